"""``KafkaCoordinator``: what recipes ask and tell Kafka about transactions, from outside any producer.

Describing, listing and ending transactions, for both transaction versions. One instance serves all threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.interfaces import Closing
from dualwrite.kafka.brokers import Brokers, Connections, NotYet, answers_of_all, until_answered, until_known, verdict
from dualwrite.kafka.cluster import (
    HELD_BACK_S,
    Coordinators,
    HeldBack,
    Partition,
    Place,
    Producers,
    Topic,
    Topics,
    open_offsets,
    producers,
    producers_now,
    right_to_look,
)
from dualwrite.kafka.config import CONNECTING, KERBEROS_TICKETS, KafkaConfig
from dualwrite.kafka.error_codes import Code, code_name
from dualwrite.kafka.messages import EndTxn, Message, NotOffered, Request, TransactionEnded
from dualwrite.kafka.opening_messages import (
    DescribeConfigs,
    DescribedConfig,
    DescribedTransaction,
    DescribeTransactions,
    FinalizedFeatures,
    GivenProducerId,
    InitProducerId,
    ResourceType,
)
from dualwrite.kafka.transaction_ends import PostedQuestion, States
from dualwrite.protocol.findings import PROBES, TIME_LIMIT, TRANSACTION_STATE
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Later
from dualwrite.protocol.values import (
    OPEN,
    EndAnswer,
    LogProof,
    OpenTransaction,
    ShownProducer,
    TransactionStatus,
    TransactionView,
)

if TYPE_CHECKING:
    from dualwrite.kafka.blocking import BlockingTransaction, OpenTransactions


logger = logging.getLogger(__name__)


class KafkaCoordinator(Closing):
    """:class:`~dualwrite.interfaces.TransactionCoordinator` over the wire. Connects on the first call; thread-safe.

    A call on many ids sends one request per broker where Kafka has a batched request, otherwise one per id, all at once.
    Transient failures (a coordinator that moves, loads or is gone, a change of leader, a lost connection) are retried after
    2 ms, then with growing waits, up to the deadline; then the call raises `Unavailable`. `ConfigurationError` means that a
    right is missing, or that the brokers refuse our way of connecting.

    Required rights: Describe and Write on the transactional ids; Describe and Read on the topics written, for the evidence,
    and Write on them, to end transactions that a broker has forgotten; DescribeConfigs on the cluster, for
    :meth:`max_transaction_timeout_ms`.

    What ``like`` knows of the brokers' addresses is used. With ``one_thread``, only one thread uses it at any time: it may
    post questions, and shares what ``like`` knows.
    """

    def __init__(self, config: KafkaConfig, *, like: KafkaCoordinator | None = None, one_thread: bool = False) -> None:
        self.brokers: Brokers = Brokers(config, like=None if like is None else like.brokers)
        self._posting = Connections(config, addresses=(like or self).brokers.addresses) if one_thread else None
        self._coordinators = Coordinators(self.brokers)
        self._topics: Topics = like._topics if like is not None and one_thread else Topics(self.brokers)  # noqa: SLF001 - its own class
        self._held_back = HeldBack()
        self._noted: dict[str, tuple[float, int | None]] = {}

    def close(self) -> None:
        """Close the connections. Idempotent; in a forked process it leaves the parent's connections alone."""
        if self._posting is not None:
            self._posting.close()
        self.brokers.close()

    def refuses(self) -> bool:
        return self.brokers.refuse()

    def cluster_id(self, deadline: Deadline) -> str:
        """The id of the cluster that the bootstrap servers belong to."""

        def ask() -> str | NotYet:
            return self.brokers.metadata((), deadline).cluster_id or NotYet("the cluster has no id yet")

        return until_known(ask, deadline, "report its cluster id")

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """The smallest ``transaction.max.timeout.ms`` of all brokers; None if we may not read it.

        As it was at most ten seconds ago: a writer that opens many lanes asks once.
        """

        def ask() -> int | NotYet | None:
            found = []
            answer: Sequence[DescribedConfig]
            for answer in answers_of_all(
                self.brokers, lambda node: DescribeConfigs(ResourceType.BROKER, [str(node)], TIME_LIMIT), deadline
            ):
                for broker in answer:
                    if broker.error_code == Code.CLUSTER_AUTHORIZATION_FAILED:
                        return None
                    why = verdict(broker.error_code, "the broker's configuration", "DescribeConfigs on the cluster")
                    if why is not None:
                        return why
                    if (value := broker.values.get(TIME_LIMIT)) is not None:
                        found.append(int(value))
            return min(found)

        return self._lately(TIME_LIMIT, ask, deadline)

    def describe(self, kafka_ids: Collection[str], deadline: Deadline) -> Mapping[str, TransactionView]:
        """The coordinator's view of each id; an unknown id has the status ``NO_SUCH_ID``. Source: KIP-664."""

        def requests(ids: list[str]) -> Iterator[tuple[Request, list[str]]]:
            yield DescribeTransactions(ids), ids

        def read(
            _: list[str], answer: Sequence[DescribedTransaction]
        ) -> Iterator[tuple[str, TransactionView | NotYet]]:
            for described in answer:
                yield described.transactional_id, _view(described)

        return self._coordinators.ask(kafka_ids, requests, read, deadline, "describe the transactions")

    def end(
        self, transactions: Mapping[str, PreparedTxnState], *, committed: bool, deadline: Deadline, once: bool = False
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` for each Kafka id with its state's producer id and epoch, which stay valid.

        Without ``once`` a request may be sent more than once, because the first answer may get lost. A repetition is
        harmless unless a producer begins another transaction with that id and epoch. After `Unavailable` any of the
        transactions may have ended.
        """
        from dualwrite.kafka.kafka_python import end_shared  # noqa: PLC0415 - loads kafka-python, which no native writer needs

        named = {kafka_id: (state.producer_id, state.epoch) for kafka_id, state in transactions.items()}
        return self._ended(named, end_shared, deadline, committed=committed, once=once)

    def end_exactly(
        self, transactions: Mapping[str, tuple[int, int]], *, committed: bool, deadline: Deadline
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` v5 for each Kafka id with the producer id and epoch that name one transaction.

        Any process may do so under transaction version 2, and repeat it. After `Unavailable` any of the transactions may
        have ended. `ConfigurationError` also if a broker is older than 4.0. Source: KIP-890.
        """
        return self._ended(transactions, EndTxn, deadline, committed=committed)

    def _ended(
        self,
        transactions: Mapping[str, tuple[int, int]],
        make: Callable[..., Request | Message],
        deadline: Deadline,
        *,
        committed: bool,
        once: bool = False,
    ) -> Mapping[str, EndAnswer]:
        def requests(ids: list[str]) -> Iterator[tuple[Request | Message, list[str]]]:
            for kafka_id in ids:
                yield make(kafka_id, transactions[kafka_id], committed=committed), [kafka_id]

        def read(ids: list[str], response: Message) -> Iterator[tuple[str, EndAnswer | NotYet]]:
            [kafka_id] = ids
            code = response.error_code
            answer = _END_ANSWERS.get(code)
            yield kafka_id, answer or _retriable(code, f"the end of {kafka_id!r}", _write_right(kafka_id))

        return self._coordinators.ask(transactions, requests, read, deadline, "end the transactions", once=once)

    def transaction_version(self, deadline: Deadline, *, fresh: bool = False) -> int:
        """The cluster's finalized ``transaction.version``: from 2 on, every transaction has an epoch of its own (KIP-890).

        0 if the cluster has not finalized one. While it is being raised or lowered, the lowest of the brokers' answers, as they
        were at most ten seconds ago; ``fresh`` asks now.
        """

        def ask() -> int | NotYet:
            found: list[int] = []
            for code, levels in answers_of_all(self.brokers, lambda _: FinalizedFeatures(), deadline):
                why = verdict(code, "the versions of a broker", "Describe on the cluster")
                if why is not None:
                    return why
                found.append(levels.get(_TRANSACTION_VERSION, 0))
            return min(found)

        if fresh:
            self._noted.pop(_TRANSACTION_VERSION, None)
        return self._lately(_TRANSACTION_VERSION, ask, deadline) or 0

    def _lately(self, name: str, ask: Callable[[], int | NotYet | None], deadline: Deadline) -> int | None:
        """What all brokers have answered in the last ten seconds, or answer now."""
        noted_at, value = self._noted.get(name, (-_LATELY_S, None))
        if now_s() - noted_at < _LATELY_S:
            return value
        asked_at = now_s()
        value = until_known(ask, deadline, f"report its {name}")
        if value is not None:  # a right that is missing may be granted at any time
            self._noted[name] = asked_at, value
        return value

    def retire(
        self, kafka_ids: Collection[str], deadline: Deadline, *, timeouts_ms: Mapping[str, int] | None = None
    ) -> Mapping[str, tuple[int, int]]:
        """Repeat ``InitProducerId`` for each id until it succeeds: aborts what is ongoing and fences its producers.

        After `Unavailable` any of the ids may have been retired.
        """
        timeouts = dict.fromkeys(kafka_ids, _RETIRED_TIMEOUT_MS) | dict(timeouts_ms or {})

        def requests(ids: list[str]) -> Iterator[tuple[Request, list[str]]]:
            for kafka_id in ids:
                yield InitProducerId(kafka_id, timeouts[kafka_id]), [kafka_id]

        def read(ids: list[str], given: GivenProducerId) -> Iterator[tuple[str, tuple[int, int] | NotYet]]:
            [kafka_id] = ids
            code, producer_id, epoch = given
            if code == Code.INVALID_TRANSACTION_TIMEOUT:
                raise ConfigurationError(f"the broker's transaction.max.timeout.ms is below {timeouts[kafka_id]} ms")
            if code == Code.NONE:
                yield kafka_id, (producer_id, epoch)
            elif code in _OVERTAKEN:  # another process is retiring it at the same time
                yield kafka_id, NotYet(f"{kafka_id!r}: {code_name(code)}", moved=False)
            else:
                yield kafka_id, _retriable(code, f"retiring {kafka_id!r}", _write_right(kafka_id))

        return self._coordinators.ask(kafka_ids, requests, read, deadline, "retire the transactional ids")

    def add_partitions(
        self, transactions: Mapping[str, tuple[int, int, Collection[Partition]]], deadline: Deadline
    ) -> Mapping[str, bool]:
        """Send ``AddPartitionsToTxn`` for each Kafka id with producer id, epoch and partitions: begins a transaction.

        After `Unavailable` any of the partitions may have been added.
        """
        from dualwrite.kafka import kafka_python  # noqa: PLC0415 - loads kafka-python, which most writers do not need

        def requests(ids: list[str]) -> Iterator[tuple[Message, list[str]]]:
            for kafka_id in ids:
                producer_id, epoch, partitions = transactions[kafka_id]
                yield kafka_python.add_partitions(kafka_id, (producer_id, epoch), partitions), [kafka_id]

        def read(ids: list[str], response: Message) -> Iterator[tuple[str, bool | NotYet]]:
            [kafka_id] = ids
            errors = [
                (topic.name, partition.partition_error_code)
                for topic in response.results_by_topic_v3_and_below
                for partition in topic.results_by_partition
            ]
            # "Operation not attempted" only echoes another partition's error; that error may be worth a retry.
            others = [(topic, code) for topic, code in errors if code and code not in _NOT_ADDED]
            if others:
                topic, code = others[0]
                right = f"{_write_right(kafka_id)}; and Write on the topic {topic!r}"
                yield kafka_id, _retriable(code, f"ending {kafka_id!r} in partitions of {topic!r}", right)
            else:
                yield kafka_id, not any(code for _, code in errors)

        return self._coordinators.ask(transactions, requests, read, deadline, "add partitions to the transactions")

    def list_ids(self, prefix: str, deadline: Deadline) -> Sequence[str]:
        """All transactional ids with that prefix known to any coordinator, sorted; only those that we may describe.

        A broker may also list what it coordinates no more: :meth:`describe` asks the present coordinator.

        Requires Describe on the topic ``__transaction_state`` and on the transactional ids with the prefix
        ``dualwrite-probe.``. Without them nothing shows that the list is complete: then ids may be missing whose
        coordinator is changing, and a warning is logged.
        """
        from dualwrite.kafka.listing import list_transactions  # noqa: PLC0415 - writers list nothing

        listing = list_transactions(self.brokers, (), deadline)
        if not listing.is_complete:
            logger.warning(
                "transactional ids may be missing: nothing shows that all partitions of %s had a coordinator; let an "
                "administrator grant this user Describe on that topic, and on the transactional ids with the prefix %r",
                TRANSACTION_STATE,
                PROBES,
            )
        found = {state.transactional_id for state in listing.transactions}
        return sorted(kafka_id for kafka_id in found if kafka_id.startswith(prefix))

    def compacted(self, topics: Collection[str], deadline: Deadline) -> Collection[str]:
        """Those of the topics that are compacted. One whose settings we may not describe is left out. Asks once."""
        request = DescribeConfigs(ResourceType.TOPIC, topics, _CLEANUP)
        answer: Sequence[DescribedConfig] | NotYet
        [answer] = self.brokers.exchange([(self.brokers.nodes(deadline)[0], request)], deadline)
        if isinstance(answer, NotYet):
            raise Unavailable(f"the broker did not report the {_CLEANUP} of topics: {answer}")
        return {topic.resource_name for topic in answer if "compact" in (topic.values.get(_CLEANUP) or "")}

    def open_now(self, deadline: Deadline) -> Mapping[str, TransactionView]:
        """By Kafka id, every transaction of any program that has not ended in all its partitions, if we may describe it.

        All brokers list, and the present coordinator of each id then says whether it is open.
        """
        from dualwrite.kafka.listing import open_ids  # noqa: PLC0415 - as above

        listed = open_ids(self.brokers, deadline)
        views = self.describe(listed, deadline) if listed else {}
        return {kafka_id: view for kafka_id, view in views.items() if view.status in OPEN}

    def what_blocks(self, opened: Mapping[str, TransactionView], deadline: Deadline) -> OpenTransactions:
        """What open transactions block; see :func:`dualwrite.kafka.blocking.look_at_open`."""
        from dualwrite.kafka.blocking import look_at_open  # noqa: PLC0415 - writers look when something withholds, if at all

        return look_at_open(self.brokers, self._topics, opened, deadline)

    def longest_open_s(self, deadline: Deadline) -> float:
        """The age of the oldest open transaction of any id that we may describe, in seconds; 0 if none is open.

        The metric that KIP-939 proposes for brokers, ``ActiveTransactionOpenTimeMaxMs``.
        """
        started = [view.started_ms for view in self.open_now(deadline).values() if view.started_ms is not None]
        return max(0.0, time.time() - min(started) / 1000) if started else 0.0

    def topic_ids(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, str]:
        """The id of each topic as URL-safe base64. A topic that does not exist is missing from the result."""
        found = self._find_topics(topics, deadline)
        return {
            name: topic.topic_id for name, topic in found.items() if topic is not None and topic.topic_id is not None
        }

    def cluster_and_topics(self, topics: Collection[str], deadline: Deadline) -> tuple[str, Mapping[str, Topic]]:
        """The cluster's id, and each topic that exists, as they are now; in one request if there are topics."""
        found = self._find_topics(topics, deadline)
        cluster_id = self._topics.cluster_id if topics else None
        return cluster_id or self.cluster_id(deadline), {
            name: topic for name, topic in found.items() if topic is not None
        }

    def may_write_as(self, kafka_id: str, deadline: Deadline) -> bool:
        """Whether this user may write under a transactional id that nobody uses. True if the brokers do not tell it.

        No request lists such rights. So a broker, which need not be the id's coordinator, is asked to end its transaction: it
        looks at the rights first, and finds nothing to end.
        """

        def ask() -> bool:
            ended: TransactionEnded = self.brokers.lookup(lambda: EndTxn(kafka_id, (0, 0), committed=False), deadline)
            return ended.error_code != Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED

        try:
            return until_known(ask, deadline, "tell the rights on transactional ids")
        except ConfigurationError as error:
            if isinstance(error.__cause__, NotOffered):  # by brokers before 4.0
                return True
            raise

    def open_offsets(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[Partition, int | None]]:
        """For each state, by (topic, partition) of its evidence, where its producer's open transaction began."""
        places = [
            [Place(first.topic, first.partition, first.topic_id) for first in state.first_offsets] for state in states
        ]
        every = {place for of_state in places for place in of_state}
        shown = open_offsets(self.brokers, self._topics, every, deadline, fresh=True)
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
        """The offset at which a producer's open transaction began in each partition; None where it has nothing open."""
        places = [Place(topic, partition) for topic, partition in partitions]
        shown = open_offsets(self.brokers, self._topics, places, deadline, fresh=False)
        return {place.key: (shown[place] or {}).get((producer_id, epoch)) for place in places}

    def sequences(
        self, producer_id: int, epoch: int, firsts: Mapping[Partition, int], deadline: Deadline
    ) -> Mapping[Partition, tuple[int, int] | None]:
        """Sequence numbers of a producer's open transaction; see :func:`dualwrite.kafka.log.spans`."""
        from dualwrite.kafka import log  # noqa: PLC0415 - most writers read no log

        return log.spans(self.brokers, self._topics, (producer_id, epoch), firsts, deadline)

    def still_open(
        self, suspects: Sequence[tuple[int, Collection[Partition]]], deadline: Deadline
    ) -> Sequence[Mapping[Partition, int]]:
        """For each producer id with its partitions: those in which it has a transaction open, and where that began."""
        places = {Place(*key) for _, partitions in suspects for key in partitions}
        shown = open_offsets(self.brokers, self._topics, places, deadline, fresh=True)
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

        Looks also in every partition of the topics that the state names: an undecided transaction whose marker was
        forgotten is named nowhere else. A partition of a topic that no broker knows any more shows nothing; nor does one of
        a new topic, where the state names the old one's id.
        """
        ids = [state.topic_ids for state, _ in asked]
        found = self._find_topics({topic for of_state in ids for topic in of_state}, deadline)
        in_topics = {
            topic: frozenset((topic, number) for number in known.leaders) for topic, known in found.items() if known
        }
        places = {
            Place(*key, topic_id=of_state.get(key[0]))
            for (_, partitions), of_state in zip(asked, ids, strict=True)
            for key in frozenset(partitions).union(*(in_topics.get(topic, ()) for topic in of_state))
        }
        shown = producers(self.brokers, self._topics, places, deadline, fresh=False)
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
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[Partition, ShownProducer | None]]:
        """By partition of each state, its producer as the leader shows it now. Asks once, without retrying.

        After a native transaction of epoch E, an epoch above E with nothing open shows that it has ended there.
        """
        named = [(state, state.topic_ids) for state in states]
        places = [{key: Place(*key, topic_id=ids[key[0]]) for key in sorted(state.partitions)} for state, ids in named]
        shown = _producers_now(
            self.brokers, self._topics, {place for one in places for place in one.values()}, deadline, fresh=False
        )
        # A new topic may have taken the place of the known one.
        doubtful = {
            place
            for state, of_state in zip(states, places, strict=True)
            for place in of_state.values()
            if place in shown and state.producer_id not in (shown[place] or {})
        }
        if doubtful:
            again = _producers_now(self.brokers, self._topics, doubtful, deadline, fresh=True)
            shown = {place: there for place, there in shown.items() if place not in doubtful} | again
        for state, of_state in zip(states, places, strict=True):
            for first in state.first_offsets:
                there = shown.get(of_state[first.topic, first.partition]) or {}
                starts = [start for producer_id, (_, start) in there.items() if producer_id != state.producer_id]
                stable = min((start for start in starts if start is not None), default=first.offset)
                self._held_back.note(Place(first.topic, first.partition), stable, upto=first.offset)
        return [
            {key: _shown(shown[place], state.producer_id) for key, place in of_state.items() if place in shown}
            for state, of_state in zip(states, places, strict=True)
        ]

    def post_question(self, native: States, shared: States) -> PostedQuestion | None:
        """For a coordinator of ``one_thread``."""
        assert self._posting is not None
        question = PostedQuestion(self._posting, self._topics, native, shared)
        return question if question.is_sent else None

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """Prove the outcome of each state's transaction from the log; see :func:`dualwrite.kafka.log.prove`."""
        from dualwrite.kafka import log  # noqa: PLC0415 - as above

        return log.prove(self.brokers, self._topics, states, deadline)

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[Partition, LogProof | None]]:
        """Read, without retrying, what each partition's log proves; see :func:`dualwrite.kafka.log.prove_now`."""
        from dualwrite.kafka import log  # noqa: PLC0415 - as above

        return log.prove_now(self.brokers, self._topics, states, deadline, read_on=read_on, held_back=self._held_back)

    def blocking(
        self, partitions: Collection[Partition], deadline: Deadline, *, open_for_s: float
    ) -> Sequence[BlockingTransaction]:
        """Transactions that hold back readers; see :func:`~dualwrite.kafka.blocking.find_blocking`."""
        from dualwrite.kafka.blocking import find_blocking  # noqa: PLC0415 - as above
        from dualwrite.kafka.listing import ids_of  # noqa: PLC0415 - as above

        return find_blocking(
            [Place(*key) for key in partitions],
            open_in=lambda places: open_offsets(self.brokers, self._topics, places, deadline, fresh=True),
            ids_of=lambda producer_ids: ids_of(self.brokers, producer_ids, deadline),
            describe=lambda kafka_ids: self.describe(kafka_ids, deadline),
            open_for_s=open_for_s,
        )

    def newly_held_back(self, deadline: Deadline) -> Sequence[BlockingTransaction]:
        """Transactions seen to hold back readers for some seconds, when asking how others ended. Each is reported once."""
        due = self._held_back.due()
        if not due:
            return ()
        found = self.blocking([place.key for place in due], deadline, open_for_s=HELD_BACK_S)
        return [one for one in found if one.first_offset == due[Place(one.topic, one.partition)]]

    def partitions_of(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, int]:
        """The number of partitions of each topic. A topic that does not exist is missing from the result."""
        found = self._find_topics(topics, deadline)
        return {name: len(topic.leaders) for name, topic in found.items() if topic is not None}

    def later_commits(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[Later]:
        """Each producer's commits after its state, from the logs; see :func:`dualwrite.kafka.log.later_commits`."""
        from dualwrite.kafka import log  # noqa: PLC0415 - as above

        return log.later_commits(self.brokers, self._topics, states, deadline)

    def _find_topics(self, topics: Collection[str], deadline: Deadline) -> dict[str, Topic | None]:
        return until_answered(
            topics, lambda pending: self._topics.find(pending, deadline, fresh=True), deadline, "describe the topics"
        )


# Requests that end transactions from outside, and the meaning of their answers. Each may be sent more than once.

# The timeout of a retired id: nothing is ever written under it, and every broker allows this value.
_RETIRED_TIMEOUT_MS: Final = 1000
_END_ANSWERS: Final[Mapping[int, EndAnswer]] = {
    Code.NONE: EndAnswer.ENDED,
    Code.CONCURRENT_TRANSACTIONS: EndAnswer.IN_PROGRESS,
    Code.INVALID_PRODUCER_EPOCH: EndAnswer.FENCED,
    Code.PRODUCER_FENCED: EndAnswer.FENCED,
    Code.INVALID_PRODUCER_ID_MAPPING: EndAnswer.NO_SUCH_ID,
    Code.TRANSACTIONAL_ID_NOT_FOUND: EndAnswer.NO_SUCH_ID,
    Code.INVALID_TXN_STATE: EndAnswer.INVALID_STATE,
}
_OVERTAKEN: Final[frozenset[int]] = frozenset({Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED})
_NOT_ADDED: Final[frozenset[int]] = _OVERTAKEN | {
    Code.INVALID_PRODUCER_ID_MAPPING,
    Code.UNKNOWN_TOPIC_OR_PARTITION,
    Code.OPERATION_NOT_ATTEMPTED,
}


def _retriable(error_code: int, subject: str, right: str) -> NotYet:
    why = verdict(error_code, subject, right)
    assert why is not None, "answers without an error are handled by the caller"
    return why


def _write_right(kafka_id: str) -> str:
    return f"Write on the transactional id {kafka_id!r}, or on a prefix of it"


# Questions about native transactions (transaction version 2): whether the cluster has them, and where they are open.

_TRANSACTION_VERSION: Final = "transaction.version"
_LATELY_S: Final = 10.0
"""Lanes live longer than that under what was true when they opened, so it need not be newer."""


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


# Describes transactions, as their coordinators see them, and the cluster: its id and its limit of transaction timeouts.

_CLEANUP: Final = "cleanup.policy"

_STATUS: Final = {status.value: status for status in TransactionStatus if status is not TransactionStatus.NO_SUCH_ID}


def _view(described: DescribedTransaction) -> TransactionView | NotYet:
    kafka_id, begun_ms = described.transactional_id, described.start_time_ms
    if described.error_code == Code.TRANSACTIONAL_ID_NOT_FOUND:
        return TransactionView(TransactionStatus.NO_SUCH_ID)
    why = verdict(described.error_code, f"describing {kafka_id!r}", right_to_look(kafka_id))
    if why is not None:
        return why
    status = _STATUS.get(described.state)
    if status is None:
        return NotYet(f"{kafka_id!r} is in the unknown state {described.state!r}", moved=False)
    return TransactionView(
        status=status,
        producer_id=described.producer_id,
        epoch=described.producer_epoch,
        started_ms=begun_ms if status in OPEN else None,
        timeout_ms=described.timeout_ms,
        partitions=tuple(described.partitions),
        newest_started_ms=begun_ms if begun_ms >= 0 else None,
    )


# The settings by which any client of librdkafka reaches the brokers, taken from the dictionary of a writer.


def connection_settings(kafka: Mapping[str, object]) -> dict[str, object]:
    """The settings by which any client of librdkafka reaches the brokers."""
    reaching = CONNECTING | KERBEROS_TICKETS
    return {key: value for key, value in KafkaConfig.parse(kafka).librdkafka().items() if key in reaching}
