"""Writes the unit of a complete batch into the unit topic, so that the batch becomes visible to its readers at one moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.tables.unit_life import UnitEvent
from dualwrite.runtime.deadline import Deadline
from dualwrite.units.log import PartitionLogs
from dualwrite.units.ranges import BatchRange, following
from dualwrite.units.records import event_of, shortened
from dualwrite.units.writer import UnitWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.kafka.producer.choice import EngineName

logger = logging.getLogger(__name__)

UNIT_PARTITION = 0


def announce_batch(
    batch: str,
    topic: str,
    *,
    unit_topic: str,
    kafka: Mapping[str, object],
    database: Engine,
    schema: str | None,
    timeout_s: float,
    producer_engine: EngineName,
    others: Callable[[], object],
) -> bool:
    """Write the unit of a batch, all of whose transactions are complete: which offsets it has in each partition of the topic.

    Call it again after a failure. Whatever was added to the topic since the last unit belongs to this one.

    Args:
        batch: Name of the batch.
        topic: The topic of its messages. No other producer may have written to it since the last unit.
        unit_topic: The topic of units; its partition 0 is used.
        kafka: librdkafka configuration.
        database: The database of the writers' rows.
        schema: The database schema of the library's tables.
        timeout_s: Limits each step, in seconds.
        producer_engine: As of `DualWriter`.
        others: Called before and after the topic is read. It raises while another producer is at work, and its value changes
            once one has been.

    Returns:
        Whether it was written now. False if the last unit already covers every message of the topic.

    Raises:
        ConfigurationError: The unit topic cannot be continued, because retention has deleted its last unit, or the topic was
            created again; or as `UnitWriter.open`.
        Unavailable: Another producer was at work meanwhile, or a server does not answer. The unit is not written.
        DualWriteError: As `UnitWriter.unit`. The unit is not written, unless the error says so.
    """
    # The writer is open before anything is read: a driver that is fenced afterwards cannot write what it has read.
    with (
        UnitWriter(
            unit_topic,
            UNIT_PARTITION,
            kafka=kafka,
            database=database,
            schema=schema,
            timeout_s=timeout_s,
            producer_engine=producer_engine,
        ) as writer,
        closing(PartitionLogs(kafka)) as logs,
    ):
        deadline = Deadline(timeout_s)
        last = last_ranges(logs, unit_topic, deadline)
        partitions = [(topic, number) for number in logs.partitions(topic, deadline)]
        before = others()
        found = logs.settled_offsets(partitions, deadline)
        if others() != before:
            raise Unavailable(f"another batch was written into {topic} while batch {batch!r} was announced")
        ranges = following(batch, last, found)
        # Markers and messages of aborted attempts take up offsets, too.
        if not ranges or _is_empty(logs, ranges, deadline):
            return False
        with writer.unit(shortened(batch)) as unit:
            for one in ranges:
                unit.produce(one.encoded(), f"{one.topic}-{one.partition}".encode())
    logger.info("batch %r is announced in %s", batch, unit_topic)
    return True


def _is_empty(logs: PartitionLogs, ranges: Sequence[BatchRange], deadline: Deadline) -> bool:
    with closing(logs.read({one.name: one.offsets for one in ranges}, timeout_s=deadline.remaining_s())) as found:
        return next(found, None) is None


def last_ranges(logs: PartitionLogs, unit_topic: str, deadline: Deadline) -> Sequence[BatchRange] | None:
    """The ranges of the last unit that has ended; None if there was none yet.

    Raises:
        ConfigurationError: Retention has deleted it; or as `BatchRange.decoded`.
        Unavailable: As `PartitionLogs.tails`.
    """
    name = unit_topic, UNIT_PARTITION
    for tail in logs.tails(name, deadline):
        last: list[BatchRange] | None = None
        unit: list[BatchRange] | None = None
        for _, record in tail:
            event = event_of(record.headers)
            if event is UnitEvent.PART and unit is not None:
                unit.append(BatchRange.decoded(record.value))
            elif event is UnitEvent.END and unit is not None:
                last = unit
            if event is not UnitEvent.PART:
                unit = [] if event is UnitEvent.BEGIN else None
        if last is not None:
            return last
    if logs.offsets([name], deadline)[name].begin > 0:
        raise ConfigurationError(
            f"retention has deleted the last unit of {unit_topic}",
            next_step="create another unit topic, with retention.ms=-1; its first unit holds all that the topic has",
        )
    return None
