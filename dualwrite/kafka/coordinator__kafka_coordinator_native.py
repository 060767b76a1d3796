"""Questions about native transactions (transaction version 2): whether the cluster has them, and where they are open."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from kafka.protocol.metadata import ApiVersionsRequest

from dualwrite.kafka.brokers import until_answered, verdict
from dualwrite.kafka.cluster__kafka_coordinator_partitions import Place, Producers, producers, producers_now
from dualwrite.kafka.network import NotYet
from dualwrite.protocol.values import OpenTransaction, ShownProducer

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.kafka.brokers import Brokers
    from dualwrite.kafka.cluster import Partition, Topics
    from dualwrite.kafka.log__kafka_coordinator_blocking import HeldBack
    from dualwrite.protocol.prepared_state import PreparedTxnState

logger = logging.getLogger(__name__)

_TRANSACTION_VERSION: Final = "transaction.version"
_FIRST_WITH_FEATURES: Final = 3


def transaction_version(brokers: Brokers, deadline: Deadline) -> int:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.transaction_version`."""

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

    return until_answered([None], ask, deadline, f"report its {_TRANSACTION_VERSION}")[None]


def open_transactions(
    brokers: Brokers,
    topics: Topics,
    asked: Sequence[tuple[PreparedTxnState, Collection[Partition]]],
    deadline: Deadline,
) -> list[list[OpenTransaction]]:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.open_transactions`."""
    ids = [state.topic_ids for state, _ in asked]
    found = until_answered(
        {topic for of_state in ids for topic in of_state},
        lambda pending: topics.find(pending, deadline, fresh=True),
        deadline,
        "describe the topics",
    )
    in_topics = {
        topic: frozenset((topic, number) for number in known.leaders) for topic, known in found.items() if known
    }
    places = {
        Place(*key, topic_id=of_state.get(key[0]))
        for (_, partitions), of_state in zip(asked, ids, strict=True)
        for key in frozenset(partitions).union(*(in_topics.get(topic, ()) for topic in of_state))
    }
    shown = producers(brokers, topics, places, deadline, fresh=False)
    by_producer: dict[int, list[tuple[Place, int, int]]] = {}
    for place in sorted(places, key=lambda one: one.key):
        for producer_id, (epoch, start) in (shown[place] or {}).items():
            if start is not None:
                by_producer.setdefault(producer_id, []).append((place, epoch, start))
    return [
        [
            OpenTransaction(place.key, epoch, start)
            for place, epoch, start in by_producer.get(state.producer_id, ())
            if place.topic_id == of_state.get(place.topic) and (place.topic in of_state or place.key in partitions)
        ]
        for (state, partitions), of_state in zip(asked, ids, strict=True)
    ]


def producer_epochs(
    brokers: Brokers, topics: Topics, states: Sequence[PreparedTxnState], deadline: Deadline, *, held_back: HeldBack
) -> list[dict[Partition, ShownProducer | None]]:
    """See :meth:`dualwrite.kafka.coordinator.KafkaCoordinator.producer_epochs`.

    Args:
        brokers: The brokers.
        topics: The topics; uses the leaders already known.
        states: The transactions.
        deadline: Covers all requests.
        held_back: Receives where other producers' transactions are open in partitions with a known first offset.
    """
    named = [(state, state.topic_ids) for state in states]
    places = [{key: Place(*key, topic_id=ids[key[0]]) for key in sorted(state.partitions)} for state, ids in named]
    shown = _producers_now(brokers, topics, {place for one in places for place in one.values()}, deadline, fresh=False)
    # A new topic may have taken the place of the known one.
    doubtful = {
        place
        for state, of_state in zip(states, places, strict=True)
        for place in of_state.values()
        if place in shown and state.producer_id not in (shown[place] or {})
    }
    if doubtful:
        again = _producers_now(brokers, topics, doubtful, deadline, fresh=True)
        shown = {place: there for place, there in shown.items() if place not in doubtful} | again
    for state, of_state in zip(states, places, strict=True):
        for first in state.first_offsets:
            there = shown.get(of_state[first.topic, first.partition]) or {}
            starts = [start for producer_id, (_, start) in there.items() if producer_id != state.producer_id]
            stable = min((start for start in starts if start is not None), default=first.offset)
            held_back.note(Place(first.topic, first.partition), stable, upto=first.offset)
    return [
        {key: _shown(shown[place], state.producer_id) for key, place in of_state.items() if place in shown}
        for state, of_state in zip(states, places, strict=True)
    ]


def _producers_now(
    brokers: Brokers, topics: Topics, places: Collection[Place], deadline: Deadline, *, fresh: bool
) -> dict[Place, Producers | None]:
    try:
        answers = producers_now(brokers, topics, places, deadline, fresh=fresh)
    except NotYet as reason:
        logger.debug("no answer about the ends of transactions: %s", reason)
        return {}
    return {place: answer for place, answer in answers.items() if not isinstance(answer, NotYet)}


def _shown(there: Producers | None, producer_id: int) -> ShownProducer | None:
    return None if there is None else ShownProducer(*there.get(producer_id, (-1, None)))
