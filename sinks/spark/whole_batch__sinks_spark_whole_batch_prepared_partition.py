"""A task of a batch that is decided as a whole: sends its rows and messages to both servers, and decides nothing.

Its rows are committed to a staging table that no user reads, or prepared in the target and so invisible. Its messages are
flushed in a Kafka transaction that stays open, invisible to ``read_committed`` consumers. The task hands the names of both
to the driver.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from dualwrite import failpoints
from dualwrite.errors import TransactionAborted
from dualwrite.protocol.batches__protocol_batches_entry import Way
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.sinks.spark.databases.database import STAGING_PREFIX, StagingTable
from dualwrite.sinks.spark.sendable import awaited
from dualwrite.sinks.spark.worker import Attempt
from dualwrite.sinks.spark.worker__sinks_spark_worker_destinations import destination_of
from dualwrite.sinks.spark.worker__sinks_spark_worker_worker_cache import servers
from dualwrite.sinks.spark.writing__sinks_spark_writing_both_legs import write_rows
from dualwrite.sinks.spark.writing__sinks_spark_writing_progress import Progress, shown
from dualwrite.stores.sql.ledger import WHOLE_BATCH
from dualwrite.writing.transaction__writing_blocks_block import Ending, dual_write

if TYPE_CHECKING:
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.worker import Workplace
    from dualwrite.stores.sql.ledger__stores_sql_jobs_runs import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedPartition:
    """The part of a batch that one task has prepared. Pickles; holds no secret.

    Attributes:
        partition: Number of the partition.
        rows: Rows in the database, and messages in the Kafka transaction.
        bytes: Their size, as :class:`Progress` counts it.
        started_at: When the attempt began to write, by the database's clock.
        owner: The holder of the slot's lease.
        transactional_id: The slot.
        incarnation: Of the slot's row; without a staging table, it names the prepared transaction that holds the rows.
        namespace: Of the slot's row.
        prepared: The Kafka transaction.
        staged: The staging table that holds the rows; None if they are prepared in the target.
        rests: Whether the worker keeps the slot's lane, and could continue with it.
    """

    partition: int
    rows: int
    bytes: int
    started_at: datetime
    owner: str
    transactional_id: str
    incarnation: int
    namespace: str
    prepared: PreparedTxnState
    staged: StagingTable | None
    rests: bool


def prepare_partition(
    options: SinkOptions,
    layout: Layout,
    batch_id: str,
    batches: Iterable[pa.RecordBatch],
    *,
    partition: int,
    number: int,
    run: Run | None,
    staging: bool,
) -> PreparedPartition | None:
    """Send one partition to both servers, undecided.

    On return the rows are durable in the database, and the messages in an open Kafka transaction. The slot stays leased
    for as long as the broker is certain to keep that transaction open, less the margin, and ``decide_within_s`` at most.

    Args:
        options: The sink's settings.
        layout: Which column goes where.
        batch_id: Name of the batch.
        batches: The projected rows; its normal end means that the partition is complete.
        partition: Number of the partition.
        number: Number of the attempt, from 0.
        run: The run that the task belongs to; None if it is not known.
        staging: Whether the rows go into a staging table rather than into the target in a prepared transaction.

    Returns:
        The part for the driver to decide. None if the batch is already written, or the partition is empty.

    Raises:
        ConfigurationError: The batch was written to another destination.
        DualWriteError: This attempt prepared nothing that could be decided.
    """
    failpoints.hit("spark.task_started")
    rows = awaited(batches)
    if rows is None:
        return None  # needs no connection: most partitions of a shuffle may be empty
    with servers(options) as found:
        attempt = Attempt(found, batch_id, partition, number, run)
        destination = destination_of(found.database, options, layout, Way.WHOLE)
        # A stream's driver cannot do this: it learns the batch's name from the tasks.
        attempt.ledger.begin(attempt.engine, options.sink, batch_id, destination)
        if attempt.seen(WHOLE_BATCH):
            logger.info("%s: the batch is already written", attempt.name)
            return None
        undecided = _prepare(attempt, layout, rows, staging=staging)
    failpoints.hit("spark.task_done")
    return undecided


def _prepare(
    attempt: Attempt, layout: Layout, batches: Iterable[pa.RecordBatch], *, staging: bool
) -> PreparedPartition:
    options, database = attempt.options, attempt.database
    progress = Progress(attempt.name, options.progress_s)
    try:
        with attempt.workplace() as place:
            row = place.lane.row
            with (
                attempt.engine.connect() as connection,
                dual_write(
                    place.lane,
                    place.context,
                    connection,
                    margin_s=options.margin_s,
                    timeout_s=options.timeout_s,
                    savepoints=False,
                    ending=Ending.HAND_OVER if staging else Ending.PREPARE,
                    permit=attempt.require_run,
                ) as transaction,
            ):
                inside = transaction.connection
                staged = _new_staging(layout, place) if staging else None
                if staged is None:
                    database.before_prepared(inside)
                else:
                    database.create_staging(inside, staged, layout.table, layout.table_column_names)
                write_rows(
                    transaction,
                    batches,
                    layout,
                    layout.table if staged is None else staged.table,
                    options,
                    database=database,
                    partition=attempt.partition,
                    progress=progress,
                )
            assert transaction.prepared is not None
            place.slot.keep_for(_lifetime_s(attempt, place))
    except TransactionAborted as error:
        if not staging and database.waited_in_vain(error):
            attempt.settle_former()
        if (no_room := database.had_no_room(error)) is not None:
            raise no_room from error
        raise
    logger.info("%s: %d rows, %s prepared", attempt.name, progress.rows, shown(progress.bytes))
    return PreparedPartition(
        partition=attempt.partition,
        rows=progress.rows,
        bytes=progress.bytes,
        started_at=place.slot.leased_at,
        owner=place.slot.lease.owner,
        transactional_id=row.transactional_id,
        incarnation=row.incarnation,
        namespace=row.namespace,
        prepared=transaction.prepared,
        staged=staged,
        rests=place.slot.rests,
    )


def _new_staging(layout: Layout, place: Workplace) -> StagingTable:
    """A name for a staging table, and whose it is."""
    row = place.lane.row
    name = f"{STAGING_PREFIX}{secrets.token_hex(12)}"
    return StagingTable(layout.table[0], name, row.transactional_id, row.incarnation, place.slot.lease.owner)


def _lifetime_s(attempt: Attempt, place: Workplace) -> float:
    """The time that the driver has to decide. From here on the database's clock counts, for all partitions alike."""
    producer, options = place.lane.producer, attempt.options
    left_s = producer.transaction_timeout_ms / 1000 - producer.begun_for_s - options.margin_s
    if left_s <= 0:
        raise TransactionAborted(
            f"the partition took {producer.begun_for_s:.0f} s, and after {producer.transaction_timeout_ms / 1000:.0f} s the "
            "broker aborts it",
            next_step="make partitions smaller, or raise the broker's transaction.max.timeout.ms",
            retryable=False,
        )
    return min(left_s, options.decide_within_s)
