"""Completes handed-over transactions: the owner has prepared one and waits; another process, the decider, completes it.

The owner keeps the same producer afterwards, so its next transaction has the same producer id and epoch: a late
request of the decider's would end that one. Two rules prevent this.

The decider records "completed" in the row only if :func:`next_completion_step` says so: it sent its ``EndTxn`` once, and got
an answer. It leaves everything else to a claim, after which no owner can use that producer:

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

A native transaction has an epoch of its own, so a late request ends no other one, and ``EndTxn`` may be repeated.
:func:`next_native_completion_step` leaves less to a claim:

======================  =======================================  =======  ========================
``EndTxn(commit)``      end in the partitions                    proof    step
======================  =======================================  =======  ========================
not sent                any                                      any      end it
in progress             any                                      any      wait, end it again
refused                 any                                      any      leave it
success                 not asked                                any      ask the partitions
success                 not known yet                            any      wait, ask again
success                 cannot be known                          any      leave it
success                 known                                    not read prove
success                 known                                    commit   record it as completed
success                 known                                    other    leave it
======================  =======================================  =======  ========================

The owner continues only if :func:`may_go_on` allows it: the row still has its incarnation, and names its transaction as
completed. A decided transaction is not enough: the decider's ``EndTxn`` may still be on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dualwrite.protocol.known_end import EndStep
from dualwrite.protocol.values import EndAnswer, LogProof, Outcome, TransactionStatus, TransactionView

if TYPE_CHECKING:
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values__protocol_rows import StateRow


class CompletionStep(Enum):
    """The decider's next step for one transaction."""

    END = "end it with commit, by its own name"
    LOOK = "ask the coordinator, or for a native transaction the partitions"
    WAIT = "wait, then forget what was seen and look again"
    PROVE = "read the log for the markers"
    RECORD = "record it as completed: its owner may continue"
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


@dataclass(frozen=True)
class NativeHandedOver:
    """The decider's knowledge of one native transaction that it completes.

    Attributes:
        answer: The last answer to ``EndTxn(commit)``; None if it has to be sent, first or again.
        end: The step of :func:`dualwrite.protocol.known_end.next_native_end_step` about it; None if the partitions
            have to be asked, first or again.
        proof: The log's proof; None if not read.
    """

    answer: EndAnswer | None = None
    end: EndStep | None = None
    proof: LogProof | None = None


def next_native_completion_step(known: NativeHandedOver) -> CompletionStep:
    """The decider's next step for a native transaction. Pure; see the second table above."""
    if known.answer is None:
        return CompletionStep.END
    if known.answer is EndAnswer.IN_PROGRESS:
        return CompletionStep.WAIT
    if known.answer is not EndAnswer.ENDED:
        return CompletionStep.LEAVE
    if known.end is not EndStep.KNOWN:
        asking = {None: CompletionStep.LOOK, EndStep.WAIT: CompletionStep.WAIT}
        return asking.get(known.end, CompletionStep.LEAVE)
    if known.proof is None:
        return CompletionStep.PROVE
    return CompletionStep.RECORD if known.proof is LogProof.COMMITTED else CompletionStep.LEAVE


def waited(known: NativeHandedOver) -> NativeHandedOver:
    """The knowledge after :attr:`CompletionStep.WAIT`."""
    return NativeHandedOver(None if known.answer is EndAnswer.IN_PROGRESS else known.answer)


def may_go_on(known: StateRow, found: StateRow, handed_over: PreparedTxnState | None) -> bool:
    """Whether an owner may reuse its producer after idling.

    Args:
        known: The row as the owner knows it.
        found: The row as it is now.
        handed_over: The transaction that the owner has handed over, if any.
    """
    if (found.namespace, found.incarnation) != (known.namespace, known.incarnation):
        return False
    return handed_over is None or (found.prepared == handed_over and found.completed is Outcome.COMMITTED)
