"""The settling recipe: bring Kafka in line with the rows, for one or for thousands of incarnations at once.

All incarnations move together in rounds, so that a round asks each broker once, however many there are.
:func:`dualwrite.protocol.settle.next_step` alone decides what happens to each. Every step may be repeated, and
run by two processes at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, Protocol

from dualwrite import failpoints
from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, DualWriteError, OutcomeUnverifiable, Unavailable
from dualwrite.interfaces import (
    NO_OBSERVER,
    Claims,
    NativeCoordinator,
    Observer,
    Records,
    StateStore,
    TransactionCoordinator,
    native_of,
)
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Knowledge, SettleStep, looked, next_step, retired, to_end
from dualwrite.protocol.settle_native import (
    NativeStep,
    acted,
    ended,
    fence_raised,
    new_fence,
    next_native_step,
    read_fence,
    recorded,
    to_repair,
)
from dualwrite.protocol.values import EndAnswer, Outcome, Participant, Partition, StateRow, gone_back, own_among
from dualwrite.recovery.inspect import (
    Inspection,
    NativeInspection,
    Unsettled,
    UnsettledNative,
    beginnings,
    by_step,
    lost_decisions,
    lost_detail,
    named,
    perform,
    repair,
    unsettled,
    unsettled_native,
    warn_if_deleted,
    with_reason,
)

logger = logging.getLogger(__name__)


class NativeStore(Claims, Records, Protocol):
    """The parts of the store that settling a native transaction needs."""


class NativeSettling(NativeInspection):
    """The steps of settling decided native transactions, ``do``, which record outcomes. ``Unavailable``: settle again.

    The caller then raises ``settled_incarnation``.
    """

    def __init__(
        self,
        coordinator: NativeCoordinator,
        store: NativeStore,
        deadline: Deadline,
        lost_because: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(coordinator, deadline)
        self._store = store
        self._lost_because = lost_because
        self._between = GrowingPause()
        self.rolled_forward: list[str] = []
        self.repaired: list[str] = []
        self.losses: list[tuple[StateRow, Outcome, str]] = []
        self.do: dict[NativeStep, Callable[[list[UnsettledNative]], None]] = {
            **self.questions,
            NativeStep.END: self._end,
            NativeStep.WAIT: self._wait,
            NativeStep.READ_FENCE: self._read_fence,
            NativeStep.RECORD_COMMITTED: lambda items: self._record(items, Outcome.COMMITTED),
            NativeStep.RECORD_LOST: lambda items: self._record(items, Outcome.LOST),
            NativeStep.RECORD_UNVERIFIABLE: lambda items: self._record(items, Outcome.UNVERIFIABLE),
            NativeStep.RAISE_FENCE: self._raise_fence,
            NativeStep.ABORT: lambda items: self._end_shown(items, committed=False),
            NativeStep.JOIN: lambda items: self._end_shown(items, committed=True),
            NativeStep.REPAIR: self._repair,
            NativeStep.STOP: self._stop,
        }

    def _end(self, items: list[UnsettledNative]) -> None:
        failpoints.hit("settle.before_commit")
        decided = {item.kafka_id: (item.row.prepared.producer_id, item.row.prepared.epoch) for item in items}
        answers = self._coordinator.end_exactly(decided, committed=True, deadline=self._deadline)
        failpoints.hit("settle.committed")
        for item in items:
            answer = answers[item.kafka_id]
            logger.info("%s: rolling forward %s: %s", item.kafka_id, item.row.prepared, answer.value)
            if answer is EndAnswer.ENDED:
                self.rolled_forward.append(item.row.transactional_id)
            item.known = ended(item.known, answer)

    def _look(self, items: list[UnsettledNative]) -> None:
        super()._look(items)
        failpoints.hit("settle.looked")

    def _wait(self, items: list[UnsettledNative]) -> None:
        self._between.wait(self._deadline)
        for item in items:
            item.known = acted(item.known)

    def _read_fence(self, items: list[UnsettledNative]) -> None:
        rows = {row.transactional_id: row for row in self._store.read([item.row.transactional_id for item in items])}
        for item in items:
            row = rows.get(item.row.transactional_id)
            if row is None or row.namespace != item.row.namespace:
                raise Unavailable("the row is gone", transactional_id=item.row.transactional_id)
            item.known = read_fence(item.known, row.prepared, row.settle_fence)
            if not item.known.is_overwritten:
                item.row = row

    def _raise_fence(self, items: list[UnsettledNative]) -> None:
        for item in items:
            written = self._store.raise_fence(item.row, new_fence(item.known))
            item.known = fence_raised(item.known, written=written)
        failpoints.hit("settle.before_retire")

    def _end_shown(self, items: list[UnsettledNative], *, committed: bool) -> None:
        shown = {item.kafka_id: item.ids for item in items}
        answers = self._coordinator.end_exactly(shown, committed=committed, deadline=self._deadline)
        failpoints.hit("settle.retired")
        for item in items:
            answer = answers[item.kafka_id]
            how = "commit" if committed else "abort"
            logger.info("%s: ending epoch %d with %s: %s", item.kafka_id, item.ids[1], how, answer.value)
            item.known = acted(item.known)

    def _repair(self, items: list[UnsettledNative]) -> None:
        mine = repair(items, to_repair, self._end_repair, self._coordinator, deadline=self._deadline, logger=logger)
        self.repaired += [item.row.transactional_id for item in mine]
        self._wait(items)

    def _end_repair(self, items: list[UnsettledNative], committed: bool) -> None:  # noqa: FBT001 - see `repair`
        shown = {item.kafka_id: item.ids for item in items}
        self._coordinator.end_exactly(shown, committed=committed, deadline=self._deadline)

    def _record(self, items: list[UnsettledNative], outcome: Outcome) -> None:
        details = [
            (item.row, outcome, with_reason(_native_detail(item, outcome), item.row, outcome, self._lost_because))
            for item in items
        ]
        self._store.record_outcomes(details)
        failpoints.hit("settle.recorded")
        for item in items:
            if outcome is Outcome.COMMITTED:
                warn_if_deleted(item, item.known.proof, logger)
            item.known = recorded(item.known, outcome)
        if outcome is not Outcome.COMMITTED:
            for row, _, detail in details:
                logger.error("%s: %s", row.transactional_id, detail)
            self.losses += details

    def _stop(self, items: list[UnsettledNative]) -> None:
        item = items[0]
        raise Unavailable(
            f"the broker has forgotten (KAFKA-20734) to end a decided transaction in {named(item.known.own)}, and could time "
            "out the repair unnoticed",
            transactional_id=item.row.transactional_id,
            next_step="write its commit marker there by hand, and set transaction.max.timeout.ms=2147483647 for later ones",
        )


def _native_detail(item: UnsettledNative, outcome: Outcome) -> str:
    state, view = item.row.prepared, item.known.view
    shown = f"the coordinator shows {view.status.value}" if view else "the coordinator was not asked"
    still_open = f"; it is still open in {named(item.known.own)}" if item.known.own else ""
    said = {
        Outcome.COMMITTED: "committed in Kafka",
        Outcome.LOST: "decided by the database, aborted by the broker",
        Outcome.UNVERIFIABLE: "decided by the database; nothing proves its outcome any more",
    }[outcome]
    where = beginnings(state)
    among = f", among them {where}" if where else ""
    return (
        f"transaction {state.producer_id}:{state.epoch} of incarnation {item.incarnation}, "
        f"in {len(state.partitions)} partitions{among}: {said}; {shown}{still_open}"
    )


@dataclass(frozen=True)
class Loss:
    """A decided transaction that settling found aborted, or could not verify.

    Attributes:
        row: The row as claimed; ``row.prepared`` is the transaction.
        outcome: ``LOST`` or ``UNVERIFIABLE``.
        detail: The evidence, for people.
        went_back: Whether the database has lost the decision, while Kafka has its messages.
    """

    row: StateRow
    outcome: Outcome
    detail: str
    went_back: bool = False

    def as_error(self) -> DatabaseWentBack | DecidedTransactionLost | OutcomeUnverifiable:
        """The error that reports it."""
        if self.went_back:
            return gone_back(self.detail, self.row.transactional_id, str(self.row.prepared), recorded=True)
        kind = DecidedTransactionLost if self.outcome is Outcome.LOST else OutcomeUnverifiable
        return kind(self.detail, transactional_id=self.row.transactional_id, state=str(self.row.prepared))


@dataclass
class SettleReport:
    """The result of a settling, by transactional id.

    Attributes:
        rolled_forward: Those whose decided transaction was committed now.
        retired: How many times an incarnation's Kafka id was made unusable.
        repaired: Those for which settling ended what the broker had forgotten to end in some partitions.
        losses: Decided transactions that Kafka does not have.
    """

    incarnations: int = 0
    rolled_forward: list[str] = field(default_factory=list)
    retired: int = 0
    repaired: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def raise_losses(self) -> None:
        """Raise the first loss as an error, if there is any. Every loss is already in the table of incidents."""
        if self.losses:
            raise self.losses[0].as_error()


def settle(
    rows: Iterable[StateRow],
    *,
    coordinator: TransactionCoordinator,
    store: StateStore,
    deadline: Deadline,
    on_settled: Callable[[str], None] = lambda _: None,
    look_back: bool = True,
    undecided_in: Mapping[str, Mapping[int, frozenset[Partition]]] = MappingProxyType({}),
    observer: Observer = NO_OBSERVER,
    lost_because: Mapping[str, str] = MappingProxyType({}),
) -> SettleReport:
    """Settle every incarnation below each row's own, which the caller has just claimed.

    It looks for decisions that the database has lost, unless ``look_back`` is false: an owner that renews its own claim
    compares the row with what it knows instead. ``undecided_in`` has partitions, by transactional id and incarnation, in which
    an owner may have left an undecided transaction open: if the broker has forgotten to end it, nothing else shows them.
    ``lost_because`` says, by id, why a loss is expected; that is recorded with the loss.

    Losses are recorded, logged and returned, not raised: the caller finishes first.

    Raises:
        Unavailable: The deadline came first. Completed steps stay done; settle again.
        DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable: Settling could not finish, and had already recorded a
            loss.
    """
    claimed = list(rows)
    with observer.settling([row.transactional_id for row in claimed]) as observed:
        report = _Settling(coordinator, store, deadline, on_settled, lost_because).run(
            claimed, undecided_in, look_back=look_back
        )
        observed.settled(report)
    return report


_LATE: Final[Mapping[Enum, int]] = {SettleStep.WAIT: 1, NativeStep.WAIT: 1, NativeStep.STOP: 2}


def _turn(step: Enum) -> int:
    """The round's steps are those with the lowest turn: whatever waits, or gives up, lets all others go first."""
    return _LATE.get(step, 0)


class _Settling(Inspection):
    """One run of the recipe: groups incarnations by step, performs each group's step, and repeats until none is left."""

    def __init__(
        self,
        coordinator: TransactionCoordinator,
        store: StateStore,
        deadline: Deadline,
        on_settled: Callable[[str], None],
        lost_because: Mapping[str, str],
    ) -> None:
        super().__init__(coordinator, deadline)
        self._store = store
        self._on_settled = on_settled
        self._lost_because = lost_because
        self._report = SettleReport()
        self._between = GrowingPause()
        self._do: dict[SettleStep, Callable[[list[Unsettled]], None]] = {
            **self.questions,
            SettleStep.WAIT: self._wait,
            SettleStep.COMMIT: self._commit,
            SettleStep.RECORD_COMMITTED: lambda items: self._record(items, Outcome.COMMITTED),
            SettleStep.RECORD_LOST: lambda items: self._record(items, Outcome.LOST),
            SettleStep.RECORD_UNVERIFIABLE: lambda items: self._record(items, Outcome.UNVERIFIABLE),
            SettleStep.RETIRE: self._retire,
            SettleStep.REPAIR_MARKERS: self._repair_markers,
        }

    def run(
        self,
        rows: Sequence[StateRow],
        undecided_in: Mapping[str, Mapping[int, frozenset[Partition]]],
        *,
        look_back: bool,
    ) -> SettleReport:
        nothing: Mapping[int, frozenset[Partition]] = {}
        undecided = {row.transactional_id: undecided_in.get(row.transactional_id, nothing) for row in rows}
        native = [
            found
            for row in rows
            if (found := unsettled_native(row, row.incarnation - 1, undecided[row.transactional_id])) is not None
        ]
        apart = {found.kafka_id for found in native}
        pending = {
            row.transactional_id: (
                row,
                [
                    item
                    for item in unsettled(row, row.incarnation - 1, undecided[row.transactional_id])
                    if item.kafka_id not in apart
                ],
            )
            for row in rows
        }
        try:
            if look_back:
                self._look_back(rows)
            self._settle(pending, native)
        except DualWriteError:
            self._report.raise_losses()  # already recorded, so no later settling would report them
            raise
        return self._report

    def _look_back(self, rows: Sequence[StateRow]) -> None:
        lost = lost_decisions(rows, coordinator=self._coordinator, store=self._store, deadline=self._deadline)
        self._store.record_outcomes([(row, Outcome.UNVERIFIABLE, lost_detail(row)) for row in lost])
        for row in lost:
            loss = Loss(row, Outcome.UNVERIFIABLE, lost_detail(row), went_back=True)
            logger.error("%s: the database has gone back in time: %s", row.transactional_id, loss.detail)
            self._report.losses.append(loss)

    def _settle(self, pending: dict[str, tuple[StateRow, list[Unsettled]]], natives: Sequence[UnsettledNative]) -> None:
        """Both engines' together: what one cannot finish hinders no other."""
        settling = NativeSettling(native_of(self._coordinator), self._store, self._deadline, self._lost_because)
        try:
            while pending:
                self._mark_finished(pending, natives)
                items = by_step([item for _, of_row in pending.values() for item in of_row], next_step, self._do)
                native = by_step(natives, next_native_step, settling.do)
                turn = min(map(_turn, (*items, *native)), default=0)
                perform({step: of for step, of in native.items() if _turn(step) == turn}, settling.do, self._deadline)
                perform({step: of for step, of in items.items() if _turn(step) == turn}, self._do, self._deadline)
        finally:
            self._report.incarnations += len(natives)
            self._report.rolled_forward += settling.rolled_forward
            self._report.repaired += settling.repaired
            self._report.losses += [Loss(row, outcome, detail) for row, outcome, detail in settling.losses]

    def _mark_finished(
        self, pending: dict[str, tuple[StateRow, list[Unsettled]]], natives: Sequence[UnsettledNative]
    ) -> None:
        unfinished = {
            item.row.transactional_id for item in natives if next_native_step(item.known) is not NativeStep.FINISH
        }
        done = {
            key: row.incarnation - 1
            for key, (row, items) in pending.items()
            if key not in unfinished and all(next_step(item.known) is SettleStep.FINISH for item in items)
        }
        if done:
            rows = [pending[key][0] for key in done]
            end_participants(
                self._store, [one for one in self._store.participants(rows) if one.incarnation < one.row.incarnation]
            )
        raised = {key: mark for key, mark in done.items() if pending[key][0].settled_incarnation < mark}
        if raised:
            self._store.mark_settled(raised)
            failpoints.hit("settle.marked")
        for key in done:
            self._report.incarnations += len(pending.pop(key)[1])
            self._on_settled(key)

    def _look(self, items: list[Unsettled]) -> None:
        super()._look(items)
        failpoints.hit("settle.looked")

    def _wait(self, items: list[Unsettled]) -> None:
        self._between.wait(self._deadline)
        for item in items:
            item.known = replace(item.known, view=None)

    def _commit(self, items: list[Unsettled]) -> None:
        failpoints.hit("settle.before_commit")
        answers = self._end(items, committed=True)
        failpoints.hit("settle.committed")
        for item in items:
            answer = answers[item.kafka_id]
            logger.info("%s: rolling forward %s: %s", item.kafka_id, item.row.prepared, answer.value)
            if answer is EndAnswer.ENDED:
                self._report.rolled_forward.append(item.row.transactional_id)
        # Whatever the answer, only what the coordinator shows next counts.
        self._wait(items)

    def _end(self, items: list[Unsettled], *, committed: bool) -> Mapping[str, EndAnswer]:
        named = {item.kafka_id: PreparedTxnState(*item.ids) for item in items}
        return self._coordinator.end(named, committed=committed, deadline=self._deadline)

    def _record(self, items: list[Unsettled], outcome: Outcome) -> None:
        details = [(item, with_reason(_detail(item, outcome), item.row, outcome, self._lost_because)) for item in items]
        self._store.record_outcomes([(item.row, outcome, detail) for item, detail in details])
        failpoints.hit("settle.recorded")
        for item, detail in details:
            item.known = replace(item.known, recorded=outcome)
            if outcome is not Outcome.COMMITTED:
                loss = Loss(item.row, outcome, detail)
                logger.error("%s: %s", item.kafka_id, loss.detail)
                self._report.losses.append(loss)
            else:
                warn_if_deleted(item, item.known.proof, logger)

    def _retire(self, items: list[Unsettled]) -> None:
        failpoints.hit("settle.before_retire")
        pending = [item for item in items if item.known.is_pending]
        if pending:
            names = [item.row.transactional_id for item in pending]
            found = [item.known for item in pending]
            self._store.while_locked(names, lambda: self._retire_unless_changed(pending, found), self._deadline)
        if len(pending) < len(items):
            self._make_unusable([item for item in items if not item.known.is_pending])

    def _retire_unless_changed(self, items: list[Unsettled], found: list[Knowledge]) -> None:
        """Two settlers may have found the same forgotten transaction. The second must not abort what the first is ending.

        ``found`` is what this settler knew as it decided to retire. The store calls this again if it lost its lock: what the
        coordinator shows must be compared with that, and not with what the first call has seen or done.
        """
        unchanged = []
        for item, known, view in zip(items, found, self._views(items), strict=True):
            if view == known.view:
                unchanged.append(item)
            else:
                item.known = looked(item.known, view)
        if unchanged:
            self._make_unusable(unchanged)

    def _make_unusable(self, items: list[Unsettled]) -> None:
        ids = self._coordinator.retire(
            [item.kafka_id for item in items], self._deadline, timeouts_ms=_timeouts_ms(items)
        )
        failpoints.hit("settle.retired")
        self._report.retired += len(items)
        for item in items:
            logger.info("%s: retired", item.kafka_id)
            item.known = retired(item.known, ids[item.kafka_id])

    def _repair_markers(self, items: list[Unsettled]) -> None:
        mine = repair(items, to_end, self._end_repair, self._coordinator, deadline=self._deadline, logger=logger)
        self._report.repaired += [item.row.transactional_id for item in mine]
        self._wait(items)

    def _end_repair(self, items: list[Unsettled], committed: bool) -> None:  # noqa: FBT001 - see `repair`
        self._end(items, committed=committed)


def end_participants(store: StateStore, participants: Iterable[Participant]) -> None:
    """Commit or roll back prepared database transactions, as decided by the row.

    They include those that a fenced owner prepared after its incarnation was settled.
    """
    for found in participants:
        failpoints.hit("participant.found")
        store.end_participant(found, committed=found.decided)
        failpoints.hit("participant.ended")
        done = "committed" if found.decided else "rolled back"
        logger.info("%s: the prepared database transaction is now %s", found.row.kafka_id(found.incarnation), done)


def _timeouts_ms(items: Iterable[Unsettled]) -> Mapping[str, int]:
    """The timeout for a retired id under which a decided transaction must still be ended: as long as its owner had."""
    return {
        item.kafka_id: view.timeout_ms
        for item in items
        if item.known.is_pending and (view := item.known.view) is not None and view.timeout_ms is not None
    }


def _detail(item: Unsettled, outcome: Outcome) -> str:
    view = item.known.view
    shown = f"the coordinator shows {view.status.value}" if view else "the coordinator was not asked"
    said = {
        Outcome.COMMITTED: "committed in Kafka",
        Outcome.LOST: "decided by the database, aborted by the broker",
        Outcome.UNVERIFIABLE: "decided by the database; its records are no longer in the log, so no marker proves its outcome",
    }[outcome]
    if outcome is Outcome.UNVERIFIABLE and (own := own_among(item.row.prepared, item.known.still_open or ())):
        said = f"decided by the database; it is still open in {named(own)}, and Kafka has forgotten how to end it there"
    return (
        f"transaction of incarnation {item.incarnation} that begins at {beginnings(item.row.prepared)}: {said}; {shown}"
    )
