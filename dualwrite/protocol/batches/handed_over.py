"""Completes handed-over transactions: the owner has prepared one and waits; another process, the decider, completes it.

The owner goes on with the same producer afterwards, so its next transaction has the same producer id and epoch: a late
request of the decider's would end that one. Two rules prevent this.

The decider records "completed" in the row only if :func:`next_completion_step` says so: it sent its ``EndTxn`` once, and got
an answer. It leaves everything else to a claim, after which no owner can go on with that producer:

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

The owner goes on only if :func:`may_go_on` allows it: the row still has its incarnation, and names its transaction as
completed. A decided transaction is not enough: the decider's ``EndTxn`` may still be on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dualwrite.protocol.observations import EndAnswer, LogProof, Outcome, TransactionStatus, TransactionView

if TYPE_CHECKING:
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.rows import StateRow


class CompletionStep(Enum):
    """The decider's next step for one transaction."""

    LOOK = "ask the coordinator"
    WAIT = "wait, then forget what was seen and look again"
    PROVE = "read the log for the markers"
    RECORD = "record it as completed: its owner may go on"
    LEAVE = "leave it to a claim"


@dataclass(frozen=True)
class HandedOver:
    """The decider's knowledge of one transaction that it completes.

    Attributes:
        state: The transaction, as the row names it.
        answer: The answer to the one ``EndTxn(commit)``; None if it was not answered.
        view: The coordinator's view after that; None if not asked.
        proof: The log's proof; None if not read.
    """

    state: PreparedTxnState
    answer: EndAnswer | None
    view: TransactionView | None = None
    proof: LogProof | None = None


def next_completion_step(known: HandedOver) -> CompletionStep:
    """The decider's next step. Pure; see the table above."""
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
    """Whether an owner may go on with its producer after a rest.

    Args:
        known: The row as the owner knows it.
        found: The row as it is now.
        handed_over: The transaction that the owner has handed over, if any.
    """
    if (found.namespace, found.incarnation) != (known.namespace, known.incarnation):
        return False
    return handed_over is None or (found.prepared == handed_over and found.completed is Outcome.COMMITTED)
