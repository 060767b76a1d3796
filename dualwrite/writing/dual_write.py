"""One dual write: its verbs, its messages on their way to the producer, and the order in which it ends.

The order is the protocol: prepare, persist the decision with the user's rows, then complete. This module checks and serializes
messages, lets them wait for their savepoint, and hands them to the engine.

``__enter__`` begins the database transaction and reads the row, before anything can be produced. While the block's code runs,
its messages go to the engine at once, or wait for the savepoint in which they were produced. ``__exit__`` ends both sides:
Kafka is prepared, the row records it, COMMIT decides, Kafka follows. An exception in the block aborts both.

``KeyboardInterrupt`` may come between any two lines. A block that is interrupted while it ends discards its lane's producer and
its connection, so that neither is used again before the id is claimed again. A block whose ``__exit__`` never began is ended
when it is collected.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

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
from dualwrite.interfaces import NO_OBSERVER, SQL, Traits
from dualwrite.kafka import engine as forks
from dualwrite.protocol.lives import WRITE_LIFE, Machine, Phase, WriteEvent, WriteState
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, Unsendable
from dualwrite.protocol.outbox import setting_of_block
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import Allowance, DoubtStep, allow
from dualwrite.protocol.values import Decided, Decision
from dualwrite.recovery import in_doubt
from dualwrite.recovery.claim import LOSSES, note_raised
from dualwrite.stores.sql.access import conflict_behind
from dualwrite.writing.transaction import (
    NO_SERIALIZERS,
    Refusals,
    Serializing,
    Transaction,
    Work,
    enter,
    raise_aborted,
)

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, SessionTransaction

    from dualwrite.interfaces import Database, Handle, Observer, SavepointWatch, StateStore, WriteObserver
    from dualwrite.kafka.producer import LaneProducer
    from dualwrite.protocol.message import Sendable
    from dualwrite.protocol.outbox import Outbox
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.stores.sql.adopted import DjangoConnection
    from dualwrite.writing.fair_queue import Ticket
    from dualwrite.writing.health import HealthMonitor
    from dualwrite.writing.lane import Lane
    from dualwrite.writing.lane_pool import Lanes, PooledLane
    from dualwrite.writing.outbox import MayWait, Outboxes

logger = logging.getLogger(__name__)

_NO_TRANSACTION: Final = PreparedTxnState()
_ENDED: Final = frozenset({WriteState.COMPLETED, WriteState.WAITING, WriteState.ABORTED, WriteState.HANDED_OVER})


# The ORM session of a dual write or of one of its units: made at first use, on its connection and no other.


def session_of_block(bind: Connection) -> Session:
    """The ORM session of a block. Its objects stay readable after the block has ended."""
    from sqlalchemy.orm import Session  # noqa: PLC0415 - large, and loaded only where it is used

    return Session(bind=bind, expire_on_commit=False)


def no_session(**_: object) -> Session:
    """Stands in for ``tx.session`` in a block that joins another session's transaction. Always raises `IllegalStateError`."""
    raise IllegalStateError("the dual write of a session has no other session", next_step="use your own session")


class OwnSession:
    """Makes the session, flushes and closes it.

    ``refuse`` is called with the error that must abort the work even if it continues. With ``savepoint`` the session works in a
    savepoint, because SQLAlchemy rolls back what a session has joined if its flush fails.
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
        """The session, made at its first use."""
        if self._made is None:
            self._made = self._factory(bind=self._connection)
            if self._savepoint:
                self._made.join_transaction_mode = "create_savepoint"
                event.listen(self._made, "after_soft_rollback", self._refuse_rollback)
            event.listen(self._made, "after_begin", self._refuse_other_connection)
        return self._made

    def _refuse_other_connection(self, session: Session, transaction: object, connection: Connection) -> None:
        """Refuse another connection: what a class bound to another engine writes there would be rolled back at the end."""
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
        """Refuse further work: messages from before the session's savepoint would outlive the rows in it."""
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


class Ending(Enum):
    """The ways in which the end of a block ends its dual write."""

    COMMIT = "commit both sides"
    HAND_OVER = "hand it over undecided; the database's part is committed, where nobody reads it"
    PREPARE = "hand it over undecided; the database's part is prepared"


class DualWrite(Work):
    """One dual write on a ready lane. ``with DualWrite(...) as tx`` runs it; used by one thread, and entered once.

    No other dual write uses ``lane`` until the block has ended. ``handle`` is a connection that is not inside a transaction, or
    the database's counterpart. ``margin_s`` must be left of the broker's transaction timeout at the decision. ``permit`` is
    called in the database transaction after its last statement; if it raises, both sides abort. ``savepoints`` is False if the
    block's code opens none: then it may also produce in the middle of a COPY. ``may_wait`` is given if its messages may wait in
    the database; then the lane need not be ready to send.
    """

    running = False
    _in_send = False
    _producer: LaneProducer

    def __init__(
        self,
        lane: Lane,
        context: OwnerContext,
        handle: Handle,
        *,
        traits: Traits = SQL,
        session_factory: Callable[..., Session] = session_of_block,
        margin_s: float,
        timeout_s: float,
        ending: Ending = Ending.COMMIT,
        permit: Callable[[Handle], None] | None = None,
        defers: bool = True,
        savepoints: bool = True,
        observer: WriteObserver | None = None,
        serializing: Serializing = NO_SERIALIZERS,
        may_wait: MayWait | None = None,
    ) -> None:
        self.transactional_id = lane.transactional_id
        self.may_wait = may_wait
        if may_wait is None:
            self._producer = producer = lane.producer
            self.engine = producer.engine
        else:  # the lane may have none, and need none
            self.engine = may_wait.recipient()
        self.refusals = Refusals()
        self.observer = observer
        self.sending = False
        self.savepoints: SavepointWatch | None = None
        # The only unit of a group must not wait for a topic: others wait for it.
        self.of_unit = False
        self._lane = lane
        self._context = context
        self._handle = handle
        self._traits = traits
        self._session_factory = session_factory
        self._margin_s = margin_s
        self._timeout_s = timeout_s
        self._ending = ending
        self._permit = permit
        self._defers = defers
        self._uses_savepoints = savepoints
        self._serializing = serializing
        self._machine = Machine(
            "dual write", WRITE_LIFE, WriteState.BEGUN, moved=None if observer is None else observer.moved
        )
        self._session: OwnSession | None = None
        self._database_transaction: str | None = None
        self._prepared: PreparedTxnState | None = None
        self._process = forks.process

    # The block

    def __enter__(self) -> Transaction:
        """Begin the database's transaction and read the row. See :meth:`dualwrite.writing.writer.DualWriter.transaction`."""
        if self.running:
            self._refuse_inside()
        if self._machine.state is not WriteState.BEGUN:  # it is entered once
            self._machine.check(WriteEvent.CHECK)
        try:
            self._begin()
            self.running = True
            return Transaction(self, self._serializing)
        except BaseException as error:
            self.running = False
            if self._machine.state is WriteState.CHECKED:  # interrupted once it had begun
                try:
                    self._abort()
                finally:
                    self._release()
            if isinstance(error, LOSSES):
                note_raised(self._context.store, error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End both sides. See :meth:`dualwrite.writing.writer.DualWriter.transaction`."""
        try:
            self.running = False
            if error is None:
                if self.is_parents:
                    raise self._parents()
                if self._ending is Ending.COMMIT:
                    self._commit()
                else:
                    self._hand_over(prepared=self._ending is Ending.PREPARE)
            elif not self.is_parents:
                self._abort()
                if waiting.in_own_thread() and waiting.is_cancellation(error):
                    self._leave_to_code()
        except BaseException as raised:
            if isinstance(raised, LOSSES):
                note_raised(self._context.store, raised)
            self._raise_from_callback(raised)
            raise
        finally:
            self._release()
        if error is not None:
            self._raise_from_callback(error)
        return None

    def __del__(self) -> None:
        """End a block that was interrupted before its end began: abort both sides."""
        if self.running and not sys.is_finalizing():
            try:
                self.__exit__(GeneratorExit, GeneratorExit(), None)
            except BaseException as error:  # noqa: BLE001 - nobody can catch it
                logger.warning("%s: a dropped block was not ended: %s", self.transactional_id, error)

    def _leave_to_code(self) -> None:
        """Give nobody else what the block's code uses: it may still run, in a thread that its cancelled task awaits no more.

        Otherwise the statement or the message that it is about to send would become part of the next block.
        """
        self._context.store.discard(self._handle)
        if self._in_send:
            self._lane.discard()

    def _release(self) -> None:
        """Release the connection and the lane. Neither may be used again if the block has not ended properly."""
        if self.is_parents:
            # A forked process, which leaves the block, too. It must send the servers nothing, not even a rollback.
            self._context.store.discard(self._handle)
            return
        if self.savepoints is not None:
            self.savepoints.stop()
        if self._session is not None:
            self._session.close()
        if self._machine.state not in _ENDED:
            # Claiming waits for the old backend, and settles.
            self._lane.leave_in_doubt()
            self._context.store.discard(self._handle)

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked process and the dual write is its parent's, which alone may end it."""
        return self._process != forks.process

    def _parents(self) -> IllegalStateError:
        return IllegalStateError(
            f"the dual write was begun by process {self._process}, and this one was forked inside it: nothing was ended",
            transactional_id=self.transactional_id,
            next_step="leave the block to that process; end this one with os._exit()",
        )

    def _refuse_inside(self) -> NoReturn:
        """Refuse a verb that the user's code called: it would end the dual write inside its block."""
        error = IllegalStateError(
            "the dual write cannot be begun or ended inside its block",
            transactional_id=self.transactional_id,
            next_step="leave the block to commit both sides, or raise in it to abort both",
        )
        self.refuse(error)
        raise error

    def _raise_from_callback(self, error: BaseException) -> None:
        """Show what a delivery callback raised as the context of the block's own error, which outweighs it.

        By the block's error, callers and `run` decide whether to run the work again. Only an interruption
        (``KeyboardInterrupt``, a cancellation) replaces it, because it must not get lost.
        """
        raised = self._producer.take_callback_error() if self.sending else None
        if raised is None or raised is error:
            return
        if isinstance(error, Exception) and not isinstance(raised, Exception):
            raise raised from error
        chain = list(_explained(error))
        for one in _explained(raised):
            if one.__context__ in chain or one.__cause__ in chain:
                one.__context__ = one.__cause__ = None  # an abort has called it because of this error: no circle
        if raised not in chain:
            # ``raise ... from`` hides contexts, except that at the end of the chain of causes.
            chain[-1].__context__, chain[-1].__suppress_context__ = raised, False

    # What its code works with

    @property
    def state(self) -> WriteState:
        """The present state of this dual write."""
        return self._machine.state

    @property
    def prepared(self) -> PreparedTxnState | None:
        """The identity of its Kafka transaction; None if it is not prepared."""
        return self._prepared

    @property
    def outbox(self) -> bool | None:
        if self._machine.state is WriteState.CHECKED and self.may_wait is not None:
            return True if self.may_wait.waits else None
        return self._machine.state is WriteState.WAITING

    def resource(self, name: str) -> Any:
        self._machine.check(WriteEvent.EXECUTE)
        if name != self._traits.gives:
            raise self._traits.absent(name)
        return self._handle if name == SQL.gives else getattr(self._handle, name)

    @property
    def connection(self) -> Connection:
        if self._machine.state is not WriteState.CHECKED or self._traits.gives != SQL.gives:
            self.resource(SQL.gives)  # says why not
        connection: Connection = self._handle
        return connection

    @property
    def session(self) -> Session:
        self._machine.check(WriteEvent.EXECUTE)
        if self._traits.gives != SQL.gives:
            raise self._traits.absent("session")
        self.expect_session()
        if self._session is None:
            # It must not refer to this block: a dropped session would then keep its dual write alive, and with it the lane.
            self._session = OwnSession(self._handle, self._session_factory, self.transactional_id, self.refusals.note)
        return self._session.session

    def expect_session(self) -> None:
        """Watch the savepoints of ORM sessions too, before the first one is made."""
        if self.savepoints is not None:
            self.savepoints.expect_session()

    def session_of_unit(self, connection: Connection, refuse: Callable[[DualWriteError], None]) -> OwnSession:
        """The ORM session of a unit, in its savepoint; see :class:`OwnSession`."""
        return OwnSession(connection, self._session_factory, self.transactional_id, refuse, savepoint=True)

    @property
    def in_savepoint(self) -> bool:
        return self.savepoints is not None and self.savepoints.may_roll_back

    # Messages

    def require_open(self) -> None:
        self._machine.check(WriteEvent.PRODUCE)

    def send(self, message: Sendable) -> None:  # noqa: C901, PLR0912 - the whole way of a message, in one frame
        self._in_send = True  # before the state is looked at: see _leave_to_code
        if self._machine.state is not WriteState.CHECKED:
            self._machine.check(WriteEvent.PRODUCE)
        savepoints, may_wait = self.savepoints, self.may_wait
        try:
            if self.of_unit and message.topic is not None:
                self.engine.require_topic(message.topic)
            is_free = savepoints is None or savepoints.direct
            for one in (message,) if is_free else self._behind_savepoint(message):
                sent = one if may_wait is None else may_wait.keep(one)
                if sent is None:
                    continue
                try:
                    if not self.sending:
                        self._producer.begin_transaction()
                        self.sending = True
                    if isinstance(sent, Message):
                        self.engine.send(sent)
                    else:
                        self.engine.take(sent)
                except Unavailable as error:
                    if may_wait is None:
                        raise
                    self._fall_back(may_wait, error)
                    continue
                if self.observer is not None and not isinstance(sent, ConsumedOffsets):
                    self.observer.sent(sent.topic, sent.messages)
        except (IllegalStateError, TypeError, ValueError):
            raise  # nothing was changed
        except BaseException as error:  # also of a signal's handler: nobody knows how much of the message was taken
            self.refuse(error)
            raise
        finally:
            self._in_send = False
        failpoints.hit("write.produced")

    def _behind_savepoint(self, message: Sendable) -> Sequence[Sendable]:
        """Let a message wait for the open savepoint, if there is one. Returns those that need not wait any longer."""
        assert self.savepoints is not None
        self.savepoints.add(self.kept(message) if self.savepoints.holds else message)
        return self.savepoints.take()

    def hold(self, message: Sendable) -> int:
        """Take a message inside the savepoint of a unit, and return the bytes of its key and value.

        The message waits, so an error (as of :meth:`send`, or because its savepoint cannot be known) concerns only the unit.
        """
        assert self.savepoints is not None
        message = self.kept(message)
        if message.topic is not None:
            self.engine.require_topic(message.topic)
        self.savepoints.add(message)
        return message.payload

    def kept(self, message: Sendable) -> Sendable:
        """The value that may wait: checked, and copied so that its caller cannot change it."""
        if not isinstance(message, MessageBatch):
            return message
        try:
            return message.checked(self.engine.max_message_bytes)
        except Unsendable as error:
            raise error.refusal(message.topic, self.transactional_id) from None

    def _fall_back(self, may_wait: MayWait, silent: Unavailable) -> None:
        """Let the messages wait in the database. What was sent stays undecided, and its producer is not used again."""
        may_wait.fall_back(silent)
        self._machine.apply(WriteEvent.FALL_BACK)
        self.engine = may_wait.recipient()
        if self.sending:
            self.sending = False
            may_wait.callback_error = self._producer.take_callback_error()

    def _finish_messages(self) -> None:
        """Hand over the messages that still wait. From then on only delivery callbacks may produce.

        Also raises an earlier error that the block swallowed, and an error if a savepoint was rolled back unseen.
        """
        if self.refusals.first is not None:
            self._raise_refusal()
        if self.savepoints is None:
            return
        watched, self.savepoints = self.savepoints, None
        try:
            watched.finish()  # and stops
        except BaseException:
            watched.stop()
            raise
        # From here on, what delivery callbacks produce goes to the engine at once: nobody watches savepoints any more.
        if waiting_messages := watched.take():
            engine = self.engine
            engine.corked = True
            try:
                for message in waiting_messages:
                    self.send(message)
            finally:
                engine.corked = False

    def _raise_refusal(self) -> None:
        if self.refusals.first is not None:
            raise_aborted(self.refusals.first, self.transactional_id, "the block")

    def _stop_watching(self) -> None:
        if self.savepoints is not None:
            self.savepoints.stop()

    # The steps

    def _begin(self) -> None:
        """Begin the database transaction and read the row, before anything can be produced."""
        if self.running:
            self._refuse_inside()
        store, row, may_wait = self._context.store, self._lane.row, self.may_wait
        if may_wait is not None:
            may_wait.pass_gate()
        store.begin(self._handle)
        try:
            failpoints.hit("write.begun")
            if may_wait is None:
                incarnation = store.read_incarnation(
                    self._handle, self.transactional_id, namespace=row.namespace, known=row
                )
            else:
                incarnation = may_wait.look(store.outbox, self._handle, row)
            if incarnation != row.incarnation:
                raise self._fenced(incarnation)
            if may_wait is not None:
                self._choose_way(may_wait)
            if self._uses_savepoints:
                self.savepoints = store.watch_savepoints(self._handle, self.transactional_id)
            self._machine.apply(WriteEvent.CHECK)
            failpoints.hit("write.checked")
        except DatabaseWentBack as error:
            self._abort()
            self._lane.record_forgotten(error)
            raise
        except BaseException:
            self._abort()
            raise

    def _choose_way(self, may_wait: MayWait) -> None:
        may_wait.choose(self._handle, self._lane)
        if may_wait.waits:
            return
        self._producer = producer = self._lane.producer
        self.engine = producer.engine
        if may_wait.setting == "never":
            self._producer.limit_waits(None)
            self.may_wait = None
        else:
            self._producer.limit_waits(may_wait.patience_s, may_wait.waiting_is_in_vain)

    def _commit(self) -> None:
        """End the dual write: prepare Kafka, record, commit the database (the decision), commit Kafka.

        Both sides are aborted after `TransactionAborted`, `Fenced` and a `ConfigurationError` other than `DatabaseWentBack`,
        which says that the database decided and then lost the decision. `TransactionInDoubt` says that the database's answer is
        missing, and the doubt could not be resolved. After other errors the database has decided.
        """
        if self.running:
            self._refuse_inside()
        self._machine.check(WriteEvent.PREPARE)
        failpoints.hit("write.body_done")
        deadline, form = Deadline(self._timeout_s), waiting.here()
        try:
            with form.interruptible(True):
                state = self._prepare()
                allowance = self._allowance(deadline) if state.has_transaction else None
                age_s = None if allowance is None else self._age_at_once(allowance)
                answer = self._record(state, allowance, deadline) if age_s is None else None
        except Unavailable as error:
            self._abort()
            raise TransactionAborted(error.what, transactional_id=self.transactional_id) from error
        except BaseException:
            self._abort()
            raise
        with form.interruptible(False):
            if answer is not None:
                interruption = self._decide(state, answer, deadline)
            else:
                assert allowance is not None
                assert age_s is not None
                interruption = self._decide_at_once(state, allowance, age_s, deadline)
            waits = False
            if self.sending:
                if self.observer is not None:
                    self.observer.enter(Phase.COMPLETE)
                left = self._lane.complete(state, deadline, self._leaves_completion)
                if left is not None and self.may_wait is None:
                    raise left
                waits = left is not None
            elif self.may_wait is not None and self.may_wait.has_waiting:
                failpoints.hit("write.waits")
                self.may_wait.note_committed()
                waits = True
            self._machine.apply(WriteEvent.WAIT if waits else WriteEvent.COMPLETE)
            failpoints.hit("write.completed")
        if interruption is not None:
            raise interruption

    def _leaves_completion(self) -> bool:
        """Whether a commit that Kafka has not answered is left to the background."""
        return self.may_wait is not None

    def _hand_over(self, *, prepared: bool) -> None:
        """End the dual write undecided: prepare Kafka, and commit the database's part without naming it in the row.

        For writes that another process decides together with others. On return the rows are durable, :attr:`prepared` is the
        open Kafka transaction, and this process must not commit or abort either side. After an error Kafka's side is aborted;
        the rows may remain where they are, without effect.

        With ``prepared`` the database transaction is prepared (``PREPARE TRANSACTION``), and the settler of the row ends it.
        Otherwise it is committed, and the rows must be where nobody reads them.
        """
        if self.running:
            self._refuse_inside()
        self._machine.check(WriteEvent.PREPARE)
        failpoints.hit("write.body_done")
        try:
            # Tables that nobody reads have no constraints.
            state = self._prepare(run_deferred=prepared and self._defers)
            if self._permit is not None:
                self._permit(self._handle)
            answer_s = self._timeout_s / 2
            if prepared:
                self._context.store.prepare(self._handle, self._lane.row, state, answer_s=answer_s)
            else:
                self._context.store.commit(self._handle, answer_s=answer_s)
        except (Unavailable, TransactionInDoubt) as error:
            self._abort()
            raise TransactionAborted(error.what, transactional_id=self.transactional_id) from error
        except BaseException:
            self._abort()
            raise
        self._machine.apply(WriteEvent.HAND_OVER)
        failpoints.hit("batch.handed_over")

    def _prepare(self, *, run_deferred: bool = False) -> PreparedTxnState:
        if self.observer is not None:
            self.observer.enter(Phase.PREPARE)
        if self._session is not None:
            self._session.flush()
        self._finish_messages()
        if run_deferred:
            self._context.store.run_deferred(self._handle, self.transactional_id)
        state, may_wait = _NO_TRANSACTION, self.may_wait
        if self.sending:
            try:
                state = self._producer.prepare_transaction()
            except IllegalStateError:
                self._raise_refusal()
                raise
            except Unavailable as error:
                if may_wait is None:
                    raise
                self._fall_back(may_wait, error)
            if self.refusals.first is not None:
                self._raise_refusal()  # a delivery callback may have swallowed that a message of its own was refused
        if may_wait is not None:
            may_wait.finish()
        self._machine.apply(WriteEvent.PREPARE)
        self._prepared = state
        failpoints.hit("write.prepared")
        return state

    def _allowance(self, deadline: Deadline) -> Allowance:
        """The time that the decision may take. Raises if the Kafka transaction has been open for too long."""
        timeout_s = self._producer.transaction_timeout_ms / 1000  # after it, the broker aborts the transaction
        allowance = allow(timeout_s - self.engine.begun_for_s, self._margin_s, deadline.remaining_s())
        if allowance is None:
            raise self._out_of_time(timeout_s)
        return allowance

    def _age_at_once(self, allowance: Allowance) -> float | None:
        """The age up to which the transaction may be recorded: :meth:`Allowance.fits`, for the database to check.

        None if the decision and its COMMIT cannot share one exchange with the database, because the database or the connection
        does not support it, or something must happen between them.
        """
        with_commit = self._context.store.with_commit
        if with_commit is None or self._permit is not None or failpoints.may_stop_at("write.recorded"):
            return None
        age_s = self._producer.transaction_timeout_ms / 1000 - allowance.margin_s - allowance.decide_s
        if not with_commit.is_possible(self._handle, age_s):
            return None
        self.engine.require_still_open()
        return age_s

    def _decide_at_once(
        self, state: PreparedTxnState, allowance: Allowance, age_s: float, deadline: Deadline
    ) -> BaseException | None:
        """Record the decision and commit the database in one exchange. Returns as :meth:`_decide`."""
        with_commit, row = self._context.store.with_commit, self._lane.row
        assert with_commit is not None
        decision = Decision(
            row.transactional_id,
            row.incarnation,
            state,
            row.namespace,
            within_s=allowance.decide_s,
            answer_s=allowance.answer_s,
            deferred=True,
        )
        try:
            decided = with_commit.execute(self._handle, decision, age_s)
        except TransactionInDoubt as error:
            self._machine.apply(WriteEvent.RECORD)
            return self._resolved(state, deadline, error, at_once=True)
        except DualWriteError as error:
            self._abort()
            if (interruption := _interruption(error)) is not None:
                raise interruption from error
            if isinstance(error, Unavailable):
                raise TransactionAborted(error.what, transactional_id=self.transactional_id) from error
            raise
        except BaseException:  # an interruption, perhaps behind the COMMIT: the next claim finds out
            self._machine.apply(WriteEvent.RECORD)
            raise
        if decided is not Decided.COMMITTED:
            self._abort()
            late = decided is Decided.LATE
            raise self._out_of_time(self._producer.transaction_timeout_ms / 1000) if late else self._fenced(None)
        self._machine.apply(WriteEvent.RECORD)
        self._machine.apply(WriteEvent.COMMIT)
        failpoints.hit("write.decided")
        return None

    def _record(self, state: PreparedTxnState, allowance: Allowance | None, deadline: Deadline) -> Deadline:
        """Execute the last statement of the database's transaction. Returns the deadline for the answer to its COMMIT.

        What is deferred to COMMIT runs before that statement. In COMMIT it would run after the last check of the clock.
        """
        row = self._lane.row
        decision = Decision(row.transactional_id, row.incarnation, namespace=row.namespace, deferred=True)
        if allowance is not None:
            answer = Deadline(allowance.answer_s)
            decision = decision._replace(
                state=state,
                idle_s=allowance.decide_s,
                within_s=allowance.decide_s,
                answer_s=allowance.answer_s,
            )
            ours, self._database_transaction = self._context.store.decide(self._handle, decision)
        else:
            answer_s = deadline.remaining_s() / 2
            answer = Deadline(answer_s)
            decision = decision._replace(answer_s=answer_s)
            if self.may_wait is not None and self.may_wait.has_waiting:
                ours, self._database_transaction = self.may_wait.decide(self._handle, decision)
            else:
                ours, self._database_transaction = self._context.store.hold(self._handle, decision)
        if not ours:
            raise self._fenced(None)
        # Only now: it locks the row until COMMIT, and from here on the session ends by itself if it is paused.
        if self._permit is not None:
            self._permit(self._handle)
        self._machine.apply(WriteEvent.RECORD)
        failpoints.hit("write.recorded")
        if allowance is not None:
            self.engine.require_still_open()
            timeout_s = self._producer.transaction_timeout_ms / 1000
            if not allowance.fits(timeout_s - self.engine.begun_for_s):
                raise self._out_of_time(timeout_s)
        return answer

    def _out_of_time(self, timeout_s: float) -> TransactionAborted:
        return TransactionAborted(
            f"the transaction was open for {self.engine.begun_for_s:.0f} s of the {timeout_s:.0f} s "
            f"after which the broker aborts it; {self._margin_s:g} s must be left when the database has committed",
            transactional_id=self.transactional_id,
            next_step="do less in one transaction, or raise the broker's transaction.max.timeout.ms",
            retryable=False,
        )

    def _decide(self, state: PreparedTxnState, answer: Deadline, deadline: Deadline) -> BaseException | None:
        """Commit the database. Returns an interruption (``KeyboardInterrupt``) that came meanwhile, to raise later."""
        answer_s = answer.remaining_s()
        if not answer_s:
            # The process was paused since the last check of the clock. SQLite has no server that would have ended the
            # transaction.
            self._abort()
            raise TransactionAborted("the process was paused before its COMMIT", transactional_id=self.transactional_id)
        try:
            self._context.store.commit(self._handle, answer_s=answer_s)
        except TransactionAborted as error:
            self._abort()
            if (interruption := _interruption(error)) is not None:
                raise interruption from error
            raise
        except TransactionInDoubt as error:
            return self._resolved(state, deadline, error)
        self._machine.apply(WriteEvent.COMMIT)
        failpoints.hit("write.decided")
        return None

    def _resolved(
        self, state: PreparedTxnState, deadline: Deadline, doubt: TransactionInDoubt, *, at_once: bool = False
    ) -> BaseException | None:
        """Find out what the COMMIT did. If the database has committed, returns the interruption behind the doubt, if any.

        ``at_once`` says that the decision was sent with the COMMIT.
        """
        self._machine.apply(WriteEvent.LOSE_ANSWER)
        self._resolve(state, deadline, doubt, partial(self._lane.fence, deadline) if at_once else None)
        return _interruption(doubt)

    def _resolve(
        self, state: PreparedTxnState, deadline: Deadline, doubt: TransactionInDoubt, fence: Callable[[], None] | None
    ) -> None:
        try:
            verdict = waiting.elsewhere(
                lambda: in_doubt.resolve_commit(
                    self._context,
                    self.transactional_id,
                    state,
                    self._database_transaction,
                    deadline,
                    None if self.may_wait is None else self.may_wait.decision,
                    fence,
                )
            )
        except Exception as error:  # whatever it is, such as no file left to open: nothing was found out
            self._lane.leave_in_doubt()
            raise doubt from error
        if verdict is DoubtStep.COMMITTED:
            self._machine.apply(WriteEvent.COMMIT)
        elif verdict is DoubtStep.ABORTED:
            self._abort()
            raise _interruption(doubt) or TransactionAborted(
                f"{doubt.what}; the database has rolled back",
                transactional_id=self.transactional_id,
            ) from doubt
        elif verdict is DoubtStep.IN_DOUBT:
            self._lane.leave_in_doubt()
            raise doubt
        else:
            self._machine.apply(WriteEvent.FIND_LOST)
            self._lane.leave_in_doubt()
            kind = DecidedTransactionLost if verdict is DoubtStep.LOST else OutcomeUnverifiable
            raise kind(verdict.value, transactional_id=self.transactional_id, state=str(state)) from doubt

    def _abort(self) -> None:
        """Abort both sides. Does nothing if they have already ended.

        If Kafka does not accept the abort, the producer is discarded and the next settler aborts its transaction: the row
        does not name it, so it can no longer be committed.
        """
        if self.running:
            self._refuse_inside()
        if self._machine.state in _ENDED:
            return
        if self.observer is not None:
            self.observer.enter(Phase.ABORT)
        failpoints.hit("write.before_abort")
        with waiting.uninterrupted():
            self._stop_watching()
            self._context.store.rollback(self._handle)
            failpoints.hit("write.rolled_back")
            if self.sending:
                try:
                    self._producer.abort_transaction()
                except DualWriteError as error:
                    logger.warning("%s: Kafka did not accept the abort: %s", self.transactional_id, error)
                    self._lane.discard()
            self._machine.apply(WriteEvent.ABORT)

    def _fenced(self, found: int | None) -> Fenced:
        shown = "no longer names" if found is None else f"names incarnation {found} instead of"
        return Fenced(
            f"the row {shown} our incarnation {self._lane.row.incarnation}", transactional_id=self.transactional_id
        )

    def __repr__(self) -> str:
        return f"<DualWrite {self.transactional_id} {self._machine.state.value}>"


# The block of a writer: a dual write on a lane and a connection, which it takes at its beginning and gives back at its end.


@dataclass(frozen=True, eq=False)
class Ground:
    """What all blocks of a writer share.

    ``context`` returns the servers: the writer's, or those with the store of a transaction that other code begins and ends. It
    raises if the writer is not open. ``timeout_s`` limits the ending, and ``ready_s`` the wait until a lane is ready.
    ``outboxes`` is None if no messages may wait in the database.
    """

    writer: str
    context: Callable[[StateStore | None], OwnerContext]
    lanes: Lanes
    database: Database
    monitor: HealthMonitor
    observer: Observer
    serializing: Serializing
    session_factory: Callable[..., Session]
    margin_s: float
    timeout_s: float
    ready_s: float
    outboxes: Outboxes | None = None


class WriterBlock(DualWrite):
    """A dual write of a writer. It takes a lane and a connection when the block is entered.

    It gives everything back in reverse order, and its ticket for the lane twice, because the first time may be interrupted. If
    even that does not happen, the lane is free once this object is collected.

    ``joined`` is the store of the transaction that other code began on ``connection`` and will end.
    """

    def __init__(  # the rest is known when it has a lane
        self,
        ground: Ground,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None,
        joined: StateStore | None = None,
        *,
        outbox: Outbox | None = None,
    ) -> None:
        if ground.outboxes is None:
            if outbox is not None:
                setting_of_block("never", outbox)
            self.may_wait = None
        else:
            self.may_wait = ground.outboxes.of_block(outbox)
        self._ground = ground
        self._user_connection = connection
        self._joined = joined
        self._adopted: AbstractContextManager[Handle] | None = None
        self._own: AbstractContextManager[Handle] | None = None
        self._ticket: Ticket[PooledLane] | None = None
        self._has_lane = False
        self.observer = None

    def __enter__(self) -> Transaction:
        """Take a lane and a connection, and begin. See :meth:`dualwrite.writing.writer.DualWriter.transaction`."""
        if self._ticket is not None:
            if self.running:
                self._refuse_inside()
            raise IllegalStateError(
                "a block is entered once", transactional_id=self._ground.writer, next_step="call transaction() for each"
            )
        try:
            self._take()
            return super().__enter__()
        except BaseException as error:
            try:
                self._give_back(error)
            finally:
                if self._adopted is not None:
                    self._adopted.__exit__(type(error), error, error.__traceback__)
            raise

    def _take(self) -> None:
        ground = self._ground
        context = ground.context(self._joined)
        self._ticket = ticket = ground.lanes.ticket()
        enter(ground.lanes, ticket, ground.writer)
        database, handle = ground.database, None
        if self._user_connection is not None:
            self._adopted, handle = self._adopt(context)
        if ground.observer is not NO_OBSERVER:
            observed = ground.observer.writing(ground.writer, database.traits.name.lower())
            self.observer = observed.__enter__()
        observer = self.observer
        silence = ground.monitor.silence
        if silence is not None and (self.may_wait is None or self.may_wait.setting == "never"):
            raise silence.error(ground.writer)
        lane = ground.lanes.take(ticket)
        if ground.monitor.sleeps:
            ground.monitor.wake()
        self.transactional_id = lane.transactional_id  # also where connecting fails
        self._has_lane = True
        if self.may_wait is None:
            lane.ready(Deadline(ground.ready_s), ground.monitor.refuse_in_silence)
        else:
            self.may_wait.make_ready(lane, ground.monitor, ground.ready_s)
        if observer is not None:
            observer.lane(lane.transactional_id)
        permit = None
        if handle is None:
            self._own = own = database.connect()
            handle = own.__enter__()
        else:
            from dualwrite.stores.sql.adopted import permit_of  # noqa: PLC0415 - loaded with the first connection that is given

            permit = permit_of(handle)
        super().__init__(
            lane,
            self._context_on(lane, context),
            handle,
            traits=database.traits,
            session_factory=ground.session_factory if self._joined is None else no_session,
            margin_s=ground.margin_s,
            timeout_s=ground.timeout_s,
            permit=permit,
            observer=observer,
            serializing=ground.serializing,
            may_wait=self.may_wait,
        )

    def _adopt(self, context: OwnerContext) -> tuple[AbstractContextManager[Handle], Handle]:
        """The user's connection while the block lasts, and the handle on it."""
        adopted = self._ground.database.adopt(self._user_connection, context.store)
        return adopted, adopted.__enter__()

    def _leaves_completion(self) -> bool:
        return self.may_wait is not None or self._ground.monitor.silence is not None

    def _context_on(self, lane: Lane, context: OwnerContext) -> OwnerContext:
        del lane
        return context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End both sides, and give back the connection and the lane."""
        if self._adopted is None:
            return self._leave(kind, error, traceback)
        with ExitStack() as around:  # Django's atomic() may replace the error, or be left without one
            around.push(self._adopted)
            around.push(self._leave)
            leave = around.pop_all()
        return leave.__exit__(kind, error, traceback)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            super().__exit__(kind, error, traceback)
        except BaseException as raised:
            self._give_back(raised)
            raise
        self._give_back(error)
        return None

    def _give_back(self, error: BaseException | None) -> None:
        """Give back what the block has taken.

        A statement's deadlock or serialization failure leaves the block as `TransactionAborted`, with the failure as its cause.
        """
        ticket = self._ticket
        try:
            try:
                own, self._own = self._own, None
                if own is not None:
                    own.__exit__(None, None, None)
            finally:
                self._note_end(error)
        finally:
            if ticket is not None:
                try:
                    ticket.end()
                except BaseException:
                    ticket.end()  # the first one was interrupted
                    raise

    def _note_end(self, error: BaseException | None) -> None:
        observer, self.observer = self.observer, None
        conflict = None
        if self._has_lane:
            if isinstance(error, Exception) and not isinstance(error, DualWriteError):
                conflict = conflict_behind(error, self.transactional_id)
            shown = error if conflict is None else conflict
            if shown is None:
                place = self._ticket.place if self._ticket is not None and self.sending else None
                self._ground.monitor.note(None, place.thing.taken_at or 0.0 if place is not None else 0.0)
            elif isinstance(shown, DualWriteError) and not (self.may_wait is not None and self.may_wait.refused):
                self._ground.monitor.note(shown)
        if observer is not None:
            shown = error if conflict is None else conflict
            observer.__exit__(None if shown is None else type(shown), shown, None)
        if conflict is not None:
            raise conflict from error

    def __repr__(self) -> str:
        return super().__repr__() if self._has_lane else f"<DualWrite {self._ground.writer} without a lane>"


def _interruption(error: DualWriteError) -> BaseException | None:
    """The interruption behind this error, which must be passed on: a ``KeyboardInterrupt`` or the like, if any."""
    return None if isinstance(error.__cause__, Exception) else error.__cause__


def _explained(error: BaseException | None) -> Iterator[BaseException]:
    """The error and, one by one, what a traceback shows above it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
