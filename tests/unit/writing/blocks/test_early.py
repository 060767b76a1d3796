"""Messages that wait for a savepoint are checked and copied when they are handed over."""

from types import SimpleNamespace

import pytest

from dualwrite.errors import IllegalStateError, TransactionAborted
from dualwrite.writing.blocks.early import hold, hold_many

SENT = "value", "key", "partition", "headers", "timestamp_ms", "on_delivery"


def producer(*, bulk=False):
    return SimpleNamespace(transactional_id="orders", bulk=bulk, max_message_bytes=60)


def held(value="1", key=None, *, topic="sold", bulk=False, **parts):
    """The parts that are sent of a message, and its size."""
    given = {"partition": None, "headers": None, "timestamp_ms": None, "on_delivery": None, **parts}
    send, size = hold(producer(bulk=bulk), topic, value, key, **given)
    sent = []
    send(SimpleNamespace(produce=lambda *args, **parts: sent.append((*args, *parts.values()))))
    [(of, *found)] = sent
    assert of == topic
    return dict(zip(SENT, found, strict=True)), size


def test_what_waits_is_what_was_handed_over():
    headers = {"n": "1", "m": None}
    send, size = hold(producer(), "sold", "ä", b"k", partition=3, headers=headers, timestamp_ms=7, on_delivery=print)
    headers["n"] = "2"
    sent = []
    send(SimpleNamespace(produce=lambda *args, **parts: sent.append((args, parts))))
    [(args, parts)] = sent
    assert args == ("sold", "ä".encode(), b"k")
    assert list(parts.pop("headers")) == [("n", b"1"), ("m", None)]
    assert parts == {"partition": 3, "timestamp_ms": 7, "on_delivery": print}
    assert size == 3


@pytest.mark.parametrize("headers", [[("n", "1")], [["n", "1"]], {"n": "1"}])
def test_headers_that_change_later_stay_those_of_the_call(headers):
    send, _ = hold(producer(), "sold", None, None, partition=None, headers=headers, timestamp_ms=None, on_delivery=None)
    if isinstance(headers, dict):
        headers["n"] = "2"
    elif isinstance(headers[0], list):
        headers[0][1] = "2"
    else:
        headers[:] = [("n", "2")]
    sent = []
    send(SimpleNamespace(produce=lambda *_, headers, **__: sent.extend(headers)))
    assert sent == [("n", b"1")]


MISTAKES = {
    "value is a dict": {"value": {"id": 1}},
    "value is a bytearray": {"value": bytearray(b"x")},
    "key is a tuple": {"key": (1, 2)},
    "header value is an int": {"headers": {"n": 1}},
    "timestamp is a float": {"timestamp_ms": 1.5},
    "partition is text": {"partition": "0"},
    "topic is None": {"topic": None},
    "on_delivery is text": {"on_delivery": "print"},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_part_of_another_type_is_refused_at_the_call(mistake):
    with pytest.raises(TypeError):
        held(**MISTAKES[mistake])


@pytest.mark.parametrize(
    "parts", [{"value": "x" * 30}, {"value": None, "key": b"x" * 30}, {"topic": "a b"}, {"partition": -2}]
)
def test_a_message_that_no_broker_takes_is_refused_at_the_call_and_not_tried_again(parts):
    with pytest.raises(TransactionAborted) as raised:
        held(**parts)
    assert not raised.value.retryable
    assert raised.value.transactional_id == "orders"


def test_a_callback_in_bulk_mode_is_refused():
    with pytest.raises(IllegalStateError, match="on_delivery"):
        held(bulk=True, on_delivery=print)


def test_many_messages_are_copied():
    values, keys = ["1", b"22", None], ["k", None, b"kk"]
    send, size = hold_many(producer(), "sold", values, keys)
    values.clear()
    keys.clear()
    sent = []
    send(SimpleNamespace(produce_many=lambda *args: sent.append(args)))
    assert sent == [("sold", [b"1", b"22", None], [b"k", None, b"kk"])]
    assert size == 6


def test_of_many_messages_the_one_that_is_too_large_is_named():
    with pytest.raises(TransactionAborted, match="row 1 has"):
        hold_many(producer(), "sold", ["1", "x" * 30], None)


def test_as_many_keys_as_values():
    with pytest.raises(ValueError, match="2 values, 1 keys"):
        hold_many(producer(), "sold", ["1", "2"], ["k"])
