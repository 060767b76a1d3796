"""``RowUnit``: a unit of a group given as data, so that the rows of many units are written by one statement."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from sqlalchemy import TextClause
from sqlalchemy.sql.dml import UpdateBase

from dualwrite import failpoints
from dualwrite.errors import ConfigurationError
from dualwrite.protocol.message__protocol_producer_record import ProducerRecord

if TYPE_CHECKING:
    from dualwrite.writing.transaction import Transaction

_WRITES: Final = re.compile(r"\s*(?:insert|update|delete|merge|replace)\b", re.IGNORECASE)
_RETURNS: Final = re.compile(r"\breturning\b", re.IGNORECASE)


class RowUnit:
    """Rows and messages of one caller, for ``submit``: a unit of work as data instead of code.

    Consecutive units of a group with the same statement are executed at once (``executemany``), in one savepoint: with many
    callers, several times as fast as functions. If that fails, each of them runs in a savepoint of its own, so that the
    failing one alone gets its error.

    Statements are the same if they are one object, or if each is a bare ``insert(table)``, and their parameters have the same
    names. So make a statement once, and give what differs as parameters.

    Args:
        statement: ``insert()``, ``update()``, ``delete()``, or one of them as ``text()``. It must not return rows.
        parameters: The parameters of the statement, as for SQLAlchemy's ``Connection.execute()``: a mapping, or a sequence of
            mappings with the same names, for several rows.
        messages: The messages that commit with the rows, in their order; none if not given. Their headers are copied.

    The statement is executed without the context variables of the caller: column defaults that read them must be given as
    parameters. Serializers and telemetry have them.

    Raises:
        ConfigurationError: The statement returns rows or is none of these; or the parameters or messages cannot be used.
    """

    __slots__ = ("_names", "messages", "rows", "statement")

    def __init__(
        self,
        statement: UpdateBase | TextClause,
        parameters: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        *,
        messages: Sequence[ProducerRecord] = (),
    ) -> None:
        _check_statement(statement)
        self.statement: Final = statement
        self.rows: Final = _rows_of(parameters)
        self._names: Final = self.rows[0].keys()
        self.messages: Final = tuple(map(_copied, messages))

    def goes_with(self, other: RowUnit) -> bool:
        """Whether one ``executemany`` can write the rows of both."""
        if not self._names or self._names != other._names:
            return False
        mine, others = self.statement, other.statement
        return mine is others or (type(mine) is type(others) and vars(mine) == vars(others))

    def produce(self, transaction: Transaction) -> None:
        """Produce its messages."""
        for topic, value, key, headers, partition, timestamp_ms in self.messages:
            transaction.produce(
                topic, value, key, headers=headers or None, partition=partition, timestamp_ms=timestamp_ms
            )

    def __repr__(self) -> str:
        return f"<RowUnit of {len(self.rows)} rows, {len(self.messages)} messages>"


def execute_rows(units: Sequence[RowUnit], transaction: Transaction) -> None:
    """Write the rows of units with the same statement.

    Raises:
        SQLAlchemyError: The database refuses one of them.
    """
    rows = [row for unit in units for row in unit.rows]
    transaction.connection.execute(units[0].statement, rows[0] if len(rows) == 1 else rows)
    failpoints.hit("group.rows_executed")


def _copied(message: ProducerRecord) -> ProducerRecord:
    """The message as it is now: its caller may use the same headers for the next one."""
    if not isinstance(message, ProducerRecord):
        raise ConfigurationError(
            f"{type(message).__name__} is no message", next_step="give each as dualwrite.ProducerRecord(topic, value)"
        )
    given = message.headers
    if not given:
        return message
    pairs = given.items() if isinstance(given, Mapping) else given
    return message._replace(headers=tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs))


def _check_statement(statement: object) -> None:
    if isinstance(statement, UpdateBase):
        returns = bool(statement._returning)  # noqa: SLF001 - what is public takes 40 µs, and changes the statement
    elif isinstance(statement, TextClause):
        if _WRITES.match(statement.text) is None:
            raise _not_a_write(f"text that begins with {statement.text.strip()[:20]!r}")
        returns = _RETURNS.search(statement.text) is not None
    else:
        raise _not_a_write(type(statement).__name__)
    if returns:
        raise ConfigurationError(
            "the statement of a RowUnit returns rows, which submit cannot give back",
            next_step="leave out RETURNING, or submit a function, which can return them",
        )


def _not_a_write(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the statement of a RowUnit is {what}",
        next_step="give insert(), update() or delete(), or one of them as text(); submit a function for anything else",
    )


def _rows_of(
    parameters: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
) -> Sequence[Mapping[str, object]]:
    if parameters is None:
        return ({},)
    rows = [dict(row) for row in ([parameters] if isinstance(parameters, Mapping) else parameters)]
    if not rows:
        raise ConfigurationError("a RowUnit has an empty sequence of parameters", next_step="give at least one mapping")
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ConfigurationError(
            "the rows of a RowUnit have parameters of different names", next_step="give each row the same names"
        )
    return rows
