"""A dry run over native transactions, which changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search import native as small

from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.interfaces import native_of
from dualwrite.protocol.settle import SettleStep
from dualwrite.protocol.values import Outcome, TransactionStatus
from dualwrite.recovery.inspect import unsettled_native
from dualwrite.recovery.recover import inspect
from unit.recovery.test_settle_native import HUNG, KNOWN, TIMED_OUT, SmallCoordinator, row_of

GONE = replace(KNOWN, status=TransactionStatus.NO_SUCH_ID)
COMMITTED = small.drained(small.end(KNOWN, 0, committed=True)[0])


@pytest.mark.parametrize(
    ("state", "recorded", "step"),
    [
        (KNOWN, None, SettleStep.COMMIT),
        (COMMITTED, None, SettleStep.RECORD_COMMITTED),
        (TIMED_OUT, None, SettleStep.RECORD_LOST),
        (HUNG, None, SettleStep.RETIRE),
        (COMMITTED, Outcome.COMMITTED, SettleStep.RETIRE),
        (GONE, None, SettleStep.RECORD_UNVERIFIABLE),
        (GONE, Outcome.COMMITTED, SettleStep.FINISH),
    ],
)
def test_the_step_that_settling_would_take(state: small.State, recorded: Outcome | None, step: SettleStep) -> None:
    coordinator = SmallCoordinator(state)
    row = row_of(small.prepared(), completed=recorded, incarnation=1)
    [(item, found)] = inspect([row], coordinator=coordinator, deadline=Deadline(30))
    assert (found, item.incarnation, item.known.recorded) == (step, 1, recorded)
    assert item.known.view is not None
    assert coordinator.sent == []


def test_only_an_unsettled_incarnation_counts() -> None:
    row = row_of(small.prepared())
    assert unsettled_native(row, 1) is not None
    assert unsettled_native(row, 0) is None
    assert unsettled_native(replace(row, settled_incarnation=1), 1) is None


def test_a_coordinator_that_cannot_is_refused() -> None:
    with pytest.raises(IllegalStateError):
        native_of(object())  # type: ignore[arg-type]
