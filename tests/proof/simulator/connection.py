"""One client's connection to the simulated database. Each statement is a separate step; the connection may break."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from simulator.database import ConnectionLost, Kind, Session, parts_of
from simulator.scheduler import Simulation

Result = TypeVar("Result")


class SimulatedConnection:
    """Stands in for a SQLAlchemy connection to the simulated database."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._session: Session | None = None
        self._known_broken = False

    @property
    def session(self) -> Session:
        """The session; a new one if the last one is gone."""
        if self._session is None or self._session.broken:
            database = self.simulation.database
            repeatable = database.kind is Kind.REPEATABLE_READ
            self._session = database.connect(self.simulation.inside(), repeatable=repeatable)
            self._known_broken = False
        return self._session

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, as far as the client knows."""
        return self._session is not None and self._session.open and not self._known_broken

    @property
    def is_broken(self) -> bool:
        """Whether the connection of the begun transaction is gone, as far as the client knows."""
        return self._session is None or self._known_broken

    @property
    def has_failed(self) -> bool:
        """Whether a statement of the open transaction has failed."""
        return self._session is not None and self._session.failed

    def run(self, label: str, statement: Callable[[Session], Result]) -> Result:
        """Run a statement of the open transaction."""
        session = self._session
        if session is None or session.broken:
            self._known_broken = True
            raise ConnectionLost
        try:
            return cast("Result", self.simulation.execute(session, label, lambda: statement(session)))
        except ConnectionLost:
            self._known_broken = True
            raise

    def insert(self, row: object) -> None:
        """Run a user statement that inserts a row."""
        database = self.simulation.database
        self.run("INSERT", lambda session: database.write_user_row(session, row))

    def fail(self) -> None:
        """Run a user statement that violates a constraint."""
        self.run("INSERT", self.simulation.database.fail_statement)

    def about(self, tag: object) -> None:
        """Tag the open transaction, for the check of the run. Not a statement."""
        self.session.tag = tag

    def add(self, part: object) -> None:
        """Note that the open transaction has this part, for the check of the run, until it is rolled back. Not a statement."""
        parts_of(self.session.tag).append(part)

    def roll_back(self) -> None:
        """Run a ROLLBACK of the user's own."""
        self.run("ROLLBACK", self.simulation.database.rollback)

    def cut(self) -> None:
        """Let the server end the session, as the next statement shows."""
        self.simulation.database.disconnect(self.session)

    def get_nested_transaction(self) -> None:
        """The user's code in the simulation opens no savepoints."""

    def close(self) -> None:
        """Close the session."""
        session, self._session = self._session, None
        if session is not None and not session.broken:
            self.simulation.database.disconnect(session)

    def lose(self) -> None:
        """Abandon the session as it is; the server has to notice."""
        session, self._session = self._session, None
        if session is not None:
            self.simulation.database.abandon(session)
