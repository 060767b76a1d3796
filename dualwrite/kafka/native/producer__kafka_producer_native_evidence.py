"""The evidence of a native transaction: the state that names it, and whether its brokers still show it open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualwrite.errors import ConfigurationError, DualWriteError
from dualwrite.kafka.engine import IdLogger, Transaction
from dualwrite.kafka.failures import ended_by_hand, not_open, other_producer
from dualwrite.kafka.native.producer__kafka_producer_native_deliveries import Deliveries
from dualwrite.protocol.known_end import Ended
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import TransactionStatus
from dualwrite.protocol.values__protocol_identity import OFFSETS_TOPIC

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
    from dualwrite.kafka.native.produce_state import Partition, ProduceCore


class OpenTransaction(Transaction):
    """The current transaction, with its messages on their way.

    Attributes:
        offsets_in: The partitions that hold its consumers' groups, as far as we may describe that topic.
        late_offsets: Whether consumed offsets may still be on their way there.
    """

    deliveries: Deliveries

    def __init__(self, core: ProduceCore) -> None:
        super().__init__(Deliveries())
        self.core = core
        self.offsets_in: set[Partition] = set()
        self.late_offsets = False

    @property
    def sent_to(self) -> frozenset[Partition]:
        """The partitions that a batch or consumed offsets were sent to."""
        return self.core.sent_to | self.offsets_in

    @property
    def first_offsets(self) -> dict[Partition, int | None]:
        """Its first offset in each partition, as far as answers have named it or may still come."""
        late: dict[Partition, int | None] = dict.fromkeys(self.offsets_in) if self.late_offsets else {}
        return late | dict(self.core.first_offsets)


class Evidence:
    """Makes the states of one producer's transactions, and looks whether they are open.

    Args:
        transactional_id: Kafka's ``transactional.id``.
        coordinator: Shows which transaction is open.
        incarnation: Stamped into the states.
    """

    def __init__(self, transactional_id: str, coordinator: TransactionCoordinator, incarnation: int | None) -> None:
        self._id = transactional_id
        self._coordinator = coordinator
        self._incarnation = incarnation
        self._may_read_groups = True
        self._log = IdLogger(transactional_id)

    def state(
        self,
        transaction: OpenTransaction,
        ids: tuple[int, int],
        topic_ids: Mapping[str, str],
        deadline: Deadline,
    ) -> PreparedTxnState:
        """The state of a transaction, with every partition that it was sent to.

        Args:
            transaction: The transaction.
            ids: Its producer id and epoch.
            topic_ids: The ids of the topics that it was sent to, as far as they are known.
            deadline: Limits the requests.

        Raises:
            DualWriteError: As the coordinator's methods.
        """
        offsets = transaction.first_offsets
        known = dict(topic_ids)
        if transaction.sent_offsets:
            of_groups = self._groups_offsets(ids, deadline)
            offsets.update(of_groups)
            if of_groups:
                known.update(self._coordinator.topic_ids([OFFSETS_TOPIC], deadline))
        if not offsets and not transaction.sent_offsets:
            return PreparedTxnState()
        return PreparedTxnState.native(*ids, self._incarnation, offsets, known)

    def _groups_offsets(self, ids: tuple[int, int], deadline: Deadline) -> Mapping[Partition, int | None]:
        """Where consumed offsets were written. Without the right to read that topic, what is left open there goes unnoticed."""
        if not self._may_read_groups:
            return {}
        view = self._coordinator.describe([self._id], deadline)[self._id]
        written = [key for key in view.partitions if key[0] == OFFSETS_TOPIC]
        try:
            return self._coordinator.producer_open_offsets(*ids, written, deadline)
        except ConfigurationError as error:
            self._may_read_groups = False
            self._log.warning("cannot check whether its consumed offsets have ended: %s", error)
            return {}

    def require_open(self, state: PreparedTxnState, deadline: Deadline) -> None:
        """Ask the coordinator, then the leaders: it does not show that an operator's tool ended it in one partition.

        Raises:
            TransactionAborted: The broker or an operator ended it.
            Fenced: The coordinator shows another producer.
            Unavailable: No answer in time.
        """
        view = self._coordinator.describe([self._id], deadline)[self._id]
        if view.producer_id != state.producer_id or view.epoch > state.epoch + 1:
            shown = (view.producer_id, view.epoch)
            raise other_producer(shown, (state.producer_id, state.epoch), transactional_id=self._id)
        if view.status is not TransactionStatus.ONGOING or view.epoch != state.epoch:
            raise not_open(view.status, transactional_id=self._id)
        firsts = {(first.topic, first.partition): first.offset for first in state.first_offsets}
        found = self._coordinator.producer_open_offsets(state.producer_id, state.epoch, state.partitions, deadline)
        for partition in sorted(found):
            start = found[partition]
            # It begins after its first message where a tool ended it in between.
            if start is None or start > firsts.get(partition, start):
                raise ended_by_hand(partition, transactional_id=self._id)

    def given_up(
        self,
        transaction: OpenTransaction,
        ids: tuple[int, int],
        topic_ids: Mapping[str, str],
        deadline: Deadline,
        *,
        prepared: PreparedTxnState | None,
    ) -> Ended:
        """A transaction that is about to be aborted. Where a late copy of a request may come, it is not known completely.

        Args:
            transaction: The transaction.
            ids: Its producer id and epoch.
            topic_ids: As for :meth:`state`.
            deadline: Limits the requests.
            prepared: Its state, if it is prepared.
        """
        complete = not transaction.core.late and not transaction.late_offsets
        if prepared is not None:
            return Ended(prepared, committed=False, complete=complete)
        try:
            state = self.state(transaction, ids, topic_ids, deadline)
            return Ended(state, committed=False, complete=complete)
        except DualWriteError as error:
            self._log.info("aborting a transaction that is only partly known: %s", error)
            state = PreparedTxnState.native(*ids, self._incarnation, transaction.first_offsets, topic_ids)
            return Ended(state, committed=False, complete=False)
