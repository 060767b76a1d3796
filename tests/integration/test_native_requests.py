"""A native producer's requests to its coordinators on a real broker: new ids, ends of transactions, consumed offsets."""

import base64
import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.kafka_tools import offsets_requests
from harness.native_requests import MINUTE_MS, Producer
from harness.patience import PATIENCE_S
from kafka.protocol.admin import AlterClientQuotasRequest, DescribeClientQuotasRequest

from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.messages import Client, Produce, TxnOffsetCommit
from dualwrite.kafka.native.coordination import Group, Offset, group_of
from dualwrite.kafka.native.produce_state import Code
from dualwrite.testing import read_committed
from dualwrite.testing.proxy import Api, KafkaProxy


@pytest.fixture
def producer(dualwrite_kafka):
    with closing(Producer(dualwrite_kafka.client_config())) as made:
        yield made.init()


@pytest.fixture
def proxied(dualwrite_kafka):
    with KafkaProxy(dualwrite_kafka) as proxy, closing(Producer(proxy.client_config())) as made:
        yield proxy, made


def sent(proxy, api):
    return len([request for request in proxy.requests if request.api_key == api])


def values(server, topic):
    return [record.value for record in read_committed(server.client_config(), topic)]


def test_transactions_one_after_the_other(producer, dualwrite_kafka, dualwrite_topic):
    first = producer.ids
    for value, committed in [(b"a", True), (b"b", False), (b"c", True)]:
        producer.send(dualwrite_topic, value)
        assert producer.end(committed=committed) == Code.NONE
    assert producer.ids == (first[0], first[1] + 3)
    assert values(dualwrite_kafka, dualwrite_topic) == [b"a", b"c"]


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("committed", [True, False])
def test_the_end_of_a_transaction_is_sent_until_it_is_answered(
    proxied, dualwrite_kafka, dualwrite_topic, lost, committed
):
    proxy, producer = proxied
    producer.init()
    producer.send(dualwrite_topic, b"a")
    first = producer.ids
    cut = proxy.on(Api.END_TXN)
    cut.reset_request() if lost == "request" else cut.reset_answer()
    assert producer.end(committed=committed) == Code.NONE
    assert sent(proxy, Api.END_TXN) >= 2
    assert producer.ids == (first[0], first[1] + 1)
    producer.send(dualwrite_topic, b"b")
    assert producer.end() == Code.NONE
    assert values(dualwrite_kafka, dualwrite_topic) == ([b"a", b"b"] if committed else [b"b"])


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_new_producer_id_is_asked_for_once(proxied, lost):
    proxy, producer = proxied
    cut = proxy.on(Api.INIT_PRODUCER_ID)
    cut.reset_request() if lost == "request" else cut.reset_answer()
    assert producer.requests.init_producer_id(MINUTE_MS, producer.deadline) is None
    assert sent(proxy, Api.INIT_PRODUCER_ID) == 1


def test_a_new_producer_waits_for_its_coordinator_to_come_back(mortal_kafka):
    with closing(Producer(mortal_kafka.client_config())) as producer, ThreadPoolExecutor() as threads:
        producer.init()
        mortal_kafka.kill()
        started = threads.submit(mortal_kafka.start)
        producer.init()
        started.result()


def test_a_version_that_the_broker_does_not_offer_is_not_sent(proxied):
    proxy, producer = proxied
    answered = producer.requests.init_producer_id(MINUTE_MS, producer.deadline, two_phase=True)
    assert answered.code == Code.UNSUPPORTED_VERSION
    assert sent(proxy, Api.INIT_PRODUCER_ID) == 0


def test_the_former_owner_is_fenced(producer, dualwrite_kafka, dualwrite_topic):
    producer.send(dualwrite_topic, b"a")
    with closing(Producer(dualwrite_kafka.client_config(), producer.kafka_id)) as successor:
        successor.init()
        assert producer.end() == Code.PRODUCER_FENCED
        assert producer.commit_offsets(Group("g"), {(dualwrite_topic, 0): Offset(1)}) == Code.INVALID_PRODUCER_EPOCH


@pytest.fixture(params=["classic", "consumer"])
def member(request, dualwrite_kafka, dualwrite_topic):
    """A consumer that has joined its group by one of the two protocols."""
    consumer = Consumer(
        {
            **dualwrite_kafka.client_config(),
            "group.id": f"group-{secrets.token_hex(4)}",
            "group.protocol": request.param,
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([dualwrite_topic])
    deadline = Deadline(PATIENCE_S)
    while not consumer.assignment():
        assert not deadline.expired
        consumer.poll(0.1)
    yield consumer
    consumer.close()


def committed(consumer, topic):
    found = consumer.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)], timeout=PATIENCE_S)
    return [(one.offset, one.leader_epoch, one.metadata) for one in found]


def test_offsets_are_committed_with_the_transaction_and_not_with_an_abort(producer, member, dualwrite_topic):
    group = group_of(member.consumer_group_metadata())
    assert group.member_id
    assert group.generation > 0
    none = (-1001, None, None)
    for offset, expected in [(3, (3, 0, "a note")), (5, (5, 0, "a note"))]:
        before = committed(member, dualwrite_topic)
        assert producer.commit_offsets(group, {(dualwrite_topic, 0): Offset(offset, 0, "a note")}) == Code.NONE
        assert producer.end(committed=False) == Code.NONE
        assert committed(member, dualwrite_topic) == before
        offsets = {(dualwrite_topic, 0): Offset(offset, 0, "a note"), (dualwrite_topic, 1): Offset(1)}
        assert producer.commit_offsets(group, offsets) == Code.NONE
        assert producer.end() == Code.NONE
        assert committed(member, dualwrite_topic) == [expected, (1, None, none[2])]


def test_a_member_that_is_not_of_the_group_any_more_is_refused(producer, member, dualwrite_topic):
    offsets = {(dualwrite_topic, 0): Offset(3)}
    group = group_of(member.consumer_group_metadata())
    stale = group._replace(generation=group.generation - 1)
    # Where topics have ids, members by KIP-848 have an error of their own.
    assert producer.commit_offsets(stale, offsets) in {Code.ILLEGAL_GENERATION, Code.STALE_MEMBER_EPOCH}
    assert producer.commit_offsets(group._replace(member_id="another"), offsets) == Code.UNKNOWN_MEMBER_ID
    # The transaction goes on, and may be aborted.
    producer.send(dualwrite_topic, b"a")
    assert producer.end(committed=False) == Code.NONE


def test_a_group_id_or_a_topic_that_cannot_be(producer, dualwrite_topic):
    assert producer.commit_offsets(Group(""), {(dualwrite_topic, 0): Offset(3)}) == Code.INVALID_GROUP_ID
    too_long = {(dualwrite_topic, 0): Offset(3, metadata="x" * 5000)}
    assert producer.commit_offsets(Group("g"), too_long) == Code.OFFSET_METADATA_TOO_LARGE
    unknown = {("not-there", 0): Offset(3)}
    last = producer.requests.commit_offsets(producer.ids, Group("g"), unknown, Deadline(1))
    assert last.code == Code.UNKNOWN_TOPIC_OR_PARTITION


def of_committed_offsets(proxy):
    return [request.api_version for request in proxy.requests if request.api_key == Api.TXN_OFFSET_COMMIT]


def test_offsets_name_topics_by_id_where_the_id_is_known(proxied, dualwrite_kafka, dualwrite_topic):
    proxy, producer = proxied
    producer.init()
    group, offsets = (
        Group(f"group-{secrets.token_hex(4)}"),
        {(dualwrite_topic, 0): Offset(3), (dualwrite_topic, 1): Offset(4)},
    )
    assert producer.commit_offsets(group, offsets) == Code.NONE
    by_name = producer.requests.commit_offsets(
        producer.ids, group, {(dualwrite_topic, 0): Offset(5)}, producer.deadline
    )
    assert by_name.code == Code.NONE
    assert producer.end() == Code.NONE
    assert of_committed_offsets(proxy) == [6, 5]
    with closing(Consumer({**dualwrite_kafka.client_config(), "group.id": group.group_id})) as consumer:
        assert [offset for offset, _, _ in committed(consumer, dualwrite_topic)] == [5, 4]


def test_offsets_of_a_topic_that_was_made_again_are_refused_until_its_id_is_looked_up_again(producer, dualwrite_kafka):
    topic = dualwrite_kafka.create_topic(f"again-{secrets.token_hex(4)}")
    group, offsets = Group(f"group-{secrets.token_hex(4)}"), {(topic, 0): Offset(3)}
    assert producer.commit_offsets(group, offsets) == Code.NONE
    dualwrite_kafka.delete_topic(topic)
    dualwrite_kafka.create_topic(topic)
    assert producer.commit_offsets(group, offsets) == Code.UNKNOWN_TOPIC_ID
    # The transaction goes on, and may be aborted.
    assert producer.end(committed=False) == Code.NONE
    producer.sender.forget([topic])
    assert producer.commit_offsets(group, offsets) == Code.NONE
    assert producer.end() == Code.NONE


def test_offsets_are_the_java_clients_bytes():
    drawn = random.Random(31)
    cases, ours = [], []
    for number in range(40):
        version = TxnOffsetCommit.LOWEST + number % 2
        topics = {f"topic-{name}-é" * drawn.choice([1, 30]): drawn.randbytes(16) for name in range(drawn.randrange(4))}
        group = Group(
            "g" * drawn.choice([1, 200]), drawn.randrange(-1, 2**31), "m\u2603", drawn.choice([None, "", "an instance"])
        )
        offsets = {
            (name, partition): Offset(drawn.randrange(2**63), drawn.randrange(-1, 2**31), "x" * drawn.choice([0, 200]))
            for name in topics
            for partition in range(drawn.randrange(1, 3))
        }
        ids = drawn.randrange(2**63), drawn.randrange(2**15)
        request = TxnOffsetCommit("tx-\u2603", ids, group, offsets, topics)
        ours.append(request.frame(version, number, Client("a client"))[4:])
        cases.append(
            {"version": version, "correlation": number, "client": "a client", "request": as_java(request, version)}
        )
    assert offsets_requests(cases) == ours


def as_java(request, version):
    """The request as the Java client's own JSON has it."""
    topics = {}
    for (name, number), (offset, leader_epoch, metadata) in request.offsets.items():
        topics.setdefault(name, []).append(
            {
                "partitionIndex": number,
                "committedOffset": offset,
                "committedLeaderEpoch": leader_epoch,
                "committedMetadata": metadata,
            }
        )
    named = {
        name: {"topicId": base64.urlsafe_b64encode(request.topic_ids[name]).decode().rstrip("=")}
        if version >= 6
        else {"name": name}
        for name in topics
    }
    return {
        "transactionalId": request.transactional_id,
        "groupId": request.group.group_id,
        "producerId": request.ids[0],
        "producerEpoch": request.ids[1],
        "generationIdOrMemberEpoch": request.group.generation,
        "memberId": request.group.member_id,
        "groupInstanceId": request.group.instance_id,
        "topics": [{**named[name], "partitions": partitions} for name, partitions in topics.items()],
    }


def test_a_right_that_is_missing_is_an_answer(guarded_kafka):
    topic = guarded_kafka.create_topic(f"guarded-{secrets.token_hex(4)}", 1)
    with closing(Producer(guarded_kafka.client_config("native"))) as producer:
        refused = producer.requests.init_producer_id(MINUTE_MS, producer.deadline)
        assert refused.code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        guarded_kafka.allow("native", "write", "transactional_id", producer.kafka_id)
        producer.init()
        offsets = {(topic, 0): Offset(1)}
        assert producer.commit_offsets(Group("theirs"), offsets) == Code.GROUP_AUTHORIZATION_FAILED
        guarded_kafka.allow("native", "read", "group", "ours")
        assert producer.commit_offsets(Group("ours"), offsets) == Code.TOPIC_AUTHORIZATION_FAILED
        guarded_kafka.allow("native", "read", "topic", topic)
        assert producer.commit_offsets(Group("ours"), offsets) == Code.NONE
        assert producer.end() == Code.NONE


class Throttled:
    """A producer whose client id may write 10 kB a second, after it has written more than that."""

    def __init__(self, server, proxy, topic, patch):
        patch.setattr(Produce, "read", self._noting(Produce.read))
        name = f"throttled-{secrets.token_hex(4)}"
        self._limit(server.client_config(), name)
        self.proxy, self.name = proxy, name
        self.throttled_ms = 0
        self.producer = Producer({**proxy.client_config(), "client.id": name}).init()
        for _ in range(10):
            self.producer.send(topic, b"x" * 60_000)
            if self.is_waiting:
                break
            assert self.producer.end(committed=False) == Code.NONE

    def _limit(self, config, name):
        entry = AlterClientQuotasRequest.EntryData
        with closing(Brokers(KafkaConfig.parse(config))) as brokers:
            [node] = brokers.nodes(Deadline(PATIENCE_S))
            entity = entry.EntityData(entity_type="client-id", entity_name=name)
            limit = entry.OpData(key="producer_byte_rate", value=10_000.0, remove=False)
            request = AlterClientQuotasRequest(entries=[entry(entity=[entity], ops=[limit])], validate_only=False)
            [answer] = brokers.exchange([(node, request)], Deadline(PATIENCE_S))
            assert answer.entries[0].error_code == Code.NONE
            # A broker that learns of the quota after many records would let the producer wait longer than for an answer.
            by_name = DescribeClientQuotasRequest.ComponentData(entity_type="client-id", match_type=0, match=name)
            known = DescribeClientQuotasRequest(components=[by_name], strict=True)
            while not brokers.exchange([(node, known)], Deadline(PATIENCE_S))[0].entries:
                pass

    def _noting(self, read):
        def note(request, answer, version):
            self.throttled_ms = int.from_bytes(answer[-5:-1], "big")  # the last field before the tagged ones
            return read(request, answer, version)

        return note

    @property
    def is_waiting(self):
        return self.throttled_ms > 0


@pytest.fixture
def throttled(dualwrite_kafka, dualwrite_topic, monkeypatch):
    with KafkaProxy(dualwrite_kafka) as proxy:
        made = Throttled(dualwrite_kafka, proxy, dualwrite_topic, monkeypatch)
        with closing(made.producer):
            yield made


@pytest.mark.parametrize("request_", ["send", "end", "init"])
def test_a_throttled_producer_waits(throttled, dualwrite_topic, request_):
    assert throttled.is_waiting
    producer, proxy = throttled.producer, throttled.proxy
    before = len(proxy.requests)
    if request_ == "send":
        producer.send(dualwrite_topic, b"y")
    elif request_ == "end":
        assert producer.end() == Code.NONE
    else:
        producer.init()
    asked = {"send": {Api.PRODUCE}, "end": {Api.END_TXN}, "init": {Api.METADATA, Api.INIT_PRODUCER_ID}}[request_]
    # No broker was asked for another leader or coordinator meanwhile. Clients of former tests may come back to the same port.
    ours = [one for one in proxy.requests[before:] if one.client_id == throttled.name]
    assert {one.api_key for one in ours} == asked
