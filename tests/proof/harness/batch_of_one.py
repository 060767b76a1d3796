"""A batch of one dual write that was handed over, for :class:`dualwrite.sinks.batches.Decision`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sqlalchemy import Connection, Engine, Table, select

from dualwrite import recover


class BatchOfOne:
    """See :class:`dualwrite.sinks.batches.Batch`. Its own row is the row that it writes.

    Args:
        name: The transactional id.
        operation: What the row says.
        rows: The table.
        kafka: The configuration.
        engine: The database.
        on_claim: Called before the transactional id is claimed.
    """

    def __init__(
        self,
        name: str,
        operation: str,
        rows: Table,
        kafka: Mapping[str, object],
        engine: Engine,
        *,
        on_claim: Callable[[], None],
    ) -> None:
        self.name = name
        self._operation = operation
        self._rows = rows
        self._kafka = kafka
        self._engine = engine
        self._on_claim = on_claim

    def record(self, connection: Connection) -> bool:
        connection.execute(self._rows.insert().values(id=self._operation))
        return True

    def require_held(self, connection: Connection) -> None:
        """Nobody else has it."""

    def bring(self, connection: Connection) -> None:
        """The row is where it belongs."""

    def decided(self) -> None:
        """The row says so."""

    def is_written(self) -> bool:
        with self._engine.connect() as connection:
            found = connection.scalar(select(self._rows.c.id).where(self._rows.c.id == self._operation))
        return found is not None

    def settle(self, completed: Collection[str]) -> None:
        if self.name not in completed:
            self._on_claim()
            recover(self.name, kafka=self._kafka, database=self._engine, timeout_s=600)
