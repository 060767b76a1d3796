"""Listeners to connections: on their engine where we know it, as SQLAlchemy takes longer to add a listener than to call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event

Listened = TypeVar("Listened", Connection, Engine)


class Listeners:
    """Functions that SQLAlchemy calls for every connection of an engine. They stay; each looks whether it is meant.

    Args:
        functions: By the names of events.
    """

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
