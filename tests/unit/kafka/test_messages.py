"""Requests packed by hand equal kafka-python's bytes, and their answers are read as it reads them."""

import ast
import re
import struct
import uuid

import pytest
from harness.places import ROOT
from hypothesis import assume, given
from hypothesis import strategies as st
from kafka.protocol.admin.transactions import DescribeProducersRequest, DescribeProducersResponse
from kafka.protocol.consumer.offsets import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse
from kafka.protocol.producer import ProduceRequest, ProduceResponse
from kafka.protocol.producer.transaction import (
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

from dualwrite.kafka import messages
from dualwrite.kafka.messages import (
    API_VERSIONS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Client,
    Cursor,
    DescribeProducers,
    EndTxn,
    Group,
    NotOffered,
    Offered,
    Offset,
    OffsetForLeaderEpoch,
    Produce,
    ProducerState,
    Rare,
    TopicKey,
    TxnOffsetCommit,
    Unreadable,
    compact,
    opening_request,
    read_api_versions,
    read_sasl_authenticate,
    read_sasl_handshake,
    unsigned,
)

int16, int32 = st.integers(-(2**15), 2**15 - 1), st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
numbers = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=140)
clients = st.builds(Client, texts)
ids = st.uuids().map(lambda one: one.bytes)
partitions = st.lists(st.tuples(names, numbers), max_size=6, unique=True)


def theirs(request, version, correlation_id, client):
    request.with_header(correlation_id=correlation_id, client_id=client.name)
    return request.encode(version=version, header=True, framed=True)


def answer(response, version, correlation_id=7):
    """The bytes of kafka-python's response, from its correlation id on."""
    response.API_VERSION = version
    response.with_header(correlation_id=correlation_id)
    return bytes(response.encode(header=True))


def refuses_every_beginning(read, whole):
    """No part of an answer is taken for a whole one."""
    for size in range(4, len(whole)):
        with pytest.raises((Unreadable, ValueError, KeyError)):
            read(whole[:size])


batches = st.lists(
    st.tuples(
        st.builds(TopicKey.of, names, ids),
        st.lists(st.tuples(numbers, st.binary(max_size=400)), min_size=1, max_size=3),
    ),
    max_size=4,
    unique_by=(lambda one: one[0].name, lambda one: one[0].topic_id),
)
kafka_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
VERSIONS = pytest.mark.parametrize("version", range(Produce.LOWEST, Produce.HIGHEST + 1))


def test_the_versions_of_produce_are_all_that_kafka_python_has_for_native_transactions():
    assert ProduceRequest.max_version == Produce.HIGHEST
    assert EndTxnRequest.max_version == EndTxn.HIGHEST


@VERSIONS
@given(kafka_ids, batches, numbers, numbers, clients)
def test_produce(version, kafka_id, sent, timeout_ms, number, client):
    data = ProduceRequest.TopicProduceData
    request = ProduceRequest(
        transactional_id=kafka_id,
        acks=-1,
        timeout_ms=timeout_ms,
        topic_data=[
            data(
                name=topic.name,
                topic_id=uuid.UUID(bytes=topic.topic_id),
                partition_data=[data.PartitionProduceData(index=index, records=records) for index, records in of_topic],
            )
            for topic, of_topic in sent
        ],
    )
    ours = Produce(kafka_id, sent, timeout_ms).frame(version, number, client)
    assert ours == theirs(request, version, number, client)


of_produce = ProduceResponse.TopicProduceResponse
one_partition = of_produce.PartitionProduceResponse
leaders = st.builds(one_partition.LeaderIdAndEpoch, leader_id=int32, leader_epoch=int32)
faults = st.builds(
    one_partition.BatchIndexAndErrorMessage, batch_index=int32, batch_index_error_message=st.none() | texts
)
answered = st.fixed_dictionaries(
    {"error_code": int16, "base_offset": int64, "log_append_time_ms": int64, "log_start_offset": int64},
    optional={
        "record_errors": st.lists(faults, max_size=2),
        "error_message": st.none() | texts,
        "current_leader": leaders,
    },
)


@VERSIONS
@given(st.data(), batches, st.lists(st.tuples(int32, names, int32), max_size=2))
def test_the_answer_to_produce(version, data, sent, endpoints):
    responses, expected = [], {}
    for topic, of_topic in sent:
        of = []
        for index in {index for index, _ in of_topic}:
            fields = data.draw(answered)
            expected[topic.name, index] = (fields["error_code"], fields["base_offset"])
            of.append(one_partition(index=index, **fields))
        responses.append(of_produce(name=topic.name, topic_id=uuid.UUID(bytes=topic.topic_id), partition_responses=of))
    more = {
        "node_endpoints": [
            ProduceResponse.NodeEndpoint(node_id=node, host=host, port=port, rack=None)
            for node, host, port in endpoints
        ]
    }
    whole = answer(ProduceResponse(responses=responses, throttle_time_ms=data.draw(numbers), **more), version)
    read = Produce("id", sent, 1).read
    assert read(whole, version) == expected
    if len(whole) < 200:
        refuses_every_beginning(lambda part: read(part, version), whole)


@VERSIONS
@given(names, ids, numbers, answered, numbers)
def test_the_answer_to_one_batch(version, name, topic_id, index, fields, throttled_ms):
    topic = TopicKey.of(name, topic_id)
    of = of_produce(
        name=name, topic_id=uuid.UUID(bytes=topic_id), partition_responses=[one_partition(index=index, **fields)]
    )
    whole = answer(ProduceResponse(responses=[of], throttle_time_ms=throttled_ms), version)
    read = Produce("id", [(topic, [(index, b"x")])], 1).read
    assert read(whole, version) == {(name, index): (fields["error_code"], fields["base_offset"])}
    if len(whole) < 300:
        refuses_every_beginning(lambda part: read(part, version), whole)


def test_one_batch_needs_no_walk_through_the_answer(monkeypatch):
    topic = TopicKey.of("orders", bytes(range(16)))
    of = of_produce(
        name="orders",
        topic_id=uuid.UUID(bytes=topic.topic_id),
        partition_responses=[one_partition(index=3, error_code=0, base_offset=9)],
    )
    monkeypatch.setattr(Produce, "_read_any", lambda *_: pytest.fail("walked"))
    for version in (12, 13):
        whole = answer(ProduceResponse(responses=[of]), version)
        assert Produce("id", [(topic, [(3, b"x")])], 1).read(whole, version) == {("orders", 3): (0, 9)}


def test_an_answer_about_a_topic_that_was_not_asked_for_is_none():
    of = of_produce(topic_id=uuid.uuid4(), partition_responses=[])
    with pytest.raises(KeyError):
        Produce("id", [(TopicKey.of("orders", bytes(16)), [(0, b"x")])], 1).read(
            answer(ProduceResponse(responses=[of]), 13), 13
        )


@given(kafka_ids, int64, int16, st.booleans(), numbers, clients)
def test_end_txn(kafka_id, producer_id, epoch, committed, number, client):
    request = EndTxnRequest(
        transactional_id=kafka_id, producer_id=producer_id, producer_epoch=epoch, committed=committed
    )
    ours = EndTxn(kafka_id, (producer_id, epoch), committed=committed).frame(EndTxn.HIGHEST, number, client)
    assert ours == theirs(request, EndTxn.HIGHEST, number, client)


@given(int16, int64, int16, int32, st.dictionaries(st.integers(0, 200), st.binary(max_size=140), max_size=3))
def test_the_answer_to_end_txn(code, producer_id, epoch, throttled_ms, tags):
    response = EndTxnResponse(
        throttle_time_ms=throttled_ms, error_code=code, producer_id=producer_id, producer_epoch=epoch
    )
    whole = answer(response, EndTxn.HIGHEST)
    read = EndTxn("id", (1, 2), committed=True).read
    refuses_every_beginning(lambda part: read(part, EndTxn.HIGHEST), whole)
    tagged = whole[:-1] + with_tags(tags)
    for one in (whole, tagged):
        assert read(one, EndTxn.HIGHEST) == (code, producer_id, epoch)
    refuses_every_beginning(lambda part: read(part, EndTxn.HIGHEST), tagged)


def with_tags(tags):
    """Tagged fields that neither side knows."""
    return unsigned(len(tags)) + b"".join(
        unsigned(tag) + unsigned(len(value)) + value for tag, value in sorted(tags.items())
    )


BY_NAME, BY_ID = TxnOffsetCommit.LOWEST, TxnOffsetCommit.HIGHEST
groups = st.builds(Group, texts, int32, texts, st.none() | texts)
offsets = st.builds(Offset, int64, int32, texts)
# Such a name takes as many bytes as an id, which may stand in its place.
as_long_as_ids = st.text("abcdefghijklmnopqrstuvwxyz.-_", min_size=15, max_size=15)


def id_of(name):
    return uuid.uuid5(uuid.NAMESPACE_DNS, name).bytes


def by_id(whole, names):
    """The bytes with ids in place of names."""
    for name in names:
        whole = whole.replace(compact(name), id_of(name))
    return whole


def committing(kafka_id, ids, group, committed):
    """kafka-python's request. It knows no version that names topics by id."""
    topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    by_topic = {}
    for (name, number), (offset, leader_epoch, metadata) in committed.items():
        partition = topic.TxnOffsetCommitRequestPartition(
            partition_index=number,
            committed_offset=offset,
            committed_leader_epoch=leader_epoch,
            committed_metadata=metadata,
        )
        by_topic.setdefault(name, []).append(partition)
    return TxnOffsetCommitRequest(
        transactional_id=kafka_id,
        group_id=group.group_id,
        producer_id=ids[0],
        producer_epoch=ids[1],
        generation_id=group.generation,
        member_id=group.member_id,
        group_instance_id=group.instance_id,
        topics=[topic(name=name, partitions=of_topic) for name, of_topic in by_topic.items()],
    )


def test_kafka_python_knows_consumed_offsets_by_name_alone():
    assert TxnOffsetCommitRequest.max_version == BY_NAME == BY_ID - 1


@given(
    kafka_ids, int64, int16, groups, st.dictionaries(st.tuples(names, numbers), offsets, max_size=6), numbers, clients
)
def test_consumed_offsets_by_name(kafka_id, producer_id, epoch, group, committed, number, client):
    request = committing(kafka_id, (producer_id, epoch), group, committed)
    ours = TxnOffsetCommit(kafka_id, (producer_id, epoch), group, committed, {}).frame(BY_NAME, number, client)
    assert ours == theirs(request, BY_NAME, number, client)


@given(
    kafka_ids, int64, int16, groups, st.dictionaries(st.tuples(as_long_as_ids, numbers), offsets, max_size=6), numbers,
    clients,
)  # fmt: skip
def test_consumed_offsets_by_id(kafka_id, producer_id, epoch, group, committed, number, client):
    request = theirs(committing(kafka_id, (producer_id, epoch), group, committed), BY_NAME, number, client)
    topic_ids = {name: id_of(name) for name, _ in committed}
    assume(all(request.count(compact(name)) == 1 for name in topic_ids))  # no group or metadata has a topic's name
    ours = TxnOffsetCommit(kafka_id, (producer_id, epoch), group, committed, topic_ids).frame(BY_ID, number, client)
    assert ours == by_id(request[:6] + struct.pack(">h", BY_ID) + request[8:], topic_ids)


@given(st.dictionaries(st.tuples(as_long_as_ids, numbers), int16, max_size=6), int32)
def test_the_answer_to_consumed_offsets(codes, throttled_ms):
    topic = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
    by_topic = {}
    for (name, number), code in codes.items():
        partition = topic.TxnOffsetCommitResponsePartition(partition_index=number, error_code=code)
        by_topic.setdefault(name, []).append(partition)
    topics = [topic(name=name, partitions=of_topic) for name, of_topic in by_topic.items()]
    whole = answer(TxnOffsetCommitResponse(throttle_time_ms=throttled_ms, topics=topics), BY_NAME)
    request = TxnOffsetCommit("id", (1, 2), Group("g"), {}, {name: id_of(name) for name, _ in codes})
    for version, one in ((BY_NAME, whole), (BY_ID, by_id(whole, by_topic))):
        assert request.read(one, version) == codes
        if len(one) < 200:
            refuses_every_beginning(lambda part, version=version: request.read(part, version), one)


def test_offsets_of_a_topic_that_was_not_asked_for_are_no_answer():
    topic = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(name="a" * 15, partitions=[])
    whole = answer(TxnOffsetCommitResponse(throttle_time_ms=0, topics=[topic]), BY_NAME)
    with pytest.raises(KeyError):
        TxnOffsetCommit("id", (1, 2), Group("g"), {}, {"orders": bytes(16)}).read(whole, BY_ID)


@pytest.mark.parametrize(
    ("offered", "ids", "version"),
    [
        ((0, 6), ["a", "b"], 6),
        ((0, 6), ["a"], 5),
        ((0, 6), [], 5),
        ((0, 5), ["a", "b"], 5),
        ((0, 4), ["a", "b"], None),
        ((6, 7), ["a", "b"], 6),
        ((6, 7), ["a"], None),
    ],
)
def test_offsets_name_topics_by_id_where_all_ids_are_known_and_the_broker_offers_it(offered, ids, version):
    committed = {("a", 0): Offset(1), ("b", 0): Offset(2)}
    request = TxnOffsetCommit("id", (1, 2), Group("g"), committed, dict.fromkeys(ids, bytes(16)))
    theirs_ = Offered({TxnOffsetCommit.KEY: offered})
    if version is not None:
        assert request.version(theirs_) == version
        return
    with pytest.raises(NotOffered):
        request.version(theirs_)


@given(partitions, numbers, clients)
def test_describe_producers(asked, number, client):
    by_topic = {}
    for name, index in asked:
        by_topic.setdefault(name, []).append(index)
    of = DescribeProducersRequest.TopicRequest
    request = DescribeProducersRequest(
        topics=[of(name=name, partition_indexes=indexes) for name, indexes in by_topic.items()]
    )
    assert DescribeProducers(asked).frame(0, number, client) == theirs(request, 0, number, client)


of_describe = DescribeProducersResponse.TopicResponse
states = st.builds(ProducerState, int64, int32, int32, int64, int32, int64)


@given(
    st.dictionaries(
        names,
        st.dictionaries(numbers, st.tuples(int16, st.none() | texts, st.lists(states, max_size=4)), max_size=3),
        max_size=3,
    )
)
def test_the_answer_to_describe_producers(shown):
    of_partition = of_describe.PartitionResponse
    response = DescribeProducersResponse(
        throttle_time_ms=1,
        topics=[
            of_describe(
                name=name,
                partitions=[
                    of_partition(
                        partition_index=index,
                        error_code=code,
                        error_message=text,
                        active_producers=[
                            of_partition.ProducerState(
                                producer_id=one.producer_id,
                                producer_epoch=one.epoch,
                                last_sequence=one.last_sequence,
                                last_timestamp=one.last_timestamp,
                                coordinator_epoch=one.coordinator_epoch,
                                current_txn_start_offset=one.open_from,
                            )
                            for one in producers
                        ],
                    )
                    for index, (code, text, producers) in of_topic.items()
                ],
            )
            for name, of_topic in shown.items()
        ],
    )
    whole = answer(response, 0)
    read = DescribeProducers(()).read
    assert read(whole, 0) == {
        (name, index): (code, producers)
        for name, of_topic in shown.items()
        for index, (code, _, producers) in of_topic.items()
    }
    if len(whole) < 400:
        refuses_every_beginning(lambda part: read(part, 0), whole)


_SHOWN = b"\0\0\0\7" + b"\0" + b"\0\0\0\1" + b"\2" + b"\5name"
SHORT_STATES = (
    _SHOWN + b"\2" + b"\0\0\0\3" + b"\0\0" + b"\0" + b"\2" + struct.pack(">qiiqiq", 1, 2, 3, 4, 5, 6) + b"\0" * 4
)
SHORT_ENDS = _SHOWN + b"\2" + struct.pack(">hiiq", 0, 3, 4, 5) + b"\0" * 3
READS = [(DescribeProducers, SHORT_STATES), (OffsetForLeaderEpoch, SHORT_ENDS)]


@pytest.mark.parametrize(("request_", "data"), READS)
def test_a_short_answer_about_an_end_needs_no_walk_through_it(request_, data, monkeypatch):
    monkeypatch.setattr(request_, "_read_any", None)
    assert list(request_({}).read(data, 0)) == [("name", 3)]


@pytest.mark.parametrize(("request_", "data"), READS)
@given(st.data())
def test_whatever_comes_is_read_in_one_pass_as_it_is_field_by_field(request_, data, drawn):
    at = drawn.draw(st.integers(4, len(data) - 1))
    changed = data[:at] + drawn.draw(st.binary(max_size=3)) + data[at + drawn.draw(st.integers(0, 3)) :]

    def outcome(read):
        try:
            return read()
        except (Unreadable, UnicodeDecodeError) as error:
            return type(error)

    found, expected = outcome(lambda: request_({}).read(changed, 0)), outcome(lambda: request_._read_any(changed))
    assert found == expected


def test_producers_with_tagged_fields_are_read_one_by_one():
    one, other = ProducerState(1, 2, 3, 4, 5, 6), ProducerState(7, 8, 9, 10, 11, -1)
    packed = [messages._STATE.pack(*state) for state in (one, other)]
    data = b"\3" + packed[0] + with_tags({3: b"new"}) + packed[1] + b"\0"
    read = Cursor(data, 0)
    assert messages._states(read) == [one, other]
    assert read.at == len(data)


@given(st.dictionaries(st.tuples(names, numbers), int32, max_size=6), numbers, clients)
def test_offset_for_leader_epoch(epochs, number, client):
    of = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    by_topic = {}
    for (name, index), epoch in epochs.items():
        by_topic.setdefault(name, []).append(
            of.OffsetForLeaderPartition(partition=index, current_leader_epoch=epoch, leader_epoch=epoch)
        )
    request = OffsetForLeaderEpochRequest(
        topics=[of(topic=name, partitions=of_topic) for name, of_topic in by_topic.items()]
    )
    version = OffsetForLeaderEpoch.HIGHEST
    assert OffsetForLeaderEpoch(epochs).frame(version, number, client) == theirs(request, version, number, client)


@given(st.dictionaries(names, st.dictionaries(numbers, st.tuples(int16, int32, int64), max_size=3), max_size=3))
def test_the_answer_to_offset_for_leader_epoch(shown):
    of = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
    response = OffsetForLeaderEpochResponse(
        throttle_time_ms=1,
        topics=[
            of(
                topic=name,
                partitions=[
                    of.EpochEndOffset(partition=index, error_code=code, leader_epoch=epoch, end_offset=end)
                    for index, (code, epoch, end) in of_topic.items()
                ],
            )
            for name, of_topic in shown.items()
        ],
    )
    whole = answer(response, OffsetForLeaderEpoch.HIGHEST)
    read = OffsetForLeaderEpoch({}).read
    assert read(whole, 4) == {
        (name, index): (code, end) for name, of_topic in shown.items() for index, (code, _, end) in of_topic.items()
    }
    refuses_every_beginning(lambda part: read(part, 4), whole)


@given(numbers, clients)
def test_api_versions(number, client):
    for version in (0, 3):
        request = ApiVersionsRequest(client_software_name="dualwrite", client_software_version=messages._OUR_VERSION)
        assert opening_request(API_VERSIONS, version, number, client) == theirs(request, version, number, client)


ranges = st.dictionaries(int16, st.tuples(int16, int16), max_size=6)


@pytest.mark.parametrize("version", [0, 3])
@given(ranges, st.lists(st.tuples(names, int16), max_size=2))
def test_the_answer_to_api_versions(version, offered, features):
    response = ApiVersionsResponse(
        error_code=0,
        api_keys=[
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in offered.items()
        ],
        throttle_time_ms=3,
        finalized_features=[
            ApiVersionsResponse.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=0)
            for name, level in features
        ],
    )
    whole = answer(response, version)
    assert read_api_versions(whole, version) == (0, offered)


@given(ranges)
def test_an_old_brokers_answer_to_new_api_versions(offered):
    response = ApiVersionsResponse(
        error_code=35,
        api_keys=[
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in offered.items()
        ],
    )
    assert read_api_versions(answer(response, 0), 3) == (35, offered)


@given(names, st.binary(max_size=300), numbers, clients)
def test_logins(mechanism, token, number, client):
    ours = opening_request(SASL_HANDSHAKE, 1, number, client, mechanism.encode())
    assert ours == theirs(SaslHandshakeRequest(mechanism=mechanism), 1, number, client)
    ours = opening_request(SASL_AUTHENTICATE, 1, number, client, token)
    assert ours == theirs(SaslAuthenticateRequest(auth_bytes=token), 1, number, client)


@given(int16, st.lists(texts, max_size=3), st.none() | texts, st.binary(max_size=300), int64)
def test_the_answers_to_logins(code, mechanisms, text, token, lifetime_ms):
    whole = answer(SaslHandshakeResponse(error_code=code, mechanisms=mechanisms), 1)
    assert read_sasl_handshake(whole) == (code, mechanisms)
    refuses_every_beginning(read_sasl_handshake, whole)
    response = SaslAuthenticateResponse(
        error_code=code, error_message=text, auth_bytes=token, session_lifetime_ms=lifetime_ms
    )
    whole = answer(response, 1)
    assert read_sasl_authenticate(whole) == (code, text, token, lifetime_ms)
    refuses_every_beginning(read_sasl_authenticate, whole)


@given(texts, numbers, clients)
def test_kafka_python_packs_and_reads_what_is_rare(name, number, client):
    message = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name)])
    rare = Rare(message)
    version = rare.version(Offered({MetadataRequest.API_KEY: (0, 9)}))
    assert version == 9
    again = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name)])
    assert rare.frame(version, number, client) == theirs(again, version, number, client)
    response = MetadataResponse(
        throttle_time_ms=0,
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=1, host="a", port=2, rack=None)],
        cluster_id=name,
        controller_id=1,
        topics=[],
    )
    read = rare.read(answer(response, version), version)
    assert (read.cluster_id, [broker.port for broker in read.brokers]) == (name, [2])


@pytest.mark.parametrize(
    ("request_", "ranges"),
    [
        (Produce("id", [], 1), {}),
        (Produce("id", [], 1), {0: (3, 11)}),
        (Produce("id", [], 1), {0: (14, 20)}),
        (EndTxn("id", (1, 2), committed=True), {26: (0, 4)}),
        (Rare(InitProducerIdRequest(min_version=6, max_version=6)), {22: (0, 5)}),
        (Rare(InitProducerIdRequest()), {}),
    ],
)
def test_what_a_broker_does_not_offer_is_refused(request_, ranges):
    with pytest.raises(NotOffered):
        request_.version(Offered(ranges))


def test_the_highest_version_that_both_sides_know_is_sent():
    assert [Produce("id", [], 1).version(Offered({0: (3, top)})) for top in (12, 13, 14)] == [12, 13, 13]
    assert Rare(InitProducerIdRequest(max_version=5)).version(Offered({22: (0, 9)})) == 5


ALLOWED = re.compile(r"kafka\.(errors|protocol|record|net\.sasl)(\.|$)")


def test_of_kafka_python_only_messages_records_errors_and_logins_are_used():
    """Its connections, its event loop and its clients are not; a private attribute of an object is for the linter to find."""
    found = {}
    for path in (ROOT / "dualwrite").rglob("*.py"):
        if "testing" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                named = node.names if isinstance(node, ast.Import) else []
                modules = [one.name for one in named] + [getattr(node, "module", None) or ""]
                bad = [one for one in modules if one.partition(".")[0] == "kafka" and not ALLOWED.match(one)]
                if bad and not getattr(node, "level", 0):
                    found[str(path)] = bad
    assert not found


def test_a_long_varint_is_no_answer():
    with pytest.raises(Unreadable, match="too long"):
        Cursor(b"\xff" * 9, 0).unsigned()
