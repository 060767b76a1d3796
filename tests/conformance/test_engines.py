"""Every producer engine on a real broker: the same promises while nothing goes wrong, and the same refusals."""

import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from harness.engines import answered
from harness.patience import PATIENCE_S

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.kafka import engine
from dualwrite.kafka.abandoned import Completion
from dualwrite.kafka.native import producer as native_instance
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.protocol.lives import ProducerState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.testing.proxy import Api, KafkaProxy


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
    # The row still names the transaction before, which has the same producer id, and with librdkafka the same epoch.
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


def test_the_coordinator_that_a_producer_made_for_itself_is_closed_with_it(kafka, kafka_id, producer_engine):
    with TransactionalProducer({**kafka, "dualwrite.engine": producer_engine}, kafka_id) as producer:
        producer.init_transactions()
        coordinator = producer._coordinator
    with pytest.raises(IllegalStateError):
        coordinator.describe([kafka_id], Deadline(30))


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
    monkeypatch.setattr(engine, "_logged", set())
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
def test_a_setting_that_the_engine_refuses_is_a_configuration_error(make_producer, settings, said):
    producer = make_producer(settings)
    with pytest.raises(ConfigurationError, match=said):
        producer.init_transactions()


def test_settings_are_checked_before_anything_connects(kafka, producer_engine):
    with pytest.raises(ConfigurationError):
        TransactionalProducer({"dualwrite.engine": producer_engine}, "tx")
    with pytest.raises(ConfigurationError, match="empty"):
        TransactionalProducer({**kafka, "dualwrite.engine": producer_engine}, "")


def test_a_broker_that_is_not_there_is_unavailable_at_the_deadline(kafka_id, producer_engine):
    nowhere = {"bootstrap.servers": "127.0.0.1:1"}
    with TransactionalProducer(
        {**nowhere, "dualwrite.engine": producer_engine}, kafka_id, call_timeout_s=0.5
    ) as producer:
        with pytest.raises(Unavailable):
            producer.init_transactions()
        assert producer.state is ProducerState.CREATED


def test_a_producer_shows_no_setting_and_is_not_pickled(kafka, producer_engine):
    secret = "hunter2-canary"
    settings = {
        **kafka,
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": secret,
    }
    with TransactionalProducer({**settings, "dualwrite.engine": producer_engine}, "tx") as producer:
        assert repr(producer) == "<TransactionalProducer tx created>"
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(producer)
        assert secret not in repr(vars(producer))


def test_a_forked_process_is_refused_and_the_parent_goes_on(kafka, dualwrite_topic, kafka_id, values, producer_engine):
    settings = {**kafka, "dualwrite.engine": producer_engine}
    script = textwrap.dedent(f"""
        import os, sys
        from dualwrite.errors import IllegalStateError
        from dualwrite.kafka.producer import TransactionalProducer

        producer = TransactionalProducer({settings!r}, {kafka_id!r})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce({dualwrite_topic!r}, b"1")
        child = os.fork()
        if child == 0:
            calls = [
                producer.begin_transaction, lambda: producer.produce({dualwrite_topic!r}, b"2"), producer.prepare_transaction,
                producer.commit_transaction, producer.abort_transaction, producer.poll, producer.close,
                lambda: TransactionalProducer({settings!r}, {kafka_id!r}).close(),
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


def test_a_transaction_aborted_behind_our_back_is_not_prepared(
    ready, dualwrite_topic, coordinator, kafka_id, monkeypatch
):
    monkeypatch.setattr(native_instance, "OLD_S", -1.0)  # as if it were open for longer
    producer = ready(bulk=True)
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"1")
    answered(producer)
    ours = PreparedTxnState(producer.producer_id, producer.epoch)
    coordinator.end({kafka_id: ours}, committed=False, deadline=Deadline(30))
    with pytest.raises(TransactionAborted):
        producer.prepare_transaction()
    assert producer.state is ProducerState.FAILED


def test_an_interrupted_wait_costs_the_producer(make_producer, dualwrite_kafka, dualwrite_topic, values):
    with KafkaProxy(dualwrite_kafka) as proxy:
        producer = make_producer(proxy.client_config())
        producer.init_transactions()
        producer.begin_transaction()
        held = proxy.on(Api.PRODUCE).hold_answer()

        def interrupt():
            held.wait()
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            producer.produce(dualwrite_topic, b"1")
            producer.prepare_transaction()
        interrupting.join()
        assert producer.doubtful
        with pytest.raises(IllegalStateError, match="make a new one"):
            producer.abort_transaction()
    make_producer().init_transactions()
    assert values() == []
