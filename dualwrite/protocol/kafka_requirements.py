"""What this library requires of a Kafka cluster: its brokers, the time limit of transactions, topics and rights.

Each rule judges facts; :mod:`dualwrite.kafka.facts` gathers them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dualwrite.errors import ConfigurationError, DualWriteError
from dualwrite.protocol.findings import (
    KAFKA,
    PROBES,
    TIME_LIMIT,
    TRANSACTION_STATE,
    Check,
    CheckResult,
    Status,
    Unasked,
    clock,
    listed,
    time_limit,
)
from dualwrite.protocol.values import NEVER_MS, OFFSETS_TOPIC, other_cluster

_COMPLETE: Final = 2
"""The ``transaction.version`` from which on each transaction has an epoch of its own (KIP-890)."""
_RELEASES: Final = {
    1: (3, 0),
    2: (3, 1),
    3: (3, 2),
    4: (3, 3),
    8: (3, 4),
    9: (3, 5),
    12: (3, 6),
    15: (3, 7),
    20: (3, 8),
    21: (3, 9),
    22: (4, 0),
    26: (4, 1),
    28: (4, 2),
    30: (4, 3),
    31: (4, 4),
}
"""By the first level of ``metadata.version`` that a release knows, the release. Source: Kafka's ``MetadataVersion``."""
_NEWEST_KNOWN: Final = 33
"""The last level of 4.4.0, whose levels begin at 31."""
_FORGETS_FROM: Final = (4, 3)
"""The first release that has KAFKA-20734; 4.2 keeps the markers. None is known to be free of it again."""
_SAFE_REPLICAS: Final = 3
_SAFE_IN_SYNC: Final = 2
_LEAST_RETENTION_MS: Final = 86_400_000
TWO_PHASE_COMMIT: Final = "transaction.two.phase.commit.enable"
UNSTABLE_VERSIONS: Final = "unstable.api.versions.enable"


TOPIC_SETTINGS: Final = (
    "cleanup.policy",
    "max.message.bytes",
    "min.insync.replicas",
    "retention.ms",
    "unclean.leader.election.enable",
)
BROKER_SETTINGS: Final = {
    TIME_LIMIT: int,
    TWO_PHASE_COMMIT: str,
    UNSTABLE_VERSIONS: str,
    "transaction.state.log.replication.factor": int,
    "transaction.state.log.min.isr": int,
    "offsets.topic.replication.factor": int,
    "min.insync.replicas": int,
}
"""The settings of brokers that are looked at: of a number the least is the worst, of a text ``false``."""


@dataclass(frozen=True)
class Named:
    """What a person has named to be checked: topics, consumer groups, and the writer."""

    topics: Collection[str] = ()
    groups: Collection[str] = ()
    writer: str | None = None


@dataclass(frozen=True)
class BrokerFacts:
    """What one broker says of itself.

    Attributes:
        lacking: The requests that every writer needs and that it does not offer, by name and versions.
        metadata_level: The highest level of ``metadata.version`` that its program knows; None if it names none.
        transaction_version: The cluster's finalized ``transaction.version``.
        most_transaction_version: The highest one that its program knows.
    """

    lacking: frozenset[str]
    metadata_level: int | None
    transaction_version: int
    most_transaction_version: int


@dataclass(frozen=True)
class PartitionFacts:
    """A partition: whether it has a leader, and how many replicas, of which so many are in sync."""

    has_leader: bool
    replicas: int
    in_sync: int


@dataclass(frozen=True)
class TopicFacts:
    """A topic that exists.

    Attributes:
        partitions: Its partitions.
        rights: The names of the operations that this user may do on it.
        settings: The values of its settings.
    """

    partitions: Sequence[PartitionFacts]
    rights: frozenset[str] | Unasked
    settings: Mapping[str, str] | Unasked


@dataclass(frozen=True)
class KafkaFacts:
    """What was seen of a cluster that answers.

    Attributes:
        cluster_id: The cluster's id.
        brokers: What each broker says, by its id and address.
        settings: The brokers' settings; where they differ, the worst value for a dual write.
        timeout_ms: The transaction timeout that a writer would ask for, or the error with which it refuses the settings.
        requested_ms: The user's own ``transaction.timeout.ms``.
        maximum_ms: The brokers' ``transaction.max.timeout.ms``; None if it cannot be read.
        internal: Kafka's own topics that transactions need; None for one that has not been made yet.
        topics: The topics that were asked about; None for one that does not exist.
        id_rights: By right, whether this user has it on the writer's transactional ids; empty if no writer was named.
        writer: The writer's name.
        probes: Whether this user may describe the ids by which a recovery after a restore shows that it has found all of them;
            None if no writer was named.
        groups: By consumer group that was asked about, whether this user has Read on it.
        max_message_bytes: The largest message that the client takes.
        ahead_s: How far this machine's clock is ahead of the active controller's; negative if it is behind.
        within_s: How exactly that is known.
    """

    cluster_id: str
    brokers: Mapping[str, BrokerFacts | Unasked]
    settings: Mapping[str, str] | Unasked
    timeout_ms: int | ConfigurationError
    requested_ms: int | None = None
    maximum_ms: int | None = None
    internal: Mapping[str, TopicFacts | Unasked | None] = field(default_factory=dict)
    topics: Mapping[str, TopicFacts | Unasked | None] = field(default_factory=dict)
    id_rights: Mapping[str, bool | Unasked] = field(default_factory=dict)
    writer: str | None = None
    probes: bool | Unasked | None = None
    groups: Mapping[str, bool | Unasked] = field(default_factory=dict)
    max_message_bytes: int = 1_000_000
    ahead_s: float | Unasked = 0.0
    within_s: float = 0.0


def judge_kafka(facts: KafkaFacts) -> Iterator[CheckResult]:
    """All findings about a cluster that answers."""
    yield brokers_answer(facts.cluster_id, facts.brokers)
    answering = [one for one in facts.brokers.values() if isinstance(one, BrokerFacts)]
    if answering:
        yield versions(answering)
        yield transaction_version(answering)
        yield forgotten_markers(answering, list(facts.topics.values()))
    yield _time_limit(facts)
    yield two_phase_commit(facts.settings, granted=facts.id_rights.get("TwoPhaseCommit"), writer=facts.writer)
    for name, topic in facts.internal.items():
        yield internal_topic(name, topic, facts.settings)
    if facts.writer is not None:
        yield id_rights(facts.writer, facts.id_rights)
    if facts.probes is not None:
        yield rights_after_a_restore(facts.internal.get(TRANSACTION_STATE), probes=facts.probes)
    for group, granted in facts.groups.items():
        yield group_rights(group, granted=granted)
    if facts.groups and OFFSETS_TOPIC in facts.internal:
        yield rights_on_offsets(facts.internal[OFFSETS_TOPIC])
    for name, topic in facts.topics.items():
        yield from judge_topic(name, topic, facts.max_message_bytes)
    yield clock("the active controller", facts.ahead_s, facts.within_s, of_brokers=True)


def kafka_is_away(error: DualWriteError) -> CheckResult:
    """No broker answers, or they refuse us."""
    why = "without Kafka no transaction is committed, and what is decided waits"
    return Check(KAFKA, "brokers", why).refused(error)


def brokers_answer(cluster_id: str, brokers: Mapping[str, BrokerFacts | Unasked]) -> CheckResult:
    """Each broker must answer under the address that the cluster tells clients."""
    check = Check(KAFKA, "brokers", "a writer must reach the leader of each partition, and the coordinators of its ids")
    silent = {name: one.reason for name, one in brokers.items() if isinstance(one, Unasked)}
    if silent:
        return check.error(
            f"{len(silent)} of {len(brokers)} brokers do not answer: "
            + listed([f"{name} ({why})" for name, why in silent.items()]),
            "start them, open the way to these addresses, or correct advertised.listeners on the brokers",
        )
    return check.ok(f"all {len(brokers)} of cluster {cluster_id} answer: {listed(list(brokers))}")


def release_of(broker: BrokerFacts) -> tuple[int, int] | None:
    """The release of a broker's program; None if it tells none, or one newer than those known here."""
    level = broker.metadata_level
    if level is None or level > _NEWEST_KNOWN:
        return None
    return max((release for first, release in _RELEASES.items() if first <= level), default=None)


def versions(brokers: Sequence[BrokerFacts]) -> CheckResult:
    """The brokers' program must know the requests that this library sends."""
    check = Check(
        KAFKA, "version", "settling and the proof of how a transaction ended need requests that came with 3.0"
    )
    if lacking := sorted({request for broker in brokers for request in broker.lacking}):
        return check.error(f"a broker does not offer {listed(lacking)}", "use Kafka 3.0 or newer")
    return check.ok(f"Kafka {listed(sorted({_release_words(broker) for broker in brokers}))}")


def _release_words(broker: BrokerFacts) -> str:
    release = release_of(broker)
    if release is not None:
        return ".".join(map(str, release))
    return "3.x (its features name no release)" if broker.metadata_level is None else "newer than 4.4"


def worst_settings(of_brokers: Sequence[Mapping[str, str] | Unasked]) -> Mapping[str, str] | Unasked:
    """The settings as a dual write must expect them: of the brokers' values, each time the worst."""
    known: list[Mapping[str, str]] = []
    for one in of_brokers:
        if isinstance(one, Unasked):
            return one
        known.append(one)
    values = {name: [one[name] for one in known if name in one] for name in BROKER_SETTINGS}
    # Older brokers do not have every setting.
    return {name: min(found, key=BROKER_SETTINGS[name]) for name, found in values.items() if found}


def transaction_version(brokers: Sequence[BrokerFacts]) -> CheckResult:
    """The cluster should have transactions of version 2, if its brokers know them."""
    why = f"from {_COMPLETE} on, each transaction has an epoch of its own, and the native engine sends (KIP-890)"
    check = Check(KAFKA, "transaction.version", why)
    finalized = min(broker.transaction_version for broker in brokers)
    if finalized >= _COMPLETE:
        return check.ok(str(finalized))
    if min(broker.most_transaction_version for broker in brokers) >= _COMPLETE:
        return check.warning(
            f"{finalized}, although all brokers know {_COMPLETE}",
            f"kafka-features.sh --bootstrap-server ... upgrade --feature transaction.version={_COMPLETE}",
        )
    return check.ok(f"{finalized}: the brokers know no other, and librdkafka sends")


def forgotten_markers(brokers: Sequence[BrokerFacts], topics: Sequence[TopicFacts | Unasked | None]) -> CheckResult:
    """Whether the brokers may forget to end transactions in partitions without a leader. Replication makes it rare."""
    why = (
        "such a broker may forget to end a transaction in a partition without a leader: readers wait there, and settling must "
        "find and end it"
    )
    check = Check(KAFKA, "KAFKA-20734", why)
    oldest_with_it = ".".join(map(str, _FORGETS_FROM))
    if not any(_may_forget(broker) for broker in brokers):
        return check.ok(f"not known of releases before {oldest_with_it}")
    known = [topic for topic in topics if isinstance(topic, TopicFacts)]
    replicated = [
        partition.replicas >= _SAFE_REPLICAS and _in_sync_of(topic) >= _SAFE_IN_SYNC
        for topic in known
        for partition in topic.partitions
    ]
    if replicated and all(replicated) and len(known) == len(topics):
        return check.ok("these brokers may have it; three replicas make it rare")
    if not topics:
        return check.unknown(
            Unasked(
                f"all releases from {oldest_with_it} on may have it; three replicas make it rare, and no topic was named",
                "name the topics with --topic",
            )
        )
    return check.warning(
        f"all releases from {oldest_with_it} on may have it, and the topics have fewer than three replicas, two in sync",
        "give topics three replicas on three brokers and min.insync.replicas=2, and run `dualwrite recover` after a broker "
        "was lost",
    )


def _may_forget(broker: BrokerFacts) -> bool:
    release = release_of(broker)
    return broker.metadata_level is not None if release is None else release >= _FORGETS_FROM


def _in_sync_of(topic: TopicFacts) -> int:
    """The topic's ``min.insync.replicas``. One that may not be read counts as enough: its own check says so."""
    return _SAFE_IN_SYNC if isinstance(topic.settings, Unasked) else int(topic.settings.get("min.insync.replicas", "1"))


def _time_limit(facts: KafkaFacts) -> CheckResult:
    if isinstance(facts.timeout_ms, ConfigurationError):
        why = "a broker refuses a transaction timeout above its own maximum"
        return Check(KAFKA, TIME_LIMIT, why).refused(facts.timeout_ms)
    if takes_two_phase(facts.settings) is True and facts.id_rights.get("TwoPhaseCommit") is True:
        return Check(
            KAFKA, TIME_LIMIT, "a transaction under two-phase commit has no time limit, whatever this setting is"
        ).ok(f"{facts.maximum_ms}, and two-phase commit is granted")
    return time_limit(facts.requested_ms, facts.maximum_ms, facts.timeout_ms, greatest_ms=NEVER_MS)


def takes_two_phase(settings: Mapping[str, str] | Unasked) -> bool | Unasked:
    """Whether the brokers offer KIP-939's two-phase commit."""
    if isinstance(settings, Unasked):
        return settings
    return all(settings.get(name) == "true" for name in (TWO_PHASE_COMMIT, UNSTABLE_VERSIONS))


def two_phase_commit(
    settings: Mapping[str, str] | Unasked, *, granted: bool | Unasked | None, writer: str | None
) -> CheckResult:
    """Whether the native engine can use KIP-939's two-phase commit. Nobody has to switch it on."""
    why = "under two-phase commit (KIP-939) a broker never ends a decided transaction by itself"
    check = Check(KAFKA, "two-phase commit", why)
    offered = takes_two_phase(settings)
    if isinstance(offered, Unasked):
        return check.unknown(offered)
    if not offered:
        return check.ok("the brokers do not offer it: it is optional")
    if granted is None:
        return check.unknown(Unasked("the brokers offer it; the right depends on the writer's name", "give --writer"))
    if isinstance(granted, Unasked):
        return check.unknown(granted)
    if granted:
        return check.ok("the brokers offer it, and this user may use it")
    return check.warning(
        "the brokers offer it, and this user lacks the right TwoPhaseCommit",
        _acl("TwoPhaseCommit", f"--transactional-id {writer} --resource-pattern-type prefixed"),
    )


def _acl(operation: str, resource: str) -> str:
    return f"kafka-acls.sh --bootstrap-server ... --add --allow-principal User:... --operation {operation} {resource}"


INTERNAL_TOPICS: Final = {
    TRANSACTION_STATE: (
        *("transaction.state.log.replication.factor", "transaction.state.log.min.isr"),
        "it holds what the coordinators have committed",
    ),
    OFFSETS_TOPIC: (
        *("offsets.topic.replication.factor", "min.insync.replicas"),
        "it holds the offsets that transactions commit",
    ),
}
"""By Kafka's own topic, the brokers' settings for its replicas and for those in sync, and what is lost with it."""


def internal_topic(name: str, topic: TopicFacts | Unasked | None, settings: Mapping[str, str] | Unasked) -> CheckResult:
    """The replication of one of Kafka's own topics; of one that is not made yet, as the brokers would make it."""
    replicas_key, in_sync_key, holds = INTERNAL_TOPICS[name]
    if not isinstance(topic, TopicFacts):
        check = Check(KAFKA, f"replicas of {name}", f"{holds}, and is lost with its last replica")
        if isinstance(topic, Unasked):
            return check.unknown(topic)
        if isinstance(settings, Unasked):
            return check.unknown(
                Unasked("the topic is not made yet, and the brokers' settings cannot be read", settings.remedy)
            )
        replicas = int(settings.get(replicas_key, "1"))
        in_sync = int(settings.get(in_sync_key, "1"))
        topic = TopicFacts(
            (PartitionFacts(True, replicas, replicas),), Unasked(""), {"min.insync.replicas": str(in_sync)}
        )
    return replication(name, topic, holds)


# Topics.


def judge_topic(name: str, topic: TopicFacts | Unasked | None, max_message_bytes: int) -> Iterator[CheckResult]:
    """All findings about one topic that was asked about."""
    check = Check(KAFKA, f"topic {name}", "a message to a topic that does not exist aborts its dual write")
    if topic is None:
        yield check.error("it does not exist", f"kafka-topics.sh --bootstrap-server ... --create --topic {name}")
        return
    if isinstance(topic, Unasked):
        yield check.unknown(topic)
        return
    leaderless = [number for number, partition in enumerate(topic.partitions) if not partition.has_leader]
    if leaderless:
        yield check.error(
            f"of {len(topic.partitions)} partitions these have no leader: {listed(leaderless)}",
            "start the brokers that hold them",
        )
    else:
        yield check.ok(f"{len(topic.partitions)} partitions, all with leaders")
    yield topic_rights(name, topic.rights)
    yield replication(name, topic, "it holds the messages that were decided")
    yield from topic_settings(name, topic.settings, max_message_bytes)


def topic_rights(name: str, rights: frozenset[str] | Unasked) -> CheckResult:
    """The rights of a writer, and of a process that settles, on a topic."""
    check = Check(
        KAFKA, f"rights on {name}", "a writer produces (Write), and reads how each of its transactions has ended (Read)"
    )
    if isinstance(rights, Unasked):
        return check.unknown(rights)
    missing = [right for right in ("Write", "Read") if right not in rights]
    if missing:
        operations = " --operation ".join(missing)
        return check.error(f"missing: {', '.join(missing)}", _acl(operations, f"--topic {name}"))
    if "DescribeConfigs" not in rights:
        return check.ok("Write and Read; without DescribeConfigs a writer cannot warn of a compacted topic")
    return check.ok("Write, Read and DescribeConfigs")


def replication(name: str, topic: TopicFacts, holds: str) -> CheckResult:
    """Whether an acknowledged record survives the loss of a broker, and whether writing does."""
    check = Check(KAFKA, f"replicas of {name}", f"{holds}, and is lost with its last replica in sync")
    fewest = min(partition.replicas for partition in topic.partitions)
    least_in_sync = min(partition.in_sync for partition in topic.partitions)
    if isinstance(topic.settings, Unasked):
        if fewest < _SAFE_IN_SYNC:
            return check.warning("one replica", _more_replicas(name))
        return check.unknown(
            Unasked(
                f"{fewest} replicas; min.insync.replicas cannot be read: {topic.settings.reason}", topic.settings.remedy
            )
        )
    required = int(topic.settings.get("min.insync.replicas", "1"))
    replicas = "1 replica" if fewest == 1 else f"{fewest} replicas"
    found = f"{replicas}, {least_in_sync} in sync, min.insync.replicas={required}"
    # Brokers never require more replicas in sync than a partition has.
    if any(partition.in_sync < min(required, partition.replicas) for partition in topic.partitions):
        return check.error(f"{found}: writes are refused", "bring the missing brokers back")
    if fewest < _SAFE_IN_SYNC:
        return check.warning(found, _more_replicas(name))
    if required < _SAFE_IN_SYNC:
        return check.warning(
            f"{found}: a record may be acknowledged by one broker alone",
            f"kafka-configs.sh --bootstrap-server ... --alter --topic {name} --add-config min.insync.replicas=2",
        )
    if required >= fewest:
        return check.warning(f"{found}: one broker that is away stops all writes", _more_replicas(name))
    if least_in_sync < fewest:
        return check.warning(f"{found}: a replica is behind, or its broker is away", "bring the missing brokers back")
    return check.ok(found)


def _more_replicas(name: str) -> str:
    return (
        f"give {name} three replicas on three brokers (kafka-reassign-partitions.sh), and min.insync.replicas=2; one broker "
        "alone is for development"
    )


def topic_settings(name: str, settings: Mapping[str, str] | Unasked, max_message_bytes: int) -> Iterator[CheckResult]:
    """The settings of a topic that concern dual writes."""
    if isinstance(settings, Unasked):
        yield Check(
            KAFKA, f"settings of {name}", "compaction, short retention and small messages limit dual writes"
        ).unknown(settings)
        return
    alter = f"kafka-configs.sh --bootstrap-server ... --alter --topic {name} --add-config"
    check = Check(KAFKA, f"unclean election of {name}", "a leader that was not in sync drops acknowledged messages")
    if settings.get("unclean.leader.election.enable") == "true":
        yield check.warning("unclean.leader.election.enable=true", f"{alter} unclean.leader.election.enable=false")
    else:
        yield check.ok("unclean.leader.election.enable=false")
    yield compaction(name, settings.get("cleanup.policy", "delete"))
    check = Check(KAFKA, f"retention of {name}", "the evidence of how a transaction ended is in the topic's log")
    kept_ms = int(settings.get("retention.ms", "-1"))
    found = f"retention.ms={kept_ms}"
    if "delete" in settings.get("cleanup.policy", "delete") and 0 <= kept_ms < _LEAST_RETENTION_MS:
        yield check.warning(
            found, f"keep messages for longer than recovery may take: {alter} retention.ms={_LEAST_RETENTION_MS}"
        )
    else:
        yield check.ok(found)
    check = Check(KAFKA, f"message size of {name}", "a message that the topic refuses aborts its dual write")
    taken = int(settings.get("max.message.bytes", "1048588"))
    if taken < max_message_bytes:
        yield check.warning(
            f"the topic takes {taken} bytes (max.message.bytes), the client {max_message_bytes} (message.max.bytes)",
            f"{alter} max.message.bytes={max_message_bytes}, or lower the client's message.max.bytes",
        )
    else:
        yield check.ok(f"max.message.bytes={taken}")


def compaction(name: str, policy: str) -> CheckResult:
    """A compacted topic does not keep transactions whole. A writer warns of it once it has written there."""
    check = Check(
        KAFKA,
        f"compaction of {name}",
        "a consumer that lags behind sees only the newest message of each key, and so only a part of some transactions",
    )
    if "compact" in policy:
        return check.warning(
            f"the topic {name!r} is compacted",
            "send there only messages that are right by themselves, or cleanup.policy=delete",
        )
    return check.ok(f"cleanup.policy={policy}")


def id_rights(writer: str, rights: Mapping[str, bool | Unasked]) -> CheckResult:
    """The rights on the transactional ids of a writer's lanes."""
    why = "a writer initialises, ends and looks at transactions under ids that begin with its name"
    check = Check(KAFKA, f"rights on ids of {writer}", why)
    for right in ("Describe", "Write"):
        granted = rights.get(right)
        if isinstance(granted, Unasked):
            return check.unknown(granted)
        if not granted:
            return check.error(
                f"missing: {right} on some of {writer}.*, {writer}#*",
                _acl("Write", f"--transactional-id {writer} --resource-pattern-type prefixed"),
            )
    return check.ok("Write and Describe")


def require_rights(
    writer: str, *, may_write: bool = True, topics: Mapping[str, frozenset[str] | None] | None = None
) -> None:
    """Refuse what a writer may not do with its transactional ids, or with its topics; rights that are None are not known."""
    checks = [id_rights(writer, {"Describe": True, "Write": may_write})]
    checks += [topic_rights(name, rights) for name, rights in (topics or {}).items() if rights is not None]
    for one in checks:
        if one.status is Status.ERROR:
            raise ConfigurationError(f"{one.check}: {one}", next_step=one.remedy)


def rights_after_a_restore(topic: TopicFacts | Unasked | None, *, probes: bool | Unasked) -> CheckResult:
    """Whether a recovery after a restore can show that it has found every id. Nothing reads the topic itself."""
    check = Check(
        KAFKA,
        "rights for a recovery after a restore",
        "`recover --after-restore` asks for each partition's coordinator; otherwise ids may be missing from what it finds",
    )
    if isinstance(probes, Unasked):
        return check.unknown(probes)
    granted = _right_on_internal("Describe", topic)
    if isinstance(granted, Unasked):
        return check.unknown(granted)
    missing = {
        f"Describe on {TRANSACTION_STATE}": (granted, f"--topic {TRANSACTION_STATE}"),
        f"Describe on ids {PROBES}*": (probes, f"--transactional-id {PROBES} --resource-pattern-type prefixed"),
    }
    lacking = {right: _acl("Describe", on) for right, (has, on) in missing.items() if not has}
    if lacking:
        return check.warning(f"missing: {', '.join(lacking)}", "; ".join(lacking.values()))
    return check.ok(" and ".join(missing))


def group_rights(group: str, *, granted: bool | Unasked) -> CheckResult:
    """The right of a consumer on its group."""
    check = Check(
        KAFKA,
        f"rights on the group {group}",
        "a consumer joins its group, and commits its offsets in transactions (Read)",
    )
    if isinstance(granted, Unasked):
        return check.unknown(granted)
    if not granted:
        return check.error("missing: Read", _acl("Read", f"--group {group}"))
    return check.ok("Read, which contains Describe")


def rights_on_offsets(topic: TopicFacts | Unasked | None) -> CheckResult:
    """The right to ask how offsets in a transaction have ended. Nothing reads the records of that topic."""
    check = Check(
        KAFKA,
        f"rights on {OFFSETS_TOPIC}",
        "a transaction with offsets needs it to see how they have ended (DescribeProducers); through librdkafka one without "
        "messages aborts without it",
    )
    granted = _right_on_internal("Read", topic)
    if isinstance(granted, Unasked):
        return check.unknown(granted)
    if not granted:
        return check.warning("missing: Read", _acl("Read", f"--topic {OFFSETS_TOPIC}"))
    return check.ok("Read")


def _right_on_internal(right: str, topic: TopicFacts | Unasked | None) -> bool | Unasked:
    """Whether this user has it. A broker says of a topic that it is not there only to those who may describe it."""
    if topic is None:
        return right == "Describe" or Unasked("the topic is not made yet: its first use makes it", "run it again then")
    if isinstance(topic, Unasked):
        return False if topic.is_forbidden else topic
    return topic.rights if isinstance(topic.rights, Unasked) else right in topic.rights


def same_cluster(cluster_id: str, of_rows: Mapping[str, str]) -> CheckResult:
    """The rows must belong to the cluster that the brokers are of. ``of_rows`` has, by transactional id, the row's cluster."""
    why = "what this cluster does not know must not be taken for gone, and aborted"
    check = Check(KAFKA, "cluster of the rows", why)
    known = {name: cluster for name, cluster in of_rows.items() if cluster}
    for name, cluster in known.items():
        if cluster != cluster_id:
            return check.refused(other_cluster(cluster, cluster_id, name))
    return check.ok(cluster_id if known else "no row names one yet")
