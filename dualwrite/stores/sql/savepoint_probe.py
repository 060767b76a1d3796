"""Asks the database itself which savepoints still exist, where its statements do not show it.

A row of a temporary table is written under each savepoint: if the savepoint was rolled back, the row is gone, and so
are the messages that waited for it.

A *witness* is a number that the database keeps in the open transaction. A rollback to a savepoint reverts it like a
row, whichever code sends the rollback, and by whichever route.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from sqlalchemy import exc, text
from sqlalchemy.util import await_only

from dualwrite.errors import IllegalStateError
from dualwrite.protocol.message import may_move
from dualwrite.stores.sql.drivers import (
    is_awaited,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator, Sequence

    from sqlalchemy import Connection

    from dualwrite.stores.sql.access import Begun

_ACTIVE: Final = 1
_DONE: Final = frozenset({1, 2})  # COMMAND_OK, TUPLES_OK


class Follower(Protocol):
    """A watch over savepoints, which is told of the statements on a connection where the driver shows them."""

    def after(self, statement: str, *, many: bool) -> None:
        """Follow a statement that the database has executed, perhaps many times."""
        ...

    def failed(self, statement: str, error: BaseException) -> None:
        """Judge a statement that has failed, or whose answer was not waited for."""
        ...

    def doubt(self) -> None:
        """Note that savepoints may have been opened, and those that are open rolled back, unseen."""
        ...


class Witness(Protocol):
    """The witness of one dual write."""

    doubtful: bool
    """Whether a savepoint may have been opened or rolled back unseen since the last :meth:`keep`."""

    @property
    def shown_all(self) -> bool:
        """Whether the driver shows every statement: only if it is :attr:`doubtful` is there anything to ask the database."""
        ...

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        """Store the number in place of the known one (0: none). Returns False if the database shows another one."""
        ...

    def shows(self, connection: Connection, number: int) -> bool:
        """Whether the database shows that number."""
        ...

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        """Execute statements below SQLAlchemy, in one exchange with the server, and store the number if there is one.

        The number is stored without a look at the known one. With ``later``, the answers may come with those to the next
        statement, which then also gets their error.
        """
        ...

    def settle(self, connection: Connection) -> None:
        """Take the answers that were left for later; an error may be one that another statement got before."""
        ...

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        ...


class _Psycopg(Protocol):
    @property
    def pgconn(self) -> _PGconn: ...

    def wait(self, gen: Generator[object, object, object], *args: object, **kwargs: object) -> object: ...


class _PGconn(Protocol):
    @property
    def transaction_status(self) -> int: ...

    @property
    def pipeline_status(self) -> int: ...

    def send_query(self, command: bytes) -> None: ...

    def flush(self) -> int: ...


def _text_of(query: object, driver: object) -> str | None:
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    with suppress(Exception):  # it is not to be sent, then
        return str(cast("Any", query).as_string(driver))
    return None


@contextmanager
def mapped(connection: Connection) -> Generator[None, None, None]:
    """Raise the driver's errors as SQLAlchemy's."""
    kind = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except kind as error:
        raise exc.DBAPIError.instance(None, None, error, kind, dialect=connection.dialect) from error


_SHOWN: Final = "coalesce(nullif(current_setting('dualwrite.witness', true), ''), '0') = :known"
_KEEP: Final = text(f"SELECT CASE WHEN {_SHOWN} THEN set_config('dualwrite.witness', :number, true) END")
_SHOWS: Final = text(f"SELECT {_SHOWN}")


def set_number(number: int) -> str:
    """The statement that stores the number."""
    return f"SELECT set_config('dualwrite.witness', '{number}', true)"


class NumberInSetting:
    """The witness of PostgreSQL: a setting of the transaction, which is asked only where the driver hides what it sends."""

    shown_all = True
    doubtful: bool

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        self.settle(connection)
        found = connection.scalar(_KEEP, {"known": str(known), "number": str(number)})
        self.doubtful = False
        return found is not None

    def shows(self, connection: Connection, number: int) -> bool:
        return bool(connection.scalar(_SHOWS, {"known": str(number)}))

    def settle(self, connection: Connection) -> None:
        raise NotImplementedError


# What stands in the generators by which psycopg talks to the server, as they wait: by their names, the argument with the text.
_CARRIERS: Final = {
    "_execute_gen": "query",
    "_executemany_gen_pipeline": "query",
    "_executemany_gen_no_pipeline": "query",
    "_stream_send_gen": "query",
    "_declare_gen": "query",
    "_start_copy_gen": "statement",
}
_SILENT: Final = frozenset(
    {
        "_commit_gen", "_rollback_gen",  # of the whole transaction: noticed elsewhere
        "_read_gen", "_read_row_gen", "_end_copy_out_gen", "copy_from", "copy_to", "copy_end",
        "_fetch_gen", "_close_gen", "_scroll_gen", "_stream_fetchone_gen", "_sync_gen", "notifies",
    }
)  # fmt: skip
"""Generators that send no statement of the user's."""
_PIPELINES: Final = "BasePipeline."
"""The owner of generators that only take answers, to statements of others."""
_TRANSACTION: Final = frozenset({"_enter_gen", "_exit_gen"})
"""Those of ``Connection.transaction()``, which opens a savepoint and ends that one: no other is touched."""
_PLAIN: Final = re.compile(r"\s*(?:insert|select|update|delete|with|merge|values)\b", re.IGNORECASE)


class PsycopgWitness(NumberInSetting):
    """The witness of psycopg's connections.

    psycopg does all its exchanges with the server through ``Connection.wait``: for SQLAlchemy, for cursors, for COPY
    and for its own ``transaction()``. What is sent stands in the generator that is waited for. One that is not known (of
    another version of psycopg, or of other code) makes doubt, and then the database is asked. On PostgreSQL nothing else sends
    savepoints: no function, procedure or prepared statement can.
    """

    def __init__(self, connection: Connection, follower: Follower, begun: Begun | None) -> None:
        self.doubtful = begun is not None and begun.joined_late
        self._follower = follower
        if begun is None:
            self._driver: _Psycopg = connection.connection.driver_connection  # type: ignore[assignment]
            self._awaits = is_awaited(connection.connection.dbapi_connection)
        else:
            self._driver, self._awaits = begun.driver, begun.awaits
        self._wait = self._driver.wait
        self._unanswered = False
        self._failure: Exception | None = None
        self._driver.wait = self._noticing  # type: ignore[method-assign]

    def _noticing(self, gen: Generator[object, object, object], *args: object, **kwargs: object) -> object:
        carrier = _CARRIERS.get(getattr(gen, "__name__", ""))
        frame = getattr(gen, "gi_frame", None)
        query = None if carrier is None or frame is None else frame.f_locals.get(carrier)
        if isinstance(query, str) and ";" not in query and _PLAIN.match(query) and not self._unanswered:
            return self._wait(gen, *args, **kwargs)  # nearly always
        return self._looked_at(gen, query, args, kwargs)

    def _looked_at(
        self, gen: Generator[object, object, object], query: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        name = getattr(gen, "__name__", "")
        statement = _text_of(query, self._driver)
        if self._unanswered:
            gen = self._after_answers(gen)
        silent = name in _SILENT or getattr(gen, "__qualname__", "").startswith(_PIPELINES)
        if statement is None and not silent:
            if name in _TRANSACTION:
                self.doubtful = True
            else:
                self._follower.doubt()
        if statement is None or not may_move(statement):
            return self._wait(gen, *args, **kwargs)
        if self._driver.pgconn.pipeline_status:  # it may fail later
            self._follower.doubt()
            return self._wait(gen, *args, **kwargs)
        many = name.startswith("_executemany")
        if self._awaits:
            return self._followed_later(gen, statement, many, args, kwargs)
        try:
            result = self._wait(gen, *args, **kwargs)
        except BaseException as error:
            self._follower.failed(statement, error)
            raise
        self._follower.after(statement, many=many)
        return result

    async def _followed_later(
        self,
        gen: Generator[object, object, object],
        statement: str,
        many: bool,  # noqa: FBT001 - passed on
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        try:
            result = await cast("Awaitable[object]", self._wait(gen, *args, **kwargs))
        except BaseException as error:
            self._follower.failed(statement, error)
            raise
        self._follower.after(statement, many=many)
        return result

    def keep(self, connection: Connection, known: int, number: int) -> bool:
        self.settle(connection)
        if self._driver.pgconn.transaction_status == _ACTIVE:
            raise IllegalStateError(
                "savepoints cannot be checked while the driver's connection is in a COPY or a pipeline",
                next_step="produce before it begins or after it has ended",
            )
        return super().keep(connection, known, number)

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        self.settle(connection)
        witness = [] if number is None else [set_number(number)]
        with mapped(connection):
            self._driver.pgconn.send_query("; ".join([*statements, *witness]).encode())
            self._driver.pgconn.flush()
        self._unanswered = True
        self.doubtful = False
        if not later:
            self.settle(connection)

    def settle(self, connection: Connection) -> None:
        if not self._unanswered and self._failure is None:
            return
        with mapped(connection):
            self._take_answers()
            if self._failure is not None:
                raise self._failure

    def _take_answers(self) -> None:
        if self._unanswered:
            answered = self._wait(self._answers())
            if self._awaits:
                await_only(cast("Awaitable[object]", answered))

    def _answers(self) -> Generator[object, object, None]:
        from psycopg import errors, generators  # noqa: PLC0415 - only SQLite's users may lack it

        self._unanswered = False
        for result in (yield from generators.execute(cast("Any", self._driver.pgconn))):
            if result.status not in _DONE:
                self._failure = errors.error_from_result(result)
                raise self._failure

    def _after_answers(self, gen: Generator[object, object, object]) -> Generator[object, object, object]:
        yield from self._answers()
        return (yield from gen)

    def stop(self) -> None:
        if self._unanswered:
            with suppress(Exception):  # a connection that is lost, or will show it
                self._take_answers()
        vars(self._driver).pop("wait", None)
