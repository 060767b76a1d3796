"""One database commit decides on every part of a batch, whichever engine writes it; and completes what was decided.

:data:`~dualwrite.protocol.batches.BATCH_LIFE` is the order; an engine says through :class:`Batch` what its batch is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeAlias, TypeVar

from dualwrite import failpoints
from dualwrite.clock import Deadline, GrowingPause
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DualWriteError,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.interfaces import StateStore, TransactionCoordinator, native_of
from dualwrite.kafka.transaction_ends import PendingEnd, ask_for_ends
from dualwrite.protocol.batches import (
    BATCH_LIFE,
    BatchEvent,
    BatchState,
    CompletionStep,
    HandedOver,
    NativeHandedOver,
    next_completion_step,
    next_native_completion_step,
    waited,
)
from dualwrite.protocol.lives import Machine
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Ended
from dualwrite.protocol.values import Decision as RowDecision
from dualwrite.protocol.values import Outcome, Participant, StateRow
from dualwrite.recovery.settle import end_participants

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dualwrite.recovery.claim import OwnerContext

logger = logging.getLogger(__name__)

# The advice on every batch whose end is not known or not reached. The advice for a single block would lose the batch's
# messages: only its next run, or a recovery, completes it.
RUN_AGAIN: Final = "run the batch again with the same batch id, or start the stream again: nothing is written twice"


def pending(name: str, why: DualWriteError) -> CompletionPending:
    """The error for a batch that the database has committed, and that could not be settled for the reason `why`."""
    return CompletionPending(
        f"{name}: decided, and Kafka has not all of it yet: {why.what}",
        next_step=f"{RUN_AGAIN}, and the messages follow; at its time limit the broker would abort them",
    )


class Part(Protocol):
    """One participant's prepared transaction, handed over to the decider."""

    @property
    def transactional_id(self) -> str:
        """The id that the participant owns."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the id's row, when the participant claimed it."""
        ...

    @property
    def namespace(self) -> str:
        """Of the id's row."""
        ...

    @property
    def prepared(self) -> PreparedTxnState:
        """The Kafka transaction; the empty state if the participant has sent no message."""
        ...


class Batch(Protocol):
    """One batch, as its engine knows it. Every method may raise :class:`~dualwrite.errors.DualWriteError`."""

    @property
    def name(self) -> str:
        """For logs and errors."""
        ...

    def record(self, connection: Connection) -> bool:
        """Insert the batch's own row, in the deciding transaction. False if it is there: the batch is written."""
        ...

    def require_held(self, connection: Connection) -> None:
        """Raise unless the decider still holds every part; called before COMMIT, when all else is done, and for a part lost."""
        ...

    def bring(self, connection: Connection) -> None:
        """Move the parts' rows to where they belong, and run what they would leave to COMMIT (`StateStore.run_deferred`)."""
        ...

    def decided(self) -> None:
        """The database has committed. Called before anything is sent to Kafka."""
        ...

    def is_written(self) -> bool:
        """Read the batch's own row, after :meth:`settle` has fenced every process that could still commit it."""
        ...

    def settle(self, completed: Collection[str]) -> None:
        """Claim and settle every id of the batch but those that were completed without a claim."""
        ...


P = TypeVar("P", bound=Part)


Record: TypeAlias = Callable[[Sequence[tuple[StateRow, Outcome, str]]], None]
Participants: TypeAlias = Callable[[Sequence[StateRow]], Sequence[Participant]]


class Decision(Generic[P]):
    """One attempt to decide on a batch. Use it once.

    `connect` opens the connection of the deciding transaction, and closes it. `timeout_s` limits the wait for COMMIT's answer,
    and for Kafka; `idle_s` is how long the database lets a paused decider keep its transaction. `completed` are the parts
    whose transactions were committed and recorded without a claim: their owners may continue. `participants` and `record` are
    those of :func:`complete_handed_over`: with the latter, :meth:`Batch.settle` records them.
    """

    def __init__(
        self,
        batch: Batch,
        parts: Collection[P],
        context: OwnerContext,
        *,
        connect: Callable[[], AbstractContextManager[Connection]],
        timeout_s: float,
        idle_s: float,
        participants: Participants | None = None,
        record: Record | None = None,
    ) -> None:
        self._batch = batch
        self._parts = sorted(parts, key=lambda part: part.transactional_id)
        self._context = context
        self._connect = connect
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._participants = participants
        self._record = record
        self._machine = Machine("batch", BATCH_LIFE, BatchState.PREPARED)
        self.completed: Sequence[P] = ()

    @property
    def state(self) -> BatchState:
        """Where the batch stands."""
        return self._machine.state

    def run(self) -> bool:
        """Decide on all parts in one database transaction; then bring Kafka in line.

        Returns whether this call has written the batch; False if an earlier one had. On return the rows and the batch's own
        row are committed, and every transaction of the batch has ended in Kafka.

        Raises:
            TransactionAborted: Nothing of the batch is committed. What was prepared stays open until it is settled.
            Fenced: Another decider has claimed a part. As TransactionAborted.
            TransactionInDoubt: The answer to COMMIT is missing, and the servers did not answer in time to find it out: run the
                batch again.
            CompletionPending: Decided. Kafka has not all of it yet: run the batch again, or settle.
        """
        failpoints.hit("batch.prepared")
        try:
            event = self._commit()
        except TransactionInDoubt as doubt:
            self._machine.apply(BatchEvent.LOSE_ANSWER)
            self._machine.apply(self._resolve(doubt))
            if self.state is BatchState.UNDECIDED:
                raise TransactionAborted(
                    f"{self._batch.name}: the connection broke during COMMIT; the database has rolled back",
                    next_step="run the batch again",
                ) from doubt
            failpoints.hit("batch.decided")
            return True
        except BaseException:
            self._machine.apply(BatchEvent.ABORT)
            raise
        by_this_call = self._machine.apply(event) is BatchState.DECIDED
        if by_this_call:
            self._batch.decided()
        failpoints.hit("batch.decided")
        try:
            if by_this_call:
                self.completed = self._complete()
                self._machine.apply(BatchEvent.COMPLETE)
            self._batch.settle({part.transactional_id for part in self.completed})
        except DatabaseWentBack:
            raise
        except (Unavailable, ConfigurationError) as error:
            raise pending(self._batch.name, error) from error
        self._machine.apply(BatchEvent.SETTLE)
        return by_this_call

    def _commit(self) -> BatchEvent:
        store = self._context.store
        with self._connect() as connection:
            store.begin(connection)
            try:
                if self._parts:
                    # A decider that is paused from here on loses its session, and its locks with it.
                    store.read_incarnation(connection, self._parts[0].transactional_id)
                if not self._batch.record(connection):
                    logger.info("%s: already written", self._batch.name)
                    store.rollback(connection)
                    return BatchEvent.FIND
                for part in self._parts:
                    self._decide_on(connection, part)
                self._batch.bring(connection)
                # Moving many rows may take long, and once the leases have ended, the broker aborts even what is decided.
                self._batch.require_held(connection)
                failpoints.hit("batch.recorded")
            except BaseException:
                store.rollback(connection)
                raise
            store.commit(connection, answer_s=self._timeout_s)
        return BatchEvent.COMMIT

    def _decide_on(self, connection: Connection, part: P) -> None:
        store, sent = self._context.store, part.prepared.has_transaction
        ours, _ = (store.decide if sent else store.hold)(
            connection,
            RowDecision(
                part.transactional_id,
                part.incarnation,
                part.prepared if sent else None,
                namespace=part.namespace,
                idle_s=self._idle_s,
            ),
        )
        if not ours:
            self._batch.require_held(connection)  # if its time is over, that is the reason
            raise Fenced(
                f"{self._batch.name}: another decider, or a recovery, has claimed its slot",
                transactional_id=part.transactional_id,
                next_step=RUN_AGAIN,
            )

    def _resolve(self, doubt: TransactionInDoubt) -> BatchEvent:
        """Claiming the ids waits for the old session's locks. By then, that session has committed, or never will."""
        try:
            self._batch.settle(())
            return BatchEvent.FIND if self._batch.is_written() else BatchEvent.ABORT
        except DualWriteError as error:
            doubt.next_step = RUN_AGAIN
            raise doubt from error

    def _complete(self) -> Sequence[P]:
        """Complete the parts that need no claim, so that their owners can keep their producers. Returns those parts."""
        found = {part.transactional_id: part for part in self._parts if part.prepared.has_transaction}
        nothing_sent = [part for part in self._parts if not part.prepared.has_transaction]
        store = self._context.store
        try:
            rows = [row for row in store.read(list(found)) if _is_decided(found[row.transactional_id], row)]
            completed = complete_handed_over(
                rows,
                coordinator=self._context.coordinator,
                store=store,
                deadline=Deadline(self._timeout_s),
                participants=self._participants,
                record=self._record,
            )
        except DualWriteError as error:
            logger.warning("%s: claiming its slots to complete it: %s", self._batch.name, error)
            return ()
        return [*(found[row.transactional_id] for row in completed), *nothing_sent]


def _is_decided(part: Part, row: StateRow) -> bool:
    return (row.prepared, row.incarnation) == (part.prepared, part.incarnation)


# Completes handed-over transactions without a claim, so that their owners can keep their producers.
#
# `dualwrite.protocol.batches` decides the steps. A claim and `dualwrite.recovery.settle.settle`
# end everything that they leave.


def complete_handed_over(
    rows: Sequence[StateRow],
    *,
    coordinator: TransactionCoordinator,
    store: StateStore,
    deadline: Deadline,
    participants: Participants | None = None,
    record: Record | None = None,
) -> Sequence[StateRow]:
    """Commit in Kafka what this caller has decided for waiting owners, and tell them through the row.

    The decider calls this once for each decision, before it has sent anything of it. The rows, as they are now, may be of both
    engines; their ``prepared`` is what was decided. The returned rows are durably completed on both sides. Nothing is known of
    the others, nor of any after an error: claim and settle them. `participants` names what the owners have left prepared in the
    database, which is committed first; without it the store looks for that. `record` takes the outcomes instead of the store,
    in a transaction that has other work, too: the owners may continue once it has committed.
    """
    prepared = (participants or store.participants)(rows)
    end_participants(store, [found for found in prepared if found.decided])
    failpoints.hit("complete.before")
    named = {row.kafka_id(row.incarnation): row.prepared for row in rows}
    native = {kafka_id: state for kafka_id, state in named.items() if state.is_native}
    shared = {kafka_id: state for kafka_id, state in named.items() if not state.is_native}
    done = _complete_native(native, coordinator, deadline)
    done |= _complete_shared(shared, coordinator, deadline)
    completed = [row for row in rows if row.kafka_id(row.incarnation) in done]
    outcomes = [(row, Outcome.COMMITTED, "committed by its decider") for row in completed]
    if record is not None:
        record(outcomes)
    else:
        store.record_outcomes(outcomes)
        failpoints.hit("complete.recorded")
    if len(completed) < len(rows):
        logger.info("%d of %d transactions are left for a claim to complete", len(rows) - len(completed), len(rows))
    return completed


def _complete_shared(
    named: Mapping[str, PreparedTxnState], coordinator: TransactionCoordinator, deadline: Deadline
) -> set[str]:
    """Commit librdkafka's transactions; the Kafka ids of those that may be recorded."""
    if not named:
        return set()
    answers = coordinator.end(named, committed=True, deadline=deadline, once=True)
    failpoints.hit("complete.ended")
    known = {kafka_id: HandedOver(state, answers.get(kafka_id)) for kafka_id, state in named.items()}
    between = GrowingPause()
    while asked := _at(known, next_completion_step, CompletionStep.LOOK):
        for kafka_id, view in coordinator.describe(asked, deadline).items():
            known[kafka_id] = replace(known[kafka_id], view=view)
        if early := _at(known, next_completion_step, CompletionStep.WAIT):
            between.wait(deadline)
            if not deadline.expired:
                known.update((kafka_id, replace(known[kafka_id], view=None)) for kafka_id in early)
    ended = _at(known, next_completion_step, CompletionStep.PROVE)
    for kafka_id, proof in zip(ended, coordinator.prove([named[one] for one in ended], deadline), strict=True):
        known[kafka_id] = replace(known[kafka_id], proof=proof)
    return set(_at(known, next_completion_step, CompletionStep.RECORD))


def _complete_native(
    named: Mapping[str, PreparedTxnState], coordinator: TransactionCoordinator, deadline: Deadline
) -> set[str]:
    """Commit native transactions by their own names; the Kafka ids of those that may be recorded."""
    if not named:
        return set()
    exact = native_of(coordinator)
    known = {kafka_id: NativeHandedOver() for kafka_id in named}
    pending = {kafka_id: PendingEnd(Ended(state, committed=True)) for kafka_id, state in named.items()}
    between = GrowingPause()
    while True:
        if to_end := _at(known, next_native_completion_step, CompletionStep.END):
            ids = {kafka_id: (named[kafka_id].producer_id, named[kafka_id].epoch) for kafka_id in to_end}
            answers = exact.end_exactly(ids, committed=True, deadline=deadline)
            failpoints.hit("complete.ended")
            known.update((kafka_id, replace(known[kafka_id], answer=answers[kafka_id])) for kafka_id in to_end)
        if asked := _at(known, next_native_completion_step, CompletionStep.LOOK):
            steps = ask_for_ends(coordinator, [pending[kafka_id] for kafka_id in asked], deadline)
            known.update((key, replace(known[key], end=step)) for key, step in zip(asked, steps, strict=True))
        early = _at(known, next_native_completion_step, CompletionStep.WAIT)
        if not early or deadline.expired:
            break
        between.wait(deadline)
        known.update((kafka_id, waited(known[kafka_id])) for kafka_id in early)
    ended = _at(known, next_native_completion_step, CompletionStep.PROVE)
    for kafka_id, proof in zip(ended, coordinator.prove([named[one] for one in ended], deadline), strict=True):
        known[kafka_id] = replace(known[kafka_id], proof=proof)
    return set(_at(known, next_native_completion_step, CompletionStep.RECORD))


Known = TypeVar("Known")


def _at(known: Mapping[str, Known], next_step: Callable[[Known], CompletionStep], step: CompletionStep) -> list[str]:
    return [kafka_id for kafka_id, one in known.items() if next_step(one) is step]
