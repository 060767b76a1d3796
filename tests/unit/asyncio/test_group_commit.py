"""Group commit by tasks, on SQLite and a simulated Kafka."""

import asyncio
import contextvars

import pytest
from harness.served import TOPIC
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite import CompletionPending, ConfigurationError, TransactionAborted, Unavailable, WriterLimits
from dualwrite.asyncio import writer as module
from dualwrite.asyncio.writer import _Task
from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.writing.lane import Lane
from unit.asyncio.test_writer import in_writer, make, put  # noqa: F401 - fixtures

pytest.importorskip("aiosqlite")

NAME = contextvars.ContextVar("name")


class Refused(Exception):
    """Raised by a unit."""


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def unit(number, *, error=None, runs=None):
    async def work(tx):
        if runs is not None:
            runs.append(number)
        await put(tx, number)
        if error is not None:
            raise error
        return number

    return work


def sizes_of(writer):
    sizes = []
    writer._groups._grouped = sizes.append
    return sizes


def all_of(writer, *works):
    return asyncio.gather(*(writer.submit(work) for work in works), return_exceptions=True)


def test_the_units_of_tasks_commit_together(in_writer, shop):  # noqa: F811 - a fixture
    async def work(writer):
        sizes = sizes_of(writer)
        assert await all_of(writer, *(unit(number) for number in range(5))) == [0, 1, 2, 3, 4]
        assert await writer.submit(unit(5)) == 5
        assert sizes == [5, 1]

    in_writer(work)
    assert shop.both_have(0, 1, 2, 3, 4, 5)


def test_a_unit_that_fails_is_rolled_back_alone(in_writer, shop):  # noqa: F811
    async def flush_fails(tx):
        await tx.produce(TOPIC, "9", partition=0)
        tx.session.add(Order(id=1))
        await tx.session.flush()

    async def adds(tx):
        tx.session.add(Order(id=4))
        await tx.produce(TOPIC, "4", partition=0)

    async def work(writer):
        found = await all_of(writer, unit(1), unit(2, error=Refused()), unit(3), flush_fails, adds)
        assert [type(one) for one in found[:3]] == [int, Refused, int]
        assert "UNIQUE" in str(found[3])
        assert found[4] is None

    in_writer(work)
    assert shop.both_have(1, 3, 4)


def test_a_part_that_outlives_its_unit_writes_nothing(in_writer, shop):  # noqa: F811
    """asyncio.gather() lets the siblings of a part that has failed go on."""

    async def work(writer):
        ended = []

        async def goes_on(tx, written):
            connection, produce = tx.connection, tx.produce
            try:
                for number in range(100, 200):
                    await connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
                    await produce(TOPIC, str(number), partition=0)
                    written.set()
            except IllegalStateError as error:
                ended.append(error)

        async def fails(tx):
            written = asyncio.Event()

            async def part():
                await written.wait()
                raise Refused

            await asyncio.gather(goes_on(tx, written), part())

        found = await all_of(writer, unit(1), fails, unit(2), unit(3))
        assert [type(one) for one in found] == [int, Refused, int, int]
        assert len(ended) == 1

    in_writer(work)
    assert shop.both_have(1, 2, 3)


def test_limits_end_a_group(in_writer):  # noqa: F811
    async def work(writer):
        sizes = sizes_of(writer)
        await all_of(writer, *(unit(number) for number in range(5)))
        assert sizes == [2, 2, 1]

    in_writer(work, limits=WriterLimits(group_units=2))


def test_a_group_that_was_aborted_runs_again(in_writer, shop, monkeypatch):  # noqa: F811
    real, runs = SqlStateStore.decide, []
    failures = [TransactionAborted("a conflict")]

    def decide(*args, **kwargs):
        if failures:
            raise failures.pop()
        return real(*args, **kwargs)

    async def work(writer):
        monkeypatch.setattr(SqlStateStore, "decide", decide)
        assert await all_of(writer, unit(1, runs=runs), unit(2, runs=runs)) == [1, 2]

    in_writer(work)
    assert runs == [1, 2, 1, 2]
    assert shop.both_have(1, 2)


def test_the_groups_error_reaches_every_unit(in_writer, shop, monkeypatch):  # noqa: F811
    def pending(*_, **__):
        raise CompletionPending("no answer")

    async def work(writer):
        monkeypatch.setattr(Lane, "complete", pending)
        found = await all_of(writer, unit(1), unit(2))
        assert [type(one) for one in found] == [CompletionPending] * 2
        assert found[0] is not found[1]

    in_writer(work)
    assert shop.rows == ["1", "2"]


def test_a_task_that_is_cancelled_before_its_unit_begins_has_written_nothing(in_writer, shop):  # noqa: F811
    async def work(writer):
        tasks = [asyncio.create_task(writer.submit(unit(number))) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [int, asyncio.CancelledError, int]

    in_writer(work)
    assert shop.both_have(1, 3)


@pytest.mark.parametrize("pending", [True, False])
def test_a_task_that_is_cancelled_while_its_unit_runs_waits_no_longer(in_writer, shop, monkeypatch, caplog, pending):  # noqa: F811
    """The unit ends with its group. What its caller should have heard is in the log."""

    def no_answer(*_, **__):
        raise CompletionPending("no answer")

    async def work(writer):
        begun, may_go = asyncio.Event(), asyncio.Event()

        async def slow(tx):
            await put(tx, 1)
            begun.set()
            await may_go.wait()

        tasks = [asyncio.create_task(writer.submit(one)) for one in (slow, unit(2))]
        await begun.wait()
        if pending:
            monkeypatch.setattr(Lane, "complete", no_answer)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert not tasks[1].done()
        may_go.set()
        [found] = await asyncio.gather(tasks[1], return_exceptions=True)
        assert type(found) is (CompletionPending if pending else int)

    in_writer(work)
    assert shop.rows == ["1", "2"]
    assert ("stopped to wait" in caplog.text) is pending


def test_a_task_that_is_cancelled_before_its_unit_runs_again_is_rid_of_it(in_writer, shop, monkeypatch):  # noqa: F811
    """As while a server is away: five runs may take minutes."""
    runs = []

    async def work(writer):
        paused = asyncio.Event()

        def pause_s(failures):
            if failures:
                paused.set()
            return 3600.0 if failures else 0.0

        monkeypatch.setattr(module, "pause_after_s", pause_s)
        task = asyncio.create_task(writer.submit(unit(1, error=Unavailable("away"), runs=runs), key="k"))
        await paused.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
        for one in others():
            one.cancel()  # ends the pause
        assert await asyncio.wait_for(writer.submit(unit(2), key="k"), 30) == 2

    in_writer(work)
    assert runs == [1]
    assert shop.both_have(2)


def test_a_unit_whose_callers_coroutine_is_closed_does_not_begin(in_writer, shop):  # noqa: F811
    async def work(writer):
        begun, may_go = asyncio.Event(), asyncio.Event()

        async def slow(tx):
            await put(tx, 1)
            begun.set()
            await may_go.wait()

        first = asyncio.create_task(writer.submit(slow))
        await begun.wait()
        left = writer._groups.submit(unit(2), "left")
        left.send(None)
        left.close()
        may_go.set()
        await first
        assert await writer.submit(unit(3), key="left") == 3

    in_writer(work)
    assert shop.both_have(1, 3)


def test_a_unit_that_has_not_begun_in_time_never_runs(in_writer, shop):  # noqa: F811
    """Its caller hears it at once, though the group before it goes on. One that has begun takes its time."""
    runs = []

    async def work(writer):
        begun, may_go = asyncio.Event(), asyncio.Event()

        async def slow(tx):
            await put(tx, 1)
            begun.set()
            await may_go.wait()

        first = asyncio.create_task(writer.submit(slow, within_s=60))
        await begun.wait()
        with pytest.raises(Unavailable, match=r"not begun within 0.01 s.*nothing of it was written"):
            await asyncio.wait_for(writer.submit(unit(2, runs=runs), within_s=0.01), 30)
        may_go.set()
        await first
        assert await writer.submit(unit(3), within_s=60) == 3

    in_writer(work)
    assert runs == []
    assert shop.both_have(1, 3)


def test_a_unit_whose_time_is_over_when_it_would_run_again_fails_with_its_last_error():
    async def work():
        task = _Task("orders", unit(1), 60.0)
        assert task.begin()
        task._expiry.until = Deadline(0)
        task.rest(Unavailable("away"))
        with pytest.raises(Unavailable, match="away"):
            await asyncio.wait_for(task.outcome(None), 30)
        assert not task.begin()

    asyncio.run(work())


@pytest.mark.parametrize("within_s", [0, float("inf"), 1e10])
def test_a_time_that_no_unit_can_be_given_is_refused(in_writer, within_s):  # noqa: F811
    async def work(writer):
        with pytest.raises(ConfigurationError, match="within_s is"):
            await writer.submit(unit(1), within_s=within_s)

    in_writer(work)


def others():
    return asyncio.all_tasks() - {asyncio.current_task()}


def test_units_that_did_not_fit_beside_one_that_rests_run_at_once(in_writer, shop, monkeypatch):  # noqa: F811
    """Except those of its key, which keep their order."""
    failures = [TransactionAborted("a conflict")]

    async def conflicted(tx):
        if failures:
            raise failures.pop()
        await put(tx, 1)

    async def work(writer):
        before = others()
        resting = [asyncio.create_task(writer.submit(one, key="k")) for one in (conflicted, unit(2))]
        beside = asyncio.gather(writer.submit(unit(3), key=3), writer.submit(unit(4), key=4))
        assert await asyncio.wait_for(beside, 30) == [3, 4]
        assert not any(task.done() for task in resting)
        for one in others() - before - {*resting}:
            one.cancel()  # ends the pause
        assert await asyncio.wait_for(asyncio.gather(*resting), 30) == [None, 2]

    monkeypatch.setattr(module, "pause_after_s", lambda failures: 3600.0 if failures else 0.0)
    in_writer(work, limits=WriterLimits(group_open_s=0.0))
    assert shop.messages == ["3", "4", "1", "2"]


def test_an_event_loop_that_cancels_all_its_tasks_leaves_none_waiting(in_writer, shop, monkeypatch):  # noqa: F811
    """As asyncio.run() does at its end. Here the unit waits to run again: the server is away."""
    runs, paused = [], []

    def pause_s(failures):
        if not failures:
            return 0.0
        paused[0].set()
        return 3600.0

    async def work(writer):
        paused.append(asyncio.Event())
        task = asyncio.create_task(writer.submit(unit(1, error=Unavailable("away"), runs=runs), key="k"))
        await paused[0].wait()
        await asyncio.sleep(0)
        for one in others():
            one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
        assert await asyncio.wait_for(writer.submit(unit(2), key="k"), 30) == 2

    monkeypatch.setattr(module, "pause_after_s", pause_s)
    in_writer(work)
    assert runs == [1]
    assert shop.both_have(2)


def test_a_cancellation_that_was_put_off_to_the_end_of_a_group_takes_no_answer(in_writer, shop, monkeypatch):  # noqa: F811
    real = module.run
    callers = set()

    async def run(pool, work, **given):
        found = await real(pool, work, **given)
        if asyncio.current_task() not in callers:
            raise asyncio.CancelledError
        return found

    async def work(writer):
        caller = asyncio.create_task(writer.submit(unit(1)))
        callers.update((asyncio.current_task(), caller))
        monkeypatch.setattr(module, "run", run)
        assert await asyncio.wait_for(caller, 30) == 1

    in_writer(work)
    assert shop.both_have(1)


def test_a_group_that_is_cancelled_before_its_first_step_is_run_by_the_next_task(in_writer, shop):  # noqa: F811
    async def work(writer):
        before = others()
        task = asyncio.create_task(writer.submit(unit(1)))
        serving = set()
        for _ in range(100):
            if not serving:
                await asyncio.sleep(0)
                serving = others() - before - {task}
        serving.pop().cancel()
        assert await asyncio.wait_for(task, 30) == 1

    in_writer(work)
    assert shop.both_have(1)


def test_units_that_would_run_again_fail_once_the_writer_is_closed(in_writer, shop, monkeypatch):  # noqa: F811
    async def work(writer):
        async def slow(_):
            monkeypatch.setattr(writer._groups, "_pool", closed)
            raise Unavailable("away")

        with pytest.raises(IllegalStateError, match="is closed"):
            await asyncio.wait_for(writer.submit(slow), 30)

    def closed():
        raise IllegalStateError("the writer is closed")

    in_writer(work)
    assert shop.rows == []


def test_a_unit_that_cancels_itself_is_rolled_back(in_writer, shop):  # noqa: F811
    async def gives_up(tx):
        await put(tx, 1)
        raise asyncio.CancelledError

    async def work(writer):
        found = await all_of(writer, gives_up, unit(2))
        assert [type(one) for one in found] == [asyncio.CancelledError, int]

    in_writer(work)
    assert shop.both_have(2)


def test_a_unit_sees_the_context_of_its_caller(in_writer):  # noqa: F811
    async def name(_):
        return NAME.get()

    async def caller(writer, own):
        NAME.set(own)
        return await writer.submit(name)

    async def work(writer):
        assert await asyncio.gather(caller(writer, "a"), caller(writer, "b")) == ["a", "b"]

    in_writer(work)


@pytest.mark.parametrize("count", [1, 2])
def test_a_transaction_and_a_unit_inside_a_unit_are_refused(in_writer, count):  # noqa: F811
    async def work(writer):
        async def nested(_):
            with pytest.raises(IllegalStateError, match="already inside"):
                await writer.submit(unit(1))
            with pytest.raises(IllegalStateError, match="already inside"):
                async with writer.transaction():
                    pass
            return "refused"

        assert await all_of(writer, *[nested] * count) == ["refused"] * count

    in_writer(work)


def test_units_of_a_key_keep_their_order(in_writer):  # noqa: F811
    done = []

    async def work(writer):
        async def note(number):
            async def one(tx):
                await tx.connection.execute(text("SELECT 1"))
                done.append(number)

            await writer.submit(one, key="k")

        await asyncio.gather(*(note(number) for number in range(20)))

    in_writer(work, limits=WriterLimits(group_units=3))
    assert done == list(range(20))


def test_close_finishes_what_waits(in_writer, shop):  # noqa: F811
    tasks = []

    async def work(writer):
        tasks.extend(asyncio.create_task(writer.submit(unit(number))) for number in (1, 2))
        await asyncio.sleep(0)

    in_writer(work)
    assert [task.result() for task in tasks] == [1, 2]
    assert shop.both_have(1, 2)


def test_a_close_that_is_cancelled_while_units_run_closes_all_the_same(make, shop):  # noqa: F811
    async def main():
        writer = make()
        await writer.open()
        began, may_end = asyncio.Event(), asyncio.Event()

        async def slow(tx):
            began.set()
            await may_end.wait()
            await put(tx, 1)

        unit_ = asyncio.create_task(writer.submit(slow))
        await began.wait()
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await unit_
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not writer.health().open
        with pytest.raises(IllegalStateError, match="is closed"):
            await writer.submit(unit(2))

    asyncio.run(main())
    assert shop.both_have(1)


def test_close_fails_what_has_not_begun_in_time(in_writer, shop):  # noqa: F811
    async def work(writer):
        may_go = asyncio.Event()

        async def slow(_):
            await may_go.wait()

        tasks = [asyncio.create_task(writer.submit(slow))]
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(writer.submit(unit(1))))
        await asyncio.sleep(0)
        await writer._groups.close(0.1)
        may_go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[1], IllegalStateError)

    in_writer(work)
    assert shop.rows == []


def test_a_closed_writer_takes_no_units(make):  # noqa: F811
    async def main():
        writer = make()
        with pytest.raises(IllegalStateError, match="not open"):
            await writer.submit(unit(1))
        async with writer:
            pass
        with pytest.raises(IllegalStateError, match="closed"):
            await writer.submit(unit(1))

    asyncio.run(main())


@pytest.fixture
def in_few(in_writer):  # noqa: F811
    """Runs a coroutine function with a writer that is in a group, where one unit waits, and what lets the group end."""

    def run(work, **limits):
        async def main(writer):
            begun, may_go = asyncio.Event(), asyncio.Event()

            async def slow(tx):
                await put(tx, 0)
                begun.set()
                await may_go.wait()

            tasks = [asyncio.create_task(writer.submit(slow))]
            await begun.wait()
            tasks.append(asyncio.create_task(writer.submit(unit(1))))
            await asyncio.sleep(0)
            try:
                await work(writer, may_go)
            finally:
                may_go.set()
                await asyncio.gather(*tasks)

        return in_writer(main, limits=WriterLimits(waiting_units=1, **limits))

    return run


async def standing(writer, *works):
    """Tasks whose units stand in line."""
    tasks = [asyncio.create_task(writer.submit(work)) for work in works]
    await asyncio.sleep(0)
    assert len(writer._groups._units.in_line) == len(works)
    return tasks


def test_tasks_wait_for_a_place_first_come_first_served(in_few, shop):
    async def work(writer, may_go):
        runs = []
        tasks = await standing(writer, *(unit(number, runs=runs) for number in range(2, 9)))
        may_go.set()
        assert await asyncio.gather(*tasks) == list(range(2, 9))
        assert runs == list(range(2, 9))

    in_few(work)
    assert shop.both_have(*range(9))


def test_a_task_that_finds_no_place_in_time_is_refused_and_its_unit_never_runs(in_few, shop):
    async def work(writer, _):
        with pytest.raises(Unavailable, match=r"full \(limit 1\).*in time"):
            await asyncio.wait_for(writer.submit(unit(2)), 10)

    in_few(work, lane_timeout_s=0.05)
    assert shop.both_have(0, 1)


@pytest.mark.parametrize("placed", [True, False])
def test_a_task_that_is_cancelled_in_line_has_written_nothing(in_few, shop, placed):
    async def work(writer, may_go):
        runs = []
        tasks = await standing(writer, unit(2, runs=runs), unit(3, runs=runs))
        if placed:
            taken = writer._groups._units.take(1)
            [admitted] = writer._groups._units.admit()
            admitted.work.answer()
            writer._groups._units.end(taken, taken)
        tasks[0].cancel()
        may_go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [asyncio.CancelledError, int]
        assert runs == [3]

    in_few(work)
    assert shop.both_have(0, 1, 3)


def test_a_task_that_is_cancelled_when_its_unit_runs_gets_it_after_the_commit(in_few, shop, monkeypatch):
    """It stood in line, and the unit has begun before the task could see that it was added."""

    async def work(writer, may_go):
        async def cancels(tx):
            await put(tx, 2)
            waiter.cancel()

        waiter = asyncio.create_task(writer.submit(cancels, key="k"))
        await asyncio.sleep(0)
        monkeypatch.setattr(_Task, "answer", lambda _: None)
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await asyncio.wait_for(writer.submit(unit(3), key="k"), 30)

    in_few(work)
    assert shop.both_have(0, 1, 2, 3)


def test_close_refuses_those_in_line(in_few, shop):
    async def work(writer, may_go):
        [waiter] = await standing(writer, unit(2))
        closing = asyncio.create_task(writer._groups.close(30))
        with pytest.raises(IllegalStateError, match="closed before the unit began"):
            await waiter
        may_go.set()
        await closing

    in_few(work)
    assert shop.both_have(0, 1)
