"""Transactions of version 2 on the simulated broker, rule by rule. `make simulator` holds the same rules against a real one."""

from __future__ import annotations

import pytest
from simulator import environment
from simulator.broker import handle
from simulator.partition import committed_values, producer
from simulator.requests import (
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    EMPTY,
    NEVER_MS,
    ONGOING,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    READ_COMMITTED,
    AddPartitionsToTxn,
    DescribeProducers,
    DescribeTransactions,
    EndTxn,
    EndTxnResponse,
    ErrorCode,
    Fetch,
    InitProducerId,
    InitProducerIdResponse,
    ListedTransaction,
    ListTransactions,
    OffsetFetch,
    Produce,
    ProduceResponse,
    TxnOffsetCommit,
    WriteTxnMarkers,
)
from simulator.state import new_broker, partition, transaction, with_transaction

OK = ErrorCode.NONE
X = "X"
FIRST, OTHER = ("t", 0), ("t", 1)
LAST_EPOCH = 32_766


class Talk:
    """A broker and what is said to it. Markers are written only by `settle`."""

    def __init__(self, **settings):
        self.broker = new_broker({"t": 2}, offsets_partitions=1, transaction_version=2, **settings)

    def ask(self, request):
        self.broker, answer = handle(self.broker, request)
        return answer

    def init(self, timeout_ms=60_000, **fields):
        return self.ask(InitProducerId(X, timeout_ms, **fields))

    def produce(self, epoch, sequence=0, place=FIRST, producer_id=0):
        value = f"{producer_id}:{epoch}:{sequence}"
        return self.ask(Produce(X, producer_id, epoch, place, sequence, (value,), 2))

    def commit_offsets(self, epoch, offset):
        return self.ask(TxnOffsetCommit(X, "g", 0, epoch, ((FIRST, offset),), 2)).error_code

    def end(self, epoch, committed=True, producer_id=0):
        return self.ask(EndTxn(X, producer_id, epoch, committed, 2))

    def settle(self):
        self.broker = environment.write_markers(self.broker)

    def ended(self, epoch, committed=True):
        answer = self.end(epoch, committed)
        self.settle()
        return answer

    @property
    def shown(self):
        known = transaction(self.broker, X)
        return known.state, known.producer_id, known.producer_epoch

    def committed(self, place=FIRST):
        return committed_values(partition(self.broker, place))

    def shift(self, epoch):
        """Go on with an epoch that thousands of transactions would lead to."""
        known = transaction(self.broker, X)
        self.broker = with_transaction(self.broker, known._replace(producer_epoch=epoch))


@pytest.fixture
def talk():
    talk = Talk()
    assert talk.init() == InitProducerIdResponse(OK, 0, 0)
    return talk


def test_a_message_adds_its_partition_to_the_transaction(talk):
    assert talk.produce(0) == ProduceResponse(OK, 0)
    view = talk.ask(DescribeTransactions(X))
    assert (view.transaction_state, view.producer_epoch, view.partitions) == (ONGOING, 0, (FIRST,))
    assert talk.ask(ListTransactions(frozenset({ONGOING}))).transactions == (ListedTransaction(X, 0, ONGOING),)


def test_every_transaction_has_an_epoch_of_its_own(talk):
    for epoch in range(3):
        assert talk.produce(epoch).error_code is OK
        assert talk.ended(epoch, epoch != 1) == EndTxnResponse(OK, 0, epoch + 1)
    assert talk.committed() == ("0:0:0", "0:2:0")


def test_the_epoch_is_raised_when_the_end_is_decided_and_its_markers_carry_it(talk):
    talk.produce(0)
    talk.end(0)
    assert talk.shown == (PREPARE_COMMIT, 0, 1)
    talk.settle()
    assert talk.shown == (COMPLETE_COMMIT, 0, 1)
    batches = talk.ask(Fetch(FIRST, 0)).batches
    assert [(batch.control, batch.producer_epoch) for batch in batches] == [("", 0), ("commit", 1)]


@pytest.mark.parametrize("committed", [True, False])
def test_a_repeated_end_succeeds_with_the_same_next_epoch(talk, committed):
    talk.produce(0)
    first = talk.ended(0, committed)
    assert [talk.end(0, committed) for _ in range(2)] == [first, first] == [EndTxnResponse(OK, 0, 1)] * 2
    assert talk.end(0, not committed).error_code is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("again", [True, False])
def test_an_end_is_answered_not_yet_while_markers_are_written(talk, again):
    talk.produce(0)
    talk.end(0)
    assert talk.end(0, again).error_code is ErrorCode.CONCURRENT_TRANSACTIONS
    assert talk.end(1, again).error_code is ErrorCode.CONCURRENT_TRANSACTIONS
    assert talk.produce(1, place=OTHER).error_code is ErrorCode.CONCURRENT_TRANSACTIONS
    assert talk.init().error_code is ErrorCode.CONCURRENT_TRANSACTIONS


def test_a_commit_of_nothing_is_refused_and_an_abort_of_nothing_raises_the_epoch(talk):
    assert talk.end(0).error_code is ErrorCode.INVALID_TXN_STATE
    assert talk.end(0, committed=False) == EndTxnResponse(OK, 0, 1)
    assert talk.shown == (PREPARE_ABORT, 0, 1)
    talk.settle()
    assert talk.shown == (COMPLETE_ABORT, 0, 1)
    assert talk.end(1).error_code is ErrorCode.INVALID_TXN_STATE
    assert talk.ended(1, committed=False) == EndTxnResponse(OK, 0, 2)


def test_a_late_end_does_not_touch_the_next_transaction(talk):
    talk.produce(0)
    talk.ended(0)
    talk.produce(1)
    for committed in (True, False):
        assert talk.end(0, committed).error_code is ErrorCode.PRODUCER_FENCED
    assert talk.shown == (ONGOING, 0, 1)


def test_a_late_message_does_not_join_the_next_transaction(talk):
    talk.produce(0)
    talk.ended(0)
    talk.produce(1)
    for place in (FIRST, OTHER):
        assert talk.produce(0, 1, place).error_code is ErrorCode.INVALID_PRODUCER_EPOCH
    talk.ended(1)
    assert talk.committed() == ("0:0:0", "0:1:0")


def test_a_repeated_message_is_written_once_and_has_the_first_ones_offset(talk):
    assert [talk.produce(0) for _ in range(2)] == [ProduceResponse(OK, 0)] * 2
    talk.end(0)
    assert talk.produce(0) == ProduceResponse(OK, 0)  # its marker is not written yet
    talk.settle()
    assert talk.produce(0).error_code is ErrorCode.INVALID_PRODUCER_EPOCH
    assert talk.committed() == ("0:0:0",)


def test_sequences_begin_at_zero_in_every_transaction(talk):
    assert talk.produce(0, 1).error_code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert talk.produce(0, 0).error_code is OK
    assert talk.produce(0, 1).error_code is OK
    talk.ended(0)
    assert talk.produce(1, 2).error_code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert talk.produce(1, 0).error_code is OK


def test_a_refused_first_message_has_added_its_partition_already(talk):
    assert talk.produce(0, 1).error_code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert talk.shown == (ONGOING, 0, 0)
    assert talk.ended(0) == EndTxnResponse(OK, 0, 1)


def test_a_timed_out_transaction_is_aborted_under_the_next_epoch(talk):
    talk.produce(0)
    talk.broker = environment.write_markers(environment.time_out(talk.broker, X))
    assert talk.shown == (COMPLETE_ABORT, 0, 1)
    assert talk.end(0).error_code is ErrorCode.INVALID_TXN_STATE
    assert talk.produce(0, 1).error_code is ErrorCode.INVALID_PRODUCER_EPOCH
    assert talk.end(0, committed=False) == EndTxnResponse(OK, 0, 1)  # the abort learns the epoch, and the owner goes on
    assert talk.produce(1).error_code is OK


def test_the_longest_timeout_never_comes():
    talk = Talk(max_timeout_ms=NEVER_MS)
    talk.init(NEVER_MS)
    talk.produce(0)
    talk.broker = environment.advance_clock(talk.broker, NEVER_MS * 10)
    assert environment.overdue(talk.broker) == ()
    assert environment.time_out(talk.broker, X) == talk.broker


def test_an_initialisation_aborts_what_is_open_and_then_fences(talk):
    talk.produce(0)
    assert talk.init().error_code is ErrorCode.CONCURRENT_TRANSACTIONS
    talk.settle()
    assert talk.shown == (COMPLETE_ABORT, 0, 1)
    assert talk.end(0).error_code is ErrorCode.INVALID_TXN_STATE
    assert talk.init() == InitProducerIdResponse(OK, 0, 2)
    assert talk.shown == (EMPTY, 0, 2)
    assert talk.end(0).error_code is ErrorCode.PRODUCER_FENCED
    assert talk.produce(0, 1).error_code is ErrorCode.INVALID_PRODUCER_EPOCH
    assert talk.committed() == ()


def test_an_initialisation_after_a_complete_transaction_raises_the_epoch(talk):
    talk.produce(0)
    talk.ended(0)
    assert talk.init() == InitProducerIdResponse(OK, 0, 2)
    assert talk.end(0).error_code is ErrorCode.PRODUCER_FENCED
    assert talk.committed() == ("0:0:0",)


def test_two_phase_commit_is_taken_where_it_is_enabled_and_has_no_timeout():
    talk = Talk(two_phase_commit=True)
    assert talk.init(0, enable_2pc=True) == InitProducerIdResponse(OK, 0, 0)
    assert talk.ask(DescribeTransactions(X)).transaction_timeout_ms == NEVER_MS


def test_two_phase_commit_is_refused_where_it_is_disabled_and_not_understood_where_it_is_not_offered():
    assert Talk(two_phase_commit=False).init(enable_2pc=True).error_code is (
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    )
    with pytest.raises(ValueError, match="version 6"):
        Talk().init(enable_2pc=True)


def test_a_partition_can_be_added_without_a_message(talk):
    """As an older client does, and as it is done to end what a forgotten marker has left open."""
    assert talk.ask(AddPartitionsToTxn(X, 0, 0, (OTHER,))).error_codes == (OK,)
    assert talk.end(0) == EndTxnResponse(OK, 0, 1)
    talk.settle()
    [shown] = talk.ask(DescribeProducers(OTHER)).active_producers
    assert (shown.producer_epoch, shown.current_txn_start_offset) == (1, -1)


def test_group_offsets_add_their_partition_and_share_the_outcome(talk):
    assert talk.commit_offsets(0, 7) is OK
    assert talk.ask(OffsetFetch("g", FIRST)).committed_offset == -1
    talk.ended(0)
    assert talk.ask(OffsetFetch("g", FIRST)).committed_offset == 7
    assert talk.commit_offsets(0, 6) is ErrorCode.INVALID_PRODUCER_EPOCH
    talk.commit_offsets(1, 9)
    talk.ended(1, committed=False)
    assert talk.ask(OffsetFetch("g", FIRST)).committed_offset == 7


def test_producers_are_shown_with_the_epoch_of_the_open_transaction_then_with_the_markers(talk):
    def shown():
        [view] = talk.ask(DescribeProducers(FIRST)).active_producers
        return view.producer_epoch, view.last_sequence, view.current_txn_start_offset

    talk.produce(0)
    assert shown() == (0, 0, 0)
    talk.ended(0)
    assert shown() == (1, -1, -1)


def test_a_forgotten_marker_lets_the_next_transaction_join_and_take_the_last_one_with_it(talk):
    talk.produce(0)
    talk.end(0)
    talk.broker = environment.forget_marker(talk.broker, X, FIRST)
    assert talk.shown == (COMPLETE_COMMIT, 0, 1)
    [shown] = talk.ask(DescribeProducers(FIRST)).active_producers
    assert (shown.producer_epoch, shown.current_txn_start_offset) == (0, 0)  # evidence that the marker is missing
    assert talk.produce(1) == ProduceResponse(OK, 1)
    talk.ended(1, committed=False)
    assert talk.committed() == ()


def test_a_suspended_leader_without_a_session_gets_no_marker(talk):
    talk.produce(0)
    talk.broker = environment.lose_leader(environment.suspend(talk.broker, FIRST), FIRST)
    talk.ended(0)
    talk.broker = environment.resume(talk.broker, FIRST)
    assert talk.shown == (COMPLETE_COMMIT, 0, 1)
    assert producer(partition(talk.broker, FIRST), 0).txn_start == 0


def test_the_marker_of_a_version_2_transaction_must_be_later_than_its_messages(talk):
    talk.produce(0)
    for version, expected in ((2, ErrorCode.INVALID_PRODUCER_EPOCH), (1, OK)):
        marker = WriteTxnMarkers(0, 0, False, (FIRST,), 0, version)
        assert talk.ask(marker).error_codes == (expected,)
    assert talk.committed() == ()


def test_a_late_second_marker_is_written_and_ends_nothing(talk):
    talk.produce(0)
    talk.ended(0)
    marker = WriteTxnMarkers(0, 1, False, (FIRST,), 0, 2)
    assert talk.ask(marker).error_codes == (OK,)
    talk.produce(1)
    assert talk.ask(marker).error_codes == (ErrorCode.INVALID_PRODUCER_EPOCH,)
    assert talk.committed() == ("0:0:0",)


def test_the_last_epoch_is_followed_by_another_producer_id(talk):
    talk.shift(LAST_EPOCH)
    talk.produce(LAST_EPOCH)
    assert talk.end(LAST_EPOCH) == EndTxnResponse(OK, 1, 0)
    assert talk.shown == (PREPARE_COMMIT, 0, LAST_EPOCH + 1)
    talk.settle()
    assert talk.shown == (COMPLETE_COMMIT, 1, 0)
    assert talk.end(LAST_EPOCH) == EndTxnResponse(OK, 1, 0)
    assert talk.produce(0, producer_id=1).error_code is OK
    assert talk.end(LAST_EPOCH).error_code is ErrorCode.INVALID_PRODUCER_ID_MAPPING


@pytest.mark.parametrize("fenced_by", ["another producer", "time"])
def test_a_fence_of_the_last_epoch_leads_to_another_producer_id(talk, fenced_by):
    talk.shift(LAST_EPOCH)
    talk.produce(LAST_EPOCH)
    if fenced_by == "time":
        talk.broker = environment.time_out(talk.broker, X)
    else:
        assert talk.init().error_code is ErrorCode.CONCURRENT_TRANSACTIONS
    talk.settle()
    assert talk.shown == (COMPLETE_ABORT, 1, 0)
    assert talk.end(LAST_EPOCH, committed=False) == EndTxnResponse(OK, 1, 0)
    assert talk.end(LAST_EPOCH).error_code is ErrorCode.INVALID_TXN_STATE
    assert talk.init() == InitProducerIdResponse(OK, 1, 1)


def test_a_repeated_initialisation_that_got_the_last_epoch_is_a_fault_of_the_broker_and_changes_nothing(talk):
    talk.shift(LAST_EPOCH - 1)
    expected = {"producer_id": 0, "producer_epoch": LAST_EPOCH - 1}
    assert talk.init(**expected) == InitProducerIdResponse(OK, 0, LAST_EPOCH)
    assert talk.init(**expected) == InitProducerIdResponse(ErrorCode.UNKNOWN_SERVER_ERROR)
    assert talk.shown == (EMPTY, 0, LAST_EPOCH)
    assert talk.produce(LAST_EPOCH).error_code is OK
    assert talk.end(LAST_EPOCH) == EndTxnResponse(OK, 1, 0)


def test_what_is_acknowledged_survives_a_restart(talk):
    talk.produce(0)
    talk.end(0)
    talk.broker = environment.restart(talk.broker)
    assert talk.end(0).error_code is ErrorCode.CONCURRENT_TRANSACTIONS
    talk.settle()
    assert talk.end(0) == EndTxnResponse(OK, 0, 1)
    assert talk.ask(Fetch(FIRST, 0, READ_COMMITTED)).last_stable_offset == 2


def test_a_forgotten_id_is_unknown(talk):
    talk.produce(0)
    talk.ended(0)
    talk.broker = environment.expire_transactional_id(talk.broker, X)
    assert talk.end(0).error_code is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert talk.produce(1).error_code is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert talk.init() == InitProducerIdResponse(OK, 1, 0)
