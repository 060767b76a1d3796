"""The places where a dual write may fail, the errors that it may fail with there, and what each leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
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
    """The effect of one failure.

    Attributes:
        raised: The class of the error that leaves the block.
        outcome: That error's ``outcome``.
        rows: Whether the rows are there.
        settled: Whether settling makes the messages visible if the rows are there. Until then they are not.
    """

    raised: type[DualWriteError]
    outcome: str
    rows: Rows = Rows.ABSENT
    settled: bool = False


_ABORTED: Final = Effect(TransactionAborted, "aborted")
_FENCED: Final = Effect(Fenced, "aborted")
_REFUSED: Final = Effect(ConfigurationError, "none")
_SILENT: Final = Effect(Unavailable, "none")

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
"""By place and planted error. The real writer's servers can fail in these ways, and a test compares the two writers."""
