"""Settles decided native transactions: :mod:`dualwrite.protocol.settle_native` decides, this asks and acts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from dualwrite import failpoints
from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import Unavailable
from dualwrite.interfaces import Claims, NativeCoordinator, Records
from dualwrite.protocol.settle_native import (
    NativeStep,
    acted,
    ended,
    fence_raised,
    new_fence,
    next_step,
    read_fence,
    recorded,
    to_repair,
)
from dualwrite.protocol.values import EndAnswer, Outcome, StateRow
from dualwrite.recovery.inspect import (
    NativeInspection,
    UnsettledNative,
    beginnings,
    by_step,
    named,
    perform,
    repair,
    warn_if_deleted,
    with_reason,
)

logger = logging.getLogger(__name__)


class NativeStore(Claims, Records, Protocol):
    """The parts of the store that settling a native transaction needs."""


class NativeSettling(NativeInspection):
    """Settles decided native transactions, together in rounds. Every step may be repeated, and run by two processes at once."""

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
        self._do: dict[NativeStep, Callable[[list[UnsettledNative]], None]] = {
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

    def run(self, items: Sequence[UnsettledNative]) -> None:
        """Settle all of them in Kafka and record their outcomes. The caller then raises ``settled_incarnation``.

        ``Unavailable`` also if a forgotten transaction could be repaired only at the risk of losing it. Settle again.
        """
        while groups := by_step(items, next_step, self._do):
            perform(groups, self._do, NativeStep.WAIT, self._deadline)

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
            (item.row, outcome, with_reason(_detail(item, outcome), item.row, outcome, self._lost_because))
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


def _detail(item: UnsettledNative, outcome: Outcome) -> str:
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
