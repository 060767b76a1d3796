"""A block commits although Kafka is away: rows and waiting messages together or not at all, and in order when it is back.

A real broker is suspended or killed between blocks and in the middle of one.
"""

import asyncio
from contextlib import contextmanager

import pytest
from harness.engines import ENGINES
from harness.patience import patient, wait_until
from sqlalchemy import create_engine, insert, select
from sqlalchemy.orm import sessionmaker

from dualwrite import AsyncDualWriter, DualWriter, TransactionAborted, Unavailable, WriterLimits
from dualwrite.testing.reading import read_committed

pytestmark = [pytest.mark.kafka, pytest.mark.postgresql]
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

    def writer(self, outbox="fallback", **settings):
        return DualWriter(
            "shop",
            **{
                "kafka": patient(self.kafka.client_config()),
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
    with shop.writer(producer_engine=engine_name) as writer:
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


def test_a_writer_that_always_waits_sends_at_once(shop):
    with shop.writer("always") as writer:
        for number in range(20):
            assert shop.write(writer, number).outbox is True
        wait_until(lambda: shop.messages == list(range(20)))
    assert shop.rows == list(range(20))


def test_sessions_and_tasks_fall_back_too(shop, url):
    if not url.startswith("postgresql"):
        pytest.skip("one kind of database shows it")
    with shop.writer() as writer:
        factory = sessionmaker(shop.engine)
        bound = writer.bind(factory)
        with shop.away(), factory() as session:
            session.execute(insert(shop.orders).values(id=1))
            bound.produce(session, shop.topic, "1")
            session.commit()
    asyncio.run(in_tasks(shop, url))
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
