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
any     ended so in all that still exist           known: the producer may continue
any     records gone in one                        settle
any     open, or no answer, while it is early      ask again
any     open, or no answer, for longer             settle
======  =========================================  ==================================

Settling ends what the broker has forgotten, and must know the same partitions: the coordinator no longer names any.

A native transaction of epoch E needs no log. The producer's epoch in a partition rises above E with its marker, or with
something later. An answer of "nothing open" alone may be older than its messages. So the leader is asked for the producer,
after the commit or abort was answered:

================================================  ==================================
the leader shows for the producer                 step
================================================  ==================================
above E, nothing open, in all that still exist    known: the producer may continue
anything else, or no answer, while it is early    ask again
anything else, or no answer, for longer           settle
================================================  ==================================

One question to a leader tells this of all producers that have written to its partitions (:func:`rows_of`), so a writer asks for
the ends of all its lanes at once. A transaction whose end is answered after the question was sent is not asked for by it.

A leader that does not know the producer shows nothing. The evidence shows that the transaction has ended there, not how: an
operator's abort of one partition shows in the log alone. So an owner that closes or idles reads the log, too, where the state
names an offset, before the row calls a native transaction completed (:func:`native_step_at_rest`). Between two transactions
it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import LogProof, ShownProducer, TransactionStatus, TransactionView

Partition = tuple[str, int]


class EndStep(Enum):
    """The next step about a transaction whose commit or abort was answered."""

    ASK = "ask the partitions"
    WAIT = "wait a little, then ask again"
    KNOWN = "nothing: its end is known, and the producer may continue"
    RECORD = "record that an aborted transaction came back, then end the incarnation and settle"
    SETTLE = "end the incarnation and settle"


@dataclass(frozen=True)
class Ended:
    """A transaction whose commit or abort was answered.

    ``state`` has the partitions that it was sent to, unless it is native with its first offset in each. ``complete`` says that
    these are all that it may have been sent to.
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

    ``proofs`` are read after the answer; None if not asked. A partition that is gone with its topic has None, and partitions
    that did not answer are missing. ``early`` says that there is still time to wait: markers usually follow the answer within
    milliseconds.
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


def next_native_end_step(
    ended: Ended, shown: Mapping[Partition, ShownProducer | None] | None, *, early: bool
) -> EndStep:
    """The next step about the end of a native transaction. Pure; see the second table above.

    ``shown`` has its producer as the leaders showed it after the answer. None and missing partitions mean the same as in
    :func:`next_end_step`, and so does ``early``.
    """
    if not ended.complete:
        return EndStep.SETTLE
    if shown is None:
        return EndStep.ASK
    for partition in ended.partitions:
        if partition not in shown or not _has_ended(ended, shown[partition]):
            return EndStep.WAIT if early else EndStep.SETTLE
    return EndStep.KNOWN


def rows_of(
    producer_id: int, partitions: Iterable[Partition], shown: Mapping[Partition, Mapping[int, ShownProducer]]
) -> dict[Partition, ShownProducer]:
    """One producer's rows in the answers to one question about many transactions. Pure.

    ``shown`` has all producers of each partition, by producer id. A row is missing where its partition's leader did not
    answer, or does not know it: a new topic may have the name of the one that the producer has written to.
    """
    rows = {}
    for partition in partitions:
        there = shown.get(partition)
        if there is not None and (row := there.get(producer_id)) is not None:
            rows[partition] = row
    return rows


def _has_ended(ended: Ended, found: ShownProducer | None) -> bool:
    return found is None or (found.epoch > ended.state.epoch and found.open_from is None)


def native_step_at_rest(state: PreparedTxnState, proofs: Mapping[Partition, LogProof | None]) -> EndStep:
    """The next step about a committed native transaction whose end is known, for an owner that closes or idles. Pure.

    ``proofs`` has the present proof of each log of which the state names an offset; None for a partition that is gone with its
    topic. Partitions that did not answer are missing.

    ``KNOWN``: record it as completed. ``WAIT``: do not record it now. ``SETTLE``: settling records the loss.
    """
    if LogProof.ABORTED in proofs.values():
        return EndStep.SETTLE
    unproved = {(first.topic, first.partition) for first in state.first_offsets} - proofs.keys()
    return EndStep.WAIT if unproved or LogProof.OPEN in proofs.values() else EndStep.KNOWN


def left_undecided(
    last: Ended | None, given_up: Ended | None, *, is_prepared: bool, sent_to: frozenset[Partition]
) -> frozenset[Partition]:
    """The partitions where a discarded producer may leave an undecided transaction open. Pure.

    The settler after it must ask them: a coordinator that has ended the transaction shows them no longer.

    ``last`` is the last transaction, if it was ended and its end is not known. ``given_up`` is the current one, if an abort of
    it was tried, whether it was prepared before or not. If it ``is_prepared``, the row tells whether it is decided.
    """
    ended = last or given_up
    if ended is not None:
        return frozenset() if ended.committed else ended.partitions
    return frozenset() if is_prepared else sent_to


class PendingStep(Enum):
    """The next step about a decided transaction whose commit was not answered, and that could not be settled."""

    LOOK = "ask the coordinator, then the log again"
    COMMITTED = "it is committed"
    LOST = "the broker has aborted it"
    UNVERIFIABLE = "it cannot be known any more"
    PENDING = "the next settler will commit it"


# As the outcome of the proof with one exception: an owner that only looks leaves it to a settler to commit the rest.
_SHOWN_BY_THE_LOG = {
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

    A transaction that is open in the log may be about to be aborted: only the coordinator shows that. So ``view`` was taken
    before ``proof`` was read; None if not asked.
    """
    if (step := _SHOWN_BY_THE_LOG.get(proof)) is not None:
        return step
    if view is None or (view.producer_id, view.epoch) != (state.producer_id, state.epoch):
        return PendingStep.LOOK
    return PendingStep.PENDING if view.status in _TO_BE_COMMITTED else PendingStep.LOOK
