"""Behind a real PgBouncer, which gives each transaction another connection. Left out where it is not installed."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.checker import Case
from harness.orders import write
from harness.patience import PATIENCE_S
from harness.pgbouncer import KNOWS_STATEMENTS, NEEDS_PGBOUNCER, PgBouncer
from sqlalchemy import create_engine, insert, text
from sqlalchemy.ext.asyncio import create_async_engine

from dualwrite import (
    AsyncDualWriter,
    ConfigurationError,
    DualWriter,
    TransactionAborted,
    Unavailable,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.testing import PostgresProxy

pytestmark = [
    NEEDS_PGBOUNCER,
    pytest.mark.parametrize("url", ["postgresql"], indirect=True),
]


@pytest.fixture
def bouncer(tmp_path, url):
    with PgBouncer(tmp_path, url) as bouncer:
        yield bouncer


@pytest.fixture
def unprepared(bouncer, engine_of):
    return engine_of(bouncer.url, connect_args={"prepare_threshold": None})


def test_dual_writes_share_connections_and_leave_no_setting_on_them(
    bouncer, unprepared, kafka, engine, orders, dualwrite_topic, both
):
    """By URL, as the commands connect too: no statement is prepared under a name on a connection that others get next."""
    with (
        DualWriter("orders", kafka=kafka, database=bouncer.url, limits=WriterLimits(max_lanes=4)) as writer,
        ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(lambda number: write(writer, dualwrite_topic, orders, number), range(40)))
    assert both() == (list(range(40)), list(range(40)))
    with unprepared.connect() as connection:
        for name in ("idle_in_transaction_session_timeout", "transaction_timeout"):
            assert connection.scalar(text(f"SHOW {name}")) == "0"
        assert connection.scalar(text("SELECT count(*) FROM pg_prepared_statements")) == 0


def test_the_librarys_own_statements_are_not_prepared_through_a_pooler_though_the_drivers_may_be(
    bouncer, kafka, orders, dualwrite_topic, both
):
    through = create_engine(bouncer.url)
    with DualWriter("orders", kafka=kafka, database=through) as writer:
        for number in range(4):
            write(writer, dualwrite_topic, orders, number)
    with through.connect() as connection:
        named = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'dualwrite%'")
        assert connection.scalar(named) == 0
    through.dispose()
    assert both() == (list(range(4)), list(range(4)))


NOTHING_PREPARED = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": str,
}
"""As docs/asyncio.md has it."""


def write_in_tasks(kafka, url, topic, orders, settings=None):
    """Write 40 orders at once. What each has raised."""

    async def main():
        database = url if settings is None else create_async_engine(url, connect_args=settings)
        writer = AsyncDualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(max_lanes=4))

        async def one(number):
            async with writer.transaction() as tx:
                await tx.produce(topic, value=str(number))
                await tx.connection.execute(insert(orders).values(id=number))

        try:
            async with writer:
                return await asyncio.gather(*map(one, range(40)), return_exceptions=True)
        finally:
            if settings is not None:
                await database.dispose()

    return asyncio.run(main())


@pytest.mark.parametrize("settings", [None, NOTHING_PREPARED])
def test_tasks_share_connections_through_asyncpg_and_prepare_nothing_on_them(
    bouncer, unprepared, kafka, engine, orders, dualwrite_topic, both, settings
):
    """By URL, and with the settings that are documented for an engine."""
    assert write_in_tasks(kafka, bouncer.by_asyncpg, dualwrite_topic, orders, settings) == [None] * 40
    assert both() == (list(range(40)), list(range(40)))
    with unprepared.connect() as connection:
        assert connection.execute(text("SELECT name FROM pg_prepared_statements")).all() == []


@pytest.mark.skipif(KNOWS_STATEMENTS, reason="this PgBouncer knows prepared statements")
def test_the_settings_are_named_to_tasks_whose_statements_asyncpg_prepares(
    bouncer, kafka, engine, orders, dualwrite_topic, both
):
    outcomes = write_in_tasks(kafka, bouncer.by_asyncpg, dualwrite_topic, orders, {})
    [*_, named] = [one for one in outcomes if isinstance(one, Unavailable)]
    assert "prepared_statement_name_func=str" in str(named)
    written = [number for number, one in enumerate(outcomes) if one is None]
    assert both() == (written, written)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["psycopg", "asyncpg"])
def test_an_owner_that_is_killed_is_recovered(bouncer, kafka, url, engine, tmp_path, dualwrite_topic, asynchronous):
    directory = tmp_path / "case"
    directory.mkdir()
    tasks = {"tasks": True, "task_url": bouncer.by_asyncpg} if asynchronous else {}
    case = Case(directory, kafka, bouncer.url, dualwrite_topic, for_all=tasks)
    case.run(failpoint="write.decided:2", killed=True)
    assert recover("case", kafka=kafka, database=bouncer.url).rolled_forward == ["case"]
    assert case.verify() == {"w1-0", "w1-1"}


def test_an_owner_that_is_paused_before_its_commit_has_decided_nothing(
    bouncer, kafka, engine, orders, dualwrite_topic, monkeypatch, both
):
    hit = failpoints.hit

    def paused(name):
        hit(name)
        if name == "write.recorded":
            with engine.connect() as connection:  # until the server has ended the session
                while connection.scalar(
                    text(
                        "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND pid <> pg_backend_pid()"
                    )
                ):
                    connection.rollback()

    with DualWriter(
        "orders", kafka=kafka, database=bouncer.url, limits=WriterLimits(max_lanes=1, margin_s=0.5)
    ) as writer:
        monkeypatch.setattr(failpoints, "hit", paused)
        with pytest.raises(TransactionAborted):
            write(writer, dualwrite_topic, orders, 1)
        monkeypatch.setattr(failpoints, "hit", hit)
        write(writer, dualwrite_topic, orders, 2)
    assert both() == ([2], [2])


def test_a_pooler_that_is_killed_in_a_commit_is_asked_when_it_is_back(
    tmp_path, dualwrite_postgres, kafka, url, engine, orders, dualwrite_topic, both
):
    with (
        PostgresProxy(dualwrite_postgres) as proxy,
        PgBouncer(tmp_path, proxy.url(url)) as bouncer,
        DualWriter(
            "orders", kafka=kafka, database=bouncer.url, limits=WriterLimits(max_lanes=1, timeout_s=PATIENCE_S)
        ) as writer,
    ):
        write(writer, dualwrite_topic, orders, 1)
        rule = proxy.on("COMMIT").hold_answer()
        thread = threading.Thread(target=write, args=(writer, dualwrite_topic, orders, 2))
        thread.start()
        rule.wait(PATIENCE_S)
        bouncer.kill()
        rule.cut()
        bouncer.start()
        thread.join(PATIENCE_S)
        write(writer, dualwrite_topic, orders, 3)
    assert both() == ([1, 2, 3], [1, 2, 3])


def test_pooling_by_statement_is_refused(tmp_path, kafka, url, engine, orders):
    with (
        PgBouncer(tmp_path, url, pool_mode="statement") as bouncer,
        pytest.raises(ConfigurationError, match="pool_mode"),
    ):
        DualWriter("orders", kafka=kafka, database=bouncer.url, limits=WriterLimits(max_lanes=1)).open()
