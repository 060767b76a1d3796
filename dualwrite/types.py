"""Types for annotations: of the objects that calls return, and of dictionaries that calls take.

`Transaction` and `AsyncTransaction`, which nearly every function of an application takes, are in ``dualwrite`` itself. Each
name loads what it needs at first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualwrite.asyncio.transaction import AsyncBoundSessions
    from dualwrite.consumer.consumer import ConsumerProgress, Deserializers
    from dualwrite.protocol.outbox import Outbox
    from dualwrite.protocol.prepared_state import FirstOffset
    from dualwrite.protocol.process import Health
    from dualwrite.writing.sessions import BoundSessions
    from dualwrite.writing.transaction import AsyncWriterOptions, Serializers, WriterOptions

__all__ = [
    "AsyncBoundSessions",
    "AsyncWriterOptions",
    "BoundSessions",
    "ConsumerProgress",
    "Deserializers",
    "FirstOffset",
    "Health",
    "Outbox",
    "Serializers",
    "WriterOptions",
]

_HOMES = {
    "AsyncBoundSessions": "dualwrite.asyncio.transaction",
    "AsyncWriterOptions": "dualwrite.writing.transaction",
    "BoundSessions": "dualwrite.writing.sessions",
    "ConsumerProgress": "dualwrite.consumer.consumer",
    "Deserializers": "dualwrite.consumer.consumer",
    "FirstOffset": "dualwrite.protocol.prepared_state",
    "Health": "dualwrite.protocol.process",
    "Outbox": "dualwrite.protocol.outbox",
    "Serializers": "dualwrite.writing.transaction",
    "WriterOptions": "dualwrite.writing.transaction",
}


def __getattr__(name: str) -> object:
    """Import a driver with the first name that needs it."""
    if name in _HOMES:
        from importlib import import_module  # noqa: PLC0415 - as above

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
