"""``AsyncDualWriter`` on SQLite and a simulated Kafka: no server is needed."""

import asyncio
import builtins

import pytest
from harness.databases import prepare, sqlite_url
from harness.served import SETTINGS, TOPIC
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite import AsyncDualWriter, ConfigurationError, DualWriter, TransactionAborted, Unavailable, WriterLimits
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.lives import WriteState

pytest.importorskip("aiosqlite")


class Base(DeclarativeBase):
    pass


class _Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


async def put(tx, number):
    """A row and a message of this number."""
    await tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
    await tx.produce(TOPIC, str(number), partition=0)


@pytest.fixture
def make(shop):
    def make(name="orders", **options):
        return AsyncDualWriter(
            name, **{"kafka": SETTINGS, "database": shop.engine.url.render_as_string(False), **options}
        )

    return make


@pytest.fixture
def in_writer(make):
    """Runs a coroutine function with an open writer."""

    def run(work, **options):
        async def main():
            async with make(**options) as writer:
                return await work(writer)

        return asyncio.run(main())

    return run


def test_a_block_that_ends_writes_both_sides(in_writer, shop):
    async def work(writer):
        for number in range(3):
            async with writer.transaction() as tx:
                await put(tx, number)
            assert tx.state is WriteState.COMPLETED

    in_writer(work)
    assert shop.both_have(0, 1, 2)


def test_a_block_that_raises_writes_neither_and_the_exception_passes(in_writer, shop):
    async def work(writer):
        with pytest.raises(ZeroDivisionError):
            async with writer.transaction() as tx:
                await put(tx, 1)
                raise ZeroDivisionError
        assert tx.state is WriteState.ABORTED
        async with writer.transaction() as tx:
            await put(tx, 2)

    in_writer(work)
    assert shop.both_have(2)


def test_tasks_share_a_writer_and_wait_fairly_for_its_lane(in_writer, shop):
    entered = []

    async def work(writer):
        async def one(number):
            async with writer.transaction() as tx:
                entered.append(number)
                await put(tx, number)

        await asyncio.gather(*(one(number) for number in range(30)))

    in_writer(work, limits=WriterLimits(max_lanes=1))
    assert entered == list(range(30))
    assert sorted(map(int, shop.messages)) == sorted(map(int, shop.rows)) == list(range(30))


def test_the_session_is_flushed_and_its_commit_commits_nothing(in_writer, shop):
    async def work(writer):
        async with writer.transaction() as tx:
            tx.session.add(_Order(id=7))
            await tx.session.commit()
            assert shop.rows == []
            tx.session.add(_Order(id=8))
            assert tx.session is tx.session
        assert tx.state is WriteState.COMPLETED
        with pytest.raises(ValueError, match="no"):
            async with writer.transaction() as tx:
                tx.session.add(_Order(id=9))
                await tx.session.flush()
                raise ValueError("no")

    in_writer(work)
    assert shop.rows == ["7", "8"]


def test_messages_of_a_savepoint_that_is_rolled_back_are_dropped(in_writer, shop):
    async def work(writer):
        async with writer.transaction() as tx:
            await put(tx, 1)
            with pytest.raises(ZeroDivisionError):
                async with tx.connection.begin_nested():
                    await put(tx, 2)
                    raise ZeroDivisionError
            async with tx.session.begin_nested():
                await put(tx, 3)

    in_writer(work)
    assert shop.both_have(1, 3)


def test_a_commit_inside_the_block_is_refused_and_aborts_both(in_writer, shop):
    async def work(writer):
        with pytest.raises(IllegalStateError, match="committed inside the block"):
            async with writer.transaction() as tx:
                await put(tx, 1)
                await tx.connection.commit()

    in_writer(work)
    assert shop.both_have()


def test_calls_that_send_wait_for_each_other(in_writer, shop):
    async def work(writer):
        async with writer.transaction() as tx:
            await asyncio.gather(*(tx.produce(TOPIC, str(number), partition=0) for number in range(10)))

    in_writer(work)
    assert shop.messages == [str(number) for number in range(10)]


def test_a_block_inside_another_is_refused_by_task(in_writer, shop):
    async def work(writer):
        async def other():
            async with writer.transaction() as tx:
                await put(tx, 2)

        async with writer.transaction() as tx:
            with pytest.raises(IllegalStateError, match="this task is already inside"):
                await other()
            await tx.produce(TOPIC, "1", partition=0)
            child = asyncio.create_task(other())  # waits for the lane, and inherits the context of this task
        await child

    in_writer(work, limits=WriterLimits(max_lanes=1))
    assert shop.messages == ["1", "2"]
    assert shop.rows == ["2"]


def test_the_time_of_a_block_that_is_over_aborts_both(in_writer, shop):
    async def work(writer):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(never_ending(writer), 0.05)
        async with writer.transaction() as tx:
            await put(tx, 2)

    async def never_ending(writer):
        async with writer.transaction() as tx:
            await put(tx, 1)
            await asyncio.Event().wait()

    in_writer(work)
    assert shop.both_have(2)


def test_a_task_that_is_cancelled_while_it_waits_for_a_lane_takes_none(in_writer, shop):
    async def work(writer):
        async def one(number):
            async with writer.transaction() as tx:
                await put(tx, number)

        async with writer.transaction() as tx:
            waiting = [asyncio.create_task(one(number)) for number in (1, 2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await put(tx, 0)
        assert isinstance((await asyncio.gather(*waiting, return_exceptions=True))[0], asyncio.CancelledError)

    in_writer(work, limits=WriterLimits(max_lanes=1))
    assert shop.both_have(0, 2)


def test_a_connection_of_the_users_is_used_and_left_open(in_writer, shop):
    async def work(writer):
        async with writer._engine.connect() as connection:
            async with writer.transaction(connection) as tx:
                await put(tx, 1)
                assert tx.connection.sync_connection is connection.sync_connection
            assert not connection.closed

    in_writer(work)
    assert shop.both_have(1)


@pytest.mark.parametrize("given", ["a session", "a connection for threads", "a connection that has not begun"])
def test_what_is_no_asynchronous_connection_is_refused(in_writer, shop, given):
    async def work(writer):
        given_ones = {
            "a session": AsyncSession(writer._engine),
            "a connection for threads": shop.engine.connect(),
            "a connection that has not begun": writer._engine.connect(),
        }
        with pytest.raises(IllegalStateError, match="AsyncConnection"):
            async with writer.transaction(given_ones[given]):
                pass
        given_ones["a connection for threads"].close()

    in_writer(work)


def test_another_database_for_its_own_transactions_is_refused(in_writer, shop, tmp_path):
    (tmp_path / "other").mkdir()
    other = prepare("sqlite", sqlite_url(tmp_path / "other"))
    with pytest.raises(ConfigurationError, match="another database"):
        in_writer(None, own_engine=other.engines[0])
    other.dispose()


def test_an_engine_of_the_other_kind_is_refused_with_the_one_to_use(shop, make):
    with pytest.raises(ConfigurationError, match=r"create_async_engine"):
        make(database=shop.engine)
    with pytest.raises(ConfigurationError, match="AsyncDualWriter"):
        DualWriter("orders", kafka=SETTINGS, database=create_async_engine("sqlite+aiosqlite:///x.db"))
    with pytest.raises(ConfigurationError, match="object is not"):
        make(database=object())


def test_a_writer_for_threads_is_refused_in_a_task_but_not_in_a_thread_of_it(shop):
    with shop.writer() as writer:

        def block(number):
            with writer.transaction() as tx:
                shop.put(tx, number)

        async def main():
            with pytest.raises(IllegalStateError, match="AsyncDualWriter"):
                block(1)
            await asyncio.to_thread(block, 2)

        asyncio.run(main())
    assert shop.both_have(2)


def test_a_notebook_runs_its_cells_in_an_event_loop_and_may_block_it(shop, monkeypatch):
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    with shop.writer() as writer:

        async def cell():
            with writer.transaction() as tx:
                shop.put(tx, 1)

        asyncio.run(cell())
    assert shop.both_have(1)


def test_another_event_loop_is_refused(make, shop):
    writer = make()

    async def use():
        async with writer.transaction():
            pass

    with pytest.raises(IllegalStateError, match="not open"):
        asyncio.run(use())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(writer.open())
    with pytest.raises(IllegalStateError, match="another event loop"):
        asyncio.run(use())
    with pytest.raises(IllegalStateError, match="another event loop"):
        asyncio.run(writer.close())
    loop.run_until_complete(writer.close())
    with pytest.raises(IllegalStateError, match="is closed"):
        loop.run_until_complete(use())
    loop.run_until_complete(writer.close())
    loop.close()
    with pytest.raises(IllegalStateError, match="already opened"):
        asyncio.run(writer.open())


def test_a_plain_with_is_refused(make):
    with pytest.raises(IllegalStateError, match="async with"), make():
        pass


def test_work_runs_again_after_an_error_that_left_nothing_behind(in_writer, shop):
    tries = []

    async def work(tx):
        tries.append(1)
        await put(tx, len(tries))
        if len(tries) < 3:
            raise TransactionAborted("for the test")
        return "done"

    assert in_writer(lambda writer: writer.run(work, longest_pause_s=0.01)) == "done"
    assert shop.both_have(3)


def test_a_serializer_makes_the_values(in_writer, shop):
    async def work(writer):
        assert writer.ready
        async with writer.transaction() as tx:
            await tx.produce(TOPIC, {"id": 1}, partition=0)

    in_writer(work, serializers={"value": lambda value, _: str(value["id"]).encode()})
    assert shop.messages == ["1"]


# Opening in the background


def opens_in_background(make, work, **options):
    """Runs a coroutine function with a writer that was opened without waiting."""

    async def main():
        writer = make(**options)
        await writer.open(wait=False)
        try:
            return await work(writer)
        finally:
            await writer.close()

    return asyncio.run(main())


def test_a_task_waits_for_the_opening_and_blocks_no_other(make, shop):
    async def work(writer):
        async def block():
            async with writer.transaction() as tx:
                await put(tx, 1)

        async def unit():
            await writer.submit(lambda tx: put(tx, 2))

        await asyncio.gather(block(), unit())

    opens_in_background(make, work)
    assert shop.rows == sorted(shop.messages) == ["1", "2"]


def test_a_task_is_refused_at_once_while_kafka_is_away_and_served_once_it_is_back(make, shop):
    shop.kafka.away = True

    async def work(writer):
        for _ in range(2):
            with pytest.raises(Unavailable, match="not open yet: Kafka at simulated:9092"):
                async with writer.transaction():
                    raise AssertionError("the block is not entered")
        with pytest.raises(Unavailable, match="simulated:9092"):
            await writer.submit(lambda tx: put(tx, 9))
        shop.kafka.away = False
        while not writer.ready:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        async with writer.transaction() as tx:
            await put(tx, 1)

    opens_in_background(make, work)
    assert shop.both_have(1)


def test_an_own_engine_to_another_database_is_refused_by_each_block_if_the_opening_did_not_wait(make, tmp_path, shop):
    other = prepare("sqlite", f"sqlite:///{tmp_path / 'other.db'}")

    async def work(writer):
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="another database"):
                async with writer.transaction() as tx:
                    await put(tx, 1)

    opens_in_background(make, work, own_engine=other.engines[0])
    assert shop.rows == []
    other.dispose()
