"""Decides which transactional ids may be forgotten: unused ones with nothing unsettled and no unacknowledged loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dualwrite.protocol.values__protocol_naming import writer_of


@dataclass(frozen=True)
class Facts:
    """The facts about one id.

    Attributes:
        untouched_for_s: Seconds since its row was last written.
        unsettled: Whether recovery would change something, or a transaction of the id is open in Kafka or the database.
        leased: Whether a worker holds its slot, or may continue with it.
        has_open_incident: Whether it has a recorded loss that nobody has acknowledged.
    """

    untouched_for_s: float
    unsettled: bool = False
    leased: bool = False
    has_open_incident: bool = False


def reason_to_keep(facts: Facts, untouched_for_s: float) -> str | None:
    """The most urgent reason why the id must stay; None if it may go."""
    if facts.unsettled:
        return "unsettled: run dualwrite recover"
    if facts.has_open_incident:
        return "a loss that nobody has acknowledged: see dualwrite status"
    if facts.leased:
        return "a worker holds it"
    if facts.untouched_for_s < untouched_for_s:
        return f"used {facts.untouched_for_s / 86400:.1f} days ago"
    return None


def reasons_to_keep(facts: Mapping[str, Facts], untouched_for_s: float) -> Mapping[str, str]:
    """Why ids must stay, by id. All ids of a writer stay together: a lane without the first lane has no guard."""
    own = {name: reason_to_keep(found, untouched_for_s) for name, found in facts.items()}
    kept = {writer_of(name) for name, why in own.items() if why is not None}
    return {name: why or "another id of its writer stays" for name, why in own.items() if writer_of(name) in kept}


def by_writer(transactional_ids: Iterable[str]) -> Mapping[str, list[str]]:
    """The ids of each writer, in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(transactional_ids):
        found.setdefault(writer_of(name), []).append(name)
    return found
