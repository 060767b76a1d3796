"""Which losses were reported: each once to a caller, and again if that could not be recorded."""

import logging
from datetime import datetime, timezone

import pytest
from harness.databases import prepared

from dualwrite.errors import (
    CompletionPending,
    DatabaseWentBack,
    DecidedTransactionLost,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.protocol.values import Incident, Outcome
from dualwrite.recovery.claim import note_reported, noting_reported, reporting_at_open, unreported

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
STATE = prepared(1)


class Store:
    """Has these incidents, and notes which of them were reported."""

    def __init__(self, *incidents):
        self.found = incidents
        self.told = []
        self.refusal = None

    def incidents(self, prefix):
        return [one for one in self.found if one.transactional_id.startswith(prefix)]

    def note_reported(self, losses):
        if self.refusal is not None:
            raise self.refusal
        self.told += losses


def incident(name="orders", number=0, *, outcome=Outcome.LOST, told=False, acknowledged=False):
    return Incident(
        name,
        str(prepared(1, number)),
        outcome,
        f"loss {number}",
        NOW,
        NOW if acknowledged else None,
        NOW if told else None,
    )


def opening(store, name="orders"):
    with reporting_at_open(store, name):
        pass


def test_reporting_nothing_asks_nothing_of_the_database():
    store = Store()
    store.refusal = AssertionError("asked")
    note_reported(store, [])


def test_a_report_that_cannot_be_noted_is_made_again_and_no_error_of_its_own(caplog):
    store = Store()
    store.refusal = Unavailable("away")
    note_reported(store, [("orders", STATE)])
    assert "reported again: away" in caplog.text


@pytest.mark.parametrize("kind", [DecidedTransactionLost, OutcomeUnverifiable, DatabaseWentBack])
def test_a_loss_that_leaves_the_block_is_noted_and_passed_on(kind):
    store, loss = Store(), kind("lost", transactional_id="orders#1", state=str(STATE))
    with pytest.raises(kind) as caught, noting_reported(store):
        raise loss
    assert caught.value is loss
    assert store.told == [("orders#1", STATE)]


@pytest.mark.parametrize(
    "error",
    [
        DatabaseWentBack("a claim is lost", transactional_id="orders"),
        DecidedTransactionLost("lost", state=str(STATE)),
        CompletionPending("not yet", transactional_id="orders"),
        KeyboardInterrupt(),
    ],
    ids=["a loss without a transaction", "a loss without an id", "no loss", "an interruption"],
)
def test_an_error_that_names_no_loss_is_passed_on_and_nothing_is_noted(error):
    store = Store()
    with pytest.raises(type(error)), noting_reported(store):
        raise error
    assert store.told == []


@pytest.mark.parametrize(
    ("told", "acknowledged", "reported"),
    [(False, False, True), (True, False, False), (False, True, False), (True, True, False)],
)
def test_unreported_is_what_no_caller_has_heard_of_and_no_person_has_looked_at(told, acknowledged, reported):
    found = incident(told=told, acknowledged=acknowledged)
    assert (list(unreported([found])) == [found]) is reported


@pytest.mark.parametrize(
    ("outcome", "kind"), [(Outcome.LOST, DecidedTransactionLost), (Outcome.UNVERIFIABLE, OutcomeUnverifiable)]
)
def test_an_opening_reports_what_a_former_process_found_and_the_next_one_goes_on(outcome, kind):
    store = Store(incident("orders#1", outcome=outcome))
    with pytest.raises(kind, match=r"loss 0 \(found at 2026-01-02 03:04:05") as caught:
        opening(store)
    assert (caught.value.transactional_id, caught.value.state) == ("orders#1", str(prepared(1)))
    assert store.told == [("orders#1", prepared(1))]
    opening(Store(incident("orders#1", told=True)))


def test_several_losses_are_one_error_that_counts_the_others_and_all_are_noted():
    store = Store(incident("orders", 1), incident("orders#1", 2), incident("orders", 3, told=True))
    with pytest.raises(DecidedTransactionLost, match="loss 1 .*; 1 more: see `dualwrite status`"):
        opening(store)
    assert store.told == [("orders", prepared(1, 1)), ("orders#1", prepared(1, 2))]


def test_another_writer_whose_name_begins_alike_reports_its_losses_itself():
    store = Store(incident("orders2"), incident("orders.old"))
    opening(store)
    assert store.told == []


def test_a_loss_that_the_opening_itself_finds_is_raised_and_the_others_count_as_reported():
    store = Store(incident("orders", 1), incident("orders#1", 2))
    found = DecidedTransactionLost("found now", transactional_id="orders", state=str(prepared(1, 1)))
    with pytest.raises(DecidedTransactionLost) as caught, reporting_at_open(store, "orders"):
        raise found
    assert caught.value is found
    assert store.told == [("orders", prepared(1, 1)), ("orders#1", prepared(1, 2))]


def test_an_opening_that_fails_reports_nothing():
    store = Store(incident())
    with pytest.raises(Unavailable), reporting_at_open(store, "orders"):
        raise Unavailable("away")
    assert store.told == []


def test_every_opening_logs_how_many_losses_nobody_has_acknowledged(caplog):
    opening(Store(incident("orders", 1, told=True), incident("orders", 2, told=True), incident(acknowledged=True)))
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("orders: 2 unacknowledged losses")


def test_an_opening_without_losses_logs_nothing(caplog):
    opening(Store(incident(acknowledged=True, told=True)))
    assert caplog.records == []
