"""Messages on their way to the engine: at once or with their savepoint, and no error is forgotten."""

from types import SimpleNamespace

import pytest

from dualwrite.errors import ConfigurationError, Fenced, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.protocol.lives import WriteEvent
from dualwrite.protocol.message import Message, MessageBatch
from dualwrite.writing.dual_write import DualWrite


class Producer:
    """A producer and its engine: notes the calls, and refuses messages with planted errors."""

    max_message_bytes = 60

    def __init__(self):
        self.calls = []
        self.refusals = {}

    @property
    def engine(self):
        return self

    def begin_transaction(self):
        self.calls.append("begin")

    def send(self, message):
        if (error := self.refusals.get(message.value)) is not None:
            raise error
        self.calls.append(message.value)

    def take(self, batch):
        self.calls += batch.values

    def __setattr__(self, name, value):
        if name == "corked":
            self.calls.append("cork" if value else "uncork")
        super().__setattr__(name, value)


class Savepoints:
    """A connection with savepoints; ``waiting`` messages stay until a test releases them."""

    def __init__(self, *, direct=False, holds=True):
        self.direct, self.holds = direct, holds
        self.waiting, self.released = [], []
        self.calls = []
        self.refusal = None

    def add(self, message):
        if self.refusal is not None:
            raise self.refusal
        (self.waiting if self.holds else self.released).append(message)

    def release(self):
        self.released += self.waiting
        self.waiting = []

    def take(self):
        taken, self.released = self.released, []
        return taken

    def finish(self):
        self.calls.append("finish")
        if self.refusal is not None:
            raise self.refusal
        self.release()

    def stop(self):
        self.calls.append("stop")


@pytest.fixture
def producer():
    return Producer()


@pytest.fixture
def write(producer):
    lane = SimpleNamespace(producer=producer, transactional_id="orders")
    write = DualWrite(lane, None, None, margin_s=1.0, timeout_s=1.0)
    write._machine.apply(WriteEvent.CHECK)
    return write


def message(text):
    return Message("sold", text, None, None, (), None, None, 1)


def refused(producer, error):
    producer.refusals[str(error)] = error
    return message(str(error))


def test_a_kafka_transaction_begins_with_the_first_message_and_only_once(write, producer):
    assert not write.sending
    write.send(message("m1"))
    write.send(message("m2"))
    assert producer.calls == ["begin", "m1", "m2"]
    assert write.sending


def test_a_dual_write_without_messages_begins_no_kafka_transaction(write, producer):
    write._finish_messages()
    assert (producer.calls, write.sending) == ([], False)


@pytest.mark.parametrize("savepoints", [Savepoints(direct=True), Savepoints(holds=False)])
def test_outside_a_savepoint_a_message_goes_at_once(write, producer, savepoints):
    write.savepoints = savepoints
    write.send(message("m1"))
    assert producer.calls == ["begin", "m1"]


def test_a_message_waits_for_its_savepoint_and_the_order_stays(write, producer):
    write.savepoints = savepoints = Savepoints()
    write.send(message("m1"))
    assert (producer.calls, write.sending) == ([], False)
    savepoints.release()
    write.send(message("m2"))
    assert producer.calls == ["begin", "m1"]
    write._finish_messages()
    assert producer.calls == ["begin", "m1", "cork", "m2", "uncork"]


def test_what_the_producer_would_refuse_later_is_refused_before_the_messages_wait(write, producer):
    write.savepoints = savepoints = Savepoints()
    with pytest.raises(TransactionAborted, match="row 1 has") as raised:
        write.send(MessageBatch("sold", ["1", "x" * 30], None))
    assert not raised.value.retryable
    assert (savepoints.waiting, producer.calls) == ([], [])


def test_messages_that_wait_are_out_of_reach_of_their_caller(write, producer):
    write.savepoints, values = Savepoints(), ["1", b"2"]
    write.send(MessageBatch("sold", values, None))
    values.clear()
    write._finish_messages()
    assert producer.calls == ["cork", "begin", b"1", b"2", "uncork"]


@pytest.mark.parametrize("savepoints", [None, Savepoints(direct=True), Savepoints(holds=False)])
def test_messages_that_do_not_wait_are_checked_by_the_engine_alone(write, producer, savepoints):
    write.savepoints = savepoints
    write.send(MessageBatch("sold", ["x" * 30], None))
    assert producer.calls == ["begin", "x" * 30]


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (TransactionAborted("the queue is full", next_step="send less"), True),
        (TransactionAborted("too large", next_step="send less", retryable=False), False),
        (Unavailable("no answer", next_step="send less"), True),
        (ConfigurationError("no such topic", next_step="send less"), False),
    ],
)
def test_a_block_that_swallows_an_error_aborts_with_its_reason(write, producer, error, retryable):
    with pytest.raises(type(error)):
        write.send(refused(producer, error))
    write.send(message("m2"))
    with pytest.raises(TransactionAborted, match=error.what) as caught:
        write._finish_messages()
    assert str(caught.value.__cause__) == str(error)
    assert (caught.value.transactional_id, caught.value.next_step) == ("orders", "send less")
    assert caught.value.retryable is retryable


def test_being_fenced_is_passed_on_as_such_as_no_retry_helps(write, producer):
    error = Fenced("another owner")
    with pytest.raises(Fenced):
        write.send(refused(producer, error))
    with pytest.raises(Fenced) as caught:
        write._finish_messages()
    assert str(caught.value) == str(error)


def test_the_first_of_several_errors_is_the_reason(write, producer):
    for error in (ConfigurationError("the first"), ConfigurationError("the second")):
        with pytest.raises(ConfigurationError):
            write.send(refused(producer, error))
    with pytest.raises(TransactionAborted, match="the first"):
        write._finish_messages()


def test_a_call_that_was_not_allowed_has_changed_nothing_and_the_block_may_go_on(write, producer):
    write.savepoints = savepoints = Savepoints()
    savepoints.refusal = IllegalStateError("in the middle of a COPY")
    with pytest.raises(IllegalStateError):
        write.send(message("m1"))
    savepoints.refusal = None
    write.send(message("m2"))
    write._finish_messages()
    assert producer.calls == ["cork", "begin", "m2", "uncork"]


def test_nothing_is_handed_over_at_the_end_of_a_block_that_has_to_abort(write, producer):
    write.savepoints = savepoints = Savepoints()
    write.send(message("m1"))
    write.refuse(ConfigurationError("refused before"))
    with pytest.raises(TransactionAborted):
        write._finish_messages()
    assert (producer.calls, savepoints.calls) == ([], [])


def test_a_savepoint_that_was_rolled_back_unseen_aborts_the_block(write, producer):
    write.savepoints = savepoints = Savepoints()
    write.send(message("m1"))
    savepoints.refusal = TransactionAborted("rolled back unseen")
    with pytest.raises(TransactionAborted, match="unseen"):
        write._finish_messages()
    assert producer.calls == []


def test_stopping_stops_the_watch_if_there_is_one(write):
    write._stop_watching()
    write.savepoints = savepoints = Savepoints()
    write._stop_watching()
    assert savepoints.calls == ["stop"]
