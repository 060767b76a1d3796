"""Things that one caller uses at a time: first come, first served, and never lost to an interrupted caller.

``KeyboardInterrupt`` may come between any two lines. Handing out (`Place.holder`) and returning (the ticket has ended) are each
a single assignment, so an interrupt cannot leave a thing half-owned; the next call does what an interrupt left undone. A ticket
that nobody refers to any more has ended, too.

Most callers find a thing at once. They pay for one pass over the things and for nothing else: no queue, no event.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from dualwrite.clock import Deadline, now_s
from dualwrite.waiting import Event

T = TypeVar("T")


class NoTurn(Exception):
    """The caller got no thing: the deadline came first, or none is given out any more."""


class Place(Generic[T]):
    """One thing and its user. It is free if it has no ``holder``, or the holder's ticket has ended."""

    __slots__ = ("free_since", "holder", "thing")

    def __init__(self, thing: T) -> None:
        self.thing = thing
        self.holder: weakref.ref[Ticket[T]] | None = None
        # When the end of its last use was noticed, on the clock of the process.
        self.free_since = now_s()

    @property
    def user(self) -> Ticket[T] | None:
        """The user's ticket; None if the thing is free."""
        holder = self.holder
        ticket = None if holder is None else holder()
        return None if ticket is None or ticket.ended else ticket


Choose = Callable[[Sequence[Place[T]]], "Place[T] | None"]
"""Chooses the place for a ticket: one without a holder, or None to let it wait. Called by one thread at a time."""


class FairQueue(Generic[T]):
    """The things, and the queue for them.

    ``on_freed`` is called with each place whose user has ended and the time on the clock of the process, before it is given
    out again, by whichever thread notices.
    """

    def __init__(
        self, things: Iterable[T] = (), *, on_freed: Callable[[Place[T], float], None] = lambda *_: None
    ) -> None:
        self.places = [Place(thing) for thing in things]
        self.on_freed = on_freed
        self.closed = False
        self._arrived: deque[Ticket[T]] = deque()
        # Grouped by how they choose: if one finds no place, those behind it need not look. A thousand may wait.
        self._waiting: dict[tuple[Choose[T], bool], OrderedDict[Ticket[T], None]] = {}
        self._left: deque[Ticket[T]] = deque()
        self._arrivals = itertools.count()
        self._lock = threading.RLock()
        self._again = self._refuses = False

    def ticket(self, choose: Choose[T] | None = None) -> Ticket[T]:
        """A ticket, which holds nothing yet. By default it gets the place that was free for longest."""
        return Ticket(self, choose or longest_free)

    @property
    def waiting(self) -> int:
        """The number of tickets that wait."""
        return len(self._arrived) + sum(map(len, list(self._waiting.values())))

    def close(self) -> None:
        """Refuse waiting and new callers. Those that use a thing keep it."""
        self.closed = True
        self.serve()

    def refuse_waiting(self) -> None:
        """Refuse those that wait now, because what they wait for will not come."""
        self._refuses = True
        try:
            self.serve()
        finally:
            self._refuses = False

    def drain(self, deadline: Deadline) -> Sequence[T]:
        """Wait until all things are free, or for the deadline, and return the free ones. Only after :meth:`close`."""
        tickets = [Ticket(self, longest_free, last=True) for _ in self.places]
        for ticket in tickets:
            try:
                ticket.wait(deadline)
            except NoTurn:
                break
        free = [place.thing for place in self.places if place.user is None or place.user in tickets]
        self.places = []
        return free

    def queue_up(self, ticket: Ticket[T]) -> None:
        """Let the ticket take a thing, or wait behind all those that already wait."""
        self._arrived.append(ticket)
        self.serve()

    def leave(self, ticket: Ticket[T]) -> None:
        """Drop a ticket that has ended without a thing from the queue."""
        self._left.append(ticket)
        self.serve()

    def serve(self) -> None:
        """Give out what can be given out.

        May be called at any time, even by a finalizer that the garbage collector runs in the middle of this very function.
        Such a call only notes that there is more to do.
        """
        lock = self._lock
        self._again = True
        if lock._is_owned():  # type: ignore[attr-defined] # noqa: SLF001 - as threading.Condition asks it
            return
        try:
            while self._again:
                with lock:
                    self._again = False
                    for used in self.places:
                        holder = used.holder
                        if holder is None or ((user := holder()) is not None and not user.ended):
                            continue
                        now = now_s()
                        self.on_freed(used, now)
                        used.free_since = now
                        used.holder = None
                    if self._arrived or self._left or self._waiting:
                        self._give_out()
        finally:
            if lock._is_owned():  # type: ignore[attr-defined] # noqa: SLF001 - interrupted before the `with` block could release it
                lock.release()

    def _give_out(self) -> None:
        while self._arrived:
            ticket = self._arrived[0]
            if self._waiting or not self._serves(ticket):
                self._enqueue(ticket)
            self._arrived.popleft()  # last: an interruption before it loses nobody
        while self._left:
            self._leave_queue(self._left.popleft())
        declined: set[tuple[Choose[T], bool]] = set()
        while self._waiting and (first := self._first_waiting(declined)) is not None:
            if self._serves(first):
                self._leave_queue(first)
            else:
                declined.add(first.kind)

    def _serves(self, ticket: Ticket[T]) -> bool:
        """Give the ticket a place, or refuse it. Returns False if it has to wait."""
        if not ticket.ended and (ticket.last or not (self.closed or self._refuses)):
            for place in self.places:  # it may already have one, if an interruption stopped the call that served it
                if place.holder is not None and place.holder() is ticket:
                    break
            else:
                chosen = ticket.choose(self.places)
                if chosen is None:
                    return False
                place = chosen
                place.holder = weakref.ref(ticket, self._collected)
            ticket.place = place
        ticket.answered = True
        if ticket.woken is not None:
            ticket.woken.set()
        return True

    def _collected(self, _: object) -> None:
        """Called when a ticket is no longer referred to, in the middle of any line."""
        self.serve()

    def _enqueue(self, ticket: Ticket[T]) -> None:
        queue = self._waiting.setdefault(ticket.kind, OrderedDict())
        if ticket not in queue:
            ticket.arrival = next(self._arrivals)
            queue[ticket] = None

    def _first_waiting(self, declined: set[tuple[Choose[T], bool]]) -> Ticket[T] | None:
        first = [next(iter(queue)) for kind, queue in self._waiting.items() if queue and kind not in declined]
        return min(first, key=lambda ticket: ticket.arrival, default=None)

    def _leave_queue(self, ticket: Ticket[T]) -> None:
        queue = self._waiting.get(ticket.kind)
        if queue is not None:
            queue.pop(ticket, None)
            if not queue:
                self._waiting.pop(ticket.kind, None)


class Ticket(Generic[T]):
    """A place in the queue, then the use of one thing. End it in two ``finally`` clauses, as the first may be interrupted.

    ::

        ticket = turns.ticket()
        try:
            try:
                thing = ticket.wait(deadline)
                ...
            finally:
                ticket.end()
        finally:
            ticket.end()

    Tickets of the same ``kind`` find a place, or none, alike. ``last`` is served even after :meth:`FairQueue.close`.
    ``answered`` says that it got a place or was refused, so there is nothing more to wait for; ``ended`` that it holds nothing,
    and never will.
    """

    __slots__ = (
        "__weakref__",
        "_queue",
        "answered",
        "arrival",
        "choose",
        "ended",
        "kind",
        "last",
        "place",
        "woken",
    )

    def __init__(self, fair_queue: FairQueue[T], choose: Choose[T], *, last: bool = False) -> None:
        self._queue = fair_queue
        self.place: Place[T] | None = None
        self.choose = choose
        self.last = last
        self.kind = choose, last
        self.arrival = 0
        self.answered = False
        self.ended = False
        self.woken: Event | None = None

    def wait(self, deadline: Deadline) -> T:
        """Wait for a thing, behind earlier tickets that would take it. Raises `NoTurn` if we got none."""
        self._queue.queue_up(self)
        if not self.answered:
            self.wait_for_answer(deadline)
        if self.place is None:
            raise NoTurn
        return self.place.thing

    def wait_for_answer(self, deadline: Deadline) -> None:
        """Wait until the ticket, which has queued up, has a place or is refused, or for the deadline. By one caller."""
        if self.woken is None:
            self.woken = Event()
        if not self.answered:  # the thread that answers looks for the event after that
            self.woken.wait(deadline.remaining_s())

    def end(self) -> None:
        """Give the thing back. May be called at any time, and more than once."""
        place = self.place
        if self.ended and place is not None and (place.holder is None or place.holder() is not self):
            return  # a former call has done all of it
        self.ended = True
        if place is None:
            self._queue.leave(self)
        else:
            self._queue.serve()


def longest_free(places: Sequence[Place[T]]) -> Place[T] | None:
    """The place that was free for longest; None if there is no place."""
    free = [place for place in places if place.holder is None]
    return min(free, key=lambda place: place.free_since, default=None)
