"""The decision over many participants: one database commit decides on every part of a batch; then Kafka follows.

:data:`~dualwrite.protocol.lives__protocol_tables_batch_life.BATCH_LIFE` is the order; an engine says through :class:`Batch` what its batch is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.lives import Machine
from dualwrite.protocol.lives__protocol_tables_batch_life import BATCH_LIFE, BatchEvent, BatchState
from dualwrite.sinks.batches__sinks_jobs_complete import complete_handed_over

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.recovery.claim import OwnerContext

logger = logging.getLogger(__name__)

RUN_AGAIN: Final = "run the batch again with the same batch id, or start the stream again: nothing is written twice"
"""The advice on every batch whose end is not known or not reached. What one block's errors advise would lose its messages:
nobody but its next run, or a recovery, completes it."""


def pending(name: str, why: DualWriteError) -> CompletionPending:
    """The error for a batch that the database has committed, and that could not be settled.

    Args:
        name: The batch.
        why: What settling it has raised.
    """
    return CompletionPending(
        f"{name}: decided, and Kafka has not all of it yet: {why.what}",
        next_step=f"{RUN_AGAIN}, and the messages follow; at its time limit the broker would abort them",
    )


class Part(Protocol):
    """One participant's prepared transaction, handed over to the decider."""

    @property
    def transactional_id(self) -> str:
        """The id that the participant owns."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the id's row, when the participant claimed it."""
        ...

    @property
    def namespace(self) -> str:
        """Of the id's row."""
        ...

    @property
    def prepared(self) -> PreparedTxnState:
        """The Kafka transaction."""
        ...


class Batch(Protocol):
    """One batch, as its engine knows it. Every method may raise :class:`~dualwrite.errors.DualWriteError`."""

    @property
    def name(self) -> str:
        """For logs and errors."""
        ...

    def record(self, connection: Connection) -> bool:
        """Insert the batch's own row, in the deciding transaction. False if it is there: the batch is written."""
        ...

    def require_held(self, connection: Connection) -> None:
        """Raise unless the decider still holds every part; called before the parts are decided, and before COMMIT."""
        ...

    def bring(self, connection: Connection) -> None:
        """Move the parts' rows to where they belong."""
        ...

    def decided(self) -> None:
        """The database has committed. Called before anything is sent to Kafka."""
        ...

    def is_written(self) -> bool:
        """Read the batch's own row, after :meth:`settle` has fenced every process that could still commit it."""
        ...

    def settle(self, completed: Collection[str]) -> None:
        """Claim and settle every id of the batch but those that were completed without a claim."""
        ...


P = TypeVar("P", bound=Part)


class Decision(Generic[P]):
    """One attempt to decide on a batch. Use it once.

    Attributes:
        completed: The parts whose transactions were committed and recorded without a claim: their owners may continue.

    Args:
        batch: The engine's part of it.
        parts: What the participants have handed over.
        context: The two servers.
        connect: Opens the connection of the deciding transaction, and closes it.
        timeout_s: How long to wait for COMMIT's answer, and for Kafka.
        idle_s: How long the database lets a paused decider keep its transaction.
    """

    def __init__(
        self,
        batch: Batch,
        parts: Collection[P],
        context: OwnerContext,
        *,
        connect: Callable[[], AbstractContextManager[Connection]],
        timeout_s: float,
        idle_s: float,
    ) -> None:
        self._batch = batch
        self._parts = sorted(parts, key=lambda part: part.transactional_id)
        self._context = context
        self._connect = connect
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._machine = Machine("batch", BATCH_LIFE, BatchState.PREPARED)
        self.completed: Sequence[P] = ()

    @property
    def state(self) -> BatchState:
        """Where the batch stands."""
        return self._machine.state

    def run(self) -> bool:
        """Decide on all parts in one database transaction; then bring Kafka in line.

        On return the rows and the batch's own row are committed, and every transaction of the batch has ended in Kafka.

        Returns:
            Whether this call has written the batch. False if an earlier one had.

        Raises:
            TransactionAborted: Nothing of the batch is committed. What was prepared stays open until it is settled.
            Fenced: Another decider has claimed a part. As TransactionAborted.
            TransactionInDoubt: The answer to COMMIT is missing, and the servers did not answer in time to find it out: run the
                batch again.
            CompletionPending: Decided. Kafka has not all of it yet: run the batch again, or settle.
        """
        failpoints.hit("batch.prepared")
        try:
            event = self._commit()
        except TransactionInDoubt as doubt:
            self._machine.apply(BatchEvent.LOSE_ANSWER)
            self._machine.apply(self._resolve(doubt))
            if self.state is BatchState.UNDECIDED:
                raise TransactionAborted(
                    f"{self._batch.name}: the connection broke during COMMIT; the database has rolled back",
                    next_step="run the batch again",
                ) from doubt
            failpoints.hit("batch.decided")
            return True
        except BaseException:
            self._machine.apply(BatchEvent.ABORT)
            raise
        by_this_call = self._machine.apply(event) is BatchState.DECIDED
        if by_this_call:
            self._batch.decided()
        failpoints.hit("batch.decided")
        try:
            if by_this_call:
                self.completed = self._complete()
                self._machine.apply(BatchEvent.COMPLETE)
            self._batch.settle({part.transactional_id for part in self.completed})
        except DatabaseWentBack:
            raise
        except (Unavailable, ConfigurationError) as error:
            raise pending(self._batch.name, error) from error
        self._machine.apply(BatchEvent.SETTLE)
        return by_this_call

    def _commit(self) -> BatchEvent:
        store = self._context.store
        with self._connect() as connection:
            store.begin(connection)
            try:
                if self._parts:
                    # A decider that is paused from here on loses its session, and its locks with it.
                    store.read_incarnation(connection, self._parts[0].transactional_id)
                if not self._batch.record(connection):
                    logger.info("%s: already written", self._batch.name)
                    store.rollback(connection)
                    return BatchEvent.FIND
                self._batch.require_held(connection)
                for part in self._parts:
                    self._decide_on(connection, part)
                self._batch.bring(connection)
                store.run_deferred(connection)
                # Moving many rows takes its time, and after the lease the broker aborts what is decided.
                self._batch.require_held(connection)
                failpoints.hit("batch.recorded")
            except BaseException:
                store.rollback(connection)
                raise
            store.commit(connection, answer_s=self._timeout_s)
        return BatchEvent.COMMIT

    def _decide_on(self, connection: Connection, part: P) -> None:
        ours, _ = self._context.store.decide(
            connection,
            part.transactional_id,
            part.incarnation,
            part.prepared,
            namespace=part.namespace,
            idle_s=self._idle_s,
        )
        if not ours:
            raise Fenced(
                f"{self._batch.name}: another decider, or a recovery, has claimed its slot",
                transactional_id=part.transactional_id,
                next_step=RUN_AGAIN,
            )

    def _resolve(self, doubt: TransactionInDoubt) -> BatchEvent:
        """Claiming the ids waits for the old session's locks; whatever it was going to commit is committed then."""
        try:
            self._batch.settle(())
            return BatchEvent.FIND if self._batch.is_written() else BatchEvent.ABORT
        except DualWriteError as error:
            doubt.next_step = RUN_AGAIN
            raise doubt from error

    def _complete(self) -> Sequence[P]:
        """Complete without a claim what can be, so that its owners can keep their producers. Returns what it completed."""
        found = {part.transactional_id: part for part in self._parts}
        store = self._context.store
        try:
            rows = [row for row in store.read(list(found)) if _is_decided(found[row.transactional_id], row)]
            completed = complete_handed_over(
                rows, coordinator=self._context.coordinator, store=store, deadline=Deadline(self._timeout_s)
            )
        except DualWriteError as error:
            logger.warning("%s: claiming its slots to complete it: %s", self._batch.name, error)
            return ()
        return [found[row.transactional_id] for row in completed]


def _is_decided(part: Part, row: StateRow) -> bool:
    return (row.prepared, row.incarnation) == (part.prepared, part.incarnation)
