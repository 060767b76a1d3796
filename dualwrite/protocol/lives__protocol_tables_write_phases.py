"""The phases of one dual write and its outcome, as observers see them: derived from the states of `write_life`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, Fenced, OutcomeUnverifiable
from dualwrite.protocol.lives__protocol_tables_write_life import WriteState


class Phase(Enum):
    """The phases that a dual write spends its time in.

    ``LANE``: waiting for a lane, and making it ready. ``BEGIN``: a connection is taken, the database's transaction begins, the
    row is read. ``BODY``: the user's code. ``PREPARE``: the messages are acknowledged. ``RECORD``: the row is updated.
    ``DECIDE``: COMMIT, until its outcome is known. ``COMPLETE``: Kafka commits. ``ABORT``: both sides roll back.
    """

    LANE = "lane"
    BEGIN = "begin"
    BODY = "body"
    PREPARE = "prepare"
    RECORD = "record"
    DECIDE = "decide"
    COMPLETE = "complete"
    ABORT = "abort"


class WriteOutcome(Enum):
    """How a dual write has ended for its caller.

    ``NOT_BEGUN``: it got no lane, or no database transaction. ``FENCED``: aborted, because another owner took over.
    ``COMPLETION_PENDING``: decided, not completed yet. ``UNVERIFIABLE``: decided, and the fate of its messages, or of its
    rows, cannot be known. ``HANDED_OVER``: another process decides.
    """

    COMMITTED = "committed"
    ABORTED = "aborted"
    FENCED = "fenced"
    IN_DOUBT = "in doubt"
    COMPLETION_PENDING = "completion pending"
    LOST = "lost"
    UNVERIFIABLE = "unverifiable"
    HANDED_OVER = "handed over"
    NOT_BEGUN = "not begun"


_S, _P = WriteState, Phase

PHASE_FROM: Mapping[WriteState, Phase] = MappingProxyType(
    {
        _S.CHECKED: _P.BODY,
        _S.PREPARED: _P.RECORD,
        _S.RECORDED: _P.DECIDE,
        _S.IN_DOUBT: _P.DECIDE,
    }
)
"""The phase that begins with a state. The other phases begin before the first state or inside one: there may be nothing in
Kafka to complete, for instance, and a dual write may abort in any state before the decision."""


def outcome_of(state: WriteState | None, error: BaseException | None) -> WriteOutcome:
    """The outcome for the caller.

    Args:
        state: The last state; None if the dual write had no lane.
        error: The error that leaves the block, if any.
    """
    if state is _S.COMPLETED:
        return WriteOutcome.COMMITTED
    if state is _S.HANDED_OVER:
        return WriteOutcome.HANDED_OVER
    if state in {_S.DECIDED, _S.LOST}:
        if isinstance(error, OutcomeUnverifiable | DatabaseWentBack):
            return WriteOutcome.UNVERIFIABLE
        lost = state is _S.LOST or isinstance(error, DecidedTransactionLost)
        return WriteOutcome.LOST if lost else WriteOutcome.COMPLETION_PENDING
    if state in {_S.IN_DOUBT, _S.RECORDED}:  # only an interruption leaves it recorded: COMMIT may have been sent
        return WriteOutcome.IN_DOUBT
    if isinstance(error, Fenced):
        return WriteOutcome.FENCED
    return WriteOutcome.NOT_BEGUN if state in {None, _S.BEGUN} else WriteOutcome.ABORTED
