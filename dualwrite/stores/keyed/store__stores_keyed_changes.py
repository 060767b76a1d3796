"""The changes that each call makes to a row: pure, from the row as it was read."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import datetime

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process__protocol_settling_commit_in_doubt import DatabaseVerdict
from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_rows import Incident, StateRow
from dualwrite.stores.keyed.store__stores_keyed_encoding import Stored
from dualwrite.stores.sql.tables__stores_sql_tables_rows import check_claimed


def claimed(
    found: Stored | None, transactional_id: str, *, owner: str, cluster_id: str, at_least: int, now: datetime
) -> Stored:
    """The row after a claim.

    Raises:
        ConfigurationError: It belongs to another cluster, or names an incarnation that it had not reached.
    """
    before = found or Stored(
        StateRow(transactional_id, PreparedTxnState(), secrets.token_hex(6), 0, 0, None, cluster_id, owner, now)
    )
    row = before.row
    raised = replace(row, incarnation=max(row.incarnation + 1, at_least), owner=owner, updated_at=now)
    check_claimed(raised, cluster_id, "state")
    return replace(before, row=raised)


def transaction_name(transactional_id: str, incarnation: int) -> str:
    """A new name for a transaction on the row of that id."""
    return f"{incarnation}/{secrets.token_hex(8)}/{transactional_id}"


def id_in(transaction: str) -> str:
    """The id in a transaction's name."""
    return transaction.split("/", 2)[2]


def verdict(found: Stored | None, transaction: str) -> DatabaseVerdict:
    """The row's verdict on a transaction that can no longer commit: only later incarnations replace its name."""
    if found is None:
        return DatabaseVerdict.UNKNOWN
    if found.transaction == transaction:
        return DatabaseVerdict.COMMITTED
    if found.transaction is None or _incarnation(found.transaction) <= _incarnation(transaction):
        return DatabaseVerdict.ABORTED
    return DatabaseVerdict.UNKNOWN


def _incarnation(transaction: str) -> int:
    return int(transaction.partition("/")[0])


def is_ours(found: Stored | None, incarnation: int, namespace: str | None) -> bool:
    """Whether the row still names that incarnation, in that namespace if given."""
    return found is not None and found.row.incarnation == incarnation and namespace in {None, found.row.namespace}


def decided(found: Stored, state: PreparedTxnState, transaction: str, now: datetime) -> Stored:
    """The row after a decision."""
    row = replace(found.row, prepared=state, completed=None, settle_fence=None, updated_at=now)
    return Stored(row, transaction)


def completed(found: Stored | None, prepared: PreparedTxnState, outcome: Outcome, now: datetime) -> Stored | None:
    """The row after the outcome of that transaction is recorded; None if it does not change."""
    if found is None or str(found.row.prepared) != str(prepared) or found.row.completed is not None:
        return None
    return replace(found, row=replace(found.row, completed=outcome, updated_at=now))


def is_news(found: Stored | None, prepared: PreparedTxnState, outcome: Outcome) -> bool:
    """Whether the outcome is an incident: not UNVERIFIABLE if a settler that saw more of the log knew better."""
    if outcome is not Outcome.UNVERIFIABLE:
        return outcome is Outcome.LOST
    same = found is not None and str(found.row.prepared) == str(prepared)
    return not (same and found is not None and found.row.completed not in {None, outcome})


def loss(row: StateRow, outcome: Outcome, detail: str, now: datetime) -> Incident:
    """The incident of a loss."""
    return Incident(row.transactional_id, str(row.prepared), outcome, detail, now, None)


def fenced(found: Stored | None, row: StateRow, fence: int, now: datetime) -> Stored | None:
    """The row with the fence of its transaction; None if it is no longer as it was read."""
    if (
        found is None
        or found.row.namespace != row.namespace
        or str(found.row.prepared) != str(row.prepared)
        or found.row.settle_fence != row.settle_fence
    ):
        return None
    return replace(found, row=replace(found.row, settle_fence=fence, updated_at=now))


def settled(found: Stored | None, incarnation: int, now: datetime) -> Stored | None:
    """The row with at least that settled incarnation; None if it does not change."""
    if found is None or found.row.settled_incarnation >= incarnation:
        return None
    return replace(found, row=replace(found.row, settled_incarnation=incarnation, updated_at=now))
