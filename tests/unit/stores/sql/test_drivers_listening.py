"""Listeners are called once for each event, however a connection came about."""

import pytest

from dualwrite.stores.sql.drivers import Listeners


class Heard:
    def __init__(self):
        self.statements = []
        self.listeners = Listeners({"before_cursor_execute": lambda *given: self.statements.append(given[2])})

    def once(self, connection):
        """Whether they are called once for a statement of this connection."""
        self.statements.clear()
        self.listeners.require(connection)
        connection.exec_driver_sql("SELECT 1")
        return self.statements == ["SELECT 1"]


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def engine(engine_of):
    return engine_of("sqlite://")


def test_an_engine_that_is_expected_needs_no_listener_on_its_connections(heard, engine):
    with engine.connect() as before:
        heard.listeners.expect(engine)
        heard.listeners.expect(engine)
        with engine.connect() as connection:
            assert heard.once(connection)
            assert heard.once(connection)
        assert heard.once(before)
        assert not heard.listeners._connections


def test_an_engine_with_other_options_is_the_same_engine(heard, engine):
    first = engine.execution_options(isolation_level="SERIALIZABLE")
    heard.listeners.expect(first)
    heard.listeners.expect(engine)
    for other in (
        engine,
        first,
        first.execution_options(logging_token="x"),
        engine.execution_options(stream_results=True),
    ):
        with other.connect() as connection:
            assert heard.once(connection)


def test_a_connection_of_another_engine_gets_them_itself(heard, engine):
    with engine.connect() as connection:
        assert heard.once(connection)
        assert heard.once(connection)
    with engine.connect() as other:
        heard.statements.clear()
        other.exec_driver_sql("SELECT 1")
        assert heard.statements == []
