"""Resolves a COMMIT in doubt, whose answer is missing, by the row, the database and the log.

The row is read under its lock on a fresh connection, which waits for the old backend: by then that backend has committed or
rolled back. A question remains only if *later* owners have overwritten the row, or if the dual write had no messages: such a
row names nothing of it, and only the database itself knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import LogProof, Outcome


class DatabaseVerdict(Enum):
    """The database's own verdict on a transaction (on PostgreSQL, ``pg_xact_status``)."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class DoubtStep(Enum):
    """The next step about a COMMIT in doubt, or the verdict on it."""

    ASK_DATABASE = "ask the database for the transaction's status"
    ASK_RECORDS = "look up an incident recorded for it"
    ASK_LOG = "read the log for the marker"
    COMMITTED = "the database has committed"
    ABORTED = "the database has rolled back"
    LOST = "the database has committed and the broker aborted"
    UNVERIFIABLE = "the database has committed, and what Kafka did cannot be known"
    IN_DOUBT = "it cannot be known"


@dataclass(frozen=True)
class Doubt:
    """The facts known about one COMMIT in doubt.

    Attributes:
        ours: The state that the COMMIT would have recorded; empty for rows alone.
        row: The row's state, read after the old backend released its lock.
        verdict: The database's verdict; None if not asked.
        records_asked: Whether ``incident`` was looked up.
        incident: The loss recorded for ``ours``, if any.
        proof: The log's proof about ``ours``; None if not asked.
    """

    ours: PreparedTxnState
    row: PreparedTxnState
    verdict: DatabaseVerdict | None = None
    records_asked: bool = False
    incident: Outcome | None = None
    proof: LogProof | None = None


_VERDICT = {
    DatabaseVerdict.COMMITTED: DoubtStep.COMMITTED,
    DatabaseVerdict.ABORTED: DoubtStep.ABORTED,
    DatabaseVerdict.UNKNOWN: DoubtStep.IN_DOUBT,
}
_INCIDENT = {Outcome.LOST: DoubtStep.LOST, Outcome.UNVERIFIABLE: DoubtStep.UNVERIFIABLE}
# Not the outcome of a decided transaction: whether it was decided is the question, and here an abort is no loss.
_PROOF = {
    LogProof.COMMITTED: DoubtStep.COMMITTED,
    LogProof.PARTLY: DoubtStep.COMMITTED,
    LogProof.ABORTED: DoubtStep.ABORTED,
}


def next_doubt_step(doubt: Doubt) -> DoubtStep:
    """The next step about a COMMIT in doubt. Pure."""
    if not doubt.ours.has_transaction:
        return DoubtStep.ASK_DATABASE if doubt.verdict is None else _VERDICT[doubt.verdict]
    if doubt.row == doubt.ours:
        return DoubtStep.COMMITTED
    if not doubt.row.has_transaction or (doubt.row.incarnation or 0) <= (doubt.ours.incarnation or 0):
        return DoubtStep.ABORTED  # no later owner has overwritten the row, and it does not name our state
    if doubt.verdict is None:
        return DoubtStep.ASK_DATABASE
    if doubt.verdict is DatabaseVerdict.ABORTED:
        return DoubtStep.ABORTED
    if not doubt.records_asked:
        return DoubtStep.ASK_RECORDS
    if doubt.incident in _INCIDENT:
        return _INCIDENT[doubt.incident]
    if doubt.verdict is DatabaseVerdict.COMMITTED:
        return DoubtStep.COMMITTED  # the later owner settled it before overwriting the row, and recorded no incident
    if doubt.proof is None:
        return DoubtStep.ASK_LOG
    return _PROOF.get(doubt.proof, DoubtStep.IN_DOUBT)
