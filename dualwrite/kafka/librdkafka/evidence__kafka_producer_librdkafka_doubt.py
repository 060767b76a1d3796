"""Calls to one librdkafka producer, each followed by a judgement of whether the producer can still be trusted.

librdkafka may have sent a call twice if it took longer than the first silent retry; it resends an initialisation at
once if its connection breaks; a missing answer may still arrive. Each makes the producer doubtful, even after a
success.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Producer

from dualwrite.clock import Deadline
from dualwrite.errors import TransactionAborted
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator
from dualwrite.kafka.engine import ProducerEngine, Transaction
from dualwrite.kafka.failures import Failure, Phase, not_answered
from dualwrite.kafka.librdkafka.evidence__kafka_producer_librdkafka_deliveries import Deliveries
from dualwrite.kafka.librdkafka.evidence__kafka_producer_librdkafka_failures import (
    failure_of,
    kafka_error,
    kafka_exception_behind,
)
from dualwrite.kafka.librdkafka.handle import Handle
from dualwrite.kafka.librdkafka.handle__kafka_producer_librdkafka_bounded_call import NoAnswer
from dualwrite.protocol.lives import Machine
from dualwrite.protocol.lives__protocol_tables_producer_life import ProducerEvent, ProducerState
from dualwrite.waiting import elsewhere

_PROBE_S: Final = 2.0

INIT_MAY_COME: Final = "librdkafka asked for a producer id again before an answer; the first request may still arrive"


class OpenTransaction(Transaction):
    """The current transaction, with the deliveries of its messages."""

    deliveries: Deliveries

    def __init__(self) -> None:
        super().__init__(Deliveries())
        self.maybe_sent_twice = False

    @property
    def sent_to(self) -> frozenset[tuple[str, int]]:
        """The partitions of its delivered and failed messages."""
        return self.deliveries.partitions


class JudgedProducer(ProducerEngine):
    """A librdkafka instance and the state machine of its life. All calls go through here and move the machine.

    Args:
        transactional_id: Kafka's ``transactional.id``.
        machine: The producer's life.
        coordinator: Shows whether transactions have ended.
        silent_retry_after_s: A call that takes longer may have been sent twice.
        call_timeout_s, max_message_bytes, bulk: As for every engine.
    """

    transaction: OpenTransaction

    def __init__(
        self,
        transactional_id: str,
        machine: Machine[ProducerState, ProducerEvent],
        coordinator: TransactionCoordinator,
        *,
        silent_retry_after_s: float,
        call_timeout_s: float,
        max_message_bytes: int,
        bulk: bool,
    ) -> None:
        super().__init__(
            transactional_id,
            machine,
            coordinator,
            call_timeout_s=call_timeout_s,
            max_message_bytes=max_message_bytes,
            bulk=bulk,
        )
        self.transaction = OpenTransaction()
        self._silent_retry_after_s = silent_retry_after_s
        self._handle: Handle | None = None

    @property
    def _raw(self) -> Producer:
        assert self._handle is not None
        return self._handle.raw

    def serve(self, timeout_s: float) -> int:
        """Take delivery reports and log lines; returns 0 if there is no instance yet."""
        if self._handle is None:
            return 0
        served = self._take_reports(timeout_s)
        self.transaction.deliveries.raise_callback_error()
        return served

    def _take_reports(self, timeout_s: float) -> int:
        """Take delivery reports. What a callback raises waits for the end: it must not hide why a message was refused."""
        return self._served(self._raw.poll, timeout_s)

    def _served(self, wait: Callable[[float], int], timeout_s: float) -> int:
        """Poll or flush. Either may raise librdkafka's fatal error, whatever caused it."""
        try:
            return elsewhere(lambda: wait(timeout_s)) if timeout_s else wait(0)
        except (KafkaException, SystemError, AttributeError) as error:
            self._raise(self._failure(error, Phase.DELIVERY))

    def _failure(self, error: KafkaException | SystemError | AttributeError, phase: Phase) -> Failure:
        exception = kafka_exception_behind(error, ask=self._raw.begin_transaction)
        return failure_of(exception, phase, transactional_id=self._id)

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
            self._raise(not_answered(phase, transactional_id=self._id))
        except (KafkaException, SystemError) as error:
            self._raise(self._failure(error, phase))
        except BaseException:
            self.doubt(f"{phase.value} was interrupted")  # by a signal while waiting: the answer is missing too
            raise

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
