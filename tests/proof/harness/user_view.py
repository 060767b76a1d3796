"""The dual writes of a user, and all that they show: rows, messages, results, errors with their texts. Any writer runs them.

Two writers that show the same have the same behaviour for users: the real one and that for users' unit tests are compared.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Engine, exc, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from dualwrite import TransactionAborted


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Refused(Exception):
    """Raised by the code of a block."""


class View:
    """A writer in the user's hands, and a record of what it shows.

    Args:
        writer: A ``DualWriter``, or what stands in for one; open.
        engine: Its engine, with the table ``orders``.
        topic: Takes the messages.
        seen: Takes the record.
    """

    def __init__(self, writer: Any, engine: Engine, topic: str, seen: list[object]) -> None:
        self.writer = writer
        self.engine = engine
        self.topic = topic
        self.seen = seen

    def put(self, tx: Any, number: int) -> None:
        """A row and a message of this number."""
        tx.connection.execute(text(f"INSERT INTO orders (id) VALUES ({number})"))
        tx.produce(self.topic, str(number), partition=0)

    def show(self, what: object) -> None:
        """Record it."""
        self.seen.append(what)

    @contextmanager
    def error(self):
        """Record the error of the block, which ends here."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other writer must raise it, too
            said = re.sub(
                r"0x\w+|has \d+ bytes|\n.*", "", re.sub(r"\.\w{6,}\.\d+:", ":", str(error))
            )  # without Kafka's own id
            self.show((type(error).__name__, said, getattr(error, "outcome", None), getattr(error, "retryable", None)))
        else:
            self.show("no error")

    def state_of(self, tx: Any) -> None:
        """Record the state of a transaction whose block has ended."""
        self.show((tx.state, tx.prepared is not None and tx.prepared.has_transaction, tx.transactional_id))


def commit_and_abort(view: View) -> None:
    with view.writer.transaction() as tx:
        view.put(tx, 1)
    view.state_of(tx)
    with view.error(), view.writer.transaction() as tx:
        view.put(tx, 2)
        raise Refused
    view.state_of(tx)
    with view.error(), view.writer.transaction() as tx:
        view.put(tx, 3)
        raise KeyboardInterrupt
    with view.writer.transaction():
        pass
    with view.writer.transaction() as tx:
        tx.connection.execute(text("INSERT INTO orders (id) VALUES (4)"))
    view.state_of(tx)
    with view.writer.transaction() as tx:
        tx.produce(view.topic, b"alone", partition=0)
        tx.produce(view.topic, None, key="gone", partition=0)
        tx.produce(view.topic, "with headers", partition=0, headers={"a": "b", "none": None}, timestamp_ms=1_000)
        tx.produce(view.topic, "twice", partition=0, headers=[("a", "1"), ("a", b"2")])


def savepoints(view: View) -> None:
    with view.writer.transaction() as tx:
        view.put(tx, 1)
        with view.error(), tx.connection.begin_nested():
            view.put(tx, 2)
            raise Refused
        with tx.session.begin_nested():
            view.put(tx, 3)
        tx.connection.execute(text("SAVEPOINT mine"))
        view.put(tx, 4)
        tx.connection.execute(text("ROLLBACK TO SAVEPOINT mine"))
        view.put(tx, 5)


def sessions(view: View) -> None:
    with view.writer.transaction() as tx:
        tx.session.add(Order(id=1))
        tx.produce(view.topic, "1", partition=0)
    with view.error(), view.writer.transaction() as tx:
        tx.session.add(Order(id=1))
        tx.produce(view.topic, "again", partition=0)
    with view.writer.transaction() as tx:
        tx.session.add(Order(id=2))
        tx.session.commit()
        view.show(tx.session.get(Order, 2) is not None)


def refusals(view: View) -> None:
    with view.writer.transaction() as tx:
        view.put(tx, 1)
        with view.error(), view.writer.transaction():
            view.show("entered")
    for use in (lambda: tx.produce(view.topic, "late"), lambda: tx.connection, lambda: tx.session):
        with view.error():
            use()
    with view.error(), view.writer.transaction() as tx:
        view.put(tx, 2)
        tx.connection.commit()
    with view.error(), view.writer.transaction() as tx:
        view.put(tx, 3)
        tx.connection.execute(text("COMMIT"))
    view.engine.dispose()
    with view.engine.begin() as connection:
        connection.execute(text("DELETE FROM orders WHERE id = 3"))  # the text has committed it
    for wrong in (view.engine, sessionmaker(view.engine)()):
        with view.error(), view.writer.transaction(wrong):
            view.show("entered")
    with view.engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        with view.error(), view.writer.transaction(connection):
            view.show("entered")
    with view.engine.connect() as connection:
        with view.writer.transaction(connection) as tx:
            view.show(tx.connection is connection)
            view.put(tx, 4)
        view.show((connection.closed, connection.in_transaction()))
    with view.error():
        view.writer.open()

    async def in_a_loop() -> None:
        with view.error(), view.writer.transaction():
            view.show("entered")

    asyncio.run(in_a_loop())


def refused_messages(view: View) -> None:
    large = "x" * 1_000_001
    with view.error(), view.writer.transaction() as tx, tx.connection.begin_nested():
        tx.produce(view.topic, large, partition=0)
    with view.error(), view.writer.transaction() as tx, tx.connection.begin_nested():
        view.put(tx, 1)
        with view.error():
            tx.produce(view.topic, large, partition=0)
    with view.error(), view.writer.transaction() as tx:
        tx.produce_many(view.topic, ["a", "b"], ["k"])


def large_messages(view: View) -> None:
    large = "x" * 1_000_001
    with view.error(), view.writer.transaction() as tx:
        view.put(tx, 1)
        tx.produce(view.topic, large, partition=0)
    with view.error(), view.writer.transaction() as tx:
        view.put(tx, 2)
        with view.error():
            tx.produce(view.topic, large, partition=0)


def runs(view: View) -> None:
    errors: list[BaseException] = []

    def work(tx: Any) -> str:
        view.put(tx, len(errors))
        view.show("ran")
        if errors:
            raise errors.pop()
        return "done"

    locked = exc.OperationalError("UPDATE", {}, _Locked("database is locked"))
    for planted in (
        [],
        [TransactionAborted("a conflict")] * 2,
        [Refused()],
        [TransactionAborted("for ever", retryable=False)],
        [locked],
    ):
        errors[:] = planted
        with view.error():
            view.show(view.writer.run(work, longest_pause_s=0))
        with view.writer.transaction() as tx:
            tx.connection.execute(text("DELETE FROM orders"))
    errors[:] = [TransactionAborted("a conflict")] * 2
    with view.error():
        view.writer.run(work, attempts=2, longest_pause_s=0)

    async def later(tx: Any) -> None:
        view.put(tx, 9)

    with view.error():
        view.writer.run(later)
    with view.error():
        view.writer.run(work, attempts=0)


def bound_sessions(view: View) -> None:
    factory = sessionmaker(view.engine)
    bound = view.writer.bind(factory)
    with factory() as session:
        session.add(Order(id=1))
        bound.produce(session, view.topic, "1", partition=0)
        session.commit()
        session.add(Order(id=2))
        bound.produce(session, view.topic, "2", partition=0)
        session.rollback()
        session.add(Order(id=3))
        session.commit()
    with view.error(), factory() as session:
        session.add(Order(id=3))
        bound.produce(session, view.topic, "3", partition=0)
        session.commit()


def units(view: View) -> None:
    def unit(number: int) -> Callable[[Any], int]:
        def work(tx: Any) -> int:
            view.put(tx, number)
            if number in {2, 12}:
                raise Refused
            return number

        return work

    view.show(view.writer.submit(unit(1)).result())
    with view.error():
        view.writer.submit(unit(2)).result()
    with view.error(), view.writer.transaction():
        view.writer.submit(unit(3)).result()

    async def later(tx: Any) -> None:
        view.put(tx, 4)

    with view.error():
        view.writer.submit(later).result()
    submitted = [view.writer.submit(unit(number)) for number in range(10, 16)]
    view.show([type(one.exception()).__name__ if one.exception() else one.result() for one in submitted])


class _Locked(Exception):
    """As a driver's own error."""


def closed(view: View) -> None:
    view.writer.close()
    view.writer.close()
    with view.error(), view.writer.transaction():
        view.show("entered")
    with view.error():
        view.writer.open()


WAYS: Final[Mapping[str, Callable[[View], None]]] = {
    way.__name__: way
    for way in (commit_and_abort, savepoints, sessions, refusals, refused_messages, runs, bound_sessions, units, closed)
}
"""The dual writes by name. Each begins with an empty table; the last one closes the writer."""
CLIENTS: Final[Mapping[str, Callable[[View], None]]] = {"large_messages": large_messages, **WAYS}
"""And those that need a real Kafka client."""


def rows_of(engine: Engine) -> Sequence[int]:
    """The rows of the table ``orders``."""
    with Session(engine) as session:
        return list(session.scalars(text("SELECT id FROM orders ORDER BY id")))
