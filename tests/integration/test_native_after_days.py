"""A month without a recovery: what a broker keeps of native transactions without a time limit, and what it forgets."""

import secrets
from contextlib import ExitStack

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.checker import Case
from harness.databases import prepare, sqlite_url
from harness.moved_clock import needs_faketime, restart_days_later
from harness.patience import PATIENCE_S, wait_until
from kafka.protocol.admin import DescribeProducersRequest

from dualwrite import DecidedTransactionLost, DualWriter, recover
from dualwrite.clock import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.operations import blocking_transactions
from dualwrite.protocol.values import NEVER_MS, Outcome, TransactionStatus
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedKafka

DAYS = 30
MINUTES_MS = 10 * 60_000
KEPT = {"retention.ms": "-1"}


@pytest.fixture(scope="module")
def patient_kafka():
    """A broker that sets transactions no limit, and looks all the time for what has expired. What expires when is its default."""
    properties = {
        "transaction.max.timeout.ms": str(NEVER_MS),
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
        "producer.id.expiration.check.interval.ms": "500",
        "log.retention.check.interval.ms": "500",
        "log.initial.task.delay.ms": "500",
    }
    with EmbeddedKafka(properties) as kafka:
        yield kafka


class Left:
    """A writer of native transactions with a topic and a database of its own, and what its dead owner has left behind."""

    def __init__(self, kafka, directory, name, *, config=None, **settings):
        self.name, self.config = name, kafka.client_config()
        self.topic = kafka.create_topic(f"{name}-{secrets.token_hex(4)}", 2, KEPT if config is None else config)
        directory = directory / name
        directory.mkdir()
        self.database = prepare("sqlite", sqlite_url(directory))
        self.engine = self.database.engines[0]
        self.case = Case(directory, {**self.config, **settings}, self.database.url, self.topic, name)

    def die(self, failpoint):
        """Write one operation, and die at this point of the next incarnation's first one."""
        self.case.run(operations=1, producer_engine="native")
        self.case.run(operations=1, producer_engine="native", failpoint=failpoint, killed=True)

    @property
    def row(self):
        return SqlStateStore(self.engine).read([self.name])[0]

    def view(self, incarnation=2):
        kafka_id = self.row.kafka_id(incarnation)
        with KafkaCoordinator(KafkaConfig.parse(self.config)) as coordinator:
            return coordinator.describe([kafka_id], Deadline(60))[kafka_id]

    def recover(self):
        return recover(self.name, kafka=self.config, database=self.engine)

    def writer(self):
        return DualWriter(self.name, kafka={**self.config, "dualwrite.engine": "native"}, database=self.engine)

    def bounds(self):
        """By partition, the first offset, and the one that committed readers cannot pass."""
        with ExitStack() as later:
            consumer = Consumer({**self.config, "group.id": "none", "isolation.level": "read_committed"})
            later.callback(consumer.close)
            places = [TopicPartition(self.topic, number) for number in (0, 1)]
            return [consumer.get_watermark_offsets(place, PATIENCE_S) for place in places]

    def producers(self):
        """The ids of the producers that partition 0 remembers."""
        with KafkaCoordinator(KafkaConfig.parse(self.config)) as coordinator:
            topic = DescribeProducersRequest.TopicRequest(name=self.topic, partition_indexes=[0])
            [answer] = coordinator.brokers.exchange([(1, DescribeProducersRequest(topics=[topic]))], Deadline(60))
        return {producer.producer_id for producer in answer.topics[0].partitions[0].active_producers}


@needs_faketime
@pytest.mark.slow
def test_a_month_without_a_recovery(patient_kafka, tmp_path, caplog):
    decided = Left(patient_kafka, tmp_path, "decided")
    limited = Left(patient_kafka, tmp_path, "limited", **{"transaction.timeout.ms": MINUTES_MS})
    undecided = Left(patient_kafka, tmp_path, "undecided")
    deleted = Left(patient_kafka, tmp_path, "deleted", config={})
    for left in (decided, limited, deleted):
        left.die("write.decided:1")
    undecided.die("write.prepared:1")
    assert decided.row.prepared.is_native
    before = undecided.bounds()
    former = decided.view(1).producer_id

    restart_days_later(patient_kafka, DAYS)

    the_broker_forgets_what_has_ended(decided, former)
    a_decided_transaction_is_completed(decided)
    with_a_limit_it_is_lost_recorded_and_raised(limited)
    an_undecided_one_holds_back_readers_until_a_recovery(undecided, before)
    assert "no longer in the log" not in caplog.text
    retention_deletes_messages_of_an_open_transaction(deleted)
    assert "retention or compaction has deleted messages before any reader could have them" in caplog.text


def the_broker_forgets_what_has_ended(left, former):
    """``transactional.id.expiration.ms`` is 7 days, ``producer.id.expiration.ms`` one. An open transaction outlives both."""
    wait_until(lambda: left.view(1).status is TransactionStatus.NO_SUCH_ID)
    wait_until(lambda: former not in left.producers())
    assert left.view().producer_id in left.producers()
    assert (left.view().status, left.view().timeout_ms) == (TransactionStatus.ONGOING, NEVER_MS)


def a_decided_transaction_is_completed(left):
    assert left.recover().rolled_forward == [left.name]
    assert left.case.verify() == {"w1-0", "w2-0"}
    left.case.run(operations=1, producer_engine="native")
    assert left.case.verify() == {"w1-0", "w2-0", "w3-0"}


def with_a_limit_it_is_lost_recorded_and_raised(left):
    wait_until(lambda: left.view().status is TransactionStatus.COMPLETE_ABORT)
    with pytest.raises(DecidedTransactionLost), left.writer():
        pass
    assert left.row.completed is Outcome.LOST
    assert [incident.outcome for incident in SqlStateStore(left.engine).incidents()] == [Outcome.LOST]


def an_undecided_one_holds_back_readers_until_a_recovery(left, before):
    assert left.bounds() == before
    [item] = [one for one in status(left.name, kafka=left.config, database=left.engine) if one.needs_recovery]
    assert (item.is_undecided, item.aborted_in_s) == (True, None)
    found = blocking_transactions(left.config, topics=[left.topic], open_for_s=0)
    assert {(one.partition, one.writer) for one in found} == {(0, left.name), (1, left.name)}
    assert all(f"dualwrite recover {left.name}" in str(one) for one in found)
    left.recover()
    assert not blocking_transactions(left.config, topics=[left.topic], open_for_s=0)
    assert all(high > held for (_, high), (_, held) in zip(left.bounds(), before, strict=True))
    assert left.case.verify() == {"w1-0"}


def retention_deletes_messages_of_an_open_transaction(left):
    """Kafka deletes old messages whether a reader could have had them or not: nothing holds retention back."""
    report = left.recover()
    assert (report.rolled_forward, report.losses) == ([left.name], [])
    assert left.case.in_kafka() == []
