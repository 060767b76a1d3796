"""Sessions that frameworks make, bound to a writer on real servers: their commit is the dual write."""

import gc
import weakref
from contextlib import suppress
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from harness.asgi import answer
from harness.engines import ENGINES
from harness.orders import Order, on_postgresql
from sqlalchemy import create_engine, exc, select, text, update
from sqlalchemy.orm import Session, sessionmaker
from sqlmodel import Field, SQLModel
from sqlmodel import Session as SQLModelSession

from dualwrite import ConfigurationError, DualWriter, Fenced, TransactionAborted, WriterLimits
from dualwrite.errors import IllegalStateError
from dualwrite.testing.proxy import PostgresProxy

pytestmark = on_postgresql


@pytest.fixture
def factory(engine):
    return sessionmaker(engine)


@pytest.fixture
def bound(writer, factory):
    return writer.bind(factory)


@pytest.fixture
def put(bound, dualwrite_topic):
    """Adds a row and a message of this number."""

    def put(session, number):
        session.add(Order(id=number))
        bound.produce(session, dualwrite_topic, str(number))

    return put


def test_commits_rollbacks_and_savepoints_of_sessions(factory, put, both):
    with factory() as session:
        put(session, 1)
        session.commit()
        put(session, 2)
        session.rollback()
        session.add(Order(id=3))
        session.flush()
        with pytest.raises(exc.IntegrityError), session.begin_nested():  # the first message is inside a savepoint
            put(session, 1)
            session.flush()
        with session.begin_nested() as outer:
            put(session, 4)
            with session.begin_nested():
                put(session, 5)
            outer.rollback()
        put(session, 6)
        session.get(Order, 3).note = "flushed by commit"
        session.commit()
    with factory.begin() as session:
        put(session, 7)
        session.begin_nested()
        put(session, 8)
    with pytest.raises(ZeroDivisionError), factory.begin() as session:
        put(session, 9)
        raise ZeroDivisionError
    assert both() == ([1, 3, 6, 7, 8], [1, 6, 7, 8])


def test_a_savepoint_of_the_driver_from_before_the_first_message_takes_no_row_from_it(factory, put, both):
    with factory() as session:
        session.add(Order(id=1))
        session.flush()
        driver = session.connection().connection.driver_connection
        with pytest.raises(ZeroDivisionError), driver.transaction():  # a savepoint that SQLAlchemy does not see
            put(session, 2)
            session.flush()
            raise ZeroDivisionError
        with pytest.raises(TransactionAborted, match="rolled back past SQLAlchemy"):
            session.commit()
    assert both() == ([], [])


def test_a_dependency_that_yields_a_session_commits_both_sides(factory, bound, put, both, engine):
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE notes (order_id int REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")
        )
    app = FastAPI()

    def session():
        with factory() as session, session.begin():
            yield session

    @app.post("/orders/{number}/{noted}")
    def place_order(number: int, noted: int, session: Annotated[Session, Depends(session, scope="function")]):
        put(session, number)
        session.execute(text("INSERT INTO notes VALUES (:noted)"), {"noted": noted})

    assert answer(app, "/orders/1/1") == ([200], None)
    statuses, error = answer(app, "/orders/2/3")
    assert (statuses, type(error)) == ([500], TransactionAborted)
    assert answer(app, "/orders/3/3") == ([200], None)
    assert both() == ([1, 3], [1, 3])


def test_the_session_of_flask_sqlalchemy(kafka, url, dualwrite_topic, both, engine):
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    db = SQLAlchemy(app)
    with app.app_context():
        database = db.engine
    with DualWriter("shop", kafka=kafka, database=database) as writer:
        messages = writer.bind(db.session)

        @app.post("/orders/<int:number>")
        def place_order(number):
            db.session.add(Order(id=number))
            messages.produce(db.session, dualwrite_topic, str(number))
            if number == 2:
                return "no commit: the end of the request rolls back", 400
            db.session.commit()
            return "placed"

        client = app.test_client()
        assert [client.post(f"/orders/{number}").status_code for number in (1, 2, 3)] == [200, 400, 200]
    database.dispose()
    assert both() == ([1, 3], [1, 3])


def test_the_session_of_sqlmodel(writer, engine, dualwrite_topic, both):
    class Placed(SQLModel, table=True):
        __tablename__ = "orders"
        id: int = Field(primary_key=True)

    class Own(SQLModelSession):
        """A class of its own: binding SQLModel's would bind it for the tests that follow."""

    messages = writer.bind(Own)
    with Own(engine) as session:
        session.add(Placed(id=1))
        messages.produce(session, dualwrite_topic, "1")
        session.commit()
    SQLModel.metadata.clear()
    assert both() == ([1], [1])


def test_an_owner_that_was_taken_over_commits_nothing_of_a_session(kafka, engine, factory, put, both):
    with factory() as session:
        put(session, 1)
        session.flush()
        with DualWriter("orders", kafka=kafka, database=engine):
            with pytest.raises((Fenced, TransactionAborted)):
                session.commit()
            session.rollback()
    assert both() == ([], [])


def test_a_snapshot_that_is_older_than_the_dual_write_is_refused(writer, engine, dualwrite_topic, both):
    factory = sessionmaker(engine.execution_options(isolation_level="REPEATABLE READ"))
    messages = writer.bind(factory)
    with factory() as session:
        session.add(Order(id=1))
        session.flush()
        with pytest.raises(IllegalStateError, match="REPEATABLE READ, and its snapshot is older"):
            messages.produce(session, dualwrite_topic, "1")
        with pytest.raises(TransactionAborted, match="continued after an error"):
            session.commit()
        session.rollback()
        messages.join(session)
        session.add(Order(id=2))
        session.flush()
        messages.produce(session, dualwrite_topic, "2")
        session.commit()
    assert both() == ([2], [2])


def test_a_session_of_a_copy_of_the_database_is_refused_and_of_another_engine_works(
    writer, url, copied, engine_of, dualwrite_topic, both
):
    for engine, number in ((copied, 1), (engine_of(url), 2)):
        factory = sessionmaker(engine)
        messages = writer.bind(factory)
        with factory() as session:
            session.add(Order(id=number))
            session.flush()
            if engine is copied:
                with pytest.raises(ConfigurationError, match="another database"):
                    messages.produce(session, dualwrite_topic, "1")
                with pytest.raises(TransactionAborted):
                    session.commit()
            else:
                messages.produce(session, dualwrite_topic, str(number))
                session.commit()
    with copied.connect() as connection:
        assert list(connection.scalars(select(Order.id))) == []
    assert both() == ([2], [2])


def test_a_session_of_a_test_that_rolls_everything_back_sends_nothing(writer, engine, dualwrite_topic, both):
    factory = sessionmaker(join_transaction_mode="create_savepoint")
    messages = writer.bind(factory)
    with engine.connect() as connection:
        outer = connection.begin()
        with factory(bind=connection) as session:
            for number in (1, 2):
                session.add(Order(id=number))
                messages.produce(session, dualwrite_topic, str(number))
                session.commit()
            session.rollback()
            assert list(session.scalars(select(Order.id))) == [1, 2]
        outer.rollback()
    assert both() == ([], [])


@pytest.mark.parametrize("fault", ["reset_answer", "reset_request"])
def test_a_lost_answer_to_the_commit_of_a_session_is_resolved(
    dualwrite_postgres, url, kafka, engine, dualwrite_topic, both, fault
):
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        factory = sessionmaker(through)
        with DualWriter("others", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer:
            messages = writer.bind(factory)
            with factory() as session:
                session.add(Order(id=1))
                messages.produce(session, dualwrite_topic, "1")
                getattr(proxy.on("COMMIT"), fault)()
                if fault == "reset_request":
                    with pytest.raises(TransactionAborted):
                        session.commit()
                    session.rollback()
                else:
                    session.commit()
                session.add(Order(id=2))
                messages.produce(session, dualwrite_topic, "2")
                session.commit()
        through.dispose()
    expected = [2] if fault == "reset_request" else [1, 2]
    assert both() == (expected, expected)


@pytest.mark.usefixtures("collects_itself")
@pytest.mark.parametrize("producer_engine", ENGINES)
def test_a_session_that_is_dropped_after_a_refused_message_keeps_nothing(
    kafka, engine, dualwrite_topic, both, producer_engine
):
    factory = sessionmaker(engine)
    dropped = []

    def request(bound):
        session = factory()
        dropped.append(weakref.ref(session))
        session.execute(update(Order).values(note="sold"))
        bound.produce(session, dualwrite_topic, "2")
        bound.produce(session, dualwrite_topic, b"x" * 2_000_000)

    with DualWriter(
        "orders",
        kafka={**kafka, "dualwrite.engine": producer_engine},
        database=engine,
        limits=WriterLimits(max_lanes=1),
    ) as writer:
        bound = writer.bind(factory)
        with factory() as session:
            session.add(Order(id=1))
            bound.produce(session, dualwrite_topic, "1")
            session.commit()
        with suppress(TransactionAborted):
            request(bound)
        gc.collect()
        assert dropped[0]() is None
        assert (writer.health().used, engine.pool.checkedout()) == (0, 0)
        with factory() as session:  # the lane and the row are free
            session.execute(update(Order).values(id=3))
            bound.produce(session, dualwrite_topic, "3")
            session.commit()
        assert both() == ([3], [1, 3])
