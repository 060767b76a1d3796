"""Which numbered id a member of a fleet takes, when a lease is over, whose holder has died, and how often one is renewed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.lives import LeaseEvent, LeaseState
from dualwrite.protocol.values import check_seconds, member_id

_BEATS: Final = 6
_LEAST_BEATS: Final = 3
_RETRY: Final = 0.25
_LONGEST_NAME: Final = 229
"""A transactional id has at most 240 characters; a dash and ten digits are the number's."""
_ON: Final = " on "
_PLACE: Final = re.compile(f"(?s:.*){_ON}(?P<system>[^ ]+)/(?P<pid>[1-9][0-9]{{0,6}})")
"""As :meth:`Place.sign` writes it. No system has process ids of more than seven digits."""


@dataclass(frozen=True)
class Place:
    """Where a process runs: written behind the owner of its lease, so that the processes beside it can see that it is gone.

    ``system`` names one boot of one kernel and one namespace of process ids: where two processes have the same system, a
    number means the same process to both. It has no spaces and no wildcards of SQL.
    """

    system: str
    pid: int

    @property
    def mark(self) -> str:
        """A text that the owners of all processes of this system hold, and no others."""
        return f"{_ON}{self.system}/"

    def sign(self, owner: str) -> str:
        """The owner with this place behind it."""
        return f"{owner}{self.mark}{self.pid}"


def place_of(owner: str) -> Place | None:
    """The place that an owner names; None if it names none: then the lease alone shows that it is dead."""
    found = _PLACE.fullmatch(owner)
    return None if found is None else Place(found["system"], int(found["pid"]))


@dataclass(frozen=True)
class Lease:
    """One numbered id of a fleet (``fleet-number``), as its row was read. One without an owner is free.

    ``left_s`` are the seconds until it expires, by the database's clock when the row was read.
    """

    transactional_id: str
    fleet: str
    number: int
    owner: str | None = None
    left_s: float | None = None

    @property
    def state(self) -> LeaseState:
        """Free, held, or expired."""
        if self.owner is None or self.left_s is None:
            return LeaseState.FREE
        return LeaseState.HELD if self.left_s > 0 else LeaseState.EXPIRED


def holder_has_died(lease: Lease, here: Place | None, has_ended: Callable[[int], bool]) -> bool:
    """Whether the process that holds the lease is known to have ended, so that nobody needs to wait until it expires.

    Only a process of the same system can know, which ``has_ended`` asks; False if it cannot be known. A suspended process has
    not ended: nobody takes its id before its lease expires.
    """
    if here is None or lease.owner is None or lease.state is not LeaseState.HELD:
        return False
    place = place_of(lease.owner)
    return place is not None and place.system == here.system and has_ended(place.pid)


def numbers_to_try(leases: Iterable[Lease], has_died: Callable[[Lease], bool]) -> Iterator[int]:
    """The numbers that nobody holds, lowest first, without an end: a newcomer takes the first one that it gets.

    A lease that has expired, or whose holder has died, takes its place among the free ones. So numbers stay small, and a dead
    member's id is settled soon.
    """
    held = {lease.number for lease in leases if lease.state is LeaseState.HELD and not has_died(lease)}
    return (number for number in count() if number not in held)


def heard(transactional_id: str, renewed: Collection[str]) -> LeaseEvent:
    """The event of a heartbeat for our lease, from the ids that it has renewed under our name."""
    return LeaseEvent.RENEW if transactional_id in renewed else LeaseEvent.LOSE


@dataclass(frozen=True)
class LeaseTiming:
    """How long a lease lasts, and how often it is renewed, in seconds.

    Others take a lease that was not renewed for ``timeout_s``. ``heartbeat_s`` is the mean time between two heartbeats; a
    sixth of the timeout if not given.
    """

    timeout_s: float = 30.0
    heartbeat_s: float | None = None

    def __post_init__(self) -> None:
        check_seconds("lease_timeout_s", self.timeout_s)
        if self.heartbeat_s is not None:
            check_seconds("heartbeat_s", self.heartbeat_s)
        if self.beat_s > self.timeout_s / _LEAST_BEATS:
            raise ConfigurationError(
                f"a heartbeat every {self.beat_s:g} s is too rare for a lease of {self.timeout_s:g} s",
                next_step=f"give at most {self.timeout_s / _LEAST_BEATS:g} s: a lost heartbeat must not end a lease",
            )

    @property
    def beat_s(self) -> float:
        """The mean time between two heartbeats."""
        return self.timeout_s / _BEATS if self.heartbeat_s is None else self.heartbeat_s

    def pause_s(self, drawn: float, *, failed: bool = False) -> float:
        """The pause before the next heartbeat, shorter if the last one failed.

        ``drawn`` is a random number from 0 to 1, so that members that started together do not ask at the same time.
        """
        return self.beat_s * (0.75 + 0.5 * drawn) * (_RETRY if failed else 1.0)

    def is_over(self, since_s: float) -> bool:
        """Whether a lease may have expired that was renewed that many seconds ago, counted from before the request."""
        return since_s >= self.timeout_s


def check_fleet(fleet: str) -> None:
    """Refuse a name that cannot be a fleet's: it is empty or too long, or holds a ``#``."""
    if not 1 <= len(fleet) <= _LONGEST_NAME or "#" in fleet:
        raise ConfigurationError(
            f"{fleet!r} cannot be the name of a fleet",
            next_step=f"use 1 to {_LONGEST_NAME} characters without '#'; its ids are {member_id('NAME', 0)!r} and so on",
        )
