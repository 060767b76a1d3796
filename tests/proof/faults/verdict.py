"""Compares both sides of one case once everything has healed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from sqlalchemy import Engine, select

from dualwrite import recover
from dualwrite.errors import Unavailable
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import read_committed
from faults.work import MESSAGES, OFFSETS, OPERATIONS, PARTITIONS, offset_of

TIMEOUT_S = 60.0


def settle_twice(transactional_id: str, kafka: Mapping[str, str], engine: Engine) -> list[str]:
    """Settle; what is wrong with it: a loss, or a second settling that finds something to do or to send."""
    findings = []
    report = recover(transactional_id, kafka=kafka, database=engine, timeout_s=TIMEOUT_S)
    findings += [f"lost: {loss}" for loss in report.losses]
    again = recover(transactional_id, kafka=kafka, database=engine, timeout_s=TIMEOUT_S)
    if again.planned:
        findings.append(f"the second settling found something to do: {again.planned}")
    if again.sent:
        findings.append(f"the second settling found messages that wait: {again.sent}")
    incidents = SqlStateStore(engine).incidents(transactional_id)
    if incidents:
        findings.append(f"incidents are recorded: {incidents}")
    return findings


def compare(
    transactional_id: str,
    topic: str,
    group: str,
    told: Mapping[str, str],
    *,
    kafka: Mapping[str, str],
    engine: Engine,
    admin: AdminClient,
) -> list[str]:
    """Compare rows with messages, offsets and the answers that the owners got; return what is wrong.

    Args:
        transactional_id: The id of the case.
        topic: Where its messages are; other cases' messages have another key.
        group: The group whose offsets were committed.
        told: The last word that the owner heard of each operation.
        kafka: Leads directly to the broker.
        engine: Leads directly to the database.
        admin: Any client.
    """
    mine = OPERATIONS.c.transactional_id == transactional_id
    with engine.connect() as connection:
        found = connection.execute(select(OPERATIONS.c.name, OPERATIONS.c.kind, OPERATIONS.c.incarnation).where(mine))
        rows = sorted(found, key=lambda row: (row.incarnation, offset_of(row.name)))
    try:
        messages = [m for m in read_committed(kafka, topic, timeout_s=TIMEOUT_S) if m.key == transactional_id.encode()]
    except Unavailable as error:
        return [f"the topic cannot be read to its end: {error}"]
    findings = []
    expected = [row.name for row in rows if row.kind != OFFSETS]
    for partition in range(PARTITIONS):
        seen = [m.value.decode() for m in messages if m.partition == partition]
        if seen != expected:
            findings.append(f"partition {partition} has {seen}, the database {expected}")
    committed = {row.name for row in rows}
    for name, word in told.items():
        if word in {"acknowledged", "pending"} and name not in committed:
            findings.append(f"{name} is {word} and not there")
        if word in {"aborted", "fenced"} and name in committed:
            findings.append(f"{name} is {word} and there")
    if surplus := committed - told.keys():
        findings.append(f"nobody began {sorted(surplus)}")
    offsets = [row.name for row in rows if row.kind != MESSAGES]
    wanted = offset_of(offsets[-1]) if offsets else None
    if (stands := _offset(group, topic, admin)) != wanted:
        findings.append(f"the group's offset is {stands}, the last committed one {wanted}")
    return findings


def _offset(group: str, topic: str, admin: AdminClient) -> int | None:
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    answer = admin.list_consumer_group_offsets([asked], require_stable=True, request_timeout=TIMEOUT_S)[group]
    partitions: Sequence[TopicPartition] = answer.result(TIMEOUT_S).topic_partitions or []
    offsets = [partition.offset for partition in partitions if partition.offset >= 0]
    return offsets[0] if offsets else None
