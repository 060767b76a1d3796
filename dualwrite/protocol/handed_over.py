"""What was handed over: an owner has prepared a transaction and waits; somebody else, the decider, decides and completes it.

The owner goes on with the same producer afterwards, so its next transaction has the same producer id and epoch: a request of
the decider's that comes late would end that one. Two rules stand against it.

The decider says "completed" in the row only of what :func:`next_completion_step` has led to the end: its ``EndTxn`` was sent
once, and answered. Everything else it leaves to a claim, after which no owner can go on with that producer:

=============================  ============================  =======  ==============================================
the one ``EndTxn(commit)``     coordinator                   proof    step
=============================  ============================  =======  ==============================================
not answered, or refused       any                           any      leave it
answered                       not asked                     any      look
answered                       PrepareCommit, its id, epoch  any      wait, look again
answered                       CompleteCommit, its id, epoch not read prove
answered                       CompleteCommit, its id, epoch commit   record it as completed
answered                       anything else                 any      leave it
=============================  ============================  =======  ==============================================

The owner goes on only where :func:`may_go_on` says so: the row still has its incarnation, and names its transaction as
completed. Being decided is not enough: the decider's ``EndTxn`` may be on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dualwrite.observations import EndAnswer, LogProof, Outcome, TransactionStatus, TransactionView

if TYPE_CHECKING:
    from dualwrite.ports import StateRow
    from dualwrite.prepared_state import PreparedTxnState


class CompletionStep(Enum):
    """What the decider does next about one transaction."""

    LOOK = "ask the coordinator"
    WAIT = "wait, then forget what was seen and look again"
    PROVE = "read the log for the markers"
    RECORD = "record it as completed: its owner may go on"
    LEAVE = "leave it to a claim"


@dataclass(frozen=True)
class HandedOver:
    """What the decider knows of one transaction that it completes.

    Attributes:
        state: The transaction, as the row names it.
        answer: What the one ``EndTxn(commit)`` was answered; None where it was not answered.
        view: The coordinator's answer after it; None where not asked.
        proof: The log's word; None where not read.
    """

    state: PreparedTxnState
    answer: EndAnswer | None
    view: TransactionView | None = None
    proof: LogProof | None = None


def next_completion_step(known: HandedOver) -> CompletionStep:
    """The next step of the decider. Pure; see the table above."""
    if known.answer is not EndAnswer.ENDED:
        return CompletionStep.LEAVE
    view = known.view
    if view is None:
        return CompletionStep.LOOK
    if (view.producer_id, view.epoch) != (known.state.producer_id, known.state.epoch):
        return CompletionStep.LEAVE
    if view.status is TransactionStatus.PREPARE_COMMIT:
        return CompletionStep.WAIT
    if view.status is not TransactionStatus.COMPLETE_COMMIT:
        return CompletionStep.LEAVE
    if known.proof is None:
        return CompletionStep.PROVE
    return CompletionStep.RECORD if known.proof is LogProof.COMMITTED else CompletionStep.LEAVE


def may_go_on(known: StateRow, found: StateRow, handed_over: PreparedTxnState | None) -> bool:
    """Whether an owner that has rested may go on with its producer.

    Args:
        known: The row, as the owner knows it.
        found: The row, as it is now.
        handed_over: The transaction that the owner has handed over, if it has.
    """
    if (found.namespace, found.incarnation) != (known.namespace, known.incarnation):
        return False
    return handed_over is None or (found.prepared == handed_over and found.completed is Outcome.COMMITTED)
