"""A broker that forgets the markers of a partition without a leader (KAFKA-20734), because the leader was suspended.

Nothing shows it: the answers are good, and no connection breaks. Owners find it before they continue, settlers find it
after them, and what was left open is ended there.
"""

import os
import threading
import time
from contextlib import suppress

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from harness import cut_off
from harness.flushing import flush
from harness.patience import wait_until
from sqlalchemy import create_engine

from dualwrite import DualWriter, TransactionAborted, Unavailable, WriterLimits, failpoints, recover
from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.failpoints import FailpointError
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.engine import ProducerEngine
from dualwrite.kafka.transaction_ends import EndQuestions
from dualwrite.migrations import upgrade
from dualwrite.protocol.values import Outcome, TransactionStatus
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import read_committed
from dualwrite.writing import lane_pool
from dualwrite.writing.lane import Lane

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.longest]

ENGINE = os.environ.get("DUALWRITE_PRODUCER_ENGINE", "native")
SETTINGS = {
    # No call of a writer's is doubtful for its duration.
    "librdkafka": {"retry.backoff.ms": 60_000, "retry.backoff.max.ms": 60_000, "log_level": 2},
    "native": {},
}
AWAY = 3
LONG_S = 120
DELETED = {"deleted-where-open": 0, "deleted-elsewhere": 1}
"""Stages, with the partition whose records are deleted afterwards."""
DEAD = ["recovered", "settle.retired", "repair.before", "repair.added", "repair.ended", *DELETED]
ALIVE = ["aborts-next", "writes-next", "closes"]
UNAWARE = "unaware"
DECIDED = [*DEAD, *ALIVE, UNAWARE]
ABORTED = "aborted"
UNDECIDED = "undecided"


class Stage:
    """A writer whose id is coordinated elsewhere than on the broker that is taken away, and a topic: half of it is there."""

    def __init__(self, cluster, path, name):
        self.kafka = {**cluster.client_config(), **SETTINGS[ENGINE]}
        self.engine = create_engine(f"sqlite:///{path}")
        with self.engine.connect() as connection:
            upgrade(connection)
        self.admin = AdminClient({**cluster.client_config(), "log_level": 0})
        self.coordinator = KafkaCoordinator(KafkaConfig.parse(self.kafka))
        self.at = AWAY
        while self.at == AWAY:
            self.name = self.topic = f"{name}-{time.monotonic_ns()}"
            self.writer = DualWriter(
                self.name,
                kafka={**self.kafka, "dualwrite.engine": ENGINE},
                database=self.engine,
                limits=WriterLimits(max_lanes=1),
            )
            self.writer.__enter__()
            self.kafka_id = self.row.kafka_id(self.row.incarnation)
            self.at = self.coordinator._coordinators._find([self.kafka_id], Deadline(LONG_S))[self.kafka_id]
            if self.at == AWAY:
                self.writer.__exit__(None, None, None)
        self.producer_id = self.view().producer_id
        replicas = {"replica_assignment": [[AWAY], [self.at]], "config": {"min.insync.replicas": "1"}}
        self.admin.create_topics([NewTopic(self.topic, num_partitions=2, **replicas)])[self.topic].result(LONG_S)
        wait_until(self.has_all_leaders, LONG_S)

        self.lane = self.writer._lanes.first

    @property
    def row(self):
        [row] = SqlStateStore(self.engine).read([self.name])
        return row

    def view(self):
        return self.coordinator.describe([self.kafka_id], Deadline(LONG_S))[self.kafka_id]

    def leaders(self):
        """As a broker shows them that is not taken away: any other client may wait for the one that is."""
        answer = self.coordinator.brokers.metadata([self.topic], Deadline(LONG_S), node=self.at)
        partitions = sorted(answer.topics[0].partitions, key=lambda partition: partition.partition_index)
        return [partition.leader_id for partition in partitions] or [-1]

    def has_all_leaders(self):
        return all(leader > 0 for leader in self.leaders())

    def write(self, value):
        with self.writer.transaction() as tx:
            for partition in (0, 1):
                tx.produce(self.topic, f"{value}/{partition}", partition=partition)

    def abort(self, value):
        with pytest.raises(ZeroDivisionError), self.writer.transaction() as tx:
            for partition in (0, 1):
                tx.produce(self.topic, f"{value}/{partition}", partition=partition)
            flush(self.lane.producer, LONG_S)  # it is there when the broker goes away
            raise ZeroDivisionError

    def leave_open(self, value):
        """An owner ends without deciding what it has written."""
        failpoints.arm("write.prepared:1:raise,write.before_abort:1:raise")
        with pytest.raises(FailpointError):
            self.write(value)
        failpoints.arm("")
        self.die()

    def recover(self):
        return recover(kafka=self.kafka, database=self.engine, transactional_id=self.name)

    def visible(self):
        return {message.value.decode() for message in read_committed(self.kafka, self.topic)}

    def hanging(self):
        """The partitions in which the writer's first producer has left something open."""
        partitions = [(self.producer_id, [(self.topic, 0), (self.topic, 1)])]
        [still_open] = self.coordinator.still_open(partitions, Deadline(LONG_S))
        return sorted(partition for _, partition in still_open)

    def die(self):
        self.lane.discard()


@pytest.fixture(scope="module", autouse=True)
def idle():
    """No writer works in the background: a dead one must not, and a live one must find everything at its next use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_pool, "_see_to", lambda *_, **__: None)
        patch.setattr(EndQuestions, "ask", lambda _: None)
        yield


@pytest.fixture(scope="module")
def cluster():
    """Its third broker can be suspended, and cut off from its controllers."""
    with cut_off.cluster_to_cut() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stages(cluster, tmp_path_factory):
    """Commits and an abort that were answered while a partition had no leader, and a settler that has not looked again yet."""
    made = {
        name: Stage(cluster, tmp_path_factory.mktemp(name) / "rows.sqlite", name.replace(".", "-"))
        for name in [*DECIDED, ABORTED, UNDECIDED]
    }
    made[UNDECIDED].write("a")
    made[UNDECIDED].leave_open("b")
    arrived, gone, back = threading.Semaphore(0), threading.Event(), threading.Event()

    def wait_at(point):
        if point in {"write.decided", "write.rolled_back", "settle.before_retire"}:
            arrived.release()
            gone.wait(LONG_S)
        elif point == "settle.retired":
            back.wait(LONG_S)

    with failpoints.watched(wait_at):
        works = [threading.Thread(target=made[name].write, args=("a",)) for name in DECIDED]
        works.append(threading.Thread(target=made[ABORTED].abort, args=("a",)))
        settler = threading.Thread(target=made[UNDECIDED].recover)
        for thread in [*works, settler]:
            thread.start()
        for _ in [*works, settler]:
            assert arrived.acquire(timeout=LONG_S)
        cluster.suspend(AWAY)
        wait_until(lambda: all(stage.leaders()[0] == -1 for stage in made.values()), LONG_S)
        gone.set()
        for thread in works:
            thread.join(LONG_S)
            assert not thread.is_alive()
        wait_until(
            lambda: all(made[name].view().status is TransactionStatus.COMPLETE_COMMIT for name in DECIDED), LONG_S
        )
        wait_until(lambda: made[ABORTED].view().status is TransactionStatus.COMPLETE_ABORT, LONG_S)
        # A native one's epoch is raised by an abort, librdkafka's by an initialisation.
        retired = {TransactionStatus.EMPTY, TransactionStatus.COMPLETE_ABORT}
        wait_until(lambda: made[UNDECIDED].view().status in retired, LONG_S)
        cluster.resume(AWAY)
        wait_until(lambda: all(stage.has_all_leaders() for stage in made.values()), LONG_S)
        hanging = {name: stage.hanging() for name, stage in made.items()}
        assert all(where == [0] for where in hanging.values()), f"the broker has not forgotten the markers: {hanging}"
        back.set()
        settler.join(LONG_S)
    yield made
    for stage in made.values():
        stage.die()
        # Its threads would look for the brokers until the last of all tests has ended. What it has to tell is known.
        with suppress(DualWriteError):
            stage.writer.close()
        stage.coordinator.close()
        stage.engine.dispose()


def test_a_decided_transaction_is_committed_also_where_its_marker_was_forgotten(stages):
    stage = stages["recovered"]
    [before] = status(kafka=stage.kafka, database=stage.engine, transactional_id=stage.name)
    assert before.needs_recovery
    assert not stage.recover().losses
    assert stage.visible() == {"a/0", "a/1"}
    assert stage.row.completed is Outcome.COMMITTED
    after = status(kafka=stage.kafka, database=stage.engine, transactional_id=stage.name)
    assert not [item for item in after if item.needs_recovery]


@pytest.mark.parametrize("name", DELETED)
def test_what_was_forgotten_is_committed_although_records_of_the_transaction_are_gone(stages, name):
    """One partition shows a commit or is open, the other shows nothing: neither counts for the whole."""
    stage = stages[name]
    gone = TopicPartition(stage.topic, DELETED[name], -1)
    stage.admin.delete_records([gone])[gone].result(LONG_S)
    assert not stage.recover().losses
    assert not stage.hanging()
    assert stage.visible() == {f"a/{1 - gone.partition}"}
    assert stage.row.completed is Outcome.COMMITTED


@pytest.mark.parametrize("point", ["settle.retired", "repair.before", "repair.added", "repair.ended"])
def test_whoever_comes_after_a_settler_that_died_goes_on_with_it(stages, point):
    stage = stages[point]
    failpoints.arm(f"{point}:1:raise")
    with pytest.raises(FailpointError):
        stage.recover()
    failpoints.arm("")
    assert not stage.recover().losses
    assert stage.visible() == {"a/0", "a/1"}


def test_what_is_undecided_is_ended_also_where_its_abort_was_forgotten(stages):
    stage = stages[UNDECIDED]
    assert not stage.hanging()
    assert stage.visible() == {"a/0", "a/1"}


def test_an_owner_aborts_nothing_before_it_knows_that_its_commit_has_ended(stages):
    stage = stages["aborts-next"]
    stage.abort("b")
    stage.write("c")
    assert stage.visible() == {"a/0", "a/1", "c/0", "c/1"}


def test_an_owner_decides_nothing_before_it_knows_that_its_commit_has_ended(stages):
    stage = stages["writes-next"]
    fixed = []
    with failpoints.watched(lambda point: fixed.append(stage.hanging()) if point == "write.produced" else None):
        stage.write("b")
    assert fixed[0] == []
    assert stage.visible() == {"a/0", "a/1", "b/0", "b/1"}


def test_an_owner_that_closes_records_as_committed_what_the_log_shows_as_committed(stages):
    stage = stages["closes"]
    stage.writer.close()
    assert not stage.hanging()
    assert stage.row.completed is Outcome.COMMITTED
    assert stage.visible() == {"a/0", "a/1"}


def test_what_an_owner_has_aborted_does_not_come_back_with_its_next_commit(stages):
    stage = stages[ABORTED]
    stage.write("b")
    assert not stage.hanging()
    assert stage.visible() == {"b/0", "b/1"}


def test_a_commit_that_an_abort_has_taken_along_is_told(stages, monkeypatch):
    stage = stages[UNAWARE]
    monkeypatch.setattr(Lane, "know_end", lambda *_: None)
    monkeypatch.setattr(ProducerEngine, "_require_end_known", lambda *_: None)
    stage.leave_open("b")
    [loss] = stage.recover().losses
    assert loss.outcome is Outcome.LOST
    assert not stage.hanging()
    assert stage.visible() == {"a/1"}


OF_A_COMMIT = ["begun", "checked", "produced", "body_done", "prepared", "recorded", "decided", "completed"]
OF_AN_ABORT = ["before_abort", "rolled_back"]


EVERY_POINT = [f"write.{point}" for point in [*OF_A_COMMIT, *OF_AN_ABORT]]


@pytest.mark.thorough
@pytest.mark.parametrize("point", EVERY_POINT)
def test_a_broker_is_suspended_at_every_fail_point(cluster, tmp_path, point):
    go_on_without_a_broker_at(cluster, tmp_path, point, cluster.suspend, cluster.resume)


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[] if point == "write.decided" else pytest.mark.thorough) for point in EVERY_POINT],
)
def test_a_broker_is_cut_off_from_its_controllers_at_every_fail_point(cluster, tmp_path, point):
    """It goes on showing its partitions as their leader, with the transactions open whose markers it has missed."""
    go_on_without_a_broker_at(cluster, tmp_path, point, cluster.cut_off, cluster.join)


def go_on_without_a_broker_at(cluster, tmp_path, point, take_away, bring_back):
    """A dual write comes to the point, a broker is taken away there, and comes back; others follow."""
    stage = Stage(cluster, tmp_path / "rows.sqlite", point.replace(".", "-"))
    ended = threading.Event()
    resumers = []

    def resume():
        ended.wait(2)  # what waits for the broker must not wait for ever
        bring_back(AWAY)

    def suspend_at(reached):
        if reached == point and not resumers:
            take_away(AWAY)
            wait_until(lambda: stage.leaders()[0] == -1, LONG_S)
            resumers.append(threading.Thread(target=resume))
            resumers[0].start()

    expected = set()

    def write(value):
        try:
            stage.write(value)
        except (TransactionAborted, Unavailable):
            return False
        expected.update({f"{value}/0", f"{value}/1"})
        return True

    with failpoints.watched(suspend_at):
        if point.removeprefix("write.") in OF_AN_ABORT:
            stage.abort("a")
        else:
            write("a")
    ended.set()
    resumers[0].join(LONG_S)
    wait_until(stage.has_all_leaders, LONG_S)
    stage.abort("b")
    assert any(write(f"c{attempt}") for attempt in range(10))
    stage.abort("d")
    stage.writer.close()
    assert not stage.recover().losses
    assert stage.visible() == expected
    stage.coordinator.close()
    stage.engine.dispose()


@pytest.mark.thorough
def test_brokers_before_4_3_keep_the_marker_for_the_next_leader(tmp_path):
    """The last release without the defect: the same suspension, and nothing is left open."""
    arrived, gone = threading.Event(), threading.Event()

    def wait_at(point):
        if point == "write.decided":
            arrived.set()
            gone.wait(LONG_S)

    with cut_off.cluster_to_cut("4.2.2") as cluster:
        stage = Stage(cluster, tmp_path / "rows.sqlite", "kept")
        with failpoints.watched(wait_at):
            work = threading.Thread(target=stage.write, args=("a",))
            work.start()
            assert arrived.wait(LONG_S)
            cluster.suspend(AWAY)
            wait_until(lambda: stage.leaders()[0] == -1, LONG_S)
            gone.set()
            work.join(LONG_S)
        assert stage.view().status is TransactionStatus.PREPARE_COMMIT
        there = [(stage.producer_id, [(stage.topic, 1)])]
        wait_until(lambda: stage.coordinator.still_open(there, Deadline(LONG_S)) == [{}], LONG_S)
        assert stage.view().status is TransactionStatus.PREPARE_COMMIT  # it waits for the partition without a leader
        cluster.resume(AWAY)
        wait_until(lambda: stage.view().status is TransactionStatus.COMPLETE_COMMIT, LONG_S)
        assert stage.hanging() == []
        assert stage.visible() == {"a/0", "a/1"}
        stage.die()
        with suppress(DualWriteError):
            stage.writer.close()
        stage.coordinator.close()
        stage.engine.dispose()
