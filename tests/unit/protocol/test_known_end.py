"""When a producer may begin its next transaction, over all that the partitions of the last one can show."""

from itertools import product

import pytest

from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import (
    Ended,
    EndStep,
    PendingStep,
    left_undecided,
    native_step_at_rest,
    next_end_step,
    next_native_end_step,
    next_pending_step,
)
from dualwrite.protocol.values import LogProof, ShownProducer, TransactionStatus, TransactionView

S = PreparedTxnState(42, 3, 7, (FirstOffset("orders", 0, 17), FirstOffset("orders", 1, 33)))
P0, P1 = ("orders", 0), ("orders", 1)
PROOFS = [None, LogProof.COMMITTED, LogProof.ABORTED, LogProof.OPEN, LogProof.UNKNOWABLE]
SEEN = [
    {key: proof for key, proof in ((P0, first), (P1, second)) if proof is not None}
    for first, second in product(PROOFS, PROOFS)
]
ALL = [
    (Ended(S, committed, complete), seen, early)
    for committed, complete, seen, early in product([True, False], [True, False], [None, *SEEN], [True, False])
]
OWN = {True: LogProof.COMMITTED, False: LogProof.ABORTED}


def test_the_producer_goes_on_only_where_every_partition_shows_the_end_that_it_was_given():
    for ended, seen, early in ALL:
        everywhere = ended.complete and seen == dict.fromkeys((P0, P1), OWN[ended.committed])
        assert (next_end_step(ended, seen, early=early) is EndStep.KNOWN) is everywhere, (ended, seen)


def test_what_ended_otherwise_in_one_partition_is_not_waited_for():
    for ended, seen, early in ALL:
        if seen and ended.complete and OWN[not ended.committed] in seen.values():
            step = EndStep.SETTLE if ended.committed else EndStep.RECORD
            assert next_end_step(ended, seen, early=early) is step


def test_what_is_open_or_does_not_answer_is_waited_for_a_while():
    for seen in ({}, {P0: LogProof.COMMITTED}, {P0: LogProof.OPEN, P1: LogProof.COMMITTED}):
        assert next_end_step(Ended(S, committed=True), seen, early=True) is EndStep.WAIT
        assert next_end_step(Ended(S, committed=True), seen, early=False) is EndStep.SETTLE


@pytest.mark.parametrize("committed", [True, False])
def test_partitions_that_are_not_all_known_are_not_even_asked(committed):
    assert next_end_step(Ended(S, committed, complete=False), None, early=True) is EndStep.SETTLE
    assert next_end_step(Ended(S, committed), None, early=True) is EndStep.ASK


def test_a_partition_that_is_gone_with_its_topic_has_nothing_open():
    for committed in (True, False):
        ended = Ended(S, committed)
        assert next_end_step(ended, {P0: OWN[committed], P1: None}, early=True) is EndStep.KNOWN
        assert next_end_step(ended, {P1: None}, early=True) is EndStep.WAIT
        assert next_end_step(ended, {P0: LogProof.OPEN, P1: None}, early=True) is EndStep.WAIT


def test_nothing_was_sent_so_there_is_nothing_to_wait_for():
    assert next_end_step(Ended(PreparedTxnState(42, 3), committed=False), {}, early=True) is EndStep.KNOWN


NATIVE = PreparedTxnState.native(42, 3, 7, {P0: 17, P1: None}, {"orders": "sample"})
SHOWN = [None, *(ShownProducer(epoch, start) for epoch, start in product([-1, 2, 3, 4, 9], [None, 0, 17, 60]))]
UNANSWERED = object()
ALL_NATIVE = [
    (
        Ended(NATIVE, committed, complete),
        {key: found for key, found in ((P0, first), (P1, second)) if found is not UNANSWERED},
        early,
    )
    for committed, complete, first, second, early in product(
        [True, False], [True, False], [UNANSWERED, *SHOWN], [UNANSWERED, *SHOWN], [True, False]
    )
]


def test_after_a_native_transaction_every_partition_must_show_a_later_epoch_and_nothing_open():
    def has_ended(found):
        return found is None or (found.epoch >= 4 and found.open_from is None)

    for ended, shown, early in ALL_NATIVE:
        step = next_native_end_step(ended, shown, early=early)
        everywhere = ended.complete and set(shown) == {P0, P1} and all(map(has_ended, shown.values()))
        assert (step is EndStep.KNOWN) is everywhere, (ended, shown)
        if not everywhere:
            assert step is (EndStep.WAIT if early and ended.complete else EndStep.SETTLE)


@pytest.mark.parametrize("committed", [True, False])
def test_a_native_transaction_with_a_batch_that_was_not_acknowledged_is_settled_at_once(committed):
    assert next_native_end_step(Ended(NATIVE, committed, complete=False), None, early=True) is EndStep.SETTLE
    assert next_native_end_step(Ended(NATIVE, committed), None, early=True) is EndStep.ASK


def test_before_a_native_transaction_is_called_completed_no_log_may_speak_against_it():
    two = PreparedTxnState.native(42, 3, 7, {P0: 17, P1: 33, ("orders", 2): None}, {"orders": "sample"})
    for first, second in product([UNANSWERED, None, *LogProof], repeat=2):
        proofs = {key: found for key, found in ((P0, first), (P1, second)) if found is not UNANSWERED}
        step = native_step_at_rest(two, proofs)
        if LogProof.ABORTED in (first, second):
            assert step is EndStep.SETTLE
        else:
            waits = {UNANSWERED, LogProof.OPEN} & {first, second}
            assert step is (EndStep.WAIT if waits else EndStep.KNOWN)


def view(status, epoch=3):
    return TransactionView(status, 42, epoch)


def test_the_log_has_the_last_word_about_a_decided_transaction():
    told = {
        LogProof.COMMITTED: PendingStep.COMMITTED,
        LogProof.ABORTED: PendingStep.LOST,
        LogProof.UNKNOWABLE: PendingStep.UNVERIFIABLE,
    }
    for proof, shown in product(told, [None, *map(view, TransactionStatus)]):
        assert next_pending_step(proof, shown, S) is told[proof]


def test_only_what_is_going_to_be_committed_is_called_pending():
    going_to_be = {TransactionStatus.ONGOING, TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT}
    for status, epoch in product(TransactionStatus, [3, 4]):
        step = PendingStep.PENDING if status in going_to_be and epoch == 3 else PendingStep.LOOK
        assert next_pending_step(LogProof.OPEN, view(status, epoch), S) is step
    assert next_pending_step(LogProof.OPEN, None, S) is PendingStep.LOOK
    assert next_pending_step(LogProof.PARTLY, None, S) is PendingStep.PENDING


def test_what_a_producer_may_leave_open_is_named_unless_it_is_decided_or_known_to_have_ended():
    ends = [None, Ended(S, committed=True), Ended(S, committed=False)]
    for last, given_up, is_prepared in product(ends, [None, Ended(S, committed=False)], [True, False]):
        left = left_undecided(last, given_up, is_prepared=is_prepared, sent_to=frozenset({P1}))
        if last is not None:
            assert left == (frozenset() if last.committed else S.partitions)
        elif given_up is not None:  # aborted by its owner, so it is undecided even if it was prepared
            assert left == S.partitions
        else:
            assert left == (frozenset() if is_prepared else {P1})
