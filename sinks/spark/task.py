"""One task: one partition, one dual write. Whatever becomes of its attempts, the ledger lets one of them count."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext

from dualwrite import failpoints
from dualwrite.block import dual_write
from dualwrite.claiming import Ground, default_owner, unique_owner
from dualwrite.deadline import Deadline
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    IllegalStateError,
    OutcomeUnverifiable,
)
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.lane import Lane
from dualwrite.sinks.spark.connecting import connect_engine
from dualwrite.sinks.spark.copying import copying
from dualwrite.sinks.spark.messages import produce_batch
from dualwrite.sinks.spark.rows import row_batches
from dualwrite.sinks.spark.slot import leased_slot
from dualwrite.sinks.spark.whole_input import whole_input
from dualwrite.stores.ledger import Ledger
from dualwrite.stores.slots import SlotPool
from dualwrite.stores.state import SqlStateStore

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql import types as spark
    from sqlalchemy import Connection, Engine

    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.ports import StateRow
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.settings import SinkOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartitionReport:
    """What became of one partition.

    Attributes:
        partition: Its number.
        rows: Rows that this task has written.
        written: False if an earlier or a faster attempt had written it.
    """

    partition: int
    rows: int
    written: bool


REPORT_SCHEMA: Final = pa.schema([("partition", pa.int32()), ("rows", pa.int64()), ("written", pa.bool_())])


@dataclass(frozen=True)
class PartitionTask:
    """What a task does; pickled, and run once for each attempt at each partition.

    Attributes:
        options: The sink's settings.
        layout: Which column goes where.
        schema: The DataFrame's own schema.
        batch_id: Name of the batch.
    """

    options: SinkOptions
    layout: Layout
    schema: spark.StructType
    batch_id: str

    def run_arrow(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For ``mapInArrow``, on the projected columns: writes the partition and yields what became of it."""
        report = self._run(map(self._cast, whole_input(batches)))
        yield pa.RecordBatch.from_pylist([asdict(report)], schema=REPORT_SCHEMA)

    def run_rows(self, rows: Iterator[Row]) -> None:
        """For ``foreachPartition``, on the DataFrame's own rows."""
        self._run(row_batches(whole_input(rows), self.schema, self.layout))

    def _run(self, batches: Iterable[pa.RecordBatch]) -> PartitionReport:
        context = TaskContext.get()
        if context is None:
            raise IllegalStateError("this function runs in a Spark task only")
        return write_partition(self, context.partitionId(), context.attemptNumber(), batches)

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch in the types that are sent; a value that does not fit fails the task."""
        arrays = []
        for column, projected in zip(batch.columns, self.layout.projected, strict=True):
            try:
                arrays.append(column if column.type == projected.arrow else column.cast(projected.arrow))
            except pa.ArrowInvalid as error:
                name = self.schema.fields[projected.source].name
                raise ConfigurationError(
                    f"a value of column {name!r} does not fit {projected.arrow}: {error}"
                ) from error
        return pa.RecordBatch.from_arrays(arrays, schema=self.layout.arrow_schema)


def owner_prefix(batch_id: str) -> str:
    """How the names of the lease owners of a batch begin, and of no other batch."""
    return f"{json.dumps(batch_id)} "


def write_partition(
    task: PartitionTask, partition: int, attempt: int, batches: Iterable[pa.RecordBatch]
) -> PartitionReport:
    """Write one partition, unless that is done already. Durable on both sides on return.

    Args:
        task: What to do.
        partition: Number of the partition.
        attempt: Number of the attempt, for people.
        batches: The projected rows; its normal end means that they are all. Nothing is taken from it if the partition is
            already written.

    Raises:
        DualWriteError: This attempt did not write the partition. The next one finds out by itself whether it must.
        DecidedTransactionLost, OutcomeUnverifiable: The rows are in the database, the messages are not, or nobody knows. It
            is recorded; the next attempt finds the partition written.
    """
    failpoints.hit("spark.task_started")
    engine = connect_engine(task.options)
    try:
        report = _Attempt(task, partition, attempt, engine).run(batches)
    finally:
        engine.dispose()
    failpoints.hit("spark.task_done")
    return report


class _WrittenByOther(Exception):
    """Another attempt has written the partition: leaves the dual write, so that both sides abort."""


class _Attempt:
    def __init__(self, task: PartitionTask, partition: int, attempt: int, engine: Engine) -> None:
        self._task = task
        self._options = task.options
        self._partition = partition
        self._engine = engine
        self._ledger = Ledger(task.options.schema)
        self._rows = 0
        self._name = f"sink {task.options.sink!r} batch {task.batch_id!r} partition {partition} attempt {attempt}"
        who = f"partition {partition} attempt {attempt} {secrets.token_hex(4)} {default_owner()}"
        self._owner = owner_prefix(task.batch_id) + who

    def run(self, batches: Iterable[pa.RecordBatch]) -> PartitionReport:
        if self._seen():
            logger.info("%s: already written", self._name)
            return PartitionReport(self._partition, 0, written=False)
        try:
            self._write(batches)
        except CompletionPending as error:
            # Decided. The slot stays leased, so that the driver finds and completes it.
            logger.warning("%s: %s", self._name, error)
        except (DecidedTransactionLost, OutcomeUnverifiable):
            raise
        except _WrittenByOther:
            logger.info("%s: another attempt was faster", self._name)
            return PartitionReport(self._partition, 0, written=False)
        except Exception as error:
            # Another attempt shows as this one's failure, too: it fences us, or our rows collide with its rows.
            if not self._seen_after(error):
                raise
            return PartitionReport(self._partition, 0, written=False)
        logger.info("%s: %d rows written", self._name, self._rows)
        return PartitionReport(self._partition, self._rows, written=True)

    def _seen(self) -> bool:
        with self._engine.connect() as connection:
            return self._ledger.seen(connection, self._options.sink, self._task.batch_id, self._partition)

    def _seen_after(self, error: Exception) -> bool:
        try:
            seen = self._seen()
        except DualWriteError as more:
            logger.warning("%s: the ledger could not be read after a failure: %s", self._name, more)
            return False
        if seen:
            logger.info("%s: written all the same; this attempt failed: %s", self._name, error)
        return seen

    def _write(self, batches: Iterable[pa.RecordBatch]) -> None:
        options, config = self._options, self._options.kafka_config()
        pool = SlotPool(self._engine, options.pool, schema=options.schema, max_slots=options.max_slots)
        with (
            closing(KafkaCoordinator(config)) as coordinator,
            leased_slot(pool, self._owner, options.lease_s) as lease,
        ):
            ground = Ground(coordinator, SqlStateStore(self._engine, schema=options.schema), unique_owner())
            lane = Lane(lease.transactional_id, ground, _producer_maker(config, ground, options.timeout_s))
            try:
                self._make_ready(lane)
                with (
                    self._engine.connect() as connection,
                    dual_write(
                        lane, ground, connection, margin_s=options.margin_s, timeout_s=options.timeout_s
                    ) as transaction,
                ):
                    with copying(transaction.connection, self._task.layout) as table:
                        for batch in batches:
                            table.write(batch)
                            produce_batch(transaction, batch, self._task.layout, options.topic)
                            self._rows += batch.num_rows
                    failpoints.hit("spark.rows_copied")
                    self._record(transaction.connection)
                self._record_completed(lane)
            finally:
                lane.discard()

    def _make_ready(self, lane: Lane) -> None:
        deadline = Deadline(self._options.timeout_s)
        try:
            lane.ready(deadline)
        except (DecidedTransactionLost, OutcomeUnverifiable):
            # Of the slot's former user. It is recorded, and the driver reports it.
            logger.exception("%s: the slot's former user has lost a transaction", self._name)
            lane.ready(deadline)

    def _record(self, connection: Connection) -> None:
        sink, batch_id = self._options.sink, self._task.batch_id
        partition_count = self._ledger.started(connection, sink, batch_id)
        if partition_count is None or self._partition >= partition_count:
            raise IllegalStateError(f"{self._name}: the batch was begun with {partition_count} partitions")
        if not self._ledger.insert(
            connection,
            sink,
            batch_id,
            self._partition,
            row_count=self._rows,
            message_count=self._rows,
            partition_count=partition_count,
        ):
            raise _WrittenByOther

    def _record_completed(self, lane: Lane) -> None:
        try:
            lane.record_completed()
        except DualWriteError as error:
            logger.warning("%s: completion was not recorded, the next claim will prove it: %s", self._name, error)


def _producer_maker(
    config: KafkaConfig, ground: Ground, timeout_s: float
) -> Callable[[StateRow], TransactionalProducer]:
    def make_producer(row: StateRow) -> TransactionalProducer:
        return TransactionalProducer(
            config,
            row.kafka_id(row.incarnation),
            coordinator=ground.coordinator,
            incarnation=row.incarnation,
            call_timeout_s=timeout_s,
            bulk=True,
        )

    return make_producer
