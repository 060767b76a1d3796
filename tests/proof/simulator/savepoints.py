"""The savepoints of units on the simulated database, and the messages that wait for them. Users' code opens no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualwrite.errors import TransactionAborted, Unavailable
from dualwrite.protocol.message import Move, Savepoints

if TYPE_CHECKING:
    from dualwrite.protocol.message import Sendable
    from simulator.connection import SimulatedConnection
    from simulator.database import Session

    Run = Callable[[SimulatedConnection, str, Callable[[Session], Any]], Any]

_UNIT = "unit"


class SimulatedSavepoints:
    """:class:`~dualwrite.interfaces.SavepointWatch` over the simulated database.

    Args:
        connection: The connection of the dual write.
        transactional_id: Its id.
        run: Runs a statement, and maps its errors as the store does.
    """

    def __init__(self, connection: SimulatedConnection, transactional_id: str, run: Run) -> None:
        self._connection = connection
        self._database = connection.simulation.database
        self._id = transactional_id
        self._run = run
        self._savepoints: Savepoints[Sendable] = Savepoints()
        self._unit_kept = False

    @property
    def direct(self) -> bool:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        return self._savepoints.idle

    @property
    def holds(self) -> bool:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        return self._savepoints.holds

    @property
    def may_roll_back(self) -> bool:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        return self._savepoints.may_roll_back

    def expect_session(self) -> None:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""

    def add(self, message: Sendable) -> None:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        self._savepoints.add(message)

    def open_unit(self, uses: object) -> SimulatedConnection:
        """See :class:`dualwrite.interfaces.SavepointWatch`. Releases the savepoint of a unit that was kept before."""
        del uses  # users' code waits for all that it does
        self._unit_kept = False
        self._savepoints.apply(Move.OPEN, _UNIT)
        self._run(self._connection, "SAVEPOINT", self._database.open_savepoint)
        return self._connection

    def require_unit(self) -> None:
        """See :class:`dualwrite.interfaces.SavepointWatch`. The simulated database has answered."""

    def keep_unit(self) -> str | None:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        self._require_transaction()
        if self._connection.has_failed:
            return "a statement failed, and the unit continued"
        self._savepoints.apply(Move.RELEASE, _UNIT)
        self._unit_kept = True
        return None

    def drop_unit(self) -> None:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        self._require_transaction()
        self._run(self._connection, "ROLLBACK TO SAVEPOINT", self._database.roll_back_to_savepoint)
        self._savepoints.apply(Move.ROLL_BACK, _UNIT)
        self._savepoints.apply(Move.RELEASE, _UNIT)

    def _require_transaction(self) -> None:
        if self._connection.is_broken:
            raise Unavailable("a unit of the group has lost the database connection", transactional_id=self._id)
        if not self._connection.in_transaction:
            raise TransactionAborted(
                "a unit has rolled back the transaction of its group", transactional_id=self._id, retryable=False
            )

    def take(self) -> Sequence[Sendable]:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        return self._savepoints.take()

    def finish(self) -> None:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
        if not self._connection.is_broken:
            self._require_transaction()  # the product's witness is gone with the transaction
        if self._unit_kept:
            self._run(self._connection, "RELEASE SAVEPOINT", self._database.release_savepoint)
        self._savepoints.end()

    def stop(self) -> None:
        """See :class:`dualwrite.interfaces.SavepointWatch`."""
