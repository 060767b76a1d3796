"""The examples of docs/sessions.md, run as they stand on real servers; and what else a psycopg connection may do."""

import asyncio

import psycopg
import pytest
from harness.asgi import answer
from harness.orders import on_postgresql
from harness.page_examples import Base, Item, example, run_example
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from dualwrite import AsyncDualWriter, ConfigurationError, DualWriter, WriterLimits
from dualwrite.errors import IllegalStateError
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import PostgresProxy

pytestmark = on_postgresql


@pytest.fixture
def dsn(url):
    return url.replace("postgresql+psycopg://", "postgresql://")


@pytest.fixture
def there(engine, kafka, dualwrite_topic):
    """Both sides: the items of the rows, and the messages."""
    Base.metadata.create_all(engine)

    def read():
        messages = sorted(message.value.decode() for message in read_committed(kafka, dualwrite_topic))
        with engine.connect() as connection:
            return sorted(connection.scalars(text("SELECT item FROM items"))), messages

    return read


@pytest.fixture
def run(writer, engine, url, dsn, dualwrite_topic, there):
    """Runs an example with this topic and table in the place of the page's; returns its names."""

    given = {"writer": writer, "engine": engine, "url": url, "dsn": dsn, "Order": Item}
    return lambda code, **names: run_example(code, dualwrite_topic, **{**given, **names})


def test_the_examples_of_sessions_and_fastapi(run, there):
    names = run(example("sessions.md", "The session you already have")[0])
    assert there() == (["coffee", "tea"], ["coffee", "tea"])
    names = run(example("sessions.md", "Frameworks")[0], **names)
    assert answer(names["app"], "/orders/milk") == ([200], None)
    assert there() == (["coffee", "milk", "tea"], ["coffee", "milk", "tea"])


def test_the_example_of_asynchronous_sessions(run, there, kafka, url):
    async def main():
        engine = create_async_engine(url)
        async with AsyncDualWriter("others", kafka=kafka, database=engine) as writer:
            names = run(example("sessions.md", "An AsyncSession")[0], async_writer=writer, async_engine=engine)
            await names["place_order_in_task"]("tea")
        await engine.dispose()

    asyncio.run(main())
    assert there() == (["tea"], ["tea"])


def test_the_example_of_flask(run, there):
    names = run(example("sessions.md", "Frameworks")[1])
    assert names["app"].test_client().post("/orders/tea").text == "placed"
    with names["app"].app_context():
        names["db"].engine.dispose()
    assert there() == (["tea"], ["tea"])


def test_the_example_of_psycopg(run, there):
    run(example("sessions.md", "A psycopg connection")[0])
    assert there() == (["tea"], ["tea"])


def insert(connection, item):
    connection.execute("INSERT INTO items (item) VALUES (%s)", [item])


def test_a_psycopg_connection_serves_many_blocks_whatever_its_rows_are(writer, dsn, dualwrite_topic, there):
    with psycopg.connect(dsn, row_factory=dict_row, cursor_factory=psycopg.ClientCursor) as connection:
        for item in ("tea", "coffee"):
            with writer.transaction(connection) as tx:
                insert(connection, item)
                assert connection.execute("SELECT 1 AS one").fetchone() == {"one": 1}
                tx.produce(dualwrite_topic, item)
        with pytest.raises(ZeroDivisionError), writer.transaction(connection) as tx:
            insert(connection, "milk")
            tx.produce(dualwrite_topic, "milk")
            raise ZeroDivisionError
        with writer.transaction(connection) as tx:
            connection.execute("SAVEPOINT by_the_driver")
            insert(connection, "water")
            tx.produce(dualwrite_topic, "water")
            connection.execute("ROLLBACK TO by_the_driver")
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert not connection.closed
    assert there() == (["coffee", "tea"], ["coffee", "tea"])


def test_a_psycopg_connection_that_cannot_be_used_is_refused(writer, dsn, copied, there):
    elsewhere = copied.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with (
        psycopg.connect(elsewhere) as other,
        pytest.raises(ConfigurationError, match="another database"),
        writer.transaction(other),
    ):
        pass
    with (
        psycopg.connect(dsn, autocommit=True) as automatic,
        pytest.raises(ConfigurationError, match="autocommit=False"),
        writer.transaction(automatic),
    ):
        pass
    with psycopg.connect(dsn) as begun:
        insert(begun, "kept")
        with pytest.raises(IllegalStateError, match="already in a transaction"), writer.transaction(begun):
            pass
        begun.commit()
    with pytest.raises(IllegalStateError, match="is closed"), writer.transaction(begun):
        pass
    assert there()[0] == ["kept"]


def test_a_commit_of_a_psycopg_connection_that_is_not_answered_is_resolved(
    dualwrite_postgres, url, kafka, dualwrite_topic, there
):
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        dsn = proxy.url(url).replace("postgresql+psycopg://", "postgresql://")
        with (
            DualWriter("others", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer,
            psycopg.connect(dsn) as connection,
        ):
            for item in ("coffee", "tea"):
                with writer.transaction(connection) as tx:
                    insert(connection, item)
                    tx.produce(dualwrite_topic, item)
                    if item == "tea":
                        proxy.on("COMMIT").reset_answer()
            assert connection.closed
        through.dispose()
    assert there() == (["coffee", "tea"], ["coffee", "tea"])


def test_a_writer_of_another_kind_of_database_refuses_a_psycopg_connection(kafka, dsn, tmp_path):
    from dualwrite.migrations import upgrade

    sqlite = create_engine(f"sqlite:///{tmp_path}/other.db")
    with sqlite.connect() as connection:
        upgrade(connection)
    with (
        DualWriter("others", kafka=kafka, database=sqlite) as writer,
        psycopg.connect(dsn) as connection,
        pytest.raises(ConfigurationError, match="another database"),
        writer.transaction(connection),
    ):
        pass
    sqlite.dispose()
