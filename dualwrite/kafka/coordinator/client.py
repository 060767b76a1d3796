"""The coordinator port over kafka-python: asks coordinators and partition leaders, and ends transactions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

import kafka.errors as kafka_errors
from kafka.protocol.admin.configs import DescribeConfigsRequest
from kafka.protocol.admin.transactions import DescribeTransactionsRequest, ListTransactionsRequest

from dualwrite.runtime.deadline import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import ending, later, log, native, sequences
from dualwrite.kafka.coordinator.blocking import HELD_BACK_S, BlockingTransaction, HeldBack, find_blocking
from dualwrite.kafka.coordinator.brokers import Brokers, until_answered, verdict
from dualwrite.kafka.coordinator.network import Message, NotYet
from dualwrite.kafka.coordinator.partitions import Place, open_offsets
from dualwrite.kafka.coordinator.routing import Coordinators, Partition, Topic, Topics
from dualwrite.protocol.observations import (
    EndAnswer,
    LogProof,
    OpenTransaction,
    TransactionStatus,
    TransactionView,
)
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settling.lost_decisions import Later

if TYPE_CHECKING:
    from typing_extensions import Self

_BROKER_RESOURCE: Final = 4
_LONGEST_TIMEOUT: Final = "transaction.max.timeout.ms"

_STATUS: Final = {status.value: status for status in TransactionStatus if status is not TransactionStatus.NO_SUCH_ID}
_OPEN: Final = frozenset(
    {
        TransactionStatus.ONGOING,
        TransactionStatus.PREPARE_COMMIT,
        TransactionStatus.PREPARE_ABORT,
    }
)


class KafkaCoordinator:
    """:class:`~dualwrite.ports.coordinator.TransactionCoordinator` over the wire. Connects on the first call; thread-safe.

    A call on many ids sends one request per broker where Kafka has a batched request, otherwise one per id, all at
    once. Transient failures (a coordinator that moves, loads or is gone, a change of leader, a lost connection) are
    retried after 2 ms, then with growing waits, up to the deadline.

    Required rights: Describe and Write on the transactional ids; Describe and Read on the topics written, for the
    evidence, and Write on them, to end transactions that a broker has forgotten; DescribeConfigs on the cluster, for
    :meth:`max_transaction_timeout_ms`.

    Args:
        config: How to connect.

    Raises:
        ConfigurationError: A certificate or key of the configuration cannot be used.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._brokers = Brokers(config)
        self._coordinators = Coordinators(self._brokers)
        self._topics = Topics(self._brokers)
        self._held_back = HeldBack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent; in a forked process it leaves the parent's connections alone."""
        self._brokers.close()

    def cluster_id(self, deadline: Deadline) -> str:
        """The id of the cluster that the bootstrap servers belong to.

        Raises:
            Unavailable: No broker answered in time.
            ConfigurationError: The brokers refuse our credentials or our way of connecting.
        """

        def ask(_: list[None]) -> dict[None, str | NotYet]:
            return {None: self._brokers.metadata((), deadline).cluster_id or NotYet("the cluster has no id yet")}

        return until_answered([None], ask, deadline, "tell its cluster id")[None]

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """The smallest ``transaction.max.timeout.ms`` of all brokers; None if we may not read it.

        Raises:
            Unavailable: Not all brokers answered in time.
        """

        def ask(_: list[None]) -> dict[None, int | None]:
            requests = [(node, _describe_broker(node)) for node in self._brokers.nodes(deadline)]
            found = []
            for response in self._brokers.exchange(requests, deadline):
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

        return until_answered([None], ask, deadline, f"tell its {_LONGEST_TIMEOUT}")[None]

    def describe(self, kafka_ids: Collection[str], deadline: Deadline) -> Mapping[str, TransactionView]:
        """The coordinator's view of each id; an unknown id has the status ``NO_SUCH_ID``. Source: KIP-664.

        Raises:
            Unavailable: Not all coordinators answered in time.
            ConfigurationError: We may not describe an id.
        """

        def requests(ids: list[str]) -> Iterator[tuple[Message, list[str]]]:
            yield DescribeTransactionsRequest(transactional_ids=ids), ids

        def read(_: list[str], response: Message) -> Iterator[tuple[str, TransactionView | NotYet]]:
            for state in response.transaction_states:
                yield state.transactional_id, _view(state)

        return self._coordinators.ask(kafka_ids, requests, read, deadline, "describe the transactions")

    def end(
        self, transactions: Mapping[str, PreparedTxnState], *, committed: bool, deadline: Deadline, once: bool = False
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` for each Kafka id with its state's producer id and epoch, which stay valid.

        A request may be sent more than once, because the first answer may get lost. A repetition is harmless unless a
        producer begins another transaction with that id and epoch.

        With ``once`` each request is sent at most once; an id without an answer is missing from the result.

        Raises:
            Unavailable: Some coordinators did not answer in time. Any of the transactions may have ended.
            ConfigurationError: We may not write under an id.
        """
        return ending.end(self._coordinators, transactions, deadline, committed=committed, once=once)

    def end_exactly(
        self, transactions: Mapping[str, tuple[int, int]], *, committed: bool, deadline: Deadline
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` v5 for each Kafka id with the producer id and epoch that name one transaction.

        Any process may do so under transaction version 2, and repeat it. Source: KIP-890.

        Raises:
            Unavailable: Some coordinators did not answer in time. Any of the transactions may have ended.
            ConfigurationError: We may not write under an id, or a broker is older than 4.0.
        """
        named = {kafka_id: PreparedTxnState(*ids) for kafka_id, ids in transactions.items()}
        return ending.end(self._coordinators, named, deadline, committed=committed, exactly=True)

    def transaction_version(self, deadline: Deadline) -> int:
        """The cluster's finalized ``transaction.version``: from 2 on, every transaction has an epoch of its own (KIP-890).

        0 if the cluster has not finalized one. While it is being raised or lowered, the lowest of the brokers' answers.

        Raises:
            Unavailable: Not all brokers answered in time.
        """
        return native.transaction_version(self._brokers, deadline)

    def retire(
        self, kafka_ids: Collection[str], deadline: Deadline, *, timeouts_ms: Mapping[str, int] | None = None
    ) -> Mapping[str, tuple[int, int]]:
        """Repeat ``InitProducerId`` for each id until it succeeds: aborts what is ongoing and fences its producers.

        Args:
            kafka_ids: The ids.
            deadline: Covers all attempts.
            timeouts_ms: The transaction timeout for ids with transactions left to end; the others get a short one.

        Returns:
            By id, its producer id and epoch now.

        Raises:
            Unavailable: Some ids were not retired in time. Any of them may have been.
            ConfigurationError: We may not write under an id, or a timeout exceeds ``transaction.max.timeout.ms``.
        """
        return ending.retire(self._coordinators, kafka_ids, timeouts_ms or {}, deadline)

    def add_partitions(
        self, transactions: Mapping[str, tuple[int, int, Collection[Partition]]], deadline: Deadline
    ) -> Mapping[str, bool]:
        """Send ``AddPartitionsToTxn`` for each Kafka id with producer id, epoch and partitions: begins a transaction.

        Returns:
            By id, whether its partitions were added; False if its producer id or epoch differs, or a partition is gone.

        Raises:
            Unavailable: Some coordinators did not answer in time. Any of the partitions may have been added.
            ConfigurationError: We may not write under an id, or to a topic.
        """
        return ending.add_partitions(self._coordinators, transactions, deadline)

    def list_ids(self, prefix: str, deadline: Deadline) -> Sequence[str]:
        """All transactional ids with that prefix known to any coordinator, sorted; only those that we may describe.

        Raises:
            Unavailable: Some brokers did not answer in time, or one was still loading its transaction log.
        """
        found = {state.transactional_id for state in self._listed((), deadline)}
        return sorted(kafka_id for kafka_id in found if kafka_id.startswith(prefix))

    def _ids_of(self, producer_ids: Collection[int], deadline: Deadline) -> Mapping[int, str]:
        """The Kafka ids of producer ids; those that no coordinator shows us are missing."""
        return {state.producer_id: state.transactional_id for state in self._listed(producer_ids, deadline)}

    def _listed(self, producer_ids: Collection[int], deadline: Deadline) -> Sequence[Message]:
        request = ListTransactionsRequest(state_filters=[], producer_id_filters=list(producer_ids))

        def ask(_: list[None]) -> dict[None, list[Message]]:
            nodes = self._brokers.nodes(deadline)
            found: list[Message] = []
            for response in self._brokers.exchange([(node, request) for node in nodes], deadline):
                if isinstance(response, NotYet):
                    raise response
                why = verdict(response.error_code, "the list of transactions", "Describe on the transactional ids")
                if why is not None:
                    raise why
                found += response.transaction_states
            return {None: found}

        return until_answered([None], ask, deadline, "list the transactional ids")[None]

    def topic_ids(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, str]:
        """The id of each topic as URL-safe base64. A topic that does not exist is missing from the result.

        Raises:
            Unavailable: The brokers did not answer in time.
            ConfigurationError: We may not describe a topic.
        """
        found = self._find_topics(topics, deadline, fresh=True)
        return {
            name: topic.topic_id for name, topic in found.items() if topic is not None and topic.topic_id is not None
        }

    def open_offsets(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[Partition, int | None]]:
        """For each state, by (topic, partition) of its evidence, where its producer's open transaction began.

        None where that producer has nothing open. A partition is left out once no broker knows its topic, even if a new
        topic has the name.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        places = [
            [Place(first.topic, first.partition, first.topic_id) for first in state.first_offsets] for state in states
        ]
        every = {place for of_state in places for place in of_state}
        shown = open_offsets(self._brokers, self._topics, every, deadline, fresh=True)
        return [
            {
                place.key: there.get((state.producer_id, state.epoch))
                for place in of_state
                if (there := shown[place]) is not None
            }
            for state, of_state in zip(states, places, strict=True)
        ]

    def producer_open_offsets(
        self, producer_id: int, epoch: int, partitions: Collection[Partition], deadline: Deadline
    ) -> Mapping[Partition, int | None]:
        """The offset at which a producer's open transaction began in each partition; None where it has nothing open.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        places = [Place(topic, partition) for topic, partition in partitions]
        shown = open_offsets(self._brokers, self._topics, places, deadline, fresh=False)
        return {place.key: (shown[place] or {}).get((producer_id, epoch)) for place in places}

    def sequences(
        self, producer_id: int, epoch: int, firsts: Mapping[Partition, int], deadline: Deadline
    ) -> Mapping[Partition, tuple[int, int] | None]:
        """Sequence numbers of a producer's open transaction; see :func:`dualwrite.kafka.coordinator.sequences.spans`.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        return sequences.spans(self._brokers, self._topics, (producer_id, epoch), firsts, deadline)

    def still_open(
        self, suspects: Sequence[tuple[int, Collection[Partition]]], deadline: Deadline
    ) -> Sequence[Mapping[Partition, int]]:
        """For each producer id with its partitions: those in which it has a transaction open, and where that began.

        The transaction may be under any epoch. A partition whose topic no broker knows any more shows nothing.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        places = {Place(*key) for _, partitions in suspects for key in partitions}
        shown = open_offsets(self._brokers, self._topics, places, deadline, fresh=True)
        starts: dict[tuple[int, Partition], int] = {
            (producer_id, place.key): start
            for place, there in shown.items()
            for (producer_id, _), start in (there or {}).items()
        }
        return [
            {key: starts[producer_id, key] for key in partitions if (producer_id, key) in starts}
            for producer_id, partitions in suspects
        ]

    def open_transactions(
        self, asked: Sequence[tuple[PreparedTxnState, Collection[Partition]]], deadline: Deadline
    ) -> Sequence[Sequence[OpenTransaction]]:
        """For each state with partitions: the transactions that its producer has open there, under any epoch.

        A partition of a topic that no broker knows any more shows nothing; nor does one of a new topic, where the state names
        the old one's id.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        return native.open_transactions(self._brokers, self._topics, asked, deadline)

    def producer_epochs(
        self, state: PreparedTxnState, deadline: Deadline
    ) -> Mapping[Partition, tuple[int, int | None] | None]:
        """By partition of a state, its producer's epoch there now, and the first offset of its open transaction, if any.

        After a native transaction of epoch E, an epoch above E with nothing open shows that it has ended there. None if the
        leader does not know the producer. A partition that certainly no longer exists is left out.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        return native.producer_epochs(self._brokers, self._topics, state, deadline)

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """Prove the outcome of each state's transaction from the log; see :func:`dualwrite.kafka.coordinator.log.prove`.

        Raises:
            Unavailable: The leaders did not answer in time, or there was too much to read.
            ConfigurationError: We may not read or describe a topic.
        """
        return log.prove(self._brokers, self._topics, states, deadline)

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[Partition, LogProof | None]]:
        """Read, without retrying, what each partition's log proves; see :func:`dualwrite.kafka.coordinator.log.prove_now`.

        Raises:
            ConfigurationError: We may not read or describe a topic.
        """
        return log.prove_now(self._brokers, self._topics, states, deadline, read_on=read_on, held_back=self._held_back)

    def blocking(
        self, partitions: Collection[Partition], deadline: Deadline, *, open_for_s: float
    ) -> Sequence[BlockingTransaction]:
        """Transactions that hold back readers; see :func:`~dualwrite.kafka.coordinator.blocking.find_blocking`.

        Raises:
            Unavailable: Some leaders or coordinators did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        return find_blocking(
            [Place(*key) for key in partitions],
            open_in=lambda places: open_offsets(self._brokers, self._topics, places, deadline, fresh=True),
            ids_of=lambda producer_ids: self._ids_of(producer_ids, deadline),
            describe=lambda kafka_ids: self.describe(kafka_ids, deadline),
            open_for_s=open_for_s,
        )

    def newly_held_back(self, deadline: Deadline) -> Sequence[BlockingTransaction]:
        """Transactions that :meth:`prove_now` has seen hold back readers for some seconds. Each is reported once.

        Raises:
            Unavailable, ConfigurationError: As :meth:`blocking`.
        """
        due = self._held_back.due()
        if not due:
            return ()
        found = self.blocking([place.key for place in due], deadline, open_for_s=HELD_BACK_S)
        return [one for one in found if one.first_offset == due[Place(one.topic, one.partition)]]

    def partitions_of(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, int]:
        """The number of partitions of each topic. A topic that does not exist is missing from the result.

        Raises:
            Unavailable: The brokers did not answer in time.
            ConfigurationError: We may not describe a topic.
        """
        found = self._find_topics(topics, deadline, fresh=True)
        return {name: len(topic.leaders) for name, topic in found.items() if topic is not None}

    def later_commits(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[Later]:
        """Each producer's commits after its state, from the logs; see :func:`dualwrite.kafka.coordinator.later.later_commits`.

        Raises:
            Unavailable: The leaders did not answer in time, or there was too much to read.
            ConfigurationError: We may not read or describe a topic.
        """
        return later.later_commits(self._brokers, self._topics, states, deadline)

    def _find_topics(self, topics: Collection[str], deadline: Deadline, *, fresh: bool) -> dict[str, Topic | None]:
        return until_answered(
            topics,
            lambda pending: self._topics.find(pending, deadline, fresh=fresh),
            deadline,
            "describe the topics",
        )


def _view(state: Message) -> TransactionView | NotYet:
    kafka_id = state.transactional_id
    if kafka_errors.for_code(state.error_code) is kafka_errors.TransactionalIdNotFoundError:
        return TransactionView(TransactionStatus.NO_SUCH_ID)
    right = f"Describe on the transactional id {kafka_id!r}, or on a prefix of it"
    why = verdict(state.error_code, f"describing {kafka_id!r}", right)
    if why is not None:
        return why
    status = _STATUS.get(state.transaction_state)
    if status is None:
        return NotYet(f"{kafka_id!r} is in the unknown state {state.transaction_state!r}", moved=False)
    return TransactionView(
        status=status,
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        started_ms=state.transaction_start_time_ms if status in _OPEN else None,
        timeout_ms=state.transaction_timeout_ms,
        partitions=tuple((topic.topic, partition) for topic in state.topics for partition in topic.partitions),
        newest_started_ms=state.transaction_start_time_ms if state.transaction_start_time_ms >= 0 else None,
    )


def _describe_broker(node: int) -> Message:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=_BROKER_RESOURCE, resource_name=str(node), configuration_keys=[_LONGEST_TIMEOUT]
    )
    return DescribeConfigsRequest(resources=[resource], include_synonyms=False, include_documentation=False)
