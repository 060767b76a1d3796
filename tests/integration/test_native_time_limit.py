"""The time limit that a broker sets to native transactions: none where it allows that, by each of the two ways."""

import logging
import secrets

import pytest
from harness.acls import allow_two_phase_commit
from sqlalchemy import create_engine

from dualwrite import DualWriter, WriterLimits
from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.kafka import engine as transaction_timeout
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.engine import BROKER_DEFAULT_MS
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.migrations import upgrade
from dualwrite.protocol.values import NEVER_MS, EndAnswer, TransactionStatus
from dualwrite.recovery.recover import status
from dualwrite.testing import read_committed


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(transaction_timeout, "_logged", set())
    caplog.set_level(logging.INFO, "dualwrite.kafka.producer")
    return caplog


@pytest.fixture
def initialised():
    """Makes producers that are ready to begin."""
    made = []

    def make(config, kafka_id=None, **settings):
        producer = TransactionalProducer({**config, **settings, "dualwrite.engine": "native"}, kafka_id or fresh_id())
        made.append(producer)
        producer.init_transactions()
        return producer

    yield make
    for one in made:
        one.close()


def fresh_id():
    return f"native-{secrets.token_hex(4)}"


def shown(config, producer):
    with KafkaCoordinator(KafkaConfig.parse(config)) as coordinator:
        return coordinator.describe([producer.transactional_id], Deadline(60))[producer.transactional_id]


def write(producer, topic, value):
    producer.begin_transaction()
    producer.produce(topic, value)
    producer.prepare_transaction()


def test_two_phase_commit_is_used_where_it_is_enabled_and_allowed(two_phase_kafka, initialised, log):
    config, kafka_id = two_phase_kafka.client_config("native"), fresh_id()
    topic = two_phase_kafka.create_topic(f"two-phase-{secrets.token_hex(4)}", 1)
    for operation, kind, name in [
        ("all", "transactional_id", kafka_id),
        ("all", "topic", topic),
        ("describe_configs", "broker", "kafka-cluster"),
    ]:
        two_phase_kafka.allow("native", operation, kind, name)
    producer = initialised(config, kafka_id)
    assert producer.transaction_timeout_ms == NEVER_MS
    assert "no time limit to transactions (two-phase commit)" in log.text
    # Its transactions are ended by name as any others: by the owner, and by a settler.
    write(producer, topic, b"a")
    view = shown(config, producer)
    assert (view.status, view.timeout_ms) == (TransactionStatus.ONGOING, NEVER_MS)
    producer.commit_transaction()
    write(producer, topic, b"b")
    with KafkaCoordinator(KafkaConfig.parse(config)) as settler:
        named = {kafka_id: (producer.producer_id, producer.epoch)}
        ended = settler.end_exactly(named, committed=True, deadline=Deadline(60))
        assert ended == {kafka_id: EndAnswer.ENDED}
    # An undecided one is aborted by the next owner.
    write(initialised(config, kafka_id), topic, b"c")
    initialised(config, kafka_id)
    visible = [record.value for record in read_committed(two_phase_kafka.admin_config(), topic)]
    assert visible == [b"a", b"b"]


def test_status_shows_whether_two_phase_commit_is_used(two_phase_kafka, tmp_path):
    config, engine = two_phase_kafka.admin_config(), create_engine(f"sqlite:///{tmp_path / 'state.db'}")
    with engine.connect() as connection:
        upgrade(connection)
    shown = {}
    for name, settings in (("with", {}), ("without", {"transaction.two.phase.commit.enable": "false"})):
        with DualWriter(
            name,
            kafka={**config, **settings, "dualwrite.engine": "native"},
            database=engine,
            limits=WriterLimits(max_lanes=1),
        ):
            [shown[name]] = [one.has_no_time_limit for one in status(name, kafka=config, database=engine)]
    engine.dispose()
    assert shown == {"with": True, "without": False}


REQUIRED = {"transaction.two.phase.commit.enable": "true"}


def test_two_phase_commit_needs_both_rights_and_is_required_forbidden_or_left_open(two_phase_kafka, initialised, log):
    """KIP-939: both WRITE and TWO_PHASE_COMMIT on the transactional id."""
    config, kafka_id = two_phase_kafka.client_config("native"), fresh_id()
    two_phase_kafka.allow("native", "write", "transactional_id", kafka_id)
    with pytest.raises(ConfigurationError, match="grant Write and TwoPhaseCommit"):
        initialised(config, kafka_id, **REQUIRED)
    allow_two_phase_commit(two_phase_kafka.admin_config(), "native", kafka_id)
    assert initialised(config, kafka_id, **REQUIRED).transaction_timeout_ms == NEVER_MS
    assert initialised(config, kafka_id).transaction_timeout_ms == NEVER_MS
    forbidden = initialised(config, kafka_id, **{"transaction.two.phase.commit.enable": "false"})
    assert forbidden.transaction_timeout_ms == BROKER_DEFAULT_MS
    with pytest.raises(ConfigurationError, match="Write"):
        initialised(config, fresh_id(), **REQUIRED)  # no right at all: Kafka asks for Describe first
    without_write = fresh_id()
    two_phase_kafka.allow("native", "describe", "transactional_id", without_write)
    allow_two_phase_commit(two_phase_kafka.admin_config(), "native", without_write)
    with pytest.raises(ConfigurationError, match="Write"):
        initialised(config, without_write, **REQUIRED)


def test_two_phase_commit_that_is_required_of_a_stock_broker_is_refused_with_the_settings_to_change(
    dualwrite_kafka, initialised
):
    with pytest.raises(ConfigurationError, match=r"unstable\.api\.versions\.enable=true"):
        initialised(dualwrite_kafka.client_config(), **REQUIRED)


def test_without_the_right_to_it_the_broker_limits_transactions(two_phase_kafka, initialised, log):
    config, kafka_id = two_phase_kafka.client_config("native"), fresh_id()
    two_phase_kafka.allow("native", "write", "transactional_id", kafka_id)
    producer = initialised(config, kafka_id)
    assert producer.transaction_timeout_ms == shown(config, producer).timeout_ms == BROKER_DEFAULT_MS
    assert "LOST" in log.text


@pytest.mark.parametrize("limit_ms", [60_000, BROKER_DEFAULT_MS])
def test_the_users_own_limit_overrides_two_phase_commit(two_phase_kafka, initialised, log, limit_ms):
    config = two_phase_kafka.admin_config()
    producer = initialised(config, **{"transaction.timeout.ms": limit_ms})
    assert producer.transaction_timeout_ms == shown(config, producer).timeout_ms == limit_ms
    assert "no time limit" not in log.text


@pytest.mark.parametrize("settings", [{}, {"transaction.timeout.ms": NEVER_MS}])
def test_the_timeout_that_never_expires_is_used_where_the_broker_allows_it(mortal_kafka, initialised, log, settings):
    config = mortal_kafka.client_config()
    producer = initialised(config, **settings)
    assert producer.transaction_timeout_ms == shown(config, producer).timeout_ms == NEVER_MS
    assert "no time limit to transactions (transaction.timeout.ms=2147483647)" in log.text


def test_a_stock_broker_limits_transactions_and_a_warning_says_so(dualwrite_kafka, initialised, log):
    assert initialised(dualwrite_kafka.client_config()).transaction_timeout_ms == BROKER_DEFAULT_MS
    assert "LOST" in log.text
