"""Losses of transactions that have ended for their callers: each is reported once to code, and always to the log."""

import logging

import pytest

from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable
from dualwrite.writing.lane import Losses

LOST = DecidedTransactionLost("aborted by the broker", transactional_id="orders#1", state="42:0;i=1")


def refusing(_loss):
    raise LookupError("the pager is away")


@pytest.mark.parametrize(
    ("loss", "outcome"),
    [
        (LOST, "lost"),
        (OutcomeUnverifiable("its records are gone", transactional_id="orders#1", state="42:0;i=1"), "unknown"),
        (DatabaseWentBack("an older row", transactional_id="orders#1", state="42:0;i=1"), "none"),
    ],
)
def test_a_log_collector_finds_the_transaction_in_fields_of_the_record(loss, outcome, caplog):
    Losses().report(loss)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert vars(record).items() >= {
        ("dualwrite_event", "loss"),
        ("dualwrite_transactional_id", "orders#1"),
        ("dualwrite_state", "42:0;i=1"),
        ("dualwrite_outcome", outcome),
    }
    assert str(loss) in record.getMessage()


def test_a_loss_that_on_loss_takes_is_reported_and_never_raised(caplog):
    taken = []
    losses = Losses(taken.append)
    assert losses.report(LOST) is True
    assert taken == [LOST]
    losses.raise_unreported()
    assert [record.levelname for record in caplog.records] == ["ERROR"], "the log has it too"


def test_a_loss_that_only_the_log_has_is_raised_once():
    losses = Losses()
    assert losses.report(LOST) is False
    with pytest.raises(DecidedTransactionLost) as caught:
        losses.raise_unreported()
    assert caught.value is LOST
    losses.raise_unreported()


def test_an_exception_of_on_loss_is_logged_and_the_loss_counts_as_reported_in_the_log_alone(caplog):
    losses = Losses(refusing)
    assert losses.report(LOST) is False
    assert "the pager is away" in caplog.text
    with pytest.raises(DecidedTransactionLost):
        losses.raise_unreported()


def test_of_several_losses_the_first_is_raised_and_none_of_them_again():
    second = OutcomeUnverifiable("its records are gone", transactional_id="orders")
    losses = Losses()
    losses.report(LOST)
    losses.report(second)
    with pytest.raises(DecidedTransactionLost):
        losses.raise_unreported()
    losses.raise_unreported()


def test_an_interruption_of_on_loss_is_passed_on():
    def interrupted(_loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Losses(interrupted).report(LOST)
