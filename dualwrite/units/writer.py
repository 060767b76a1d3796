"""``UnitWriter``: the one writer of a partition, and the units of batches that many producers have written.

Readers see a unit as a whole or not at all. A driver announces a complete batch as one unit, so that all of it becomes visible
at one moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    text_of,
)
from dualwrite.protocol.lives import Machine, WriteState
from dualwrite.protocol.values import WriterLimits
from dualwrite.units.log import UNIT_PARTITION, PartitionLogs
from dualwrite.units.records import (
    UNIT_WRITER_LIFE,
    AbortTransaction,
    BatchRange,
    BeginTransaction,
    EndTransaction,
    Headers,
    UnitEvent,
    UnitRecord,
    UnitWriterEvent,
    UnitWriterState,
    event_of,
    following,
    found_at_the_end,
    marker_record,
    part_of_unit,
    shortened,
)
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from typing_extensions import Self

    from dualwrite.interfaces import Database
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)

Work: TypeAlias = "Callable[[Transaction], object]"
Append: TypeAlias = Callable[[Sequence[UnitRecord], UnitWriterEvent], None]

_LARGEST_PART: Final = 16 * 1024 * 1024
_W, _V = UnitWriterState, UnitWriterEvent


def writer_id(topic: str, partition: int) -> str:
    """The transactional id of the writers of a partition: one for all, so that each fences the one before."""
    return f"{topic}-{partition}.units"


class _Parts:
    """The parts of one unit: the records that wait for the next one, and whether the unit is begun in the log."""

    def __init__(self, begin: UnitRecord, part_records: int) -> None:
        self.is_open = True
        self._waiting = [begin]
        self._count = 0
        self._size = 0
        self._is_begun = False
        self._is_torn = False
        self._part_records = part_records

    def add(self, record: UnitRecord) -> bool:
        """Returns whether a part is full."""
        self._waiting.append(record)
        self._count += 1
        self._size += len(record.key or b"") + len(record.value or b"")
        return self._count >= self._part_records or self._size >= _LARGEST_PART

    def write(self, append: Append) -> None:
        """Write a part. After an exception from anywhere here the unit cannot end: the part may be in the log, or not."""
        self._is_torn = True
        append(self._waiting, _V.PART if self._is_begun else _V.BEGIN)
        self._waiting, self._count, self._size, self._is_begun = [], 0, 0, True
        self._is_torn = False

    def require_whole(self) -> None:
        if self._is_torn:
            raise TransactionAborted(
                "the unit continued after a part of it could not be written",
                next_step="after an error of produce(), leave the block, and write the unit again",
                retryable=False,
            )

    def last(self) -> tuple[Sequence[UnitRecord], UnitWriterEvent]:
        self.require_whole()
        return [*self._waiting, marker_record(EndTransaction())], _V.END if self._is_begun else _V.WHOLE


class Unit:
    """One unit: the object of ``with writer.unit() as unit``. Used by one thread, until its block ends.

    Attributes:
        records: How many records were produced.
    """

    def __init__(self, parts: _Parts, append: Append) -> None:
        self.records = 0
        self._parts = parts
        self._append = append

    def produce(self, value: bytes | None = None, key: bytes | None = None, *, headers: Headers = ()) -> None:
        """Add a record to the unit. It waits in memory until a part of the unit is full, which is then written.

        Raises:
            IllegalStateError: The block has ended.
            ConfigurationError: A header is the library's own.
            DualWriteError: A part could not be written. Leave the block: the unit is aborted, even if the block continues.
        """
        if not self._parts.is_open:
            raise IllegalStateError("the unit has ended")
        self._parts.require_whole()
        record = part_of_unit(key, value, headers)
        self.records += 1
        if self._parts.add(record):
            self._parts.write(self._append)
            failpoints.hit("unit.part")


class UnitWriter:
    """The one writer of a partition. Its units are sequences of records, of any length, that readers see at one moment.

    A unit is written in parts, each a dual write of its own; markers around them (KIP-868) say when it is whole. Opening a
    second writer of the same partition, in any process, fences the first: a paused one cannot add to the log when it resumes.
    Opening also aborts the unit that a former writer has left unfinished.

    The topic must not be compacted, which would tear units, and nothing else may write to the partition. Used by one thread.

    Args:
        topic: The topic. It must exist.
        partition: The number of the partition.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least.
        database: A SQLAlchemy engine or a database URL, as for `DualWriter`.
        schema: The database schema of the library's tables, if it is not the default one.
        part_records: The most records in a part, which are held in memory. A part is also full at 16 MiB.
        timeout_s: Limits opening, and the end of each part, in seconds.

    Raises:
        ConfigurationError: A setting cannot work.

    Source: KIP-868.
    """

    def __init__(
        self,
        topic: str,
        partition: int = 0,
        *,
        kafka: Mapping[str, object],
        database: Engine | Database | str,
        schema: str | None = None,
        part_records: int = 10_000,
        timeout_s: float = 60.0,
    ) -> None:
        if part_records < 1:
            raise ConfigurationError(
                "a part of a unit has at least one record", next_step="set part_records to 1 or more"
            )
        self.topic = topic
        self.partition = partition
        self._kafka = kafka
        self._part_records = part_records
        self._timeout_s = timeout_s
        self._machine = Machine("writer of units", UNIT_WRITER_LIFE, _W.CLAIMED)
        self._in_unit = False
        # Set while what the log holds is not known: an interruption may come between any two lines.
        self._appending = False
        self._writer = DualWriter(
            writer_id(topic, partition),
            kafka=kafka,
            database=database,
            schema=schema,
            # One lane: each part waits until the one before is complete, so their order in the log is that of the unit.
            limits=WriterLimits(max_lanes=1, timeout_s=timeout_s),
        )

    @property
    def state(self) -> UnitWriterState:
        """Where the writer stands. A broken one can only be closed: open another."""
        return _W.BROKEN if self._appending else self._machine.state

    def open(self) -> None:
        """Claim the partition, and abort the unit that a former writer has left unfinished, with a reason for people.

        Call it once; ``with writer:`` does so. On return no former writer can add to the log.

        Raises:
            ConfigurationError: The topic is missing or compacted, the log holds what no `UnitWriter` has written; or as
                `DualWriter.open`.
            DualWriteError: As `DualWriter.open`; or a server does not answer, or a transaction stays open in the partition.
        """
        self._writer.open()
        try:
            deadline = Deadline(self._timeout_s)
            with closing(PartitionLogs(self._kafka)) as logs:
                if self.partition not in logs.partitions(self.topic, deadline):
                    raise ConfigurationError(f"{self.topic} has no partition {self.partition}")
                last = logs.last_event((self.topic, self.partition), deadline)
            if self._machine.apply(found_at_the_end(last)) is _W.WITHIN:
                failpoints.hit("unit.found")
                self._abort("its writer ended before the unit")
        except BaseException:
            self._writer.close()
            raise

    def close(self) -> None:
        """Disconnect. Raises what `DualWriter.close` raises."""
        self._writer.close()

    @contextmanager
    def unit(self, name: str | None = None, *, at_end: Work | None = None) -> Generator[Unit, None, None]:
        """Write one unit: readers see all of it once the block has ended, and nothing of it if the block raises.

        Args:
            name: A description for people, at most 255 bytes.
            at_end: Called with the `Transaction` of the unit's last part, to write rows: they commit if and only if the unit
                ends. Use nothing else of it.

        Raises:
            TransactionAborted: The unit is aborted, or will be by the next writer. No row of ``at_end`` is written.
            TransactionInDoubt: It is not known whether the unit has ended, nor whether the rows of ``at_end`` are committed.
            CompletionPending: The unit has ended; readers will see it.
            IllegalStateError: The writer is not open, is broken, or is inside a unit.
            DualWriteError: As `DualWriter.transaction`; the unit is aborted.

        Every other exception from the block is passed on unchanged. After an error that leaves the writer broken, close it and
        open another.
        """
        if self._in_unit:
            raise IllegalStateError("units cannot be nested", next_step="end the first unit before the second")
        if self.state is not _W.BETWEEN:
            raise IllegalStateError(
                f"the writer of units is {self.state.value}",
                transactional_id=self._writer.transactional_id,
                next_step="open a new writer: it aborts the unit that this one left unfinished",
            )
        parts = _Parts(marker_record(BeginTransaction(name)), self._part_records)
        try:
            self._in_unit = True
            yield Unit(parts, self._append)
            failpoints.hit("unit.ending")
            self._append(*parts.last(), at_end)
            failpoints.hit("unit.ended")
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            parts.is_open = self._in_unit = False

    def _append(self, records: Sequence[UnitRecord], event: UnitWriterEvent, work: Work | None = None) -> None:
        """Write records in one dual write. Moves the machine by the event; to BROKEN if they may or may not be in the log."""
        self._machine.check(event)
        begun: Transaction | None = None
        self._appending = True
        try:
            with self._writer.transaction() as begun:
                for record in records:
                    begun.produce(
                        self.topic, record.value, record.key, partition=self.partition, headers=record.headers
                    )
                if work is not None:
                    work(begun)
        except BaseException as error:
            if begun is not None and begun.state is not WriteState.ABORTED:
                self._machine.apply(_V.FAIL)
                if event in {_V.BEGIN, _V.PART} and isinstance(error, CompletionPending | TransactionInDoubt):
                    raise TransactionAborted(
                        f"a part of the unit may be in the log, without its end: {error}",
                        transactional_id=self._writer.transactional_id,
                        next_step="open another writer, which aborts the unit, and write the unit again",
                    ) from error
            self._appending = False
            raise
        self._machine.apply(event)
        self._appending = False

    def _abandon(self, error: BaseException) -> None:
        """Abort the unit if it has begun in the log and the end of the log is known; otherwise the next writer does."""
        if self.state is not _W.WITHIN:
            return
        try:
            self._abort(f"{type(error).__name__}: {text_of(error)}")
        except Exception as failed:  # noqa: BLE001 - the block's own error counts
            logger.warning("%s: the next writer aborts the unit: %s", self._writer.transactional_id, failed)

    def _abort(self, reason: str) -> None:
        failpoints.hit("unit.before_abort")
        self._append([marker_record(AbortTransaction(shortened(reason)))], _V.ABORT)
        failpoints.hit("unit.aborted")
        logger.info("%s: aborted a unit: %s", self._writer.transactional_id, reason)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, traceback)


# Writes the unit of a complete batch into the unit topic, so that the batch becomes visible to its readers at one
# moment.


class Written(NamedTuple):
    """The producers' progress, as their database shows it.

    ``newest`` is the batch whose messages are the newest in the topic; None if no batch has any there. ``decisions`` changes
    once any of the producers has decided anything.
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
    written: Callable[[], Written],
) -> bool:
    """Write the unit of a batch, all of whose transactions are complete: which offsets it has in each partition of the topic.

    Call it again after a failure. Whatever was added to the topic since the last unit belongs to this one, which bears the
    name of the newest batch in it: that need not be the caller's, who may have been paused, or run an old batch again. No
    other producer may have written to the topic since the last unit.

    ``written`` is called before and after the topic is read; it raises while another producer is at work. ``timeout_s`` limits
    each step. The unit goes to partition 0 of ``unit_topic``.

    Returns False if the last unit already covers every message of the topic. After an error the unit is not written, unless
    the error says so. `ConfigurationError` says also that the unit topic cannot be continued, because retention has deleted
    its last unit, or the topic was created again; or that the newest batch has its unit already.
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
    """The ranges of the last unit that has ended; None if there was none yet. Raises if retention has deleted it."""
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
