"""The coordinator port over kafka-python: asks coordinators and partition leaders, and ends transactions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from dualwrite.clock import Deadline
from dualwrite.kafka import (
    coordinator__kafka_coordinator_describing,
    coordinator__kafka_coordinator_ending,
    coordinator__kafka_coordinator_listing,
    coordinator__kafka_coordinator_native,
    log,
    log__kafka_coordinator_later,
    log__kafka_coordinator_sequences,
)
from dualwrite.kafka.brokers import Brokers, until_answered
from dualwrite.kafka.callers_network import CallersNetwork
from dualwrite.kafka.cluster import Coordinators, Partition, Topic, Topics
from dualwrite.kafka.cluster__kafka_coordinator_partitions import Place, open_offsets
from dualwrite.kafka.config__kafka_config import KafkaConfig
from dualwrite.kafka.log__kafka_coordinator_blocking import HELD_BACK_S, BlockingTransaction, HeldBack, find_blocking
from dualwrite.kafka.network import Network
from dualwrite.protocol.lost_decisions import Later
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import EndAnswer, LogProof, OpenTransaction, ShownProducer, TransactionView

if TYPE_CHECKING:
    from typing_extensions import Self


class KafkaCoordinator:
    """:class:`~dualwrite.interfaces__ports_coordinator.TransactionCoordinator` over the wire. Connects on the first call; thread-safe.

    A call on many ids sends one request per broker where Kafka has a batched request, otherwise one per id, all at
    once. Transient failures (a coordinator that moves, loads or is gone, a change of leader, a lost connection) are
    retried after 2 ms, then with growing waits, up to the deadline.

    Required rights: Describe and Write on the transactional ids; Describe and Read on the topics written, for the
    evidence, and Write on them, to end transactions that a broker has forgotten; DescribeConfigs on the cluster, for
    :meth:`max_transaction_timeout_ms`.

    Args:
        config: How to connect.
        like: Another one for the same cluster, whose knowledge of the brokers' addresses is used.
        one_thread: Whether only one thread uses it, at any time. It then needs no second thread for its connections.

    Raises:
        ConfigurationError: A certificate or key of the configuration cannot be used.
    """

    def __init__(self, config: KafkaConfig, *, like: KafkaCoordinator | None = None, one_thread: bool = False) -> None:
        make_network = CallersNetwork if one_thread else Network
        self._brokers = Brokers(config, make_network, like=None if like is None else like.brokers)
        self._coordinators = Coordinators(self._brokers)
        self._topics = Topics(self._brokers)
        self._held_back = HeldBack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def brokers(self) -> Brokers:
        """The connections."""
        return self._brokers

    def close(self) -> None:
        """Close the connections. Idempotent; in a forked process it leaves the parent's connections alone."""
        self._brokers.close()

    def cluster_id(self, deadline: Deadline) -> str:
        """The id of the cluster that the bootstrap servers belong to.

        Raises:
            Unavailable: No broker answered in time.
            ConfigurationError: The brokers refuse our credentials or our way of connecting.
        """
        return coordinator__kafka_coordinator_describing.cluster_id(self._brokers, deadline)

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """The smallest ``transaction.max.timeout.ms`` of all brokers; None if we may not read it.

        Raises:
            Unavailable: Not all brokers answered in time.
        """
        return coordinator__kafka_coordinator_describing.max_transaction_timeout_ms(self._brokers, deadline)

    def describe(self, kafka_ids: Collection[str], deadline: Deadline) -> Mapping[str, TransactionView]:
        """The coordinator's view of each id; an unknown id has the status ``NO_SUCH_ID``. Source: KIP-664.

        Raises:
            Unavailable: Not all coordinators answered in time.
            ConfigurationError: We may not describe an id.
        """
        return coordinator__kafka_coordinator_describing.describe(self._coordinators, kafka_ids, deadline)

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
        return coordinator__kafka_coordinator_ending.end(
            self._coordinators, transactions, deadline, committed=committed, once=once
        )

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
        return coordinator__kafka_coordinator_ending.end(
            self._coordinators, named, deadline, committed=committed, exactly=True
        )

    def transaction_version(self, deadline: Deadline) -> int:
        """The cluster's finalized ``transaction.version``: from 2 on, every transaction has an epoch of its own (KIP-890).

        0 if the cluster has not finalized one. While it is being raised or lowered, the lowest of the brokers' answers.

        Raises:
            Unavailable: Not all brokers answered in time.
        """
        return coordinator__kafka_coordinator_native.transaction_version(self._brokers, deadline)

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
        return coordinator__kafka_coordinator_ending.retire(self._coordinators, kafka_ids, timeouts_ms or {}, deadline)

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
        return coordinator__kafka_coordinator_ending.add_partitions(self._coordinators, transactions, deadline)

    def list_ids(self, prefix: str, deadline: Deadline) -> Sequence[str]:
        """All transactional ids with that prefix known to any coordinator, sorted; only those that we may describe.

        Requires Describe on the topic ``__transaction_state`` and on the transactional ids with the prefix
        ``dualwrite-probe.``. Without them nothing shows that the list is complete: then ids may be missing whose coordinator is
        changing, and a warning is logged.

        Raises:
            Unavailable: Some brokers did not answer in time, or some ids had no coordinator.
        """
        return coordinator__kafka_coordinator_listing.list_ids(self._brokers, prefix, deadline)

    def compacted(self, topics: Collection[str], deadline: Deadline) -> Collection[str]:
        """Those of the topics that are compacted. One whose settings we may not describe is left out. Asks once.

        Raises:
            Unavailable: No answer.
        """
        return coordinator__kafka_coordinator_describing.compacted(self._brokers, topics, deadline)

    def longest_open_s(self, deadline: Deadline) -> float:
        """The age of the oldest open transaction of any id that we may describe, in seconds; 0 if none is open.

        The metric that KIP-939 proposes for brokers, ``ActiveTransactionOpenTimeMaxMs``.

        Raises:
            Unavailable: The brokers did not answer in time.
        """
        return coordinator__kafka_coordinator_listing.longest_open_s(
            self._brokers, lambda ids: self.describe(ids, deadline), deadline
        )

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
        """Sequence numbers of a producer's open transaction; see :func:`dualwrite.kafka.log__kafka_coordinator_sequences.spans`.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        return log__kafka_coordinator_sequences.spans(
            self._brokers, self._topics, (producer_id, epoch), firsts, deadline
        )

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
        """For each state with further partitions: the transactions that its producer has open, under any epoch.

        Looks in these, and in every partition of the topics that the state names: an undecided transaction whose marker was
        forgotten is named nowhere else. A partition of a topic that no broker knows any more shows nothing; nor does one of a
        new topic, where the state names the old one's id.

        Raises:
            Unavailable: Some leaders did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        return coordinator__kafka_coordinator_native.open_transactions(self._brokers, self._topics, asked, deadline)

    def producer_epochs(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[Partition, ShownProducer | None]]:
        """By partition of each state, its producer as the leader shows it now. Asks once, without retrying.

        After a native transaction of epoch E, an epoch above E with nothing open shows that it has ended there. None for a
        partition that is gone with its topic. Unanswered partitions are missing.

        Raises:
            ConfigurationError: We may not read or describe a topic.
        """
        return coordinator__kafka_coordinator_native.producer_epochs(
            self._brokers, self._topics, states, deadline, held_back=self._held_back
        )

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """Prove the outcome of each state's transaction from the log; see :func:`dualwrite.kafka.log.prove`.

        Raises:
            Unavailable: The leaders did not answer in time, or there was too much to read.
            ConfigurationError: We may not read or describe a topic.
        """
        return log.prove(self._brokers, self._topics, states, deadline)

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[Partition, LogProof | None]]:
        """Read, without retrying, what each partition's log proves; see :func:`dualwrite.kafka.log.prove_now`.

        Raises:
            ConfigurationError: We may not read or describe a topic.
        """
        return log.prove_now(self._brokers, self._topics, states, deadline, read_on=read_on, held_back=self._held_back)

    def blocking(
        self, partitions: Collection[Partition], deadline: Deadline, *, open_for_s: float
    ) -> Sequence[BlockingTransaction]:
        """Transactions that hold back readers; see :func:`~dualwrite.kafka.log__kafka_coordinator_blocking.find_blocking`.

        Raises:
            Unavailable: Some leaders or coordinators did not answer in time.
            ConfigurationError: We may not read or describe a topic.
        """
        return find_blocking(
            [Place(*key) for key in partitions],
            open_in=lambda places: open_offsets(self._brokers, self._topics, places, deadline, fresh=True),
            ids_of=lambda producer_ids: coordinator__kafka_coordinator_listing.ids_of(
                self._brokers, producer_ids, deadline
            ),
            describe=lambda kafka_ids: self.describe(kafka_ids, deadline),
            open_for_s=open_for_s,
        )

    def newly_held_back(self, deadline: Deadline) -> Sequence[BlockingTransaction]:
        """Transactions seen to hold back readers for some seconds, when asking how others ended. Each is reported once.

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
        """Each producer's commits after its state, from the logs; see :func:`dualwrite.kafka.log__kafka_coordinator_later.later_commits`.

        Raises:
            Unavailable: The leaders did not answer in time, or there was too much to read.
            ConfigurationError: We may not read or describe a topic.
        """
        return log__kafka_coordinator_later.later_commits(self._brokers, self._topics, states, deadline)

    def _find_topics(self, topics: Collection[str], deadline: Deadline, *, fresh: bool) -> dict[str, Topic | None]:
        return until_answered(
            topics,
            lambda pending: self._topics.find(pending, deadline, fresh=fresh),
            deadline,
            "describe the topics",
        )
