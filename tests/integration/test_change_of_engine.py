"""A writer that is started again with the other producer engine, in the middle of everything: either settles what either left."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest
from harness.engines import ENGINES
from harness.forking import processes
from harness.orders import Order, write
from harness.patience import PATIENCE_S
from sqlalchemy import create_engine, insert

from dualwrite import DualWriter, Fenced, TransactionAborted, WriterLimits, failpoints
from dualwrite.clock import Deadline
from dualwrite.failpoints import FailpointError
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.protocol.values import Decision, Outcome
from dualwrite.recovery.claim import OwnerContext, unique_owner
from dualwrite.sinks.batches import complete_handed_over
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.writing.dual_write import DualWrite, Ending
from dualwrite.writing.lane import Lane

both_ways = pytest.mark.parametrize(("former", "latter"), [("librdkafka", "native"), ("native", "librdkafka")])
pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
ORDERS = Order.__table__


def leave_two_lanes(kafka, url, producer_engine, topic, log):
    """In a process of its own: completed are 1 and 2, decided is 3 alone, prepared and not decided is 4 at the kill."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    engine = create_engine(url)
    writer = DualWriter("orders", kafka={**kafka, "dualwrite.engine": producer_engine}, database=engine)
    writer.open()
    thread = ThreadPoolExecutor(1)  # one thread has one dual write at a time
    with writer.transaction() as outer:
        outer.produce(topic, value="1", partition=0)
        outer.connection.execute(insert(ORDERS).values(id=1))
        thread.submit(write, writer, topic, ORDERS, 2).result()
    with writer.transaction() as outer:
        outer.produce(topic, value="4", partition=1)
        outer.connection.execute(insert(ORDERS).values(id=4))
        failpoints.arm("write.decided:1:raise")
        writer._lanes._queue.on_freed = lambda *_: None  # nobody settles it here
        with suppress(FailpointError):
            thread.submit(write, writer, topic, ORDERS, 3).result()
        failpoints.arm("write.recorded:1:kill")
    os._exit(1)


def may_go_on(lane):
    rows = lane._context.store.read([lane.transactional_id])
    return lane.may_go_on(rows[0] if rows else None)


@both_ways
def test_a_writer_of_the_other_engine_settles_all_lanes_of_a_dead_one_and_writes_on(
    kafka, engine, url, orders, both, dualwrite_topic, former, latter, tmp_path
):
    log = tmp_path / "log"
    dying = processes().Process(target=leave_two_lanes, args=(kafka, url, former, dualwrite_topic, log))
    dying.start()
    dying.join(PATIENCE_S)
    assert dying.exitcode == -signal.SIGKILL, log.read_text()
    left = SqlStateStore(engine).find("orders")
    assert {row.transactional_id for row in left} >= {"orders", "orders#1", "orders#2"}
    assert {row.prepared.engine.value for row in left if row.prepared.has_transaction} == {former}
    with (
        DualWriter("orders", kafka={**kafka, "dualwrite.engine": latter}, database=engine) as writer,
        writer.transaction() as tx,
    ):
        tx.produce(dualwrite_topic, value="5")
        tx.connection.execute(insert(orders).values(id=5))
        with ThreadPoolExecutor(1) as thread:
            thread.submit(write, writer, dualwrite_topic, orders, 6).result()
    assert both() == ([1, 2, 3, 5, 6], [1, 2, 3, 5, 6])
    rows = [row for row in SqlStateStore(engine).find("orders") if row.prepared.has_transaction]
    assert {row.prepared.engine.value for row in rows} == {latter}
    assert {row.completed for row in rows} == {Outcome.COMMITTED}


@both_ways
def test_an_owner_that_lives_on_is_fenced_by_a_writer_of_the_other_engine(
    kafka, engine, orders, both, dualwrite_topic, former, latter
):
    with DualWriter(
        "orders", kafka={**kafka, "dualwrite.engine": former}, database=engine, limits=WriterLimits(max_lanes=1)
    ) as old:
        write(old, dualwrite_topic, orders, 1)
        with pytest.raises((Fenced, TransactionAborted)), old.transaction() as tx:
            tx.produce(dualwrite_topic, value="2", partition=0)
            tx.connection.execute(insert(orders).values(id=2))
            with DualWriter(
                "orders", kafka={**kafka, "dualwrite.engine": latter}, database=engine, limits=WriterLimits(max_lanes=1)
            ) as new:
                write(new, dualwrite_topic, orders, 3)
        with pytest.raises((Fenced, TransactionAborted)):
            write(old, dualwrite_topic, orders, 4)
    assert both() == ([1, 3], [1, 3])


def test_one_decision_completes_what_workers_of_both_engines_have_prepared(
    kafka, engine, orders, both, dualwrite_topic
):
    """As a driver's, whose workers were started with other settings."""

    def soon():
        return Deadline(60)

    config = KafkaConfig.parse(kafka)
    with closing(KafkaCoordinator(config)) as coordinator, ExitStack() as discarded_later:
        context = OwnerContext(coordinator, SqlStateStore(engine), unique_owner())

        def lane_of(producer_engine):
            def make_producer(row):
                return LaneProducer(
                    config,
                    row.kafka_id(row.incarnation),
                    coordinator=coordinator,
                    incarnation=row.incarnation,
                    engine=producer_engine,
                )

            lane = Lane(f"orders-{producer_engine}", context, make_producer)
            discarded_later.callback(lane.discard)
            lane.ready(soon())
            return lane

        def hand_over(lane, number):
            with (
                engine.connect() as connection,
                DualWrite(lane, context, connection, margin_s=1, timeout_s=60, ending=Ending.PREPARE) as transaction,
            ):
                transaction.produce(dualwrite_topic, str(number), partition=number % 2)
                transaction.connection.execute(insert(orders).values(id=number))
            return transaction.prepared

        lanes = [lane_of(producer_engine) for producer_engine in ENGINES]
        names = [lane.transactional_id for lane in lanes]
        for first in (1, 3):
            states = [hand_over(lane, number) for number, lane in enumerate(lanes, first)]
            with engine.connect() as connection:
                context.store.begin(connection)
                context.store.read_incarnation(connection, lanes[0].transactional_id)
                for lane, state in zip(lanes, states, strict=True):
                    assert context.store.decide(
                        connection, Decision(lane.transactional_id, lane.row.incarnation, state)
                    )[0]
                context.store.commit(connection)
            rows = context.store.read(names)
            assert {row.prepared.engine.value for row in rows} == set(ENGINES)
            done = complete_handed_over(rows, coordinator=coordinator, store=context.store, deadline=soon())
            assert sorted(row.transactional_id for row in done) == names
            for lane in lanes:
                assert may_go_on(lane)
                lane.ready(soon())
    assert both() == ([1, 2, 3, 4], [1, 2, 3, 4])
