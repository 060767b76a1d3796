"""A journal of what the writers were told, on disk before the next step: half of every proof that nothing was lost.

One line for each thing that happened to an operation, ``word <tab> stream <tab> operation``. A line is written by one
``write`` to a file opened for appending, and flushed to the disk, so that many processes may share one journal and any of
them may be killed at any instant.
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
    """What happened to an operation."""

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
"""`DualWriteError.outcome` says what is known of the two sides."""


@dataclass
class History:
    """What a journal says, by operation.

    Attributes:
        begun: Every operation in the order in which it was begun first, with its stream (empty for none).
        acknowledged: The writer was told that it is on both sides, or will be.
        aborted: The last that the writer was told is that it is on neither.
        in_doubt: The last that the writer was told is that nobody knows.
        lost: The writer was told that the rows are committed and the messages are not.
    """

    begun: dict[str, str] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def add(self, word: Word, operation: str, stream: str) -> None:
        """Take in what happened next.

        Raises:
            ConfigurationError: An operation ends that was never begun.
        """
        if word is Word.BEGUN:
            self.begun.setdefault(operation, stream)
        elif operation not in self.begun:
            raise ConfigurationError(f"the journal says {word.value} of {operation!r}, which was never begun")
        # An operation may be begun again, by whoever found that its first attempt has not happened.
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
    """Writes down what is begun and what the writer is told of it. May be shared by threads, and by processes by path.

    Args:
        path: The file; made if it is missing, continued if it is there.

    Raises:
        OSError: It cannot be written.
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
        """Write down that an operation begins, before anything of it is done.

        On return it is on the disk.

        Args:
            operation: Its name, the one that is found in the row and in the messages. No tab, no line break.
            stream: Operations of one stream are begun one after the other, and consumers must see them in that order in
                each partition. Empty: the order of this one does not matter.

        Raises:
            ValueError: A name holds a tab or a line break, or is empty.
        """
        self._write(Word.BEGUN, operation, stream)

    def acknowledged(self, operation: str) -> None:
        """Write down that the writer was told of success: it must be on both sides. On return it is on the disk."""
        self._write(Word.ACKNOWLEDGED, operation)

    def aborted(self, operation: str) -> None:
        """Write down that the writer was told that neither side has it. On return it is on the disk."""
        self._write(Word.ABORTED, operation)

    def in_doubt(self, operation: str) -> None:
        """Write down that the writer was told that nobody knows. On return it is on the disk."""
        self._write(Word.IN_DOUBT, operation)

    def lost(self, operation: str) -> None:
        """Write down that the writer was told of a loss. On return it is on the disk."""
        self._write(Word.LOST, operation)

    @contextmanager
    def operation(self, operation: str, *, stream: str = "") -> Generator[None, None, None]:
        """Journal one operation around a dual write: begun, and then what the block's end says.

        A normal end is *acknowledged*. An error of this library says itself what is known (`DualWriteError.outcome`). After
        any other exception the operation counts as *in doubt*; where the block was left on purpose, before the dual write's
        end, call `aborted` afterwards. The exception is passed on.

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
            raise OSError(f"the disk took {written} of {len(line)} bytes of the journal {self.path}")
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @staticmethod
    def read(path: Path | str) -> History:
        """Read a journal back. Writers may still be at it: a last line without its end has not been written yet.

        Raises:
            ConfigurationError: A line that no journal has written; its number is in the message.
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
