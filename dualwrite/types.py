"""The types of objects that calls return, for annotations. Applications never create them themselves.

`Transaction` and `AsyncTransaction`, which nearly every function of an application takes, are in ``dualwrite`` itself. Each
name loads what it needs at first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualwrite.asyncio.transaction import AsyncBoundSessions
    from dualwrite.consumer.consumer import ConsumerProgress
    from dualwrite.protocol.prepared_state import FirstOffset
    from dualwrite.protocol.process import Health
    from dualwrite.writing.sessions import BoundSessions

__all__ = ["AsyncBoundSessions", "BoundSessions", "ConsumerProgress", "FirstOffset", "Health"]

_HOMES = {
    "AsyncBoundSessions": "dualwrite.asyncio.transaction",
    "BoundSessions": "dualwrite.writing.sessions",
    "ConsumerProgress": "dualwrite.consumer.consumer",
    "FirstOffset": "dualwrite.protocol.prepared_state",
    "Health": "dualwrite.protocol.process",
}


def __getattr__(name: str) -> object:
    """Import a driver with the first name that needs it."""
    if name in _HOMES:
        from importlib import import_module  # noqa: PLC0415 - as above

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
