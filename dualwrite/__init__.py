"""dualwrite: commit Kafka messages and database rows together or not at all.

The database commit is the decision, and Kafka follows it, on stock brokers and clients. No relay is needed, and an outbox only
while Kafka is away. Implements the dual-write recipe of KIP-939 ("Support Participation in 2PC").

What belongs here: the names that applications use every day, loaded at first use, so that an import loads no driver. May use:
every package but ``dualwrite.cli``, ``dualwrite.sinks`` and ``dualwrite.testing``. The other public names are in

- ``dualwrite.errors``: every error;
- ``dualwrite.databases``: RocksDB and ZooKeeper as databases;
- ``dualwrite.operations``: the calls for operators, and their reports;
- ``dualwrite.types``: what calls return, and the dictionaries that they take, for annotations;
- ``dualwrite.sinks``, ``dualwrite.state``, ``dualwrite.units``, ``dualwrite.testing``, ``dualwrite.migrations``.
"""

from typing import TYPE_CHECKING

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.message import ProducerRecord
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import WriterLimits

if TYPE_CHECKING:
    from dualwrite.asyncio.consumer import AsyncExactlyOnceConsumer
    from dualwrite.asyncio.transaction import AsyncTransaction
    from dualwrite.asyncio.writer import AsyncDualWriter
    from dualwrite.consumer.consumer import ExactlyOnceConsumer
    from dualwrite.kafka.producer import TransactionalProducer
    from dualwrite.recovery.recover import status
    from dualwrite.telemetry.observer import Telemetry
    from dualwrite.writing.left_behind import recover
    from dualwrite.writing.transaction import Transaction
    from dualwrite.writing.units_of_work import RowUnit
    from dualwrite.writing.writer import DualWriter

__all__ = [
    "AsyncDualWriter",
    "AsyncExactlyOnceConsumer",
    "AsyncTransaction",
    "CompletionPending",
    "ConfigurationError",
    "DecidedTransactionLost",
    "DualWriteError",
    "DualWriter",
    "ExactlyOnceConsumer",
    "Fenced",
    "PreparedTxnState",
    "ProducerRecord",
    "RowUnit",
    "Telemetry",
    "Transaction",
    "TransactionAborted",
    "TransactionInDoubt",
    "TransactionalProducer",
    "Unavailable",
    "WriterLimits",
    "recover",
    "status",
]

_LAZY = {
    "AsyncDualWriter": "dualwrite.asyncio.writer",
    "AsyncExactlyOnceConsumer": "dualwrite.asyncio.consumer",
    "AsyncTransaction": "dualwrite.asyncio.transaction",
    "DualWriter": "dualwrite.writing.writer",
    "ExactlyOnceConsumer": "dualwrite.consumer.consumer",
    "RowUnit": "dualwrite.writing.units_of_work",
    "Telemetry": "dualwrite.telemetry.observer",
    "Transaction": "dualwrite.writing.transaction",
    "TransactionalProducer": "dualwrite.kafka.producer",
    "recover": "dualwrite.writing.left_behind",
    "status": "dualwrite.recovery.recover",
}


def __getattr__(name: str) -> object:
    """Import the drivers only with the first name that needs them: errors and values stay cheap to import."""
    if name in _LAZY:
        from importlib import import_module  # noqa: PLC0415 - as above

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
