"""Writes the unit of a complete batch into the unit topic, so that the batch becomes visible to its readers at one moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.lives import UnitEvent
from dualwrite.units.log import PartitionLogs
from dualwrite.units.records import BatchRange, event_of, following, shortened
from dualwrite.units.writer import UnitWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.kafka.producer import EngineName

logger = logging.getLogger(__name__)

UNIT_PARTITION = 0


class Written(NamedTuple):
    """The producers' progress, as their database shows it.

    Attributes:
        newest: The batch whose messages are the newest in the topic; None if no batch has any there.
        decisions: Changes once any of the producers has decided anything.
    """

    newest: str | None
    decisions: object


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
    written: Callable[[], Written],
) -> bool:
    """Write the unit of a batch, all of whose transactions are complete: which offsets it has in each partition of the topic.

    Call it again after a failure. Whatever was added to the topic since the last unit belongs to this one, which bears the
    name of the newest batch in it: that need not be the caller's, who may have been paused, or run an old batch again.

    Args:
        batch: Name of the batch.
        topic: The topic of its messages. No other producer may have written to it since the last unit.
        unit_topic: The topic of units; its partition 0 is used.
        kafka: librdkafka configuration.
        database: The database of the writers' rows.
        schema: The database schema of the library's tables.
        timeout_s: Limits each step, in seconds.
        producer_engine: As of `DualWriter`.
        written: Called before and after the topic is read. It raises while another producer is at work.

    Returns:
        Whether it was written now. False if the last unit already covers every message of the topic.

    Raises:
        ConfigurationError: The unit topic cannot be continued, because retention has deleted its last unit, or the topic was
            created again; the newest batch has its unit already; or as `UnitWriter.open`.
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
        before = written()
        found = logs.settled_offsets(partitions, deadline)
        if written() != before:
            raise Unavailable(f"another batch was written into {topic} while batch {batch!r} was announced")
        name = batch if before.newest is None else before.newest
        ranges = following(name, last, found)
        # Markers and messages of aborted attempts take up offsets, too.
        if not ranges or _is_empty(logs, ranges, deadline):
            return False
        _require_new(name, last, topic, unit_topic)
        with writer.unit(shortened(name)) as unit:
            for one in ranges:
                unit.produce(one.encoded(), f"{one.topic}-{one.partition}".encode())
    logger.info("batch %r is announced in %s", name, unit_topic)
    return True


def _require_new(name: str, last: Sequence[BatchRange] | None, topic: str, unit_topic: str) -> None:
    """Refuse a name twice. They follow the order of writing, or repeat the last one if the database's clock went back."""
    if last and last[0].batch == name:
        raise ConfigurationError(
            f"{topic} has messages that no batch after {name!r} has written, and batch {name!r} has its unit in {unit_topic}",
            next_step="let nothing but the sink write to the topic, and never use a batch's name again. The unit of the "
            "sink's next batch will hold them; so does the first unit of another unit topic, with all of the topic",
        )


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
