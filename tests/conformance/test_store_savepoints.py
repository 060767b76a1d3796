"""Messages go with savepoints as rows do, also where statements run past SQLAlchemy; or the dual write aborts."""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import psycopg
import pymysql
import pytest
from harness.databases import Database, prepared, run_raw
from psycopg import generators
from sqlalchemy import Connection, event, exc, text

from dualwrite.errors import IllegalStateError, TransactionAborted
from dualwrite.protocol.values import Decision
from dualwrite.stores.sql.savepoints import SavepointWatch
from dualwrite.stores.sql.store import SqlStateStore


class DualWrite:
    """The database's part of a dual write that is watched; a message is a number, as is the row that it stands for."""

    def __init__(self, connection: Connection, watch: SavepointWatch) -> None:
        self.connection = connection
        self.watch = watch
        self.sent: list[int] = []
        self.produced: list[int] = []

    def execute(self, statement: str) -> None:
        """A statement of the user's, through SQLAlchemy."""
        self.connection.exec_driver_sql(statement)

    def execute_past(self, statement: str) -> None:
        """A statement of the user's by a cursor of the driver's."""
        run_raw(self.connection.connection.driver_connection, statement)

    def execute_unseen(self, statement: str) -> None:
        """A statement that nothing shows: in SQLite any by a cursor of the driver's."""
        driver: Any = self.connection.connection.driver_connection
        if isinstance(driver, psycopg.Connection):
            driver.wait(_below_psycopg(driver.pgconn, statement))
        elif isinstance(driver, sqlite3.Connection):
            run_raw(driver, statement)
        else:
            run_raw(driver, f"EXECUTE IMMEDIATE '{statement}'")

    def produce(self, number: int, *, row: bool = True) -> None:
        if row:
            self.connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": number})
        self.produced.append(number)
        message = _Message(self.sent, number)
        if self.watch.direct:
            message()
        else:
            self.watch.add(message)
            self.take()

    def take(self) -> None:
        for message in self.watch.take():
            message()

    def finish(self) -> tuple[list[int], list[int]]:
        """The rows and the messages, as they would be committed."""
        self.watch.finish()
        self.take()
        return rows_of(self), self.sent


def _below_psycopg(pgconn: Any, statement: str) -> Generator[Any, Any, None]:
    pgconn.send_query(statement.encode())
    (result,) = yield from generators.execute(pgconn)
    if result.status != psycopg.pq.ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(result)


class _Message:
    def __init__(self, sent: list[int], number: int) -> None:
        self._sent, self._number = sent, number

    def __call__(self, *_: object) -> None:
        self._sent.append(self._number)


Begin = Callable[[], AbstractContextManager[DualWrite]]


@contextmanager
def dual_write(store: SqlStateStore) -> Iterator[DualWrite]:
    with store.engine.connect() as connection:
        store.begin(connection)
        watch = store.watch_savepoints(connection, "orders")
        try:
            yield DualWrite(connection, watch)
        finally:
            watch.stop()
            store.rollback(connection)


@pytest.fixture
def begin(store: SqlStateStore) -> Begin:
    return lambda: dual_write(store)


@pytest.fixture
def begin_postgres(postgres: Database) -> Begin:
    store = postgres.store()
    return lambda: dual_write(store)


on_each = pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"], indirect=True)
REFUSED = (exc.DBAPIError, psycopg.Error, pymysql.err.MySQLError, sqlite3.Error)
Way = Literal["seen", "past", "unseen"]
Step = tuple[str, Way]
"""A statement, or ``produce``; and whether SQLAlchemy sends it, a cursor of the driver's, or something that nothing shows."""


def sequences(database: Database, *ways: Way) -> Iterator[Sequence[Step]]:
    """The sequences to try: on SQLite every short one; everywhere some longer ones that the database would not refuse."""
    if database.kind == "sqlite":
        moves = [f"{verb} {name}" for verb in ("SAVEPOINT", "RELEASE", "ROLLBACK TO") for name in "ab"]
        yield from itertools.product([("produce", "seen"), *itertools.product(moves, ways)], repeat=3)
    chance = random.Random(1)
    for _ in range(80):
        yield list(_random_sequence(chance, ways))


def _random_sequence(chance: random.Random, ways: Sequence[Way]) -> Iterator[Step]:
    names: list[str] = []
    for _ in range(chance.randrange(4, 12)):
        verb = chance.choice(["produce", "produce", "SAVEPOINT", "RELEASE", "ROLLBACK TO"])
        if verb == "produce" or (verb != "SAVEPOINT" and not names):
            yield "produce", "seen"
            continue
        name = chance.choice(names if verb != "SAVEPOINT" else "abc")
        if verb == "SAVEPOINT":
            names.append(name)
        else:
            at = len(names) - 1 - names[::-1].index(name)
            del names[at + (verb == "ROLLBACK TO") :]
        yield f"{verb} {name}", chance.choice(ways)


def perform(tx: DualWrite, steps: Sequence[Step]) -> tuple[list[int], list[int]] | None:
    """Rows and messages; None where the database has refused a step, so that the transaction cannot go on."""
    for number, (step, way) in enumerate(steps):
        try:
            if step == "produce":
                tx.produce(number)
            elif way == "seen":
                tx.execute(step)
            elif way == "past":
                tx.execute_past(step)
            else:
                tx.execute_unseen(step)
        except REFUSED:
            return None
    return tx.finish()


def rows_of(tx: DualWrite) -> list[int]:
    return list(tx.connection.scalars(text("SELECT id FROM orders ORDER BY id")))


@pytest.mark.parametrize(
    ("database", "ways"),
    [
        ("postgresql", ["seen", "past"]),
        ("mariadb", ["seen", "past"]),
        ("sqlite", ["seen"]),
    ],
    indirect=["database"],
)
def test_savepoints_that_are_seen_take_their_messages_along(
    database: Database, begin: Begin, ways: Sequence[Way]
) -> None:
    dropped = 0
    for steps in sequences(database, *ways):
        with begin() as tx:
            if (found := perform(tx, steps)) is not None:
                rows, messages = found
                assert rows == messages, steps
                dropped += messages != tx.produced
    assert dropped


@on_each
def test_savepoints_unseen_abort_the_dual_write_where_a_message_was_rolled_back_and_only_there(
    database: Database, begin: Begin
) -> None:
    ended = {"both": 0, "aborted": 0}
    for steps in sequences(database, "unseen"):
        with begin() as tx:
            try:
                found = perform(tx, steps)
            except TransactionAborted:
                assert rows_of(tx) != tx.produced, steps
                ended["aborted"] += 1
            else:
                if found is not None:
                    assert found[0] == found[1] == tx.produced, steps
                    ended["both"] += 1
    assert all(ended.values())


@on_each
def test_savepoints_seen_and_unseen_never_part_rows_and_messages(database: Database, begin: Begin) -> None:
    ended = {"both": 0, "aborted": 0}
    for steps in sequences(database, "seen", "past", "unseen"):
        with begin() as tx:
            try:
                found = perform(tx, steps)
            except TransactionAborted:
                ended["aborted"] += 1
            else:
                if found is not None:
                    assert found[0] == found[1], steps
                    ended["both"] += 1
    assert all(ended.values())


def test_a_text_of_several_statements_is_read_and_one_that_fails_in_the_middle_aborts(begin_postgres: Begin) -> None:
    with begin_postgres() as tx:
        tx.execute("SAVEPOINT a; INSERT INTO orders (id) VALUES (1)")
        tx.produce(1, row=False)
        tx.execute("ROLLBACK TO a; RELEASE a")
        tx.produce(2)
        assert tx.finish() == ([2], [2])
    with begin_postgres() as tx:
        with pytest.raises(exc.DBAPIError):
            tx.execute("SAVEPOINT a; SELECT 1 / 0")
        tx.execute("ROLLBACK TO a")
        with pytest.raises(TransactionAborted, match="several statements"):
            tx.produce(1)


def test_psycopgs_own_transactions_and_copy(begin_postgres: Begin) -> None:
    with begin_postgres() as tx:
        driver = tx.connection.connection.driver_connection
        assert driver is not None
        with driver.cursor().copy("COPY orders (id) FROM STDIN") as copy:
            copy.write_row((1,))
            tx.produce(1, row=False)
        with driver.transaction():
            with (
                driver.cursor().copy("COPY orders (id) FROM STDIN") as copy,
                pytest.raises(IllegalStateError, match="COPY"),
            ):
                tx.produce(2, row=False)
            tx.produce(2)
        assert tx.finish() == ([1, 2], [1, 2])
    with begin_postgres() as tx:
        driver = tx.connection.connection.driver_connection
        assert driver is not None
        tx.produce(1)
        with driver.transaction(force_rollback=True):
            tx.produce(2)
        with pytest.raises(TransactionAborted, match="past SQLAlchemy"):
            tx.finish()


def test_a_message_of_a_savepoint_that_has_failed_is_dropped_with_it(begin_postgres: Begin) -> None:
    for way in ("seen", "past", "unseen"):
        with begin_postgres() as tx:
            tx.produce(1)
            tx.execute("SAVEPOINT a")
            with pytest.raises(exc.DBAPIError):
                tx.execute("SELECT 1 / 0")
            tx.produce(2, row=False)
            if way == "unseen":
                tx.execute_unseen("ROLLBACK TO a")
                with pytest.raises(TransactionAborted, match="does not show"):
                    tx.finish()
            else:
                (tx.execute if way == "seen" else tx.execute_past)("ROLLBACK TO a")
                assert tx.finish() == ([1], [1])


def test_where_nothing_runs_past_sqlalchemy_a_message_costs_no_statement(begin_postgres: Begin) -> None:
    with begin_postgres() as tx:
        statements: list[str] = []
        listener = lambda *called: statements.append(called[2])  # noqa: E731
        event.listen(tx.connection, "before_cursor_execute", listener)
        many = [{"id": number} for number in range(100, 110)]
        tx.connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), many)  # executemany, in a pipeline
        for number in range(3):
            tx.produce(number, row=False)
        assert tx.watch.direct
        tx.execute_past("SELECT 1")  # the driver shows it
        assert tx.watch.direct
        tx.watch.finish()
        event.remove(tx.connection, "before_cursor_execute", listener)
        assert len(statements) == 1
        assert "wait" not in vars(tx.connection.connection.driver_connection)


@on_each
def test_a_rollback_does_not_bring_back_the_witness_of_an_earlier_dual_write(
    database: Database, store: SqlStateStore
) -> None:
    database.claim(store, "orders")
    with store.engine.connect() as connection:
        for last in (False, True):
            store.begin(connection)
            store.read_incarnation(connection, "orders")
            watch = store.watch_savepoints(connection, "orders")
            write = DualWrite(connection, watch)
            write.execute_unseen("SAVEPOINT unseen")
            write.produce(1 + last)
            if last:
                write.execute_unseen("ROLLBACK TO SAVEPOINT unseen")
                with pytest.raises(TransactionAborted, match="rolled back past SQLAlchemy"):
                    write.finish()
                store.rollback(connection)
            else:
                write.finish()
                assert store.decide(connection, Decision("orders", 1, prepared(1)))[0]
                store.commit(connection)
