"""The statements that every dual write executes, compiled once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sqlalchemy import Connection, CursorResult, Executable
    from sqlalchemy.engine.interfaces import Dialect

_TRANSLATED: Final = "schema_translate_map"


@dataclass(frozen=True)
class OwnText:
    """A statement as the driver takes it.

    Attributes:
        dialect: The dialect that it was compiled for.
        template: The text.
        order: The names of its values, if the driver takes them by position.
        constants: Values that the statement itself contains.
        names: The names of all values, each once.
        name: A name for the text, the same in every process: a pooler's sessions are shared.
    """

    dialect: Dialect
    template: str
    order: tuple[str, ...] | None
    constants: Mapping[str, Any]
    names: tuple[str, ...]
    name: str


class CompiledOnce:
    """A statement whose text is made at its first execution, and sent as it is from then on.

    For each execution of a statement object SQLAlchemy makes its cache key, and prepares the types of its values and results.
    That takes as much of the processor as all that follows it.

    Args:
        statement: The statement. Its values are bound parameters with names; neither they nor its results are converted.
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

    def execute(self, connection: Connection, bound: Mapping[str, Any]) -> CursorResult[Any]:
        """Execute it with these values. Events, logs and errors of the execution are SQLAlchemy's.

        Raises:
            SQLAlchemyError: The database failed.
        """
        compiled = self.text(connection)
        if compiled is None:
            return connection.execute(self._statement, dict(bound))
        values = {**compiled.constants, **bound} if compiled.constants else dict(bound)
        if compiled.order is None:
            return connection.exec_driver_sql(compiled.template, values)
        return connection.exec_driver_sql(compiled.template, tuple(values[name] for name in compiled.order))


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
