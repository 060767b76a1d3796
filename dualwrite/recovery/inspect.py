"""Inspects what is unsettled, and looks back for lost decisions, by questions that change nothing but knowledge.

All incarnations at the same step go together in *rounds*, so that a round asks each broker once, however many ids there
are. Transactions of the native engine, whose producer id and epoch name them exactly, are asked about in their own way.

A database that was restored from a backup no longer names transactions that Kafka has committed. To settle on such rows
would abort or repeat them, so those of ids that still have a row are looked for before settling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.interfaces import NativeCoordinator, StateStore, TransactionCoordinator
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import (
    Knowledge,
    Later,
    Lookup,
    NewestKnown,
    SettleStep,
    compared,
    initial,
    known_of,
    look_up,
    looked,
    lost_decision,
    proved,
)
from dualwrite.protocol.settle_native import (
    NativeKnowledge,
    NativeStep,
    found_open,
    initial_native,
    looked_native,
    proved_native,
)
from dualwrite.protocol.values import (
    LogProof,
    Outcome,
    Partition,
    StateRow,
    TransactionView,
    belongs,
    is_open,
    others_than,
)

# Rounds over many incarnations: all those at the same step go together, so that a round asks each broker once.


class HasView(Protocol):
    """Knowledge of an incarnation, whichever engine made its transactions."""

    @property
    def view(self) -> TransactionView | None: ...


Known = TypeVar("Known", bound=HasView)
Step = TypeVar("Step", bound=Enum)


@dataclass
class Incarnation(Generic[Known]):
    """One unsettled incarnation: the row it belongs to, and what is known of it."""

    row: StateRow
    incarnation: int
    known: Known

    @property
    def kafka_id(self) -> str:
        """The incarnation's Kafka transactional id."""
        return self.row.kafka_id(self.incarnation)

    @property
    def ids(self) -> tuple[int, int]:
        """The producer id and epoch that the coordinator shows. Only after it was asked."""
        assert self.known.view is not None
        return self.known.view.producer_id, self.known.view.epoch


def with_reason(detail: str, row: StateRow, outcome: Outcome, lost_because: Mapping[str, str]) -> str:
    """The detail of an outcome; of a loss that is expected, with the reason."""
    why = lost_because.get(row.transactional_id) if outcome is Outcome.LOST else None
    return detail if why is None else f"{detail}; {why}"


def warn_if_deleted(item: Incarnation[Known], proof: LogProof | None, logger: logging.Logger) -> None:
    """Warn of deleted records of a committed transaction: retention deletes those of open ones, and no outcome shows it."""
    if proof is LogProof.UNKNOWABLE:
        logger.warning(
            "%s: %s is committed, but its first records are no longer in the log: if it was open until now, retention or "
            "compaction has deleted messages before any reader could have them",
            item.kafka_id,
            item.row.prepared,
        )


Steps = Mapping[Step, Callable[[list[Incarnation[Known]]], None]]


def by_step(
    items: Iterable[Incarnation[Known]], next_step: Callable[[Known], Step], among: Collection[Step]
) -> dict[Step, list[Incarnation[Known]]]:
    """The incarnations by their next step, as far as it is among these."""
    groups: dict[Step, list[Incarnation[Known]]] = {}
    for item in items:
        if (step := next_step(item.known)) in among:
            groups.setdefault(step, []).append(item)
    return groups


def perform(groups: Mapping[Step, list[Incarnation[Known]]], do: Steps[Step, Known], deadline: Deadline) -> None:
    """Carry out one round: each group's step."""
    for step, group in groups.items():
        if deadline.expired:
            raise _too_late(group[0], step)
        do[step](group)


def _too_late(item: Incarnation[Known], step: Enum) -> Unavailable:
    shown = item.known.view.status.value if item.known.view else "nothing yet"
    return Unavailable(
        f"settling incarnation {item.incarnation} did not finish in time: the coordinator shows {shown}, "
        f"the next step is to {step.value}",
        transactional_id=item.row.transactional_id,
    )


def repair(
    items: Sequence[Incarnation[Known]],
    to_end: Callable[[Known], tuple[frozenset[Partition], bool]],
    end: Callable[[list[Incarnation[Known]], bool], None],
    coordinator: TransactionCoordinator,
    *,
    deadline: Deadline,
    logger: logging.Logger,
) -> list[Incarnation[Known]]:
    """End what the broker has forgotten to end, in a transaction of its own under the epoch that the coordinator shows.

    ``to_end`` names the partitions of one, and whether they end with commit. Returns those for which this was done: the id of
    the others has another epoch by now, and another settler does the same.
    """
    failpoints.hit("repair.before")
    ends = {item.kafka_id: to_end(item.known) for item in items}
    for item in items:
        partitions, committed = ends[item.kafka_id]
        logger.warning(
            "%s: the broker left a transaction open in %s (KAFKA-20734); ending it there now with %s",
            item.kafka_id,
            named(partitions),
            "commit" if committed else "abort",
        )
    added = coordinator.add_partitions({item.kafka_id: (*item.ids, ends[item.kafka_id][0]) for item in items}, deadline)
    failpoints.hit("repair.added")
    mine = [item for item in items if added[item.kafka_id]]
    for committed in (True, False):
        if some := [item for item in mine if ends[item.kafka_id][1] is committed]:
            end(some, committed)
    failpoints.hit("repair.ended")
    return mine


def named(partitions: Iterable[Partition]) -> str:
    """Partitions for people."""
    return ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(partitions))


def beginnings(state: PreparedTxnState) -> str:
    """The first offsets of a transaction for people."""
    return ", ".join(f"{first.topic}[{first.partition}]@{first.offset}" for first in state.first_offsets)


logger = logging.getLogger(__name__)

Unsettled = Incarnation[Knowledge]


def unsettled(
    row: StateRow, upto: int, undecided_in: Mapping[int, frozenset[Partition]] = MappingProxyType({})
) -> list[Unsettled]:
    """The row's incarnations from the first unsettled one to ``upto``; only their owner knows of ``undecided_in``."""
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


# Inspects decided native transactions that are unsettled, by questions that change nothing but knowledge.

UnsettledNative = Incarnation[NativeKnowledge]


def unsettled_native(
    row: StateRow, upto: int, undecided_in: Mapping[int, frozenset[Partition]] = MappingProxyType({})
) -> UnsettledNative | None:
    """The row's incarnation that has decided a native transaction and is not settled; None if there is none."""
    state, incarnation = row.prepared, row.prepared.incarnation
    if not state.is_native or incarnation is None or not row.settled_incarnation < incarnation <= upto:
        return None
    return UnsettledNative(
        row, incarnation, initial_native(state, row.completed, undecided_in.get(incarnation, frozenset()))
    )


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
            item.known = looked_native(item.known, views[item.kafka_id])

    def _prove(self, items: list[UnsettledNative]) -> None:
        proofs = self._coordinator.prove([item.row.prepared for item in items], self._deadline)
        for item, proof in zip(items, proofs, strict=True):
            item.known = proved_native(item.known, proof)

    def _look_for_open(self, items: list[UnsettledNative]) -> None:
        asked = [(item.row.prepared, item.known.suspects) for item in items]
        for item, found in zip(items, self._coordinator.open_transactions(asked, self._deadline), strict=True):
            item.known = found_open(item.known, tuple(found))


_LONGEST_S: Final = 10.0
"""Limits the reading of logs. Settling comes after it, and consumers wait for that."""


def lost_decisions(
    rows: Collection[StateRow],
    *,
    coordinator: TransactionCoordinator,
    store: StateStore,
    deadline: Deadline,
    upto_own: bool = False,
) -> Sequence[StateRow]:
    """Find decisions that the database has lost: Kafka has committed them, and no row or incident names them.

    Call it before anything is settled: a retired id no longer shows its last transaction. Changes nothing. With ``upto_own``
    it also looks at the rows' own incarnations, and the rows must be read again afterwards: their owners may have decided
    meanwhile.

    The rows that it returns have the newest lost decision as ``prepared``. That names the partitions in which it was seen; one
    that only the coordinator has shown names none.
    """
    items = [
        (row, incarnation)
        for row in rows
        for incarnation in range(row.settled_incarnation + 1, row.incarnation + upto_own)
    ]
    if not items:
        return []
    views = coordinator.describe([row.kafka_id(incarnation) for row, incarnation in items], deadline)
    named = _named([row for row, _ in items], store)
    known = [known_of(named[row.transactional_id], incarnation) for row, incarnation in items]
    shown = [views[row.kafka_id(incarnation)] for row, incarnation in items]
    fences = _fences(items, known, store)
    answers = [look_up(*one) for one in zip(known, shown, fences, strict=True)]
    later = _read_logs(known, answers, coordinator, deadline)
    found: dict[str, StateRow] = {}
    for (row, incarnation), of_incarnation, view, answer in zip(items, known, shown, answers, strict=True):
        lost = lost_decision(of_incarnation, view, incarnation, answer, later.get(of_incarnation))
        if lost is not None:  # the newest incarnation comes last
            found[row.transactional_id] = replace(row, prepared=lost, completed=None)
    return [found[key] for key in sorted(found)]


def _named(rows: Collection[StateRow], store: StateStore) -> dict[str, list[PreparedTxnState]]:
    named = {row.transactional_id: [row.prepared] for row in rows}
    for incident in store.incidents_of(named.keys()):
        named[incident.transactional_id].append(incident.state)
    return named


def _fences(
    items: Sequence[tuple[StateRow, int]], known: Sequence[NewestKnown], store: StateStore
) -> Sequence[int | None]:
    """The fences of incarnations with a native transaction, read after the coordinator was asked.

    A settler writes the fence before it raises the coordinator's epoch. If the row names another transaction by now, a newer
    owner has settled this one; it counts as fenced from the beginning.
    """
    native = {row.transactional_id for (row, _), one in zip(items, known, strict=True) if _is_native(one)}
    rows = {row.transactional_id: row for row in store.read(sorted(native))} if native else {}

    def fence_of(row: StateRow) -> int | None:
        now = rows.get(row.transactional_id)
        same = now is not None and (now.namespace, now.prepared) == (row.namespace, row.prepared)
        return now.settle_fence if now is not None and same else 0

    return [fence_of(row) if _is_native(one) else None for (row, _), one in zip(items, known, strict=True)]


def _is_native(known: NewestKnown) -> bool:
    return known.newest is not None and known.newest.is_native


def _read_logs(
    known: Sequence[NewestKnown], answers: Sequence[Lookup], coordinator: TransactionCoordinator, deadline: Deadline
) -> Mapping[NewestKnown, Later]:
    to_read = {
        of_incarnation: of_incarnation.newest
        for of_incarnation, answer in zip(known, answers, strict=True)
        if answer is not Lookup.NOTHING and of_incarnation.newest is not None and of_incarnation.newest.first_offsets
    }
    if not to_read:
        return {}
    try:
        later = coordinator.later_commits(list(to_read.values()), Deadline(min(deadline.remaining_s(), _LONGEST_S)))
    except (ConfigurationError, Unavailable) as error:
        logger.warning("could not look for all decisions that the database may have lost: %s", error)
        return {}
    return dict(zip(to_read, later, strict=True))


def lost_detail(lost: StateRow) -> str:
    """Describe, for people, a lost decision that :func:`lost_decisions` returned."""
    state = lost.prepared
    where = beginnings(state)
    shown = f"that begins at {where}" if where else f"of producer {state.producer_id}:{state.epoch}"
    return (
        f"Kafka has committed a transaction of incarnation {state.incarnation} {shown}, which the row does not name: "
        "there may be earlier ones that the database has lost too"
    )
