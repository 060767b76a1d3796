"""Messages that wait for a savepoint are refused at once if the producer would refuse them."""

from types import SimpleNamespace

import pytest

from dualwrite.errors import IllegalStateError, TransactionAborted
from dualwrite.writing.blocks.early import refuse_early


def producer(*, bulk=False):
    return SimpleNamespace(transactional_id="orders", bulk=bulk, max_message_bytes=10)


def test_messages_within_the_limit_are_taken():
    refuse_early(producer(), "sold", ["1234567", None, b"123456789\x00"], [b"key", "key", None], on_delivery=print)


@pytest.mark.parametrize(("value", "key"), [("12345678", "key"), ("äöüäöü", None), (None, b"12345678901")])
def test_a_message_above_it_aborts_and_is_not_tried_again(value, key):
    with pytest.raises(TransactionAborted, match="message.max.bytes is 10") as raised:
        refuse_early(producer(), "sold", ["1", value], [None, key])
    assert not raised.value.retryable


def test_a_callback_in_bulk_mode_is_refused():
    with pytest.raises(IllegalStateError, match="on_delivery"):
        refuse_early(producer(bulk=True), "sold", ["1"], on_delivery=print)


def test_as_many_keys_as_values():
    with pytest.raises(ValueError, match="2 values, 1 keys"):
        refuse_early(producer(), "sold", ["1", "2"], ["k"])
