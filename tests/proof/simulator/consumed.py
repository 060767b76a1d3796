"""Consumed offsets as rows of the simulated database, for one member: each statement is a separate step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from dualwrite.stores.sql.consumed import NOTHING_YET, ClaimedOffset
from simulator.store import SimulatedStore, _of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from simulator.connection import SimulatedConnection
    from simulator.database import Session
    from simulator.requests import TopicPartition


class SimulatedConsumedOffsets:
    """:class:`dualwrite.stores.sql.consumed.ConsumedOffsets` over the simulated database. Topics are never made again.

    Args:
        store: The member's.
        group: The ``group.id``.
    """

    def __init__(self, store: SimulatedStore, group: str) -> None:
        self._store = store
        self._database = store.database
        self._group = group

    def claim(self, partitions: Mapping[TopicPartition, str | None]) -> dict[TopicPartition, ClaimedOffset]:
        """See :meth:`dualwrite.stores.sql.consumed.ConsumedOffsets.claim`."""

        def work(used: SimulatedConnection) -> dict[TopicPartition, ClaimedOffset]:
            return {at: used.run("UPDATE consumed", partial(self._raised, at=at)) for at in ordered}

        ordered = sorted(partitions)
        return self._store.run(work) if ordered else {}

    def _raised(self, session: Session, *, at: TopicPartition) -> ClaimedOffset:
        found = self._database.lock_consumed(session, self.key(at)) or ClaimedOffset(0, NOTHING_YET)
        row = ClaimedOffset(found.epoch + 1, found.next_offset)
        self._database.write_consumed(session, self.key(at), row)
        return row

    def move(self, connection: Connection, at: TopicPartition, claimed: ClaimedOffset, to: int) -> bool:
        """See :meth:`dualwrite.stores.sql.consumed.ConsumedOffsets.move`."""

        def update(session: Session) -> bool:
            if self._database.lock_consumed(session, self.key(at)) != claimed:
                return False
            self._database.write_consumed(session, self.key(at), ClaimedOffset(claimed.epoch, to))
            return True

        return _of(connection).run("UPDATE consumed", update)

    def key(self, at: TopicPartition) -> str:
        """The row's key."""
        return consumed_key(self._group, at)


def consumed_key(group: str, at: TopicPartition) -> str:
    """The key of a group's row for a partition."""
    return f"consumed {group} {at[0]}[{at[1]}]"
