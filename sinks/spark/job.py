"""The driver's part: check everything before a task runs, settle before and after, and know what became of the batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final

from sqlalchemy import exc

from dualwrite import failpoints
from dualwrite.claiming import Ground, claim_rows, unique_owner
from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError, DecidedTransactionLost, DualWriteError, OutcomeUnverifiable
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.observations import Outcome
from dualwrite.settling import settle
from dualwrite.sinks.spark.connecting import connect_engine
from dualwrite.sinks.spark.layout import plan_layout
from dualwrite.sinks.spark.table import read_table
from dualwrite.sinks.spark.task import PartitionReport, PartitionTask, owner_prefix
from dualwrite.stores.failures import map_database_error
from dualwrite.stores.ledger import Ledger, check_partition_count
from dualwrite.stores.rows import check_name
from dualwrite.stores.schema import check_schema
from dualwrite.stores.slots import SlotPool
from dualwrite.stores.state import SqlStateStore

if TYPE_CHECKING:
    from pyspark.sql import types as spark
    from typing_extensions import Self

    from dualwrite.ports import Incident
    from dualwrite.sinks.spark.settings import SinkOptions

logger = logging.getLogger(__name__)

STARTED: Final = -2
"""The partition id of the ledger's row that says with how many partitions a batch was begun."""


@dataclass(frozen=True)
class BatchReport:
    """What became of a batch.

    Attributes:
        sink: Name of the sink.
        batch_id: Name of the batch.
        partitions: How many partitions it has; all of them are written.
        rows: Rows in the table, over all runs of this batch.
        messages: Messages in Kafka, likewise.
        written_partitions: How many partitions this call has written.
        written_rows: How many rows this call has written; 0 where the batch was done already.
    """

    sink: str
    batch_id: str
    partitions: int
    rows: int
    messages: int
    written_partitions: int
    written_rows: int


class BatchJob:
    """One run of one batch, on the driver. A context manager; settles the sink's slots when it is entered and left.

    Args:
        options: The sink's settings.
        batch_id: Name of the batch.

    Raises:
        ConfigurationError: From entering: a name, a right, the schema or the cluster is not as it should be.
        DecidedTransactionLost, OutcomeUnverifiable: From entering: settling found a loss that an earlier run has left. It is
            recorded; the next run goes on.
        Unavailable: A server does not answer.
    """

    def __init__(self, options: SinkOptions, batch_id: str) -> None:
        check_name(batch_id, "the name of a batch")
        self._options = options
        self._batch_id = batch_id
        self._name = f"sink {options.sink!r} batch {batch_id!r}"
        self._engine = connect_engine(options)
        self._coordinator = KafkaCoordinator(options.kafka_config())
        self._store = SqlStateStore(self._engine, schema=options.schema)
        self._ledger = Ledger(options.schema)
        self._pool = SlotPool(self._engine, options.pool, schema=options.schema, max_slots=options.max_slots)
        self._known_incidents: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        try:
            check_schema(self._engine, self._options.schema)
            self._known_incidents = {_identity(incident) for incident in self._incidents()}
            self._settle()
            self._raise_new_incidents()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._settle()
        except DualWriteError as unsettled:
            if error is None:
                raise
            logger.warning("%s: not settled after a failure; the next run does it: %s", self._name, unsettled)
        finally:
            self._close()

    def _close(self) -> None:
        self._coordinator.close()
        self._engine.dispose()

    def plan(self, schema: spark.StructType) -> PartitionTask:
        """Check topic, table and every column; nothing is written.

        Raises:
            ConfigurationError: What does not fit; it names the column and the type.
            Unavailable: A server does not answer.
        """
        options = self._options
        if options.topic is not None:
            found = self._coordinator.topic_ids([options.topic], Deadline(options.timeout_s))
            if options.topic not in found:
                raise ConfigurationError(f"there is no topic {options.topic!r}", next_step="create it")
        try:
            with self._engine.connect() as connection:
                table = read_table(connection, options.table)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, options.schema) from error
        return PartitionTask(options, plan_layout(schema, options, table), schema, self._batch_id)

    def begin(self, partition_count: int) -> None:
        """Record with how many partitions the batch is begun, before any of them is written.

        Raises:
            ConfigurationError: It was begun with another number before.
            Unavailable: The database does not answer.
        """
        sink = self._options.sink
        if partition_count:
            try:
                with self._engine.begin() as connection:
                    self._ledger.insert(
                        connection,
                        sink,
                        self._batch_id,
                        STARTED,
                        row_count=0,
                        message_count=0,
                        partition_count=partition_count,
                    )
                    # Another driver may have been faster, with another number.
                    recorded = self._ledger.started(connection, sink, self._batch_id)
                    check_partition_count(sink, self._batch_id, recorded, partition_count)
            except exc.SQLAlchemyError as error:
                raise map_database_error(error, self._engine, self._options.schema) from error
        logger.info("%s: begun with %d partitions", self._name, partition_count)
        failpoints.hit("spark.driver_started")

    def finish(self, partition_count: int, reports: Collection[PartitionReport]) -> BatchReport:
        """Settle, and say what became of the batch.

        Raises:
            DecidedTransactionLost, OutcomeUnverifiable: Kafka does not have what the database has decided.
            DualWriteError: A task has reported success, but the ledger does not show it.
        """
        failpoints.hit("spark.driver_done")
        self._settle()
        self._raise_new_incidents()
        written = self._ledger.written(self._engine, self._options.sink, self._batch_id)
        if written.partitions != partition_count:
            raise DualWriteError(
                f"{self._name}: {written.partitions} of {partition_count} partitions are in the ledger",
                next_step="the ledger was changed by somebody else while the batch ran: find out what else was changed",
            )
        report = BatchReport(
            sink=self._options.sink,
            batch_id=self._batch_id,
            partitions=partition_count,
            rows=written.rows,
            messages=written.messages,
            written_partitions=sum(report.written for report in reports),
            written_rows=sum(report.rows for report in reports),
        )
        logger.info(
            "%s: done, %d rows in %d partitions, of which %d rows in %d partitions were written now",
            self._name,
            report.rows,
            report.partitions,
            report.written_rows,
            report.written_partitions,
        )
        return report

    @contextmanager
    def progress(self, partition_count: int) -> Generator[None, None, None]:
        """Log what is committed, from time to time, while the block runs."""
        stop = threading.Event()
        thread = threading.Thread(
            target=self._log_progress, args=(partition_count, stop), name=f"progress of {self._name}", daemon=True
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
                logger.warning("%s: progress is not known: %s", self._name, error)
                continue
            logger.info(
                "%s: %d of %d partitions written, %d rows",
                self._name,
                written.partitions,
                partition_count,
                written.rows,
            )

    def _settle(self) -> None:
        """Settle the slots that nobody holds any more, and those that tasks of this batch have left.

        Tasks of this batch that still run, of a former driver or of a cancelled job, are fenced by it.
        """
        leases = [*self._pool.expired(), *self._pool.held_by(owner_prefix(self._batch_id))]
        if not leases:
            return
        deadline = Deadline(self._options.timeout_s)
        ground = Ground(self._coordinator, self._store, unique_owner())
        rows = claim_rows(ground, sorted({lease.transactional_id for lease in leases}), deadline)
        report = settle(rows, coordinator=self._coordinator, store=self._store, deadline=deadline)
        for lease in leases:
            self._pool.release(lease)
        logger.info(
            "%s: settled %d slots, %d transactions rolled forward", self._name, len(rows), len(report.rolled_forward)
        )

    def _incidents(self) -> list[Incident]:
        return list(self._store.incidents(f"{self._pool.pool}#"))

    def _raise_new_incidents(self) -> None:
        for incident in self._incidents():
            if _identity(incident) not in self._known_incidents:
                kind = DecidedTransactionLost if incident.outcome is Outcome.LOST else OutcomeUnverifiable
                raise kind(
                    incident.detail,
                    transactional_id=incident.transactional_id,
                    state=incident.prepared_transaction_state,
                )


def _identity(incident: Incident) -> tuple[str, str]:
    return incident.transactional_id, incident.prepared_transaction_state
