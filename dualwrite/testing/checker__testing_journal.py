"""A journal of the answers that writers got, on disk before the next step: half of every proof that nothing was lost.

One line for each event of an operation, ``word <tab> stream <tab> operation``. Each line is one ``write`` to a file
opened for appending, flushed to disk, so that many processes may share a journal and any of them may be killed at any
instant.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError, DualWriteError

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

    from typing_extensions import Self


class Word(Enum):
    """An event of an operation."""

    BEGUN = "begun"
    ACKNOWLEDGED = "acknowledged"
    ABORTED = "aborted"
    IN_DOUBT = "in-doubt"
    LOST = "lost"


_WORD_OF_OUTCOME: Final = {
    "none": Word.ABORTED,
    "aborted": Word.ABORTED,
    "decided": Word.ACKNOWLEDGED,
    "unknown": Word.IN_DOUBT,
    "lost": Word.LOST,
}
"""The event for each `DualWriteError.outcome`."""


@dataclass
class History:
    """The contents of a journal, by operation.

    Attributes:
        begun: Every operation in the order in which it first began, with its stream (empty for none).
        acknowledged: Operations reported to the writer as done on both sides, now or soon.
        aborted: Operations last reported to the writer as done on neither side.
        in_doubt: Operations last reported to the writer as in doubt.
        lost: Operations reported to the writer as lost: the rows are committed and the messages are not.
    """

    begun: dict[str, str] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def add(self, word: Word, operation: str, stream: str) -> None:
        """Add the next event.

        Raises:
            ConfigurationError: An operation ends that never began.
        """
        if word is Word.BEGUN:
            self.begun.setdefault(operation, stream)
        elif operation not in self.begun:
            raise ConfigurationError(f"the journal says {word.value} of {operation!r}, which was never begun")
        # An operation may begin again, once a process has found that its first attempt did not happen.
        self.aborted.discard(operation)
        self.in_doubt.discard(operation)
        sets = {
            Word.ACKNOWLEDGED: self.acknowledged,
            Word.ABORTED: self.aborted,
            Word.IN_DOUBT: self.in_doubt,
            Word.LOST: self.lost,
        }
        if word in sets:
            sets[word].add(operation)


class Journal:
    """Records each operation's beginning and the answer that its writer got.

    Threads may share one; processes share it by its path.

    Args:
        path: The file; created if missing, otherwise appended to.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def begun(self, operation: str, *, stream: str = "") -> None:
        """Record that an operation begins, before any part of it is done.

        The line is on disk on return.

        Args:
            operation: Its name, as in the row and in the messages. No tab, no line break.
            stream: Operations of one stream begin one after the other, and consumers must see them in that order in
                each partition. Empty: the order of this operation does not matter.

        Raises:
            ValueError: A name holds a tab or a line break, or is empty.
        """
        self._write(Word.BEGUN, operation, stream)

    def acknowledged(self, operation: str) -> None:
        """Record a reported success: the operation must be on both sides. The line is on disk on return."""
        self._write(Word.ACKNOWLEDGED, operation)

    def aborted(self, operation: str) -> None:
        """Record a reported abort: neither side may have the operation. The line is on disk on return."""
        self._write(Word.ABORTED, operation)

    def in_doubt(self, operation: str) -> None:
        """Record that the operation was reported as in doubt. The line is on disk on return."""
        self._write(Word.IN_DOUBT, operation)

    def lost(self, operation: str) -> None:
        """Record that the operation was reported as lost. The line is on disk on return."""
        self._write(Word.LOST, operation)

    @contextmanager
    def operation(self, operation: str, *, stream: str = "") -> Generator[None, None, None]:
        """Journal one operation around a dual write: its beginning, and its outcome when the block ends.

        A normal end is *acknowledged*. An error of this library carries the outcome (`DualWriteError.outcome`). After
        any other exception the operation counts as *in doubt*; if your code left the block on purpose, before the dual
        write's end, call `aborted` afterwards. The exception propagates.

        Args:
            operation: As for `begun`.
            stream: As for `begun`.
        """
        self.begun(operation, stream=stream)
        try:
            yield
        except DualWriteError as error:
            self._write(_WORD_OF_OUTCOME[error.outcome], operation)
            raise
        except BaseException:
            self.in_doubt(operation)
            raise
        self.acknowledged(operation)

    def _write(self, word: Word, operation: str, stream: str = "") -> None:
        if not operation or any(mark in operation + stream for mark in "\t\n\r"):
            raise ValueError(f"{operation!r} of {stream!r} cannot be a line of the journal")
        line = f"{word.value}\t{stream}\t{operation}\n".encode()
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written to the journal {self.path}")
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @staticmethod
    def read(path: Path | str) -> History:
        """Read a journal back. Writers may still be active: ignores a last line without its end.

        Raises:
            ConfigurationError: A line is malformed; its number is in the message.
            OSError: The file cannot be read.
        """
        history = History()
        *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            word, *names = line.split("\t")
            try:
                stream, operation = names
                history.add(Word(word), operation, stream)
            except (ValueError, ConfigurationError) as error:
                raise ConfigurationError(
                    f"{path}, line {number}: {line!r} is not a line of a journal: {error}"
                ) from error
        return history
