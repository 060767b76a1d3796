"""Settling: bring Kafka in line with the row, for one incarnation of one transactional id (KIP-939's recovery recipe).

:func:`next_step` decides everything from the knowledge so far; the recipe in ``dualwrite.recovery.settle`` only acts.
The order of the questions is part of the protocol: the coordinator first, *then* the partitions. In the other order, the
transaction that a partition showed may have ended before the coordinator showed a later one of the same epoch.

The rules, from the top; the first match applies. *Pending*: there is a prepared state, and no outcome is recorded for it.
*Retired*: the coordinator shows the id at rest, as this settling left it after retiring it; while a transaction is pending,
also at rest under any epoch later than its own, as no owner begins anything under such an epoch.

=======  =====================================  ==============================  ===============================================
pending  coordinator                            known besides                   step
=======  =====================================  ==============================  ===============================================
any      PrepareCommit, PrepareAbort, ...       any                             wait, look again
no       any                                    retired, nothing suspect        finish
no       no such id                             any                             finish: nothing can write under it any more
no       Ongoing, or retired                    suspects, not asked for         look for what is still open
no       not retired                            any                             retire (aborts what is ongoing: it is undecided)
no       retired                                suspects are open               end what was forgotten (*)
no       retired                                suspects are not open           finish
yes      Ongoing, its id, epoch, start, places  evidence never asked            look at the partitions
yes      Ongoing, its id, epoch, start, places  evidence matches                commit
yes      Ongoing, its id, a later epoch         open not asked                  look for what is still open
yes      Ongoing, its id, a later epoch         all of it is its own            commit: an earlier settler was ending it
yes      anything else                          proof not asked                 prove
yes      anything else                          proof not committed or aborted, look for what is still open
                                                not asked
yes      no such id, or another producer id     it is still open somewhere      wait, look again: it cannot be ended there
yes      Ongoing, its id, epoch, start, places  it is, evidence did not match   wait, look again: it may be ending
yes      Ongoing, its id and epoch              all of it is its own, again     commit: a late request has begun it again
yes      not retired                            it is still open somewhere      retire
yes      retired                                it is still open somewhere      end what was forgotten (*)
yes      anything else                          it is not, by then              prove again: it may just have ended
yes      CompleteCommit, its id and epoch       proof open or unknowable        record committed
yes      anything else                          proof committed or partly       record committed
yes      anything else                          proof aborted                   record lost
yes      anything else                          proof open                      wait, look again
yes      anything else                          proof unknowable                record unverifiable
=======  =====================================  ==============================  ===============================================

(*) One epoch either commits or aborts what was forgotten, never both: a late copy of a commit could otherwise end what the
same producer id and epoch is about to abort, and the other way round. If the coordinator shows that the epoch has ended
something the other way, the id is retired once more first, which raises the epoch.

*Places* are all partitions that the transaction has written. The coordinator may show others, which a late copy of an earlier
transaction's request has added: those are asked as well, and the evidence matches if nothing is open there.

Retiring comes last on purpose. The broker may have timed the transaction out a moment ago: a settler that retired first and
looked afterwards would find an aborted transaction, could not tell why, and would report no loss.

The one exception is a transaction that the coordinator calls complete while a partition shows it open: some brokers forget
markers (KAFKA-20734), and never write them again. Only a transaction of the same producer id can end it there, and no owner
may write in that one, so the id is retired first. That hides nothing, as the forgotten records stay open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import (
    IN_TRANSITION,
    LogProof,
    OpenPlaces,
    Outcome,
    Partition,
    TransactionStatus,
    TransactionView,
    own_among,
    own_partitions,
    shows_same_transaction,
)

_NONE: Final[frozenset[Partition]] = frozenset()


class SettleStep(Enum):
    """The next step for one incarnation."""

    LOOK = "ask the coordinator"
    LOOK_AT_PARTITIONS = "ask the partitions for the first offsets of what is open"
    WAIT = "wait, then forget what was seen and look again"
    LOOK_FOR_OPEN = "ask the partitions whether anything was left open"
    COMMIT = "end the transaction with commit, then look again"
    PROVE = "read the log for the marker"
    RECORD_COMMITTED = "record that it was committed"
    RECORD_LOST = "record that the broker aborted a decided transaction"
    RECORD_UNVERIFIABLE = "record that its outcome cannot be known any more"
    RETIRE = "make the incarnation's Kafka id unusable"
    REPAIR_MARKERS = "end what the broker has forgotten to end in some partitions, then look again"
    FINISH = "mark the incarnation as settled"


QUESTIONS: Final = frozenset(
    {SettleStep.LOOK, SettleStep.LOOK_AT_PARTITIONS, SettleStep.LOOK_FOR_OPEN, SettleStep.PROVE}
)
"""The steps that change nothing."""


@dataclass(frozen=True)
class Knowledge:
    """The settler's knowledge of one incarnation. An answer of this round is None if the question was not asked.

    - ``prepared``: the row's state if it belongs to this incarnation; ``recorded``: its outcome, if that is recorded.
    - ``evidence``: whether the transaction open on the partitions is ``prepared``.
    - ``retired``: the producer id and epoch that the coordinator gave out when this settling retired the Kafka id.
    - ``suspects``: partitions in which a transaction of the id may have been left open.
    - ``tainted``: partitions in which an undecided transaction, other than ``prepared``, may have written.
    - ``still_open``: where the id's producer still has something open among ``suspects``, and from which offset on.
    - ``ended``: the evidence failed to match in an earlier round: ``prepared`` is no longer open in all its partitions.
    - ``confirmed``: the log was read after asking the partitions what is still open.
    """

    prepared: PreparedTxnState | None = None
    recorded: Outcome | None = None
    view: TransactionView | None = None
    evidence: bool | None = None
    proof: LogProof | None = None
    retired: tuple[int, int] | None = None
    suspects: frozenset[Partition] = _NONE
    tainted: frozenset[Partition] = _NONE
    still_open: OpenPlaces | None = None
    ended: bool = False
    confirmed: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether there is a decided transaction whose outcome is not recorded."""
        return self.prepared is not None and self.recorded is None

    @property
    def is_retired(self) -> bool:
        """Whether the coordinator shows the id at rest, and no owner can begin anything under it."""
        view = self.view
        if view is None or view.status not in _AT_REST:
            return False
        state = self.prepared
        if self.is_pending and state is not None and view.producer_id == state.producer_id and view.epoch > state.epoch:
            return True  # retiring once more would abort what another settler is ending at the same time
        return (view.producer_id, view.epoch) == self.retired


_ABORTING = frozenset({TransactionStatus.PREPARE_ABORT, TransactionStatus.PREPARE_EPOCH_FENCE})
_AT_REST = frozenset({TransactionStatus.EMPTY, TransactionStatus.COMPLETE_COMMIT, TransactionStatus.COMPLETE_ABORT})
_MAY_BE_OPEN = frozenset({LogProof.OPEN, LogProof.PARTLY, LogProof.UNKNOWABLE})
"""Includes deleted records: a transaction stays open without them."""
_LOG_IS_SILENT = frozenset({LogProof.OPEN, LogProof.UNKNOWABLE})

_RECORD = {
    Outcome.COMMITTED: SettleStep.RECORD_COMMITTED,
    Outcome.LOST: SettleStep.RECORD_LOST,
    Outcome.UNVERIFIABLE: SettleStep.RECORD_UNVERIFIABLE,
    None: SettleStep.WAIT,
}


def initial(prepared: PreparedTxnState | None, recorded: Outcome | None) -> Knowledge:
    """The knowledge before the first question.

    A settler that recorded an outcome other than a commit may have died before it ended what the broker had forgotten of that
    transaction.
    """
    unended = _NONE if prepared is None or recorded in {None, Outcome.COMMITTED} else own_partitions(prepared)
    return Knowledge(prepared=prepared, recorded=recorded if prepared is not None else None, suspects=unended)


def looked(known: Knowledge, view: TransactionView) -> Knowledge:
    """The knowledge after asking the coordinator: the answers of the previous round no longer hold.

    A transaction that is open or ending now may be left open in some partition, and the coordinator will not show that later.
    The one exception: a transaction being committed while one is pending is the pending one, whose end the log proves.
    """
    unended = view.status is TransactionStatus.ONGOING or view.status in IN_TRANSITION
    is_own = known.is_pending and view.status is TransactionStatus.PREPARE_COMMIT
    seen = frozenset(view.partitions) if unended and not is_own else _NONE
    return replace(
        known,
        view=view,
        evidence=None,
        proof=None,
        still_open=None,
        confirmed=False,
        ended=known.ended or known.evidence is False,
        suspects=known.suspects | seen,
        tainted=known.tainted | seen if view.status in _ABORTING else known.tainted,
    )


def compared(known: Knowledge, evidence: bool) -> Knowledge:  # noqa: FBT001 - the answer itself
    """The knowledge after comparing what is open with ``prepared``: if they match, the log will prove its end."""
    assert known.view is not None
    suspects = known.suspects - frozenset(known.view.partitions) if evidence else known.suspects
    return replace(known, evidence=evidence, suspects=suspects)


def proved(known: Knowledge, proof: LogProof) -> Knowledge:
    """The knowledge after reading the log: unless it shows commit markers everywhere, something may be open."""
    assert known.prepared is not None
    unended = _NONE if proof is LogProof.COMMITTED else own_partitions(known.prepared)
    return replace(known, proof=proof, suspects=known.suspects | unended, confirmed=known.still_open is not None)


def retired(known: Knowledge, ids: tuple[int, int]) -> Knowledge:
    """The knowledge after retiring, whose answer is the coordinator's newest view: what was ongoing is aborted."""
    view = known.view
    aborted = frozenset(view.partitions) if view is not None and view.status is TransactionStatus.ONGOING else _NONE
    known = replace(known, retired=ids, tainted=known.tainted | aborted)
    return looked(known, TransactionView(TransactionStatus.EMPTY, *ids))


def to_end(known: Knowledge) -> tuple[frozenset[Partition], bool]:
    """The partitions in which to end what the broker has forgotten, and whether to commit it.

    Commit only where the decided transaction has its records and certainly no other has; after that, abort everything else.
    """
    assert known.still_open is not None
    if known.prepared is not None and known.recorded in {None, Outcome.COMMITTED}:
        own = own_among(known.prepared, known.still_open) - known.tainted
        if own:
            return own, True
    return frozenset(key for key, _ in known.still_open), False


def next_step(known: Knowledge) -> SettleStep:
    """The next step in settling one incarnation. Pure; see the table in the module's docstring."""
    if not known.is_pending and known.retired is not None and not known.suspects:
        return SettleStep.FINISH
    view = known.view
    if view is None:
        return SettleStep.LOOK
    if view.status in IN_TRANSITION:
        return SettleStep.WAIT
    if known.is_pending:
        return _step_for_decided(known, view)
    if view.status is TransactionStatus.NO_SUCH_ID:
        return SettleStep.FINISH
    # Ask before retiring, too: it waits for leaders, and a broker forgets the markers of partitions that have none.
    worth_asking = known.is_retired or view.status is TransactionStatus.ONGOING
    if known.suspects and known.still_open is None and worth_asking:
        return SettleStep.LOOK_FOR_OPEN
    if not known.is_retired:
        return SettleStep.RETIRE
    return _step_to_end(known, view) if known.still_open else SettleStep.FINISH


def _step_to_end(known: Knowledge, view: TransactionView) -> SettleStep:
    """End what the broker has forgotten, under an epoch that has ended nothing the other way."""
    _, committed = to_end(known)
    contrary = TransactionStatus.COMPLETE_ABORT if committed else TransactionStatus.COMPLETE_COMMIT
    return SettleStep.RETIRE if view.status is contrary else SettleStep.REPAIR_MARKERS


def _step_for_decided(known: Knowledge, view: TransactionView) -> SettleStep:
    state = known.prepared
    assert state is not None
    if view.status is TransactionStatus.ONGOING:
        step = _step_for_ongoing(known, view, state)
        if step is not None:
            return step
    if known.proof is None:
        return SettleStep.PROVE
    if known.proof in _MAY_BE_OPEN:
        step = _step_for_unended(known, view, state)
        if step is not None:
            return step
    if _coordinator_says_committed(view, state) and known.proof in _LOG_IS_SILENT:
        return SettleStep.RECORD_COMMITTED
    return _RECORD[known.proof.outcome]


def _step_for_unended(known: Knowledge, view: TransactionView, state: PreparedTxnState) -> SettleStep | None:
    if known.still_open is None:
        return SettleStep.LOOK_FOR_OPEN
    if not own_among(state, known.still_open):
        return None if known.confirmed else SettleStep.PROVE
    if view.producer_id != state.producer_id or known.evidence is False:
        return SettleStep.WAIT  # without matching evidence, it may be what was ongoing, and be ending just now
    if known.is_retired:
        return _step_to_end(known, view)
    return SettleStep.COMMIT if _is_own_again(known, view, state) else SettleStep.RETIRE


def _step_for_ongoing(known: Knowledge, view: TransactionView, state: PreparedTxnState) -> SettleStep | None:
    if shows_same_transaction(view, state) and not known.ended:
        if known.evidence is None:
            return SettleStep.LOOK_AT_PARTITIONS
        return SettleStep.COMMIT if known.evidence else None
    if view.producer_id == state.producer_id and view.epoch > state.epoch:
        # No owner begins anything under a later epoch: an earlier settler was ending what was forgotten.
        if known.still_open is None:
            return SettleStep.LOOK_FOR_OPEN
        own = own_among(state, known.still_open)
        shown = {key for key, _ in known.still_open if key in view.partitions}
        return SettleStep.COMMIT if shown and shown <= own else None
    return None


def _is_own_again(known: Knowledge, view: TransactionView, state: PreparedTxnState) -> bool:
    """Whether the ongoing transaction holds only the state's own records, which the broker has forgotten to end.

    A late copy of the transaction's own request has begun it again. No owner did: an owner begins nothing before it knows that
    its last transaction has ended everywhere.
    """
    assert known.still_open is not None
    if view.status is not TransactionStatus.ONGOING or (view.producer_id, view.epoch) != (
        state.producer_id,
        state.epoch,
    ):
        return False
    shown = {key for key, _ in known.still_open if key in view.partitions}
    return bool(shown) and shown <= own_among(state, known.still_open) - known.tainted


def _coordinator_says_committed(view: TransactionView, state: PreparedTxnState) -> bool:
    """Whether the coordinator shows the state's own transaction as committed.

    It does not know everything: a tool that writes markers past the coordinator has the last word in the log.
    """
    same = (view.producer_id, view.epoch) == (state.producer_id, state.epoch)
    return same and view.status is TransactionStatus.COMPLETE_COMMIT
