"""Decisions of a writing process about its own dual writes: time, doubt, another attempt, opening, silence, health.

How to divide the rest of the broker's timeout among the last steps; what the row, the database and the log say about a COMMIT
whose answer is missing; whether work may run again after an error; whether Kafka is silent; and whether a writer is ready.

::

    the time left when the decision is recorded
    |-- at most decide_s: a pause, and COMMIT ----|-- at least the margin: its answer, Kafka's commit --|  the broker aborts

No second is spent twice: the database ends a transaction that has not committed within ``decide_s``, and ``decide_s`` plus the
margin must fit into the time left once the record is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Final

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import LogProof, Outcome


@dataclass(frozen=True)
class Allowance:
    """The time that one ending may take after the record of its decision, in seconds.

    Within ``decide_s`` the database must commit; it enforces that where it can. Within ``answer_s`` COMMIT must be answered:
    otherwise the owner reads the row while the Kafka transaction is still open. ``margin_s`` must be left for Kafka once the
    database has committed.
    """

    decide_s: float
    answer_s: float
    margin_s: float

    def fits(self, left_s: float) -> bool:
        """Whether a decision at the last allowed moment still leaves the margin.

        Checked once the record is written, with the time left then: the record may have waited for a lock.
        """
        return self.decide_s + self.margin_s <= left_s


def allow(left_s: float, margin_s: float, ending_s: float) -> Allowance | None:
    """Divide the time left, just before the record is written. Returns None if too little is left to decide. Pure.

    Half of the time above the margin is for the record, half for the decision. Half of the ending's time is reserved for
    resolving an unanswered COMMIT.

    ``left_s`` is what is left of the broker's transaction timeout, ``ending_s`` the limit of this ending. ``margin_s`` must be
    left once the database has committed; unless it is 0, it also limits the decision.
    """
    if left_s <= margin_s:
        return None
    half_s = ending_s / 2
    return Allowance(
        decide_s=min(margin_s or half_s, half_s, (left_s - margin_s) / 2),
        answer_s=min(half_s, left_s - margin_s / 2),
        margin_s=margin_s,
    )


# Resolves a COMMIT whose answer is missing, by the row, the database and the log.
# Reading the row under its lock, on a fresh connection, waits until the old backend has committed or rolled back. A question
# remains only if *later* owners have overwritten the row, or if the dual write had no messages: then the row says nothing of
# it, and only the database itself knows.


class DatabaseVerdict(Enum):
    """The database's own verdict on a transaction (on PostgreSQL, ``pg_xact_status``)."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class DoubtStep(Enum):
    """The next step about a COMMIT in doubt, or the verdict on it."""

    ASK_DATABASE = "ask the database for the transaction's status"
    ASK_RECORDS = "look up an incident recorded for it"
    ASK_LOG = "read the log for the marker"
    COMMITTED = "the database has committed"
    ABORTED = "the database has rolled back"
    LOST = "the database has committed and the broker aborted"
    UNVERIFIABLE = "the database has committed, and what Kafka did cannot be known"
    IN_DOUBT = "it cannot be known"


@dataclass(frozen=True)
class Doubt:
    """The facts known about one COMMIT in doubt. None means that the question was not asked.

    ``ours`` is the state that the COMMIT would have recorded; empty for rows alone, and for messages that wait. ``row`` is the
    row's state, read after the old backend released its lock. ``incident`` is the loss recorded for ``ours``, if any; it was
    looked up if ``records_asked``. ``waits`` is the number of the decision if the block's messages wait, and ``counted`` the
    number in the row, read at the same time as ``row``.
    """

    ours: PreparedTxnState
    row: PreparedTxnState
    verdict: DatabaseVerdict | None = None
    records_asked: bool = False
    incident: Outcome | None = None
    proof: LogProof | None = None
    waits: int | None = None
    counted: int = 0


_VERDICT = {
    DatabaseVerdict.COMMITTED: DoubtStep.COMMITTED,
    DatabaseVerdict.ABORTED: DoubtStep.ABORTED,
    DatabaseVerdict.UNKNOWN: DoubtStep.IN_DOUBT,
}
_INCIDENT = {Outcome.LOST: DoubtStep.LOST, Outcome.UNVERIFIABLE: DoubtStep.UNVERIFIABLE}
# The question here is whether the transaction was decided: so an abort is no loss.
_PROOF = {
    LogProof.COMMITTED: DoubtStep.COMMITTED,
    LogProof.PARTLY: DoubtStep.COMMITTED,
    LogProof.ABORTED: DoubtStep.ABORTED,
}


def next_doubt_step(doubt: Doubt) -> DoubtStep:
    """The next step about a COMMIT in doubt. Pure."""
    if not doubt.ours.has_transaction:
        return _step_without_state(doubt)
    if doubt.row == doubt.ours:
        return DoubtStep.COMMITTED
    if not doubt.row.has_transaction or (doubt.row.incarnation or 0) <= (doubt.ours.incarnation or 0):
        return DoubtStep.ABORTED  # no later owner has overwritten the row, and it does not name our state
    if doubt.verdict is None:
        return DoubtStep.ASK_DATABASE
    if doubt.verdict is DatabaseVerdict.ABORTED:
        return DoubtStep.ABORTED
    if not doubt.records_asked:
        return DoubtStep.ASK_RECORDS
    if doubt.incident in _INCIDENT:
        return _INCIDENT[doubt.incident]
    if doubt.verdict is DatabaseVerdict.COMMITTED:
        return DoubtStep.COMMITTED  # the later owner settled it before overwriting the row, and recorded no incident
    if doubt.proof is None:
        return DoubtStep.ASK_LOG
    return _PROOF.get(doubt.proof, DoubtStep.IN_DOUBT)


def _step_without_state(doubt: Doubt) -> DoubtStep:
    if doubt.waits is not None and doubt.counted <= doubt.waits:
        # Numbers only grow, and none is used twice. A greater one is a later owner's, and says nothing about ours.
        return DoubtStep.COMMITTED if doubt.counted == doubt.waits else DoubtStep.ABORTED
    return DoubtStep.ASK_DATABASE if doubt.verdict is None else _VERDICT[doubt.verdict]


# Whether the work of a dual write that ended with an error may run again, in a new transaction.


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
"""A subclass is judged like its nearest base class in this table. A class that is not in it is unsafe."""
_NOTHING_WRITTEN: Final = frozenset({"none", "aborted"})


def is_for_good(error: BaseException) -> bool:
    """Whether the settings must change first, so that trying again is useless."""
    return isinstance(error, ConfigurationError) and not error.may_pass


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
    return Redo.AGAIN if isinstance(error, ConfigurationError) and error.may_pass else rule


def leaves_nothing(error: BaseException) -> bool:
    """Whether a dual write that ended with this error has certainly changed neither side."""
    return redo_after(error) in {Redo.AGAIN, Redo.USELESS}


# What an opening in the background does after a failed attempt.


class OpeningStep(Enum):
    """The step after a failed attempt to open a writer."""

    AGAIN = "try again: a server may answer by then"
    REPORT = "report the loss, which is recorded, and try again"
    KEEP = "keep the error: waiting does not fix it"


def after_failed_opening(error: Exception) -> OpeningStep:
    """The step after an attempt that ended with this error. Pure.

    A loss belongs to a former owner's transaction: it is in the table of incidents, and the next attempt succeeds. The same
    holds for a decision that the database has lost. After a lost claim, however, every attempt fails until a person has looked.
    A standby may be promoted, so its error is no reason to stop.
    """
    if isinstance(error, DecidedTransactionLost | OutcomeUnverifiable):
        return OpeningStep.REPORT
    if isinstance(error, DatabaseWentBack) and error.state is not None:
        return OpeningStep.REPORT
    if isinstance(error, ConfigurationError | Fenced | IllegalStateError) and redo_after(error) is not Redo.AGAIN:
        return OpeningStep.KEEP
    return OpeningStep.AGAIN


# `Breaker`: whether Kafka is silent, so that blocks are refused at once instead of waiting one after the other.
# One waiting lane proves little: its broker may be slow while others answer. So once a question has waited for a second, the
# background asks, too. Kafka counts as silent once nobody gets an answer: the lane not within two seconds, nor the background,
# nor any other lane meanwhile. Any answer ends the silence.
# A broker that is down refuses connections at once, which proves more than a wait. If its messages may wait in the database, a
# writer tries to connect to all brokers, and two refusals by all of them in a row count as silence, too: then requests wait
# only for a fraction of a second. Other writers do not: a broker that restarts within the two seconds then causes no error.

SUSPECT_S: Final = 1.0
"""After a wait of this length the background asks, too, and repeats that after each further one."""
SILENT_S: Final = 2.0
"""A question that has waited for this long counts as unanswered."""
VERDICT_S: Final = 3.0
"""Once a question has waited for this long, it is known whether Kafka is silent."""
_PROBE_WAITS_S: Final = 0.5
"""The background's own question must have waited for at least this long, too."""
KNOCK_S: Final = 0.1
"""After a wait of this length the background checks whether the brokers refuse connections."""
_REFUSALS: Final = 2
_NEVER_S: Final = float("-inf")


@dataclass(frozen=True)
class Silence:
    """Kafka does not answer.

    Attributes:
        address: The bootstrap servers.
        since: When the oldest question without an answer was asked, in UTC.
        since_s: The same moment on the clock of the process.
        asked: What was asked.
    """

    address: str
    since: datetime
    since_s: float
    asked: str

    def __str__(self) -> str:
        return f"Kafka at {self.address} has not answered since {self.since:%H:%M:%S} UTC ({self.asked})"

    def error(self, transactional_id: str) -> Unavailable:
        """The error of a block that is refused because of this silence."""
        error = Unavailable(
            f"{self}; nothing was begun",
            transactional_id=transactional_id,
            next_step="try again when it answers, which the writer notices within about a second",
        )
        error.silent = True
        return error


@dataclass(frozen=True)
class Breaker:
    """Whether Kafka is silent, by the questions and answers of all lanes and of the background. Pure; times are in seconds.

    Attributes:
        asked: The oldest question since which nobody got any answer: since when it waits, and what it is; None if there is
            none.
        answered_s: The last moment at which Kafka is known to have answered anything.
        probed_s: When the background last asked.
        knocked_s: When it last tried to connect to all brokers.
        refusals: How often in a row all of them have refused since that question.
        silent: Whether Kafka is silent.
    """

    asked: tuple[float, str] | None = None
    answered_s: float = _NEVER_S
    probed_s: float = _NEVER_S
    knocked_s: float = _NEVER_S
    refusals: int = 0
    silent: bool = False

    def missing(self, since_s: float, what: str) -> Breaker:
        """Note a question without an answer, which still waits or was given up."""
        if since_s <= self.answered_s or (self.asked is not None and self.asked[0] <= since_s):
            return self
        return replace(self, asked=(since_s, what))

    def answered(self, at_s: float) -> Breaker:
        """Note that Kafka has answered something at that moment, or later."""
        if at_s <= self.answered_s:
            return self
        if self.asked is not None and at_s <= self.asked[0]:
            return replace(self, answered_s=at_s)
        return replace(self, answered_s=at_s, asked=None, refusals=0, silent=False)

    def must_probe(self, now_s: float) -> bool:
        """Whether the background should ask now."""
        return self.asked is not None and now_s >= max(self.asked[0], self.probed_s) + SUSPECT_S

    def probing(self, now_s: float) -> Breaker:
        """Note that the background asks."""
        return replace(self, probed_s=now_s)

    def must_knock(self, now_s: float) -> bool:
        """Whether the background should check now if all brokers refuse connections. After a refusal it checks again soon."""
        if self.asked is None or self.silent or now_s < self.asked[0] + KNOCK_S:
            return False
        return self.refusals > 0 or now_s >= self.knocked_s + SUSPECT_S

    def knocked(self, at_s: float, *, refused: bool) -> Breaker:
        """Note that the background began to connect to all brokers at that moment, and whether every one refused."""
        counts = refused and self.asked is not None and at_s > self.asked[0]
        return replace(self, knocked_s=at_s, refusals=self.refusals + 1 if counts else 0)

    def judged(self, now_s: float) -> Breaker:
        """Decide whether Kafka is silent. Only an answer ends that."""
        if self.silent or self.asked is None:
            return self
        since_s = self.asked[0]
        waits = now_s >= since_s + SILENT_S and since_s < self.probed_s <= now_s - _PROBE_WAITS_S
        return replace(self, silent=True) if waits or self.refusals >= _REFUSALS else self


# `Health`: what a writer knows of itself, and whether it is ready for the next dual write.


@dataclass(frozen=True)
class Health:
    """A writer's knowledge of itself, gathered without asking a server.

    Attributes:
        writer: The writer's transactional id.
        open: Whether it is open, in this process.
        opening: What its opening in the background waits for, and since when; None if it does not.
        refused: Why it cannot write, if waiting does not fix that; None if it can. Fix the cause, and restart the process.
        fenced: Whether another owner has taken over. This is final: restart the process if the takeover was not intended.
        answered: Whether database and Kafka answered the last dual write, settling or probe; while degraded, the database
            alone.
        degraded: Whether dual writes go through although their messages wait in the database: because Kafka is silent, or
            refuses a message, or because others wait before them. Such a writer is ready.
        silence: Since when Kafka is silent, and what was asked; None if it answers, or was asked nothing.
        unanswered_s: For how long a running dual write has waited for Kafka, in seconds, while no other one got an answer.
        lease_lost: Whether another member of its fleet has its id, so that it is about to take another one.
        lease_expired: Whether its lease was not renewed in time, so that another member may take its id.
        outbox_later: Whether messages wait in the database and are sent later; None if the writer has no outbox, or does not
            know yet.
        outbox_rows: How many messages wait, as of the last count; while any wait, they are counted about once a second.
        outbox_bytes: The bytes of their keys, values and headers.
        outbox_oldest_s: For how long the oldest of them has waited, in seconds; 0 if none does.
        outbox_stopped: Why no message is sent until a person acts: Kafka refuses one for good, or the database has lost a
            commit, so that messages that were sent may wait again. None otherwise.
        outbox_full: Which bound of `WriterLimits` is reached, so that no more may wait; None if none is.
        unreported_losses: The number of losses that only the log has reported; see ``on_loss``.
        max_lanes: The maximum number of lanes that dual writes use at a time.
        lanes: The number of lanes that exist, up to twice as many: some rest until the end of their last transaction is known.
        used: The number of lanes that dual writes use now.
        waiting: The number of dual writes that wait for a lane.
        unsettled: The number of lanes that may have left a transaction open in Kafka. They are settled in the background.
        stuck: The number of unsettled lanes for which settling has failed. It is retried.
        unsettled_s: For how long the oldest of the unsettled lanes has been so, in seconds.
        open_s: For how long the oldest of the running dual writes has held its lane, in seconds.
        time_left_s: The time until the broker aborts the next one of the open transactions, in seconds; None if none has a time
            limit.
        problems: Why it is not ready, as short sentences; empty if it is ready.
    """

    writer: str
    open: bool
    opening: str | None = None
    refused: str | None = None
    fenced: bool = False
    answered: bool = True
    degraded: bool = False
    silence: Silence | None = None
    unanswered_s: float = 0.0
    lease_lost: bool = False
    lease_expired: bool = False
    outbox_later: bool | None = None
    outbox_rows: int = 0
    outbox_bytes: int = 0
    outbox_oldest_s: float = 0.0
    outbox_stopped: str | None = None
    outbox_full: str | None = None
    unreported_losses: int = 0
    max_lanes: int = 0
    lanes: int = 0
    used: int = 0
    waiting: int = 0
    unsettled: int = 0
    stuck: int = 0
    unsettled_s: float = 0.0
    open_s: float = 0.0
    time_left_s: float | None = None
    problems: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        wrong = {
            "the writer is not open": not self.open and self.opening is None and self.refused is None,
            f"the writer is not open yet: {self.opening}": not self.open and self.opening is not None,
            f"nothing can be written: {self.refused}": self.refused is not None,
            "another owner has taken over": self.fenced,
            "the database or Kafka did not answer last": not self.answered and not self.degraded,
            "the database did not answer last": not self.answered and self.degraded,
            str(self.silence): self.silence is not None and not self.degraded,
            f"a dual write has waited for Kafka for {self.unanswered_s:.0f} s": self.silence is None
            and not self.degraded
            and self.unanswered_s >= SILENT_S,
            "its lease is lost: it is taking another id": self.lease_lost,
            "its lease was not renewed in time": self.lease_expired,
            f"no more messages may wait: {self.outbox_full}": self.outbox_full is not None,
            f"lanes that could not be settled: {self.stuck}": self.stuck > 0 and not self.degraded,
            f"losses that only the log has reported: {self.unreported_losses}": self.unreported_losses > 0,
        }
        object.__setattr__(self, "problems", tuple(text for text, applies in wrong.items() if applies))

    @property
    def ready(self) -> bool:
        """Whether dual writes are expected to work now."""
        return not self.problems
