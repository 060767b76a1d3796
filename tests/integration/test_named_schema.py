"""A block may change which tables a name means, by ``search_path`` or ``USE``: every statement of the library names its schema."""

import re

import pytest
from harness.orders import Order, on_postgresql, write
from sqlalchemy import event, make_url, text
from sqlalchemy.orm import sessionmaker

from dualwrite import DualWriter, ExactlyOnceConsumer, WriterLimits, migrations, recover, status
from dualwrite.operations import forget, terminate
from dualwrite.stores.sql.tables import BATCH_VIEW, OWN_TABLES

on_postgresql_and_mariadb = pytest.mark.parametrize(
    "url", ["postgresql", pytest.param("mariadb", marks=pytest.mark.mariadb)], indirect=True
)
_OWN = "|".join(sorted({*OWN_TABLES, BATCH_VIEW}))
_UNNAMED = re.compile(rf'(?<![.\w"`])["`]?(?:{_OWN})\b')


@pytest.fixture(params=["without tables of the library", "with tables of its own"])
def elsewhere(request, engine):
    """The statement after which names lead elsewhere: to a schema with tables of the library, or without."""
    own = request.param.startswith("with ")
    if engine.dialect.name == "postgresql":
        with engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA tenant"))
            connection.execute(text("CREATE TABLE tenant.orders (LIKE public.orders)"))
            if own:
                connection.execute(text("SET LOCAL search_path TO tenant"))
                migrations.upgrade(connection)
        yield "SET LOCAL search_path TO tenant"
        return
    other = f"{engine.url.database}_tenant"
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {other}"))
        connection.execute(text(f"CREATE TABLE {other}.orders LIKE {engine.url.database}.orders"))
    if own:
        with engine.connect() as connection:
            migrations.upgrade(connection, schema=other)
    yield f"USE {other}"
    with engine.connect() as connection:
        connection.execute(text(f"DROP DATABASE {other}"))


def in_tenant(engine):
    tenant = "tenant" if engine.dialect.name == "postgresql" else f"{engine.url.database}_tenant"
    with engine.connect() as connection:
        return sorted(connection.execute(text(f"SELECT id FROM {tenant}.orders")).scalars())


@pytest.mark.parametrize("way", ["writer", "leased", "session"])
@on_postgresql_and_mariadb
def test_a_block_that_leads_names_elsewhere_commits_and_the_writer_stays_ready(
    kafka, engine, orders, dualwrite_topic, both, elsewhere, way
):
    made = DualWriter.leased if way == "leased" else DualWriter
    with made("orders", kafka=kafka, database=engine) as writer:
        sessions = sessionmaker(engine)
        bound = writer.bind(sessions)
        for number in (1, 2):
            if way == "session":
                with sessions.begin() as session:
                    session.execute(text(elsewhere))
                    bound.produce(session, dualwrite_topic, str(number))
                    session.add(Order(id=number))
            else:
                with writer.transaction() as tx:
                    tx.connection.execute(text(elsewhere))
                    tx.connection.execute(orders.insert().values(id=number))
                    tx.produce(dualwrite_topic, value=str(number))
        assert writer.ready
        assert writer.transactional_id == ("orders-0" if way == "leased" else "orders")
    assert in_tenant(engine) == both()[1] == [1, 2]


@on_postgresql
@pytest.mark.parametrize("elsewhere", ["with tables of its own"], indirect=True)
def test_a_pooled_connection_whose_names_lead_elsewhere_serves_the_next_block_and_the_writer(
    kafka, url, engine, engine_of, orders, dualwrite_topic, both, elsewhere
):
    one = engine_of(url, pool_size=1, max_overflow=0)
    with DualWriter("orders", kafka=kafka, database=one, limits=WriterLimits(max_lanes=1)) as writer:
        with writer.transaction() as tx:
            tx.connection.execute(text(elsewhere.replace("LOCAL ", "")))
            tx.produce(dualwrite_topic, value="1")
        write(writer, dualwrite_topic, orders, 2)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM tenant.kafka_transaction_state")) == 0
    assert in_tenant(engine) == [2]
    assert both()[1] == [1, 2]


@on_postgresql_and_mariadb
def test_every_statement_of_the_library_names_the_schema_of_its_tables(kafka, engine, dualwrite_topic, orders):
    statements = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    arguments = {"kafka": kafka, "database": engine}
    for made in (DualWriter, DualWriter.leased):
        with made("orders", **arguments) as writer:
            write(writer, dualwrite_topic, orders, len(statements))
    handled = []
    for offsets in ("kafka", "database"):
        group = f"orders-{offsets}-{dualwrite_topic[-12:]}"
        consumer = ExactlyOnceConsumer(
            group,
            "one",
            topics=[dualwrite_topic],
            handler=lambda _, given: handled.extend(given),
            offsets=offsets,
            **arguments,
        )
        consumer.run(max_messages=2)
    assert len(handled) == 4
    recover(**arguments, open_for_s=0)
    status(**arguments)
    terminate("orders", **arguments)
    forget(**arguments)
    first = [statement for statement in statements if _UNNAMED.search(statement)]
    asked_where = "SELECT own.version_num"
    assert [statement for statement in first if not statement.startswith(asked_where)] == []
    assert {table for table in OWN_TABLES if any(table in statement for statement in statements)} >= {
        "kafka_transaction_state",
        "dualwrite_incident",
        "dualwrite_slot",
        "dualwrite_run",
        "dualwrite_consumed",
        "dualwrite_lease",
    }


def test_tables_are_upgraded_where_they_are_found_not_where_new_ones_would_be_made(dualwrite_database, engine_of):
    engine = engine_of(dualwrite_database)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA app"))
    with engine.connect() as connection:
        migrations.upgrade(connection, "0004")
    first_app = engine_of(make_url(dualwrite_database), connect_args={"options": "-c search_path=app,public"})
    with first_app.connect() as connection:
        migrations.upgrade(connection)
        assert migrations.current_revision(connection) == migrations.current_revision(connection, schema="public")
    with engine.connect() as connection:
        found = connection.execute(text("SELECT schemaname FROM pg_tables WHERE tablename = 'dualwrite_lease'"))
        assert found.scalars().all() == ["public"]
