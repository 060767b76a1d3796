"""Whether the work of a dual write that ended with an error may run again, in a new transaction."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)


class Redo(Enum):
    """The advice after an error."""

    AGAIN = "neither side changed, and another run may succeed"
    USELESS = "neither side changed, and another run would fail, too"
    UNSAFE = "a side may have changed"
    FOREIGN = "not an error of the dual write"


_BY_CLASS: Final[Mapping[type[DualWriteError], Redo]] = {
    TransactionAborted: Redo.AGAIN,
    Unavailable: Redo.AGAIN,
    ConfigurationError: Redo.USELESS,
    IllegalStateError: Redo.USELESS,
    Fenced: Redo.USELESS,
    TransactionInDoubt: Redo.UNSAFE,
    CompletionPending: Redo.UNSAFE,
    DecidedTransactionLost: Redo.UNSAFE,
    OutcomeUnverifiable: Redo.UNSAFE,
}
"""A subclass is judged as its nearest class here; a class that is not here is unsafe."""
_NOTHING_WRITTEN: Final = frozenset({"none", "aborted"})


def redo_after(error: BaseException) -> Redo:
    """Judge an error that has left a dual write.

    The class alone is not enough: the outcome of this error may be less certain than that of its class.

    Source: the design of transactional messaging in Kafka ("the producer should abort, and subsequently redo, the
    transaction").
    """
    if not isinstance(error, DualWriteError):
        return Redo.FOREIGN
    rule = next((_BY_CLASS[kind] for kind in type(error).__mro__ if kind in _BY_CLASS), Redo.UNSAFE)
    if error.outcome not in _NOTHING_WRITTEN:
        return Redo.UNSAFE
    if rule is Redo.AGAIN and isinstance(error, TransactionAborted) and not error.retryable:
        return Redo.USELESS
    return rule


def leaves_nothing(error: BaseException) -> bool:
    """Whether a dual write that ended with this error has certainly changed neither side."""
    return redo_after(error) in {Redo.AGAIN, Redo.USELESS}
