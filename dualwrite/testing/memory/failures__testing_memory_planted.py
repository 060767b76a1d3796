"""The failures that a test has planted, until a dual write reaches their places."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dualwrite.errors import DualWriteError, Fenced
from dualwrite.testing.memory.failures import EFFECTS, Place, Rows


@dataclass(frozen=True)
class Failure:
    """One planted failure.

    Attributes:
        place: Where it happens.
        error: The error that the server's part raises.
        rows_committed: Whether the database commits nevertheless.
    """

    place: Place
    error: DualWriteError
    rows_committed: bool

    def __str__(self) -> str:
        return f"{type(self.error).__name__} at {self.place.value!r}"


class Planted:
    """The failures that wait for their places, first planted first. Used by many threads at once.

    Attributes:
        fenced: Whether another owner has taken over: no dual write of this writer can begin any more.
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
        """Add a failure.

        Raises:
            ValueError: The real writer cannot fail in this way.
        """
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
        """Reach a place.

        Raises:
            DualWriteError: A failure was planted there.
        """
        if (found := self.take(place)) is not None:
            raise found.error
