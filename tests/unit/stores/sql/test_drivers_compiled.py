"""Statements that are compiled once: each execution gives what SQLAlchemy's own would give."""

import pytest
from sqlalchemy import Integer, String, bindparam, create_engine, event, exc, literal, select, text
from sqlalchemy.pool import NullPool

from dualwrite.stores.sql import drivers
from dualwrite.stores.sql.drivers import CompiledOnce, execute_below
from dualwrite.stores.sql.tables import declare_tables

STATE = declare_tables(None).state


def connect():
    return create_engine("sqlite://", poolclass=NullPool).connect()


@pytest.fixture
def times(monkeypatch):
    """The number of times that a statement was compiled."""
    found = []
    compile_ = drivers._compiled
    monkeypatch.setattr(drivers, "_compiled", lambda *given: found.append(1) or compile_(*given))
    return found


def test_values_come_by_their_names_wherever_they_stand_and_it_is_compiled_once(times):
    second, first = bindparam("second", type_=String()), bindparam("first", type_=Integer())
    statement = CompiledOnce(select(second, first, literal(7), second))
    with connect() as connection:
        assert statement.execute(connection, {"first": 1, "second": "b"})[0] == ("b", 1, 7, "b")
        assert statement.execute(connection, {"first": None, "second": "c"})[0] == ("c", None, 7, "c")
    assert len(times) == 1


def test_a_connection_of_another_engine_gets_a_text_of_its_own(times):
    statement = CompiledOnce(select(bindparam("value", type_=Integer())))
    for number in range(2):
        with connect() as connection:
            assert statement.execute(connection, {"value": number})[0] == (number,)
    assert len(times) == 2


def test_a_connection_that_translates_schemas_reads_its_own():
    statement = CompiledOnce(select(STATE.c.incarnation).where(STATE.c.transactional_id == bindparam("id_")))
    with connect() as plain:
        plain.execute(text("ATTACH ':memory:' AS other"))
        for incarnation, schema in enumerate(("main", "other")):
            plain.execute(text(f"CREATE TABLE {schema}.{STATE.name} (transactional_id TEXT, incarnation INTEGER)"))
            plain.execute(text(f"INSERT INTO {schema}.{STATE.name} VALUES ('a', {incarnation})"))
        assert statement.execute(plain, {"id_": "a"})[0] == (0,)
        translated = plain.execution_options(schema_translate_map={None: "other"})
        assert statement.execute(translated, {"id_": "a"})[0] == (1,)


def test_errors_are_sqlalchemys_and_its_listeners_hear_of_them_but_not_of_the_statement():
    executed, failed = [], []
    with connect() as connection:
        event.listen(connection, "before_cursor_execute", lambda *given: executed.append(given[2]))
        event.listen(connection.engine, "handle_error", lambda context: failed.append(context.statement))
        assert execute_below(connection, "SELECT 1") == ((1,), -1)
        with pytest.raises(exc.OperationalError, match="no such table"):
            execute_below(connection, "SELECT * FROM no_such")
    assert not executed
    assert failed == ["SELECT * FROM no_such"]
