"""Settling a decided transaction of the native engine, which producer id and epoch name exactly (transaction version 2).

:func:`next_step` decides everything from the knowledge so far, as :func:`dualwrite.protocol.settle.next_step` does for
librdkafka's transactions. Only incarnations with a decided transaction are settled by these rules: whatever an undecided
incarnation left open is aborted, and ``InitProducerId`` can do that for either engine.

Below, S is the decided transaction, E its epoch, and *own* what S has open in a partition: the leader shows it under E, or
from S's first offset or earlier.

**End S** by its own name, ``EndTxn`` (commit, E). Any process may, and may repeat it.

=================================================  ============================================================
answer                                             then
=================================================  ============================================================
success                                            the coordinator has committed it; prove it
in progress                                        wait, and ask again
invalid state, fenced                              it is not open any more: look
no such id                                         the coordinator has forgotten it; look, and prove it
=================================================  ============================================================

**Look**, then prove. The first match applies; *pending*: no outcome is recorded.

=======  ===================================  ======================================  ==========================
pending  coordinator                          known besides                           step
=======  ===================================  ======================================  ==========================
any      Ongoing, E                           not recorded as lost                    end S
yes      Prepare- or CompleteAbort, E + 1     any                                     record lost
any      Prepare...                           any                                     wait, look again
yes      any                                  proof not asked                         prove
yes      any                                  proof aborted                           record lost
yes      any                                  open not asked                          look for what is still open
yes      no such id, another producer id      own is open                             record unverifiable
yes      not fenced                           own is open                             fence
yes      fenced                               own is open                             repair own with commit
yes      any                                  proof committed                         record committed
yes      any                                  proof read before asking what is open   prove again
yes      any                                  proof committed in part                 record committed
yes      any                                  proof open                              wait, look again
yes      any                                  unknowable, S committed (1)             record committed
yes      any                                  unknowable                              record unverifiable
no       no such id                           any                                     finish
no       another producer id, Ongoing         any                                     abort that, by its own name
no       another producer id                  any                                     finish
no       not fenced                           any                                     fence
no       fenced                               open not asked                          look for what is still open
no       fenced                               own is open, not recorded as lost       repair own with commit
no       fenced                               anything is open                        repair it with abort
no       fenced                               nothing is open                         finish
=======  ===================================  ======================================  ==========================

(1) ``EndTxn`` has said so; or the coordinator shows PrepareCommit, CompleteCommit or Ongoing under E + 1. Only the success of
S's own commit tells an owner that epoch.

**Fence**, so that the epoch is the settlers' alone. ``InitProducerId`` does not compare: its late copy would abort another
settler's repair. ``EndTxn`` (abort, e) does, and the row says which epochs are settlers'. *Fenced*: the coordinator is at rest
with an epoch that is not below the fence in the row, read after the coordinator was asked.

==================  ====================  ==========================================================================
coordinator         fence in the row      step
==================  ====================  ==========================================================================
any                 not read              read it
any, e              none                  write e + 1, on condition that there still is none
any, e              greater than e        ``EndTxn`` (abort, e), whatever the answer, and look again
Ongoing, e          e or less             another settler's repair: commit it if own is open in it, else abort it
at rest, e          e or less             fenced
==================  ====================  ==========================================================================

Without the fence in the row, a second settler takes the first one's repair for an owner's transaction, and aborts the decided
messages in it.

**Repair** what a broker has forgotten to end (KAFKA-20734): ``AddPartitionsToTxn``, then ``EndTxn``, under the fenced epoch.
One transaction ends only one way: own partitions first, with commit, then the others with abort. A repair that commits must
not time out, since that would abort it: either the timeout is unlimited, or the log of each of its partitions would prove the
loss. Otherwise settling stops.

S is ended, and its outcome recorded, before the fence: the fence raises the epoch, and E + 1 would no longer show that the
broker has timed S out. What was left open by then is the exception: it stays open, and shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import (
    IN_TRANSITION,
    NEVER_MS,
    EndAnswer,
    LogProof,
    OpenTransaction,
    Outcome,
    Partition,
    TransactionStatus,
    TransactionView,
)


class NativeStep(Enum):
    """The next step for one incarnation with a decided native transaction."""

    END = "end the decided transaction by its own name with commit"
    LOOK = "ask the coordinator"
    WAIT = "wait, then forget what was seen and look again"
    PROVE = "read the log for the marker"
    LOOK_FOR_OPEN = "ask the partitions what is still open, and under which epoch"
    READ_FENCE = "read the row's fence"
    RECORD_COMMITTED = "record that it was committed"
    RECORD_LOST = "record that the broker aborted a decided transaction"
    RECORD_UNVERIFIABLE = "record that its outcome cannot be known any more"
    RAISE_FENCE = "write the fence into the row, if it is as it was read"
    ABORT = "end what the coordinator shows with abort, by its own name"
    JOIN = "end another settler's repair with commit, by its own name"
    REPAIR = "end what the broker has forgotten to end in some partitions"
    STOP = "stop: the repair could time out, and the loss would not show"
    FINISH = "mark the incarnation as settled"


QUESTIONS: Final = frozenset({NativeStep.LOOK, NativeStep.PROVE, NativeStep.LOOK_FOR_OPEN, NativeStep.READ_FENCE})
"""The steps that change nothing."""


@dataclass(frozen=True)
class NativeKnowledge:
    """The settler's knowledge of one incarnation with a decided native transaction, S. An answer is None if it is to be asked.

    - ``suspects``: partitions in which a transaction of the id may have been left open, besides those of the topics of S.
    - ``answer``: the answer to ending S; None if it has to be asked, first or again.
    - ``committed``: the coordinator's word on S; None if it has not shown it.
    - ``still_open``: the producer's open transactions in ``suspects`` and in the topics of S.
    - ``confirmed``: the log was read after asking what is still open.
    - ``fence``: the row's fence, if ``is_fence_known``: read in this round, after ``view``.
    - ``is_overwritten``: the row names another transaction by now: then a newer owner has settled this one.
    """

    prepared: PreparedTxnState
    recorded: Outcome | None = None
    suspects: frozenset[Partition] = frozenset()
    answer: EndAnswer | None = None
    committed: bool | None = None
    view: TransactionView | None = None
    proof: LogProof | None = None
    still_open: tuple[OpenTransaction, ...] | None = None
    confirmed: bool = False
    fence: int | None = None
    is_fence_known: bool = False
    is_overwritten: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether no outcome is recorded."""
        return self.recorded is None

    @property
    def own(self) -> frozenset[Partition]:
        """The partitions in which S itself is still open, as far as asked."""
        firsts = {(first.topic, first.partition): first.offset for first in self.prepared.first_offsets}
        return frozenset(
            found.partition
            for found in self.still_open or ()
            if found.epoch == self.prepared.epoch or found.start <= firsts.get(found.partition, -1)
        )


_WORD: Final = {
    TransactionStatus.PREPARE_COMMIT: True,
    TransactionStatus.COMPLETE_COMMIT: True,
    TransactionStatus.ONGOING: True,
    TransactionStatus.PREPARE_ABORT: False,
    TransactionStatus.COMPLETE_ABORT: False,
}
"""Whether S was committed, by the status that the coordinator shows under the epoch after S's."""


def initial_native(
    prepared: PreparedTxnState, recorded: Outcome | None, suspects: frozenset[Partition] = frozenset()
) -> NativeKnowledge:
    """The knowledge before the first step.

    ``suspects`` are partitions besides those of the state's topics in which its owner may have left a transaction open. The
    coordinator does not name an undecided transaction that was aborted, and whose marker the broker has forgotten. Its living
    owner knows it, and all partitions of the state's topics are asked in any case.
    """
    return NativeKnowledge(prepared, recorded, prepared.partitions | suspects)


def ended(known: NativeKnowledge, answer: EndAnswer) -> NativeKnowledge:
    """The knowledge after :attr:`NativeStep.END`."""
    committed = True if answer is EndAnswer.ENDED else known.committed
    return replace(_next_round(known), answer=answer, committed=committed)


def looked_native(known: NativeKnowledge, view: TransactionView) -> NativeKnowledge:
    """The knowledge after asking the coordinator: the answers of the previous round no longer hold."""
    state = known.prepared
    committed = known.committed
    if committed is None and (view.producer_id, view.epoch) == (state.producer_id, state.epoch + 1):
        committed = _WORD.get(view.status)
    unended = view.status is TransactionStatus.ONGOING or view.status in IN_TRANSITION
    seen = frozenset(view.partitions) if unended and view.producer_id == state.producer_id else frozenset()
    return replace(_next_round(known), view=view, committed=committed, suspects=known.suspects | seen)


def proved_native(known: NativeKnowledge, proof: LogProof) -> NativeKnowledge:
    """The knowledge after reading the log."""
    return replace(known, proof=proof, confirmed=known.still_open is not None)


def found_open(known: NativeKnowledge, still_open: tuple[OpenTransaction, ...]) -> NativeKnowledge:
    """The knowledge after asking the leaders of all ``suspects``, and of all partitions of the state's topics."""
    return replace(known, still_open=still_open)


def read_fence(known: NativeKnowledge, prepared: PreparedTxnState, fence: int | None) -> NativeKnowledge:
    """The knowledge after reading the row."""
    return replace(known, fence=fence, is_fence_known=True, is_overwritten=prepared != known.prepared)


def fence_raised(known: NativeKnowledge, *, written: bool) -> NativeKnowledge:
    """The knowledge after :attr:`NativeStep.RAISE_FENCE`: if it was not written, look again."""
    return replace(known, fence=new_fence(known)) if written else _next_round(known)


def recorded(known: NativeKnowledge, outcome: Outcome) -> NativeKnowledge:
    """The knowledge after recording an outcome: look again."""
    return replace(_next_round(known), recorded=outcome)


def acted(known: NativeKnowledge) -> NativeKnowledge:
    """The knowledge after any other step that changes something, or after waiting: only what is shown next counts."""
    again = None if known.answer is EndAnswer.IN_PROGRESS else known.answer
    return replace(_next_round(known), answer=again)


def _next_round(known: NativeKnowledge) -> NativeKnowledge:
    return replace(known, view=None, proof=None, still_open=None, confirmed=False, fence=None, is_fence_known=False)


def new_fence(known: NativeKnowledge) -> int:
    """The fence to write: above the epoch that the coordinator shows."""
    assert known.view is not None
    return known.view.epoch + 1


def to_repair(known: NativeKnowledge) -> tuple[frozenset[Partition], bool]:
    """The partitions in which to end what the broker has forgotten, and whether to commit it."""
    if known.own and known.recorded is not Outcome.LOST:
        return known.own, True
    return frozenset(found.partition for found in known.still_open or ()), False


def next_native_step(known: NativeKnowledge) -> NativeStep:
    """The next step in settling one incarnation. Pure; see the tables in the module's docstring."""
    view = known.view
    if known.is_overwritten:
        return NativeStep.FINISH
    if known.is_pending and known.answer in {None, EndAnswer.IN_PROGRESS}:
        return NativeStep.END if known.answer is None else NativeStep.WAIT
    if view is None:
        return NativeStep.LOOK
    if _shows_own(known, view) and known.recorded is not Outcome.LOST:
        return NativeStep.END
    if known.is_pending and known.committed is False:
        return NativeStep.RECORD_LOST
    if view.status in IN_TRANSITION:
        return NativeStep.WAIT
    return _step_for_pending(known, view) if known.is_pending else _step_for_recorded(known, view)


def _shows_own(known: NativeKnowledge, view: TransactionView) -> bool:
    named = (known.prepared.producer_id, known.prepared.epoch)
    return view.status is TransactionStatus.ONGOING and (view.producer_id, view.epoch) == named


def _step_for_pending(known: NativeKnowledge, view: TransactionView) -> NativeStep:
    if known.proof is None:
        return NativeStep.PROVE
    if known.proof is LogProof.ABORTED:
        return NativeStep.RECORD_LOST
    if known.still_open is None:
        return NativeStep.LOOK_FOR_OPEN
    if known.own:
        if view.producer_id != known.prepared.producer_id:  # it is -1 if the coordinator does not know the id
            return NativeStep.RECORD_UNVERIFIABLE
        return _step_to_fence(known, view) or _step_to_repair(known, view)
    if known.proof is not LogProof.COMMITTED and not known.confirmed:
        return NativeStep.PROVE
    if known.proof is LogProof.UNKNOWABLE:
        return NativeStep.RECORD_COMMITTED if known.committed else NativeStep.RECORD_UNVERIFIABLE
    return NativeStep.WAIT if known.proof is LogProof.OPEN else NativeStep.RECORD_COMMITTED


def _step_for_recorded(known: NativeKnowledge, view: TransactionView) -> NativeStep:
    if view.producer_id != known.prepared.producer_id:
        return NativeStep.ABORT if view.status is TransactionStatus.ONGOING else NativeStep.FINISH
    step = _step_to_fence(known, view)
    if step is not None:
        return step
    if known.still_open is None:
        return NativeStep.LOOK_FOR_OPEN
    return _step_to_repair(known, view) if known.still_open else NativeStep.FINISH


def _step_to_fence(known: NativeKnowledge, view: TransactionView) -> NativeStep | None:
    """The next step towards the fence; None if the id is fenced."""
    if not known.is_fence_known:
        return NativeStep.READ_FENCE
    if known.fence is None:
        return NativeStep.RAISE_FENCE
    if view.epoch < known.fence:
        return NativeStep.ABORT
    if view.status is not TransactionStatus.ONGOING:
        return None
    if known.still_open is None:
        return NativeStep.LOOK_FOR_OPEN
    joins = known.own & frozenset(view.partitions) and known.recorded is not Outcome.LOST
    return NativeStep.JOIN if joins else NativeStep.ABORT


def _step_to_repair(known: NativeKnowledge, view: TransactionView) -> NativeStep:
    partitions, committed = to_repair(known)
    witnessed = {(first.topic, first.partition) for first in known.prepared.first_offsets}
    if committed and view.timeout_ms != NEVER_MS and not partitions <= witnessed:
        return NativeStep.STOP
    return NativeStep.REPAIR
