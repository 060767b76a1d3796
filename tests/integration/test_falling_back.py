"""A block commits although Kafka is away: rows and waiting messages together or not at all, and in order when it is back.

A real broker is suspended or killed between blocks and in the middle of one.
"""

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from harness.engines import ENGINES
from harness.orders import by_asyncpg_too
from harness.patience import PATIENCE_S, patient, wait_until
from sqlalchemy import create_engine, insert, select
from sqlalchemy.orm import sessionmaker

from dualwrite import AsyncDualWriter, DualWriter, TransactionAborted, Unavailable, WriterLimits, failpoints
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import Api, KafkaProxy
from dualwrite.writing.lane_pool import Lanes

pytestmark = [pytest.mark.kafka, pytest.mark.postgresql]
one_database = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
LIMITS = WriterLimits(max_lanes=3, fallback_after_s=0.5, timeout_s=120.0)


@pytest.fixture
def topic(mortal_kafka, request):
    return mortal_kafka.create_topic(f"falls-{abs(hash(request.node.name))}", 1)


@pytest.fixture
def shop(mortal_kafka, engine, orders, topic):
    return Shop(mortal_kafka, engine, orders, topic)


class Shop:
    """One writer's servers, and what they hold."""

    def __init__(self, kafka, engine, orders, topic):
        self.kafka, self.engine, self.orders, self.topic = kafka, engine, orders, topic

    def writer(self, outbox="fallback", engine_name="auto", **settings):
        return DualWriter(
            "shop",
            **{
                "kafka": {**patient(self.kafka.client_config()), "dualwrite.engine": engine_name},
                "database": self.engine,
                "outbox": outbox,
                "limits": LIMITS,
                **settings,
            },
        )

    def put(self, tx, number):
        tx.connection.execute(insert(self.orders).values(id=number))
        tx.produce(self.topic, str(number), key="k")

    def write(self, writer, number, **given):
        with writer.transaction(**given) as tx:
            self.put(tx, number)
        return tx

    @contextmanager
    def away(self):
        self.kafka.suspend()
        try:
            yield
        finally:
            self.kafka.resume()

    @property
    def rows(self):
        with self.engine.connect() as connection:
            return sorted(connection.scalars(select(self.orders.c.id)))

    @property
    def messages(self):
        return [int(message.value) for message in read_committed(self.kafka.client_config(), self.topic)]


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.thorough), "mariadb"])
def url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("migrated_database")
    if request.param == "mariadb":
        return request.getfixturevalue("migrated_mariadb")
    from dualwrite.migrations import upgrade

    made = create_engine(f"sqlite:///{tmp_path / 'rows.db'}")
    with made.connect() as connection:
        upgrade(connection)
    made.dispose()
    return str(made.url)


@pytest.mark.parametrize("engine_name", ENGINES)
def test_blocks_before_during_and_after_an_outage_are_all_there_once_and_in_order(shop, engine_name):
    with shop.writer(engine_name=engine_name) as writer:
        assert shop.write(writer, 1).outbox is False
        with writer.transaction() as middle:
            shop.put(middle, 2)
            shop.kafka.suspend()
            shop.put(middle, 3)
        try:
            assert middle.outbox is True
            for number in range(4, 8):
                assert shop.write(writer, number).outbox is True
            with pytest.raises(ZeroDivisionError), writer.transaction() as tx:
                shop.put(tx, 108)
                1 / 0  # noqa: B018 - raises
            with writer.transaction() as tx:
                shop.put(tx, 9)
                with pytest.raises(ZeroDivisionError), tx.connection.begin_nested():
                    shop.put(tx, 110)
                    1 / 0  # noqa: B018 - raises
            with pytest.raises(TransactionAborted, match="offsets"), writer.transaction() as tx:
                shop.put(tx, 111)
                tx.send_offsets_to_transaction([], None)
            with pytest.raises(Unavailable):
                shop.write(writer, 112, outbox="never")
            health = writer.health()
            assert health.degraded
            assert health.ready, health.problems
        finally:
            shop.kafka.resume()
        wait_until(lambda: shop.write(writer, max(shop.rows) + 1).outbox is False)
    assert shop.rows == shop.messages
    assert not {108, 110, 111, 112} & set(shop.messages)


@one_database
def test_a_leased_writer_falls_back_too(shop):
    given = {"kafka": patient(shop.kafka.client_config()), "database": shop.engine, "limits": LIMITS}
    with DualWriter.leased("fleet", outbox="fallback", **given) as writer:
        assert shop.write(writer, 1).outbox is False
        with shop.away():
            for number in (2, 3):
                assert shop.write(writer, number).outbox is True
        wait_until(lambda: shop.write(writer, max(shop.rows) + 1).outbox is False)
    assert shop.rows == shop.messages


@contextmanager
def each_answer_late(proxy, answers, pause_s):
    """Each of so many answers to Produce comes that long after the one before."""
    held = [proxy.on(Api.PRODUCE, nth=number).hold_answer() for number in range(1, answers + 1)]
    over = threading.Event()

    def release():
        for one in held:
            while not one.taken and not over.wait(0.01):
                pass
            over.wait(pause_s)
            one.release()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield held
    finally:
        over.set()
        thread.join()


@one_database
@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_large_block_does_not_fall_back_while_a_slow_kafka_answers(
    dualwrite_kafka, engine, orders, topic, engine_name
):
    """Each answer begins the time anew: silence counts, not the length of a transaction."""
    topic = dualwrite_kafka.create_topic(f"{topic}-slow", 1)
    limits = WriterLimits(max_lanes=1, fallback_after_s=2.0, timeout_s=120.0)
    with KafkaProxy(dualwrite_kafka) as proxy:
        kafka = patient({**proxy.client_config(), "batch.size": "16384", "linger.ms": "0"}, engine_name)
        kafka["dualwrite.engine"] = engine_name
        with DualWriter("shop", kafka=kafka, database=engine, outbox="fallback", limits=limits) as writer:
            with writer.transaction() as tx:  # the topic is known from here on
                tx.produce(topic, "small")
            assert tx.outbox is False
            with each_answer_late(proxy, 10, 0.5) as held, writer.transaction() as tx:
                tx.connection.execute(insert(orders).values(id=1))
                for number in range(15):
                    tx.produce(topic, str(number).rjust(15_000))
            assert tx.outbox is False
            assert all(one.taken for one in held)
    found = [message.value.decode() for message in read_committed(dualwrite_kafka.client_config(), topic)]
    assert found == ["small", *(str(number).rjust(15_000) for number in range(15))]


@one_database
def test_a_block_that_must_not_wait_has_the_longer_time_of_its_own(dualwrite_kafka, engine, topic):
    """Also on a lane on which others have fallen back after a shorter one."""
    topic = dualwrite_kafka.create_topic(f"{topic}-own-time", 1)
    limits = WriterLimits(max_lanes=1, fallback_after_s=0.2, flush_timeout_s=60.0, timeout_s=120.0)
    with KafkaProxy(dualwrite_kafka) as proxy:
        given = {"kafka": patient(proxy.client_config()), "database": engine, "outbox": "fallback", "limits": limits}
        with DualWriter("shop", **given) as writer:
            wait_until(lambda: puts(writer, topic, "before") is False)
            with each_answer_late(proxy, 1, 1.0):
                assert puts(writer, topic, "never", outbox="never") is False
            with each_answer_late(proxy, 1, 1.0):
                assert puts(writer, topic, "fallback") is True
    found = [message.value.decode() for message in read_committed(dualwrite_kafka.client_config(), topic)]
    assert found[-2:] == ["never", "fallback"]


@one_database
@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_block_waits_no_longer_for_a_new_producer_of_its_lane(shop, engine_name, monkeypatch):
    """A call of a producer may take half of ``timeout_s``, but a block waits for no answer that long."""
    monkeypatch.setattr(Lanes, "_choose_due", lambda *_: None)  # nobody else makes the producer
    limits = WriterLimits(max_lanes=1, fallback_after_s=2.0, timeout_s=2 * PATIENCE_S)
    away = []

    def suspend(name):
        if name == "claim.settled" and not away:
            away.append(name)
            shop.kafka.suspend()

    numbers = itertools.count()
    with shop.writer(limits=limits, engine_name=engine_name) as writer, ThreadPoolExecutor(1) as threads:
        wait_until(lambda: shop.write(writer, next(numbers)).outbox is False)
        writer._lanes.first.producer._instance.doubt("for the test")
        with failpoints.watched(suspend):
            block = threads.submit(shop.write, writer, next(numbers))
            try:
                assert block.result(60).outbox is True
            finally:
                shop.kafka.resume()
        wait_until(lambda: shop.write(writer, next(numbers)).outbox is False)
    assert away
    assert shop.rows == shop.messages == list(range(next(numbers)))


@one_database
def test_a_block_under_way_waits_no_longer_once_kafka_is_known_to_be_silent(shop):
    """Every broker refuses connections, which is known long before the block's own patience ends."""
    limits = WriterLimits(max_lanes=2, fallback_after_s=10 * PATIENCE_S, timeout_s=20 * PATIENCE_S)
    away = []

    def kill(name):
        if name == point and not away:
            away.append(name)
            shop.kafka.kill()

    numbers = itertools.count()
    with shop.writer(limits=limits) as writer, ThreadPoolExecutor(1) as threads:
        for point in ("write.produced", "write.decided"):
            wait_until(lambda: shop.write(writer, next(numbers)).outbox is False)
            try:
                with failpoints.watched(kill):
                    block = threads.submit(shop.write, writer, next(numbers))
                    assert block.result(PATIENCE_S).outbox is True
                assert writer.health().silence is not None
            finally:
                shop.kafka.start()
            assert away.pop() == point
        wait_until(lambda: shop.write(writer, next(numbers)).outbox is False)
    assert shop.rows == shop.messages == list(range(next(numbers)))


def puts(writer, topic, value, **given):
    with writer.transaction(**given) as tx:
        tx.produce(topic, value)
    return tx.outbox


def test_a_writer_that_always_waits_sends_at_once(shop):
    with shop.writer("always") as writer:
        for number in range(20):
            assert shop.write(writer, number).outbox is True
        wait_until(lambda: shop.messages == list(range(20)))
    assert shop.rows == list(range(20))


@one_database
def test_a_full_outbox_refuses_blocks_and_is_a_problem_until_it_is_sent(shop):
    limits = WriterLimits(max_lanes=3, fallback_after_s=0.5, timeout_s=120.0, outbox_rows=2)
    with shop.writer(limits=limits) as writer:
        with shop.away():
            for number in (1, 2):
                assert shop.write(writer, number).outbox is True
            wait_until(lambda: writer.health().outbox_full)
            with pytest.raises(Unavailable, match="outbox_rows=2"):
                shop.write(writer, 3)
            [problem] = writer.health().problems
            assert "no more messages may wait: 2 messages wait in the database (outbox_rows=2)" in problem
        wait_until(lambda: writer.ready)
        shop.write(writer, 4)
    assert shop.rows == shop.messages == [1, 2, 4]


@one_database
def test_the_sender_alone_finds_out_that_kafka_is_silent_and_that_it_answers_again(shop, caplog):
    with shop.writer("always") as writer:
        shop.write(writer, 1)
        wait_until(lambda: shop.messages == [1])
        with shop.away():
            shop.write(writer, 2)
            wait_until(lambda: writer.health().silence is not None)
            health = writer.health()
            assert health.degraded
            assert health.ready, health.problems
            shop.write(writer, 3)
        wait_until(lambda: writer.health().silence is None)
        wait_until(lambda: shop.messages == [1, 2, 3])
    assert "Kafka answers again" in caplog.text


@one_database
@by_asyncpg_too
def test_sessions_and_tasks_fall_back_too(shop, task_url):
    with shop.writer() as writer:
        factory = sessionmaker(shop.engine)
        bound = writer.bind(factory)
        with shop.away(), factory() as session:
            session.execute(insert(shop.orders).values(id=1))
            bound.produce(session, shop.topic, "1")
            session.commit()
    asyncio.run(in_tasks(shop, task_url))
    assert shop.rows == shop.messages == [1, 2, 3]


async def in_tasks(shop, url):
    settings = patient(shop.kafka.client_config())
    async with AsyncDualWriter("tasks", kafka=settings, database=url, outbox="fallback", limits=LIMITS) as writer:
        with shop.away():
            async with writer.transaction() as tx:
                await tx.connection.execute(insert(shop.orders).values(id=2))
                await tx.produce(shop.topic, "2")
            assert tx.outbox is True

            async def unit(tx):
                await tx.connection.execute(insert(shop.orders).values(id=3))
                await tx.produce(shop.topic, "3")

            await writer.submit(unit)


@pytest.mark.parametrize("url", ["postgresql", pytest.param("sqlite", marks=pytest.mark.thorough)], indirect=True)
def test_tasks_before_during_and_after_an_outage_are_all_there_once_and_in_order_and_cancelled_ones_whole_or_not(
    shop, url
):
    """The last ones are left to the next writer: the loop is closed while Kafka is still away."""
    if url.startswith("sqlite"):
        pytest.importorskip("aiosqlite")
    try:
        cancelled = asyncio.run(tasks_in_an_outage(shop, url))
    finally:
        shop.kafka.resume()
    with shop.writer() as writer:
        wait_until(lambda: shop.write(writer, max(shop.rows) + 1).outbox is False)
    rows, messages = shop.rows, shop.messages
    assert sorted(messages) == rows
    assert set(range(240)) - set(cancelled) <= set(rows)
    for task in range(8):
        own = [number for number in messages if number < 240 and number // 30 == task]
        assert own == sorted(own)


async def tasks_in_an_outage(shop, url):
    settings = {"kafka": patient(shop.kafka.client_config()), "outbox": "fallback", "limits": LIMITS}
    patient_url = f"{url}?timeout=60" if url.startswith("sqlite") else url
    cancelled, waited = [], []

    async def one(writer, number):
        async with writer.transaction() as tx:
            await tx.connection.execute(insert(shop.orders).values(id=number))
            await tx.produce(shop.topic, str(number), key="k")
        waited.append(tx.outbox)

    async def some(writer, task, numbers):
        for number in numbers:
            block = asyncio.create_task(one(writer, 30 * task + number))
            if number % 7 == 6:
                await asyncio.sleep(0.003 * task)
                block.cancel()
            try:
                await block
            except asyncio.CancelledError:
                cancelled.append(30 * task + number)

    async with AsyncDualWriter("shop", database=patient_url, **settings) as writer:
        await asyncio.gather(*(some(writer, task, range(10)) for task in range(8)))
        with shop.away():
            await asyncio.gather(*(some(writer, task, range(10, 20)) for task in range(8)))
            assert waited[-1] is True
        while waited[-1]:
            await one(writer, 1000 + len(waited))
        shop.kafka.suspend()
        await asyncio.gather(*(some(writer, task, range(20, 30)) for task in range(8)))
    return cancelled
