"""A COMMIT in doubt: asked again until the deadline, whatever stands in the way."""

import pytest
from harness.databases import prepared

from dualwrite.clock import Deadline, running_on
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.process import DoubtStep
from dualwrite.protocol.values import StateRow
from dualwrite.recovery.claim import OwnerContext
from dualwrite.recovery.in_doubt import resolve_commit

OURS = prepared(1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds, /):
        self.now += seconds


class Store:
    """Answers after some errors; each question takes a second."""

    def __init__(self, clock, errors, row):
        self.clock, self.errors, self.row = clock, list(errors), row

    def read_locked(self, *_):
        self.clock.now += 1.0
        if self.errors:
            raise self.errors.pop(0)
        return self.row


def row_with(state):
    return StateRow(
        transactional_id="orders",
        prepared=state,
        namespace="n",
        incarnation=1,
        settled_incarnation=0,
        completed=None,
        cluster_id="c",
        owner="me",
        updated_at=None,
    )


IN_THE_WAY = [
    Unavailable("connection refused"),
    Unavailable("the database system is starting up"),
    ConfigurationError("the database is a standby"),
    Unavailable("server login has been failing, try again later"),
]


@pytest.mark.parametrize(("state", "step"), [(OURS, DoubtStep.COMMITTED), (prepared(1, 7), DoubtStep.ABORTED)])
def test_it_is_resolved_when_the_database_is_back(state, step):
    clock = Clock()
    with running_on(clock):
        store = Store(clock, IN_THE_WAY, row_with(state))
        assert resolve_commit(OwnerContext(None, store, "me"), "orders", OURS, None, Deadline(60)) is step
    assert not store.errors


@pytest.mark.parametrize("kind", [Unavailable, ConfigurationError])
def test_it_is_given_up_at_the_deadline_and_not_before(kind):
    clock = Clock()
    with running_on(clock):
        store = Store(clock, [kind("still away")] * 1000, row_with(OURS))
        with pytest.raises(kind, match="still away"):
            resolve_commit(OwnerContext(None, store, "me"), "orders", OURS, None, Deadline(60))
    assert 60 <= clock.now <= 62


def test_what_is_no_matter_of_time_is_raised_at_once():
    clock = Clock()
    with running_on(clock), pytest.raises(ZeroDivisionError):
        resolve_commit(
            OwnerContext(None, Store(clock, [ZeroDivisionError()], None), "me"), "orders", OURS, None, Deadline(60)
        )
    assert clock.now == 1
