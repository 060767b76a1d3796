"""The lanes of one writer: who takes which, and what is done for those that nobody uses.

A lane whose producer was thrown away may have left a transaction open in Kafka, which holds back every ``read_committed``
reader of its topics. It is settled in the background as soon as it is free: the next dual write may be hours away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from dualwrite.deadline import Deadline, now_s
from dualwrite.errors import DualWriteError, Fenced, IllegalStateError, Unavailable
from dualwrite.lane import Lane

logger = logging.getLogger(__name__)

_ATTEMPT_S: Final = 10.0
"""Bounds one attempt at settling in the background: a dual write that waits for the lane then tries by itself."""
_CLOSE_S: Final = 5.0
"""Bounds what closing settles: what is left then is for whoever opens next."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0


@dataclass(eq=False)
class _Free:
    """A lane that nobody uses, and how its housekeeping went so far."""

    lane: Lane
    since: float = field(default_factory=now_s)
    failures: int = 0
    given_up: bool = False

    def due_at(self, idle_after_s: float) -> float | None:
        """When there is something to be done for it, by the clock of the process; None if there is nothing."""
        if self.lane.needs_settling:
            if self.given_up:
                return None
            backoff_s = min(_FIRST_BACKOFF_S * 2 ** (self.failures - 1), _LONGEST_BACKOFF_S) if self.failures else 0.0
            return self.since + backoff_s
        return self.since + idle_after_s if self.lane.unrecorded is not None else None


class Lanes:
    """Gives lanes to threads, and keeps house for the others on a thread of its own.

    Args:
        name: The writer's transactional id.
        make_lane: Makes the lane of that number; not claimed yet.
        max_lanes: The most lanes.
        timeout_s: How long closing waits for lanes in use, in seconds.
        lane_timeout_s: How long :meth:`take` waits, in seconds.
        idle_after_s: After this time without use the row records that its last transaction is complete, in seconds.
    """

    def __init__(
        self,
        name: str,
        make_lane: Callable[[int], Lane],
        *,
        max_lanes: int,
        timeout_s: float,
        lane_timeout_s: float,
        idle_after_s: float,
    ) -> None:
        self._name = name
        self._make_lane = make_lane
        self._max_lanes = max_lanes
        self._timeout_s = timeout_s
        self._lane_timeout_s = lane_timeout_s
        self._idle_after_s = idle_after_s
        self._all: list[Lane] = []
        self._free: list[_Free] = []
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._housekeeper: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether no lane is given out any more."""
        return self._closing.is_set()

    @property
    def first(self) -> Lane:
        """The lane that guards the others."""
        return self._all[0]

    def __len__(self) -> int:
        return len(self._all)

    def open(self, lanes: Iterable[Lane]) -> None:
        """Begin with these lanes, in order of their numbers; they are ready."""
        self._all = list(lanes)
        self._free = [_Free(lane) for lane in self._all]
        self._housekeeper = threading.Thread(target=self._keep_house, name=f"dualwrite {self._name}", daemon=True)
        self._housekeeper.start()

    def take(self) -> Lane:
        """The lane that was free for longest, a new one, or the first to become free. To be given back.

        Raises:
            IllegalStateError: Closed.
            Unavailable: All lanes were in use until the end of the wait.
        """
        deadline = Deadline(self._lane_timeout_s)
        with self._changed:
            while True:
                if self._closing.is_set():
                    raise IllegalStateError("the writer is closed", transactional_id=self._name)
                if self._free:
                    # One that cannot be settled now does not stand in the way of those that work.
                    works = [free for free in self._free if not free.lane.needs_settling] or self._free
                    # Nor one whose last transaction is still ending, if there is another one.
                    free = next((free for free in works if free.lane.pending_end is None), works[0])
                    self._free.remove(free)
                    return free.lane
                if len(self._all) < self._max_lanes:
                    lane = self._make_lane(len(self._all))
                    self._all.append(lane)
                    return lane
                if not self._changed.wait(deadline.remaining_s()):
                    raise Unavailable(
                        f"all {self._max_lanes} lanes were busy for {self._lane_timeout_s:g} s",
                        transactional_id=self._name,
                        next_step="raise max_lanes, or make transactions shorter",
                    )

    def give_back(self, lane: Lane) -> None:
        """Let others use the lane, and housekeeping see to it."""
        lane.watch_end()
        self._put(_Free(lane))

    def look_again(self) -> None:
        """Let housekeeping look what there is to be done."""
        with self._changed:
            self._changed.notify_all()

    def _put(self, free: _Free) -> None:
        with self._changed:
            self._free.append(free)
            self._changed.notify_all()

    def _keep_house(self) -> None:
        while (free := self._next_due()) is not None:
            after = _Free(free.lane, failures=free.failures)
            try:
                _see_to(free.lane, Deadline(min(self._timeout_s, _ATTEMPT_S)))
                after.failures = free.failures + 1 if free.lane.needs_settling else 0
            except Fenced as error:
                after.given_up = True
                logger.warning("%s: left to the new owner to settle: %s", free.lane.transactional_id, error)
            except Exception as error:
                after.failures += 1
                level = logging.WARNING if isinstance(error, DualWriteError) else logging.ERROR
                logger.log(level, "%s: not settled, tried again later", free.lane.transactional_id, exc_info=error)
            finally:
                after.since = now_s()
                self._put(after)

    def _next_due(self) -> _Free | None:
        """Wait for a lane for which there is something to do, and take it; None when closing."""
        with self._changed:
            while not self._closing.is_set():
                due = [(at, free) for free in self._free if (at := free.due_at(self._idle_after_s)) is not None]
                at, free = min(due, key=lambda item: item[0], default=(None, None))
                left_s = None if at is None else at - now_s()
                if free is not None and left_s is not None and left_s <= 0:
                    self._free.remove(free)
                    return free
                self._changed.wait(left_s)
        return None

    def close(self) -> None:
        """Wait for lanes in use, settle and record what there is, throw the producers away. May be called more than once.

        Raises:
            DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable: A loss was found that nobody was told of yet. All is
                closed.
            Unavailable: That all is complete could not be recorded. All is closed.
        """
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._housekeeper is not None:
            self._housekeeper.join(self._timeout_s)
            self._housekeeper = None
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= len(self._all), self._timeout_s)
            lanes = [free.lane for free in self._free]
            self._all, self._free = [], []
        deadline = Deadline(min(self._timeout_s, _CLOSE_S))
        try:
            _attempt(lanes, lambda lane: lane.know_end(deadline))
            _attempt([lane for lane in lanes if lane.needs_settling], lambda lane: lane.settle(deadline))
            for lane in lanes:
                lane.record_completed()
                lane.compare_with_row()
        finally:
            for lane in lanes:
                lane.discard()
        for lane in lanes:
            lane.tell()


def _attempt(lanes: Iterable[Lane], do: Callable[[Lane], None]) -> None:
    for lane in lanes:
        try:
            do(lane)
        except DualWriteError as error:
            logger.warning("%s: left to whoever settles next: %s", lane.transactional_id, error)


def _see_to(lane: Lane, deadline: Deadline) -> None:
    if lane.needs_settling:
        lane.settle(deadline)
        logger.info("%s: settled in the background", lane.transactional_id)
    else:
        lane.record_completed()
        lane.compare_with_row()
