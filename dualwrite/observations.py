"""What can be observed of a Kafka transaction, as plain values: the words in which ports and protocol talk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TransactionStatus(Enum):
    """The coordinator's word for a transactional id (``DescribeTransactions``), ``NO_SUCH_ID`` where it knows none."""

    NO_SUCH_ID = "no such id"
    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"


@dataclass(frozen=True)
class TransactionView:
    """What the coordinator shows of one transactional id at one moment.

    Attributes:
        status: The coordinator's state of the id.
        producer_id: Current producer id, -1 if there is none.
        epoch: Current producer epoch, -1 if there is none.
        started_ms: Start of the present transaction in ms since 1970, None where none is open.
        timeout_ms: The transaction timeout that the producer asked for, None where the id is unknown.
        partitions: The (topic, partition) pairs that were added to the present transaction; empty where none is open.
        newest_started_ms: Start of the newest transaction, also of one that has ended; None where the id has had none since it
            was initialised.
    """

    status: TransactionStatus
    producer_id: int = -1
    epoch: int = -1
    started_ms: int | None = None
    timeout_ms: int | None = None
    partitions: tuple[tuple[str, int], ...] = ()
    newest_started_ms: int | None = None


class EndAnswer(Enum):
    """What the coordinator answered to ``EndTxn``."""

    ENDED = "ended"
    IN_PROGRESS = "in progress"
    FENCED = "fenced"
    NO_SUCH_ID = "no such id"
    INVALID_STATE = "invalid state"


class LogProof(Enum):
    """What the log of the partitions that a transaction wrote proves of it.

    ``COMMITTED`` and ``ABORTED``: its own records are there, and the first control record of its producer after them is
    that marker. ``PARTLY``: that is a commit marker in some partitions, and none is to be seen in others. ``OPEN``: its records
    are there and no marker yet. ``UNKNOWABLE``: its records are gone (retention,
    compaction, truncation, another topic of that name), so no marker can be told to be its own.
    """

    COMMITTED = "committed"
    PARTLY = "committed in a part"
    ABORTED = "aborted"
    OPEN = "open"
    UNKNOWABLE = "unknowable"


class Outcome(Enum):
    """What became of a decided transaction in Kafka, as recorded in its row."""

    COMMITTED = "committed"
    LOST = "lost"
    UNVERIFIABLE = "unverifiable"
