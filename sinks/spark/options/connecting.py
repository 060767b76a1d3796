"""Connections to the database, configured the same on the driver and in the tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import create_engine

from dualwrite.stores.connecting import liveness_of

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.sinks.spark.options.settings import SinkOptions


def connect_engine(options: SinkOptions) -> Engine:
    """Create an engine for the sink's database. It connects at first use; the caller disposes of it.

    Raises:
        ConfigurationError: The URL refers to an environment variable that is not set.
    """
    url = options.database_url()
    return create_engine(
        url,
        # Binary COPY sends text as UTF-8, whatever the database's own encoding is.
        connect_args={**liveness_of(url), "client_encoding": "utf8", "prepare_threshold": None},
        isolation_level="READ COMMITTED",  # reads the ledger and the catalog as they are now, not as of the transaction's start
        hide_parameters=True,
        pool_pre_ping=True,  # a reused worker may find its connection gone
    )
