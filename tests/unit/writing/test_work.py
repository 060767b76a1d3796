"""Work that runs again: after which errors, how often, and what the log and the last error say of each attempt."""

import logging
import sqlite3
import threading
import time

import pytest
from sqlalchemy import create_engine, exc

from dualwrite import CompletionPending, ConfigurationError, Fenced, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.clock import running_on
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.process import DoubtStep
from dualwrite.recovery import in_doubt
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.writing.lane import Lane
from dualwrite.writing.lane_pool import Lanes


class Refused(Exception):
    """Raised by the work."""


class Work:
    """Writes a number to both sides, by default the same in each run; the first runs end with the given errors."""

    def __init__(self, shop, *errors, counts=False):
        self.shop = shop
        self.counts = counts
        self.errors = list(errors)
        self.runs = 0

    def __call__(self, tx):
        self.runs += 1
        self.shop.put(tx, self.runs if self.counts else 1)
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture
def writer(shop):
    with shop.writer() as writer:
        yield writer


@pytest.fixture(autouse=True)
def no_pauses():
    """Pauses pass at once; those of the test's own thread are kept."""

    class Clock:
        def __init__(self):
            self.pauses = []

        def monotonic(self):
            return time.monotonic()

        def sleep(self, seconds):
            if threading.current_thread() is threading.main_thread():
                self.pauses.append(seconds)
            time.sleep(min(seconds, 0.001))

    clock = Clock()
    with running_on(clock):
        yield clock.pauses


def test_work_that_fails_twice_is_written_once_and_its_result_returned(shop, writer, caplog):
    work = Work(shop, TransactionAborted("a conflict"), Unavailable("no answer"))
    with caplog.at_level(logging.INFO, "dualwrite.writing.work"):
        assert writer.run(work) == "done"
    assert work.runs == 3
    assert shop.both_have(1)
    said = [
        (one.levelname, one.dualwrite_attempt, one.dualwrite_outcome)
        for one in caplog.records
        if getattr(one, "dualwrite_event", None) == "attempt"
    ]
    assert said == [("INFO", 1, "aborted"), ("INFO", 2, "none"), ("INFO", 3, "committed")]


@pytest.mark.parametrize(
    "error",
    [
        Refused(),
        KeyboardInterrupt(),
        exc.IntegrityError("INSERT", {}, sqlite3.IntegrityError("UNIQUE constraint failed")),
        TransactionAborted("hopeless", retryable=False),
        Fenced("taken over"),
        IllegalStateError("wrong"),
        ConfigurationError("wrong"),
        CompletionPending("of another writer"),
        TransactionInDoubt("of another writer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_after_any_other_error_the_work_does_not_run_again(shop, writer, error):
    work = Work(shop, error)
    with pytest.raises(type(error)) as raised:
        writer.run(work)
    assert raised.value is error
    assert work.runs == 1
    assert shop.both_have()


def test_a_conflict_of_a_statement_is_run_again(shop, writer):
    locked = exc.OperationalError("UPDATE", {}, sqlite3.OperationalError("database is locked"))
    assert writer.run(Work(shop, locked)) == "done"
    assert shop.both_have(1)


def test_work_is_not_run_again_while_its_commit_is_in_doubt(shop, writer, monkeypatch):
    work = Work(shop, counts=True)

    def lose_the_answer(self, connection, **_):
        real(self, connection)
        raise TransactionInDoubt("the answer is missing") from OSError()

    real = SqlStateStore.commit
    monkeypatch.setattr(SqlStateStore, "commit", lose_the_answer)
    monkeypatch.setattr(in_doubt, "resolve_commit", lambda *_: DoubtStep.IN_DOUBT)
    with pytest.raises(TransactionInDoubt):
        writer.run(work)
    assert work.runs == 1, "it ran twice"
    assert shop.rows == ["1"]


def test_work_is_not_run_again_while_its_completion_is_pending(shop, writer, monkeypatch):
    work = Work(shop, counts=True)

    def pending(lane, *_):
        raise CompletionPending("no answer", transactional_id=lane.transactional_id)

    monkeypatch.setattr(Lane, "complete", pending)
    with pytest.raises(CompletionPending):
        writer.run(work)
    assert work.runs == 1, "it ran twice"
    assert shop.rows == ["1"]


def test_the_last_error_is_raised_with_the_earlier_ones_as_notes(shop, writer, caplog):
    errors = [TransactionAborted(f"conflict {number}") for number in range(3)]
    with caplog.at_level(logging.WARNING, "dualwrite.writing.work"), pytest.raises(TransactionAborted) as raised:
        writer.run(Work(shop, *errors), attempts=3)
    assert raised.value is errors[2]
    assert [note.partition(" (")[0] for note in raised.value.__notes__] == [
        "attempt 1 of 3: TransactionAborted: conflict 0",
        "attempt 2 of 3: TransactionAborted: conflict 1",
    ]
    assert "attempt 3 of 3: TransactionAborted: conflict 2" in caplog.text
    assert "it was the last attempt" in caplog.text
    assert shop.both_have()


def test_no_attempt_begins_after_the_deadline(shop, writer, caplog):
    work = Work(shop, *[TransactionAborted("a conflict")] * 3)
    with caplog.at_level(logging.WARNING, "dualwrite.writing.work"), pytest.raises(TransactionAborted):
        writer.run(work, within_s=0)
    assert work.runs == 1
    assert "later than 0 s" in caplog.text


def test_the_pauses_are_random_and_limited(shop, writer, no_pauses):
    no_pauses.clear()
    writer.run(Work(shop, *[TransactionAborted("a conflict")] * 7), attempts=8, longest_pause_s=0.3)
    assert len(no_pauses) == len(set(no_pauses)) == 7
    assert all(0 <= pause <= limit for pause, limit in zip(no_pauses, [0.1, 0.2, *[0.3] * 5], strict=True))


def test_a_writer_whose_lanes_are_all_in_use_is_tried_again(shop, writer, monkeypatch):
    real = Lanes.take
    busy = [Unavailable("all lanes were busy")]

    def take(self, ticket):
        if busy:
            raise busy.pop()
        return real(self, ticket)

    monkeypatch.setattr(Lanes, "take", take)
    work = Work(shop)
    assert writer.run(work) == "done"
    assert work.runs == 1


def test_a_connection_of_the_users_serves_every_attempt(shop, writer):
    own = create_engine(shop.database.url)
    with own.connect() as connection:
        seen = []

        def work(tx):
            seen.append(tx.connection)
            shop.put(tx, 1)
            if len(seen) == 1:
                raise TransactionAborted("a conflict")

        writer.run(work, connection=connection)
        assert seen == [connection, connection]
    own.dispose()
    assert shop.both_have(1)


def test_asynchronous_work_is_refused_and_nothing_commits(shop, writer):
    async def work(tx):
        shop.put(tx, 1)

    def yields(tx):
        yield shop.put(tx, 2)

    for wrong in (work, yields):
        with pytest.raises(IllegalStateError, match="none of it has run"):
            writer.run(wrong)
    assert shop.both_have()
    assert list(writer.run(lambda _: (number for number in (1, 2)))) == [1, 2]


def test_settings_that_cannot_work_are_refused(writer):
    with pytest.raises(ConfigurationError, match="attempts is 0"):
        writer.run(str, attempts=0)
