"""``submit``: what a writer offers its callers of group commit."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar

from dualwrite.writing import entered
from dualwrite.writing.group.groups import Groups

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dualwrite.writing.transaction import Transaction

Result = TypeVar("Result")


class Submitting:
    """The part of a writer that takes units of work. The writer sets its attributes."""

    transactional_id: str
    _groups: Groups

    def submit(self, work: Callable[[Transaction], Result], *, key: Hashable | None = None) -> Future[Result]:
        """Run the work as one unit of a group: many callers' units commit in one dual write. Returns at once.

        A group begins as soon as the one before has run its units, with those that wait then. So a single caller waits for
        nobody, and many callers share the cost of a commit. Each unit runs in a savepoint of its own, in a thread of the
        writer, with the context variables of its caller. One that raises is rolled back alone: its rows are gone, its
        messages are never sent, and the others commit.

        A unit may run more than once, by the rule of :meth:`run`: after a conflict of its own, and when its group was aborted
        on both sides, up to five times. What it does elsewhere happens in each run. It never runs again after an error that
        leaves a side in doubt or committed.

        Args:
            work: Called with a transaction, as the body of a block of :meth:`transaction`. It may neither commit nor roll back
                the transaction of its group.
            key: Units with the same key run and commit in the order of the calls; by default those of one thread do.

        Returns:
            The future of the result. It is done once both sides are durable, or nothing of the unit will ever be.
            ``cancel()`` works until the unit begins.

            Its exception is what the work has raised; or, for every unit of a group that has failed, the error that
            :meth:`transaction` would raise: after `TransactionInDoubt` and `CompletionPending` do not submit the work again.
            If a unit has lost the database's connection, or has rolled back the transaction, it fails, and the others run
            again.

        Raises:
            IllegalStateError: The writer is not open; or this thread is inside a transaction or a unit of this writer, which
                would wait for itself.
        """
        self._require_open()
        entered.refuse_nested(self, self.transactional_id)
        return self._groups.submit(work, key)

    def _require_open(self) -> None:
        raise NotImplementedError
