"""The SQL of the history of actions: intents before the deed, outcomes after it, the last ones for people to read.

Its rows protect nothing, and nothing is decided by them. They are there so that a person who comes later sees what was done,
by whom and why, also if the process that did it was killed in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, insert, select, update

from dualwrite.protocol.blocking import ActionRecord, Deed, End, Ended, Intent
from dualwrite.stores.sql.short_transactions import ShortTransactions, dialect_of
from dualwrite.stores.sql.tables import database_now, declare_tables, in_chunks

_KNOWN: Final = [deed.value for deed in Deed]
"""A later version may store others, which this one could not show."""


class History:
    """The actions on the ids of one database. Thread-safe; every call is a short transaction of its own, durable on return.

    Every call raises ``Unavailable`` if the database does not answer, and ``ConfigurationError`` if the right to the table is
    missing, or the database is read-only.
    """

    def __init__(self, engine: Engine, *, schema: str | None = None) -> None:
        self._dialect = dialect_of(engine)
        self._tables = declare_tables(schema)
        self._action = self._tables.action
        self._own = ShortTransactions(engine, self._dialect, self._tables)

    def begin(self, intents: Sequence[Intent]) -> None:
        """Store what is about to be done. One whose id is there already begins anew: it has no outcome any more."""
        action = self._action

        def work(connection: Connection) -> None:
            there = self._there(connection, intents)
            for intent in intents:
                if intent.action_id in there:
                    connection.execute(
                        update(action)
                        .where(action.c.action_id == intent.action_id)
                        .values(begun_at=database_now(), ended_at=None, outcome=None, result=None, **_values(intent))
                    )
            if new := [_values(intent) for intent in intents if intent.action_id not in there]:
                connection.execute(insert(action).values(begun_at=database_now()), new)

        if intents:
            self._own.run(work)

    def begin_once(self, intent: Intent) -> bool:
        """Store one intent; False, and nothing is stored, if its id is there already: its form was sent twice."""
        statement = self._dialect.insert_if_missing(self._action).values(begun_at=database_now(), **_values(intent))
        return self._own.run(lambda connection: connection.execute(statement).rowcount) == 1

    def _there(self, connection: Connection, intents: Sequence[Intent]) -> set[str]:
        action = self._action
        found: set[str] = set()
        for some in in_chunks(sorted({intent.action_id for intent in intents})):
            found.update(connection.scalars(select(action.c.action_id).where(action.c.action_id.in_(some))))
        return found

    def end(self, ends: Sequence[End]) -> None:
        """Store how what was begun has ended."""
        action = self._action

        def work(connection: Connection) -> None:
            for end in ends:
                connection.execute(
                    update(action)
                    .where(action.c.action_id == end.action_id)
                    .values(ended_at=database_now(), outcome=end.outcome.value, result=end.result)
                )

        if ends:
            self._own.run(work)

    def read(self, action_id: str) -> ActionRecord | None:
        """One action; None if it is not there."""
        statement = select(self._action).where(self._action.c.action_id == action_id, self._action.c.deed.in_(_KNOWN))
        row = self._own.read(lambda connection: connection.execute(statement).one_or_none())
        return None if row is None else _record(row)

    def last(self, prefix: str, *, limit: int) -> Sequence[ActionRecord]:
        """The last actions on ids and writers with that prefix, newest first."""
        action = self._action
        statement = (
            select(action)
            .where(self._dialect.begins_with(action.c.subject, prefix), action.c.deed.in_(_KNOWN))
            .order_by(action.c.begun_at.desc(), action.c.action_id)
            .limit(limit)
        )
        return [_record(row) for row in self._own.read(lambda connection: connection.execute(statement).all())]


def _values(intent: Intent) -> dict[str, str]:
    return {
        "action_id": intent.action_id,
        "subject": intent.subject,
        "deed": intent.deed.value,
        "detail": intent.detail,
        "reason": intent.reason,
        "actor": intent.actor,
        "program": intent.program,
    }


def _record(row: Row[Any]) -> ActionRecord:
    return ActionRecord(
        Intent(row.action_id, row.subject, Deed(row.deed), row.detail, row.reason, row.actor, row.program),
        row.begun_at,
        row.ended_at,
        None if row.outcome is None else Ended(row.outcome),
        row.result,
    )
