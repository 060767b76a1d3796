"""Looks back, before settling, for transactions that Kafka has committed and the database has forgotten."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.interfaces import StateStore
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
from dualwrite.protocol.lost_decisions import Known, Later, Lookup, known_of, look_up, lost_decision
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.inspect__recovery_settling_rounds import beginnings

logger = logging.getLogger(__name__)

_LONGEST_S: Final = 10.0
"""Limits the reading of logs: settling, for which consumers wait, comes after it."""


def lost_decisions(
    rows: Collection[StateRow],
    *,
    coordinator: TransactionCoordinator,
    store: StateStore,
    deadline: Deadline,
    upto_own: bool = False,
) -> Sequence[StateRow]:
    """Find decisions that the database has lost: Kafka has committed them, and no row or incident names them.

    Call it before anything is settled: a retired id no longer shows its last transaction. Changes nothing.

    Args:
        rows: Rows as a claim returned them, or as they were read.
        coordinator: Kafka.
        store: The database.
        deadline: Limits the requests.
        upto_own: Whether to look at the rows' own incarnations, too, not only at earlier ones. The rows must be read again
            afterwards: their owners may have decided meanwhile.

    Returns:
        The rows that have lost something, with the newest lost decision as ``prepared``. It names the partitions in which it
        was seen; one that only the coordinator has shown names none.

    Raises:
        Unavailable: The coordinators did not answer in time.
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


def _fences(items: Sequence[tuple[StateRow, int]], known: Sequence[Known], store: StateStore) -> Sequence[int | None]:
    """The fences of incarnations with a native transaction, read after the coordinator was asked.

    A settler writes the fence before it raises the coordinator's epoch. Where the row names another transaction by now, a newer
    owner has settled this one: as if it had been fenced from the beginning.
    """
    native = {row.transactional_id for (row, _), one in zip(items, known, strict=True) if _is_native(one)}
    rows = {row.transactional_id: row for row in store.read(sorted(native))} if native else {}

    def fence_of(row: StateRow) -> int | None:
        now = rows.get(row.transactional_id)
        same = now is not None and (now.namespace, now.prepared) == (row.namespace, row.prepared)
        return now.settle_fence if now is not None and same else 0

    return [fence_of(row) if _is_native(one) else None for (row, _), one in zip(items, known, strict=True)]


def _is_native(known: Known) -> bool:
    return known.newest is not None and known.newest.is_native


def _read_logs(
    known: Sequence[Known], answers: Sequence[Lookup], coordinator: TransactionCoordinator, deadline: Deadline
) -> Mapping[Known, Later]:
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
    """Describe a lost decision for people.

    Args:
        lost: As :func:`lost_decisions` returned it.
    """
    state = lost.prepared
    where = beginnings(state)
    shown = f"that begins at {where}" if where else f"of producer {state.producer_id}:{state.epoch}"
    return (
        f"Kafka has committed a transaction of incarnation {state.incarnation} {shown}, which the row does not name: "
        "there may be earlier ones that the database has lost too"
    )
