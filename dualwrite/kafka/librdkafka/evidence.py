"""The evidence of a prepared transaction: its first offset in every partition that it wrote to."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import ConfigurationError, DualWriteError, TransactionAborted
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
from dualwrite.kafka.engine import OLD_S
from dualwrite.kafka.failures import ended_by_hand, not_open, other_producer
from dualwrite.kafka.librdkafka.evidence__kafka_producer_librdkafka_sequences import Sequences
from dualwrite.protocol.known_end import Ended
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import TransactionStatus, TransactionView
from dualwrite.protocol.values__protocol_identity import OFFSETS_TOPIC

if TYPE_CHECKING:
    from dualwrite.kafka.librdkafka.evidence__kafka_producer_librdkafka_doubt import OpenTransaction

logger = logging.getLogger("dualwrite.kafka.producer")

_TOPIC_ID_LIFE_S: Final = 10.0
_ASK_S: Final = 2.0
"""Limits the requests before an abort: an abort must not wait for a broker that is down."""


class Evidence:
    """Makes the prepared states of one producer.

    Small transactions take their first offsets from the delivery reports. The partitions are asked where only failures
    are reported (bulk), where a transaction wrote only consumer offsets, or where librdkafka did not know an offset.

    Args:
        coordinator: The coordinator.
        kafka_id: The transactional id.
        incarnation: Stamped into the states.
    """

    def __init__(self, coordinator: TransactionCoordinator, kafka_id: str, incarnation: int | None) -> None:
        self._coordinator = coordinator
        self._kafka_id = kafka_id
        self._incarnation = incarnation
        self._topic_ids = _TopicIds(coordinator)
        self._may_read_groups = True
        self._sequences = Sequences()
        self.ids: tuple[int, int] | None = None

    def learn_ids(self, deadline: Deadline) -> tuple[int, int]:
        """Ask for the producer id and epoch. All transactions share them until an abort, which may raise the epoch."""
        return self._take_ids(self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id])

    def state_of(
        self, transaction: OpenTransaction, *, bulk: bool, age_s: float, deadline: Deadline
    ) -> PreparedTxnState:
        """The state of a transaction that wrote something, all of it delivered.

        Args:
            transaction: The transaction.
            bulk: Whether the deliveries hold no offsets.
            age_s: Seconds that the transaction has been open.
            deadline: Limits the requests.

        Raises:
            TransactionAborted: The broker ended the transaction, or shows nothing of it.
            Fenced: The coordinator shows another producer.
            Unavailable: No answer in time.
        """
        deliveries = transaction.deliveries
        offsets = {
            key: first for key, first in deliveries.first_offsets.items() if key not in deliveries.without_offset
        }
        to_ask: Collection[tuple[str, int]] = deliveries.without_offset
        started_ms = None
        nothing_reported = bulk or not (offsets or to_ask)
        if nothing_reported or self.ids is None or age_s > OLD_S or transaction.sent_offsets:
            view = self._open_view(deadline)
            started_ms = view.started_ms
            if nothing_reported:
                to_ask = view.partitions
            elif transaction.sent_offsets:
                groups = [key for key in view.partitions if key[0] == OFFSETS_TOPIC]
                offsets.update(self._ask_about_groups(groups, deadline))
        assert self.ids is not None
        if age_s > OLD_S and not nothing_reported:
            self._require_open(offsets, self.ids, deadline)
        if to_ask:
            offsets.update(self._ask_partitions(to_ask, self.ids, deadline))
        if bulk:
            self._require_no_gap(offsets, self.ids, deadline)
        if not offsets:
            raise TransactionAborted("no partition shows anything of the transaction", transactional_id=self._kafka_id)
        return replace(self._named(offsets, self.ids, deadline), started_ms=started_ms)

    def ended(
        self, transaction: OpenTransaction, state: PreparedTxnState | None, *, bulk: bool, deadline: Deadline
    ) -> Ended:
        """Describe a transaction that is about to be aborted, as completely as possible.

        Args:
            transaction: The transaction.
            state: Its state, if it is prepared.
            bulk: Whether the deliveries hold no offsets.
            deadline: Limits the requests.
        """
        deliveries = transaction.deliveries
        if state is not None and state.has_transaction:
            return Ended(state, committed=False)
        deadline = Deadline(min(_ASK_S, deadline.remaining_s()))
        try:
            if not deliveries.failed:
                return Ended(self.state_of(transaction, bulk=bulk, age_s=0.0, deadline=deadline), committed=False)
            self._sequences.forget()
            # Failed messages may be in the log. None arrives later: librdkafka raises the epoch before it continues.
            view = self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id]
            ids = self._take_ids(view)
            written = deliveries.partitions.union(view.partitions)
            shown = self._coordinator.producer_open_offsets(*ids, written, deadline)
            firsts = {key: first for key, first in shown.items() if first is not None}
            return Ended(self._named(firsts, ids, deadline), committed=False)
        except DualWriteError as error:
            logger.info("%s: aborting a transaction that is only partly known: %s", self._kafka_id, error)
            self._sequences.forget()
            seen = tuple(FirstOffset(*key, first) for key, first in deliveries.first_offsets.items())
            state = PreparedTxnState(*(self.ids or (0, 0)), self._incarnation, seen)
            return Ended(state, committed=False, complete=False)

    def require_open(self, state: PreparedTxnState, deadline: Deadline) -> None:
        """Check that a prepared transaction is still open everywhere.

        Raises:
            TransactionAborted: The broker or an operator ended it.
            Fenced: The coordinator shows another producer.
            Unavailable: No answer in time.
        """
        self._open_view(deadline)
        offsets = {(first.topic, first.partition): first.offset for first in state.first_offsets}
        self._require_open(offsets, (state.producer_id, state.epoch), deadline)

    def _require_open(self, offsets: Mapping[tuple[str, int], int], ids: tuple[int, int], deadline: Deadline) -> None:
        """Ask the leaders: the coordinator does not show that an operator's tool ended it in one partition."""
        if not offsets:
            return
        shown = self._coordinator.producer_open_offsets(*ids, offsets, deadline)
        for (topic, partition), first in offsets.items():
            if shown[topic, partition] != first:
                raise ended_by_hand((topic, partition), transactional_id=self._kafka_id)

    def _require_no_gap(self, offsets: Mapping[tuple[str, int], int], ids: tuple[int, int], deadline: Deadline) -> None:
        """Check that each partition's first record is the transaction's first, not the first after an operator's marker."""
        numbered = {key: first for key, first in offsets.items() if key[0] != OFFSETS_TOPIC}
        gap = self._sequences.take(ids, self._coordinator.sequences(*ids, numbered, deadline))
        if gap is not None:
            raise ended_by_hand(gap, transactional_id=self._kafka_id)

    def _named(
        self, offsets: Mapping[tuple[str, int], int], ids: tuple[int, int], deadline: Deadline
    ) -> PreparedTxnState:
        topic_ids = self._topic_ids.of(offsets, deadline)
        firsts = tuple(
            FirstOffset(topic, part, first, topic_ids.get(topic)) for (topic, part), first in offsets.items()
        )
        return PreparedTxnState(*ids, self._incarnation, firsts)

    def _open_view(self, deadline: Deadline) -> TransactionView:
        view = self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id]
        if view.status is not TransactionStatus.ONGOING:
            raise not_open(view.status, transactional_id=self._kafka_id)
        self._take_ids(view)
        return view

    def _take_ids(self, view: TransactionView) -> tuple[int, int]:
        ids = (view.producer_id, view.epoch)
        if self.ids is not None and self.ids != ids:
            raise other_producer(ids, self.ids, transactional_id=self._kafka_id)
        self.ids = ids
        return ids

    def _ask_partitions(
        self, partitions: Collection[tuple[str, int]], ids: tuple[int, int], deadline: Deadline
    ) -> Mapping[tuple[str, int], int]:
        answer = self._coordinator.producer_open_offsets(*ids, partitions, deadline)
        for key, first in answer.items():
            if first is None and key[0] != OFFSETS_TOPIC:
                raise ended_by_hand(key, transactional_id=self._kafka_id)
        return {key: first for key, first in answer.items() if first is not None}

    def _ask_about_groups(
        self, partitions: Collection[tuple[str, int]], deadline: Deadline
    ) -> Mapping[tuple[str, int], int]:
        """The first offsets of consumed offsets. Without the right to read them, one left open there goes unnoticed."""
        assert self.ids is not None
        if not self._may_read_groups:
            return {}
        try:
            return self._ask_partitions(partitions, self.ids, deadline)
        except ConfigurationError as error:
            self._may_read_groups = False
            logger.warning("%s: cannot check whether its consumed offsets have ended: %s", self._kafka_id, error)
            return {}


class _TopicIds:
    """Topic ids, refreshed after ten seconds, or when a partition's offsets go back, which shows a new topic."""

    def __init__(self, coordinator: TransactionCoordinator) -> None:
        self._coordinator = coordinator
        self._known: dict[str, tuple[str | None, float]] = {}
        self._newest: dict[tuple[str, int], int] = {}

    def of(self, offsets: Mapping[tuple[str, int], int], deadline: Deadline) -> Mapping[str, str | None]:
        now = now_s()
        for (topic, partition), first in offsets.items():
            if first <= self._newest.get((topic, partition), -1):
                self._known.pop(topic, None)
            self._newest[(topic, partition)] = first
        topics = {topic for topic, _ in offsets}
        stale = [topic for topic in topics if now > self._known.get(topic, (None, 0.0))[1]]
        if stale:
            ids = self._coordinator.topic_ids(stale, deadline)
            self._known.update({topic: (ids.get(topic), now + _TOPIC_ID_LIFE_S) for topic in stale})
        return {topic: self._known[topic][0] for topic in topics}
