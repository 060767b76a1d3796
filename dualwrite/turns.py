"""Things that one caller uses at a time: given out first come, first served, and kept by no caller that was interrupted.

``KeyboardInterrupt`` comes between any two lines. So one assignment gives a thing away (`Place.holder`) and one gives it back
(the ticket has ended); everything else follows from these two, and whatever an interruption left undone, the next call does.
A ticket that nobody refers to any more has ended, too.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from dualwrite.deadline import Deadline, now_s

T = TypeVar("T")


def _owned(lock: threading.RLock) -> bool:
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return] # noqa: SLF001 - as threading.Condition asks it


class NoTurn(Exception):
    """The deadline came first, or nothing is given out any more."""


class Place(Generic[T]):
    """One thing and who uses it.

    Attributes:
        thing: The thing.
        holder: Refers to the ticket of its user; None, or the ticket has ended, while nobody uses it.
        free_since: When its last user's end was noticed, in seconds on the clock of the process.
    """

    def __init__(self, thing: T) -> None:
        self.thing = thing
        self.holder: weakref.ref[Ticket[T]] | None = None
        self.free_since = now_s()

    @property
    def user(self) -> Ticket[T] | None:
        """The ticket of its user, None if nobody uses it."""
        holder = self.holder
        ticket = None if holder is None else holder()
        return None if ticket is None or ticket.ended else ticket


Choose = Callable[[Sequence[Place[T]]], "Place[T] | None"]
"""Which of the places to give to a ticket: one without a user, or None if it is to wait. Called by one thread at a time."""


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
        self._waiting: list[Ticket[T]] = []
        self._lock = threading.RLock()
        self._again = False

    def ticket(self, choose: Choose[T] | None = None) -> Ticket[T]:
        """A ticket, which holds nothing yet.

        Args:
            choose: Which place it takes; the one that was free for longest if not given.
        """
        return Ticket(self, choose or longest_free)

    def close(self) -> None:
        """Refuse those who wait and those who come. Whoever uses a thing goes on."""
        self.closed = True
        self.serve()

    def drain(self, deadline: Deadline) -> Sequence[T]:
        """The things that nobody uses, when nobody uses any or the deadline comes. After :meth:`close`."""
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
        """Let the ticket wait behind all that wait already."""
        self._waiting.append(ticket)
        self.serve()

    def serve(self) -> None:
        """Give out what can be given out.

        May be called at any time: also by a finalizer, which the garbage collector may run in the middle of this very
        function. It then only says that there is more to do.
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
            if _owned(self._lock):  # interrupted where the `with` block was to release it
                self._lock.release()

    def _give_out(self) -> None:
        for used in list(self.places):
            if used.holder is not None and used.user is None:
                self.on_freed(used)
                used.free_since = now_s()
                used.holder = None
        declined: set[Choose[T]] = set()
        for ticket in list(self._waiting):
            if not ticket.ended and not (self.closed and not ticket.last):
                # Its place may be known already: whoever was to serve it was interrupted.
                place = self._place_of(ticket)
                if place is None and ticket.choose not in declined:
                    place = ticket.choose(self.places)
                if place is None:
                    declined.add(ticket.choose)
                    continue
                place.holder = weakref.ref(ticket, lambda _: self.serve())
                ticket.place = place
            self._waiting.remove(ticket)
            ticket.woken.put(None)

    def _place_of(self, ticket: Ticket[T]) -> Place[T] | None:
        return next((place for place in self.places if place.user is ticket), None)


class Ticket(Generic[T]):
    """A place in the queue, then the use of one thing. Its end stands in two ``finally``, as the first may be interrupted.

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
        place: What it holds, since :meth:`wait`.
        choose: Which place it takes.
        last: Whether it is served after :meth:`Turns.close`.
        ended: Whether it holds nothing any more, and never will.
        woken: Gets an item when there is something to look at.
    """

    def __init__(self, turns: Turns[T], choose: Choose[T], *, last: bool = False) -> None:
        self._turns = turns
        self.place: Place[T] | None = None
        self.choose = choose
        self.last = last
        self.ended = False
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait(self, deadline: Deadline) -> T:
        """Wait for a thing: behind those who came before, as far as they would take it.

        Raises:
            NoTurn: There was none for us.
        """
        self._turns.queue_up(self)
        with suppress(queue.Empty):
            self.woken.get(timeout=deadline.remaining_s())
        if self.place is None:
            raise NoTurn
        return self.place.thing

    def end(self) -> None:
        """Give it back. May be called at any time, and more than once."""
        self.ended = True
        self._turns.serve()


def longest_free(places: Sequence[Place[T]]) -> Place[T] | None:
    """The place that was free for longest."""
    free = [place for place in places if place.user is None]
    return min(free, key=lambda place: place.free_since, default=None)
