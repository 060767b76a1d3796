"""Serializers: what they get, what becomes of their errors, and that a block goes on without the message that failed."""

import json
import struct
import threading
from uuid import UUID

import pytest
from confluent_kafka.error import KeySerializationError, ValueSerializationError
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import (
    IntegerSerializer,
    MessageField,
    SerializationContext,
    SerializationError,
    StringSerializer,
)
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from harness.engines import taking
from harness.messages import protobuf_file
from harness.schema_registry import schema_registry
from harness.served import TOPIC
from sqlalchemy import text
from sqlalchemy.orm import sessionmaker

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.errors import IllegalStateError
from dualwrite.kafka.librdkafka.producer import ProducerInstance
from dualwrite.kafka.native.producer import NativeInstance
from dualwrite.writing.transaction import Serializing


@pytest.fixture
def produced(monkeypatch):
    """The key, value and headers of the messages that reach the engine."""
    found = []
    taking(monkeypatch, lambda message: found.append((message.key, message.value, list(message.headers))))
    return found


def as_number(value, _context):
    return struct.pack(">i", value)


def test_confluents_serializers_make_keys_and_values(shop, produced):
    with (
        shop.writer(serializers={"key": StringSerializer(), "value": IntegerSerializer()}) as writer,
        writer.transaction() as tx,
    ):
        tx.produce(TOPIC, 7, "seven", partition=0)
        tx.produce(TOPIC, None, "gone", partition=0)
    assert produced == [(b"seven", b"\x00\x00\x00\x07", []), (b"gone", None, [])]


def test_a_serializer_learns_the_topic_the_field_and_the_headers_and_may_add_to_them(shop, produced):
    seen = []

    def serialize(value, context):
        seen.append((context.topic, context.field, value, list(context.headers)))
        context.headers.append((f"{context.field}-schema", b"1"))
        return str(value)

    own = {"kind": "order"}
    with shop.writer(serializers={"key": serialize, "value": serialize}) as writer, writer.transaction() as tx:
        tx.produce(TOPIC, {"id": 1}, 1, partition=0, headers=own)
    assert seen == [
        (TOPIC, MessageField.KEY, 1, [("kind", "order")]),
        (TOPIC, MessageField.VALUE, {"id": 1}, [("kind", "order"), ("key-schema", b"1")]),
    ]
    assert produced == [(b"1", b"{'id': 1}", [("kind", b"order"), ("key-schema", b"1"), ("value-schema", b"1")])]
    assert own == {"kind": "order"}


def test_messages_may_be_passed_on_as_they_were_read(shop, produced):
    with shop.writer(serializers={"value": as_number}) as writer, writer.transaction() as tx:
        tx.without_serializers.produce(TOPIC, b"as it was", b"key", partition=0)
        tx.produce(TOPIC, 1, partition=0)
    assert produced == [(b"key", b"as it was", []), (None, b"\x00\x00\x00\x01", [])]


def test_a_bound_sessions_messages_are_serialized_and_it_goes_on_without_one_that_cannot_be(shop, produced):
    factory = sessionmaker(shop.engine)
    with shop.writer(serializers={"value": {TOPIC: as_number}}) as writer, factory() as session:
        bound = writer.bind(factory)
        with pytest.raises(ValueSerializationError):
            bound.produce(session, TOPIC, "not a number", partition=0)
        session.execute(text("INSERT INTO orders (id) VALUES (1)"))
        bound.produce(session, TOPIC, 1, partition=0)
        session.commit()
    assert shop.rows == ["1"]
    assert [value for _, value, _ in produced] == [b"\x00\x00\x00\x01"]


def test_each_topic_may_have_its_own_and_the_others_have_none():
    serializing = Serializing(value={"numbers": as_number})
    assert serializing.message("numbers", "k", 1, None) == ("k", b"\x00\x00\x00\x01", None)
    assert serializing.message("texts", "k", "1", {"a": "b"}) == ("k", "1", {"a": "b"})
    assert serializing.many("numbers", None, [1, 2]) == (None, [b"\x00\x00\x00\x01", b"\x00\x00\x00\x02"])
    assert serializing.many("texts", ["k"], ["1"]) == (["k"], ["1"])


@pytest.mark.parametrize(("given", "error"), [("value", ValueSerializationError), ("key", KeySerializationError)])
def test_a_block_goes_on_without_the_message_that_cannot_be_serialized(shop, given, error):
    def serialize(value, _context):
        if value == "bad":
            raise LookupError("no such field")
        return value

    with shop.writer(serializers={given: serialize}) as writer, writer.transaction() as tx:
        shop.put(tx, 1)
        with pytest.raises(error, match="no such field") as raised:
            tx.produce(TOPIC, "bad", "bad", partition=0)
        assert isinstance(raised.value.__cause__, LookupError)
        assert isinstance(raised.value, SerializationError)
        shop.put(tx, 2)
    assert shop.both_have(1, 2)


def test_an_error_that_leaves_the_block_aborts_both_sides(shop):
    with shop.writer(serializers={"value": as_number}) as writer:
        with pytest.raises(ValueSerializationError), writer.transaction() as tx:
            tx.connection.exec_driver_sql("INSERT INTO orders (id) VALUES (1)")
            tx.produce(TOPIC, 1, partition=0)
            tx.produce(TOPIC, "not a number", partition=0)
        assert (shop.rows, shop.messages) == ([], [])


def test_of_many_messages_none_is_produced_if_one_cannot_be_serialized(shop, monkeypatch):
    many = []
    for kind in (NativeInstance, ProducerInstance):
        monkeypatch.setattr(kind, "send_many", lambda _, batch: many.append(batch[:3]))
    with shop.writer(serializers={"value": as_number}) as writer, writer.transaction() as tx:
        with pytest.raises(ValueSerializationError):
            tx.produce_many(TOPIC, [1, "two", 3])
        assert many == []
        tx.produce_many(TOPIC, iter([1, 3]))
    assert many == [(TOPIC, [b"\x00\x00\x00\x01", b"\x00\x00\x00\x03"], None)]


def test_a_result_that_is_no_bytes_is_refused(shop):
    with (
        shop.writer(serializers={"value": lambda value, _: value}) as writer,
        writer.transaction() as tx,
        pytest.raises(ValueSerializationError, match="made dict"),
    ):
        tx.produce(TOPIC, {"id": 1}, partition=0)


def test_a_message_that_waits_for_a_savepoint_is_serialized_at_once(shop, produced):
    order = {"id": 1}
    with (
        shop.writer(serializers={"value": lambda value, _: str(value["id"])}) as writer,
        writer.transaction() as tx,
        tx.connection.begin_nested(),
    ):
        tx.produce(TOPIC, order, partition=0)
        order["id"] = 2
        with pytest.raises(ValueSerializationError):
            tx.produce(TOPIC, {}, partition=0)
    assert [value for _, value, _ in produced] == [b"1"]


def test_the_bytes_that_a_serializer_makes_are_held_against_the_limit(shop):
    with (
        shop.writer(serializers={"value": lambda size, _: b"x" * size}) as writer,
        pytest.raises(TransactionAborted, match="MESSAGE_TOO_LARGE"),
        writer.transaction() as tx,
        tx.connection.begin_nested(),
    ):
        tx.produce(TOPIC, 2_000_000, partition=0)


def test_no_serializer_is_called_once_the_block_has_ended(shop):
    asked = []
    with shop.writer(serializers={"value": lambda value, _: asked.append(value)}) as writer:
        with writer.transaction() as tx:
            pass
        for produce in (lambda: tx.produce(TOPIC, 1), lambda: tx.produce_many(TOPIC, [1])):
            with pytest.raises(IllegalStateError):
                produce()
    assert asked == []


@pytest.mark.parametrize("wrong", [{"value": "json"}, {"key": {"orders": 7}}])
def test_what_cannot_be_called_is_refused_when_the_writer_is_made(shop, wrong):
    with pytest.raises(ConfigurationError, match="cannot be called"):
        shop.writer(serializers=wrong)


@pytest.mark.parametrize("wrong", [{"values": str}, str])
def test_serializers_are_a_dictionary_of_keys_and_values(shop, wrong):
    with pytest.raises(ConfigurationError, match='"key": ..., "value": ...'):
        shop.writer(serializers=wrong)


ORDER = {"type": "object", "title": "Order", "properties": {"id": {"type": "integer"}}}


def avro(client, **conf):
    schema = '{"type": "record", "name": "Order", "fields": [{"name": "item", "type": "string"}]}'
    return AvroSerializer(client, schema, conf=conf), AvroDeserializer(client), {"item": "a pot of tea"}


def json_schema(client, **conf):
    return JSONSerializer(json.dumps(ORDER), client, conf=conf), JSONDeserializer(json.dumps(ORDER)), {"id": 1}


def protobuf(client, **conf):
    pool = descriptor_pool.DescriptorPool()
    pool.Add(FileDescriptorSet.FromString(protobuf_file(Order={"id": "int32"})).file[0])
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Order"))
    return ProtobufSerializer(order, client, conf=conf), ProtobufDeserializer(order), order(id=1)


@pytest.mark.parametrize("kind", [avro, json_schema, protobuf])
@pytest.mark.parametrize("where", ["value", "headers"])
def test_the_serializers_of_a_schema_registry_make_what_their_deserializers_read(shop, produced, kind, where):
    conf = {} if where == "value" else {"schema.id.serializer": header_schema_id_serializer}
    with schema_registry() as registry, SchemaRegistryClient({"url": registry.url}) as client:
        known = registry.answer

        def answer(*request):
            status, found = known(*request)
            return status, {**found, "guid": str(UUID(int=found["id"]))} if "id" in found else found

        registry.answer = answer  # as newer registries do
        serialize, deserialize, order = kind(client, **conf)
        with shop.writer(serializers={"value": serialize}) as writer, writer.transaction() as tx:
            tx.produce(TOPIC, order, partition=0)
        assert registry.subjects.keys() == {f"{TOPIC}-value"}
        [(_, value, headers)] = produced
        assert [name for name, _ in headers or ()] == ([] if where == "value" else ["__value_schema_id"])
        assert deserialize(value, SerializationContext(TOPIC, MessageField.VALUE, headers)) == order


def test_a_registry_that_does_not_answer_costs_a_block_the_clients_timeout_and_no_more(shop):
    with schema_registry() as registry:
        gate = threading.Event()
        registry.answer = lambda *_: (gate.wait(60), (503, {}))[1]
        client = SchemaRegistryClient({"url": registry.url, "timeout": 0.05, "max.retries": 0})
        order = AvroSerializer(client, '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}')
        with shop.writer(serializers={"value": {"orders": order}}) as writer, writer.transaction() as tx:
            with pytest.raises(ValueSerializationError) as raised:
                tx.produce("orders", {"id": 1}, partition=0)
            assert "Timeout" in type(raised.value.__cause__).__name__
            shop.put(tx, 2)
        assert shop.both_have(2)
        client.close()
        gate.set()
