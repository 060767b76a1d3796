"""Creates and deletes topics, allows users operations, and waits until the brokers show what the controller promised."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka.admin import AdminClient, TopicMetadata


def create(admin: AdminClient, name: str, partitions: int, config: Mapping[str, str], deadline: Deadline) -> None:
    """Create a topic, and return when every partition has a leader.

    Raises:
        confluent_kafka.KafkaException: The broker refused, with its reason.
        Unavailable: Some partitions had no leader in time.
    """
    topic = NewTopic(name, num_partitions=partitions, replication_factor=-1, config=dict(config))
    admin.create_topics([topic])[name].result(deadline.remaining_s())
    while True:
        found = _described(admin, name, deadline).partitions
        if len(found) == partitions and all(partition.leader >= 0 for partition in found.values()):
            return
        _wait(deadline, f"topic {name} has no leaders")


def delete(admin: AdminClient, name: str, deadline: Deadline) -> None:
    """Delete a topic, and return once the brokers no longer know it.

    Raises:
        confluent_kafka.KafkaException: The broker refused, with its reason.
        Unavailable: It was still there at the deadline.
    """
    admin.delete_topics([name])[name].result(deadline.remaining_s())
    while True:
        error = _described(admin, name, deadline).error
        if error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return
        _wait(deadline, f"topic {name} is still there")


def allow(
    admin: AdminClient,
    user: str,
    operation: str,
    resource_type: str,
    resource: str,
    *,
    prefixed: bool,
    deadline: Deadline,
) -> None:
    """Allow a user one operation, and return once a broker applies it; the other brokers follow.

    Raises:
        confluent_kafka.KafkaException: The broker refused, with its reason.
        Unavailable: It was not in force at the deadline.
    """
    described = (
        ResourceType[resource_type.upper()],
        resource,
        ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        AclOperation[operation.upper()],
        AclPermissionType.ALLOW,
    )
    binding = AclBinding(*described)
    admin.create_acls([binding])[binding].result(deadline.remaining_s())
    while not admin.describe_acls(AclBindingFilter(*described)).result(deadline.remaining_s()):
        _wait(deadline, f"{user!r} may not {operation} {resource_type} {resource!r} yet")


def _described(admin: AdminClient, name: str, deadline: Deadline) -> TopicMetadata:
    return admin.list_topics(name, timeout=max(0.1, deadline.remaining_s())).topics[name]


def _wait(deadline: Deadline, what_is_wrong: str) -> None:
    if deadline.expired:
        raise Unavailable(f"{what_is_wrong}, and the time is up")
    time.sleep(0.01)
