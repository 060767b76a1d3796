"""How long a transaction may stay open: the greatest that both sides allow, and one warning where the broker bounds it."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.kafka import engine
from dualwrite.kafka.engine import GREATEST_TIMEOUT_MS, choose_transaction_timeout_ms, warn_if_bounded
from dualwrite.protocol.values import NEVER_MS


@pytest.mark.parametrize(
    ("requested", "maximum", "chosen"),
    [
        (None, NEVER_MS, GREATEST_TIMEOUT_MS),
        (None, 900_000, 900_000),
        (None, None, 900_000),
        (60_000, 900_000, 60_000),
        (60_000, None, 60_000),
        (GREATEST_TIMEOUT_MS, NEVER_MS, GREATEST_TIMEOUT_MS),
    ],
)
def test_the_users_own_timeout_else_the_greatest_is_chosen(requested, maximum, chosen):
    assert choose_transaction_timeout_ms(requested, maximum) == chosen


@pytest.mark.parametrize(("requested", "maximum"), [(900_001, 900_000), (NEVER_MS, NEVER_MS), (999, 900_000)])
def test_a_timeout_that_somebody_refuses_is_refused_at_once(requested, maximum):
    with pytest.raises(ConfigurationError, match=r"transaction\.timeout\.ms"):
        choose_transaction_timeout_ms(requested, maximum)


@given(st.none() | st.integers(1000, GREATEST_TIMEOUT_MS), st.none() | st.integers(1000, NEVER_MS))
def test_what_is_chosen_is_never_above_what_the_broker_allows(requested, maximum):
    try:
        chosen = choose_transaction_timeout_ms(requested, maximum)
    except ConfigurationError:
        assert requested is not None
        assert maximum is not None
        assert requested > maximum
    else:
        assert chosen <= (maximum or NEVER_MS)
        assert chosen <= GREATEST_TIMEOUT_MS
        assert requested in {None, chosen}


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(engine, "_logged", set())
    caplog.set_level(logging.WARNING, "dualwrite.kafka.producer")
    return caplog


def test_a_broker_that_bounds_the_guarantee_is_warned_of_once_for_each_of_its_addresses(warnings):
    for servers in ("a", "a", "b"):
        warn_if_bounded(None, 900_000, 900_000, servers=servers, transactional_id="tx")
    assert len(warnings.records) == 2
    text = warnings.records[0].getMessage()
    for said in ("tx", "900 s", "LOST", f"transaction.max.timeout.ms={NEVER_MS}"):
        assert said in text


def test_the_warning_says_that_the_brokers_setting_could_not_be_read(warnings):
    warn_if_bounded(None, None, 900_000, servers="a", transactional_id="tx")
    assert "cannot be read" in warnings.records[0].getMessage()


@pytest.mark.parametrize(("requested", "chosen"), [(60_000, 60_000), (None, GREATEST_TIMEOUT_MS)])
def test_the_users_own_choice_and_the_greatest_are_not_warned_of(warnings, requested, chosen):
    warn_if_bounded(requested, NEVER_MS, chosen, servers="a", transactional_id="tx")
    assert not warnings.records
