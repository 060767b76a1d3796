"""Group commit: many callers' units in one dual write, what ends a group, and what each caller is told."""

import threading
from concurrent.futures import CancelledError, Future, wait

import pytest
from harness.patience import wait_until
from harness.served import TOPIC
from sqlalchemy import text

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    ProducerRecord,
    RowUnit,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
    failpoints,
)
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.values import LONGEST_S
from dualwrite.stores.sql import dialect
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.writing import group_commit
from dualwrite.writing import writer as writer_module
from dualwrite.writing.group_commit import Task
from dualwrite.writing.lane import Lane
from dualwrite.writing.units_of_work import GroupRun
from unit.writing.group.held import Held, Refused


def test_units_commit_together_and_each_caller_gets_its_result(shop, held):
    with held.together():
        futures = [held.put(number, result=number * 10) for number in (1, 2, 3)]
    assert [future.result(30) for future in futures] == [10, 20, 30]
    assert held.sizes == [1, 3]
    assert shop.both_have(1, 2, 3)


def test_a_single_unit_is_a_plain_block(shop, held):
    def unit(tx):
        assert not tx.connection.in_nested_transaction()
        shop.put(tx, 1)
        return tx

    tx = held.writer.submit(unit).result(30)
    assert shop.both_have(1)
    assert tx.state.value == "completed"


def test_units_of_one_thread_commit_in_their_order(shop, held):
    done = []
    with held.together():
        futures = [held.writer.submit(lambda _, n=n: done.append(n)) for n in range(50)]
    wait(futures, 30)
    assert done == list(range(50))


def test_units_of_a_key_wait_for_one_that_runs_again(shop, held):
    runs = []

    def conflicted(tx):
        runs.append("first")
        shop.put(tx, 1)
        if len(runs) == 1:
            raise TransactionAborted("a conflict")

    with held.together():
        first = held.writer.submit(conflicted, key="k")
        later = held.writer.submit(lambda tx: (runs.append("later"), shop.put(tx, 2)), key="k")
        other = held.writer.submit(lambda tx: (runs.append("other"), shop.put(tx, 3)), key="o")
    wait([first, later, other], 30)
    assert runs == ["first", "other", "first", "later"]
    assert shop.rows == ["1", "2", "3"]
    assert shop.messages == ["3", "1", "2"]


def test_limits_end_a_group(shop):
    with shop.writer(limits=WriterLimits(group_units=2)) as writer:
        held = Held(shop, writer)
        with held.together():
            futures = [held.put(number) for number in range(5)]
        wait(futures, 30)
        assert held.sizes == [1, 2, 2, 1]
    assert shop.both_have(*range(5))


@pytest.mark.parametrize("limits", [WriterLimits(group_open_s=0.0), WriterLimits(group_bytes=0)])
def test_old_and_large_groups_take_no_more(shop, limits):
    with shop.writer(limits=limits) as writer:
        held = Held(shop, writer)
        with held.together():
            futures = [held.put(number) for number in range(3)]
        wait(futures, 30)
        assert held.sizes == [1, 1, 1, 1]
    assert shop.both_have(*range(3))


def test_the_whole_of_a_groups_messages_counts(shop):
    with shop.writer(limits=WriterLimits(group_bytes=3)) as writer:
        held = Held(shop, writer)
        with held.together():
            futures = [held.put(number) for number in range(10, 15)]
        wait(futures, 30)
        assert held.sizes == [1, 2, 2, 1]


def test_a_cancelled_unit_that_has_not_begun_is_dropped(shop, held):
    with held.together():
        futures = [held.put(number) for number in (1, 2, 3)]
        assert futures[1].cancel()
    assert futures[0].result(30) is futures[2].result(30) is None
    with pytest.raises(CancelledError):
        futures[1].result()
    assert shop.both_have(1, 3)


def test_a_group_whose_units_are_all_cancelled_writes_nothing(shop, held):
    with held.together():
        assert held.put(1).cancel()
        assert held.put(2).cancel()
    held.put(3).result(30)
    assert shop.both_have(3)


def test_who_waits_for_many_does_not_wait_for_the_cancelled_ones(held):
    with held.together():
        futures = [held.put(1), held.put(2), held.put(3)]
        assert futures[1].cancel()
    assert wait(futures, 30).not_done == set()


def test_a_cancelled_unit_is_dropped_once_if_its_group_also_fails(shop, held, monkeypatch):
    def fails(_):
        raise TransactionAborted("all were dropped, and the abort has failed")

    monkeypatch.setattr(GroupRun, "require_any", fails)
    with held.together():
        futures = [held.put(1), held.put(2)]
        assert all(future.cancel() for future in futures)
    assert wait(futures, 30).not_done == set()
    monkeypatch.undo()
    held.put(3).result(30)
    assert shop.both_have(3)


def test_a_unit_that_runs_cannot_be_cancelled(shop, held):
    begun, may_go = threading.Event(), threading.Event()

    def unit(tx):
        begun.set()
        may_go.wait(30)
        shop.put(tx, 1)

    future = held.writer.submit(unit)
    begun.wait(30)
    assert not future.cancel()
    may_go.set()
    future.result(30)
    assert shop.both_have(1)


def test_a_unit_can_be_cancelled_while_no_group_can_begin(shop, held, monkeypatch):
    """As while the database is away: five attempts may take minutes."""
    real, tried, may_go = held.writer._groups._block, threading.Event(), threading.Event()

    def block():
        tried.set()
        may_go.wait(30)
        monkeypatch.setattr(held.writer._groups, "_block", real)
        raise Unavailable("away")

    monkeypatch.setattr(held.writer._groups, "_block", block)
    future = held.put(1)
    tried.wait(30)
    assert future.cancel()
    may_go.set()
    assert wait([future], 30).not_done == set()
    held.put(2).result(30)
    assert shop.both_have(2)


def test_a_unit_that_has_not_begun_in_time_never_runs(shop, held):
    """Its caller hears it at once, though the group before it goes on."""
    begun, may_go = threading.Event(), threading.Event()

    def slow(tx):
        begun.set()
        may_go.wait(30)
        shop.put(tx, 1)

    running = held.writer.submit(slow, key=1)
    begun.wait(30)
    late = [held.writer.submit(lambda tx: shop.put(tx, 2), key=2, within_s=within_s) for within_s in (60, 0.02, 0.01)]
    assert wait(late[1:], 30).not_done == set()
    assert "not begun within 0.01 s" in str(late[2].exception(0))
    assert isinstance(late[1].exception(0), Unavailable)
    may_go.set()
    assert running.result(30) is late[0].result(30) is None
    held.put(3).result(30)
    assert shop.both_have(1, 2, 3)


def test_a_unit_whose_time_is_over_fails_once_and_never_while_it_runs():
    futures = [Future() for _ in range(4)]
    waits, runs, again, cancelled = (Task("orders", lambda _: None, future, 60.0) for future in futures)
    assert runs.begin()
    assert again.begin()
    again.rest(TransactionAborted("a conflict"))
    futures[3].cancel()
    for task in (waits, runs, again, cancelled):
        task.expire()
        task.expire()
    assert isinstance(futures[0].exception(0), Unavailable)
    assert not futures[1].done()
    assert "a conflict" in str(futures[2].exception(0))
    assert futures[3].cancelled()
    assert [task.begin() for task in (waits, again, cancelled)] == [False] * 3


@pytest.mark.parametrize("within_s", [0, -1, float("nan"), float("inf"), 1e10])
def test_a_time_that_no_unit_can_be_given_is_refused(held, within_s):
    """No thread can wait until the longest ones: the one that ends the others' times would have died of them."""
    with pytest.raises(ConfigurationError, match="within_s is"):
        held.writer.submit(lambda _: None, within_s=within_s)
    with held.together():
        late = held.writer.submit(lambda _: None, key="late", within_s=0.01)
        assert isinstance(late.exception(30), Unavailable)


def test_the_longest_time_ends_no_thread(held):
    with held.together():
        longest = held.writer.submit(lambda _: None, key="longest", within_s=LONGEST_S)
        late = held.writer.submit(lambda _: None, key="late", within_s=0.01)
        assert isinstance(late.exception(30), Unavailable)
    assert longest.result(30) is None


def test_those_whose_time_is_not_over_are_forgotten_once_they_have_ended(held, monkeypatch):
    monkeypatch.setattr("dualwrite.writing.group_commit._FEW", 2)
    later = held.writer._groups._later
    later._sweep_at = 2
    for _ in range(20):
        held.writer.submit(lambda _: None, within_s=3600).result(30)
        assert len(later._waiting) <= 4


def test_a_group_that_was_aborted_runs_again(shop, held, monkeypatch):
    real, failures = SqlStateStore.decide, [TransactionAborted("a conflict"), Unavailable("gone")]

    def decide(*args, **kwargs):
        if failures:
            raise failures.pop(0)
        return real(*args, **kwargs)

    with held.together():
        futures = [held.put(number, result=number) for number in (1, 2, 3)]
        monkeypatch.setattr(SqlStateStore, "decide", decide)
        failures.insert(0, TransactionAborted("of the first"))
    assert [future.result(60) for future in futures] == [1, 2, 3]
    assert not failures
    # The one that has failed alone rests by itself: the others overtake it.
    assert sorted(shop.rows) == sorted(shop.messages) == ["1", "2", "3"]


def test_units_that_rest_before_they_run_again_keep_no_other_waiting(shop, held, monkeypatch):
    """Those of its key wait, and keep their order."""
    failures = [TransactionAborted("a conflict")]

    def conflicted(tx):
        if failures:
            raise failures.pop()
        shop.put(tx, 2)

    monkeypatch.setattr(group_commit, "pause_after_s", lambda failures: 3600.0 if failures else 0.0)
    with held.together():
        futures = [held.put(1), held.writer.submit(conflicted, key="k"), held.put(3, key="k")]
    assert futures[0].result(30) is None
    assert held.put(4).result(30) is held.put(5).result(30) is None
    assert not futures[1].done()
    assert not futures[2].done()
    assert shop.both_have(1, 4, 5)
    held.writer._groups._let_run_again([*held.writer._groups._units._busy["key", "k"]][:1])
    assert futures[1].result(30) is futures[2].result(30) is None
    assert shop.messages == ["1", "4", "5", "2", "3"]


def test_units_that_did_not_fit_beside_one_that_rests_run_at_once(shop, monkeypatch):
    """Except those of its key, which keep their order."""
    failures = [TransactionAborted("a conflict")]

    def conflicted(tx):
        if failures:
            raise failures.pop()
        shop.put(tx, 1)

    monkeypatch.setattr(group_commit, "pause_after_s", lambda failures: 3600.0 if failures else 0.0)
    with shop.writer(limits=WriterLimits(group_open_s=0.0)) as writer:
        held = Held(shop, writer)
        with held.together():
            first = held.writer.submit(conflicted, key="k")
            futures = [first, held.put(2, key="k"), held.put(3), held.put(4)]
        assert futures[2].result(30) is futures[3].result(30) is None
        assert not futures[0].done()
        assert not futures[1].done()
        writer._groups._let_run_again([*writer._groups._units._busy["key", "k"]][:1])
        assert futures[0].result(30) is futures[1].result(30) is None
    assert shop.messages == ["3", "4", "1", "2"]


def test_a_group_that_cannot_commit_for_one_unit_commits_the_others(shop, held, monkeypatch):
    """A deferred constraint, say."""
    real = SqlStateStore.decide

    def decide(store, connection, *args, **kwargs):
        if connection.scalar(text("SELECT count(*) FROM orders WHERE id = 2")):
            raise TransactionAborted("a deferred check", retryable=False)
        return real(store, connection, *args, **kwargs)

    monkeypatch.setattr(SqlStateStore, "decide", decide)
    with held.together():
        futures = [held.put(number) for number in (1, 2, 3)]
    assert "a deferred check" in str(futures[1].exception(30))
    futures[0].result(30)
    futures[2].result(30)
    assert shop.both_have(1, 3)


def test_in_doubt_reaches_every_unit_and_none_runs_again(shop, held, monkeypatch):
    runs = []

    def unit(tx, number):
        runs.append(number)
        shop.put(tx, number)
        if number == 2:
            raise Refused

    def in_doubt(*_, **__):
        raise TransactionInDoubt("no answer", transactional_id="orders")

    with held.together():
        futures = [held.writer.submit(lambda tx, n=n: unit(tx, n), key=n) for n in (1, 2, 3)]
        monkeypatch.setattr(dialect, "commit", in_doubt)
        monkeypatch.setattr("dualwrite.recovery.in_doubt.resolve_commit", in_doubt)
    errors = [future.exception(30) for future in futures]
    assert [type(error) for error in errors] == [TransactionInDoubt, Refused, TransactionInDoubt]
    assert errors[0] is not errors[2]
    assert errors[0].transactional_id == "orders"
    assert runs == [1, 2, 3]


def test_pending_reaches_every_unit(shop, held, monkeypatch):
    def pending(*_, **__):
        raise CompletionPending("no answer")

    with held.together():
        futures = [held.put(number) for number in (1, 2)]
        monkeypatch.setattr(Lane, "complete", pending)
    assert [type(future.exception(30)) for future in futures] == [CompletionPending] * 2
    assert shop.rows == ["1", "2"]


@pytest.mark.parametrize(
    ("point", "told"),
    # The first unit alone is "first of a test". Units that have not begun run again, in another group.
    [
        ("group.unit_begun:2", [1]),
        ("group.unit_kept:1", [1]),
        ("group.units_done:2", []),
        ("write.prepared:2", []),
    ],
)
def test_a_defect_that_aborts_a_group_of_several_lets_each_run_alone(shop, held, point, told):
    with held.together():
        futures = {number: held.put(number) for number in (1, 2, 3)}
        failpoints.arm(f"{point}:raise")
    assert [number for number, future in futures.items() if future.exception(30) is not None] == told
    assert shop.both_have(*sorted({1, 2, 3} - set(told)))


def test_a_delivery_callback_that_raises_fails_its_unit_alone(shop, held):
    def told(*_):
        raise Refused

    def unit(tx):
        shop.put(tx, 2)
        tx.produce(TOPIC, "22", partition=0, on_delivery=told)

    with held.together():
        futures = [held.put(1), held.writer.submit(unit, key=2), held.put(3)]
    assert [type(future.exception(30)) for future in futures] == [type(None), Refused, type(None)]
    assert shop.both_have(1, 3)


MISTAKES = {
    "value": lambda tx: tx.produce(TOPIC, {"id": 1}),
    "header": lambda tx: tx.produce(TOPIC, "x", headers={"n": 1}),
    "topic": lambda tx: tx.produce("a b", "x"),
    "many": lambda tx: tx.produce_many(TOPIC, ["x", 7]),
    "rows": RowUnit(text("INSERT INTO orders (id) VALUES (9)"), messages=[ProducerRecord(TOPIC, 7)]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_message_is_told_at_the_call_and_fails_no_other_unit(shop, held, mistake):
    runs = []

    def counted(tx):
        runs.append(1)
        shop.put(tx, 1)

    with held.together():
        futures = [
            held.writer.submit(counted, key=1),
            held.writer.submit(MISTAKES[mistake], key=2),
            held.put(3),
        ]
    assert isinstance(futures[1].exception(30), TypeError | TransactionAborted)
    assert [futures[0].result(30), futures[2].result(30)] == [None, None]
    assert len(runs) == 1
    assert shop.both_have(1, 3)


def test_a_callback_that_raises_an_interruption_keeps_no_caller_waiting(shop, held, caplog):
    def leave(_):
        raise SystemExit

    for first in (1, 11, 21):  # more often than there are threads
        with held.together():
            futures = [held.put(number) for number in range(first, first + 3)]
            futures[0].add_done_callback(leave)
        assert wait(futures, 30).not_done == set()
    assert shop.both_have(1, 2, 3, 11, 12, 13, 21, 22, 23)
    assert "a callback of a unit's future has raised" in caplog.text


def test_close_finishes_what_waits(shop):
    with shop.writer() as writer:
        held = Held(shop, writer)
        with held.together():
            futures = [held.put(number) for number in (1, 2)]
    assert all(future.done() for future in futures)
    assert shop.both_have(1, 2)
    with pytest.raises(IllegalStateError, match="not open"):
        writer.submit(lambda _: None)


def test_close_fails_what_has_not_begun_in_time(shop):
    may_go, begun = threading.Event(), threading.Event()

    def slow(_):
        begun.set()
        may_go.wait(30)

    with shop.writer(limits=WriterLimits(timeout_s=0.2)) as writer:
        running = writer.submit(slow, key=1)
        begun.wait(30)
        waiting = writer.submit(lambda tx: shop.put(tx, 1), key=2)
        threading.Timer(0.5, may_go.set).start()
    with pytest.raises(IllegalStateError, match="closed before the unit began"):
        waiting.result(0)
    running.exception(30)
    assert shop.rows == []


def test_close_fails_what_waits_to_run_again(shop, monkeypatch):
    monkeypatch.setattr(writer_module, "runners_for", lambda *_: 2)
    may_go, begun, submitted = threading.Event(), threading.Event(), threading.Event()

    def conflicted(_):
        submitted.wait(30)
        raise TransactionAborted("a conflict")

    def slow(_):
        begun.set()
        may_go.wait(30)

    with shop.writer(limits=WriterLimits(timeout_s=0.2, group_units=1)) as writer:
        again = writer.submit(conflicted, key=1)
        running = writer.submit(slow, key=2)
        submitted.set()
        begun.wait(30)
        threading.Timer(0.5, may_go.set).start()
    with pytest.raises(IllegalStateError, match="closed before the unit began"):
        again.result(0)
    running.exception(30)
    assert shop.rows == []


def test_a_unit_whose_group_is_aborted_after_close_has_waited_does_not_rest(shop, monkeypatch):
    """Nothing would wake it."""
    monkeypatch.setattr(group_commit, "pause_after_s", lambda failures: 3600.0 if failures else 0.0)
    may_go, begun = threading.Event(), threading.Event()

    def conflicted(_):
        begun.set()
        may_go.wait(30)
        raise TransactionAborted("a conflict")

    with shop.writer() as writer:
        future = writer.submit(conflicted)
        begun.wait(30)
        writer._groups.close(0.01)
        may_go.set()
        assert "a conflict" in str(future.exception(30))
        wait_until(lambda: writer._groups._threads == 0, 30, pause_s=0.001)
    assert shop.rows == []


def test_units_that_rest_when_close_has_waited_fail_and_keep_nothing_waiting(shop, monkeypatch):
    monkeypatch.setattr(group_commit, "pause_after_s", lambda failures: 3600.0 if failures else 0.0)

    def conflicted(_):
        raise TransactionAborted("a conflict")

    with shop.writer() as writer:
        future = writer.submit(conflicted, key="k")
        wait_until(lambda: writer._groups._units._resting, 30, pause_s=0.001)
        patient = threading.Thread(target=writer._groups.close, args=(60,))
        patient.start()
        wait_until(lambda: writer._groups._closed, 30, pause_s=0.001)
        writer._groups.close(0.01)
        assert "closed before the unit began" in str(future.exception(30))
        patient.join(30)
        assert not patient.is_alive()
        wait_until(lambda: writer._groups._threads == 0, 30, pause_s=0.001)
    assert shop.rows == []


def test_many_threads_lose_nothing(shop, held):
    def caller(first):
        for number in range(first, first + 20):
            held.put(number).result(60)

    threads = [threading.Thread(target=caller, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, shop.rows)) == sorted(map(int, shop.messages))
    assert len(shop.rows) == 160


def test_the_threads_end_with_the_writer(shop):
    with shop.writer() as writer:
        writer.submit(lambda _: None).result(30)
    wait_until(
        lambda: not any(thread.name.startswith("dualwrite group") for thread in threading.enumerate()), 30, pause_s=0.01
    )
