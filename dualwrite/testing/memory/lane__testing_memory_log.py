"""A Kafka that is a list: the transactions of one writer, with their messages and offsets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from dualwrite.protocol.message__protocol_producer_record import ProducerRecord


class TransactionState(Enum):
    """The states of a Kafka transaction."""

    ONGOING = "ongoing"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False)
class RecordedTransaction:
    """One dual write.

    Attributes:
        transactional_id: The id that it ran under.
        messages: Its messages that were handed to the producer.
        offsets: The consumed offsets in it: for each call the offsets and the group's metadata, as they were given.
        rows_committed: Whether the database has committed its rows.
        state: The state of its Kafka transaction: while it is ongoing, nobody sees the messages.
    """

    transactional_id: str
    messages: list[ProducerRecord] = field(default_factory=list)
    offsets: list[tuple[Sequence[object], object]] = field(default_factory=list)
    rows_committed: bool = False
    state: TransactionState = TransactionState.ONGOING


class Log:
    """The transactions in the order in which they began, and those committed in the order of their commits. Thread-safe."""

    def __init__(self) -> None:
        self._began: list[RecordedTransaction] = []
        self._committed: list[RecordedTransaction] = []
        self._lock = threading.Lock()

    def begin(self, transactional_id: str) -> RecordedTransaction:
        """A new transaction."""
        transaction = RecordedTransaction(transactional_id)
        with self._lock:
            self._began.append(transaction)
        return transaction

    def end(self, transaction: RecordedTransaction, *, committed: bool) -> None:
        """Commit or abort it. Does nothing if it has ended."""
        with self._lock:
            if transaction.state is not TransactionState.ONGOING:
                return
            transaction.state = TransactionState.COMMITTED if committed else TransactionState.ABORTED
            if committed:
                self._committed.append(transaction)

    @property
    def transactions(self) -> list[RecordedTransaction]:
        """All transactions, in the order in which they began."""
        with self._lock:
            return list(self._began)

    @property
    def committed(self) -> list[RecordedTransaction]:
        """The committed ones, in the order of their commits."""
        with self._lock:
            return list(self._committed)
