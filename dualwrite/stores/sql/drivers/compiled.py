"""The statements that every dual write executes, compiled once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sqlalchemy import Connection, CursorResult, Executable
    from sqlalchemy.engine.interfaces import Dialect

_TRANSLATED: Final = "schema_translate_map"


@dataclass(frozen=True)
class _Text:
    """A statement as the driver takes it.

    Attributes:
        dialect: The dialect that it was compiled for.
        text: The text.
        order: The names of its values, if the driver takes them by position.
        constants: Values that the statement itself contains.
    """

    dialect: Dialect
    text: str
    order: tuple[str, ...] | None
    constants: Mapping[str, Any]


class CompiledOnce:
    """A statement whose text is made at its first execution, and sent as it is from then on.

    For each execution of a statement object SQLAlchemy makes its cache key, and prepares the types of its values and results.
    That takes as much of the processor as all that follows it. Events, logs and errors of the execution stay SQLAlchemy's.

    Args:
        statement: The statement. Its values are bound parameters with names; neither they nor its results are converted.
    """

    def __init__(self, statement: Executable) -> None:
        self._statement = statement
        self._compiled: _Text | None = None

    def execute(self, connection: Connection, bound: Mapping[str, Any]) -> CursorResult[Any]:
        """Execute it with these values.

        Raises:
            SQLAlchemyError: The database failed.
        """
        if _TRANSLATED in connection.get_execution_options():  # each connection may have another one
            return connection.execute(self._statement, dict(bound))
        compiled = self._compiled
        if compiled is None or compiled.dialect is not connection.dialect:
            compiled = self._compiled = _compiled(self._statement, connection.dialect)
        values = {**compiled.constants, **bound} if compiled.constants else dict(bound)
        if compiled.order is None:
            return connection.exec_driver_sql(compiled.text, values)
        return connection.exec_driver_sql(compiled.text, tuple(values[name] for name in compiled.order))


def _compiled(statement: Executable, dialect: Dialect) -> _Text:
    compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    constants = {name: value for name, value in compiled.params.items() if value is not None}
    order = compiled.positiontup
    return _Text(dialect, str(compiled), None if order is None else tuple(order), constants)
