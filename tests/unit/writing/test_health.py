"""Whether the servers answered last, and the probe that finds out that they answer again."""

import queue
import threading

import pytest

from dualwrite import CompletionPending, Fenced, TransactionAborted, TransactionInDoubt, Unavailable, failpoints
from dualwrite.clock import now_s
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.outbox import OutboxState
from dualwrite.writing.health import HealthMonitor
from dualwrite.writing.lane_pool import Lanes

LANES = Lanes("orders", lambda _: None, max_lanes=8, timeout_s=1, lane_timeout_s=1, idle_after_s=1, kafka_at="b:9092")


def vitals_with(probe):
    monitor = HealthMonitor("orders", probe)
    return monitor, lambda **given: monitor.health(LANES, **{"is_open": True, "unreported_losses": 0, **given})


def no_probe():
    raise AssertionError("nobody asked for it")


@pytest.mark.parametrize(
    ("error", "cause", "answered"),
    [
        (Unavailable("x"), None, False),
        (TransactionInDoubt("x"), None, False),
        (CompletionPending("x"), None, False),
        (TransactionAborted("x"), Unavailable("y"), False),
        (TransactionAborted("x"), None, True),
        (TransactionAborted("x"), ValueError("y"), True),
        (IllegalStateError("x"), None, True),
    ],
)
def test_only_a_missing_answer_makes_it_unready(error, cause, answered):
    probed = threading.Event()
    monitor, health = vitals_with(probed.set)
    error.__cause__ = cause
    monitor.note(error)
    assert health().answered is answered
    assert health(is_open=False).answered is answered or probed.wait(60)


@pytest.mark.parametrize("kind", [Fenced, Unavailable])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        (None, True),
        ("orders", True),
        ("orders#3", True),
        ("orders.0123456789ab.7", True),
        ("orders#3.0123456789ab.7", True),
        ("invoices", False),
        ("invoices#3.0123456789ab.7", False),
    ],
)
def test_an_error_of_another_writer_says_nothing_about_this_one(kind, name, ours):
    monitor, health = vitals_with(lambda: None)
    monitor.note(kind("x", transactional_id=name))
    found = health(is_open=False)
    assert found.fenced is (ours and kind is Fenced)
    assert found.answered is not (ours and kind is Unavailable)


def test_a_dual_write_that_was_answered_makes_it_ready_again_and_no_probe_is_needed():
    monitor, health = vitals_with(no_probe)
    monitor.note(Unavailable("x"))
    monitor.note(None)
    assert health().ready


def test_the_question_starts_a_probe_whose_answer_a_later_question_sees():
    asked = threading.Event()
    monitor, health = vitals_with(asked.set)
    monitor.note(Unavailable("x"))
    assert not health().ready  # at once
    assert asked.wait(60)
    while not health().ready:
        threading.Event().wait(0.001)


def test_one_probe_runs_at_a_time_and_one_that_fails_leaves_it_unready():
    started, go_on, count = threading.Semaphore(0), threading.Event(), []

    def probe():
        count.append(1)
        started.release()
        go_on.wait(60)
        raise Unavailable("still not")

    monitor, health = vitals_with(probe)
    monitor.note(Unavailable("x"))
    for _ in range(5):
        assert not health().ready
    assert started.acquire(timeout=60)
    go_on.set()
    assert not health().ready
    assert len(count) == 1


def test_a_closed_writer_asks_nobody():
    monitor, health = vitals_with(no_probe)
    monitor.note(Unavailable("x"))
    assert not health(is_open=False).open


def test_a_fenced_writer_stays_so():
    monitor, health = vitals_with(no_probe)
    monitor.note(Fenced("x"))
    monitor.note(None)
    assert health().problems == ("another owner has taken over",)


def test_a_loss_that_only_the_log_has_makes_it_unready():
    _, health = vitals_with(no_probe)
    assert "reported: 1" in health(unreported_losses=1).problems[0]


WAITING = OutboxState(later=True, rows=7)


@pytest.mark.parametrize("outbox", [WAITING, WAITING.with_stop("it is too large")])
def test_a_writer_whose_messages_wait_is_degraded_and_ready_until_no_more_may_wait(outbox):
    _, health = vitals_with(no_probe)
    found = health(setting="fallback", outbox=outbox)
    assert found.degraded
    assert found.ready
    assert health(setting="fallback", outbox=outbox, full="outbox_rows=7").problems == (
        "no more messages may wait: outbox_rows=7",
    )


def test_while_messages_wait_the_database_alone_is_asked_and_its_silence_is_no_readiness():
    answers, asked = threading.Event(), threading.Semaphore(0)

    def ask():
        asked.release()
        if not answers.is_set():
            raise Unavailable("no answer")

    monitor = HealthMonitor("orders", no_probe, ask_database=ask)
    monitor.note(Unavailable("Kafka's, for all that is known"))

    def problems():
        return monitor.health(LANES, is_open=True, unreported_losses=0, setting="fallback", outbox=WAITING).problems

    assert problems() == ()
    assert asked.acquire(timeout=60)
    while not problems():
        threading.Event().wait(0.001)
    assert problems() == ("the database did not answer last",)
    answers.set()
    while problems():
        threading.Event().wait(0.01)


def test_a_writers_probe_asks_both_servers(shop, monkeypatch):
    with shop.writer() as writer:
        with monkeypatch.context() as patched:
            patched.setattr("dualwrite.stores.sql.store.SqlStateStore.begin", raising)
            with pytest.raises(Unavailable), writer.transaction():
                raise AssertionError("the block is not entered")
        assert not writer.ready
        while not writer.ready:
            threading.Event().wait(0.001)
        asked = []
        for part, name in (
            (writer._opened().context.store, "read"),
            (writer._opened().context.coordinator, "describe"),
        ):
            monkeypatch.setattr(part, name, lambda *_, name=name: asked.append(name) or [])
        writer._opened().probe()
        assert asked == ["read", "describe"]
    assert writer.health().problems == ("the writer is not open",)


def test_a_writer_is_ready_from_the_end_of_its_opening_to_its_close(shop):
    writer = shop.writer()
    shown = [writer.ready]
    with failpoints.watched(lambda _: shown.append(writer.ready)):
        writer.open()
    assert len(shown) > 5
    assert not any(shown)
    assert writer.ready
    writer.close()
    assert not writer.ready


def raising(*_):
    raise Unavailable("the database is away")


# Silence, on a clock of the test's own: the thread that watches is not started, and each look is called.


class AskingLane:
    """A lane whose dual write asks Kafka."""

    needs_settling, time_left_s, unsettled_s, heard_s, refused = False, None, 0.0, 0.0, None
    sends_to = frozenset({("orders", 0)})

    def __init__(self, number):
        self.transactional_id = f"orders#{number}"
        self.asking_since = self.question = None

    def ask(self):
        self.asking_since = now_s()
        self.question = self.asking_since, "a flush"

    def come_to_rest(self):
        return None

    unrecorded = None


class Watched:
    """HealthMonitor with one lane in use, and the probes of Kafka that they have started."""

    def __init__(self, monkeypatch, *, answers=None, knock=None):
        self.turned, self.probes = [], queue.SimpleQueue()
        self.answers = answers or threading.Event()
        self.lanes = Lanes(
            "orders", AskingLane, max_lanes=2, timeout_s=1, lane_timeout_s=60, idle_after_s=60, kafka_at="b:9092"
        )
        self.lanes.open([AskingLane(0), AskingLane(1)], keep_house=False)
        self.monitor = HealthMonitor(
            "orders", no_probe, kafka_at="b:9092", ask_kafka=self._ask, knock=knock, turned=self._turned
        )
        self.monitor._lanes = self.lanes
        self.ticket = self.lanes.ticket()
        self.lane = self.lanes.take(self.ticket)
        self._ahead = 0.0
        monkeypatch.setattr("dualwrite.writing.health.now_s", lambda: now_s() + self._ahead)

    def _ask(self, partitions):
        self.probes.put(partitions)
        if not self.answers.is_set():
            raise Unavailable("no answer")

    def _turned(self, silence):
        self.turned.append(silence)
        self.lanes.note_silence(silence)

    def look_after(self, seconds):
        self._ahead += seconds
        return self.monitor._look()

    def fall_silent(self):
        self.lane.ask()
        self.look_after(1.1)
        self.look_after(1.1)
        assert self.monitor.silence is not None


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


def health_of(watched, **given):
    return watched.monitor.health(watched.lanes, is_open=True, unreported_losses=0, **given)


def test_a_dual_write_that_waits_while_nobody_answers_shows_that_kafka_is_silent(watched, caplog):
    watched.lane.ask()
    assert watched.look_after(0.1)
    assert watched.probes.empty()
    watched.look_after(1.0)
    assert watched.probes.get(timeout=60) == {("orders", 0)}
    assert watched.monitor.silence is None
    watched.look_after(1.0)
    silence = watched.monitor.silence
    assert (silence.address, silence.asked) == ("b:9092", "a flush")
    assert silence.since_s == watched.lane.asking_since
    assert watched.turned == [silence]
    assert health_of(watched).problems == (str(silence),)
    assert caplog.messages == [f"orders: {silence}: dual writes are refused until it answers"]


def test_brokers_that_refuse_connections_show_it_within_half_a_second(monkeypatch, caplog):
    knocked = queue.SimpleQueue()
    watched = Watched(monkeypatch, knock=lambda: knocked.put(None) or True)

    def look_and_hear():
        watched.look_after(0.2)
        knocked.get(timeout=60)
        while watched.monitor._knocks:
            threading.Event().wait(0.001)

    watched.lane.ask()
    look_and_hear()
    look_and_hear()
    assert watched.monitor.silence is None
    watched.look_after(0.1)
    assert watched.monitor.silence is not None
    assert watched.probes.empty()
    assert "messages wait in the database until it answers" in caplog.text


def test_a_knock_that_fails_shows_nothing(monkeypatch):
    watched = Watched(monkeypatch, knock=lambda: 1 // 0)
    watched.lane.ask()
    for _ in range(4):
        watched.look_after(0.2)
        while watched.monitor._knocks:
            threading.Event().wait(0.001)
    assert watched.monitor.silence is None


def test_a_probe_that_is_answered_ends_the_silence(watched):
    watched.fall_silent()
    watched.answers.set()
    watched.look_after(1.1)
    while watched.monitor._probe_heard_s == 0.0:
        threading.Event().wait(0.001)
    watched.look_after(0.0)
    assert watched.monitor.silence is None
    assert watched.turned[-1] is None


def test_kafka_that_answers_the_background_is_not_silent_however_long_one_dual_write_waits(watched):
    watched.answers.set()
    watched.lane.ask()
    watched.look_after(1.1)
    while watched.monitor._probe_heard_s == 0.0:
        threading.Event().wait(0.001)
    watched.look_after(30.0)
    assert watched.monitor.silence is None
    assert not health_of(watched).ready  # the dual write waits all the same


def test_one_other_dual_write_that_was_answered_shows_that_kafka_is_not_silent(watched):
    watched.lane.ask()
    watched.look_after(1.1)
    watched.monitor.note(None, heard_s=watched.lane.asking_since + 1.0)
    watched.look_after(1.1)
    assert watched.monitor.silence is None
    assert health_of(watched).ready


def test_a_dual_write_of_rows_alone_shows_nothing_about_kafka(watched):
    watched.fall_silent()
    watched.monitor.note(None)
    watched.look_after(0.1)
    assert watched.monitor.silence is not None


def test_those_that_wait_for_a_lane_are_refused_when_kafka_falls_silent_and_nobody_waits_afterwards(watched):
    others = [watched.lanes.ticket() for _ in range(2)]
    watched.lanes.take(others[0])
    watched.lanes._queue.queue_up(others[1])
    assert not others[1].answered
    watched.fall_silent()
    assert others[1].answered
    assert others[1].place is None
    assert others[0].place is not None  # it has its lane


def test_a_degraded_writer_is_ready_although_kafka_is_silent(watched):
    watched.fall_silent()
    found = health_of(watched, setting="fallback")
    assert found.ready
    assert found.silence is not None


def test_it_need_not_look_again_once_no_lane_is_in_use_and_nothing_is_asked(watched):
    assert watched.look_after(0.1)
    watched.ticket.end()
    assert not watched.look_after(0.1)
