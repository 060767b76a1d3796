"""Rounds over many incarnations: all those at the same step go together, so that a round asks each broker once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import LogProof, Outcome, TransactionView
from dualwrite.protocol.values__protocol_identity import Partition
from dualwrite.protocol.values__protocol_rows import StateRow


class HasView(Protocol):
    """Knowledge of an incarnation, whichever engine made its transactions."""

    @property
    def view(self) -> TransactionView | None:
        """The coordinator's answer; None if it was not asked."""
        ...


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
    """Warn of a committed transaction whose records are not in the log any more.

    Retention deletes records of open transactions, too. No outcome shows that readers have never had them.
    """
    if proof is LogProof.UNKNOWABLE:
        logger.warning(
            "%s: %s is committed, but its first records are no longer in the log: if it was open until now, retention or "
            "compaction has deleted messages before any reader could have them",
            item.kafka_id,
            item.row.prepared,
        )


Steps = Mapping[Step, Callable[[list[Incarnation[Known]]], None]]
"""By step, what carries it out."""


def by_step(
    items: Iterable[Incarnation[Known]], next_step: Callable[[Known], Step], among: Collection[Step]
) -> dict[Step, list[Incarnation[Known]]]:
    """The incarnations by their next step, as far as it is among these."""
    groups: dict[Step, list[Incarnation[Known]]] = {}
    for item in items:
        if (step := next_step(item.known)) in among:
            groups.setdefault(step, []).append(item)
    return groups


def perform(
    groups: Mapping[Step, list[Incarnation[Known]]], do: Steps[Step, Known], waiting: Step, deadline: Deadline
) -> None:
    """Carry out one round: each group's step. Those that wait get their turn when no other can move on.

    Raises:
        Unavailable: The deadline has come.
    """
    for step, group in groups.items():
        if step is waiting and len(groups) > 1:
            continue
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

    Args:
        items: The incarnations.
        to_end: The partitions of one, and whether they end with commit.
        end: Ends the transactions of these incarnations with commit, or with abort.
        coordinator: Kafka.
        deadline: Limits the requests.
        logger: Tells which partitions it were.

    Returns:
        Those for which this was done. The id of the others has another epoch by now: another settler does the same.
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
