"""Atomic units (KIP-868): records in any number of Kafka transactions that readers see as a whole or not at all.

What belongs here: the marker records, the image that readers apply them to, readers and writers. May use: all
but applications, sinks, testing and the command line.
"""

from dualwrite.units.following import Follower, Snapshot, UnitImage
from dualwrite.units.image import KeyedImage
from dualwrite.units.records import AbortTransaction, BeginTransaction, EndTransaction, UnitRecord

__all__ = [
    "AbortTransaction",
    "BeginTransaction",
    "EndTransaction",
    "Follower",
    "KeyedImage",
    "Snapshot",
    "UnitImage",
    "UnitRecord",
]
