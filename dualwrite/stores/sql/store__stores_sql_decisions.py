"""The SQL of a dual write's own statements: the row read at its beginning, and the decision at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Integer, String, bindparam, null, or_, select, update

from dualwrite.stores.sql.drivers__stores_sql_drivers_compiled import CompiledOnce
from dualwrite.stores.sql.tables__stores_sql_tables_clock import database_now

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.tables import Tables


class Decisions:
    """Reads and decides a row inside the caller's transaction. The statements are made once: each dual write runs two."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self._dialect = dialect
        state = tables.state
        namespace = bindparam("namespace_", type_=String())
        is_row = (
            state.c.transactional_id == bindparam("id_"),
            or_(namespace.is_(None), state.c.namespace == namespace),
        )
        # In the statement itself: one that stands alone, since the transaction was ended unseen, must match nothing.
        is_ours = (*is_row, state.c.incarnation == bindparam("incarnation_"), *dialect.is_begun())
        incarnation = select(state.c.incarnation).where(*is_row).scalar_subquery()
        prepared = select(state.c.prepared_transaction_state).where(*is_row).scalar_subquery()
        self._start = CompiledOnce(select(incarnation, prepared, *dialect.start_columns()))
        decide = dialect.deciding(
            update(state)
            .where(*is_ours)
            .values(
                prepared_transaction_state=bindparam("state_"),
                completed=null(),
                settle_fence=null(),
                updated_at=database_now(),
            ),
            idle_ms=bindparam("idle_ms_", type_=Integer()),
            within_ms=bindparam("within_ms_", type_=Integer()),
        )
        self._decide = CompiledOnce(decide)
        hold = select(*dialect.end_columns()).select_from(state).where(*is_ours).with_for_update(read=True)
        self._hold = CompiledOnce(hold)

    def start(self, connection: Connection, transactional_id: str, namespace: str | None) -> Sequence[Any]:
        """The row's incarnation and prepared state, both None if there is no such row; then the dialect's start columns."""
        bound = {"id_": transactional_id, "namespace_": namespace}
        return self._dialect.read_first(connection, self._start, bound)

    def decide(
        self,
        connection: Connection,
        transactional_id: str,
        incarnation: int,
        state: str,
        *,
        namespace: str | None,
        idle_s: float | None,
        within_s: float | None,
        deferred: bool,
    ) -> Sequence[Any] | None:
        """Write the prepared state into the row.

        Returns:
            The dialect's end columns; None if the row is no longer ours, or the transaction is not the one that was begun.
        """
        bound = {
            "id_": transactional_id,
            "incarnation_": incarnation,
            "namespace_": namespace,
            "state_": state,
            "idle_ms_": _milliseconds(idle_s),
            "within_ms_": _milliseconds(within_s),
            **self._dialect.begun(connection),
        }
        first = transactional_id if deferred else None
        return self._dialect.ask_last(connection, self._decide, bound, decides=True, deferred_of=first)

    def hold(
        self, connection: Connection, transactional_id: str, incarnation: int, *, namespace: str | None, deferred: bool
    ) -> Sequence[Any] | None:
        """Lock the row as it is. Returns as :meth:`decide`."""
        bound = {
            "id_": transactional_id,
            "incarnation_": incarnation,
            "namespace_": namespace,
            **self._dialect.begun(connection),
        }
        first = transactional_id if deferred else None
        return self._dialect.ask_last(connection, self._hold, bound, decides=False, deferred_of=first)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, int(seconds * 1000))  # 0 would be no limit
