"""The right TwoPhaseCommit (KIP-939), which no Python client can name: granted by the request itself."""

from __future__ import annotations

from collections.abc import Mapping

from kafka.protocol.admin.acl import CreateAclsRequest, DescribeAclsRequest

from dualwrite.clock import Deadline, GrowingPause
from dualwrite.kafka.brokers import Brokers
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from harness.patience import PATIENCE_S

_TWO_PHASE_COMMIT, _TRANSACTIONAL_ID, _LITERAL, _ALLOW = 15, 5, 3, 3


def allow_two_phase_commit(admin: Mapping[str, object], user: str, kafka_id: str) -> None:
    """Allow a user TwoPhaseCommit on a transactional id, and nothing else; return once a broker shows it."""
    given = {
        "resource_type": _TRANSACTIONAL_ID,
        "resource_name": kafka_id,
        "resource_pattern_type": _LITERAL,
        "principal": f"User:{user}",
        "host": "*",
        "operation": _TWO_PHASE_COMMIT,
        "permission_type": _ALLOW,
    }
    deadline = Deadline(PATIENCE_S)
    with KafkaCoordinator(KafkaConfig.parse(admin)) as coordinator:
        brokers = coordinator.brokers
        answer = _asked(brokers, CreateAclsRequest(creations=[CreateAclsRequest.AclCreation(**given)]), deadline)
        assert [result.error_code for result in answer.results] == [0], answer
        wanted = {
            "resource_type_filter": _TRANSACTIONAL_ID,
            "resource_name_filter": kafka_id,
            "pattern_type_filter": _LITERAL,
            "principal_filter": f"User:{user}",
            "host_filter": "*",
            "operation": _TWO_PHASE_COMMIT,
            "permission_type": _ALLOW,
        }
        pausing = GrowingPause()
        while not _asked(brokers, DescribeAclsRequest(**wanted), deadline).resources:
            pausing.wait(deadline)


def _asked(brokers: Brokers, request: object, deadline: Deadline) -> object:
    [answer] = brokers.exchange([(brokers.nodes(deadline)[0], request)], deadline)
    return answer
