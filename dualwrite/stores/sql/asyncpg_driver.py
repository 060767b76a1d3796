"""What is exchanged on a connection of asyncpg, and what its server's last answers say of the transaction.

asyncpg has no simple query that returns rows, and no pipeline. So the library's own statements go where SQLAlchemy's go:
through the cursor that SQLAlchemy adapts, prepared as the engine is configured. BEGIN, and SET CONSTRAINTS before the decision,
take an exchange each, which psycopg sends along with the library's statements.

All else rests on one place. Whatever sends on a connection of asyncpg (SQLAlchemy, a cursor, COPY, its own ``transaction()``)
calls methods of the connection's protocol, with the text of the statement. :class:`Exchanges` stands before that protocol for
as long as the connection lives. It follows savepoints, and knows what asyncpg does not tell: that a statement has failed in
the transaction, that an answer is missing, and that the server answered a COMMIT by ROLLBACK.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from sqlalchemy.util import await_only

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.message import may_move
from dualwrite.stores.sql.access import ended_inside, fileno_of
from dualwrite.stores.sql.savepoint_probe import NumberInSetting, mapped, set_number

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.stores.sql.access import Begun
    from dualwrite.stores.sql.savepoint_probe import Follower

T = TypeVar("T")

# Numbers of libpq's PQtransactionStatus, as psycopg has them.
_IDLE, _ACTIVE, _IN_TRANSACTION, _IN_ERROR, _UNKNOWN = range(5)
_NO_TRANSACTION: Final = "25P01"
_BOUNDARY: Final = re.compile(r"(?:BEGIN|COMMIT|ROLLBACK)\b(?!\s+TO\b)")
"""How asyncpg's own beginning and end of a transaction read."""


class Exchanges:
    """The protocol of one connection of asyncpg, watched.

    Attributes:
        follower: Who hears of statements about savepoints; None if nobody needs to.
        in_block: Whether a dual write has begun in the open transaction. Once that is gone, statements are refused: SQLAlchemy
            begins no other transaction then, and the server would commit each of them by itself.
        commit_found_none: Whether the server has warned since that a COMMIT has found no transaction.
    """

    def __init__(self, driver: Any) -> None:
        self._protocol = driver._protocol  # noqa: SLF001 - asyncpg shows its statements nowhere else before they are executed
        self._transport = driver._transport  # noqa: SLF001 - as above
        self._waiting = 0
        self._failed = False
        self.follower: Follower | None = None
        self.in_block = False
        self.commit_found_none = False
        try:
            driver._protocol = self  # noqa: SLF001 - as above
        except AttributeError:
            raise ConfigurationError(
                f"{type(driver).__name__} is not a connection of asyncpg's own",
                next_step="let SQLAlchemy keep the pool: create_async_engine() without a pool of asyncpg's as its creator",
            ) from None
        driver.add_log_listener(self._hear)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def _hear(self, _: object, notice: Any) -> None:
        if notice.sqlstate == _NO_TRANSACTION:
            self.commit_found_none = True

    @property
    def transaction_status(self) -> int:
        """As libpq's. asyncpg itself tells neither a failed transaction nor a missing answer."""
        if not self._protocol.is_connected():
            return _UNKNOWN
        if self._waiting or self._protocol._is_cancelling():  # noqa: SLF001 - an interrupted statement may still be executed
            return _ACTIVE
        if not self._protocol.is_in_transaction():
            return _IDLE
        return _IN_ERROR if self._failed else _IN_TRANSACTION

    @property
    def pgconn(self) -> Exchanges:
        """Where psycopg has the status."""
        return self

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return not self._protocol.is_connected()

    def fileno(self) -> int:
        """The descriptor of its socket."""
        return fileno_of(self)

    async def query(self, query: str, timeout: float | None) -> str:
        tag = await self._exchange(query, self._protocol.query(query, timeout))
        if tag == "ROLLBACK" and query.strip(" ;\n").upper() == "COMMIT":
            from asyncpg import InFailedSQLTransactionError  # noqa: PLC0415 - only its users have it

            raise InFailedSQLTransactionError("the server answered COMMIT by ROLLBACK: a statement had failed before")
        return str(tag)

    async def prepare(self, stmt_name: str, query: str, timeout: float | None, **options: Any) -> Any:
        # Text that is only prepared moves nothing, but the server may refuse it, and with it all that follows.
        return await self._exchange(
            "", self._protocol.prepare(stmt_name, query, timeout, **options), shows_success=False
        )

    async def bind_execute(self, state: Any, *given: Any, **named: Any) -> Any:
        return await self._exchange(state.query, self._protocol.bind_execute(state, *given, **named))

    async def bind_execute_many(self, state: Any, *given: Any, **named: Any) -> Any:
        return await self._exchange(state.query, self._protocol.bind_execute_many(state, *given, **named), many=True)

    async def bind(self, state: Any, *given: Any, **named: Any) -> Any:
        return await self._exchange("", self._protocol.bind(state, *given, **named), shows_success=False)

    async def execute(self, state: Any, *given: Any, **named: Any) -> Any:
        return await self._exchange(state.query, self._protocol.execute(state, *given, **named))

    async def copy_in(self, statement: str, *given: Any, **named: Any) -> Any:
        return await self._exchange(statement, self._protocol.copy_in(statement, *given, **named))

    async def copy_out(self, statement: str, *given: Any, **named: Any) -> Any:
        return await self._exchange(statement, self._protocol.copy_out(statement, *given, **named))

    async def _exchange(
        self, statement: str, answer: Coroutine[Any, Any, T], *, many: bool = False, shows_success: bool = True
    ) -> T:
        if self.in_block and not _BOUNDARY.match(statement) and self.transaction_status == _IDLE:
            answer.close()  # it has not begun, and sends nothing
            raise ended_inside("by a COMMIT or ROLLBACK sent as text", "leave COMMIT and ROLLBACK to the dual write")
        follower = self.follower if may_move(statement) else None
        self._waiting += 1
        try:
            found = await answer
        except BaseException as error:
            if getattr(error, "sqlstate", None) is not None or not isinstance(error, Exception):
                self._failed = True
            elif isinstance(
                error, asyncio.TimeoutError
            ):  # asyncpg has given up the wait: the statement may have been executed
                self._failed = True
                if follower is not None:
                    follower.doubt()
            if follower is not None:
                follower.failed(statement, error)
            raise
        finally:
            self._waiting -= 1
        if shows_success:
            self._failed = False
        if follower is not None:
            follower.after(statement, many=many)
        return found


def exchanges_of(driver: Any) -> Exchanges:
    """The watch over that connection, which begins with the first call. A closed connection has none left."""
    found = driver._protocol  # noqa: SLF001 - as above
    if isinstance(found, Exchanges):
        return found
    return _CLOSED if found is None else Exchanges(driver)


class _Closed(Exchanges):
    """The exchanges of a connection that is lost: asyncpg drops its protocol."""

    transaction_status = _UNKNOWN
    closed = True

    def __init__(self) -> None:
        self.follower = None
        self.in_block = False
        self.commit_found_none = False

    def fileno(self) -> NoReturn:
        raise OSError("the connection is closed")


_CLOSED: Final = _Closed()


class AsyncpgWitness(NumberInSetting):
    """The witness of a connection whose :class:`Exchanges` show every statement."""

    def __init__(self, connection: Connection, follower: Follower, begun: Begun | None) -> None:
        self.doubtful = begun is not None and begun.joined_late
        self._adapted = cast("Any", connection.connection.dbapi_connection)
        self._exchanges = exchanges_of(self._adapted.driver_connection)
        self._follower = follower
        self._exchanges.follower = follower

    def execute(
        self, connection: Connection, statements: Sequence[str], number: int | None, *, later: bool = False
    ) -> None:
        """No answer is left for later: asyncpg cannot."""
        del later
        texts: Iterable[str] = statements if number is None else [*statements, set_number(number)]
        self._exchanges.follower = None  # its own savepoints are the caller's to follow
        try:
            with mapped(connection):
                try:
                    await_only(self._adapted.driver_connection.execute("; ".join(texts)))
                except Exception as error:  # noqa: BLE001 - it maps asyncpg's errors, and raises the others as they are
                    self._adapted._handle_exception(error)  # noqa: SLF001 - as its own cursors do
        finally:
            self._exchanges.follower = self._follower
        self.doubtful = False

    def settle(self, connection: Connection) -> None:
        del connection

    def stop(self) -> None:
        self._exchanges.follower = None
