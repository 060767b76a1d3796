"""The verdict on the fleets of a round, besides the one on all writers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from harness.worker import DECISIONS
from sqlalchemy import Engine, select


class Decision(NamedTuple):
    """An operation of a member that is in the database."""

    operation: str
    transactional_id: str
    incarnation: int
    member: str


def find(engine: Engine) -> list[dict[str, str]]:
    """Find out what is wrong with the fleets of this database."""
    with engine.connect() as connection:
        return shared(Decision(*row) for row in connection.execute(select(DECISIONS)))


def shared(decisions: Iterable[Decision]) -> list[dict[str, str]]:
    """The incarnations of an id under which more than one member has decided."""
    members: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for one in decisions:
        members[one.transactional_id, one.incarnation].add(one.member)
    return [
        {"kind": "shared", "subject": name, "detail": f"{sorted(who)} have decided under its incarnation {incarnation}"}
        for (name, incarnation), who in sorted(members.items())
        if len(who) > 1
    ]
