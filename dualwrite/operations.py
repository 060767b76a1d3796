"""The calls for operators, scripts and start-up hooks, and their reports; the commands of ``dualwrite`` call the same.

They work from any process and machine, whether the writers of the ids are running or gone.
"""

from dualwrite.kafka.blocking import BlockingTransaction
from dualwrite.protocol.findings import CheckResult, Status
from dualwrite.protocol.outbox_table import OutboxTable, Placement
from dualwrite.recovery.doctor import doctor
from dualwrite.recovery.operator import ForgetReport, TerminationReport, blocking_transactions, forget, terminate
from dualwrite.recovery.recover import Forgotten, IdStatus, RecoveryReport, status
from dualwrite.recovery.settle import Loss
from dualwrite.writing.left_behind import recover
from dualwrite.writing.relay import Relay, RelayReport

__all__ = [
    "BlockingTransaction",
    "CheckResult",
    "ForgetReport",
    "Forgotten",
    "IdStatus",
    "Loss",
    "OutboxTable",
    "Placement",
    "RecoveryReport",
    "Relay",
    "RelayReport",
    "Status",
    "TerminationReport",
    "blocking_transactions",
    "doctor",
    "forget",
    "recover",
    "status",
    "terminate",
]
