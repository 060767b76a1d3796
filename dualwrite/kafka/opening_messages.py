"""The requests with which a writer opens: who the brokers are, who coordinates, what is open, and a producer id.

They are packed and read here, as those of every dual write in :mod:`dualwrite.kafka.messages`: a process whose brokers are well
then never imports kafka-python, which takes a tenth of a second. Kafka 3.0 offers a version of each. Tests hold their bytes
equal to kafka-python's, for every version.

Source: the Kafka protocol guide; KIP-482 (tagged fields), KIP-584 (features), KIP-664, KIP-699, KIP-939.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from dualwrite.kafka.messages import (
    API_VERSIONS,
    ID_ENDS,
    NO_TAGS,
    Client,
    Cursor,
    Offered,
    OfOneKind,
    Partition,
    Varying,
    api_versions_body,
    behind_head,
    compact,
    framed,
    skip_api_keys,
    unsigned,
)


def _texts(texts: Collection[str]) -> bytes:
    return unsigned(len(texts) + 1) + b"".join(map(compact, texts))


# The cluster.


class Broker(NamedTuple):
    """A broker, where its listener is reached."""

    node_id: int
    host: str
    port: int


class DescribedPartition(NamedTuple):
    """A partition as a broker knows it. ``leader_id`` is -1 while it has no leader. Of the replicas, ``in_sync`` are that."""

    partition_index: int
    leader_id: int
    leader_epoch: int
    replicas: int
    in_sync: int


class DescribedTopic(NamedTuple):
    """A topic as a broker knows it. ``topic_id`` is 16 bytes, zeros if it has none.

    ``operations`` has a bit for each operation that this user may do there; none but the sign if the broker does not tell them.
    """

    error_code: int
    name: str
    topic_id: bytes
    partitions: Sequence[DescribedPartition]
    operations: int


class ClusterMetadata(NamedTuple):
    """The brokers, the cluster's id, and the topics that were asked for."""

    brokers: Sequence[Broker]
    cluster_id: str | None
    topics: Sequence[DescribedTopic]


class Metadata(OfOneKind):
    """The brokers, the cluster's id, and these topics, with this user's rights on them. Creates no topic."""

    NAME, KEY, LOWEST, HIGHEST = "Metadata", 3, 11, 13
    __slots__ = ("topics",)

    def __init__(self, topics: Collection[str]) -> None:
        self.topics = topics

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        topics = [_NO_ID + compact(name) + NO_TAGS for name in self.topics]
        body = unsigned(len(topics) + 1) + b"".join(topics) + _CREATE_NOTHING_TELL_RIGHTS
        return framed(self.KEY, version, correlation_id, client, body)

    def read(self, answer: bytes, version: int) -> ClusterMetadata:
        """The answer."""
        read = behind_head(answer)
        brokers = []
        for _ in range(read.count()):
            brokers.append(Broker(read.int32(), read.text() or "", read.int32()))
            read.text()  # its rack
            read.skip_tags()
        cluster_id = read.text()
        read.int32()  # the controller
        topics = [_topic(read) for _ in range(read.count())]
        if version >= _WITH_ONE_ERROR:
            read.int16()
        read.skip_tags()
        return ClusterMetadata(brokers, cluster_id, topics)


_NO_ID: Final = bytes(16)
_CREATE_NOTHING_TELL_RIGHTS: Final = b"\0\1" + NO_TAGS
_WITH_ONE_ERROR: Final = 13


def _topic(read: Cursor) -> DescribedTopic:
    code, name, topic_id = read.int16(), read.text() or "", read.raw(16)
    read.raw(1)  # whether it is internal
    partitions = []
    for _ in range(read.count()):
        read.int16()  # an error of the partition: it has no leader then
        number, leader, epoch = read.int32(), read.int32(), read.int32()
        # The replicas: all, those in sync, and those that are offline.
        replicas, in_sync, _ = (len(read.raw(4 * read.count())) // 4 for _ in range(3))
        partitions.append(DescribedPartition(number, leader, epoch, replicas, in_sync))
        read.skip_tags()
    operations = read.int32()
    read.skip_tags()
    return DescribedTopic(code, name, topic_id, partitions, operations)


class CoordinatorType(IntEnum):
    """Whose coordinator to find."""

    GROUP = 0
    TRANSACTION = 1


class FindCoordinator(OfOneKind):
    """The brokers that coordinate transactional ids, or groups. Source: KIP-699."""

    NAME, KEY, LOWEST, HIGHEST = "FindCoordinator", 10, 4, 6
    __slots__ = ("keys", "kind")

    def __init__(self, kind: CoordinatorType, keys: Collection[str]) -> None:
        self.kind = kind
        self.keys = keys

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        body = self.kind.to_bytes(1, "big") + _texts(self.keys) + NO_TAGS
        return framed(self.KEY, version, correlation_id, client, body)

    def read(self, answer: bytes, version: int) -> dict[str, tuple[int, int]]:  # noqa: ARG002 - all versions answer alike
        """By key, the error code, and the id of the coordinating broker if that is 0."""
        found = {}
        read = behind_head(answer)
        for _ in range(read.count()):
            key, node = read.text() or "", read.int32()
            read.text()  # host
            read.int32()  # and port: a Metadata answer tells them, too
            found[key] = (read.int16(), node)
            read.text()  # of the error
            read.skip_tags()
        read.skip_tags()
        return found


class FinalizedFeatures(OfOneKind):
    """The levels of the features that the cluster has finalized: an ApiVersions request. Source: KIP-584."""

    NAME, KEY, LOWEST, HIGHEST = "ApiVersions", API_VERSIONS, 3, 4
    __slots__ = ()

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        return framed(self.KEY, version, correlation_id, client, api_versions_body())

    def read(self, answer: bytes, version: int) -> tuple[int, Mapping[str, int]]:  # noqa: ARG002 - all versions answer alike
        """The error code, and by feature its highest level."""
        read = Cursor(answer, ID_ENDS)  # the head never has tagged fields
        code = read.int16()
        skip_api_keys(read)
        read.int32()  # for how long the broker throttles us
        levels: dict[str, int] = {}
        for _ in range(read.unsigned()):
            tag, size = read.unsigned(), read.unsigned()
            value = Cursor(read.raw(size), 0)
            if tag == _FINALIZED:
                for _ in range(value.count()):
                    name = value.text() or ""
                    levels[name] = value.int16()
                    value.int16()  # the lowest level
                    value.skip_tags()
        return code, levels


_FINALIZED: Final = 2


class DescribedConfig(NamedTuple):
    """A resource and those of its settings that were asked for."""

    error_code: int
    resource_name: str
    values: Mapping[str, str | None]


class ResourceType(IntEnum):
    """What has settings."""

    TOPIC = 2
    BROKER = 4


class DescribeConfigs(OfOneKind):
    """Some settings of each of these resources."""

    NAME, KEY, LOWEST, HIGHEST = "DescribeConfigs", 32, 4, 4
    __slots__ = ("kind", "names", "settings")

    def __init__(self, kind: ResourceType, names: Collection[str], *settings: str) -> None:
        self.kind = kind
        self.names = names
        self.settings = settings

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        kind, settings = self.kind.to_bytes(1, "big"), _texts(self.settings) + NO_TAGS
        resources = b"".join(kind + compact(name) + settings for name in self.names)
        body = unsigned(len(self.names) + 1) + resources + _NEITHER_SYNONYMS_NOR_DOCUMENTATION
        return framed(self.KEY, version, correlation_id, client, body)

    def read(self, answer: bytes, version: int) -> Sequence[DescribedConfig]:  # noqa: ARG002 - there is one version
        """The resources, in the broker's order."""
        read = behind_head(answer)
        found = []
        for _ in range(read.count()):
            code = read.int16()
            read.text()  # of the error
            read.raw(1)  # the kind of the resource
            name = read.text() or ""
            values: dict[str, str | None] = {}
            for _ in range(read.count()):
                setting = read.text() or ""
                values[setting] = read.text()
                read.raw(3)  # whether it is read only, where it comes from, whether it is a secret
                for _ in range(read.count()):  # its synonyms
                    read.text()
                    read.text()
                    read.raw(1)
                    read.skip_tags()
                read.raw(1)  # its type
                read.text()  # its documentation
                read.skip_tags()
            read.skip_tags()
            found.append(DescribedConfig(code, name, values))
        read.skip_tags()
        return found


_NEITHER_SYNONYMS_NOR_DOCUMENTATION: Final = b"\0\0" + NO_TAGS


# The transactions of a transactional id.


class DescribedTransaction(NamedTuple):
    """A transactional id as its coordinator knows it. ``start_time_ms`` is -1 if no transaction has begun."""

    error_code: int
    transactional_id: str
    state: str
    timeout_ms: int
    start_time_ms: int
    producer_id: int
    producer_epoch: int
    partitions: Sequence[Partition]


class DescribeTransactions(OfOneKind):
    """The newest transactions of ids that one broker coordinates. Source: KIP-664."""

    NAME, KEY, LOWEST, HIGHEST = "DescribeTransactions", 65, 0, 0
    __slots__ = ("transactional_ids",)

    def __init__(self, transactional_ids: Collection[str]) -> None:
        self.transactional_ids = transactional_ids

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        return framed(self.KEY, version, correlation_id, client, _texts(self.transactional_ids) + NO_TAGS)

    def read(self, answer: bytes, version: int) -> Sequence[DescribedTransaction]:  # noqa: ARG002 - there is one version
        """The ids, in the broker's order."""
        read = behind_head(answer)
        found = []
        for _ in range(read.count()):
            code, kafka_id, state = read.int16(), read.text() or "", read.text() or ""
            timeout_ms, begun_ms, producer_id, epoch = _OF_TRANSACTION.unpack(read.raw(_OF_TRANSACTION.size))
            partitions: list[Partition] = []
            for _ in range(read.count()):
                topic, count = read.text() or "", read.count()
                partitions += [(topic, number) for (number,) in _INT32.iter_unpack(read.raw(4 * count))]
                read.skip_tags()
            read.skip_tags()
            found.append(
                DescribedTransaction(code, kafka_id, state, timeout_ms, begun_ms, producer_id, epoch, partitions)
            )
        read.skip_tags()
        return found


_OF_TRANSACTION: Final = struct.Struct(">iqqh")  # timeout, start, producer id and epoch
_INT32: Final = struct.Struct(">i")


class GivenProducerId(NamedTuple):
    """The answer to an InitProducerId. The ids are -1 if there is an error."""

    error_code: int
    producer_id: int
    producer_epoch: int


class InitProducerId(OfOneKind, Varying):
    """A producer id and epoch for a new producer; what is open under its transactional id is aborted.

    Of the last version, KIP-939's, is the request for two-phase commit. Brokers offer it only if they have unstable versions
    enabled.
    """

    NAME, KEY, LOWEST, HIGHEST, TWO_PHASE = "InitProducerId", 22, 4, 5, 6
    __slots__ = ("timeout_ms", "transactional_id", "two_phase")

    def __init__(self, transactional_id: str, timeout_ms: int, *, two_phase: bool = False) -> None:
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self.two_phase = two_phase

    def version(self, offered: Offered) -> int:
        if self.two_phase:
            return offered.highest(self.NAME, self.KEY, self.TWO_PHASE, self.TWO_PHASE)
        return super().version(offered)

    def frame(self, version: int, correlation_id: int, client: Client) -> bytes:
        body = compact(self.transactional_id) + _FOR_A_NEW_PRODUCER.pack(self.timeout_ms, -1, -1)
        body += (_TWO_PHASE if self.two_phase else b"") + NO_TAGS
        return framed(self.KEY, version, correlation_id, client, body)

    def read(self, answer: bytes, version: int) -> GivenProducerId:
        """The answer."""
        read = behind_head(answer)
        given = GivenProducerId(read.int16(), read.int64(), read.int16())
        if version >= self.TWO_PHASE:
            read.raw(10)  # the ids of a transaction that was kept: we keep none
        read.skip_tags()
        return given


_FOR_A_NEW_PRODUCER: Final = struct.Struct(">iqh")
_TWO_PHASE: Final = b"\1\0"  # two-phase commit, and no prepared transaction is kept
