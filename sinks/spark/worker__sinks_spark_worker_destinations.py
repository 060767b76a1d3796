"""The destination of a batch, as the ledger records it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.protocol.batches__protocol_batches_entry import Destination, Way

if TYPE_CHECKING:
    from dualwrite.sinks.spark.databases.database import SinkDatabase
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions


def destination_of(database: SinkDatabase, options: SinkOptions, layout: Layout, way: Way) -> Destination:
    """The destination that the driver has planned: the driver and its tasks get the same one."""
    topic = options.topic
    if topic is None:
        assert options.topic_column is not None
        topic = Destination.topics_of_column(options.topic_column)
    return Destination(way, database.quoted(layout.table), topic, layout.cluster_id)
