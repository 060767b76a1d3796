"""What the library watches on a driver's connection, below SQLAlchemy; and the library's own statements, sent there.

A watchdog cuts a connection whose statement outlives its deadline.

libpq waits for an answer as long as the connection lives, and neither keepalives nor ``tcp_user_timeout`` end a
connection to a server or pooler that is alive but does not answer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakSet

from sqlalchemy import AdaptedConnection, Connection, Engine, event, exc
from sqlalchemy.util.concurrency import in_greenlet

from dualwrite.clock import now_s
from dualwrite.errors import DualWriteError
from dualwrite.stores.sql.access import sqlstate_of
from dualwrite.stores.sql.tables import digest

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy import Executable
    from sqlalchemy.engine.interfaces import DBAPIConnection, Dialect, ExceptionContext
    from typing_extensions import Self

    from dualwrite.protocol.prepared_state import PreparedTxnState


class Watch:
    """One wait, for as long as its ``with`` block lasts: if that is too long, the connection is shut, and the wait fails.

    If the answer came at the last moment, and the connection was shut, ``shut`` is called after the block. ``expired`` says
    that the connection was shut: it is unusable then, even if the answer arrived.

    It shuts by a duplicate of the socket: by then the connection's own descriptor may have been closed, and its number may
    belong to another file. The duplicate lives no longer than the wait. The server sees the end of a connection, and ends its
    transaction, only once no descriptor of its socket is left; and some drivers close the socket without a word.
    """

    __slots__ = ("_dog", "_fileno", "_shut", "due_s", "expired")
    _give_back = staticmethod(os.close)  # as the interpreter ends, modules are gone before the last objects

    def __init__(self, dog: Watchdog, fileno: int, seconds: float, shut: Callable[[], object] | None = None) -> None:
        self._fileno = -1
        self._dog = dog
        self._shut = shut
        self.due_s = now_s() + seconds
        self.expired = False
        self._fileno = os.dup(fileno)

    def __enter__(self) -> Self:
        dog = self._dog
        with dog.lock:
            dog.watched.add(self)
            if self.due_s < dog.wakes_s or not dog.runs:
                dog.wake()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        dog = self._dog
        with dog.lock:
            dog.watched.discard(self)
            self.close()
        if self.expired and kind is None and self._shut is not None:
            self._shut()

    def expire(self) -> None:
        """End the connection, for each descriptor of its socket."""
        self.expired = True
        with suppress(OSError), socket.socket(fileno=os.dup(self._fileno)) as own:  # the peer closed it first
            own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicate, and leave the connection alone. Idempotent."""
        fileno, self._fileno = getattr(self, "_fileno", -1), -1  # none yet if its making was interrupted
        if fileno >= 0:
            self._give_back(fileno)

    def __del__(self) -> None:
        self.close()


class Watchdog:
    """Shuts connections whose answers are overdue, on one thread for all of them, started on first use."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start with nothing to watch. A fork inherits no thread, perhaps a held lock, and its parent's connections."""
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self.watched: set[Watch] = set()
        self.runs = False
        self.wakes_s = inf

    def wake(self) -> None:
        """Have the thread look again. Called with the lock."""
        if not self.runs:
            self.runs = True
            threading.Thread(target=self._run, name="dualwrite watchdog", daemon=True).start()
        else:
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                now = now_s()
                for watch in [watch for watch in self.watched if watch.due_s <= now]:
                    self.watched.discard(watch)
                    watch.expire()
                self.wakes_s = min((watch.due_s for watch in self.watched), default=inf)
                self._changed.wait(None if self.wakes_s == inf else max(0.0, self.wakes_s - now))


WATCHDOG: Final = Watchdog()


def _in_child() -> None:
    """The server could not see that the parent has died as long as any process holds the socket."""
    watched = WATCHDOG.watched
    WATCHDOG.begin()
    for watch in list(watched):
        watch.close()


os.register_at_fork(after_in_child=_in_child)


# The statements that every dual write executes, compiled once.

_TRANSLATED: Final = "schema_translate_map"


@dataclass(frozen=True)
class OwnText:
    """A statement as the driver takes it. Its name is the same in every process: a pooler's sessions are shared.

    Attributes:
        order: The names of its values, if the driver takes them by position.
        constants: Values that the statement itself contains.
    """

    dialect: Dialect
    template: str
    order: tuple[str, ...] | None
    constants: Mapping[str, Any]
    names: tuple[str, ...]
    name: str


class CompiledOnce:
    """A statement whose text is made at its first execution, and sent as it is from then on. Nothing is converted.

    For each execution of a statement object SQLAlchemy makes its cache key, and prepares the types of its values and results.
    That takes as much processor time as everything after it.
    """

    def __init__(self, statement: Executable) -> None:
        self._statement = statement
        self._compiled: OwnText | None = None

    def text(self, connection: Connection) -> OwnText | None:
        """The text for this connection; None if it has a ``schema_translate_map``: each connection may have another one."""
        if _TRANSLATED in connection.get_execution_options():
            return None
        compiled = self._compiled
        if compiled is None or compiled.dialect is not connection.dialect:
            compiled = self._compiled = _compiled(self._statement, connection.dialect)
        return compiled

    def execute(self, connection: Connection, bound: Mapping[str, Any]) -> tuple[Sequence[Any] | None, int]:
        """Execute it below SQLAlchemy. Returns its first row, if there is one, and how many rows it has changed."""
        compiled = self.text(connection)
        if compiled is None:
            result = connection.execute(self._statement, dict(bound))
            return result.first() if result.returns_rows else None, result.rowcount
        values: Any = {**compiled.constants, **bound}
        if compiled.order is not None:
            values = tuple([values[name] for name in compiled.order])
        return execute_below(connection, compiled.template, values)


def execute_below(connection: Connection, statement: str, values: Any = ()) -> tuple[Sequence[Any] | None, int]:
    """Execute one of our own statements on a cursor of the driver's.

    SQLAlchemy's execution takes a hundred calls, and tells the application's listeners of statements that are not theirs.
    Errors are those of its own executions: it alone knows its events, and which connections are lost with this one.
    """
    cursor = connection.connection.cursor()
    try:
        if values:
            cursor.execute(statement, values)
        else:
            cursor.execute(statement)
        found = cursor.fetchone() if cursor.description else None, cursor.rowcount
    except BaseException as error:
        with suppress(Exception):  # first: SQLite keeps its locks as long as the statement is there, connected or not
            cursor.close()
        if isinstance(error, DualWriteError):  # of the watch over the driver
            raise
        connection._handle_dbapi_exception(error, statement, values, None, None)  # noqa: SLF001 - as above
    cursor.close()
    return found


def execute_many_below(connection: Connection, statement: str, values: Sequence[Any]) -> None:
    """As :func:`execute_below`, once for each of the values, in the driver's own way."""
    cursor = connection.connection.cursor()
    try:
        cursor.executemany(statement, values)
    except BaseException as error:
        with suppress(Exception):  # as above
            cursor.close()
        if isinstance(error, DualWriteError):  # of the watch over the driver
            raise
        connection._handle_dbapi_exception(error, statement, None, None, None)  # noqa: SLF001 - as above
    cursor.close()


def _compiled(statement: Executable, dialect: Dialect) -> OwnText:
    compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    constants = {name: value for name, value in compiled.params.items() if value is not None}
    order = compiled.positiontup
    template = str(compiled)
    return OwnText(
        dialect,
        template,
        None if order is None else tuple(order),
        constants,
        tuple(compiled.params),
        f"dualwrite_{sha256(template.encode()).hexdigest()[:16]}",
    )


# Listeners to connections: on their engine where we know it, as SQLAlchemy takes longer to add a listener than to call
# it.

Listened = TypeVar("Listened", Connection, Engine)


class Listeners:
    """Functions that SQLAlchemy calls for every connection of an engine. They stay; each checks whether it is concerned."""

    def __init__(self, functions: Mapping[str, Callable[..., object]]) -> None:
        self._functions: Final = functions
        self._engines: Final[WeakSet[Engine]] = WeakSet()
        self._connections: Final[WeakSet[Connection]] = WeakSet()

    def expect(self, engine: Engine) -> None:
        """Have them called for all connections of this engine. Call it early: others may listen there, too."""
        self._listen(_root(engine), self._engines)

    def require(self, connection: Connection) -> None:
        """Have them called for this connection, if they are not."""
        if _root(connection.engine) not in self._engines:
            self._listen(connection, self._connections)

    def _listen(self, target: Listened, known: WeakSet[Listened]) -> None:
        if target not in known:
            for name, function in self._functions.items():
                event.listen(target, name, function)
            known.add(target)


def listens(target: Any, name: str, function: Callable[..., object]) -> bool:
    """Whether the function is called for this event of a pool, an engine or a connection.

    ``event.contains`` finds targets by their addresses, and keeps that of a pool which ``Engine.dispose()`` has replaced: it
    says yes for the next pool at that address, where nobody listens.
    """
    return function in list(getattr(target.dispatch, name))


def _root(engine: Engine) -> Engine:
    """The engine behind those that ``execution_options()`` has made of it: its listeners are called for theirs."""
    while isinstance(proxied := getattr(engine, "_proxied", None), Engine):
        engine = proxied
    return engine


# Releases locks before SQLAlchemy closes a connection because one of its statements was interrupted or cancelled.


def roll_back_before_closing(engine: Engine) -> None:
    """Roll back SQLite's connections before SQLAlchemy closes them because a statement was interrupted or cancelled.

    SQLite ends a closed connection only with its last statement, which the traceback may hold: until then nobody could write.
    """
    if engine.dialect.name == "sqlite" and not listens(engine.pool, "invalidate", _roll_back):
        event.listen(engine, "handle_error", _end_statement)
        event.listen(engine, "invalidate", _roll_back)


def _end_statement(context: ExceptionContext) -> None:
    if (
        context.execution_context is not None
        and not isinstance(context.original_exception, Exception)
        and (cursor := context.execution_context.cursor) is not None
    ):
        cursor.close()


def _roll_back(driver: DBAPIConnection, record: object, error: BaseException | None) -> None:
    del record, error
    if not is_awaited(driver) or in_greenlet():  # the latter needs the package greenlet
        with suppress(Exception):  # it is closed in any case
            driver.rollback()


# The drivers' own connections behind those that SQLAlchemy adapts from an asynchronous driver.
#
# Statements need none of this: on such a connection they await by themselves, in the greenlet that runs them.

T = TypeVar("T")


def is_awaited(driver: object) -> bool:
    """Whether this is an asynchronous driver's connection, adapted by SQLAlchemy."""
    return isinstance(driver, AdaptedConnection)


def own_connection(driver: DBAPIConnection | sqlite3.Connection) -> object:
    """The driver's own connection, synchronous or not."""
    return driver.driver_connection if isinstance(driver, AdaptedConnection) else driver


def ask(driver: object, question: Callable[[sqlite3.Connection], T]) -> T:
    """Call ``question`` with the connection of ``sqlite3``, in the one thread that may use it."""
    if not isinstance(driver, AdaptedConnection):
        return question(cast("sqlite3.Connection", driver))

    def awaitable(connection: Any) -> Awaitable[T]:
        answer: Awaitable[T] = connection._execute(lambda: question(connection._conn))  # noqa: SLF001 - no public method runs a function there
        return answer

    return driver.run_async(awaitable)


# Names prepared transactions, and ends them.
#
# PostgreSQL always flushes PREPARE TRANSACTION and COMMIT PREPARED, whatever the session's `synchronous_commit`.

PREFIX: Final = "dualwrite:"
_UNDEFINED_OBJECT: Final = "42704"
_DIGEST_LENGTH: Final = 32
_PARTS: Final = 3


def name_of(namespace: str, state: PreparedTxnState) -> str:
    """The name of the database transaction prepared with a Kafka transaction; a namespace is unique across all databases."""
    return f"{PREFIX}{namespace}:{state.incarnation}:{digest(state)[:_DIGEST_LENGTH]}"


def parse(name: str) -> tuple[str, int] | None:
    """Namespace and incarnation from a name made by :func:`name_of`; None for any other name."""
    parts = name[len(PREFIX) :].rsplit(":", 2)
    if len(parts) < _PARTS or not parts[1].isdecimal():
        return None
    return parts[0], int(parts[1])


def end(engine: Engine, name: str, *, committed: bool) -> None:
    """Commit or roll back a prepared transaction; does nothing if none has that name."""
    verb = "COMMIT" if committed else "ROLLBACK"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        try:
            connection.exec_driver_sql(f"{verb} PREPARED '{name}'")
        except exc.DBAPIError as error:
            if sqlstate_of(error.orig) != _UNDEFINED_OBJECT:
                raise
