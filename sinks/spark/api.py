"""The entry points: a batch, a batch of several tables, functions for ``foreachPartition`` and ``foreachBatch``."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    OutcomeUnverifiable,
)
from dualwrite.sinks.spark.digests import may_mix, require_deterministic, require_deterministic_stream
from dualwrite.sinks.spark.observing import reported, sources_of, sources_of_stream
from dualwrite.sinks.spark.options import SinkOptions, SinkSettings, settings_of, target_options
from dualwrite.sinks.spark.partition_task import REPORT_SCHEMA, PartitionReport
from dualwrite.sinks.spark.per_partition import BatchJob, BatchReport
from dualwrite.sinks.spark.plan import CONNECT, JOB_ERRORS, JobFailed, SparkJobs, reason_of, without_cause
from dualwrite.sinks.spark.sendable import projected_batches, used_columns, without_unused
from dualwrite.sinks.spark.targets import Target, Wanted, routed_batches
from dualwrite.sinks.spark.whole_batch import PreparedPartition, WholeBatch, prepare_partition, rows_by_target
from dualwrite.sinks.spark.worker import running_task, spare_collections
from dualwrite.sinks.spark.writing import described, whole_input

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, Row
    from pyspark.sql import types as spark
    from typing_extensions import Unpack

    from dualwrite.stores.sql.ledger import Run

logger = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"


def write_batch(df: DataFrame, *, batch_id: str, **settings: Unpack[SinkSettings]) -> BatchReport:
    """Write a DataFrame into a database table and a Kafka topic: each partition on both sides or on neither.

    After any failure, call it again with the same batch id until it returns: partitions that are already written are skipped.
    This needs the same partitions each time: the same rows in the partition of the same number. A DataFrame is refused if Spark
    knows that its plan is nondeterministic. Before anything is written, the number of partitions, and the rows of partitions
    already written, are compared with the ledger's record.

    Args:
        df: The rows to write. Spark computes a partition again when it is retried.
        batch_id: Names the batch within the sink.
        settings: The sink's settings (see :class:`SinkOptions`): ``sink``, ``kafka``, ``url``, ``topic``, ``table``, ``key``...

    Returns:
        A report. On return the whole batch is committed in the database and complete in Kafka.

    Raises:
        ConfigurationError: A setting, a column, the table, the topic or a right does not fit; the DataFrame may give other
            rows when it is computed again; or the batch was begun for another destination, or partly written with another
            number of partitions. This call wrote no row.
        DecidedTransactionLost, OutcomeUnverifiable: Rows are in the database, and Kafka aborted their messages, or the
            outcome cannot be verified. The loss is recorded.
        Unavailable: A server does not answer. Run the batch again.
        CompletionPending: All is committed in the database, and a server does not answer: run the batch again, which completes
            Kafka's part. At the broker's time limit its messages would be lost.
        JobFailed: Tasks failed or found other rows than those written earlier, or the job was cancelled. Its first line says
            why, its second line which partitions are written; these stay written. Run the batch again. No task of this call can
            still write, unless the error says otherwise.
        pyspark.errors.PySparkException, py4j.protocol.Py4JJavaError: Spark could not plan the batch, or compute what its plan
            depends on. This call wrote no row.
    """
    _require_classic(df)
    return _write(df, settings_of(settings), batch_id, sources=sources_of(df))


def _write(
    df: DataFrame,
    options: SinkOptions,
    batch_id: str,
    *,
    warn: bool = True,
    stream_shown: bool = True,
    sources: str | None = None,
    streaming: bool = False,
) -> BatchReport:
    context = df.sparkSession.sparkContext
    jobs = SparkJobs(context)
    with (
        reported(options, streaming=streaming) as lineage,
        BatchJob(options, batch_id, jobs) as job,
        described(context, f"dualwrite: {job.name}"),
        jobs.started(),
    ):
        task = job.plan(df.schema)
        rows = without_unused(df, used_columns([task.layout]))
        if not options.allow_nondeterministic:
            require_deterministic(df)
        reports = rows.mapInArrow(task.run_arrow, REPORT_SCHEMA).rdd
        # By the RDD, because adaptive execution may choose another number of partitions for each query. This runs the shuffles
        # now; the same plan then runs to its end.
        partition_count = reports.getNumPartitions()
        if not options.allow_nondeterministic:
            require_deterministic(df, reports)
        written = job.begin(partition_count, sources)
        lineage.start(task.targets, sources)
        if warn and not stream_shown:
            what = "Spark does not show the stream's plan, and expressions such as rand() in it are not refused"
            _warn(job.name, what, partition_count, len(written))
        with job.progress(partition_count):
            missing = sorted({*range(partition_count)}.difference(written))
            if missing and not options.allow_nondeterministic:
                job.require_same_rows(_run(reports, written))
            done = _run(reports, missing)
            job.record_empty(partition_count, done)
        report = job.finish(partition_count, done)
        lineage.complete({0: report.written_rows - report.quarantined_rows, 1: report.quarantined_rows})
        return report


def _warn(name: str, what: str, partition_count: int, written: int, remedy: str = "") -> None:
    words = may_mix(what, partition_count, written, remedy)
    if words is not None:
        logger.warning("%s: %s", name, words)


def _run(reports: RDD[Row], partitions: Sequence[int]) -> list[PartitionReport]:
    """Run the tasks of some partitions. Tasks of written partitions compare the rows, and fail if they differ."""
    if len(partitions) == reports.getNumPartitions():
        rows = reports.collect()  # needs no second Python worker for each task
    else:
        rows = reports.context.runJob(reports, list, partitions) if partitions else []
    return [PartitionReport(**row.asDict()) for row in rows]


def foreach_partition(
    df: DataFrame, *, batch_id: str, **settings: Unpack[SinkSettings]
) -> Callable[[Iterator[Row]], None]:
    """Return a function for ``df.foreachPartition`` that writes each partition on both sides or on neither.

    Call this on the driver before each run: it checks everything, settles the leftovers of earlier runs, and records the number
    of partitions. It is slower than :func:`write_batch`, because rows travel to Python one by one. Nothing settles at the end:
    leftovers of failed tasks wait for the next run, or for ``dualwrite recover``. A task whose rows are committed and whose
    messages are not fails, so that its next attempt completes them.

    Args:
        df: The DataFrame that the function will be used on.
        batch_id: Names the batch within the sink.
        settings: As for :func:`write_batch`.

    Only `write_batch` compares the rows of skipped partitions with those written earlier. If the batch has several partitions,
    a warning says so.

    Returns:
        The function. It holds the settings, pickles, and may be used several times with the same DataFrame.

    Raises:
        ConfigurationError, DecidedTransactionLost, OutcomeUnverifiable, Unavailable: As :func:`write_batch`.
    """
    _require_classic(df)
    options = settings_of(settings)
    if options.unit_topic is not None:
        raise ConfigurationError(
            "unit_topic is not for foreach_partition, which does not learn when the batch is complete",
            next_step="use write_batch",
        )
    if options.lineage_namespace is not None:
        raise ConfigurationError(
            "lineage_namespace is not for foreach_partition, which does not learn when the batch is complete",
            next_step="use write_batch",
        )
    with BatchJob(options, batch_id) as job:
        task = replace(job.plan(df.schema), alone=True)
        if not options.allow_nondeterministic:
            require_deterministic(df, df.rdd)
        partition_count = df.rdd.getNumPartitions()
        written = len(job.begin(partition_count, sources_of(df)))
        if not options.allow_nondeterministic:
            _warn(
                job.name, "foreach_partition compares no rows", partition_count, written, "write_batch compares them; "
            )
        job.leave_to_caller()
    return task.run_rows


def foreach_batch(**settings: Unpack[SinkSettings]) -> Callable[[DataFrame, int], None]:
    """Return a function for ``writeStream.foreachBatch`` that writes each micro-batch once on both sides, despite replays.

    The batch is named after the query's id, which the checkpoint keeps, and the number of the micro-batch. A query with a
    new checkpoint is a new query, and writes everything that it reads.

    Args:
        settings: As for :func:`write_batch`.

    Returns:
        The function. It raises what :func:`write_batch` raises. A stream shows only an error's text, so there the errors have
        no cause: the driver's log has it, as it has Spark's exception behind :class:`JobFailed`.

    Raises:
        ConfigurationError: A setting is missing or wrong.
    """
    options = settings_of(settings)
    warned: set[str | None] = set()

    def write(df: DataFrame, number: int) -> None:
        _require_classic(df)
        query_id = df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        batch_id, shown, sources = str(number), True, None
        if query_id is not None:
            batch_id = f"{query_id}/{number}"
            sources = sources_of_stream(df.sparkSession, query_id, number)
            shown = options.allow_nondeterministic or require_deterministic_stream(df, query_id)
        with nullcontext() if query_id is None else without_cause():
            report = _write(
                df,
                options,
                batch_id,
                warn=query_id not in warned,
                stream_shown=shown,
                sources=sources,
                streaming=query_id is not None,
            )
        if report.partitions > 1:
            warned.add(query_id)

    return write


def write_many(
    parts: Sequence[tuple[DataFrame, Mapping[str, object]]] | DataFrame,
    *,
    batch_id: str,
    tag_column: str | None = None,
    targets: Mapping[str, Mapping[str, object]] | None = None,
    **settings: object,
) -> BatchReport:
    """Write into several tables and topics in one batch: all of it or nothing, and once.

    One commit of the database makes all rows durable and visible; Kafka's part follows, as for ``format("dualwrite")``. After
    any failure, call it again with the same batch id until it returns. The DataFrames may then have other partitions and other
    rows: an undecided batch leaves nothing behind.

    Args:
        parts: Pairs of a DataFrame and the settings of its target: ``[(orders, {"table": "orders", "topic": "orders"}),
            ...]``. Or, with `tag_column`, one DataFrame, which is computed once.
        batch_id: Names the batch within the sink.
        tag_column: A string column of the one DataFrame that marks each row's target.
        targets: With `tag_column`, the settings of each target by its tag. By default a target takes the DataFrame's columns
            that its table has.
        settings: Those of :class:`SinkOptions` for the batch (``sink``, ``kafka``, ``url``...), and defaults for all targets.
            The tables are filled in the order of their targets: list first the tables that others refer to.

    Returns:
        A report. On return the whole batch is committed in the database and complete in Kafka.

    Raises:
        ConfigurationError: A setting, a column, a table, a topic or a right does not fit, or a table appears twice; or the
            batch was written to other tables or topics, or partition by partition. Nothing is written.
        TransactionAborted, Fenced: Nothing is written: a table refuses rows, or another run of the batch has begun.
        TransactionInDoubt, Unavailable: A server does not answer. Run the batch again.
        CompletionPending: All is committed in the database, and a server does not answer: run the batch again, which completes
            Kafka's part. At the broker's time limit its messages would be lost.
        DecidedTransactionLost, OutcomeUnverifiable: Rows are in the database, and Kafka aborted their messages, or the
            outcome cannot be verified. The loss is recorded.
        JobFailed: Tasks failed, a row has a tag that no target has, or the job was cancelled. Nothing is written.
        pyspark.errors.PySparkException, py4j.protocol.Py4JJavaError: Spark could not plan the batch. Nothing is written.
    """
    asked = _asked(parts, tag_column, targets, settings)
    return write_asked(asked, batch_id, sources_of(*asked.frames))


def foreach_many(
    split: Callable[[DataFrame], Sequence[tuple[DataFrame, Mapping[str, object]]]] | None = None,
    *,
    tag_column: str | None = None,
    targets: Mapping[str, Mapping[str, object]] | None = None,
    **settings: object,
) -> Callable[[DataFrame, int], None]:
    """Return a function for ``writeStream.foreachBatch`` that writes each micro-batch as :func:`write_many` does, once.

    A micro-batch is named as by :func:`foreach_batch`: by the query's id, which the checkpoint keeps, and its number.

    Args:
        split: Makes the pairs of :func:`write_many` from the micro-batch, which is then computed once for each pair. Or give
            `tag_column` and `targets`: then it is computed once.
        tag_column: As for :func:`write_many`.
        targets: Likewise.
        settings: Likewise.

    Returns:
        The function. It raises what :func:`write_many` raises; in a stream, without a cause, as for :func:`foreach_batch`.

    Raises:
        ConfigurationError: Neither `split` nor `tag_column` is given, or both are.
    """
    if (split is None) == (tag_column is None):
        raise ConfigurationError("give either a function that splits the micro-batch, or tag_column and targets")

    def write(df: DataFrame, number: int) -> None:
        _require_classic(df)
        query_id = df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        batch_id, sources = str(number), None
        if query_id is not None:
            batch_id, sources = f"{query_id}/{number}", sources_of_stream(df.sparkSession, query_id, number)
        with nullcontext() if query_id is None else without_cause():
            asked = _asked(df if split is None else split(df), tag_column, targets, settings)
            write_asked(asked, batch_id, sources, streaming=query_id is not None)

    return write


def _asked(
    parts: Sequence[tuple[DataFrame, Mapping[str, object]]] | DataFrame,
    tag_column: str | None,
    targets: Mapping[str, Mapping[str, object]] | None,
    settings: Mapping[str, object],
) -> Asked:
    if settings.get("allow_nondeterministic"):
        raise ConfigurationError(
            "allow_nondeterministic is for batches written partition by partition",
            next_step="leave it out: a batch decided as a whole may give other rows each time",
        )
    if tag_column is None:
        if targets is not None:
            raise ConfigurationError(
                "targets needs tag_column", next_step="name the column that marks each row's target"
            )
        asked = Asked.of_frames(parts, settings)
    elif isinstance(parts, (list, tuple)):
        raise ConfigurationError(
            "tag_column is for one DataFrame, not for a list", next_step="give the DataFrame itself"
        )
    else:
        asked = Asked.of_tags(cast("DataFrame", parts), tag_column, targets, settings)
    for df in asked.frames:
        _require_classic(df)
    return asked


def _require_classic(df: DataFrame) -> None:
    if type(df).__module__.startswith(CONNECT):
        raise ConfigurationError(
            "Spark Connect does not report how many partitions a DataFrame has",
            next_step='use format("dualwrite"), which writes whole batches; or run the job in a driver of its own '
            "(spark-submit, or a session with a master)",
        )


# Several tables and topics, written from the user's own driver: the job, its one decision, and the report.


_PREPARED: Final = "prepared"
_PREPARED_SCHEMA: Final = f"{_PREPARED} binary"


@dataclass(frozen=True)
class Asked:
    """What a caller asks for: DataFrames with one target each or, with `tag_column`, one DataFrame and its targets."""

    frames: tuple[DataFrame, ...]
    targets: tuple[tuple[str | None, SinkOptions], ...]
    tag_column: str | None = None

    @classmethod
    def of_frames(cls, parts: object, common: Mapping[str, object]) -> Asked:
        """From a list of pairs: a DataFrame, and its target's settings."""
        if not isinstance(parts, Sequence) or not parts:
            raise ConfigurationError(
                "there is nothing to write", next_step="give a list of pairs: [(df, {'table': ..., 'topic': ...}), ...]"
            )
        frames, targets = [], []
        for number, part in enumerate(parts):
            if not isinstance(part, tuple) or len(part) != 2:  # noqa: PLR2004 - a pair
                raise ConfigurationError(
                    f"part {number} is not a pair of a DataFrame and its settings",
                    next_step="write (df, {'table': ..., 'topic': ...})",
                )
            df, settings = part
            frames.append(df)
            targets.append((None, target_options(common, settings, f"part {number}")))
        return cls(tuple(frames), tuple(targets))

    @classmethod
    def of_tags(cls, df: DataFrame, tag_column: str, targets: object, common: Mapping[str, object]) -> Asked:
        """From one DataFrame whose column `tag_column` names the target of each row."""
        if not isinstance(targets, Mapping) or not targets:
            raise ConfigurationError(
                "tag_column needs targets", next_step="map each tag to its settings: {'order': {'table': ...}, ...}"
            )
        for tag in targets:
            if not isinstance(tag, str):
                raise ConfigurationError(f"the tag {tag!r} is not text", next_step="cast the column to string")
        every = tuple((tag, target_options(common, given, f"target {tag!r}")) for tag, given in targets.items())
        return cls((df,), every, tag_column)

    def wanted(self) -> list[Wanted]:
        """Each target, with the schema of its rows."""
        frames = self.frames * len(self.targets) if self.tag_column is not None else self.frames
        return [Wanted(options, df.schema, tag) for df, (tag, options) in zip(frames, self.targets, strict=True)]


@dataclass(frozen=True)
class ManyTask:
    """The work of the tasks of one DataFrame; pickled, and run once for each attempt at each partition.

    `number` is the number of its only target. With `tag`, that column names each row's target instead.
    """

    options: SinkOptions
    targets: tuple[Target, ...]
    schema: spark.StructType
    batch_id: str
    run: Run
    staging: bool
    number: int
    tag: int | None

    def run_arrow(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For ``mapInArrow``: prepares the partition, and yields what the driver decides on."""
        context = running_task()
        spare_collections()
        rows = whole_input(batches)
        routed: Iterator[tuple[int, pa.RecordBatch]]
        if self.tag is None:
            layout = self.targets[self.number].layout
            routed = ((self.number, batch) for batch in projected_batches(rows, self.schema, layout))
        else:
            routed = routed_batches(rows, self.schema, self.targets, self.tag, context.partitionId())
        prepared = prepare_partition(
            self.options,
            self.targets,
            self.batch_id,
            routed,
            partition=context.partitionId(),
            number=context.attemptNumber(),
            run=self.run,
            staging=self.staging,
        )
        yield pa.RecordBatch.from_pydict({_PREPARED: [pickle.dumps(prepared)]}, pa.schema([(_PREPARED, pa.binary())]))


def write_asked(asked: Asked, batch_id: str, sources: str | None, *, streaming: bool = False) -> BatchReport:
    """Write everything that is asked for, or nothing; see :func:`~dualwrite.sinks.spark.write_many`."""
    options, began_s = asked.targets[0][1], now_s()
    context = asked.frames[0].sparkSession.sparkContext
    jobs = SparkJobs(context)
    with (
        reported(options, streaming=streaming) as lineage,
        WholeBatch(options, batch_id, run_name=batch_id) as batch,
        described(context, f"dualwrite: {batch.name}"),
        jobs.started(),
    ):
        slots = batch.settle_left()
        targets = batch.targets(asked.wanted(), asked.tag_column)
        staging = batch.uses_staging(targets, empty=None)
        is_written = batch.begin(targets)
        lineage.start(targets, sources)
        if is_written:
            logger.info("%s: already written", batch.name)
            batch.end_written(targets, slots)
            lineage.complete({})
            return _report(asked, batch, [], 0, began_s)
        logger.info("%s: writing into %d tables", batch.name, len(targets))
        try:
            prepared, partitions = _prepared(asked, batch, targets, staging=staging)
            by_this_call = batch.decide(targets, prepared, empty=None, sources=sources)
        except BaseException as error:
            _give_up(batch, targets, jobs, options.timeout_s)
            if isinstance(error, JOB_ERRORS):
                raise JobFailed(
                    f"{batch.name}: {reason_of(error)}\nnothing of it is written, into none of its tables and topics; run "
                    "it again with the same batch id"
                ) from error
            raise
        written = prepared if by_this_call else []
        lineage.complete(rows_by_target(targets, written))
        return _report(asked, batch, written, partitions, began_s)


def _prepared(
    asked: Asked, batch: WholeBatch, targets: tuple[Target, ...], *, staging: bool
) -> tuple[list[PreparedPartition], int]:
    """Run all tasks in one job. Returns what they have prepared, and how many partitions there are."""
    assert batch.run is not None
    jobs = []
    for number, df in enumerate(asked.frames):
        tag = None if asked.tag_column is None else df.columns.index(asked.tag_column)
        layouts = [target.layout for target in (targets if tag is not None else targets[number : number + 1])]
        rows = without_unused(df, used_columns(layouts) | (set() if tag is None else {tag}))
        task = ManyTask(batch.options, targets, df.schema, batch.batch_id, batch.run, staging, number, tag)
        jobs.append(rows.mapInArrow(task.run_arrow, _PREPARED_SCHEMA))
    found = [pickle.loads(row[0]) for row in reduce(_union, jobs).collect()]  # noqa: S301 - made by our own tasks
    return [one for one in found if one is not None], len(found)


def _union(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.union(right)


def _give_up(batch: WholeBatch, targets: Sequence[Target], jobs: SparkJobs, timeout_s: float) -> None:
    """Fence the tasks, wait until none runs, and undo what they have prepared. Leaves the rest to the next run."""
    for end_jobs in (True, False):
        try:
            batch.give_up(targets)
        except (DecidedTransactionLost, OutcomeUnverifiable):
            raise
        except DualWriteError as error:
            logger.warning("%s: not settled after a failure; the next run does it: %s", batch.name, error)
        finally:
            if end_jobs:
                jobs.end(batch.name, Deadline(timeout_s))


def _report(
    asked: Asked, batch: WholeBatch, prepared: Sequence[PreparedPartition], partitions: int, began_s: float
) -> BatchReport:
    written = batch.written()
    names = [options.table for _, options in asked.targets]
    if (aside := asked.targets[0][1].quarantine_table) is not None:
        names.append(aside)
    by_table = dict.fromkeys(names, 0)
    for one in prepared:
        for part in one.parts:
            by_table[names[part.target]] += part.rows
    quarantined = sum(one.quarantined for one in prepared)
    return BatchReport(
        sink=asked.targets[0][1].sink,
        batch_id=batch.batch_id,
        partitions=partitions,
        rows=written.rows,
        messages=written.messages,
        written_partitions=partitions if prepared else 0,
        written_rows=sum(one.rows for one in prepared),
        written_bytes=sum(one.bytes for one in prepared),
        written_by_table=by_table,
        seconds=now_s() - began_s,
        parts=[_part(one) for one in sorted(prepared, key=attrgetter("partition"))],
        quarantined_rows=quarantined,
    )


def _part(one: PreparedPartition) -> PartitionReport:
    """The report of a partition that this call has written."""
    offsets = {f"{at.topic}-{at.partition}": at.offset for at in one.prepared.first_offsets}
    return PartitionReport(
        one.partition,
        one.rows,
        one.bytes,
        written=True,
        seconds=one.seconds,
        first_offsets=offsets,
        quarantined=one.quarantined,
    )
