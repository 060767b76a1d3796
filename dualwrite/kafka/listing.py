"""Lists the transactions of all coordinators, with evidence that none is missing.

A broker lists the transactions of those partitions of ``__transaction_state`` that it has loaded, and refuses to list
while it loads one. But while a leader has not begun to load its partition, and where a partition has no leader or
moves to a broker that has already answered, its transactions are missing from all answers without an error.

So each leader describes an unused id of each of its partitions before and after it lists: it answers
``NOT_COORDINATOR`` for a partition that it has not loaded. Afterwards all brokers must still name the same leaders in
the same epochs: otherwise a partition may have moved away and back, or a broker that was paused may not know yet that
it leads no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Final

from dualwrite.clock import Deadline
from dualwrite.kafka import kafka_python
from dualwrite.kafka.brokers import Brokers, NotYet, answers_of_all, until_known, verdict
from dualwrite.kafka.cluster import Leader, internal_partition, read_topics
from dualwrite.kafka.error_codes import Code, code_name
from dualwrite.kafka.messages import Message, Request
from dualwrite.kafka.opening_messages import ClusterMetadata, DescribeTransactions, Metadata
from dualwrite.protocol.findings import PROBES, TRANSACTION_STATE
from dualwrite.protocol.values import OPEN

_LIST: Final = "the list of transactions"
_TO_LIST: Final = "Describe on the transactional ids"
_LOADED: Final = frozenset({Code.NONE, Code.TRANSACTIONAL_ID_NOT_FOUND})
_Leaders = Mapping[int, Leader | None] | None
"""The leader of each partition. Empty if there is no such topic, None if we may not describe it."""


@dataclass(frozen=True)
class Listing:
    """The transactions that the coordinators have listed; ``is_complete`` if there is evidence that they know no others."""

    transactions: Sequence[Message]
    is_complete: bool


def ids_of(brokers: Brokers, producer_ids: Collection[int], deadline: Deadline) -> Mapping[int, str]:
    """The transactional ids of producer ids; those that no coordinator shows us are missing. Raises as `list_transactions`."""
    transactions = list_transactions(brokers, producer_ids, deadline).transactions
    return {state.producer_id: state.transactional_id for state in transactions}


def list_transactions(brokers: Brokers, producer_ids: Collection[int], deadline: Deadline) -> Listing:
    """List the transactions of these producer ids, or all; only those that we may describe.

    `Unavailable` if some brokers did not answer in time, or some transactions had no coordinator.
    """

    def ask() -> Listing | NotYet:
        seen = brokers.metadata([TRANSACTION_STATE], deadline)
        nodes, leaders = [broker.node_id for broker in seen.brokers], _leaders(seen)
        probes = _probes(leaders or {})
        if unled := probes.keys() - nodes:
            raise NotYet(f"partition {min(min(probes[node]) for node in unled)} of {TRANSACTION_STATE} has no leader")
        asked = [
            (node, request)
            for node in nodes
            for request in _requests(list(probes.get(node, {}).values()), producer_ids)
        ]
        # A broker gets its requests in this order, and serves those of one connection one after the other.
        return _judged(leaders, brokers.exchange(asked, deadline))

    return until_known(ask, deadline, "list the transactional ids")


def open_ids(brokers: Brokers, deadline: Deadline) -> set[str]:
    """The ids whose transactions any broker lists as open; it may coordinate them no more. Only those that we may describe."""
    request = kafka_python.list_transactions(states=[status.value for status in OPEN])

    def ask() -> set[str] | NotYet:
        found: set[str] = set()
        for answer in answers_of_all(brokers, lambda _: request, deadline):
            if (why := verdict(answer.error_code, _LIST, _TO_LIST)) is not None:
                return why
            found.update(state.transactional_id for state in answer.transaction_states)
        return found

    return until_known(ask, deadline, "list the open transactions")


def _requests(probes: Sequence[str], producer_ids: Collection[int]) -> Iterator[Request | Message]:
    yield DescribeTransactions(probes)
    yield kafka_python.list_transactions(producer_ids=producer_ids)
    yield DescribeTransactions(probes)
    yield Metadata([TRANSACTION_STATE])


def _judged(leaders: _Leaders, answers: Sequence[Message | NotYet]) -> Listing | NotYet:
    """Decide from each broker's four answers whether its list can be taken, and whether all of them are complete."""
    transactions: list[Message] = []
    is_evident = leaders is not None
    for answer in answers:
        if isinstance(answer, NotYet):
            return answer
    for before, listed, after, view in zip(*[iter(answers)] * 4, strict=True):
        why = verdict(listed.error_code, _LIST, _TO_LIST)
        if why is not None:
            return why
        if _leaders(view) != leaders:
            return NotYet(f"the leaders of {TRANSACTION_STATE} changed meanwhile")
        transactions += listed.transaction_states
        for probe in (*before, *after):
            if probe.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                is_evident = False
            elif probe.error_code not in _LOADED:
                return NotYet(
                    f"a partition of {TRANSACTION_STATE} is without a coordinator: {code_name(probe.error_code)}"
                )
    hides_its_topic = leaders == {} and bool(transactions)
    return Listing(transactions, is_evident and not hides_its_topic)


def _leaders(response: ClusterMetadata) -> _Leaders:
    if any(topic.error_code == Code.TOPIC_AUTHORIZATION_FAILED for topic in response.topics):
        return None
    found = read_topics(response).get(TRANSACTION_STATE)
    if isinstance(found, NotYet):
        raise found
    return {} if found is None else found.leaders


def _probes(leaders: Mapping[int, Leader | None]) -> dict[int, dict[int, str]]:
    """By broker, and by partition that it leads, an id in that partition. Under -1 those without a leader."""
    by_node: dict[int, dict[int, str]] = {}
    ids = _probe_ids(len(leaders))
    for partition, leader in leaders.items():
        by_node.setdefault(-1 if leader is None else leader.node, {})[partition] = ids[partition]
    return by_node


@lru_cache(maxsize=1)
def _probe_ids(partitions: int) -> Sequence[str]:
    found: dict[int, str] = {}
    numbers = count()
    while len(found) < partitions:
        probe = f"{PROBES}{next(numbers)}"
        found.setdefault(internal_partition(probe, partitions), probe)
    return [found[partition] for partition in range(partitions)]
