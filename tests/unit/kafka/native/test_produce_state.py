"""The core of sending: order, repetitions and refusals, against a partition that follows Kafka's rules."""

from dataclasses import replace
from random import Random

import pytest

from dualwrite.kafka.native.produce_state import MAX_IN_FLIGHT, Code, Limits, Meaning, ProduceCore, Refusal
from dualwrite.kafka.native.records import Codec, RecordsBuilder

HERE, THERE = ("t", 0), ("t", 1)
LIMITS = Limits(linger_s=0.0, delivery_s=60.0, topic_s=5.0, first_backoff_s=1.0, longest_backoff_s=8.0)
DONE = (Code.NONE, 0)


def core(limits=LIMITS, *, records=1, leaders=None):
    """A core whose batches hold so many records of one byte."""
    made = ProduceCore(limits, lambda: RecordsBuilder(Codec(), limit_bytes=61 + 8 * records))
    made.learn("t", leaders or {0: 1, 1: 1})
    return made


def append(to, *values, where=HERE, now=0.0):
    for value in values:
        to.append(where, value, None, (), 0, now=now)


def sent(to, now=0.0, *, flush=True):
    return list(to.requests(now, flush=flush))


def sequences(requests, where=HERE):
    return [request.batches[where].sequence for request in requests]


def know(to):
    """Let the first batch of a partition be acknowledged."""
    append(to, b"0")
    [first] = sent(to)
    to.answered(first, {HERE: DONE}, 0.0)


def test_the_first_batch_of_a_partition_goes_alone():
    to = core()
    append(to, b"a", b"b", b"c")
    [first] = sent(to)
    assert sequences([first]) == [0]
    assert not sent(to)
    to.answered(first, {HERE: (Code.NONE, 17)}, 0.0)
    assert sequences(sent(to)) == [1, 2]
    assert to.first_offsets == {HERE: 17}


def test_five_batches_are_in_flight_at_most():
    to = core()
    know(to)
    append(to, *[b"x"] * 9)
    requests = sent(to)
    assert sequences(requests) == [1, 2, 3, 4, 5]
    assert len(requests) == MAX_IN_FLIGHT
    to.answered(requests[0], {HERE: DONE}, 0.0)
    assert sequences(sent(to)) == [6]


@pytest.mark.parametrize("in_flight", range(1, MAX_IN_FLIGHT))
def test_a_user_may_want_fewer_in_flight(in_flight):
    to = core(Limits(in_flight=in_flight))
    know(to)
    append(to, *[b"x"] * 9)
    assert sequences(sent(to)) == list(range(1, in_flight + 1))


def test_what_arrives_while_a_batch_is_in_flight_goes_together():
    to = core(records=100)
    append(to, b"a")
    [first] = sent(to, flush=False)
    append(to, b"b", b"c", b"d")
    to.answered(first, {HERE: DONE}, 0.0)
    [rest] = sent(to, flush=False)
    assert rest.batches[HERE].body.count == 3


def test_it_collects_behind_a_batch_in_flight_even_where_the_leader_takes_more():
    to = core(records=100)
    know(to)
    append(to, b"a")
    [first] = sent(to, flush=False)
    append(to, b"b")
    assert not sent(to, flush=False)
    append(to, b"c")
    to.answered(first, {HERE: DONE}, 0.0)
    [rest] = sent(to, flush=False)
    assert rest.batches[HERE].body.count == 2
    append(to, b"d")
    assert len(sent(to, flush=True)) == 1


def test_a_batch_collects_for_the_linger_unless_it_is_full_or_flushed():
    to = core(Limits(linger_s=5.0), records=2)
    append(to, b"a", now=10.0)
    assert not sent(to, 14.9, flush=False)
    [due] = sent(to, 15.0, flush=False)
    assert due.batches[HERE].body.count == 1
    append(to, b"b", b"c", b"d", now=15.0)
    to.answered(due, {HERE: DONE}, 15.0)
    [full] = sent(to, 15.0, flush=False)
    assert full.batches[HERE].body.count == 2
    assert sent(to, 15.0, flush=True)


def test_one_request_holds_one_batch_of_each_partition_of_a_broker():
    to = core(leaders={0: 1, 1: 2, 2: 1})
    for number in range(3):
        append(to, b"x", where=("t", number))
    assert {request.node: set(request.batches) for request in sent(to)} == {
        1: {("t", 0), ("t", 2)},
        2: {("t", 1)},
    }


def test_a_request_is_divided_where_its_batches_are_too_large_together():
    to = core(Limits(linger_s=0, request_bytes=100))
    append(to, b"x")
    append(to, b"x", where=THERE)
    assert [set(request.batches) for request in sent(to)] == [{HERE}, {THERE}]


def test_a_batch_that_is_not_acknowledged_keeps_its_sequence_number_and_bytes():
    to = core()
    append(to, b"a")
    [first] = sent(to)
    once = first.batches[HERE].body.sealed(7, 3, first.batches[HERE].sequence)
    to.unanswered(first, 0.0)
    assert to.outdated == {"t"}
    assert to.late == {HERE}
    to.learn("t", {0: 2})
    assert not sent(to, 0.9)
    [again] = sent(to, 1.0)
    assert again.node == 2
    assert again.batches[HERE].body.sealed(7, 3, again.batches[HERE].sequence) == once


def test_no_copy_of_a_batch_comes_late_once_all_requests_with_it_are_answered():
    to = core()
    append(to, b"a")
    assert not to.late
    [first] = sent(to)
    assert to.late == {HERE}
    to.answered(first, {HERE: (Code.NOT_LEADER_OR_FOLLOWER, -1)}, 0.0)
    assert not to.late
    to.learn("t", {0: 2})
    [second] = sent(to, to.next_at())
    to.unanswered(second, 1.0)
    to.learn("t", {0: 1})
    [third] = sent(to, to.next_at())
    to.answered(third, {HERE: (Code.MESSAGE_TOO_LARGE, -1)}, 5.0)
    assert to.refusal.code == Code.MESSAGE_TOO_LARGE
    assert to.late == {HERE}, "of the second request"
    assert to.sent_to == {HERE}


def test_a_partition_that_we_may_not_write_to_has_nothing_of_the_transaction():
    to = core()
    append(to, b"a")
    append(to, b"a", where=THERE)
    [first] = sent(to)
    to.answered(first, {HERE: (Code.TOPIC_AUTHORIZATION_FAILED, -1), THERE: DONE}, 0.0)
    assert to.sent_to == {THERE}
    to = core()
    know(to)
    append(to, b"a")
    [second] = sent(to)
    to.answered(second, {HERE: (Code.TOPIC_AUTHORIZATION_FAILED, -1)}, 0.0)
    assert to.sent_to == {HERE}, "it has an earlier batch"


def test_batches_behind_a_failed_one_are_sent_again_behind_it():
    to = core()
    know(to)
    append(to, b"a", b"b", b"c")
    one, two, three = sent(to)
    to.answered(one, {HERE: (Code.NOT_ENOUGH_REPLICAS, -1)}, 0.0)
    to.answered(two, {HERE: (Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)}, 0.0)
    to.answered(three, {HERE: (Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)}, 0.0)
    assert to.refusal is None
    assert not sent(to, 0.5)
    assert sequences(sent(to, 1.0)) == [1, 2, 3]


def test_a_gap_that_no_failed_batch_explains_aborts():
    to = core()
    know(to)
    append(to, b"a")
    [one] = sent(to)
    to.answered(one, {HERE: (Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)}, 0.0)
    assert to.refusal == Refusal(Meaning.ABORT, Code.OUT_OF_ORDER_SEQUENCE_NUMBER, HERE)


def test_a_batch_that_the_broker_has_already_is_acknowledged_without_an_offset():
    to = core()
    append(to, b"a")
    [one] = sent(to)
    [delivered] = to.answered(one, {HERE: (Code.DUPLICATE_SEQUENCE_NUMBER, -1)}, 0.0)
    assert delivered.base_offset == -1
    assert to.is_flushed
    assert to.first_offsets == {HERE: None}


@pytest.mark.parametrize(
    ("code", "meaning"),
    [(Code.MESSAGE_TOO_LARGE, Meaning.ABORT), (Code.INVALID_PRODUCER_EPOCH, Meaning.END), (999, Meaning.END)],
)
def test_nothing_is_sent_after_a_refusal(code, meaning):
    to = core()
    append(to, b"a")
    append(to, b"b", where=THERE)
    [one] = sent(to)
    to.answered(one, {HERE: (code, -1), THERE: (Code.NOT_LEADER_OR_FOLLOWER, -1)}, 0.0)
    assert to.refusal == Refusal(meaning, code, HERE)
    to.learn("t", {0: 1, 1: 1})
    append(to, b"c", where=THERE)
    assert not sent(to, 100.0)


def test_the_end_of_the_incarnation_outweighs_an_abort():
    to = core()
    append(to, b"a")
    append(to, b"b", where=THERE)
    [one] = sent(to)
    to.answered(one, {HERE: (Code.MESSAGE_TOO_LARGE, -1), THERE: (Code.PRODUCER_FENCED, -1)}, 0.0)
    assert to.refusal == Refusal(Meaning.END, Code.PRODUCER_FENCED, THERE)


def test_a_partition_without_a_leader_waits_for_one():
    to = core(leaders={0: None, 1: 1})
    append(to, b"a")
    append(to, b"b", where=THERE)
    [other] = sent(to)
    assert set(other.batches) == {THERE}
    assert to.outdated == {"t"}
    assert not sent(to)
    to.learn("t", {0: None, 1: 1})
    assert to.outdated == {"t"}
    to.learn("t", {0: 3, 1: 1})
    assert not to.outdated
    assert [request.node for request in sent(to)] == [3]


def test_a_topic_that_stays_unknown_aborts():
    to = core()
    append(to, b"a")
    for now in (0.0, 1.0, 3.0, 7.0):
        [one] = sent(to, now)
        to.answered(one, {HERE: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)}, now)
        assert (to.refusal is None) == (now <= 5.0)
        to.learn("t", {0: 1})


def test_a_batch_that_is_never_acknowledged_aborts():
    to = core()
    append(to, b"a")
    [one] = sent(to)
    to.answered(one, {HERE: (Code.NOT_ENOUGH_REPLICAS, -1)}, 0.0)
    assert to.next_at() == 1.0
    to.give_up(60.0)
    assert to.refusal is None
    to.give_up(60.1)
    assert to.refusal == Refusal(Meaning.ABORT, Code.NOT_ENOUGH_REPLICAS, HERE)


def test_only_answers_bring_on_what_waits_for_them():
    to = core()
    append(to, *[b"x"] * 9)
    [first] = sent(to)
    assert to.next_at() == 60.0
    to.answered(first, {HERE: DONE}, 0.0)
    assert len(sent(to)) == MAX_IN_FLIGHT
    assert to.next_at() == 60.0


def test_a_topic_that_no_broker_knows_is_awaited_for_a_while():
    to = core()
    append(to, b"a")
    [one] = sent(to)
    to.unanswered(one, 0.0)
    to.note_missing("t", 5.0)
    assert to.refusal is None
    to.note_missing("t", 5.1)
    assert to.refusal == Refusal(Meaning.ABORT, Code.UNKNOWN_TOPIC_OR_PARTITION, HERE)


def test_a_topic_that_was_made_again_is_another_one():
    to = core()
    to.note_recreated("t")
    assert to.refusal is None  # nothing was sent to it
    append(to, b"a")
    to.note_recreated("t")
    assert to.refusal == Refusal(Meaning.ABORT, Code.UNKNOWN_TOPIC_ID, HERE)


def test_a_topic_holds_nothing_of_a_transaction_that_it_has_refused_or_left_unanswered():
    to = core()
    assert not to.may_have_written("t")
    append(to, b"a")
    assert not to.may_have_written("t")
    [one] = sent(to)
    assert to.may_have_written("t"), "the answer may still come"
    to.answered(one, {HERE: (Code.UNKNOWN_TOPIC_ID, -1)}, 0.0)
    assert not to.may_have_written("t")
    to.learn("t", {0: 1, 1: 1})
    [one] = sent(to, to.next_at())
    to.unanswered(one, 1.0)
    assert not to.may_have_written("t"), "where a topic of another id is found, the former one is gone with all it had"
    to.learn("t", {0: 1, 1: 1})
    [one] = sent(to, to.next_at())
    to.answered(one, {HERE: DONE}, 2.0)
    assert to.may_have_written("t")
    assert not to.may_have_written("another")


def test_pauses_grow():
    to = core()
    append(to, b"a")
    now, pauses = 0.0, []
    for _ in range(6):
        [one] = sent(to, now)
        to.answered(one, {HERE: (Code.NOT_ENOUGH_REPLICAS, -1)}, now)
        pauses.append(to.next_at() - now)
        now = to.next_at()
    assert pauses == [1, 2, 4, 8, 8, 8]


def test_a_message_may_be_refused_for_as_often_as_there_is_time():
    to = core(replace(LIMITS, first_backoff_s=0.001, longest_backoff_s=0.001))
    append(to, b"a")
    now = 0.0
    for _ in range(2_000):
        [one] = sent(to, now)
        to.answered(one, {HERE: (Code.NOT_ENOUGH_REPLICAS, -1)}, now)
        now = to.next_at()
    assert to.refusal is None


def test_queued_bytes_are_those_not_acknowledged():
    to = core()
    append(to, b"abc", b"de")
    assert to.queued_bytes == 5
    [one] = sent(to)
    to.answered(one, {HERE: DONE}, 0.0)
    assert to.queued_bytes == 2


class Log:
    """One partition as Kafka keeps it for one producer's epoch: the order of sequences, and the last five batches."""

    def __init__(self):
        self.records, self.kept, self.next = [], [], 0

    def produce(self, sequence, values):
        for first, offset, length in self.kept[-5:]:
            if (first, length) == (sequence, len(values)):
                return Code.NONE, offset
        if sequence < self.next:
            return Code.DUPLICATE_SEQUENCE_NUMBER, -1
        if sequence != self.next:
            return Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
        self.kept.append((sequence, len(self.records), len(values)))
        self.records += values
        self.next += len(values)
        return Code.NONE, self.kept[-1][1]


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_whatever_the_network_does_every_record_is_there_once_and_in_order(seed):
    """Connections break before and after a request arrives, answers are lost, leaders refuse, and late copies arrive."""
    for one in range(seed, seed + 100):
        _run_through_a_bad_network(Random(one))


def _run_through_a_bad_network(chance):
    network = BadNetwork(chance)
    steps = [network.append, network.pump, network.answer, network.refuse, network.break_off, network.let_arrive_late]
    for _ in range(200):
        chance.choice(steps)()
        assert network.to.refusal is None
        assert len(network.flying) <= MAX_IN_FLIGHT
    network.heal()
    assert network.log.records == network.appended
    assert network.to.queued_bytes == 0


class BadNetwork:
    """A core, the requests on their way, and those whose connection is gone but that arrive nevertheless."""

    def __init__(self, chance):
        self.chance, self.to, self.log = chance, core(records=chance.randint(1, 4)), Log()
        self.flying, self.late, self.appended, self.now = [], [], [], 0.0
        self.left = chance.randint(0, 25)
        self.contents = {}  # values by sequence: the bytes of a batch are the builder's business

    def append(self):
        if self.left:
            self.left -= 1
            self.appended.append(len(self.appended))
            append(self.to, b"x", now=self.now)

    def pump(self):
        self.now += 1.0
        self.to.learn("t", {0: 1})
        self.flying += sent(self.to, self.now, flush=self.chance.random() < 0.5)

    def arrive(self, request):
        batch = request.batches[HERE]
        values = self.appended[batch.sequence : batch.sequence + batch.body.count]
        values = self.contents.setdefault(batch.sequence, values)
        return {HERE: self.log.produce(batch.sequence, values)}

    def answer(self):
        if self.flying:
            request = self.flying.pop(0)
            self.to.answered(request, self.arrive(request), self.now)

    def refuse(self):
        if self.flying:
            code = self.chance.choice([Code.NOT_LEADER_OR_FOLLOWER, Code.CONCURRENT_TRANSACTIONS])
            self.to.answered(self.flying.pop(0), {HERE: (code, -1)}, self.now)

    def break_off(self):
        """All that was sent is unanswered: some of it arrived, and what did not may come late, in its order."""
        arrived = self.chance.randint(0, len(self.flying))
        for request in self.flying[:arrived]:
            self.arrive(request)
        if self.chance.random() < 0.5:
            self.late += self.flying[arrived:]
        for request in self.flying:
            self.to.unanswered(request, self.now)
        self.flying = []

    def let_arrive_late(self):
        if self.late:
            self.arrive(self.late.pop(0))

    def heal(self):
        while not self.to.is_flushed:
            self.now += 10.0
            self.pump()
            while self.flying:
                self.answer()
            assert self.to.refusal is None
