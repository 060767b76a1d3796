"""The lanes of one writer: gives them to blocks, and takes care of those that are not in use.

A lane can be used again once the end of its last transaction is known. Lanes are used in turn, so that one question finds out
several ends: a caller at work asks it when no other lane is left, and nobody waits for its answer as long as a lane is free. If
every lane were in use, each block would have to ask about the one that it takes. So there are twice as many lanes as blocks
that run at a time: half of them are at rest, and one question asks about all of those.

A lane whose producer was discarded may have left a transaction open in Kafka, which holds back every ``read_committed`` reader
of its topics. The background settles it as soon as it is free, because the next dual write may be hours away. It also takes
care of a lane if nobody has asked how its last transaction ended, or if that has not ended after a second.

While Kafka is silent nobody waits for a lane that waits for Kafka, and nothing is settled, since an attempt would only fail.
All of that is done as soon as Kafka answers again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import DualWriteError, Fenced, IllegalStateError, Unavailable
from dualwrite.writing.fair_queue import FairQueue, NoTurn, Place, Ticket, longest_free

if TYPE_CHECKING:
    from dualwrite.kafka.transaction_ends import EndQuestions, PendingEnd
    from dualwrite.protocol.process import Silence
    from dualwrite.writing.lane import Lane

logger = logging.getLogger(__name__)

_ATTEMPT_S: Final = 10.0
"""Limits one attempt to settle in the background. After it, a dual write that waits for the lane settles it itself."""
_CLOSE_S: Final = 5.0
"""Limits the settling while closing: the next opening settles the rest."""
_LEAST_S: Final = 1.0
"""A closing lane's share of that, at least, as long as any is left: settling takes some tens of milliseconds."""
_SILENT_S: Final = 2.0
"""A step that has waited for Kafka for this long counts as unanswered."""
_MAKE_S: Final = 1.0
"""Limits one attempt to make a lane that no block waits for: others that must be claimed or settled wait for it."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_DOUBLINGS: Final = 10
"""More make no difference, and after a thousand failures, in some hours, the number would overflow."""
_END_AFTER_S: Final = 1.0
"""Housekeeping asks for a lane's end after this time at rest, if no caller has asked for it, or if it is late."""
_WATCH_EVERY_S: Final = 1.0


class PooledLane:
    """A lane, and the state of its housekeeping since a block last used it.

    ``needs_settling`` and ``pending`` (its last transaction, if its end was not known) are as of the end of its last use.
    ``worked``: it was usable when it was given out, so it will be free again soon. ``given_up``: another owner settles it.
    ``coming``: housekeeping must make it ready first, as no block has asked for it. ``in_care``: housekeeping has it.
    ``taken_at`` is on the clock of the process.
    """

    __slots__ = ("coming", "failures", "given_up", "in_care", "lane", "needs_settling", "pending", "taken_at", "worked")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.needs_settling = lane.needs_settling
        self.pending: PendingEnd | None = None
        self.worked = False
        self.coming = self.in_care = False
        self.failures = 0
        self.given_up = False
        self.taken_at: float | None = None

    @property
    def _backoff_s(self) -> float:
        if not self.failures:
            return 0.0
        return min(_FIRST_BACKOFF_S * 2.0 ** min(self.failures - 1, _DOUBLINGS), _LONGEST_BACKOFF_S)

    def due_at(self, free_since: float, idle_after_s: float) -> float | None:
        """When its next housekeeping is due, by the clock of the process; None if there is nothing to do."""
        if self.needs_settling or self.coming:
            return None if self.given_up else free_since + self._backoff_s
        if self.pending is not None and not self.pending.known:
            return free_since + (_END_AFTER_S if not self.failures else max(_END_AFTER_S, self._backoff_s))
        return free_since + idle_after_s if self.lane.unrecorded is not None else None


class Lanes:
    """Gives lanes to blocks, and takes care of idle lanes on a thread of its own.

    Up to ``max_lanes`` blocks have one at a time. ``make_lane`` returns the lane with that number, not claimed yet. Closing
    waits ``timeout_s`` for lanes in use. After ``idle_after_s`` without use the row records that the lane's last transaction is
    complete. The background calls ``watch`` at most once a second: it looks for what is worth a warning, and returns whether
    there was something to look at. ``refuses_in_silence`` says that a lane is useless to a block while Kafka is silent.
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
        kafka_at: str,
    ) -> None:
        self._name = name
        self._make_lane = make_lane
        self.max_lanes = max_lanes
        self.most = 2 * max_lanes - 1  # including those at rest; with max_lanes=1 the writer has one id
        self._timeout_s = timeout_s
        self.lane_timeout_s = lane_timeout_s
        self._idle_after_s = idle_after_s
        self._kafka_at = kafka_at
        self.ends: EndQuestions | None = None
        self.watch: Callable[[], bool] = lambda: False
        self.silence: Silence | None = None
        self.refuses_in_silence = True
        self._queue: FairQueue[PooledLane] = FairQueue(on_freed=self._freed)
        self._choose, self._due = (
            self._chosen,
            self._choose_due,
        )  # one object each: tickets that choose alike wait in one queue
        self._look: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._due_at: float | None = None
        self._watch_at = 0.0
        self._housekeeper: threading.Thread | None = None
        self.left_settled = False

    @property
    def closed(self) -> bool:
        """Whether the lanes are closed: none is given out any more."""
        return self._queue.closed

    @property
    def first(self) -> Lane:
        """The lane that guards the others."""
        return self._queue.places[0].thing.lane

    @property
    def first_or_none(self) -> Lane | None:
        """The same; None before the lanes are open, and once they are closed."""
        places = self._queue.places
        return places[0].thing.lane if places else None

    @property
    def all(self) -> Sequence[PooledLane]:
        """The lanes as they are now, those in use included."""
        return [place.thing for place in list(self._queue.places)]

    @property
    def waiting(self) -> int:
        """The number of blocks that wait for a lane."""
        return self._queue.waiting

    def __len__(self) -> int:
        return len(self._queue.places)

    def open(self, lanes: Iterable[Lane], *, keep_house: bool = True) -> None:
        """Start with these lanes, which are ready, in order of their numbers.

        ``keep_house`` says whether to take care of free lanes in the background.
        """
        self._queue.places = [Place(PooledLane(lane)) for lane in lanes]
        if not keep_house:
            return
        self._housekeeper = threading.Thread(target=self._keep_house, name=f"dualwrite {self._name}", daemon=True)
        self._housekeeper.start()

    def ticket(self) -> Ticket[PooledLane]:
        """A ticket with which a block takes its lane. End it, however the block ends; see :class:`Ticket`."""
        return Ticket(self._queue, self._choose)

    def take(self, ticket: Ticket[PooledLane]) -> Lane:
        """Wait for a lane; first come, first served. Raises `Unavailable` if all were in use until the end of the wait."""
        if self.ends is not None:
            self.ends.take_answer()
        self._queue.queue_up(ticket)
        if not ticket.answered:
            ticket.wait_for_answer(Deadline(self.lane_timeout_s))
        if ticket.place is None:
            if self.closed:
                raise IllegalStateError("the writer is closed", transactional_id=self._name)
            if (silence := self.silence) is not None and self.refuses_in_silence:
                raise silence.error(self._name)
            raise self._busy()
        pooled = ticket.place.thing
        pooled.failures, pooled.given_up, pooled.coming, pooled.taken_at = 0, False, False, now_s()
        return pooled.lane

    def note_silence(self, silence: Silence | None) -> None:
        """If Kafka is silent, refuse those that wait; if it answers again, do what has waited for it."""
        self.silence = silence
        if silence is None:
            for place in list(self._queue.places):
                place.thing.failures = 0
            self.look_again()
        elif self.refuses_in_silence:
            self._queue.refuse_waiting()
        else:
            self._queue.serve()  # any lane will do now

    def _busy(self) -> Unavailable:
        """The error of a caller that got no lane. It says whether Kafka, other callers, or both kept the lanes busy."""
        what, now = f"all {self.max_lanes} lanes were busy for {self.lane_timeout_s:g} s", now_s()
        began = [place.thing.lane.asking_since for place in list(self._queue.places) if place.user is not None]
        waited = [now - since for since in began if since is not None]
        long = [waited_s for waited_s in waited if waited_s >= min(_SILENT_S, self.lane_timeout_s / 2)]
        if not long:
            step = "raise max_lanes, or make transactions shorter"
            return Unavailable(what, transactional_id=self._name, next_step=step)
        step = "check these brokers and the way to them: more lanes would wait, too"
        if len(long) < len(began):
            step = "check these brokers and the way to them; for the other lanes, raise max_lanes, or make transactions shorter"
        since = datetime.now(timezone.utc) - timedelta(seconds=max(long))
        return Unavailable(
            f"{what}: Kafka at {self._kafka_at} has not answered {len(long)} of them since {since:%H:%M:%S} UTC "
            f"({max(long):.0f} s)",
            transactional_id=self._name,
            next_step=step,
        )

    def _chosen(self, places: Sequence[Place[PooledLane]]) -> Place[PooledLane] | None:
        """The working lane that was free for longest, or else another one; None if ``max_lanes`` are in use.

        A lane whose last transaction is still ending would make the block wait, so others come first.
        """
        free, used = _free_and_used(places)
        if used >= self.max_lanes:
            return None
        if self.silence is not None and not self.refuses_in_silence:
            return self._that_may_wait(free)
        known = ending = None
        left = False
        for place in free:
            pooled = place.thing
            if pooled.needs_settling or pooled.coming:
                continue
            if pooled.pending is not None and not pooled.pending.known:
                if ending is None or place.free_since < ending.free_since:
                    ending = place
            else:
                left = known is not None
                if known is None or place.free_since < known.free_since:
                    known = place
        if self.ends is not None:
            self.ends.wanted = not left
        if known is None:
            return self._other(places, ending, used)
        known.thing.worked = True
        return known

    def _that_may_wait(self, free: Sequence[Place[PooledLane]]) -> Place[PooledLane] | None:
        """While messages wait as rows: prefers a lane whose claim is valid, settled or not, to one that must be claimed."""
        chosen = longest_free([place for place in free if place.thing.lane.may_wait])
        if chosen is None and len(self) < self.max_lanes:
            chosen = self._new()
        chosen = chosen or longest_free(free)
        if chosen is not None:
            chosen.thing.worked = True
        return chosen

    def _other(
        self, places: Sequence[Place[PooledLane]], ending: Place[PooledLane] | None, used: int
    ) -> Place[PooledLane] | None:
        """The lane that is ``ending``, or a new one, or one that needs settling.

        A lane that needs settling only if no working one will be free soon: the background settles it, and perhaps that is
        impossible now.
        """
        if ending is not None:
            if len(places) < min(self.most, 2 * (used + 1)):
                self._have_another_made(places)
            ending.thing.worked = True
            return ending
        if len(places) < self.max_lanes:
            return self._new()
        unsettled = longest_free(places)
        if unsettled is None or any(place.thing.worked for place in places if place.holder is not None):
            return None
        unsettled.thing.worked = False
        return unsettled

    def _have_another_made(self, places: Sequence[Place[PooledLane]]) -> None:
        """Let the background make one more lane for later, because a claim may have to wait, and this block has a lane."""
        if self._housekeeper is not None and not any(place.thing.coming for place in places):
            self._new().thing.coming = True
            self.look_again()

    def _new(self) -> Place[PooledLane]:
        new = Place(PooledLane(self._make_lane(len(self))))
        self._queue.places.append(new)
        return new

    def _freed(self, place: Place[PooledLane], now: float) -> None:
        pooled = place.thing
        pooled.taken_at, pooled.in_care = None, False
        pooled.pending = pooled.lane.come_to_rest()
        pooled.needs_settling = pooled.pending is None and pooled.lane.needs_settling
        due_at = pooled.due_at(now, self._idle_after_s)
        # Housekeeping is woken for what is due before its next look, not by every dual write.
        if due_at is not None and (self._due_at is None or due_at < self._due_at):
            self.look_again()

    def look_again(self) -> None:
        """Make housekeeping check what is due."""
        if self._look.empty():
            self._look.put(None)

    def _keep_house(self) -> None:
        while (ticket := self._next_due()) is not None:
            assert ticket.place is not None
            pooled = ticket.place.thing
            lane = pooled.lane
            try:
                idles = now_s() >= ticket.place.free_since + self._idle_after_s
                if pooled.coming:
                    lane.ready(Deadline(self._attempt_s(pooled)))
                    pooled.coming = False
                else:
                    _see_to(lane, Deadline(self._attempt_s(pooled)), idles=idles)
                pooled.failures = pooled.failures + 1 if lane.needs_settling else 0
            except Fenced as error:
                pooled.given_up = True
                logger.warning("%s: left to the new owner to settle: %s", lane.transactional_id, error)
            except DualWriteError as error:
                pooled.failures += 1
                logger.warning("%s: not settled yet; retrying later: %s", lane.transactional_id, error)
            except Exception:
                pooled.failures += 1
                logger.exception("%s: not settled yet; retrying later", lane.transactional_id)
            finally:
                ticket.end()

    def _attempt_s(self, pooled: PooledLane) -> float:
        """For how long housekeeping may keep a lane.

        Blocks whose messages may wait need no answer from Kafka. In the first moments of an outage, before anybody knows of it,
        housekeeping must not keep the only lane from them. With each further attempt it gives a slow Kafka more time.
        """
        most_s = min(self._timeout_s, _MAKE_S if pooled.coming else _ATTEMPT_S)
        return most_s if self.refuses_in_silence else min(most_s, _SILENT_S * 2.0 ** min(pooled.failures, _DOUBLINGS))

    def _next_due(self) -> Ticket[PooledLane] | None:
        """Wait for a lane whose housekeeping is due, and take it; None when closing."""
        while not self.closed:
            if now_s() >= self._watch_at and self.watch():
                self._watch_at = now_s() + _WATCH_EVERY_S
            if self.ends is not None:
                self.ends.take_answer()
            ticket = self._queue.ticket(self._due)
            try:
                ticket.wait(Deadline(0))
            except NoTurn:
                ticket.end()
            else:
                return ticket
            with suppress(queue.Empty):
                self._look.get(timeout=None if self._due_at is None else max(0.0, self._due_at - now_s()))
        return None

    def _choose_due(self, places: Sequence[Place[PooledLane]]) -> Place[PooledLane] | None:
        due = [
            (at, place)
            for place in places
            if place.holder is None and self.silence is None
            if (at := place.thing.due_at(place.free_since, self._idle_after_s)) is not None
        ]
        self._due_at, place = min(due, key=lambda item: item[0], default=(None, None))
        if place is None or self._due_at is None or self._due_at > now_s():
            return None
        place.thing.worked, place.thing.in_care = False, True
        return place

    def close(self) -> None:
        """Wait for lanes in use, settle and record what is left, and discard the producers. May be called more than once.

        ``left_settled`` then says whether nothing is left for the next owner to settle. Everything is closed even if this
        raises `Unavailable`, because the database could not record that everything is complete.
        """
        self._queue.close()
        self._look.put(None)
        if self._housekeeper is not None:
            self._housekeeper.join(self._timeout_s)
            self._housekeeper = None
        count = len(self)
        lanes = [pooled.lane for pooled in self._queue.drain(Deadline(self._timeout_s))]
        deadline = Deadline(min(self._timeout_s, _CLOSE_S))
        try:
            _attempt(lanes, lambda lane, share: lane.prove_end(share), deadline)
            left = [lane for lane in lanes if lane.needs_settling]
            _attempt(left, lambda lane, share: lane.settle(share), deadline)
            for lane in lanes:
                lane.record_completed()
                lane.compare_with_row()
            self.left_settled = len(lanes) == count and not any(lane.needs_settling for lane in lanes)
        finally:
            for lane in lanes:
                lane.discard()


def _attempt(lanes: Sequence[Lane], do: Callable[[Lane, Deadline], object], deadline: Deadline) -> None:
    """Each lane gets its share of the time that is left: one that cannot end leaves the others theirs."""
    for left, lane in zip(range(len(lanes), 0, -1), lanes, strict=True):
        remaining_s = deadline.remaining_s()
        try:
            do(lane, Deadline(min(remaining_s, max(remaining_s / left, _LEAST_S))))
        except DualWriteError as error:
            logger.warning("%s: left to the next settler: %s", lane.transactional_id, error)


def _free_and_used(places: Sequence[Place[PooledLane]]) -> tuple[list[Place[PooledLane]], int]:
    """The places that are free, and how many blocks use others. Housekeeping does not count as a block."""
    free, used = [], 0
    for place in places:
        if place.holder is None:
            free.append(place)
        elif not place.thing.in_care:
            used += 1
    return free, used


def _see_to(lane: Lane, deadline: Deadline, *, idles: bool) -> None:
    """Do what is due: find out how the last transaction has ended; settle, or record that all is complete.

    ``idles`` says that the lane was not used for so long that its last transaction should be recorded as complete.
    """
    if not lane.needs_settling:
        lane.know_end(deadline)
    if lane.needs_settling:
        lane.settle(deadline)
        logger.info("%s: settled in the background", lane.transactional_id)
    elif idles:
        lane.record_completed()
        lane.compare_with_row()
