"""The losses found on one lane: recorded before they are reported, each of them once."""

from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
from harness.simulated import TOPIC

from dualwrite.errors import DatabaseWentBack, OutcomeUnverifiable, Unavailable
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome, StateRow
from dualwrite.writing.lane import Losses, RecordedLosses

STATE = PreparedTxnState.native(7, 3, 1, {(TOPIC, 0): 5}, {TOPIC: "id"})
ROW = StateRow("orders", STATE, "space", 1, 0, None, "cluster", "me", datetime(2026, 1, 1, tzinfo=timezone.utc))


class Store:
    """Holds one row; takes outcomes, unless it is away."""

    def __init__(self):
        self.row, self.away = ROW, False
        self.outcomes, self.told = [], []

    def read(self, _ids):
        return [self.row]

    def record_outcomes(self, outcomes):
        if self.away:
            raise Unavailable("away")
        self.outcomes += [(row.prepared, outcome) for row, outcome, _ in outcomes]

    def note_reported(self, losses):
        self.told += losses


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def reported():
    return []


@pytest.fixture
def losses(store, reported):
    return RecordedLosses("orders", SimpleNamespace(store=store), Losses(reported.append))


def test_a_transaction_that_came_back_is_reported_once_it_is_recorded(losses, store, reported):
    store.away = True
    with pytest.raises(Unavailable):
        losses.record_came_back(ROW)
    assert reported == []
    store.away = False
    losses.record_came_back(ROW)
    assert store.outcomes == [(STATE, Outcome.UNVERIFIABLE)]
    assert [(type(loss), loss.state) for loss in reported] == [(OutcomeUnverifiable, str(STATE))]
    assert store.told == [("orders", STATE)]


def test_a_decision_that_the_row_still_holds_is_not_lost(losses, store, reported):
    losses.compare(ROW)
    store.row = replace(ROW, namespace="of a row that was made again", prepared=PreparedTxnState())
    losses.compare(ROW)
    losses.compare(replace(ROW, prepared=PreparedTxnState()))
    assert (store.outcomes, reported) == ([], [])


def test_a_decision_that_the_row_has_lost_is_recorded_and_reported_once(losses, store, reported):
    store.row = replace(ROW, prepared=PreparedTxnState())
    losses.compare(ROW)
    losses.compare(ROW)
    assert store.outcomes == [(STATE, Outcome.UNVERIFIABLE)]
    assert [(type(loss), loss.state) for loss in reported] == [(DatabaseWentBack, str(STATE))]
