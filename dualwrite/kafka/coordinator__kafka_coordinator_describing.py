"""Describes transactions, as their coordinators see them, and the cluster: its id and its limit of transaction timeouts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import kafka.errors as kafka_errors
from kafka.protocol.admin.configs import DescribeConfigsRequest
from kafka.protocol.admin.transactions import DescribeTransactionsRequest

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.brokers import Brokers, until_answered, verdict
from dualwrite.kafka.cluster import Coordinators, right_to_look
from dualwrite.kafka.network import Message, NotYet
from dualwrite.protocol.values import OPEN, TransactionStatus, TransactionView

_TOPIC_RESOURCE: Final = 2
_BROKER_RESOURCE: Final = 4
_CLEANUP: Final = "cleanup.policy"
_LONGEST_TIMEOUT: Final = "transaction.max.timeout.ms"

_STATUS: Final = {status.value: status for status in TransactionStatus if status is not TransactionStatus.NO_SUCH_ID}


def describe(
    coordinators: Coordinators, kafka_ids: Collection[str], deadline: Deadline
) -> Mapping[str, TransactionView]:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.describe`."""

    def requests(ids: list[str]) -> Iterator[tuple[Message, list[str]]]:
        yield DescribeTransactionsRequest(transactional_ids=ids), ids

    def read(_: list[str], response: Message) -> Iterator[tuple[str, TransactionView | NotYet]]:
        for state in response.transaction_states:
            yield state.transactional_id, _view(state)

    return coordinators.ask(kafka_ids, requests, read, deadline, "describe the transactions")


def _view(state: Message) -> TransactionView | NotYet:
    kafka_id = state.transactional_id
    if kafka_errors.for_code(state.error_code) is kafka_errors.TransactionalIdNotFoundError:
        return TransactionView(TransactionStatus.NO_SUCH_ID)
    why = verdict(state.error_code, f"describing {kafka_id!r}", right_to_look(kafka_id))
    if why is not None:
        return why
    status = _STATUS.get(state.transaction_state)
    if status is None:
        return NotYet(f"{kafka_id!r} is in the unknown state {state.transaction_state!r}", moved=False)
    return TransactionView(
        status=status,
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        started_ms=state.transaction_start_time_ms if status in OPEN else None,
        timeout_ms=state.transaction_timeout_ms,
        partitions=tuple((topic.topic, partition) for topic in state.topics for partition in topic.partitions),
        newest_started_ms=state.transaction_start_time_ms if state.transaction_start_time_ms >= 0 else None,
    )


def cluster_id(brokers: Brokers, deadline: Deadline) -> str:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.cluster_id`."""

    def ask(_: list[None]) -> dict[None, str | NotYet]:
        return {None: brokers.metadata((), deadline).cluster_id or NotYet("the cluster has no id yet")}

    return until_answered([None], ask, deadline, "report its cluster id")[None]


def max_transaction_timeout_ms(brokers: Brokers, deadline: Deadline) -> int | None:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.max_transaction_timeout_ms`."""

    def ask(_: list[None]) -> dict[None, int | None]:
        requests = [(node, _describe_broker(node)) for node in brokers.nodes(deadline)]
        found = []
        for response in brokers.exchange(requests, deadline):
            if isinstance(response, NotYet):
                raise response
            for result in response.results:
                if kafka_errors.for_code(result.error_code) is kafka_errors.ClusterAuthorizationFailedError:
                    return {None: None}
                why = verdict(result.error_code, "the broker's configuration", "DescribeConfigs on the cluster")
                if why is not None:
                    raise why
                found += [int(config.value) for config in result.configs if config.name == _LONGEST_TIMEOUT]
        return {None: min(found)}

    return until_answered([None], ask, deadline, f"report its {_LONGEST_TIMEOUT}")[None]


def compacted(brokers: Brokers, topics: Collection[str], deadline: Deadline) -> Collection[str]:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.compacted`."""
    resources = [
        DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=[_CLEANUP]
        )
        for topic in topics
    ]
    request = DescribeConfigsRequest(resources=resources, include_synonyms=False, include_documentation=False)
    [answer] = brokers.exchange([(brokers.nodes(deadline)[0], request)], deadline)
    if isinstance(answer, NotYet):
        raise Unavailable(f"the broker did not report the {_CLEANUP} of topics: {answer}")
    return {
        result.resource_name
        for result in answer.results
        for config in result.configs or ()
        if config.name == _CLEANUP and "compact" in (config.value or "")
    }


def _describe_broker(node: int) -> Message:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=_BROKER_RESOURCE, resource_name=str(node), configuration_keys=[_LONGEST_TIMEOUT]
    )
    return DescribeConfigsRequest(resources=[resource], include_synonyms=False, include_documentation=False)
