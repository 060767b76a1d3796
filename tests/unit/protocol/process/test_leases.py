"""Which number a newcomer takes, what a heartbeat says, and times that cannot work: as tables."""

from itertools import islice

import pytest

from dualwrite import ConfigurationError
from dualwrite.protocol.process.leases import Lease, LeaseTiming, check_fleet, heard, numbers_to_try
from dualwrite.protocol.tables.lease_life import LeaseEvent, LeaseState

FREE, HELD, EXPIRED = (None, None), ("a member", 12.5), ("a member", -0.001)


def lease(number, standing):
    return Lease(f"orders-{number}", "orders", number, *standing)


@pytest.mark.parametrize(
    ("standing", "state"),
    [
        (FREE, LeaseState.FREE),
        (HELD, LeaseState.HELD),
        (("a member", 0.001), LeaseState.HELD),
        (("a member", 0.0), LeaseState.EXPIRED),
        (EXPIRED, LeaseState.EXPIRED),
    ],
)
def test_a_lease_is_held_until_its_time_is_over(standing, state):
    assert lease(0, standing).state is state


@pytest.mark.parametrize(
    ("there", "first"),
    [
        ({}, [0, 1, 2]),
        ({0: HELD}, [1, 2, 3]),
        ({0: FREE, 1: HELD}, [0, 2, 3]),
        ({0: HELD, 1: EXPIRED, 2: FREE, 3: HELD}, [1, 2, 4]),
        ({0: EXPIRED, 1: EXPIRED}, [0, 1, 2]),
        ({1: HELD, 3: HELD}, [0, 2, 4]),  # rows that were deleted leave a gap, which is filled
    ],
)
def test_a_newcomer_tries_the_lowest_number_that_nobody_holds(there, first):
    leases = [lease(number, standing) for number, standing in reversed(there.items())]
    assert list(islice(numbers_to_try(leases), 3)) == first


@pytest.mark.parametrize(
    ("renewed", "event"),
    [({"orders-1"}, LeaseEvent.RENEW), ({"orders-1", "orders-2"}, LeaseEvent.RENEW), ((), LeaseEvent.LOSE)],
)
def test_a_heartbeat_that_renews_nothing_of_ours_says_that_the_lease_is_lost(renewed, event):
    assert heard("orders-1", renewed) is event


@pytest.mark.parametrize(
    ("timeout_s", "heartbeat_s", "beat_s"), [(30.0, None, 5.0), (30.0, 10.0, 10.0), (3.0, 0.1, 0.1)]
)
def test_a_heartbeat_comes_several_times_within_a_lease_and_is_jittered(timeout_s, heartbeat_s, beat_s):
    timing = LeaseTiming(timeout_s, heartbeat_s)
    assert timing.beat_s == beat_s
    assert [timing.pause_s(drawn) for drawn in (0, 0.5, 1)] == pytest.approx([0.75 * beat_s, beat_s, 1.25 * beat_s])
    assert timing.pause_s(1, failed=True) < timing.pause_s(0)
    assert 2 * timing.pause_s(1) < timeout_s, "one lost heartbeat must not end a lease"


@pytest.mark.parametrize(("since_s", "over"), [(0, False), (29.9, False), (30, True), (300, True)])
def test_a_lease_may_be_over_once_its_time_has_passed_since_the_last_renewal_was_asked_for(since_s, over):
    assert LeaseTiming(30.0).is_over(since_s) is over


@pytest.mark.parametrize(("timeout_s", "heartbeat_s"), [(0, None), (-1, None), (30, 0), (30, -1), (30, 10.1), (1, 30)])
def test_times_that_cannot_work_are_refused(timeout_s, heartbeat_s):
    with pytest.raises(ConfigurationError, match="give"):
        LeaseTiming(timeout_s, heartbeat_s)


@pytest.mark.parametrize("name", ["", "orders#1", "x" * 230])
def test_a_name_that_cannot_be_a_fleets_is_refused(name):
    with pytest.raises(ConfigurationError, match="'NAME-0'"):
        check_fleet(name)


def test_the_longest_name_leaves_room_for_the_number():
    check_fleet("x" * 229)
