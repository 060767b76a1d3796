"""Which open transactions may be terminated by force: over every combination of what the row and Kafka show."""

import itertools

import pytest

from dualwrite.protocol.blocking import TerminateStep, step_with_row, step_without_row
from dualwrite.protocol.values import TransactionStatus

BOTH = [False, True]


@pytest.mark.parametrize(("needs_settling", "decided", "lose"), list(itertools.product(BOTH, repeat=3)))
def test_a_decided_transaction_is_aborted_only_by_a_caller_who_gives_it_up(needs_settling, decided, lose):
    step = step_with_row(needs_settling=needs_settling, decided_is_open=decided, lose_decided=lose)
    if decided:
        assert step is (TerminateStep.LOSE if lose else TerminateStep.REFUSE)
    else:
        assert step is (TerminateStep.SETTLE if needs_settling else TerminateStep.NOTHING)


@pytest.mark.parametrize(("status", "ours", "lose"), list(itertools.product(TransactionStatus, BOTH, BOTH)))
def test_without_a_row_only_what_is_ongoing_is_aborted_and_an_id_of_ours_only_by_a_caller_who_gives_it_up(
    status, ours, lose
):
    step = step_without_row(status, is_ours=ours, lose_decided=lose)
    if status is TransactionStatus.NO_SUCH_ID:
        assert step is TerminateStep.UNKNOWN
    elif status is not TransactionStatus.ONGOING:
        assert step is TerminateStep.NOTHING
    else:
        assert step is (TerminateStep.REFUSE if ours and not lose else TerminateStep.ABORT)
