"""A broker is suspended at every fail point of a dual write, of a claim, of settling, of repair and of a batch's decision.

It goes on, no connection breaks, and it has missed markers (KAFKA-20734). Many writers stand at their points when one broker
stops, so that it has to be suspended once. Half of each topic is on that broker alone. When the broker's session has ended,
the writers go on: their coordinators skip its markers and call the transactions complete. Then it comes back, with these
transactions open, and the writers go on as they like. What repairs them stands at its points when the broker stops again.

Points are left out that lie inside a Spark job, or belong to messages that wait in the database; and to transactions that were
prepared there (``participant.*``, ``batch.completed``), which differ in the database alone.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import product
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from harness.batch_of_one import BatchOfOne
from harness.hanging import abort_hanging
from harness.patience import PATIENCE_S, patient, wait_until
from sqlalchemy import Column, MetaData, Table, Text, create_engine, select

from dualwrite import DualWriteError, DualWriter, WriterLimits, failpoints, recover
from dualwrite.clock import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.migrations import upgrade
from dualwrite.protocol.values import TransactionStatus
from dualwrite.recovery.claim import OwnerContext
from dualwrite.recovery.recover import status
from dualwrite.sinks.batches import Decision
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import EmbeddedKafka, History, Journal, read_committed
from dualwrite.testing.checker import Place, compare
from dualwrite.writing import writer_resources as opened_module
from dualwrite.writing.dual_write import DualWrite, Ending
from dualwrite.writing.lane import Lane

pytestmark = [pytest.mark.kafka, pytest.mark.postgresql, pytest.mark.slow]

SUSPENDED, OTHER = 3, 1
ROWS = Table("operations", MetaData(), Column("id", Text, primary_key=True))
ABORTING = {"write.before_abort", "write.rolled_back"}
WAITING = {"write.falls_back", "write.turns", "write.waits"}
WRITING = [name for name in failpoints.FAILPOINTS if name.startswith("write.") and name not in WAITING]
SETTLING = [name for name in failpoints.FAILPOINTS if name.startswith(("claim.", "settle."))]
REPAIRING = [name for name in failpoints.FAILPOINTS if name.startswith("repair.")]
BATCHES = [
    "batch.handed_over", "batch.prepared", "batch.recorded", "batch.decided",
    "complete.before", "complete.ended", "complete.recorded",
]  # fmt: skip
DECIDED = {"write.prepared", "write.recorded", "write.decided", *BATCHES[:5]}
"""From there on a dual write comes to its decision without the partition's leader, and its marker is due while there is none."""
GOES_ON = ("aborts", "writes elsewhere", "closes", "dies")
"""The owner's next step when the broker is back: its dual write aborts, or writes to the other partition; or the owner ends."""
DONE = {TransactionStatus.COMPLETE_COMMIT, TransactionStatus.COMPLETE_ABORT}


class OnPurpose(Exception):
    """Leaves a dual write, which then aborts."""


class Writer:
    """One writer, which stands at one fail point when the broker is suspended.

    Args:
        crowd: Where it writes.
        point: The fail point of its second dual write, or of what settles that after its owner's death. Where a point belongs
            to repair, the writer decides during the first suspension, and its successor is at the point in a second one.
        goes_on: What it does when the broker is back.
    """

    def __init__(self, crowd, point, goes_on):
        self._crowd = crowd
        self.point = point
        self.goes_on = goes_on
        self.name = f"{point}-{goes_on}".replace(" ", "-")
        self.claims = False
        """Whether the decided transaction is left to a claim, which needs the partition's leader first."""
        self.settled = point in SETTLING
        self.repaired = point in REPAIRING
        self.kafka_id = ""
        self._made = 0
        self._writer = None

    def open(self):
        self._writer = DualWriter(
            self.name, kafka=self._crowd.kafka, database=self._crowd.engine, limits=WriterLimits(max_lanes=1)
        )
        self._writer.open()

    def until_suspended(self):
        """Up to the point, wait there, and come to the end of what it was at."""
        self.open()
        self._write()
        [row] = SqlStateStore(self._crowd.engine).read([self.name])
        self.kafka_id = row.kafka_id(row.incarnation)
        if not self.settled:
            with self._crowd.waiting_at("write.decided" if self.repaired else self.point):
                self._write(aborts=self.point in ABORTING)
            if self.repaired:
                self.die()  # at once: its owner would repair it, once the broker is back
            return
        with self._crowd.armed("write.decided", self._die_there):
            self._write()
        with self._crowd.waiting_at(self.point):
            self.open()

    def until_suspended_again(self):
        """The work after the owner's death, up to its point and to its end."""
        with self._crowd.waiting_at(self.point):
            self.open()

    def go_on(self):
        if self.goes_on == "dies":
            self.die()
            return
        if self.goes_on == "aborts":
            self._write(aborts=True)
            self._write()
        elif self.goes_on == "writes elsewhere":
            self._write(partitions=(1, 1))
        self._writer.close()

    def _die_there(self):
        self.die()  # before the block ends: its housekeeping would settle what is decided
        raise Dies

    def die(self):
        """As by SIGKILL: nothing is recorded, and no housekeeping runs."""
        for place in self._writer._lanes._queue.places:
            pooled = place.thing
            pooled.given_up = pooled.needs_settling = True
            pooled.pending = None
            pooled.lane.discard()

    def _write(self, *, aborts=False, partitions=(0, 1)):
        self._made += 1
        operation = f"{self.name}/{self._made}"
        journal = self._crowd.journal
        try:
            with journal.operation(operation, stream=self.name), self._writer.transaction() as tx:
                for number in partitions:
                    tx.produce(self._crowd.topic, operation, partition=number)
                tx.connection.execute(ROWS.insert().values(id=operation))
                if aborts:
                    raise OnPurpose
        except OnPurpose:
            journal.aborted(operation)
        except (DualWriteError, Dies):
            pass  # the journal has it


class Dies(BaseException):
    """Stands for SIGKILL in a thread."""


class BatchWriter(Writer):
    """Hands one dual write over and decides on it, as a batch of one part. Then it dies."""

    def __init__(self, crowd, point):
        super().__init__(crowd, point, "dies")
        self._coordinator = KafkaCoordinator(KafkaConfig.parse(crowd.kafka))
        self._context = OwnerContext(self._coordinator, SqlStateStore(crowd.engine), "decider")
        self._lane = Lane(self.name, self._context, self._make_producer)

    def _make_producer(self, row):
        kafka_id = row.kafka_id(row.incarnation)
        return LaneProducer(self._crowd.kafka, kafka_id, coordinator=self._coordinator, incarnation=row.incarnation)

    def until_suspended(self):
        self._lane.ready(Deadline(PATIENCE_S))
        row = self._lane.row
        self.kafka_id = row.kafka_id(row.incarnation)
        with self._crowd.waiting_at(self.point), suppress(DualWriteError):
            self._write()

    def _write(self):
        crowd, operation, lane = self._crowd, f"{self.name}/1", self._lane
        with crowd.journal.operation(operation, stream=self.name):
            with (
                crowd.engine.connect() as connection,
                DualWrite(
                    lane, self._context, connection, margin_s=10, timeout_s=PATIENCE_S, ending=Ending.HAND_OVER
                ) as tx,
            ):
                for number in (0, 1):
                    tx.produce(crowd.topic, operation, partition=number)
            part = SimpleNamespace(
                transactional_id=self.name,
                incarnation=lane.row.incarnation,
                namespace=lane.row.namespace,
                prepared=tx.prepared,
            )
            batch = BatchOfOne(self.name, operation, ROWS, crowd.kafka, crowd.engine, on_claim=self._note_claim)
            decision = Decision(
                batch, [part], self._context, connect=crowd.engine.connect, timeout_s=PATIENCE_S, idle_s=PATIENCE_S
            )
            decision.run()

    def _note_claim(self):
        self.claims = True  # its coordinator was the suspended broker: the commit that it sent may still arrive

    def go_on(self):
        self._lane.discard()
        self._coordinator.close()


_here = threading.local()
"""The thread's writer waits at a point, if ``armed`` says so."""


class Armed:
    """A point of one writer, whichever of its threads passes it."""

    def __init__(self, point, does):
        self.point = point
        self.does = does
        self.passed = False


class Carrying(ThreadPoolExecutor):
    """Its threads belong to the writer of the thread that gives them work."""

    def submit(self, function, /, *arguments, **named):
        armed = getattr(_here, "armed", None)

        def work():
            _here.armed = armed
            return function(*arguments, **named)

        return super().submit(work)


class Crowd:
    """All writers of one suspension, with their topic, their rows and their journal."""

    def __init__(self, cluster, engine, path, writers):
        self.engine = engine
        self.cluster = cluster
        # No call is doubtful for its duration: that would end the incarnation, and hide what this is about.
        # Where the coordinator is suspended, its successor is asked when that time is over.
        self.kafka = {**patient(cluster.client_config()), "log_level": 2, "socket.timeout.ms": 10_000}
        self.journal = Journal(path)
        self.topic = f"t{time.monotonic_ns()}"
        self.writers = [
            BatchWriter(self, point) if point in BATCHES else Writer(self, point, *goes_on)
            for point, *goes_on in writers
        ]
        self._admin = AdminClient({**cluster.client_config(), "log_level": 0, "socket.timeout.ms": 3000})
        self._never_reached = []
        self._arrived = threading.Semaphore(0)
        self._suspended = threading.Event()
        replicas = {"replica_assignment": [[SUSPENDED], [OTHER]], "config": {"min.insync.replicas": "1"}}
        self._admin.create_topics([NewTopic(self.topic, num_partitions=2, **replicas)])[self.topic].result(PATIENCE_S)
        wait_until(lambda: self._leader() == SUSPENDED)

    def _leader(self):
        try:
            return self._admin.list_topics(self.topic, timeout=3).topics[self.topic].partitions[0].leader
        except (KafkaException, KeyError):
            return None

    # What the fail points do to the writer that passes them

    def waiting_at(self, point):
        return self.armed(point, self._wait)

    @contextmanager
    def armed(self, point, does):
        armed = _here.armed = Armed(point, does)
        try:
            yield
        finally:
            _here.armed = None
            if not armed.passed:
                self._never_reached.append(point)
                self._arrived.release()  # the others need not wait for it

    @staticmethod
    def passed(name):
        armed = getattr(_here, "armed", None)
        if armed is not None and armed.point == name and not armed.passed:
            armed.passed = True
            armed.does()

    def _wait(self):
        self._arrived.release()
        assert self._suspended.wait(PATIENCE_S)

    # The course of events

    def run(self):
        repaired = [writer for writer in self.writers if writer.repaired]
        with failpoints.watched(self.passed), ThreadPoolExecutor(len(self.writers)) as threads:
            decided = [writer for writer in self.writers if writer.repaired or writer.point in DECIDED]
            self._suspend_under([threads.submit(writer.until_suspended) for writer in self.writers], decided)
            if repaired:
                # The next step of the others ends the repaired transaction while the broker is away, or when it is back.
                ended = [writer for writer in repaired if writer.point == "repair.added"]
                self._suspend_under([threads.submit(writer.until_suspended_again) for writer in repaired], ended)
            for one in [threads.submit(writer.go_on) for writer in self.writers]:
                one.result(PATIENCE_S)
        return [f"never reached: {point}" for point in self._never_reached] + self._check()

    def _suspend_under(self, under_way, decided):
        """Suspend the broker when all of them are at their points, until what is decided has been ended without it."""
        self._suspended.clear()
        for _ in under_way:
            wait_until(lambda: self._arrived.acquire(timeout=1) or [one.result() for one in under_way if one.done()])
        self.cluster.suspend(SUSPENDED)
        try:
            wait_until(lambda: self._leader() == -1)
            self._suspended.set()
            self._wait_until_skipped(decided)
        finally:
            self.cluster.resume(SUSPENDED)
        wait_until(lambda: self._leader() == SUSPENDED)
        for one in under_way:
            one.result(PATIENCE_S)

    def _wait_until_skipped(self, decided):
        """Until the coordinators call complete what they could not write the markers of."""
        coordinator = KafkaCoordinator(KafkaConfig.parse(self.cluster.client_config()))

        def skipped():
            ids = [writer.kafka_id for writer in decided if not writer.claims]
            return all(view.status in DONE for view in coordinator.describe(ids, Deadline(PATIENCE_S)).values())

        try:
            wait_until(skipped)
        finally:
            coordinator.close()

    def _check(self):
        """The differences found."""
        report = recover(kafka=self.kafka, database=self.engine, timeout_s=120)
        # Of owners that live, nothing hangs: they know where their last transaction was, until it is known to have ended there.
        hanging = [f"hanging: {one}" for one in abort_hanging(self.kafka, self.topic, 2)]
        wrong = [one for one in hanging if "-dies." not in one]
        wrong += [f"lost: {loss.row.transactional_id}: {loss.detail}" for loss in report.losses]
        wrong += [
            f"to be recovered: {item}" for item in status(kafka=self.kafka, database=self.engine) if item.needs_recovery
        ]
        wrong += [f"incident: {incident}" for incident in SqlStateStore(self.engine).incidents()]
        history: History = Journal.read(self.journal.path)
        with self.engine.connect() as connection:
            rows = list(connection.execute(select(ROWS.c.id)).scalars())
        seen = [
            Place(self.topic, record.partition, record.offset, record.value.decode())
            for record in read_committed(self.kafka, self.topic)
        ]
        return wrong + [str(finding) for finding in compare(history, rows, seen, messages_per_operation=2)]


@pytest.fixture(scope="module")
def cluster():
    with EmbeddedKafka(brokers=3, start_timeout_s=PATIENCE_S) as cluster:
        yield cluster


@pytest.fixture
def crowd_of(cluster, dualwrite_database, tmp_path, monkeypatch):
    monkeypatch.setattr(opened_module, "ThreadPoolExecutor", Carrying)
    engine = create_engine(dualwrite_database, pool_size=30, max_overflow=30)
    with engine.connect() as connection:
        upgrade(connection)
    ROWS.metadata.create_all(engine)
    yield lambda writers: Crowd(cluster, engine, tmp_path / "journal", writers)
    engine.dispose()


@pytest.mark.thorough
def test_a_broker_is_suspended_at_every_point_of_a_dual_write(crowd_of):
    crowd = crowd_of(product(WRITING, ["aborts", "closes"]))
    wrong = crowd.run()
    assert not wrong, "\n".join(wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("goes_on", GOES_ON)
def test_a_broker_is_suspended_at_every_point_of_settling_and_repair_whatever_its_writer_does_next(crowd_of, goes_on):
    batches = BATCHES if goes_on == "dies" else []
    crowd = crowd_of([(point, goes_on) for point in [*WRITING, *SETTLING, *REPAIRING, *batches]])
    wrong = crowd.run()
    assert not wrong, "\n".join(wrong)
