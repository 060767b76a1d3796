"""The driver's part: checks everything before tasks run, settles before and after, and reports the result of the batch."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING

from sqlalchemy import exc

from dualwrite import failpoints
from dualwrite.clock import Deadline, now_s
from dualwrite.errors import DualWriteError, Unavailable
from dualwrite.protocol.batches import Way
from dualwrite.sinks.batches import pending
from dualwrite.sinks.spark.digests import Fingerprint, other_rows
from dualwrite.sinks.spark.partition_task import PartitionReport, PartitionTask
from dualwrite.sinks.spark.plan import JOB_ERRORS, DriverSide, JobFailed, reason_of
from dualwrite.sinks.spark.targets import Target
from dualwrite.sinks.spark.worker import destination_of
from dualwrite.sinks.spark.writing import shown
from dualwrite.stores.sql.access import map_database_error
from dualwrite.stores.sql.ledger import BEGUN

if TYPE_CHECKING:
    from pyspark.sql import types as spark
    from sqlalchemy import Connection, Engine
    from typing_extensions import Self

    from dualwrite.protocol.batches import Destination
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.plan import Left, SparkJobs
    from dualwrite.stores.sql.ledger import Run, Written

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchReport:
    """The result of a batch.

    Attributes:
        sink: Name of the sink.
        batch_id: Name of the batch.
        partitions: Number of partitions; all of them are written.
        rows: Rows in the table, over all runs of this batch.
        messages: Messages in Kafka, likewise.
        written_partitions: Number of partitions that this call has written.
        written_rows: Number of rows that this call has written; 0 if the batch was already written.
        written_bytes: Their size in Arrow: the table's columns and the messages' parts.
        written_by_table: The rows that this call has written, by the table's name as in the settings; of
            :func:`~dualwrite.sinks.spark.write_many` alone.
        seconds: How long this call took.
        parts: The partitions that this call has run, by number: each with its rows, bytes, seconds and first offsets.
        quarantined_rows: Those of the rows that this call has put aside, because the table does not take them. `rows` and
            `written_rows` count them, too; `written_by_table` by the quarantine's table.
    """

    sink: str
    batch_id: str
    partitions: int
    rows: int
    messages: int
    written_partitions: int
    written_rows: int
    written_bytes: int
    written_by_table: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    parts: Sequence[PartitionReport] = ()
    quarantined_rows: int = 0


def what_stays(written: Sequence[int], partition_count: int, *, given_up: bool = True) -> str:
    """Describe the result of a failed run, for people. `given_up` says that none of its tasks can commit any more."""
    if not given_up:
        words = what_stays(written, partition_count)
        return f"{words}. The run could not be ended in the database: tasks that still run may commit more"
    if not written:
        return f"none of its {partition_count} partitions is committed, on either side; run it again with the same batch id"
    ranges: list[list[int]] = []
    for number in written:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    shown = ", ".join("-".join(map(str, ends)) for ends in ranges)
    return (
        f"{len(written)} of its {partition_count} partitions are committed and stay ({shown}); run it again with the same "
        "batch id: it skips these and writes the others"
    )


class BatchJob(DriverSide):
    """One run of one batch whose partitions are written one by one. Settles on entering, on :meth:`finish`, or on leaving.

    The Spark jobs end with the run; `jobs` is None if the caller starts them.
    """

    _layout: Layout
    _begun_partitions = 0
    _finished = False
    _given_up = False
    _tasks_run: Run | None = None

    def __init__(self, options: SinkOptions, batch_id: str, jobs: SparkJobs | None = None) -> None:
        super().__init__(options, batch_id, run_name=batch_id)
        self._jobs = jobs
        self._started_s = now_s()

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.settle_left()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._finished:
                self._give_up()
        except DualWriteError as unsettled:
            if error is None:
                raise
            logger.warning("%s: not settled after a failure; the next run does it: %s", self.name, unsettled)
        finally:
            try:
                if error is not None and self._begun_partitions:
                    self._note_failed()
                    self._log_what_stays(error)
            finally:
                self._close()

    def _give_up(self) -> None:
        try:
            if self._jobs is not None:
                self._end_tasks(self._jobs)
            self._settle()
        finally:
            self._given_up = self.run not in {None, self._tasks_run}

    def _end_tasks(self, jobs: SparkJobs) -> None:
        try:
            self._settle()
        except DualWriteError as error:
            logger.warning("%s: not settled yet; retrying when its tasks have ended: %s", self.name, error)
        finally:
            # If the run could not be given up, its tasks can commit until they end. Once they are killed, the next step
            # settles what they leave.
            jobs.end(self.name, Deadline(self._options.timeout_s))

    def _log_what_stays(self, error: BaseException) -> None:
        """Log how the whole batch ended: tasks report only their own partition. Raises `JobFailed` for Spark's error."""
        try:
            words = what_stays(self.written_partitions(), self._begun_partitions, given_up=self._given_up)
        except DualWriteError as unknown:
            words = f"which of its partitions are committed is not known: {unknown}"
        logger.error("%s failed: %s", self.name, words)
        if isinstance(error, JOB_ERRORS):
            raise JobFailed(f"{self.name}: {reason_of(error)}\n{words}") from error
        if sys.version_info >= (3, 11):
            error.add_note(f"{self.name} failed: {words}")

    def plan(self, schema: spark.StructType) -> PartitionTask:
        """Make the tasks' work; see :meth:`layout`. Writes nothing but schemas into a registry."""
        assert self.run is not None
        self._tasks_run = self.run
        self._layout = self.layout(schema)
        if self._layout.merge is not None:
            with self._engine.connect() as connection:
                self.database.require_replaceable(connection, self._layout, empty=None, direct=True)
        quarantine = self.quarantine([Target.of(self._options, self._layout)])
        return PartitionTask(self._options, self._layout, schema, self._batch_id, self.run, quarantine=quarantine)

    def leave_to_caller(self) -> None:
        """Let the tasks of this run write after the block, too: the caller runs them, and we do not learn when they end."""
        self._finished = True

    def begin(self, partition_count: int, sources: str | None = None) -> Sequence[int]:
        """Record the batch's destination, sources and number of partitions, before any partition is written.

        Returns the numbers of the partitions that are written. It refuses a batch that was begun earlier for another
        destination; and if some are written, another number of partitions.
        """
        assert self.run is not None
        written: Sequence[int] = ()
        if partition_count:
            sink, batch_id, destination = self._options.sink, self._batch_id, self._destination()
            with self._transaction() as connection:
                self._ledger.begin(
                    connection,
                    sink,
                    batch_id,
                    destination,
                    partition_count=partition_count,
                    sources=sources,
                    run=partial(self._runs.require, run=self.run),
                )
                written = list(self._ledger.partitions(connection, sink, batch_id))
            self._begun_partitions = partition_count
        logger.info("%s: writing, begun with %d partitions", self.name, partition_count)
        failpoints.hit("spark.driver_started")
        return written

    @contextmanager
    def _transaction(self) -> Generator[Connection, None, None]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, self._options.schema) from error

    def _destination(self) -> Destination:
        return destination_of(self.database, [Target.of(self._options, self._layout)], Way.PARTITIONS)

    def written_partitions(self) -> Sequence[int]:
        """The numbers of the partitions that are written."""
        return list(self._ledger.partitions(self._engine, self._options.sink, self._batch_id))

    def require_same_rows(self, reports: Collection[PartitionReport]) -> None:
        """Refuse written partitions that have no rows now. If they have rows, their tasks have already compared them."""
        self._require_empty(self._engine, [report.partition for report in reports if report.empty])

    def _require_empty(self, database: Connection | Engine, partitions: Collection[int]) -> None:
        if not partitions or self._options.allow_nondeterministic:
            return
        recorded = self._ledger.partitions(database, self._options.sink, self._batch_id)
        for number in partitions:
            if (written := recorded[number]).rows:
                found = Fingerprint(written.rows, written.rows_digest)
                raise other_rows(f"{self.name} partition {number}", Fingerprint(0, 0), found)

    def record_empty(self, partition_count: int, reports: Collection[PartitionReport]) -> None:
        """Record the partitions without rows as written, all at once: their tasks have not recorded them.

        It refuses a partition that was written with rows meanwhile, and raises `Fenced` if another run of the batch has begun.
        """
        empty = [report.partition for report in reports if report.empty]
        if not empty:
            return
        assert self.run is not None
        sink, batch_id = self._options.sink, self._batch_id
        destination = self._destination()
        with self._transaction() as connection:
            self._runs.require(connection, self.run)
            self._ledger.require(connection, sink, batch_id, destination)
            self._ledger.insert_empty(connection, sink, batch_id, empty, partition_count=partition_count)
            self._require_empty(connection, empty)

    def finish(self, partition_count: int, reports: Collection[PartitionReport]) -> BatchReport:
        """Settle, and report the result of the batch.

        Raises `CompletionPending` if a server does not answer: run the batch again. A loss is raised as by
        :meth:`settle_left`.
        """
        failpoints.hit("spark.driver_done")
        logger.info("%s: decided, all %d partitions", self.name, partition_count)
        try:
            at_once = written = self._end_at_once(partition_count)
            if written is None:
                self.settle_left(have_run=True)
                written = self._ledger.written(self._engine, self._options.sink, self._batch_id)
        except Unavailable as error:
            raise pending(self.name, error) from error
        if written.partitions != partition_count:
            raise DualWriteError(
                f"{self.name}: {written.partitions} of {partition_count} partitions are in the ledger",
                next_step="the ledger was changed from outside while the batch ran: find out what else was changed",
            )
        if at_once is None:
            self._note_completed(BEGUN, None)
        self.announce()
        self._finished = True
        report = BatchReport(
            sink=self._options.sink,
            batch_id=self._batch_id,
            partitions=partition_count,
            rows=written.rows,
            messages=written.messages,
            written_partitions=sum(report.written or report.empty for report in reports),
            written_rows=sum(report.rows for report in reports),
            written_bytes=sum(report.bytes for report in reports),
            seconds=now_s() - self._started_s,
            parts=sorted(reports, key=attrgetter("partition")),
            quarantined_rows=sum(report.quarantined for report in reports),
        )
        logger.info(
            "%s: completed, %d rows in %d partitions, of which %d rows in %d partitions, %s, were written now, in %.1f s%s",
            self.name,
            report.rows,
            report.partitions,
            report.written_rows,
            report.written_partitions,
            shown(report.written_bytes),
            report.seconds,
            self.words_of_quarantined(report.quarantined_rows),
        )
        return report

    def _end_at_once(self, partition_count: int) -> Written | None:
        """As :meth:`settle_left`, where tasks have left nothing; and note the completion, all in one transaction.

        None if something is left to settle, or the batch is not complete.
        """

        def work(connection: Connection) -> tuple[Left, Written | None]:
            left = self._end_run(connection, prepared=False)  # its tasks prepare nothing in the database
            if not left.has_ended or left.leases:
                return left, None
            self._raise_new_incidents(connection)
            written = self._ledger.written(connection, self._options.sink, self._batch_id)
            if written.partitions != partition_count:
                return left, None
            self._ledger.complete(connection, self._options.sink, self._batch_id, BEGUN)
            return left, written

        logger.info("%s: settling what tasks have left", self.name)
        left, written = self._store.own_transaction(work, light=self._ends_light)
        self.run = left.run
        return written

    @contextmanager
    def progress(self, partition_count: int) -> Generator[None, None, None]:
        """Log from time to time what is committed while the block runs."""
        stop = threading.Event()
        thread = threading.Thread(
            target=self._log_progress, args=(partition_count, stop), name=f"progress of {self.name}", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _log_progress(self, partition_count: int, stop: threading.Event) -> None:
        while not stop.wait(self._options.progress_s):
            try:
                written = self._ledger.written(self._engine, self._options.sink, self._batch_id)
            except DualWriteError as error:
                logger.warning("%s: progress is not known: %s", self.name, error)
                continue
            logger.info(
                "%s: writing, %d of %d partitions committed, %d rows",
                self.name,
                written.partitions,
                partition_count,
                written.rows,
            )
