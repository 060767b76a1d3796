"""The kinds of values that a setting takes: how each is read, and what errors call it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from dualwrite.kafka.config import Setting

Value: TypeAlias = Any  # of the type that the kind reads


@dataclass(frozen=True)
class Whole:
    """Whole numbers."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        text = str(given)
        return int(text) if re.fullmatch(r"-?[0-9]{1,10}", text) and self.least <= int(text) <= self.most else None


@dataclass(frozen=True)
class Decimal:
    """Numbers that may have decimal places."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"a number from {self.least} to {self.most}"

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        text = str(given)
        fits = re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text) and self.least <= float(text) <= self.most
        return float(text) if fits else None


@dataclass(frozen=True)
class Words:
    """Some words, in lower or upper case; with ``exact``, only as they stand here."""

    words: tuple[str, ...]
    exact: bool = False

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}" if len(self.words) > 1 else self.words[0]

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        word = str(given) if self.exact else str(given).lower()
        return word if word in self.words else None


@dataclass(frozen=True)
class Function:
    """Something to call."""

    def __str__(self) -> str:
        return "a function"

    def read(self, given: Setting) -> Value:
        """The value; None if it is not one of these."""
        return given if callable(given) else None
