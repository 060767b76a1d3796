"""``AsyncDualWriter.leased`` on SQLite and a simulated Kafka: members of a fleet with an event loop each."""

import asyncio
import time

import pytest
from harness.databases import prepare, sqlite_url
from harness.served import SETTINGS, TOPIC

from dualwrite import AsyncDualWriter, ConfigurationError, TransactionAborted, Unavailable
from dualwrite.stores.sql.leases import read_leases

pytest.importorskip("aiosqlite")


@pytest.fixture
def member(shop):
    settings = {"kafka": SETTINGS, "database": shop.database.url, "lease_timeout_s": 3600.0}
    return lambda **kwargs: AsyncDualWriter.leased("orders", **{**settings, **kwargs})


@pytest.fixture
def leases(shop):
    return lambda: {lease.transactional_id: lease.state.value for lease in read_leases(shop.engine)}


async def put(writer, number):
    async with writer.transaction() as tx:
        await tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
        await tx.produce(TOPIC, str(number), partition=0)


async def ready(writer):
    while not writer.ready:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


def test_members_take_ids_of_their_own_write_and_give_them_back(shop, member, leases):
    async def main():
        first = member()
        assert first.transactional_id == "orders"
        async with first, member() as second:
            assert [first.transactional_id, second.transactional_id] == ["orders-0", "orders-1"]
            await put(first, 1)
            await put(second, 2)
            assert leases() == {"orders-0": "held", "orders-1": "held"}

    asyncio.run(main())
    assert leases() == {"orders-0": "free", "orders-1": "free"}
    assert shop.both_have(1, 2)


def test_a_member_whose_id_was_taken_aborts_and_goes_on_under_another(shop, member):
    async def main():
        paused = member()
        async with paused:
            await put(paused, 1)
            shop.database.execute("UPDATE dualwrite_lease SET lease_until = '2020-01-01 00:00:00.000000'")
            async with member() as heir:
                assert heir.transactional_id == "orders-0"
                with pytest.raises(TransactionAborted, match="has lost its id"):
                    await put(paused, 2)
                await asyncio.wait_for(ready(paused), 60)
                assert paused.transactional_id == "orders-1"
                await put(paused, 3)
                await put(heir, 4)

    asyncio.run(main())
    assert shop.both_have(1, 3, 4)


def test_run_runs_the_work_again_under_the_new_id(shop, member):
    async def work(tx):
        await tx.connection.exec_driver_sql("INSERT INTO orders (id) VALUES (1)")
        await tx.produce(TOPIC, "1", partition=0)

    async def main():
        async with member() as paused:
            shop.database.execute("UPDATE dualwrite_lease SET lease_until = '2020-01-01 00:00:00.000000'")
            async with member():
                await paused.run(work, attempts=1000, longest_pause_s=0.05)
                assert paused.transactional_id == "orders-1"

    asyncio.run(main())
    assert shop.both_have(1)


def test_an_event_loop_that_stands_still_keeps_its_id(member, leases):
    async def main():
        async with member(lease_timeout_s=0.6, heartbeat_s=0.05):
            time.sleep(1.5)  # noqa: ASYNC251 - a handler that computes
            assert leases() == {"orders-0": "held"}

    asyncio.run(main())


def test_an_own_engine_to_another_database_is_refused_and_leaves_no_lease(member, leases, tmp_path):
    (tmp_path / "other").mkdir()
    other = prepare("sqlite", sqlite_url(tmp_path / "other"))

    async def main():
        async with member(own_engine=other.url):
            raise AssertionError

    with pytest.raises(ConfigurationError):
        asyncio.run(main())
    assert {lease.state.value for lease in read_leases(other.engines[0])} == {"free"}
    assert leases() == {}
    other.dispose()


def test_a_setting_that_cannot_work_is_refused(member):
    with pytest.raises(ConfigurationError):
        member(lease_timeout_s=-1.0)


def test_a_member_that_starts_while_kafka_is_away_takes_an_id_once_it_is_back(shop, member, leases):
    shop.kafka.away = True

    async def main():
        writer = member()
        await writer.open(wait=False)
        try:
            with pytest.raises(Unavailable, match="not open yet: Kafka at simulated:9092"):
                await put(writer, 9)
            assert leases() == {}
            shop.kafka.away = False
            await ready(writer)
            await put(writer, 1)
            assert writer.transactional_id == "orders-0"
        finally:
            await writer.close()

    asyncio.run(main())
    assert leases() == {"orders-0": "free"}
    assert shop.both_have(1)
