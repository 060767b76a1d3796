"""The connection of a block: which are taken, and which are refused with what to do. psycopg's are tried on a real server."""

import sys

import psycopg
import pytest
from harness.databases import sqlite_url
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.stores.sql.access import Borrowed, begun_on, keep
from dualwrite.stores.sql.adopted import usable


@pytest.fixture
def engine():
    found = create_engine("sqlite://")
    yield found
    found.dispose()


def test_sqlalchemys_connections_are_used_as_they_are(engine):
    with engine.connect() as connection:
        with usable(connection, engine) as given:
            assert given is connection
        assert not connection.closed


def test_without_one_the_engine_lends_one(engine):
    with Borrowed(engine) as own:
        assert own.engine is engine
    assert own.closed


def test_an_engine_that_cannot_connect_is_an_error_of_ours(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path}/missing/rows.db")
    with pytest.raises((ConfigurationError, Unavailable)), Borrowed(engine):
        pass


@pytest.mark.parametrize("psycopg_is_loaded", [True, False])
def test_what_is_no_connection_is_refused(engine, monkeypatch, psycopg_is_loaded):
    if not psycopg_is_loaded:
        monkeypatch.delitem(sys.modules, "psycopg")
    for wrong in (engine, Session(engine), "postgresql://"):
        with pytest.raises(IllegalStateError, match=type(wrong).__name__), usable(wrong, engine):
            pass


@pytest.mark.parametrize(
    ("kind", "words"), [(psycopg.AsyncConnection, "asynchronous"), (psycopg.Connection, "another database")]
)
def test_a_psycopg_connection_must_be_synchronous_and_of_the_writers_kind_of_database(engine, kind, words):
    with pytest.raises(ConfigurationError, match=words), usable(kind.__new__(kind), engine):
        pass


def test_a_connection_that_an_interruption_has_let_drop_goes_back_to_its_pool(tmp_path):
    engine = create_engine(sqlite_url(tmp_path))
    borrowed = Borrowed(engine)
    borrowed.__enter__()
    assert engine.pool.checkedout() == 1
    del borrowed
    assert engine.pool.checkedout() == 0
    with Borrowed(engine) as own:
        keep(own)
    assert begun_on(own) is None, "the beginning of a dual write was interrupted"
    engine.dispose()
