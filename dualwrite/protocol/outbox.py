"""The rules of messages that wait in the database: which way a block's messages go, and how those that wait are sent.

A block, given its setting, the writer's mode, Kafka's silence and its lane, sends directly, lets its messages wait as rows, or
refuses. The database keeps the *mode* of each writer. A block reads it in its first statement; one that finds *later* takes a
share of the lock on it and looks again. So a block that began after another one had decided to wait sees that, and cannot
overtake it::

    setting     mode      the lane can send    way
    never       direct    -                    direct
    never       later     -                    refuse
    fallback    direct    yes                  direct; turns the mode if Kafka falls silent in the middle
    fallback    direct    no                   turn: the mode becomes later with the block's decision
    fallback    later     -                    wait, under a share of the lock
    always      direct    -                    turn
    always      later     -                    wait, under a share; without one if the writer itself is "always"

The mode of a writer that is *always* never turns back while its owner lives, so nothing has to be held.

Sending is itself a dual write: it deletes the waiting rows and produces what they hold. One send at a time takes the rows in
their order from the head, so everything here is a decision about the next send: how many rows, whether it is the last one,
which turns the mode back to direct under the lock on it, and how a refused message is found by halving.

A send that fails without a refusal is tried again after a pause; while Kafka is known to be silent nothing is tried at all, so
that an outage never counts against a message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.protocol.message import STEPS
from dualwrite.protocol.values import OutboxMode, WriterLimits

if TYPE_CHECKING:
    from datetime import datetime

    from typing_extensions import Self

Outbox: TypeAlias = Literal["never", "fallback", "always"]
"""Whether the messages of a writer may wait in the database: ``never``; while Kafka does not answer; or ``always``."""

_SETTINGS: Final = get_args(Outbox)


def check_setting(setting: object) -> None:
    """Refuse what is not a setting of a writer."""
    if setting not in _SETTINGS:
        raise ConfigurationError(f"outbox is {setting!r}", next_step='choose "never", "fallback" or "always"')


def setting_of_block(writer: Outbox, block: Outbox | None) -> Outbox:
    """The setting of one block. A writer that is *never* has no block that is anything else: nobody would send its rows."""
    if block is None or block == writer:
        return writer
    check_setting(block)
    if writer == "never":
        raise ConfigurationError(
            f"a block has outbox={block!r}, and its writer has none",
            next_step='make the writer with outbox="fallback" or "always": it sends what waits',
        )
    # Its mode never turns back, so there is nothing that a block could fall back from.
    return "always" if writer == "always" and block == "fallback" else block


# What a block does


class Way(Enum):
    """The way of a block's messages."""

    DIRECT = "to Kafka, in the block's own transaction"
    SHARE = "look again, under a share of the lock on the mode"
    WAIT = "rows in the block's own transaction"
    TURN = "rows, and with them the writer's mode becomes later"
    REFUSE = "nowhere: messages that wait must come first"


def asks_kafka_first(setting: Outbox, *, silent: bool, later: bool) -> bool:
    """Whether a block makes its lane ready to send before it begins.

    ``silent`` says that Kafka is known to be; ``later``, that messages waited when this process last looked. Both only spare a
    wait: the mode in the database decides what the block does.
    """
    return setting == "never" or (setting == "fallback" and not silent and not later)


def way_of(setting: Outbox, mode: OutboxMode, *, can_send: bool, shared: bool, always: bool = False) -> Way:
    """The way of a block that has read the mode.

    Args:
        setting: The block's.
        mode: As it was read.
        can_send: Whether its lane is ready to send.
        shared: Whether the mode was read under a share of the lock, which the block holds to its end.
        always: Whether the writer itself is *always*.
    """
    if setting == "never":
        return Way.DIRECT if mode is OutboxMode.DIRECT else Way.REFUSE
    if mode is OutboxMode.LATER:
        return Way.WAIT if shared or always else Way.SHARE
    return Way.DIRECT if setting == "fallback" and can_send else Way.TURN


# The bounds of what waits


def full(limits: WriterLimits, *, rows: int, size: int, oldest_s: float | None) -> str | None:
    """Why no more messages may wait, in words; None if they may. ``oldest_s`` is for how long the first one has waited."""
    if rows >= limits.outbox_rows:
        return f"{rows} messages wait in the database (outbox_rows={limits.outbox_rows})"
    if size >= limits.outbox_bytes:
        return f"messages of {size} bytes wait in the database (outbox_bytes={limits.outbox_bytes})"
    if oldest_s is not None and oldest_s >= limits.outbox_age_s:
        return f"messages have waited in the database for {oldest_s:.0f} s (outbox_age_s={limits.outbox_age_s:g})"
    return None


def full_error(why: str, transactional_id: str) -> Unavailable:
    """The error of a block whose messages could only wait, where no more may."""
    return Unavailable(
        f"{why}, and no more may; nothing was written",
        transactional_id=transactional_id,
        next_step="find out why they are not sent (`dualwrite status`), or raise the limit",
    )


def must_come_first(transactional_id: str) -> Unavailable:
    """The error of a block that must not wait, while others' messages do."""
    return Unavailable(
        "messages of this writer wait in the database and must come first; nothing was begun",
        transactional_id=transactional_id,
        next_step='run it again later, or let its messages wait, too: leave out outbox="never"',
    )


# Sending what waits

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
COLUMNS_FROM: Final = 250
"""From so many messages of a topic on, columns of them cost less than one call for each."""
_SLOW_S: Final = 2.0
"""A send that takes longer gives its place to smaller ones: the broker, and a paused owner's successor, wait for it."""

_REST_S: Final = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0
_FIRST_LOCK_PAUSE_S, _LONGEST_LOCK_PAUSE_S = 0.1, 2.0
_OF_THE_TOPIC: Final = frozenset({STEPS["UNKNOWN_TOPIC_OR_PARTITION"], STEPS["INVALID_TOPIC_EXCEPTION"]})
STOPPED_PAUSE_S: Final = 30.0
"""The pause before a sender that has stopped at a refused message tries it again: its cause may be fixed meanwhile."""


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
        rest_s: How long to let messages gather before the next send: none unless blocks commit while one is under way. Each
            send costs the servers and this process as much as a dual write, and the concurrent blocks as much again in waits. A
            message that comes alone goes at once.
        lock_failures: How often in a row the lock on the mode was not free in time.
    """

    turns_back: bool
    most_rows: int = MOST_ROWS
    rows: int = FIRST_ROWS
    suspects: int = 0
    caught_up: bool = False
    rest_s: float = 0.0
    lock_failures: int = 0

    def next(self, *, lock_due: bool = True) -> Round:
        """The next send. ``lock_due`` says whether the pause after a lock that was not free is over."""
        if self.suspects:
            return Round(max(1, self.suspects // 2))
        if self.caught_up and self.turns_back and lock_due:
            return Round(LAST_ROWS, last=True)
        return Round(self.rows)

    def sent(self, made: Round, read: int, *, seconds: float, full: bool = False, news: bool = False) -> Self:
        """A send has ended: it had read so many rows.

        ``full`` says that its bytes, not its rows, were the limit; ``news`` that blocks have committed meanwhile.
        """
        full = full or read >= made.rows
        if self.suspects:
            # Those that went are no suspects; with the last one gone there is none. Nothing is known of what comes behind.
            return replace(self, suspects=max(0, self.suspects - read) if read else 0, caught_up=False, rest_s=0.0)
        rows = self.rows
        if seconds > _SLOW_S:
            rows = max(1, rows // 2)
        elif full and not made.last:
            rows = min(2 * rows, self.most_rows)
        little = not full and read <= LAST_ROWS
        rest_s = _REST_S if little and news else 0.0
        failures = 0 if made.last else self.lock_failures
        return replace(self, rows=rows, caught_up=little, rest_s=rest_s, lock_failures=failures)

    def refused(self, read: int) -> Self:
        """Kafka refuses one message, or several, of a send of so many rows; see :attr:`found`."""
        return replace(self, suspects=max(1, read), caught_up=False)

    def behind(self, rows: int) -> Self:
        """The refused message stands behind so many rows, at least one, which the next send takes alone."""
        return self.refused(2 * rows)

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
        return growing_pause_s(self.lock_failures, _FIRST_LOCK_PAUSE_S, _LONGEST_LOCK_PAUSE_S)


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
    return growing_pause_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def growing_pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """A pause that doubles with each failure in a row, up to the longest; 0 without a failure."""
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
