"""The native sender on a real broker: what it sends is there once and in order, over lost connections and refusals."""

import secrets
import time
from contextlib import closing

import pytest
from harness.patience import PATIENCE_S, wait_until

from dualwrite.clock import Deadline, now_s
from dualwrite.kafka.brokers import Connections
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.native.produce_state import Code, Limits, Meaning, ProduceCore, Refusal
from dualwrite.kafka.native.records import Codec, RecordsBuilder
from dualwrite.kafka.native.sender import Sender
from dualwrite.testing import read_committed
from dualwrite.testing.proxy import Api, KafkaProxy

LIMITS = Limits(linger_s=0.0, topic_s=1.0)
NUMBERS = [b"%d" % number for number in range(200)]


class Transactions:
    """One id's native transactions, ended from outside."""

    def __init__(self, server, config=None, *, limit_bytes=100_000, codec="none"):
        self.kafka_id = f"native-{secrets.token_hex(4)}"
        self.coordinator = KafkaCoordinator(KafkaConfig.parse(server.client_config()))
        self.sender = Sender(Connections(KafkaConfig.parse(config or server.client_config())), self.kafka_id)
        self.ids = self.coordinator.retire([self.kafka_id], self.deadline)[self.kafka_id]
        self._make = lambda: RecordsBuilder(Codec(codec), limit_bytes=limit_bytes)
        self.begin()

    @property
    def deadline(self):
        return Deadline(PATIENCE_S)

    def begin(self):
        self.core = ProduceCore(LIMITS, self._make)
        self.sender.begin(self.ids, self.core)

    def send(self, topic, *values, partition=0):
        self.sender.topic(topic, self.deadline)
        for value in values:
            self.core.append((topic, partition), value, None, (), time.time_ns() // 1_000_000, now=now_s())
        self.sender.pump()

    def end(self, *, committed=True):
        self.coordinator.end_exactly({self.kafka_id: self.ids}, committed=committed, deadline=self.deadline)
        wait_until(lambda: self.view().epoch != self.ids[1])
        self.ids = (self.view().producer_id, self.view().epoch)
        self.begin()

    def view(self):
        return self.coordinator.describe([self.kafka_id], self.deadline)[self.kafka_id]

    def close(self):
        self.sender.close()
        self.coordinator.close()


@pytest.fixture
def transactions(dualwrite_kafka):
    with closing(Transactions(dualwrite_kafka)) as made:
        yield made


def values(server, topic, partition=0):
    records = read_committed(server.client_config(), topic)
    return [record.value for record in records if record.partition == partition]


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_every_message_is_there_once_and_in_order(dualwrite_kafka, dualwrite_topic, codec):
    with closing(Transactions(dualwrite_kafka, limit_bytes=200, codec=codec)) as transactions:
        for number in range(0, 200, 10):
            transactions.send(dualwrite_topic, *NUMBERS[number : number + 10], partition=number // 10 % 2)
        assert transactions.sender.flush(transactions.deadline)
        assert transactions.core.first_offsets.keys() == {(dualwrite_topic, 0), (dualwrite_topic, 1)}
        transactions.end()
    for partition in (0, 1):
        expected = [value for value in NUMBERS if int(value) // 10 % 2 == partition]
        assert values(dualwrite_kafka, dualwrite_topic, partition) == expected


def test_each_transaction_has_an_epoch_of_its_own(transactions, dualwrite_kafka, dualwrite_topic):
    epochs = []
    for number, committed in enumerate([True, False, True]):
        transactions.send(dualwrite_topic, NUMBERS[number])
        assert transactions.sender.flush(transactions.deadline)
        epochs.append(transactions.ids)
        transactions.end(committed=committed)
    assert len(set(epochs)) == 3
    assert values(dualwrite_kafka, dualwrite_topic) == [b"0", b"2"]


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_what_a_lost_connection_leaves_unknown_is_sent_again(dualwrite_kafka, dualwrite_topic, lost):
    with (
        KafkaProxy(dualwrite_kafka) as proxy,
        closing(Transactions(dualwrite_kafka, proxy.client_config(), limit_bytes=200)) as transactions,
    ):
        transactions.send(dualwrite_topic, NUMBERS[0])
        assert transactions.sender.flush(transactions.deadline)
        cut = proxy.on(Api.PRODUCE)
        cut.reset_request() if lost == "request" else cut.reset_answer()
        transactions.send(dualwrite_topic, *NUMBERS[1:])
        assert transactions.sender.flush(transactions.deadline)
        assert len([request for request in proxy.requests if request.api_key == Api.PRODUCE]) > 2
        transactions.end()
    assert values(dualwrite_kafka, dualwrite_topic) == NUMBERS


def test_a_new_owner_ends_the_incarnation(transactions, dualwrite_kafka, dualwrite_topic):
    transactions.send(dualwrite_topic, NUMBERS[0])
    assert transactions.sender.flush(transactions.deadline)
    transactions.coordinator.retire([transactions.kafka_id], transactions.deadline)
    transactions.send(dualwrite_topic, NUMBERS[1])
    assert not transactions.sender.flush(transactions.deadline)
    assert transactions.core.refusal.meaning is Meaning.END
    assert values(dualwrite_kafka, dualwrite_topic) == []


def test_a_batch_that_the_topic_refuses_aborts(transactions, dualwrite_kafka):
    narrow = dualwrite_kafka.create_topic(f"narrow-{secrets.token_hex(4)}", 1, {"max.message.bytes": "1000"})
    transactions.send(narrow, b"x" * 2000)
    assert not transactions.sender.flush(transactions.deadline)
    assert transactions.core.refusal == Refusal(Meaning.ABORT, Code.MESSAGE_TOO_LARGE, (narrow, 0))
    transactions.end(committed=False)
    transactions.send(narrow, b"x" * 20)
    assert transactions.sender.flush(transactions.deadline)
    transactions.end()
    assert values(dualwrite_kafka, narrow) == [b"x" * 20]


def test_a_topic_that_is_made_again_in_the_middle_gets_nothing_of_the_transaction(transactions, dualwrite_kafka):
    topic = dualwrite_kafka.create_topic(f"short-lived-{secrets.token_hex(4)}", 1)
    transactions.send(topic, NUMBERS[0])
    assert transactions.sender.flush(transactions.deadline)
    dualwrite_kafka.delete_topic(topic)
    wait_until(lambda: transactions.coordinator.topic_ids([topic], transactions.deadline) == {})
    dualwrite_kafka.create_topic(topic, 1)
    transactions.core.append((topic, 0), NUMBERS[1], None, (), 1, now=now_s())
    assert not transactions.sender.flush(transactions.deadline)
    assert transactions.core.refusal == Refusal(Meaning.ABORT, Code.UNKNOWN_TOPIC_ID, (topic, 0))
    transactions.end(committed=False)
    assert values(dualwrite_kafka, topic) == []


def test_an_unknown_topic_is_none(transactions):
    assert transactions.sender.topic("not-there", transactions.deadline) is None
