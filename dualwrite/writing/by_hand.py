"""What people do by hand, with their reason: the actions that the commands and the service's page share.

The database stores the intent before the action, and the outcome after it: :class:`~dualwrite.interfaces.History`. If the
process is killed in between, the history says that the action began, but not how it ended; it may be repeated, and then does
what is left. If the intent cannot be stored, nothing is done. If the outcome cannot be stored, the action was done all the
same: the caller is told, and the log says what is missing.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dualwrite import failpoints
from dualwrite.errors import ConfigurationError, DatabaseWentBack, DualWriteError, IllegalStateError
from dualwrite.protocol.blocking import Deed, End, Ended, Intent, counted, number_ranges
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.recovery import operator
from dualwrite.recovery.claim import default_owner
from dualwrite.writing import left_behind

if TYPE_CHECKING:
    from dualwrite.interfaces import Database, History, OutboxRows
    from dualwrite.recovery.operator import TerminationReport
    from dualwrite.recovery.recover import RecoveryReport

logger = logging.getLogger(__name__)

SETTLING: Final = "commit what is decided, abort what is not, send what waits"
"""What settling is about to do, in words."""


def new_action_id() -> str:
    """A name for one action."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class By:
    """Who acts, and why.

    Attributes:
        actor: The person.
        reason: Why, in the person's words.
        program: Where it runs.
        action_id: Names this one action: a second one with the same id is refused.
    """

    actor: str
    reason: str
    program: str = field(default_factory=default_owner)
    action_id: str = field(default_factory=new_action_id)


class Note:
    """Takes how an action ended: by default it is done."""

    def __init__(self) -> None:
        self.outcome, self.result = Ended.DONE, ""

    def ends(self, outcome: Ended, result: str) -> None:
        """Set how it ended, in a word and in words."""
        self.outcome, self.result = outcome, result


@contextmanager
def noted(database: Database, deed: Deed, subject: str, detail: str, by: By | None) -> Generator[Note, None, None]:
    """Store the intent before the block, and the outcome after it; without ``by``, nothing.

    Raises:
        ConfigurationError: The database keeps no history, or the right to its table is missing. The block has not begun.
        IllegalStateError: Likewise; this action was begun before, because its form was sent twice.
        Unavailable: Likewise; the database does not answer.
    """
    note = Note()
    if by is None:
        yield note
        return
    history = database.history()
    if history is None:
        raise ConfigurationError(
            f"{database.traits.name} keeps no history of actions here, so the reason cannot be stored",
            next_step="run `dualwrite migrate` on a SQL database; or give no reason, and note it elsewhere",
        )
    if not history.begin_once(Intent(by.action_id, subject, deed, detail, by.reason, by.actor, by.program)):
        raise IllegalStateError(f"this action was begun before: {by.action_id}", next_step="look at its outcome")
    failpoints.hit("action.intended")
    try:
        yield note
    except (IllegalStateError, ConfigurationError, DatabaseWentBack) as error:
        _end(history, by, Ended.REFUSED, str(error))
        raise
    except BaseException as error:
        _end(history, by, Ended.FAILED, f"{type(error).__name__}: {error}")
        raise
    failpoints.hit("action.done")
    _end(history, by, note.outcome, note.result)


def _end(history: History, by: By, outcome: Ended, result: str) -> None:
    try:
        history.end([End(by.action_id, outcome, result)])
    except DualWriteError as error:
        logger.warning(
            "action %s is %s, which the history does not say: %s: %s",
            by.action_id,
            outcome.value,
            type(error).__name__,
            error,
        )


def settle(
    transactional_id: str | None,
    *,
    prefix: str | None = None,
    kafka: Mapping[str, object],
    database: Database,
    by: By | None,
    open_for_s: float | None,
    dry_run: bool = False,
    after_restore: bool = False,
    timeout_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> RecoveryReport:
    """As :func:`dualwrite.recover`, with its reason. A dry run stores nothing."""
    with noted(
        database, Deed.SETTLE, transactional_id or f"{prefix or ''}*", SETTLING, None if dry_run else by
    ) as note:
        report = left_behind.recover(
            transactional_id,
            kafka=kafka,
            database=database,
            prefix=prefix,
            open_for_s=open_for_s,
            dry_run=dry_run,
            after_restore=after_restore,
            timeout_s=timeout_s,
            progress=progress,
        )
        note.ends(Ended.REFUSED if nothing_done(report) else Ended.DONE, recovery_words(report))
    return report


def nothing_done(report: RecoveryReport) -> bool:
    """Whether everything was left alone."""
    return bool(report.skipped or report.went_back or report.unknown) and not (
        report.settled or any(report.sent.values())
    )


def recovery_words(report: RecoveryReport) -> str:
    """What a recovery did, in words."""
    sent = sum(report.sent.values())
    words = [f"{counted(len(report.settled), 'id')} settled", f"{len(report.rolled_forward)} rolled forward"]
    words += [f"{counted(sent, 'message')} sent"] if sent else []
    words += [f"{len(report.skipped)} left alone: the owner may be alive"] if report.skipped else []
    words += [f"{len(report.losses)} LOST OR UNVERIFIABLE"] if report.losses else []
    words += [str(error) for error in report.went_back]
    words += ["there is no such id"] if report.unknown else []
    return ", ".join(words)


def terminate(
    transactional_id: str,
    *,
    kafka: Mapping[str, object],
    database: Database,
    by: By | None,
    lose_decided: bool,
    timeout_s: float,
) -> TerminationReport:
    """As :func:`dualwrite.operations.terminate`, with its reason."""
    detail = "abort what is open"
    if lose_decided:
        detail += ", also what the database has decided: its messages are lost"
    with noted(database, Deed.TERMINATE, transactional_id, detail, by) as note:
        report = operator.terminate(
            transactional_id, kafka=kafka, database=database, lose_decided=lose_decided, timeout_s=timeout_s
        )
        words = [f"{counted(len(report.terminated), 'transaction')} aborted"]
        words += [f"{counted(len(report.settled), 'id')} settled"] if report.settled else []
        words += [f"{len(report.rolled_forward)} rolled forward"] if report.rolled_forward else []
        words += [f"{len(report.losses)} LOST"] if report.losses else []
        words += ["nobody knows this id"] if report.unknown else []
        note.ends(Ended.DONE, ", ".join(words))
    return report


def acknowledge(transactional_id: str, states: Sequence[str] | None, *, database: Database, by: By | None) -> int:
    """Note that a person has looked at these losses of an id, or at all of them. Returns how many; durable on return."""
    store = database.store()
    if states is None:
        states = [
            found.prepared_transaction_state
            for found in store.incidents(transactional_id)
            if found.transactional_id == transactional_id
        ]
    detail = f"{counted(len(states), 'loss', 'losses')}: {', '.join(states) or 'none'}"
    with noted(database, Deed.ACKNOWLEDGE, transactional_id, detail, by) as note:
        count = sum(store.acknowledge(transactional_id, PreparedTxnState.from_string(text)) for text in states)
        note.ends(Ended.DONE if count else Ended.REFUSED, f"{count} acknowledged")
    return count


def replay(writer: str, numbers: Sequence[int] | None, *, database: Database, by: By | None) -> int:
    """Let messages that were moved aside wait again; without numbers, all. Durable on return. Returns how many."""
    with noted(database, Deed.REPLAY, writer, _which(numbers), by) as note:
        count = outbox_of(database).replay(writer, numbers)
        note.ends(Ended.DONE if count else Ended.REFUSED, f"{counted(count, 'message')} put back")
    return count


def drop(writer: str, numbers: Sequence[int] | None, *, database: Database, by: By | None) -> int:
    """Delete messages that were moved aside; without numbers, all. Durable on return. Returns how many."""
    with noted(database, Deed.DROP, writer, _which(numbers), by) as note:
        count = outbox_of(database).drop(writer, numbers)
        note.ends(Ended.DONE if count else Ended.REFUSED, f"{counted(count, 'message')} deleted")
    return count


def outbox_of(database: Database) -> OutboxRows:
    """The rows of messages that wait, in a database that has them.

    Raises:
        ConfigurationError: It has none.
    """
    database.require_outbox()
    rows = database.store().outbox
    assert rows is not None
    return rows


def _which(numbers: Sequence[int] | None) -> str:
    if numbers is None:
        return "all messages that were moved aside"
    return f"{'message' if len(set(numbers)) == 1 else 'messages'} {number_ranges(sorted(set(numbers)))}"
