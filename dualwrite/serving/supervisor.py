"""One target of ``dualwrite serve``: round after round it looks, decides, and, if it leads, settles.

Any number of replicas look at a target; one of them leads, by a lease in the target's own database, and settles. As with the
members of a fleet, safety rests on the claim alone: two that settle at once, or one that is killed in the middle, do no harm,
and whoever leads next goes on. So nothing of what stands here in memory is missed after a crash.

A round that fails is tried again, for ever, after growing pauses. The service must not need a person because a server was away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import inf
from typing import TYPE_CHECKING, Final

from dualwrite.clock import now_s
from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.protocol.blocking import Deed, End, Ended, Intent
from dualwrite.protocol.findings import CheckResult, Status
from dualwrite.protocol.members import LeaseTiming
from dualwrite.protocol.outbox import growing_pause_s
from dualwrite.protocol.supervision import UNTRIED, Action, Planned, Seen, Tries, View, plan
from dualwrite.protocol.values import member_id, writer_of
from dualwrite.recovery.claim import default_owner, lease_owner
from dualwrite.recovery.doctor import doctor
from dualwrite.recovery.recover import overview, settle_writers, settled_with
from dualwrite.serving.configuration import fleet_of, is_ours
from dualwrite.stores.sql.database import SqlDatabase, database_of
from dualwrite.stores.sql.ledger import batches_of
from dualwrite.writing.by_hand import SETTLING, new_action_id, recovery_words
from dualwrite.writing.leased import LeaseKeeper
from dualwrite.writing.left_behind import Waits, recover, what_waits

if TYPE_CHECKING:
    from dualwrite.interfaces import Database, History
    from dualwrite.protocol.blocking import ActionRecord, Blocker
    from dualwrite.protocol.members import Lease
    from dualwrite.protocol.values import Incident, StateRow
    from dualwrite.recovery.recover import IdStatus, RecoveryReport
    from dualwrite.serving.configuration import Settings, Target
    from dualwrite.stores.sql.ledger import UnfinishedBatch


_SHOWN: Final = 20
"""How many actions of the history a page shows."""


@dataclass(frozen=True)
class Round:
    """What one look has found.

    Attributes:
        at: When it ended.
        took_s: How long it took, in seconds.
        items: As :func:`dualwrite.status` has them.
        longest_s: The age of the oldest open transaction that the brokers list, of any program; None if none is open.
        blockers: Every open transaction of the cluster with what it blocks, what blocks most first; of dualwrite writers only
            those with the target's prefix.
        incidents: Losses that nobody has acknowledged.
        leases: Those of fleets.
        leader: The lease of the replicas of this service; None before any has taken it.
        waiting: What waits in the database, by writer.
        batches: Batches of Spark sinks that are not completed.
        warnings: Conditions in the database that slow dual writes down, and what could not be found out.
        skew_s: By how much this machine's clock is ahead of the database's.
        seen: Every writer that has something to settle or to send.
        history: What people and services did last, newest first.
    """

    at: datetime
    took_s: float
    items: Sequence[IdStatus]
    longest_s: float | None
    blockers: Sequence[Blocker] = ()
    incidents: Sequence[Incident] = ()
    leases: Sequence[Lease] = ()
    leader: Lease | None = None
    waiting: Sequence[Waits] = ()
    batches: Sequence[UnfinishedBatch] = ()
    warnings: Sequence[str] = ()
    skew_s: float = 0.0
    seen: Sequence[Seen] = ()
    history: Sequence[ActionRecord] = ()


def look(target: Target, database: Database) -> Round:
    """Ask both servers. Changes nothing.

    Raises:
        ConfigurationError: The tables, a row, the cluster or a right is not as required.
        Unavailable: A server does not answer in time.
    """
    began = time.monotonic()
    found = overview(
        kafka=target.kafka, database=database, prefix=target.prefix or None, others=True, timeout_s=target.timeout_s
    )
    items = found.items
    store = database.store()
    rows = store.find(target.prefix)  # after the items: a row that has changed meanwhile is a sign of life
    needing = {item.row.transactional_id for item in items if item.needs_recovery}
    leases = database.lease_list(None, target.prefix)
    waiting = what_waits(
        database, [name for name in store.outbox.writers() if name.startswith(target.prefix)] if store.outbox else ()
    )
    history, missing = _history(database, target.prefix)
    batches, unknown = batches_of(database, target.prefix)
    now = database.now()
    leader = next(iter(database.lease_list(member_id(fleet_of(target.name), 0), "")), None)
    seen = every_writer(
        items,
        rows,
        leases=leases,
        held=database.living(needing) if needing else (),
        waiting=waiting,
        now=now,
    )
    return Round(
        at=datetime.now(timezone.utc),
        took_s=time.monotonic() - began,
        items=items,
        longest_s=found.longest_s,
        blockers=found.blockers,
        incidents=store.incidents(target.prefix),
        leases=leases,
        leader=leader,
        waiting=waiting,
        batches=batches,
        warnings=[*database.warnings(), *found.unknown, *missing, *unknown],
        skew_s=time.time() - now.timestamp(),
        seen=seen,
        history=history,
    )


def _history(database: Database, prefix: str) -> tuple[Sequence[ActionRecord], Sequence[str]]:
    """The last actions, and why they are not there: for a record alone, settling does not wait."""
    try:
        history = database.history()
        return (() if history is None else history.last(prefix, limit=_SHOWN)), ()
    except ConfigurationError as error:
        return (), [f"the history of actions cannot be read: {error}"]


def every_writer(
    items: Iterable[IdStatus],
    rows: Sequence[StateRow],
    *,
    leases: Iterable[Lease],
    held: Collection[str],
    waiting: Iterable[Waits],
    now: datetime,
) -> list[Seen]:
    """What is seen of each writer that has something to settle or to send, in order of their names.

    Args:
        items: What is unsettled.
        rows: All rows, read after the items.
        leases: The leases of fleets.
        held: Those of the ids whose lease or slot is held.
        waiting: What waits.
        now: The database's time, read after the rows.
    """
    names = {row.transactional_id for row in rows}
    of_writer: dict[str, list[IdStatus]] = defaultdict(list)
    for item in items:
        if item.needs_recovery:
            of_writer[settled_with(item.row.transactional_id, names)].append(item)
    changed: dict[str, float] = {}
    for row in rows:
        if not is_ours(row.owner):
            writer = settled_with(row.transactional_id, names)
            changed[writer] = min(changed.get(writer, inf), (now - row.updated_at).total_seconds())
    waits = {one.writer: one for one in waiting if one.waiting.rows and one.writer in names}
    lease_of = {lease.transactional_id: lease for lease in leases}
    return [
        _seen(
            name,
            of_writer.get(name, ()),
            unchanged_s=changed.get(name, inf),
            lease=lease_of.get(writer_of(name)),
            held=held,
            waits=waits.get(name),
        )
        for name in sorted({*of_writer, *waits})
    ]


def _seen(
    name: str,
    items: Sequence[IdStatus],
    *,
    unchanged_s: float,
    lease: Lease | None,
    held: Collection[str],
    waits: Waits | None,
) -> Seen:
    return Seen(
        name,
        needs_recovery=bool(items),
        decided=any(not item.is_undecided for item in items),
        undecided=any(item.is_undecided for item in items),
        youngest_s=min((item.waits_for_s for item in items if item.waits_for_s is not None), default=None),
        time_left_s=min(
            (item.aborted_in_s for item in items if item.decided_is_open and item.aborted_in_s is not None),
            default=None,
        ),
        unchanged_s=unchanged_s,
        lease=None if lease is None else lease.state,
        lease_left_s=None if lease is None else lease.left_s,
        slot_held=any(item.row.transactional_id in held for item in items),
        claim_lost=any(item.claim_lost for item in items),
        waiting=0 if waits is None else waits.waiting.rows,
        waiting_s=None if waits is None else waits.waiting.oldest_s,
    )


logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 60.0
_SHORTEST_PAUSE_S: Final = 1.0
_CHECK_EVERY_S: Final = 300.0
# Up to so many writers are settled one by one: the log then tells of one after the other.
_FEW: Final = 8
# At most so many are settled together, so that stopping, and a lost lease, need not wait for all of them.
_TOGETHER: Final = 250
SERVICE: Final = "dualwrite serve"
"""Who acts, in the history, where no person does."""


@dataclass(frozen=True)
class Snapshot:
    """What a supervisor knows now: a value that other threads may read.

    Attributes:
        target: The target's name.
        leads: Whether this replica settles.
        round: The last look that succeeded; None before the first.
        round_s: When it ended, by the supervisor's own clock.
        plans: What becomes of each writer that has something to settle or to send.
        tries: The attempts by writer. Only the leader has any.
        now_s: When this value was made, by the clock of the tries.
        error: Why the last round failed; None if it succeeded.
        alive_s: When the last round ended, failed or not, by the supervisor's own clock.
        counts: What was done since the process started: ``rounds``, ``failed rounds``, ``settled``, ``rolled forward``,
            ``losses``, ``sent``, ``failures``.
        findings: What ``dualwrite doctor`` finds wrong or weak, as this process sees it; asked again every five minutes.
    """

    target: str
    leads: bool = False
    round: Round | None = None
    round_s: float = -inf
    plans: Sequence[Planned] = ()
    tries: Mapping[str, Tries] = field(default_factory=dict)
    now_s: float = 0.0
    error: str | None = None
    alive_s: float = -inf
    counts: Mapping[str, float] = field(default_factory=dict)
    findings: Sequence[CheckResult] = ()


class Supervisor:
    """Looks at one target, and settles what its dead writers left while this replica leads. Runs in a thread of its own.

    Raises:
        ConfigurationError: The target's database keeps no leases, or the times do not fit one another.
    """

    def __init__(self, target: Target, settings: Settings) -> None:
        self.target = target
        self.interval_s = settings.interval_s
        database = database_of(target.url, target.schema)
        if not isinstance(database, SqlDatabase):
            database.close()
            raise ConfigurationError(
                f"target {target.name}: {database.traits.name} keeps no leases, by which replicas find their leader",
                next_step="serve SQL databases; run `dualwrite recover` for this one",
            )
        self._database = database
        self._lost = threading.Event()
        self._stopping = threading.Event()
        self._keeper = LeaseKeeper(
            database.leases(fleet_of(target.name)),
            LeaseTiming(settings.lease_timeout_s),
            on_lost=self._lost.set,
            on_dead=lambda _: None,
        )
        self._thread = threading.Thread(target=self._run, name=f"dualwrite serve {target.name}", daemon=True)
        self._started_s = now_s()
        self._leads = False
        self._answering_since_s: float | None = None
        self._round: Round | None = None
        self._round_s = -inf
        self._plans: Sequence[Planned] = ()
        self._tries: dict[str, Tries] = {}
        self._failures = 0
        self._error: str | None = None
        self._failing_with: type[Exception] | tuple[()] = ()
        self._counts: Counter[str] = Counter()
        self._action_ids: dict[str, str] = {}
        self._kept_s = -inf
        self._ends: list[End] = []
        self._unended: set[str] = set()
        self._findings: Sequence[CheckResult] = ()
        self._checked_s = -inf
        self.snapshot = Snapshot(target.name)

    def start(self) -> None:
        """Begin with the first round. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """Let the present settlement end, settle nothing more, and give the lease back. Returns at once."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until it has stopped. False if it has not after that many seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    @property
    def alive_s(self) -> float:
        """When it ended a round or a settlement last, by the clock of :data:`dualwrite.clock.now_s`."""
        return max(self._started_s, self.snapshot.alive_s)

    @property
    def stalled_after_s(self) -> float:
        """Without a sign of life for so many seconds it has stalled: each look and each settlement has a time limit."""
        return self.interval_s + _LONGEST_PAUSE_S + 5 * self.target.timeout_s

    def _run(self) -> None:
        name = self.target.name
        logger.info("%s: serving %s writers", name, f"{self.target.prefix}*" if self.target.prefix else "all")
        try:
            while not self._stopping.is_set():
                self._stopping.wait(self._turn())
        finally:
            self._keeper.give_back(settled=True)
            self._keeper.stop()
            self._database.close()
            self._leads = False
            self._publish()
            logger.info("%s: stopped", name)

    def _turn(self) -> float:
        """One round. Returns the pause before the next one."""
        name = self.target.name
        try:
            self._take_lead()
            self._observe()
            if self._leads and self._settle():
                self._observe()
        except DualWriteError as error:
            if not isinstance(error, self._failing_with):  # in an outage the words change from round to round
                logger.warning(
                    "%s: a round failed; the next one tries again: %s: %s", name, type(error).__name__, error
                )
            self._note_failure(error)
        except Exception as error:
            logger.exception("%s: a round failed; the next one tries again", name)
            self._note_failure(error)
        else:
            if self._error is not None:
                logger.info("%s: both servers answer again", name)
            self._failures, self._error, self._failing_with = 0, None, ()
            self._check()
        self._counts["rounds"] += 1
        self._publish()
        return self._pause_s()

    def _pause_s(self) -> float:
        """How long to wait before the next round: until the first writer is due, if that is sooner than usual."""
        if self._failures:
            return max(self.interval_s, growing_pause_s(self._failures, 1.0, _LONGEST_PAUSE_S))
        due = [planned.due_in_s for planned in self._plans if planned.due_in_s is not None]
        soonest_s = min(due) if due and self._leads else inf
        return min(self.interval_s, max(soonest_s, _SHORTEST_PAUSE_S))

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self._error = f"{type(error).__name__}: {error}"
        self._failing_with = type(error)
        self._answering_since_s = None
        self._counts["failed rounds"] += 1

    def _check(self) -> None:
        """Ask now and then for what is wrong with the servers. It hinders no settlement: it comes last, and fails alone."""
        since_s = now_s() - self._checked_s
        if since_s < _CHECK_EVERY_S or self._stopping.is_set():
            return
        if since_s < 2 * _CHECK_EVERY_S and self._pause_s() < self.interval_s:
            return  # a writer is due before the next round, and would wait for this
        try:
            found = doctor(
                kafka=self.target.kafka,
                database=self._database,
                schema=self.target.schema,
                timeout_s=self.target.timeout_s,
            )
        except Exception:
            logger.exception("%s: the servers could not be checked", self.target.name)
        else:
            self._findings = [one for one in found if one.status in {Status.ERROR, Status.WARNING}]
        self._checked_s = now_s()

    # One replica leads

    def _take_lead(self) -> None:
        """Hold the lease, if no other replica does."""
        if self._leads and (self._lost.is_set() or not self._keeper.still_held()):
            logger.warning("%s: another replica leads from now on", self.target.name)
            self._step_down()
        if not self._leads:
            self._lost.clear()
            owner = lease_owner(f"{self.target.kafka['client.id']} {default_owner()}")
            self._leads = self._keeper.take_number(0, owner) is not None
            if self._leads:
                logger.info("%s: this replica leads", self.target.name)

    def _step_down(self) -> None:
        self._leads = False
        self._tries.clear()
        self._action_ids.clear()
        self._keeper.give_back(settled=True)

    # What it sees, and what it does

    def _observe(self) -> None:
        self._round = look(self.target, self._database)
        now = self._round_s = now_s()
        if self._answering_since_s is None:
            self._answering_since_s = now  # the first look of all settles nothing, however long it took
        view = View(now, now - self._answering_since_s, self._round.skew_s)
        before = {planned.writer: (planned.action, planned.reason) for planned in self._plans}
        self._plans = [
            plan(seen, view, self.target.rule, self._tries.get(seen.writer, UNTRIED)) for seen in self._round.seen
        ]
        self._tries = {seen.writer: self._tries[seen.writer] for seen in self._round.seen if seen.writer in self._tries}
        for planned in self._plans:
            if before.pop(planned.writer, None) != (planned.action, planned.reason):
                logger.info("%s: %s: %s: %s", self.target.name, planned.writer, planned.action.value, planned.because)
        for writer in before:
            logger.info("%s: %s: nothing is left", self.target.name, writer)
        self._publish()

    def _settle(self) -> bool:
        """Settle what is planned: many writers together, the others one by one. Returns whether anything was tried."""
        due = [planned for planned in self._plans if planned.action is Action.SETTLE]
        self._keep_intents(due)
        done = self._settle_together(due) if len(due) > _FEW else set()
        tried = bool(done)
        for planned in due:
            if planned.writer in done:
                continue
            if self._must_stop() or (tried and not self._keeper.still_held()):
                break
            tried = True
            report = None
            try:
                report = recover(
                    planned.writer,
                    kafka=self.target.kafka,
                    database=self._database,
                    open_for_s=planned.patience_s,
                    timeout_s=self.target.timeout_s,
                )
            except DualWriteError as error:
                failure: str | None = f"{type(error).__name__}: {error}"
            except Exception as error:
                logger.exception("%s: %s: cannot be settled", self.target.name, planned.writer)
                failure = f"{type(error).__name__}: {error}"
            else:
                failure = self._note_report(planned.writer, report)
            self._note_attempt(planned.writer, report, failure)
            self._publish()
        for writer in sorted(self._unended):
            self._keep_end(writer, Ended.REFUSED, "not begun: this replica stops, or another one leads")
        self._keep_ends()
        return tried

    def _must_stop(self) -> bool:
        return self._stopping.is_set() or self._lost.is_set()

    def _settle_together(self, due: Sequence[Planned]) -> set[str]:
        """Settle those of which nothing waits, many at a time. Returns those of which there is an answer.

        One by one, a thousand writers would take minutes, in which the last of them hold back their readers. A writer that
        cannot be settled must hinder no other: after any error but silence, each of its companions is tried alone.
        """
        waiting = {one.writer for one in self._round.waiting} if self._round is not None else set()
        by_patience: dict[float, list[str]] = defaultdict(list)
        for planned in due:
            if planned.writer not in waiting:
                by_patience[planned.patience_s].append(planned.writer)
        done: set[str] = set()
        for patience_s, writers in by_patience.items():
            for start in range(0, len(writers), _TOGETHER):
                if self._must_stop() or (start and not self._keeper.still_held()):
                    return done
                together = writers[start : start + _TOGETHER]
                try:
                    reports = settle_writers(
                        self._database,
                        together,
                        prefix=self.target.prefix,
                        kafka=self.target.kafka,
                        open_for_s=patience_s,
                        timeout_s=self.target.timeout_s,
                    )
                except Unavailable as error:
                    reports = {}
                    failures: dict[str, str | None] = dict.fromkeys(together, f"{type(error).__name__}: {error}")
                except Exception as error:  # noqa: BLE001 - whatever it is, it comes again for the writer that has it
                    logger.warning(
                        "%s: settling one by one, after %s: %s", self.target.name, type(error).__name__, error
                    )
                    continue
                else:
                    failures = {writer: self._note_report(writer, report) for writer, report in reports.items()}
                for writer, failure in failures.items():
                    self._note_attempt(writer, reports.get(writer), failure)
                done.update(failures)
                self._publish()
        return done

    def _note_attempt(self, writer: str, report: RecoveryReport | None, failure: str | None) -> None:
        tries = self._tries.get(writer, UNTRIED)
        if failure is None:
            assert report is not None
            self._tries[writer] = tries.succeeded(now_s())
            self._keep_end(writer, Ended.DONE, recovery_words(report))
        else:
            self._keep_end(writer, Ended.FAILED, f"attempt {tries.failures + 1}: {failure}")
            self._tries[writer] = tries.failed(now_s(), failure)
            self._counts["failures"] += 1
            self._note(f"{writer}: attempt {tries.failures + 1} failed: {failure}", logging.WARNING)

    # The history of what it did: a record alone, for which no settlement waits

    def _keep_intents(self, due: Sequence[Planned]) -> None:
        """Store what is about to be settled, in one transaction. What has failed before goes on under its former record."""
        failed = {one: known for one, known in self._action_ids.items() if self._tries.get(one, UNTRIED).failures}
        self._action_ids = {**{one.writer: new_action_id() for one in due}, **failed}
        self._unended = {one.writer for one in due}
        program = f"{self.target.kafka['client.id']} {default_owner()}"
        intents = [
            Intent(
                self._action_ids[one.writer],
                one.writer,
                Deed.SETTLE,
                SETTLING,
                one.because,
                SERVICE,
                program,
            )
            for one in due
        ]
        self._keep(lambda history: history.begin(intents))

    def _keep_end(self, writer: str, outcome: Ended, result: str) -> None:
        self._unended.discard(writer)
        self._ends.append(End(self._action_ids[writer], outcome, result))
        if now_s() - self._kept_s >= 1.0:  # a transaction each would take longer than a small settlement
            self._keep_ends()

    def _keep_ends(self) -> None:
        ends, self._ends = self._ends, []
        self._kept_s = now_s()
        self._keep(lambda history: history.end(ends))

    def _keep(self, work: Callable[[History], None]) -> None:
        try:
            if (history := self._database.history()) is not None:
                work(history)
        except DualWriteError as error:
            logger.warning("%s: the history of actions cannot be kept: %s", self.target.name, error)

    def _note_report(self, writer: str, report: RecoveryReport) -> str | None:
        """Count and log what was done. Returns what hindered it, if anything did."""
        sent = sum(report.sent.values())
        self._counts["settled"] += len(report.settled)
        self._counts["rolled forward"] += len(report.rolled_forward)
        self._counts["losses"] += len(report.losses)
        self._counts["sent"] += sent
        if report.settled or sent or report.losses:
            self._note(f"{writer}: {recovery_words(report)}", logging.ERROR if report.losses else logging.INFO)
        if report.went_back:
            return str(report.went_back[0])
        return "left alone: its owner has come back" if report.skipped else None

    def _note(self, what: str, level: int) -> None:
        logger.log(level, "%s: %s", self.target.name, what)

    def _publish(self) -> None:
        now = now_s()
        self.snapshot = Snapshot(
            target=self.target.name,
            leads=self._leads,
            round=self._round,
            round_s=self._round_s,
            plans=tuple(self._plans),
            tries=dict(self._tries),
            now_s=now,
            error=self._error,
            alive_s=now,
            counts=dict(self._counts),
            findings=tuple(self._findings),
        )
