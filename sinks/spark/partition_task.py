"""One task: one partition, one dual write. The ledger lets exactly one of its attempts count."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from dualwrite import failpoints
from dualwrite.clock import Deadline, now_s
from dualwrite.errors import (
    CompletionPending,
    DecidedTransactionLost,
    DualWriteError,
    IllegalStateError,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.batches import Way
from dualwrite.sinks.batches import RUN_AGAIN, pending
from dualwrite.sinks.spark.digests import Fingerprint, Fingerprinted, RowNames, hashed_columns, other_rows
from dualwrite.sinks.spark.quarantine import Sieve
from dualwrite.sinks.spark.sendable import awaited, projected_batches, row_batches
from dualwrite.sinks.spark.targets import Target
from dualwrite.sinks.spark.worker import (
    AlreadyWritten,
    Attempt,
    destination_of,
    running_task,
    servers,
    spare_collections,
)
from dualwrite.sinks.spark.writing import Progress, shown, whole_input, write_rows
from dualwrite.writing.dual_write import DualWrite

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql import types as spark
    from sqlalchemy import Connection

    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.worker import Workplace
    from dualwrite.stores.sql.ledger import Run
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartitionReport:
    """The result of one partition.

    Attributes:
        partition: Its number.
        rows: Rows that this task has written.
        bytes: Their size in Arrow: the table's columns and the message's parts.
        written: False if an earlier or a faster attempt had written the partition, or if it is empty.
        empty: Whether it has no rows; the task has then left the ledger to the driver.
        seconds: How long the task took, with the time to compute its rows; 0 if it has written nothing.
        quarantined: Those of the rows that were put aside.
        first_offsets: The offset of its first message in each partition of Kafka, by ``topic-partition``; in eight of them at
            most with the native engine.
    """

    partition: int
    rows: int
    bytes: int
    written: bool
    empty: bool = False
    seconds: float = 0.0
    first_offsets: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0


# The columns of a PartitionReport: its fields.
REPORT_SCHEMA: Final = (
    "partition bigint, rows bigint, bytes bigint, written boolean, empty boolean, seconds double, "
    "first_offsets map<string,bigint>, quarantined bigint"
)
_ARROW_SCHEMA: Final = pa.schema(
    [
        *((name, pa.int64()) for name in ("partition", "rows", "bytes")),
        *((name, pa.bool_()) for name in ("written", "empty")),
        ("seconds", pa.float64()),
        ("first_offsets", pa.map_(pa.string(), pa.int64())),
        ("quarantined", pa.int64()),
    ]
)


@dataclass(frozen=True)
class PartitionTask:
    """The work of a task; pickled, and run once for each attempt at each partition.

    If it is `alone`, no driver settles at the end: the task itself must see its partition complete. Rows that the table does
    not take go to the `quarantine`, if there is one.
    """

    options: SinkOptions
    layout: Layout
    schema: spark.StructType
    batch_id: str
    run: Run
    alone: bool = False
    quarantine: Target | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        """Where the rows go; those that are put aside to the last one."""
        target = Target.of(self.options, self.layout)
        return (target,) if self.quarantine is None else (target, self.quarantine)

    def run_arrow(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For ``mapInArrow``, on the DataFrame's own columns: writes the partition and yields its report."""
        projected = projected_batches(whole_input(batches), self.schema, self.layout)
        taken = Fingerprinted(projected, None if self.options.allow_nondeterministic else hashed_columns(self.layout))
        report = self._run(taken, taken)
        row = {**asdict(report), "first_offsets": list(report.first_offsets.items())}
        yield pa.RecordBatch.from_pylist([row], _ARROW_SCHEMA)

    def run_rows(self, rows: Iterator[Row]) -> None:
        """For ``foreachPartition``, on the DataFrame's own rows."""
        self._run(row_batches(whole_input(rows), self.schema, self.layout))

    def _run(self, batches: Iterable[pa.RecordBatch], taken: Fingerprinted | None = None) -> PartitionReport:
        context = running_task()
        spare_collections()
        return write_partition(self, context.partitionId(), context.attemptNumber(), batches, taken)


def write_partition(
    task: PartitionTask,
    partition: int,
    attempt: int,
    batches: Iterable[pa.RecordBatch],
    taken: Fingerprinted | None = None,
) -> PartitionReport:
    """Write one partition, unless it is already written. Durable on both sides on return.

    The normal end of `batches` means that the partition is complete. `taken` has the same rows, and compares them with those
    of an earlier run if the partition is already written; the driver then records partitions without rows. None compares
    nothing: the task records partitions without rows, and takes nothing from ``batches`` if the partition is already written.

    Raises:
        ConfigurationError: The partition is already written, with other rows.
        CompletionPending: No driver settles at the end, and Kafka has not all of the partition yet: the next attempt
            completes it.
        DualWriteError: This attempt did not write the partition, or does not know whether it did. The next attempt finds out
            by itself whether it must.
        DecidedTransactionLost, OutcomeUnverifiable: The rows are in the database; the messages are lost, or their outcome
            cannot be verified. The loss is recorded; the next attempt finds the partition written.
    """
    failpoints.hit("spark.task_started")
    if taken is not None:
        rows = awaited(batches)
        if rows is None:
            # Needs no connection: most partitions of a shuffle may be empty.
            return PartitionReport(partition, 0, 0, written=False, empty=True)
        batches = rows
    with servers(task.options) as found:
        report = _Writing(task, Attempt(found, task.batch_id, partition, attempt, task.run), taken).run(batches)
    failpoints.hit("spark.task_done")
    return report


def _advise(error: Exception) -> None:
    """Replace the advice for a dual write by the advice for a partition of a batch."""
    if isinstance(error, TransactionAborted) and error.next_step == TransactionAborted.advice:
        error.next_step = "nothing of this partition was written on either side; others may be, and stay"
    elif isinstance(error, TransactionInDoubt):
        error.next_step = RUN_AGAIN


class _WrittenByOther(Exception):
    """Leaves the dual write when another attempt has written the partition, so that both sides abort."""


class _Writing:
    def __init__(self, task: PartitionTask, attempt: Attempt, taken: Fingerprinted | None) -> None:
        self._task = task
        self._attempt = attempt
        self._taken = taken
        self._progress = Progress(attempt.name, task.options.progress_s)
        self._started_s = now_s()
        self._first_offsets: Mapping[str, int] = {}
        self._targets = task.targets
        self._destination = destination_of(attempt.database, self._targets, Way.PARTITIONS)
        self._filled: set[int] = set()
        self._sieve = Sieve(task.options, self._targets, attempt.database, attempt.batch_id, attempt.partition)

    def run(self, batches: Iterable[pa.RecordBatch]) -> PartitionReport:
        report = self._run(batches)
        if self._task.alone and not report.written:
            self._complete_former()
        return report

    def _run(self, batches: Iterable[pa.RecordBatch]) -> PartitionReport:
        attempt, partition = self._attempt, self._attempt.partition
        if self._taken is None and self._is_written():  # otherwise the transaction that leases the slot asks for it
            return PartitionReport(partition, 0, 0, written=False)
        try:
            self._write(batches)
        except AlreadyWritten:
            self._is_written()
            return PartitionReport(partition, 0, 0, written=False)
        except CompletionPending as error:
            # Decided. The slot stays leased so that the driver, or the next attempt, finds and completes it.
            if self._task.alone:
                raise pending(attempt.name, error) from error
            logger.warning("%s: the driver completes it: %s", attempt.name, error.what)
        except (DecidedTransactionLost, OutcomeUnverifiable):
            raise
        except _WrittenByOther:
            logger.info("%s: another attempt was faster", attempt.name)
            self._is_written()  # and it had the same rows
            return PartitionReport(partition, 0, 0, written=False)
        except Exception as error:
            # Another attempt may be the cause of our failure: it fences us, or our rows collide with its rows.
            if not attempt.seen_after(error, partition):
                _advise(error)
                raise
            return PartitionReport(partition, 0, 0, written=False)
        rows, size = self._progress.rows, self._progress.bytes
        logger.info("%s: %d rows, %s written", attempt.name, rows, shown(size))
        seconds = now_s() - self._started_s
        return PartitionReport(
            partition,
            rows,
            size,
            written=True,
            seconds=seconds,
            first_offsets=self._first_offsets,
            quarantined=self._sieve.count,
        )

    def _complete_former(self) -> None:
        """Complete what the attempt that has written the partition may have left; a loss is recorded and raised."""
        try:
            report = self._attempt.settle_former()
        except Unavailable as error:
            raise pending(self._attempt.name, error) from error
        report.raise_losses()

    def _is_written(self) -> bool:
        """Whether the partition is written, with the same rows that this run has for it. Other rows are refused."""
        written = self._attempt.written()
        if written is None:
            return False
        logger.info("%s: already written", self._attempt.name)
        taken = None if self._task.options.allow_nondeterministic else self._taken
        if taken is not None:
            ours, theirs = taken.take_all(), Fingerprint(written.rows, written.rows_digest)
            if ours.differs_from(theirs):
                raise other_rows(self._attempt.name, ours, theirs)
        return True

    def _write(self, batches: Iterable[pa.RecordBatch]) -> None:
        rows = awaited(batches)
        if rows is None:
            self._write_nothing()
        else:
            self._write_rows(rows)

    def _write_nothing(self) -> None:
        """Record a partition without rows in the ledger: it needs no slot and no producer."""
        with self._attempt.engine.begin() as connection:
            self._attempt.require_run(connection)
            sink, batch_id = self._task.options.sink, self._task.batch_id
            begun = self._attempt.ledger.require(connection, sink, batch_id, self._destination)
            self._record(connection, begun, None)

    def _write_rows(self, batches: Iterable[pa.RecordBatch]) -> None:
        attempt, options = self._attempt, self._task.options
        with attempt.workplace() as place:

            def permit(connection: Connection) -> None:
                layouts = [self._targets[number].layout for number in self._filled if self._targets[number].in_table]
                sink, batch_id, ledger = options.sink, self._task.batch_id, attempt.ledger
                # A merge has checked its target itself.
                checked = [layout for layout in layouts if layout.merge is None]
                found = attempt.require_written(connection, checked, ledger.begun(sink, batch_id))
                begun = ledger.require_begun(sink, batch_id, self._destination, *found)
                self._record(connection, begun, place.slot.leased_at)

            with (
                attempt.observed(place) as observer,
                attempt.engine.connect() as connection,
                DualWrite(
                    place.lane,
                    place.context,
                    connection,
                    margin_s=options.margin_s,
                    timeout_s=options.timeout_s,
                    savepoints=False,
                    permit=permit,
                    observer=observer,
                ) as transaction,
            ):
                self._fill(transaction, batches)
                failpoints.hit("spark.rows_copied")
            if (sent := transaction.prepared) is not None:
                self._first_offsets = {f"{one.topic}-{one.partition}": one.offset for one in sent.first_offsets}
            self._note_completed(place)

    def _fill(self, transaction: Transaction, batches: Iterable[pa.RecordBatch]) -> None:
        routed = ((0, batch) for batch in batches)
        sifted = routed if self._task.quarantine is None else self._sieve.sift(routed)
        for number, rows in groupby(sifted, key=itemgetter(0)):
            self._filled.add(number)
            target = self._targets[number]
            write_rows(
                transaction,
                map(itemgetter(1), rows),
                target,
                target.layout.table,
                self._task.options,
                database=self._attempt.database,
                names=RowNames(self._attempt.partition, target.layout),
                progress=self._progress,
            )

    def _record(self, connection: Connection, partition_count: int | None, started_at: datetime | None) -> None:
        """Record the partition as written; `partition_count` is what the batch was begun with."""
        attempt, sink, batch_id = self._attempt, self._task.options.sink, self._task.batch_id
        if partition_count is None or attempt.partition >= partition_count:
            raise IllegalStateError(f"{attempt.name}: the batch was begun with {partition_count} partitions")
        if not attempt.ledger.insert(
            connection,
            sink,
            batch_id,
            attempt.partition,
            row_count=self._progress.rows,
            message_count=self._progress.rows - self._sieve.silent,
            partition_count=partition_count,
            started_at=started_at,
            rows_digest=None if self._taken is None else self._taken.fingerprint().digest,
            byte_count=self._progress.bytes,
        ):
            raise _WrittenByOther

    def _note_completed(self, place: Workplace) -> None:
        lane = place.lane
        try:
            place.slot.completed = lane.take_completed()
            if lane.unrecorded is not None and lane.needs_settling:
                # Some partitions do not show the end yet. Their readers wait, and this slot may not be used again for a long
                # time.
                lane.settle(Deadline(self._task.options.timeout_s))
        except DualWriteError as error:
            logger.warning(
                "%s: completion was not recorded, the next claim will prove it: %s", self._attempt.name, error
            )
