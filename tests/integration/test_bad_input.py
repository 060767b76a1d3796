"""Settings and surroundings of ``DualWriter`` that cannot work: a clear error, nothing half done."""

import io
import logging
import pickle
import traceback
from functools import partial

import pytest
from harness.engines import ENGINES
from harness.orders import on_both
from harness.patience import patient
from harness.users import USERS
from sqlalchemy import create_engine, inspect, make_url, select, text, update

from dualwrite import ConfigurationError, DualWriter, TransactionAborted, Unavailable, WriterLimits, recover
from dualwrite.migrations import downgrade, upgrade
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import VERSION_TABLE, declare_tables
from dualwrite.testing.checker import read_committed

on_postgresql = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
on_each_engine = pytest.mark.parametrize("producer_engine", ENGINES)
STATE = declare_tables(None).state
SECRET = USERS["shop"]


def opening(kafka, engine, **settings):
    with DualWriter("orders", kafka=kafka, database=engine, **settings):
        pass


@on_both
def test_missing_tables_name_the_command(kafka, engine):
    with engine.connect() as connection:
        downgrade(connection, "base")
    with pytest.raises(ConfigurationError, match="dualwrite migrate"):
        opening(kafka, engine)


@pytest.mark.parametrize("revision", ["0000", "9999"])
@on_both
def test_older_and_newer_tables_name_the_command(kafka, engine, revision):
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))
    with pytest.raises(ConfigurationError, match="(?s)dualwrite|upgrade"):
        opening(kafka, engine)


@on_both
def test_bad_state_row_is_named_and_left_as_it_is(kafka, engine):
    opening(kafka, engine)
    with engine.begin() as connection:
        connection.execute(update(STATE).values(prepared_transaction_state="42:0;nonsense"))
    with engine.connect() as connection:
        before = connection.execute(select(STATE)).all()
    with pytest.raises(ConfigurationError, match="kafka_transaction_state") as caught:
        opening(kafka, engine)
    assert "orders" in str(caught.value)
    with engine.connect() as connection:
        assert connection.execute(select(STATE)).all() == before


@on_postgresql
def test_read_only_database_is_named(kafka, engine):
    read_only = create_engine(engine.url, connect_args={"options": "-c default_transaction_read_only=on"})
    with pytest.raises(ConfigurationError, match="read-only"):
        opening(kafka, read_only)
    read_only.dispose()


@on_postgresql
def test_missing_grant_is_named(kafka, engine, url):
    role = "dualwrite_stranger"
    with engine.begin() as connection:
        if not connection.execute(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}).scalar():
            connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'stranger'"))
    stranger = create_engine(make_url(url).set(username=role, password="stranger"))
    with pytest.raises(ConfigurationError, match="GRANT"):
        opening(kafka, stranger)
    stranger.dispose()


@on_each_engine
def test_unknown_topic_aborts_both_and_says_so(kafka, engine, orders, producer_engine):
    settings = {**kafka, "topic.metadata.propagation.max.ms": "200"}  # it waits for the topic so long
    with DualWriter("orders", kafka={**settings, "dualwrite.engine": producer_engine}, database=engine) as writer:
        with pytest.raises(TransactionAborted, match="no-such-topic") as caught, writer.transaction() as tx:
            tx.connection.execute(orders.insert().values(id=1))
            tx.produce("no-such-topic", value="1")
        assert not caught.value.retryable
    with engine.connect() as connection:
        assert connection.execute(select(orders)).all() == []


@on_each_engine
def test_message_larger_than_the_topic_takes_aborts_both(dualwrite_kafka, kafka, engine, orders, producer_engine):
    topic = dualwrite_kafka.create_topic(
        f"small-{engine.dialect.name}-{producer_engine}", 1, {"max.message.bytes": "2000"}
    )
    with DualWriter("orders", kafka={**kafka, "dualwrite.engine": producer_engine}, database=engine) as writer:
        with pytest.raises(TransactionAborted, match="(?i)large") as caught, writer.transaction() as tx:
            tx.connection.execute(orders.insert().values(id=1))
            tx.produce(topic, value=b"x" * 5000)
        assert not caught.value.retryable
        with writer.transaction() as tx:
            tx.connection.execute(orders.insert().values(id=2))
            tx.produce(topic, value="2")
    with engine.connect() as connection:
        assert connection.execute(select(orders.c.id)).scalars().all() == [2]
    assert [record.value for record in read_committed(kafka, topic)] == [b"2"]


def test_transaction_timeout_above_the_brokers_names_the_setting(kafka, engine):
    with pytest.raises(ConfigurationError, match=r"transaction\.max\.timeout\.ms"):
        opening({**kafka, "transaction.timeout.ms": 3_600_000}, engine)


@pytest.mark.parametrize(
    "setting",
    [
        {"transactional.id": "mine"},
        {"enable.idempotence": False},
        {"acks": "1"},
        {"security.protocol": "carrier pigeon"},
        {"ssl.no.such.key": "x"},
    ],
)
def test_kafka_settings_that_cannot_work_are_refused_by_name(kafka, engine, setting):
    (name,) = setting
    with pytest.raises(ConfigurationError, match=name.replace(".", r"\.")):
        opening({**kafka, **setting}, engine)


def test_broker_that_nobody_is_at_is_unavailable(engine):
    with pytest.raises(Unavailable):
        opening({"bootstrap.servers": "127.0.0.1:1"}, engine, limits=WriterLimits(timeout_s=2))
    assert SqlStateStore(engine).read(["orders"]) == []


@on_postgresql
def test_database_that_nobody_is_at_is_unavailable(kafka, engine):
    away = create_engine(engine.url.set(port=1))
    with pytest.raises(Unavailable):
        opening(kafka, away)


@pytest.fixture(scope="module")
def guarded(guarded_kafka):
    guarded_kafka.create_topic("guarded", 1)
    return guarded_kafka


@on_postgresql
@on_each_engine
def test_unauthorised_id_names_the_right_and_claims_nothing(guarded, engine, orders, producer_engine):
    """With a right added at a time, each missing one is named, until the granted prefix and topic are enough."""
    name, topic = f"orders-{producer_engine}", f"guarded-{producer_engine}"
    guarded.create_topic(topic, 1)
    kafka = patient(guarded.client_config("shop"), producer_engine)
    for operation in ("write", "describe"):
        guarded.allow("shop", operation, "topic", topic)
    with pytest.raises(ConfigurationError, match="(?i)transactional.?id"):
        DualWriter(name, kafka={**kafka, "dualwrite.engine": producer_engine}, database=engine).open()
    assert SqlStateStore(engine).read([name]) == []
    for operation in ("write", "describe"):
        guarded.allow("shop", operation, "transactional_id", name, prefixed=True)
    guarded.allow("shop", "read", "topic", topic)
    with DualWriter(name, kafka={**kafka, "dualwrite.engine": producer_engine}, database=engine) as writer:
        for number in (1, 2):
            with writer.transaction() as tx:
                tx.connection.execute(orders.insert().values(id=number))
                tx.produce(topic, value=str(number))
    assert recover(open_for_s=0, kafka=guarded.client_config("shop"), database=engine).losses == []
    assert [record.value for record in read_committed(guarded.admin_config(), topic)] == [b"1", b"2"]


@on_postgresql
@on_each_engine
def test_no_secret_shows_in_any_log_error_repr_row_or_pickle(guarded, url, engine, orders, producer_engine):
    """A canary: one password for Kafka and one for the database, through good and bad ways."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    root.addHandler(handler)
    level, root.level = root.level, logging.DEBUG
    shown, trying = [], partial(opening, producer_engine=producer_engine)
    database_password = make_url(url).password
    wrong = make_url(url).set(password=SECRET, username="nobody")
    try:
        kafka = guarded.client_config("shop")
        writer = DualWriter("canary", kafka={**kafka, "dualwrite.engine": producer_engine}, database=url)
        shown += [repr(writer), str(writer), repr(vars(writer)["_producers"])]
        for attempt in (
            lambda: trying({**kafka, "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "eve"}, engine, timeout_s=5),
            lambda: trying({**kafka, "ssl.key.password": SECRET, "ssl.bad": SECRET}, engine),
            lambda: trying(kafka, wrong.render_as_string(hide_password=False), timeout_s=5),
            lambda: trying(kafka, engine),
        ):
            try:
                attempt()
            except Exception as error:  # noqa: BLE001 - looked at, not handled
                shown += [str(error), repr(error), "".join(traceback.format_exception(error))]
                shown.append(repr(pickle.dumps(error)))
        with engine.connect() as connection:
            for table in inspect(connection).get_table_names():
                shown += [repr(row) for row in connection.execute(text(f'SELECT * FROM "{table}"'))]
    finally:
        root.removeHandler(handler)
        root.level = level
    shown.append(stream.getvalue())
    assert len(shown) > 10
    for text_ in shown:
        # Source lines in a traceback name the variable, not the value.
        assert SECRET not in text_
        assert database_password not in text_


@on_both
def test_migrating_twice_does_nothing(engine):
    with engine.connect() as connection:
        upgrade(connection)
    assert "kafka_transaction_state" in inspect(engine).get_table_names()
