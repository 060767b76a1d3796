"""Sessions of the application on SQLite and a simulated Kafka: what their commit, rollback and end do to both sides."""

import gc
import itertools
import threading
import weakref
from contextlib import suppress

import pytest
from harness.bound import Order
from harness.interruption import Interruption
from harness.served import TOPIC
from sqlalchemy import event, exc, insert, select, text
from sqlalchemy.event import registry
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool

from dualwrite import (
    CompletionPending,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
    failpoints,
)
from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.kafka.librdkafka.producer import ProducerInstance
from dualwrite.protocol.lives import WriteState
from dualwrite.protocol.process import DoubtStep
from dualwrite.recovery import in_doubt
from dualwrite.stores.sql import savepoints
from dualwrite.stores.sql.database import JoinedStore
from dualwrite.writing import sessions
from dualwrite.writing.lane import Lane
from dualwrite.writing.lane_pool import Lanes


def test_commit_commits_both_sides_and_rollback_aborts_both(shop, factory, put):
    with factory() as session:
        put(session, 1)
        session.commit()
        put(session, 2)
        session.rollback()
        put(session, 3)
        session.commit()
        assert session.get(Order, 2) is None
    assert shop.both_have(1, 3)


def test_the_end_of_begin_commits_and_an_exception_in_it_aborts(shop, factory, put):
    with factory.begin() as session:
        put(session, 1)
    with pytest.raises(ZeroDivisionError), factory.begin() as session:
        put(session, 2)
        raise ZeroDivisionError
    with factory() as session, session.begin():
        put(session, 3)
    assert shop.both_have(1, 3)


def test_a_session_that_is_closed_without_a_commit_aborts(shop, factory, put):
    with factory() as session:
        put(session, 1)
    session = factory()
    put(session, 2)
    session.close()
    assert shop.both_have()


def test_rows_before_the_first_message_belong_to_the_dual_write(shop, factory, bound, put):
    with factory() as session:
        session.add(Order(id=1))
        session.flush()
        put(session, 2)
        session.rollback()
        session.add(Order(id=3))
        session.flush()
        bound.produce(session, TOPIC, "3", partition=0)
        session.commit()
    assert shop.both_have(3)


def test_what_commit_flushes_is_part_of_it_also_that_of_a_listener(shop, factory, bound):
    @event.listens_for(factory, "before_commit")
    def audit(session):
        session.add(Order(id=2))
        bound.produce(session, TOPIC, "2", partition=0)

    with factory() as session:
        bound.produce(session, TOPIC, "1", partition=0)
        session.add(Order(id=1))
        session.commit()
    assert shop.both_have(1, 2)


def test_a_session_that_produces_nothing_is_left_alone(shop, factory, bound, writer, monkeypatch):
    monkeypatch.setattr(Lanes, "take", lambda *_: pytest.fail("a lane was taken"))
    statements = []
    event.listen(shop.engine, "before_cursor_execute", lambda *given: statements.append(given[2].split()[0]))
    with factory() as session:
        session.commit()
        session.add(Order(id=1))
        session.commit()
        assert session.scalars(select(Order.id)).all() == [1]
    assert statements == ["INSERT", "SELECT"]
    assert shop.messages == []


def test_a_dual_write_of_nothing_commits(shop, factory, bound):
    with factory() as session:
        joined = bound.join(session)
        session.commit()
    assert joined.state is WriteState.COMPLETED
    assert shop.both_have()


def test_a_session_is_used_for_many_commits(shop, factory, put):
    with factory() as session:
        for number in range(20):
            put(session, number)
            session.commit()
    assert shop.rows == sorted(shop.messages, key=int) == [str(number) for number in range(20)]


@pytest.mark.parametrize("expire", [True, False])
def test_objects_expire_on_commit_as_ever(shop, writer, expire):
    factory = sessionmaker(shop.engine, expire_on_commit=expire)
    bound = writer.bind(factory)
    with factory() as session:
        order = Order(id=1)
        session.add(order)
        bound.produce(session, TOPIC, "1", partition=0)
        session.commit()
        shop.database.execute("UPDATE orders SET customer = NULL WHERE id = 1")
        asked = []
        event.listen(shop.engine, "before_cursor_execute", lambda *_: asked.append(1))
        assert order.id == 1
    assert bool(asked) is expire


def test_messages_of_a_savepoint_that_is_rolled_back_are_dropped(shop, factory, put):
    with factory() as session:
        put(session, 1)
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            put(session, 2)
            raise ZeroDivisionError
        with session.begin_nested():
            put(session, 3)
            inner = session.begin_nested()
            put(session, 4)
            inner.rollback()
        session.commit()
    assert shop.both_have(1, 3)


def test_a_message_right_after_begin_nested_belongs_to_the_savepoint(shop, factory, bound):
    with factory() as session:
        joined = bound.join(session)
        nested = session.begin_nested()
        joined.produce(TOPIC, "1", partition=0)
        nested.rollback()
        session.commit()
    assert shop.both_have()


def test_the_first_dual_write_of_a_process_may_begin_with_a_savepoint(shop, writer):
    if event.contains(Session, "after_transaction_create", savepoints._open_now):
        event.remove(Session, "after_transaction_create", savepoints._open_now)
    factory = sessionmaker(shop.engine)
    bound = writer.bind(factory)
    with factory() as session:
        with session.begin_nested():
            session.add(Order(id=1))
            bound.produce(session, TOPIC, "1", partition=0)
        session.commit()
    assert shop.both_have(1)


def test_open_savepoints_are_committed_with_the_session(shop, factory, put):
    with factory() as session:
        put(session, 1)
        session.begin_nested()
        put(session, 2)
        session.commit()
    with factory() as session, session.begin():
        put(session, 3)
        session.begin_nested()
        put(session, 4)
    assert shop.both_have(1, 2, 3, 4)


def test_insert_or_skip(shop, factory, put):
    shop.database.execute("INSERT INTO orders (id) VALUES (1)")
    with factory() as session:
        for number in (1, 2):
            try:
                with session.begin_nested():
                    put(session, number)
                    session.flush()
            except exc.IntegrityError:
                continue
        session.commit()
    assert shop.rows == ["1", "2"]
    assert shop.messages == ["2"]


def test_an_error_of_flush_aborts_both_sides_with_the_rollback(shop, factory, put):
    shop.database.execute("INSERT INTO orders (id) VALUES (1)")
    with factory() as session:
        put(session, 2)
        put(session, 1)
        with pytest.raises(exc.IntegrityError):
            session.commit()
        session.rollback()
        put(session, 3)
        session.commit()
    assert shop.rows == ["1", "3"]
    assert shop.messages == ["3"]


def test_an_abort_at_commit_leaves_a_session_that_can_be_rolled_back(shop, factory, put, monkeypatch):
    with factory() as session:
        order = Order(id=1)
        session.add(order)
        put(session, 2)
        with monkeypatch.context() as patch:
            patch.setattr(JoinedStore, "decide", _refuse)
            with pytest.raises(TransactionAborted, match="a check failed"):
                session.commit()
        session.rollback()
        assert order not in session
        assert shop.both_have()
        put(session, 3)
        session.commit()
    with pytest.raises(TransactionAborted), factory.begin() as session:
        put(session, 4)
        monkeypatch.setattr(JoinedStore, "decide", _refuse)
    assert shop.both_have(3)


def _refuse(*_, **__):
    raise TransactionAborted("a check failed")


def test_a_fenced_owner_is_found_before_the_first_message_and_the_rows_cannot_commit(shop, factory, bound):
    with shop.writer(), factory() as session:
        session.add(Order(id=1))
        session.flush()
        with pytest.raises(Fenced):
            bound.produce(session, TOPIC, "1", partition=0)
        with pytest.raises(Fenced):
            session.commit()
    assert shop.both_have()


def test_a_pending_completion_is_reported_and_the_rows_are_there(shop, factory, put, monkeypatch):
    def pending(lane, *_):
        raise CompletionPending("no answer", transactional_id=lane.transactional_id)

    with factory() as session:
        put(session, 1)
        monkeypatch.setattr(Lane, "complete", pending)
        with pytest.raises(CompletionPending):
            session.commit()
        session.rollback()
    assert shop.rows == ["1"]


@pytest.mark.parametrize("verdict", [DoubtStep.COMMITTED, DoubtStep.ABORTED, DoubtStep.IN_DOUBT])
def test_a_commit_whose_answer_is_lost_is_resolved_and_the_session_goes_on(shop, factory, put, monkeypatch, verdict):
    real = JoinedStore.commit

    def lose_the_answer(self, connection, **_):
        if verdict is DoubtStep.ABORTED:
            self.rollback(connection)
        else:
            real(self, connection)
        self.discard(connection)
        raise TransactionInDoubt("the answer is missing") from OSError()

    expected = {DoubtStep.ABORTED: TransactionAborted, DoubtStep.IN_DOUBT: TransactionInDoubt}.get(verdict)
    with factory() as session:
        put(session, 1)
        with monkeypatch.context() as patch:
            patch.setattr(JoinedStore, "commit", lose_the_answer)
            patch.setattr(in_doubt, "resolve_commit", lambda *_: verdict)
            if expected is None:
                session.commit()
            else:
                with pytest.raises(expected):
                    session.commit()
                session.rollback()
        put(session, 2)
        session.commit()
    assert shop.rows == (["2"] if verdict is DoubtStep.ABORTED else ["1", "2"])


def test_a_session_that_could_not_join_cannot_commit_its_rows_alone(shop, factory, bound, monkeypatch):
    def busy(*_):
        raise Unavailable("all lanes were busy")

    with factory() as session:
        session.add(Order(id=1))
        session.flush()
        with monkeypatch.context() as patch:
            patch.setattr(Lanes, "take", busy)
            with pytest.raises(Unavailable):
                bound.produce(session, TOPIC, "1", partition=0)
        with pytest.raises(TransactionAborted, match="the session continued after an error: all lanes"):
            bound.produce(session, TOPIC, "1", partition=0)
        with pytest.raises(TransactionAborted, match="the session continued") as raised:
            session.commit()
        assert raised.value.retryable
        session.rollback()
        assert shop.both_have()
        session.add(Order(id=2))
        bound.produce(session, TOPIC, "2", partition=0)
        session.commit()
    assert shop.both_have(2)


def test_a_connection_that_is_lost_while_a_session_joins_raises_what_it_means(shop, factory, bound, put, monkeypatch):
    def lose(_, connection, *_others, **_options):
        connection.connection.driver_connection.close()
        connection.invalidate()  # as SQLAlchemy does after the error of a statement
        raise Unavailable("the database does not answer")

    with factory() as session:
        session.add(Order(id=1))
        session.flush()
        with monkeypatch.context() as patch:
            patch.setattr(JoinedStore, "read_incarnation", lose)
            with pytest.raises(Unavailable, match="does not answer"):
                bound.produce(session, TOPIC, "1", partition=0)
        session.rollback()
        put(session, 2)
        session.commit()
    assert shop.both_have(2)


@pytest.mark.parametrize("lost", [False, True], ids=["a listener raises", "the connection is lost"])
def test_a_commit_that_is_never_sent_leaves_nothing_behind_for_the_next_session(shop, factory, bound, put, lost):
    armed = [not lost]

    @event.listens_for(shop.engine, "commit")
    def refuse(_):
        if armed and armed.pop():
            raise ZeroDivisionError

    session = factory()
    put(session, 1)
    session.flush()
    if lost:
        session.connection().invalidate()
    with pytest.raises(exc.PendingRollbackError if lost else ZeroDivisionError):
        session.commit()
    session.close()
    with factory() as other:  # in the same thread, perhaps on the same connection
        put(other, 2)
        other.commit()
    assert shop.both_have(2)


def test_a_lost_connection_of_a_pool_at_the_address_of_a_former_one_aborts(shop, factory, put):
    former = QueuePool(lambda: None)
    for name in ("reset", "invalidate"):
        event.listen(former, name, sessions._returned)
    kept = former.recreate()  # as Engine.dispose() does: SQLAlchemy keeps the address of the former pool
    known = registry._key_to_collection
    stale = {(id(shop.engine.pool), *key[1:]): dict(known[key]) for key in list(known) if key[0] == id(former)}
    for key, owners in stale.items():
        known[key].update(owners)
    assert event.contains(shop.engine.pool, "invalidate", sessions._returned)
    try:
        session = factory()
        put(session, 1)
        session.flush()
        session.connection().invalidate()
        with factory() as other:
            put(other, 2)
            other.commit()
        session.close()
    finally:
        for key, owners in stale.items():
            for owner in owners:
                del known[key][owner]
    assert shop.both_have(2)
    del kept


@pytest.mark.parametrize("end", ["rollback", "close"])
@pytest.mark.parametrize("outside", [False, True], ids=["own", "outside"])
@pytest.mark.parametrize("on", ["engine", "connection"])
def test_a_listener_that_raises_in_a_rollback_keeps_no_lane_and_no_transaction(shop, end, on, outside):
    armed = []

    def refuse(_):
        if armed and armed.pop():
            raise ZeroDivisionError

    if on == "engine":
        event.listen(shop.engine, "rollback", refuse)
    with (
        shop.writer("small", limits=WriterLimits(max_lanes=1, lane_timeout_s=5)) as writer,
        shop.engine.connect() as connection,
    ):
        factory = sessionmaker()
        bound = writer.bind(factory)

        def put(session, number):
            session.add(Order(id=number))
            session.flush()
            bound.produce(session, TOPIC, str(number), partition=0)

        outer = connection.begin() if outside else None
        with factory(bind=connection if outer else shop.engine) as session:
            if on == "connection":
                event.listen(session.connection(), "rollback", refuse)
            put(session, 1)
            armed.append(True)
            if outer is None:
                with pytest.raises(ZeroDivisionError):
                    getattr(session, end)()
        if outer is not None:
            with pytest.raises(ZeroDivisionError):
                getattr(outer, end)()
        with factory(bind=shop.engine) as session:
            put(session, 2)
            session.commit()
    assert shop.both_have(2)


def test_a_commit_sent_as_text_is_refused_at_the_end(shop, factory, put):
    with factory() as session:
        put(session, 1)
        session.flush()
        session.execute(text("COMMIT"))
        with pytest.raises(IllegalStateError, match="was ended inside it"):
            session.commit()
    assert shop.messages == []


def test_sessions_in_many_threads_each_take_a_lane(shop, factory, put):
    inside = threading.Barrier(3)

    def write(number):
        with factory() as session:
            put_later = number
            inside.wait(60)
            put(session, put_later)
            session.commit()

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shop.rows == sorted(shop.messages) == ["1", "2", "3"]


def test_one_thread_may_produce_and_another_commit(shop, factory, put):
    session = factory()
    for step in (lambda: put(session, 1), session.commit, session.close):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert shop.both_have(1)


def test_a_second_session_of_a_thread_is_refused_while_the_first_is_inside(shop, factory, put, writer):
    with factory() as first, factory() as second:
        put(first, 1)
        with pytest.raises(IllegalStateError, match="already inside"):
            put(second, 2)
        with pytest.raises(IllegalStateError, match="already inside"), writer.transaction():
            pass
        second.rollback()
        first.commit()
        put(second, 3)
        second.commit()
    assert shop.both_have(1, 3)


def test_a_session_that_is_dropped_gives_its_lane_back(shop, put):
    with shop.writer("small", limits=WriterLimits(max_lanes=1, lane_timeout_s=5)) as writer:
        factory = sessionmaker(shop.engine)
        bound = writer.bind(factory)

        def drop():
            session = factory()
            session.add(Order(id=1))
            session.flush()
            bound.produce(session, TOPIC, "1", partition=0)

        drop()
        gc.collect()
        with factory() as session:
            session.add(Order(id=2))
            bound.produce(session, TOPIC, "2", partition=0)
            session.commit()
    assert shop.both_have(2)


@pytest.mark.parametrize(
    ("owner", "call", "error"),
    [
        (ProducerInstance, "send", TransactionAborted),
        (Lanes, "take", Unavailable),
        (JoinedStore, "read_incarnation", Fenced),
        (JoinedStore, "read_incarnation", ZeroDivisionError),
    ],
)
@pytest.mark.usefixtures("collects_itself")
@pytest.mark.parametrize("times", [1, 3])
def test_a_session_that_is_dropped_after_a_refused_message_gives_its_lane_back(
    shop, monkeypatch, owner, call, error, times
):
    """An error that is kept until the end would keep its traceback's frames, and so the session, and so its dual write."""
    dropped = []

    def refuse(*_, **_options):
        raise error("refused")

    def request(factory, bound):
        session = factory()
        dropped.append(weakref.ref(session))
        session.add(Order(id=1))
        session.flush()
        for _ in range(times):
            with suppress(DualWriteError, ZeroDivisionError):
                bound.produce(session, TOPIC, "1", partition=0)
        bound.produce(session, TOPIC, "1", partition=0)

    with (
        shop.writer("small", limits=WriterLimits(max_lanes=1, lane_timeout_s=5)) as writer,
        monkeypatch.context() as patch,
    ):
        factory = sessionmaker(shop.engine)
        bound = writer.bind(factory)
        patch.setattr(owner, call, refuse)
        with pytest.raises((DualWriteError, ZeroDivisionError)) as raised:
            request(factory, bound)
        del raised
        gc.collect()
        assert dropped[0]() is None
        patch.undo()
        with factory() as session:
            session.add(Order(id=2))
            bound.produce(session, TOPIC, "2", partition=0)
            session.commit()
    assert shop.both_have(2)


def test_a_session_inside_a_transaction_of_a_connection_waits_for_its_end(shop, writer):
    factory = sessionmaker()
    bound = writer.bind(factory)
    for number, end in ((1, "commit"), (2, "rollback")):
        with shop.engine.connect() as connection:
            outer = connection.begin()
            with factory(bind=connection) as session:
                bound.join(session)
                session.add(Order(id=number))
                bound.produce(session, TOPIC, str(number), partition=0)
                session.commit()
            gc.collect()
            getattr(outer, end)()
    assert shop.both_have(1)


@pytest.mark.parametrize("point", ["write.begun", "write.checked", "write.recorded"])
def test_a_failure_on_the_way_aborts_both(shop, factory, put, point):
    try:
        with factory() as session:
            failpoints.arm(f"{point}:1:raise")
            with pytest.raises(FailpointError):
                put(session, 1)
                session.commit()
            failpoints.arm("")
            session.rollback()
            put(session, 2)
            session.commit()
    finally:
        failpoints.arm("")
    assert shop.both_have(2)


def test_an_interruption_of_commit_leaves_both_or_neither(shop, factory, put):
    def interrupt(name):
        if name == "write.recorded":
            raise KeyboardInterrupt

    with factory() as session:
        put(session, 1)
        with failpoints.watched(interrupt), pytest.raises(KeyboardInterrupt):
            session.commit()
        session.rollback()
        put(session, 2)
        session.commit()
    assert shop.both_have(2)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_interruption_before_the_block_ends_leaves_no_block_behind(shop, factory, writer, bound, end):
    """The session may be kept, or be collected much later."""
    numbers = itertools.count()

    def write(how):
        number = next(numbers)
        with factory() as session:
            session.add(Order(id=number))
            bound.produce(session, TOPIC, str(number), partition=0)
            getattr(session, how)()
        kept.append(session)
        return number

    kept, told = [], []
    for line in itertools.count(1):
        interruption = Interruption(line, inside="_close")
        with suppress(KeyboardInterrupt), interruption.armed():
            write(end)
        if interruption.at is None:
            break
        told.append(write("commit"))
    assert line > 5
    assert set(map(str, told)) <= set(shop.rows)
    assert shop.rows == sorted(shop.messages, key=int)


def test_bulk_statements_take_part(shop, factory, bound):
    with factory() as session:
        session.execute(insert(Order), [{"id": 1}, {"id": 2}])
        for number in ("1", "2"):
            bound.produce(session, TOPIC, number, partition=0)
        session.commit()
    assert shop.both_have(1, 2)
