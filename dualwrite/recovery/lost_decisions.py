"""Looks back for decisions that the database has lost, before settling and after a restore.

A database that was restored from a backup no longer names transactions that Kafka has committed. To settle on such rows
would abort or repeat them, so both kinds are looked for first: transactions of ids that still have a row, and ids that
have none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.interfaces import StateStore, TransactionCoordinator
from dualwrite.protocol.lost_decisions import Known, Later, Lookup, known_of, look_up, lost_decision
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import StateRow, TransactionStatus, is_drawn, parsed
from dualwrite.recovery.inspect import beginnings

logger = logging.getLogger(__name__)

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


def _fences(items: Sequence[tuple[StateRow, int]], known: Sequence[Known], store: StateStore) -> Sequence[int | None]:
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
    """Describe, for people, a lost decision that :func:`lost_decisions` returned."""
    state = lost.prepared
    where = beginnings(state)
    shown = f"that begins at {where}" if where else f"of producer {state.producer_id}:{state.epoch}"
    return (
        f"Kafka has committed a transaction of incarnation {state.incarnation} {shown}, which the row does not name: "
        "there may be earlier ones that the database has lost too"
    )


# Recovery after a restore: finds what Kafka knows of transactional ids and the database has forgotten.


@dataclass(frozen=True)
class Forgotten:
    """One Kafka id that the restored database does not know.

    Attributes:
        kafka_id: Kafka's ``transactional.id``.
        transactional_id: The id of the writer or lane.
        incarnation: The incarnation.
        status: The coordinator's status of it before recovery did anything.
        has_row: Whether the database has a row for that id, with an older incarnation.
        settled: Whether recovery made the id unusable and aborted what was open under it. False: left alone.
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

    An id with another namespace than its row's is left out: it belongs to another database, or to a row that was deleted.
    ``rows`` are all rows of the requested ids; ``is_asked_for`` says whether an id without a row may be settled, as another
    database's ids look the same.
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
    # A broker may list ids that it coordinates no more (KAFKA-21481). Those that their coordinator does not know are gone.
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
    """Make the ids without a row unusable. No row names what is open under them, so it is aborted.

    After ``Unavailable``, run it again: some may be left.
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

    Rows with evidence are read again from the store, as their owners may have continued meanwhile.
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
