"""The parts of a writer that it has while it is open: its servers, and its lanes, each with a producer of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.kafka.transaction_ends import EndQuestions, look_again
from dualwrite.protocol.values import lane_id
from dualwrite.recovery.claim import OwnerContext, claim_lanes
from dualwrite.recovery.in_doubt import reporting_at_open
from dualwrite.writing.fair_queue import Turns
from dualwrite.writing.health import SeldomAsked
from dualwrite.writing.lane import Lane

if TYPE_CHECKING:
    from dualwrite.interfaces import Observer, StateStore
    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.kafka.producer import EngineName
    from dualwrite.protocol.values import StateRow
    from dualwrite.writing.lane import Losses
    from dualwrite.writing.lane_pool import Lanes

logger = logging.getLogger(__name__)

_LANES_FROM_THE_START: Final = 2
_PROBE_S: Final = 5.0
_LOOK_S: Final = 2.0
"""Limits a look for what holds back readers."""


@dataclass(frozen=True)
class ProducerSettings:
    """How the producers of lanes are made. ``timeout_s`` limits the ending of a transaction."""

    config: KafkaConfig
    timeout_s: float
    bulk: bool
    engine: EngineName


class ReaderWarnings:
    """Logs warnings: of other writers' open transactions that hold back readers for seconds, and of compacted topics.

    ``ends`` names the writer's newest transactions, so that their partitions are looked at.
    """

    def __init__(self, name: str, coordinator: KafkaCoordinator, ends: EndQuestions) -> None:
        self._name = name
        self._coordinator = coordinator
        self._ends = ends
        self._looked_up: set[str] = set()

    def look(self) -> bool:
        """Look at the partitions of the transactions since the last look, if there were any. By one thread."""
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
                logger.warning(
                    "%s: the topic %r is compacted: a consumer that lags behind sees only the newest message of each key, and "
                    "so only a part of some transactions",
                    self._name,
                    topic,
                )
        except Exception as error:  # noqa: BLE001 - it is only a warning
            logger.debug("could not find out whether topics are compacted: %s", error)


class Opened:
    """The connections of one writer, and what is made on them.

    ``owner`` is the writer's name in the rows, which no other owner has. ``longest_open_s`` is the age of the oldest
    transaction that is open in Kafka; see :meth:`dualwrite.interfaces.Observer.opened`.
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
    ) -> None:
        self._name = name
        self._settings = settings
        self._lanes = lanes
        self._losses = losses
        self._claiming = Turns([None])
        coordinator = KafkaCoordinator(settings.config)
        self.context = OwnerContext(coordinator, store, owner, observer)
        self.longest_open_s = SeldomAsked(
            f"dualwrite {name} open transactions",
            lambda: coordinator.longest_open_s(Deadline(_PROBE_S)),
            lambda error: logger.debug("could not ask for the oldest open transaction: %s", error),
        )
        # Their own connections: a broker works through the requests of one connection one by one, and settling may take long.
        self._late = KafkaCoordinator(settings.config, like=coordinator)
        self._ends = lanes.ends = EndQuestions(
            KafkaCoordinator(settings.config, like=self._late, one_thread=True), late=self._late
        )
        lanes.watch = ReaderWarnings(name, self._late, self._ends).look

    def lane(self, number: int) -> Lane:
        """A lane that is not claimed yet."""
        return Lane(
            lane_id(self._name, number),
            self.context,
            self._make_producer,
            claiming=self._claiming,
            guard=self._guard if number else None,
            ends=self._ends,
            losses=self._losses,
        )

    def _guard(self) -> tuple[str, int]:
        return self._name, self._lanes.first.row.incarnation

    def _make_producer(self, row: StateRow) -> LaneProducer:
        return LaneProducer(
            self._settings.config,
            row.kafka_id(row.incarnation),
            coordinator=self.context.coordinator,
            incarnation=row.incarnation,
            # The other half is for settling, if the producer gets no answer.
            call_timeout_s=self._settings.timeout_s / 2,
            bulk=self._settings.bulk,
            engine=self._settings.engine,
        )

    def claim(self, deadline: Deadline) -> Sequence[Lane]:
        """Claim and settle all lanes of the writer, and return those that it starts with, ready for use."""
        count = min(_LANES_FROM_THE_START, self._lanes.max_lanes)
        with reporting_at_open(self.context.store, self._name):
            rows = claim_lanes(self.context, self._name, count, deadline)
        lanes = [self.lane(number) for number in range(count)]
        for lane in lanes:
            lane.adopt(rows[lane.transactional_id])
        try:
            with ThreadPoolExecutor(len(lanes)) as threads:
                for future in [threads.submit(lane.ready, deadline) for lane in lanes]:
                    future.result()
        except BaseException:
            for lane in lanes:
                lane.discard()
            raise
        return lanes

    def probe(self) -> None:
        """Ask the database and Kafka something. Raises if one of them does not answer."""
        rows = self.context.store.read([self._name])
        self.context.coordinator.describe([row.kafka_id(row.incarnation) for row in rows], Deadline(_PROBE_S))

    def close(self) -> None:
        """Disconnect from Kafka."""
        self._ends.close()
        self._late.close()
        self.context.coordinator.close()


def require_opened(opened: Opened | None, transactional_id: str, pid: int) -> Opened:
    """The parts of a writer that is open, in the process that has made it."""
    if os.getpid() != pid:
        raise IllegalStateError(
            "the writer was made in another process",
            transactional_id=transactional_id,
            next_step="a fork cannot share a producer: make a writer in each process, with an id of its own",
        )
    if opened is None:
        raise IllegalStateError(
            "the writer is not open", transactional_id=transactional_id, next_step="use `with writer:` or open()"
        )
    return opened
