"""Settling native transactions on a real broker: left open, undecided, timed out, and forgotten by the broker."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from harness.databases import CLUSTER, prepare, sqlite_url
from harness.native import UNVERIFIED, NativeProducer
from harness.patience import wait_until

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.abandoned import AbandonedTransaction, Completion
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.kafka.transaction_ends import PendingEnd, ask_for_ends, know_end
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Ended, EndStep
from dualwrite.protocol.values import (
    NEVER_MS,
    Decision,
    EndAnswer,
    LogProof,
    OpenTransaction,
    Outcome,
    ShownProducer,
    TransactionStatus,
)
from dualwrite.recovery.settle import settle
from dualwrite.testing import EmbeddedKafka, read_committed

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

AWAY = 3


@pytest.fixture(scope="module")
def broker():
    """A broker without a limit on timeouts.

    It does not verify partitions, so that a ``Produce`` of an old version leaves records of a transaction in a partition whose
    marker the coordinator never writes: as if it had forgotten it (KAFKA-20734).
    """
    properties = {
        "transaction.max.timeout.ms": str(NEVER_MS),
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "transaction.partition.verification.enable": "false",
    }
    with EmbeddedKafka(properties) as server:
        yield server


class Stage:
    """A row, its incarnation's producer, and a topic."""

    def __init__(self, config, path, topic, *, timeout_ms=NEVER_MS):
        self.config, self.topic = config, topic
        self.database = prepare("sqlite", sqlite_url(path))
        self.store = self.database.store()
        self.coordinator = KafkaCoordinator(KafkaConfig.parse(config))
        self.admin = AdminClient({**config, "log_level": 0})
        self.row = self.claim()
        self.kafka_id = self.row.kafka_id(self.row.incarnation)
        self.producer = NativeProducer(config, self.kafka_id, timeout_ms=timeout_ms)
        self.ids = self.coordinator.topic_ids([topic], Deadline(60))

    def claim(self):
        return self.store.claim(["orders-" + self.topic], owner="a test", cluster_id=CLUSTER)[0]

    def state(self, offsets):
        producer = self.producer
        named = {(self.topic, partition): offset for partition, offset in offsets.items()}
        return PreparedTxnState.native(producer.producer_id, producer.epoch, self.row.incarnation, named, self.ids)

    def decide(self, state):
        with self.store.engine.connect() as connection:
            self.store.begin(connection)
            self.store.read_incarnation(connection, self.row.transactional_id)
            self.store.decide(connection, Decision(self.row.transactional_id, self.row.incarnation, state))
            self.store.commit(connection)

    def end(self, epoch, *, committed=True):
        named = {self.kafka_id: (self.producer.producer_id, epoch)}
        return self.coordinator.end_exactly(named, committed=committed, deadline=Deadline(60))[self.kafka_id]

    def end_fully(self, epoch, *, committed=True):
        wait_until(lambda: self.end(epoch, committed=committed) is EndAnswer.ENDED)
        wait_until(lambda: self.view().status in {TransactionStatus.COMPLETE_COMMIT, TransactionStatus.COMPLETE_ABORT})

    def view(self):
        return self.coordinator.describe([self.kafka_id], Deadline(60))[self.kafka_id]

    def settle(self):
        rows = [self.claim()]
        return settle(rows, coordinator=self.coordinator, store=self.store, deadline=Deadline(120))

    def visible(self):
        return sorted(record.value.decode() for record in read_committed(self.config, self.topic))

    def now(self):
        return self.store.read([self.row.transactional_id])[0]

    def close(self):
        self.producer.close()
        self.coordinator.close()
        self.database.dispose()


@pytest.fixture
def stage(broker, tmp_path):
    made = []

    def make(**kwargs):
        topic = broker.create_topic(f"native-{time.monotonic_ns()}", partitions=2)
        made.append(Stage(broker.client_config(), tmp_path, topic, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_requests_name_one_transaction_and_every_answer_has_a_meaning(stage):
    made = stage()
    producer, topic = made.producer, made.topic
    assert made.coordinator.transaction_version(Deadline(60)) >= 2
    assert made.end(0) is EndAnswer.INVALID_STATE  # nothing was written
    offset = producer.produce(topic, 0, "a")
    state = made.state({0: offset, 1: None})
    assert made.coordinator.open_transactions([(state, state.partitions)], Deadline(60)) == [
        [OpenTransaction((topic, 0), 0, offset)]
    ]
    epochs = {(topic, 0): ShownProducer(0, offset), (topic, 1): ShownProducer()}
    assert made.coordinator.producer_epochs([state], Deadline(60)) == [epochs]
    assert made.end(1) is EndAnswer.FENCED
    made.end_fully(0)
    assert made.end(0) is EndAnswer.ENDED  # again
    assert made.end(0, committed=False) is EndAnswer.INVALID_STATE
    assert made.view().epoch == 1
    assert made.coordinator.producer_epochs([state], Deadline(60))[0][topic, 0] == ShownProducer(1)
    assert made.coordinator.prove([state], Deadline(60)) == [LogProof.COMMITTED]
    elsewhere = replace(made.row, transactional_id="never-seen").kafka_id(1)
    unknown = made.coordinator.end_exactly({elsewhere: (1, 0)}, committed=True, deadline=Deadline(60))
    assert unknown == {elsewhere: EndAnswer.NO_SUCH_ID}


def test_only_the_end_of_native_transactions_raises_the_epoch_whichever_engine_has_written(stage):
    made = stage()
    undecided = made.state({0: made.producer.produce(made.topic, 0, "native")})
    shared = made.coordinator.end({made.kafka_id: undecided}, committed=False, deadline=Deadline(60))
    assert shared == {made.kafka_id: EndAnswer.ENDED}
    wait_until(lambda: made.view().status is TransactionStatus.COMPLETE_ABORT)
    assert made.view().epoch == 0  # the next transaction would have the same name
    other = made.kafka_id + "-librdkafka"
    with LaneProducer(made.config, other, coordinator=made.coordinator) as owner:
        owner.init_transactions()
        owner.begin_transaction()
        owner.produce(made.topic, "librdkafka's", partition=1)
        state = owner.prepare_transaction()
        exactly = {other: (state.producer_id, state.epoch)}
        answers = made.coordinator.end_exactly(exactly, committed=True, deadline=Deadline(60))
        assert answers == {other: EndAnswer.ENDED}
        wait_until(lambda: made.coordinator.prove([state], Deadline(60)) == [LogProof.COMMITTED])
        view = made.coordinator.describe([other], Deadline(60))[other]
        assert (view.producer_id, view.epoch) == (state.producer_id, state.epoch + 1)
        assert made.coordinator.end({other: state}, committed=True, deadline=Deadline(60))[other] is EndAnswer.FENCED
    assert made.visible() == ["librdkafka's"]


def test_the_end_of_a_transaction_is_known_from_the_leaders(stage):
    made = stage()
    made.producer.produce(made.topic, 0, "a/0")
    state = made.state({0: 0, 1: made.producer.produce(made.topic, 1, "a/1")})
    pending = PendingEnd(Ended(state, committed=True))
    assert ask_for_ends(made.coordinator, [pending], Deadline(60)) == [EndStep.WAIT]
    wait_until(lambda: made.end(0) is EndAnswer.ENDED)
    assert know_end(made.coordinator, PendingEnd(pending.ended), Deadline(60)) is EndStep.KNOWN
    # In a topic made again under that name nothing of it is left.
    made.admin.delete_topics([made.topic])[made.topic].result(60)
    wait_until(lambda: made.topic not in made.coordinator.topic_ids([made.topic], Deadline(60)))
    made.admin.create_topics([NewTopic(made.topic, num_partitions=2)])[made.topic].result(60)
    assert know_end(made.coordinator, PendingEnd(pending.ended), Deadline(60)) is EndStep.KNOWN


def test_a_forgotten_marker_keeps_the_end_from_being_known(stage):
    made = stage()
    hung(made)
    assert (
        know_end(made.coordinator, PendingEnd(Ended(made.now().prepared, committed=True)), Deadline(60))
        is EndStep.SETTLE
    )


def test_an_abandoned_transaction_is_completed_by_its_state(stage):
    made = stage()
    state = made.state({number: made.producer.produce(made.topic, number, f"a/{number}") for number in (0, 1)})
    kept = AbandonedTransaction(made.coordinator, made.kafka_id)
    assert kept.complete(state, Deadline(60)) is Completion.COMMITTED
    assert made.view().epoch == 1
    made.producer.produce(made.topic, 0, "b/0", epoch=1)
    assert kept.complete(state, Deadline(60)) is Completion.ABORTED
    assert made.view().epoch == 2
    assert made.visible() == ["a/0", "a/1"]


def test_a_decided_transaction_left_open_is_committed(stage):
    made = stage()
    made.decide(made.state({number: made.producer.produce(made.topic, number, f"a/{number}") for number in (0, 1)}))
    report = made.settle()
    assert (report.rolled_forward, report.repaired, report.losses) == ([made.row.transactional_id], [], [])
    row = made.now()
    assert (row.completed, row.settled_incarnation, row.settle_fence) == (Outcome.COMMITTED, 1, 2)
    assert made.visible() == ["a/0", "a/1"]
    assert made.settle().rolled_forward == []


def test_an_undecided_transaction_is_aborted(stage):
    made = stage()
    made.producer.produce(made.topic, 0, "undecided")
    made.settle()
    assert (made.visible(), made.now().settled_incarnation) == ([], 1)
    assert made.end(0) is EndAnswer.FENCED


def test_an_undecided_transaction_after_a_decided_one_is_aborted_and_its_epoch_fenced(stage):
    made = stage()
    made.decide(made.state({0: made.producer.produce(made.topic, 0, "decided")}))
    made.end_fully(0)
    made.producer.produce(made.topic, 1, "undecided", epoch=1)
    made.settle()
    assert (made.visible(), made.now().completed) == (["decided"], Outcome.COMMITTED)
    assert made.end(1) in {EndAnswer.FENCED, EndAnswer.INVALID_STATE}


def test_a_decided_transaction_that_the_broker_has_timed_out_is_recorded_as_lost(stage):
    made = stage(timeout_ms=1000)
    made.decide(made.state({0: made.producer.produce(made.topic, 0, "lost")}))
    wait_until(lambda: made.view().status is TransactionStatus.COMPLETE_ABORT)
    report = made.settle()
    assert [loss.outcome for loss in report.losses] == [Outcome.LOST]
    assert (made.visible(), made.now().completed) == ([], Outcome.LOST)
    assert [incident.outcome for incident in made.store.incidents()] == [Outcome.LOST]


def hung(made):
    """A decided transaction that the coordinator calls committed, while it is open in partition 1."""
    first = made.producer.produce(made.topic, 0, "a/0")
    made.producer.produce(made.topic, 1, "a/1", version=UNVERIFIED)
    made.decide(made.state({0: first, 1: None}))
    made.end_fully(0)
    [found] = made.coordinator.open_transactions([(made.now().prepared, made.now().prepared.partitions)], Deadline(60))
    assert [one.partition for one in found] == [(made.topic, 1)]


def test_what_the_broker_has_forgotten_is_repaired_with_commit(stage):
    made = stage()
    hung(made)
    report = made.settle()
    assert (report.repaired, report.losses) == ([made.row.transactional_id], [])
    assert made.visible() == ["a/0", "a/1"]
    assert made.now().completed is Outcome.COMMITTED


def test_an_undecided_transaction_that_the_broker_has_forgotten_is_found_in_the_topics_of_the_last_decision(stage):
    made = stage()
    made.decide(made.state({0: made.producer.produce(made.topic, 0, "decided")}))
    made.end_fully(0)
    made.producer.produce(made.topic, 0, "undecided", epoch=1)
    made.producer.produce(made.topic, 1, "undecided", epoch=1, version=UNVERIFIED)
    made.end_fully(1, committed=False)
    report = made.settle()
    assert (report.repaired, report.losses) == ([made.row.transactional_id], [])
    state = made.now().prepared
    assert made.coordinator.open_transactions([(state, ())], Deadline(60)) == [[]]
    assert made.visible() == ["decided"]


def test_a_repair_that_could_time_out_unnoticed_is_not_begun(stage):
    made = stage(timeout_ms=60_000)
    hung(made)
    with pytest.raises(Unavailable, match="could time out the repair"):
        made.settle()
    assert (made.now().completed, made.now().settled_incarnation) == (None, 0)


@pytest.mark.parametrize("seen_by", ["its epoch", "the log"])
def test_a_decision_that_a_restored_database_has_lost_is_recorded(stage, seen_by):
    made = stage()
    made.decide(made.state({0: made.producer.produce(made.topic, 0, "kept")}))
    made.end_fully(0)
    kept = made.now().prepared
    later = 1 if seen_by == "its epoch" else 0
    offset = made.producer.produce(made.topic, later, "lost", epoch=1)
    made.end_fully(1)
    if seen_by == "the log":
        made.producer.produce(made.topic, 1, "aborted", epoch=2)
        made.end_fully(2, committed=False)
    report = made.settle()
    assert made.now().prepared == kept
    [loss] = report.losses
    assert loss.went_back
    assert (loss.row.prepared.epoch, loss.row.prepared.is_native) == (1, True)
    firsts = [first.offset for first in loss.row.prepared.first_offsets]
    assert firsts == ([offset] if seen_by == "the log" else [])
    assert made.visible() == ["kept", "lost"]


@pytest.mark.thorough
def test_a_partition_whose_broker_was_suspended_is_repaired(tmp_path):
    with EmbeddedKafka({"transaction.max.timeout.ms": str(NEVER_MS)}, brokers=3) as cluster:
        admin = AdminClient({**cluster.client_config(), "log_level": 0})
        while True:
            topic = f"suspended-{time.monotonic_ns()}"
            replicas = {"replica_assignment": [[1], [AWAY]], "config": {"min.insync.replicas": "1"}}
            admin.create_topics([NewTopic(topic, num_partitions=2, **replicas)])[topic].result(120)

            def leader(topic=topic):
                return admin.list_topics(topic, timeout=10).topics[topic].partitions[1].leader

            wait_until(lambda: leader() == AWAY, 120)
            path = tmp_path / topic
            path.mkdir()
            made = Stage(cluster.client_config(), path, topic)
            if made.producer.coordinator != AWAY:
                break
            made.close()
        made.decide(made.state({number: made.producer.produce(topic, number, f"a/{number}") for number in (0, 1)}))
        cluster.suspend(AWAY)
        wait_until(lambda: leader() == -1, 120)
        made.end_fully(0)
        cluster.resume(AWAY)
        wait_until(lambda: leader() == AWAY, 120)
        state = made.now().prepared
        [found] = made.coordinator.open_transactions([(state, state.partitions)], Deadline(120))
        assert [one.partition for one in found] == [(topic, 1)]
        report = made.settle()
        assert (report.repaired, made.visible()) == ([made.row.transactional_id], ["a/0", "a/1"])
        made.close()
