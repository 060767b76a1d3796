"""The parts of a writer that it has while it is open: its servers, and its lanes; and how it opens in the background.

A process that starts while a server is away must not fail: the platform would start it again and again, and take down what
needs no server. Nor may its blocks wait for the server: they would take every thread of the process. So a thread claims, and
tries again until it has; a block that comes before waits for a moment, as a start takes one, and is then refused with the
reason.

What waiting cannot mend ends the attempts: that error is kept, for blocks and for ``health()``. A loss that an attempt finds
belongs to a former owner's transaction, whose rows are committed. No block of this process may raise it: the block's own rows
are not. It is reported as every loss that is found in the background, and the next attempt succeeds.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from dualwrite import waiting
from dualwrite.clock import Deadline, now_s
from dualwrite.errors import (
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.kafka.transaction_ends import EndQuestions, look_again
from dualwrite.protocol.process import Health, OpeningStep, after_failed_opening
from dualwrite.protocol.values import DEFAULT_LIMITS, Partition, lane_id, lane_number, outbox_id
from dualwrite.recovery.claim import OwnerContext, claim_every_lane, claim_lanes, reporting_at_open, settle_lanes
from dualwrite.waiting import Condition
from dualwrite.writing.fair_queue import FairQueue
from dualwrite.writing.health import SeldomAsked
from dualwrite.writing.lane import FoundLoss, Lane

if TYPE_CHECKING:
    from dualwrite.interfaces import Observer, StateStore
    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.protocol.values import StateRow
    from dualwrite.writing.lane import Losses
    from dualwrite.writing.lane_pool import Lanes


logger = logging.getLogger(__name__)

_LANES_FROM_THE_START: Final = 3
"""With two, each dual write must ask how the one before the last has ended; with three, every second one asks, for two."""
_PROBE_S: Final = 5.0
_SETTLE_S: Final = 10.0
"""Where messages may wait as rows, what an opening cannot settle in this time is left to the background."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_KAFKA_PROBE_S: Final = 3.0
"""Limits one question to a Kafka that may be silent. The next one is asked a second later, whether or not this one waits."""
_LOOK_S: Final = 2.0
"""Limits a look for what holds back readers."""


@dataclass(frozen=True)
class ProducerSettings:
    """How the producers of lanes are made.

    ``timeout_s`` limits the ending of a transaction, and ``flush_timeout_s`` each wait for an answer until its decision.
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
                from dualwrite.protocol.kafka_requirements import compaction  # noqa: PLC0415 - the doctor's rules

                logger.warning("%s: %s", self._name, compaction(topic, "compact"))
        except Exception as error:  # noqa: BLE001 - it is only a warning
            logger.debug("could not find out whether topics are compacted: %s", error)


class Opened:
    """The connections of one writer, and what is made on them.

    ``owner`` is the writer's name in the rows, which no other owner has. ``falls_back_after_s`` limits the wait for Kafka while
    a writer opens whose messages may wait as rows; None for any other. ``outbox_lane`` is the id under which such messages are
    sent: claimed with the lanes, and perhaps not settled yet; None if the writer has none. ``unanswered`` is the opening's
    question that Kafka left without an answer. ``longest_open_s`` is the age of the oldest transaction that is open in Kafka;
    see :meth:`dualwrite.interfaces.Observer.opened`.
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
        # Their own connections: a broker works through the requests of one connection one by one, and settling may take long.
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
        """The lane under which waiting messages are sent, claimed with the others or not yet. One sender uses it."""
        if self.outbox_lane is None:
            name = outbox_id(self._name)
            self.outbox_lane = self._lane(name, guard=lambda: (self._name, first.row.incarnation))
        return self.outbox_lane

    def _make_producer(self, row: StateRow) -> LaneProducer:
        return lane_producer(self._settings, self.context, row)

    def claim(self, deadline: Deadline) -> Sequence[Lane]:
        """Claim all lanes of the writer, and settle them. Returns those that it starts with, ready for use.

        Where messages may wait as rows, a Kafka that is away holds nothing up: then the lanes are claimed in the database
        alone, and settled in the background once Kafka answers.
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
            # If it is the database that does not answer, this raises as well.
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
        """Lanes for all rows, which the background settles: a former owner may have left something open under each."""
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
        """Settle lanes that this writer has no use for, as it has fewer than its former owner."""
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

        On new connections: they remember no failures, and no broker has requests of theirs that wait for something.
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


def ask_first(config: KafkaConfig, name: str, within_s: float) -> None:
    """Ask Kafka something before anything is claimed. Raises `Unavailable`, which names it, if it does not answer."""
    with KafkaCoordinator(config) as coordinator:
        try:
            coordinator.cluster_id(Deadline(within_s))
        except Unavailable as error:
            raise Unavailable(
                f"Kafka at {config.listener[0]} does not answer ({error.what})", transactional_id=name
            ) from error


def refuse_fork(transactional_id: str, pid: int) -> None:
    """Refuse a writer that another process has made."""
    if os.getpid() != pid:
        raise IllegalStateError(
            "the writer was made in another process",
            transactional_id=transactional_id,
            next_step="a fork cannot share a producer: make a writer in each process, with an id of its own",
        )


def require_opened(opened: Opened | None, transactional_id: str, pid: int) -> Opened:
    """The parts of a writer that is open, in the process that has made it."""
    refuse_fork(transactional_id, pid)
    if opened is None:
        raise IllegalStateError(
            "the writer is not open", transactional_id=transactional_id, next_step="use `with writer:` or open()"
        )
    return opened


T = TypeVar("T")

PATIENCE_S: Final = 2.0
"""A block waits no longer for an opening that no server is known to hold up: one takes less than a second, and within this
time the first look at Kafka shows whether it answers."""
_FIRST_OPENING_PAUSE_S, _LONGEST_OPENING_PAUSE_S = 0.1, 1.0
_JOIN_S: Final = 5.0
"""Closing waits so long for an attempt. One that waits for a server is left: what it makes after that, it throws away."""


class Opening(Generic[T]):
    """Opens one writer. Its callers are threads and tasks.

    ``attempt`` asks the servers, and returns what it has made; ``publish`` lets the writer use that, at once, and ``discard``
    throws it away. ``report`` takes a loss.
    """

    def __init__(
        self,
        name: str,
        attempt: Callable[[], T],
        *,
        publish: Callable[[T], object],
        discard: Callable[[T], object],
        report: Callable[[FoundLoss], object],
    ) -> None:
        self._name = name
        self._attempt = attempt
        self._publish = publish
        self._discard = discard
        self._report = report
        self._changed = Condition()
        self._stopping = threading.Event()
        self._began_s = now_s()
        self._missing: Exception | None = None
        self._missing_since = datetime.now(timezone.utc)
        self._missing_since_s = self._began_s
        self.refused: DualWriteError | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run, name=f"dualwrite {name} opens", daemon=True)

    def start(self) -> None:
        """Begin. Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Make no further attempt. What one under way makes is discarded. May be called more than once."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    @property
    def stopped(self) -> bool:
        """Whether no further attempt is made."""
        return self._stopping.is_set()

    @property
    def waits_for(self) -> str | None:
        """What is missing, and since when; None if it has opened, or never will."""
        if self.done or self.refused is not None:
            return None
        missing = self._missing
        if missing is None:
            return f"its opening began {now_s() - self._began_s:.0f} s ago"
        what = missing.what if isinstance(missing, DualWriteError) else repr(missing)
        return f"{what}, since {self._missing_since:%H:%M:%S} UTC ({now_s() - self._missing_since_s:.0f} s)"

    def wait(self, seconds: float) -> None:
        """Wait for an opening that no server is known to hold up, and raise as :meth:`check`."""
        deadline = Deadline(0.0 if waiting.blocks_a_loop() else seconds)
        with self._changed:
            while self._is_open_question and not deadline.expired:
                self._changed.wait(deadline.remaining_s())
        self.check()

    def check(self, *, patient: bool = False) -> None:
        """Raise unless it has opened, or was stopped: then there is nothing to say.

        With ``patient`` it does not raise either while no attempt has failed: the caller's own block will wait.
        """
        if self.done or self.stopped or (patient and self._is_open_question):
            return
        if self.refused is not None:
            raise copy(self.refused) from self.refused  # a copy for each caller: an error that is raised grows
        raise Unavailable(
            f"the writer is not open yet: {self.waits_for}; nothing was begun",
            transactional_id=self._name,
            next_step="try again later: it opens by itself when the servers answer",
        )

    @property
    def _is_open_question(self) -> bool:
        return not self.done and self._missing is None and self.refused is None and not self._stopping.is_set()

    def _run(self) -> None:
        pause_s = _FIRST_OPENING_PAUSE_S
        while not self._stopping.is_set():
            began_s, began = now_s(), datetime.now(timezone.utc)
            try:
                made = self._attempt()
            except Exception as error:  # noqa: BLE001 - an error that nobody expects may pass, too
                step = after_failed_opening(error)
                self._note(error, step, began_s, began)
                if step is OpeningStep.KEEP:
                    return
                if step is OpeningStep.AGAIN:
                    self._stopping.wait(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
                    pause_s = min(2 * pause_s, _LONGEST_OPENING_PAUSE_S)
                continue
            with self._changed:
                stopped = self._stopping.is_set()
                if not stopped:
                    self._publish(made)
                    self.done = True
                    self._changed.notify_all()
            if stopped:
                self._discard(made)
            else:
                logger.log(
                    logging.INFO if self._missing is None else logging.WARNING,
                    "%s: open after %.1f s",
                    self._name,
                    now_s() - self._began_s,
                )
            return

    def _note(self, error: Exception, step: OpeningStep, began_s: float, began: datetime) -> None:
        if self._stopping.is_set():
            return
        if step is OpeningStep.REPORT and isinstance(
            error, DatabaseWentBack | DecidedTransactionLost | OutcomeUnverifiable
        ):
            self._report(error)
            return
        if step is OpeningStep.KEEP:
            logger.error("%s: cannot be opened: %s", self._name, error)
        elif self._missing is None:
            shown = None if isinstance(error, DualWriteError) else error
            logger.warning("%s: not open yet; trying again until it is: %s", self._name, error, exc_info=shown)
        else:
            logger.debug("%s: not open yet: %s", self._name, error)
        with self._changed:
            if step is OpeningStep.KEEP and isinstance(error, DualWriteError):
                self.refused = error
            else:
                if self._missing is None:
                    self._missing_since_s, self._missing_since = began_s, began
                self._missing = error
            self._changed.notify_all()


def with_opening(health: Health, opening: Opening[Any]) -> Health:
    """The health of a writer that is not open, with what its opening waits for, or what keeps it from opening."""
    if opening.done or opening.stopped:
        return health
    refused = None if opening.refused is None else str(opening.refused)
    return replace(health, opening=opening.waits_for, refused=refused)
