"""State stores: state of a stream processor that becomes permanent exactly when the Kafka transaction with its changelog does.

What belongs here: persistent stores with transactions (KIP-892, KIP-1035), and what keeps them equal to their changelogs.
May use: ``dualwrite.writing`` and everything below it. RocksDB comes with the extra ``state``.
"""

from dualwrite.state.changelog import Standby
from dualwrite.state.entries import Committed, Position, Scan
from dualwrite.state.reader import Answer, Reader, Snapshot
from dualwrite.state.store import KeyValueStore, Timestamped, TimestampedKeyValueStore, WindowStore
from dualwrite.state.task import PartitionStores, ProducerBlocks, StateTask

__all__ = [
    "Answer",
    "Committed",
    "KeyValueStore",
    "PartitionStores",
    "Position",
    "ProducerBlocks",
    "Reader",
    "Scan",
    "Snapshot",
    "Standby",
    "StateTask",
    "Timestamped",
    "TimestampedKeyValueStore",
    "WindowStore",
]
