"""Which time limit a native producer asks for, in which order, and what it says of the one that it gets."""

import logging

import pytest

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.kafka import engine
from dualwrite.kafka.engine import GREATEST_TIMEOUT_MS
from dualwrite.kafka.error_codes import Code
from dualwrite.kafka.native.coordination import (
    Answered,
    Attempt,
    Initialised,
    attempts,
    initialise,
    log_time_limit,
    refusal_of_two_phase,
)
from dualwrite.protocol.values import NEVER_MS

DEFAULT_MS = 900_000
TWO_PHASE, UNLIMITED, LIMITED = Attempt(NEVER_MS, two_phase=True), Attempt(NEVER_MS), Attempt(DEFAULT_MS)
DONE = Answered(Code.NONE, (7, 0))


@pytest.mark.parametrize(
    ("requested", "maximum", "expected"),
    [
        (None, NEVER_MS, [TWO_PHASE, UNLIMITED]),
        (None, DEFAULT_MS, [TWO_PHASE, LIMITED]),
        (None, None, [TWO_PHASE, UNLIMITED, LIMITED]),
        (60_000, NEVER_MS, [Attempt(60_000)]),
        (60_000, None, [Attempt(60_000)]),
        (NEVER_MS, NEVER_MS, [UNLIMITED]),
        (GREATEST_TIMEOUT_MS, NEVER_MS, [Attempt(GREATEST_TIMEOUT_MS)]),
    ],
)
def test_the_users_own_timeout_else_the_longest_first(requested, maximum, expected):
    assert attempts(requested, maximum) == expected


@pytest.mark.parametrize(("requested", "maximum"), [(DEFAULT_MS + 1, DEFAULT_MS), (999, None), (NEVER_MS, DEFAULT_MS)])
def test_a_timeout_that_the_broker_refuses_is_refused_at_once(requested, maximum):
    with pytest.raises(ConfigurationError, match=r"transaction\.timeout\.ms"):
        attempts(requested, maximum)


@pytest.mark.parametrize(("maximum", "without"), [(NEVER_MS, [UNLIMITED]), (DEFAULT_MS, [LIMITED])])
def test_two_phase_commit_is_the_only_attempt_if_required_and_none_if_forbidden(maximum, without):
    assert attempts(None, maximum, two_phase_commit=True) == [TWO_PHASE]
    assert attempts(None, maximum, two_phase_commit=False) == without
    with pytest.raises(ConfigurationError, match="no effect together with"):
        attempts(60_000, maximum, two_phase_commit=True)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (Code.UNSUPPORTED_VERSION, "unstable.api.versions.enable=true"),
        (Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "grant Write and TwoPhaseCommit"),
        (Code.NONE, None),
        (None, None),
        (Code.PRODUCER_FENCED, None),
    ],
)
def test_a_refusal_of_what_is_required_names_the_right_and_the_settings(code, advice):
    error = refusal_of_two_phase(Initialised(None if code is None else Answered(code), TWO_PHASE), "orders")
    assert (None if error is None else advice in str(error)) == (None if advice is None else True)
    assert refusal_of_two_phase(Initialised(Answered(Code.UNSUPPORTED_VERSION), LIMITED), "orders") is None


class Requests:
    """The requests to a broker that answers with these codes, one after the other."""

    def __init__(self, *codes):
        self.codes, self.asked = list(codes), []

    def init_producer_id(self, timeout_ms, _deadline, *, two_phase):
        self.asked.append(Attempt(timeout_ms, two_phase))
        code = self.codes.pop(0)
        return None if code is None else Answered(code, (7, 0) if code is Code.NONE else (-1, -1))


def initialised(maximum, *codes, requested=None):
    requests = Requests(*codes)
    return initialise(requests, attempts(requested, maximum), Deadline(60)), requests


@pytest.mark.parametrize(
    ("maximum", "codes", "granted"),
    [
        (DEFAULT_MS, [Code.NONE], TWO_PHASE),
        (NEVER_MS, [Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, Code.NONE], UNLIMITED),
        (NEVER_MS, [Code.UNSUPPORTED_VERSION, Code.NONE], UNLIMITED),
        (DEFAULT_MS, [Code.UNSUPPORTED_VERSION, Code.NONE], LIMITED),
        (None, [Code.UNSUPPORTED_VERSION, Code.NONE], UNLIMITED),
        (None, [Code.UNSUPPORTED_VERSION, Code.INVALID_TRANSACTION_TIMEOUT, Code.NONE], LIMITED),
    ],
)
def test_what_is_refused_is_followed_by_the_next(maximum, codes, granted):
    result, requests = initialised(maximum, *codes)
    assert (result.answered, result.granted) == (DONE, granted)
    assert not requests.codes


@pytest.mark.parametrize("code", [None, Code.PRODUCER_FENCED])
def test_what_is_not_answered_or_refused_otherwise_is_not_followed_by_another_attempt(code):
    result, requests = initialised(NEVER_MS, code)
    assert result.answered == (None if code is None else Answered(code))
    assert requests.asked == [TWO_PHASE]


def test_a_right_that_is_missing_altogether_is_the_last_answer():
    codes = [Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED] * 2
    assert initialised(NEVER_MS, *codes)[0].answered == Answered(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(engine, "_logged", set())
    caplog.set_level(logging.INFO, "dualwrite.kafka.producer")
    return caplog


@pytest.mark.parametrize(
    ("granted", "said"),
    [
        (TWO_PHASE, "no time limit to transactions (two-phase commit)"),
        (UNLIMITED, "no time limit to transactions (transaction.timeout.ms=2147483647)"),
        (LIMITED, "LOST"),
    ],
)
def test_the_time_limit_is_told_once(log, granted, said):
    for _ in range(2):
        log_time_limit(granted, None, DEFAULT_MS, servers="cluster", transactional_id="orders")
    [line] = log.records
    assert said in line.getMessage()


def test_the_users_own_timeout_is_not_warned_of(log):
    log_time_limit(Attempt(60_000), 60_000, DEFAULT_MS, servers="cluster", transactional_id="orders")
    assert not log.records
