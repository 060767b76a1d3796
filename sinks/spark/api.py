"""The three ways in: a batch, a function for ``foreachPartition``, a function for ``foreachBatch``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.columns.digests import (
    left_out,
    may_mix,
    require_deterministic,
    require_deterministic_stream,
    with_digest,
)
from dualwrite.sinks.spark.columns.from_arrow import without_unused
from dualwrite.sinks.spark.driver.spark_jobs import SparkJobs
from dualwrite.sinks.spark.driver.task_errors import named_failures
from dualwrite.sinks.spark.options.settings import SinkOptions, SinkSettings
from dualwrite.sinks.spark.per_partition.job import BatchJob, BatchReport
from dualwrite.sinks.spark.per_partition.task import PartitionReport
from dualwrite.sinks.spark.writing.progress import described

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, Row
    from typing_extensions import Unpack

    from dualwrite.sinks.spark.columns.layout import Layout

logger = logging.getLogger(__name__)

_REPORT_SCHEMA: Final = "partition int, rows bigint, bytes bigint, written boolean, empty boolean"
_QUERY_ID: Final = "sql.streaming.queryId"


def write_batch(df: DataFrame, *, batch_id: str, **settings: Unpack[SinkSettings]) -> BatchReport:
    """Write a DataFrame into a PostgreSQL table and a Kafka topic: each partition on both sides or on neither.

    May be called again with the same batch id, after any failure, until it returns: what is written is skipped. For that the
    batch must have the same partitions each time: the same rows in the partition of the same number. A DataFrame of which Spark
    knows that it has not is refused; and before anything is written, the number of partitions and the rows of those that are
    written are compared with what the ledger has recorded of them. A warning names columns that cannot be compared.

    Args:
        df: What to write. Its lineage runs again when a partition is retried.
        batch_id: Names the batch within the sink.
        settings: The sink's settings, as :class:`SinkOptions` has them: ``sink``, ``kafka``, ``url``, ``topic``, ``table``,
            ``key``, ...

    Returns:
        What was written. On return all of the batch is committed in the database and complete in Kafka.

    Raises:
        ConfigurationError: A setting, a column, the table, the topic or a right does not fit; the DataFrame may give other
            rows when it is computed again; or the batch was begun with another number of partitions, or for another
            destination. No row was written by this call.
        DecidedTransactionLost, OutcomeUnverifiable: Rows are in the database, and Kafka aborted their messages, or nobody can
            tell. It is recorded.
        Unavailable: A server does not answer. Run it again.
        pyspark.errors.PySparkException, py4j.protocol.Py4JJavaError: Tasks failed, or the job was cancelled. Partitions that
            were written stay; run it again. Or they have found other rows than those that were written. Where the reason is
            this library's, it is a :class:`JobFailed`, and its first line.
    """
    _require_classic(df)
    return _write(df, SinkOptions(**settings), batch_id)


def _write(
    df: DataFrame, options: SinkOptions, batch_id: str, *, warn: bool = True, stream_shown: bool = True
) -> BatchReport:
    context = df.sparkSession.sparkContext
    jobs = SparkJobs(context)
    with BatchJob(options, batch_id, jobs) as job, described(context, f"dualwrite: {job.name}"), jobs.started():
        task = job.plan(df.schema)
        rows = without_unused(df, task.layout)
        if not options.allow_nondeterministic:
            require_deterministic(df)
            rows = with_digest(rows, df.schema, task.layout)
        reports = rows.mapInArrow(task.run_arrow, _REPORT_SCHEMA).rdd
        # Through the RDD, because adaptive execution decides the number of partitions anew for each query: this one's
        # shuffles run now, and the very same plan then runs to its end.
        partition_count = reports.getNumPartitions()
        if not options.allow_nondeterministic:
            require_deterministic(df, reports)
        job.begin(partition_count)
        written = job.written_partitions()
        if warn and not options.allow_nondeterministic:
            for what in _unseen(df, task.layout, stream_shown=stream_shown):
                _warn(job.name, what, partition_count, len(written))
        with named_failures(job.name), job.progress(partition_count):
            missing = sorted({*range(partition_count)}.difference(written))
            if missing and not options.allow_nondeterministic:
                job.require_same_rows(_run(reports, written))
            done = _run(reports, missing)
            job.record_empty(partition_count, done)
        return job.finish(partition_count, done)


def _unseen(df: DataFrame, layout: Layout, *, stream_shown: bool) -> Iterator[str]:
    """Where this batch may have other rows in its next run, and nobody would see it."""
    if columns := left_out(df.schema, layout):
        yield f"the rows are compared without {', '.join(map(repr, columns))}"
    if not stream_shown:
        yield "Spark does not show the stream's plan, and expressions such as rand() in it are not refused"


def _warn(name: str, what: str, partition_count: int, written: int, remedy: str = "") -> None:
    words = may_mix(what, partition_count, written, remedy)
    if words is not None:
        logger.warning("%s: %s", name, words)


def _run(reports: RDD[Row], partitions: Sequence[int]) -> list[PartitionReport]:
    """Run the tasks of some partitions. Those that are written already compare their rows, and fail if they are others."""
    if len(partitions) == reports.getNumPartitions():
        rows = reports.collect()  # without one more Python worker for each task
    else:
        rows = reports.context.runJob(reports, list, partitions) if partitions else []
    return [PartitionReport(**row.asDict()) for row in rows]


def foreach_partition(
    df: DataFrame, *, batch_id: str, **settings: Unpack[SinkSettings]
) -> Callable[[Iterator[Row]], None]:
    """A function for ``df.foreachPartition``: writes each partition on both sides or on neither.

    To be called on the driver for each run; it checks everything, settles what earlier runs have left, and records the number
    of partitions. Slower than :func:`write_batch`, because rows travel to Python one by one; and nothing settles at the end:
    what the last tasks leave waits for the next run, or for ``dualwrite recover``.

    Args:
        df: The DataFrame that the function will be used on.
        batch_id: Names the batch within the sink.
        settings: As for :func:`write_batch`.

    The rows of partitions that are skipped are not compared with those that were written: only `write_batch` does that. Where
    the batch has several partitions, a warning says so.

    Returns:
        The function. It holds the settings, pickles, and may be used once or again with the same DataFrame.

    Raises:
        ConfigurationError, DecidedTransactionLost, OutcomeUnverifiable, Unavailable: As :func:`write_batch`.
    """
    _require_classic(df)
    options = SinkOptions(**settings)
    with BatchJob(options, batch_id) as job:
        task = job.plan(df.schema)
        if not options.allow_nondeterministic:
            require_deterministic(df, df.rdd)
        partition_count = df.rdd.getNumPartitions()
        job.begin(partition_count)
        if not options.allow_nondeterministic:
            written = len(job.written_partitions())
            _warn(
                job.name, "foreach_partition compares no rows", partition_count, written, "write_batch compares them; "
            )
        job.leave_to_caller()
    return task.run_rows


def foreach_batch(**settings: Unpack[SinkSettings]) -> Callable[[DataFrame, int], None]:
    """A function for ``writeStream.foreachBatch``: each micro-batch once on both sides, however often it is replayed.

    The batch is named by the query's id, which the checkpoint keeps, and the number of the micro-batch. A query with a new
    checkpoint is a new query, and writes what it reads.

    Args:
        settings: As for :func:`write_batch`.

    Raises:
        ConfigurationError: A setting is missing or wrong.
    """
    options = SinkOptions(**settings)
    warned: set[str | None] = set()

    def write(df: DataFrame, number: int) -> None:
        _require_classic(df)
        query_id = df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        batch_id, shown = str(number), True
        if query_id is not None:
            batch_id = f"{query_id}/{number}"
            shown = options.allow_nondeterministic or require_deterministic_stream(df, query_id)
        report = _write(df, options, batch_id, warn=query_id not in warned, stream_shown=shown)
        if report.partitions > 1:
            warned.add(query_id)

    return write


def _require_classic(df: DataFrame) -> None:
    if type(df).__module__.startswith("pyspark.sql.connect"):
        raise ConfigurationError(
            "Spark Connect does not tell how many partitions a DataFrame has",
            next_step='use format("dualwrite"), which writes whole batches; or run the job in a driver of its own '
            "(spark-submit, or a session with a master)",
        )
