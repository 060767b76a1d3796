"""The calls for operators, scripts and start-up hooks, and their reports; the commands of ``dualwrite`` call the same.

They work from any process and machine, whether the writers of the ids are running or gone.
"""

from dualwrite.kafka.log__kafka_coordinator_blocking import BlockingTransaction
from dualwrite.recovery.lost_decisions__recovery_after_restore import Forgotten
from dualwrite.recovery.operator import TerminationReport, terminate
from dualwrite.recovery.operator__recovery_blocking import blocking_transactions
from dualwrite.recovery.operator__recovery_forget import ForgetReport, forget
from dualwrite.recovery.recover import RecoveryReport, recover, status
from dualwrite.recovery.recover__recovery_plan import IdStatus
from dualwrite.recovery.settle import Loss

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
