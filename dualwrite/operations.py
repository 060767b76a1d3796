"""The calls for operators, scripts and start-up hooks, and their reports; the commands of ``dualwrite`` call the same.

They work from any process and machine, whether the writers of the ids are running or gone.
"""

from dualwrite.kafka.coordinator.blocking import BlockingTransaction
from dualwrite.recovery.after_restore import Forgotten
from dualwrite.recovery.blocking import blocking_transactions
from dualwrite.recovery.forget import ForgetReport, forget
from dualwrite.recovery.plan import IdStatus
from dualwrite.recovery.recover import RecoveryReport, recover, status
from dualwrite.recovery.settling.settle import Loss
from dualwrite.recovery.terminate import TerminationReport, terminate

__all__ = [
    "BlockingTransaction",
    "ForgetReport",
    "Forgotten",
    "IdStatus",
    "Loss",
    "RecoveryReport",
    "TerminationReport",
    "blocking_transactions",
    "forget",
    "recover",
    "status",
    "terminate",
]
