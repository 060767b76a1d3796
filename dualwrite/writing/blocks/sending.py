"""The messages of one dual write on their way to the producer: at once, or when their savepoint is released."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, NoReturn

from dualwrite.errors import DualWriteError, Fenced, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.protocol.prepared_state import PreparedTxnState

if TYPE_CHECKING:
    from dualwrite.kafka.producer.transactional import TransactionalProducer
    from dualwrite.ports.savepoints import Message, SavepointWatch
    from dualwrite.writing.blocks.early import Hold


class Sending:
    """Hands messages to the producer, and remembers the first error: a block that swallows it must not commit half its work.

    Attributes:
        begun: Whether a Kafka transaction has begun.
        refusal: The first error in the block that must abort it, even if the block continues.
        savepoints: The savepoints that messages wait for; None if none are used.
        of_unit: Whether the messages are those of the only unit of a group. It must not wait for a topic: others wait for it.
    """

    def __init__(self, producer: TransactionalProducer, transactional_id: str) -> None:
        self._producer = producer
        self._id = transactional_id
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

    def hold(self, message: Message, hold: Hold | None, topic: str | None) -> int:
        """Take a message inside the savepoint of a unit. It waits, so an error concerns nothing but the unit.

        Returns:
            Its size in bytes, as far as it is known.

        Raises:
            TransactionAborted, ConfigurationError: It would be refused later; or no broker knows its topic; or its savepoint
                cannot be known.
            IllegalStateError, TypeError, ValueError: As :func:`dualwrite.writing.blocks.early.hold`.
        """
        assert self.savepoints is not None
        kept, size = (message, 0) if hold is None else hold(self._producer)
        self._require_topic(topic)
        self.savepoints.add(kept)
        return size

    def _require_topic(self, topic: str | None) -> None:
        if topic is not None:
            self._producer.require_topic(topic)

    def _hand_over_released(self) -> None:
        if self.savepoints is not None:
            for message in self.savepoints.take():
                self._hand_over(message)

    def send(self, message: Message, hold: Hold | None, topic: str | None = None) -> None:
        """Take a message; see :meth:`dualwrite.writing.blocks.dual_write.DualWrite.send`."""
        try:
            if self.of_unit:
                self._require_topic(topic)
            if self.savepoints is None or self.savepoints.direct:
                self._hand_over(message)
            else:
                if hold is not None and self.savepoints.holds:
                    message, _ = hold(self._producer)
                self.savepoints.add(message)
                self._hand_over_released()
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
                with self._producer.corked():
                    for message in waiting:
                        self._hand_over(message)

    def prepare(self) -> PreparedTxnState:
        """Prepare the Kafka transaction. Call :meth:`finish` first.

        Raises:
            DualWriteError: As :meth:`dualwrite.kafka.producer.transactional.TransactionalProducer.prepare_transaction`; or a
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

    def _hand_over(self, message: Message) -> None:
        if not self.begun:
            self._producer.begin_transaction()
            self.begun = True
        message(self._producer)

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
