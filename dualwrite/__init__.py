"""dualwrite: commit Kafka messages and database rows together or not at all.

No outbox, no relay: the database commit is the decision and Kafka follows it, on stock brokers and clients. Implements the
dual-write recipe of KIP-939 ("Support Participation in 2PC").

What belongs here: the public names, loaded at first use, so that an import loads no driver. May use: every package but
``dualwrite.apps.cli``, ``dualwrite.sinks`` and ``dualwrite.testing``.
"""

from typing import TYPE_CHECKING

from dualwrite.errors import (
    ChangelogDiffers,
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    StoreInUse,
    StoreTooOld,
    StoreUnreadable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.process.grouping import GroupLimits
from dualwrite.protocol.producer_record import ProducerRecord

if TYPE_CHECKING:
    from dualwrite.apps.async_consumer import AsyncExactlyOnceConsumer
    from dualwrite.apps.async_sessions import AsyncBoundSessions
    from dualwrite.apps.async_transaction import AsyncTransaction
    from dualwrite.apps.async_writer import AsyncDualWriter
    from dualwrite.apps.consumer.consumer import ExactlyOnceConsumer
    from dualwrite.apps.consumer.member import ConsumerProgress
    from dualwrite.kafka.coordinator.blocking import BlockingTransaction
    from dualwrite.kafka.producer.transactional import TransactionalProducer
    from dualwrite.protocol.process.health import Health
    from dualwrite.recovery.blocking import blocking_transactions
    from dualwrite.recovery.forget import ForgetReport, forget
    from dualwrite.recovery.plan import IdStatus
    from dualwrite.recovery.recover import RecoveryReport, recover, status
    from dualwrite.recovery.settling.settle import Loss
    from dualwrite.recovery.terminate import TerminationReport, terminate
    from dualwrite.stores.rocksdb.batch import RocksBatch
    from dualwrite.stores.rocksdb.database import RocksDatabase
    from dualwrite.stores.sql.jobs.batches import Batch, read_batches
    from dualwrite.stores.zookeeper.database import ZooKeeperDatabase
    from dualwrite.telemetry.observer import Telemetry
    from dualwrite.writing.blocks.transaction import Transaction
    from dualwrite.writing.group.row_unit import RowUnit
    from dualwrite.writing.sessions import BoundSessions
    from dualwrite.writing.writer import DualWriter

__all__ = [
    "AsyncBoundSessions",
    "AsyncDualWriter",
    "AsyncExactlyOnceConsumer",
    "AsyncTransaction",
    "Batch",
    "BlockingTransaction",
    "BoundSessions",
    "ChangelogDiffers",
    "CompletionPending",
    "ConfigurationError",
    "ConsumerProgress",
    "DatabaseWentBack",
    "DecidedTransactionLost",
    "DualWriteError",
    "DualWriter",
    "ExactlyOnceConsumer",
    "Fenced",
    "FirstOffset",
    "ForgetReport",
    "GroupLimits",
    "Health",
    "IdStatus",
    "IllegalStateError",
    "Loss",
    "OutcomeUnverifiable",
    "PreparedTxnState",
    "ProducerRecord",
    "RecoveryReport",
    "RocksBatch",
    "RocksDatabase",
    "RowUnit",
    "StoreInUse",
    "StoreTooOld",
    "StoreUnreadable",
    "Telemetry",
    "TerminationReport",
    "Transaction",
    "TransactionAborted",
    "TransactionInDoubt",
    "TransactionalProducer",
    "Unavailable",
    "ZooKeeperDatabase",
    "blocking_transactions",
    "forget",
    "read_batches",
    "recover",
    "status",
    "terminate",
]

_LAZY = {
    "AsyncBoundSessions": "dualwrite.apps.async_sessions",
    "AsyncDualWriter": "dualwrite.apps.async_writer",
    "AsyncExactlyOnceConsumer": "dualwrite.apps.async_consumer",
    "AsyncTransaction": "dualwrite.apps.async_transaction",
    "Batch": "dualwrite.stores.sql.jobs.batches",
    "BlockingTransaction": "dualwrite.kafka.coordinator.blocking",
    "BoundSessions": "dualwrite.writing.sessions",
    "ConsumerProgress": "dualwrite.apps.consumer.member",
    "DualWriter": "dualwrite.writing.writer",
    "ExactlyOnceConsumer": "dualwrite.apps.consumer.consumer",
    "ForgetReport": "dualwrite.recovery.forget",
    "Health": "dualwrite.protocol.process.health",
    "IdStatus": "dualwrite.recovery.plan",
    "Loss": "dualwrite.recovery.settling.settle",
    "RecoveryReport": "dualwrite.recovery.recover",
    "RocksBatch": "dualwrite.stores.rocksdb.batch",
    "RocksDatabase": "dualwrite.stores.rocksdb.database",
    "RowUnit": "dualwrite.writing.group.row_unit",
    "Telemetry": "dualwrite.telemetry.observer",
    "TerminationReport": "dualwrite.recovery.terminate",
    "Transaction": "dualwrite.writing.blocks.transaction",
    "TransactionalProducer": "dualwrite.kafka.producer.transactional",
    "ZooKeeperDatabase": "dualwrite.stores.zookeeper.database",
    "blocking_transactions": "dualwrite.recovery.blocking",
    "forget": "dualwrite.recovery.forget",
    "read_batches": "dualwrite.stores.sql.jobs.batches",
    "recover": "dualwrite.recovery.recover",
    "status": "dualwrite.recovery.recover",
    "terminate": "dualwrite.recovery.terminate",
}


def __getattr__(name: str) -> object:
    """Import the drivers only with the first name that needs them: errors and values stay cheap to import."""
    if name in _LAZY:
        from importlib import import_module  # noqa: PLC0415 - as above

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
