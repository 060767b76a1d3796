"""Each verb of a native producer, for each kind of answer: over its own sender and requests, on a simulated broker."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
from harness.simulated import TOPIC, simulated
from simulator import environment, scheduler
from simulator.broker import handle
from simulator.requests import (
    NEVER_MS,
    DescribeTransactions,
    EndTxn,
    EndTxnResponse,
    ErrorCode,
    ErrorResponse,
    InitProducerId,
    InitProducerIdResponse,
    Produce,
    ProduceResponse,
    TxnOffsetCommit,
    WriteTxnMarkers,
)
from simulator.state import OFFSETS_TOPIC, offsets_partition, transaction, with_transaction
from simulator.wire import SimulatedBrokers, make_wire

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    TransactionAborted,
    Unavailable,
)
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.native import arrow
from dualwrite.kafka.native import producer as instance
from dualwrite.kafka.native.sender import Sender
from dualwrite.kafka.producer import LaneProducer
from dualwrite.protocol.lives import ProducerState
from dualwrite.protocol.prepared_state import Engine

KAFKA_ID = "orders.n.1"
CONFIG = {"bootstrap.servers": "simulated:9092", "linger.ms": 0}
NOT_LEADER, MESSAGE_TOO_LARGE, COORDINATOR_LOADING, REBALANCE_IN_PROGRESS, OPERATION_FAILED = 6, 10, 14, 27, -1
UNKNOWN_TOPIC_ID = 100
CONCURRENT = ErrorCode.CONCURRENT_TRANSACTIONS
_REFUSALS = {
    InitProducerId: InitProducerIdResponse,
    Produce: ProduceResponse,
    EndTxn: EndTxnResponse,
    TxnOffsetCommit: ErrorResponse,
}


def _said(value):
    return value.name if isinstance(value, ErrorCode) else getattr(value, "__name__", str(value))


class Kafka:
    """A simulated cluster of transaction version 2, and one process with one producer.

    Attributes:
        sent: All requests that came to the broker, in order.
    """

    def __init__(self, servers, monkeypatch):
        self.servers = servers
        self.simulation = servers.simulation
        self.broker = self.broker._replace(max_timeout_ms=NEVER_MS, transaction_version=2)
        self.sent = []
        self._answers = {}
        monkeypatch.setattr(scheduler, "handle", self._handle)

    @property
    def broker(self):
        return self.simulation.broker

    @broker.setter
    def broker(self, broker):
        self.simulation.broker = broker

    def _handle(self, broker, request):
        self.sent.append(request)
        answers = self._answers.get(type(request))
        if answers:
            code = answers.pop(0)
            return broker, _REFUSALS[type(request)](code)
        return handle(broker, request)

    def answers(self, kind, *codes):
        """Answer the next requests of that kind with these errors, and do nothing."""
        self._answers[kind] = list(codes)

    def count(self, kind):
        return sum(isinstance(request, kind) for request in self.sent)

    def run(self, work, **config):
        """Run the work in a process with a producer; returns its result."""
        return self.start(work, **config).result()

    def start(self, work, **config):
        self.running = self.servers.start(lambda here: work(producer(here, **config)))
        return self.running

    def cut_off(self, *labels):
        """From now on none of these requests arrives."""
        self.running.cut_off(*labels)

    def known(self):
        return transaction(self.broker, KAFKA_ID)

    def set_epoch(self, epoch):
        self.broker = with_transaction(self.broker, self.known()._replace(producer_epoch=epoch))


def producer(here, *, bulk=False, call_timeout_s=30.0, **config):
    return LaneProducer(
        KafkaConfig.parse(CONFIG | config),
        KAFKA_ID,
        coordinator=here.context.coordinator,
        incarnation=1,
        call_timeout_s=call_timeout_s,
        engine="native",
        bulk=bulk,
        make_wire=make_wire(here.simulation),
    )


@pytest.fixture
def kafka(monkeypatch):
    with simulated() as servers:
        yield Kafka(servers, monkeypatch)


def begun(sending, *values, partition=0):
    sending.init_transactions()
    write(sending, *values, partition=partition)
    return sending


def write(sending, *values, partition=0, **kwargs):
    sending.begin_transaction()
    for value in values:
        sending.produce(TOPIC, value, partition=partition, **kwargs)


def refused_with(error, verb):
    with pytest.raises(error) as raised:
        verb()
    return raised.value


# What is sent, and what the state names


def test_each_transaction_has_the_epoch_that_the_answer_to_the_one_before_has_named(kafka):
    def work(sending):
        begun(sending, "a")
        first = sending.prepare_transaction()
        sending.commit_transaction()
        write(sending, "b")
        second = sending.prepare_transaction()
        sending.commit_transaction()
        return first, second

    first, second = kafka.run(work)
    assert (second.producer_id, second.epoch) == (first.producer_id, first.epoch + 1)
    ends = [request.producer_epoch for request in kafka.sent if isinstance(request, EndTxn)]
    assert ends == [first.epoch, second.epoch]
    assert kafka.servers.visible() == ["a", "b"]


def test_the_state_names_the_engine_and_every_partition_with_its_topic(kafka):
    def work(sending):
        begun(sending, "a")
        sending.produce(TOPIC, "b", partition=1)
        sending.produce(TOPIC, "c", partition=1)
        return sending.prepare_transaction()

    state = kafka.run(work)
    assert state.engine is Engine.NATIVE
    assert state.partitions == {(TOPIC, 0), (TOPIC, 1)}
    assert state.topic_ids.keys() == {TOPIC}
    assert {(first.partition, first.offset) for first in state.first_offsets} == {(0, 0), (1, 0)}


def test_nothing_is_prepared_before_every_batch_is_acknowledged(kafka):
    kafka.answers(Produce, CONCURRENT, COORDINATOR_LOADING)

    def work(sending):
        begun(sending, "a").prepare_transaction()
        return kafka.servers.simulation.broker

    kafka.run(work)
    sequences = [request.base_sequence for request in kafka.sent if isinstance(request, Produce)]
    assert sequences == [0, 0, 0]  # a repeated batch keeps its number
    assert any(one.batches for one in kafka.broker.partitions)


def test_a_batch_behind_a_repeated_one_has_its_own_number(kafka):
    kafka.answers(Produce, CONCURRENT)

    def work(sending):
        begun(sending, "a", "b").prepare_transaction()
        sending.commit_transaction()

    kafka.run(work, **{"batch.num.messages": 1})
    assert kafka.servers.visible() == ["a", "b"]


def test_a_batch_without_an_answer_is_written_once(kafka):
    def work(sending):
        begun(sending, "a").prepare_transaction()
        sending.commit_transaction()

    running = kafka.start(work).before("Produce")
    running.lose_answer()
    running.result()
    assert kafka.servers.visible() == ["a"]


def test_the_states_offsets_are_those_of_its_own_transaction(kafka):
    def work(sending):
        begun(sending, "a").prepare_transaction()
        sending.commit_transaction()
        write(sending, "b")
        return sending.prepare_transaction()

    [first] = kafka.run(work).first_offsets
    assert first.offset == 2  # behind "a" and its marker


@pytest.mark.parametrize(("rows", "requests"), [(10, [20]), (30, [23, 45, 60])])
def test_columns_are_sent_once_they_fill_a_request_and_at_their_end(kafka, monkeypatch, rows, requests):
    sent = []
    pump = Sender.pump

    def counted(sender):
        sent.append(sender._core.queued_messages)
        pump(sender)

    monkeypatch.setattr(Sender, "pump", counted)
    monkeypatch.setattr(arrow, "_PIECE_BYTES", 1000)

    def work(sending):
        sending.init_transactions()
        sending.begin_transaction()
        values, partitions = pa.array([b"x" * 90] * 2 * rows), pa.array([0, 1] * rows)
        sending.produce_arrow(TOPIC, values, partitions=partitions)
        sending.prepare_transaction()

    kafka.run(work, **{"message.max.bytes": 2000})
    assert sent == requests


def test_a_transaction_without_messages_sends_nothing(kafka):
    def work(sending):
        sending.init_transactions()
        sending.begin_transaction()
        state = sending.prepare_transaction()
        sending.commit_transaction()
        sending.begin_transaction()
        sending.abort_transaction()
        return state, sending.state

    state, left = kafka.run(work)
    assert not state.has_transaction
    assert left is ProducerState.READY
    assert kafka.count(EndTxn) == kafka.count(Produce) == 0


def test_consumed_offsets_are_a_part_of_the_transaction(kafka):
    def work(sending):
        sending.init_transactions()
        sending.begin_transaction()
        offset = SimpleNamespace(topic=TOPIC, partition=0, offset=7, leader_epoch=None, metadata=None)
        sending.send_offsets_to_transaction([offset], SimpleNamespace(group_id="readers"))
        state = sending.prepare_transaction()
        sending.commit_transaction()
        return state

    state = kafka.run(work)
    assert {topic for topic, _ in state.partitions} == {OFFSETS_TOPIC}
    assert kafka.known().state == "CompleteCommit"


def test_the_coordinator_is_asked_once_where_a_groups_offsets_are_written(kafka):
    def work(sending):
        sending.init_transactions()
        states = []
        for _ in range(3):
            sending.begin_transaction()
            consumed(sending)
            states.append(sending.prepare_transaction())
            sending.commit_transaction()
        return states

    before = kafka.count(DescribeTransactions)
    states = kafka.run(work)
    assert kafka.count(DescribeTransactions) - before <= 2  # one looks at the id before the producer begins
    assert len({frozenset(state.partitions) for state in states}) == 1
    firsts = [first.offset for state in states for first in state.first_offsets]
    assert sorted(set(firsts)) == firsts, "each names its own first offset"


def consumed(sending, group="readers"):
    offset = SimpleNamespace(topic=TOPIC, partition=0, offset=7, leader_epoch=None, metadata=None)
    sending.send_offsets_to_transaction([offset], SimpleNamespace(group_id=group))


def test_offsets_of_a_topic_that_was_made_again_are_refused_and_its_id_is_looked_up_again(kafka, monkeypatch):
    looked_up = []
    shown = SimulatedBrokers.metadata
    monkeypatch.setattr(
        SimulatedBrokers,
        "metadata",
        lambda self, topics, *more, **named: looked_up.extend(topics) or shown(self, topics, *more, **named),
    )

    def work(sending):
        sending.init_transactions()
        sending.begin_transaction()
        consumed(sending)
        consumed(sending)
        known = looked_up.count(TOPIC)
        kafka.answers(TxnOffsetCommit, UNKNOWN_TOPIC_ID)
        error = refused_with(TransactionAborted, lambda: consumed(sending))
        sending.abort_transaction()
        sending.begin_transaction()
        consumed(sending)
        return known, error, looked_up.count(TOPIC)

    known, error, afterwards = kafka.run(work)
    assert (known, afterwards) == (1, 2)
    assert not error.retryable
    assert (
        error.next_step
        == "a consumed topic was deleted or recreated: poll the consumer again instead of retrying this work"
    )


@pytest.mark.parametrize("arrives", [True, False])
def test_consumed_offsets_without_an_answer_end_the_producer_and_name_where_they_may_be(kafka, arrives):
    def work(sending):
        begun(sending, "a")
        refused_with(Unavailable, lambda: consumed(sending))
        return sending.doubtful, sending.undecided_in

    running = kafka.start(work).before("TxnOffsetCommit")
    if arrives:
        running.lose_answer()
    running.cut_off("TxnOffsetCommit")
    assert running.result() == (True, {(TOPIC, 0), offsets_partition(kafka.broker, "readers")})


def test_consumed_offsets_are_named_by_a_producer_that_ends_before_it_has_prepared_them(kafka):
    def work(sending):
        begun(sending, "a")
        consumed(sending)
        kafka.cut_off("EndTxn")
        refused_with(Unavailable, sending.abort_transaction)
        return sending.doubtful, sending.undecided_in

    assert kafka.run(work) == (True, {(TOPIC, 0), offsets_partition(kafka.broker, "readers")})


@pytest.mark.parametrize("held", [True, False])
def test_an_abort_ends_a_producer_whose_refused_offsets_may_come_a_second_time(kafka, held):
    """The copy that was not answered may be carried out after the abort has asked where the transaction is."""

    def work(sending):
        begun(sending, "a")
        refused_with(TransactionAborted, lambda: consumed(sending))
        sending.abort_transaction()
        undecided = sending.undecided_in
        if held:
            refused_with(TransactionAborted, sending.begin_transaction)
        else:
            sending.begin_transaction()
        return undecided, sending.doubtful

    kafka.answers(TxnOffsetCommit, REBALANCE_IN_PROGRESS)
    running = kafka.start(work).before("TxnOffsetCommit")
    if held:
        kafka.simulation.hold(running.process)
    partitions = {(TOPIC, 0), offsets_partition(kafka.broker, "readers")} if held else {(TOPIC, 0)}
    assert running.result() == (partitions, held)


# The first request


def test_a_producer_whose_first_request_is_not_answered_is_thrown_away_and_asks_no_second_time(kafka):
    def work(sending):
        error = refused_with(Unavailable, sending.init_transactions)
        return error, sending.doubtful

    running = kafka.start(work)
    kafka.cut_off("InitProducerId")
    error, doubtful = running.result()
    assert doubtful
    assert "not answered" in error.what
    assert kafka.count(InitProducerId) == 0  # none arrived, and the one that was lost may still come


def test_the_first_request_is_sent_at_most_once_without_an_answer(kafka):
    running = kafka.start(lambda sending: refused_with(Unavailable, sending.init_transactions))
    running.before("InitProducerId").lose_answer()
    running.result()
    assert kafka.count(InitProducerId) == 1


def test_an_answer_that_says_not_yet_is_followed_by_another_first_request(kafka):
    kafka.answers(InitProducerId, CONCURRENT, COORDINATOR_LOADING)

    def work(sending):
        sending.init_transactions()
        return sending.state

    assert kafka.run(work) is ProducerState.READY
    assert kafka.count(InitProducerId) == 3


def test_a_right_that_is_missing_at_the_first_request_is_named(kafka):
    refused = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    kafka.answers(InitProducerId, refused, refused)
    error = kafka.run(lambda sending: refused_with(ConfigurationError, sending.init_transactions))
    assert KAFKA_ID in error.next_step


def test_two_phase_commit_is_asked_for_where_the_broker_offers_it(kafka):
    kafka.broker = kafka.broker._replace(two_phase_commit=True, max_timeout_ms=900_000)
    kafka.run(lambda sending: sending.init_transactions())
    assert kafka.known().timeout_ms == NEVER_MS
    assert kafka.count(InitProducerId) == 1


def test_a_broker_that_refuses_two_phase_commit_is_asked_for_its_longest_limit(kafka):
    kafka.broker = kafka.broker._replace(two_phase_commit=False, max_timeout_ms=900_000)

    def work(sending):
        sending.init_transactions()
        return sending.transaction_timeout_ms

    assert kafka.run(work) == kafka.known().timeout_ms == 900_000
    assert [request.enable_2pc for request in kafka.sent if isinstance(request, InitProducerId)] == [True, False]


# Messages


@pytest.mark.parametrize(
    ("code", "error", "left"),
    [
        (MESSAGE_TOO_LARGE, TransactionAborted, ProducerState.FAILED),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, TransactionAborted, ProducerState.FAILED),
        (ErrorCode.INVALID_TXN_STATE, TransactionAborted, ProducerState.DOUBTFUL),
        (ErrorCode.TRANSACTION_ABORTABLE, TransactionAborted, ProducerState.DOUBTFUL),
        (ErrorCode.INVALID_PRODUCER_ID_MAPPING, TransactionAborted, ProducerState.DOUBTFUL),
        (ErrorCode.INVALID_PRODUCER_EPOCH, Fenced, ProducerState.DOUBTFUL),
        (ErrorCode.PRODUCER_FENCED, Fenced, ProducerState.DOUBTFUL),
        (OPERATION_FAILED, TransactionAborted, ProducerState.DOUBTFUL),
    ],
)
def test_a_refused_message_fails_the_transaction_or_the_producer(kafka, code, error, left):
    kafka.answers(Produce, code)

    def work(sending):
        begun(sending, "a")
        refused_with(error, sending.prepare_transaction)
        return sending.state

    assert kafka.run(work) is left


def test_a_producer_goes_on_after_a_refused_message(kafka):
    kafka.answers(Produce, MESSAGE_TOO_LARGE)

    def work(sending):
        begun(sending, "a")
        refused_with(TransactionAborted, sending.prepare_transaction)
        epoch = sending.epoch
        sending.abort_transaction()
        return epoch

    epoch = kafka.run(work)
    assert kafka.count(EndTxn) == 1  # it may have reached a broker before
    assert kafka.known().producer_epoch == epoch + 1


def test_a_message_without_an_acknowledgement_stops_the_preparation(kafka):
    def work(sending):
        begun(sending, "a")
        kafka.cut_off("Produce")
        error = refused_with(Unavailable, sending.prepare_transaction)
        return error, sending.state

    error, left = kafka.run(work)
    assert "not every message was acknowledged" in error.what
    assert left is ProducerState.FAILED


def test_messages_that_no_leader_takes_fail_after_their_own_time(kafka):
    def work(sending):
        begun(sending, "a")
        kafka.cut_off("Produce")
        error = refused_with(TransactionAborted, sending.prepare_transaction)
        return error, sending.state

    error, left = kafka.run(work, **{"message.timeout.ms": 5000})
    assert "did not acknowledge its messages in time" in error.what
    assert left is ProducerState.FAILED


def test_a_full_queue_waits_for_the_leaders_and_then_fails(kafka):
    def work(sending):
        sending.init_transactions()
        kafka.cut_off("Produce")
        sending.begin_transaction()
        error = refused_with(Unavailable, lambda: sending.produce(TOPIC, "a", partition=0))
        return error, sending.state

    error, left = kafka.run(work, **{"queue.buffering.max.messages": 1})
    assert "queue stayed full" in error.what
    assert left is ProducerState.FAILED


def test_a_full_queue_goes_on_once_there_is_room(kafka):
    def work(sending):
        begun(sending, "a", "b", "c").prepare_transaction()
        sending.commit_transaction()

    kafka.run(work, **{"queue.buffering.max.messages": 1})
    assert kafka.servers.visible() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("topic", "partition"), [("nowhere", 0), (TOPIC, 7)], ids=["unknown topic", "unknown partition"]
)
def test_what_does_not_exist_is_refused_at_once(kafka, topic, partition):
    def work(sending):
        sending.init_transactions()
        sending.begin_transaction()
        error = refused_with(TransactionAborted, lambda: sending.produce(topic, "a", partition=partition))
        return error, sending.state

    error, left = kafka.run(work)
    assert "there is no topic" in error.what or "has no partition" in error.what
    assert left is ProducerState.FAILED


# Callbacks


def test_callbacks_get_the_offsets(kafka):
    told = []

    def work(sending):
        sending.init_transactions()
        write(sending, "a", "b", on_delivery=lambda error, message: told.append((error, message.offset())))
        sending.prepare_transaction()

    kafka.run(work)
    assert told == [(None, 0), (None, 1)]


def test_a_call_that_waits_for_callbacks_finds_the_leader_that_has_moved(kafka):
    told = []

    def work(sending):
        sending.init_transactions()
        kafka.answers(Produce, NOT_LEADER)
        write(sending, "a", on_delivery=lambda error, _: told.append(error))
        for _ in range(100):
            if told:
                break
            sending.poll(1)
        sending.abort_transaction()

    kafka.run(work)
    assert told == [None]


def test_callbacks_of_what_an_abort_drops_are_told_so(kafka):
    told = []

    def work(sending):
        sending.init_transactions()
        kafka.cut_off("Produce")
        write(sending, "a", on_delivery=lambda error, _: told.append(error.name()))
        sending.abort_transaction()

    kafka.run(work)
    assert told == ["_PURGE_QUEUE"]


def test_an_exception_of_a_callback_comes_from_the_preparation_and_decides_nothing(kafka):
    def fail(*_):
        raise LookupError

    def work(sending):
        sending.init_transactions()
        write(sending, "a", on_delivery=fail)
        refused_with(LookupError, sending.prepare_transaction)
        return sending.state

    assert kafka.run(work) is ProducerState.BEGUN


# The end


@pytest.mark.parametrize("committed", [True, False])
def test_an_end_without_an_answer_is_sent_again_and_names_the_same_next_epoch(kafka, committed):
    def work(sending):
        begun(sending, "a").prepare_transaction()
        epoch = sending.epoch
        (sending.commit_transaction if committed else sending.abort_transaction)()
        left = sending.epoch - epoch, sending.state
        write(sending, "b")
        sending.prepare_transaction()
        sending.commit_transaction()
        return left

    running = kafka.start(work)
    running.before("EndTxn").lose_answer()
    assert running.result() == (1, ProducerState.READY)
    assert kafka.servers.visible() == ["a", "b"][not committed :]


def test_a_commit_that_is_never_answered_is_pending_and_the_producer_is_thrown_away(kafka):
    def work(sending):
        begun(sending, "a")
        state = sending.prepare_transaction()
        kafka.cut_off("EndTxn")
        error = refused_with(CompletionPending, sending.commit_transaction)
        return error, state, sending.prepared_state, sending.doubtful, sending.undecided_in

    error, state, kept, doubtful, undecided = kafka.run(work)
    assert error.outcome == "decided"
    assert kept == state
    assert doubtful
    assert undecided == frozenset()


def test_an_abort_that_is_never_answered_names_where_it_may_be_open(kafka):
    def work(sending):
        begun(sending, "a").prepare_transaction()
        kafka.cut_off("EndTxn")
        refused_with(Unavailable, sending.abort_transaction)
        return sending.doubtful, sending.prepared_state, sending.undecided_in

    doubtful, kept, undecided = kafka.run(work)
    assert doubtful
    assert kept is not None
    assert undecided == {(TOPIC, 0)}


def test_an_abort_of_what_was_not_prepared_and_is_never_answered_names_where_it_may_be_open(kafka):
    def work(sending):
        begun(sending, "a")
        kafka.cut_off("EndTxn")
        refused_with(Unavailable, sending.abort_transaction)
        return sending.doubtful, sending.undecided_in

    assert kafka.run(work) == (True, {(TOPIC, 0)})


@pytest.mark.parametrize(
    ("code", "error", "outcome"),
    [
        (ErrorCode.INVALID_TXN_STATE, CompletionPending, "decided"),
        (ErrorCode.INVALID_PRODUCER_ID_MAPPING, CompletionPending, "decided"),
        (ErrorCode.PRODUCER_FENCED, Fenced, "unknown"),
        (ErrorCode.INVALID_PRODUCER_EPOCH, Fenced, "unknown"),
        (ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, CompletionPending, "decided"),
    ],
    ids=_said,
)
def test_a_refused_commit_is_no_abort(kafka, code, error, outcome):
    """Whatever the broker says, the database has decided: only a look shows how the transaction ended."""
    kafka.answers(EndTxn, code)

    def work(sending):
        begun(sending, "a").prepare_transaction()
        return refused_with(error, sending.commit_transaction), sending.doubtful

    raised, doubtful = kafka.run(work)
    assert raised.outcome == outcome
    assert not isinstance(raised, DecidedTransactionLost)
    assert doubtful


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.INVALID_TXN_STATE, Unavailable),
        (ErrorCode.PRODUCER_FENCED, Fenced),
        (ErrorCode.INVALID_PRODUCER_ID_MAPPING, Unavailable),
    ],
)
def test_a_refused_abort_ends_the_producer(kafka, code, error):
    kafka.answers(EndTxn, code)

    def work(sending):
        begun(sending, "a")
        refused_with(error, sending.abort_transaction)
        return sending.doubtful

    assert kafka.run(work)


def test_an_abort_with_an_unacknowledged_batch_is_sent_and_ends_the_producer(kafka):
    def work(sending):
        begun(sending, "a")
        kafka.cut_off("Produce")
        sending.abort_transaction()
        undecided = sending.undecided_in
        refused_with(TransactionAborted, sending.begin_transaction)
        return undecided, sending.doubtful

    undecided, doubtful = kafka.run(work)
    assert undecided == {(TOPIC, 0)}
    assert doubtful
    assert [request.committed for request in kafka.sent if isinstance(request, EndTxn)] == [False]


def test_a_late_copy_of_a_batch_is_refused_after_its_abort(kafka):
    def work(sending):
        begun(sending, "a")
        sending.abort_transaction()

    running = kafka.start(work).before("Produce")
    held = kafka.simulation.hold(running.process)
    running.result()
    kafka.simulation.arrive(held)
    assert kafka.known().state == "CompleteAbort"
    assert kafka.servers.visible() == []


def test_nothing_begins_before_the_leaders_have_shown_the_end(kafka):
    def work(sending):
        begun(sending, "a").prepare_transaction()
        kafka.simulation.markers_delayed = True
        sending.commit_transaction()
        refused_with(TransactionAborted, sending.begin_transaction)
        return sending.doubtful

    assert kafka.run(work)


def test_a_producer_begins_once_the_leaders_have_shown_the_end(kafka):
    def work(sending):
        begun(sending, "a").prepare_transaction()
        sending.commit_transaction()
        pending = sending.pending_end is not None
        sending.begin_transaction()
        return pending, sending.pending_end, sending.state

    assert kafka.run(work) == (True, None, ProducerState.BEGUN)


# The look before a decision


def test_a_young_transaction_is_not_looked_at_again(kafka):
    def work(sending):
        begun(sending, "a").prepare_transaction()
        sent = len(kafka.sent)
        sending.require_still_open()
        return len(kafka.sent) - sent

    assert kafka.run(work) == 0


def aged(kafka, happens=None):
    """The work that prepares a transaction, lets something happen, and looks at it two seconds later."""

    def work(sending):
        begun(sending, "a").prepare_transaction()
        kafka.simulation.now_s += 2.0
        if happens is not None:
            happens()
        try:
            sending.require_still_open()
        except DualWriteError as error:
            return error, sending.state
        return None, sending.state

    return work


def test_an_old_transaction_that_is_open_may_be_decided(kafka):
    assert kafka.run(aged(kafka)) == (None, ProducerState.PREPARED)


def test_an_old_transaction_that_another_process_has_ended_may_not(kafka):
    def happens():
        kafka.broker, _ = handle(kafka.broker, InitProducerId(KAFKA_ID, 60_000))
        kafka.broker = environment.write_markers(kafka.broker)

    error, left = kafka.run(aged(kafka, happens))
    assert isinstance(error, TransactionAborted)
    assert left is ProducerState.PREPARED


def test_an_old_transaction_whose_id_another_producer_has_may_not(kafka):
    def happens():
        for _ in range(2):  # the first one aborts
            kafka.broker, _ = handle(kafka.broker, InitProducerId(KAFKA_ID, 60_000))
            kafka.broker = environment.write_markers(kafka.broker)

    error, left = kafka.run(aged(kafka, happens))
    assert isinstance(error, Fenced)
    assert left is ProducerState.DOUBTFUL


def test_an_old_transaction_that_a_tool_has_ended_in_one_partition_may_not(kafka):
    def happens():
        known = kafka.known()
        marker = WriteTxnMarkers(known.producer_id, known.producer_epoch, False, ((TOPIC, 0),), 0)
        kafka.broker, _ = handle(kafka.broker, marker)

    error, left = kafka.run(aged(kafka, happens))
    assert isinstance(error, TransactionAborted)
    assert "ended there by hand" in error.what
    assert left is ProducerState.PREPARED


# Interruptions


@pytest.mark.parametrize("call", ["InitProducerId", "Produce", "EndTxn", "DescribeProducers"])
def test_an_interruption_in_any_verb_makes_the_producer_doubtful(kafka, call):
    seen = {}

    def work(sending):
        seen["producer"] = sending
        begun(sending, "a").prepare_transaction()
        sending.commit_transaction()
        sending.begin_transaction()

    running = kafka.start(work).before(call)
    running.interrupt()
    with pytest.raises(KeyboardInterrupt):
        running.result()
    assert seen["producer"].doubtful


# Epochs


def test_a_producer_is_thrown_away_long_before_its_last_epoch(kafka):
    def work(sending):
        sending.init_transactions()
        sending.close()

    kafka.run(work)
    kafka.set_epoch(instance._EPOCHS - 3)

    def more(sending):
        begun(sending, "a").prepare_transaction()
        sending.commit_transaction()
        first = sending.state
        write(sending, "b")
        sending.prepare_transaction()
        sending.commit_transaction()
        refused_with(IllegalStateError, sending.begin_transaction)
        return first, sending.state

    assert kafka.run(more) == (ProducerState.READY, ProducerState.DOUBTFUL)
    assert kafka.servers.visible() == ["a", "b"]


def test_a_producer_that_gets_one_of_the_last_epochs_goes_on_under_the_next_producer_id(kafka):
    """An id without incarnations, whose epochs no one renews."""

    def work(sending):
        sending.init_transactions()
        sending.close()

    kafka.run(work)
    kafka.set_epoch(2**15 - 3)
    states = []

    def more(sending):
        sending.init_transactions()
        for value in ("a", "b"):
            write(sending, value)
            states.append(sending.prepare_transaction())
            sending.commit_transaction()

    kafka.run(more)
    assert [state.epoch for state in states] == [2**15 - 2, 0]
    assert states[0].producer_id != states[1].producer_id
    assert kafka.servers.visible() == ["a", "b"]


# Close


def test_close_leaves_what_is_prepared_to_the_next_owner(kafka):
    def work(sending):
        begun(sending, "a")
        state = sending.prepare_transaction()
        sending.close()
        return state

    state = kafka.run(work)
    assert kafka.known().state == "Ongoing"

    def completes(sending):
        sending.init_transactions(keep_prepared_txn=True)
        return sending.complete_transaction(state).value

    assert kafka.run(completes) == "committed"
    assert kafka.servers.visible() == ["a"]


def test_what_is_acknowledged_while_a_topic_is_looked_up_does_not_delay_the_next_request():
    """Otherwise nothing would leave until as much waits as before, and a request's worth more."""
    core = SimpleNamespace(queued_bytes=8000, limits=SimpleNamespace(request_bytes=1000))
    resumed = []

    def taking():
        core.queued_bytes = 0
        for _ in range(3):
            core.queued_bytes += 600
            yield

    taker = SimpleNamespace(
        _filling=SimpleNamespace(is_full=False),
        _open=SimpleNamespace(core=core),
        _begin_writing=lambda: None,
        _resume=lambda _: resumed.append(core.queued_bytes),
    )
    instance.NativeInstance._take_all(taker, TOPIC, taking())
    assert resumed == [1800, 1800]
