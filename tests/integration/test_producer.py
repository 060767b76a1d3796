"""TransactionalProducer on a real broker: what it promises while nothing goes wrong, and what it refuses."""

import logging
import pickle
import subprocess
import sys
import textwrap
from contextlib import closing
from itertools import groupby

import pytest
from confluent_kafka import Consumer, KafkaError, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.patience import PATIENCE_S

from dualwrite.runtime.deadline import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.kafka.producer import transaction_timeout
from dualwrite.kafka.producer.abandoned_transaction import Completion
from dualwrite.kafka.producer.transactional import TransactionalProducer
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.tables.producer_life import ProducerState
from dualwrite.testing.reading import read_committed


@pytest.fixture
def values(kafka, dualwrite_topic):
    """The committed values of the topic."""
    return lambda: [record.value for record in read_committed(kafka, dualwrite_topic)]


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


def test_a_committed_transaction_is_visible_and_an_aborted_one_is_not(ready, dualwrite_topic, values):
    producer = ready()
    for value, end in [
        (b"1", producer.commit_transaction),
        (b"2", producer.abort_transaction),
        (b"3", producer.commit_transaction),
    ]:
        producer.begin_transaction()
        producer.produce(dualwrite_topic, value, partition=0)
        producer.prepare_transaction()
        end()
        assert producer.state is ProducerState.READY
        assert producer.prepared_state is None
    assert values() == [b"1", b"3"]


def test_commit_without_prepare_flushes_first(ready, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    for number in range(1000):
        producer.produce(dualwrite_topic, str(number), partition=0)
    producer.commit_transaction()
    assert values() == [str(number).encode() for number in range(1000)]


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
        producer.commit_transaction()
        written = [record for record in read_committed(kafka, dualwrite_topic) if record not in before]
        assert len(written) == count
        assert offsets_of(state) == first_by_partition(written)
        assert (state.producer_id, state.epoch, state.incarnation) == (producer.producer_id, producer.epoch, 7)
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


@pytest.mark.parametrize("bulk", [False, True])
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


def test_the_state_names_the_topics_id_and_notices_a_topic_made_anew(ready, dualwrite_kafka, kafka, kafka_id):
    topic = dualwrite_kafka.create_topic(f"again-{kafka_id}")
    producer = ready({"topic.metadata.refresh.interval.ms": 500})

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


def test_an_empty_transaction_has_the_empty_state(ready):
    producer = ready()
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        assert producer.prepare_transaction() == PreparedTxnState()
        assert producer.begun_for_s == 0
        end()
    assert producer.state is ProducerState.READY


def test_an_instance_completes_what_it_has_prepared_itself(ready, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1", partition=0)
    first = producer.prepare_transaction()
    assert producer.complete_transaction(first) is Completion.COMMITTED
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"2", partition=0)
    producer.prepare_transaction()
    # The row still names the transaction before, which has the same producer id and epoch.
    assert producer.complete_transaction(first) is Completion.ABORTED
    assert producer.state is ProducerState.READY
    assert values() == [b"1"]


def test_after_prepare_only_commit_abort_and_complete_are_allowed(ready, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1", partition=0)
    state = producer.prepare_transaction()
    for call in (
        lambda: producer.produce(dualwrite_topic, b"2"),
        lambda: producer.send_offsets_to_transaction([], None),
        producer.begin_transaction,
        producer.prepare_transaction,
        producer.init_transactions,
    ):
        with pytest.raises(IllegalStateError, match="while the producer is prepared") as refused:
            call()
        assert "commit, abort or complete" in str(refused.value)
        assert producer.state is ProducerState.PREPARED
        assert producer.prepared_state == state
    producer.commit_transaction()
    assert values() == [b"1"]


def test_nothing_works_before_init_and_after_close(make_producer, dualwrite_topic):
    producer = make_producer()
    with pytest.raises(IllegalStateError, match="call init_transactions first"):
        producer.begin_transaction()
    with pytest.raises(IllegalStateError, match="call init_transactions first"):
        _ = producer.transaction_timeout_ms
    assert producer.poll() == 0
    producer.close()
    producer.close()
    for call in (
        producer.init_transactions,
        producer.begin_transaction,
        producer.poll,
        lambda: producer.produce(dualwrite_topic),
    ):
        with pytest.raises(IllegalStateError, match="make a new producer"):
            call()
    assert producer.state is ProducerState.CLOSED


def test_the_coordinator_that_a_producer_made_for_itself_is_closed_with_it(kafka, kafka_id):
    with TransactionalProducer(kafka, kafka_id) as producer:
        producer.init_transactions()
        coordinator = producer._coordinator
    with pytest.raises(IllegalStateError):
        coordinator.describe([kafka_id], Deadline(30))


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


def test_a_delivery_callback_gets_every_message_before_prepare_returns(ready, dualwrite_topic):
    producer, seen = ready(), []
    producer.begin_transaction()
    for number in range(300):
        producer.produce(
            dualwrite_topic,
            str(number),
            partition=0,
            on_delivery=lambda error, sent: seen.append((error, sent.value())),
        )
    producer.prepare_transaction()
    assert seen == [(None, str(number).encode()) for number in range(300)]
    producer.abort_transaction()


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


def test_a_value_of_a_wrong_type_is_refused_and_the_transaction_goes_on(ready, dualwrite_topic, values):
    producer = ready()
    producer.begin_transaction()
    with pytest.raises(TypeError):
        producer.produce(dualwrite_topic, 42)
    assert producer.state is ProducerState.BEGUN
    producer.produce(dualwrite_topic, b"1")
    producer.commit_transaction()
    assert values() == [b"1"]


def test_the_time_a_transaction_is_open_counts_from_its_first_message(ready, dualwrite_topic):
    producer = ready()
    producer.begin_transaction()
    assert producer.begun_for_s == 0
    producer.produce(dualwrite_topic, b"1")
    assert producer.begun_for_s > 0
    producer.commit_transaction()
    producer.begin_transaction()
    assert producer.begun_for_s == 0


def test_the_brokers_maximum_is_asked_for_and_warned_of_when_it_is_short(make_producer, caplog, monkeypatch):
    monkeypatch.setattr(transaction_timeout, "_warned", set())
    caplog.set_level(logging.INFO, "dualwrite.kafka.producer")
    for _ in range(2):
        producer = make_producer()
        producer.init_transactions()
        assert producer.transaction_timeout_ms == 900_000
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "transaction.max.timeout.ms" in warning.getMessage()


def test_the_users_own_timeout_reaches_the_coordinator(ready, coordinator, kafka_id):
    ready({"transaction.timeout.ms": 60_000})
    assert coordinator.describe([kafka_id], Deadline(30))[kafka_id].timeout_ms == 60_000
    ready({"transaction.timeout.ms": 60_000}, transaction_timeout_ms=70_000)
    assert coordinator.describe([kafka_id], Deadline(30))[kafka_id].timeout_ms == 70_000


def test_a_timeout_above_the_brokers_is_refused_and_nothing_was_initialised(make_producer, coordinator, kafka_id):
    producer = make_producer(transaction_timeout_ms=900_001)
    with pytest.raises(ConfigurationError, match=r"transaction\.max\.timeout\.ms"):
        producer.init_transactions()
    assert producer.state is ProducerState.CREATED
    assert coordinator.describe([kafka_id], Deadline(30))[kafka_id].producer_id == -1


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"compression.type": "best"}, "compression"), ({"message.timeout.ms": 10**9}, "message.timeout.ms")],
)
def test_what_librdkafka_refuses_is_a_configuration_error(make_producer, settings, said):
    producer = make_producer(settings)
    with pytest.raises(ConfigurationError, match=said):
        producer.init_transactions()


def test_settings_are_checked_before_anything_connects(kafka):
    with pytest.raises(ConfigurationError):
        TransactionalProducer({}, "tx")
    with pytest.raises(ConfigurationError, match="empty"):
        TransactionalProducer(kafka, "")


def test_a_broker_that_is_not_there_is_unavailable_at_the_deadline(dualwrite_kafka, kafka_id):
    with TransactionalProducer({"bootstrap.servers": "127.0.0.1:1"}, kafka_id, call_timeout_s=0.5) as producer:
        with pytest.raises(Unavailable):
            producer.init_transactions()
        assert producer.state is ProducerState.CREATED


def test_every_line_of_the_log_names_the_transactional_id(ready, dualwrite_topic, caplog, kafka_id):
    caplog.set_level(logging.DEBUG, "dualwrite.kafka.producer")
    producer = ready({"debug": "eos"})
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"x")
    producer.commit_transaction()
    producer.poll()
    lines = [record.getMessage() for record in caplog.records if record.name == "dualwrite.kafka.producer"]
    assert any("TXNAPI" in line for line in lines), "librdkafka's own lines are routed, too"
    assert all(line.startswith(kafka_id) for line in lines)


def test_a_users_own_error_callback_is_called(ready):
    errors = []
    producer = ready({"error_cb": errors.append})
    producer._instance._handle._note_client_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert [error.code() for error in errors] == [KafkaError._ALL_BROKERS_DOWN]


def test_a_producer_shows_no_setting_and_is_not_pickled(kafka):
    secret = "hunter2-canary"
    settings = {
        **kafka,
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": secret,
    }
    with TransactionalProducer(settings, "tx") as producer:
        assert repr(producer) == "<TransactionalProducer tx created>"
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(producer)
        assert secret not in repr(vars(producer))


def test_a_forked_process_is_refused_and_the_parent_goes_on(kafka, dualwrite_topic, kafka_id, values):
    script = textwrap.dedent(f"""
        import os, sys
        from dualwrite.errors import IllegalStateError
        from dualwrite.kafka.producer.transactional import TransactionalProducer

        producer = TransactionalProducer({kafka!r}, {kafka_id!r})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce({dualwrite_topic!r}, b"1")
        child = os.fork()
        if child == 0:
            calls = [
                producer.begin_transaction, lambda: producer.produce({dualwrite_topic!r}, b"2"), producer.prepare_transaction,
                producer.commit_transaction, producer.abort_transaction, producer.poll, producer.close,
                lambda: TransactionalProducer({kafka!r}, "of-the-child").close(),
            ]
            refused = 0
            for call in calls:
                try:
                    call()
                except IllegalStateError as error:
                    refused += "make a producer in each process" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        producer.commit_transaction()
        producer.close()
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)
    assert values() == [b"1"]


def test_a_transaction_aborted_behind_our_back_is_not_prepared(ready, dualwrite_topic, coordinator, kafka_id):
    producer = ready(bulk=True)
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1")
    producer._instance._raw.flush(120)
    ours = PreparedTxnState(producer.producer_id, producer.epoch)
    coordinator.end({kafka_id: ours}, committed=False, deadline=Deadline(30))
    with pytest.raises(TransactionAborted):
        producer.prepare_transaction()
    assert producer.state is ProducerState.FAILED
