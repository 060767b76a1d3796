"""SQLite's locks after an interruption: free at once, whatever still refers to the interrupted statement."""

import gc
import sqlite3

import pytest
from sqlalchemy import create_engine, event, text

from dualwrite.migrations import upgrade
from dualwrite.stores.sql.store import SqlStateStore


def interrupt(connection, cursor, statement, *others):
    if statement.startswith("SELECT"):
        raise KeyboardInterrupt


class Interrupted(sqlite3.Cursor):
    """Is interrupted where it takes the first row of a SELECT of the library's own."""

    armed = False

    def fetchone(self):
        if Interrupted.armed:
            raise KeyboardInterrupt
        return super().fetchone()


class Connection(sqlite3.Connection):
    """Its cursors may be interrupted."""

    def cursor(self, factory=Interrupted):
        return super().cursor(factory)


@pytest.mark.parametrize("whose", ["the library's", "the application's"])
def test_an_interrupted_statement_does_not_keep_the_write_lock(tmp_path, monkeypatch, whose):
    url = f"sqlite:///{tmp_path}/rows.db"
    engine = create_engine(url, connect_args={"factory": Connection})
    with engine.begin() as connection:
        upgrade(connection)
    store = SqlStateStore(engine)
    others = create_engine(url, connect_args={"timeout": 0})
    gc.disable()  # it would end the interrupted connection at some time
    try:
        with engine.connect() as connection:
            store.begin(connection)
            with pytest.raises(KeyboardInterrupt) as interrupted:
                if whose == "the library's":
                    monkeypatch.setattr(Interrupted, "armed", True)
                    store.read_incarnation(connection, "orders")
                event.listen(connection, "after_cursor_execute", interrupt)
                connection.execute(text("SELECT * FROM kafka_transaction_state"))
            with others.begin() as other:
                other.exec_driver_sql("DELETE FROM kafka_transaction_state")
        del interrupted
    finally:
        gc.enable()
        engine.dispose()
        others.dispose()
