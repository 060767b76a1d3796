"""One dual write is decided in one database: connections and sessions that lead elsewhere are refused before anything is begun."""

from dataclasses import replace

import pytest
from harness.orders import Order, on_both, on_postgresql
from sqlalchemy import event, insert, make_url, select, text
from sqlalchemy.orm import Session, sessionmaker

from dualwrite import ConfigurationError, DualWriter, TransactionAborted, Unavailable, WriterLimits
from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql.postgresql import PostgreSQL
from dualwrite.testing.checker import read_committed


@pytest.fixture
def writer(kafka, engine):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        yield writer


def write(writer, connection, topic, orders, number):
    with writer.transaction(connection) as tx:
        tx.connection.execute(insert(orders).values(id=number))
        tx.produce(topic, value=str(number))


def rows(engine, orders):
    with engine.connect() as connection:
        return list(connection.scalars(select(orders.c.id)))


def messages(kafka, topic):
    return sorted(int(message.value) for message in read_committed(kafka, topic))


@on_both
def test_a_connection_of_a_copy_of_the_database_is_refused_and_left_as_it_is(
    kafka, engine, writer, copied, dualwrite_topic, orders
):
    with copied.connect() as connection:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="another database"):
                write(writer, connection, dualwrite_topic, orders, 1)
            assert not connection.in_transaction()
    write(writer, None, dualwrite_topic, orders, 2)
    assert (rows(copied, orders), rows(engine, orders), messages(kafka, dualwrite_topic)) == ([], [2], [2])


@on_both
def test_a_connection_of_another_engine_of_the_same_database_works_and_is_asked_once(
    kafka, engine, url, writer, engine_of, tmp_path, dualwrite_topic, orders
):
    if engine.dialect.name == "sqlite":
        link = tmp_path / "link.db"
        link.symlink_to(make_url(url).database)
        url = f"sqlite:///{link}"
    other = engine_of(url)
    asked = []
    event.listen(engine, "begin", asked.append)
    with other.connect() as connection:
        write(writer, connection, dualwrite_topic, orders, 1)
        assert len(asked) == 1
        write(writer, connection, dualwrite_topic, orders, 2)
    with engine.execution_options(logging_token="x").connect() as connection:  # shares the pool of its engine
        asked.clear()
        write(writer, connection, dualwrite_topic, orders, 3)
        assert len(asked) == 1, "the one of the dual write"
    assert rows(engine, orders) == [1, 2, 3]
    assert messages(kafka, dualwrite_topic) == [1, 2, 3]


@on_postgresql
def test_a_server_that_is_restarted_between_the_two_questions_is_no_other_database(
    engine, url, writer, engine_of, orders, dualwrite_topic, monkeypatch
):
    other = engine_of(url)
    identity = PostgreSQL.identity

    def restarted(self, connection, tables):
        found = identity(self, connection, tables)
        if connection.engine is other:
            return found
        with engine.begin() as own:
            own.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        return replace(found, database=("started later", found.database[1]))

    monkeypatch.setattr(PostgreSQL, "identity", restarted)
    with other.connect() as connection:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        connection.rollback()
        with pytest.raises(Unavailable):
            write(writer, connection, dualwrite_topic, orders, 1)
    assert rows(engine, orders) == []


@on_postgresql
def test_a_connection_whose_search_path_finds_another_schemas_tables_uses_the_writers(
    kafka, engine, url, writer, engine_of, dualwrite_topic, orders
):
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant"))
        connection.execute(text("CREATE TABLE tenant.kafka_transaction_state (LIKE public.kafka_transaction_state)"))
    other = engine_of(url, connect_args={"options": "-c search_path=tenant,public"})
    with other.connect() as connection:
        write(writer, connection, dualwrite_topic, orders, 1)
    assert (rows(engine, orders), messages(kafka, dualwrite_topic)) == ([1], [1])


@on_postgresql
def test_an_unprivileged_role_can_tell_the_databases_apart(
    kafka, engine, url, writer, engine_of, dualwrite_topic, orders
):
    role = f"plain_{dualwrite_topic[-12:]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'plain'"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}"))
    plain = engine_of(make_url(url).set(username=role, password="plain"))
    with plain.connect() as connection:
        write(writer, connection, dualwrite_topic, orders, 1)
    plain.dispose()
    assert rows(engine, orders) == messages(kafka, dualwrite_topic) == [1]
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


@on_postgresql
def test_another_kind_of_database_and_what_is_no_connection_are_refused(writer, engine, engine_of, tmp_path):
    with (
        engine_of(f"sqlite:///{tmp_path}/other.db").connect() as connection,
        pytest.raises(ConfigurationError, match="another database"),
        writer.transaction(connection),
    ):
        pass
    for given in (Session(bind=engine), engine):
        with pytest.raises(IllegalStateError, match=type(given).__name__), writer.transaction(given):
            pass


@pytest.mark.parametrize("swallowed", [False, True])
@on_both
def test_a_session_that_binds_a_class_to_another_database_is_refused(
    kafka, engine, copied, dualwrite_topic, orders, swallowed
):
    factory = sessionmaker(binds={Order: copied})
    with DualWriter("others", kafka=kafka, database=engine, session_factory=factory) as writer:
        refused = TransactionAborted if swallowed else ConfigurationError
        with pytest.raises(refused, match="another connection"), writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="1")
            tx.session.add(Order(id=1))
            try:
                tx.session.flush()
            except ConfigurationError:
                if not swallowed:
                    raise
                tx.session.expunge_all()
    assert (rows(copied, orders), rows(engine, orders), messages(kafka, dualwrite_topic)) == ([], [], [])
