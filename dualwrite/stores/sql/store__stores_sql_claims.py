"""The SQL of a claim: one short transaction, all rows or none."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import select, update

from dualwrite.stores.sql.tables__stores_sql_tables_clock import database_now
from dualwrite.stores.sql.tables__stores_sql_tables_rows import check_claimed, check_guard, in_chunks, read_rows

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.tables import Tables


class Claim:
    """One claim. Run it inside a transaction at READ COMMITTED.

    Args:
        tables: The library's tables.
        dialect: The adapter for the database.
        owner: The new owner.
        cluster_id: The current Kafka cluster.
        raise_to: The least incarnation for some ids.
    """

    def __init__(
        self, tables: Tables, dialect: Dialect, *, owner: str, cluster_id: str, raise_to: Mapping[str, int]
    ) -> None:
        self._tables = tables
        self._state = tables.state
        self._dialect = dialect
        self._owner = owner
        self._cluster_id = cluster_id
        self._raise_to = raise_to

    def check_guard(self, connection: Connection, transactional_id: str, incarnation: int, *, claimed: bool) -> None:
        """Lock the guard's row until the claim has committed, provided that our owner still holds it.

        Args:
            connection: Inside the claim's transaction.
            transactional_id: The guard.
            incarnation: The incarnation of our newest known claim of it.
            claimed: Whether the claim includes the guard. It then takes the stronger lock at once: two claims that hold
                the weaker one and want the stronger would deadlock.

        Raises:
            Fenced: Another owner has claimed the row, or the row is gone.
            ConfigurationError: The row has an older incarnation.
        """
        state = self._state
        statement = select(state.c.incarnation, state.c.owner).where(state.c.transactional_id == transactional_id)
        row = connection.execute(statement.with_for_update(read=not claimed)).one_or_none()
        check_guard(None if row is None else (row.incarnation, row.owner), transactional_id, self._owner, incarnation)

    def run(self, connection: Connection, ids: Sequence[str]) -> Sequence[StateRow]:
        """Insert missing rows, raise all incarnations, and return the rows in order of id.

        Raises:
            ConfigurationError: A row cannot be parsed, or belongs to another cluster. Roll back.
        """
        for chunk in in_chunks(ids):
            self._lock_or_insert(connection, chunk)
            self._raise(connection, chunk)
        # Read only after taking the locks: a newer decision may have replaced a state that was read earlier.
        rows = read_rows(self._tables, ids, connection)
        for row in rows:
            check_claimed(row, self._cluster_id, self._state.fullname)
        return rows

    def _lock_or_insert(self, connection: Connection, ids: Sequence[str]) -> None:
        state = self._state
        # Lock in a fixed order, so that two claims of the same ids cannot deadlock.
        present = select(state.c.transactional_id).where(state.c.transactional_id.in_(ids))
        locked = set(connection.scalars(present.order_by(state.c.transactional_id).with_for_update()))
        new = [
            {
                "transactional_id": transactional_id,
                "namespace": secrets.token_hex(6),
                "incarnation": 0,
                "settled_incarnation": 0,
                "cluster_id": self._cluster_id,
                "owner": self._owner,
            }
            for transactional_id in ids
            if transactional_id not in locked
        ]
        if new:
            connection.execute(self._dialect.insert_if_missing(state), new)

    def _raise(self, connection: Connection, ids: Sequence[str]) -> None:
        state = self._state
        connection.execute(
            update(state)
            .where(state.c.transactional_id.in_(ids))
            .values(incarnation=state.c.incarnation + 1, owner=self._owner, updated_at=database_now())
        )
        for transactional_id in sorted(self._raise_to.keys() & set(ids)):
            at_least = self._raise_to[transactional_id]
            connection.execute(
                update(state)
                .where(state.c.transactional_id == transactional_id, state.c.incarnation < at_least)
                .values(incarnation=at_least)
            )
