"""Tracks which losses were reported. If a process dies before it reports one, the next opening or recovery does."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, DualWriteError, OutcomeUnverifiable
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome

if TYPE_CHECKING:
    from dualwrite.interfaces import StateStore
    from dualwrite.protocol.values__protocol_rows import Incident

logger = logging.getLogger(__name__)

LOSSES: Final = (DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable)
"""The errors that report a loss."""


def note_told(store: StateStore, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
    """Note that these losses are reported to a caller now. If that cannot be noted, they are reported again later.

    Args:
        store: The database.
        losses: Transactional ids with the transactions that were lost.
    """
    if not losses:
        return
    try:
        store.note_told(losses)
    except DualWriteError as error:
        logger.warning("could not record which losses were reported; they will be reported again: %s", error)


@contextmanager
def noting_told(store: StateStore) -> Generator[None, None, None]:
    """Note that a loss that leaves the block is reported to its caller."""
    try:
        yield
    except LOSSES as loss:
        if loss.state is not None and loss.transactional_id is not None:
            note_told(store, [(loss.transactional_id, PreparedTxnState.from_string(loss.state))])
        raise


@contextmanager
def telling_at_open(store: StateStore, name: str) -> Generator[None, None, None]:
    """Report all unreported losses of a writer with a single error, so that the next opening succeeds.

    Args:
        store: The database.
        name: The writer's transactional id; its lanes' losses are its own.

    Raises:
        DecidedTransactionLost, OutcomeUnverifiable: The first unreported loss.
    """
    try:
        yield
    except LOSSES:
        note_told(store, [(found.transactional_id, found.state) for found in untold(_incidents(store, name))])
        raise
    incidents = _incidents(store, name)
    left = [found for found in incidents if found.acknowledged_at is None]
    if left:
        logger.error(
            "%s: %d unacknowledged losses: look at them with `dualwrite status`, then run `dualwrite acknowledge`",
            name,
            len(left),
        )
    new = untold(incidents)
    note_told(store, [(found.transactional_id, found.state) for found in new])
    if new:
        raise _as_error(new[0], others=len(new) - 1)


def untold(incidents: Iterable[Incident]) -> Sequence[Incident]:
    """The incidents that were not reported to any caller, and that no person has looked at."""
    return [found for found in incidents if found.told_at is None and found.acknowledged_at is None]


def _incidents(store: StateStore, name: str) -> Sequence[Incident]:
    return [
        found
        for found in store.incidents(name)
        if found.transactional_id == name or found.transactional_id.startswith(f"{name}#")
    ]


def _as_error(incident: Incident, *, others: int) -> DecidedTransactionLost | OutcomeUnverifiable:
    kind = DecidedTransactionLost if incident.outcome is Outcome.LOST else OutcomeUnverifiable
    more = f"; {others} more: see `dualwrite status`" if others else ""
    return kind(
        f"{incident.detail} (found at {incident.detected_at:%Y-%m-%d %H:%M:%S} by a process that ended before it "
        f"reported the loss{more})",
        transactional_id=incident.transactional_id,
        state=incident.prepared_transaction_state,
    )
