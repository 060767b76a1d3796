"""The interface of a producer engine, what all engines share, and the transaction timeout that they ask for.

Every verb goes through the producer's state machine: it is checked, carried out by the engine, judged, then applied. A
producer that came through a fork is refused: its threads and sockets belong to the parent.

An engine sends the messages of one transactional id, one transaction at a time, and moves the producer's machine.
:class:`dualwrite.kafka.producer.TransactionalProducer` checks the machine before it calls a verb; only the
engine knows whether the verb has succeeded.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

from dualwrite.clock import Deadline, Patience, now_s
from dualwrite.errors import ConfigurationError, Fenced, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.interfaces import TransactionCoordinator
from dualwrite.kafka.error_codes import Failure
from dualwrite.kafka.transaction_ends import PendingEnd, know_end
from dualwrite.protocol.findings import Status, time_limit
from dualwrite.protocol.lives import WAY_ON, ProducerEvent, ProducerState
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch
from dualwrite.protocol.settle import EndStep, left_undecided
from dualwrite.protocol.values import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Concatenate, ParamSpec

    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.protocol.lives import Machine
    from dualwrite.protocol.message import DeliveryCallback, MessageColumns, Sendable, Unsendable
    from dualwrite.protocol.prepared_state import Engine, PreparedTxnState
    from dualwrite.protocol.settle import Ended

if TYPE_CHECKING:
    Arguments = ParamSpec("Arguments")

logger = logging.getLogger("dualwrite.kafka.producer")

AnyEngine = TypeVar("AnyEngine", bound="ProducerEngine")
Result = TypeVar("Result")

SILENT_ABORT_S: Final = 1.0
"""Limits the abort of a transaction that the brokers have not answered: its settling aborts it, too, once they answer."""
OLD_S: Final = 1.0
"""From this age on, extra requests that check the transaction no longer matter for its latency."""
_END_UNKNOWN: Final = "the previous transaction is not known to have ended in every partition as decided here"


class Column(Protocol):
    """A column of Arrow: a ``pyarrow.Array`` or ``ChunkedArray``, described by what both have.

    pyarrow has no types, and importing it would cost every process 0.2 s.
    """

    @property
    def null_count(self) -> int:
        """The number of nulls."""

    def __len__(self) -> int: ...


def not_allowed(event: ProducerEvent, state: ProducerState, transactional_id: str) -> IllegalStateError:
    """The error for an event that a producer's state does not allow."""
    return IllegalStateError(
        f"{event.value} is not allowed while the producer is {state.value}",
        transactional_id=transactional_id,
        next_step=WAY_ON[state],
    )


class IdLogger(logging.LoggerAdapter):  # type: ignore[type-arg] # not generic at run time on Python 3.10
    """Prefixes every line with the transactional id."""

    def __init__(self, transactional_id: str) -> None:
        super().__init__(logger, {})
        self._prefix = transactional_id.replace("%", "%%") + ": "

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix one line."""
        return self._prefix + str(msg), kwargs


def whole(
    verb: Callable[Concatenate[AnyEngine, Arguments], Result],
) -> Callable[Concatenate[AnyEngine, Arguments], Result]:
    """Make the producer doubtful if an interruption (``KeyboardInterrupt``, a cancelled task) cuts a verb short.

    The client may have done more than the machine knows, or a slow call may have escaped judgement.
    """

    @wraps(verb)
    def uninterrupted(self: AnyEngine, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return verb(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException as interruption:
            self._note_interrupted(verb.__name__, interruption)
            raise

    return uninterrupted


_ASKED: Final = {
    "open": "a producer id",
    "begin": "the end of the last transaction",
    "_ask_for_topic": "the leaders of a topic",
    "_wait_for_room": "the acknowledgement of messages",
    "_produce_when_there_is_room": "the acknowledgement of messages",
    "send_offsets": "the acknowledgement of offsets",
    "prepare": "the acknowledgement of messages",
    "commit": "the commit of a transaction",
    "abort": "the abort of a transaction",
}
"""What a step asks the brokers for."""


def asking(
    step: Callable[Concatenate[AnyEngine, Arguments], Result],
) -> Callable[Concatenate[AnyEngine, Arguments], Result]:
    """Note since when a step has been under way that asks the brokers, so that others can say what they wait for."""
    return _noted(step, is_whole=False)


def verb(
    step: Callable[Concatenate[AnyEngine, Arguments], Result],
) -> Callable[Concatenate[AnyEngine, Arguments], Result]:
    """As :func:`asking` and :func:`whole`, for a verb that asks the brokers, in one frame."""
    return _noted(step, is_whole=True)


def _noted(
    step: Callable[Concatenate[AnyEngine, Arguments], Result], *, is_whole: bool
) -> Callable[Concatenate[AnyEngine, Arguments], Result]:
    @wraps(step)
    def done(self: AnyEngine, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before = self.asking_since
        if before is None:
            self.asking_since, self.asking_for = now_s(), what
        try:
            return step(self, *args, **kwargs)
        except Unavailable:
            self.unanswered = self.asking
            raise
        except Exception:
            raise
        except BaseException as interruption:
            if is_whole:
                self._note_interrupted(step.__name__, interruption)
            raise
        finally:
            self.asking_since = before

    what = _ASKED.get(step.__name__, step.__name__)
    return done


class Callbacks:
    """Calls the delivery callbacks of one transaction, and keeps what they raise until a call may raise it."""

    callback_error: BaseException | None = None

    def call(self, callback: DeliveryCallback, error: Any, message: Any) -> None:
        """Call one. Raised in the middle of a verb, its exception would hide the verb's own outcome."""
        try:
            callback(error, message)
        except BaseException as raised:
            logger.exception("a delivery callback raised")
            self.callback_error = self.callback_error or raised

    def take_callback_error(self) -> BaseException | None:
        """The first exception that a callback raised, once."""
        raised, self.callback_error = self.callback_error, None
        return raised

    def raise_callback_error(self) -> None:
        """Re-raise the first exception that a callback raised, once."""
        if self.callback_error is not None and (raised := self.take_callback_error()) is not None:
            raise raised


class Transaction:
    """The current transaction, as far as this process knows it."""

    def __init__(self, deliveries: Callbacks | None = None) -> None:
        self.first_write_at: float | None = None  # the broker's timeout starts with the first message or offset
        self.sent_offsets = False  # consumed offsets are a part of it
        self.looked_at = 0.0  # when it was last seen open, once it is prepared
        self.given_up: Ended | None = None  # once its abort was sent
        self.deliveries = deliveries or Callbacks()

    @property
    def sent_to(self) -> frozenset[tuple[str, int]]:
        """The partitions that its messages may have been sent to."""
        return frozenset()

    def note_write(self) -> None:
        """Note the time of the first message or offset."""
        if self.first_write_at is None:
            self.first_write_at = now_s()


@dataclass(frozen=True)
class EngineArguments:
    """What a producer gives to its engine, whichever it chooses. ``incarnation`` is that of a lane's transactional id."""

    transactional_id: str
    machine: Machine[ProducerState, ProducerEvent]
    coordinator: TransactionCoordinator
    config: KafkaConfig
    incarnation: int | None
    bulk: bool
    call_timeout_s: float


class ProducerEngine(ABC):
    """One producer of one engine. Used by one thread at a time.

    The engine applies the event of a verb that has succeeded to the machine, and ``FAIL`` or ``DOUBT``.
    """

    engine: Engine

    def __init__(self, given: EngineArguments) -> None:
        self.machine = given.machine
        self.max_message_bytes = given.config.max_message_bytes
        self.bulk = given.bulk
        self.log = IdLogger(given.transactional_id)
        self.transaction = Transaction()
        self.corked = False  # messages wait for others to be sent with, until something must be sent
        self.prepared: PreparedTxnState | None = None  # also while a commit has no answer
        self.pending_end: PendingEnd | None = None  # the last transaction while its end is unknown
        self.epoch_may_rise = False  # a later transaction may have one that settling takes for a settler's
        self.asking_since: float | None = None  # when the step began that asks the brokers now
        self.asking_for = ""  # what it asks for
        self.unanswered: tuple[float, str] | None = None  # since when the last question was asked that had no answer
        # While a transaction waits for an answer, the database may hold locks for it.
        self.answer_within_s = self.call_timeout_s = given.call_timeout_s
        self.in_vain: Callable[[], bool] | None = None  # whether Kafka is known to be silent; None: wait all the same
        self._id = given.transactional_id
        self._coordinator = given.coordinator
        self._config = given.config
        self._made_in = process

    def patience(self, seconds: float) -> Deadline:
        """Limits a wait for answers to so many seconds, or until waiting is known to be in vain."""
        return Deadline(seconds) if self.in_vain is None else Patience(seconds, self.in_vain)

    @abstractmethod
    def open(self, event: ProducerEvent, asked_timeout_ms: int | None, deadline: Deadline) -> int:
        """Connect and initialise: aborts an ongoing transaction and fences earlier producers.

        Returns the transaction timeout that was agreed on, in ms.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction, once the last one is known to have ended."""

    def require_topic(self, topic: str) -> None:  # noqa: B027 - not every engine asks
        """Raise if the brokers answer that there is no such topic, before a message for it is handed over.

        Does not wait, as :meth:`send` does, for a topic that was made a moment ago: run the work again then. The error is
        ``retryable`` until that has lasted for ``topic.metadata.propagation.max.ms``. Does nothing where the engine asks in
        the background (librdkafka).
        """

    def require(self, event: ProducerEvent) -> None:
        """Raise unless the event is allowed now, in the process that made the producer; changes nothing."""
        if self._made_in != process:
            raise forked_error(self._made_in, self._id)
        if not self.machine.allows(event):
            raise not_allowed(event, self.machine.state, self._id)

    @abstractmethod
    def send(self, message: Message) -> None:
        """Take one message: it was checked when it was made. Waits for room if the queue is full."""

    @abstractmethod
    def send_many(self, batch: MessageBatch) -> None:
        """Take many messages; see :meth:`send`.

        Those that nobody has checked yet are checked as they are taken: at a ``TypeError`` or ``UnicodeEncodeError``,
        messages before that one may have been taken.
        """

    @abstractmethod
    def send_columns(self, columns: MessageColumns) -> None:
        """Check and take the rows of Arrow's columns; see :meth:`send_many`."""

    @abstractmethod
    def send_offsets(self, consumed: ConsumedOffsets, deadline: Deadline) -> None:
        """Commit consumed offsets as a part of the transaction."""

    def take(self, held: Sendable) -> None:
        """Take whatever has waited: each kind has its own method."""
        if isinstance(held, Message):
            self.send(held)
        elif isinstance(held, MessageBatch):
            self.send_many(held)
        elif isinstance(held, ConsumedOffsets):
            self.send_offsets(held, Deadline(self.answer_within_s))
        else:
            self.send_columns(held)

    def refuse_callback(self) -> None:
        """Refuse a delivery callback in bulk mode."""
        if self.bulk:
            raise IllegalStateError("a producer in bulk mode calls no on_delivery", transactional_id=self._id)

    @abstractmethod
    def prepare(self, deadline: Deadline) -> PreparedTxnState:
        """Make sure that every message is delivered, and name the transaction."""

    @abstractmethod
    def _require_open(self, state: PreparedTxnState, deadline: Deadline) -> None:
        """Raise unless the prepared transaction is still open everywhere."""

    @abstractmethod
    def commit(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Commit the prepared transaction."""

    @abstractmethod
    def abort(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Abort the transaction."""

    @abstractmethod
    def serve(self, timeout_s: float) -> int:
        """Take what has come in, and call delivery callbacks; returns the number of events."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect without ending the transaction, and apply ``CLOSE``."""

    @property
    @abstractmethod
    def ids(self) -> tuple[int, int] | None:
        """The producer id and epoch, where they are known."""

    @property
    def asking(self) -> tuple[float, str] | None:
        """Since when a step has asked the brokers, and for what; None if none asks now. For other threads."""
        since = self.asking_since
        return None if since is None else (since, self.asking_for)

    @property
    def begun_for_s(self) -> float:
        """Seconds since this transaction's first write; 0 if there is none."""
        first = self.transaction.first_write_at
        return 0.0 if first is None else now_s() - first

    @property
    def undecided_in(self) -> frozenset[tuple[str, int]]:
        """Partitions where an aborted or unprepared transaction may be open, even if its coordinator forgot it."""
        return left_undecided(
            None if self.pending_end is None else self.pending_end.ended,
            self.transaction.given_up,
            is_prepared=self.prepared is not None,
            sent_to=self.transaction.sent_to,
        )

    def require_still_open(self) -> None:
        """Check before a decision that the prepared transaction is still open; see the producer's method."""
        state = self.prepared
        if state is None or not state.has_transaction or now_s() - self.transaction.looked_at <= OLD_S:
            return
        try:
            self._require_open(state, Deadline(self.answer_within_s))
        except Fenced as error:
            self._raise(Failure(error, ProducerEvent.DOUBT))
        self.transaction.looked_at = now_s()

    def note_end(self, step: EndStep) -> None:
        """Take the next step for the last transaction's end: the producer continues, or becomes doubtful."""
        assert self.pending_end is not None
        if step is EndStep.KNOWN:
            self.pending_end = None
        elif step in {EndStep.SETTLE, EndStep.RECORD} and self.machine.state is ProducerState.READY:
            self.doubt(f"{_END_UNKNOWN}: {self.pending_end.ended.state}")

    def doubt(self, why: str) -> None:
        """Allow no further transaction: a request may still be on its way."""
        self.machine.apply(ProducerEvent.DOUBT)
        self.log.warning("this producer must be replaced: %s", why)

    def _note_interrupted(self, verb: str, interruption: BaseException) -> None:
        del interruption
        if self.machine.allows(ProducerEvent.DOUBT):
            self.doubt(f"{verb} was interrupted")

    @verb
    def _require_end_known(self, pending_end: PendingEnd) -> None:
        if pending_end.known:
            self.pending_end = None
            return
        step = know_end(self._coordinator, pending_end, Deadline(self.answer_within_s))
        self.note_end(step)
        if step is not EndStep.KNOWN:
            raise TransactionAborted(f"begin_transaction: {_END_UNKNOWN}", transactional_id=self._id)

    def refuse(self, message: Unsendable, topic: str) -> NoReturn:
        """Refuse a message that no broker would take: the transaction fails."""
        self._raise(Failure(message.refusal(topic, self._id), ProducerEvent.FAIL))

    def _raise(self, failure: Failure) -> NoReturn:
        if failure.event is ProducerEvent.DOUBT:
            self.doubt(failure.error.what)
        else:
            self.machine.apply(failure.event)
        raise failure.error from failure.error.__cause__


# The transaction timeout: the one limit that a stock broker sets to the guarantee.
#
# A prepared transaction whose owner is dead waits for a settler. The broker aborts it after its timeout, even if the
# database has decided it. Only 2147483647 ms never expires (KIP-939). The native engine asks for that; librdkafka
# cannot, since its check against `socket.timeout.ms` overflows: the greatest value that works there is 100 ms less,
# 24.8 days.

LEAST_TIMEOUT_MS = 1000
GREATEST_TIMEOUT_MS = 2_147_483_547
"""The greatest ``transaction.timeout.ms`` that librdkafka takes."""
BROKER_DEFAULT_MS = 900_000
"""The broker's default, assumed if we may not read its setting."""

_logged: set[tuple[str, str]] = set()
_logged_lock = threading.Lock()


def choose_transaction_timeout_ms(
    requested_ms: int | None, broker_maximum_ms: int | None, *, greatest_ms: int = GREATEST_TIMEOUT_MS
) -> int:
    """Choose the ``transaction.timeout.ms`` to ask for: the user's own, else the greatest that works.

    ``broker_maximum_ms`` is None if it cannot be read. A user's value that the engine or the broker does not allow is refused.
    """
    if requested_ms is None:
        known_ms = BROKER_DEFAULT_MS if broker_maximum_ms is None else broker_maximum_ms
        return min(greatest_ms, known_ms)
    if not LEAST_TIMEOUT_MS <= requested_ms <= greatest_ms:
        raise ConfigurationError(
            f"transaction.timeout.ms is {requested_ms}; the producer takes {LEAST_TIMEOUT_MS} to {greatest_ms}"
        )
    if broker_maximum_ms is not None and requested_ms > broker_maximum_ms:
        raise ConfigurationError(
            f"transaction.timeout.ms is {requested_ms}, above the broker's transaction.max.timeout.ms of {broker_maximum_ms}",
            next_step=f"lower it, or set transaction.max.timeout.ms={NEVER_MS} on the brokers",
        )
    return requested_ms


def warn_if_bounded(
    requested_ms: int | None, broker_maximum_ms: int | None, chosen_ms: int, *, servers: str, transactional_id: str
) -> None:
    """Warn, once per process and bootstrap servers, if the broker and not the user limits the guarantee."""
    finding = time_limit(requested_ms, broker_maximum_ms, chosen_ms, greatest_ms=GREATEST_TIMEOUT_MS)
    if finding.status is Status.WARNING and is_news("time limit", servers):
        logger.warning("%s: %s; %s", transactional_id, finding, finding.remedy)


def log_that_unlimited(how: str, *, servers: str, transactional_id: str) -> None:
    """Log, once per process, bootstrap servers and way, that the broker never ends a transaction by itself."""
    if is_news(how, servers):
        logger.info("%s: the brokers set no time limit to transactions (%s)", transactional_id, how)


def is_news(what: str, of: str = "") -> bool:
    """Whether it was not logged yet in this process: then the caller does, and no other one."""
    with _logged_lock:
        before = len(_logged)
        _logged.add((what, of))
        return len(_logged) > before


def agree_on_transaction_timeout_ms(
    coordinator: TransactionCoordinator,
    requested_ms: int | None,
    transactional_id: str,
    deadline: Deadline,
    *,
    servers: str,
) -> int:
    """Ask the brokers for their maximum, choose the timeout, and warn if it is short."""
    maximum_ms = coordinator.max_transaction_timeout_ms(deadline)
    chosen_ms = choose_transaction_timeout_ms(requested_ms, maximum_ms)
    warn_if_bounded(requested_ms, maximum_ms, chosen_ms, servers=servers, transactional_id=transactional_id)
    return chosen_ms


# Detects forks. A librdkafka instance does not survive one: its threads stay in the parent.

process = os.getpid()
"""This process's id, without a system call: a ``getpid()`` for each message would cost as much as the message."""


def _note_fork() -> None:
    global process  # noqa: PLW0603 - the process id is global to the process
    process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def forked_error(made_in: int, transactional_id: str) -> IllegalStateError:
    """The error for a producer that another process has made."""
    return IllegalStateError(
        f"this producer was made by process {made_in} and does not work after a fork",
        transactional_id=transactional_id,
        next_step="make a producer in each process",
    )
