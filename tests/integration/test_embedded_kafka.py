"""The embedded broker: real, killable, and gone when it should be."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from threading import Thread

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource
from harness.patience import PATIENCE_S

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.testing import EmbeddedKafka, read_committed
from dualwrite.testing.servers.embedded import accepts_connections

pytestmark = pytest.mark.kafka

FETCH = """
from dualwrite.testing.servers.embedded import kafka_jars
print(len(list(kafka_jars().glob("*.jar"))))
"""


@pytest.fixture
def broker(mortal_kafka):
    return mortal_kafka


@pytest.fixture
def guarded(guarded_kafka):
    return guarded_kafka


def produce(config, topic, *values):
    producer = Producer(config)
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(120) == 0


def values_in(broker, topic):
    return [record.value for record in read_committed(broker.client_config(), topic)]


@pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.thorough)])
def test_a_killed_or_stopped_broker_comes_back_on_its_port_with_its_data(broker, end):
    topic = broker.create_topic(f"kept-{end}")
    produce(broker.client_config(), topic, b"before")
    where = broker.bootstrap_servers

    with pytest.raises(IllegalStateError, match="is already running"):
        broker.start()
    getattr(broker, end)()
    assert not broker.running
    assert not accepts_connections(int(where.split(":")[1]))
    with pytest.raises(IllegalStateError, match="is not running"):
        getattr(broker, end)()
    broker.start()

    assert broker.bootstrap_servers == where
    produce(broker.client_config(), topic, b"after")
    assert values_in(broker, topic) == [b"before", b"after"]


def test_a_suspended_broker_answers_nobody_until_it_is_resumed(broker):
    admin = AdminClient(broker.client_config())
    admin.list_topics(timeout=120)
    broker.suspend()
    try:
        with pytest.raises(KafkaException) as raised:
            admin.list_topics(timeout=0.5)
        assert raised.value.args[0].code() in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}
        assert broker.running
    finally:
        broker.resume()
    assert admin.list_topics(timeout=120).topics


def test_properties_are_the_brokers(broker):
    resource = ConfigResource(ConfigResource.Type.BROKER, "1")
    admin = AdminClient(broker.client_config())
    settings = admin.describe_configs([resource])[resource].result(120)
    assert settings["transaction.max.timeout.ms"].value == "2147483647"


def test_the_cluster_has_the_id_that_the_broker_object_names(broker):
    assert AdminClient(broker.client_config()).list_topics(timeout=120).cluster_id == broker.cluster_id


def test_a_topic_that_was_not_created_does_not_appear(broker):
    refused = []
    producer = Producer({**broker.client_config(), "topic.metadata.propagation.max.ms": 2000})
    producer.produce("misspelt", b"lost", on_delivery=lambda error, _: refused.append(error and error.code()))
    producer.flush(120)
    assert refused == [KafkaError.UNKNOWN_TOPIC_OR_PART]
    with pytest.raises(KafkaException) as raised:
        read_committed(broker.client_config(), "misspelt")
    assert raised.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_reading_leaves_out_what_was_aborted_and_says_when_a_transaction_is_open(broker):
    topic = broker.create_topic("transactions", 2)
    producer = Producer({**broker.client_config(), "transactional.id": "reading"})
    producer.init_transactions(120)
    for ending in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce(topic, ending.__name__.encode(), partition=1)
        assert producer.flush(120) == 0
        ending(30)
    assert values_in(broker, topic) == [b"commit_transaction"]

    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    assert producer.flush(120) == 0
    with pytest.raises(Unavailable, match=r"stays open on transactions.*\{0: 0\}"):
        read_committed(broker.client_config(), topic, timeout_s=0.5)
    producer.abort_transaction(120)


def test_a_broker_outlives_the_thread_that_started_it_and_leaves_nothing_when_it_is_closed():
    kafka = EmbeddedKafka()
    thread = Thread(target=kafka.start)
    thread.start()
    thread.join()
    with closing(kafka):
        assert AdminClient(kafka.client_config()).list_topics(timeout=120).brokers
        process, where = kafka._members[0].process, int(kafka.bootstrap_servers.split(":")[1])
        assert process.directory.is_dir()
    assert not process.directory.exists()
    assert not accepts_connections(where)
    with pytest.raises(IllegalStateError, match="closed"):
        _ = kafka.bootstrap_servers


def test_a_broker_that_refuses_its_settings_is_an_error_with_its_own_words():
    with pytest.raises(ConfigurationError, match=r"process\.roles"):
        EmbeddedKafka(properties={"process.roles": "nonsense"}).start()


def test_without_java_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("DUALWRITE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigurationError, match="Java runtime"):
        EmbeddedKafka().start()


@pytest.mark.thorough
def test_two_processes_that_fetch_the_jars_at_once_both_get_all_of_them(monkeypatch, tmp_path):
    monkeypatch.setenv("DUALWRITE_CACHE", str(tmp_path))
    both = [
        subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    (one, said_by_one), (other, said_by_other) = (process.communicate(timeout=PATIENCE_S) for process in both)
    assert one == other
    assert int(one) > 40
    assert (said_by_one + said_by_other).count("fetching Apache Kafka") == 1
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".lock"]
    assert len(list(tmp_path.iterdir())) == 2


def test_servers_of_the_environment_are_used_and_never_touched(broker, monkeypatch):
    monkeypatch.setenv("DUALWRITE_TEST_KAFKA", broker.bootstrap_servers)
    with EmbeddedKafka() as kafka:
        assert kafka.client_config() == broker.client_config()
        topic = kafka.create_topic("environment")
        produce(kafka.client_config(), topic, b"here")
        assert values_in(broker, topic) == [b"here"]
        for deed in (kafka.kill, kafka.stop, kafka.restart, kafka.suspend, kafka.resume):
            with pytest.raises(IllegalStateError, match="DUALWRITE_TEST_KAFKA"):
                deed()
    assert broker.running


class TestWithUsers:
    @pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
    def test_a_user_may_do_what_was_allowed_and_nothing_else(self, guarded, mechanism):
        topic = guarded.create_topic(f"allowed-{mechanism}")
        guarded.allow("mail", "write", "topic", topic)
        produce(guarded.client_config("mail", mechanism=mechanism), topic, b"welcome")
        assert [record.value for record in read_committed(guarded.admin_config(), topic)] == [b"welcome"]

        refused = []
        producer = Producer(guarded.client_config("other", mechanism=mechanism))
        producer.produce(topic, b"intruder", on_delivery=lambda error, _: refused.append(error.code()))
        producer.flush(120)
        assert refused == [KafkaError.TOPIC_AUTHORIZATION_FAILED]

    def test_transactional_ids_are_allowed_by_prefix(self, guarded):
        guarded.allow("mail", "write", "transactional_id", "orders", prefixed=True)
        Producer({**guarded.client_config("mail"), "transactional.id": "orders#1"}).init_transactions(120)
        stranger = Producer({**guarded.client_config("mail"), "transactional.id": "payments"})
        with pytest.raises(KafkaException) as raised:
            stranger.init_transactions(120)
        assert raised.value.args[0].code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED

    @pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
    def test_a_wrong_password_is_refused(self, guarded, mechanism):
        errors = []
        config = guarded.client_config("mail", mechanism=mechanism)
        admin = AdminClient({**config, "sasl.password": "guess", "error_cb": errors.append})
        with pytest.raises(KafkaException):
            admin.list_topics(timeout=2)
        admin.poll(1)
        assert KafkaError._AUTHENTICATION in {error.code() for error in errors}

    def test_users_and_what_they_may_do_outlive_a_kill(self, guarded):
        guarded.create_topic("orders")
        guarded.allow("mail", "write", "topic", "orders")
        guarded.kill()
        guarded.start()
        produce(guarded.client_config("mail"), "orders", b"again")

    def test_an_unknown_user_has_no_configuration(self, guarded, broker):
        with pytest.raises(ConfigurationError, match="no user 'nobody'"):
            guarded.client_config("nobody")
        with pytest.raises(ConfigurationError, match="has no users"):
            broker.client_config("app")
        with pytest.raises(ConfigurationError, match="without users"):
            broker.allow("app", "write", "topic", "orders")
