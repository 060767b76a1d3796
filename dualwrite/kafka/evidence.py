"""The evidence of a prepared transaction: the first offset that it wrote in every partition."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dualwrite.deadline import Deadline, now_s
from dualwrite.errors import Fenced, TransactionAborted
from dualwrite.kafka.deliveries import Deliveries
from dualwrite.observations import TransactionStatus, TransactionView
from dualwrite.ports import TransactionCoordinator
from dualwrite.prepared_state import FirstOffset, PreparedTxnState

_TOPIC_ID_LIFE_S = 10.0
_OLD_S = 1.0
"""From this age on a request to the coordinator, for the start time, no longer shows in a transaction's latency."""


class Evidence:
    """Makes the prepared states of one producer.

    Small transactions have their first offsets from the delivery reports. Where only failures are reported (bulk), where
    nothing but consumer offsets was written, or where librdkafka could not tell an offset, the partitions are asked.

    Args:
        coordinator: The coordinator.
        kafka_id: The transactional id.
        incarnation: Stamped in the states.
    """

    def __init__(self, coordinator: TransactionCoordinator, kafka_id: str, incarnation: int | None) -> None:
        self._coordinator = coordinator
        self._kafka_id = kafka_id
        self._incarnation = incarnation
        self._topic_ids = _TopicIds(coordinator)
        self.ids: tuple[int, int] | None = None

    def learn_ids(self, deadline: Deadline) -> tuple[int, int]:
        """Ask for producer id and epoch. All transactions share them until an abort, which may raise the epoch."""
        return self._take_ids(self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id])

    def state_of(self, deliveries: Deliveries, *, bulk: bool, age_s: float, deadline: Deadline) -> PreparedTxnState:
        """The state of a transaction that wrote something, all of it delivered.

        Args:
            deliveries: What was delivered.
            bulk: Whether the deliveries hold no offsets.
            age_s: How long the transaction has been open.
            deadline: Until when to ask.

        Raises:
            TransactionAborted: The broker has ended the transaction, or shows nothing of it.
            Fenced: The coordinator shows another producer.
            Unavailable: No answer in time.
        """
        offsets = {
            key: first for key, first in deliveries.first_offsets.items() if key not in deliveries.without_offset
        }
        to_ask: Collection[tuple[str, int]] = deliveries.without_offset
        started_ms = None
        nothing_reported = bulk or not (offsets or to_ask)
        if nothing_reported or self.ids is None or age_s > _OLD_S:
            view = self._open_view(deadline)
            started_ms = view.started_ms
            if nothing_reported:
                to_ask = view.partitions
        assert self.ids is not None
        if to_ask:
            offsets.update(self._ask_partitions(to_ask, self.ids, deadline))
        if not offsets:
            raise TransactionAborted("no partition shows anything of the transaction", transactional_id=self._kafka_id)
        topic_ids = self._topic_ids.of(offsets, deadline)
        firsts = tuple(
            FirstOffset(topic, part, first, topic_ids.get(topic)) for (topic, part), first in offsets.items()
        )
        return PreparedTxnState(*self.ids, self._incarnation, firsts, started_ms)

    def _open_view(self, deadline: Deadline) -> TransactionView:
        view = self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id]
        if view.status is not TransactionStatus.ONGOING:
            raise TransactionAborted(
                f"the coordinator shows {view.status.value} instead of an open transaction: it timed out, or was aborted by "
                "somebody else",
                transactional_id=self._kafka_id,
            )
        self._take_ids(view)
        return view

    def _take_ids(self, view: TransactionView) -> tuple[int, int]:
        ids = (view.producer_id, view.epoch)
        if self.ids is not None and self.ids != ids:
            raise Fenced(
                f"the coordinator shows producer {ids[0]}:{ids[1]}, ours is {self.ids[0]}:{self.ids[1]}",
                transactional_id=self._kafka_id,
            )
        self.ids = ids
        return ids

    def _ask_partitions(
        self, partitions: Collection[tuple[str, int]], ids: tuple[int, int], deadline: Deadline
    ) -> Mapping[tuple[str, int], int]:
        answer = self._coordinator.producer_open_offsets(*ids, partitions, deadline)
        return {key: first for key, first in answer.items() if first is not None}


class _TopicIds:
    """Topic ids, asked again after ten seconds or when a partition's offsets have gone back: then it is a new topic."""

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
