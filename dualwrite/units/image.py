"""Applies the records of one partition to an image, and publishes whole units only. Pure."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.protocol.lives import EFFECTS, UNIT_LIFE, Effect, Machine, UnitState
from dualwrite.units.records import UnitRecord, event_of

Contents = TypeVar("Contents")
Contents_co = TypeVar("Contents_co", covariant=True)


class UnitImage(Protocol[Contents_co]):
    """An application's state, to which a reader applies records: a change stays invisible until it is published.

    `KeyedImage` is one. Methods are called by one thread at a time, and must not raise: a reader cannot skip a record. If a
    signal handler raises in one of them, the reader calls none of them again.
    """

    def apply(self, record: UnitRecord) -> None:
        """Take a record into the change."""

    def publish(self) -> None:
        """Show the change, at one moment."""

    def revert(self) -> None:
        """Forget the change."""

    def contents(self) -> Contents_co:
        """All that is published, as a value that later records do not change."""


@dataclass(frozen=True)
class Snapshot(Generic[Contents]):
    """All that an image has published, and the position to resume reading from. It holds no markers and no part of a unit.

    Attributes:
        position: The offset of the first record that is not in it; None if that is the first one of the log.
        contents: As the image gives it.
    """

    position: int | None
    contents: Contents


class Follower(Generic[Contents]):
    """Applies the records of one partition to an image, so that it never shows a part of a unit. Does no I/O.

    It needs no memory besides the image's. Threads may take snapshots while one thread reads.

    Args:
        image: What to apply the records to.
        position: The position of the snapshot that the image begins with; None at the beginning of the log.
    """

    def __init__(self, image: UnitImage[Contents], position: int | None = None) -> None:
        self._image = image
        initial = UnitState.START if position is None else UnitState.OUTSIDE
        self._machine = Machine("reader", UNIT_LIFE, initial)
        self._position = position
        # Two numbers, not a flag: between them an exception of a signal handler may strike at any instruction.
        self._begun = self._applied = -1
        self._lock = threading.Lock()

    def read(self, offset: int, record: UnitRecord) -> Effect:
        """Take the next record of the partition, in order of offsets: only Kafka's own markers may be left out.

        If an exception leaves this call, or the caller before it asked for the next record, the record may be given again: it
        is refused if the image may have it already.

        Returns:
            What was done with it. After ``SHOW`` and ``PUBLISH`` the image shows more than before.

        Raises:
            ConfigurationError: The record cannot stand here: something other than one `UnitWriter` writes to the partition.
                Nothing was changed.
            IllegalStateError: An exception has interrupted a reader that had begun to apply this record.
        """
        if offset <= self._begun:
            raise self._interrupted()
        event, state = event_of(record.headers), self._machine.state
        if not self._machine.allows(event):
            raise ConfigurationError(
                f"offset {offset} holds {event.value!r}, which cannot stand there: the reader is at {state.value!r}",
                next_step="let one UnitWriter alone write to this partition. If its records were deleted under the reader, open"
                " another reader without a position",
            )
        effect = EFFECTS[state][event]
        with self._lock:
            self._begun = offset
            if effect in {Effect.HOLD, Effect.SHOW}:
                self._image.apply(record)
            if effect in {Effect.SHOW, Effect.PUBLISH}:
                self._image.publish()
            if effect is Effect.REVERT:
                self._image.revert()
            if self._machine.apply(event) is UnitState.OUTSIDE:
                self._position = offset + 1
            self._applied = offset
        return effect

    def _interrupted(self) -> IllegalStateError:
        return IllegalStateError(
            f"the reader was interrupted while it applied offset {self._begun}: it is not known whether the image has it",
            next_step="open another reader with the image and the position of an earlier snapshot, or with an empty image and"
            " no position",
        )

    @property
    def state(self) -> UnitState:
        """Where the reader stands: inside a unit or not."""
        return self._machine.state

    def snapshot(self) -> Snapshot[Contents]:
        """All that is published now, and where to resume: inside a unit, at its beginning.

        Raises:
            IllegalStateError: An exception has left the image in the middle of a record.
        """
        with self._lock:
            if self._applied != self._begun:
                raise self._interrupted()
            return Snapshot(self._position, self._image.contents())


# An image of the newest value of each key.


class KeyedImage:
    """The newest value of each key, of published units only; a record without a value deletes its key.

    Any thread may look at it. Units become visible at one moment: a thread that needs several values of the same moment takes
    them by :meth:`contents`. Needs memory for the values, and for the keys that the unfinished unit has changed.

    Args:
        contents: What it begins with, as from a `Snapshot`.
    """

    def __init__(self, contents: Mapping[bytes, bytes] | None = None) -> None:
        self._shown: dict[bytes, bytes] = dict(contents or {})
        self._change: dict[bytes, bytes | None] = {}
        # A change that is published at the moment of its assignment, though it is not yet in `_shown`: if an exception (of a
        # signal handler) interrupts the copying, the next look finishes it, and no part of a unit is ever seen.
        self._published: dict[bytes, bytes | None] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: bytes) -> bytes:
        with self._lock:
            return self._whole()[key]

    def get(self, key: bytes) -> bytes | None:
        """The published value of a key; None if there is none."""
        with self._lock:
            return self._whole().get(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._whole())

    def contents(self) -> dict[bytes, bytes]:
        """A copy of what is published."""
        with self._lock:
            return dict(self._whole())

    def _whole(self) -> dict[bytes, bytes]:
        """The published values. Call it under the lock."""
        for key, value in self._published.items():
            if value is None:
                self._shown.pop(key, None)
            else:
                self._shown[key] = value
        self._published = {}
        return self._shown

    def apply(self, record: UnitRecord) -> None:
        """Take a record into the unpublished change. A record without a key is skipped."""
        if record.key is not None:
            self._change[record.key] = record.value

    def publish(self) -> None:
        """Show the change."""
        with self._lock:
            self._whole()
            self._published = self._change
            self._change = {}
            self._whole()

    def revert(self) -> None:
        """Forget the change."""
        self._change = {}
