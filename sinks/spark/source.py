"""The Data Source: ``df.write.format("dualwrite")`` and ``df.writeStream.format("dualwrite")``, a whole batch at once.

Spark plans the write on the driver, sends the writer to the tasks, and calls ``commit`` or ``abort`` in a separate process
beside the driver; for a stream, it creates another writer there. Only the options survive between these calls.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from dualwrite.errors import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    IllegalStateError,
    OutcomeUnverifiable,
)
from dualwrite.sinks.spark.databases.database import Emptying
from dualwrite.sinks.spark.observing import BatchLineage, sources_of_checkpoint
from dualwrite.sinks.spark.options import SourceOptions
from dualwrite.sinks.spark.plan import CONNECT, plan_stream, shown_first
from dualwrite.sinks.spark.sendable import projected_batches, row_batches
from dualwrite.sinks.spark.targets import Target, Wanted, routed_batches
from dualwrite.sinks.spark.whole_batch import PreparedPartition, WholeBatch, prepare_partition, rows_by_target
from dualwrite.sinks.spark.worker import running_task
from dualwrite.sinks.spark.writing import log_to_stderr, whole_input

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql import types as spark

    from dualwrite.sinks.spark.plan import StreamPlan
    from dualwrite.stores.sql.ledger import Run

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # PySpark 4.0
    from pyspark.sql.datasource import DataSourceStreamWriter as DataSourceStreamArrowWriter  # type: ignore[assignment]

_stream_batches = projected_batches if DataSourceStreamArrowWriter is not DataSourceStreamWriter else row_batches

logger = logging.getLogger(__name__)

SHORT_NAME: Final = "dualwrite"
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_NUMBER: Final = "streaming.sql.batchId"
_ENDING: Final = "python_streaming_sink_runner.py"
_TESTED: Final = "use a version of PySpark that this library is tested with"
_NOT_CONTINUOUS: Final = (
    "trigger(continuous=...) does that: stop the query, and start it with another trigger and a new checkpoint; this one may "
    "hold offsets whose rows were never written"
)


@dataclass(frozen=True)
class TablePlan:
    """The part of a plan that says where rows go. Holds no secret.

    `schema` and `revision` are those of the library's own tables.
    """

    schema: str | None
    revision: str
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class TaskMessage(WriterCommitMessage):
    """A task's message to the driver: the batch's name as the task knows it, and what it has prepared, if anything.

    That of a micro-batch's first partition carries the plan, so that the micro-batch ends by the plan that its tasks had:
    Spark keeps nothing else for the process that ends it.
    """

    batch_id: str
    prepared: PreparedPartition | None
    plan: TablePlan | None = None


class DualWriteDataSource(DataSource):
    """Writes a batch, or each micro-batch of a stream, into a database table and a Kafka topic: all of it or nothing.

    Register it with :func:`register`, then use the format ``dualwrite``. `SourceOptions` has the options.
    """

    @classmethod
    def name(cls) -> str:
        """The short name."""
        return SHORT_NAME

    @shown_first()
    def writer(self, schema: spark.StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """Plan a batch: checks options, table, topic and every column; nothing is written.

        Raises:
            ConfigurationError: A setting, a column, the table, the topic or a right does not fit.
            DecidedTransactionLost, OutcomeUnverifiable: An earlier run of this batch left a loss. It is recorded; the next
                run continues.
            Unavailable: A server does not answer.
        """
        log_to_stderr()
        options = _options(self.options)
        if options.batch_id is None:
            raise ConfigurationError(
                "the option batchId is missing",
                next_step='name the batch: .option("batchId", "2026-01-01"); a batch that is run again under the same name is '
                "written once",
            )
        if options.replace_where is not None and not overwrite:
            raise ConfigurationError(
                'replaceWhere is for mode("overwrite")', next_step="set that mode, or leave it out"
            )
        if overwrite and options.targets:
            raise ConfigurationError(
                'mode("overwrite") is for one table, and tagColumn has several targets',
                next_step='use mode("append"), with upsertKeys in the targets whose rows are replaced',
            )
        lineage = BatchLineage(options.sink, streaming=False)
        with WholeBatch(options.sink, options.batch_id, run_name=options.batch_id) as batch:
            batch.settle_left()
            targets = batch.targets(_wanted(options, schema), options.tag_column)
            empty = Emptying(options.truncate, options.replace_where) if overwrite else None
            staging = batch.uses_staging(targets, empty=empty)
            batch.begin(targets)
            logger.info("%s: writing", batch.name)
            assert batch.run is not None
            options = replace(options, sink=batch.options)
            lineage.start(targets, options.sources)
        run_id = lineage.run_id
        return _BatchWriter(options, batch.run, schema, targets, empty=empty, staging=staging, run_id=run_id)

    @shown_first()
    def streamWriter(self, schema: spark.StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - Spark's signature
        """Plan a micro-batch like :meth:`writer`, or prepare to end one, which needs no plan of its own.

        Raises:
            ConfigurationError: As :meth:`writer`; or ``batchId`` is given, which only Spark sets for streams; or the output
                mode is not "append".
            Unavailable: A server does not answer.
        """
        options = _options(self.options)
        if options.batch_id is not None:
            raise ConfigurationError("batchId is for batches: a stream names its micro-batches itself")
        if options.sources is not None:
            raise ConfigurationError("sources is for batches: those of a micro-batch are in its stream's checkpoint")
        if overwrite or options.replace_where is not None:
            raise ConfigurationError(
                "a stream cannot empty the table with each micro-batch",
                next_step='use outputMode("append"); or, for aggregates, outputMode("update") and foreachBatch with '
                'df.write.format("dualwrite"), the options upsertKeys and batchId',
            )
        if _at_the_end_of_a_micro_batch():
            return _StreamWriter(options, schema, None)
        BatchLineage(options.sink, streaming=True)  # refused here if it cannot be reported at the end
        if options.targets and _stream_batches is row_batches:
            raise ConfigurationError(
                "tagColumn in a stream needs PySpark 4.1 or later, which gives a Python data source columns",
                next_step="use foreach_many(tag_column=...) with foreachBatch",
            )
        wanted = _wanted(options, schema)
        plan = plan_stream(options.sink, wanted, options.tag_column, stream=options.stream)
        return _StreamWriter(options, schema, plan)


def _at_the_end_of_a_micro_batch() -> bool:
    """Whether Spark asks for a writer only to call ``commit`` or ``abort``, in a process for that call alone."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - Spark tells it in no other way
    while frame is not None and PurePath(frame.f_code.co_filename).name != _ENDING:
        frame = frame.f_back
    return frame is not None


def register(session: SparkSession) -> None:
    """Register the format ``dualwrite`` with a session, and let the calling thread find it. May be called again.

    In the thread that has made the session, Spark finds an installed ``dualwrite`` by itself; this call makes sure of it.
    Every other thread of the driver that writes with the format must call it once: Spark looks for Python's formats in the
    calling thread's active session, and a new thread has none. This call makes the session active there.

    Args:
        session: The session; one of Spark Connect, too.
    """
    session.dataSource.register(DualWriteDataSource)
    if not type(session).__module__.startswith(CONNECT):  # its server looks in the session of each request
        jvm = session.sparkContext._jvm  # noqa: SLF001 - PySpark offers it in `createDataFrame` alone
        sessions = getattr(jvm, "org.apache.spark.sql.classic.SparkSession")
        sessions.setActiveSession(session._jsparkSession)  # noqa: SLF001 - as above


def _wanted(options: SourceOptions, schema: spark.StructType) -> list[Wanted]:
    if not options.targets:
        return [Wanted(options.sink, schema)]
    return [Wanted(one, schema, tag) for tag, one in options.targets]


def _options(given: MutableMapping[str, str]) -> SourceOptions:
    return SourceOptions.parse(dict(given))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(
        self,
        options: SourceOptions,
        run: Run,
        schema: spark.StructType,
        targets: tuple[Target, ...],
        *,
        empty: Emptying | None,
        staging: bool,
        run_id: str | None,
    ) -> None:
        self._options = options
        self._run_id = run_id
        self._run = run
        self._schema = schema
        self._targets = targets
        self._empty = empty
        self._staging = staging

    @shown_first()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: prepare the partition."""
        batches = _routed(self._options, iterator, self._schema, self._targets)
        return _write(self._options, self._targets, self._run.name, batches, run=self._run, staging=self._staging)

    @shown_first()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, after all tasks have succeeded: decide."""
        log_to_stderr()
        options = self._options
        with WholeBatch(options.sink, self._run.name, run_name=self._run.name, is_planned=True) as batch:
            undecided = _undecided(_complete(messages, batch.name, _TESTED))
            written = batch.decide(self._targets, undecided, empty=self._empty, sources=options.sources)
        self._lineage().complete(rows_by_target(self._targets, undecided if written else ()))

    @shown_first()
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, when a task has failed for good, or the decision has failed."""
        log_to_stderr()
        del messages  # prepared parts are found by their leases, including those whose task's message was lost
        _give_up(self._options, self._targets, self._run.name, run_name=self._run.name)
        self._lineage().fail(None)

    def _lineage(self) -> BatchLineage:
        lineage = BatchLineage(self._options.sink, streaming=False, run_id=self._run_id)
        lineage.start(self._targets, self._options.sources)
        return lineage


class _StreamWriter(DataSourceStreamArrowWriter):
    """The writer of a micro-batch's tasks; or, without a plan, of its end."""

    def __init__(self, options: SourceOptions, schema: spark.StructType, plan: StreamPlan | None) -> None:
        self._options = options
        self._schema = schema
        self._plan = plan

    @shown_first()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: prepare the partition."""
        plan = self._plan
        assert plan is not None, "Spark sends tasks the writer that was planned"
        task = running_task()
        query, number = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_NUMBER)
        if query is None or number is None:
            raise IllegalStateError(
                "Spark does not tell the task which query and micro-batch it belongs to",
                next_step=_TESTED,
            )
        batches = _routed(self._options, iterator, self._schema, plan.targets, project=_stream_batches)
        options = replace(self._options, sink=plan.options)
        message = _write(options, plan.targets, f"{query}/{number}", batches, run=plan.run, staging=plan.staging)
        if task.partitionId() == 0:
            return replace(message, plan=TablePlan(plan.options.schema, plan.options.tables_revision, plan.targets))
        return message

    @shown_first()
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's signature
        """On the driver, after all tasks of the micro-batch have succeeded: decide."""
        log_to_stderr()
        name = f"sink {self._options.sink.sink!r} micro-batch {batchId}"
        written = _complete(messages, name, _NOT_CONTINUOUS)
        batch_id = _batch_of(written, batchId)
        if batch_id is None:
            return  # no partitions, no rows
        plan = _plan_of(written)
        if plan is None:
            raise IllegalStateError(f"{name}: no message of its first partition has come back", next_step=_TESTED)
        sink = replace(self._options.sink, schema=plan.schema, tables_revision=plan.revision)
        sources = sources_of_checkpoint(self._options.checkpoint, batchId)
        undecided = _undecided(written)
        with WholeBatch(sink, batch_id, run_name=self._options.stream, is_planned=True) as batch:
            by_this_call = batch.decide(plan.targets, undecided, empty=None, sources=sources)
        lineage = BatchLineage(sink, streaming=True)
        lineage.start(plan.targets, sources, at=min((one.started_at for one in undecided), default=None))
        lineage.complete(rows_by_target(plan.targets, undecided if by_this_call else ()))

    @shown_first()
    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's signature
        """On the driver, when the micro-batch has failed."""
        log_to_stderr()
        own = _own(messages)
        batch_id = _batch_of(own, batchId)
        if batch_id is None:  # no task has succeeded
            if self._options.stream is None:
                return  # the next run of the micro-batch settles what the tasks left
            batch_id = f"{self._options.stream}/{batchId}"
        plan = _plan_of(own)
        planned = self._schema if plan is None else plan.targets
        targets = _give_up(self._options, planned, batch_id, run_name=self._options.stream)
        lineage = BatchLineage(self._options.sink, streaming=True)
        lineage.start(targets, sources_of_checkpoint(self._options.checkpoint, batchId))
        lineage.fail(None)


def _routed(
    options: SourceOptions,
    iterator: Iterable[pa.RecordBatch],
    schema: spark.StructType,
    targets: tuple[Target, ...],
    *,
    project: Callable[..., Iterator[pa.RecordBatch]] = projected_batches,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    rows = whole_input(iterator)
    if options.tag_column is None:
        return ((0, batch) for batch in project(rows, schema, targets[0].layout))
    tag = schema.names.index(options.tag_column)
    return routed_batches(rows, schema, targets, tag, running_task().partitionId())


def _write(
    options: SourceOptions,
    targets: tuple[Target, ...],
    batch_id: str,
    batches: Iterable[tuple[int, pa.RecordBatch]],
    *,
    run: Run | None,
    staging: bool,
) -> TaskMessage:
    task = running_task()
    prepared = prepare_partition(
        options.sink,
        targets,
        batch_id,
        batches,
        partition=task.partitionId(),
        number=task.attemptNumber(),
        run=run,
        staging=staging,
    )
    return TaskMessage(batch_id, prepared)


def _give_up(
    options: SourceOptions, planned: tuple[Target, ...] | spark.StructType, batch_id: str, *, run_name: str | None
) -> tuple[Target, ...]:
    """Settle a batch that has failed, if the servers let us. The error that made it fail is what people must see.

    Returns its targets; none if they are not known.

    `planned` is the schema of the rows if their targets are not known here.

    Spark would put an error from here in its place, as "Writing job failed", with the first one a hundred lines below. A
    loss alone is worth that.
    """
    try:
        with WholeBatch(options.sink, batch_id, run_name=run_name) as batch:
            if not isinstance(planned, tuple):
                planned = batch.targets(_wanted(options, planned), options.tag_column)
            batch.give_up(planned)
    except (DecidedTransactionLost, OutcomeUnverifiable):
        raise
    except DualWriteError as error:
        name = f"sink {options.sink.sink!r} batch {batch_id!r}"
        logger.warning("%s: not settled after a failure; the next run does it: %s", name, error)
    return planned if isinstance(planned, tuple) else ()


def _undecided(messages: Iterable[TaskMessage]) -> list[PreparedPartition]:
    return [message.prepared for message in messages if message.prepared is not None]


def _plan_of(messages: Iterable[TaskMessage]) -> TablePlan | None:
    return next((message.plan for message in messages if message.plan is not None), None)


def _batch_of(messages: Iterable[TaskMessage], number: int) -> str | None:
    """The name of the micro-batch, as its tasks know it: Spark tells the driver only its number."""
    names = {message.batch_id for message in messages}
    if len(names) > 1 or any(name.rpartition("/")[2] != str(number) for name in names):
        raise IllegalStateError(f"the tasks of micro-batch {number} belong to {sorted(names)}")
    return next(iter(names), None)


def _complete(messages: Sequence[WriterCommitMessage | None], name: str, next_step: str) -> list[TaskMessage]:
    """The messages of all tasks.

    It refuses a task that Spark takes for done and that has never run this library. With the continuous trigger no task does:
    Spark discards the rows, and commits. Nothing is written.
    """
    own = _own(messages)
    if lost := len(messages) - len(own):
        raise ConfigurationError(
            f"{name}: Spark discarded the rows of {lost} of {len(messages)} partitions; nothing is written",
            next_step=next_step,
        )
    return own


def _own(messages: Sequence[WriterCommitMessage | None]) -> list[TaskMessage]:
    return [message for message in messages if isinstance(message, TaskMessage)]
