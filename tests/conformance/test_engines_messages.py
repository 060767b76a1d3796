"""Messages of every producer engine on a real broker: where they land, what of them arrives, what their sender is told."""

from contextlib import closing
from functools import partial
from itertools import groupby

import pytest
from confluent_kafka import Consumer, KafkaError, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from harness.engines import ENGINES, answered, quick
from harness.patience import PATIENCE_S, wait_until

from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError, TransactionAborted
from dualwrite.protocol.lives import ProducerState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.testing.checker import read_committed


@pytest.fixture
def consumer(kafka, kafka_id):
    consumer = Consumer(
        {**kafka, "group.id": f"group-of-{kafka_id}", "isolation.level": "read_committed", "enable.auto.commit": False}
    )
    with closing(consumer):
        consumer.committed([TopicPartition("any", 0)], timeout=120)  # the group has a coordinator from here on
        yield consumer


def first_by_partition(records):
    return {
        partition: min(record.offset for record in group)
        for partition, group in groupby(records, lambda r: r.partition)
    }


def offsets_of(state):
    return {first.partition: first.offset for first in state.first_offsets}


def test_key_headers_partition_and_timestamp_arrive(ready, dualwrite_topic, consumer):
    producer = ready()
    producer.begin_transaction()
    producer.produce(
        dualwrite_topic,
        "välue",
        "käy",
        partition=1,
        headers=(("h", b"1"), ("h", "2"), ("n", None)),
        timestamp_ms=1_700_000_000_123,
    )
    producer.produce(dualwrite_topic, None, b"tombstone", partition=1, headers={"k": "v"})
    producer.commit_transaction()
    consumer.assign([TopicPartition(dualwrite_topic, 1, 0)])
    first, second = consumer.consume(2, timeout=120)
    assert (first.key(), first.value()) == ("käy".encode(), "välue".encode())
    assert first.headers() == [("h", b"1"), ("h", b"2"), ("n", None)]
    assert first.timestamp()[1] == 1_700_000_000_123
    assert (second.key(), second.value(), second.headers()) == (b"tombstone", None, [("k", b"v")])


@pytest.mark.parametrize("bulk", [False, True])
def test_the_state_names_the_first_offset_in_every_partition_written(ready, dualwrite_topic, kafka, bulk):
    producer = ready(bulk=bulk, incarnation=7)
    for count in (3, 5, 4):
        before = read_committed(kafka, dualwrite_topic)
        producer.begin_transaction()
        for number in range(count):
            producer.produce(dualwrite_topic, str(number), partition=number % 2)
        state = producer.prepare_transaction()
        assert (state.producer_id, state.epoch, state.incarnation) == (producer.producer_id, producer.epoch, 7)
        producer.commit_transaction()
        written = [record for record in read_committed(kafka, dualwrite_topic) if record not in before]
        assert len(written) == count
        assert offsets_of(state) == first_by_partition(written)
        assert PreparedTxnState.from_string(str(state)) == state


@pytest.mark.parametrize("bulk", [False, True])
def test_many_messages_of_one_call_arrive_in_order_with_their_keys(ready, dualwrite_topic, kafka, bulk):
    producer = ready({"queue.buffering.max.messages": 100}, bulk=bulk)
    producer.begin_transaction()
    numbers = [str(number) for number in range(1000)]
    producer.produce_many(dualwrite_topic, numbers, ["the same"] * 1000)
    producer.produce_many(dualwrite_topic, [b"without a key"])
    producer.produce_many(dualwrite_topic, [])
    with pytest.raises(ValueError, match="2 values, 1 keys"):
        producer.produce_many(dualwrite_topic, ["a", "b"], ["a"])
    state = producer.prepare_transaction()
    with pytest.raises(IllegalStateError):
        producer.produce_many(dualwrite_topic, ["late"])
    producer.commit_transaction()
    records = read_committed(kafka, dualwrite_topic)
    assert [record.value.decode() for record in records if record.key == b"the same"] == numbers
    assert [record.value for record in records if record.key is None] == [b"without a key"]
    assert offsets_of(state) == first_by_partition(records)


@pytest.mark.parametrize("bulk", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_hundred_thousand_messages_are_all_there_and_the_state_names_their_beginning(
    ready, dualwrite_topic, kafka, bulk
):
    producer = ready(bulk=bulk)
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"before", partition=0)
    producer.commit_transaction()
    producer.begin_transaction()
    for number in range(100_000):
        producer.produce(dualwrite_topic, str(number))
    state = producer.prepare_transaction()
    producer.commit_transaction()
    records = read_committed(kafka, dualwrite_topic)
    written = [record for record in records if record.value != b"before"]
    assert sorted(int(record.value) for record in written) == list(range(100_000))
    assert offsets_of(state) == first_by_partition(written)


def test_the_state_names_the_topics_id_and_notices_a_topic_made_anew(
    ready, dualwrite_kafka, kafka, kafka_id, producer_engine
):
    topic = dualwrite_kafka.create_topic(f"again-{kafka_id}")
    producer = ready(quick(producer_engine))

    def id_in_state():
        producer.begin_transaction()
        producer.produce(topic, b"x")
        state = producer.prepare_transaction()
        producer.commit_transaction()
        return state.first_offsets[0].topic_id

    def id_at_broker():
        admin = AdminClient(kafka)
        [described] = admin.describe_topics(TopicCollection([topic])).values()
        return str(described.result(120).topic_id).translate(str.maketrans("+/", "-_", "="))

    first = id_in_state()
    assert first == id_at_broker()
    dualwrite_kafka.delete_topic(topic)
    dualwrite_kafka.create_topic(topic)
    assert id_at_broker() != first
    assert id_in_state() == id_at_broker()
    dualwrite_kafka.delete_topic(topic)


@pytest.mark.parametrize(
    "producer_engine", ["native"], indirect=True
)  # librdkafka refreshes what it knows from time to time
def test_partitions_that_a_topic_gets_can_be_written_to_at_once(ready, dualwrite_kafka, kafka, kafka_id):
    topic = dualwrite_kafka.create_topic(f"grows-{kafka_id}", 1)
    producer = ready()
    producer.begin_transaction()
    producer.produce(topic, b"1", partition=0)
    producer.commit_transaction()
    admin = AdminClient(kafka)
    [grown] = admin.create_partitions([NewPartitions(topic, 2)]).values()
    grown.result(120)
    wait_until(lambda: len(admin.list_topics(topic).topics[topic].partitions) == 2)
    producer.begin_transaction()
    producer.produce(topic, b"2", partition=1)
    producer.commit_transaction()
    assert [(record.partition, record.value) for record in read_committed(kafka, topic)] == [(0, b"1"), (1, b"2")]
    dualwrite_kafka.delete_topic(topic)


def test_consumed_offsets_are_committed_with_the_messages(ready, dualwrite_topic, consumer):
    producer = ready()
    consumer.assign([TopicPartition(dualwrite_topic, 0)])
    for offset, end in [(5, producer.commit_transaction), (9, producer.abort_transaction)]:
        producer.begin_transaction()
        producer.produce(dualwrite_topic, b"x", partition=0)
        producer.send_offsets_to_transaction(
            [TopicPartition(dualwrite_topic, 0, offset)], consumer.consumer_group_metadata()
        )
        written = [first.topic for first in producer.prepare_transaction().first_offsets]
        assert written == ["__consumer_offsets", dualwrite_topic]
        end()
    [committed] = consumer.committed([TopicPartition(dualwrite_topic, 0)], timeout=120)
    assert committed.offset == 5


@pytest.mark.parametrize("bulk", [False, True])
def test_a_transaction_of_nothing_but_offsets_has_evidence_too(ready, dualwrite_topic, consumer, bulk):
    producer = ready(bulk=bulk)
    states = []
    for offset in (1, 2):
        producer.begin_transaction()
        producer.send_offsets_to_transaction(
            [TopicPartition(dualwrite_topic, 0, offset)], consumer.consumer_group_metadata()
        )
        states.append(producer.prepare_transaction())
        producer.commit_transaction()
    assert [first.topic for state in states for first in state.first_offsets] == ["__consumer_offsets"] * 2
    assert states[0].first_offsets[0].offset < states[1].first_offsets[0].offset


def test_sending_no_offsets_leaves_the_transaction_empty(ready, dualwrite_topic, consumer):
    producer = ready()
    producer.begin_transaction()
    producer.send_offsets_to_transaction([TopicPartition(dualwrite_topic, 0)], consumer.consumer_group_metadata())
    assert producer.prepare_transaction() == PreparedTxnState()
    producer.commit_transaction()


def test_a_delivery_callback_gets_every_message_before_prepare_returns(ready, dualwrite_topic, kafka):
    producer, seen = ready(), []
    producer.begin_transaction()
    for number in range(300):
        producer.produce(
            dualwrite_topic,
            str(number),
            None if number % 3 else "käy",
            partition=number % 2,
            headers=[("h", "1"), ("n", None)] if number % 5 else None,
            timestamp_ms=1_700_000_000_000 + number,
            on_delivery=lambda *told: seen.append(told),
        )
    producer.prepare_transaction()
    producer.commit_transaction()
    found = {(record.partition, record.offset): record for record in read_committed(kafka, dualwrite_topic)}
    assert sorted(int(message.value()) for _, message in seen) == list(range(300))
    for error, message in seen:
        number = int(message.value())
        assert error is message.error() is None
        assert message.topic() == dualwrite_topic
        assert message.partition() == number % 2
        assert found[message.partition(), message.offset()].value == message.value()
        assert message.key() == (None if number % 3 else "käy".encode())
        assert message.timestamp()[1] == 1_700_000_000_000 + number
    for partition in (0, 1):
        offsets = [message.offset() for _, message in seen if message.partition() == partition]
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("linger", [{}, {"linger.ms": 5}], ids=["at-once", "collected"])
def test_what_delivery_callbacks_produce_at_the_end_is_a_part_of_the_transaction(ready, dualwrite_topic, kafka, linger):
    producer = ready(linger)
    producer.begin_transaction()

    def produce(generation):
        for _ in range(2):  # the callbacks of these produce again, into another partition
            told = partial(follow, generation) if generation < 3 else None
            producer.produce(dualwrite_topic, str(generation), partition=generation % 2, on_delivery=told)

    def follow(generation, error, message):
        assert error is message.error() is None
        produce(generation + 1)

    produce(0)
    state = producer.prepare_transaction()
    producer.commit_transaction()
    records = read_committed(kafka, dualwrite_topic)
    assert sorted(record.value for record in records) == [b"0"] * 2 + [b"1"] * 4 + [b"2"] * 8 + [b"3"] * 16
    assert offsets_of(state) == first_by_partition(records)


def test_nothing_can_be_produced_while_the_transaction_gets_its_name(
    ready, dualwrite_topic, kafka, consumer, coordinator, monkeypatch
):
    producer, refused = ready(), []
    describe = coordinator.describe

    def produce_and_describe(*arguments):
        # Another task of the block, while prepare_transaction waits for an answer.
        with pytest.raises(IllegalStateError, match="produce is not allowed while the producer is flushed") as raised:
            producer.produce(dualwrite_topic, b"late", partition=1)
        refused.append(raised.value)
        return describe(*arguments)

    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1", partition=0)
    producer.send_offsets_to_transaction(
        [TopicPartition(dualwrite_topic, 0, 5)], consumer.consumer_group_metadata()
    )  # for these the coordinator is asked
    monkeypatch.setattr(coordinator, "describe", produce_and_describe)
    state = producer.prepare_transaction()
    assert refused
    assert {first.partition for first in state.first_offsets if first.topic == dualwrite_topic} == {0}
    monkeypatch.undo()
    producer.commit_transaction()
    assert [record.value for record in read_committed(kafka, dualwrite_topic)] == [b"1"]


def test_a_delivery_callback_cannot_produce_into_an_abort(ready, dualwrite_topic, values):
    producer, refused = ready({"linger.ms": 60_000}), []
    producer.begin_transaction()

    def follow(*_):
        with pytest.raises(IllegalStateError, match="abort the transaction") as raised:
            producer.produce(dualwrite_topic, b"2")
        refused.append(raised.value)

    for _ in range(3):
        producer.produce(dualwrite_topic, b"1", on_delivery=follow)
    producer.abort_transaction()
    assert len(refused) == 3
    assert producer.take_callback_error() is None
    assert producer.state is ProducerState.READY
    assert values() == []


def test_an_abort_leaves_no_delivery_callback_uncalled(ready, dualwrite_topic, values, producer_engine):
    producer, seen = ready({"linger.ms": 60_000}), []
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1", on_delivery=lambda *told: seen.append(told))
    producer.abort_transaction()
    [(error, message)] = seen
    assert message.value() == b"1"
    # What is still collected librdkafka sends first.
    assert (error and error.code()) == (KafkaError._PURGE_QUEUE if producer_engine == "native" else None)
    assert values() == []


def test_poll_serves_delivery_callbacks(ready, dualwrite_topic):
    producer, seen = ready(), []
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1", on_delivery=lambda *told: seen.append(told))
    patience = Deadline(PATIENCE_S)
    while not seen:
        assert not patience.expired
        producer.poll(1.0)
    producer.abort_transaction()
    assert len(seen) == 1


def test_what_a_delivery_callback_raises_comes_out_of_prepare_and_the_transaction_can_be_aborted(
    ready, dualwrite_topic, values
):
    producer = ready()
    producer.begin_transaction()

    def callback(error, sent):
        raise LookupError("the user's mistake")

    producer.produce(dualwrite_topic, b"1", on_delivery=callback)
    with pytest.raises(LookupError, match="the user's mistake"):
        producer.prepare_transaction()
    assert producer.state is ProducerState.BEGUN
    producer.abort_transaction()
    assert producer.state is ProducerState.READY
    assert values() == []


def test_an_abort_does_not_raise_what_a_delivery_callback_raises(ready, dualwrite_topic, values):
    producer, raised = ready({"linger.ms": 60_000}), LookupError("the user's mistake")
    producer.begin_transaction()

    def callback(error, sent):
        raise raised

    producer.produce(dualwrite_topic, b"1", on_delivery=callback)
    producer.abort_transaction()
    assert producer.take_callback_error() is raised
    assert producer.take_callback_error() is None
    assert values() == []


def test_a_message_that_fails_outweighs_what_its_delivery_callback_raises(
    ready, dualwrite_topic, values, producer_engine
):
    producer = ready(quick(producer_engine))
    raised = LookupError("as in most examples: if error is not None, raise")

    def callback(error, sent):
        if error is not None:
            raise raised

    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1", on_delivery=callback)
    answered(producer)
    with pytest.raises(
        TransactionAborted, match="misspelt"
    ):  # the native engine finds it at once, librdkafka at the end
        producer.produce(f"{dualwrite_topic}-misspelt", b"2", on_delivery=callback)
        producer.prepare_transaction()
    producer.abort_transaction()
    assert producer.take_callback_error() is (raised if producer_engine == "librdkafka" else None)
    assert values() == []


def test_a_producer_in_bulk_mode_offers_no_delivery_callback(ready, dualwrite_topic):
    producer = ready(bulk=True)
    producer.begin_transaction()
    with pytest.raises(IllegalStateError, match="bulk"):
        producer.produce(dualwrite_topic, b"1", on_delivery=print)


def test_a_full_queue_makes_produce_wait_and_loses_nothing(ready, dualwrite_topic, values):
    producer = ready({"queue.buffering.max.messages": 10})
    producer.begin_transaction()
    for number in range(500):
        producer.produce(dualwrite_topic, str(number), partition=0)
    producer.commit_transaction()
    assert values() == [str(number).encode() for number in range(500)]


def test_a_key_lands_in_the_same_partition_whichever_engine_sends_it(make_producer, kafka, kafka_id, dualwrite_kafka):
    topic = dualwrite_kafka.create_topic(f"keys-{kafka_id}", 7)
    keys = [f"key {number} ü".encode() for number in range(100)]
    for engine in ENGINES:
        producer = make_producer(engine=engine)
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce_many(topic, [engine] * 50, keys[:50])
        for key in keys[50:]:
            producer.produce(topic, engine, key)
        producer.commit_transaction()
        producer.close()
    landed = {engine: {} for engine in ENGINES}
    for record in read_committed(kafka, topic):
        landed[record.value.decode()][record.key] = record.partition
    one, other = landed.values()
    assert one == other
    assert one.keys() == set(keys)
    assert set(one.values()) == set(range(7))
    dualwrite_kafka.delete_topic(topic)


def test_a_value_of_a_wrong_type_is_refused_and_the_transaction_goes_on(ready, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    with pytest.raises(TypeError):
        producer.produce(dualwrite_topic, 42)
    assert producer.state is ProducerState.BEGUN
    producer.produce(dualwrite_topic, b"1")
    producer.commit_transaction()
    assert values() == [b"1"]
