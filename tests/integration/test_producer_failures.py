"""Both engines' producers when something goes wrong: failed messages, missing answers, late answers, other owners, missing rights."""

import os
import secrets
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.engines import ENGINES, answered, quick
from harness.patience import patient

from dualwrite.clock import Deadline
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    Fenced,
    IllegalStateError,
    TransactionAborted,
    Unavailable,
)
from dualwrite.kafka.abandoned import Completion
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.error_codes import Phase
from dualwrite.kafka.producer import LaneProducer, TransactionalProducer
from dualwrite.protocol.lives import ProducerState
from dualwrite.protocol.values import TransactionStatus
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import Api, KafkaProxy

# What may have been sent twice is known after 0.8 x this. Long enough for a busy machine to initialise a producer in less.
IMPATIENT = {"retry.backoff.ms": 3000, "retry.backoff.max.ms": 3000}
SLOW_S = 2.6
SHORT_S = 2.0
of_librdkafka = pytest.mark.parametrize("producer_engine", ["librdkafka"], indirect=True)


@pytest.fixture(params=ENGINES)
def producer_engine(request):
    return request.param


@pytest.fixture(scope="module", autouse=True)
def warm(dualwrite_kafka):
    """A broker that has just been started answers its first InitProducerId late."""
    with TransactionalProducer(patient(dualwrite_kafka.client_config()), f"warm-{secrets.token_hex(6)}") as producer:
        producer.init_transactions()


@pytest.fixture
def values(kafka, dualwrite_topic):
    return lambda: [record.value for record in read_committed(kafka, dualwrite_topic)]


@pytest.fixture
def narrow_topic(dualwrite_kafka):
    """A topic that takes only small messages, while librdkafka would send larger ones."""
    topic = dualwrite_kafka.create_topic(f"narrow-{secrets.token_hex(6)}", 2, {"max.message.bytes": "1000"})
    yield topic
    dualwrite_kafka.delete_topic(topic)


@pytest.fixture
def proxy(dualwrite_kafka):
    with KafkaProxy(dualwrite_kafka) as proxy:
        yield proxy


def works_again(producer, topic, values):
    """Whether the producer runs a transaction, and its message alone is visible."""
    producer.begin_transaction()
    producer.produce(topic, b"again")
    producer.commit_transaction()
    return values() == [b"again"]


# Random: it does not become small enough by compressing. A slow machine hears the refusal within the call that hands it over:
# that call stands inside `pytest.raises`, too.
TOO_LARGE = os.urandom(5000)


@pytest.mark.parametrize("bulk", [False, True])
def test_a_message_too_large_for_the_topic_comes_out_of_prepare_though_librdkafkas_flush_says_that_nothing_is_left(
    ready, dualwrite_topic, narrow_topic, values, bulk
):
    producer = ready(bulk=bulk)
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"fits")
    with pytest.raises(TransactionAborted, match=r"max\.message\.bytes") as failed:
        producer.produce(narrow_topic, TOO_LARGE)
        answered(producer)
        producer.prepare_transaction()
    assert not failed.value.retryable
    assert producer.state is ProducerState.FAILED
    with pytest.raises(IllegalStateError, match="abort the transaction"):
        producer.commit_transaction()
    producer.abort_transaction()
    assert works_again(producer, dualwrite_topic, values)


@pytest.mark.parametrize("bulk", [False, True])
def test_one_bad_message_among_many_is_found(ready, dualwrite_topic, narrow_topic, values, bulk):
    producer = ready(bulk=bulk)
    producer.begin_transaction()
    with pytest.raises(TransactionAborted, match=r"max\.message\.bytes"):
        for number in range(20_000):
            producer.produce(dualwrite_topic, b"fits")
            if number == 700:
                producer.produce(narrow_topic, TOO_LARGE, partition=1)
        producer.prepare_transaction()
    assert producer.state is ProducerState.FAILED
    with suppress(Unavailable):  # librdkafka still had messages on their way, which depends on the broker's pace
        producer.abort_transaction()
    try:
        assert producer.doubtful or works_again(producer, dualwrite_topic, values)
    except TransactionAborted:  # librdkafka may leave a gap before its next message: that transaction is refused, too
        producer.abort_transaction()
        assert works_again(producer, dualwrite_topic, values)


@pytest.mark.parametrize("bulk", [False, True])
def test_an_unknown_topic_comes_out_of_produce_or_prepare(ready, dualwrite_topic, values, bulk, producer_engine):
    producer = ready(quick(producer_engine), bulk=bulk)
    producer.begin_transaction()
    acknowledged = []
    producer.produce(dualwrite_topic, b"fits", **({} if bulk else {"on_delivery": lambda *_: acknowledged.append(1)}))
    while not bulk and not acknowledged:  # else the abort may not know what becomes of it
        producer.poll(0.1)
    with pytest.raises(TransactionAborted, match="create the topic") as failed:
        producer.produce("no-such-topic", b"x")
        producer.prepare_transaction()
    assert not failed.value.retryable
    producer.abort_transaction()
    assert works_again(producer, dualwrite_topic, values)


@pytest.mark.parametrize("bulk", [False, True])
def test_a_topic_deleted_in_the_middle_comes_out_of_prepare(ready, dualwrite_kafka, bulk, producer_engine):
    topic = dualwrite_kafka.create_topic(f"gone-{secrets.token_hex(6)}")
    producer = ready(quick(producer_engine), bulk=bulk)
    producer.begin_transaction()
    producer.produce(topic, b"there")
    answered(producer)
    dualwrite_kafka.delete_topic(topic)
    until = time.monotonic() + 60  # brokers delete after they have answered
    with pytest.raises(TransactionAborted, match=r"create the topic|partition that the topic has"):
        while time.monotonic() < until:
            answered(producer)
            producer.produce(topic, b"gone")
        producer.prepare_transaction()
    assert producer.state is ProducerState.FAILED


@pytest.mark.parametrize("bulk", [False, True])
def test_a_partition_that_the_topic_has_not_comes_out_of_produce_or_prepare(
    ready, dualwrite_topic, values, bulk, producer_engine
):
    producer = ready(quick(producer_engine), bulk=bulk)
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"fits")
    answered(producer)  # else the abort may not know what becomes of it
    with pytest.raises(TransactionAborted, match="partition that the topic has"):
        producer.produce(dualwrite_topic, b"x", partition=99)
        producer.prepare_transaction()
    producer.abort_transaction()
    assert works_again(producer, dualwrite_topic, values)


def test_a_message_too_large_for_the_engine_comes_out_of_produce_and_spoils_the_transaction(
    ready, dualwrite_topic, values
):
    producer = ready()
    producer.begin_transaction()
    with pytest.raises(TransactionAborted, match=r"message\.max\.bytes") as failed:
        producer.produce(dualwrite_topic, b"x" * 2_000_000)
    assert not failed.value.retryable
    assert producer.state is ProducerState.FAILED
    producer.abort_transaction()
    assert works_again(producer, dualwrite_topic, values)


def test_after_a_failure_produce_says_what_failed(ready, dualwrite_topic, narrow_topic):
    producer = ready()
    producer.begin_transaction()
    with pytest.raises(TransactionAborted, match=r"(MSG_SIZE|MESSAGE)_TOO_LARGE"):
        producer.produce(narrow_topic, TOO_LARGE)
        answered(producer)
        producer.produce(dualwrite_topic, b"next")
    assert producer.state is ProducerState.FAILED


@of_librdkafka
def test_messages_that_cannot_be_delivered_by_the_deadline_make_the_producer_doubtful(
    make_producer, proxy, dualwrite_topic
):
    producer = make_producer(proxy.client_config(), call_timeout_s=SHORT_S)
    producer.init_transactions()
    producer.begin_transaction()
    proxy.on(Api.PRODUCE, nth=None).drop_request()
    producer.produce(dualwrite_topic, b"x")
    with pytest.raises(Unavailable, match="1 of 1 messages"):
        producer.prepare_transaction()
    assert producer.doubtful
    with pytest.raises(IllegalStateError, match="make a new one"):
        producer.abort_transaction()


def test_a_queue_that_stays_full_is_unavailable(make_producer, proxy, dualwrite_topic):
    producer = make_producer({**proxy.client_config(), "queue.buffering.max.messages": 5}, call_timeout_s=SHORT_S)
    producer.init_transactions()
    producer.begin_transaction()
    proxy.on(Api.PRODUCE, nth=None).drop_request()
    with pytest.raises(Unavailable, match="queue stayed full"):
        for _ in range(10):
            producer.produce(dualwrite_topic, b"x", partition=0)
    assert producer.state is ProducerState.FAILED


@of_librdkafka
def test_an_abort_with_messages_on_their_way_costs_the_producer(make_producer, proxy, dualwrite_topic, values):
    producer = make_producer(proxy.client_config())
    producer.init_transactions()
    producer.begin_transaction()
    held = proxy.on(Api.PRODUCE).hold_request()
    producer.produce(dualwrite_topic, b"x", partition=0)
    held.wait()
    late = threading.Timer(1.5, held.release)
    late.start()
    with pytest.raises(Unavailable, match="still in flight"):
        producer.abort_transaction()
    late.join()
    assert producer.doubtful
    make_producer().init_transactions()
    assert values() == []


@of_librdkafka
def test_a_commit_that_took_long_enough_to_be_sent_twice_succeeds_and_costs_the_producer(
    make_producer, proxy, dualwrite_topic, values
):
    producer = make_producer({**proxy.client_config(), **IMPATIENT})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"x")
    producer.prepare_transaction()
    held = proxy.on(Api.END_TXN).hold_answer()
    late = threading.Timer(SLOW_S, held.release)
    late.start()
    producer.commit_transaction()
    late.join()
    assert producer.doubtful
    with pytest.raises(IllegalStateError, match="make a new one"):
        producer.begin_transaction()
    assert values() == [b"x"]


@of_librdkafka
def test_offsets_that_may_have_been_sent_twice_cost_the_producer_after_its_transaction(
    make_producer, proxy, kafka, dualwrite_topic
):
    producer = make_producer({**proxy.client_config(), **IMPATIENT})
    producer.init_transactions()
    with closing(Consumer({**kafka, "group.id": producer.transactional_id})) as consumer:
        consumer.committed([TopicPartition(dualwrite_topic, 0)], timeout=120)
        producer.begin_transaction()
        producer.produce(dualwrite_topic, b"x")
        held = proxy.on(Api.TXN_OFFSET_COMMIT).hold_answer()
        late = threading.Timer(SLOW_S, held.release)
        late.start()
        producer.send_offsets_to_transaction(
            [TopicPartition(dualwrite_topic, 0, 1)], consumer.consumer_group_metadata()
        )
        late.join()
    assert producer.state is ProducerState.BEGUN
    producer.commit_transaction()
    assert producer.doubtful


LOST = {"drop_request": Completion.COMMITTED, "drop_answer": Completion.NOTHING_ONGOING}


@pytest.mark.parametrize("lost", LOST)
def test_a_commit_without_an_answer_is_completed_by_its_state_with_a_new_producer(
    make_producer, proxy, dualwrite_topic, values, lost
):
    producer = make_producer(proxy.client_config(), call_timeout_s=SHORT_S)
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"x")
    state = producer.prepare_transaction()
    rule = getattr(proxy.on(Api.END_TXN), lost)()
    with pytest.raises(CompletionPending, match="do not run the work again"):
        producer.commit_transaction()
    rule.wait()
    assert producer.doubtful
    assert producer.prepared_state == state
    producer.close()
    successor = make_producer()
    successor.init_transactions(keep_prepared_txn=True)
    assert successor.complete_transaction(state) is LOST[lost]
    assert successor.state is ProducerState.READY
    assert values() == [b"x"]


HANGING = {
    Phase.BEGIN: Unavailable,
    Phase.SEND_OFFSETS: Unavailable,
    Phase.COMMIT: CompletionPending,
    Phase.ABORT: Unavailable,
}


@of_librdkafka
@pytest.mark.parametrize("phase", HANGING)
def test_a_call_of_librdkafka_that_hangs_is_left_behind_at_the_deadline(ready, phase):
    producer, go_on = ready(), threading.Event()
    with pytest.raises(HANGING[phase], match="was not answered in time"):
        producer._instance._call(phase, lambda *_: go_on.wait(), Deadline(0.05))
    assert producer.doubtful
    go_on.set()


@of_librdkafka
def test_a_wait_that_a_signal_interrupts_costs_the_producer(ready):
    producer = ready()

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        producer._instance._call(Phase.COMMIT, interrupted, Deadline(30))
    assert producer.doubtful


def test_an_abort_without_an_answer_costs_the_producer(make_producer, proxy, dualwrite_topic, values):
    producer = make_producer(proxy.client_config(), call_timeout_s=SHORT_S)
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"x")
    producer.prepare_transaction()
    proxy.on(Api.END_TXN).drop_answer()
    with pytest.raises(Unavailable):
        producer.abort_transaction()
    assert producer.doubtful
    assert values() == []


def test_an_init_without_an_answer_costs_the_producer(make_producer, proxy):
    producer = make_producer(proxy.client_config(), call_timeout_s=SHORT_S)
    proxy.on(Api.INIT_PRODUCER_ID, nth=None).drop_request()
    with pytest.raises(Unavailable):
        producer.init_transactions()
    assert producer.doubtful


def test_a_missing_answer_does_not_make_closing_slow(make_producer, proxy, dualwrite_topic):
    producer = make_producer(proxy.client_config(), call_timeout_s=SHORT_S)
    producer.init_transactions()
    producer.begin_transaction()
    proxy.on(Api.PRODUCE, nth=None).drop_request()
    producer.produce(dualwrite_topic, b"x")
    seen = []
    producer.produce(dualwrite_topic, b"y", on_delivery=lambda error, _: seen.append(error))
    deadline = Deadline(10)
    producer.close()
    assert not deadline.expired
    assert producer.state is ProducerState.CLOSED


def test_a_producer_whose_id_was_taken_over_is_fenced_when_it_writes(ready, dualwrite_topic, values):
    old = ready()
    old.begin_transaction()
    old.produce(dualwrite_topic, b"old")
    answered(old)
    ready()
    with pytest.raises(Fenced) as fenced:
        old.produce(dualwrite_topic, b"late")
        old.prepare_transaction()
    assert fenced.value.outcome == "aborted"
    assert old.doubtful
    assert values() == []


def test_a_fenced_commit_says_that_its_outcome_is_unknown(ready, dualwrite_topic, values):
    old = ready()
    old.begin_transaction()
    old.produce(dualwrite_topic, b"old")
    old.prepare_transaction()
    ready()
    with pytest.raises(Fenced) as fenced:
        old.commit_transaction()
    assert fenced.value.outcome == "unknown"
    assert old.doubtful
    assert values() == []


def test_the_ids_are_known_after_an_abort_that_raised_the_epoch(
    ready, dualwrite_topic, narrow_topic, coordinator, kafka_id, producer_engine
):
    producer = ready()
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"x")
    with pytest.raises(TransactionAborted):
        producer.produce(narrow_topic, TOO_LARGE)
        producer.prepare_transaction()
    producer.abort_transaction()
    assert (producer.producer_id is None) is (producer_engine == "librdkafka"), "it is asked again there"
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"y")
    state = producer.prepare_transaction()
    view = coordinator.describe([kafka_id], Deadline(30))[kafka_id]
    assert view.status is TransactionStatus.ONGOING
    assert (state.producer_id, state.epoch) == (view.producer_id, view.epoch) == (producer.producer_id, producer.epoch)


# Not of the module: a worker that has taken tests of others meanwhile would make it again, on the same broker.
@pytest.fixture(scope="session")
def guarded(guarded_kafka):
    """A broker that authenticates its clients and refuses what is not allowed."""
    guarded_kafka.create_topic("granted", 1)
    guarded_kafka.create_topic("withheld", 1)
    for operation in ("write", "describe"):
        guarded_kafka.allow("app", operation, "transactional_id", "app-", prefixed=True)
        guarded_kafka.allow("app", operation, "topic", "granted")
    guarded_kafka.allow("app", "describe", "topic", "withheld")
    return guarded_kafka


@pytest.fixture
def guarded_producer(guarded, producer_engine):
    """Makes producers of the user ``app``."""
    with ExitStack() as closed_later:

        def make(kafka_id, **options):
            config = patient(guarded.client_config("app"), producer_engine)
            producer = LaneProducer(config | options.pop("settings", {}), kafka_id, engine=producer_engine, **options)
            return closed_later.enter_context(producer)

        yield make


def test_a_transactional_id_without_a_right_names_the_right(guarded_producer):
    producer = guarded_producer("other-id")
    with pytest.raises(ConfigurationError, match="transactional id"):
        producer.init_transactions()


def test_a_topic_without_a_right_names_the_right_and_the_topic(guarded_producer, producer_engine):
    producer = guarded_producer("app-1")
    producer.init_transactions()
    producer.begin_transaction()
    with pytest.raises(ConfigurationError, match="Write and Describe on topic (withheld|concerned)"):
        producer.produce("withheld", b"x")
        producer.prepare_transaction()
    assert producer.state is ProducerState.FAILED
    if producer_engine == "native":
        producer.abort_transaction()
        producer.begin_transaction()
        producer.produce("granted", b"x")
        producer.commit_transaction()
        return
    # librdkafka asks for the end of a transaction that never began at the coordinator, and then takes itself for dead.
    with pytest.raises(Unavailable, match="make a new one"):
        producer.abort_transaction()
    assert producer.doubtful


def test_a_topic_that_must_not_be_seen_names_the_right_and_the_topic(guarded_producer):
    producer = guarded_producer("app-4")
    producer.init_transactions()
    producer.begin_transaction()
    with pytest.raises(ConfigurationError, match="(?i)describe on (the )?topic '?hidden"):
        producer.produce("hidden", b"x")
        producer.prepare_transaction()


def test_a_consumer_group_without_a_right_names_the_right_and_the_group(guarded_producer, guarded):
    producer = guarded_producer("app-5")
    producer.init_transactions()
    producer.begin_transaction()
    with closing(Consumer({**guarded.client_config("app"), "group.id": "others"})) as consumer:
        metadata = consumer.consumer_group_metadata()
    with pytest.raises(ConfigurationError, match="Read on consumer group (others|concerned)"):
        producer.send_offsets_to_transaction([TopicPartition("granted", 0, 1)], metadata)


def test_a_wrong_password_is_a_configuration_error_and_is_not_shown(guarded_producer, caplog):
    wrong = "canary-of-a-password"
    producer = guarded_producer("app-2", settings={"sasl.password": wrong}, call_timeout_s=5.0)
    with pytest.raises((ConfigurationError, Unavailable)) as refused:
        producer.init_transactions()
    assert wrong not in repr(refused.value) + str(refused.value) + caplog.text


def test_rights_that_suffice_suffice(guarded_producer, guarded):
    producer = guarded_producer("app-3")
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce("granted", b"x")
    state = producer.prepare_transaction()
    assert state.first_offsets
    producer.commit_transaction()
    with closing(KafkaCoordinator(KafkaConfig.parse(guarded.admin_config()))) as coordinator:
        view = coordinator.describe(["app-3"], Deadline(30))["app-3"]
    assert view.status in {TransactionStatus.COMPLETE_COMMIT, TransactionStatus.PREPARE_COMMIT}
