"""Inspects decided native transactions that are unsettled, by questions that change nothing but knowledge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from dualwrite.clock import Deadline
from dualwrite.interfaces__ports_coordinator import NativeCoordinator
from dualwrite.protocol.settle import SettleStep
from dualwrite.protocol.settle_native import NativeKnowledge, NativeStep, found_open, initial, looked, next_step, proved
from dualwrite.protocol.values import EndAnswer
from dualwrite.protocol.values__protocol_identity import Partition
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.inspect__recovery_settling_rounds import Incarnation, by_step

UnsettledNative = Incarnation[NativeKnowledge]
"""An incarnation that has decided a native transaction."""


def unsettled_native(
    row: StateRow, upto: int, undecided_in: Mapping[int, frozenset[Partition]] = MappingProxyType({})
) -> UnsettledNative | None:
    """The row's incarnation that has decided a native transaction and is not settled; None if there is none.

    Args:
        row: The row.
        upto: The last incarnation that counts.
        undecided_in: By incarnation, partitions that its owner knows of, besides those that the state names.
    """
    state, incarnation = row.prepared, row.prepared.incarnation
    if not state.is_native or incarnation is None or not row.settled_incarnation < incarnation <= upto:
        return None
    return UnsettledNative(row, incarnation, initial(state, row.completed, undecided_in.get(incarnation, frozenset())))


class NativeInspection:
    """The questions to Kafka, which change nothing but knowledge."""

    def __init__(self, coordinator: NativeCoordinator, deadline: Deadline) -> None:
        self._coordinator = coordinator
        self._deadline = deadline
        self.questions: dict[NativeStep, Callable[[list[UnsettledNative]], None]] = {
            NativeStep.LOOK: self._look,
            NativeStep.PROVE: self._prove,
            NativeStep.LOOK_FOR_OPEN: self._look_for_open,
        }

    def _look(self, items: list[UnsettledNative]) -> None:
        views = self._coordinator.describe([item.kafka_id for item in items], self._deadline)
        for item in items:
            item.known = looked(item.known, views[item.kafka_id])

    def _prove(self, items: list[UnsettledNative]) -> None:
        proofs = self._coordinator.prove([item.row.prepared for item in items], self._deadline)
        for item, proof in zip(items, proofs, strict=True):
            item.known = proved(item.known, proof)

    def _look_for_open(self, items: list[UnsettledNative]) -> None:
        asked = [(item.row.prepared, item.known.suspects) for item in items]
        for item, found in zip(items, self._coordinator.open_transactions(asked, self._deadline), strict=True):
            item.known = found_open(item.known, tuple(found))


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
"""The steps of a dry run, which never reads the fence, in the words of the other engine's."""


def inspect_native(
    items: Sequence[UnsettledNative], *, coordinator: NativeCoordinator, deadline: Deadline
) -> list[SettleStep]:
    """Find out what settling would do now with each of them. Changes nothing.

    Ending a transaction that is not open any more changes nothing, so the questions after it can be asked without it.

    Raises:
        Unavailable: Kafka did not answer in time.
    """
    inspection = NativeInspection(coordinator, deadline)
    for item in items:
        item.known = replace(item.known, answer=EndAnswer.FENCED)
    while groups := by_step(items, next_step, inspection.questions):
        for step, group in groups.items():
            inspection.questions[step](group)
    return [_AS_FOR_LIBRDKAFKA[next_step(item.known)] for item in items]
