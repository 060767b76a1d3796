"""Atomic units (KIP-868): records in any number of Kafka transactions that readers see as a whole or not at all.

What belongs here: the marker records, the image that readers apply them to, readers and writers. May use: all
but applications, sinks, testing and the command line.
"""

from typing import TYPE_CHECKING

from dualwrite.units.records import (
    AbortTransaction,
    BatchRange,
    BeginTransaction,
    EndTransaction,
    Follower,
    KeyedImage,
    Snapshot,
    UnitImage,
    UnitRecord,
)

if TYPE_CHECKING:
    from dualwrite.units.log import BatchReader, BatchRecord, UnitReader, VisibleBatch
    from dualwrite.units.writer import Unit, UnitWriter

__all__ = [
    "AbortTransaction",
    "BatchRange",
    "BatchReader",
    "BatchRecord",
    "BeginTransaction",
    "EndTransaction",
    "Follower",
    "KeyedImage",
    "Snapshot",
    "Unit",
    "UnitImage",
    "UnitReader",
    "UnitRecord",
    "UnitWriter",
    "VisibleBatch",
]

_LAZY = {
    "BatchReader": "dualwrite.units.log",
    "BatchRecord": "dualwrite.units.log",
    "Unit": "dualwrite.units.writer",
    "UnitReader": "dualwrite.units.log",
    "UnitWriter": "dualwrite.units.writer",
    "VisibleBatch": "dualwrite.units.log",
}


def __getattr__(name: str) -> object:
    """Import the drivers only with the first name that needs them."""
    if name in _LAZY:
        from importlib import import_module  # noqa: PLC0415 - as above

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
