"""Recovery from outside the writer: settle ids whose owner is gone, and show what is open.

``status`` asks and shows; ``recover`` acts on the same plan. From the rows and from what Kafka shows, the plan says which ids
to settle and which to leave to owners that may be alive. This module also has what a restored database has forgotten, and how
calls for operators reach both servers.

For start-up hooks, commands and operators; it works from any process and machine. Every settler claims, which fences an owner
that is still alive. So recovery touches only ids that have something to settle and, if asked to, only those whose transaction
has been open for some time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline
from dualwrite.errors import DatabaseWentBack
from dualwrite.interfaces import NO_OBSERVER, NativeCoordinator, Observer, StateStore, TransactionCoordinator, native_of
from dualwrite.kafka.blocking import OpenTransactions
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.blocking import Blocker
from dualwrite.protocol.settle import QUESTIONS, Knowledge, SettleStep, next_step
from dualwrite.protocol.settle_native import NativeStep, next_native_step
from dualwrite.protocol.values import (
    NEVER_MS,
    OPEN,
    EndAnswer,
    Outcome,
    Participant,
    StateRow,
    TransactionStatus,
    check_seconds,
    check_selection,
    gone_back,
    is_drawn,
    lane_id,
    other_cluster,
    parsed,
    shows_same_transaction,
    writer_of,
)
from dualwrite.recovery.claim import OwnerContext, claim_writers, note_reported, unique_owner, unreported
from dualwrite.recovery.inspect import (
    Inspection,
    NativeInspection,
    Unsettled,
    UnsettledNative,
    by_step,
    lost_decisions,
    lost_detail,
    unsettled,
    unsettled_native,
)
from dualwrite.recovery.settle import Loss, SettleReport, settle
from dualwrite.stores.sql.database import opened

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces import Database

logger = logging.getLogger(__name__)

_YOUNG_S = 60.0
_BATCH = 100
_WORKERS = 4


@dataclass
class RecoveryReport:
    """The result of :func:`recover`; of a dry run, its plan.

    Attributes:
        planned: The ids that needed recovery, with what was found.
        settled: The ids that are settled now.
        rolled_forward: The ids whose decided transaction this recovery committed in Kafka.
        losses: Decided transactions that Kafka does not have, recorded in the table of incidents. Includes those that another
            process recorded, but ended before it reported them.
        skipped: Ids that need recovery but were left alone: a transaction of their writer is too young, or their lease has not
            expired.
        went_back: Ids that cannot be claimed because the database has lost a claim of theirs: see ``after_restore``.
        forgotten: With ``after_restore``, the Kafka ids that the database had forgotten, and what was done with each.
        unknown: Whether the one id asked for has no row, and Kafka knows nothing to settle of it either.
        sent: By writer, how many messages were sent that its dead owner left waiting in the database; of a dry run, about how
            many wait.
    """

    planned: list[IdStatus] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    rolled_forward: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    went_back: list[DatabaseWentBack] = field(default_factory=list)
    forgotten: list[Forgotten] = field(default_factory=list)
    unknown: bool = False
    sent: dict[str, int] = field(default_factory=dict)


def status(
    transactional_id: str | None = None,
    *,
    kafka: Mapping[str, object],
    database: Engine | Database | str,
    schema: str | None = None,
    prefix: str | None = None,
    timeout_s: float = 60.0,
) -> list[IdStatus]:
    """Show every id with something unsettled, its owner's present incarnation included. Changes nothing.

    Args:
        transactional_id: One writer's id, with its lanes; not together with ``prefix``.
        kafka: librdkafka configuration.
        database: A SQLAlchemy engine or a database URL.
        schema: The database schema of the library's tables.
        prefix: All ids with this prefix; all ids if neither is given.
        timeout_s: Limits the whole call, in seconds.

    Raises:
        ConfigurationError: An argument cannot be used: an empty id or prefix, a time that is NaN or infinite; or the
            tables, a row or a right is not as required.
        Unavailable: A server does not answer in time.
    """
    check_selection(transactional_id, prefix)
    check_seconds("timeout_s", timeout_s)
    with opened(database, schema) as used, connected_coordinator(kafka) as coordinator:
        store = used.store()
        rows = rows_of(store, transactional_id, prefix)
        return inspect_rows(rows, store, coordinator, Deadline(timeout_s), ahead_s=clock_ahead_s(used))


@dataclass(frozen=True)
class Overview:
    """What one look at both servers has found.

    Attributes:
        items: As :func:`status` has them.
        longest_s: The age of the oldest open Kafka transaction in seconds; None if none is open.
        blockers: The open transactions, the one that blocks most first.
        unknown: What could not be found out about what they block, in words.
    """

    items: list[IdStatus]
    longest_s: float | None
    blockers: Sequence[Blocker] = ()
    unknown: Sequence[str] = ()


def overview(
    transactional_id: str | None = None,
    *,
    kafka: Mapping[str, object],
    database: Database,
    prefix: str | None = None,
    others: bool | None = None,
    timeout_s: float = 60.0,
) -> Overview:
    """As :func:`status`, plus every open transaction with what it blocks.

    Open transactions are those of the ids that were asked for. With ``others``, the default if neither an id nor a prefix is
    given, they are all that the brokers list for us, including those of other programs, which have no row here; but of other
    dualwrite writers only those with the prefix.
    """
    check_selection(transactional_id, prefix)
    check_seconds("timeout_s", timeout_s)
    deadline = Deadline(timeout_s)
    with connected_coordinator(kafka) as coordinator:
        store = database.store()
        rows = rows_of(store, transactional_id, prefix)
        items = inspect_rows(rows, store, coordinator, deadline, ahead_s=clock_ahead_s(database))
        if others if others is not None else transactional_id is None and prefix is None:
            opened = {
                kafka_id: view
                for kafka_id, view in coordinator.open_now(deadline).items()
                if (named := parsed(kafka_id)) is None or not is_drawn(named[1]) or named[0].startswith(prefix or "")
            }
        else:
            ids = {item.row.kafka_id(item.incarnation) for item in items if item.open_for_s is not None}
            views = coordinator.describe(ids, deadline) if ids else {}
            opened = {kafka_id: view for kafka_id, view in views.items() if view.status in OPEN}
        found = coordinator.what_blocks(opened, deadline) if opened else OpenTransactions()
    longest_s = max(longest_open_s(items) or 0.0, *(one.open_for_s for one in found.blockers), 0.0)
    return Overview(items, longest_s or None, found.blockers, found.unknown)


def recover_ids(
    database: Database,
    transactional_id: str | None,
    prefix: str | None,
    *,
    kafka: Mapping[str, object],
    open_for_s: float,
    dry_run: bool,
    after_restore: bool,
    deadline: Deadline,
    progress: Callable[[int, int], None] | None,
    observer: Observer,
) -> RecoveryReport:
    """Settle the ids: all of :func:`dualwrite.writing.left_behind.recover` except sending what waits, which needs a lane."""
    counted, store = _Progress(progress), database.store()
    report = recover_rows(
        lambda: whole_writers(store, rows_of(store, transactional_id, prefix)),
        store=store,
        connect=partial(connected_coordinator, kafka),
        open_for_s=open_for_s,
        leased=database.living,
        ahead_s=clock_ahead_s(database),
        dry_run=dry_run,
        after_restore=_asked_for(store, transactional_id, prefix) if after_restore else None,
        deadline=deadline,
        owner=unique_owner(KafkaConfig.parse(kafka).client_id),
        on_settled=counted.note_settled,
        on_planned=counted.note_planned,
        observer=observer,
    )
    rows = rows_of(store, transactional_id, prefix)
    report.unknown = transactional_id is not None and not rows and not report.forgotten
    if not dry_run:
        report_losses(report, rows, store, observer)
    return report


def settle_writers(
    database: Database,
    writers: Collection[str],
    *,
    prefix: str,
    kafka: Mapping[str, object],
    open_for_s: float,
    timeout_s: float,
    observer: Observer = NO_OBSERVER,
) -> dict[str, RecoveryReport]:
    """Settle several writers, each as :func:`recover_ids` does, by one inspection and few claims. Sends nothing that waits.

    All their names begin with ``prefix``, by which the rows are read; it may be empty.

    Returns:
        The report of each writer, or of each slot that stands for itself.
    """
    store, deadline = database.store(), Deadline(timeout_s)

    def select() -> Sequence[StateRow]:
        return [row for row in store.find(prefix) if settled_with(row.transactional_id, writers) in writers]

    report = recover_rows(
        select,
        store=store,
        connect=partial(connected_coordinator, kafka),
        open_for_s=open_for_s,
        leased=database.living,
        ahead_s=clock_ahead_s(database),
        deadline=deadline,
        owner=unique_owner(KafkaConfig.parse(kafka).client_id),
        observer=observer,
    )
    report_losses(report, select(), store, observer)

    return {writer: _of_writer(report, writer, writers) for writer in writers}


def _of_writer(report: RecoveryReport, writer: str, writers: Collection[str]) -> RecoveryReport:
    """What a report on several writers says of one of them."""

    def is_its(name: str | None) -> bool:
        return name is not None and settled_with(name, writers) == writer

    return RecoveryReport(
        planned=[item for item in report.planned if is_its(item.row.transactional_id)],
        settled=[name for name in report.settled if is_its(name)],
        rolled_forward=[name for name in report.rolled_forward if is_its(name)],
        losses=[loss for loss in report.losses if is_its(loss.row.transactional_id)],
        skipped=[name for name in report.skipped if is_its(name)],
        went_back=[back for back in report.went_back if is_its(back.transactional_id)],
    )


class _Progress:
    """Counts the ids of one recovery, and tells its caller."""

    def __init__(self, report: Callable[[int, int], None] | None) -> None:
        self._report = report
        self._settled = self._planned = 0
        self._one_at_a_time = threading.Lock()

    def note_planned(self, items: Sequence[IdStatus]) -> None:
        self._planned = len({item.row.transactional_id for item in items})
        if self._report is not None:
            self._report(0, self._planned)

    def note_settled(self, _: str) -> None:
        if self._report is None:
            return
        with self._one_at_a_time:
            self._settled += 1
            self._report(self._settled, self._planned)


def open_for_s_of(asked: float | None, transactional_id: str | None) -> float:
    """For how long an owner must have shown no sign of life: as asked for, or the default."""
    if asked is not None:
        return asked
    return _YOUNG_S if transactional_id is None else 0.0


def _asked_for(store: StateStore, transactional_id: str | None, prefix: str | None) -> Callable[[str], bool]:
    """The test whether an id without a row may be settled after a restore."""
    if transactional_id is not None:
        return lambda name: writer_of(name) == transactional_id
    if prefix:
        return lambda name: name.startswith(prefix)
    names = {row.transactional_id for row in store.find("")}
    return lambda name: name != writer_of(name) and writer_of(name) in names


def report_losses(report: RecoveryReport, rows: Sequence[StateRow], store: StateStore, observer: Observer) -> None:
    """Report all losses, including those that other processes found and did not report before they ended."""
    by_id = {row.transactional_id: row for row in rows}
    reported = {(loss.row.transactional_id, loss.row.prepared) for loss in report.losses}
    for found in unreported(store.incidents_of(by_id.keys())):
        if (found.transactional_id, found.state) not in reported:
            row = replace(by_id[found.transactional_id], prepared=found.state)
            report.losses.append(Loss(row, found.outcome, found.detail))
    note_reported(store, [(loss.row.transactional_id, loss.row.prepared) for loss in report.losses])
    for loss in report.losses:
        observer.lost(loss.as_error())


def recover_rows(
    select: Callable[[], Sequence[StateRow]],
    *,
    store: StateStore,
    connect: Callable[[], AbstractContextManager[TransactionCoordinator]],
    open_for_s: float = 0.0,
    leased: Callable[[Collection[str]], Collection[str]] = lambda _: (),
    ahead_s: float = 0.0,
    dry_run: bool = False,
    after_restore: Callable[[str], bool] | None = None,
    claims_all: bool = False,
    deadline: Deadline,
    owner: str,
    on_settled: Callable[[str], None] = lambda _: None,
    on_planned: Callable[[Sequence[IdStatus]], None] = lambda _: None,
    observer: Observer = NO_OBSERVER,
) -> RecoveryReport:
    """:func:`recover_ids` on given servers: the rows that ``select`` reads, through coordinators that ``connect`` opens.

    ``after_restore`` says whether an id without a row must be settled, too. ``leased`` returns those of the given ids whose
    lease has not expired. ``claims_all`` says whether to claim and settle rows that need no recovery, too.
    """
    report = RecoveryReport()
    rows = select()
    with connect() as coordinator:
        found = inspect_rows(rows, store, coordinator, deadline, ahead_s=ahead_s)
        if after_restore is not None:
            report.forgotten += find_forgotten(rows, coordinator, deadline, is_asked_for=after_restore)
    raise_to = next_incarnations(report.forgotten)
    undecided = {item.row.transactional_id for item in found if item.needs_recovery and item.is_undecided}
    at_work = leased(undecided) if undecided and open_for_s > 0 else ()
    also = [row.transactional_id for row in rows] if claims_all else ()
    plan = Plan.of(found, rows, open_for_s, raise_to.keys(), at_work, also=also)
    report.planned, report.skipped = plan.items, plan.skipped
    report.went_back += [gone_back(why, name) for name, why in plan.went_back]
    on_planned(report.planned)
    if dry_run:
        return report
    recovery = _Recovery(select, store, connect, deadline, owner, raise_to, on_settled, observer)
    for done in _each(recovery.settle_batch, plan.batches(_BATCH)):
        report.settled.extend(name for name in done.ids if name in plan.wanted)
        report.rolled_forward.extend(done.report.rolled_forward)
        report.losses.extend(done.report.losses)
        report.went_back.extend(done.went_back)
    if report.forgotten:
        with connect() as coordinator:
            retire_without_rows(report.forgotten, coordinator, deadline)
        report.forgotten = [replace(one, settled=True) for one in report.forgotten]
    return report


@dataclass
class _Done:
    ids: list[str] = field(default_factory=list)
    report: SettleReport = field(default_factory=SettleReport)
    went_back: list[DatabaseWentBack] = field(default_factory=list)


@dataclass(frozen=True)
class _Recovery:
    select: Callable[[], Sequence[StateRow]]
    store: StateStore
    connect: Callable[[], AbstractContextManager[TransactionCoordinator]]
    deadline: Deadline
    owner: str
    raise_to: Mapping[str, int]
    on_settled: Callable[[str], None]
    observer: Observer

    def settle_batch(self, writers: Sequence[Sequence[str]]) -> _Done:
        """Claim and settle whole writers. A writer whose claim the database has lost is left out."""
        done = _Done()
        left = list(writers)
        with self.connect() as coordinator:
            context = OwnerContext(coordinator, self.store, self.owner, self.observer)
            while left:
                try:
                    ids = [name for writer in left for name in writer]
                    claimed = claim_writers(context, ids, self.select, self.deadline, raise_to=self.raise_to)
                except DatabaseWentBack as error:
                    others = [writer for writer in left if error.transactional_id not in writer]
                    if len(others) == len(left):
                        raise
                    left = others
                    done.went_back.append(error)
                else:
                    done.ids = [row.transactional_id for row in claimed]
                    done.report = settle(
                        claimed,
                        coordinator=coordinator,
                        store=self.store,
                        deadline=self.deadline,
                        on_settled=self.on_settled,
                        observer=self.observer,
                    )
                    break
        return done


def _each(
    settle_batch: Callable[[Sequence[Sequence[str]]], _Done], batches: Sequence[Sequence[Sequence[str]]]
) -> Iterable[_Done]:
    if len(batches) <= 1:  # most recoveries, and they need no threads
        return [settle_batch(batch) for batch in batches]
    calls = [partial(copy_context().run, settle_batch, batch) for batch in batches]  # so that spans have their parent
    with ThreadPoolExecutor(_WORKERS) as threads:
        return list(threads.map(lambda call: call(), calls))


def inspect_rows(
    rows: Sequence[StateRow],
    store: StateStore,
    coordinator: TransactionCoordinator,
    deadline: Deadline,
    *,
    ahead_s: float = 0.0,
) -> list[IdStatus]:
    """:func:`status` on given servers. Ages are measured by this machine's clock, which is ``ahead_s`` ahead of theirs."""
    check_cluster(rows, coordinator.cluster_id(deadline))
    participants = store.participants(rows)
    prepared_at = {(found.row.transactional_id, found.incarnation): found.prepared_at for found in participants}
    back = went_back(rows, store, coordinator, deadline)
    inspected = inspect(rows, coordinator=coordinator, deadline=deadline, participants=participants)
    return [
        describe(
            item,
            step,
            prepared_at.get((item.row.transactional_id, item.incarnation)),
            back.get(item.row.transactional_id) if item.incarnation == item.row.incarnation else None,
            ahead_s,
        )
        for item, step in inspected
    ]


def check_cluster(rows: Iterable[StateRow], cluster_id: str) -> None:
    """Refuse rows of another cluster: their transactions are not in this one, and would count as gone.

    A row that was claimed only while Kafka was away belongs to no cluster yet, and has left nothing in any.
    """
    for row in rows:
        if row.cluster_id not in {cluster_id, ""}:
            raise other_cluster(row.cluster_id, cluster_id, row.transactional_id)


# Decides from what the rows and Kafka show what a recovery settles and what it leaves alone. Pure, except for the clock.

_MATTERS: Final = frozenset(
    {
        SettleStep.COMMIT,
        SettleStep.RECORD_LOST,
        SettleStep.RECORD_UNVERIFIABLE,
        SettleStep.WAIT,
        SettleStep.REPAIR_MARKERS,
    }
)


@dataclass(frozen=True)
class IdStatus:
    """One transactional id as the row and the coordinator show it.

    Attributes:
        row: The row.
        incarnation: The unsettled incarnation: the owner's own, or one that the owner has not settled.
        kafka_status: The coordinator's status of that incarnation.
        open_for_s: Seconds since its Kafka transaction began; None if none is open.
        step: The step that settling would take in Kafka.
        needs_recovery: Whether settling would change anything in Kafka or in the database's tables, or would report a loss.
        prepared_for_s: Seconds since that incarnation prepared a database transaction that has not ended; None if there is
            none.
        aborted_in_s: Seconds until the broker aborts its open Kafka transaction; None if none is open, or if the broker never
            aborts it.
        went_back: The evidence that the database has lost commits; None if there is none.
        claim_lost: Whether it has lost a claim: then the id can only be claimed by a recovery with ``after_restore``.
        decided_is_open: Whether its open Kafka transaction is the one that the database has decided.
        has_no_time_limit: Whether the broker never aborts a transaction of this incarnation by itself: its producer asked for
            two-phase commit, or for the timeout 2147483647 ms, which brokers keep as the same. None if the coordinator does not
            know the incarnation.
        partitions: The partitions of its open Kafka transaction, by topic and number: their ``read_committed`` consumers wait.
    """

    row: StateRow
    incarnation: int
    kafka_status: TransactionStatus
    open_for_s: float | None
    step: SettleStep
    needs_recovery: bool
    prepared_for_s: float | None = None
    aborted_in_s: float | None = None
    went_back: str | None = None
    claim_lost: bool = False
    decided_is_open: bool = False
    has_no_time_limit: bool | None = None
    partitions: tuple[tuple[str, int], ...] = ()

    @property
    def is_undecided(self) -> bool:
        """Whether settling would undo what the owner left behind: the row does not name it, or names an earlier transaction."""
        if self.open_for_s is not None:
            return not self.decided_is_open
        prepared = self.row.prepared
        is_named = prepared.has_transaction and prepared.incarnation == self.incarnation
        return not is_named or self.row.completed is not None

    @property
    def waits_for_s(self) -> float | None:
        """For how many seconds something of its owner has been open on either side; None if nothing is."""
        return self.prepared_for_s if self.open_for_s is None else self.open_for_s


def describe(
    item: Unsettled, step: SettleStep, prepared_at: datetime | None, back: tuple[str, bool] | None, ahead_s: float = 0.0
) -> IdStatus:
    """Describe one unsettled incarnation; ``back`` is the evidence of lost commits, and whether a claim was lost."""
    view = item.known.view
    assert view is not None
    is_open = view.status is TransactionStatus.ONGOING
    unfinished = item.known.is_pending or _left_unended(item.known)
    matters = is_open or step in _MATTERS or (unfinished and step is SettleStep.RETIRE)
    open_for_s = _seconds_since(view.started_ms / 1000, ahead_s) if view.started_ms is not None and is_open else None
    timeout_s = None if view.timeout_ms in {None, NEVER_MS} else view.timeout_ms / 1000
    return IdStatus(
        row=item.row,
        incarnation=item.incarnation,
        kafka_status=view.status,
        open_for_s=open_for_s,
        step=step,
        needs_recovery=matters or prepared_at is not None or back is not None,
        prepared_for_s=None if prepared_at is None else _seconds_since(prepared_at.timestamp(), ahead_s),
        aborted_in_s=None if open_for_s is None or timeout_s is None else max(0.0, timeout_s - open_for_s),
        went_back=back[0] if back is not None else None,
        claim_lost=back is not None and back[1],
        has_no_time_limit=None if view.timeout_ms is None else view.timeout_ms == NEVER_MS,
        partitions=tuple(sorted(view.partitions)) if is_open else (),
        decided_is_open=is_open and step is SettleStep.COMMIT and shows_same_transaction(view, item.row.prepared),
    )


def longest_open_s(items: Iterable[IdStatus]) -> float | None:
    """The age of the oldest of their open Kafka transactions, in seconds; None if none is open."""
    return max((item.open_for_s for item in items if item.open_for_s is not None), default=None)


def _left_unended(known: Knowledge) -> bool:
    """Whether it is recorded as not committed: the recorder may have died before it ended what the broker forgot."""
    return known.recorded not in {None, Outcome.COMMITTED}


def _seconds_since(instant: float, ahead_s: float) -> float:
    return max(0.0, time.time() - ahead_s - instant)


def clock_ahead_s(database: Database) -> float:
    """By how many seconds this machine's clock is ahead of the database's: ages must not depend on where a person works."""
    return time.time() - database.now().timestamp()


def is_young(item: IdStatus, open_for_s: float) -> bool:
    """Whether its owner began something less than that many seconds ago, and so may be alive."""
    return item.waits_for_s is not None and item.waits_for_s < open_for_s


def settled_with(name: str, names: Collection[str]) -> str:
    """The id that stands for all that are settled together with this one: its writer's, or, for a slot, its own.

    ``names`` are the ids that have a row: a pool of slots has no first lane.
    """
    return writer if (writer := writer_of(name)) in names else name


@dataclass(frozen=True)
class Plan:
    """The ids that a recovery settles, and those that it leaves alone.

    Attributes:
        skipped: The ids that need recovery and are left alone.
        went_back: The ids that cannot be claimed, with the evidence.
        wanted: The ids that need settling or raising, or were asked for.
        writers: The ids to claim, each writer with all its lanes.
    """

    items: list[IdStatus]
    skipped: list[str]
    went_back: list[tuple[str, str]]
    wanted: frozenset[str]
    writers: list[list[str]]

    @classmethod
    def of(
        cls,
        found: Iterable[IdStatus],
        rows: Sequence[StateRow],
        open_for_s: float,
        raised: Collection[str] = (),
        leased: Collection[str] = (),
        *,
        also: Collection[str] = (),
    ) -> Plan:
        """Decide writer by writer: leave a writer alone as a whole if its owner may be alive, else take it as a whole.

        An owner may be alive if it began something less than ``open_for_s`` ago, or if the lease of its id has not expired
        (``leased``); decided transactions are settled anyway. The incarnations of ``raised`` ids go up even if the database
        has lost their claim. Ids in ``also`` are taken even if they need no settling.
        """
        names = {row.transactional_id for row in rows}
        group = partial(settled_with, names=names)

        needing = [item for item in found if item.needs_recovery]
        lost = {
            item.row.transactional_id: item.went_back
            for item in needing
            if item.claim_lost and item.went_back is not None and item.row.transactional_id not in raised
        }
        young = {
            group(item.row.transactional_id)
            for item in needing
            if is_young(item, open_for_s) or (item.is_undecided and item.row.transactional_id in leased)
        }
        blocked = {group(name) for name in lost}
        items, skipped = [], []
        for item in needing:
            name = item.row.transactional_id
            if group(name) in blocked:
                continue
            if group(name) in young:
                skipped.append(name)
            else:
                items.append(item)
        wanted = {item.row.transactional_id for item in items} | set(raised)
        wanted |= {name for name in also if group(name) not in blocked}
        taken = {group(name) for name in wanted}
        writers: dict[str, list[str]] = {}
        for name in sorted(names | wanted):
            if group(name) in taken:
                writers.setdefault(group(name), []).append(name)
        return cls(items, list(dict.fromkeys(skipped)), sorted(lost.items()), frozenset(wanted), list(writers.values()))

    def batches(self, size: int) -> list[list[list[str]]]:
        """The writers, in batches of about that many ids."""
        batches: list[list[list[str]]] = []
        count = size
        for writer in self.writers:
            if count >= size:
                batches.append([])
                count = 0
            batches[-1].append(writer)
            count += len(writer)
        return batches


# The servers of a call for people: connections made from its arguments, and the rows that its arguments name.


def connected_coordinator(kafka: Mapping[str, object]) -> KafkaCoordinator:
    """A coordinator for this configuration. As a context manager, it closes its connections."""
    return KafkaCoordinator(KafkaConfig.parse(kafka))


def rows_of(store: StateStore, transactional_id: str | None, prefix: str | None) -> Sequence[StateRow]:
    """The rows of one writer, or of all ids with a prefix, or all."""
    if transactional_id is None:
        return store.find(prefix or "")
    return [*store.read([transactional_id]), *store.find(lane_id(transactional_id, 1)[:-1])]


def whole_writers(store: StateStore, rows: Sequence[StateRow]) -> Sequence[StateRow]:
    """The rows, and the other lanes of writers of which only some lanes were selected."""
    names = {row.transactional_id for row in rows}
    outside = {writer_of(name) for name in names} - names
    firsts = store.read(list(outside)) if outside else []
    lanes = [row for first in firsts for row in store.find(f"{first.transactional_id}#")]
    return [*rows, *(row for row in [*firsts, *lanes] if row.transactional_id not in names)]


# Finds out what settling would do now, by asking the questions that settling asks. Changes nothing.


def inspect(
    rows: Sequence[StateRow],
    *,
    coordinator: TransactionCoordinator,
    deadline: Deadline,
    participants: Iterable[Participant] = (),
) -> list[tuple[Unsettled, SettleStep]]:
    """Find out what settling would do now with every unsettled incarnation, the owners' own included. Changes nothing.

    Returns each with its first step that is not a question. Appends settled incarnations with a prepared transaction in the
    database (``participants``).
    """
    native = [found for row in rows if (found := unsettled_native(row, row.incarnation)) is not None]
    apart = {found.kafka_id for found in native}
    items = [item for row in rows for item in unsettled(row, row.incarnation) if item.kafka_id not in apart]
    late = [found for found in participants if found.incarnation <= found.row.settled_incarnation]
    items += [Unsettled(found.row, found.incarnation, Knowledge()) for found in late]
    inspection = Inspection(coordinator, deadline)
    while groups := by_step(items, next_step, QUESTIONS):
        for question, group in groups.items():
            inspection.questions[question](group)
            if question is SettleStep.LOOK:
                _suspect_nothing(group)
    steps = inspect_native(native, coordinator=native_of(coordinator), deadline=deadline) if native else []
    return [(item, next_step(item.known)) for item in items] + [
        (_as_unsettled(found), step) for found, step in zip(native, steps, strict=True)
    ]


def _as_unsettled(found: UnsettledNative) -> Unsettled:
    known = Knowledge(prepared=found.row.prepared, recorded=found.row.completed, view=found.known.view)
    return Unsettled(found.row, found.incarnation, known)


def _suspect_nothing(items: Iterable[Unsettled]) -> None:
    """A dry run need not ask the partitions of undecided transactions: settling aborts these in any case."""
    for item in items:
        item.known = replace(item.known, suspects=frozenset())


_AS_FOR_LIBRDKAFKA: Final = {
    NativeStep.END: SettleStep.COMMIT,
    NativeStep.WAIT: SettleStep.WAIT,
    NativeStep.RECORD_COMMITTED: SettleStep.RECORD_COMMITTED,
    NativeStep.RECORD_LOST: SettleStep.RECORD_LOST,
    NativeStep.RECORD_UNVERIFIABLE: SettleStep.RECORD_UNVERIFIABLE,
    NativeStep.ABORT: SettleStep.RETIRE,
    NativeStep.READ_FENCE: SettleStep.RETIRE,
    NativeStep.FINISH: SettleStep.FINISH,
}
"""The steps of a dry run, which never reads the fence, in terms of librdkafka's steps."""


def inspect_native(
    items: Sequence[UnsettledNative], *, coordinator: NativeCoordinator, deadline: Deadline
) -> list[SettleStep]:
    """Find out what settling would do now with each of them. Changes nothing.

    Ending a transaction that is no longer open changes nothing, so a dry run can ask what comes after it without ending it.
    """
    inspection = NativeInspection(coordinator, deadline)
    for item in items:
        item.known = replace(item.known, answer=EndAnswer.FENCED)
    while groups := by_step(items, next_native_step, inspection.questions):
        for step, group in groups.items():
            inspection.questions[step](group)
    return [_AS_FOR_LIBRDKAFKA[next_native_step(item.known)] for item in items]


# After a restore: what Kafka knows of transactional ids and the database has forgotten. Here, ids without a row are found by
# their names; :func:`~dualwrite.recovery.inspect.lost_decisions` finds lost transactions of ids that have one.


@dataclass(frozen=True)
class Forgotten:
    """One Kafka id that the restored database does not know.

    Attributes:
        kafka_id: Kafka's ``transactional.id``.
        transactional_id: The id of the writer or lane.
        incarnation: The incarnation.
        status: The coordinator's status of it before recovery did anything.
        has_row: Whether the database has a row for that id, with an older incarnation.
        settled: Whether recovery made the id unusable and aborted what was open under it.
    """

    kafka_id: str
    transactional_id: str
    incarnation: int
    status: TransactionStatus
    has_row: bool
    settled: bool


def find_forgotten(
    rows: Collection[StateRow],
    coordinator: TransactionCoordinator,
    deadline: Deadline,
    *,
    is_asked_for: Callable[[str], bool],
) -> Sequence[Forgotten]:
    """Find the Kafka ids that are newer than their rows, or have no row. Changes nothing.

    Skips an id whose namespace is not its row's: it belongs to another database, or to a row that was deleted. ``rows`` are all
    rows of the requested ids. ``is_asked_for`` says whether an id without a row may be settled, because another database's ids
    look the same.
    """
    by_id = {row.transactional_id: row for row in rows}
    found: dict[str, tuple[str, int, bool]] = {}
    for kafka_id in coordinator.list_ids("", deadline):
        if (named := parsed(kafka_id)) is None:
            continue
        name, namespace, incarnation = named
        row = by_id.get(name)
        if row is not None and row.namespace == namespace and incarnation > row.incarnation:
            found[kafka_id] = (name, incarnation, True)
        elif row is None and is_drawn(namespace) and is_asked_for(name):
            found[kafka_id] = (name, incarnation, False)
    views = coordinator.describe(found.keys(), deadline) if found else {}
    # A broker may list ids that it no longer coordinates (KAFKA-21481). Those that their coordinator does not know are gone.
    return [
        Forgotten(kafka_id, name, incarnation, views[kafka_id].status, has_row, settled=False)
        for kafka_id, (name, incarnation, has_row) in sorted(found.items())
        if views[kafka_id].status is not TransactionStatus.NO_SUCH_ID
    ]


def next_incarnations(forgotten: Iterable[Forgotten]) -> dict[str, int]:
    """For each id with a row, the first incarnation above all those that Kafka knows."""
    result: dict[str, int] = {}
    for one in forgotten:
        if one.has_row:
            result[one.transactional_id] = max(result.get(one.transactional_id, 0), one.incarnation + 1)
    return result


def retire_without_rows(
    forgotten: Iterable[Forgotten], coordinator: TransactionCoordinator, deadline: Deadline
) -> None:
    """Make the ids without a row unusable, and abort what is open under them: no row names it.

    After ``Unavailable``, call it again: some may be left.
    """
    ids = [one.kafka_id for one in forgotten if not one.has_row]
    if ids:
        coordinator.retire(ids, deadline)
        for kafka_id in ids:
            logger.warning("%s: retired: no row of the restored database names it", kafka_id)


def went_back(
    rows: Collection[StateRow], store: StateStore, coordinator: TransactionCoordinator, deadline: Deadline
) -> Mapping[str, tuple[str, bool]]:
    """Find evidence of lost commits, by id: in words, and whether a claim was lost. Changes nothing.

    Reads rows with evidence again from the store, because their owners may have continued meanwhile.
    """
    next_ids = {row.kafka_id(row.incarnation + 1): row for row in rows}
    views = coordinator.describe(next_ids.keys(), deadline) if next_ids else {}
    seen: dict[str, tuple[str, bool]] = {}
    for lost in lost_decisions(rows, coordinator=coordinator, store=store, deadline=deadline, upto_own=True):
        seen[lost.transactional_id] = (lost_detail(lost), False)
    for kafka_id, row in next_ids.items():
        if views[kafka_id].status is not TransactionStatus.NO_SUCH_ID:
            seen[row.transactional_id] = (f"Kafka knows {kafka_id}, which the database has not claimed yet", True)
    if not seen:
        return {}
    known = {row.transactional_id: (row.incarnation, row.prepared) for row in rows}
    return {
        row.transactional_id: seen[row.transactional_id]
        for row in store.read(list(seen))
        if known[row.transactional_id] == (row.incarnation, row.prepared)
    }
