"""The port to Kafka."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dualwrite.errors import IllegalStateError

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.protocol.lost_decisions import Later
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import EndAnswer, LogProof, OpenTransaction, ShownProducer, TransactionView


class TransactionCoordinator(Protocol):
    """Kafka's coordinator and log, as seen by a client other than the producer. Every call may be repeated."""

    def cluster_id(self, deadline: Deadline) -> str:
        """The id of the cluster that the bootstrap servers belong to."""
        ...

    def max_transaction_timeout_ms(self, deadline: Deadline) -> int | None:
        """The broker's ``transaction.max.timeout.ms``; None if we may not read it."""
        ...

    def describe(self, kafka_ids: Collection[str], deadline: Deadline) -> Mapping[str, TransactionView]:
        """The coordinator's view of each id; an unknown id has the status ``NO_SUCH_ID``."""
        ...

    def list_ids(self, prefix: str, deadline: Deadline) -> Sequence[str]:
        """All transactional ids with that prefix that any coordinator knows."""
        ...

    def open_offsets(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int | None]]:
        """For each state, by (topic, partition) of its evidence, where its producer's open transaction began there.

        Asks the current leaders (``DescribeProducers``). None where that producer has nothing open. A partition that certainly
        no longer exists is left out: its topic was deleted, perhaps recreated with another id.
        """
        ...

    def producer_open_offsets(
        self, producer_id: int, epoch: int, partitions: Collection[tuple[str, int]], deadline: Deadline
    ) -> Mapping[tuple[str, int], int | None]:
        """Where the open transaction of a producer began in each (topic, partition); None where it has nothing open.

        Asks the current leaders (``DescribeProducers``).
        """
        ...

    def sequences(
        self, producer_id: int, epoch: int, firsts: Mapping[tuple[str, int], int], deadline: Deadline
    ) -> Mapping[tuple[str, int], tuple[int, int] | None]:
        """By (topic, partition), the sequence numbers of a producer's record at that offset and of its newest record there.

        None where the partition does not hold that record, or no newest one of that epoch is known.
        """
        ...

    def still_open(
        self, suspects: Sequence[tuple[int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], int]]:
        """For each producer id with (topic, partition) pairs: those in which it has a transaction open, and where that began.

        Transactions of every epoch count. Waits for leaders, then asks them (``DescribeProducers``).
        """
        ...

    def end(
        self, transactions: Mapping[str, PreparedTxnState], *, committed: bool, deadline: Deadline, once: bool = False
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` for each Kafka id with its state's producer id and epoch. A request may be sent more than once.

        With ``once`` it is not: an id whose one request was not answered is missing from the answer.
        """
        ...

    def retire(
        self, kafka_ids: Collection[str], deadline: Deadline, *, timeouts_ms: Mapping[str, int] | None = None
    ) -> Mapping[str, tuple[int, int]]:
        """Send ``InitProducerId`` for each id until it succeeds: aborts what is ongoing and fences every producer of the id.

        Args:
            kafka_ids: The ids.
            deadline: Limits the whole call.
            timeouts_ms: The transaction timeout for ids under which something must still be ended; others get a short one.

        Returns:
            By id, its new producer id and epoch.
        """
        ...

    def add_partitions(
        self, transactions: Mapping[str, tuple[int, int, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Mapping[str, bool]:
        """Send ``AddPartitionsToTxn`` for each Kafka id with producer id, epoch and partitions: begins a transaction there.

        Returns:
            By id, whether they were added; False if the id has another producer id or epoch, or a partition is gone.
        """
        ...

    def prove(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[LogProof]:
        """The log's proof of the outcome of each state's transaction."""
        ...

    def prove_now(
        self, states: Sequence[PreparedTxnState], deadline: Deadline, *, read_on: bool
    ) -> Sequence[Mapping[tuple[str, int], LogProof | None]]:
        """For each state, the present proof of the log of each (topic, partition). Does not wait for markers or leaders.

        None for a partition that certainly no longer exists. Partitions whose leader does not answer are missing.

        Args:
            states: The transactions.
            deadline: Limits the whole call.
            read_on: Whether to read on, which may take long, where something is open before a transaction. Otherwise the proof
                is ``OPEN`` there.
        """
        ...

    def later_commits(self, states: Sequence[PreparedTxnState], deadline: Deadline) -> Sequence[Later]:
        """For each state, the later activity of its producer in the logs of its partitions."""
        ...

    def topic_ids(self, topics: Collection[str], deadline: Deadline) -> Mapping[str, str]:
        """The id of each topic as URL-safe base64. A topic that does not exist is missing from the answer."""
        ...

    def close(self) -> None:
        """Close the connections. May be called more than once."""
        ...


@runtime_checkable
class NativeCoordinator(TransactionCoordinator, Protocol):
    """A coordinator that can end transactions of the native engine (transaction version 2), which have an epoch each."""

    def end_exactly(
        self, transactions: Mapping[str, tuple[int, int]], *, committed: bool, deadline: Deadline
    ) -> Mapping[str, EndAnswer]:
        """Send ``EndTxn`` for each Kafka id with the producer id and epoch that name one transaction. May be repeated."""
        ...

    def open_transactions(
        self, asked: Sequence[tuple[PreparedTxnState, Collection[tuple[str, int]]]], deadline: Deadline
    ) -> Sequence[Sequence[OpenTransaction]]:
        """For each state with further (topic, partition) pairs: the transactions that its producer has open.

        Looks in these, and in every partition of the topics that the state names. Transactions of every epoch count. Waits for
        leaders, then asks them (``DescribeProducers``).
        """
        ...

    def producer_epochs(
        self, states: Sequence[PreparedTxnState], deadline: Deadline
    ) -> Sequence[Mapping[tuple[str, int], ShownProducer | None]]:
        """For each state, by (topic, partition), its producer as the leader shows it now. Does not wait for leaders.

        None for a partition that certainly no longer exists. Partitions whose leader does not answer are missing.
        """
        ...

    def transaction_version(self, deadline: Deadline) -> int:
        """The cluster's finalized ``transaction.version``; 0 if it has none."""
        ...


def native_of(coordinator: TransactionCoordinator) -> NativeCoordinator:
    """The coordinator, if it can end native transactions.

    Raises:
        IllegalStateError: It cannot.
    """
    if not isinstance(coordinator, NativeCoordinator):
        raise IllegalStateError("this coordinator cannot end transactions of the native engine")
    return coordinator
