"""What is asyncpg's own: statements that pass SQLAlchemy, failed transactions, limits of waits, and how it connects.

What it shares with other drivers is tested beside them: tests/conformance, and the tests that take a ``task_url``.
"""

import asyncio
import sys

import pytest
from harness.orders import Order, on_postgresql
from sqlalchemy import exc, insert, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from dualwrite import AsyncDualWriter, ConfigurationError, DualWriter, TransactionAborted, Unavailable, WriterLimits
from dualwrite.asyncio.writer import async_engine_of, blocking_twin
from dualwrite.stores.sql.asyncpg_driver import exchanges_of

asyncpg = pytest.importorskip("asyncpg")
pytestmark = [on_postgresql, pytest.mark.parametrize("task_url", ["asyncpg"], indirect=True)]


async def put(tx, topic, number):
    await tx.connection.execute(insert(Order.__table__).values(id=number))
    await tx.produce(topic, value=str(number))


async def driver_of(tx):
    return (await tx.connection.get_raw_connection()).driver_connection


def test_messages_go_with_savepoints_that_pass_sqlalchemy(in_writer, dualwrite_topic, both):
    async def work(writer):
        async with writer.transaction() as tx:
            driver = await driver_of(tx)
            with pytest.raises(ZeroDivisionError):
                async with driver.transaction():
                    await put(tx, dualwrite_topic, 1)
                    raise ZeroDivisionError
            async with driver.transaction():
                await put(tx, dualwrite_topic, 2)
            await driver.execute("SAVEPOINT a")
            await put(tx, dualwrite_topic, 3)
            statement = await driver.prepare("ROLLBACK TO SAVEPOINT a")
            await statement.fetch()
            await put(tx, dualwrite_topic, 4)
            with pytest.raises(asyncpg.UndefinedTableError):
                async with driver.transaction():
                    await put(tx, dualwrite_topic, 5)
                    await driver.fetch("SELECT * FROM nothing")
            await driver.copy_records_to_table("orders", records=[(6,)], columns=["id"])
            await tx.produce(dualwrite_topic, value="6")

    in_writer(work)
    assert both() == ([2, 4, 6], [2, 4, 6])


def test_units_of_a_group_are_undone_alone(in_writer, dualwrite_topic, both):
    async def work(writer):
        async def unit(tx, number):
            await put(tx, dualwrite_topic, number)
            if number % 3 == 0:
                await tx.connection.execute(text("SELECT * FROM nothing"))

        units = [writer.submit(lambda tx, number=number: unit(tx, number)) for number in range(9)]
        return await asyncio.gather(*units, return_exceptions=True)

    outcomes = in_writer(work, limits=WriterLimits(max_lanes=1))
    assert sum(isinstance(one, BaseException) for one in outcomes) == 3
    expected = [number for number in range(9) if number % 3]
    assert both() == (expected, expected)


def test_a_statement_that_failed_unseen_by_sqlalchemy_aborts_both_sides(in_writer, dualwrite_topic, both):
    """The server would answer COMMIT by ROLLBACK, which asyncpg takes for success."""

    async def work(writer):
        with pytest.raises(TransactionAborted):
            async with writer.transaction() as tx:
                await put(tx, dualwrite_topic, 1)
                with pytest.raises(asyncpg.UndefinedTableError):
                    await (await driver_of(tx)).execute("SELECT * FROM nothing")
        async with writer.transaction() as tx:
            await put(tx, dualwrite_topic, 2)

    in_writer(work, limits=WriterLimits(max_lanes=1))
    assert both() == ([2], [2])


def test_a_commit_that_is_answered_by_a_rollback_is_an_error(task_url, engine):
    async def main():
        asynchronous = async_engine_of(task_url)
        async with asynchronous.connect() as connection:
            watched = exchanges_of((await connection.get_raw_connection()).driver_connection)
            await connection.execute(text("SELECT 1"))
            with pytest.raises(exc.DBAPIError):
                await connection.execute(text("SELECT * FROM nothing"))
            assert watched.transaction_status == 3
            with pytest.raises(exc.DBAPIError, match="answered COMMIT by ROLLBACK"):
                await connection.commit()
        await asynchronous.dispose()

    asyncio.run(main())


def test_a_wait_that_asyncpg_gives_up_aborts_both_sides(kafka, task_url, engine, dualwrite_topic, both):
    async def main():
        asynchronous = create_async_engine(task_url, connect_args={"command_timeout": 0.5})
        async with AsyncDualWriter("orders", kafka=kafka, database=asynchronous) as writer:
            with pytest.raises(TimeoutError if sys.version_info >= (3, 11) else asyncio.TimeoutError):
                async with writer.transaction() as tx:
                    await put(tx, dualwrite_topic, 1)
                    await tx.connection.execute(text("SELECT pg_sleep(60)"))
            async with writer.transaction() as tx:
                await put(tx, dualwrite_topic, 2)
        await asynchronous.dispose()

    asyncio.run(main())
    assert both() == ([2], [2])


def test_a_read_only_connection_and_one_in_autocommit_are_refused(kafka, task_url, engine):
    async def main():
        asynchronous = async_engine_of(task_url)
        async with AsyncDualWriter("orders", kafka=kafka, database=asynchronous) as writer:
            for options, words in (
                ({"isolation_level": "AUTOCOMMIT"}, "autocommit"),
                ({"postgresql_readonly": True}, "read-only"),
            ):
                async with asynchronous.connect() as connection:
                    await connection.execution_options(**options)
                    with pytest.raises(ConfigurationError, match=words):
                        async with writer.transaction(connection):
                            pass
        await asynchronous.dispose()

    asyncio.run(main())


def test_a_pool_of_asyncpgs_own_is_refused(kafka, task_url, engine):
    async def main():
        plain = make_url(task_url).set(drivername="postgresql").render_as_string(hide_password=False)
        async with asyncpg.create_pool(plain, min_size=1, max_size=1) as pool:
            asynchronous = create_async_engine(task_url, async_creator=pool.acquire)
            with pytest.raises(ConfigurationError, match="not a connection of asyncpg's own"):
                async with (
                    AsyncDualWriter("orders", kafka=kafka, database=asynchronous) as writer,
                    writer.transaction(),
                ):
                    pass
            await asynchronous.dispose()

    asyncio.run(main())


def test_a_database_that_is_away_is_unavailable(kafka, task_url, engine, dualwrite_topic):
    async def main():
        away = create_async_engine(make_url(task_url).set(port=1))
        writer = AsyncDualWriter("orders", kafka=kafka, database=away, own_engine=engine)
        with pytest.raises(Unavailable, match="Connect|connect"):
            async with writer:
                pass
        await away.dispose()

    asyncio.run(main())


def test_the_writers_own_transactions_go_to_the_same_server_by_psycopg(kafka, task_url, engine):
    url = make_url(task_url).update_query_dict({"ssl": "prefer", "prepared_statement_cache_size": "0"})
    twin = blocking_twin(async_engine_of(url.render_as_string(hide_password=False)))
    assert (twin.dialect.driver, dict(twin.url.query)) == ("psycopg", {"sslmode": "prefer"})
    with twin.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    twin.dispose()
    with pytest.raises(ConfigurationError, match=r"postgresql\+psycopg"):
        DualWriter("orders", kafka=kafka, database=task_url).open()


def test_the_extra_is_named_where_asyncpg_is_missing(monkeypatch, task_url):
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(ConfigurationError, match=r"asyncpg is not installed.*dualwrite\[asyncpg\]"):
        async_engine_of(task_url)
