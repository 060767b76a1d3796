"""The messages of one dual write on their way to the producer: at once, or when their savepoint is released."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, NoReturn

from dualwrite.errors import DualWriteError, Fenced, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, Unsendable
from dualwrite.protocol.prepared_state import PreparedTxnState

if TYPE_CHECKING:
    from dualwrite.interfaces__ports_observer import WriteObserver
    from dualwrite.interfaces__ports_savepoints import SavepointWatch
    from dualwrite.protocol.message import Sendable
    from dualwrite.writing.lane import Lane


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
