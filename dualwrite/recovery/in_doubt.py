"""Finds out what is in doubt: a COMMIT without an answer, an outcome that must be proved, a loss not yet reported.

Each question ends with proof (a row, a record of the log) or with an honest error; silence is never an answer. A loss
is reported once: the row says whether it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, GrowingPause, pause
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.protocol.known_end import PendingStep, next_pending_step
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import Doubt, DoubtStep, next_doubt_step
from dualwrite.protocol.values import Outcome, StateRow
from dualwrite.recovery.claim import OwnerContext

if TYPE_CHECKING:
    from tenacity import RetryCallState

    from dualwrite.interfaces import StateStore
    from dualwrite.protocol.values import Decision, Incident

logger = logging.getLogger(__name__)

LOSSES: Final = (DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable)


def note_reported(store: StateStore, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
    """Note that these losses are reported to a caller now. If that cannot be noted, they are reported again later."""
    if not losses:
        return
    try:
        store.note_reported(losses)
    except DualWriteError as error:
        logger.warning("could not record which losses were reported; they will be reported again: %s", error)


def note_raised(store: StateStore, loss: DatabaseWentBack | DecidedTransactionLost | OutcomeUnverifiable) -> None:
    """Note that a loss is reported to a caller by the error that is about to be raised."""
    if loss.state is not None and loss.transactional_id is not None:
        note_reported(store, [(loss.transactional_id, PreparedTxnState.from_string(loss.state))])


@contextmanager
def noting_reported(store: StateStore) -> Generator[None, None, None]:
    """Note that a loss that leaves the block is reported to its caller."""
    try:
        yield
    except LOSSES as loss:
        note_raised(store, loss)
        raise


@contextmanager
def reporting_at_open(store: StateStore, name: str) -> Generator[None, None, None]:
    """Report all unreported losses of a writer, its lanes' included, with a single error, so that the next opening succeeds."""
    try:
        yield
    except LOSSES:
        note_reported(store, [(found.transactional_id, found.state) for found in unreported(_incidents(store, name))])
        raise
    incidents = _incidents(store, name)
    left = [found for found in incidents if found.acknowledged_at is None]
    if left:
        logger.error(
            "%s: %d unacknowledged losses: look at them with `dualwrite status`, then run `dualwrite acknowledge`",
            name,
            len(left),
        )
    new = unreported(incidents)
    note_reported(store, [(found.transactional_id, found.state) for found in new])
    if new:
        raise _as_error(new[0], others=len(new) - 1)


def unreported(incidents: Iterable[Incident]) -> Sequence[Incident]:
    """The incidents that were not reported to any caller, and that no person has looked at."""
    return [found for found in incidents if found.reported_at is None and found.acknowledged_at is None]


def _incidents(store: StateStore, name: str) -> Sequence[Incident]:
    return [
        found
        for found in store.incidents(name)
        if found.transactional_id == name or found.transactional_id.startswith(f"{name}#")
    ]


def _as_error(incident: Incident, *, others: int) -> DecidedTransactionLost | OutcomeUnverifiable:
    kind = DecidedTransactionLost if incident.outcome is Outcome.LOST else OutcomeUnverifiable
    more = f"; {others} more: see `dualwrite status`" if others else ""
    return kind(
        f"{incident.detail} (found at {incident.detected_at:%Y-%m-%d %H:%M:%S} by a process that ended before it "
        f"reported the loss{more})",
        transactional_id=incident.transactional_id,
        state=incident.prepared_transaction_state,
    )


# Finds the outcome of an owner's decided transaction whose commit was not answered, and that could not be settled.


def prove_committed(
    context: OwnerContext, row: StateRow, state: PreparedTxnState, deadline: Deadline, unsettled: DualWriteError
) -> None:
    """Find out by reading alone how a transaction ended that could not be settled. Returns if it is committed.

    Another owner may have claimed the id, but being fenced says nothing about the outcome. Or a server does not answer. So it
    raises ``CompletionPending`` if the next settler will commit it, or that is not known; a loss is recorded, and raised.
    """
    kafka_id = row.kafka_id(state.incarnation or 0)
    view = None
    between = GrowingPause()
    try:
        while (
            step := next_pending_step(context.coordinator.prove([state], deadline)[0], view, state)
        ) is PendingStep.LOOK:
            if view is not None:
                between.wait(deadline)
            view = context.coordinator.describe([kafka_id], deadline)[kafka_id]
            if deadline.expired:
                raise pending(row, str(unsettled), known=False)
    except CompletionPending:
        raise
    except DualWriteError as error:
        raise pending(row, f"{unsettled}; {error}", known=False) from error
    if step is PendingStep.PENDING:
        raise pending(row, str(unsettled), known=True)
    if step is not PendingStep.COMMITTED:
        outcome = Outcome.LOST if step is PendingStep.LOST else Outcome.UNVERIFIABLE
        raise _recorded(context, replace(row, prepared=state), outcome)


def _recorded(context: OwnerContext, row: StateRow, outcome: Outcome) -> DualWriteError:
    lost = outcome is Outcome.LOST
    known = "aborted by the broker" if lost else "its records are no longer in the log"
    detail = f"decided by the database; {known}"
    try:
        context.store.record_outcomes([(row, outcome, detail)])
    except DualWriteError:
        logger.exception(
            "%s: could not record a loss; the next settling will: %s of %s", row.transactional_id, detail, row.prepared
        )
    kind = DecidedTransactionLost if lost else OutcomeUnverifiable
    return kind(detail, transactional_id=row.transactional_id, state=str(row.prepared))


def pending(row: StateRow, why: str, *, known: bool) -> CompletionPending:
    """The error of a decided transaction that is not complete. ``known`` says whether Kafka shows that it will be."""
    if known:
        what = f"the database has committed, and Kafka has not yet: {why}"
        return CompletionPending(what, transactional_id=row.transactional_id)
    error = CompletionPending(
        f"the database has committed, and what Kafka did is not known: {why}",
        transactional_id=row.transactional_id,
        next_step="do not run the work again: settling completes it, or finds and records that it is lost",
    )
    error.outcome = "unknown"
    return error


# Resolves a COMMIT in doubt: asks the row, the database, the records and the log, in this order.
#
# The cause of a broken connection often lasts: a restarting server, a failover, a replaced pooler. So the questions are
# asked again until the deadline; only then does the COMMIT stay in doubt.

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_QUESTIONS: Final = frozenset({DoubtStep.ASK_DATABASE, DoubtStep.ASK_RECORDS, DoubtStep.ASK_LOG})


def resolve_commit(  # noqa: PLR0917 - as the writer hands it on
    context: OwnerContext,
    transactional_id: str,
    ours: PreparedTxnState,
    database_transaction: str | None,
    deadline: Deadline,
    waiting: Decision | None = None,
    fence: Callable[[], None] | None = None,
) -> DoubtStep:
    """Find out whether the COMMIT that would have recorded ``ours``, empty for rows alone, has happened.

    ``waiting`` is the decision if the block's messages wait: then its number in the row tells. The row is read under its lock
    on a fresh connection, so the old backend has ended before the answer, which is a verdict and never a question.
    ``fence`` claims the row, for a decision that went with its COMMIT: until the server has it, the old backend holds no lock,
    and could still commit what was taken for rolled back.
    ``ConfigurationError``: the database refused us until the deadline, as a standby does that is not yet promoted.
    """
    from tenacity import Retrying, retry_if_exception_type, wait_exponential  # noqa: PLC0415 - few writers are ever in doubt

    named = str(ours) or ("rows alone" if waiting is None else "rows and messages that wait")

    def note(attempt: RetryCallState) -> None:
        error = attempt.outcome and attempt.outcome.exception()
        logger.info("%s: COMMIT of %s is in doubt; asking the database again: %s", transactional_id, named, error)

    retrying = Retrying(
        retry=retry_if_exception_type((Unavailable, ConfigurationError)),
        stop=lambda _: deadline.expired,
        wait=wait_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        sleep=lambda seconds: pause(min(seconds, deadline.remaining_s())),
        before_sleep=note,
        reraise=True,
    )
    asked = partial(_asked, context, transactional_id, ours, database_transaction, deadline, waiting)
    step: DoubtStep = retrying(_verdict, asked, fence)
    logger.warning("%s: COMMIT of %s was in doubt: %s", transactional_id, named, step.value)
    return step


def _verdict(asked: Callable[[], DoubtStep], fence: Callable[[], None] | None) -> DoubtStep:
    step = asked()
    if step is DoubtStep.ABORTED and fence is not None:
        fence()
        step = asked()  # it may have come between the answer and the claim
    return step


def _asked(  # noqa: PLR0917 - as above
    context: OwnerContext,
    transactional_id: str,
    ours: PreparedTxnState,
    database_transaction: str | None,
    deadline: Deadline,
    waiting: Decision | None,
) -> DoubtStep:
    if waiting is None:
        doubt = Doubt(ours=ours, row=context.store.read_locked(transactional_id, deadline).prepared)
    else:
        rows = context.store.outbox
        assert rows is not None  # it has put the messages
        counted = rows.decisions_locked(transactional_id, waiting.namespace, deadline)
        doubt = Doubt(ours=ours, row=ours, waits=waiting.waits, counted=counted)
    while (step := next_doubt_step(doubt)) in _QUESTIONS:
        if step is DoubtStep.ASK_DATABASE:
            doubt = replace(doubt, verdict=context.store.transaction_verdict(database_transaction))
        elif step is DoubtStep.ASK_RECORDS:
            doubt = replace(doubt, records_asked=True, incident=context.store.incident(transactional_id, ours))
        else:
            [proof] = context.coordinator.prove([ours], deadline)
            doubt = replace(doubt, proof=proof)
    return step
