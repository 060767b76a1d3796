"""Transactions in compacted topics: what a consumer that lags behind sees, and the warning of it."""

import logging
import secrets
import time

import pytest
from harness.patience import wait_until
from sqlalchemy import create_engine

from dualwrite import DualWriter
from dualwrite.clock import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.migrations import upgrade
from dualwrite.testing import read_committed

AT_ONCE = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.001",
    "delete.retention.ms": "0",
    "max.compaction.lag.ms": "200",
}


@pytest.fixture
def writer(mortal_kafka, tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path / 'state.db'}")
    with engine.connect() as connection:
        upgrade(connection)
    with DualWriter("accounts", kafka=mortal_kafka.client_config(), database=engine) as writer:
        yield writer
    engine.dispose()


def test_a_lagging_reader_of_a_compacted_topic_sees_a_part_of_a_transaction_and_a_warning_says_so(
    mortal_kafka, writer, caplog
):
    """The draft of transactional messaging: "it could result in an inconsistent view of the database"."""
    caplog.set_level(logging.WARNING, "dualwrite.writing")
    name = secrets.token_hex(4)
    topic = mortal_kafka.create_topic(f"compacted-{name}", 1, AT_ONCE)
    plain = mortal_kafka.create_topic(f"plain-{name}", 1)
    with writer.transaction() as tx:  # a transfer: one account has less, the other more
        tx.produce(topic, key="a", value="-10")
        tx.produce(topic, key="b", value="+10")
        tx.produce(plain, key="a", value="done")
    turns = 0

    def compacted():
        nonlocal turns
        turns += 1
        with (
            writer.transaction() as tx
        ):  # each turn rolls a segment: only what is older than the newest one is compacted
            tx.produce(topic, key="a", value=f"turn {turns}")
        time.sleep(0.2)  # the age that segment.ms asks for
        return b"-10" not in seen()

    def seen():
        return [record.value for record in read_committed(mortal_kafka.client_config(), topic)]

    wait_until(compacted)
    assert seen()[0] == b"+10"
    assert seen()[-1] == f"turn {turns}".encode()
    assert caplog.text.count(f"the topic '{topic}' is compacted") == 1
    assert plain not in caplog.text


def test_compaction_is_known_of_topics_that_we_may_describe_and_the_others_are_left_out(guarded_kafka):
    name = secrets.token_hex(4)
    topics = [
        guarded_kafka.create_topic(f"{kind}-{name}", 1, {"cleanup.policy": policy})
        for kind, policy in (("compact", "compact"), ("both", "compact,delete"), ("delete", "delete"))
    ]
    found = {}
    for user, config in (("admin", guarded_kafka.admin_config()), ("ann", guarded_kafka.client_config("ann"))):
        with KafkaCoordinator(KafkaConfig.parse(config)) as coordinator:
            found[user] = coordinator.compacted([*topics, "no-such-topic"], Deadline(30))
    assert found == {"admin": set(topics[:2]), "ann": set()}
