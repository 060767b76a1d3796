"""Which lane a block gets, and when housekeeping takes one. On lanes that do nothing."""

import threading
from contextlib import ExitStack

import pytest
from harness.patience import wait_until

from dualwrite.clock import now_s
from dualwrite.errors import IllegalStateError, Unavailable
from dualwrite.kafka.transaction_ends import PendingEnd
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Ended
from dualwrite.writing import lane_pool
from dualwrite.writing.lane_pool import Lanes


class FakeLane:
    def __init__(self, number):
        self.transactional_id = f"orders#{number}"
        self.needs_settling = False
        self.unrecorded = None
        self.pending_end = None
        self.asking_since = None
        self.asked = threading.Event()
        self.settling, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.recorded = threading.Event()
        self.settled_within_s = []
        self.unanswered = 0

    def ready(self, _deadline):
        pass

    def settle(self, deadline):
        self.settled_within_s.append(deadline.remaining_s())
        self.settling.set()
        if len(self.settled_within_s) <= self.unanswered:
            raise Unavailable("no answer")
        assert self.may_go_on.wait(60)
        self.needs_settling = False

    def record_completed(self):
        self.unrecorded = None
        self.recorded.set()

    def compare_with_row(self):
        pass

    def come_to_rest(self):
        return self.pending_end

    def know_end(self, _deadline):
        self.pending_end = None
        self.asked.set()

    def prove_end(self, _deadline):
        pass

    def discard(self):
        pass


@pytest.fixture
def make():
    with ExitStack() as closed_later:

        def make(count, *, max_lanes=None, timeout_s=0.05, lane_timeout_s=60.0, idle_after_s=3600.0):
            lanes = Lanes(
                "orders",
                FakeLane,
                max_lanes=max_lanes or count,
                timeout_s=timeout_s,
                lane_timeout_s=lane_timeout_s,
                idle_after_s=idle_after_s,
                kafka_at="broker-1:9092",
            )
            lanes.open(map(FakeLane, range(count)))
            closed_later.callback(lanes.close)
            return lanes

        yield make


def queued(lanes):
    ticket = lanes.ticket()
    lanes._queue.queue_up(ticket)
    return ticket


def lane_of(ticket):
    return None if ticket.place is None else ticket.place.thing.lane


def test_blocks_get_their_lanes_in_the_order_in_which_they_came(make):
    lanes = make(2)
    users = [queued(lanes), queued(lanes)]
    waiting = [queued(lanes) for _ in range(5)]
    for position, user in enumerate([*users, *waiting[:3]]):
        freed = lane_of(user)
        user.end()
        assert lane_of(waiting[position]) is freed
        assert all(lane_of(ticket) is None for ticket in waiting[position + 1 :])


def test_lanes_are_added_up_to_the_most(make):
    lanes = make(1, max_lanes=3)
    tickets = [queued(lanes) for _ in range(4)]
    assert [lane_of(ticket) and lane_of(ticket).transactional_id for ticket in tickets] == [
        "orders#0",
        "orders#1",
        "orders#2",
        None,
    ]


def test_a_lane_that_needs_settling_is_settled_in_the_background_and_does_not_stand_in_front_of_those_that_work(make):
    lanes = make(2)
    users = [queued(lanes), queued(lanes)]
    waiting = [queued(lanes), queued(lanes)]
    bad, good = lane_of(users[0]), lane_of(users[1])
    bad.needs_settling = True
    bad.may_go_on.clear()
    users[0].end()
    assert bad.settling.wait(60), "the background has not taken it"
    assert [lane_of(ticket) for ticket in waiting] == [None, None]
    users[1].end()
    assert [lane_of(ticket) for ticket in waiting] == [good, None]
    bad.may_go_on.set()
    wait_until(lambda: waiting[1].answered)
    assert lane_of(waiting[1]) is bad


def test_a_new_lane_is_made_before_one_that_needs_settling_is_used(make):
    lanes = make(1, max_lanes=2)
    user, bad = queued(lanes), lanes.first
    bad.may_go_on.clear()
    bad.needs_settling = True
    user.end()
    assert lane_of(queued(lanes)) is not bad
    bad.may_go_on.set()


class Ends:
    """Counts the answers that were taken in."""

    wanted = True

    def __init__(self):
        self.looks = 0

    def take_answer(self):
        self.looks += 1


def ending(lanes):
    """Use a lane whose transaction is still ending afterwards."""
    ticket = queued(lanes)
    lane = lane_of(ticket)
    lane.pending_end = pending = PendingEnd(Ended(PreparedTxnState(), committed=True))
    ticket.end()
    return lane, pending


def test_a_lane_whose_last_transaction_is_still_ending_is_given_out_after_those_that_have_ended(make):
    lanes = make(3, max_lanes=2)
    first, _ = ending(lanes)
    second, _ = ending(lanes)
    users = [queued(lanes), queued(lanes)]
    assert lane_of(users[0]) not in {first, second}
    assert lane_of(users[1]) is first


def use_at_once(lanes, count):
    """Use so many lanes, whose transactions are still ending afterwards, and wait until the background has made what it makes."""
    users = [queued(lanes) for _ in range(count)]
    for user in users:
        lane_of(user).pending_end = PendingEnd(Ended(PreparedTxnState(), committed=True))
        user.end()
    wait_until(lambda: not any(pooled.coming for pooled in lanes.all))


def test_where_lanes_are_still_ending_others_are_made_until_there_are_two_for_each_block(make):
    lanes = make(2, max_lanes=3)
    for blocks, most in ((1, 2), (2, 4), (3, 5)):
        for _ in range(4):
            use_at_once(lanes, blocks)
        assert len(lanes) == most


def test_a_block_waits_for_a_lane_whose_transaction_is_ending_and_not_for_one_that_is_being_made(make, monkeypatch):
    making, may_go_on = threading.Event(), threading.Event()

    def ready(*_):
        making.set()
        assert may_go_on.wait(60)

    monkeypatch.setattr(FakeLane, "ready", ready)
    lanes = make(1, max_lanes=2)
    first, _ = ending(lanes)
    for _ in range(2):
        user = queued(lanes)
        assert lane_of(user) is first
        assert making.wait(60)
        user.end()
    may_go_on.set()
    wait_until(lambda: not lanes.all[1].coming)
    wait_until(lambda: lanes.all[1].lane is lane_of(queued(lanes)))


def test_a_lane_that_is_being_made_takes_the_place_of_no_block(make, monkeypatch):
    making, may_go_on = threading.Event(), threading.Event()
    within_s = []

    def ready(_, deadline):
        within_s.append(deadline.remaining_s())
        making.set()
        assert may_go_on.wait(60)

    monkeypatch.setattr(FakeLane, "ready", ready)
    lanes = make(4, max_lanes=3, timeout_s=30.0)
    users = [queued(lanes) for _ in range(3)]
    for pooled in lanes.all:
        pooled.lane.pending_end = pooled.pending = PendingEnd(Ended(PreparedTxnState(), committed=True))
    for user in users:
        user.end()
    users = [queued(lanes) for _ in range(3)]
    assert making.wait(60)
    users[0].end()
    assert lane_of(queued(lanes)) is not None
    assert within_s[0] <= 1.0
    may_go_on.set()


def test_a_lane_that_cannot_be_made_yet_is_kept_from_blocks_and_tried_again(make, monkeypatch):
    failures = [Unavailable("no answer")]

    def ready(*_):
        if failures:
            raise failures.pop()

    monkeypatch.setattr(FakeLane, "ready", ready)
    lanes = make(1, max_lanes=2)
    first, _ = ending(lanes)
    queued(lanes).end()
    wait_until(lambda: not failures and lanes._queue.places[1].user is None)
    user = queued(lanes)
    assert lane_of(user) is first
    user.end()
    wait_until(lambda: not lanes.all[1].coming)


def test_no_more_blocks_run_at_a_time_than_may_however_many_lanes_are_at_rest(make):
    lanes = make(5, max_lanes=3)
    users, waiting = [queued(lanes) for _ in range(3)], queued(lanes)
    assert all(lane_of(user) for user in users)
    assert lane_of(waiting) is None
    users[0].end()
    assert lane_of(waiting) is not None


def test_a_writer_for_one_block_at_a_time_has_one_lane(make):
    lanes = make(1)
    lane, _ = ending(lanes)
    user = queued(lanes)
    assert lane_of(user) is lane


def test_a_lane_is_given_out_again_as_soon_as_an_answer_has_shown_its_end(make):
    lanes = make(3, max_lanes=2)
    first, _ = ending(lanes)
    second, pending = ending(lanes)
    ending(lanes)
    pending.known = True
    users = [queued(lanes), queued(lanes)]
    assert [lane_of(user) for user in users] == [second, first]


def test_it_is_time_to_ask_once_no_lane_with_a_known_end_is_left(make):
    lanes = make(3)
    lanes.ends = Ends()
    wanted, users = [], [lanes.ticket() for _ in range(3)]
    for user in users:
        lanes.take(user)
        wanted.append(lanes.ends.wanted)
    assert wanted == [False, False, True]
    assert lanes.ends.looks == 3


def test_an_end_that_nobody_has_asked_for_is_asked_for_in_the_background(make, monkeypatch):
    monkeypatch.setattr(lane_pool, "_END_AFTER_S", 0.01)
    lanes = make(2)
    lane, _ = ending(lanes)
    assert lane.asked.wait(60)
    assert not lane.recorded.is_set(), "it is not idle yet"


def test_what_is_worth_a_warning_is_looked_for_seldom(make, monkeypatch):
    monkeypatch.setattr(lane_pool, "_END_AFTER_S", 0.01)
    looks = []
    monkeypatch.setattr(
        Lanes, "watch", property(lambda _: lambda: looks.append(1) is None, lambda *_: None), raising=False
    )
    lanes = make(2)
    for _ in range(5):
        lane, _ = ending(lanes)
        assert lane.asked.wait(60)
        lane.asked.clear()
    assert len(looks) == 1


def test_where_no_lane_works_a_block_gets_one_that_needs_settling_and_is_told_what_becomes_of_it(make):
    lanes = make(1)
    user, waiting = queued(lanes), queued(lanes)
    lane_of(user).needs_settling = True
    user.end()
    assert lane_of(waiting) is lanes.first


@pytest.mark.parametrize(("outbox", "within_s"), [(False, [10.0, 10.0, 10.0]), (True, [2.0, 4.0, 8.0])])
def test_a_lane_that_could_take_messages_that_wait_is_kept_in_the_background_for_seconds_alone(
    make, monkeypatch, outbox, within_s
):
    monkeypatch.setattr(lane_pool, "_FIRST_BACKOFF_S", 0.01)
    lanes = make(1, timeout_s=30.0)
    lanes.refuses_in_silence = not outbox
    user, lane = queued(lanes), lanes.first
    lane.needs_settling, lane.unanswered = True, 2
    user.end()
    wait_until(lambda: not lane.needs_settling)
    assert lane.settled_within_s == pytest.approx(within_s, abs=0.5)


def test_a_lane_that_has_failed_for_days_is_still_tried():
    pooled = lane_pool.PooledLane(FakeLane(0))
    pooled.needs_settling, pooled.failures = True, 100_000
    assert pooled.due_at(0.0, 60.0) == 30.0


def test_an_idle_lane_is_recorded_and_then_goes_to_whoever_waits(make):
    lanes = make(1, idle_after_s=0.01)
    user = queued(lanes)
    lanes.first.unrecorded = object()
    user.end()
    assert lanes.first.recorded.wait(60)
    ticket = lanes.ticket()
    assert lanes.take(ticket) is lanes.first
    ticket.end()


def test_housekeeping_is_woken_for_what_is_due_before_its_next_look_alone(make, monkeypatch):
    lanes = make(2)
    users = [queued(lanes), queued(lanes)]
    for user in users:
        lane_of(user).unrecorded = object()
    users[0].end()
    wait_until(lambda: lanes._due_at is not None)
    woken = []
    monkeypatch.setattr(lanes, "look_again", lambda: woken.append(1))
    users[1].end()
    assert not woken
    last = queued(lanes)
    lane_of(last).needs_settling = True
    last.end()
    assert woken


def test_whoever_waits_too_long_is_told_and_keeps_nobody_waiting(make):
    lanes = make(1, lane_timeout_s=0.01)
    user, late = queued(lanes), lanes.ticket()
    with pytest.raises(Unavailable, match=r"all 1 lanes were busy for 0\.01 s"):
        lanes.take(late)
    late.end()
    patient = queued(lanes)
    user.end()
    assert lane_of(patient) is lanes.first


def test_a_caller_that_waits_too_long_for_lanes_that_kafka_does_not_answer_is_told_so(make):
    lanes = make(3, lane_timeout_s=0.01)
    users, late = [queued(lanes) for _ in range(3)], lanes.ticket()
    asked_at = now_s()
    lane_of(users[0]).asking_since = asked_at - 61
    lane_of(users[1]).asking_since = asked_at - 7
    lane_of(users[2]).asking_since = asked_at - 3
    with pytest.raises(
        Unavailable, match=r"Kafka at broker-1:9092 has not answered 3 of them since \d\d:\d\d:\d\d UTC \(6\d s\)"
    ) as told:
        lanes.take(late)
    assert "max_lanes" not in str(told.value)
    assert "check these brokers" in str(told.value)
    for ticket in (*users, late):
        ticket.end()


def test_a_caller_that_waits_for_lanes_of_slow_callers_too_is_told_of_both(make):
    lanes = make(3, lane_timeout_s=0.01)
    users, late = [queued(lanes) for _ in range(3)], lanes.ticket()
    asked_at = now_s()
    lane_of(users[0]).asking_since = asked_at - 61
    lane_of(users[1]).asking_since = asked_at + 60  # it has only just asked
    with pytest.raises(Unavailable, match="has not answered 1 of them") as told:
        lanes.take(late)
    assert "check these brokers" in str(told.value)
    assert "for the other lanes, raise max_lanes" in str(told.value)
    for ticket in (*users, late):
        ticket.end()


def test_whoever_waits_is_refused_when_the_writer_closes(make):
    lanes = make(1)
    user, waiting = queued(lanes), queued(lanes)
    lanes.close()
    assert waiting.answered
    with pytest.raises(IllegalStateError, match="closed"):
        lanes.take(lanes.ticket())
    user.end()


def test_a_lane_that_cannot_be_settled_leaves_the_others_time_when_the_writer_closes(make):
    lanes = make(3, timeout_s=30.0)
    closing = [pooled.lane for pooled in lanes.all]
    for lane in closing:
        lane.needs_settling = True
        lane.unanswered = 1
    lanes.close()
    within_s = [lane.settled_within_s[-1] for lane in closing]
    assert within_s[0] < 2
    assert within_s[2] > 4  # what the others have left over
