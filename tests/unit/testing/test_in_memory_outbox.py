"""A block whose messages may wait, in memory: it commits although Kafka is away, and its messages follow, once and in order.

The block is the product's own code; the real databases' part of it is tested with them.
"""

import asyncio
import itertools
import threading

import pytest
from sqlalchemy import text
from sqlalchemy.orm import sessionmaker

from dualwrite import ProducerRecord, RowUnit, WriterLimits
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DualWriteError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.interfaces import Observer, OutboxNews
from dualwrite.protocol.lives import WriteState
from dualwrite.testing import AsyncInMemoryWriter, InMemoryWriter

TOPIC = "orders"


class Broken(Exception):
    """Raised by the code of a block."""


@pytest.fixture
def make(tmp_path, engine_of):
    writers = []

    def make(outbox="fallback", **settings):
        engine = engine_of(f"sqlite:///{tmp_path}/shop.db")
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY)"))
        writer = InMemoryWriter("shop", database=engine, outbox=outbox, **settings)
        writer.open()
        writers.append(writer)
        return writer

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def writer(make):
    return make()


def put(tx, number):
    tx.connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": number})
    tx.produce(TOPIC, str(number), key="k")


def rows(writer):
    with writer.engine.connect() as connection:
        return list(connection.scalars(text("SELECT id FROM orders ORDER BY id")))


def values(messages):
    return [message.value.decode() for message in messages]


def write(writer, number, **given):
    with writer.transaction(**given) as tx:
        put(tx, number)
    return tx


def test_a_block_commits_while_kafka_is_away_and_its_messages_follow_in_order(writer):
    assert write(writer, 1).outbox is False
    with writer.outage():
        waited = [write(writer, number) for number in (2, 3)]
        assert [tx.outbox for tx in waited] == [True, True]
        assert {tx.state for tx in waited} == {WriteState.WAITING}
        assert (rows(writer), values(writer.messages), values(writer.waiting)) == ([1, 2, 3], ["1"], ["2", "3"])
    assert write(writer, 4).outbox is False
    assert values(writer.messages) == ["1", "2", "3", "4"]
    assert writer.waiting == []


def test_without_an_outbox_the_block_is_refused(make):
    writer = make("never")
    with writer.outage(), pytest.raises(Unavailable):
        write(writer, 1)
    assert rows(writer) == []


@pytest.mark.parametrize("outbox", ["never", "fallback", "always"])
def test_an_outage_shows_as_the_real_writer_shows_it_and_ends_with_everything_sent_in_order(make, outbox):
    writer = make(outbox)
    assert writer.health().problems == ()
    write(writer, 1)
    writer.kafka_goes_away()
    writer.kafka_goes_away()  # it is away already
    known = writer.health()
    assert (known.ready, known.degraded, known.silence is not None) == (outbox != "never", outbox != "never", True)
    if outbox == "never":
        with pytest.raises(Unavailable, match="has not answered since.*nothing was begun") as refused:
            write(writer, 2)
        assert (refused.value.silent, writer.waiting) == (True, [])
        assert known.problems == (str(known.silence),)
    else:
        assert [write(writer, number).outbox for number in (2, 3)] == [True, True]
        known = writer.health()
        assert (known.outbox_later, known.outbox_rows, known.outbox_bytes) == (True, 2, 4)
        assert values(writer.waiting) == ["2", "3"]
    writer.kafka_returns()
    writer.kafka_returns()
    write(writer, 4)
    known = writer.health()
    assert (known.ready, known.degraded, known.silence, known.outbox_rows) == (True, False, None, 0)
    assert values(writer.messages) == (["1", "4"] if outbox == "never" else ["1", "2", "3", "4"])


def test_a_bound_that_is_reached_shows_in_the_health(make):
    writer = make("fallback", limits=WriterLimits(outbox_rows=1))
    with writer.outage():
        write(writer, 1)
        assert "no more messages may wait" in str(writer.health().problems)
        with pytest.raises(Unavailable):
            write(writer, 2)
    assert writer.health().problems == ()
    assert values(writer.messages) == ["1"]


class Seen(Observer):
    def __init__(self):
        self.news, self.writers, self.open = [], [], 0

    def outbox(self, writer, news, count):
        self.news.append((writer, news, count))

    def writing(self, writer, database):
        self.writers.append((writer, database))
        return super().writing(writer, database)

    def opened(self, *_):
        self.open += 1

        def closed():
            self.open -= 1

        return closed


def test_telemetry_hears_of_an_outage(tmp_path):
    seen = Seen()
    with InMemoryWriter("shop", outbox="fallback", telemetry=seen) as writer:
        assert seen.open == 1
        with writer.outage():
            for _ in range(2):
                with writer.transaction() as tx:
                    tx.produce(TOPIC, "1")
    assert seen.open == 0
    assert seen.writers == [("shop", "sqlite")] * 2
    assert seen.news == [("shop", OutboxNews.FELL_BACK, 1), ("shop", OutboxNews.SENT, 2)]


def test_a_block_falls_back_in_its_middle(writer):
    with writer.transaction() as tx:
        put(tx, 1)
        assert tx.outbox is None
        outage = writer.outage()
        with outage:
            put(tx, 2)
            assert tx.outbox is True
            assert values(writer.messages) == []
    assert tx.outbox is True
    assert values(writer.messages) == ["1", "2"]
    writer.settle()
    assert values(writer.aborted) == ["1"]  # what was sent was left, and settled


def test_a_block_falls_back_at_its_end(writer):
    outage = writer.outage()
    with writer.transaction() as tx:
        put(tx, 1)
        outage.__enter__()
    assert tx.outbox is True
    assert (rows(writer), values(writer.waiting), values(writer.messages)) == ([1], ["1"], [])
    outage.__exit__(None, None, None)
    assert values(writer.messages) == ["1"]


def test_a_planted_silence_of_the_producer_makes_a_block_fall_back_too(writer):
    for place in ("produce", "prepare"):
        writer.fail_next(place, Unavailable)
    assert [write(writer, number).outbox for number in (1, 2, 3)] == [True, True, False]
    assert values(writer.messages) == ["1", "2", "3"]


@pytest.mark.parametrize("place", ["produce", "prepare"])
def test_a_refusal_aborts_as_without_an_outbox(writer, place):
    writer.fail_next(place, TransactionAborted)
    with pytest.raises(TransactionAborted):
        write(writer, 1)
    assert (rows(writer), writer.waiting, writer.messages) == ([], [], [])


def test_messages_that_wait_roll_back_with_the_block(writer):
    with writer.outage():
        with pytest.raises(Broken), writer.transaction() as tx:
            put(tx, 1)
            raise Broken
        assert (rows(writer), writer.waiting, tx.outbox) == ([], [], False)


def test_messages_of_a_savepoint_that_is_rolled_back_never_wait(writer):
    with writer.outage(), writer.transaction() as tx:
        put(tx, 1)
        with pytest.raises(Broken), tx.connection.begin_nested():
            put(tx, 2)
            raise Broken
        with tx.connection.begin_nested():
            put(tx, 3)
    assert (rows(writer), values(writer.messages)) == ([1, 3], ["1", "3"])


def test_many_messages_and_their_headers_wait_as_they_were_given(writer):
    with writer.outage(), writer.transaction() as tx:
        given = ["1", "2"]
        tx.produce_many(TOPIC, given, ["a", None])
        given.clear()
        tx.produce(TOPIC, "3", partition=1, headers={"h": "x"}, timestamp_ms=5)
    assert writer.messages == [
        ProducerRecord(TOPIC, b"1", b"a"),
        ProducerRecord(TOPIC, b"2", None),
        ProducerRecord(TOPIC, b"3", None, (("h", b"x"),), 1, 5),
    ]


def test_columns_wait_as_rows_whether_they_were_sent_before_or_not(writer):
    pa = pytest.importorskip("pyarrow")
    columns = pa.array([b"1", None]), pa.array([b"a", b"b"])
    with writer.transaction() as tx:
        tx.produce_arrow(TOPIC, *columns)
        with writer.outage():
            tx.produce_arrow(TOPIC, *columns)
    assert tx.outbox is True
    assert writer.messages == [ProducerRecord(TOPIC, b"1", b"a"), ProducerRecord(TOPIC, None, b"b")] * 2


def test_what_needs_no_kafka_is_checked_when_it_is_produced(make):
    writer = make(max_message_bytes=1000)
    with writer.outage():
        for produce in (
            lambda tx: tx.produce(TOPIC, b"x" * 2000),
            lambda tx: tx.produce_many(TOPIC, [b"x" * 2000]),
            lambda tx: tx.produce("no topic", b"x"),
        ):
            with pytest.raises(TransactionAborted), writer.transaction() as tx:
                produce(tx)
        with writer.transaction() as tx, pytest.raises(TypeError):
            tx.produce(TOPIC, 5)
    assert writer.messages == []


def test_a_callback_is_not_called_for_a_message_that_waits(writer):
    called = []
    with writer.outage(), writer.transaction() as tx:
        tx.produce(TOPIC, "1", on_delivery=lambda *of: called.append(of))
    assert values(writer.messages) == ["1"]
    assert called == []


def test_consumed_offsets_cannot_wait(writer):
    with writer.outage():
        with pytest.raises(TransactionAborted, match="offsets") as raised, writer.transaction() as tx:
            put(tx, 1)
            tx.send_offsets_to_transaction([], "group")
        assert raised.value.retryable
    with pytest.raises(TransactionAborted, match="does not fall back.*offsets"), writer.transaction() as tx:
        tx.send_offsets_to_transaction([], "group")
        writer.fail_next("prepare", Unavailable)
        put(tx, 1)
    assert (rows(writer), writer.messages) == ([], [])


def test_rows_alone_wait_for_nothing(writer):
    with writer.outage(), writer.transaction() as tx:
        tx.connection.execute(text("INSERT INTO orders VALUES (1)"))
    assert tx.outbox is False
    assert tx.state is WriteState.COMPLETED


def test_a_commit_that_kafka_does_not_answer_is_no_error(writer):
    writer.fail_next("complete", CompletionPending)
    tx = write(writer, 1)
    assert (tx.outbox, rows(writer), writer.messages) == (True, [1], [])
    assert write(writer, 2).outbox is False
    writer.settle()
    assert sorted(values(writer.messages)) == ["1", "2"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_in_doubt_stays_so(writer, committed):
    with writer.outage():
        writer.fail_next("commit", TransactionInDoubt, rows_committed=committed)
        with pytest.raises(TransactionInDoubt):
            write(writer, 1)
        assert rows(writer) == [int(value) for value in values(writer.waiting)] == ([1] if committed else [])


def test_a_writer_may_always_let_them_wait(make):
    writer = make("always")
    assert write(writer, 1).outbox is True
    assert values(writer.messages) == ["1"]  # sent at once
    with writer.outage():
        write(writer, 2)
        assert values(writer.waiting) == ["2"]
    assert values(writer.messages) == ["1", "2"]
    with pytest.raises(TransactionAborted, match="offsets") as raised, writer.transaction() as tx:
        tx.send_offsets_to_transaction([], "group")
    assert not raised.value.retryable


def test_one_block_may_let_its_messages_wait_or_must_not(writer):
    assert write(writer, 1, outbox="always").outbox is True
    with writer.outage():
        write(writer, 2)
        with pytest.raises(Unavailable):
            write(writer, 3, outbox="never")
    assert write(writer, 4, outbox="never").outbox is False
    assert values(writer.messages) == ["1", "2", "4"]


def test_a_block_that_must_not_wait_is_refused_while_others_wait(writer):
    outage = writer.outage()
    with outage:
        write(writer, 1)
        writer._outbox.away, writer._monitor.silence = False, None  # back, and not sent yet
        with pytest.raises(Unavailable, match="wait in the database and must come first"):
            write(writer, 2, outbox="never")
    assert values(writer.messages) == ["1"]


def test_a_writer_without_an_outbox_has_no_block_with_one(make):
    writer = make("never")
    with pytest.raises(ConfigurationError, match="outbox"):
        writer.transaction(outbox="always")


def test_a_bound_refuses_and_names_itself(make):
    writer = make(limits=WriterLimits(outbox_rows=2))
    with writer.outage():
        write(writer, 1)
        write(writer, 2)
        with pytest.raises(Unavailable, match="outbox_rows=2"):
            write(writer, 3)
    write(writer, 4)
    assert values(writer.messages) == ["1", "2", "4"]


def test_a_block_that_is_larger_than_the_bound_does_not_fall_back(make):
    writer = make(limits=WriterLimits(outbox_bytes=100))
    with pytest.raises(TransactionAborted, match="outbox_bytes"), writer.transaction() as tx:
        tx.produce(TOPIC, "x" * 200)
        writer.fail_next("prepare", Unavailable)
    with writer.outage(), pytest.raises(TransactionAborted, match="outbox_bytes"), writer.transaction() as tx:
        tx.produce(TOPIC, "x" * 200)
    with writer.transaction() as tx:
        tx.produce(TOPIC, "x" * 200)
    assert len(writer.messages) == 1


def test_units_of_a_group_go_the_way_of_their_block(writer):
    with writer.outage():
        futures = [writer.submit(lambda tx, number=number: put(tx, number)) for number in range(5)]
        failing = writer.submit(lambda tx: (put(tx, 9), 1 / 0))
        insert = text("INSERT INTO orders VALUES (:id)")
        unit = writer.submit(RowUnit(insert, {"id": 7}, messages=[ProducerRecord(TOPIC, "7")]))
        with pytest.raises(ZeroDivisionError):
            failing.result(30)
        for future in (*futures, unit):
            future.result(30)
        assert sorted(values(writer.waiting)) == ["0", "1", "2", "3", "4", "7"]
    assert rows(writer) == sorted(int(value) for value in values(writer.messages)) == [0, 1, 2, 3, 4, 7]


def test_a_bound_session_commits_while_kafka_is_away(writer):
    factory = sessionmaker(writer.engine)
    bound = writer.bind(factory)
    with writer.outage():
        with factory() as session:
            session.execute(text("INSERT INTO orders VALUES (1)"))
            bound.produce(session, TOPIC, "1")
            session.commit()
        with factory() as session:
            session.execute(text("INSERT INTO orders VALUES (2)"))
            bound.produce(session, TOPIC, "2")
            session.rollback()
    assert (rows(writer), values(writer.messages)) == ([1], ["1"])


def test_threads_write_in_an_outage_that_comes_and_goes(make):
    writer = make(limits=WriterLimits(max_lanes=3))
    errors, stop = [], threading.Event()
    numbers = itertools.count()  # threads that had no more of them would leave the outage without a message

    def work():
        while not stop.is_set():
            number = next(numbers)
            try:
                writer.run(lambda tx, number=number: put(tx, number))
            except DualWriteError as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with writer.outage():
            waited = threading.Event()
            while not waited.wait(0.01) and not writer.waiting:
                pass
    stop.set()
    for thread in threads:
        thread.join(30)
    writer.settle()
    assert errors == []
    assert rows(writer) == sorted(int(value) for value in values(writer.messages))


def test_tasks_write_while_kafka_is_away():
    asyncio.run(write_in_tasks())


async def write_in_tasks():
    async with AsyncInMemoryWriter(outbox="fallback") as writer:
        with writer.outage():
            async with writer.transaction() as tx:
                await tx.produce(TOPIC, "1")
            assert tx.outbox is True
            await writer.submit(produce_two)
            assert values(writer.waiting) == ["1", "2"]
        assert values(writer.messages) == ["1", "2"]


async def produce_two(tx):
    await tx.produce(TOPIC, "2")
