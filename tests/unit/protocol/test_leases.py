"""Which number a newcomer takes, what a heartbeat says, and times that cannot work: as tables."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite import ConfigurationError
from dualwrite.protocol.members import (
    Lease,
    LeaseEvent,
    LeaseState,
    LeaseTiming,
    Place,
    check_fleet,
    heard,
    holder_has_died,
    numbers_to_try,
    place_of,
)

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
    assert list(islice(numbers_to_try(leases, lambda _: False), 3)) == first


def test_a_newcomer_tries_the_number_of_a_holder_that_has_died():
    leases = [lease(number, standing) for number, standing in enumerate((HELD, HELD, FREE, EXPIRED))]
    assert list(islice(numbers_to_try(leases, lambda found: found.number == 1), 3)) == [1, 2, 3]


SYSTEMS = st.sampled_from(["boot/1", "boot/2", "boot/12", "reboot/1"])
PLACES = st.builds(Place, SYSTEMS, st.integers(1, 4))
NAMES = st.text(max_size=20) | st.sampled_from(["x on boot/1/1", " on boot/1/", "on", "a on b"])
OWNERS = st.none() | NAMES | st.builds(lambda name, place: place.sign(name), NAMES, PLACES)


@given(NAMES, PLACES)
def test_an_owner_says_where_it_runs_whatever_its_name_is(name, place):
    assert place_of(place.sign(name)) == place
    assert place.sign(name).startswith(name)


@given(st.text(alphabet="a1/ on²") | st.text())
def test_what_does_not_end_in_a_place_names_none(text):
    place = place_of(text)
    assert place is None or text.endswith(place.sign(""))


@pytest.mark.parametrize("pid", ["", "0", "01", "-1", "12345678", "9" * 5000, "1 ", "1\n", "²"])
def test_what_is_no_process_id_names_no_place(pid):
    assert place_of(f"member on boot/1/{pid}") is None


@given(OWNERS, st.none() | st.floats(-10, 10), st.none() | PLACES, st.sets(st.integers(1, 4)))
def test_a_holder_has_died_only_if_its_process_has_ended_in_our_own_system(owner, left_s, here, ended):
    found = Lease("orders-0", "orders", 0, owner, left_s)
    if not holder_has_died(found, here, ended.__contains__):
        return
    place = place_of(found.owner)
    assert found.state is LeaseState.HELD
    assert (place.system, place.pid in ended) == (here.system, True)


@given(NAMES, PLACES, st.integers(1, 4), st.sets(st.integers(1, 4)))
def test_a_holder_beside_us_has_died_as_soon_as_its_process_has_ended(name, place, our_pid, ended):
    found = Lease("orders-0", "orders", 0, place.sign(name), 3600.0)
    assert holder_has_died(found, Place(place.system, our_pid), ended.__contains__) is (place.pid in ended)


@given(PLACES, PLACES)
def test_the_mark_of_a_system_is_in_the_owners_of_its_processes_alone(one, other):
    assert (one.mark in other.sign("member")) is (one.system == other.system)


def test_a_heartbeat_that_renews_nothing_of_ours_says_that_the_lease_is_lost():
    assert (heard(renewed=True), heard(renewed=False)) == (LeaseEvent.RENEW, LeaseEvent.LOSE)


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
