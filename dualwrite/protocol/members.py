"""Decisions of a process that shares work with others: a member of a fleet about its lease, and one of a consumer group.

A member of a fleet holds a lease on a numbered id. A consumer decides what to do after a failed attempt, and whose unsettled
ids are those of dead members.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from types import MappingProxyType
from typing import Final, TypeVar

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
)
from dualwrite.protocol.process import Redo, redo_after
from dualwrite.protocol.values import check_seconds, member_id, writer_of

# The life of one lease, as its holder knows it: the right to try to own a numbered id.
#
# A lease permits a member to try, and nothing else. The claim of an id fences its former owner, whatever the lease
# says.


class LeaseState(Enum):
    """The states of one lease."""

    FREE = "free"
    HELD = "held"
    EXPIRED = "expired"
    TAKEN = "taken"


class LeaseEvent(Enum):
    """The events of one lease.

    ``TAKE``: the row names us. ``RENEW``: a heartbeat found our name there. ``EXPIRE``: no heartbeat has come through for the
    lease's time, so any other member may take it. ``LOSE``: a heartbeat found another name there, or none. ``GIVE_BACK``: we
    have given it up.
    """

    TAKE = "take"
    RENEW = "renew"
    EXPIRE = "expire"
    LOSE = "lose"
    GIVE_BACK = "give back"


_LEASE, _OF_LEASE = LeaseState, LeaseEvent

LEASE_LIFE: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = MappingProxyType(
    {
        _LEASE.FREE: {_OF_LEASE.TAKE: _LEASE.HELD},
        _LEASE.HELD: {
            _OF_LEASE.RENEW: _LEASE.HELD,
            _OF_LEASE.EXPIRE: _LEASE.EXPIRED,
            _OF_LEASE.LOSE: _LEASE.TAKEN,
            _OF_LEASE.GIVE_BACK: _LEASE.FREE,
        },
        # Renewed late, but in time: nobody has taken it. After an outage of the database, all members come here at once.
        _LEASE.EXPIRED: {
            _OF_LEASE.RENEW: _LEASE.HELD,
            _OF_LEASE.EXPIRE: _LEASE.EXPIRED,
            _OF_LEASE.LOSE: _LEASE.TAKEN,
            _OF_LEASE.GIVE_BACK: _LEASE.FREE,
        },
        _LEASE.TAKEN: {_OF_LEASE.GIVE_BACK: _LEASE.FREE},
    }
)


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
    """Where a process runs: written behind the owner of its lease, so that other processes there can see that it is gone.

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


def heard(*, renewed: bool) -> LeaseEvent:
    """The event of a heartbeat for our lease, which it has renewed, or found taken."""
    return LeaseEvent.RENEW if renewed else LeaseEvent.LOSE


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


Item = TypeVar("Item")

_SEPARATOR: Final = "/"
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0


class Trouble(Enum):
    """The kinds of failed attempts, by what helps."""

    WORK = "the work fails, and may fail again"
    UNREADABLE = "a message cannot be deserialized: the same bytes will fail again"
    PASSING = "a server or another transaction was in the way: the same work may succeed"
    MOVED = "another member has the partitions, or had them meanwhile"
    OWNER = "another process has claimed our transactional id"
    DOUBT = "the outcome is not known until the transaction is settled"
    DECIDED = "the database has committed; Kafka follows"
    FATAL = "a person must look"


class Step(Enum):
    """The next step after an attempt."""

    DONE = "continue with the next messages"
    REDO = "run the same messages again, after a pause"
    SPLIT = "run each half of the messages by itself"
    ISOLATE = "run the message that fails by itself, between those before and after it"
    SET_ASIDE = "write the message to the dead-letter topic"
    REWIND = "forget the messages, and read again from the committed offset"
    REOPEN = "open a new writer, which settles, then read again from the committed offset"
    STOP = "stop, and raise the error"


_TROUBLE_BY_CLASS: Final[Mapping[type[DualWriteError], Trouble]] = {
    Fenced: Trouble.OWNER,
    TransactionInDoubt: Trouble.DOUBT,
    CompletionPending: Trouble.DECIDED,
}


def trouble_of(error: DualWriteError, *, handling: bool = False, moving: bool = False) -> Trouble:
    """The kind of an error that has left a block.

    If the handler has raised it (``handling``), an outcome in doubt or decided is that of another dual write inside the
    handler: this one has aborted. If moving the offsets has (``moving``), a refusal is that of the group coordinator.
    """
    advice = redo_after(error)
    if advice is Redo.AGAIN:
        return Trouble.PASSING
    if advice is Redo.USELESS and isinstance(error, TransactionAborted):
        return Trouble.MOVED if moving else Trouble.WORK
    kind = next((kind for of, kind in _TROUBLE_BY_CLASS.items() if isinstance(error, of)), Trouble.FATAL)
    return Trouble.WORK if handling and kind in {Trouble.DOUBT, Trouble.DECIDED} else kind


def step_after(trouble: Trouble, *, messages: int, failures: int, attempts: int, sets_aside: bool) -> Step:
    """Decide what to do after a failed attempt with so many messages.

    Only failures of the work and of deserializers count: an outage must not send good messages to the dead-letter topic. A new
    writer settles what is in doubt; the committed offset then shows whether the messages are written, since it is a part of
    the transaction.

    ``failures`` counts this attempt if it has failed because of the work, which may fail ``attempts`` times.
    """
    if trouble not in {Trouble.WORK, Trouble.UNREADABLE}:
        return _STEPS[trouble]
    if trouble is Trouble.UNREADABLE and messages > 1:
        return Step.ISOLATE
    if trouble is Trouble.WORK and failures < attempts:
        return Step.REDO
    if not sets_aside:
        return Step.STOP
    return Step.SPLIT if messages > 1 else Step.SET_ASIDE


_STEPS: Final[Mapping[Trouble, Step]] = {
    Trouble.PASSING: Step.REDO,
    Trouble.MOVED: Step.REWIND,
    Trouble.OWNER: Step.REOPEN,
    Trouble.DOUBT: Step.REOPEN,
    Trouble.DECIDED: Step.DONE,
    Trouble.FATAL: Step.STOP,
}


def halves(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """The two halves of at least two items, in their order."""
    middle = len(items) // 2
    return items[:middle], items[middle:]


def around(items: Sequence[Item], index: int) -> list[Sequence[Item]]:
    """The items before one of them, this one by itself, and those after it, in their order; without empty ones."""
    return [part for part in (items[:index], items[index : index + 1], items[index + 1 :]) if part]


def failures_left_over(messages: int, attempts: int) -> int:
    """The failures that a half begins with: several messages get one more attempt, a single message gets all."""
    return attempts - 1 if messages > 1 else 0


def pause_s(failures: int) -> float:
    """Seconds to wait before the next attempt, after this many failed ones in a row."""
    return min(_FIRST_PAUSE_S * float(1 << min(failures - 1, 16)), _LONGEST_PAUSE_S)


def next_offsets(consumed: Iterable[tuple[str, int, int]]) -> dict[tuple[str, int], int]:
    """By topic and partition, the offset after the last one consumed."""
    after: dict[tuple[str, int], int] = {}
    for topic, partition, offset in consumed:
        after[topic, partition] = max(offset + 1, after.get((topic, partition), 0))
    return after


def member_prefix(group: str) -> str:
    """The prefix of the transactional ids of a group's members."""
    return f"{group}{_SEPARATOR}"


def consumer_member_id(group: str, member: str) -> str:
    """The transactional id of a member, which is also the ``client.id`` of its consumer.

    Refuses, with `ValueError`, an empty name and one with a character that the member's peers would read otherwise.
    """
    if not member or _SEPARATOR in member or "#" in member:
        raise ValueError(f"a member's name is not empty, and has neither '#' nor {_SEPARATOR!r}: {member!r}")
    return member_prefix(group) + member


def left_behind(group: str, unsettled: Collection[str], present: Collection[str], ours: str) -> list[str]:
    """The members with something unsettled whose owners are no longer in the group: their peers may settle it.

    A member joins its group before it begins a transaction. So if an id has an open transaction, and a list of members read
    *after* that was seen does not contain it, its owner has died or was expelled. An expelled owner may be alive, but its
    partitions are assigned to others, so settling only aborts a transaction that could not commit. Do not trust a list without
    our own id: we may have been expelled ourselves.

    ``unsettled`` are transactional ids, lanes included; ``present`` are client ids.
    """
    if ours not in present:
        return []
    prefix = member_prefix(group)
    names = {writer_of(name) for name in unsettled if name.startswith(prefix)}
    return sorted(name for name in names - set(present) if _SEPARATOR not in name[len(prefix) :])
