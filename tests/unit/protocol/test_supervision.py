"""What a supervisor settles and what it leaves alone, as a table; and when it tries again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.protocol.members import LeaseState
from dualwrite.protocol.supervision import URGENT_S, Action, Reason, Rule, Seen, Tries, View, plan, why_not_by_hand

RULE = Rule(settle_after_s=60.0)
VIEW = View(now_s=1000.0, answering_s=3600.0)
DECIDED = Seen("orders", needs_recovery=True, decided=True, youngest_s=95.0, unchanged_s=95.0)
UNDECIDED = Seen("orders", needs_recovery=True, undecided=True, youngest_s=95.0, unchanged_s=200.0)
WAITING = Seen("orders", waiting=12, waiting_s=95.0, unchanged_s=95.0)
HELD = {"lease": LeaseState.HELD, "lease_left_s": 12.0}
EXPIRED = {"lease": LeaseState.EXPIRED, "lease_left_s": -12.0}


@pytest.mark.parametrize(
    ("seen", "reason", "words"),
    [
        (DECIDED, Reason.DECIDED, "has decided, Kafka has not followed, and its owner shows no sign of life"),
        (replace(DECIDED, **EXPIRED), Reason.DECIDED, "its lease has expired"),
        (
            replace(DECIDED, slot_held=True),
            Reason.DECIDED,
            "has decided",
        ),  # a dead driver's task may hold its slot for days
        (replace(DECIDED, time_left_s=60.0), Reason.RUNNING_OUT, "the broker aborts it in 60 s"),
        (replace(DECIDED, time_left_s=9.0, youngest_s=URGENT_S, unchanged_s=URGENT_S), Reason.RUNNING_OUT, "in 9 s"),
        (UNDECIDED, Reason.UNDECIDED, "left open, undecided"),
        (replace(UNDECIDED, youngest_s=60.0, unchanged_s=60.0), Reason.UNDECIDED, "left open"),
        (replace(UNDECIDED, lease=LeaseState.FREE), Reason.UNDECIDED, "no sign of life"),
        (WAITING, Reason.WAITING, "12 messages wait in the database"),
        (replace(DECIDED, waiting=12, waiting_s=95.0), Reason.DECIDED, "has decided"),
    ],
)
def test_what_a_dead_owner_left_is_settled(seen, reason, words):
    planned = plan(seen, VIEW, RULE)
    assert (planned.action, planned.reason) == (Action.SETTLE, reason)
    assert words in planned.because
    assert planned.patience_s == (URGENT_S if reason is Reason.RUNNING_OUT else 60.0)


@pytest.mark.parametrize(
    ("seen", "reason", "words"),
    [
        (Seen("orders"), Reason.NOTHING, "nothing to do"),
        (replace(DECIDED, claim_lost=True), Reason.WENT_BACK, "a person must compare both"),
        (replace(DECIDED, **HELD), Reason.LEASED, "its lease is held for 12 s more"),
        (replace(DECIDED, time_left_s=9.0, **HELD), Reason.LEASED, "its owner is alive"),
        (replace(UNDECIDED, **HELD), Reason.LEASED, "its owner is alive"),
        (replace(WAITING, **HELD), Reason.LEASED, "its owner is alive"),
        (replace(UNDECIDED, slot_held=True), Reason.SLOT, "still holds the slot"),
        (replace(DECIDED, undecided=True, slot_held=True), Reason.SLOT, "still holds the slot"),
        (replace(UNDECIDED, youngest_s=59.9), Reason.YOUNG, "began 60 s ago"),
        (replace(DECIDED, youngest_s=3.0), Reason.YOUNG, "began 3 s ago"),
        (replace(DECIDED, time_left_s=9.0, youngest_s=4.0), Reason.YOUNG, "began 4 s ago"),
        (
            replace(UNDECIDED, time_left_s=9.0, youngest_s=30.0),
            Reason.YOUNG,
            "30 s",
        ),  # the broker may abort what is undecided
        (replace(UNDECIDED, unchanged_s=2.0), Reason.CHANGED, "at work 2 s ago"),
        (replace(DECIDED, time_left_s=9.0, unchanged_s=4.0), Reason.CHANGED, "at work 4 s ago"),
        (replace(WAITING, waiting_s=8.0), Reason.YOUNG, "waited for 8 s"),
        (replace(WAITING, unchanged_s=8.0), Reason.CHANGED, "at work 8 s ago"),
    ],
)
def test_what_may_have_a_live_owner_is_left_alone(seen, reason, words):
    planned = plan(seen, VIEW, RULE)
    assert (planned.action, planned.reason) == (Action.LEAVE, reason)
    assert words in planned.because


@pytest.mark.parametrize("seen", [DECIDED, UNDECIDED, WAITING])
@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (replace(VIEW, answering_s=59.0), Reason.KAFKA_IS_BACK),
        (replace(VIEW, skew_s=31.0), Reason.CLOCK),
        (replace(VIEW, skew_s=-31.0), Reason.CLOCK),
    ],
)
def test_a_view_in_doubt_settles_nothing(seen, view, reason):
    assert plan(seen, view, RULE).reason is reason
    assert plan(seen, VIEW, RULE).action is Action.SETTLE


@pytest.mark.parametrize(
    ("seen", "view", "due_in_s"),
    [
        (replace(DECIDED, youngest_s=12.0, unchanged_s=20.0), VIEW, 48.0),
        (replace(DECIDED, youngest_s=20.0, unchanged_s=12.0), VIEW, 48.0),
        (replace(DECIDED, youngest_s=None, unchanged_s=59.5), VIEW, 0.5),
        (replace(DECIDED, youngest_s=12.0), replace(VIEW, answering_s=2.0), 58.0),
        (replace(DECIDED, time_left_s=9.0, youngest_s=3.0), VIEW, URGENT_S - 3.0),
        (replace(WAITING, waiting_s=40.0), VIEW, 20.0),
        (replace(DECIDED, waiting=1, waiting_s=1.0, youngest_s=50.0), VIEW, 10.0),
        (replace(DECIDED, **HELD), VIEW, 12.0),
        (replace(UNDECIDED, slot_held=True), VIEW, None),
        (replace(DECIDED, claim_lost=True), VIEW, None),
        (DECIDED, replace(VIEW, skew_s=31.0), None),
        (DECIDED, VIEW, None),
        (Seen("orders"), VIEW, None),
    ],
)
def test_it_is_known_when_a_silent_owner_is_taken_for_dead(seen, view, due_in_s):
    assert plan(seen, view, RULE).due_in_s == due_in_s
    if due_in_s is not None and seen.lease is None and seen.time_left_s is None:
        passed = {
            name: age + due_in_s
            for name in ("youngest_s", "unchanged_s", "waiting_s")
            if (age := getattr(seen, name)) is not None
        }
        later = replace(view, answering_s=view.answering_s + due_in_s)
        assert plan(replace(seen, **passed), later, RULE).action is Action.SETTLE


def test_what_runs_out_waits_only_a_little_for_kafka_to_be_back():
    urgent = replace(DECIDED, time_left_s=9.0)
    assert plan(urgent, replace(VIEW, answering_s=URGENT_S), RULE).action is Action.SETTLE
    assert plan(urgent, replace(VIEW, answering_s=4.0), RULE).reason is Reason.KAFKA_IS_BACK


def test_sending_can_be_switched_off():
    off = Rule(sends_waiting=False)
    assert plan(WAITING, VIEW, off).reason is Reason.NOTHING
    assert "12 messages wait, and sending them is switched off" in plan(WAITING, VIEW, off).because
    assert plan(replace(DECIDED, waiting=12), VIEW, off).reason is Reason.DECIDED


def test_a_failed_attempt_is_repeated_after_a_pause_that_grows():
    tries, pauses = Tries(), []
    for _ in range(9):
        tries = tries.failed(VIEW.now_s, "Kafka does not answer")
        pauses.append(tries.next_s - VIEW.now_s)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    planned = plan(DECIDED, replace(VIEW, now_s=tries.next_s - 120), RULE, tries)
    assert planned.reason is Reason.FAILED
    assert planned.because == "attempt 9 failed (Kafka does not answer); the next one is in 120 s"
    assert planned.due_in_s == 120.0
    assert plan(DECIDED, replace(VIEW, now_s=tries.next_s), RULE, tries).action is Action.SETTLE
    again = tries.succeeded(VIEW.now_s)
    assert (again.failures, again.error, again.last_s) == (0, None, VIEW.now_s)
    assert plan(DECIDED, VIEW, RULE, again).action is Action.SETTLE


TIMES = st.one_of(st.none(), st.floats(0, 1000))


@given(
    st.builds(
        Seen,
        st.just("orders"),
        *[st.booleans()] * 3,
        TIMES,
        TIMES,
        st.floats(0, 1000),
        st.sampled_from([None, *LeaseState]),
        st.floats(-100, 100),
        st.booleans(),
        st.booleans(),
        st.integers(0, 3),
        TIMES,
    ),
    st.floats(0.5, 300),
)
def test_whatever_is_seen_no_sign_of_life_is_overlooked(seen, settle_after_s):
    planned = plan(seen, VIEW, Rule(settle_after_s))
    if planned.action is Action.SETTLE:
        assert seen.lease is not LeaseState.HELD
        assert not seen.claim_lost
        assert seen.needs_recovery or seen.waiting
        assert not (seen.slot_held and seen.undecided)
        assert seen.unchanged_s >= min(URGENT_S, settle_after_s)
        assert seen.youngest_s is None or seen.youngest_s >= min(URGENT_S, settle_after_s)
        if planned.reason is not Reason.RUNNING_OUT:
            assert seen.unchanged_s >= settle_after_s
        assert planned.patience_s > 0, "0 would let the recovery itself overlook them"


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Seen("orders"), Reason.NOTHING),
        (replace(DECIDED, claim_lost=True), Reason.WENT_BACK),
        (replace(DECIDED, **HELD), Reason.LEASED),
        (replace(UNDECIDED, slot_held=True), Reason.SLOT),
        (replace(UNDECIDED, youngest_s=59.9), Reason.YOUNG),
        (replace(DECIDED, time_left_s=9.0, youngest_s=30.0), Reason.YOUNG),
        (replace(DECIDED, unchanged_s=59.9), Reason.CHANGED),
        (replace(WAITING, waiting_s=3.0), Reason.YOUNG),
    ],
)
def test_a_person_settles_nothing_past_a_sign_of_life(seen, reason):
    why_not = why_not_by_hand(seen, RULE)
    assert why_not is not None
    assert why_not[0] is reason


def test_a_person_need_not_wait_for_a_pause_and_may_send_what_the_service_does_not():
    assert why_not_by_hand(DECIDED, RULE) is None
    assert why_not_by_hand(WAITING, replace(RULE, sends_waiting=False)) is None
