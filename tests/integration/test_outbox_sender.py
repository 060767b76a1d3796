"""Messages that wait are sent once and in order, whoever sends them and whatever fails; what Kafka refuses is moved aside."""

import logging
import threading
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.checker import Case
from harness.orders import on_both, on_postgresql
from harness.patience import wait_until
from sqlalchemy import create_engine, text

from dualwrite import DualWriter, Fenced, Unavailable, WriterLimits, failpoints, recover
from dualwrite.clock import Deadline
from dualwrite.failpoints import FailpointError
from dualwrite.protocol.message import OVERHEAD
from dualwrite.protocol.outbox import PRODUCED_AT
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.testing import PostgresProxy
from dualwrite.testing.checker import read_committed
from dualwrite.writing.left_behind import send_for

POINTS = ("outbox.read", "outbox.sent", "outbox.deleted", "write.prepared", "write.recorded", "write.decided")


def put(engine, topic, numbers, *, writer="orders", value=str, key=None, partition=0):
    """Messages as a writer leaves them that has fallen back."""
    rows = [
        {
            "writer": writer,
            "topic": topic,
            "partition": partition,
            "key": None if key is None else key(number),
            "value": value(number).encode(),
        }
        for number in numbers
    ]
    with engine.begin() as connection:
        for row in rows:
            connection.execute(
                text(
                    "INSERT INTO dualwrite_outbox (writer, transactional_id, topic, topic_partition, key, value) "
                    "VALUES (:writer, :writer, :topic, :partition, :key, :value)"
                ),
                row,
            )
        if not connection.execute(
            text("SELECT mode FROM dualwrite_outbox_mode WHERE writer = :w"), {"w": writer}
        ).all():
            connection.execute(
                text("INSERT INTO dualwrite_outbox_mode (writer, mode) VALUES (:w, 'later')"), {"w": writer}
            )


def left(engine):
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM dualwrite_outbox"))


def mode(engine, writer="orders"):
    with engine.connect() as connection:
        return connection.scalar(text("SELECT mode FROM dualwrite_outbox_mode WHERE writer = :w"), {"w": writer})


def aside(engine):
    with engine.connect() as connection:
        return connection.execute(text("SELECT topic, value, reason FROM dualwrite_outbox_aside ORDER BY seq")).all()


def sent(kafka, topic):
    return [record.value.decode() for record in read_committed(kafka, topic)]


def send(engine, kafka, writer="orders", **options):
    return send_for(writer, kafka=kafka, database=SqlDatabase(engine), deadline=Deadline(60.0), **options)


@on_both
def test_what_waits_is_sent_once_and_in_order_before_the_first_block(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, range(1200))
    with DualWriter("orders", kafka=kafka, database=engine) as writer:
        assert (left(engine), mode(engine)) == (0, "direct")
        with writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="direct", partition=0)
    assert sent(kafka, dualwrite_topic) == [*map(str, range(1200)), "direct"]


@on_postgresql
def test_messages_of_many_topics_and_partitions_keep_their_order(kafka, engine, dualwrite_kafka, dualwrite_topic):
    other = dualwrite_kafka.create_topic(f"{dualwrite_topic}-other", 2)
    for number in range(0, 40, 2):
        put(engine, dualwrite_topic, [number])
        put(engine, other, [number + 1], partition=number // 2 % 2)
    assert send(engine, kafka) == 40
    assert sent(kafka, dualwrite_topic) == [str(number) for number in range(0, 40, 2)]
    found = read_committed(kafka, other)
    for partition in (0, 1):
        of_it = [int(record.value) for record in found if record.partition == partition]
        assert of_it == sorted(of_it)
        assert len(of_it) == 10


@on_postgresql
def test_a_record_has_todays_time_and_the_blocks_own_in_a_header(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, [1])
    with engine.begin() as connection:
        connection.execute(text("UPDATE dualwrite_outbox SET put_at = '2001-01-01T00:00:00Z'"))
    send(engine, kafka)
    [record] = read_committed(kafka, dualwrite_topic)
    assert dict(record.headers)[PRODUCED_AT] == b"978307200000"
    with closing(Consumer({**kafka, "group.id": "reader", "enable.auto.commit": False})) as consumer:
        consumer.assign([TopicPartition(dualwrite_topic, 0, 0)])
        [message] = consumer.consume(1, 30.0)
        assert message.timestamp()[1] > 1_700_000_000_000


@on_postgresql
@pytest.mark.parametrize("point", POINTS)
def test_a_sender_that_dies_leaves_the_rest_to_recover(kafka, engine, dualwrite_topic, point):
    put(engine, dualwrite_topic, range(1500))
    failpoints.arm(f"{point}:2:raise")
    try:
        with pytest.raises(FailpointError):
            send(engine, kafka)
    finally:
        failpoints.arm("")
    report = recover("orders", kafka=kafka, database=engine)
    assert sum(report.sent.values()) == (0 if point == "write.decided" else 1000)
    assert sent(kafka, dualwrite_topic) == list(map(str, range(1500)))
    assert (left(engine), mode(engine)) == (0, "direct")


@on_postgresql
def test_a_sender_whose_rows_somebody_else_has_taken_aborts(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, range(10))
    taken = []

    def take(name):
        if name == "outbox.sent" and not taken:
            taken.append(name)
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM dualwrite_outbox WHERE value = '5'"))

    with failpoints.watched(take):
        assert send(engine, kafka) == 9
    assert sent(kafka, dualwrite_topic) == [str(number) for number in range(10) if number != 5]


@on_postgresql
def test_a_sender_that_was_replaced_sends_nothing_more(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, range(10))
    replaced = []

    def replace(name):
        if name == "outbox.sent" and not replaced:
            replaced.append(name)
            thread = threading.Thread(target=lambda: replaced.append(send(engine, kafka)))
            thread.start()
            thread.join(30)

    with failpoints.watched(replace), pytest.raises(Fenced):
        send(engine, kafka)
    assert replaced[1:] == [10]
    assert sent(kafka, dualwrite_topic) == list(map(str, range(10)))


@on_postgresql
def test_a_message_that_is_too_large_by_now_is_moved_aside_and_the_others_are_sent(
    kafka, engine, dualwrite_topic, caplog
):
    put(engine, dualwrite_topic, range(300), value=lambda number: "x" * 2_000_000 if number == 123 else str(number))
    with caplog.at_level(logging.ERROR):
        send(engine, kafka)
    assert sent(kafka, dualwrite_topic) == [str(number) for number in range(300) if number != 123]
    [(topic, value, reason)] = aside(engine)
    assert (topic, len(value)) == (dualwrite_topic, 2_000_000)
    assert "MESSAGE_TOO_LARGE" in reason
    assert sum("moved aside" in record.getMessage() for record in caplog.records) == 1
    assert mode(engine) == "direct"


@on_postgresql
@pytest.mark.parametrize("engine_of_producer", ["native", "librdkafka"])
@pytest.mark.parametrize("count", [1, 300])
def test_a_message_as_large_as_any_may_be_is_sent_though_it_has_waited(
    kafka, engine, dualwrite_topic, count, engine_of_producer
):
    """It has no room for the header that says since when it has waited: those beside it do."""
    largest = "x" * (1_000_000 - OVERHEAD)
    put(engine, dualwrite_topic, range(count), value=lambda number: str(number) if number else largest)
    assert send(engine, {**kafka, "dualwrite.engine": engine_of_producer}) == count
    assert aside(engine) == []
    records = read_committed(kafka, dualwrite_topic)
    assert [record.value.decode() for record in records] == [largest, *map(str, range(1, count))]
    assert [PRODUCED_AT in dict(record.headers or ()) for record in records] == [False, *[True] * (count - 1)]


@on_postgresql
def test_messages_for_a_topic_that_is_gone_are_moved_aside_together(kafka, engine, dualwrite_topic):
    kafka = {**kafka, "topic.metadata.propagation.max.ms": 100}
    for number in range(20):
        put(engine, f"{dualwrite_topic}-gone" if number % 2 else dualwrite_topic, [number])
    send(engine, kafka)
    assert sent(kafka, dualwrite_topic) == [str(number) for number in range(0, 20, 2)]
    assert [topic for topic, *_ in aside(engine)] == [f"{dualwrite_topic}-gone"] * 10


@on_postgresql
def test_a_sender_that_is_to_stop_keeps_everything_behind_a_refused_message(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, range(30), value=lambda number: "x" * 2_000_000 if number == 12 else str(number))
    with pytest.raises(Unavailable, match="MESSAGE_TOO_LARGE"):
        send(engine, kafka, when_refused="stop")
    assert sent(kafka, dualwrite_topic) == [str(number) for number in range(12)]
    assert (left(engine), mode(engine), aside(engine)) == (18, "later", [])


@on_postgresql
def test_the_last_send_sees_what_came_after_its_transaction_began(kafka, url, engine, dualwrite_topic):
    """At REPEATABLE READ, which the application's engine has, the snapshot would hide it, and the mode would become direct."""
    put(engine, dualwrite_topic, range(5))
    strict = create_engine(url, isolation_level="REPEATABLE READ")
    came = []

    def come(name):
        if name == "outbox.locked" and not came:
            came.append(name)
            put(engine, dualwrite_topic, range(5, 8))

    with failpoints.watched(come):
        send(strict, kafka)
    strict.dispose()
    assert came
    assert (left(engine), mode(engine)) == (0, "direct")
    assert sent(kafka, dualwrite_topic) == list(map(str, range(8)))


@on_postgresql
def test_a_last_send_waits_for_no_block_for_long(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, range(5))
    with engine.connect() as block:
        block.execute(text("SELECT mode FROM dualwrite_outbox_mode WHERE writer = 'orders' FOR SHARE"))
        done = threading.Event()
        thread = threading.Thread(target=lambda: (send(engine, kafka), done.set()))
        thread.start()
        while left(engine):  # sent, although the lock is not free
            assert thread.is_alive()
        assert not done.is_set()
        assert mode(engine) == "later"
        block.rollback()
        thread.join(60)
    assert done.is_set()
    assert mode(engine) == "direct"


@on_postgresql
def test_a_recovery_of_several_leaves_a_writer_alone_that_was_at_work_just_now(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, [1])
    with DualWriter("orders", kafka=kafka, database=engine):
        pass
    put(engine, dualwrite_topic, [2])
    with engine.begin() as connection:
        connection.execute(text("UPDATE dualwrite_outbox_mode SET mode = 'later'"))
    assert recover(prefix="ord", kafka=kafka, database=engine).skipped == ["orders"]
    assert recover(prefix="ord", kafka=kafka, database=engine, open_for_s=0.0, dry_run=True).sent == {"orders": 1}
    assert recover(prefix="ord", kafka=kafka, database=engine, open_for_s=0.0).sent == {"orders": 1}
    assert sent(kafka, dualwrite_topic) == ["1", "2"]


@on_postgresql
def test_a_recovery_that_settles_a_dead_writer_sends_at_once_what_it_left_waiting(
    kafka, engine, url, dualwrite_topic, tmp_path
):
    """The claim has just changed the writer's rows. That is no sign of life of its owner."""
    Case(tmp_path, kafka, url, dualwrite_topic).run(failpoint="write.decided:2", killed=True)
    put(engine, dualwrite_topic, ["waits"], writer="case")
    names = {"kafka": kafka, "database": engine, "prefix": "ca"}
    wait_until(lambda: min(item.waits_for_s or 9.0 for item in status(**names) if item.needs_recovery) > 2.0)
    report = recover(**names, open_for_s=2.0)
    assert report.rolled_forward == ["case"]
    assert (report.sent, report.skipped) == ({"case": 1}, [])
    assert "waits" in sent(kafka, dualwrite_topic)


@on_postgresql
def test_a_writer_of_never_that_cannot_send_what_waits_does_not_open(kafka, engine, dualwrite_topic):
    put(engine, dualwrite_topic, [1], value=lambda _: "x" * 2_000_000)
    limits = WriterLimits(outbox_refused="stop")
    writer = DualWriter("orders", kafka=kafka, database=engine, limits=limits)
    with pytest.raises(Unavailable, match="messages that wait"):
        writer.open()
    assert left(engine) == 1


@on_postgresql
def test_a_session_that_sends_prepares_its_statements_once(kafka, url, engine, dualwrite_postgres, dualwrite_topic):
    """At a ROLLBACK psycopg would let the session forget them, and each send would prepare its read and its decision again."""
    put(engine, dualwrite_topic, range(1200))
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        assert send(through, kafka) == 1200
        through.dispose()
        statements = [statement for request in proxy.requests for statement in request.statements]
    assert not [statement for statement in statements if statement.startswith("DEALLOCATE")]


@on_postgresql
def test_a_snapshot_that_somebody_holds_open_delays_no_message_and_hides_none(kafka, engine, dualwrite_topic):
    """It keeps every row that was deleted since: each read steps over all of them, at the head of the index."""
    with engine.connect() as holder:
        holder.execution_options(isolation_level="REPEATABLE READ")
        holder.scalar(text("SELECT count(*) FROM dualwrite_outbox"))
        with DualWriter("orders", kafka=kafka, database=engine, outbox="always") as writer:
            for number in range(6):
                with writer.transaction() as tx:
                    tx.produce_many(dualwrite_topic, [str(500 * number + one) for one in range(500)], [b"k"] * 500)
                wait_until(lambda: left(engine) == 0, pause_s=0.01)
        assert holder.scalar(text("SELECT count(*) FROM dualwrite_outbox")) == 0, "it still sees what it saw"
    assert sent(kafka, dualwrite_topic) == list(map(str, range(3000)))
