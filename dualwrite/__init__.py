"""dualwrite: commit Kafka messages and database rows together or not at all.

No outbox, no relay: the database commit is the decision and Kafka follows it, on stock brokers and clients. Implements the
dual-write recipe of KIP-939 ("Support Participation in 2PC").

What belongs here: the names that applications use every day, loaded at first use, so that an import loads no driver. May use:
every package but ``dualwrite.apps.cli``, ``dualwrite.sinks`` and ``dualwrite.testing``. The other public names are in

- ``dualwrite.errors``: every error;
- ``dualwrite.databases``: RocksDB and ZooKeeper as databases;
- ``dualwrite.operations``: the calls for operators, and their reports;
- ``dualwrite.types``: what calls return, for annotations;
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
from dualwrite.protocol.allowed import WriterLimits
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.producer_record import ProducerRecord

if TYPE_CHECKING:
    from dualwrite.apps.async_consumer import AsyncExactlyOnceConsumer
    from dualwrite.apps.async_transaction import AsyncTransaction
    from dualwrite.apps.async_writer import AsyncDualWriter
    from dualwrite.apps.consumer.consumer import ExactlyOnceConsumer
    from dualwrite.kafka.producer.transactional import TransactionalProducer
    from dualwrite.recovery.recover import recover, status
    from dualwrite.telemetry.observer import Telemetry
    from dualwrite.writing.blocks.transaction import Transaction
    from dualwrite.writing.group.row_unit import RowUnit
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
    "AsyncDualWriter": "dualwrite.apps.async_writer",
    "AsyncExactlyOnceConsumer": "dualwrite.apps.async_consumer",
    "AsyncTransaction": "dualwrite.apps.async_transaction",
    "DualWriter": "dualwrite.writing.writer",
    "ExactlyOnceConsumer": "dualwrite.apps.consumer.consumer",
    "RowUnit": "dualwrite.writing.group.row_unit",
    "Telemetry": "dualwrite.telemetry.observer",
    "Transaction": "dualwrite.writing.blocks.transaction",
    "TransactionalProducer": "dualwrite.kafka.producer.transactional",
    "recover": "dualwrite.recovery.recover",
    "status": "dualwrite.recovery.recover",
}


def __getattr__(name: str) -> object:
    """Import the drivers only with the first name that needs them: errors and values stay cheap to import."""
    if name in _LAZY:
        from importlib import import_module  # noqa: PLC0415 - as above

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
