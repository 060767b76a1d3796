"""Rows as they come from the database, checked before use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from sqlalchemy import select

from dualwrite.errors import ConfigurationError, Fenced, IllegalStateError
from dualwrite.protocol.lost_decisions import contradiction
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_mismatch import gone_back, other_cluster
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.stores.sql.tables import MAX_ID_LENGTH

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from dualwrite.stores.sql.tables import Tables

Item = TypeVar("Item")

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_RESTORE: Final = "the row was not written by this library, or was edited: restore it before anything is settled"
_CHUNK: Final = 5000
MAX_FENCE: Final = 2**15
"""One more than the greatest producer epoch."""


def check_name(name: str, kind: str = "a transactional id") -> str:
    """Return the name if it can be a key of the tables.

    Raises:
        ConfigurationError: It is no text, is empty, longer than 255 characters, or holds control characters.
    """
    if not isinstance(name, str):
        # 20260101 and "20260101" would be one name in the tables, and two in a program.
        raise ConfigurationError(f"{kind} is text, not {type(name).__name__}", next_step=f"write {str(name)!r}")
    if not 1 <= len(name) <= MAX_ID_LENGTH or _CONTROL.search(name):
        raise ConfigurationError(
            f"{name[:MAX_ID_LENGTH]!r} cannot be {kind}",
            next_step=f"use 1 to {MAX_ID_LENGTH} characters without control characters",
        )
    return name


class NamedValues(Protocol):
    """A row by column name: a ``RowMapping`` or a dictionary."""

    def __getitem__(self, name: str, /) -> object:
        """The value of that column."""
        ...


def parse_state_row(table: str, row: NamedValues) -> StateRow:
    """Parse one row of the table strictly.

    Raises:
        ConfigurationError: This library cannot have written the row. The message names table, row and cause.
    """
    transactional_id, incarnation = cast("str", row["transactional_id"]), cast("int", row["incarnation"])
    completed = cast("str | None", row["completed"])
    where = f"bad row in {table}"
    try:
        state = PreparedTxnState.from_string(cast("str | None", row["prepared_transaction_state"]) or "")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{where}: {error.what}", transactional_id=transactional_id, next_step=error.next_step
        ) from error
    cause = _incomplete(state, incarnation)
    if completed is not None and completed not in _OUTCOMES:
        cause = f"completed is {completed[:20]!r}"
    fence = cast("int | None", row["settle_fence"])
    if fence is not None and not (0 < fence <= MAX_FENCE and state.is_native):
        cause = f"settle_fence is {fence}"
    if cause is not None:
        raise ConfigurationError(f"{where}: {cause}", transactional_id=transactional_id, next_step=_RESTORE)
    return StateRow(
        transactional_id=transactional_id,
        prepared=state,
        namespace=cast("str", row["namespace"]),
        incarnation=incarnation,
        settled_incarnation=cast("int", row["settled_incarnation"]),
        completed=None if completed is None else _OUTCOMES[completed],
        cluster_id=cast("str", row["cluster_id"]),
        owner=cast("str", row["owner"]),
        updated_at=cast("datetime", row["updated_at"]),
        settle_fence=fence,
    )


_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


def _incomplete(state: PreparedTxnState, incarnation: int) -> str | None:
    """The reason why the state cannot be settled; None if it can."""
    if not state.has_transaction:
        return None
    if state.incarnation is None:
        return "the state names no incarnation"
    if not state.partitions:
        return "the state holds no partitions" if state.is_native else "the state holds no first offsets"
    if state.incarnation > incarnation:
        return f"the state names incarnation {state.incarnation}, the row is only at {incarnation}"
    return None


def check_decidable(transactional_id: str, incarnation: int, state: PreparedTxnState) -> str:
    """The text to store for a decision of that incarnation.

    Raises:
        IllegalStateError: A later claim would refuse the row.
        ConfigurationError: The text is too long, or cannot be parsed.
    """
    text = str(state)
    cause = _incomplete(state, incarnation)
    if not state.has_transaction:
        cause = "it names no transaction"
    elif state.incarnation != incarnation:
        cause = cause or f"it names incarnation {state.incarnation}, not {incarnation}"
    if cause is not None:
        raise IllegalStateError(f"the prepared state cannot be recorded: {cause}", transactional_id=transactional_id)
    PreparedTxnState.from_string(text)
    return text


def check_not_gone_back(known: StateRow, incarnation: int, prepared: str | None) -> None:
    """Compare the row with what its owner knows: while the incarnation is ours, only we change its state.

    Raises:
        ConfigurationError: The incarnation, or the newest decision, is older: the database has lost commits.
    """
    if incarnation == known.incarnation and (prepared or "") == str(known.prepared):
        return  # the usual case
    shown = PreparedTxnState.from_string(prepared or "") if incarnation <= known.incarnation else known.prepared
    seen = contradiction(known.incarnation, known.prepared, incarnation, shown)
    if seen is not None:
        # If the claim was lost too, the next claim finds its Kafka id in use.
        raise gone_back(
            seen,
            known.transactional_id,
            str(known.prepared) if shown != known.prepared else None,
            recorded=incarnation == known.incarnation,
        )


def check_claimed(row: StateRow, cluster_id: str, table: str) -> None:
    """Check a row that was claimed just now, before the claim is committed.

    Raises:
        ConfigurationError: It belongs to another cluster, or its state names an incarnation that it had not reached.
    """
    if row.prepared.incarnation == row.incarnation:
        raise ConfigurationError(
            f"bad row in {table}: the state names an incarnation that the row had not reached",
            transactional_id=row.transactional_id,
            next_step="the row was edited: restore it before anything is settled",
        )
    if row.cluster_id != cluster_id:
        raise other_cluster(row.cluster_id, cluster_id, row.transactional_id)


def check_guard(found: tuple[int, str] | None, transactional_id: str, owner: str, incarnation: int) -> None:
    """Check that the guard of a claim is still ours.

    A higher incarnation alone does not show another owner: if the answer to a COMMIT was lost, it may be a claim of our own
    that we do not know of. Every claim writes its owner, so the name shows which owner claimed last.

    Args:
        found: The incarnation and the owner that its row names; None if the row is gone.
        transactional_id: The guard.
        owner: Our name.
        incarnation: The incarnation of our newest known claim of it.

    Raises:
        Fenced: Another owner has claimed the row, or the row is gone.
        ConfigurationError: The row has an older incarnation.
    """
    if found is None:
        raise Fenced("the row is gone", transactional_id=transactional_id)
    shown, holder = found
    if holder != owner:
        raise Fenced(
            f"the row names incarnation {shown} of {holder!r}, our newest is {incarnation}",
            transactional_id=transactional_id,
        )
    if shown < incarnation:
        raise gone_back(f"the row names our incarnation {shown}, although {incarnation} was claimed", transactional_id)


def digest(state: PreparedTxnState) -> str:
    """The transaction's key: equal for equal states. It leaves out what is not part of a state's identity."""
    exact = replace(state, incarnation=None, first_offsets=(), further=()) if state.is_native else state
    return hashlib.sha256(str(replace(exact, started_ms=None)).encode()).hexdigest()


def in_chunks(items: Iterable[Item]) -> Iterator[Sequence[Item]]:
    """Split the items into chunks whose bound values fit into one statement of any database."""
    rest = list(items)
    for start in range(0, len(rest), _CHUNK):
        yield rest[start : start + _CHUNK]


def parse_rows(table: str, rows: Sequence[NamedValues]) -> Sequence[StateRow]:
    """Parse the rows of a SELECT of all columns; returns them in order of id.

    Fetch all of them first: a cursor that a bad row leaves half read would keep SQLite's lock.

    Raises:
        ConfigurationError: As :func:`parse_state_row`.
    """
    # Sorted here: databases order texts by their collation.
    return sorted((parse_state_row(table, row) for row in rows), key=lambda row: row.transactional_id)


def read_rows(
    tables: Tables, ids: Sequence[str], connection: Connection, *, locked: bool = False
) -> Sequence[StateRow]:
    """The rows of these sorted ids, in order of id, optionally locked one after the other. Missing ones are left out.

    Raises:
        ConfigurationError: As :func:`parse_state_row`.
    """
    state = tables.state
    statement = select(state).order_by(state.c.transactional_id)
    statement = statement.with_for_update() if locked else statement
    return [
        row
        for chunk in in_chunks(ids)
        for row in parse_rows(
            state.fullname,
            connection.execute(statement.where(state.c.transactional_id.in_(chunk))).mappings().all(),
        )
    ]
