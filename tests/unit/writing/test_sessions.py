"""Which sessions can be bound to a writer, on SQLite and a simulated Kafka; and which are refused."""

from functools import partial

import pytest
from harness.bound import Order
from harness.served import TOPIC
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.errors import IllegalStateError


@pytest.mark.parametrize("makes", ["sessionmaker", "scoped", "class", "subclass"])
def test_every_way_to_make_sessions_can_be_bound(shop, writer, makes):
    class Own(Session):
        pass

    maker = sessionmaker(shop.engine)
    source = {"sessionmaker": maker, "scoped": scoped_session(maker), "class": Session, "subclass": Own}[makes]
    bound = writer.bind(source)
    session = source(shop.engine) if isinstance(source, type) else source()
    given = source if makes == "scoped" else session
    session.add(Order(id=1))
    bound.produce(given, TOPIC, "1", partition=0)
    session.commit()
    session.close()
    assert shop.both_have(1)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (sessionmaker(twophase=True), "two phases"),
        (async_sessionmaker(), "asyncio.to_thread"),
        (async_scoped_session(async_sessionmaker(), scopefunc=lambda: 1), "asyncio.to_thread"),
        (AsyncSession, "asyncio.to_thread"),
        (scoped_session(partial(Session)), "give a sessionmaker"),
        (object(), "give a sessionmaker"),
        (Session(), "give a sessionmaker"),
    ],
    ids=["twophase", "async_sessionmaker", "async_scoped_session", "AsyncSession", "partial", "object", "session"],
)
def test_what_cannot_be_bound_is_refused_with_what_to_do(writer, source, words):
    with pytest.raises(ConfigurationError, match=words):
        writer.bind(source)


def test_a_session_of_another_factory_is_refused(shop, bound):
    with sessionmaker(shop.engine)() as other, pytest.raises(IllegalStateError, match="not a session of the factory"):
        bound.produce(other, TOPIC, "1")


def test_binding_the_class_of_all_sessions_leaves_the_sessions_of_blocks_as_they_are(shop, writer):
    class Own(Session):
        pass

    with shop.writer("others", session_factory=Own) as others:
        others.bind(Own)
        with others.transaction() as tx:
            with tx.session.begin_nested():
                tx.session.add(Order(id=1))
            tx.produce(TOPIC, "1", partition=0)
    assert shop.both_have(1)


def test_a_session_of_another_writers_dual_write_is_refused(shop, factory, bound):
    with shop.writer("others") as others, factory() as session:
        bound.join(session)
        with pytest.raises(IllegalStateError, match="through another bind"):
            others.bind(factory).produce(session, TOPIC, "1")
        with pytest.raises(TransactionAborted, match="continued after an error"):
            session.commit()


def test_a_session_on_a_connection_that_another_has_joined_is_refused_until_that_one_has_ended(shop, writer):
    factory = sessionmaker()
    bound = writer.bind(factory)
    with shop.engine.connect() as connection:
        outer = connection.begin()
        with factory(bind=connection) as first, factory(bind=connection) as second:
            bound.produce(first, TOPIC, "1", partition=0)
            second.add(Order(id=2))
            second.flush()
            with pytest.raises(IllegalStateError, match="another session on this connection"):
                bound.produce(second, TOPIC, "2", partition=0)
            second.commit()
        with pytest.raises(TransactionAborted, match="continued after an error: another session"):
            outer.commit()
    with shop.engine.connect() as connection:
        outer = connection.begin()
        for number in (3, 4):
            with factory(bind=connection) as session:
                session.add(Order(id=number))
                bound.produce(session, TOPIC, str(number), partition=0)
                session.commit()
        outer.commit()
    assert shop.both_have(3, 4)


def test_a_session_is_no_connection_and_its_own_cannot_have_a_second_dual_write(shop, factory, bound, writer):
    with factory() as session:
        with pytest.raises(IllegalStateError, match=r"use bind\(\)"), writer.transaction(session):
            pass
        session.add(Order(id=1))
        bound.produce(session, TOPIC, "1", partition=0)
        with pytest.raises(IllegalStateError, match="already inside"), writer.transaction(session.connection()):
            pass
        session.commit()
    assert shop.both_have(1)


def test_a_session_on_the_connection_of_a_block_is_refused_and_the_block_aborts(shop, writer):
    factory = sessionmaker()
    bound = writer.bind(factory)
    with pytest.raises(TransactionAborted, match="already inside.*rolled back"), writer.transaction() as tx:
        shop.put(tx, 1)
        with factory(bind=tx.connection) as session:
            session.add(Order(id=2))
            with pytest.raises(IllegalStateError, match="already inside"):
                bound.produce(session, TOPIC, "2", partition=0)
            session.commit()
    assert shop.both_have()


@pytest.mark.parametrize("before", [True, False])
def test_a_session_with_two_databases_is_refused(shop, writer, tmp_path, before):
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    factory = sessionmaker(shop.engine)
    bound = writer.bind(factory)
    with factory() as session:
        session.add(Order(id=1))
        session.flush()
        if before:
            session.connection(bind_arguments={"bind": other})
            with pytest.raises(ConfigurationError, match="more than one connection"):
                bound.produce(session, TOPIC, "1")
            with pytest.raises(TransactionAborted, match="continued"):
                session.commit()
        else:
            bound.produce(session, TOPIC, "1", partition=0)
            with pytest.raises(ConfigurationError, match="more than one connection"):
                session.connection(bind_arguments={"bind": other})
            with pytest.raises(TransactionAborted, match="continued"):
                session.commit()
    assert shop.both_have()
    other.dispose()


def test_a_session_in_autocommit_or_of_another_database_is_refused(shop, writer, tmp_path):
    elsewhere = create_engine(f"sqlite:///{tmp_path}/other.db")
    automatic = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    for engine, words in ((automatic, "in autocommit"), (elsewhere, "another database")):
        factory = sessionmaker(engine)
        bound = writer.bind(factory)
        with factory() as session, pytest.raises(ConfigurationError, match=words):
            bound.produce(session, TOPIC, "1")
    elsewhere.dispose()
    assert shop.messages == []


def test_the_dual_write_of_a_session_has_no_second_session(factory, bound):
    with factory() as session, pytest.raises(IllegalStateError, match="use your own"):
        _ = bound.join(session).session
