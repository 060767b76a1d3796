"""Inspects what is unsettled, by questions that change nothing but knowledge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator, native_of
from dualwrite.protocol.settle import QUESTIONS, Knowledge, SettleStep, compared, initial, looked, next_step, proved
from dualwrite.protocol.values import TransactionView
from dualwrite.protocol.values__protocol_identity import Partition, belongs, is_open, others_than
from dualwrite.protocol.values__protocol_rows import Participant, StateRow
from dualwrite.recovery.inspect__recovery_settling_inspect_native import (
    UnsettledNative,
    inspect_native,
    unsettled_native,
)
from dualwrite.recovery.inspect__recovery_settling_rounds import Incarnation, by_step

logger = logging.getLogger(__name__)

Unsettled = Incarnation[Knowledge]


def unsettled(
    row: StateRow, upto: int, undecided_in: Mapping[int, frozenset[Partition]] = MappingProxyType({})
) -> list[Unsettled]:
    """The incarnations of a row from the first unsettled one up to and including ``upto``.

    Args:
        row: The row.
        upto: The last incarnation.
        undecided_in: By incarnation, partitions that its owner knows of, besides those that the coordinator shows.
    """
    return [
        Unsettled(row, incarnation, _initial_knowledge(row, incarnation, undecided_in.get(incarnation, frozenset())))
        for incarnation in range(row.settled_incarnation + 1, upto + 1)
    ]


def _initial_knowledge(row: StateRow, incarnation: int, undecided_in: frozenset[Partition]) -> Knowledge:
    known = initial(row.prepared, row.completed) if belongs(row.prepared, incarnation) else Knowledge()
    return replace(known, suspects=known.suspects | undecided_in, tainted=known.tainted | undecided_in)


class Inspection:
    """The recipe's questions, which change nothing but knowledge."""

    def __init__(self, coordinator: TransactionCoordinator, deadline: Deadline) -> None:
        self._coordinator = coordinator
        self._deadline = deadline
        self.questions: dict[SettleStep, Callable[[list[Unsettled]], None]] = {
            SettleStep.LOOK: self._look,
            SettleStep.LOOK_AT_PARTITIONS: self._look_at_partitions,
            SettleStep.LOOK_FOR_OPEN: self._look_for_open,
            SettleStep.PROVE: self._prove,
        }

    def _look(self, items: list[Unsettled]) -> None:
        for item, view in zip(items, self._views(items), strict=True):
            item.known = looked(item.known, view)

    def _views(self, items: list[Unsettled]) -> Sequence[TransactionView]:
        views = self._coordinator.describe([item.kafka_id for item in items], self._deadline)
        return [views[item.kafka_id] for item in items]

    def _look_at_partitions(self, items: list[Unsettled]) -> None:
        states = [item.row.prepared for item in items]
        observed = self._coordinator.open_offsets(states, self._deadline)
        others = [
            (state.producer_id, others_than(state, shown))
            for item, state in zip(items, states, strict=True)
            if (shown := item.known.view) is not None
        ]
        beside = self._coordinator.still_open(others, self._deadline)
        for item, offsets, open_beside in zip(items, observed, beside, strict=True):
            item.known = compared(item.known, is_open(item.row.prepared, offsets) and not open_beside)

    def _look_for_open(self, items: list[Unsettled]) -> None:
        try:
            self._find_open(items)
        except ConfigurationError:
            for item in items:
                self._find_open_of(item)

    def _find_open(self, items: list[Unsettled]) -> None:
        suspects = [(_suspected(item), item.known.suspects) for item in items]
        for item, offsets in zip(items, self._coordinator.still_open(suspects, self._deadline), strict=True):
            item.known = replace(item.known, still_open=tuple(sorted(offsets.items())))

    def _find_open_of(self, item: Unsettled) -> None:
        try:
            self._find_open([item])
        except ConfigurationError as error:
            if item.known.is_pending:
                raise
            # It is undecided: a settler that has no right to read its partitions can still retire it.
            logger.warning("%s: could not check its partitions after the abort: %s", item.kafka_id, error)
            item.known = replace(item.known, suspects=frozenset(), still_open=())

    def _prove(self, items: list[Unsettled]) -> None:
        proofs = self._coordinator.prove([item.row.prepared for item in items], self._deadline)
        for item, proof in zip(items, proofs, strict=True):
            item.known = proved(item.known, proof)


def _suspected(item: Unsettled) -> int:
    """The producer id that may have a transaction left open: for a decided one, the row's, whatever the coordinator shows."""
    return item.row.prepared.producer_id if item.known.is_pending else item.ids[0]


def inspect(
    rows: Sequence[StateRow],
    *,
    coordinator: TransactionCoordinator,
    deadline: Deadline,
    participants: Iterable[Participant] = (),
) -> list[tuple[Unsettled, SettleStep]]:
    """Find out what settling would do now with every unsettled incarnation, the owners' own included. Changes nothing.

    Args:
        rows: The rows.
        coordinator: Kafka.
        deadline: Limits the whole call.
        participants: The transactions prepared in the database; those of settled incarnations come at the end.

    Returns:
        Each incarnation with its first step that is not a question.

    Raises:
        Unavailable: Kafka did not answer in time.
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
    """A dry run need not query partitions of undecided transactions: they will be aborted regardless."""
    for item in items:
        item.known = replace(item.known, suspects=frozenset())
