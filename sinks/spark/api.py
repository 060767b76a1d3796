"""The entry points: a batch, a batch of several tables, functions for ``foreachPartition`` and ``foreachBatch``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.digests import may_mix, require_deterministic, require_deterministic_stream
from dualwrite.sinks.spark.lineage import reported
from dualwrite.sinks.spark.many import Asked, write_asked
from dualwrite.sinks.spark.observing import sources_of, sources_of_stream
from dualwrite.sinks.spark.options import SinkOptions, SinkSettings, settings_of
from dualwrite.sinks.spark.partition_task import REPORT_SCHEMA, PartitionReport
from dualwrite.sinks.spark.per_partition import BatchJob, BatchReport
from dualwrite.sinks.spark.plan import CONNECT, SparkJobs, without_cause
from dualwrite.sinks.spark.sendable import used_columns, without_unused
from dualwrite.sinks.spark.writing import described

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, Row
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_QUERY_ID: Final = "sql.streaming.queryId"


def write_batch(df: DataFrame, *, batch_id: str, **settings: Unpack[SinkSettings]) -> BatchReport:
    """Write a DataFrame into a database table and a Kafka topic: each partition on both sides or on neither.

    After any failure, call it again with the same batch id until it returns: partitions that are already written are skipped.
    This needs the same partitions each time: the same rows in the partition of the same number. A DataFrame whose plan Spark
    knows to be nondeterministic is refused. Before anything is written, the number of partitions, and the rows of partitions
    already written, are compared with the ledger's record.

    Args:
        df: The rows to write. Its lineage runs again when a partition is retried.
        batch_id: Names the batch within the sink.
        settings: The sink's settings (see :class:`SinkOptions`): ``sink``, ``kafka``, ``url``, ``topic``, ``table``, ``key``...

    Returns:
        A report. On return the whole batch is committed in the database and complete in Kafka.

    Raises:
        ConfigurationError: A setting, a column, the table, the topic or a right does not fit; the DataFrame may give other
            rows when it is computed again; or the batch was begun with another number of partitions, or for another
            destination. This call wrote no row.
        DecidedTransactionLost, OutcomeUnverifiable: Rows are in the database, and Kafka aborted their messages, or the
            outcome cannot be verified. The loss is recorded.
        Unavailable: A server does not answer. Run the batch again.
        CompletionPending: All is committed in the database, and a server does not answer: run the batch again, which completes
            Kafka's part. At the broker's time limit its messages would be lost.
        JobFailed: Tasks failed, found other rows than those written earlier, or the job was cancelled. Its first line says
            why, its second line which partitions are written: these stay. Run the batch again. No task of this call can write
            any more, unless the error says otherwise.
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
        # Through the RDD: adaptive execution may choose another number of partitions for every query. Here the shuffles run
        # now, and the same plan then runs to its end.
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
    """Run the tasks of some partitions. Tasks of partitions already written compare their rows, and fail if they differ."""
    if len(partitions) == reports.getNumPartitions():
        rows = reports.collect()  # without one more Python worker for each task
    else:
        rows = reports.context.runJob(reports, list, partitions) if partitions else []
    return [PartitionReport(**row.asDict()) for row in rows]


def foreach_partition(
    df: DataFrame, *, batch_id: str, **settings: Unpack[SinkSettings]
) -> Callable[[Iterator[Row]], None]:
    """Return a function for ``df.foreachPartition`` that writes each partition on both sides or on neither.

    Call this on the driver before each run: it checks everything, settles the leftovers of earlier runs, and records the
    number of partitions. Slower than :func:`write_batch`, because rows travel to Python one by one. Nothing settles at the
    end: leftovers of tasks that failed wait for the next run, or for ``dualwrite recover``. A task whose rows are committed and
    whose messages are not fails, so that its next attempt completes them.

    Args:
        df: The DataFrame that the function will be used on.
        batch_id: Names the batch within the sink.
        settings: As for :func:`write_batch`.

    The rows of skipped partitions are not compared with those written earlier: only `write_batch` does that. If the batch
    has several partitions, a warning says so.

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
        The function. It raises what :func:`write_batch` raises. In a stream, which shows an error's text only, its errors
        have no cause: that is in the driver's log, as is Spark's exception behind :class:`JobFailed`.

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

    All rows become durable, and visible, by one commit of the database; Kafka's part follows it, as for
    ``format("dualwrite")``. After any failure, call it again with the same batch id until it returns. The DataFrames may then
    have other partitions and other rows: nothing of a batch that was not decided is left.

    Args:
        parts: Pairs of a DataFrame and the settings of its target: ``[(orders, {"table": "orders", "topic": "orders"}),
            ...]``. Or, with `tag_column`, one DataFrame, which is computed once.
        batch_id: Names the batch within the sink.
        tag_column: A string column of the one DataFrame that marks each row's target.
        targets: With `tag_column`, the settings of each target by its tag. By default a target takes the DataFrame's columns
            that its table has.
        settings: Those of :class:`SinkOptions` for the batch: ``sink``, ``kafka``, ``url``...; and those of targets for all of
            them, unless a target has its own. The tables are filled in the order of their targets: name first what others
            refer to.

    Returns:
        A report. On return the whole batch is committed in the database and complete in Kafka.

    Raises:
        ConfigurationError: A setting, a column, a table, a topic or a right does not fit, or a table is there twice; or the
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
        split: Makes the pairs of :func:`write_many` from the micro-batch. Or give `tag_column` and `targets`, by which the
            micro-batch is computed once; pairs compute it once for each.
        tag_column: As for :func:`write_many`.
        targets: Likewise.
        settings: Likewise.

    Returns:
        The function. It raises what :func:`write_many` raises; in a stream, without a cause, as that of :func:`foreach_batch`.

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
