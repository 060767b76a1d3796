"""Gathers what a cluster shows of itself, and of this user's rights, for :mod:`dualwrite.protocol.kafka_requirements`.

Changes nothing. Rights on transactional ids and groups cannot be listed without a right on the cluster, so we try them out: by
requests about ids that no writer uses, or for a member that no group has, to any broker, coordinator or not. A broker checks
the rights first, and then finds nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafka.protocol.admin.cluster import DescribeQuorumRequest
from kafka.protocol.consumer.group import HeartbeatRequest
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.producer.transaction import InitProducerIdRequest

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.brokers import Brokers, NotYet
from dualwrite.kafka.cluster import rights_of
from dualwrite.kafka.engine import choose_transaction_timeout_ms
from dualwrite.kafka.error_codes import MISSING_RIGHT, RETRIABLE, Code, code_name
from dualwrite.kafka.kafka_python import SHARED_EPOCH, end_shared
from dualwrite.kafka.messages import (
    DescribeProducers,
    Message,
    NotOffered,
    Offered,
    OffsetForLeaderEpoch,
    OfOneKind,
)
from dualwrite.kafka.opening_messages import (
    ClusterMetadata,
    DescribeConfigs,
    DescribedConfig,
    DescribedTopic,
    DescribeTransactions,
    FindCoordinator,
    InitProducerId,
    Metadata,
    ResourceType,
)
from dualwrite.protocol.findings import PROBES, TIME_LIMIT, Unasked
from dualwrite.protocol.kafka_requirements import (
    BROKER_SETTINGS,
    INTERNAL_TOPICS,
    TOPIC_SETTINGS,
    BrokerFacts,
    KafkaFacts,
    Named,
    PartitionFacts,
    TopicFacts,
    takes_two_phase,
    worst_settings,
)
from dualwrite.protocol.values import NEVER_MS, lane_id, outbox_id

if TYPE_CHECKING:
    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.kafka.coordinator import KafkaCoordinator

_ONE_BROKER_S: Final = 5.0
"""Limits the questions to one broker: the others are asked nevertheless."""
_WITH_TWO_PHASE: Final = 6  # of InitProducerId
_FIRST_WITH_FEATURES: Final = 3  # of ApiVersions
_PACKED_HERE: Final[tuple[type[OfOneKind], ...]] = (
    *(Metadata, FindCoordinator, InitProducerId),
    *(DescribeTransactions, DescribeProducers, OffsetForLeaderEpoch),
)
_NEEDED: Final = (
    *((request.NAME, request.KEY, request.LOWEST, request.HIGHEST) for request in _PACKED_HERE),
    *(("EndTxn", 26, 0, SHARED_EPOCH), ("AddPartitionsToTxn", 24, 0, 3), ("Fetch", 1, 0, 12)),  # by kafka-python
)
"""The requests that a writer and recovery need with either engine: name, key, and the versions that the library can send."""
_QUORUM_TOPIC: Final = "__cluster_metadata"
_TO_READ_SETTINGS: Final = "grant DescribeConfigs on the cluster"


def gather(coordinator: KafkaCoordinator, config: KafkaConfig, named: Named, deadline: Deadline) -> KafkaFacts:
    """What shows of the cluster. `Unavailable` or `ConfigurationError` if no broker answers, or they refuse us."""
    brokers, writer = coordinator.brokers, named.writer
    cluster_id = coordinator.cluster_id(deadline)
    addresses = {node: f"{node} at {host}:{port}" for node, (host, port) in sorted(brokers.addresses.brokers.items())}
    answers = {node: _asked(brokers, node, _ask_versions(), deadline) for node in addresses}
    alive = [node for node, answer in answers.items() if not isinstance(answer, Unasked)]
    if not alive:
        silent = Unasked("no broker answers under the address that the cluster tells")
        return KafkaFacts(
            cluster_id,
            {addresses[node]: answer for node, answer in answers.items() if isinstance(answer, Unasked)},
            settings=silent,
            timeout_ms=_chosen(config, None),
            requested_ms=config.transaction_timeout_ms,
            topics=dict.fromkeys(named.topics, silent),
            groups=dict.fromkeys(named.groups, silent),
            ahead_s=silent,
        )
    settings = worst_settings([_settings_of_broker(brokers, node, deadline) for node in alive])
    known = {} if isinstance(settings, Unasked) else settings
    maximum = int(known[TIME_LIMIT]) if TIME_LIMIT in known else None  # brokers of other makers may not name it
    shown = _topics(brokers, alive[0], [*INTERNAL_TOPICS, *named.topics], deadline)
    ahead_s, within_s = _ahead_of_controller(brokers, alive[0], deadline)
    return KafkaFacts(
        cluster_id,
        {addresses[node]: _versions(answer) for node, answer in answers.items()},
        settings,
        _chosen(config, maximum),
        requested_ms=config.transaction_timeout_ms,
        maximum_ms=maximum,
        internal={name: shown[name] for name in INTERNAL_TOPICS},
        topics={name: shown[name] for name in named.topics},
        id_rights={} if writer is None else _id_rights(brokers, alive[0], writer, settings, deadline),
        writer=writer,
        probes=None if writer is None else _may_describe(brokers, alive[0], f"{PROBES}doctor", deadline),
        groups={group: _may_read_group(brokers, alive[0], group, deadline) for group in named.groups},
        max_message_bytes=config.max_message_bytes,
        ahead_s=ahead_s,
        within_s=within_s,
    )


def _asked(brokers: Brokers, node: int, request: Message, deadline: Deadline) -> Any:
    """The answer, or :class:`Unasked`."""
    try:
        [answer] = brokers.exchange([(node, request)], Deadline(min(_ONE_BROKER_S, deadline.remaining_s())))
    except NotYet as reason:
        return Unasked(str(reason))
    except ConfigurationError as error:  # the request is not offered, or the login is refused there
        return Unasked(error.what, error.next_step)
    return Unasked(str(answer)) if isinstance(answer, NotYet) else answer


def _chosen(config: KafkaConfig, maximum_ms: int | None) -> int | ConfigurationError:
    try:
        return choose_transaction_timeout_ms(config.transaction_timeout_ms, maximum_ms, greatest_ms=NEVER_MS)
    except ConfigurationError as error:
        return error


def _ask_versions() -> Message:
    return ApiVersionsRequest(
        client_software_name="dualwrite", client_software_version="0", min_version=_FIRST_WITH_FEATURES
    )


def lacking(offered: Offered) -> frozenset[str]:
    """The requests that every writer needs and that a broker does not offer, by name and versions."""
    found = set()
    for name, key, lowest, highest in _NEEDED:
        try:
            offered.highest(name, key, lowest, highest)
        except NotOffered:
            found.add(f"{name} {lowest}" + (f" to {highest}" if highest > lowest else ""))
    return frozenset(found)


def _versions(answer: Message | Unasked) -> BrokerFacts | Unasked:
    if isinstance(answer, Unasked):
        return answer
    known = {feature.name: feature.max_version for feature in answer.supported_features or ()}
    finalized = {feature.name: feature.max_version_level for feature in answer.finalized_features or ()}
    return BrokerFacts(
        lacking(Offered({api.api_key: (api.min_version, api.max_version) for api in answer.api_keys})),
        known.get("metadata.version"),
        finalized.get("transaction.version", 0),
        known.get("transaction.version", 0),
    )


def _settings_of_broker(brokers: Brokers, node: int, deadline: Deadline) -> Mapping[str, str] | Unasked:
    answer: Sequence[DescribedConfig] | Unasked = _asked(
        brokers, node, DescribeConfigs(ResourceType.BROKER, [str(node)], *BROKER_SETTINGS), deadline
    )
    if isinstance(answer, Unasked):
        return answer
    [result] = answer
    return _settings(result, "the brokers' settings", _TO_READ_SETTINGS)


def _settings(found: DescribedConfig, whose: str, remedy: str) -> Mapping[str, str] | Unasked:
    if found.error_code:
        return _refused(found.error_code, f"{whose}: ", remedy)
    return {name: value for name, value in found.values.items() if value is not None}


def _refused(code: int, subject: str, grant: str) -> Unasked:
    is_forbidden = code in MISSING_RIGHT
    remedy = grant if is_forbidden else "run it again" if code in RETRIABLE else ""
    return Unasked(f"{subject}{code_name(code)}", remedy, is_forbidden)


# Topics: whether they are there, their replicas, their settings, and this user's rights on them.


def _topics(
    brokers: Brokers, node: int, topics: Iterable[str], deadline: Deadline
) -> Mapping[str, TopicFacts | Unasked | None]:
    names = list(dict.fromkeys(topics))
    seen: ClusterMetadata | Unasked = _asked(brokers, node, Metadata(names), deadline)
    if isinstance(seen, Unasked):
        return dict.fromkeys(names, seen)
    answer: Sequence[DescribedConfig] | Unasked = _asked(
        brokers, node, DescribeConfigs(ResourceType.TOPIC, names, *TOPIC_SETTINGS), deadline
    )
    settings: dict[str, Mapping[str, str] | Unasked] = (
        dict.fromkeys(names, answer)
        if isinstance(answer, Unasked)
        else {
            found.resource_name: _settings(
                found,
                f"the settings of {found.resource_name}",
                f"grant DescribeConfigs on the topic {found.resource_name}",
            )
            for found in answer
        }
    )
    left_out = Unasked("the broker left its settings out of its answer")
    return {topic.name: _topic(topic, settings.get(topic.name, left_out)) for topic in seen.topics}


def _topic(topic: DescribedTopic, settings: Mapping[str, str] | Unasked) -> TopicFacts | Unasked | None:
    code = topic.error_code
    if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    if code:
        return _refused(code, "", f"grant Describe on the topic {topic.name}")
    partitions = tuple(PartitionFacts(one.leader_id >= 0, one.replicas, one.in_sync) for one in topic.partitions)
    rights = rights_of(topic.operations)  # who may not even describe it is not shown it
    untold = Unasked("the broker does not tell the rights on a topic")
    return TopicFacts(partitions, untold if rights is None else rights, settings)


# Rights on the transactional ids of a writer.


def _id_rights(
    brokers: Brokers, node: int, writer: str, settings: Mapping[str, str] | Unasked, deadline: Deadline
) -> Mapping[str, bool | Unasked]:
    # A grant on "orders." covers the first lane and not the others; only one on "orders" covers all of them.
    ids = [f"{name}.doctor" for name in (writer, lane_id(writer, 1), outbox_id(writer))]

    def each(make: Callable[[str], Message], codes: Callable[[Any], Collection[int]]) -> bool | Unasked:
        for kafka_id in ids:
            answer = _asked(brokers, node, make(kafka_id), deadline)
            if isinstance(answer, Unasked):
                return answer
            if Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED in codes(answer):
                return False
        return True

    found = {
        "Describe": each(
            lambda kafka_id: DescribeTransactions([kafka_id]),
            lambda answer: [state.error_code for state in answer],
        ),
        "Write": each(
            lambda kafka_id: end_shared(kafka_id, (0, 0), committed=False),
            lambda answer: [answer.error_code],
        ),
    }
    if takes_two_phase(settings) is not True or found["Write"] is not True:
        return found
    # Brokers refuse to keep a prepared transaction once they have checked the rights, and before they make the id.
    found["TwoPhaseCommit"] = each(
        lambda kafka_id: InitProducerIdRequest(
            transactional_id=kafka_id,
            transaction_timeout_ms=NEVER_MS,
            producer_id=-1,
            producer_epoch=-1,
            enable2_pc=True,
            keep_prepared_txn=True,
            min_version=_WITH_TWO_PHASE,
        ),
        lambda answer: [answer.error_code],
    )
    return found


def _may_describe(brokers: Brokers, node: int, kafka_id: str, deadline: Deadline) -> bool | Unasked:
    answer = _asked(brokers, node, DescribeTransactions([kafka_id]), deadline)
    if isinstance(answer, Unasked):
        return answer
    return Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED not in {state.error_code for state in answer}


def _may_read_group(brokers: Brokers, node: int, group: str, deadline: Deadline) -> bool | Unasked:
    request = HeartbeatRequest(group_id=group, generation_id=0, member_id="dualwrite-doctor")
    answer = _asked(brokers, node, request, deadline)
    return answer if isinstance(answer, Unasked) else answer.error_code != Code.GROUP_AUTHORIZATION_FAILED


# The brokers' clock: that of the active controller, which any broker asks for its present state of the quorum.


def _ahead_of_controller(brokers: Brokers, node: int, deadline: Deadline) -> tuple[float | Unasked, float]:
    topic = DescribeQuorumRequest.TopicData
    request = DescribeQuorumRequest(
        topics=[topic(topic_name=_QUORUM_TOPIC, partitions=[topic.PartitionData(partition_index=0)])], min_version=1
    )
    before, began = time.time(), time.monotonic()
    answer = _asked(brokers, node, request, deadline)
    took_s = time.monotonic() - began
    if isinstance(answer, Unasked):
        return answer, 0.0
    if answer.error_code in MISSING_RIGHT:
        return Unasked("only the state of the quorum tells the brokers' time", "grant Describe on the cluster"), 0.0
    for quorum in (partition for one in answer.topics for partition in one.partitions):
        for voter in quorum.current_voters:
            if voter.replica_id == quorum.leader_id and voter.last_fetch_timestamp > 0:
                return before + took_s / 2 - voter.last_fetch_timestamp / 1000, took_s / 2
    return Unasked(f"the controllers do not tell their time ({code_name(answer.error_code)})"), 0.0
