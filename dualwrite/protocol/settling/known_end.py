"""A producer begins its next transaction only once the end of its last one is known.

Kafka's answer to a commit or an abort is the coordinator's word alone. The markers are written after it, and some brokers
forget the marker of a partition that has no leader at that moment (KAFKA-20734). The producer's next marker then ends what is
left open there: an abort also aborts what was committed, and a commit brings back what was aborted. An operator's tool can
end a transaction in a single partition, too. The coordinator shows neither; the partitions do.

So every partition that the transaction was sent to must show the marker, on positive evidence: the leader's log, read after
the answer, holds the transaction's own first record; nothing that began at or before it is open there; and it ended as the
owner ended it. Until then the producer begins no other transaction, no decision overwrites the row that names the last one,
and the row does not call it completed.

======  =========================================  ==================================
ended   in the partitions                          step
======  =========================================  ==================================
any     not all of them are known                  settle: the incarnation ends
any     not asked                                  ask
commit  aborted in one                             settle: it finds and records the loss
abort   committed in one                           record that it came back, then settle
any     ended so in all that still exist           known: the producer may go on
any     records gone in one                        settle
any     open, or no answer, while it is early      ask again
any     open, or no answer, for longer             settle
======  =========================================  ==================================

Settling ends what the broker has forgotten, and must know the same partitions: the coordinator no longer names any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dualwrite.protocol.observations import LogProof, TransactionStatus, TransactionView
from dualwrite.protocol.prepared_state import PreparedTxnState

Partition = tuple[str, int]


class EndStep(Enum):
    """The next step about a transaction whose commit or abort was answered."""

    ASK = "ask the partitions"
    WAIT = "wait a little, then ask again"
    KNOWN = "nothing: its end is known, and the producer may go on"
    RECORD = "record that an aborted transaction came back, then end the incarnation and settle"
    SETTLE = "end the incarnation and settle"


@dataclass(frozen=True)
class Ended:
    """A transaction whose commit or abort was answered.

    Attributes:
        state: The transaction: its producer, and its first offset in each partition that it was sent to.
        committed: Whether it was committed.
        complete: Whether ``state`` names every partition that it may have been sent to.
    """

    state: PreparedTxnState
    committed: bool
    complete: bool = True

    @property
    def partitions(self) -> frozenset[Partition]:
        """The partitions that it is known to have been sent to."""
        return self.state.partitions


def next_end_step(ended: Ended, proofs: Mapping[Partition, LogProof | None] | None, *, early: bool) -> EndStep:
    """The next step about the end of a transaction. Pure; see the table above.

    Args:
        ended: The transaction.
        proofs: The proof of each partition's log, read after the answer; None for a partition that is gone with its topic.
            Partitions that did not answer are missing. None if not asked.
        early: Whether there is still time to wait: markers usually follow the answer within milliseconds.
    """
    if not ended.complete:
        return EndStep.SETTLE
    if proofs is None:
        return EndStep.ASK
    answered = ended.partitions & proofs.keys()
    shown = {proof for partition in answered if (proof := proofs[partition]) is not None}
    if ended.committed and LogProof.ABORTED in shown:
        return EndStep.SETTLE
    if not ended.committed and LogProof.COMMITTED in shown:
        return EndStep.RECORD
    if answered == ended.partitions and shown <= {LogProof.COMMITTED if ended.committed else LogProof.ABORTED}:
        return EndStep.KNOWN
    if LogProof.UNKNOWABLE in shown:
        return EndStep.SETTLE
    return EndStep.WAIT if early else EndStep.SETTLE


class PendingStep(Enum):
    """The next step about a decided transaction whose commit was not answered, and that could not be settled."""

    LOOK = "ask the coordinator, then the log again"
    COMMITTED = "it is committed"
    LOST = "the broker has aborted it"
    UNVERIFIABLE = "it cannot be known any more"
    PENDING = "the next settler will commit it"


_TOLD_BY_THE_LOG = {
    LogProof.COMMITTED: PendingStep.COMMITTED,
    LogProof.PARTLY: PendingStep.PENDING,
    LogProof.ABORTED: PendingStep.LOST,
    LogProof.UNKNOWABLE: PendingStep.UNVERIFIABLE,
}
_TO_BE_COMMITTED = frozenset(
    {TransactionStatus.ONGOING, TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT}
)


def next_pending_step(proof: LogProof, view: TransactionView | None, state: PreparedTxnState) -> PendingStep:
    """The next step about a decided transaction, for an owner that can only look. Pure.

    A transaction that is open in the log may be about to be aborted: only the coordinator shows that.

    Args:
        proof: The log's proof, read now.
        view: The coordinator's view, taken before that; None if not asked.
        state: The transaction.
    """
    if (told := _TOLD_BY_THE_LOG.get(proof)) is not None:
        return told
    if view is None or (view.producer_id, view.epoch) != (state.producer_id, state.epoch):
        return PendingStep.LOOK
    return PendingStep.PENDING if view.status in _TO_BE_COMMITTED else PendingStep.LOOK
