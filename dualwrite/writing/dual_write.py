"""One dual write: its verbs, its messages on their way to the producer, and the order in which it ends.

The order is the protocol: prepare, persist the decision with the user's rows, then complete. Messages are checked and
serialized here, wait here for their savepoint, and go from here to the engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypedDict, TypeVar, cast

from sqlalchemy import event

from dualwrite import failpoints, waiting
from dualwrite.clock import Deadline
from dualwrite.errors import (
    ConfigurationError,
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
from dualwrite.interfaces import NO_WRITE_OBSERVER, SQL, Traits, WriteObserver
from dualwrite.protocol.lives import WRITE_LIFE, Machine, Phase, WriteEvent, WriteState
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, Unsendable
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import Allowance, DoubtStep, allow
from dualwrite.recovery.in_doubt import resolve_commit

if TYPE_CHECKING:
    from confluent_kafka.serialization import SerializationContext
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, SessionTransaction
    from typing_extensions import Self

    from dualwrite.interfaces import Handle, SavepointWatch
    from dualwrite.interfaces import Headers as ObservedHeaders
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


# The messages of one dual write on their way to the producer: at once, or when their savepoint is released.


class Sending:
    """Hands messages to the producer, and remembers the first error: a block that swallows it must not commit half its work.

    Attributes:
        begun: Whether a Kafka transaction has begun.
        refusal: The first error in the block that must abort it, even if the block continues.
        savepoints: The savepoints that messages wait for; None if none are used.
        of_unit: Whether the messages are those of the only unit of a group. It must not wait for a topic: others wait for it.
    """

    def __init__(self, lane: Lane, observer: WriteObserver) -> None:
        self._producer = lane.producer
        self._engine = lane.engine
        self._id = lane.transactional_id
        self._observer = observer
        self.begun = False
        self.refusal: DualWriteError | None = None
        self.savepoints: SavepointWatch | None = None
        self.of_unit = False

    def expect_session(self) -> None:
        """Watch the savepoints of ORM sessions too, before the first one is made."""
        if self.savepoints is not None:
            self.savepoints.expect_session()

    def refuse(self, error: DualWriteError) -> None:
        """Note an error that must abort the block even if it continues; the first one counts."""
        self.refusal = self.refusal or as_value(error)

    @property
    def max_message_bytes(self) -> int:
        """The greatest size of a message."""
        return self._engine.max_message_bytes

    def refuse_callback(self) -> None:
        """Refuse a delivery callback in bulk mode.

        Raises:
            IllegalStateError: The producer is in bulk mode.
        """
        self._engine.refuse_callback()

    def hold(self, message: Sendable) -> int:
        """Take a message inside the savepoint of a unit. It waits, so an error concerns nothing but the unit.

        Returns:
            The bytes of its key and value.

        Raises:
            TransactionAborted, ConfigurationError: It would be refused later; or no broker knows its topic; or its savepoint
                cannot be known.
            TypeError, UnicodeEncodeError: A part is of another type, or a text has a surrogate.
        """
        assert self.savepoints is not None
        message = self._kept(message)
        if message.topic is not None:
            self._engine.require_topic(message.topic)
        self.savepoints.add(message)
        return message.payload

    def _kept(self, message: Sendable) -> Sendable:
        """The value that may wait: checked, and out of reach of its caller."""
        if not isinstance(message, MessageBatch):
            return message
        try:
            return message.checked(self._engine.max_message_bytes)
        except Unsendable as error:
            raise error.refusal(message.topic, self._id) from None

    def send(self, message: Sendable) -> None:
        """Take a message; see :meth:`dualwrite.writing.dual_write.DualWrite.send`."""
        try:
            if self.of_unit and message.topic is not None:
                self._engine.require_topic(message.topic)
            if self.savepoints is None or self.savepoints.direct:
                self._hand_over(message)
            else:
                self.savepoints.add(self._kept(message) if self.savepoints.holds else message)
                for released in self.savepoints.take():
                    self._hand_over(released)
        except IllegalStateError:
            raise  # nothing was changed
        except DualWriteError as error:
            self.refuse(error)
            raise

    def finish(self) -> None:
        """Hand over the messages that still wait. From then on only delivery callbacks may produce.

        Raises:
            TransactionAborted, Fenced, Unavailable, ConfigurationError: There was an error before, which the block swallowed;
                or the producer refuses now; or a savepoint was rolled back unseen.
        """
        self._require_no_refusal()
        if self.savepoints is not None:
            watched, self.savepoints = self.savepoints, None
            try:
                watched.finish()
            finally:
                watched.stop()
            # What delivery callbacks produce from here on goes to the producer at once: nobody watches savepoints any more.
            if waiting := watched.take():
                self._engine.corked = True
                try:
                    for message in waiting:
                        self._hand_over(message)
                finally:
                    self._engine.corked = False

    def prepare(self) -> PreparedTxnState:
        """Prepare the Kafka transaction. Call :meth:`finish` first.

        Raises:
            DualWriteError: As :meth:`dualwrite.kafka.producer.TransactionalProducer.prepare_transaction`; or a
                delivery callback has swallowed that a message of its own was refused.
        """
        if not self.begun:
            return PreparedTxnState()
        try:
            return self._producer.prepare_transaction()
        except IllegalStateError:
            self._require_no_refusal()
            raise

    def take_callback_error(self) -> BaseException | None:
        """The first exception of a delivery callback that no call has raised, once."""
        return self._producer.take_callback_error() if self.begun else None

    def stop(self) -> None:
        """Stop watching savepoints."""
        if self.savepoints is not None:
            self.savepoints.stop()

    def _hand_over(self, message: Sendable) -> None:
        if not self.begun:
            self._producer.begin_transaction()
            self.begun = True
        if isinstance(message, Message):
            self._engine.send(message)
        else:
            self._engine.take(message)
        if not isinstance(message, ConsumedOffsets):
            self._observer.sent(message.topic, message.messages)

    def _require_no_refusal(self) -> None:
        if self.refusal is not None:
            raise_aborted(self.refusal, self._id, "the block")


def as_value(error: BaseException) -> DualWriteError:
    """An error to keep until the end of a dual write: what it says, without its traceback and its causes.

    Their frames hold what the caller has open. Through them, a session that was dropped after the error would stay alive as
    long as its dual write, which ends when the session is collected: neither would ever end.
    """
    if isinstance(error, DualWriteError):
        return copy(error)
    return TransactionAborted(type(error).__name__, retryable=getattr(error, "retryable", False))


def raise_aborted(refusal: DualWriteError, transactional_id: str, subject: str) -> NoReturn:
    """Abort a dual write that continued after an error that it must not survive.

    Args:
        refusal: The first error.
        transactional_id: The id of the dual write.
        subject: The code that continued.

    Raises:
        TransactionAborted, Fenced: Always.
    """
    if isinstance(refusal, Fenced):
        raise copy(refusal)  # raised itself, the kept one would get this traceback
    raise TransactionAborted(
        f"{subject} continued after an error: {refusal.what}",
        transactional_id=transactional_id,
        next_step=refusal.next_step,
        retryable=isinstance(refusal, Unavailable) or getattr(refusal, "retryable", False),
    ) from refusal


# The ORM session of a dual write, or of one of its units: made at first use, on its connection, and on no other.


class OwnSession:
    """Makes the session, flushes and closes it.

    Args:
        connection: The connection.
        factory: Makes the session, called with ``bind=connection``.
        transactional_id: The id of the dual write.
        refuse: Called with the error that must abort the work even if it continues.
        savepoint: Whether the session works in a savepoint. SQLAlchemy rolls back what a session has joined if its flush fails.
    """

    def __init__(
        self,
        connection: Connection,
        factory: Callable[..., Session],
        transactional_id: str,
        refuse: Callable[[DualWriteError], None],
        *,
        savepoint: bool = False,
    ) -> None:
        self._connection = connection
        self._factory = factory
        self._id = transactional_id
        self._refuse = refuse
        self._savepoint = savepoint
        self._closing = False
        self._made: Session | None = None

    @property
    def session(self) -> Session:
        """The session."""
        if self._made is None:
            self._made = self._factory(bind=self._connection)
            if self._savepoint:
                self._made.join_transaction_mode = "create_savepoint"
                event.listen(self._made, "after_soft_rollback", self._refuse_rollback)
            event.listen(self._made, "after_begin", self._refuse_other_connection)
        return self._made

    def _refuse_other_connection(self, session: Session, transaction: object, connection: Connection) -> None:
        """Refuse another connection: what a class bound to another engine wrote there would be rolled back in the end."""
        del session, transaction
        if connection is not self._connection:
            error = ConfigurationError(
                "the session began on another connection, not the dual write's",
                transactional_id=self._id,
                next_step="leave binds out of session_factory: a dual write is decided in one database",
            )
            self._refuse(error)
            raise error

    def _refuse_rollback(self, session: Session, transaction: SessionTransaction) -> None:
        """Refuse further work: messages before the session's savepoint would outlive the rows in it."""
        del session
        if transaction.parent is None and not self._closing:
            self._refuse(
                TransactionAborted(
                    "the session of the unit was rolled back",
                    transactional_id=self._id,
                    next_step="use begin_nested() for what may fail",
                    retryable=False,
                )
            )

    def flush(self) -> None:
        """Flush the session, if there is one."""
        if self._made is not None:
            self._made.flush()

    def close(self) -> None:
        """Close the session, if there is one. Its objects stay readable."""
        self._closing = True
        if self._made is not None:
            self._made.close()


# Serializers: callables that make the bytes of keys and values, as confluent-kafka's `SerializingProducer` has them.

Serializer: TypeAlias = Callable[[Any, "SerializationContext"], bytes | str | None]
"""Makes a key or a value from an object: ``(object, SerializationContext) -> bytes``. It may add to the context's headers."""

ByTopic: TypeAlias = Serializer | Mapping[str, Serializer] | None
"""One for all topics, or one for each topic; the other topics then have none."""


class Serializers(TypedDict, total=False):
    """The serializers of a writer: ``{"key": ..., "value": ...}``, or one of the two.

    Each is a callable ``(object, SerializationContext) -> bytes``, as those of confluent-kafka, or a dictionary with one for
    each topic that has one. Many threads use them at once.
    """

    key: ByTopic
    value: ByTopic


Bytes: TypeAlias = bytes | str | None

Called = TypeVar("Called")


class Serializing:
    """Makes the bytes of messages. Many threads use it, and its serializers, at once.

    Args:
        key: The serializers of keys.
        value: The serializers of values.

    Attributes:
        none: Whether there is no serializer for any topic.

    Raises:
        ConfigurationError: One of them cannot be called.
    """

    def __init__(self, key: ByTopic = None, value: ByTopic = None) -> None:
        for name, given in (("the key serializer", key), ("the value serializer", value)):
            check_callable(name, given, "(object, SerializationContext) -> bytes")
        self._key = key
        self._value = value
        self.none = key is None and value is None

    @classmethod
    def of(cls, given: Serializers | None) -> Self:
        """Make it of what a writer was given.

        Raises:
            ConfigurationError: There is another entry than ``key`` and ``value``, or one of them cannot be called.
        """
        return cls(**key_and_value("serializers", given))

    def message(
        self, topic: str, key: object, value: object, headers: ObservedHeaders
    ) -> tuple[Bytes, Bytes, ObservedHeaders]:
        """The key, value and headers to produce. The caller's headers stay as they are. What has no serializer stays, too.

        Raises:
            KeySerializationError, ValueSerializationError: A serializer has failed. Nothing was produced.
        """
        key_by, value_by = for_topic(self._key, topic), for_topic(self._value, topic)
        if key_by is None and value_by is None:
            return cast("Bytes", key), cast("Bytes", value), headers
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers or ())
        made = _made(key_by, key, "key", topic, pairs), _made(value_by, value, "value", topic, pairs)
        return *made, pairs or None

    def many(
        self, topic: str, keys: Sequence[object] | None, values: Sequence[object]
    ) -> tuple[Sequence[Bytes] | None, Sequence[Bytes]]:
        """The keys and values of many messages of one topic, whose serializers get no headers.

        Raises:
            KeySerializationError, ValueSerializationError: As :meth:`message`. Nothing was produced.
        """
        key_by, value_by = for_topic(self._key, topic), for_topic(self._value, topic)
        return (
            None if keys is None else [_made(key_by, one, "key", topic, None) for one in keys],
            [_made(value_by, one, "value", topic, None) for one in values],
        )


def key_and_value(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries ``key`` and ``value`` of an argument.

    Raises:
        ConfigurationError: It is no dictionary, or has another entry.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or (given.keys() - {"key", "value"}):
        raise ConfigurationError(f"{name} is {given!r}", next_step='give a dictionary: {"key": ..., "value": ...}')
    return dict(given)


def check_callable(name: str, given: object, signature: str) -> None:
    """Refuse what is neither a callable, nor one for each topic, nor None.

    Raises:
        ConfigurationError: It cannot be called.
    """
    for one in given.values() if isinstance(given, Mapping) else [given]:
        if one is not None and not callable(one):
            raise ConfigurationError(
                f"{name} cannot be called: {one!r}",
                next_step=f"give a callable {signature}, or one for each topic in a dict",
            )


def for_topic(given: Called | Mapping[str, Called] | None, topic: str) -> Called | None:
    """The callable of a topic: the one for all topics, or its own, if it has one."""
    return given.get(topic) if isinstance(given, Mapping) else given


def _made(
    serializer: Serializer | None, given: object, field: str, topic: str, headers: list[tuple[str, Bytes]] | None
) -> Bytes:
    if serializer is None:
        return cast("Bytes", given)
    from confluent_kafka.error import KeySerializationError, ValueSerializationError  # noqa: PLC0415 - loads a driver
    from confluent_kafka.serialization import MessageField, SerializationContext  # noqa: PLC0415 - as above

    try:
        made = serializer(given, SerializationContext(topic, MessageField(field), headers))
        if made is None or isinstance(made, bytes | str):
            return made
        raise TypeError(
            f"the {field} serializer of {topic} made {type(made).__name__}, neither bytes nor text nor None"
        )
    except Exception as error:
        raise (KeySerializationError if field == "key" else ValueSerializationError)(error) from error


NO_SERIALIZERS: Final = Serializing()
