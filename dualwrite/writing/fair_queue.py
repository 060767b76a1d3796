"""Things that one caller uses at a time: first come, first served, and never lost to an interrupted caller.

``KeyboardInterrupt`` comes between any two lines. Handing out (`Place.holder`) and returning (the ticket has ended) are each a
single assignment, so an interrupt cannot leave a thing half-owned; the next call does what an interrupt left undone. A ticket
that nobody refers to any more has ended, too.
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


def _owned(lock: threading.RLock) -> bool:
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return] # noqa: SLF001 - as threading.Condition asks it


class NoTurn(Exception):
    """The deadline came first, or things are no longer given out."""


class Place(Generic[T]):
    """One thing and its user.

    Attributes:
        thing: The thing.
        holder: Refers to the user's ticket. The thing is free if this is None, or the ticket has ended.
        free_since: When the end of its last use was noticed, in seconds on the clock of the process.
    """

    def __init__(self, thing: T) -> None:
        self.thing = thing
        self.holder: weakref.ref[Ticket[T]] | None = None
        self.free_since = now_s()

    @property
    def user(self) -> Ticket[T] | None:
        """The user's ticket; None if the thing is free."""
        holder = self.holder
        ticket = None if holder is None else holder()
        return None if ticket is None or ticket.ended else ticket


Choose = Callable[[Sequence[Place[T]]], "Place[T] | None"]
"""Chooses the place for a ticket: one without a user, or None to let it wait. Called by one thread at a time."""


class Turns(Generic[T]):
    """The things, and the queue for them.

    Args:
        things: The things.
        on_freed: Called with each place whose user has ended, before it is given out again, by whichever thread notices.
    """

    def __init__(self, things: Iterable[T] = (), *, on_freed: Callable[[Place[T]], None] = lambda _: None) -> None:
        self.places = [Place(thing) for thing in things]
        self.on_freed = on_freed
        self.closed = False
        # By how they choose: where one of them finds no place, those behind it need not look. A thousand may wait.
        self._waiting: dict[tuple[Choose[T], bool], OrderedDict[Ticket[T], None]] = {}
        self._arrived: deque[Ticket[T]] = deque()
        self._ended: deque[Ticket[T]] = deque()
        self._arrivals = itertools.count()
        self._lock = threading.RLock()
        self._again = False

    def ticket(self, choose: Choose[T] | None = None) -> Ticket[T]:
        """A ticket, which holds nothing yet.

        Args:
            choose: Chooses its place; by default the one that was free for longest.
        """
        return Ticket(self, choose or longest_free)

    @property
    def waiting(self) -> int:
        """The number of tickets that wait."""
        return len(self._arrived) + sum(map(len, list(self._waiting.values())))

    def close(self) -> None:
        """Refuse waiting and new callers. Those that use a thing keep it."""
        self.closed = True
        self.serve()

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
        """Let the ticket wait behind all those that already wait."""
        ticket.arrival = next(self._arrivals)
        self._arrived.append(ticket)
        self.serve()

    def end(self, ticket: Ticket[T]) -> None:
        """Take the thing of a ticket that has ended, or its place in the queue."""
        self._ended.append(ticket)
        self.serve()

    def serve(self) -> None:
        """Give out what can be given out.

        May be called at any time, even by a finalizer that the garbage collector runs in the middle of this very function.
        Such a call only notes that there is more to do.
        """
        self._again = True
        if _owned(self._lock):
            return
        try:
            while self._again:
                with self._lock:
                    self._again = False
                    self._give_out()
        finally:
            if _owned(self._lock):  # interrupted before the `with` block could release it
                self._lock.release()

    def _give_out(self) -> None:
        for used in list(self.places):
            if used.holder is not None and used.user is None:
                self.on_freed(used)
                used.free_since = now_s()
                used.holder = None
        while self._arrived:
            ticket = self._arrived[0]
            self._waiting.setdefault(ticket.kind, OrderedDict())[ticket] = None
            self._arrived.popleft()  # last: an interruption before it loses nobody
        while self._ended:
            self._leave_queue(self._ended.popleft())
        declined: set[tuple[Choose[T], bool]] = set()
        while (first := self._first_waiting(declined)) is not None:
            ticket = first
            if not ticket.ended and not (self.closed and not ticket.last):
                # It may already have a place, if an interruption stopped the call that served it.
                place = self._place_of(ticket) or ticket.choose(self.places)
                if place is None:
                    declined.add(ticket.kind)
                    continue
                place.holder = weakref.ref(ticket, lambda _: self.serve())
                ticket.place = place
            self._leave_queue(ticket)
            ticket.woken.set()

    def _first_waiting(self, declined: set[tuple[Choose[T], bool]]) -> Ticket[T] | None:
        first = [next(iter(queue)) for kind, queue in self._waiting.items() if queue and kind not in declined]
        return min(first, key=lambda ticket: ticket.arrival, default=None)

    def _leave_queue(self, ticket: Ticket[T]) -> None:
        self._waiting.get(ticket.kind, OrderedDict()).pop(ticket, None)

    def _place_of(self, ticket: Ticket[T]) -> Place[T] | None:
        return next((place for place in self.places if place.user is ticket), None)


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

    Attributes:
        place: The place that it holds, since :meth:`wait`.
        choose: Chooses its place.
        last: Whether it is served even after :meth:`Turns.close`.
        kind: Tickets alike in this find a place, or none, alike.
        arrival: Its place among all that have waited.
        ended: Whether its use is over: it holds nothing, and never will.
        woken: Set when the ticket was served or refused.
    """

    def __init__(self, turns: Turns[T], choose: Choose[T], *, last: bool = False) -> None:
        self._turns = turns
        self.place: Place[T] | None = None
        self.choose = choose
        self.last = last
        self.kind = choose, last
        self.arrival = 0
        self.ended = False
        self.woken = Event()

    def wait(self, deadline: Deadline) -> T:
        """Wait for a thing, behind earlier tickets that would take it.

        Raises:
            NoTurn: There was none for us.
        """
        self._turns.queue_up(self)
        self.woken.wait(deadline.remaining_s())
        if self.place is None:
            raise NoTurn
        return self.place.thing

    def end(self) -> None:
        """Give the thing back. May be called at any time, and more than once."""
        self.ended = True
        self._turns.end(self)


def longest_free(places: Sequence[Place[T]]) -> Place[T] | None:
    """The place that was free for longest."""
    free = [place for place in places if place.user is None]
    return min(free, key=lambda place: place.free_since, default=None)
