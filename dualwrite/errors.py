"""The errors: the class says what the caller must do.

::

    DualWriteError
      ConfigurationError        fix the settings
        DatabaseWentBack        the database has lost commits: compare both sides
        StoreInUse              a state store is open elsewhere: each has one writer
        StoreUnreadable         a state store's directory cannot be opened
        ChangelogDiffers        a state store and its changelog do not belong together
        StoreTooOld             a state store's changelog may have forgotten deletions that the store needs
      IllegalStateError         fix the code
      TransactionAborted        neither side changed; see .retryable
      Fenced                    another owner took over; stop
      Unavailable               a server did not answer in time; nothing was decided; try again later
      TransactionInDoubt        the database's answer is missing; recover, do not retry
      CompletionPending         decided; Kafka will follow; do not redo
      DecidedTransactionLost    the broker aborted what the database decided; a person must look
      OutcomeUnverifiable       the log no longer shows how a decided transaction ended

Every error pickles (Spark ships them between processes) and keeps the driver's own error as its
``__cause__`` in the process that raised it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ChangelogDiffers",
    "CompletionPending",
    "ConfigurationError",
    "DatabaseWentBack",
    "DecidedTransactionLost",
    "DualWriteError",
    "Fenced",
    "IllegalStateError",
    "OutcomeUnverifiable",
    "StoreInUse",
    "StoreTooOld",
    "StoreUnreadable",
    "TransactionAborted",
    "TransactionInDoubt",
    "Unavailable",
]


class DualWriteError(Exception):
    """Base class of this library's errors.

    Args:
        what: What happened, in one sentence without a secret in it.
        transactional_id: The transactional id it happened to, if there is one.
        next_step: What to do now; the class's own advice if not given.

    Attributes:
        refused_topic: The topic of a message that Kafka refuses for good, because it is too large, the topic does not exist, or
            a right to it is missing. None for any other error.
    """

    outcome: str = "unknown"
    """The known outcome on the two sides: ``none``, ``aborted``, ``decided``, ``lost`` or ``unknown``."""
    advice: ClassVar[str] = ""
    """The advice of the class: the error's ``next_step`` unless it has its own."""
    refused_topic: str | None = None

    def __init__(self, what: str, *, transactional_id: str | None = None, next_step: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.transactional_id = transactional_id
        self.next_step = next_step or self.advice

    def __str__(self) -> str:
        subject = f"{self.transactional_id}: " if self.transactional_id is not None else ""
        advice = f" ({self.next_step})" if self.next_step else ""
        return f"{subject}{self.what}{advice}"


class ConfigurationError(DualWriteError):
    """The settings cannot work, or would not be safe. Nothing was changed on either side.

    Attributes:
        may_pass: Whether the cause may go away by itself: the database is a standby or read-only, as during a failover.
    """

    may_pass: bool = False

    outcome = "none"


class DatabaseWentBack(ConfigurationError):
    """The database has lost commits: it was restored, cloned, or failed over to a copy that was behind.

    Attributes:
        state: The text form of the newest decision that it has lost; None if that is not known.
    """

    def __init__(
        self,
        what: str,
        *,
        transactional_id: str | None = None,
        next_step: str | None = None,
        state: str | None = None,
    ) -> None:
        super().__init__(what, transactional_id=transactional_id, next_step=next_step)
        self.state = state


class StoreInUse(ConfigurationError):
    """Another state store has this directory open, in this process or in another one. Nothing was changed."""

    advice = "a store has one writer: close the other one, or use another directory"


class StoreUnreadable(ConfigurationError):
    """The directory of a state store cannot be opened: RocksDB's message says why. Nothing was deleted."""

    advice = "fix the cause, or restore into an empty directory"


class ChangelogDiffers(ConfigurationError):
    """A state store and its changelog do not belong together: it is another topic, or records are gone. Nothing was changed."""


class StoreTooOld(ConfigurationError):
    """A state store was away for longer than its changelog keeps deletions: it might keep deleted keys. Nothing was changed."""


class IllegalStateError(DualWriteError):
    """A method was called where the protocol does not allow it. The call changed nothing."""

    outcome = "none"


class TransactionAborted(DualWriteError):
    """Neither the database nor Kafka shows anything of this transaction.

    Attributes:
        retryable: True if the same work may succeed when it is run again.
    """

    outcome = "aborted"
    advice = "nothing was written on either side"

    def __init__(
        self,
        what: str,
        *,
        transactional_id: str | None = None,
        next_step: str | None = None,
        retryable: bool = True,
    ) -> None:
        super().__init__(what, transactional_id=transactional_id, next_step=next_step)
        self.retryable = retryable


class Fenced(DualWriteError):
    """Another owner has claimed the transactional id. The current transaction is on neither side.

    If a *commit* raises it, the transaction may have been committed: the other owner may have completed it. Then ``outcome`` is
    ``unknown``, and only the log proves what happened.
    """

    outcome = "aborted"
    advice = "another owner took this transactional id over: stop using it here"


class Unavailable(DualWriteError):
    """The database or Kafka did not answer in time, while no decision was under way.

    Attributes:
        silent: Whether nothing was tried because Kafka was already known not to answer.
    """

    silent: bool = False

    outcome = "none"
    advice = "try again when the server answers"


class TransactionInDoubt(DualWriteError):
    """The answer to the database's COMMIT is missing, and nothing showed the outcome in time. Never retry before recovery."""

    outcome = "unknown"
    advice = "do not run the work again; run recovery and look at the database"


class CompletionPending(DualWriteError):
    """The database has committed; Kafka has not answered yet. This process or the next recovery completes it, or finds it lost.

    ``outcome`` is ``decided`` if Kafka shows that the commit will follow, and ``unknown`` if Kafka could not be asked.
    """

    outcome = "decided"
    advice = "the messages will become visible: do not run the work again"


class DecidedTransactionLost(DualWriteError):
    """The database has committed, but the broker aborted the Kafka transaction (timeout, an operator, another tool).

    Two-phase commit calls this a *heuristic outcome*.

    Attributes:
        state: The text form of the prepared state: it names the partitions and the first offsets.
    """

    outcome = "lost"
    advice = "the rows are in the database, the messages are aborted: a person must look and publish them again"

    def __init__(
        self,
        what: str,
        *,
        transactional_id: str | None = None,
        next_step: str | None = None,
        state: str | None = None,
    ) -> None:
        super().__init__(what, transactional_id=transactional_id, next_step=next_step)
        self.state = state


class OutcomeUnverifiable(DualWriteError):
    """The database has committed, and Kafka no longer shows whether the messages were committed.

    Attributes:
        state: The text form of the prepared state.
    """

    outcome = "unknown"
    advice = "compare the rows with the topics by hand for the offsets named"

    def __init__(
        self,
        what: str,
        *,
        transactional_id: str | None = None,
        next_step: str | None = None,
        state: str | None = None,
    ) -> None:
        super().__init__(what, transactional_id=transactional_id, next_step=next_step)
        self.state = state


def extra_missing(extra: str, error: ImportError) -> ImportError:
    """The error for a package that is not installed. It names the extra that installs it."""
    return ImportError(f"{error}: pip install 'dualwrite[{extra}]'", name=error.name)


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that an unknown one may mean, for the next step of an error; None if none is as near as that."""
    from difflib import get_close_matches  # noqa: PLC0415 - for an error only

    return next(iter(get_close_matches(given, list(known), 1, cutoff)), None)


def text_of(error: BaseException) -> str:
    """The error's text. Never raises, even if the error's own ``__str__`` does: whatever users raise must be reported."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - of the user's class
        return f"(its text cannot be had: {type(failed).__name__})"


def encoded(text: str) -> bytes:
    """The text as UTF-8, a lone surrogate as its escape: names of files and bad input bring these into errors."""
    return text.encode(errors="backslashreplace")
