"""Observations of a Kafka transaction as plain values: the vocabulary of ports and protocol."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class TransactionStatus(Enum):
    """The coordinator's status of a transactional id (``DescribeTransactions``); ``NO_SUCH_ID`` if it does not know the id."""

    NO_SUCH_ID = "no such id"
    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"


OPEN: Final = frozenset(
    {
        TransactionStatus.ONGOING,
        TransactionStatus.PREPARE_COMMIT,
        TransactionStatus.PREPARE_ABORT,
    }
)
"""While these are shown, the transaction has not ended in every partition."""
IN_TRANSITION: Final = frozenset(
    {
        TransactionStatus.PREPARE_COMMIT,
        TransactionStatus.PREPARE_ABORT,
        TransactionStatus.PREPARE_EPOCH_FENCE,
        TransactionStatus.DEAD,
    }
)
"""While these are shown, the coordinator is at work on the id: its next status is not up to a client."""
NEVER_MS: Final = 2_147_483_647
"""The transaction timeout that never expires (KIP-939)."""


@dataclass(frozen=True)
class TransactionView:
    """The coordinator's view of one transactional id at one moment.

    Attributes:
        status: The coordinator's status of the id.
        producer_id: Current producer id, -1 if there is none.
        epoch: Current producer epoch, -1 if there is none.
        started_ms: Start of the current transaction in ms since 1970; None if none is open.
        timeout_ms: The transaction timeout that the producer asked for; None if the id is unknown.
        partitions: The (topic, partition) pairs added to the current transaction; empty if none is open.
        newest_started_ms: Start of the newest transaction, even if it has ended, in ms since 1970; None if the id has had none
            since it was initialised.
    """

    status: TransactionStatus
    producer_id: int = -1
    epoch: int = -1
    started_ms: int | None = None
    timeout_ms: int | None = None
    partitions: tuple[tuple[str, int], ...] = ()
    newest_started_ms: int | None = None


@dataclass(frozen=True, order=True)
class OpenTransaction:
    """A transaction of one producer that is open in a partition, as its leader shows it.

    Attributes:
        partition: The (topic, partition).
        epoch: The epoch under which the producer last wrote there.
        start: The transaction's first offset there.
    """

    partition: tuple[str, int]
    epoch: int
    start: int


@dataclass(frozen=True)
class ShownProducer:
    """One producer in one partition, as its leader shows it.

    Attributes:
        epoch: Its epoch there; -1 if the leader does not know the producer.
        open_from: The first offset of its open transaction; None if it has none open.
    """

    epoch: int = -1
    open_from: int | None = None


class EndAnswer(Enum):
    """The coordinator's answer to ``EndTxn``."""

    ENDED = "ended"
    IN_PROGRESS = "in progress"
    FENCED = "fenced"
    NO_SUCH_ID = "no such id"
    INVALID_STATE = "invalid state"


class LogProof(Enum):
    """The proof that the logs of a transaction's partitions give of its outcome.

    ``COMMITTED`` and ``ABORTED``: its own records are there, and the first control record of its producer after them is
    that marker. ``PARTLY``: that is a commit marker in some partitions, and others show none. ``OPEN``: its records are there
    and no marker yet. ``UNKNOWABLE``: its records are gone (retention, compaction, truncation, another topic of that name), so
    no marker can be identified as its own.
    """

    COMMITTED = "committed"
    PARTLY = "committed in a part"
    ABORTED = "aborted"
    OPEN = "open"
    UNKNOWABLE = "unknowable"

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of a decided transaction with this proof; None while its log shows none.

        ``PARTLY`` is a commit: settling writes the markers that are missing.
        """
        return _OUTCOMES.get(self)


class Outcome(Enum):
    """The outcome of a decided transaction in Kafka, as recorded in its row."""

    COMMITTED = "committed"
    LOST = "lost"
    UNVERIFIABLE = "unverifiable"


_OUTCOMES = {
    LogProof.COMMITTED: Outcome.COMMITTED,
    LogProof.PARTLY: Outcome.COMMITTED,
    LogProof.ABORTED: Outcome.LOST,
    LogProof.UNKNOWABLE: Outcome.UNVERIFIABLE,
}
