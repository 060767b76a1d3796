"""The requests with which a writer opens equal kafka-python's bytes, and their answers are read as it reads them."""

import uuid

import kafka.errors as kafka_errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.admin.configs import DescribeConfigsRequest, DescribeConfigsResponse
from kafka.protocol.admin.transactions import DescribeTransactionsRequest, DescribeTransactionsResponse
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer.transaction import InitProducerIdRequest, InitProducerIdResponse

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.kafka import messages
from dualwrite.kafka.brokers import NotYet, verdict
from dualwrite.kafka.error_codes import MISSING_RIGHT, RETRIABLE, Code, code_name
from dualwrite.kafka.messages import Client, NotOffered, Offered, Unreadable, unsigned
from dualwrite.kafka.opening_messages import (
    Broker,
    CoordinatorType,
    DescribeConfigs,
    DescribedConfig,
    DescribedPartition,
    DescribedTopic,
    DescribedTransaction,
    DescribeTransactions,
    FinalizedFeatures,
    FindCoordinator,
    InitProducerId,
    Metadata,
    ResourceType,
)

int16, int32 = st.integers(-(2**15), 2**15 - 1), st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
numbers = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=140)
many_names = st.lists(names, max_size=4, unique=True)
clients = st.builds(Client, texts)
ids = st.uuids().map(lambda one: one.bytes)


def versions(kind):
    return pytest.mark.parametrize("version", range(kind.LOWEST, kind.HIGHEST + 1))


def theirs(request, version, correlation_id, client):
    request.with_header(correlation_id=correlation_id, client_id=client.name)
    return request.encode(version=version, header=True, framed=True)


def answer(response, version):
    """The bytes of kafka-python's response, from its correlation id on."""
    response.API_VERSION = version
    response.with_header(correlation_id=7)
    return bytes(response.encode(header=True))


def refuses_every_beginning(read, whole):
    """No part of an answer is taken for a whole one."""
    if len(whole) < 300:
        for size in range(4, len(whole)):
            with pytest.raises((Unreadable, ValueError)):
                read(whole[:size])


def with_an_unknown_tag(whole):
    """The same answer with a tagged field at its end that no side knows."""
    assert whole[-1:] == b"\0"
    return whole[:-1] + b"\1" + unsigned(99) + unsigned(3) + b"new"


def check(read, whole, expected):
    assert read(whole) == expected
    assert read(with_an_unknown_tag(whole)) == expected
    refuses_every_beginning(read, whole)


def test_the_newest_versions_are_those_of_kafka_python():
    for ours, request in (
        (Metadata.HIGHEST, MetadataRequest),
        (FindCoordinator.HIGHEST, FindCoordinatorRequest),
        (FinalizedFeatures.HIGHEST, ApiVersionsRequest),
        (DescribeConfigs.HIGHEST, DescribeConfigsRequest),
        (DescribeTransactions.HIGHEST, DescribeTransactionsRequest),
        (InitProducerId.TWO_PHASE, InitProducerIdRequest),
    ):
        assert ours == request.max_version


@versions(Metadata)
@given(many_names, numbers, clients)
def test_metadata(version, topics, number, client):
    request = MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in topics],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    assert Metadata(topics).frame(version, number, client) == theirs(request, version, number, client)


partitions = st.builds(DescribedPartition, numbers, int32, int32, st.integers(0, 3), st.integers(0, 3))
topics = st.builds(DescribedTopic, int16, names, ids, st.lists(partitions, max_size=3), numbers)


@versions(Metadata)
@given(
    st.lists(st.builds(Broker, int32, texts, int32), max_size=3),
    st.none() | texts,
    st.lists(topics, max_size=3),
    st.lists(int32, max_size=3),
    st.none() | texts,
)
def test_the_answer_to_metadata(version, brokers, cluster_id, described, offline, rack):
    of_topic = MetadataResponse.MetadataResponseTopic
    response = MetadataResponse(
        throttle_time_ms=1,
        brokers=[
            MetadataResponse.MetadataResponseBroker(node_id=one.node_id, host=one.host, port=one.port, rack=rack)
            for one in brokers
        ],
        cluster_id=cluster_id,
        controller_id=2,
        topics=[
            of_topic(
                error_code=topic.error_code,
                name=topic.name,
                topic_id=uuid.UUID(bytes=topic.topic_id),
                is_internal=True,
                partitions=[
                    of_topic.MetadataResponsePartition(
                        error_code=5,
                        partition_index=one.partition_index,
                        leader_id=one.leader_id,
                        leader_epoch=one.leader_epoch,
                        replica_nodes=[7] * one.replicas,
                        isr_nodes=[8] * one.in_sync,
                        offline_replicas=offline,
                    )
                    for one in topic.partitions
                ],
                authorized_operations={bit for bit in range(31) if topic.operations >> bit & 1},
            )
            for topic in described
        ],
    )
    whole = answer(response, version)
    check(lambda data: Metadata(()).read(data, version), whole, (brokers, cluster_id, described))


@versions(FindCoordinator)
@given(st.sampled_from(CoordinatorType), many_names, numbers, clients)
def test_find_coordinator(version, kind, keys, number, client):
    request = FindCoordinatorRequest(key_type=kind.value, coordinator_keys=keys)
    assert FindCoordinator(kind, keys).frame(version, number, client) == theirs(request, version, number, client)


@versions(FindCoordinator)
@given(st.dictionaries(names, st.tuples(int16, int32), max_size=3), st.none() | texts, texts)
def test_the_answer_to_find_coordinator(version, found, text, host):
    of = FindCoordinatorResponse.Coordinator
    response = FindCoordinatorResponse(
        throttle_time_ms=1,
        coordinators=[
            of(key=key, node_id=node, host=host, port=9, error_code=code, error_message=text)
            for key, (code, node) in found.items()
        ],
    )
    whole = answer(response, version)
    check(lambda data: FindCoordinator(CoordinatorType.GROUP, ()).read(data, version), whole, found)


@versions(FinalizedFeatures)
@given(numbers, clients)
def test_finalized_features(version, number, client):
    request = ApiVersionsRequest(client_software_name="dualwrite", client_software_version=messages._OUR_VERSION)
    assert FinalizedFeatures().frame(version, number, client) == theirs(request, version, number, client)


@versions(FinalizedFeatures)
@given(int16, st.dictionaries(int16, st.tuples(int16, int16), max_size=4), st.dictionaries(names, int16, max_size=3))
def test_the_answer_about_finalized_features(version, code, offered, levels):
    response = ApiVersionsResponse(
        error_code=code,
        api_keys=[
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in offered.items()
        ],
        throttle_time_ms=3,
        supported_features=[ApiVersionsResponse.SupportedFeatureKey(name="other", min_version=1, max_version=2)],
        finalized_features_epoch=4,
        finalized_features=[
            ApiVersionsResponse.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=0)
            for name, level in levels.items()
        ],
    )
    whole = answer(response, version)
    assert FinalizedFeatures().read(whole, version) == (code, levels)
    refuses_every_beginning(lambda data: FinalizedFeatures().read(data, version), whole)


@given(st.sampled_from(ResourceType), many_names, many_names, numbers, clients)
def test_describe_configs(kind, of, settings, number, client):
    request = DescribeConfigsRequest(
        resources=[
            DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=kind.value, resource_name=name, configuration_keys=settings
            )
            for name in of
        ],
        include_synonyms=False,
        include_documentation=False,
    )
    ours = DescribeConfigs(kind, of, *settings).frame(DescribeConfigs.HIGHEST, number, client)
    assert ours == theirs(request, DescribeConfigs.HIGHEST, number, client)


configs = st.builds(DescribedConfig, int16, texts, st.dictionaries(names, st.none() | texts, max_size=2))


@given(st.lists(configs, max_size=3), st.none() | texts)
def test_the_answer_to_describe_configs(shown, text):
    of = DescribeConfigsResponse.DescribeConfigsResult
    setting = of.DescribeConfigsResourceResult
    response = DescribeConfigsResponse(
        throttle_time_ms=1,
        results=[
            of(
                error_code=one.error_code,
                error_message=text,
                resource_type=2,
                resource_name=one.resource_name,
                configs=[
                    setting(
                        name=name,
                        value=value,
                        read_only=True,
                        config_source=3,
                        is_sensitive=False,
                        synonyms=[setting.DescribeConfigsSynonym(name="s", value=text, source=1)],
                        config_type=2,
                        documentation=text,
                    )
                    for name, value in one.values.items()
                ],
            )
            for one in shown
        ],
    )
    whole = answer(response, DescribeConfigs.HIGHEST)
    read = DescribeConfigs(ResourceType.TOPIC, (), "x").read
    check(lambda data: read(data, DescribeConfigs.HIGHEST), whole, shown)


@given(many_names, numbers, clients)
def test_describe_transactions(kafka_ids, number, client):
    request = DescribeTransactionsRequest(transactional_ids=kafka_ids)
    assert DescribeTransactions(kafka_ids).frame(0, number, client) == theirs(request, 0, number, client)


in_topics = st.dictionaries(names, st.lists(int32, max_size=3), max_size=2)


@given(st.lists(st.tuples(int16, names, texts, int32, int64, int64, int16, in_topics), max_size=3))
def test_the_answer_to_describe_transactions(shown):
    of = DescribeTransactionsResponse.TransactionState
    response = DescribeTransactionsResponse(
        throttle_time_ms=1,
        transaction_states=[
            of(
                error_code=code,
                transactional_id=kafka_id,
                transaction_state=state,
                transaction_timeout_ms=timeout_ms,
                transaction_start_time_ms=begun_ms,
                producer_id=producer_id,
                producer_epoch=epoch,
                topics=[of.TopicData(topic=name, partitions=of_topic) for name, of_topic in sent_to.items()],
            )
            for code, kafka_id, state, timeout_ms, begun_ms, producer_id, epoch, sent_to in shown
        ],
    )
    expected = [
        DescribedTransaction(*fields, [(name, number) for name, of_topic in sent_to.items() for number in of_topic])
        for *fields, sent_to in shown
    ]
    check(lambda data: DescribeTransactions(()).read(data, 0), answer(response, 0), expected)


@pytest.mark.parametrize(("version", "two_phase"), [(4, False), (5, False), (6, True)])
@given(names, int32, numbers, clients)
def test_init_producer_id(version, two_phase, kafka_id, timeout_ms, number, client):
    request = InitProducerIdRequest(
        transactional_id=kafka_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
        enable2_pc=two_phase,
    )
    ours = InitProducerId(kafka_id, timeout_ms, two_phase=two_phase)
    assert ours.version(Offered({22: (0, 9)})) == (6 if two_phase else 5)
    assert ours.frame(version, number, client) == theirs(request, version, number, client)


@pytest.mark.parametrize("version", [4, 5, 6])
@given(int16, int64, int16, int64)
def test_the_answer_to_init_producer_id(version, code, producer_id, epoch, ongoing):
    response = InitProducerIdResponse(
        throttle_time_ms=1,
        error_code=code,
        producer_id=producer_id,
        producer_epoch=epoch,
        ongoing_txn_producer_id=ongoing,
        ongoing_txn_producer_epoch=3,
    )
    read = InitProducerId("id", 1).read
    check(lambda data: read(data, version), answer(response, version), (code, producer_id, epoch))


@pytest.mark.parametrize(
    ("request_", "ranges"),
    [
        (Metadata(()), {3: (0, 10)}),
        (FindCoordinator(CoordinatorType.GROUP, ()), {10: (0, 3)}),
        (FinalizedFeatures(), {18: (0, 2)}),
        (DescribeConfigs(ResourceType.TOPIC, (), "x"), {32: (0, 3)}),
        (DescribeTransactions(()), {}),
        (InitProducerId("id", 1), {22: (0, 3)}),
        (InitProducerId("id", 1, two_phase=True), {22: (0, 5)}),
    ],
)
def test_a_broker_that_is_too_old_is_refused(request_, ranges):
    with pytest.raises(NotOffered):
        request_.version(Offered(ranges))


def test_every_version_of_kafka_3_0_is_offered():
    kafka_3_0 = Offered({3: (0, 11), 10: (0, 4), 18: (0, 3), 22: (0, 4), 32: (0, 4), 65: (0, 0)})
    requests = [
        Metadata(()),
        FindCoordinator(CoordinatorType.GROUP, ()),
        FinalizedFeatures(),
        InitProducerId("id", 1),
        DescribeConfigs(ResourceType.TOPIC, (), "x"),
        DescribeTransactions(()),
    ]
    assert [request.version(kafka_3_0) for request in requests] == [11, 4, 3, 4, 4, 0]


ERRORS = {code: kind for code, kind in kafka_errors.kafka_errors.items() if isinstance(code, int)}


def test_what_may_be_asked_again_and_what_lacks_a_right_is_as_kafka_python_says():
    assert {code for code, kind in ERRORS.items() if kind.retriable} == RETRIABLE
    lacking = {code for code, kind in ERRORS.items() if issubclass(kind, kafka_errors.AuthorizationError)}
    assert lacking == MISSING_RIGHT


@pytest.mark.parametrize("code", sorted({*ERRORS, 9999} - {0}))
def test_a_brokers_error_is_retried_or_raised(code):
    if code in RETRIABLE or code == Code.UNKNOWN_SERVER_ERROR:
        assert isinstance(verdict(code, "it", "everything"), NotYet)
        return
    with pytest.raises(ConfigurationError if code in MISSING_RIGHT else Unavailable, match=code_name(code)):
        verdict(code, "it", "everything")


def test_no_error_is_no_reason():
    assert verdict(0, "it", "everything") is None
