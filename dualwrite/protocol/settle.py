"""How transactions end: settling what was left, the known end of one's own, and decisions that the database has lost.

Settling: bring Kafka in line with the row, for one incarnation of one transactional id (KIP-939's recovery recipe).

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
yes      no such id, or another producer id     it is still open somewhere      record unverifiable: it cannot be ended there
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

Detects decisions that the database has lost: transactions that Kafka has committed but the row does not name.

Kafka only ever commits what the database has decided, and the row names the newest decision. So a commit newer than every
transaction that the row or a recorded incident names was decided by a database that has gone back since: it was restored
from a backup, or failed over to a copy that was behind.

The coordinator keeps the start of an id's newest transaction after its end. If the start of the newest known transaction is
recorded, comparing the two suffices. Otherwise the logs of its partitions are read on from it.

Native transactions have an epoch each, and ending one raises the coordinator's by 1. So the coordinator shows which one has
ended last, and whether by commit. But settlers raise the epoch, too: by their fence, which aborts, and by repairs, some of
which commit. The fence in the row tells these apart, read after the coordinator was asked. Below, S is the newest known
transaction, E its epoch, L the epoch of the one that has ended last, and F the fence:

=============================  =====================  =========================================================
coordinator                    fence                  then
=============================  =====================  =========================================================
another producer id            any                    read the logs
L is E or less                 any                    nothing is lost
L is F or greater              F                      settlers have ended L: as for F - 2, ended somehow
L is F - 1, aborted            F                      the fence has ended L: as for F - 2, ended somehow
L was committed                any                    lost
L was aborted                  any                    read the logs
=============================  =====================  =========================================================

The first match applies. If a database has lost the fence, and Kafka shows the commit of a repair, that is reported, too: the
database has gone back, although it misses no decision.

A producer begins its next transaction only once the end of its last one is known.

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
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import (
    IN_TRANSITION,
    LogProof,
    OpenPlaces,
    Outcome,
    Partition,
    ShownProducer,
    TransactionStatus,
    TransactionView,
    own_among,
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
    unended = _NONE if prepared is None or recorded in {None, Outcome.COMMITTED} else prepared.partitions
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
    unended = _NONE if proof is LogProof.COMMITTED else known.prepared.partitions
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
    if view.producer_id != state.producer_id:
        return SettleStep.RECORD_UNVERIFIABLE  # only an operator's tool can end it
    if known.evidence is False:
        return SettleStep.WAIT  # it may be what was ongoing, and be ending just now
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


CLOCKS_DIFFER_MS: Final = 10_000
"""How far the brokers' clocks may differ without a false alarm, in ms."""
_COMMITTED: Final = frozenset({TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT})


@dataclass(frozen=True)
class Later:
    """The producer's later activity, as the logs of a transaction's partitions show it.

    ``commit`` is the newest committed transaction after it, and names only these partitions; of native ones, the newest of all
    partitions, which may name fewer. ``idle_since_ms`` says since when the producer has written nothing there, not even a
    marker, by the leaders' clocks (ms since 1970); None if no leader knows it.
    """

    commit: PreparedTxnState | None = None
    idle_since_ms: int | None = None


class Lookup(Enum):
    """The answer of the coordinator's view to whether an incarnation has lost decisions."""

    NOTHING = "nothing is lost"
    LOST = "the coordinator shows a commit that the database does not name"
    READ = "only the logs can tell"


@dataclass(frozen=True)
class NewestKnown:
    """The transactions of one incarnation that the database names, in the row or in incidents.

    ``newest`` has the newest of them in each partition, as one state. ``started_ms`` is the latest of their starts; None if
    one of them, which may be the newest, has no start recorded.
    """

    newest: PreparedTxnState | None
    started_ms: int | None


def known_of(states: Iterable[PreparedTxnState], incarnation: int) -> NewestKnown:
    """Collect the transactions of an incarnation among the row's prepared state and those of the incidents of its id."""
    own = [state for state in states if state.has_transaction and state.incarnation == incarnation]
    if not own:
        return NewestKnown(None, None)
    # Epochs only rise, and all states of one incarnation have the same producer id.
    last = max(own, key=lambda state: (state.producer_id, state.epoch))
    started = [state.started_ms for state in own if state.started_ms is not None]
    newest_started_ms = max(started) if len(started) == len(own) else None
    if last.is_native:
        return NewestKnown(last, newest_started_ms)
    firsts: dict[tuple[str, int, str | None], FirstOffset] = {}
    for state in own:
        for first in state.first_offsets:
            key = (first.topic, first.partition, first.topic_id)
            firsts[key] = max(first, firsts.get(key, first), key=lambda one: one.offset)
    by_place: dict[tuple[str, int], FirstOffset] = {(one.topic, one.partition): one for one in firsts.values()}
    newest = PreparedTxnState(last.producer_id, last.epoch, incarnation, tuple(by_place.values()))
    return NewestKnown(newest, newest_started_ms)


def look_up(known: NewestKnown, view: TransactionView, fence: int | None = None) -> Lookup:
    """Look for lost decisions of an incarnation in the coordinator's view of its Kafka id.

    ``fence`` is the row's, read after the view. Only native transactions have one.
    """
    if known.newest is None:
        return Lookup.LOST if view.status in _COMMITTED else Lookup.NOTHING
    if known.newest.is_native:
        return _look_up_native(known.newest, view, fence)
    if _shows_commit_of(view, known.newest) and known.started_ms is not None and view.newest_started_ms is not None:
        return Lookup.LOST if view.newest_started_ms > known.started_ms else Lookup.NOTHING
    return Lookup.READ if known.newest.first_offsets else Lookup.NOTHING


def _look_up_native(newest: PreparedTxnState, view: TransactionView, fence: int | None) -> Lookup:
    read = Lookup.READ if newest.first_offsets else Lookup.NOTHING
    if view.producer_id != newest.producer_id:
        return read
    ended_last = view.epoch - 1
    committed = view.status in _COMMITTED
    if fence is not None and (fence <= ended_last or (fence - 1 == ended_last and not committed)):
        ended_last, committed = fence - 2, False
    if ended_last <= newest.epoch:
        return Lookup.NOTHING
    return Lookup.LOST if committed else read


def lost_decision(
    known: NewestKnown, view: TransactionView, incarnation: int, answer: Lookup, later: Later | None
) -> PreparedTxnState | None:
    """The newest decision of an incarnation that the database has lost, if any. It names the partitions where it was seen.

    A commit that the coordinator shows may have been written to partitions other than those whose logs were read. If it began
    long after the producer's last write to these, it is not a known one.

    A commit that has records in none of them, but began before the producer's last marker there, wrote nothing: a late copy of
    the known transaction's AddPartitionsToTxn began it, and a second EndTxn committed it.

    ``later`` is None if the logs were not read.
    """
    if known.newest is not None and known.newest.is_native:
        return _lost_native(known.newest, view, answer, later)
    commit, idle_since_ms = (later.commit, later.idle_since_ms) if later is not None else (None, None)
    newest = known.newest
    shows_commit = newest is not None and _shows_commit_of(view, newest)
    started_ms = view.newest_started_ms if shows_commit or answer is Lookup.LOST else None
    began_later = started_ms is not None and idle_since_ms is not None and started_ms > idle_since_ms + CLOCKS_DIFFER_MS
    if commit is None and started_ms is not None and idle_since_ms is not None and started_ms <= idle_since_ms:
        return None
    if answer is Lookup.LOST or (answer is Lookup.READ and (commit is not None or began_later)):
        firsts = commit.first_offsets if commit is not None else ()
        producer = newest if newest is not None and answer is Lookup.READ else view
        return PreparedTxnState(producer.producer_id, producer.epoch, incarnation, firsts, started_ms)
    return None


def _lost_native(
    newest: PreparedTxnState, view: TransactionView, answer: Lookup, later: Later | None
) -> PreparedTxnState | None:
    commit = later.commit if later is not None and answer is not Lookup.NOTHING else None
    if answer is not Lookup.LOST or (commit is not None and commit.epoch >= view.epoch - 1):
        return commit
    return PreparedTxnState.native(view.producer_id, view.epoch - 1, newest.incarnation, {}, {})


def contradiction(
    incarnation: int, newest: PreparedTxnState, shown_incarnation: int, shown: PreparedTxnState
) -> str | None:
    """Why a row contradicts what its owner knows, in words; None if it does not.

    Only the owner changes the state as long as the incarnation is its own.
    """
    if shown_incarnation > incarnation:
        return None  # another owner has claimed the row
    if shown != newest:
        return f"the row shows {str(shown) or 'none'!r} as the newest decision, which was {str(newest) or 'none'!r}"
    if shown_incarnation < incarnation:
        return f"the row names incarnation {shown_incarnation}, although {incarnation} was claimed"
    return None


def _shows_commit_of(view: TransactionView, state: PreparedTxnState) -> bool:
    same_producer = (view.producer_id, view.epoch) == (state.producer_id, state.epoch)
    return same_producer and view.status in _COMMITTED


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
