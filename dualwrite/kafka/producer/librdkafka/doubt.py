"""Calls to one librdkafka producer, each followed by a judgement of whether the producer can still be trusted.

librdkafka may have sent a call twice if it took longer than the first silent retry; it resends an initialisation at
once if its connection breaks; a missing answer may still arrive. Each makes the producer doubtful, even after a
success.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from dualwrite.runtime.deadline import Deadline
from dualwrite.errors import CompletionPending, DualWriteError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.kafka.producer.librdkafka.bounded_call import NoAnswer
from dualwrite.kafka.producer.librdkafka.deliveries import Deliveries
from dualwrite.kafka.producer.librdkafka.failures import (
    NOT_ANSWERED,
    Failure,
    Phase,
    failure_of,
    kafka_error,
    kafka_exception_behind,
)
from dualwrite.kafka.producer.librdkafka.handle import Handle, IdLogger
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settling.known_end import Ended
from dualwrite.protocol.tables.machine import Machine
from dualwrite.protocol.tables.producer_life import PRODUCER_LIFE, WAY_ON, ProducerEvent, ProducerState

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    Arguments = ParamSpec("Arguments")

Judged = TypeVar("Judged", bound="JudgedProducer")
Result = TypeVar("Result")

_PROBE_S: Final = 2.0

INIT_MAY_COME: Final = "librdkafka asked for a producer id again before an answer; the first request may still arrive"


def judged_whole(
    verb: Callable[Concatenate[Judged, Arguments], Result],
) -> Callable[Concatenate[Judged, Arguments], Result]:
    """Make the producer doubtful if an interruption (``KeyboardInterrupt``) cuts a verb short.

    librdkafka may have done more than the machine knows, or a slow call may have escaped judgement.
    """

    @wraps(verb)
    def whole(self: Judged, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return verb(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            if self.machine.allows(ProducerEvent.DOUBT):
                self.doubt(f"{verb.__name__} was interrupted")
            raise

    return whole


class OpenTransaction:
    """The current transaction, as far as this process knows it."""

    def __init__(self) -> None:
        self.deliveries = Deliveries()
        self.sent_offsets = False
        self.maybe_sent_twice = False
        self.first_write_at: float | None = None
        self.prepared: PreparedTxnState | None = None
        self.given_up: Ended | None = None


class JudgedProducer:
    """A librdkafka instance and the state machine of its life. All calls go through here and move the machine.

    Args:
        transactional_id: Kafka's ``transactional.id``.
        silent_retry_after_s: A call that takes longer may have been sent twice.
    """

    def __init__(self, transactional_id: str, *, silent_retry_after_s: float) -> None:
        self.machine = Machine("producer", PRODUCER_LIFE, ProducerState.CREATED)
        self.log = IdLogger(transactional_id)
        self.transaction = OpenTransaction()
        self._id = transactional_id
        self._silent_retry_after_s = silent_retry_after_s
        self._handle: Handle | None = None

    def check(self, event: ProducerEvent) -> None:
        """Raise unless the event is allowed now; changes nothing."""
        if not self.machine.allows(event):
            state = self.machine.state
            raise IllegalStateError(
                f"{event.value} is not allowed while the producer is {state.value}",
                transactional_id=self._id,
                next_step=WAY_ON[state],
            )

    @property
    def _raw(self) -> Producer:
        assert self._handle is not None
        return self._handle.raw

    def serve(self, timeout_s: float) -> int:
        """Take delivery reports and log lines; returns 0 if there is no instance yet."""
        if self._handle is None:
            return 0
        served = self._served(self._raw.poll, timeout_s)
        self.transaction.deliveries.raise_callback_error()
        return served

    def _served(self, wait: Callable[[float], int], timeout_s: float) -> int:
        """Poll or flush. Either may raise librdkafka's fatal error, whatever caused it."""
        try:
            return wait(timeout_s)
        except (KafkaException, SystemError, AttributeError) as error:
            self._raise(failure_of(kafka_exception_behind(error), Phase.DELIVERY, transactional_id=self._id))

    def doubt(self, why: str) -> None:
        """Allow no further transaction: a request may still be on its way."""
        self.machine.apply(ProducerEvent.DOUBT)
        self.log.warning("this producer must be thrown away: %s", why)

    def _judge(self, phase: Phase, took_s: float) -> None:
        assert self._handle is not None
        if phase is not Phase.COMMIT:  # a commit has succeeded, whatever a poll raises
            self._served(self._raw.poll, 0)
        if took_s > self._silent_retry_after_s:
            self.doubt(f"{phase.value} took {took_s:.3f} s, so it may have been sent twice")
        elif self.transaction.maybe_sent_twice:
            self.doubt("the consumer's offsets may have been sent twice")
        elif self._handle.init_unanswered:
            self.doubt(INIT_MAY_COME)

    def _call(self, phase: Phase, function: Callable[[Producer, float], object], deadline: Deadline) -> float:
        assert self._handle is not None
        try:
            return self._handle.timed(function, deadline)
        except NoAnswer:
            self._raise(self._no_answer(phase))
        except (KafkaException, SystemError) as error:
            self._raise(failure_of(kafka_exception_behind(error), phase, transactional_id=self._id))
        except BaseException:
            self.doubt(f"{phase.value} was interrupted")  # by a signal while waiting: the answer is missing too
            raise

    def _raise(self, failure: Failure) -> NoReturn:
        if failure.event is ProducerEvent.DOUBT:
            self.doubt(failure.error.what)
        else:
            self.machine.apply(failure.event)
        raise failure.error from failure.error.__cause__

    def _no_answer(self, phase: Phase) -> Failure:
        what = f"{phase.value} was not answered in time"
        error: DualWriteError
        if phase is Phase.COMMIT:
            error = CompletionPending(
                what,
                transactional_id=self._id,
                next_step=NOT_ANSWERED,
            )
        else:
            error = Unavailable(
                what, transactional_id=self._id, next_step="throw this producer away and make a new one"
            )
        return Failure(error, ProducerEvent.DOUBT)

    def _delivery_failure(self) -> Failure:
        """The cause of failed messages. Where librdkafka only says that it dropped them, its transaction knows why."""
        first = self.transaction.deliveries.first_failure
        if first is None or first[0].code() in {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}:
            reason = self._transaction_error()
            if reason is not None:
                return failure_of(reason, Phase.DELIVERY, transactional_id=self._id)
        if first is None:
            error = TransactionAborted("produce: librdkafka's transaction has failed", transactional_id=self._id)
            return Failure(error, ProducerEvent.FAIL)
        return failure_of(first[0], Phase.DELIVERY, transactional_id=self._id, subject=first[1])

    def _transaction_error(self) -> KafkaException | None:
        """The error of librdkafka's transaction: a begin fails with it, and changes nothing."""
        assert self._handle is not None
        try:
            self._handle.timed(lambda producer, _: producer.begin_transaction(), Deadline(_PROBE_S))
        except KafkaException as error:
            return None if kafka_error(error).code() == KafkaError._STATE else error
        except NoAnswer:
            return None
        raise AssertionError("librdkafka began a transaction inside a transaction")
