"""SQLite's locks after an interruption: free at once, whatever still refers to the interrupted statement."""

import gc

import pytest
from sqlalchemy import create_engine, event

from dualwrite.migrations import upgrade
from dualwrite.stores.sql.store import SqlStateStore


def interrupt(connection, cursor, statement, *others):
    if statement.startswith("SELECT"):
        raise KeyboardInterrupt


def test_an_interrupted_statement_does_not_keep_the_write_lock(tmp_path):
    url = f"sqlite:///{tmp_path}/rows.db"
    engine = create_engine(url)
    with engine.begin() as connection:
        upgrade(connection)
    store = SqlStateStore(engine)
    others = create_engine(url, connect_args={"timeout": 0})
    gc.disable()  # it would end the interrupted connection at some time
    try:
        with engine.connect() as connection:
            store.begin(connection)
            event.listen(connection, "after_cursor_execute", interrupt)
            with pytest.raises(KeyboardInterrupt) as interrupted:
                store.read_incarnation(connection, "orders")
            with others.begin() as other:
                other.exec_driver_sql("DELETE FROM kafka_transaction_state")
        del interrupted
    finally:
        gc.enable()
        engine.dispose()
        others.dispose()
