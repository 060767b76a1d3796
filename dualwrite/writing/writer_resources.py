"""What a writer has while it is open: connections to its servers, and its lanes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import (
    Fenced,
    IllegalStateError,
    Unavailable,
)
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.kafka.transaction_ends import EndQuestions, look_again
from dualwrite.protocol.values import DEFAULT_LIMITS, Partition, lane_id, lane_number, outbox_id
from dualwrite.recovery.claim import OwnerContext, claim_every_lane, claim_lanes, reporting_at_open, settle_lanes
from dualwrite.writing.fair_queue import FairQueue
from dualwrite.writing.health import SeldomAsked
from dualwrite.writing.lane import Lane

if TYPE_CHECKING:
    from dualwrite.interfaces import Observer, StateStore
    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.protocol.values import StateRow
    from dualwrite.writing.lane import Losses
    from dualwrite.writing.lane_pool import Lanes


logger = logging.getLogger(__name__)

_LANES_FROM_THE_START: Final = 3
"""With two, each dual write must ask how the one before the last ended. With three, every second one asks, about two."""
_PROBE_S: Final = 5.0
_SETTLE_S: Final = 10.0
"""If messages may wait as rows, the background settles what an opening cannot settle in this time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_KAFKA_PROBE_S: Final = 3.0
"""Limits one question to Kafka, which may be silent. The next one follows a second later, even if this one still waits."""
_LOOK_S: Final = 2.0
"""Limits one check for what holds back readers."""


@dataclass(frozen=True)
class ProducerSettings:
    """How the producers of lanes are made.

    ``timeout_s`` limits the ending of a transaction, and ``flush_timeout_s`` each wait for an answer before its decision.
    """

    config: KafkaConfig
    timeout_s: float
    flush_timeout_s: float = DEFAULT_LIMITS.flush_timeout_s


def lane_producer(settings: ProducerSettings, context: OwnerContext, row: StateRow) -> LaneProducer:
    """A producer for the row's incarnation, not initialised yet."""
    return LaneProducer(
        settings.config,
        row.kafka_id(row.incarnation),
        coordinator=context.coordinator,
        incarnation=row.incarnation,
        # The other half is for settling, if the producer gets no answer.
        call_timeout_s=settings.timeout_s / 2,
        flush_timeout_s=settings.flush_timeout_s,
        bulk=settings.config.bulk,
        engine=settings.config.engine,
    )


class ReaderWarnings:
    """Logs warnings: of other writers' open transactions that hold back readers for seconds, and of compacted topics.

    It checks the partitions of the writer's newest transactions, which ``ends`` names.
    """

    def __init__(self, name: str, coordinator: KafkaCoordinator, ends: EndQuestions) -> None:
        self._name = name
        self._coordinator = coordinator
        self._ends = ends
        self._looked_up: set[str] = set()

    def look(self) -> bool:
        """Check the partitions of the transactions since the last check, if there were any. Used by one thread."""
        states = self._ends.take_newest()
        if not states:
            return False
        try:
            look_again(self._coordinator, states, Deadline(_LOOK_S))
            for one in self._coordinator.newly_held_back(Deadline(_LOOK_S)):
                if one.writer != self._name:
                    logger.warning("%s: read_committed consumers are held back in %s", self._name, one)
        except Exception as error:  # noqa: BLE001 - it is only a warning
            logger.debug("could not find out what holds back readers: %s", error)
        self._warn_of_compaction({topic for state in states for topic in state.topic_ids})
        return True

    def _warn_of_compaction(self, topics: set[str]) -> None:
        """Warn of topics that do not keep transactions whole, once for each."""
        new = {topic for topic in topics - self._looked_up if not topic.startswith("__")}
        if not new:
            return
        self._looked_up |= new
        try:
            for topic in sorted(self._coordinator.compacted(new, Deadline(_LOOK_S))):
                from dualwrite.protocol.kafka_requirements import compaction  # noqa: PLC0415 - the doctor's rules

                logger.warning("%s: %s", self._name, compaction(topic, "compact"))
        except Exception as error:  # noqa: BLE001 - it is only a warning
            logger.debug("could not find out whether topics are compacted: %s", error)


class Opened:
    """The connections of one writer, and what is made on them.

    ``owner`` is the writer's name in the rows, which no other owner has. ``falls_back_after_s`` limits the wait for Kafka while
    a writer opens whose messages may wait as rows; None for other writers. ``outbox_lane`` is the lane that sends such
    messages: claimed with the others, and perhaps not settled yet; None if the writer has none. ``unanswered`` is the opening's
    question that Kafka did not answer. ``longest_open_s`` is the age of the oldest transaction open in Kafka; see
    :meth:`dualwrite.interfaces.Observer.opened`.
    """

    def __init__(
        self,
        name: str,
        store: StateStore,
        settings: ProducerSettings,
        *,
        owner: str,
        lanes: Lanes,
        losses: Losses,
        observer: Observer,
        falls_back_after_s: float | None = None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._lanes = lanes
        self._losses = losses
        self._falls_back_after_s = falls_back_after_s
        self._closing = threading.Event()
        self._claiming = FairQueue([None])
        self.outbox_lane: Lane | None = None
        self.unanswered: tuple[float, str] | None = None
        coordinator = KafkaCoordinator(settings.config)
        self.context = OwnerContext(coordinator, store, owner, observer)
        self.longest_open_s = SeldomAsked(
            f"dualwrite {name} open transactions",
            lambda: coordinator.longest_open_s(Deadline(_PROBE_S)),
            lambda error: logger.debug("could not ask for the oldest open transaction: %s", error),
        )
        # Separate connections, because a broker handles the requests of one connection one by one, and settling may take long.
        self._late = KafkaCoordinator(settings.config, like=coordinator)
        self._ends = lanes.ends = EndQuestions(
            KafkaCoordinator(settings.config, like=self._late, one_thread=True), late=self._late
        )
        lanes.watch = ReaderWarnings(name, self._late, self._ends).look

    def lane(self, number: int) -> Lane:
        """A lane that is not claimed yet."""
        return self._lane(lane_id(self._name, number))

    def _lane(self, transactional_id: str, *, guard: Callable[[], tuple[str, int]] | None = None) -> Lane:
        return Lane(
            transactional_id,
            self.context,
            self._make_producer,
            claiming=self._claiming,
            guard=None if transactional_id == self._name else guard or self._guard,
            ends=self._ends,
            losses=self._losses,
        )

    def _guard(self) -> tuple[str, int]:
        return self._name, self._lanes.first.row.incarnation

    def lane_to_send(self, first: Lane) -> Lane:
        """The lane that sends waiting messages, claimed with the others or not yet. One sender uses it."""
        if self.outbox_lane is None:
            name = outbox_id(self._name)
            self.outbox_lane = self._lane(name, guard=lambda: (self._name, first.row.incarnation))
        return self.outbox_lane

    def _make_producer(self, row: StateRow) -> LaneProducer:
        return lane_producer(self._settings, self.context, row)

    def claim(self, deadline: Deadline) -> Sequence[Lane]:
        """Claim all lanes of the writer, and settle them. Returns those that it starts with, ready for use.

        If messages may wait as rows and Kafka is away, it claims the lanes in the database alone, and the background settles
        them once Kafka answers.
        """
        count, began_s = min(_LANES_FROM_THE_START, self._lanes.max_lanes), now_s()
        if self._falls_back_after_s is None:
            with reporting_at_open(self.context.store, self._name):
                rows = claim_lanes(self.context, self._name, count, deadline)
            return self._started(rows, count, deadline)
        try:
            soon = Deadline(min(self._falls_back_after_s, deadline.remaining_s()))
            rows = claim_every_lane(self.context, self._name, count, soon, outbox=True)
        except Unavailable as error:
            # If the database does not answer, this raises as well.
            rows = claim_every_lane(self.context, self._name, count, deadline, outbox=True, without_kafka=True)
            return self._unsettled(rows, error, began_s)
        soon = Deadline(min(deadline.remaining_s(), max(self._falls_back_after_s, _SETTLE_S)))
        try:
            with reporting_at_open(self.context.store, self._name):
                settle_lanes(self.context, rows.values(), soon)
        except Unavailable as error:
            return self._unsettled(rows, error, began_s)
        return self._started(rows, count, soon)

    def _started(self, rows: Mapping[str, StateRow], count: int, deadline: Deadline) -> Sequence[Lane]:
        lanes = [self.lane(number) for number in range(count)]
        for lane in lanes:
            lane.adopt(rows[lane.transactional_id])
        self._adopt_outbox(rows)
        try:
            with ThreadPoolExecutor(len(lanes)) as threads:
                for future in [threads.submit(lane.ready, deadline) for lane in lanes]:
                    future.result()
        except BaseException as error:
            for lane in lanes:
                lane.discard()
            if self._falls_back_after_s is None or not isinstance(error, Unavailable):
                raise
            logger.warning("%s: its lanes get their producers later: %s", self._name, error)
        return lanes

    def _adopt_outbox(self, rows: Mapping[str, StateRow], *, settled: bool = True) -> None:
        if (row := rows.get(outbox_id(self._name))) is not None:
            self.outbox_lane = self._lane(row.transactional_id)
            self.outbox_lane.adopt(row, settled=settled)

    def _unsettled(self, rows: Mapping[str, StateRow], error: Unavailable, began_s: float) -> Sequence[Lane]:
        """Lanes for all rows, for the background to settle: a former owner may have left something open under each."""
        logger.warning("%s: opened without Kafka, messages wait in the database: %s", self._name, error)
        numbers = [number for name in rows if (number := lane_number(self._name, name)) is not None]
        lanes = [self.lane(number) for number in range(min(self._lanes.most, max(numbers) + 1))]
        for lane in lanes:
            if (row := rows.get(lane.transactional_id)) is not None:
                lane.adopt(row, settled=False)
        self._adopt_outbox(rows, settled=False)
        self.unanswered = began_s, "to open the writer"
        beyond = [self.lane(number) for number in numbers if number >= len(lanes)]
        for lane in beyond:
            lane.adopt(rows[lane.transactional_id], settled=False)
        if beyond:
            threading.Thread(
                target=self._settle_beyond, args=(beyond,), name=f"dualwrite {self._name} settles", daemon=True
            ).start()
        return lanes

    def _settle_beyond(self, lanes: list[Lane]) -> None:
        """Settle lanes that this writer does not use, because it has fewer than its former owner."""
        pause_s = _FIRST_PAUSE_S
        while lanes and not self._closing.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for lane in list(lanes):
                try:
                    lane.settle(Deadline(_SETTLE_S))
                except Fenced as error:
                    logger.warning("%s: left to the new owner to settle: %s", lane.transactional_id, error)
                    return
                except Exception as error:  # noqa: BLE001 - whatever it is, only another attempt can help
                    logger.info("%s: not settled yet; retrying later: %s", lane.transactional_id, error)
                    break
                if not lane.needs_settling:
                    lanes.remove(lane)

    def ask_database(self) -> Sequence[StateRow]:
        """Ask the database something. Raises if it does not answer."""
        return self.context.store.read([self._name])

    def probe(self) -> None:
        """Ask the database and Kafka something. Raises if one of them does not answer."""
        rows = self.ask_database()
        self.context.coordinator.describe([row.kafka_id(row.incarnation) for row in rows], Deadline(_PROBE_S))

    def ask_kafka(self, partitions: Collection[Partition]) -> None:
        """Ask the coordinator of the first lane, and the leaders of these partitions. Raises if one of them does not answer.

        Uses new connections: they remember no failures, and have no earlier requests that a broker has not answered.
        """
        first = self._lanes.first_or_none
        kafka_id = self._name if first is None else first.row.kafka_id(first.row.incarnation)
        deadline = Deadline(_KAFKA_PROBE_S)
        with KafkaCoordinator(self._settings.config, like=self._late) as coordinator:
            coordinator.describe([kafka_id], deadline)
            if partitions:
                coordinator.producer_open_offsets(0, 0, partitions, deadline)

    def knock(self) -> bool:
        """Whether all brokers refuse connections."""
        return self._late.refuses()

    def close(self) -> None:
        """Disconnect from Kafka."""
        self._closing.set()
        self._ends.close()
        self._late.close()
        self.context.coordinator.close()


def refuse_fork(transactional_id: str, pid: int) -> None:
    """Refuse a writer that another process has made."""
    if os.getpid() != pid:
        raise IllegalStateError(
            "the writer was made in another process",
            transactional_id=transactional_id,
            next_step="a fork cannot share a producer: make a writer in each process, with an id of its own",
        )


def require_opened(opened: Opened | None, transactional_id: str, pid: int) -> Opened:
    """The resources of a writer, which must be open and used in the process that made it."""
    refuse_fork(transactional_id, pid)
    if opened is None:
        raise IllegalStateError(
            "the writer is not open", transactional_id=transactional_id, next_step="use `with writer:` or open()"
        )
    return opened
