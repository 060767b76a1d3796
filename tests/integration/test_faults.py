"""Faults around a dual write: time-outs, paused owners, forgotten ids, other clusters, many recoverers."""

import os
import signal
import threading
from contextlib import closing
from functools import partial

import pytest
from harness.checker import Case
from harness.death import ended_by_hand, mortal
from harness.engines import answered
from harness.orders import write as write_order
from harness.patience import PATIENCE_S, patient, wait_until
from kafka.admin import AbortTransactionSpec, KafkaAdminClient
from kafka.structs import TopicPartition as Place
from sqlalchemy import create_engine, insert, select

from dualwrite import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriter,
    Fenced,
    TransactionAborted,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.clock import Deadline
from dualwrite.errors import OutcomeUnverifiable
from dualwrite.failpoints import FailpointError
from dualwrite.kafka import engine as engine_port
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.librdkafka import evidence
from dualwrite.kafka.librdkafka import producer as instance
from dualwrite.kafka.native import producer as native_instance
from dualwrite.protocol.values import Outcome, TransactionStatus
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed
from dualwrite.writing.lane import Lane

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


write = partial(write_order, partitions=(0, 1))


def leave_decided(kafka, engine, topic, orders, number, name="orders", **limits):
    """The owner is gone between the database's commit and Kafka's; returns its Kafka id."""
    writer = mortal(DualWriter(name, kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, **limits)))
    writer.open()
    failpoints.arm("write.decided:1:raise")
    with pytest.raises(FailpointError):
        write(writer, topic, orders, number)
    failpoints.arm("")
    writer.close()
    (row,) = SqlStateStore(engine).read([name])
    return row.kafka_id(row.incarnation)


def wait_for(kafka, kafka_id, *wanted):
    with closing(KafkaCoordinator(KafkaConfig.parse(kafka))) as coordinator:
        wait_until(lambda: coordinator.describe([kafka_id], Deadline(60))[kafka_id].status in wanted)


def test_broker_that_times_a_decided_transaction_out_is_a_loss_that_is_told(hasty_kafka, engine, orders):
    topic = hasty_kafka.create_topic("timed-out", 2)
    kafka = {**patient(hasty_kafka.client_config()), "transaction.timeout.ms": 5_000}
    kafka_id = leave_decided(kafka, engine, topic, orders, 1, margin_s=1.0)
    wait_for(kafka, kafka_id, TransactionStatus.COMPLETE_ABORT, TransactionStatus.NO_SUCH_ID)
    report = recover(open_for_s=0, kafka=kafka, database=engine)
    assert [loss.outcome.value for loss in report.losses] == ["lost"]
    assert len(SqlStateStore(engine).incidents("orders")) == 1
    assert not recover(open_for_s=0, kafka=kafka, database=engine).losses, "a second settling changed something"
    assert read_committed(kafka_of(kafka), topic) == []


def kafka_of(kafka):
    return {key: value for key, value in kafka.items() if key != "transaction.timeout.ms"}


def test_too_little_of_the_time_out_left_aborts_both(kafka, engine, orders, dualwrite_topic):
    settings = {**kafka, "transaction.timeout.ms": 12_000}
    with DualWriter("orders", kafka=settings, database=engine, limits=WriterLimits(margin_s=12.5)) as writer:
        with pytest.raises(TransactionAborted, match="time") as caught:
            write(writer, dualwrite_topic, orders, 1)
        assert not caught.value.retryable
    with engine.connect() as connection:
        assert connection.execute(select(orders)).all() == []
    assert read_committed(kafka, dualwrite_topic) == []


def test_id_that_the_coordinator_has_forgotten_is_settled_by_the_log(hasty_kafka, engine, orders):
    topic = hasty_kafka.create_topic("forgotten", 2)
    kafka = patient(hasty_kafka.client_config())
    kafka_id = leave_decided(kafka, engine, topic, orders, 1)
    coordinator = KafkaCoordinator(KafkaConfig.parse(kafka))
    (row,) = SqlStateStore(engine).read(["orders"])
    coordinator.end({kafka_id: row.prepared}, committed=True, deadline=Deadline(30))
    coordinator.close()
    wait_for(kafka, kafka_id, TransactionStatus.NO_SUCH_ID)
    assert recover(open_for_s=0, kafka=kafka, database=engine).losses == []
    with DualWriter("orders", kafka=kafka, database=engine) as writer:
        write(writer, topic, orders, 2)
    assert sorted(record.value for record in read_committed(kafka, topic)) == [b"1", b"1", b"2", b"2"]


def test_outcome_that_the_log_no_longer_shows_is_unverifiable_and_told(hasty_kafka, engine, orders):
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    topic = hasty_kafka.create_topic("deleted", 2)
    kafka = patient(hasty_kafka.client_config())
    kafka_id = leave_decided(kafka, engine, topic, orders, 1)
    coordinator = KafkaCoordinator(KafkaConfig.parse(kafka))
    (row,) = SqlStateStore(engine).read(["orders"])
    coordinator.end({kafka_id: row.prepared}, committed=True, deadline=Deadline(30))
    coordinator.close()
    wait_for(kafka, kafka_id, TransactionStatus.NO_SUCH_ID)
    admin = AdminClient(kafka)
    for future in admin.delete_records([TopicPartition(topic, partition, 2) for partition in (0, 1)]).values():
        future.result(120)
    with pytest.raises(OutcomeUnverifiable) as caught:
        DualWriter("orders", kafka=kafka, database=engine).open()
    assert topic in str(caught.value)
    with DualWriter("orders", kafka=kafka, database=engine) as writer:
        write(writer, topic, orders, 2)
    (incident,) = SqlStateStore(engine).incidents("orders")
    assert incident.outcome.value == "unverifiable"


def test_another_cluster_is_refused_and_nothing_is_aborted(kafka, hasty_kafka, engine, orders, dualwrite_topic):
    leave_decided(kafka, engine, dualwrite_topic, orders, 1)
    before = SqlStateStore(engine).read(["orders"])
    with pytest.raises(ConfigurationError, match="cluster"):
        DualWriter("orders", kafka=patient(hasty_kafka.client_config()), database=engine).open()
    assert SqlStateStore(engine).read(["orders"]) == before
    assert recover(open_for_s=0, kafka=kafka, database=engine).rolled_forward == ["orders"]


def test_recoverers_at_once_converge(kafka, engine, orders, dualwrite_topic):
    for number in range(6):
        leave_decided(kafka, engine, dualwrite_topic, orders, number, name=f"left-{number}")
    reports, failures = [], []

    def settle():
        try:
            reports.append(recover(open_for_s=0, kafka=kafka, database=engine, prefix="left-"))
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=settle) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not [loss for report in reports for loss in report.losses]
    assert not [item for item in status(kafka=kafka, database=engine) if item.needs_recovery]
    seen = sorted(int(record.value) for record in read_committed(kafka, dualwrite_topic))
    assert seen == sorted(2 * list(range(6)))


ABORTING = {"write.before_abort", "write.rolled_back"}
PAUSES = [name for name in failpoints.FAILPOINTS if name.startswith(("write.", "claim.")) and name not in ABORTING]


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [pytest.param(name, marks=() if name == "write.recorded" else pytest.mark.thorough) for name in PAUSES],
)
def test_owner_paused_anywhere_and_resumed_after_somebody_settled_can_do_nothing(
    tmp_path, kafka, url, dualwrite_topic, point
):
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    nth = 1 if point.startswith("claim.") else 3 if point == "write.produced" else 2
    zombie = case.start(failpoint=f"{point}:{nth}:stop", paused_owner_timeout_s=1)
    _, how = os.waitpid(zombie.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(how)
    case.run(operations=2)
    zombie.send_signal(signal.SIGCONT)
    zombie.communicate(timeout=PATIENCE_S)
    recover(open_for_s=0, kafka=kafka, database=url)
    took_over = point == "claim.before"  # it claims after the other has finished: a new owner, not a zombie
    rows = case.verify()
    assert {"w2-0", "w2-1"} <= rows
    assert (zombie.returncode == 0) is took_over
    if not took_over:
        assert not {"w1-2", "w1-3"} & rows


def test_kafka_killed_and_restarted_in_the_middle_keeps_both_sides_equal(mortal_kafka, engine, orders):
    """Under a writer at work, and under a decided transaction whose owner is dead."""
    topic = mortal_kafka.create_topic("killed-in-the-middle", 2)
    kafka = mortal_kafka.client_config()
    kafka_id = leave_decided(kafka, engine, topic, orders, 1, name="left")
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, topic, orders, 2)
        mortal_kafka.kill()
        mortal_kafka.start()
        wait_for(kafka, kafka_id, TransactionStatus.ONGOING)
        done = []
        for number in range(3, 8):
            wait_until(lambda: writer.ready)  # while Kafka is known to be silent, nothing is tried
            try:
                write(writer, topic, orders, number)
            except TransactionAborted:
                continue
            done.append(number)
        assert done, "no write succeeded after the restart"
    with DualWriter("left", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)):
        pass
    assert sorted(int(record.value) for record in read_committed(kafka, topic)) == sorted(2 * [1, 2, *done])
    with engine.connect() as connection:
        assert sorted(connection.execute(select(orders.c.id)).scalars()) == [1, 2, *done]


def test_a_loss_is_raised_by_the_transaction_that_finds_it(hasty_kafka, engine, orders):
    """The owner's own commit finds that an operator has ended its decided transaction."""
    topic = hasty_kafka.create_topic("operator", 2)
    kafka = patient(hasty_kafka.client_config())
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        hit = failpoints.hit
        failpoints.hit = ended_by_hand(kafka, engine)
        try:
            with pytest.raises(DecidedTransactionLost):
                write(writer, topic, orders, 1)
        finally:
            failpoints.hit = hit
        write(writer, topic, orders, 2)
    assert sorted(int(record.value) for record in read_committed(kafka, topic)) == [2, 2]


def write_abort_markers(kafka, topic, writer, partitions):
    """As ``kafka-transactions.sh abort`` does, past the coordinator."""
    producer = writer._lanes.first.producer
    with closing(KafkaAdminClient(bootstrap_servers=kafka["bootstrap.servers"])) as admin:
        for partition in partitions:
            # The epoch of a coordinator that has never moved.
            spec = AbortTransactionSpec(
                Place(topic, partition), producer.producer_id, producer.epoch, coordinator_epoch=0
            )
            admin.abort_transaction(spec)


@pytest.mark.parametrize("point", ["write.prepared", "write.decided"])
def test_what_a_tool_aborts_under_a_live_owner_is_recorded_when_it_closes(
    kafka, engine, orders, dualwrite_topic, point
):
    """The coordinator commits it afterwards and answers success: the log has the last word, in each partition."""
    writer = DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))
    writer.open()

    def at(name):
        if name == point:
            write_abort_markers(kafka, dualwrite_topic, writer, [0])

    with failpoints.watched(at):
        write(writer, dualwrite_topic, orders, 1)
    with pytest.raises(DecidedTransactionLost):
        writer.close()
    (incident,) = SqlStateStore(engine).incidents("orders")
    assert incident.outcome is Outcome.LOST
    assert [record.partition for record in read_committed(kafka, dualwrite_topic)] == [1]


def write_around_a_marker(kafka, topic, writer, orders, number):
    """Two messages to one partition; a tool ends there what was written, between them."""
    with writer.transaction() as tx:
        tx.connection.execute(insert(orders).values(id=number))
        tx.produce(topic, value=str(number), partition=0)
        producer = writer._lanes.first.producer
        answered(producer)
        write_abort_markers(kafka, topic, writer, [0])
        tx.produce(topic, value=str(number), partition=0)


def test_what_a_tool_aborts_between_two_messages_is_recorded_when_the_owner_closes(
    kafka, engine, orders, dualwrite_topic
):
    writer = DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))
    writer.open()
    write_around_a_marker(kafka, dualwrite_topic, writer, orders, 1)
    with pytest.raises(DecidedTransactionLost):
        writer.close()
    (incident,) = SqlStateStore(engine).incidents("orders")
    assert incident.outcome is Outcome.LOST


def test_what_a_tool_aborts_between_two_messages_in_bulk_mode_aborts_both_sides(
    kafka, engine, orders, dualwrite_topic, both
):
    """The later message hides the marker: only the gap in the sequence numbers shows that there was an earlier one."""
    with DualWriter(
        "orders", kafka={**kafka, "dualwrite.bulk": True}, database=engine, limits=WriterLimits(max_lanes=1)
    ) as writer:
        for number in (1, 2):
            write_order(writer, dualwrite_topic, orders, number)
        with pytest.raises(TransactionAborted, match="ended there by hand"):
            write_around_a_marker(kafka, dualwrite_topic, writer, orders, 3)
        with pytest.raises(LookupError), writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="4", partition=0)
            raise LookupError
        for number in (5, 6):
            write_order(writer, dualwrite_topic, orders, number)
    assert not SqlStateStore(engine).incidents("orders")
    assert both() == ([1, 2, 5, 6], [1, 2, 5, 6])


def test_what_a_tool_aborts_under_a_live_owner_is_recorded_when_it_idles(
    kafka, engine, orders, dualwrite_topic, monkeypatch
):
    """Idling asks the log by itself before it records "committed"."""
    monkeypatch.setattr(Lane, "come_to_rest", lambda *_: None)
    told = []

    def at(name):
        if name == "write.decided":
            write_abort_markers(kafka, dualwrite_topic, writer, [0])

    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, idle_after_s=0.01), on_loss=told.append
    ) as writer:
        with failpoints.watched(at):
            write(writer, dualwrite_topic, orders, 1)
        store = SqlStateStore(engine)
        wait_until(lambda: store.read(["orders"])[0].completed is not None)
        assert store.read(["orders"])[0].completed is Outcome.LOST
    assert [type(loss) for loss in told] == [DecidedTransactionLost]


@pytest.mark.parametrize(
    ("bulk", "ended_by"),
    [
        pytest.param(False, "markers", id="markers"),
        pytest.param(True, "markers", id="markers-bulk"),
        pytest.param(False, "a new producer", id="new-producer"),
        pytest.param(False, "an abort at the coordinator", id="coordinator"),
    ],
)
def test_what_somebody_has_aborted_is_not_decided_if_there_is_time_to_look(
    kafka, engine, orders, dualwrite_topic, monkeypatch, bulk, ended_by, coordinator
):
    for module in (engine_port, evidence, instance, native_instance):
        monkeypatch.setattr(module, "OLD_S", -1.0)

    def abort_at_the_coordinator():
        [row] = SqlStateStore(engine).read(["orders"])
        kafka_id = row.kafka_id(row.incarnation)
        state = writer._lanes.first.producer.prepared_state
        coordinator.end({kafka_id: state}, committed=False, deadline=Deadline(60))

    abort = {
        "markers": lambda: write_abort_markers(kafka, dualwrite_topic, writer, [0]),
        "a new producer": lambda: ended_by_hand(kafka, engine)("write.decided"),
        "an abort at the coordinator": abort_at_the_coordinator,
    }[ended_by]

    def at(name):
        if name == "write.recorded":
            abort()

    with DualWriter(
        "orders", kafka={**kafka, "dualwrite.bulk": bulk}, database=engine, limits=WriterLimits(max_lanes=1)
    ) as writer:
        with failpoints.watched(at), pytest.raises((TransactionAborted, Fenced)) as caught:
            write(writer, dualwrite_topic, orders, 1)
        assert caught.value.outcome == "aborted"
        write(writer, dualwrite_topic, orders, 2)
    assert not SqlStateStore(engine).incidents("orders")
    assert sorted(int(record.value) for record in read_committed(kafka, dualwrite_topic)) == [2, 2]
    with engine.connect() as connection:
        assert connection.execute(select(orders.c.id)).scalars().all() == [2]


def test_recovery_url_and_engine_are_the_same(kafka, url, engine, orders, dualwrite_topic):
    leave_decided(kafka, engine, dualwrite_topic, orders, 1)
    assert [
        item.row.transactional_id for item in recover(open_for_s=0, kafka=kafka, database=url, dry_run=True).planned
    ] == ["orders"]
    own = create_engine(url)
    assert recover("orders", kafka=kafka, database=own, open_for_s=3600).skipped == ["orders"]
    assert recover("orders", kafka=kafka, database=own).rolled_forward == ["orders"]
    own.dispose()
