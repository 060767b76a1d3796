"""Attacks on the ends of a dual write: errors and interruptions at the moments where something is half done."""

import os
import sys
import threading
import time
from collections import Counter
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from harness.death import ended_by_hand, mortal
from harness.orders import on_both, on_postgresql, write
from harness.patience import patient, wait_until
from sqlalchemy import create_engine, delete, event, insert, select

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
from dualwrite.clock import running_on
from dualwrite.errors import CompletionPending, DualWriteError, IllegalStateError, Unavailable
from dualwrite.failpoints import FailpointError
from dualwrite.kafka import coordinator
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import Api, KafkaProxy
from dualwrite.writing.dual_write import DualWrite

DESCRIBE_CONFIGS = 32  # asked for whenever a producer is made, if it was not asked lately
STATE = declare_tables(None).state


@pytest.fixture
def writer(kafka, engine):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        yield writer


def lose_the_producer(writer, topic, orders, number):
    """A dual write that is decided and not completed; its lane has to be renewed."""
    failpoints.arm("write.decided:1:raise")
    with pytest.raises(FailpointError):
        write(writer, topic, orders, number)
    failpoints.arm("")


@on_both
def test_rows_written_directly_on_the_callers_connection_are_committed(writer, engine, orders, both):
    with engine.connect() as connection, writer.transaction(connection):
        connection.execute(insert(orders).values(id=1))
    assert both() == ([1], [])


@on_both
def test_a_refused_commit_leaves_nothing_that_a_later_commit_could_make_visible(
    writer, engine, dualwrite_topic, orders, both
):
    with engine.connect() as connection:
        with pytest.raises(IllegalStateError, match="commit"), writer.transaction(connection) as tx:
            tx.produce(dualwrite_topic, value="1")
            connection.execute(insert(orders).values(id=1))
            connection.commit()
        connection.execute(insert(orders).values(id=2))
        connection.commit()
    assert both() == ([2], [])


@on_postgresql
def test_an_interruption_at_a_commit_that_was_not_sent_aborts_both_and_is_not_swallowed(
    writer, engine, dualwrite_topic, orders, both
):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="1")
        tx.connection.execute(insert(orders).values(id=1))
        event.listen(engine, "commit", interrupt)
    event.remove(engine, "commit", interrupt)
    write(writer, dualwrite_topic, orders, 2)
    assert both() == ([2], [2])


@pytest.fixture
def asked_each_time(monkeypatch):
    monkeypatch.setattr(coordinator, "_LATELY_S", 0.0)


@on_postgresql
@pytest.mark.usefixtures("asked_each_time")
def test_a_lane_whose_producer_could_not_be_initialised_is_made_anew(
    dualwrite_kafka, engine, dualwrite_topic, orders, both
):
    with KafkaProxy(dualwrite_kafka) as proxy:
        with DualWriter(
            "orders",
            kafka=patient(proxy.client_config()),
            database=engine,
            limits=WriterLimits(max_lanes=1, timeout_s=4),
        ) as writer:
            lose_the_producer(writer, dualwrite_topic, orders, 1)
            dropped = proxy.on(DESCRIBE_CONFIGS, nth=None).drop_request()
            with pytest.raises(Unavailable):
                write(writer, dualwrite_topic, orders, 2)
            dropped.withdraw()
            wait_until(lambda: writer.health().silence is None)
            write(writer, dualwrite_topic, orders, 3)
        assert both() == ([1, 3], [1, 3])


@on_postgresql
def test_a_lane_that_was_claimed_and_could_not_be_settled_does_not_fence_itself(
    dualwrite_kafka, engine, dualwrite_topic, orders, both
):
    with KafkaProxy(dualwrite_kafka) as proxy:
        with DualWriter(
            "orders",
            kafka=patient(proxy.client_config()),
            database=engine,
            limits=WriterLimits(max_lanes=1, timeout_s=4),
        ) as writer:
            dropped = proxy.on(Api.END_TXN, nth=None).drop_request()  # the owner's, and those of settling
            with pytest.raises(CompletionPending) as caught:
                write(writer, dualwrite_topic, orders, 1)
            assert caught.value.outcome == "decided"
            dropped.withdraw()
            assert len(dropped.taken) > 1
            write(writer, dualwrite_topic, orders, 2)
        assert both() == ([1, 2], [1, 2])


@pytest.mark.usefixtures("through_librdkafka")
@on_postgresql
def test_a_loss_is_told_although_settling_could_not_be_finished(dualwrite_kafka, engine, dualwrite_topic, orders):
    with KafkaProxy(dualwrite_kafka) as proxy:
        kafka = patient(proxy.client_config())
        with mortal(DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))) as writer:
            lose_the_producer(writer, dualwrite_topic, orders, 1)
        (row,) = SqlStateStore(engine).read(["orders"])
        Producer({**kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(120)
        retiring = proxy.on(Api.INIT_PRODUCER_ID).drop_request()
        with pytest.raises(DecidedTransactionLost):
            DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, timeout_s=4)).open()
        retiring.wait()
        DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()


@on_postgresql
@pytest.mark.usefixtures("asked_each_time")
def test_a_loss_is_told_before_the_next_producer_can_fail_to_be_made(
    dualwrite_kafka, engine, dualwrite_topic, orders, monkeypatch
):
    with KafkaProxy(dualwrite_kafka) as proxy:
        kafka = patient(proxy.client_config())
        told = []
        with DualWriter(
            "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, timeout_s=4), on_loss=told.append
        ) as writer:
            with monkeypatch.context() as patched:
                patched.setattr(failpoints, "hit", ended_by_hand(kafka, engine))
                lose_the_producer(writer, dualwrite_topic, orders, 1)
            making = proxy.on(DESCRIBE_CONFIGS, nth=None).drop_request()
            with pytest.raises(Unavailable):
                write(writer, dualwrite_topic, orders, 2)
            [loss] = told
            assert isinstance(loss, DecidedTransactionLost)
            making.wait()
            making.withdraw()
            wait_until(lambda: writer.health().silence is None)
            write(writer, dualwrite_topic, orders, 3)


@on_postgresql
def test_a_decided_transaction_is_never_reported_as_a_mistake_in_the_settings(
    kafka, engine, dualwrite_topic, orders, both, monkeypatch
):
    """The new owner of the id completes it; we may not read the log that would tell."""
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        context = writer._opened().context

        def refuse(*_):
            raise ConfigurationError("Kafka refused to be read")

        def take_over(name):
            if name == "write.decided":
                monkeypatch.undo()
                monkeypatch.setattr(context.coordinator, "prove", refuse)
                DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()

        monkeypatch.setattr(failpoints, "hit", take_over)
        with pytest.raises(CompletionPending) as caught:
            write(writer, dualwrite_topic, orders, 1)
        assert caught.value.outcome == "unknown"
    assert both() == ([1], [1])


@on_postgresql
def test_a_row_made_anew_inside_the_block_is_not_ours(writer, kafka, engine, dualwrite_topic, orders, both):
    with pytest.raises(Fenced), writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="1")
        tx.connection.execute(insert(orders).values(id=1))
        with engine.begin() as other:
            other.execute(delete(STATE))
        DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()
    assert both() == ([], [])


@on_postgresql
def test_opening_that_fails_does_not_wait_for_transactions_that_nobody_has_begun(kafka, engine):
    began = time.monotonic()
    threads = threading.active_count()
    with pytest.raises(ConfigurationError, match=r"transaction\.max\.timeout\.ms"):
        DualWriter("orders", kafka={**kafka, "transaction.timeout.ms": 3_600_000}, database=engine).open()
    assert time.monotonic() - began < 30
    assert threading.active_count() <= threads


@on_postgresql
def test_closing_in_a_forked_process_leaves_the_servers_to_the_parent(writer, engine, dualwrite_topic, orders, both):
    write(writer, dualwrite_topic, orders, 1)
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        try:
            writer.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    (row,) = SqlStateStore(engine).read(["orders"])
    assert row.completed is None, "the child has written on the parent's connections"
    write(writer, dualwrite_topic, orders, 2)
    assert both() == ([1, 2], [1, 2])


class Interrupting:
    """Raises ``KeyboardInterrupt`` at the nth line that this thread comes to, of those that end a dual write.

    Where locks are taken it would prove nothing: a trace function, unlike a signal, can raise between a block and its lock.
    """

    FILES = ("transaction.py", "committing.py", "state.py", "instance.py", "machine.py")

    def __init__(self, nth):
        self.left = nth
        self.lines = 0

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, _event, _argument):
        file = frame.f_code.co_filename
        return self._traced if "/dualwrite/" in file and file.endswith(self.FILES) else None

    def _traced(self, _frame, kind, _argument):
        if kind == "line":
            self.lines += 1
            if self.lines == self.left:
                raise KeyboardInterrupt
        return self._traced


@pytest.mark.thorough
def test_an_interruption_at_any_line_leaves_both_sides_equal(kafka, engine, dualwrite_topic, orders):
    """Every seventh line here, each time with the writer that the last interruption has left."""

    def opened():
        writer = DualWriter(
            "orders",
            kafka=kafka,
            database=engine,
            limits=WriterLimits(max_lanes=1, lane_timeout_s=1, timeout_s=20),
        )
        writer.open()
        return writer

    writer = opened()
    with Interrupting(0) as trace:
        write(writer, dualwrite_topic, orders, 0)
    told = {0: "committed"}
    for number, nth in enumerate(range(1, trace.lines, 7), start=1):
        try:
            with Interrupting(nth):
                write(writer, dualwrite_topic, orders, number)
            told[number] = "committed"
        except KeyboardInterrupt:
            told[number] = "interrupted"
        except DualWriteError:  # what the last interruption has broken: it may cost a transaction, and a new writer
            told[number] = "failed"
            writer = opened()
    opened().close()
    with engine.connect() as connection:
        rows = Counter(connection.execute(select(orders.c.id)).scalars())
    assert rows == Counter(int(message.value) for message in read_committed(kafka, dualwrite_topic))
    assert {number for number, outcome in told.items() if outcome == "committed"} <= rows.keys()
    assert not {number for number, outcome in told.items() if outcome == "failed"} & rows.keys()
    assert list(told.values()).count("interrupted") > len(told) / 2, "it was hardly ever interrupted"


@on_postgresql
def test_consumed_offsets_alone_are_rolled_forward_with_their_rows(kafka, engine, dualwrite_topic, orders):
    group = {**kafka, "group.id": f"group-{dualwrite_topic}", "enable.auto.commit": False}
    offset = TopicPartition(dualwrite_topic, 0, 7)
    with closing(Consumer(group)) as consumer:
        with mortal(DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))) as writer:
            failpoints.arm("write.decided:1:raise")
            with pytest.raises(FailpointError), writer.transaction() as tx:
                tx.connection.execute(insert(orders).values(id=1))
                tx.send_offsets_to_transaction([offset], consumer.consumer_group_metadata())
        failpoints.arm("")
        assert recover(open_for_s=0, kafka=kafka, database=engine).rolled_forward == ["orders"]
        assert consumer.committed([offset], 30)[0].offset == 7


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_sqlite_is_not_waited_for_as_long_as_its_driver_would(kafka, engine, dualwrite_topic, orders, both, url):
    """The driver would wait for a reader for a minute; the ending may take four seconds."""
    patient_driver = create_engine(url, connect_args={"timeout": 60})
    with DualWriter("orders", kafka=kafka, database=patient_driver, limits=WriterLimits(max_lanes=1)) as writer:
        writer._limits = WriterLimits(timeout_s=4)  # the producer's calls keep the writer's 60 s
        with engine.connect() as reader:
            reader.exec_driver_sql("BEGIN")
            reader.exec_driver_sql("SELECT * FROM kafka_transaction_state").fetchone()
            began = time.monotonic()
            with pytest.raises(TransactionAborted, match="COMMIT") as caught:
                write(writer, dualwrite_topic, orders, 1)
            assert time.monotonic() - began < 50, "waited as long as the driver"
            assert caught.value.retryable
        write(writer, dualwrite_topic, orders, 2)
        [limit] = {
            connection.exec_driver_sql("PRAGMA busy_timeout").scalar() for connection in [patient_driver.connect()]
        }
        assert limit == 60_000, "the caller's own limit was not put back"
    patient_driver.dispose()
    assert both() == ([2], [2])


class JumpingClock:
    """The system's clock, set forward by hand, as a paused process sees it."""

    def __init__(self):
        self.ahead_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead_s

    def sleep(self, seconds, /):
        time.sleep(seconds)


@pytest.mark.parametrize("messages", [True, False], ids=["with messages", "rows alone"])
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_process_that_was_paused_before_its_commit_does_not_send_it(
    kafka, engine, dualwrite_topic, orders, both, messages, monkeypatch
):
    """No server ends SQLite's transaction meanwhile. The pause comes after the last look at the broker's time."""
    clock, real = JumpingClock(), DualWrite._decide

    def decide(*args):
        clock.ahead_s += 3600
        return real(*args)

    with (
        running_on(clock),
        DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(DualWrite, "_decide", decide)
            with pytest.raises(TransactionAborted, match="paused before its COMMIT"), writer.transaction() as tx:
                tx.connection.execute(insert(orders).values(id=1))
                if messages:
                    tx.produce(dualwrite_topic, value="1")
        write(writer, dualwrite_topic, orders, 2)
    assert both() == ([2], [2])


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_reader_that_keeps_sqlite_from_committing_aborts_both(kafka, engine, dualwrite_topic, orders, both, url):
    waiting_little = create_engine(url, connect_args={"timeout": 0.2})
    with DualWriter("orders", kafka=kafka, database=waiting_little, limits=WriterLimits(max_lanes=1)) as writer:
        with engine.connect() as reader:
            rows = reader.exec_driver_sql("SELECT * FROM kafka_transaction_state")
            assert rows.fetchone() is not None
            reader.exec_driver_sql("BEGIN")
            reader.exec_driver_sql("SELECT * FROM kafka_transaction_state").fetchone()
            with pytest.raises(TransactionAborted, match="COMMIT") as caught:
                write(writer, dualwrite_topic, orders, 1)
            assert caught.value.retryable
        write(writer, dualwrite_topic, orders, 2)
    waiting_little.dispose()
    assert both() == ([2], [2])
