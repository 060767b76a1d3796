"""Recovery after a restore: finds what Kafka knows of transactional ids and the database has forgotten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dualwrite.clock import Deadline
from dualwrite.interfaces import StateStore
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
from dualwrite.protocol.values import TransactionStatus
from dualwrite.protocol.values__protocol_naming import is_drawn, parsed
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.lost_decisions import lost_decisions, lost_detail

logger = logging.getLogger(__name__)


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

    Args:
        rows: All rows of the requested ids.
        coordinator: Kafka.
        deadline: Limits the requests.
        is_asked_for: Whether an id without a row may be settled. Another database's ids look the same.

    Raises:
        Unavailable: Not all brokers answered in time.
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
    return [
        Forgotten(kafka_id, name, incarnation, views[kafka_id].status, has_row, settled=False)
        for kafka_id, (name, incarnation, has_row) in sorted(found.items())
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

    Raises:
        Unavailable: Not all ids could be retired in time; run it again.
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

    Args:
        rows: The rows as they were read.
        store: The database; rows with evidence are read again, as their owners may have continued meanwhile.
        coordinator: Kafka.
        deadline: Limits the requests.

    Raises:
        Unavailable: The coordinators did not answer in time.
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
