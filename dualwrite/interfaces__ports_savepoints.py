"""The port to the savepoints of a connection, and to the messages that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dualwrite.protocol.message import Sendable


class SavepointWatch(Protocol):
    """The savepoints that are open on the connection of a dual write, and the messages that wait for them."""

    @property
    def direct(self) -> bool:
        """Whether a message may go to the producer at once, without :meth:`add`.

        Raises:
            TransactionAborted: ORM sessions became possible only inside the block: one may have begun a savepoint unseen.
        """
        ...

    @property
    def holds(self) -> bool:
        """Whether a message that is added now waits for a savepoint."""
        ...

    @property
    def may_roll_back(self) -> bool:
        """Whether what is done now may be rolled back to a savepoint, as far as savepoints were seen. Asks nobody."""
        ...

    def expect_session(self) -> None:
        """Watch ORM sessions too. Call it before the block's own session is made."""
        ...

    def add(self, message: Sendable) -> None:
        """Add a produced message. :meth:`take` returns it now, or when its savepoint is released, or never.

        Raises:
            TransactionAborted: Its savepoint cannot be known: both sides must abort.
            IllegalStateError: Its savepoint cannot be asked for now: the driver's connection is in the middle of a COPY.
            Unavailable: The database does not answer.
        """
        ...

    def open_unit(self, uses: AbstractContextManager[object]) -> Any:
        """Open the savepoint of a unit of work. The former unit was kept or dropped.

        Args:
            uses: Entered for each use of the unit's connection, and raises once the unit has ended. No use may be under way
                when the unit is kept or dropped.

        Returns:
            The connection of the unit, which is of no use once the unit has ended.

        Raises:
            TransactionAborted: As :meth:`add`.
            DualWriteError: The database failed, or it no longer has the savepoint of the former unit.
        """
        ...

    def require_unit(self) -> None:
        """Make sure that the savepoint of the unit was opened: the database may answer later.

        Raises:
            DualWriteError: As :meth:`open_unit`.
        """
        ...

    def keep_unit(self) -> str | None:
        """Release the savepoint of the unit: :meth:`take` returns its messages.

        Returns:
            None if it is kept; or why it must be dropped: it continued after a failed statement, or it is not known which of
            its messages belong to a savepoint that was rolled back.

        Raises:
            TransactionAborted: The unit has rolled back the transaction: both sides must abort.
            Unavailable: The connection is lost.
        """
        ...

    def drop_unit(self) -> None:
        """Roll back to the savepoint of the unit. Its messages are never sent.

        Raises:
            TransactionAborted, Unavailable: As :meth:`keep_unit`; or the database failed.
            TransactionInDoubt: The savepoint is gone: code of the unit has ended the transaction, and may have committed it.
        """
        ...

    def take(self) -> Sequence[Sendable]:
        """The messages to send now, in the order in which they were produced; each is taken once."""
        ...

    def finish(self) -> None:
        """Release all open savepoints, as the database is about to commit, and stop watching.

        Raises:
            TransactionAborted: A savepoint was rolled back unseen after a message was produced in it.
            TransactionInDoubt: As :meth:`drop_unit`, after units.
            Unavailable: The database does not answer.
        """
        ...

    def stop(self) -> None:
        """Stop watching. May be called more than once."""
        ...
