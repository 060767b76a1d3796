"""Whatever has produced a message, it waits in the database as it was produced, and is sent so: parts, savepoints, groups.

Blocks on connections of Django's are in ``test_django.py``.
"""

import threading
from contextlib import ExitStack, closing

import psycopg
import pyarrow as pa
import pytest
from confluent_kafka.error import ValueSerializationError
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from harness.messages import consume
from harness.orders import on_postgresql
from harness.patience import PATIENCE_S, patient, wait_until
from harness.schema_registry import schema_registry
from sqlalchemy import insert, make_url, select, text

from dualwrite import DualWriter, ProducerRecord, RowUnit, TransactionAborted, WriterLimits
from dualwrite.protocol.outbox import PRODUCED_AT
from dualwrite.testing.checker import read_committed

pytestmark = on_postgresql
LIMITS = WriterLimits(max_lanes=2, fallback_after_s=0.5, timeout_s=PATIENCE_S, lane_timeout_s=PATIENCE_S)
ORDER = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}'


@pytest.fixture
def waiting(kafka, engine):
    """A writer whose messages always wait."""
    with DualWriter("orders", kafka=kafka, database=engine, outbox="always", limits=LIMITS) as writer:
        yield writer


@pytest.fixture
def sent(kafka, engine, dualwrite_topic):
    """Waits until nothing waits any more; then the values in Kafka, in their order."""

    def read():
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            wait_until(lambda: connection.scalar(text("SELECT count(*) FROM dualwrite_outbox")) == 0)
        return [record.value.decode() for record in read_committed(kafka, dualwrite_topic)]

    return read


@pytest.fixture
def rows(engine, orders):
    def read():
        with engine.connect() as connection:
            return sorted(connection.scalars(select(orders.c.id)))

    return read


def put(writer, topic, value):
    """Whether the message waits."""
    with writer.transaction() as tx:
        tx.produce(topic, value)
    return tx.outbox


def produce_all(tx, topic):
    """Messages of every kind."""
    tx.produce(topic, "both", "k", partition=0, headers=[("a", "1"), ("a", None)], timestamp_ms=1_767_225_600_000)
    tx.produce(topic, None, "tombstone", partition=1)
    tx.produce(topic, b"\x00\xff", partition=0)
    tx.produce_many(topic, ["one", None, "three"], ["k", "k", "z"])
    entry = pa.struct([("key", pa.string()), ("value", pa.binary())])
    tx.produce_arrow(
        topic,
        pa.array([b"first", None]),
        pa.array([b"x", b"y"]),
        pa.array([[{"key": "h", "value": b"v"}], None], pa.list_(entry)),
        pa.array([1, 0], pa.int32()),
        timestamps=pa.array([1_767_225_600_001, None], pa.int64()),
    )


def read_all(config, topic):
    """By partition, the messages that :func:`produce_all` has made; a timestamp only where it gave one."""
    read_committed(config, topic)  # waits until no transaction is open
    found = [
        (
            one.partition(),
            (
                one.value(),
                one.key(),
                [(name, value) for name, value in one.headers() or () if name != PRODUCED_AT],
                one.timestamp()[1] if one.timestamp()[1] < 1_767_300_000_000 else None,
            ),
        )
        for one in consume(config, topic)
    ]
    return [[message for partition, message in found if partition == number] for number in (0, 1)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_messages_of_every_kind_are_the_same_whether_they_go_directly_or_wait(mortal_kafka, engine, when):
    """Kafka falls silent before or after they are produced: then the block falls back with what it has kept."""
    config = patient(mortal_kafka.client_config())
    direct, later = (mortal_kafka.create_topic(f"every-kind-{when}-{name}", 2) for name in ("direct", "later"))
    with DualWriter("direct", kafka=config, database=engine, limits=LIMITS) as writer, writer.transaction() as tx:
        produce_all(tx, direct)
    with DualWriter("orders", kafka=config, database=engine, outbox="fallback", limits=LIMITS) as writer:
        wait_until(lambda: not put(writer, later, "first"))
        try:
            with writer.transaction() as tx:
                if when == "before":
                    mortal_kafka.suspend()
                produce_all(tx, later)
                mortal_kafka.suspend()
            assert tx.outbox is True
        finally:
            mortal_kafka.resume()
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM dualwrite_outbox")) == 0, "closing sends what waits"
    made, found = read_all(config, direct), read_all(config, later)
    assert [messages[-len(expected) :] for messages, expected in zip(found, made, strict=True)] == made


def test_a_block_on_a_psycopg_connection_falls_back_and_waits_as_any_other(mortal_kafka, url, engine, rows):
    config = patient(mortal_kafka.client_config())
    topic, other = (mortal_kafka.create_topic(f"psycopg-falls-back-{name}", 1) for name in ("here", "there"))
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)

    def put_both(tx, number):
        connection.execute("INSERT INTO orders (id) VALUES (%s)", [number])
        tx.produce(topic, str(number))

    def put_all(tx, first):
        put_both(tx, first)
        with connection.transaction():
            put_both(tx, first + 1)
        put_both(tx, first + 2)

    with (
        DualWriter("orders", kafka=config, database=engine, outbox="fallback", limits=LIMITS) as writer,
        psycopg.connect(plain) as connection,
    ):
        wait_until(lambda: not put(writer, other, "first"))
        with writer.transaction(connection) as tx:
            put_all(tx, 1)
        try:
            with writer.transaction(connection) as tx:
                mortal_kafka.suspend()
                put_all(tx, 4)
            assert tx.outbox is True
            with writer.transaction(connection) as tx:
                put_all(tx, 7)
                assert tx.outbox is True
            with pytest.raises(TransactionAborted, match="savepoint"), writer.transaction(connection) as tx:
                put_both(tx, 10)
                with pytest.raises(ZeroDivisionError), connection.transaction():
                    put_both(tx, 11)
                    1 / 0  # noqa: B018 - raises
        finally:
            mortal_kafka.resume()
    assert rows() == list(range(1, 10))
    assert [int(record.value) for record in read_committed(config, topic)] == list(range(1, 10))


def test_units_of_a_group_wait_without_those_that_have_failed(waiting, sent, rows, orders, dualwrite_topic):
    inside, goes_on = threading.Event(), threading.Event()

    def unit(number):
        def work(tx):
            if number == 0:
                inside.set()
                assert goes_on.wait(PATIENCE_S)
            tx.connection.execute(insert(orders).values(id=number))
            tx.produce(dualwrite_topic, str(number), "k", partition=0)
            if number % 5 == 4:
                raise ZeroDivisionError

        return work

    def row_unit(number):
        message = ProducerRecord(dualwrite_topic, str(number), "k", partition=0)
        return RowUnit(insert(orders), {"id": number}, messages=[message])

    futures = [waiting.submit(unit(0))]
    assert inside.wait(PATIENCE_S)
    futures += [waiting.submit(unit(number)) for number in range(1, 10)]
    futures += [waiting.submit(row_unit(number)) for number in (10, 11, 5, 12)]  # the row 5 is there already
    goes_on.set()
    failed = [number for number, one in enumerate(futures) if one.exception(PATIENCE_S) is not None]
    assert failed == [4, 9, 12]
    written = [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12]
    assert sorted(map(int, sent())) == rows() == written


def test_units_of_a_group_fall_back_together(mortal_kafka, engine, orders, rows):
    config = patient(mortal_kafka.client_config())
    topic = mortal_kafka.create_topic("units-fall-back", 1)

    def unit(number):
        def work(tx):
            tx.connection.execute(insert(orders).values(id=number))
            tx.produce(topic, str(number))

        return work

    with DualWriter("orders", kafka=config, database=engine, outbox="fallback", limits=LIMITS) as writer:
        writer.submit(unit(0)).result(PATIENCE_S)
        mortal_kafka.suspend()
        try:
            futures = [writer.submit(unit(number), key="k") for number in range(1, 20)]
            futures.append(
                writer.submit(RowUnit(insert(orders), {"id": 20}, messages=[ProducerRecord(topic, "20")]), key="k")
            )
            for one in futures:
                one.result(PATIENCE_S)
        finally:
            mortal_kafka.resume()
        writer.submit(unit(21), key="k").result(PATIENCE_S)
    assert rows() == list(range(22))
    assert [int(record.value) for record in read_committed(config, topic)] == list(range(22))


def test_a_message_waits_as_its_serializer_has_made_it_and_a_registry_that_is_away_is_an_error_of_the_block(
    kafka, engine, orders, rows, sent, dualwrite_topic
):
    with schema_registry() as registry, ExitStack() as closed:
        client = closed.enter_context(closing(SchemaRegistryClient({"url": registry.url, "max.retries": 0})))
        made = AvroSerializer(client, ORDER)
        given = {"serializers": {"value": {dualwrite_topic: made}}, "outbox": "always", "limits": LIMITS}
        with DualWriter("orders", kafka=kafka, database=engine, **given) as writer:
            registry.broken = 503
            for number in range(2):
                with pytest.raises(ValueSerializationError, match="broken"), writer.transaction() as tx:
                    tx.connection.execute(insert(orders).values(id=number))
                    tx.produce(dualwrite_topic, {"id": number}, partition=0)
            registry.broken = 0
            with writer.transaction() as tx:
                tx.connection.execute(insert(orders).values(id=2))
                tx.produce(dualwrite_topic, {"id": 2}, partition=0)
            registry.broken = 503  # what is known of the schema is enough
            with writer.transaction() as tx:
                tx.connection.execute(insert(orders).values(id=3))
                tx.produce(dualwrite_topic, {"id": 3}, partition=0)
        assert rows() == [2, 3]
        found = [record.value for record in read_committed(kafka, dualwrite_topic)]
        assert [value[:1] for value in found] == [b"\x00"] * 2
        assert [value[5:] for value in found] == [b"\x04", b"\x06"]
