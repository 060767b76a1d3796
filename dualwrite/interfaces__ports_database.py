"""The port to the deciding database as a whole: what a writer and the calls for people need of it, besides its rows.

A database is added in three steps: a subclass of :class:`Database`, the store of its rows
(:class:`dualwrite.interfaces.StateStore`), and its place in ``tests/conformance``. Databases without SQL need no store of
their own: :mod:`dualwrite.stores.keyed` makes one of five primitives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from dualwrite.errors import ConfigurationError, IllegalStateError

if TYPE_CHECKING:
    from datetime import datetime

    from dualwrite.interfaces import Handle, StateStore
    from dualwrite.protocol.leases import Lease
    from dualwrite.protocol.values__protocol_rows import StateRow

PAUSED_OWNER_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Traits:
    """The traits of a kind of database.

    Attributes:
        name: Its name, for people; in lower case, for telemetry.
        gives: The attribute of the transaction through which the user writes: ``connection``, ``batch``, ``multi``.
        blocks: How many blocks can be inside transactions at once; None if there is no limit.
        savepoints: Whether part of a transaction can be rolled back. Without that, each unit of ``submit`` is a dual write of
            its own.
    """

    name: str
    gives: str
    blocks: int | None = None
    savepoints: bool = False

    def absent(self, asked: str) -> IllegalStateError:
        """The error for an attribute of the transaction that this kind of database does not have."""
        return IllegalStateError(
            f"there is no tx.{asked}: this writer's database is {self.name}", next_step=f"use tx.{self.gives}"
        )


SQL: Final = Traits("SQL", "connection", savepoints=True)


class Leases(Protocol):
    """The leases of one fleet. Thread-safe; every call is durable on return.

    See :class:`dualwrite.stores.sql.leases.Leases`.
    """

    @property
    def fleet(self) -> str:
        """The fleet's name."""
        ...

    def take(self, owner: str, timeout_s: float, *, has_died: Callable[[Lease], bool]) -> str:
        """Take the lowest number that nobody holds, or whose holder has died, and return its id."""
        ...

    def renew(self, owner: str, timeout_s: float, *, wait_s: float) -> tuple[Collection[str], Sequence[Lease]]:
        """Renew what the owner holds.

        Returns:
            The ids that were renewed; and the leases of the fleet that have expired, with those of the owner's own place.
        """
        ...

    def adopt(self, dead: Lease, owner: str, timeout_s: float) -> bool:
        """Take the lease of a dead holder, to settle what it has left. False if another member has been faster."""
        ...

    def give_back(self, transactional_id: str, owner: str, *, settled: bool) -> None:
        """Give a lease back. Does nothing if another member has taken it."""
        ...


class Forgetting(Protocol):
    """Deletes rows that are no longer needed. See :class:`dualwrite.stores.sql.database__stores_sql_forgetting.Forgetting`."""

    def now(self) -> datetime:
        """The database's time."""
        ...

    def leased(self) -> set[str]:
        """The ids that a process holds, or may still continue with."""
        ...

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """Delete the rows, all or none. False if one was used since it was read, or is held. Durable on return."""
        ...

    def forget_incidents(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """Delete the incidents that were acknowledged before that time. Returns how many."""
        ...

    def forget_runs(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """Delete the runs of batches that began before that time and are over. Returns how many."""
        ...


class Database(ABC):
    """The database that decides. Used by many threads at once.

    What a subclass does not override, it refuses with an error that names it.
    """

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The traits of this kind of database."""

    @property
    def schema(self) -> str | None:
        """The schema of the library's tables, if it is not the default one."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Refuse a database that cannot decide: the library's tables are missing, or its commits would not be durable.

        Raises:
            ConfigurationError: It cannot.
            Unavailable: It does not answer.
        """

    @abstractmethod
    def store(self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S) -> StateStore:
        """The library's rows in this database.

        Args:
            paused_owner_timeout_s: The server, if it can, ends the session of an owner that is paused inside a transaction
                after this many seconds; None leaves the server's own setting.
        """

    @abstractmethod
    def connect(self) -> AbstractContextManager[Handle]:
        """A handle, on which one dual write works, for as long as its block lasts.

        Raises:
            DualWriteError: The database cannot be reached.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect. May be called more than once. A writer calls it only if it has made the database, from a URL."""

    def adopt(self, given: object, store: StateStore) -> AbstractContextManager[Handle]:
        """A handle over a connection of the user's own, which stays open.

        Raises:
            ConfigurationError: It leads to another database, or cannot be used for this.
            IllegalStateError: It is no connection, or in a transaction.
        """
        del store
        raise IllegalStateError(
            f"transaction() takes no {type(given).__name__}: this writer's database is {self.traits.name}",
            next_step=f"call it without an argument, and use tx.{self.traits.gives}",
        )

    def forked(self) -> None:  # noqa: B027 - most have nothing to do
        """Forget the connections of the process that this one was forked from, and leave them open for it."""

    def leases(self, fleet: str) -> Leases:
        """The leases of a fleet.

        Raises:
            ConfigurationError: The name cannot be used, or this database keeps no leases.
        """
        raise self._without(f"leases, which fleet {fleet!r} needs", "give each process a transactional id of its own")

    def living(self, names: Collection[str]) -> set[str]:
        """Those of the ids whose lease has not expired: a process works under them."""
        del names
        return set()

    def lease_list(self, transactional_id: str | None, prefix: str) -> Sequence[Lease]:
        """The leases of an id, or of all ids with a prefix, in order, for people to read."""
        del transactional_id, prefix
        return ()

    def warnings(self) -> Sequence[str]:
        """Conditions in the database that slow dual writes down, for people."""
        return ()

    def forgetting(self) -> Forgetting:
        """Deletes rows that are no longer needed.

        Raises:
            ConfigurationError: This database deletes none.
        """
        raise self._without("forgetting", "a row takes a few hundred bytes: leave it")

    def _without(self, what: str, next_step: str) -> ConfigurationError:
        return ConfigurationError(f"{self.traits.name} has no {what}", next_step=next_step)
