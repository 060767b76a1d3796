"""Settling: bring Kafka in line with the row, for one incarnation of one transactional id (KIP-939's recovery recipe).

Everything is decided by :func:`next_step` from what is known so far; the recipe in ``dualwrite.settling`` only asks and
acts. The order of asking is a part of the protocol: the coordinator first, *then* the partitions. The other way round,
the transaction that the partition showed may have ended before the coordinator showed a later one of the same epoch.

The rules, from the top; the first that fits holds:

=====================================  ==========================  ===============================================
coordinator                            prepared state              step
=====================================  ==========================  ===============================================
PrepareCommit, PrepareAbort, ...       any                         wait, look again
any                                    recorded or none, retired   finish
no such id                             none, or recorded           finish: nothing can write under it any more
any other                              none, or recorded           retire (aborts what is ongoing: it is undecided)
Ongoing, its id, epoch, start          evidence not asked          look at the partitions
Ongoing, its id, epoch, start          evidence matches            commit
anything else                          proof not asked             prove
CompleteCommit, its id and epoch       proof open or unknowable    record committed
anything else                          proof committed             record committed
anything else                          proof aborted               record lost
anything else                          proof open                  wait, look again
anything else                          proof unknowable            record unverifiable
=====================================  ==========================  ===============================================

Retiring comes last on purpose. The broker may have timed the transaction out a moment ago: whoever retires first and
looks afterwards finds an aborted transaction, cannot tell why, and tells nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dualwrite.observations import LogProof, Outcome, TransactionStatus, TransactionView
from dualwrite.prepared_state import PreparedTxnState


class SettleStep(Enum):
    """What to do next for one incarnation."""

    LOOK = "ask the coordinator"
    LOOK_AT_PARTITIONS = "ask the partitions for the first offsets of what is open"
    WAIT = "wait, then forget what was seen and look again"
    COMMIT = "end the transaction with commit, then look again"
    PROVE = "read the log for the marker"
    RECORD_COMMITTED = "record that it was committed"
    RECORD_LOST = "record that the broker aborted a decided transaction"
    RECORD_UNVERIFIABLE = "record that its outcome cannot be known any more"
    RETIRE = "make the incarnation's Kafka id unusable"
    FINISH = "mark the incarnation as settled"


@dataclass(frozen=True)
class Knowledge:
    """What is known about one incarnation while it is being settled.

    Attributes:
        prepared: The row's state if it belongs to this incarnation, else None.
        recorded: The outcome recorded for ``prepared``, if any.
        view: The coordinator's answer of this round.
        evidence: Whether what is open on the partitions is ``prepared``; None where not asked in this round.
        proof: The log's word about ``prepared``; None where not asked in this round.
        retired: Whether this settling has retired the incarnation's Kafka id.
    """

    prepared: PreparedTxnState | None = None
    recorded: Outcome | None = None
    view: TransactionView | None = None
    evidence: bool | None = None
    proof: LogProof | None = None
    retired: bool = False


_IN_TRANSITION = frozenset(
    {
        TransactionStatus.PREPARE_COMMIT,
        TransactionStatus.PREPARE_ABORT,
        TransactionStatus.PREPARE_EPOCH_FENCE,
        TransactionStatus.DEAD,
    }
)

_LOG_IS_SILENT = frozenset({LogProof.OPEN, LogProof.UNKNOWABLE})

_RECORD = {
    LogProof.COMMITTED: SettleStep.RECORD_COMMITTED,
    LogProof.ABORTED: SettleStep.RECORD_LOST,
    LogProof.OPEN: SettleStep.WAIT,
    LogProof.UNKNOWABLE: SettleStep.RECORD_UNVERIFIABLE,
}


def belongs(state: PreparedTxnState, incarnation: int) -> bool:
    """Whether the state was prepared by that incarnation."""
    return state.has_transaction and state.incarnation == incarnation


def shows_same_transaction(view: TransactionView, state: PreparedTxnState) -> bool:
    """Whether the coordinator's view may be of the state's own transaction: id, epoch and, where both know it, start."""
    if (view.producer_id, view.epoch) != (state.producer_id, state.epoch):
        return False
    return view.started_ms is None or state.started_ms is None or view.started_ms == state.started_ms


def is_older(state: PreparedTxnState, than: PreparedTxnState) -> bool:
    """Whether the state was surely decided before the other one, of the same transactional id; False where it cannot be told.

    Offsets of one partition of one topic only rise.
    """
    if not than.has_transaction:
        return False
    if not state.has_transaction:
        return True
    if state.incarnation is not None and than.incarnation is not None and state.incarnation != than.incarnation:
        return state.incarnation < than.incarnation
    firsts = {(first.topic_id, first.partition): first.offset for first in state.first_offsets}
    return any(
        first.topic_id is not None and firsts.get((first.topic_id, first.partition), first.offset) < first.offset
        for first in than.first_offsets
    )


def is_open(state: PreparedTxnState, open_offsets: Mapping[tuple[str, int], int | None]) -> bool:
    """Whether the partitions show exactly the state's transaction as open: all its first offsets, and at least one.

    Partitions that are gone with their topic say nothing. One first offset is enough to tell what is open, as every later
    transaction begins at another one; that the others match, too, tells that nobody has ended it by hand in one of them.

    Args:
        state: The prepared state.
        open_offsets: By (topic, partition), the first offset of what the state's producer has open there, or None. Without
            those that do not exist any more.
    """
    shown = [
        open_offsets[key] == first.offset
        for first in state.first_offsets
        if (key := (first.topic, first.partition)) in open_offsets
    ]
    return bool(shown) and all(shown)


def next_step(known: Knowledge) -> SettleStep:
    """The next step in settling one incarnation. Pure; see the table in the module's docstring."""
    if known.retired:
        return SettleStep.FINISH
    view = known.view
    if view is None:
        return SettleStep.LOOK
    if view.status in _IN_TRANSITION:
        return SettleStep.WAIT
    if known.prepared is None or known.recorded is not None:
        return SettleStep.FINISH if view.status is TransactionStatus.NO_SUCH_ID else SettleStep.RETIRE
    if view.status is TransactionStatus.ONGOING and shows_same_transaction(view, known.prepared):
        if known.evidence is None:
            return SettleStep.LOOK_AT_PARTITIONS
        if known.evidence:
            return SettleStep.COMMIT
    if known.proof is None:
        return SettleStep.PROVE
    if _coordinator_says_committed(view, known.prepared) and known.proof in _LOG_IS_SILENT:
        return SettleStep.RECORD_COMMITTED
    return _RECORD[known.proof]


def _coordinator_says_committed(view: TransactionView, state: PreparedTxnState) -> bool:
    """Whether the coordinator's newest word is that it committed the state's own transaction.

    It does not know everything: a tool that writes markers past it has the last word in the log.
    """
    same = (view.producer_id, view.epoch) == (state.producer_id, state.epoch)
    return same and view.status is TransactionStatus.COMPLETE_COMMIT
