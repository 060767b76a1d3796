"""Decisions of a consumer: what to do after a failed attempt, and whose open transactions the members of a group may settle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, TypeVar

from dualwrite.errors import CompletionPending, DualWriteError, Fenced, TransactionAborted, TransactionInDoubt
from dualwrite.protocol.process import Redo, redo_after
from dualwrite.protocol.values import writer_of

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


_BY_CLASS: Final[Mapping[type[DualWriteError], Trouble]] = {
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
    kind = next((kind for of, kind in _BY_CLASS.items() if isinstance(error, of)), Trouble.FATAL)
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


def member_id(group: str, member: str) -> str:
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
