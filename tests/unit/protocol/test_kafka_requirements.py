"""The rules for a Kafka cluster: each row plants one fact in a healthy cluster, and names what must be found."""

from dataclasses import replace

import pytest

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.findings import Status, Unasked, time_limit
from dualwrite.protocol.kafka_requirements import (
    BrokerFacts,
    KafkaFacts,
    PartitionFacts,
    TopicFacts,
    judge_kafka,
    kafka_is_away,
    release_of,
    same_cluster,
    worst_settings,
)
from dualwrite.protocol.values import NEVER_MS

OK, UNKNOWN, WARNING, ERROR = Status.OK, Status.UNKNOWN, Status.WARNING, Status.ERROR
REFUSED = Unasked("it does not answer", "run it again")
FORBIDDEN = Unasked("TOPIC_AUTHORIZATION_FAILED", "grant it", is_forbidden=True)

BROKER = BrokerFacts(frozenset(), metadata_level=25, transaction_version=2, most_transaction_version=2)
TOPIC = TopicFacts(
    partitions=(PartitionFacts(True, 3, 3), PartitionFacts(True, 3, 3)),
    rights=frozenset({"Read", "Write", "Describe", "DescribeConfigs"}),
    settings={
        "cleanup.policy": "delete",
        "max.message.bytes": "1048588",
        "min.insync.replicas": "2",
        "retention.ms": "604800000",
        "unclean.leader.election.enable": "false",
    },
)
SETTINGS = {
    "transaction.max.timeout.ms": str(NEVER_MS),
    "transaction.two.phase.commit.enable": "false",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "offsets.topic.replication.factor": "3",
    "min.insync.replicas": "2",
}
HEALTHY = KafkaFacts(
    "cluster",
    brokers={"1 at a:9092": BROKER, "2 at b:9092": BROKER},
    settings=SETTINGS,
    timeout_ms=NEVER_MS,
    maximum_ms=NEVER_MS,
    internal={"__transaction_state": TOPIC, "__consumer_offsets": TOPIC},
    topics={"orders": TOPIC},
    id_rights={"Describe": True, "Write": True},
    writer="orders",
    probes=True,
    groups={"readers": True},
)


def found(facts):
    """What is not ok, by the name of the check."""
    return {one.check: one.status for one in judge_kafka(facts) if one.status is not OK}


def brokers(**changes):
    return replace(HEALTHY, brokers={"1 at a:9092": BROKER, "2 at b:9092": replace(BROKER, **changes)})


def topic(**changes):
    return replace(HEALTHY, topics={"orders": replace(TOPIC, **changes)})


def topic_with(**settings):
    return topic(settings={**TOPIC.settings, **{name.replace("_", "."): value for name, value in settings.items()}})


def settings(**changes):
    return replace(HEALTHY, settings={**SETTINGS, **{name.replace("_", "."): value for name, value in changes.items()}})


def internal(*, state=None, offsets=None, **changes):
    """Kafka's own topics; by default they are not made yet."""
    return replace(settings(**changes), internal={"__transaction_state": state, "__consumer_offsets": offsets})


def partitions(*these):
    return tuple(PartitionFacts(*one) for one in these)


AFTER_A_RESTORE = "rights for a recovery after a restore"
TWO_PHASE = {"transaction_two_phase_commit_enable": "true", "unstable_api_versions_enable": "true"}


def test_a_healthy_cluster_has_nothing_to_mend():
    assert found(HEALTHY) == {}
    assert all(not one.remedy for one in judge_kafka(HEALTHY))


@pytest.mark.parametrize(
    ("facts", "check", "status"),
    [
        (replace(HEALTHY, brokers={"1 at a:9092": BROKER, "2 at b:9092": Unasked("refused")}), "brokers", ERROR),
        (brokers(lacking=frozenset({"DescribeProducers 0"})), "version", ERROR),
        (brokers(transaction_version=1), "transaction.version", WARNING),
        (brokers(transaction_version=0), "transaction.version", WARNING),
        (
            settings(transaction_state_log_replication_factor="1"),
            None,
            None,
        ),  # the topic is there: its own replicas count
        (internal(offsets_topic_replication_factor="1"), "replicas of __consumer_offsets", WARNING),
        (replace(internal(), settings=REFUSED), "replicas of __consumer_offsets", UNKNOWN),
        (replace(HEALTHY, settings=REFUSED), "two-phase commit", UNKNOWN),
        (
            internal(state=replace(TOPIC, partitions=partitions((True, 1, 1)))),
            "replicas of __transaction_state",
            WARNING,
        ),
        (internal(state=REFUSED), "replicas of __transaction_state", UNKNOWN),
        (internal(state=FORBIDDEN), AFTER_A_RESTORE, WARNING),
        (internal(state=REFUSED), AFTER_A_RESTORE, UNKNOWN),
        (internal(offsets=TOPIC), None, None),
        (replace(HEALTHY, probes=False), AFTER_A_RESTORE, WARNING),
        (replace(HEALTHY, probes=REFUSED), AFTER_A_RESTORE, UNKNOWN),
        (replace(HEALTHY, groups={"readers": True, "bills": False}), "rights on the group bills", ERROR),
        (replace(HEALTHY, groups={"readers": REFUSED}), "rights on the group readers", UNKNOWN),
        (internal(offsets=replace(TOPIC, rights=frozenset({"Describe"}))), "rights on __consumer_offsets", WARNING),
        (internal(offsets=replace(TOPIC, rights=REFUSED)), "rights on __consumer_offsets", UNKNOWN),
        (internal(offsets=FORBIDDEN), "rights on __consumer_offsets", WARNING),
        (internal(), "rights on __consumer_offsets", UNKNOWN),
        (replace(HEALTHY, timeout_ms=900_000, maximum_ms=900_000), "transaction.max.timeout.ms", WARNING),
        (replace(HEALTHY, timeout_ms=900_000, maximum_ms=None), "transaction.max.timeout.ms", WARNING),
        (replace(HEALTHY, timeout_ms=ConfigurationError("above it")), "transaction.max.timeout.ms", ERROR),
        (replace(HEALTHY, timeout_ms=60_000, requested_ms=60_000), None, None),
        (replace(settings(**TWO_PHASE), id_rights={}, writer=None), "two-phase commit", UNKNOWN),
        (
            replace(settings(**TWO_PHASE), id_rights={**HEALTHY.id_rights, "TwoPhaseCommit": False}),
            "two-phase commit",
            WARNING,
        ),
        (
            replace(
                settings(**TWO_PHASE),
                id_rights={**HEALTHY.id_rights, "TwoPhaseCommit": False},
                timeout_ms=900_000,
                maximum_ms=900_000,
            ),
            "transaction.max.timeout.ms",
            WARNING,
        ),
        (
            replace(settings(**TWO_PHASE), id_rights={**HEALTHY.id_rights, "TwoPhaseCommit": REFUSED}),
            "two-phase commit",
            UNKNOWN,
        ),
        (
            replace(
                settings(**TWO_PHASE),
                id_rights={**HEALTHY.id_rights, "TwoPhaseCommit": True},
                timeout_ms=900_000,
                maximum_ms=900_000,
            ),
            None,
            None,
        ),
        (replace(HEALTHY, id_rights={"Describe": True, "Write": False}), "rights on ids of orders", ERROR),
        (replace(HEALTHY, id_rights={"Describe": False, "Write": False}), "rights on ids of orders", ERROR),
        (replace(HEALTHY, id_rights={"Describe": REFUSED, "Write": True}), "rights on ids of orders", UNKNOWN),
        (replace(HEALTHY, ahead_s=60.0), "the active controller", WARNING),
        (replace(HEALTHY, ahead_s=7200.0), "the active controller", ERROR),
        (replace(HEALTHY, topics={"orders": None}), "topic orders", ERROR),
        (replace(HEALTHY, topics={"orders": REFUSED}), "topic orders", UNKNOWN),
        (topic(partitions=partitions((True, 3, 3), (False, 3, 3))), "topic orders", ERROR),
        (topic(rights=frozenset({"Read"})), "rights on orders", ERROR),
        (topic(rights=frozenset({"Write"})), "rights on orders", ERROR),
        (topic(rights=frozenset({"Read", "Write"})), None, None),
        (topic(rights=REFUSED), "rights on orders", UNKNOWN),
        (topic(partitions=partitions((True, 3, 3), (True, 1, 1))), "replicas of orders", WARNING),
        (topic(partitions=partitions((True, 1, 0))), "replicas of orders", ERROR),
        (topic(partitions=partitions((True, 3, 3), (True, 3, 1))), "replicas of orders", ERROR),
        (topic(partitions=partitions((True, 3, 3), (True, 3, 2))), "replicas of orders", WARNING),
        (topic(partitions=partitions((True, 2, 2))), "replicas of orders", WARNING),
        (topic_with(min_insync_replicas="1"), "replicas of orders", WARNING),
        (topic_with(min_insync_replicas="3"), "replicas of orders", WARNING),
        (topic(settings=REFUSED), "replicas of orders", UNKNOWN),
        (topic(settings=REFUSED), "settings of orders", UNKNOWN),
        (topic(settings=REFUSED, partitions=partitions((True, 1, 1))), "replicas of orders", WARNING),
        (topic(settings=REFUSED, partitions=partitions((True, 2, 2))), "replicas of orders", UNKNOWN),
        (topic_with(unclean_leader_election_enable="true"), "unclean election of orders", WARNING),
        (topic_with(cleanup_policy="compact"), "compaction of orders", WARNING),
        (topic_with(cleanup_policy="compact,delete"), "compaction of orders", WARNING),
        (topic_with(retention_ms="3600000"), "retention of orders", WARNING),
        (topic_with(retention_ms="-1"), None, None),
        (topic_with(cleanup_policy="delete", retention_ms="86400000"), None, None),
        (topic_with(max_message_bytes="100000"), "message size of orders", WARNING),
        (replace(HEALTHY, max_message_bytes=2_000_000), "message size of orders", WARNING),
    ],
)
def test_one_fact_changes_one_finding(facts, check, status):
    if check is None:
        assert found(facts) == {}
    else:
        assert found(facts)[check] is status
        [finding] = [one for one in judge_kafka(facts) if one.check == check]
        assert finding.remedy or status is UNKNOWN or isinstance(facts.timeout_ms, ConfigurationError)


@pytest.mark.parametrize(
    ("level", "release"),
    [
        (None, None),
        (1, (3, 0)),
        (7, (3, 3)),
        (21, (3, 9)),
        (25, (4, 0)),
        (29, (4, 2)),
        (30, (4, 3)),
        (31, (4, 4)),
        (33, (4, 4)),
        (34, None),
    ],
)
def test_the_release_is_told_by_the_features(level, release):
    assert release_of(replace(BROKER, metadata_level=level)) == release


@pytest.mark.parametrize("level", [30, 31, 40])
@pytest.mark.parametrize(
    ("topics", "status"),
    [
        ({"orders": TOPIC}, OK),
        ({}, UNKNOWN),
        ({"orders": None}, WARNING),
        ({"orders": TOPIC, "bills": REFUSED}, WARNING),
        ({"orders": replace(TOPIC, partitions=partitions((True, 2, 2)))}, WARNING),
        ({"orders": replace(TOPIC, settings={**TOPIC.settings, "min.insync.replicas": "1"})}, WARNING),
    ],
)
def test_brokers_that_forget_markers_need_three_replicas(level, topics, status):
    facts = replace(HEALTHY, brokers={"1 at a:9092": replace(BROKER, metadata_level=level)}, topics=topics)
    [finding] = [one for one in judge_kafka(facts) if one.check == "KAFKA-20734"]
    assert finding.status is status


@pytest.mark.parametrize("level", [None, 1, 21, 27, 29])
def test_older_brokers_are_not_known_to_forget_markers(level):
    facts = replace(HEALTHY, brokers={"1 at a:9092": replace(BROKER, metadata_level=level)}, topics={})
    assert found(facts) == {}


def test_old_brokers_without_the_feature_leave_it_to_librdkafka():
    old = replace(BROKER, transaction_version=0, most_transaction_version=0, metadata_level=21)
    assert found(replace(HEALTHY, brokers={"1 at a:9092": old})) == {}


def test_a_cluster_of_which_no_broker_answers_has_one_error_about_them():
    silent = Unasked("refused")
    facts = KafkaFacts("cluster", {"1 at a:9092": silent}, silent, 900_000, topics={"orders": silent}, ahead_s=silent)
    statuses = found(facts)
    assert statuses["brokers"] is ERROR
    assert statuses["topic orders"] is UNKNOWN
    assert statuses["the active controller"] is UNKNOWN


def test_kafka_that_is_away_is_an_error_with_the_reason():
    finding = kafka_is_away(Unavailable("nobody answers"))
    assert (finding.status, finding.found) == (ERROR, "nobody answers")


@pytest.mark.parametrize(
    ("requested", "maximum", "chosen", "status"),
    [
        (None, NEVER_MS, NEVER_MS, OK),
        (None, 900_000, 900_000, WARNING),
        (None, None, 900_000, WARNING),
        (60_000, 900_000, 60_000, OK),
    ],
)
def test_only_a_limit_that_the_user_has_not_chosen_is_warned_of(requested, maximum, chosen, status):
    assert time_limit(requested, maximum, chosen, greatest_ms=NEVER_MS).status is status


@pytest.mark.parametrize(
    ("rows", "status"),
    [({}, OK), ({"a": ""}, OK), ({"a": "cluster", "b": ""}, OK), ({"a": "cluster", "b": "another"}, ERROR)],
)
def test_rows_of_another_cluster_are_found(rows, status):
    assert same_cluster("cluster", rows).status is status


def test_of_several_brokers_the_worst_settings_count():
    other = {**SETTINGS, "transaction.max.timeout.ms": "900000", "transaction.two.phase.commit.enable": "true"}
    worst = worst_settings([SETTINGS, other])
    assert worst["transaction.max.timeout.ms"] == "900000"  # as a number: as a text it would be the greater one
    assert worst["transaction.two.phase.commit.enable"] == "false"
    assert worst_settings([SETTINGS, REFUSED]) is REFUSED
    assert "unstable.api.versions.enable" not in worst


def test_rights_of_groups_and_of_a_restore_are_judged_only_if_somebody_asks():
    named = {one.check for one in judge_kafka(HEALTHY)}
    assert {AFTER_A_RESTORE, "rights on the group readers", "rights on __consumer_offsets"} <= named
    checks = {one.check for one in judge_kafka(replace(HEALTHY, writer=None, id_rights={}, probes=None, groups={}))}
    assert not {check for check in checks if check.startswith("rights")} - {"rights on orders"}


def test_a_missing_right_on_a_group_or_for_a_restore_is_named_with_its_command():
    facts = replace(internal(state=FORBIDDEN, offsets=FORBIDDEN), probes=False, groups={"bills": False})
    remedies = {one.check: one.remedy for one in judge_kafka(facts)}
    assert "--operation Read --group bills" in remedies["rights on the group bills"]
    assert "--operation Read --topic __consumer_offsets" in remedies["rights on __consumer_offsets"]
    for part in ("--operation Describe --topic __transaction_state", "--transactional-id dualwrite-probe. --resource"):
        assert part in remedies[AFTER_A_RESTORE]
