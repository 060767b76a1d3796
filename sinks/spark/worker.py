"""One attempt of a task: its name, slot and lane; what a reused worker keeps; what dead tasks left behind."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from pyspark import TaskContext

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import DualWriteError, Fenced, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.protocol.batches import Destination, Way
from dualwrite.protocol.values import owner_prefix
from dualwrite.recovery.claim import OwnerContext, claim_rows, default_owner, unique_owner
from dualwrite.recovery.settle import SettleReport, settle
from dualwrite.sinks.spark.databases.database import open_database, values_of
from dualwrite.stores.sql.leases import SlotLease, SlotPool
from dualwrite.stores.sql.ledger import Ledger, Runs
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.telemetry import observer_if_loaded
from dualwrite.writing.lane import Lane

if TYPE_CHECKING:
    from sqlalchemy import Connection, Select, Update

    from dualwrite.interfaces import WriteObserver
    from dualwrite.protocol.values import StateRow
    from dualwrite.sinks.spark.databases.database import SinkDatabase
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.targets import Target
    from dualwrite.stores.sql.ledger import Run, WrittenPartition

logger = logging.getLogger(__name__)

_SHOWN: Final = 8
# The advice on a batch of which a part has outlasted its time.
PREPARED_TOO_LONG_AGO: Final = (
    "run the batch again; if this comes again, make it smaller, or raise decide_within_s and the broker's "
    "transaction.max.timeout.ms"
)


class AlreadyWritten(Exception):
    """Leaves the lease when the ledger says that all is written."""


@dataclass(frozen=True)
class Workplace:
    """The lane and slot of an attempt. The lane is ready for one dual write, and uses the slot's id."""

    lane: Lane
    context: OwnerContext
    slot: Slot


class Attempt:
    """One attempt at one partition. Its number is for people; the run is None if it is not known."""

    def __init__(self, servers: WorkerCache, batch_id: str, partition: int, number: int, run: Run | None) -> None:
        self.options = options = servers.options
        self.batch_id = batch_id
        self.partition = partition
        self.database = servers.database
        self.engine = servers.engine
        self.ledger = servers.ledger
        self._servers = servers
        self._run = run
        self._of = (run, batch_id)
        self.name = f"sink {options.sink!r} batch {batch_id!r} partition {partition} attempt {number}"
        self._run_name = run.name if run is not None else batch_id
        self._run_mark = f" run {run.token[:_SHOWN]} " if run is not None else " "
        self._prefix = owner_prefix(self._run_name, partition)
        self._owner = f"{self._prefix}attempt {number}{self._run_mark}{secrets.token_hex(4)} {default_owner()}"

    def seen(self, partition_id: int) -> bool:
        """Whether the ledger has that partition of the batch."""
        return self.ledger.seen(self.engine, self.options.sink, self.batch_id, partition_id)

    def written(self) -> WrittenPartition | None:
        """The ledger's record of this partition; None if it is not written."""
        return self.ledger.partition(self.engine, self.options.sink, self.batch_id, self.partition)

    def seen_after(self, error: Exception, partition_id: int) -> bool:
        """Whether the ledger has that partition despite the error: another attempt may be the cause of our failure."""
        try:
            seen = self.seen(partition_id)
        except DualWriteError as more:
            logger.warning("%s: the ledger could not be read after a failure: %s", self.name, more)
            return False
        if seen:
            logger.info("%s: already written; this attempt failed: %s", self.name, error)
        return seen

    def require_run(self, connection: Connection) -> None:
        """Continue only while the run has not been given up, which raises `Fenced`; see :meth:`Runs.require`."""
        if self._run is not None:
            self._servers.runs.require(connection, self._run)

    def require_written(
        self, connection: Connection, layouts: Sequence[Layout], beside: Sequence[Select[Any]] = ()
    ) -> Sequence[object]:
        """:meth:`require_run`, and abort unless the tables still have the types that the rows were made for.

        Returns what the queries `beside` find, each one value or None: in one statement, where the database can, for the last
        table.
        """
        held = [] if self._run is None else [self._servers.runs.holding(self._run)]
        asked, values = [*held, *beside], cast("Sequence[object]", ())
        if not layouts:
            self.require_run(connection)
            return values_of(connection, beside)
        for place, layout in enumerate(layouts, 1):
            values = self.database.require_types(
                connection,
                [layout.table],
                layout.table_types,
                shown_name=layout.table[1],
                beside=asked if place == len(layouts) else (),
            )
        if held and values[0] is None:
            self.require_run(connection)  # which says why
            raise IllegalStateError(f"{self.name}: its run was not found, and then it was")
        return values[len(held) :]

    def _require_in_time(self, former: str) -> None:
        """Fail at once if the slot that we would take holds another partition that this run has prepared.

        Its time to be decided is over, and with it that of the whole batch: taking the slot would only hide why.
        """
        of_this_run = former.startswith(owner_prefix(self._run_name)) and self._run_mark in former
        if of_this_run and self._run is not None and not former.startswith(self._prefix):
            raise TransactionAborted(
                f"{self.name}: another partition of this run was prepared too long ago, and can no longer be decided",
                next_step=PREPARED_TOO_LONG_AGO,
            )

    def settle_former(self) -> SettleReport:
        """Settle what other attempts at this partition have left: fences them, and undoes what they have prepared."""
        pool = self._servers.pool
        former = pool.held_by(self._prefix)
        deadline = Deadline(self.options.timeout_s)
        return settle_leases(self._servers.context, pool, former, deadline, name=self.name, prefix=self._prefix)

    @contextmanager
    def observed(self, place: Workplace) -> Generator[WriteObserver, None, None]:
        """Observe this attempt's dual write like a writer's, if the worker has loaded OpenTelemetry."""
        with place.context.observer.writing(self.options.pool, self.engine.dialect.name) as observer:
            observer.lane(place.lane.transactional_id)
            yield observer

    def keep_in(self, connection: Connection, slot: Slot, seconds: float) -> None:
        """As :meth:`Slot.keep_in`, and only as :meth:`require_run` lets it, in one statement."""
        run = self._run
        held = None if run is None else self._servers.runs.holding(run)
        try:
            slot.keep_in(connection, self._servers.pool, seconds, held)
        except Fenced:
            self.require_run(connection)  # which says so if that is why
            raise

    def _lease_again(self, destination: Destination | None) -> SlotLease | None:
        """Lease a slot whose lane rests here, in one statement. None if that does not work: :meth:`SlotPool.lease` then."""
        options, run = self.options, self._run
        if destination is None:
            begins = partial(self.ledger.unless_written, options.sink, self.batch_id)
        else:
            begins = partial(self.ledger.beginning, self.engine, options.sink, self.batch_id, destination)
        held = None if run is None else self._servers.runs.holding(run, waits=False)
        found = self._servers.pool.lease_again(
            self._owner,
            options.lease_s,
            self._servers.resting_rows(self._of),
            of=(self._of, destination),
            run=held,
            begins=begins,
            bound={"partition_": self.partition} if destination is None else {},
        )
        if found is None:
            return None
        lease, row = found
        self._servers.note_rows({row.transactional_id: row})
        return lease

    @contextmanager
    def workplace(self, destination: Destination | None = None) -> Generator[Workplace, None, None]:
        """Lease a slot, and continue with the lane that rests here for it; else claim it, and create a producer.

        After a successful block, the lane rests again. After an error it is discarded. `destination` is that of a batch that is
        written as a whole: the transaction that leases the slot also records it. A stream's driver cannot do this: it learns
        the batch's name from the tasks.

        `AlreadyWritten`, with nothing leased, says that the batch is, or without a destination the partition. `Fenced` means
        that the run was given up, or the slot was settled meanwhile; `TransactionAborted`, that the run has prepared a
        partition too long ago.
        """
        servers, lease_s, pool = self._servers, self.options.lease_s, self._servers.pool

        def require(connection: Connection) -> None:
            self.require_run(connection)
            batch = (connection, self.options.sink, self.batch_id)
            if (
                self.ledger.seen(*batch, self.partition)
                if destination is None
                else self.ledger.begin(*batch, destination)
            ):
                raise AlreadyWritten

        with leased_slot(
            pool,
            self._owner,
            lease_s,
            again=lambda: self._lease_again(destination),
            preferred=partial(servers.resting, self._of),
            require=require,
            ended=self._require_in_time,
            recording=servers.recording,
        ) as slot:
            lane = servers.take(slot.lease.transactional_id)
            slot.rests = servers.has_room
            try:
                known = lane.incarnation
                lane.ready(Deadline(self.options.timeout_s))
                if lane.incarnation != known:
                    # If the lease is lost, its settler may have claimed the slot before our claim, and would not return to
                    # settle. Without a claim of ours, its own one fences us.
                    pool.renew(slot.lease, lease_s)
                yield Workplace(lane, servers.context, slot)
            except BaseException:
                lane.discard()
                raise
            servers.keep(lane, None if slot.kept_until is None else self._of)


# Keeps connections, and lanes with their producers, from task to task in a reused Python worker.
#
# A task then needs no claim and no new producer. Nothing relies on the cache: a lane continues only if its row says
# that it may (`dualwrite.writing.lane.Lane.may_go_on`), and is claimed again otherwise. The cache ends with the
# process, which Spark ends after the worker has been idle for a minute.

_MOST_LANES: Final = 8
_MOST_SINKS: Final = 4


class WorkerCache:
    """One sink's connections in this process, and the lanes that rest on them. For one task at a time."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self._config = options.kafka_config()
        self.database = open_database(options)
        self.engine = self.database.engine
        self._store = SqlStateStore(self.engine, schema=options.schema)
        self.context = OwnerContext(KafkaCoordinator(self._config), self._store, unique_owner(), observer_if_loaded())
        self.ledger = Ledger(options.schema, options.tables_revision)
        self.runs = Runs(self.engine, options.schema)
        self.pool = SlotPool(self.engine, options.pool, schema=options.schema, max_slots=options.max_slots)
        self._resting: dict[str, tuple[Lane, object]] = {}  # with the batch whose driver holds its slot
        self._rows: Mapping[str, StateRow | None] = {}
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process created it: a forked process must not use it."""
        return self._pid == os.getpid()

    @property
    def outlives_its_task(self) -> bool:
        """Whether it stays for the next task in this process."""
        return self.options.keep_slots and TaskContext.get() is not None

    @property
    def has_room(self) -> bool:
        """Whether one more lane can rest here."""
        return self.outlives_its_task and len(self._resting) < _MOST_LANES

    def resting(self, of: object, connection: Connection) -> Sequence[str]:
        """The transactional ids of the lanes that rest here, the last one used first; see :meth:`resting_rows`.

        Leaves those out whose row another process has claimed: they would only get in the way of the new owner. Reads the rows
        in the caller's transaction.
        """
        names = [row.transactional_id for row in self.resting_rows(of)]
        rows = self._store.read_in(connection, names) if names else ()
        self.note_rows({**dict.fromkeys(names), **{row.transactional_id: row for row in rows}})
        return [name for name in names if self._is_ours(self._resting[name][0])]

    def resting_rows(self, of: object) -> Sequence[StateRow]:
        """The rows of the lanes that rest here, as these know them, the last one used first.

        Without those whose slots were left to the driver of this batch: until it has decided, it holds them.
        """
        return [lane.row for lane, handed_to in reversed(self._resting.values()) if handed_to != of]

    def note_rows(self, rows: Mapping[str, StateRow | None]) -> None:
        """Note the rows as they were read for :meth:`take`; None for one that is not there."""
        self._rows = rows

    def _is_ours(self, lane: Lane) -> bool:
        row = self._rows.get(lane.transactional_id)
        return row is not None and (row.namespace, row.incarnation) == (lane.row.namespace, lane.row.incarnation)

    def take(self, transactional_id: str) -> Lane:
        """Take the lane that rests here if it may continue; else create a new one, which must be claimed.

        The transaction that has leased the slot has read its row, and perhaps those of the others (:meth:`note_rows`). Lanes
        that others have claimed are discarded.
        """
        for name in [one for one in self._rows if one in self._resting and not self._is_ours(self._resting[one][0])]:
            self._resting.pop(name)[0].discard()
        lane, _ = self._resting.pop(transactional_id, (None, None))
        if lane is None:
            return self._new_lane(transactional_id)
        if lane.may_go_on(self._rows.get(transactional_id)):
            return lane
        lane.discard()
        return self._new_lane(transactional_id)

    def recording(self, slot: Slot) -> Update | None:
        """What records the outcome that an attempt has left to the slot, if it has."""
        return None if slot.completed is None else self._store.completing(slot.completed, "committed by its owner")

    def keep(self, lane: Lane, handed_to: object) -> None:
        """Let a lane rest here if there is room; else discard it. `handed_to` is the batch whose driver holds its slot."""
        if self.has_room:
            self._resting[lane.transactional_id] = lane, handed_to
        else:
            lane.discard()

    def close(self) -> None:
        """Close everything. Transactions that were handed over stay open."""
        for lane, _ in self._resting.values():
            lane.discard()
        self._resting.clear()
        self.context.coordinator.close()
        self.engine.dispose()

    def _new_lane(self, transactional_id: str) -> Lane:
        return Lane(transactional_id, self.context, self._make_producer)

    def _make_producer(self, row: StateRow) -> LaneProducer:
        return LaneProducer(
            self._config,
            row.kafka_id(row.incarnation),
            coordinator=self.context.coordinator,
            incarnation=row.incarnation,
            call_timeout_s=self.options.timeout_s,
            bulk=True,
            engine=self._config.engine,
        )


# By pool; excludes those in use.
_kept: Final[dict[str, WorkerCache]] = {}


@contextmanager
def servers(options: SinkOptions) -> Generator[WorkerCache, None, None]:
    """The sink's connections and lanes: those that an earlier task left here, or new ones.

    They are closed when the block ends: outside of a Spark task, if the sink keeps nothing, and after an error.
    """
    found = _taken(options) or WorkerCache(options)
    try:
        yield found
    except BaseException:
        found.close()
        raise
    if found.outlives_its_task:
        _keep(found)
    else:
        found.close()


def _taken(options: SinkOptions) -> WorkerCache | None:
    found = _kept.pop(options.pool, None)
    if found is None or not found.is_ours:
        return None
    if found.options != options:
        found.close()
        return None
    return found


def _keep(found: WorkerCache) -> None:
    former = _kept.pop(found.options.pool, None)
    if former is not None:  # left by a task that ran at the same time in this process
        former.close()
    _kept[found.options.pool] = found
    if len(_kept) > _MOST_SINKS:
        _kept.pop(next(iter(_kept))).close()


def running_task() -> TaskContext:
    """The context of the Spark task that calls; `IllegalStateError` outside of one."""
    context = TaskContext.get()
    if context is None:
        raise IllegalStateError("this function runs in a Spark task only")
    return context


_calls: Final = count()


def spare_collections() -> None:
    """Keep Spark's garbage collection after each call of a reused process from looking at all imported modules each time.

    To be called at the beginning of each call in a process that Spark has started. The collection takes longer than a task of
    few rows. At the second call, what is alive after the first one's collection is looked at no more: the imported modules, and
    the little that the two calls have made.
    """
    if next(_calls) == 1:
        gc.freeze()


# A slot in use: leased at the start, renewed while the task runs, returned after success.

_RENEWALS_PER_LEASE = 3


class Slot:
    """A slot in use. The lease's id is its transactional id; `leased_at` is by the database's clock.

    `rests` says that the worker will keep the lane that uses it. `completed` is the lane's row if its outcome is to be recorded
    as the slot is given back.
    """

    def __init__(self, lease: SlotLease, leased_at: datetime) -> None:
        self.lease = lease
        self.leased_at = leased_at
        self.kept_until: datetime | None = None
        self.rests = False
        self.is_kept = False
        self.completed: StateRow | None = None
        self._leased_s = now_s()
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None

    def keep_for(self, seconds: float) -> None:
        """Leave the slot leased after the block: the driver will decide on the part prepared in it.

        The time counts from now, not from the block's end or from the database's update: the broker does not wait for a
        paused worker.
        """
        self.kept_until = self.leased_at + timedelta(seconds=now_s() - self._leased_s + seconds)

    def keep_in(
        self, connection: Connection, pool: SlotPool, seconds: float, condition: Select[Any] | None = None
    ) -> None:
        """As :meth:`keep_for`, in the transaction that hands the part over: its COMMIT keeps the slot, too.

        No transaction that ends prepared may do it: until it is resolved, the lease would stay as it was. The `condition` is
        that of :meth:`SlotPool.keep`.
        """
        self.keep_for(seconds)
        assert self.kept_until is not None
        self.end_renewals()
        pool.keep(self.lease, self.kept_until, connection, condition)
        self.is_kept = True

    def renew(self, pool: SlotPool, lease_s: float) -> None:
        """Renew the lease from time to time, until :meth:`end_renewals`."""
        self._renewer = threading.Thread(
            target=_renew,
            args=(pool, self.lease, lease_s, self._stop),
            name=f"lease of {self.lease.transactional_id}",
            daemon=True,
        )
        self._lease_s = lease_s
        self._renewer.start()

    def end_renewals(self) -> None:
        """Renew no more; raise `Unavailable` if a renewal that was sent may still come."""
        self.stop()
        if self._renewer is not None and self._renewer.is_alive():
            raise Unavailable(
                "the lease could not be kept: a renewal of it may come later",
                transactional_id=self.lease.transactional_id,
            )

    def stop(self) -> None:
        """Renew no more. A hanging database holds the task no longer than its lease."""
        self._stop.set()
        if self._renewer is not None:
            self._renewer.join(self._lease_s)


@contextmanager
def leased_slot(
    pool: SlotPool,
    owner: str,
    lease_s: float,
    *,
    again: Callable[[], SlotLease | None] = lambda: None,
    preferred: Callable[[Connection], Sequence[str]] = lambda _: (),
    require: Callable[[Connection], None] = lambda _: None,
    ended: Callable[[str], None] = lambda _: None,
    recording: Callable[[Slot], Update | None] = lambda _: None,
) -> Generator[Slot, None, None]:
    """Lease a slot and keep the lease alive until the block ends.

    Leaving the block normally returns the slot, unless :meth:`Slot.keep_for` was called; then it raises `Fenced` if another
    process has leased it, and `Unavailable` if the database does not answer. An exception leaves the lease as it is: the
    driver settles what the task left behind, or the next holder of the slot does once the lease has ended. Losing the lease
    meanwhile does no harm: the next holder claims the slot's id, and that fences us.

    `again` may lease a slot in a shorter way; `recording` makes what is recorded as the slot is returned. The other arguments
    are those of :meth:`SlotPool.lease`; `preferred` are slots that the worker could continue with.
    """
    lease = again() or pool.lease(owner, lease_s, preferred=preferred, require=require, ended=ended)
    slot = Slot(lease, lease.until - timedelta(seconds=lease_s))
    slot.renew(pool, lease_s)
    try:
        yield slot
    finally:
        slot.stop()
    if slot.is_kept:
        return
    if slot.kept_until is not None:
        slot.end_renewals()
        pool.keep(lease, slot.kept_until)
        return
    try:
        pool.release({lease.transactional_id: lease.owner}, kept=slot.rests, beside=recording(slot))
    except DualWriteError as error:
        logger.warning(
            "%s: the slot was not given back; its lease will end by itself: %s", lease.transactional_id, error
        )


def _renew(pool: SlotPool, lease: SlotLease, lease_s: float, stop: threading.Event) -> None:
    while not stop.wait(lease_s / _RENEWALS_PER_LEASE):
        try:
            pool.renew(lease, lease_s)
        except Fenced as error:
            logger.warning("the lease is lost, the write will be refused: %s", error)
            return
        except DualWriteError as error:
            logger.warning("%s: the lease was not renewed; retrying: %s", lease.transactional_id, error)


# Settles the slots that a batch's tasks have left.


def settle_leases(
    context: OwnerContext, pool: SlotPool, leases: Collection[SlotLease], deadline: Deadline, *, name: str, prefix: str
) -> SettleReport:
    """Take leases over, claim their slots, settle them, and free them. A task that still writes on one is fenced.

    Our own name in the leases begins with `prefix`, so that later settlers find what we could not finish. Losses are recorded
    and reported, not raised.
    """
    # Before the claim: a task that claims its slot after us then finds by its lease that it is too late.
    taken = pool.take_over(leases, f"{prefix}settled by {context.owner}", deadline.remaining_s())
    if not taken:
        return SettleReport()
    rows = claim_rows(context, sorted({lease.transactional_id for lease in taken}), deadline)
    report = settle(
        rows, coordinator=context.coordinator, store=context.store, deadline=deadline, observer=context.observer
    )
    pool.release({lease.transactional_id: lease.owner for lease in taken})
    logger.info("%s: settled %d slots, %d transactions rolled forward", name, len(rows), len(report.rolled_forward))
    return report


# The destination of a batch, as the ledger records it.


def destination_of(database: SinkDatabase, targets: Sequence[Target], way: Way) -> Destination:
    """The destination that the driver has planned: the driver and its tasks get the same one.

    Without the quarantine: a batch that failed for the rows that it had may run again with one.
    """
    targets = [target for target in targets if not target.is_quarantine]
    tables = ", ".join(database.quoted(target.layout.table) for target in targets)
    topics = ", ".join(dict.fromkeys(target.recorded_topic for target in targets))
    return Destination(way, tables, topics, targets[0].layout.cluster_id)
