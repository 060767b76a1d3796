"""The library's own statements on a connection of psycopg's, below SQLAlchemy and below psycopg's cursors.

Through both, the three statements of a dual write take five hundred calls. A text that the server reads by itself (a *simple
query*) may hold several statements: BEGIN goes out with the look at the row, and SET CONSTRAINTS with the decision, in one
request each, without a pipeline, and through poolers too.

Where psycopg may prepare statements, ours are prepared in the session (``PREPARE``), and from then on only named: the server
takes longer to read and plan one than to execute it. Not through a pooler, which gives each transaction another session: there
the process that answers is not the one that the connection was promised. psycopg forgets what it has prepared by ``DEALLOCATE
ALL``, after a rollback and after DDL, and that takes ours along. So a block begins by naming its first statement, and begins
once more if that is gone; its last one is named only if nothing but plain statements on rows was sent since.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from psycopg import IsolationLevel, errors, generators
from sqlalchemy.util import await_only

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection
    from psycopg.pq.abc import PGresult

    from dualwrite.stores.sql.drivers import OwnText

_KEPT: Final = "dualwrite_session"
_DONE: Final = frozenset({1, 2})  # COMMAND_OK, TUPLES_OK
_NO_TRANSACTION: Final = "25P01"
"""The warning with which the server answers a COMMIT outside of a transaction. Nothing else in the answer shows it."""
WHICH_SERVER: Final = "SELECT pg_backend_pid()"
NOT_PREPARED: Final = "26000"


@dataclass
class Session:
    """The facts about one connection of psycopg's, kept for as long as it lives.

    Attributes:
        is_direct: Whether no pooler stands between us and the server; None if that is not known.
        prepared: By the names of their texts, the texts that execute the statements that the server has prepared for us.
        generation: Part of the names in the server. It grows when they are lost: perhaps not all of them are.
        commit_found_none: Whether the server has warned since that a COMMIT has found no transaction.
    """

    is_direct: bool | None = None
    prepared: dict[str, str] = field(default_factory=dict)
    generation: int = 0
    commit_found_none: bool = False

    def hear(self, notice: Any) -> None:
        """Listen to the server's notices."""
        if notice.sqlstate == _NO_TRANSACTION:
            self.commit_found_none = True

    def forget_prepared(self) -> None:
        """Prepare all statements again, under other names."""
        self.prepared.clear()
        self.generation += 1

    def prepared_in(self, own: OwnText, texts: list[str]) -> str | None:
        """The text that executes a prepared statement, for :func:`literals`; None if it cannot be prepared.

        What must be sent before it is added to the texts: the one that prepares it, or the question who answers.
        """
        if not self.is_direct:
            if self.is_direct is None:
                texts.append(WHICH_SERVER)
            return None
        execution = self.prepared.get(own.name)
        if execution is None:
            name = f"{own.name}_{self.generation}"
            numbered = own.template % {one: f"${number}" for number, one in enumerate(own.names, 1)}
            texts.append(f"PREPARE {name} AS {numbered}")
            execution = f"EXECUTE {name}({', '.join(f'%({one})s' for one in own.names)})"
        return execution


def session_of(driver: Any) -> Session:
    """The facts about that connection."""
    found: Session | None = vars(driver).get(_KEPT)
    if found is None:
        found = vars(driver)[_KEPT] = Session()
        driver.add_notice_handler(found.hear)
    return found


_begins: Final[dict[tuple[int | None, bool | None, bool | None], str]] = {}


def begin_of(driver: Any) -> str:
    """The text by which this connection begins a transaction, as psycopg would: with the isolation that it was given."""
    given = (driver.isolation_level, driver.read_only, driver.deferrable)
    text = _begins.get(given)
    if text is None:
        isolation, read_only, deferrable = given
        words = ["BEGIN"]
        if isolation is not None:
            words.append(f"ISOLATION LEVEL {IsolationLevel(isolation).name.replace('_', ' ')}")
        if read_only is not None:
            words.append("READ ONLY" if read_only else "READ WRITE")
        if deferrable is not None:
            words.append("DEFERRABLE" if deferrable else "NOT DEFERRABLE")
        text = _begins[given] = " ".join(words)
    return text


def literals(bound: Mapping[str, object]) -> dict[str, object]:
    """The values as they stand in a text: numbers as they are, NULL, and strings quoted for any setting of the session."""
    quoted: dict[str, object] = {}
    for name, value in bound.items():
        if value is None:
            quoted[name] = "NULL"
        elif isinstance(value, int):
            quoted[name] = value
        else:
            text = str(value).replace("'", "''")
            # E'' reads backslashes in one way, whatever standard_conforming_strings is. The server converts the text to its own
            # encoding before it reads it, so that no byte of another character is taken for one.
            quoted[name] = "E'" + text.replace("\\", "\\\\") + "'" if "\\" in text else "'" + text + "'"
    return quoted


def exchange(driver: Connection[Any] | AsyncConnection[Any], text: str, *, awaits: bool) -> Sequence[PGresult]:
    """Send a text of several statements and take the results, the last of which may be an error.

    An interruption cancels the statement, as psycopg does for its own.

    Raises:
        psycopg.Error: The connection is lost, or busy.
    """
    command = text.encode() if text.isascii() else text.encode(driver.info.encoding)
    talk = _talk(driver.pgconn, command)
    # The class's own way of waiting: that of the instance may be the watch for statements of others.
    if awaits:
        return await_only(_awaited(cast("AsyncConnection[Any]", driver), talk))
    blocking = cast("Connection[Any]", driver)
    with blocking.lock:
        return type(blocking).wait(blocking, talk)


async def _awaited(driver: AsyncConnection[Any], talk: Generator[Any, Any, Sequence[PGresult]]) -> Sequence[PGresult]:
    async with driver.lock:
        return await cast("Awaitable[Sequence[PGresult]]", type(driver).wait(driver, talk))


def _talk(pgconn: Any, command: bytes) -> Generator[Any, Any, Sequence[PGresult]]:
    pgconn.send_query(command)
    results: list[PGresult] = yield from generators.execute(pgconn)
    return results


def error_in(results: Sequence[PGresult], driver: Any) -> errors.Error | None:
    """The error that the last result is, if it is one: the server has executed nothing after it."""
    last = results[-1]
    return None if last.status in _DONE else errors.error_from_result(last, encoding=driver.info.encoding)


def row_of(results: Sequence[PGresult]) -> Sequence[str | None] | None:
    """The one row of the last statement, as the server has written it; None if there is none."""
    last = results[-1]
    if not last.ntuples:
        return None
    return [None if (value := last.get_value(0, at)) is None else value.decode() for at in range(last.nfields)]
