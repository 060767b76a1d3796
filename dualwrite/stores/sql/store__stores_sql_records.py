"""The SQL of the records made after a decision: outcomes, incidents, settled incarnations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Integer, bindparam, func, select, update

from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_rows import Incident
from dualwrite.stores.sql.tables__stores_sql_tables_clock import database_now
from dualwrite.stores.sql.tables__stores_sql_tables_rows import digest, in_chunks

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row, Select

    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.tables import Tables


class Records:
    """Outcomes and incidents, written inside the caller's transaction.

    Writes rows in order of id, so that two settlers cannot deadlock.
    """

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self._dialect = dialect
        self._state = state = tables.state
        self._incident = tables.incident
        self._complete = (
            update(state)
            .where(
                state.c.transactional_id == bindparam("id_"),
                state.c.prepared_transaction_state == bindparam("state_"),
                state.c.completed.is_(None),
            )
            .values(completed=bindparam("outcome_"), updated_at=database_now())
        )
        self._settle = (
            update(state)
            .where(state.c.transactional_id == bindparam("id_"), state.c.settled_incarnation < bindparam("mark_"))
            .values(settled_incarnation=bindparam("mark_"), updated_at=database_now())
        )
        self._fence = (
            update(state)
            .where(
                state.c.transactional_id == bindparam("id_"),
                state.c.namespace == bindparam("namespace_"),
                state.c.prepared_transaction_state == bindparam("state_"),
                state.c.settle_fence.is_not_distinct_from(bindparam("known_", type_=Integer())),
            )
            .values(settle_fence=bindparam("fence_"), updated_at=database_now())
        )

    def record(self, connection: Connection, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """Write each outcome into its row, if the row still holds that state without an outcome; record the losses."""
        ordered = sorted(outcomes, key=lambda item: item[0].transactional_id)
        connection.execute(
            self._complete,
            [
                {"id_": row.transactional_id, "state_": str(row.prepared), "outcome_": outcome.value}
                for row, outcome, _ in ordered
            ],
        )
        for row, outcome, detail in ordered:
            if outcome is not Outcome.COMMITTED and self._is_news(connection, row, outcome):
                self._note(connection, row, outcome, detail)

    def _is_news(self, connection: Connection, row: StateRow, outcome: Outcome) -> bool:
        """Whether to record an incident: not for UNVERIFIABLE if a settler that saw more of the log knew better."""
        if outcome is Outcome.LOST:
            return True
        state = self._state
        better = connection.scalar(
            select(func.count()).where(
                state.c.transactional_id == row.transactional_id,
                state.c.prepared_transaction_state == str(row.prepared),
                state.c.completed != outcome.value,
            )
        )
        return not better

    def _note(self, connection: Connection, row: StateRow, outcome: Outcome, detail: str) -> None:
        connection.execute(
            self._dialect.insert_if_missing(self._incident),
            {
                "transactional_id": row.transactional_id,
                "state_sha256": digest(row.prepared),
                "prepared_transaction_state": str(row.prepared),
                "outcome": outcome.value,
                "detail": detail.replace("\x00", "?"),
            },
        )

    def mark_settled(self, connection: Connection, incarnations: Mapping[str, int]) -> None:
        """Raise the settled incarnation of each id; never lower it."""
        marks = [
            {"id_": transactional_id, "mark_": incarnations[transactional_id]}
            for transactional_id in sorted(incarnations)
        ]
        connection.execute(self._settle, marks)

    def raise_fence(self, connection: Connection, row: StateRow, fence: int) -> bool:
        """Set the fence of the row's transaction if the row is as it was read; see :meth:`StateStore.raise_fence`."""
        values = {
            "id_": row.transactional_id,
            "namespace_": row.namespace,
            "state_": str(row.prepared),
            "known_": row.settle_fence,
            "fence_": fence,
        }
        return connection.execute(self._fence, values).rowcount == 1

    def incident(self, connection: Connection, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """The outcome recorded in that state's incident; None if there is none."""
        incident = self._incident
        found = connection.scalar(
            select(incident.c.outcome).where(
                incident.c.transactional_id == transactional_id, incident.c.state_sha256 == digest(state)
            )
        )
        return None if found is None else Outcome(found)

    def incidents(self, connection: Connection, prefix: str, *, acknowledged: bool) -> Sequence[Incident]:
        """The incidents of ids with that prefix, oldest first."""
        statement = self._incidents().where(self._dialect.begins_with(self._incident.c.transactional_id, prefix))
        if not acknowledged:
            statement = statement.where(self._incident.c.acknowledged_at.is_(None))
        return _by_age(connection.execute(statement).all())

    def incidents_of(self, connection: Connection, ids: Collection[str]) -> Sequence[Incident]:
        """All incidents of these ids, oldest first."""
        name = self._incident.c.transactional_id
        return _by_age(
            row
            for chunk in in_chunks(sorted(ids))
            for row in connection.execute(self._incidents().where(name.in_(chunk)))
        )

    def _incidents(self) -> Select[Any]:
        incident = self._incident
        return select(
            incident.c.transactional_id,
            incident.c.prepared_transaction_state,
            incident.c.outcome,
            incident.c.detail,
            incident.c.detected_at,
            incident.c.acknowledged_at,
            incident.c.told_at,
        )

    def note_told(self, connection: Connection, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """Record that these losses are now reported to a caller, unless they already were."""
        incident = self._incident
        keys = sorted((transactional_id, digest(state)) for transactional_id, state in losses)
        for transactional_id, key in keys:
            connection.execute(
                update(incident)
                .where(
                    incident.c.transactional_id == transactional_id,
                    incident.c.state_sha256 == key,
                    incident.c.told_at.is_(None),
                )
                .values(told_at=database_now())
            )

    def acknowledge(self, connection: Connection, transactional_id: str, state: PreparedTxnState) -> bool:
        """Record that a person has looked at the incident. Returns whether there was one to acknowledge."""
        incident = self._incident
        result = connection.execute(
            update(incident)
            .where(
                incident.c.transactional_id == transactional_id,
                incident.c.state_sha256 == digest(state),
                incident.c.acknowledged_at.is_(None),
            )
            .values(acknowledged_at=database_now())
        )
        return result.rowcount > 0


def _by_age(rows: Iterable[Row[Any]]) -> Sequence[Incident]:
    found = [
        Incident(
            row.transactional_id,
            row.prepared_transaction_state,
            Outcome(row.outcome),
            row.detail,
            row.detected_at,
            row.acknowledged_at,
            row.told_at,
        )
        for row in rows
    ]
    return sorted(found, key=lambda item: (item.detected_at, item.transactional_id))
