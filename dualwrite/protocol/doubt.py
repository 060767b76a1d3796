"""A COMMIT whose answer is missing: what the row, the database and the log say about it.

The row is read by a claim on a fresh connection, which waits for the old backend's lock: whatever that backend was going
to do, it has done. Only a row that *later* owners have overwritten leaves a question.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dualwrite.observations import LogProof, Outcome
from dualwrite.prepared_state import PreparedTxnState


class DatabaseVerdict(Enum):
    """The database's own word about a transaction (on PostgreSQL, ``pg_xact_status``)."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class DoubtStep(Enum):
    """What to do next about a COMMIT in doubt."""

    ASK_DATABASE = "ask the database for the transaction's status"
    ASK_RECORDS = "look whether an incident was recorded for it"
    ASK_LOG = "read the log for the marker"
    COMMITTED = "the database has committed"
    ABORTED = "the database has rolled back"
    LOST = "the database has committed and the broker aborted"
    UNVERIFIABLE = "the database has committed, and what Kafka did cannot be known"
    IN_DOUBT = "it cannot be known"


@dataclass(frozen=True)
class Doubt:
    """What is known about one COMMIT in doubt.

    Attributes:
        ours: The state that the COMMIT would have recorded.
        row: The row's state, read after the old backend's lock was gone.
        verdict: The database's word; None where not asked.
        records_asked: Whether ``incident`` was looked up.
        incident: The loss recorded for ``ours``, if any.
        proof: The log's word about ``ours``; None where not asked.
    """

    ours: PreparedTxnState
    row: PreparedTxnState
    verdict: DatabaseVerdict | None = None
    records_asked: bool = False
    incident: Outcome | None = None
    proof: LogProof | None = None


_INCIDENT = {Outcome.LOST: DoubtStep.LOST, Outcome.UNVERIFIABLE: DoubtStep.UNVERIFIABLE}
_PROOF = {
    LogProof.COMMITTED: DoubtStep.COMMITTED,
    LogProof.PARTLY: DoubtStep.COMMITTED,
    LogProof.ABORTED: DoubtStep.ABORTED,
}


def next_doubt_step(doubt: Doubt) -> DoubtStep:
    """The next step about a COMMIT in doubt. Pure."""
    if doubt.row == doubt.ours:
        return DoubtStep.COMMITTED
    if not doubt.row.has_transaction or (doubt.row.incarnation or 0) <= (doubt.ours.incarnation or 0):
        return DoubtStep.ABORTED  # nobody has written over it, and it is not there
    if doubt.verdict is None:
        return DoubtStep.ASK_DATABASE
    if doubt.verdict is DatabaseVerdict.ABORTED:
        return DoubtStep.ABORTED
    if not doubt.records_asked:
        return DoubtStep.ASK_RECORDS
    if doubt.incident in _INCIDENT:
        return _INCIDENT[doubt.incident]
    if doubt.verdict is DatabaseVerdict.COMMITTED:
        return DoubtStep.COMMITTED  # whoever overwrote the row settled it first, and recorded no incident
    if doubt.proof is None:
        return DoubtStep.ASK_LOG
    return _PROOF.get(doubt.proof, DoubtStep.IN_DOUBT)
