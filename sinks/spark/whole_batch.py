"""The whole batch decided at once: what each task prepares, and the one decision on the driver."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from dualwrite import failpoints
from dualwrite.clock import now_s
from dualwrite.errors import DualWriteError, TransactionAborted, Unavailable
from dualwrite.protocol.batches import Way
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Participant
from dualwrite.recovery.claim import OwnerContext, unique_owner
from dualwrite.sinks.batches import Decision
from dualwrite.sinks.spark.databases.database import DROP_LOCK_TIMEOUT_S, STAGING_PREFIX, Staged, StagingTable
from dualwrite.sinks.spark.digests import RowNames
from dualwrite.sinks.spark.plan import DriverSide, connected, is_stale, uses_staging
from dualwrite.sinks.spark.quarantine import Sieve, over_limit
from dualwrite.sinks.spark.sendable import awaited
from dualwrite.sinks.spark.worker import PREPARED_TOO_LONG_AGO, AlreadyWritten, Attempt, destination_of, servers
from dualwrite.sinks.spark.writing import Progress, shown, write_rows
from dualwrite.stores.sql.dialect import DECIDES_NOTHING
from dualwrite.stores.sql.drivers import name_of
from dualwrite.stores.sql.ledger import WHOLE_BATCH
from dualwrite.telemetry import observer_if_loaded
from dualwrite.writing.dual_write import DualWrite, Ending

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlalchemy import Connection

    from dualwrite.protocol.values import Outcome, StateRow
    from dualwrite.sinks.spark.databases.database import Emptying
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.targets import Target
    from dualwrite.sinks.spark.worker import Workplace
    from dualwrite.stores.sql.ledger import Run, WrittenPartition
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)


class WholeBatch(DriverSide):
    """One run of one batch that is decided as a whole."""

    def uses_staging(self, targets: Sequence[Target], *, empty: Emptying | None) -> bool:
        """As :func:`~dualwrite.sinks.spark.plan.uses_staging`."""
        with connected(self._engine, self._options) as connection:
            return uses_staging(connection, self.database, self._options, targets, empty=empty)

    def begin(self, targets: Sequence[Target]) -> bool:
        """Record the batch's destination, before anything of it is written. Returns whether it is written already.

        It refuses a batch that was written to another destination, or partition by partition.
        """
        destination = destination_of(self.database, targets, Way.WHOLE)
        return self._ledger.begin(self._engine, self._options.sink, self._batch_id, destination)

    def end_written(self, targets: Sequence[Target], slots: Iterable[StateRow]) -> None:
        """End a batch that an earlier driver has decided on, after :meth:`settle_left`, which has returned its `slots`.

        That driver may have been killed before it noted the completion and dropped its staging tables.
        """
        self._note_completed(WHOLE_BATCH, None)
        self._drop_dead_staging(targets, slots)

    def written(self) -> WrittenPartition:
        """The ledger's record of the batch, which is written."""
        written = self._ledger.partition(self._engine, self._options.sink, self._batch_id, WHOLE_BATCH)
        assert written is not None
        return written

    def decide(
        self,
        targets: Sequence[Target],
        prepared: Collection[PreparedPartition],
        *,
        empty: Emptying | None,
        sources: str | None = None,
    ) -> bool:
        """Decide on everything that the tasks have prepared, in one database transaction; then complete it in Kafka.

        On return the rows are in the table, the messages are visible, and the ledger names the batch. False if it was already
        written. `empty` empties the tables first, or a part of each, in the same transaction. `sources`, for display, says what
        the batch is made of.

        Raises:
            ConfigurationError: The batch was written to another destination meanwhile; nothing of it is written to this one.
            TransactionAborted: Nothing of the batch is written. Run it again.
            Fenced: Another driver of the same batch has taken over; it decides.
            TransactionInDoubt: The answer to COMMIT is missing, and the database does not answer. Run the batch again: what
                is already written is skipped.
            CompletionPending: Decided. Run the batch again: nothing is written twice, and Kafka's part is completed.
            DecidedTransactionLost, OutcomeUnverifiable: Rows are in the database; their messages are lost, or their outcome
                cannot be verified. The loss is recorded.
        """
        deciding = _Deciding(self, targets, prepared, empty=empty, sources=sources)
        decision = Decision(
            deciding,
            prepared,
            OwnerContext(self._coordinator, self._store, unique_owner(), observer_if_loaded()),
            connect=self._engine.connect,
            timeout_s=self._options.timeout_s,
            idle_s=self._options.margin_s / 2,  # leaves the other half for COMMIT and for Kafka
            participants=deciding.participants,
            record=deciding.outcomes.extend,
        )
        written = decision.run()
        ended = deciding.ended
        if not ended.is_all:
            self._note_completed(WHOLE_BATCH, deciding.decided_ago_s())
        logger.info("%s: completed", self.name)
        if not ended.has_dropped:
            self.database.drop_staging(_staged(deciding.released))
        if ended.dead_staging or not ended.is_all:
            self._drop_dead_staging(targets, deciding.slots or self._store.find(f"{self._pool.pool}#"))
        failpoints.hit("batch.completed")
        if not ended.is_all:  # else nothing was claimed, and each transaction was seen to be committed
            self._raise_new_incidents()
        self.announce()
        return written

    def record(
        self,
        connection: Connection,
        targets: Sequence[Target],
        prepared: Sequence[PreparedPartition],
        sources: str | None,
    ) -> bool:
        """Insert the batch's row into the ledger. False if it is already there."""
        options, destination = self._options, destination_of(self.database, targets, Way.WHOLE)
        if self._is_planned:
            self._note_incidents(connection)
        if self._ledger.begin(connection, options.sink, self._batch_id, destination):
            return False
        rows, quarantined = (
            sum(counts) for counts in ((one.rows for one in prepared), (one.quarantined for one in prepared))
        )
        if quarantined > options.most_quarantined:
            raise over_limit(options, f"the batch has {quarantined} of them")
        return self._ledger.insert(
            connection,
            options.sink,
            self._batch_id,
            WHOLE_BATCH,
            row_count=rows,
            message_count=rows - (0 if options.quarantine_topic is not None else quarantined),
            partition_count=max(1, len(prepared)),
            started_at=min((one.started_at for one in prepared), default=None),
            byte_count=sum(one.bytes for one in prepared),
            sources=sources,
        )

    def run_deferred(self, connection: Connection) -> None:
        """Run what the rows have left to COMMIT."""
        self._store.run_deferred(connection)

    def require_leases(self, connection: Connection, prepared: Sequence[PreparedPartition]) -> None:
        """Lock every part's lease until the transaction ends. Raise TransactionAborted if one has ended."""
        held = self._pool.held_in(connection, {one.transactional_id for one in prepared})
        late = [one for one in prepared if held.get(one.transactional_id) != one.owner]
        if late:
            raise TransactionAborted(
                f"{self.name}: {len(late)} of {len(prepared)} partitions were prepared too long ago, or taken over by "
                "another driver",
                transactional_id=late[0].transactional_id,
                next_step=PREPARED_TOO_LONG_AGO,
            )

    def is_written(self) -> bool:
        """Whether the ledger names the batch."""
        return self._ledger.seen(self._engine, self._options.sink, self._batch_id, WHOLE_BATCH)

    def end_completed(
        self,
        targets: Sequence[Target],
        completed: Sequence[PreparedPartition],
        outcomes: Sequence[tuple[StateRow, Outcome, str]],
        decided_ago_s: float | None,
    ) -> Ended | None:
        """Record completed parts, give back their slots, end the run, look for what tasks have left, and note the completion.

        All in one transaction. None on failure: the slots must then be claimed like the others.
        """
        own = _staged(completed)
        tables = {staged.table for staged in own}

        def work(connection: Connection, *, drops: bool) -> Ended:
            self._store.record_outcomes(outcomes, connection)
            for rests in (True, False):
                owners = {one.transactional_id: one.owner for one in completed if one.rests is rests}
                self._pool.release(owners, kept=rests, connection=connection)
            left = self._end_run(connection, prepared=any(one.in_targets for one in completed))
            if not left.has_ended or left.leases or any(is_stale(one) for one in left.prepared):
                return Ended(is_all=False)
            sink = self._options.sink
            self._ledger.complete(connection, sink, self._batch_id, WHOLE_BATCH, decided_ago_s=decided_ago_s)
            found = [staged for at in _schemas(targets) for staged in self.database.find_staging(connection, at)]
            dead = any(staged.table not in tables for staged in found)
            dropped = drops and self.database.drop_staging_in(connection, own)
            return Ended(is_all=True, dead_staging=dead, has_dropped=dropped)

        try:
            try:
                ended = self._store.own_transaction(
                    partial(work, drops=True), lock_timeout_s=DROP_LOCK_TIMEOUT_S, light=self._ends_light
                )
            except Unavailable:  # a backup may read a staging table
                ended = self._store.own_transaction(partial(work, drops=False), light=self._ends_light)
        except DualWriteError as error:
            logger.warning("%s: its slots are claimed to free them: %s", self.name, error)
            return None
        failpoints.hit("complete.recorded")
        failpoints.hit("slot.released")
        return ended

    def settle_all(self) -> Sequence[StateRow]:
        """Settle whatever is left of the batch. Returns the rows of all the sink's slots, as they are then."""
        return self._settle()

    def give_up(self, targets: Sequence[Target]) -> None:
        """Abort parts that are prepared and undecided; complete those that are decided.

        On return, tasks that still run cannot prepare anything any more. A loss is raised as by :meth:`decide`.
        """
        self._note_failed()
        slots = self._settle()
        self._drop_dead_staging(targets, slots)
        self._raise_new_incidents()

    def _drop_dead_staging(self, targets: Sequence[Target], slots: Iterable[StateRow]) -> None:
        incarnations = {row.transactional_id: row.incarnation for row in slots}
        for schema in _schemas(targets):
            self.database.drop_dead_staging(
                schema,
                incarnations,
                lambda: {lease.transactional_id: lease.owner for lease in self._pool.held_by("")},
            )


def _staged(parts: Iterable[PreparedPartition]) -> list[StagingTable]:
    return [part.staged for one in parts for part in one.parts if part.staged is not None]


def _schemas(targets: Sequence[Target]) -> Sequence[str]:
    return list(dict.fromkeys(target.layout.table[0] for target in targets if target.in_table))


@dataclass(frozen=True)
class Ended:
    """What :meth:`WholeBatch.end_completed` has found.

    `is_all` says that nothing is left to settle. `dead_staging`: there are staging tables that are not of this batch;
    `has_dropped`: those of the batch are gone.
    """

    is_all: bool
    dead_staging: bool = False
    has_dropped: bool = False


class _Deciding:
    """The decision on one batch; implements :class:`~dualwrite.sinks.batches.Batch`.

    `outcomes` are those of the completed parts, for :meth:`settle` to record. After that, the slots of the parts in `released`
    went back to the pool without a claim. If `ended.is_all`, that was all, and the ledger says so; otherwise `slots` has the
    rows of all the sink's slots.
    """

    def __init__(
        self,
        driver: WholeBatch,
        targets: Sequence[Target],
        prepared: Collection[PreparedPartition],
        *,
        empty: Emptying | None,
        sources: str | None,
    ) -> None:
        self._sources = sources
        self._driver = driver
        self._targets = targets
        self._prepared = sorted(prepared, key=lambda one: one.transactional_id)
        self._empty = empty
        self._decided_at: float | None = None
        self.name = driver.name
        self.slots: Sequence[StateRow] = ()
        self.released: Sequence[PreparedPartition] = ()
        self.outcomes: list[tuple[StateRow, Outcome, str]] = []
        self.ended = Ended(is_all=False)

    def record(self, connection: Connection) -> bool:
        return self._driver.record(connection, self._targets, self._prepared, self._sources)

    def require_held(self, connection: Connection) -> None:
        self._driver.require_leases(connection, self._prepared)

    def bring(self, connection: Connection) -> None:
        database = self._driver.database
        names = [name_of(one.namespace, one.prepared) for one in self._prepared if one.in_targets]
        if names:
            database.require_prepared(connection, names, self.name)
        in_order = sorted(self._prepared, key=attrgetter("partition"))  # of equal rows the last one counts
        for number, target in enumerate(self._targets):
            staged = [
                Staged(part.staged, part.rows, one.partition)
                for one in in_order
                for part in one.parts
                if part.target == number and part.staged is not None
            ]
            self._bring_into(connection, target.layout, staged, None if target.is_quarantine else self._empty)
        if self._empty is not None or not all(one.in_targets for one in self._prepared):  # else no row was moved
            self._driver.run_deferred(connection)

    def _bring_into(
        self, connection: Connection, layout: Layout, staged: Sequence[Staged], empty: Emptying | None
    ) -> None:
        database = self._driver.database
        if empty is not None:
            database.empty(connection, layout.table, empty)
        if staged and empty is not None and empty.where is not None:
            database.require_within(connection, staged, layout, empty)
        if staged:
            database.take_over(connection, staged, layout)
            # Tasks with prepared rows have checked the types, and their locks keep them. Others leave both tables to us.
            tables = [layout.table, *(one.table.table for one in staged)]
            database.require_types(connection, tables, layout.table_types, shown_name=layout.table[1])

    def participants(self, rows: Sequence[StateRow]) -> Sequence[Participant]:
        """What the tasks have prepared in the database: each has told its name, so that nobody has to look for it."""
        prepared = {one.transactional_id for one in self._prepared if one.in_targets}
        return [
            Participant(
                row, row.incarnation, name_of(row.namespace, row.prepared), decided=True, prepared_at=row.updated_at
            )
            for row in rows
            if row.transactional_id in prepared
        ]

    def decided(self) -> None:
        self._decided_at = time.monotonic()
        logger.info(
            "%s: decided, %d rows, %s in %d partitions%s",
            self.name,
            sum(one.rows for one in self._prepared),
            shown(sum(one.bytes for one in self._prepared)),
            len(self._prepared),
            self._driver.words_of_quarantined(sum(one.quarantined for one in self._prepared)),
        )

    def decided_ago_s(self) -> float | None:
        """Seconds since the decision; None if an earlier call decided."""
        return None if self._decided_at is None else time.monotonic() - self._decided_at

    def is_written(self) -> bool:
        return self._driver.is_written()

    def settle(self, completed: Collection[str]) -> None:
        done = [one for one in self._prepared if one.transactional_id in completed]
        if done:
            ended = self._driver.end_completed(self._targets, done, self.outcomes, self.decided_ago_s())
            if ended is not None:
                self.released, self.ended = done, ended
        if not self.ended.is_all:
            self.slots = self._driver.settle_all()


# A task of a batch that is decided as a whole: sends its rows and messages to both servers, and decides nothing.
#
# Its rows are committed to a staging table that no user reads, or prepared in the target and so invisible. Its messages
# are flushed in a Kafka transaction that stays open, invisible to `read_committed` consumers. The task hands the names
# of both to the driver.


@dataclass(frozen=True)
class TargetPart:
    """The rows of one task for the target of that number. `staged` is None if they are in the target itself, prepared."""

    target: int
    rows: int
    staged: StagingTable | None


@dataclass(frozen=True)
class PreparedPartition:
    """The part of a batch that one task has prepared. Pickles; holds no secret.

    `started_at` is by the database's clock. `in_targets` says that no staging tables were used: then a transaction is prepared
    in the database, with the rows in their targets, or without any, if all were put aside into a topic. `incarnation` and
    `namespace` are of the slot's row, which with `prepared` names that transaction (:func:`name_of`). `parts` are the rows by
    target.
    `rests` says that the worker could continue with the slot's lane. `quarantined` of the rows were put aside, `seconds` is how
    long the task took.
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
    in_targets: bool
    parts: tuple[TargetPart, ...]
    rests: bool
    quarantined: int = 0
    seconds: float = 0.0


def rows_by_target(targets: Sequence[Target], prepared: Iterable[PreparedPartition]) -> dict[int, int]:
    """How many rows there are for each target, by its number. Those that were put aside may be in no table."""
    rows: Counter[int] = Counter()
    for one in prepared:
        rows.update({part.target: part.rows for part in one.parts if not targets[part.target].is_quarantine})
        if one.quarantined:
            rows[len(targets) - 1] += one.quarantined
    return rows


def prepare_partition(
    options: SinkOptions,
    targets: Sequence[Target],
    batch_id: str,
    batches: Iterable[tuple[int, pa.RecordBatch]],
    *,
    partition: int,
    number: int,
    run: Run | None,
    staging: bool,
) -> PreparedPartition | None:
    """Send one partition to both servers, undecided. None if the batch is already written, or the partition is empty.

    On return the rows are durable in the database, and the messages in an open Kafka transaction. The slot stays leased for as
    long as the broker is certain to keep that transaction open, less the margin, and ``decide_within_s`` at most. After an
    error, this attempt prepared nothing that could be decided.

    `batches` are projected, each for the target of its number; their normal end means that the partition is complete. With
    `staging`, the rows of each target go into a staging table rather than into the target in a prepared transaction.
    """
    failpoints.hit("spark.task_started")
    rows = awaited(batches)
    if rows is None:
        return None  # needs no connection: most partitions of a shuffle may be empty
    with servers(options) as found:
        attempt = Attempt(found, batch_id, partition, number, run)
        try:
            undecided = _prepare(attempt, targets, rows, staging=staging)
        except AlreadyWritten:
            logger.info("%s: the batch is already written", attempt.name)
            return None
    failpoints.hit("spark.task_done")
    return undecided


def _prepare(
    attempt: Attempt, targets: Sequence[Target], batches: Iterable[tuple[int, pa.RecordBatch]], *, staging: bool
) -> PreparedPartition:
    options, database = attempt.options, attempt.database
    progress, began_s = Progress(attempt.name, options.progress_s), now_s()
    sieve = Sieve(options, targets, database, attempt.batch_id, attempt.partition)
    sifted = sieve.sift(batches) if options.quarantines else batches
    try:
        with attempt.workplace(destination_of(database, targets, Way.WHOLE)) as place:
            row = place.lane.row

            def permit(connection: Connection) -> None:
                if staging:
                    attempt.keep_in(connection, place.slot, _lifetime_s(attempt, place))
                else:
                    _require_sent(transaction)
                    attempt.require_written(connection, filling.targets_written())

            with (
                attempt.observed(place) as observer,
                attempt.engine.connect().execution_options(**DECIDES_NOTHING) as connection,
                DualWrite(
                    place.lane,
                    place.context,
                    connection,
                    margin_s=options.margin_s,
                    timeout_s=options.timeout_s,
                    savepoints=False,
                    ending=Ending.HAND_OVER if staging else Ending.PREPARE,
                    permit=permit,
                    defers=any(target.layout.defers for target in targets),
                    observer=observer,
                ) as transaction,
            ):
                inside = transaction.connection
                if not staging:
                    database.before_prepared(inside)
                filling = _Filling(attempt, targets, transaction, progress, place if staging else None)
                # One COPY for as long as the target stays the same: a partition of one target has one.
                for number, rows in groupby(sifted, key=itemgetter(0)):
                    filling.fill(number, map(itemgetter(1), rows))
                failpoints.hit("spark.rows_copied")
            assert transaction.prepared is not None
            if not staging:
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
        in_targets=not staging,
        parts=filling.parts(),
        rests=place.slot.rests,
        quarantined=sieve.count,
        seconds=now_s() - began_s,
    )


def _require_sent(transaction: Transaction) -> None:
    """Refuse to prepare rows without a message: a prepared transaction is named after the one in Kafka."""
    if transaction.prepared is None or not transaction.prepared.has_transaction:
        raise TransactionAborted(
            "no row of the partition has a message, since its table takes none of them: such rows cannot be prepared",
            next_step='name a quarantine_topic (quarantineTopic), or set database_leg (databaseLeg) to "staging"',
            retryable=False,
        )


class _Filling:
    """Brings the rows of one task into the tables of their targets: staging tables in the slot of `place`, if it is given."""

    def __init__(
        self,
        attempt: Attempt,
        targets: Sequence[Target],
        transaction: Transaction,
        progress: Progress,
        place: Workplace | None,
    ) -> None:
        self._attempt = attempt
        self._targets = targets
        self._transaction = transaction
        self._progress = progress
        self._place = place
        self._names: dict[int, RowNames] = {}
        self._staged: dict[int, StagingTable] = {}
        self._rows: Counter[int] = Counter()

    def fill(self, number: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Write rows of one target on both sides. Its staging table is made for its first ones."""
        attempt, target = self._attempt, self._targets[number]
        if number not in self._names:
            self._names[number] = RowNames(attempt.partition, target.layout)
            if self._place is not None and target.in_table:
                self._staged[number] = _new_staging(target.layout, self._place)
                attempt.database.create_staging(self._transaction.connection, self._staged[number], target.layout)
        staged, before = self._staged.get(number), self._progress.rows
        write_rows(
            self._transaction,
            batches,
            target,
            target.layout.table if staged is None else staged.table,
            attempt.options,
            database=attempt.database,
            names=self._names[number],
            progress=self._progress,
            prepared=staged is None,
        )
        self._rows[number] += self._progress.rows - before

    def targets_written(self) -> Sequence[Layout]:
        """The layouts of the targets that have rows by now. A merge has checked its target itself."""
        layouts = [self._targets[number].layout for number in self._rows if self._targets[number].in_table]
        return [layout for layout in layouts if layout.merge is None]

    def parts(self) -> tuple[TargetPart, ...]:
        """What was written, by target."""
        return tuple(
            TargetPart(number, rows, self._staged.get(number))
            for number, rows in sorted(self._rows.items())
            if self._targets[number].in_table
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
