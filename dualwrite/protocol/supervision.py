"""What a supervisor does with each writer: settles what a dead owner left, leaves alone what may have a live one, and says why.

Every settler claims, and a claim fences an owner that is still alive. A person who runs a recovery has looked first; a
supervisor has not. So it is more careful than a recovery: each sign of life holds it back, and so does each doubt about
its own view.

- A lease that is held is a live owner, whatever its transactions look like.
- A writer is judged as a whole. If its transaction is old, but it has changed another of its rows since, it is at work.
- Ages compare two clocks. If they disagree, no age is known.
- After an outage every transaction looks old. Owners that survived it finish by themselves once Kafka answers, so they get the
  same time as any other before their ids are taken.
- Letting the broker abort what the database has decided is worse than fencing a live owner. Where little of its time is left,
  the supervisor waits only as long as a live owner needs to complete it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Final, TypeAlias

from dualwrite.protocol.members import LeaseState
from dualwrite.protocol.outbox import growing_pause_s

URGENT_S: Final = 5.0
"""A live owner completes a decided transaction within milliseconds, if Kafka answers."""
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 300.0


class Action(Enum):
    """What a supervisor does with a writer in this round."""

    SETTLE = "settle"
    LEAVE = "leave"


class Reason(Enum):
    """Why. The first four settle; the others leave the writer alone."""

    RUNNING_OUT = "running out"
    DECIDED = "decided"
    UNDECIDED = "undecided"
    WAITING = "waiting"
    NOTHING = "nothing"
    WENT_BACK = "went back"
    CLOCK = "clock"
    LEASED = "leased"
    SLOT = "slot"
    KAFKA_IS_BACK = "kafka is back"
    YOUNG = "young"
    CHANGED = "changed"
    FAILED = "failed"


SILENT_SO_FAR: Final = frozenset({Reason.KAFKA_IS_BACK, Reason.YOUNG, Reason.CHANGED})
"""Reasons that end by themselves once an owner shows no sign of life for long enough."""


@dataclass(frozen=True)
class Tries:
    """The attempts of one supervisor to settle one writer. Times are of its own clock, which only moves forward.

    Attributes:
        failures: How many attempts in a row have failed.
        last_s: When the last one ended; None before the first.
        next_s: When the next one is due.
        error: Why the last one failed; None if it succeeded.
    """

    failures: int = 0
    last_s: float | None = None
    next_s: float = -inf
    error: str | None = None

    def failed(self, now_s: float, error: str) -> Tries:
        """An attempt has failed: the next one comes after a pause that grows, up to five minutes."""
        failures = self.failures + 1
        pause_s = growing_pause_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        return replace(self, failures=failures, last_s=now_s, next_s=now_s + pause_s, error=error)

    def succeeded(self, now_s: float) -> Tries:
        """An attempt has succeeded."""
        return Tries(last_s=now_s)


UNTRIED: Final = Tries()


@dataclass(frozen=True)
class Seen:
    """One writer with all its lanes, as one round has seen it. All times are in seconds.

    Attributes:
        writer: Its name; that of a slot stands for itself.
        needs_recovery: Whether settling would change anything, or report a loss.
        decided: Whether the database has decided something that Kafka does not show as complete.
        undecided: Whether settling would abort something.
        youngest_s: Since when the newest of what is open has been open, on either side; None if nothing is.
        time_left_s: Until the broker aborts something decided; None if it does not.
        unchanged_s: Since its owner last changed one of its rows, by the database's clock. Claims by supervisors do not count.
        lease: The state of its lease; None if it has none.
        lease_left_s: Until the lease expires; negative once it has.
        slot_held: Whether a task, or the driver that it prepared for, still holds the slot.
        claim_lost: Whether the database has lost a claim, so that only a recovery after a restore can claim the id.
        waiting: How many of its messages wait in the database.
        waiting_s: For how long the first of them has waited.
    """

    writer: str
    needs_recovery: bool = False
    decided: bool = False
    undecided: bool = False
    youngest_s: float | None = None
    time_left_s: float | None = None
    unchanged_s: float = inf
    lease: LeaseState | None = None
    lease_left_s: float | None = None
    slot_held: bool = False
    claim_lost: bool = False
    waiting: int = 0
    waiting_s: float | None = None


@dataclass(frozen=True)
class View:
    """What a round knows of its own view. All times are in seconds.

    Attributes:
        now_s: The supervisor's own clock, that of :class:`Tries`.
        answering_s: Since when both servers have answered every round.
        skew_s: By how much this machine's clock is ahead of the database's; negative if it is behind.
    """

    now_s: float
    answering_s: float
    skew_s: float = 0.0


@dataclass(frozen=True)
class Rule:
    """What the user has configured.

    Attributes:
        settle_after_s: An owner without a sign of life for so long counts as dead.
        sends_waiting: Whether messages that a dead writer left waiting are sent.
    """

    settle_after_s: float = 60.0
    sends_waiting: bool = True


Because: TypeAlias = tuple[Reason, str]


@dataclass(frozen=True)
class Planned:
    """What becomes of one writer in this round.

    Attributes:
        writer: Its name.
        action: Whether to settle it.
        reason: Why, as a kind: as long as it is the same, nothing has changed.
        because: Why, in words, with the figures of this round.
        patience_s: To settle: an owner that has begun something less than so many seconds ago is left alone after all.
        due_in_s: To leave alone: after so many seconds without a sign of life the reason is over; None if time does not end it.
    """

    writer: str
    action: Action
    reason: Reason
    because: str
    patience_s: float = 0.0
    due_in_s: float | None = None


def plan(seen: Seen, view: View, rule: Rule, tries: Tries = UNTRIED) -> Planned:
    """Decide what to do with one writer: the first reason to leave it alone, in this order, or the reason to settle it."""
    urgent = seen.decided and seen.time_left_s is not None and seen.time_left_s <= rule.settle_after_s
    patience_s = min(URGENT_S, rule.settle_after_s) if urgent else rule.settle_after_s
    leave = (
        _nothing_to_do(seen, rule)
        or _doubt(seen, view, rule.settle_after_s)
        or _holder(seen)
        or _sign_of_life(seen, view, patience_s)
        or _pause(view, tries)
    )
    if leave is not None:
        return Planned(seen.writer, Action.LEAVE, *leave, due_in_s=_due_in_s(leave[0], seen, view, patience_s, tries))
    return Planned(seen.writer, Action.SETTLE, *_why(seen, urgent=urgent), patience_s)


def why_not_by_hand(seen: Seen, rule: Rule) -> Because | None:
    """Why a person may not settle a writer now: its owner may be alive, or nothing is there to settle. None: it may be done.

    A person may settle what :func:`plan` leaves alone for a pause after a failure, after an outage, for clocks that
    disagree, or as sending is switched off. Nobody may settle past a sign of life, or a database that has gone back.
    """
    return (
        _nothing_to_do(seen, replace(rule, sends_waiting=True))
        or _doubt(seen, View(now_s=0.0, answering_s=inf), rule.settle_after_s)
        or _holder(seen)
        or _sign_of_life(seen, View(now_s=0.0, answering_s=inf), rule.settle_after_s)
    )


def _nothing_to_do(seen: Seen, rule: Rule) -> Because | None:
    if seen.needs_recovery or (seen.waiting and rule.sends_waiting):
        return None
    if seen.waiting:
        return Reason.NOTHING, f"{seen.waiting:,} messages wait, and sending them is switched off"
    return Reason.NOTHING, "nothing to do"


def _doubt(seen: Seen, view: View, settle_after_s: float) -> Because | None:
    if seen.claim_lost:
        return Reason.WENT_BACK, "the database has gone back in time, or a copy is in use: a person must compare both"
    if abs(view.skew_s) > settle_after_s / 2:
        where = "ahead of" if view.skew_s > 0 else "behind"
        return Reason.CLOCK, f"this machine's clock is {_s(abs(view.skew_s))} {where} the database's: no age is known"
    return None


def _holder(seen: Seen) -> Because | None:
    if seen.lease is LeaseState.HELD:
        return Reason.LEASED, f"its owner is alive: its lease is held for {_s(seen.lease_left_s or 0.0)} more"
    if seen.slot_held and seen.undecided:
        return Reason.SLOT, "undecided, and a task or its driver still holds the slot"
    return None


def _sign_of_life(seen: Seen, view: View, patience_s: float) -> Because | None:
    if view.answering_s < patience_s:
        since = f"both servers have answered for {_s(view.answering_s)}"
        return Reason.KAFKA_IS_BACK, f"{since}: an owner that is alive has until {_s(patience_s)}"
    if seen.youngest_s is not None and seen.youngest_s < patience_s:
        return Reason.YOUNG, f"young: its newest transaction began {_s(seen.youngest_s)} ago"
    if not seen.needs_recovery and seen.waiting_s is not None and seen.waiting_s < patience_s:
        return Reason.YOUNG, f"young: its first message has waited for {_s(seen.waiting_s)}"
    if seen.unchanged_s < patience_s:
        return Reason.CHANGED, f"its owner was at work {_s(seen.unchanged_s)} ago"
    return None


def _pause(view: View, tries: Tries) -> Because | None:
    if view.now_s >= tries.next_s:
        return None
    left_s = tries.next_s - view.now_s
    return Reason.FAILED, f"attempt {tries.failures} failed ({tries.error}); the next one is in {_s(left_s)}"


def _due_in_s(reason: Reason, seen: Seen, view: View, patience_s: float, tries: Tries) -> float | None:
    if reason is Reason.LEASED:
        return seen.lease_left_s
    if reason is Reason.FAILED:
        return tries.next_s - view.now_s
    if reason not in SILENT_SO_FAR:
        return None
    ages = (view.answering_s, seen.unchanged_s, seen.youngest_s, None if seen.needs_recovery else seen.waiting_s)
    return patience_s - min(age for age in ages if age is not None)


def _why(seen: Seen, *, urgent: bool) -> Because:
    owner = "its lease has expired" if seen.lease is LeaseState.EXPIRED else "its owner shows no sign of life"
    if urgent:
        return Reason.RUNNING_OUT, f"decided, and the broker aborts it in {_s(seen.time_left_s or 0.0)}"
    if seen.decided:
        return Reason.DECIDED, f"the database has decided, Kafka has not followed, and {owner}"
    if seen.needs_recovery:
        return Reason.UNDECIDED, f"left open, undecided, and {owner}"
    return Reason.WAITING, f"{seen.waiting:,} messages wait in the database, and {owner}"


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s"
