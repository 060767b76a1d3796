"""Questions about native transactions (transaction version 2): whether the cluster has them, and where they are open."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from kafka.protocol.metadata import ApiVersionsRequest

from dualwrite.kafka.coordinator.brokers import until_answered, verdict
from dualwrite.kafka.coordinator.network import NotYet
from dualwrite.kafka.coordinator.partitions import Place, producers
from dualwrite.protocol.observations import OpenTransaction

if TYPE_CHECKING:
    from dualwrite.runtime.deadline import Deadline
    from dualwrite.kafka.coordinator.brokers import Brokers
    from dualwrite.kafka.coordinator.routing import Partition, Topics
    from dualwrite.protocol.prepared_state import PreparedTxnState

_TRANSACTION_VERSION: Final = "transaction.version"
_FIRST_WITH_FEATURES: Final = 3


def transaction_version(brokers: Brokers, deadline: Deadline) -> int:
    """See :meth:`dualwrite.kafka.coordinator.client.KafkaCoordinator.transaction_version`."""

    def ask(_: list[None]) -> dict[None, int]:
        requests = [
            (
                node,
                ApiVersionsRequest(
                    client_software_name="dualwrite", client_software_version="0", min_version=_FIRST_WITH_FEATURES
                ),
            )
            for node in brokers.nodes(deadline)
        ]
        found = []
        for response in brokers.exchange(requests, deadline):
            if isinstance(response, NotYet):
                raise response
            why = verdict(response.error_code, "the versions of a broker", "Describe on the cluster")
            if why is not None:
                raise why
            finalized = {feature.name: feature.max_version_level for feature in response.finalized_features or ()}
            found.append(finalized.get(_TRANSACTION_VERSION, 0))
        return {None: min(found)}

    return until_answered([None], ask, deadline, f"tell its {_TRANSACTION_VERSION}")[None]


def open_transactions(
    brokers: Brokers,
    topics: Topics,
    asked: Sequence[tuple[PreparedTxnState, Collection[Partition]]],
    deadline: Deadline,
) -> list[list[OpenTransaction]]:
    """See :meth:`dualwrite.kafka.coordinator.client.KafkaCoordinator.open_transactions`."""
    places = [
        [Place(topic, number, ids.get(topic)) for topic, number in sorted(partitions)]
        for state, partitions in asked
        for ids in [state.topic_ids]
    ]
    every = {place for of_state in places for place in of_state}
    shown = producers(brokers, topics, every, deadline, fresh=True)
    return [
        [
            OpenTransaction(place.key, epoch, start)
            for place in of_state
            for epoch, start in [(shown[place] or {}).get(state.producer_id, (-1, None))]
            if start is not None
        ]
        for (state, _), of_state in zip(asked, places, strict=True)
    ]


def producer_epochs(
    brokers: Brokers, topics: Topics, state: PreparedTxnState, deadline: Deadline
) -> dict[Partition, tuple[int, int | None] | None]:
    """See :meth:`dualwrite.kafka.coordinator.client.KafkaCoordinator.producer_epochs`."""
    ids = state.topic_ids
    places = [Place(topic, number, ids[topic]) for topic, number in sorted(state.partitions)]
    shown = producers(brokers, topics, places, deadline, fresh=False)
    return {place.key: there.get(state.producer_id) for place in places if (there := shown[place]) is not None}
