"""Decisions of a writing process about its own dual writes: time, doubt, another attempt, opening, silence, health.

Also those of a member of a fleet about its lease, and of a consumer about failed attempts and dead members.

How the rest of the broker's timeout is divided among the last steps; what the row, the database and the log say about a
COMMIT whose answer is missing; whether work may run again after an error; whether Kafka is silent; and whether a writer is
ready.

::

    the time left when the decision is recorded
    |-- at most decide_s: a pause, and COMMIT ----|-- at least the margin: its answer, Kafka's commit --|  the broker aborts

No second is allotted twice: the database ends a transaction that has not committed within ``decide_s``, and ``decide_s``
plus the margin must fit into the time left once the record is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from itertools import count
from typing import Final, TypeVar

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
from dualwrite.protocol.lives import LeaseEvent, LeaseState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import LogProof, Outcome, check_seconds, member_id, writer_of


@dataclass(frozen=True)
class Allowance:
    """The time that one ending may take after the record of its decision, in seconds.

    ``decide_s`` lasts until the database has committed; the database enforces it where it can. ``answer_s`` lasts until COMMIT
    is answered: without an answer the owner asks the row while the Kafka transaction is still open. ``margin_s`` must be left
    for Kafka once the database has committed.
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
    """Divide the time left, just before the record is written. None: too little is left to decide. Pure.

    Half of the time above the margin is for the record itself, half for the decision. Half of the ending's time is kept for
    resolving a COMMIT that was not answered.

    ``left_s`` is left of the broker's transaction timeout, and ``ending_s`` for this ending. ``margin_s`` must be left once
    the database has committed; it is also the most that the decision gets, unless it is 0.
    """
    if left_s <= margin_s:
        return None
    half_s = ending_s / 2
    return Allowance(
        decide_s=min(margin_s or half_s, half_s, (left_s - margin_s) / 2),
        answer_s=min(half_s, left_s - margin_s / 2),
        margin_s=margin_s,
    )


# Resolves a COMMIT in doubt, whose answer is missing, by the row, the database and the log.
#
# The row is read under its lock on a fresh connection, which waits for the old backend: by then that backend has
# committed or rolled back. A question remains only if *later* owners have overwritten the row, or if the dual write had
# no messages: such a row names nothing of it, and only the database itself knows.


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
    """The facts known about one COMMIT in doubt. None is a question that was not asked.

    ``ours`` is the state that the COMMIT would have recorded; empty for rows alone, and for messages that wait. ``row`` is the
    row's state, read after the old backend released its lock. ``incident`` is the loss recorded for ``ours``, if any; it was
    looked up if ``records_asked``. ``waits`` is the number of the decision if the block's messages wait, and ``counted`` that
    which the row shows, read as ``row``.
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
# Not the outcome of a decided transaction: whether it was decided is the question, and here an abort is no loss.
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
        # Numbers only grow, and none is used twice. A greater one is of a later owner, who may have followed ours or not.
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


# What an opening in the background does after a failed attempt.


class OpeningStep(Enum):
    """The step after a failed attempt to open a writer."""

    AGAIN = "try again: a server may answer by then"
    REPORT = "report the loss, which is recorded, and try again"
    KEEP = "keep the error: waiting does not mend it"


def after_failed_opening(error: Exception) -> OpeningStep:
    """The step after an attempt that ended with this error. Pure.

    A loss is that of a former owner's transaction: it is in the table of incidents, and the next attempt succeeds. So is a
    decision that the database has lost; not so a lost claim, after which every attempt fails until a person has looked.
    """
    if isinstance(error, DecidedTransactionLost | OutcomeUnverifiable):
        return OpeningStep.REPORT
    if isinstance(error, DatabaseWentBack) and error.state is not None:
        return OpeningStep.REPORT
    if isinstance(error, ConfigurationError | Fenced | IllegalStateError):
        return OpeningStep.KEEP
    return OpeningStep.AGAIN


# `Breaker`: whether Kafka is silent, so that blocks are refused at once instead of waiting one after the other.
#
# One lane that waits shows little: its broker may be slow, and others answer. So a question that has waited for a second
# makes the background ask, too. Kafka counts as silent once nobody has an answer: not the lane after two seconds, not the
# background, and no other lane meanwhile. Any answer ends the silence.
#
# A broker that is gone refuses connections at once, which shows more than a wait. Where messages may wait in the database, a
# writer knocks at all brokers, and two refusals by all of them in a row count, too: then only a fraction of a second's requests
# wait. Where they may not, a broker that starts again within the two seconds costs nobody an error.

SUSPECT_S: Final = 1.0
"""After a wait of this length the background asks, too, and again after each of them."""
SILENT_S: Final = 2.0
"""A question that has waited for so long counts as not answered."""
VERDICT_S: Final = 3.0
"""Once a question has waited for so long, it is known whether Kafka is silent."""
_PROBE_WAITS_S: Final = 0.5
"""For so long at least, the background's own question has waited, too."""
KNOCK_S: Final = 0.1
"""After a wait of this length the background finds out whether the brokers refuse connections."""
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
        """The error of a block that is refused because of it."""
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
        asked: The oldest question that nobody has heard an answer after: since when, and what it is; None if there is none.
        answered_s: The last moment at which Kafka is known to have answered anything.
        probed_s: When the background last asked.
        knocked_s: When it last tried to connect to all brokers.
        refusals: How often in a row all of them refused, since that question.
        silent: Whether Kafka is silent.
    """

    asked: tuple[float, str] | None = None
    answered_s: float = _NEVER_S
    probed_s: float = _NEVER_S
    knocked_s: float = _NEVER_S
    refusals: int = 0
    silent: bool = False

    def missing(self, since_s: float, what: str) -> Breaker:
        """Note a question without an answer: one that still waits, or that was given up."""
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
        """Whether the background is to ask now."""
        return self.asked is not None and now_s >= max(self.asked[0], self.probed_s) + SUSPECT_S

    def probing(self, now_s: float) -> Breaker:
        """Note that the background asks."""
        return replace(self, probed_s=now_s)

    def must_knock(self, now_s: float) -> bool:
        """Whether the background is to find out now if all brokers refuse connections: soon again after they did."""
        if self.asked is None or self.silent or now_s < self.asked[0] + KNOCK_S:
            return False
        return self.refusals > 0 or now_s >= self.knocked_s + SUSPECT_S

    def knocked(self, at_s: float, *, refused: bool) -> Breaker:
        """Note that at that moment the background began to connect to all brokers, and whether every one refused."""
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
        refused: Why it cannot write, if waiting does not mend that; None if it can. Fix the cause, and restart the process.
        fenced: Whether another owner has taken over. This is final: restart the process if the takeover was not intended.
        answered: Whether database and Kafka answered the last dual write, settling or probe; if it is degraded, the database.
        degraded: Whether dual writes go through although Kafka does not have their messages yet: they wait in the database, as
            Kafka is silent, as others wait before them, or as it refuses one of those. That is ready.
        silence: Since when Kafka is silent, and what was asked; None if it answers, or was asked nothing.
        unanswered_s: For how long a running dual write has waited for Kafka, in seconds, while no other one got an answer.
        lease_lost: Whether another member of its fleet has its id: it is about to take another one.
        lease_expired: Whether its lease was not renewed in time, so that another member may take its id.
        outbox_later: Whether messages wait in the database, and are sent later; None if the writer has no outbox, or does not
            know yet.
        outbox_rows: How many messages wait, as of the last count, about a second ago while any do.
        outbox_bytes: The bytes of their keys, values and headers.
        outbox_oldest_s: For how long the oldest of them has waited, in seconds; 0 if none does.
        outbox_stopped: Why none of them is sent although Kafka answers: it refuses one for good; None if that is not so.
        outbox_full: Which bound of `WriterLimits` is reached, so that no more may wait; None if none is.
        unreported_losses: The number of losses that only the log has reported; see ``on_loss``.
        max_lanes: The maximum number of lanes that dual writes use at a time.
        lanes: The number of lanes that exist, up to twice as many: some rest until it is known how their last one has ended.
        used: The number of lanes that dual writes use now.
        waiting: The number of dual writes that wait for a lane.
        unsettled: The number of lanes that may have left a transaction open in Kafka. They are settled in the background.
        stuck: The number of unsettled lanes for which settling has failed. It is retried.
        unsettled_s: For how long the oldest of the unsettled lanes has been so, in seconds.
        open_s: For how long the oldest of the running dual writes has held its lane, in seconds.
        time_left_s: The time until the broker aborts the transaction that it aborts next, in seconds; None if no transaction
            with a time limit is open.
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


_BEATS: Final = 6
_LEAST_BEATS: Final = 3
_RETRY: Final = 0.25
_LONGEST_NAME: Final = 229
"""A transactional id has at most 240 characters; a dash and ten digits are the number's."""
_ON: Final = " on "
_PLACE: Final = re.compile(f"(?s:.*){_ON}(?P<system>[^ ]+)/(?P<pid>[1-9][0-9]{{0,6}})")
"""As :meth:`Place.sign` writes it. No system has process ids of more than seven digits."""


@dataclass(frozen=True)
class Place:
    """Where a process runs: written behind the owner of its lease, so that the processes beside it can see that it is gone.

    ``system`` names one boot of one kernel and one namespace of process ids: where two processes have the same system, a
    number means the same process to both. It has no spaces and no wildcards of SQL.
    """

    system: str
    pid: int

    @property
    def mark(self) -> str:
        """A text that the owners of all processes of this system hold, and no others."""
        return f"{_ON}{self.system}/"

    def sign(self, owner: str) -> str:
        """The owner with this place behind it."""
        return f"{owner}{self.mark}{self.pid}"


def place_of(owner: str) -> Place | None:
    """The place that an owner names; None if it names none: then the lease alone shows that it is dead."""
    found = _PLACE.fullmatch(owner)
    return None if found is None else Place(found["system"], int(found["pid"]))


@dataclass(frozen=True)
class Lease:
    """One numbered id of a fleet (``fleet-number``), as its row was read. One without an owner is free.

    ``left_s`` are the seconds until it expires, by the database's clock when the row was read.
    """

    transactional_id: str
    fleet: str
    number: int
    owner: str | None = None
    left_s: float | None = None

    @property
    def state(self) -> LeaseState:
        """Free, held, or expired."""
        if self.owner is None or self.left_s is None:
            return LeaseState.FREE
        return LeaseState.HELD if self.left_s > 0 else LeaseState.EXPIRED


def holder_has_died(lease: Lease, here: Place | None, has_ended: Callable[[int], bool]) -> bool:
    """Whether the process that holds the lease is known to have ended, so that nobody needs to wait until it expires.

    Only a process of the same system can know, which ``has_ended`` asks; False if it cannot be known. A suspended process has
    not ended: nobody takes its id before its lease expires.
    """
    if here is None or lease.owner is None or lease.state is not LeaseState.HELD:
        return False
    place = place_of(lease.owner)
    return place is not None and place.system == here.system and has_ended(place.pid)


def numbers_to_try(leases: Iterable[Lease], has_died: Callable[[Lease], bool]) -> Iterator[int]:
    """The numbers that nobody holds, lowest first, without an end: a newcomer takes the first one that it gets.

    A lease that has expired, or whose holder has died, takes its place among the free ones. So numbers stay small, and a dead
    member's id is settled soon.
    """
    held = {lease.number for lease in leases if lease.state is LeaseState.HELD and not has_died(lease)}
    return (number for number in count() if number not in held)


def heard(transactional_id: str, renewed: Collection[str]) -> LeaseEvent:
    """The event of a heartbeat for our lease, from the ids that it has renewed under our name."""
    return LeaseEvent.RENEW if transactional_id in renewed else LeaseEvent.LOSE


@dataclass(frozen=True)
class LeaseTiming:
    """How long a lease lasts, and how often it is renewed, in seconds.

    Others take a lease that was not renewed for ``timeout_s``. ``heartbeat_s`` is the mean time between two heartbeats; a
    sixth of the timeout if not given.
    """

    timeout_s: float = 30.0
    heartbeat_s: float | None = None

    def __post_init__(self) -> None:
        check_seconds("lease_timeout_s", self.timeout_s)
        if self.heartbeat_s is not None:
            check_seconds("heartbeat_s", self.heartbeat_s)
        if self.beat_s > self.timeout_s / _LEAST_BEATS:
            raise ConfigurationError(
                f"a heartbeat every {self.beat_s:g} s is too rare for a lease of {self.timeout_s:g} s",
                next_step=f"give at most {self.timeout_s / _LEAST_BEATS:g} s: a lost heartbeat must not end a lease",
            )

    @property
    def beat_s(self) -> float:
        """The mean time between two heartbeats."""
        return self.timeout_s / _BEATS if self.heartbeat_s is None else self.heartbeat_s

    def pause_s(self, drawn: float, *, failed: bool = False) -> float:
        """The pause before the next heartbeat, shorter if the last one failed.

        ``drawn`` is a random number from 0 to 1, so that members that started together do not ask at the same time.
        """
        return self.beat_s * (0.75 + 0.5 * drawn) * (_RETRY if failed else 1.0)

    def is_over(self, since_s: float) -> bool:
        """Whether a lease may have expired that was renewed that many seconds ago, counted from before the request."""
        return since_s >= self.timeout_s


def check_fleet(fleet: str) -> None:
    """Refuse a name that cannot be a fleet's: it is empty or too long, or holds a ``#``."""
    if not 1 <= len(fleet) <= _LONGEST_NAME or "#" in fleet:
        raise ConfigurationError(
            f"{fleet!r} cannot be the name of a fleet",
            next_step=f"use 1 to {_LONGEST_NAME} characters without '#'; its ids are {member_id('NAME', 0)!r} and so on",
        )


Item = TypeVar("Item")

_SEPARATOR: Final = "/"
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0


class Trouble(Enum):
    """The kinds of failed attempts, by what helps."""

    WORK = "the work fails, and may fail again"
    UNREADABLE = "a message cannot be deserialized: the same bytes will fail again"
    PASSING = "a server or another transaction was in the way: the same work may succeed"
    MOVED = "another member has the partitions, or had them meanwhile"
    OWNER = "another process has claimed our transactional id"
    DOUBT = "the outcome is not known until the transaction is settled"
    DECIDED = "the database has committed; Kafka follows"
    FATAL = "a person must look"


class Step(Enum):
    """The next step after an attempt."""

    DONE = "continue with the next messages"
    REDO = "run the same messages again, after a pause"
    SPLIT = "run each half of the messages by itself"
    ISOLATE = "run the message that fails by itself, between those before and after it"
    SET_ASIDE = "write the message to the dead-letter topic"
    REWIND = "forget the messages, and read again from the committed offset"
    REOPEN = "open a new writer, which settles, then read again from the committed offset"
    STOP = "stop, and raise the error"


_TROUBLE_BY_CLASS: Final[Mapping[type[DualWriteError], Trouble]] = {
    Fenced: Trouble.OWNER,
    TransactionInDoubt: Trouble.DOUBT,
    CompletionPending: Trouble.DECIDED,
}


def trouble_of(error: DualWriteError, *, handling: bool = False, moving: bool = False) -> Trouble:
    """The kind of an error that has left a block.

    If the handler has raised it (``handling``), an outcome in doubt or decided is that of another dual write inside the
    handler: this one has aborted. If moving the offsets has (``moving``), a refusal is that of the group coordinator.
    """
    advice = redo_after(error)
    if advice is Redo.AGAIN:
        return Trouble.PASSING
    if advice is Redo.USELESS and isinstance(error, TransactionAborted):
        return Trouble.MOVED if moving else Trouble.WORK
    kind = next((kind for of, kind in _TROUBLE_BY_CLASS.items() if isinstance(error, of)), Trouble.FATAL)
    return Trouble.WORK if handling and kind in {Trouble.DOUBT, Trouble.DECIDED} else kind


def step_after(trouble: Trouble, *, messages: int, failures: int, attempts: int, sets_aside: bool) -> Step:
    """Decide what to do after a failed attempt with so many messages.

    Only failures of the work and of deserializers count: an outage must not send good messages to the dead-letter topic. A new
    writer settles what is in doubt; the committed offset then shows whether the messages are written, since it is a part of
    the transaction.

    ``failures`` counts this attempt if it has failed because of the work, which may fail ``attempts`` times.
    """
    if trouble not in {Trouble.WORK, Trouble.UNREADABLE}:
        return _STEPS[trouble]
    if trouble is Trouble.UNREADABLE and messages > 1:
        return Step.ISOLATE
    if trouble is Trouble.WORK and failures < attempts:
        return Step.REDO
    if not sets_aside:
        return Step.STOP
    return Step.SPLIT if messages > 1 else Step.SET_ASIDE


_STEPS: Final[Mapping[Trouble, Step]] = {
    Trouble.PASSING: Step.REDO,
    Trouble.MOVED: Step.REWIND,
    Trouble.OWNER: Step.REOPEN,
    Trouble.DOUBT: Step.REOPEN,
    Trouble.DECIDED: Step.DONE,
    Trouble.FATAL: Step.STOP,
}


def halves(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """The two halves of at least two items, in their order."""
    middle = len(items) // 2
    return items[:middle], items[middle:]


def around(items: Sequence[Item], index: int) -> list[Sequence[Item]]:
    """The items before one of them, this one by itself, and those after it, in their order; without empty ones."""
    return [part for part in (items[:index], items[index : index + 1], items[index + 1 :]) if part]


def failures_left_over(messages: int, attempts: int) -> int:
    """The failures that a half begins with: several messages get one more attempt, a single message gets all."""
    return attempts - 1 if messages > 1 else 0


def pause_s(failures: int) -> float:
    """Seconds to wait before the next attempt, after this many failed ones in a row."""
    return min(_FIRST_PAUSE_S * float(1 << min(failures - 1, 16)), _LONGEST_PAUSE_S)


def next_offsets(consumed: Iterable[tuple[str, int, int]]) -> dict[tuple[str, int], int]:
    """By topic and partition, the offset after the last one consumed."""
    after: dict[tuple[str, int], int] = {}
    for topic, partition, offset in consumed:
        after[topic, partition] = max(offset + 1, after.get((topic, partition), 0))
    return after


def member_prefix(group: str) -> str:
    """The prefix of the transactional ids of a group's members."""
    return f"{group}{_SEPARATOR}"


def consumer_member_id(group: str, member: str) -> str:
    """The transactional id of a member, which is also the ``client.id`` of its consumer.

    Refuses, with `ValueError`, an empty name and one with a character that the member's peers would read otherwise.
    """
    if not member or _SEPARATOR in member or "#" in member:
        raise ValueError(f"a member's name is not empty, and has neither '#' nor {_SEPARATOR!r}: {member!r}")
    return member_prefix(group) + member


def left_behind(group: str, unsettled: Collection[str], present: Collection[str], ours: str) -> list[str]:
    """The members with something unsettled whose owners are no longer in the group: their peers may settle it.

    A member joins its group before it begins a transaction. So if an id has an open transaction, and a list of members read
    *after* that was seen does not contain it, its owner has died or was expelled. An expelled owner may be alive, but its
    partitions are assigned to others, so settling only aborts a transaction that could not commit. Do not trust a list without
    our own id: we may have been expelled ourselves.

    ``unsettled`` are transactional ids, lanes included; ``present`` are client ids.
    """
    if ours not in present:
        return []
    prefix = member_prefix(group)
    names = {writer_of(name) for name in unsettled if name.startswith(prefix)}
    return sorted(name for name in names - set(present) if _SEPARATOR not in name[len(prefix) :])
