"""Where a dual write may fail, what each failure leaves behind, and the failures that a test plants."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)


class Place(Enum):
    """The steps of a dual write, in order.

    ``BEGIN``: the database transaction begins, and the row is read. ``PRODUCE``: a message, or offsets, are handed to the
    producer. ``PREPARE``: all messages are flushed. ``DECIDE``: the decision is written, not committed. ``COMMIT``: the
    database commits. ``COMPLETE``: Kafka commits. A block without messages reaches neither ``PREPARE`` nor ``COMPLETE``.
    """

    BEGIN = "begin"
    PRODUCE = "produce"
    PREPARE = "prepare"
    DECIDE = "decide"
    COMMIT = "commit"
    COMPLETE = "complete"


class Rows(Enum):
    """Whether the rows of a dual write are in the database."""

    ABSENT = "not there"
    COMMITTED = "there"
    EITHER = "there or not"


@dataclass(frozen=True)
class Effect:
    """The effect of one failure: the error that leaves the block, and whether the rows are there.

    `settled` says whether settling makes the messages visible if the rows are there. Until then they are not.
    """

    raised: type[DualWriteError]
    outcome: str
    rows: Rows = Rows.ABSENT
    settled: bool = False


_ABORTED: Final = Effect(TransactionAborted, "aborted")
_FENCED: Final = Effect(Fenced, "aborted")
_REFUSED: Final = Effect(ConfigurationError, "none")
_SILENT: Final = Effect(Unavailable, "none")

# By place and planted error: the ways in which the real writer's servers can fail. A test compares the two writers.
EFFECTS: Final[Mapping[tuple[Place, type[DualWriteError]], Effect]] = MappingProxyType(
    {
        (Place.BEGIN, Fenced): _FENCED,
        (Place.BEGIN, Unavailable): _SILENT,
        (Place.BEGIN, ConfigurationError): _REFUSED,
        (Place.BEGIN, DatabaseWentBack): Effect(DatabaseWentBack, "none"),
        (Place.PRODUCE, TransactionAborted): _ABORTED,
        (Place.PRODUCE, Fenced): _FENCED,
        (Place.PRODUCE, Unavailable): _SILENT,
        (Place.PRODUCE, ConfigurationError): _REFUSED,
        (Place.PREPARE, TransactionAborted): _ABORTED,
        (Place.PREPARE, Fenced): _FENCED,
        (Place.PREPARE, Unavailable): _ABORTED,
        (Place.PREPARE, ConfigurationError): _REFUSED,
        (Place.DECIDE, TransactionAborted): _ABORTED,
        (Place.DECIDE, Fenced): _FENCED,
        (Place.DECIDE, Unavailable): _ABORTED,
        (Place.COMMIT, TransactionAborted): _ABORTED,
        (Place.COMMIT, TransactionInDoubt): Effect(TransactionInDoubt, "unknown", Rows.EITHER, settled=True),
        (Place.COMPLETE, CompletionPending): Effect(CompletionPending, "decided", Rows.COMMITTED, settled=True),
        (Place.COMPLETE, DecidedTransactionLost): Effect(DecidedTransactionLost, "lost", Rows.COMMITTED),
        (Place.COMPLETE, OutcomeUnverifiable): Effect(OutcomeUnverifiable, "unknown", Rows.COMMITTED),
    }
)


# The failures that a test has planted, until a dual write reaches their places.


@dataclass(frozen=True)
class Failure:
    """One planted failure: the place, and the error that the server's part raises there.

    `rows_committed` says whether the database commits nevertheless.
    """

    place: Place
    error: DualWriteError
    rows_committed: bool

    def __str__(self) -> str:
        return f"{type(self.error).__name__} at {self.place.value!r}"


class Planted:
    """The planted failures that have not happened yet, in the order of planting. Used by many threads at once.

    `fenced` says that another owner has taken over: no dual write of this writer can begin any more.
    """

    def __init__(self) -> None:
        self._waiting: list[Failure] = []
        self._lock = threading.Lock()
        self.fenced = False

    @property
    def waiting(self) -> Sequence[Failure]:
        """The failures that no dual write has reached."""
        return list(self._waiting)

    def add(self, place: Place, error: DualWriteError, *, rows_committed: bool | None) -> None:
        """Add a failure; `ValueError` if the real writer cannot fail in this way."""
        effect = EFFECTS.get((place, type(error)))
        if effect is None:
            possible = ", ".join(kind.__name__ for at, kind in EFFECTS if at is place)
            raise ValueError(f"{place.value!r} cannot fail with {type(error).__name__}; it can with {possible}")
        if rows_committed is not None and effect.rows is not Rows.EITHER:
            raise ValueError(f"with {type(error).__name__} at {place.value!r} the rows are always {effect.rows.value}")
        with self._lock:
            self._waiting.append(Failure(place, error, rows_committed is not False))

    def take(self, place: Place) -> Failure | None:
        """The failure of a dual write that has reached this place, if any. It happens once."""
        with self._lock:
            found = next((one for one in self._waiting if one.place is place), None)
            if found is not None:
                self._waiting.remove(found)
                self.fenced = self.fenced or isinstance(found.error, Fenced)
            return found

    def reach(self, place: Place) -> None:
        """Reach a place, and raise what was planted there."""
        if (found := self.take(place)) is not None:
            raise found.error
