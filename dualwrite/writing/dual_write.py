"""The steps of one dual write, and the order in which it ends. The block drives it; users hold a ``Transaction``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualwrite import failpoints, waiting
from dualwrite.clock import Deadline
from dualwrite.errors import (
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.interfaces__ports_database import SQL, Traits
from dualwrite.interfaces__ports_observer import NO_WRITE_OBSERVER, WriteObserver
from dualwrite.protocol.lives import Machine
from dualwrite.protocol.lives__protocol_tables_write_life import WRITE_LIFE, WriteEvent, WriteState
from dualwrite.protocol.lives__protocol_tables_write_phases import Phase
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import Allowance, allow
from dualwrite.protocol.process__protocol_settling_commit_in_doubt import DoubtStep
from dualwrite.recovery.in_doubt__recovery_commit_in_doubt import resolve_commit
from dualwrite.writing.dual_write__writing_blocks_own_session import OwnSession
from dualwrite.writing.dual_write__writing_blocks_sending import Sending

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from dualwrite.interfaces import Handle
    from dualwrite.protocol.message import Sendable
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.writing.lane import Lane

logger = logging.getLogger(__name__)


class DualWrite:
    """One dual write, driven by its block: begun, then committed, aborted or handed over, then released. Used by one thread.

    The block gives the user a :class:`dualwrite.writing.transaction.Transaction`, which exposes none of the verbs.

    Attributes:
        lent: Whether the user's code is running. The verbs then refuse: called there, they would end the dual write under its
            block, which could only report an outcome that is not true.
        observer: Observes it.
        sending: Its messages.
        prepared: The identity of its Kafka transaction; None if it is not prepared.
    """

    def __init__(
        self,
        lane: Lane,
        context: OwnerContext,
        handle: Handle,
        *,
        traits: Traits = SQL,
        session_factory: Callable[..., Session],
        margin_s: float,
        timeout_s: float,
        savepoints: bool = True,
        observer: WriteObserver = NO_WRITE_OBSERVER,
    ) -> None:
        self._lane = lane
        self._context = context
        self._handle = handle
        self._traits = traits
        self._session_factory = session_factory
        self._margin_s = margin_s
        self._timeout_s = timeout_s
        self._machine = Machine("dual write", WRITE_LIFE, WriteState.BEGUN, moved=observer.moved)
        self._uses_savepoints = savepoints
        self.sending = Sending(lane, observer)
        self._session = self.new_session(self.sending.refuse)
        self._database_transaction: str | None = None
        self._process = os.getpid()
        self.lent = False
        self.observer = observer
        self.prepared: PreparedTxnState | None = None

    def _refuse_while_lent(self) -> None:
        if self.lent:
            error = IllegalStateError(
                "the dual write cannot be begun or ended inside its block",
                transactional_id=self.transactional_id,
                next_step="leave the block to commit both sides, or raise in it to abort both",
            )
            self.sending.refuse(error)
            raise error

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked process, and the dual write that of its parent, which alone may end it."""
        return os.getpid() != self._process

    def require_not_parents(self) -> None:
        """Refuse to end the dual write of the process that this one was forked from.

        Raises:
            IllegalStateError: It is.
        """
        if self.is_parents:
            raise IllegalStateError(
                f"the dual write was begun by process {self._process}, and this one was forked inside it: nothing was ended",
                transactional_id=self.transactional_id,
                next_step="leave the block to that process; end this one with os._exit()",
            )

    @property
    def transactional_id(self) -> str:
        """The id that this dual write runs under."""
        return self._lane.transactional_id

    @property
    def state(self) -> WriteState:
        """The present state of this dual write."""
        return self._machine.state

    def given(self, name: str) -> Any:
        """The object that the database gives to the user's code under this name.

        Raises:
            IllegalStateError: The block has ended, or this kind of database does not have it.
        """
        self._machine.apply(WriteEvent.EXECUTE)
        if name != self._traits.gives:
            raise self._traits.absent(name)
        return self._handle if name == SQL.gives else getattr(self._handle, name)

    @property
    def connection(self) -> Connection:
        """See :attr:`dualwrite.writing.transaction.Transaction.connection`."""
        connection: Connection = self.given(SQL.gives)
        return connection

    @property
    def session(self) -> Session:
        """See :attr:`dualwrite.writing.transaction.Transaction.session`."""
        self._machine.apply(WriteEvent.EXECUTE)
        if self._traits.gives != SQL.gives:
            raise self._traits.absent("session")
        self.sending.expect_session()
        return self._session.session

    def new_session(self, refuse: Callable[[DualWriteError], None], unit: Connection | None = None) -> OwnSession:
        """An ORM session on the connection, or on that of a unit, in a savepoint; see :class:`OwnSession`."""
        connection, savepoint = (self._handle, False) if unit is None else (unit, True)
        return OwnSession(connection, self._session_factory, self.transactional_id, refuse, savepoint=savepoint)

    def require_open(self) -> None:
        """Raise if messages can no longer be sent.

        Raises:
            IllegalStateError: The block has ended.
        """
        self._machine.check(WriteEvent.PRODUCE)

    @property
    def in_savepoint(self) -> bool:
        """See :class:`dualwrite.writing.transaction.Write`. Asks nobody: a savepoint past SQLAlchemy is not seen."""
        savepoints = self.sending.savepoints
        return savepoints is not None and savepoints.may_roll_back

    @property
    def max_message_bytes(self) -> int:
        """See :class:`dualwrite.writing.transaction.Write`."""
        return self.sending.max_message_bytes

    def refuse_callback(self) -> None:
        """See :class:`dualwrite.writing.transaction.Write`."""
        self.sending.refuse_callback()

    def refuse(self, error: DualWriteError) -> None:
        """See :class:`dualwrite.writing.transaction.Write`."""
        self.sending.refuse(error)

    def send(self, message: Sendable) -> None:
        """Hand one or many messages, or offsets, to the producer: at once, or when the open savepoint is released.

        Raises:
            IllegalStateError: The block has ended.
            TransactionAborted, Fenced, Unavailable, ConfigurationError: The producer refuses. Both sides abort at the end of
                the block, even if the caller continues.
        """
        self._machine.apply(WriteEvent.PRODUCE)
        self.sending.send(message)
        failpoints.hit("write.produced")

    def begin(self) -> None:
        """Begin the database transaction and read the row, before anything can be produced.

        Raises:
            Fenced: The row names an incarnation other than ours.
            IllegalStateError, ConfigurationError: The connection cannot be used for this.
            Unavailable: The database does not answer.
        """
        self._refuse_while_lent()
        store = self._context.store
        store.begin(self._handle)
        try:
            failpoints.hit("write.begun")
            incarnation = store.read_incarnation(
                self._handle, self.transactional_id, namespace=self._lane.row.namespace, known=self._lane.row
            )
            if incarnation != self._lane.row.incarnation:
                raise self._fenced(incarnation)
            if self._uses_savepoints:
                self.sending.savepoints = store.watch_savepoints(self._handle, self.transactional_id)
            self._machine.apply(WriteEvent.CHECK)
            failpoints.hit("write.checked")
        except DatabaseWentBack as error:
            self.abort()
            self._lane.record_forgotten(error)
            raise
        except BaseException:
            self.abort()
            raise

    def commit(self, *, permit: Callable[[Handle], None] = lambda _: None) -> None:
        """End the dual write: prepare Kafka, record, commit the database (the decision), commit Kafka.

        Args:
            permit: Called in the database's transaction after its last statement. If it raises, both sides abort.

        Raises:
            TransactionAborted, Fenced, ConfigurationError: Both sides are aborted.
            TransactionInDoubt: The database's answer is missing, and the doubt could not be resolved.
            CompletionPending: Decided; Kafka will follow.
            DecidedTransactionLost, OutcomeUnverifiable: Decided, but Kafka does not have it, or that can no longer be known.
            DatabaseWentBack: Decided, then lost by the database.
            IllegalStateError: It has already ended.
        """
        self._refuse_while_lent()
        self._machine.check(WriteEvent.PREPARE)
        failpoints.hit("write.body_done")
        deadline = Deadline(self._timeout_s)
        try:
            with waiting.interruptible():
                state = self._prepare()
                answer = self._record(state, deadline, permit)
        except Unavailable as error:
            self.abort()
            raise TransactionAborted(error.what, transactional_id=self.transactional_id) from error
        except BaseException:
            self.abort()
            raise
        with waiting.uninterrupted():
            interruption = self._decide(state, answer, deadline)
            if self.sending.begun:
                self.observer.enter(Phase.COMPLETE)
                self._lane.complete(state, deadline)
            self._machine.apply(WriteEvent.COMPLETE)
            failpoints.hit("write.completed")
        if interruption is not None:
            raise interruption

    def hand_over(self, *, prepared: bool = False, permit: Callable[[Handle], None] = lambda _: None) -> None:
        """End the dual write undecided: prepare Kafka, and commit the database's part without naming it in the row.

        For writes that another process decides together with others. On return the rows are durable, :attr:`prepared` is the
        open Kafka transaction, and this process must neither commit nor abort either of them.

        Args:
            prepared: Prepare the database's transaction (``PREPARE TRANSACTION``); the settler of the row ends it. Otherwise
                it is committed, and the rows must stand where nobody reads them.
            permit: Called as the last statement of the database's transaction. If it raises, both sides abort.

        Raises:
            TransactionAborted, Fenced, ConfigurationError: Kafka's side is aborted. The rows may remain where they are, and
                count for nothing.
            IllegalStateError: It has already ended.
        """
        self._refuse_while_lent()
        self._machine.check(WriteEvent.PREPARE)
        failpoints.hit("write.body_done")
        try:
            state = self._prepare(run_deferred=True)
            permit(self._handle)
            answer_s = self._timeout_s / 2
            if prepared:
                self._context.store.prepare(self._handle, self._lane.row, state, answer_s=answer_s)
            else:
                self._context.store.commit(self._handle, answer_s=answer_s)
        except (Unavailable, TransactionInDoubt) as error:
            self.abort()
            raise TransactionAborted(error.what, transactional_id=self.transactional_id) from error
        except BaseException:
            self.abort()
            raise
        self._machine.apply(WriteEvent.HAND_OVER)
        failpoints.hit("batch.handed_over")

    def _prepare(self, *, run_deferred: bool = False) -> PreparedTxnState:
        self.observer.enter(Phase.PREPARE)
        self._session.flush()
        self.sending.finish()
        if run_deferred:
            self._context.store.run_deferred(self._handle, self.transactional_id)
        state = self.sending.prepare()
        self._machine.apply(WriteEvent.PREPARE)
        self.prepared = state
        failpoints.hit("write.prepared")
        return state

    def _record(self, state: PreparedTxnState, deadline: Deadline, permit: Callable[[Handle], None]) -> Deadline:
        """Execute the last statement of the database's transaction. Returns the deadline for the answer to its COMMIT.

        What is deferred to COMMIT runs before it. Left to COMMIT, it would take its time after the last check of the clock.
        """
        store, incarnation, namespace = self._context.store, self._lane.row.incarnation, self._lane.row.namespace
        allowance = None
        if state.has_transaction:
            allowance = self._require_time(allow(self._left_s(), self._margin_s, deadline.remaining_s()))
            answer = Deadline(allowance.answer_s)
            ours, self._database_transaction = store.decide(
                self._handle,
                self.transactional_id,
                incarnation,
                state,
                namespace=namespace,
                idle_s=allowance.decide_s,
                within_s=allowance.decide_s,
                answer_s=allowance.answer_s,
                deferred=True,
            )
        else:
            answer = Deadline(deadline.remaining_s() / 2)
            ours, self._database_transaction = store.hold(
                self._handle,
                self.transactional_id,
                incarnation,
                namespace=namespace,
                answer_s=answer.remaining_s(),
                deferred=True,
            )
        if not ours:
            raise self._fenced(None)
        # Only now: what it locks stays locked until COMMIT, and a session that is paused from here on ends by itself.
        permit(self._handle)
        self._machine.apply(WriteEvent.RECORD)
        failpoints.hit("write.recorded")
        if allowance is not None:
            self._lane.producer.require_still_open()
            self._require_time(allowance if allowance.fits(self._left_s()) else None)
        return answer

    def _left_s(self) -> float:
        """The time left of the broker's transaction timeout, in seconds."""
        return self._lane.producer.transaction_timeout_ms / 1000 - self._lane.producer.begun_for_s

    def _require_time(self, allowance: Allowance | None) -> Allowance:
        if allowance is not None:
            return allowance
        producer = self._lane.producer
        raise TransactionAborted(
            f"the transaction was open for {producer.begun_for_s:.0f} s of the {producer.transaction_timeout_ms / 1000:.0f} s "
            f"after which the broker aborts it; {self._margin_s:g} s must be left when the database has committed",
            transactional_id=self.transactional_id,
            next_step="do less in one transaction, or raise the broker's transaction.max.timeout.ms",
            retryable=False,
        )

    def _decide(self, state: PreparedTxnState, answer: Deadline, deadline: Deadline) -> BaseException | None:
        """Commit the database. Returns an interruption (``KeyboardInterrupt``) that came meanwhile, to raise later."""
        if answer.expired:
            # Paused since the last check of the clock. SQLite has no server that would have ended the transaction.
            self.abort()
            raise TransactionAborted("the process was paused before its COMMIT", transactional_id=self.transactional_id)
        try:
            self._context.store.commit(self._handle, answer_s=answer.remaining_s())
        except TransactionAborted as error:
            self.abort()
            if (interruption := _interruption(error)) is not None:
                raise interruption from error
            raise
        except TransactionInDoubt as error:
            self._machine.apply(WriteEvent.LOSE_ANSWER)
            self._resolve(state, deadline, error)
            return _interruption(error)
        self._machine.apply(WriteEvent.COMMIT)
        failpoints.hit("write.decided")
        return None

    def _resolve(self, state: PreparedTxnState, deadline: Deadline, doubt: TransactionInDoubt) -> None:
        try:
            verdict = waiting.elsewhere(
                lambda: resolve_commit(
                    self._context, self.transactional_id, state, self._database_transaction, deadline
                )
            )
        except DualWriteError as error:
            self._lane.discard()
            raise doubt from error
        if verdict is DoubtStep.COMMITTED:
            self._machine.apply(WriteEvent.COMMIT)
        elif verdict is DoubtStep.ABORTED:
            self.abort()
            raise _interruption(doubt) or TransactionAborted(
                f"{doubt.what}; the database has rolled back",
                transactional_id=self.transactional_id,
            ) from doubt
        elif verdict is DoubtStep.IN_DOUBT:
            self._lane.discard()
            raise doubt
        else:
            self._machine.apply(WriteEvent.FIND_LOST)
            self._lane.discard()
            kind = DecidedTransactionLost if verdict is DoubtStep.LOST else OutcomeUnverifiable
            raise kind(verdict.value, transactional_id=self.transactional_id, state=str(state)) from doubt

    def abort(self) -> None:
        """Abort both sides. Does nothing if they have already aborted.

        If Kafka does not accept the abort, the producer is discarded and the next settler aborts its transaction: the row
        does not name it, so it can no longer be committed.
        """
        self._refuse_while_lent()
        if self._machine.state is WriteState.ABORTED:
            return
        self.observer.enter(Phase.ABORT)
        failpoints.hit("write.before_abort")
        with waiting.uninterrupted():
            self._abort()

    def _abort(self) -> None:
        self.sending.stop()
        self._context.store.rollback(self._handle)
        failpoints.hit("write.rolled_back")
        if self.sending.begun:
            try:
                self._lane.producer.abort_transaction()
            except DualWriteError as error:
                logger.warning("%s: Kafka did not accept the abort: %s", self.transactional_id, error)
                self._lane.discard()
        self._machine.apply(WriteEvent.ABORT)

    def release(self) -> None:
        """Close the session once the block has ended. Its objects stay readable."""
        self._refuse_while_lent()
        self.sending.stop()
        self._session.close()

    def _fenced(self, found: int | None) -> Fenced:
        shown = "no longer names" if found is None else f"names incarnation {found} instead of"
        return Fenced(
            f"the row {shown} our incarnation {self._lane.row.incarnation}", transactional_id=self.transactional_id
        )

    def __repr__(self) -> str:
        return f"<DualWrite {self.transactional_id} {self._machine.state.value}>"


def _interruption(error: DualWriteError) -> BaseException | None:
    """The interruption behind this error, which must be passed on: a ``KeyboardInterrupt`` or the like, if any."""
    return None if isinstance(error.__cause__, Exception) else error.__cause__
