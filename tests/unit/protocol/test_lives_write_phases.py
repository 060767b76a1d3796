"""The outcome of a dual write for its caller: every state with every error."""

import pytest

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.errors import DatabaseWentBack, IllegalStateError, OutcomeUnverifiable
from dualwrite.protocol.lives import PHASE_FROM, WRITE_LIFE, WriteEvent, WriteOutcome, WriteState, outcome_of

S, O = WriteState, WriteOutcome  # noqa: E741 - as the tables name their columns
ERRORS = [
    None,
    CompletionPending("x"),
    ConfigurationError("x"),
    DatabaseWentBack("x"),
    DecidedTransactionLost("x"),
    Fenced("x"),
    IllegalStateError("x"),
    OutcomeUnverifiable("x"),
    TransactionAborted("x"),
    TransactionInDoubt("x"),
    Unavailable("x"),
    ValueError("the user's own"),
    KeyboardInterrupt(),
]
FENCED = {Fenced: O.FENCED}
LOSSES = {OutcomeUnverifiable: O.UNVERIFIABLE, DatabaseWentBack: O.UNVERIFIABLE, DecidedTransactionLost: O.LOST}
EXPECTED = {
    None: (O.NOT_BEGUN, FENCED),
    S.BEGUN: (O.NOT_BEGUN, FENCED),
    S.CHECKED: (O.ABORTED, FENCED),
    S.PREPARED: (O.ABORTED, FENCED),
    S.RECORDED: (O.IN_DOUBT, {}),
    S.IN_DOUBT: (O.IN_DOUBT, {}),
    S.DECIDED: (O.COMPLETION_PENDING, LOSSES),
    S.COMPLETED: (O.COMMITTED, {}),
    S.WAITING: (O.WAITING, {}),
    S.HANDED_OVER: (O.HANDED_OVER, {}),
    S.LOST: (O.LOST, LOSSES),
    S.ABORTED: (O.ABORTED, FENCED),
}


@pytest.mark.parametrize("state", [None, *S])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_outcome_is_that_of_the_state_unless_the_error_says_more(state, error):
    usual, by_error = EXPECTED[state]
    assert outcome_of(state, error) is by_error.get(type(error), usual)


def test_no_phase_begins_where_a_dual_write_ends_and_one_begins_wherever_it_may_abort():
    assert not {PHASE_FROM.get(state) for state in S if not WRITE_LIFE[state]} - {None}
    may_abort = {state for state in S if WriteEvent.ABORT in WRITE_LIFE[state]}
    assert may_abort - {S.BEGUN} <= PHASE_FROM.keys()
