"""Several tables and topics, written from the user's own driver: the job, its one decision, and the report."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    IllegalStateError,
    OutcomeUnverifiable,
)
from dualwrite.sinks.spark.lineage import reported
from dualwrite.sinks.spark.options import SinkOptions, target_options
from dualwrite.sinks.spark.partition_task import PartitionReport
from dualwrite.sinks.spark.per_partition import BatchReport
from dualwrite.sinks.spark.plan import JOB_ERRORS, JobFailed, SparkJobs, reason_of
from dualwrite.sinks.spark.sendable import projected_batches, used_columns, without_unused
from dualwrite.sinks.spark.targets import Target, Wanted, routed_batches
from dualwrite.sinks.spark.whole_batch import PreparedPartition, WholeBatch, prepare_partition, rows_by_target
from dualwrite.sinks.spark.writing import described, whole_input

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql import types as spark

    from dualwrite.stores.sql.ledger import Run

logger = logging.getLogger(__name__)

_PREPARED: Final = "prepared"
_PREPARED_SCHEMA: Final = f"{_PREPARED} binary"


@dataclass(frozen=True)
class Asked:
    """What a caller asks for: DataFrames, each with one target; or, with `tag_column`, one DataFrame and its targets."""

    frames: tuple[DataFrame, ...]
    targets: tuple[tuple[str | None, SinkOptions], ...]
    tag_column: str | None = None

    @classmethod
    def of_frames(cls, parts: object, common: Mapping[str, object]) -> Asked:
        """A list of pairs of a DataFrame and its target's settings."""
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
        """One DataFrame whose column `tag_column` names the target of each row."""
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

    `number` is that of its only target; with `tag`, the column of that number names each row's target.
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
        context = TaskContext.get()
        if context is None:
            raise IllegalStateError("this function runs in a Spark task only")
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
    """Write all that is asked for, or nothing; see :func:`~dualwrite.sinks.spark.write_many`."""
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
    """Fence the tasks, wait until none runs, and undo what they have prepared. What cannot be settled, the next run does."""
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
