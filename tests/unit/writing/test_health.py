"""Whether the servers answered last, and the probe that finds out that they answer again."""

import threading

import pytest

from dualwrite import CompletionPending, Fenced, TransactionAborted, TransactionInDoubt, Unavailable, failpoints
from dualwrite.errors import IllegalStateError
from dualwrite.writing.health import Vitals
from dualwrite.writing.lane_pool import Lanes

LANES = Lanes("orders", lambda _: None, max_lanes=8, timeout_s=1, lane_timeout_s=1, idle_after_s=1, kafka_at="b:9092")


def vitals_with(probe):
    vitals = Vitals("orders", probe)
    return vitals, lambda **given: vitals.health(LANES, **{"is_open": True, "unreported_losses": 0, **given})


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
    vitals, health = vitals_with(probed.set)
    error.__cause__ = cause
    vitals.note(error)
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
    vitals, health = vitals_with(lambda: None)
    vitals.note(kind("x", transactional_id=name))
    found = health(is_open=False)
    assert found.fenced is (ours and kind is Fenced)
    assert found.answered is not (ours and kind is Unavailable)


def test_a_dual_write_that_was_answered_makes_it_ready_again_and_no_probe_is_needed():
    vitals, health = vitals_with(no_probe)
    vitals.note(Unavailable("x"))
    vitals.note(None)
    assert health().ready


def test_the_question_starts_a_probe_whose_answer_a_later_question_sees():
    asked = threading.Event()
    vitals, health = vitals_with(asked.set)
    vitals.note(Unavailable("x"))
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

    vitals, health = vitals_with(probe)
    vitals.note(Unavailable("x"))
    for _ in range(5):
        assert not health().ready
    assert started.acquire(timeout=60)
    go_on.set()
    assert not health().ready
    assert len(count) == 1


def test_a_closed_writer_asks_nobody():
    vitals, health = vitals_with(no_probe)
    vitals.note(Unavailable("x"))
    assert not health(is_open=False).open


def test_a_fenced_writer_stays_so():
    vitals, health = vitals_with(no_probe)
    vitals.note(Fenced("x"))
    vitals.note(None)
    assert health().problems == ("another owner has taken over",)


def test_a_loss_that_only_the_log_has_makes_it_unready():
    _, health = vitals_with(no_probe)
    assert "reported: 1" in health(unreported_losses=1).problems[0]


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
