"""``run`` and ``submit``: the ways to give a writer work, besides its blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar, overload

from dualwrite.errors import IllegalStateError
from dualwrite.interfaces__ports_database import SQL, Traits
from dualwrite.writing import transaction__writing_entered
from dualwrite.writing.group_commit import Groups
from dualwrite.writing.retry import Patience, run_again
from dualwrite.writing.units_of_work__writing_group_row_unit import RowUnit

if TYPE_CHECKING:
    from concurrent.futures import Future

    import psycopg
    from sqlalchemy import Connection

    from dualwrite.stores.sql.access import DjangoConnection
    from dualwrite.writing.transaction import Transaction

Result = TypeVar("Result")


class Submitting:
    """The part of a writer that runs work. The writer sets its attributes."""

    transactional_id: str
    _groups: Groups
    _traits: Traits = SQL

    def run(
        self,
        work: Callable[[Transaction], Result],
        *,
        attempts: int = 5,
        within_s: float | None = None,
        longest_pause_s: float = 5.0,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None = None,
    ) -> Result:
        """Run the work in a dual write, and again in a new one after an error that left nothing behind on either side.

        It runs again after `TransactionAborted` with ``retryable`` (which includes deadlocks and serialization failures of
        the work's own statements and of COMMIT) and after `Unavailable` while nothing was decided; never after an error that
        leaves a side in doubt or committed, nor after an exception of the work itself. The pauses between attempts are random
        and grow. The log names each attempt with its outcome.

        Args:
            work: Called with the transaction, once for each attempt. It repeats all that it does, its reads too; what it does
                elsewhere happens once for each attempt.
            attempts: The maximum number of attempts.
            within_s: No attempt begins later than this after the call; None sets no limit. In seconds.
            longest_pause_s: The longest pause between two attempts, in seconds.
            connection: As for :meth:`transaction`.

        Returns:
            The result of the attempt that has committed. Both sides are durable, as after :meth:`transaction`.

        Raises:
            DualWriteError: As :meth:`transaction`, from the last attempt. Notes on the error name the earlier attempts.
            ConfigurationError: An argument cannot work.
            IllegalStateError: Also if the work is asynchronous, or a generator.

        Every exception of the work is passed on unchanged, after the abort of both sides.
        """
        patience = Patience(attempts, within_s, longest_pause_s)
        return run_again(lambda: self.transaction(connection), work, self.transactional_id, patience)

    @overload
    def submit(self, work: RowUnit, *, key: Hashable | None = None, within_s: float | None = None) -> Future[None]: ...

    @overload
    def submit(
        self, work: Callable[[Transaction], Result], *, key: Hashable | None = None, within_s: float | None = None
    ) -> Future[Result]: ...

    def submit(
        self,
        work: Callable[[Transaction], Result] | RowUnit,
        *,
        key: Hashable | None = None,
        within_s: float | None = None,
    ) -> Future[Result] | Future[None]:
        """Run the work as one unit of a group: many callers' units commit in one dual write. Returns at once.

        Only if as many units wait as `WriterLimits.waiting_units`, it waits for a place, first come, first served.

        A group begins as soon as the one before has run its units, with those that wait then. So a single caller waits for
        nobody, and many callers share the cost of a commit. Each unit runs in a savepoint of its own, in a thread of the
        writer, with the context variables of its caller; one that is alone runs without a savepoint, and in the thread that
        waits for its result without a timeout, if there is one. A unit that raises is rolled back alone: its rows are gone,
        its messages are never sent, and the others commit.

        A unit may run more than once, by the rule of :meth:`run`: after a conflict of its own, and when its group was aborted
        on both sides, up to five times. What it does elsewhere happens in each run. It never runs again after an error that
        leaves a side in doubt or committed.

        Args:
            work: Called with a transaction, as the body of a block of :meth:`transaction`. It may neither commit nor roll back
                the transaction of its group. Or a `RowUnit`: rows and messages as data, which is several times as fast with
                many callers; its result is None.
            key: Units with the same key run and commit in the order of the calls; by default those of one thread do.
            within_s: No run of it begins later than this after the call: the future then fails at once, with `Unavailable` or
                the error of its last run. A run that has begun ends with its group. None sets no limit. In seconds.

        Returns:
            The future of the result. It is done once both sides are durable, or nothing of the unit will ever be.
            ``cancel()`` works until the unit begins. A unit that was cancelled never runs; one whose caller has only stopped
            to wait (``result(timeout=...)``) does: cancel it, or give ``within_s``.

            Its exception is what the work has raised; or, for every unit of a group that has failed, the error that
            :meth:`transaction` would raise: after `TransactionInDoubt` and `CompletionPending` do not submit the work again.
            If a unit has lost the database's connection, or has rolled back the transaction, it fails, and the others run
            again.

        Raises:
            IllegalStateError: The writer is not open; or this thread is inside a transaction or a unit of this writer, which
                would wait for itself; or the work is a `RowUnit`, and the database has no SQL.
            Unavailable: There was no place for ``lane_timeout_s``; or there is none, and the caller must not wait, because its
                thread runs an event loop, or calls back from a future of this writer. The work will not run.
            ConfigurationError: ``within_s`` is not positive, or longer than a hundred years.
        """
        self._require_open()
        transaction__writing_entered.refuse_nested(self, self.transactional_id)
        if isinstance(work, RowUnit) and self._traits.gives != SQL.gives:
            raise IllegalStateError(
                f"a RowUnit writes rows of SQL, and this writer's database is {self._traits.name}",
                transactional_id=self.transactional_id,
                next_step=f"submit a function instead, which has tx.{self._traits.gives}",
            )
        return self._groups.submit(work, key, within_s)

    def transaction(
        self, connection: Connection | psycopg.Connection[object] | DjangoConnection | None = None
    ) -> AbstractContextManager[Transaction]:
        """A block around one dual write."""
        raise NotImplementedError

    def _require_open(self) -> None:
        raise NotImplementedError
