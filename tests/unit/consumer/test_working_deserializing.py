"""Deserializers of a consumer: what they get, what the handler gets, and what becomes of a message that they cannot read."""

import json

import pytest
from confluent_kafka.error import KeyDeserializationError, ValueDeserializationError
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext, StringDeserializer
from harness.schema_registry import schema_registry
from harness.served import TOPIC

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.consumer.consumer import Deserializing
from dualwrite.errors import IllegalStateError

from .members import LETTERS
from .messages import Read

SCHEMA = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}'


@pytest.fixture
def write_ids(shop):
    """A handler that gets objects; notes the ids that each of its calls got."""

    def handler(tx, messages):
        handler.calls.append([message.value()["id"] for message in messages])
        for message in messages:
            number = message.value()["id"]
            tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
            tx.produce(TOPIC, str(number), partition=0)

    handler.calls = []
    return handler


def from_json(value, _context):
    return json.loads(value)


def orders(*values):
    return [
        Read(offset, json.dumps({"id": one}).encode() if isinstance(one, int) else one, key=b"k%d" % offset)
        for offset, one in enumerate(values)
    ]


def test_deserializers_get_what_confluents_consumer_gives_them():
    given = []

    def note(field):
        def deserialize(value, context):
            given.append((field, value, context.topic, context.field, context.headers))
            return f"{field} object"

        return deserialize

    message = Read(0, b"v", key=b"k", headers=[("h", b"1")])
    with Deserializing(note("key"), note("value")).applied([message]):
        assert (message.key(), message.value()) == ("key object", "value object")
    assert given == [
        ("key", b"k", "input", MessageField.KEY, [("h", b"1")]),
        ("value", b"v", "input", MessageField.VALUE, [("h", b"1")]),
    ]


def test_each_topic_has_its_own_and_the_others_have_none():
    mine, other = Read(0, b"1", topic="mine", key=b"k"), Read(0, b"1", topic="other", key=b"k")
    with Deserializing(StringDeserializer(), {"mine": from_json}).applied([mine, other]):
        assert [one.value() for one in (mine, other)] == [1, b"1"]
        assert [one.key() for one in (mine, other)] == ["k", "k"]


@pytest.mark.parametrize("given", [{"key": "utf-8"}, {"value": {"input": 1}}])
def test_what_cannot_be_called_is_refused(given):
    with pytest.raises(
        ConfigurationError, match=r"the (key|value) deserializer cannot be called.*\(bytes, SerializationContext\)"
    ):
        Deserializing(**given)


def test_an_asynchronous_deserializer_is_refused(member, write_ids):
    async def later(value, context):
        return value

    found = member(write_ids, dead_letter_topic=LETTERS, deserializing=Deserializing(value=later))
    with pytest.raises(IllegalStateError, match="asynchronous"):
        found.perform(1)
    assert found.offsets.to == {}


def test_the_handler_gets_new_objects_in_each_attempt(shop, member, write_ids):
    errors = [TransactionAborted("a deadlock")]

    def spoil(tx, messages):
        write_ids(tx, messages)
        for message in messages:
            message.value()["id"] = 99
        if errors:
            raise errors.pop()

    found = member(spoil, deserializing=Deserializing(value=from_json))
    found.perform_all(orders(1, 2))
    assert shop.both_have(1, 2)
    assert write_ids.calls == [[1, 2], [1, 2]]


def test_what_cannot_be_read_is_set_aside_in_its_place_as_it_was_read(shop, member, write_ids, produced_letters):
    found = member(write_ids, attempts=9, dead_letter_topic=LETTERS, deserializing=Deserializing(value=from_json))
    assert found.perform_all(orders(0, 1, b"\xff first", 3, b"second", 5)) is False
    assert write_ids.calls == [[0, 1], [3], [5]]  # once each: the handler is not to blame
    assert shop.rows == ["0", "1", "3", "5"]
    assert found.working.counts.dead_letters == 2
    assert found.offsets.to == {("input", 0): 6}
    assert [(value, key) for value, key, _ in produced_letters] == [(b"\xff first", b"k2"), (b"second", b"k4")]
    headers = dict(produced_letters[1][2])
    assert headers["dualwrite.dead_letter.exception"] == b"confluent_kafka.error.ValueDeserializationError"
    assert b"Expecting value: line 1 column 1" in headers["dualwrite.dead_letter.reason"]


def test_a_message_that_the_handler_refuses_is_set_aside_as_it_was_read(shop, member, write_ids, produced_letters):
    def picky(tx, messages):
        write_ids(tx, messages)
        if any(message.value()["id"] == 1 for message in messages):
            raise ValueError("one")

    deserializing = Deserializing(StringDeserializer(), from_json)
    member(picky, dead_letter_topic=LETTERS, deserializing=deserializing).perform_all(orders(0, 1))
    [(value, key, _)] = produced_letters
    assert (value, key) == (b'{"id": 1}', b"k1")


@pytest.mark.parametrize(("field", "error"), [("key", KeyDeserializationError), ("value", ValueDeserializationError)])
def test_without_a_dead_letter_topic_it_stops_after_those_before_it(shop, member, write_ids, field, error):
    def refuse(given, context):
        if given in {b"k1", b'{"id": 1}'}:
            raise UnicodeError("not ours")
        return from_json(given, context) if context.field == "value" else given

    given = {"value": from_json, field: refuse}
    found = member(write_ids, deserializing=Deserializing(**given))
    with pytest.raises(error, match="not ours") as caught:
        found.perform_all(orders(0, 1, 2))
    assert isinstance(caught.value.__cause__, UnicodeError)
    assert shop.both_have(0)
    assert found.offsets.to == {("input", 0): 1}


def test_a_registry_out_of_reach_is_waited_for(shop, member, write_ids, monkeypatch):
    """With a status, and without an answer; a schema that it does not have is the message's own fault."""
    with schema_registry() as registry:
        settings = {"url": registry.url, "timeout": 5, "max.retries": 0}
        context = SerializationContext("input", MessageField.VALUE)
        with SchemaRegistryClient(settings) as client:
            order = AvroSerializer(client, SCHEMA)({"id": 7}, context)
        registry.broken = 503

    states = iter([None, 503, 401, 0])
    real = AvroDeserializer.__call__
    with schema_registry() as again:
        again.subjects = registry.subjects
        nowhere = SchemaRegistryClient(settings)  # its port is closed now
        there = SchemaRegistryClient({**settings, "url": again.url})
        away, deserialize = AvroDeserializer(nowhere), AvroDeserializer(there)

        def ask(value, given):
            state = next(states, 0)
            if state is None:
                return real(away, value, given)
            again.broken = state
            return real(deserialize, value, given)

        found = member(write_ids, attempts=1, dead_letter_topic=LETTERS, deserializing=Deserializing(value=ask))
        found.perform_all(orders(order, b"\0\0\0\0\x63of no schema"))
        assert shop.rows == ["7"]
        assert found.working.counts.failed_attempts == 3 + 2  # and 2 to set the other one aside
        assert found.working.counts.dead_letters == 1
        nowhere.close()
        there.close()


def test_a_deserializers_transient_errors_are_waited_for(shop, member, write_ids):
    errors = [LookupError("the key server")] * 4

    def decrypt(value, context):
        if errors:
            raise errors.pop()
        return from_json(value, context)

    found = member(write_ids, attempts=1, transient=(LookupError,), deserializing=Deserializing(value=decrypt))
    found.perform_all(orders(1))
    assert shop.both_have(1)
