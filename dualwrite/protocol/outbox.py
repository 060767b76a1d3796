"""The rules of messages that wait in the database: how they are sent, and what becomes of one that Kafka refuses for good.

Sending is itself a dual write: it deletes the waiting rows and produces what they hold. One send at a time takes the rows in
their order from the head, so everything here is a decision about the next send: how many rows, whether it is the last one,
which turns the mode back to direct under the lock on it, and how a refused message is found by halving.

A send that fails without a refusal is tried again after a pause; while Kafka is known to be silent nothing is tried at all, so
that an outage never counts against a message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from dualwrite.errors import ConfigurationError, DualWriteError
from dualwrite.protocol.message import STEPS

if TYPE_CHECKING:
    from datetime import datetime

    from typing_extensions import Self

Outbox: TypeAlias = Literal["never", "fallback", "always"]
"""When the messages of a writer wait in the database: never; while Kafka is silent; always."""

PRODUCED_AT: Final = "dualwrite-produced-at"
"""The header of a message that has waited: when its block produced it, in ms since 1970, as decimal digits. The record's
timestamp is the time of its send, unless the user gave one: by its age retention would delete what has waited for long."""

FIRST_ROWS: Final = 500
MOST_ROWS: Final = 20_000
"""A larger send is hardly faster: the costs of a dual write are spread over so many messages already."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""Of keys, values and headers in one send: what the sender holds in memory, several times over."""
MOST_ROWS_ALONE: Final = 2_000
"""Where one transaction at a time can write (SQLite), blocks wait for a whole send."""
LAST_ROWS: Final = 1_000
"""While the last send holds the lock on the mode, blocks wait: it is tried once no more rows than these are left."""
_SLOW_S: Final = 2.0
"""A send that takes longer gives its place to smaller ones: the broker, and a paused owner's successor, wait for it."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0
_FIRST_LOCK_PAUSE_S, _LONGEST_LOCK_PAUSE_S = 0.1, 2.0
_OF_THE_TOPIC: Final = frozenset({STEPS["UNKNOWN_TOPIC_OR_PARTITION"], STEPS["INVALID_TOPIC_EXCEPTION"]})
STOPPED_PAUSE_S: Final = 30.0
"""Between two tries of a message that Kafka refuses, where the sender stops at it: its cause may be mended meanwhile."""


@dataclass(frozen=True)
class Round:
    """The next send: at most so many rows from the head, and whether it locks the mode to turn it back to direct."""

    rows: int
    last: bool = False


@dataclass(frozen=True)
class Sends:
    """What a sender knows between two sends. Immutable: each step returns what is known after it.

    Attributes:
        turns_back: Whether the mode may become direct; never while the setting is ``always``.
        most_rows: The largest send.
        rows: The largest number of rows of the next send.
        suspects: The refused message is among so many rows at the head; 0 if none is known.
        caught_up: Whether the last send took everything there was, and that was little.
        lock_failures: How often in a row the lock on the mode was not free in time.
    """

    turns_back: bool
    most_rows: int = MOST_ROWS
    rows: int = FIRST_ROWS
    suspects: int = 0
    caught_up: bool = False
    lock_failures: int = 0

    def next(self, *, lock_due: bool = True) -> Round:
        """The next send. ``lock_due`` says whether the pause after a lock that was not free is over."""
        if self.suspects:
            return Round(max(1, self.suspects // 2))
        if self.caught_up and self.turns_back and lock_due:
            return Round(LAST_ROWS, last=True)
        return Round(self.rows)

    def sent(self, made: Round, read: int, *, seconds: float, full: bool = False) -> Self:
        """A send has ended: it had read so many rows. ``full`` says that its bytes, not its rows, were the limit."""
        full = full or read >= made.rows
        if self.suspects:
            # Those that went are no suspects; with the last one gone there is none. Nothing is known of what comes behind.
            return replace(self, suspects=max(0, self.suspects - read) if read else 0, caught_up=False)
        rows = self.rows
        if seconds > _SLOW_S:
            rows = max(1, rows // 2)
        elif full and not made.last:
            rows = min(2 * rows, self.most_rows)
        little = not full and read <= LAST_ROWS
        return replace(self, rows=rows, caught_up=little, lock_failures=0 if made.last else self.lock_failures)

    def refused(self, read: int) -> Self:
        """Kafka refuses one message, or several, of a send of so many rows; see :attr:`found`."""
        return replace(self, suspects=max(1, read), caught_up=False)

    @property
    def found(self) -> bool:
        """Whether the refused message is the one at the head."""
        return self.suspects == 1

    def moved_aside(self) -> Self:
        """The refused message waits no more."""
        return replace(self, suspects=0, caught_up=False)

    def failed(self) -> Self:
        """A send failed for another reason, perhaps because it was too large for the time that it had."""
        return replace(self, rows=max(1, self.rows // 2), caught_up=False)

    def not_locked(self) -> Self:
        """The lock on the mode was not free in time: a block works for long."""
        return replace(self, caught_up=False, lock_failures=self.lock_failures + 1)

    @property
    def lock_pause_s(self) -> float:
        """How long not to ask for the lock again. Short at first: a busy writer is to be back within a second."""
        return _growing(self.lock_failures, _FIRST_LOCK_PAUSE_S, _LONGEST_LOCK_PAUSE_S)


@dataclass(frozen=True)
class OutboxState:
    """What a writer's process knows of its outbox.

    Attributes:
        later: Whether its messages wait in the database; None if that was not read yet.
        since: When the mode changed; None if this process has not seen it change.
        rows: How many messages wait, as of the last count.
        size: The bytes of their keys, values and headers.
        oldest_at: When the oldest of them was produced, by the clock of the process; None if none waits.
        stopped: Why the sender stands at a message that Kafka refuses; None if it does not.
    """

    later: bool | None = None
    since: datetime | None = None
    rows: int = 0
    size: int = 0
    oldest_at: float | None = None
    stopped: str | None = None

    def turned(self, later: bool, at: datetime) -> Self:  # noqa: FBT001 - the mode itself
        """The mode has changed, or was read for the first time."""
        return replace(self, later=later, since=at)

    def with_rows(self, rows: int, size: int, oldest_at: float | None) -> Self:
        """What waits was counted."""
        return replace(self, rows=rows, size=size, oldest_at=oldest_at)

    def with_stop(self, why: str | None) -> Self:
        """The sender stands, or goes on."""
        return replace(self, stopped=why)


NO_OUTBOX: Final = OutboxState()
"""What is known where no messages wait."""


def pause_after(failures: int) -> float:
    """The seconds before another try after so many failures in a row, from 1 on. Never for good."""
    return _growing(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def _growing(failures: int, first_s: float, longest_s: float) -> float:
    doublings = min(failures - 1, 10)
    return min(first_s * float(2**doublings), longest_s) if failures > 0 else 0.0


def refusal_behind(error: BaseException) -> tuple[str, str] | None:
    """The topic of a message that Kafka refuses for good, and the reason for people; None if the error is another one.

    Only an answer counts, never silence: a message that is moved aside because Kafka was away would be lost to its readers.
    """
    found = _refusal(error)
    return None if found is None else (found.refused_topic or "", found.what)


def refuses_topic(error: BaseException) -> bool:
    """Whether every message of the topic would be refused: there is no such topic, or no right to it."""
    found = _refusal(error)
    return found is not None and (isinstance(found, ConfigurationError) or found.next_step in _OF_THE_TOPIC)


def _refusal(error: BaseException) -> DualWriteError | None:
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if isinstance(found, DualWriteError) and found.refused_topic is not None:
            return found
        seen.append(found)
        found = found.__cause__
    return None
