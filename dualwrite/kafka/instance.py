"""One librdkafka producer in the hands of the state machine: each verb is checked, carried out, judged, then applied.

What only shows in between belongs to the judgement: an abort with messages in flight may leave some behind; with a lost
connection the broker may have forgotten a marker. Either makes the producer doubtful.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from confluent_kafka import KafkaError, KafkaException, Producer

from dualwrite.deadline import Deadline, now_s
from dualwrite.errors import (
    DualWriteError,
    Fenced,
    TransactionAborted,
    Unavailable,
)
from dualwrite.kafka.bounded_call import NoAnswer
from dualwrite.kafka.deliveries import DeliveryCallback
from dualwrite.kafka.failures import Failure, Phase, failure_of, kafka_error, kafka_exception_behind
from dualwrite.kafka.handle import MakeHandle
from dualwrite.kafka.judged import INIT_MAY_COME, JudgedProducer, Transaction
from dualwrite.prepared_state import PreparedTxnState
from dualwrite.protocol.producer_life import ProducerEvent, ProducerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from confluent_kafka import TopicPartition
    from confluent_kafka._types import HeadersType

    from dualwrite.kafka.evidence import Evidence

_SERVE_EVERY: Final = 256
"""Delivery reports are taken once in so many messages: often enough to bound memory, rarely enough to cost nothing."""
_DRAIN_BEFORE_ABORT_S: Final = 1.0
_CONNECT_LOOK_S: Final = 0.02

_MAY_BE_FORGOTTEN: Final = (
    "a connection to a broker was lost since an earlier transaction, which may not be ended in every partition"
)

_Message = tuple[
    str, "str | bytes | None", "str | bytes | None", int, DeliveryCallback, DeliveryCallback, int, "HeadersType | None"
]


class ProducerInstance(JudgedProducer):
    """Carries the verbs out against librdkafka and moves the machine.

    Args:
        transactional_id: Kafka's ``transactional.id``.
        evidence: Makes the prepared states.
        make_handle: Makes the librdkafka instance.
        bulk: Whether only failures are reported by message.
        silent_retry_after_s: A call that took longer may have been sent twice.
    """

    def __init__(
        self,
        transactional_id: str,
        evidence: Evidence,
        make_handle: MakeHandle,
        *,
        bulk: bool,
        silent_retry_after_s: float,
    ) -> None:
        super().__init__(transactional_id, silent_retry_after_s=silent_retry_after_s)
        self._evidence = evidence
        self._bulk = bulk
        self._make_handle = make_handle
        self.epoch_may_rise = False
        self._has_ended_one = False
        self._last_was_committed = False

    def open(self, event: ProducerEvent, settings: Mapping[str, object], deadline: Deadline) -> None:
        """Make the librdkafka instance and initialise it: aborts what is ongoing and fences all earlier producers."""
        try:
            self._handle = self._make_handle(settings, self._id, deadline)
        except NoAnswer:
            self._raise(self._no_answer(Phase.CREATE))
        except KafkaException as error:
            raise failure_of(error, Phase.CREATE, transactional_id=self._id).error from error
        self._call(Phase.INIT, _connect, deadline)
        took_s = self._call(Phase.INIT, lambda producer, left_s: producer.init_transactions(left_s), deadline)
        try:
            ids = self._evidence.learn_ids(deadline)
        except DualWriteError:
            self.doubt("its producer id could not be asked")
            raise
        self.machine.apply(event)
        self.log.info("ready as producer %d:%d", *ids)
        self._judge(Phase.INIT, took_s)

    def begin(self, deadline: Deadline) -> None:
        """Begin a transaction."""
        self._require_nothing_forgotten("begin_transaction")
        self._call(Phase.BEGIN, lambda producer, _: producer.begin_transaction(), deadline)
        self.transaction = Transaction()
        self.machine.apply(ProducerEvent.BEGIN)

    def produce(
        self,
        topic: str,
        *,
        value: str | bytes | None,
        key: str | bytes | None,
        partition: int,
        headers: HeadersType | None,
        timestamp_ms: int,
        on_delivery: DeliveryCallback | None,
        timeout_s: float,
    ) -> None:
        """Hand one message to librdkafka."""
        transaction = self.transaction
        deliveries = transaction.deliveries
        report = deliveries.report if on_delivery is None else deliveries.reporting_to(on_delivery)
        if transaction.first_write_at is None:
            transaction.first_write_at = now_s()
        message = (topic, value, key, partition, report, report, timestamp_ms, headers)
        try:
            self._raw.produce(*message)
        except BufferError:
            self._produce_when_there_is_room(message, Deadline(timeout_s))
        except KafkaException as error:
            self._refused(error, topic)
        deliveries.produced += 1
        if deliveries.produced % _SERVE_EVERY == 0:
            self._serve_deliveries()

    def produce_many(
        self,
        topic: str,
        values: Iterable[str | bytes | None],
        keys: Iterable[str | bytes | None],
        timeout_s: float,
    ) -> None:
        """Hand many messages to librdkafka, in a loop that does nothing else."""
        transaction = self.transaction
        deliveries, report, produce = transaction.deliveries, transaction.deliveries.report, self._raw.produce
        if transaction.first_write_at is None:
            transaction.first_write_at = now_s()
        for value, key in zip(values, keys, strict=True):
            try:
                produce(topic, value, key, -1, report, report)
            except BufferError:
                self._produce_when_there_is_room((topic, value, key, -1, report, report, 0, None), Deadline(timeout_s))
            except KafkaException as error:
                self._refused(error, topic)
            deliveries.produced += 1
            if deliveries.produced % _SERVE_EVERY == 0:
                self._serve_deliveries()

    def _serve_deliveries(self) -> None:
        self.serve(0)
        if self.transaction.deliveries.failed:
            self._raise(self._delivery_failure())

    def _produce_when_there_is_room(self, message: _Message, deadline: Deadline) -> None:
        while True:
            self.serve(min(0.1, deadline.remaining_s()))
            try:
                return self._raw.produce(*message)
            except BufferError:
                if deadline.expired:
                    error = Unavailable(
                        "produce: librdkafka's queue stayed full",
                        transactional_id=self._id,
                        next_step="abort; the brokers take messages too slowly, or not at all",
                    )
                    self._raise(Failure(error, ProducerEvent.FAIL))
            except KafkaException as error:
                self._refused(error, message[0])

    def _refused(self, error: KafkaException, topic: str) -> NoReturn:
        # "Erroneous state": the transaction has failed before, and what failed is what the caller must know.
        if kafka_error(error).code() == KafkaError._STATE:
            self.serve(0)
            self._raise(self._delivery_failure())
        self._raise(failure_of(error, Phase.PRODUCE, transactional_id=self._id, subject=topic))

    def send_offsets(self, offsets: Sequence[TopicPartition], group_metadata: object, deadline: Deadline) -> None:
        """Commit consumed offsets as a part of the transaction."""
        transaction = self.transaction
        if transaction.first_write_at is None:
            transaction.first_write_at = now_s()
        took_s = self._call(
            Phase.SEND_OFFSETS,
            lambda producer, left_s: producer.send_offsets_to_transaction(list(offsets), group_metadata, left_s),
            deadline,
        )
        # A late second copy of it would overwrite the offsets of the next transaction.
        transaction.maybe_sent_twice |= took_s > self._silent_retry_after_s
        transaction.sent_offsets |= any(offset.offset >= 0 for offset in offsets)
        self.machine.apply(ProducerEvent.SEND_OFFSETS)

    def prepare(self, deadline: Deadline) -> PreparedTxnState:
        """Flush, make sure that every message is delivered, and name the transaction."""
        transaction = self.transaction
        undelivered = self._served(self._raw.flush, deadline.remaining_s())
        transaction.deliveries.raise_callback_error()
        self._require_all_delivered(undelivered)
        self._require_no_late_init()
        self._require_nothing_forgotten("prepare_transaction")
        state = PreparedTxnState()
        if transaction.deliveries.produced or transaction.sent_offsets:
            try:
                state = self._evidence.state_of(
                    transaction.deliveries, bulk=self._bulk, age_s=self.begun_for_s, deadline=deadline
                )
            except DualWriteError as error:
                self._raise(Failure(error, ProducerEvent.DOUBT if isinstance(error, Fenced) else ProducerEvent.FAIL))
        transaction.prepared = state
        self.machine.apply(ProducerEvent.PREPARE)
        return state

    def _require_all_delivered(self, undelivered: int) -> None:
        deliveries = self.transaction.deliveries
        if deliveries.failed:
            self._raise(self._delivery_failure())
        # len() counts reports that nobody has taken yet, too.
        undelivered = max(undelivered, len(self._raw))
        if undelivered:
            error = Unavailable(
                f"prepare_transaction: {undelivered} of {deliveries.produced} messages were not delivered in time",
                transactional_id=self._id,
                next_step="nothing was decided: make a new producer and run the work again",
            )
            self._raise(Failure(error, ProducerEvent.DOUBT))
        if not self._bulk and deliveries.delivered != deliveries.produced:
            lost = TransactionAborted(
                f"prepare_transaction: {deliveries.produced} messages, {deliveries.delivered} of them confirmed",
                transactional_id=self._id,
            )
            self._raise(Failure(lost, ProducerEvent.FAIL))

    def _require_no_late_init(self) -> None:
        """Librdkafka initialises once more by itself after some errors, and a copy that comes late aborts what is open."""
        assert self._handle is not None
        if self._handle.init_unanswered:
            error = TransactionAborted(f"prepare_transaction: {INIT_MAY_COME}", transactional_id=self._id)
            self._raise(Failure(error, ProducerEvent.DOUBT))

    @property
    def _may_be_forgotten(self) -> bool:
        """Whether the broker may have forgotten a marker of an earlier transaction (KAFKA-20734).

        It forgets when a partition has no leader at that moment; whoever wrote there was connected to that leader. The next
        marker of this producer would end the forgotten one, too: an abort would take along what is committed, a commit would
        bring back what is aborted.
        """
        assert self._handle is not None
        return self._has_ended_one and self._handle.has_lost_connection

    def notice_lost_connections(self) -> None:
        """Between transactions: where a connection was lost, this producer begins no other one; settling looks and mends."""
        if self._handle is None or self.machine.state is not ProducerState.READY:
            return
        try:
            self._raw.poll(0)
        except (KafkaException, SystemError, AttributeError) as error:
            self.doubt(f"a fatal error came out of a poll: {kafka_exception_behind(error)}")
            return
        if self._may_be_forgotten:
            self.doubt(_MAY_BE_FORGOTTEN)

    def _require_nothing_forgotten(self, verb: str) -> None:
        self._served(self._raw.poll, 0)
        if self._may_be_forgotten:
            error = TransactionAborted(f"{verb}: {_MAY_BE_FORGOTTEN}", transactional_id=self._id)
            self._raise(Failure(error, ProducerEvent.DOUBT))

    def _note_end(self, *, committed: bool) -> None:
        if self.transaction.first_write_at is not None:
            self._has_ended_one = True
            self._last_was_committed = committed

    @property
    def begun_for_s(self) -> float:
        """Seconds since the first write of this transaction; 0 if there is none."""
        first = self.transaction.first_write_at
        return 0.0 if first is None else now_s() - first

    def commit(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Commit what is prepared."""
        took_s = self._call(Phase.COMMIT, lambda producer, left_s: producer.commit_transaction(left_s), deadline)
        self.machine.apply(event)
        self._note_end(committed=True)
        self._judge(Phase.COMMIT, took_s)
        self.transaction.prepared = None

    def abort(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Abort. Messages get a moment to arrive first: with some in flight the producer is thrown away instead.

        An abort would break librdkafka (4849), or end this process when their partition's request fails after it.
        """
        if len(self._raw):
            self._served(self._raw.flush, min(_DRAIN_BEFORE_ABORT_S, deadline.remaining_s()))
        if in_flight := len(self._raw):
            error = Unavailable(
                f"abort_transaction: {in_flight} messages are still on their way",
                transactional_id=self._id,
                next_step="close this producer and make a new one, which aborts their transaction",
            )
            self._raise(Failure(error, ProducerEvent.DOUBT))
        self._require_no_commit_taken_along()
        self.epoch_may_rise |= self.machine.state is ProducerState.FAILED or bool(self.transaction.deliveries.failed)
        took_s = self._call(Phase.ABORT, lambda producer, left_s: producer.abort_transaction(left_s), deadline)
        self._evidence.ids = None  # librdkafka raises the epoch after some errors
        self.machine.apply(event)
        self._note_end(committed=False)
        self._judge(Phase.ABORT, took_s)
        self.transaction.prepared = None

    def _require_no_commit_taken_along(self) -> None:
        self._served(self._raw.poll, 0)
        if self._last_was_committed and self._may_be_forgotten:
            error = Unavailable(
                f"abort_transaction: {_MAY_BE_FORGOTTEN}: the abort would take it along",
                transactional_id=self._id,
                next_step="close this producer and settle: that looks at the earlier transaction first",
            )
            self._raise(Failure(error, ProducerEvent.DOUBT))

    def close(self) -> None:
        """Destroy the librdkafka instance without ending its transaction."""
        self.machine.apply(ProducerEvent.CLOSE)
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _connect(producer: Producer, left_s: float) -> None:
    """Wait for the first connection. librdkafka looks for the coordinator once in 500 ms: the first look should find it."""
    deadline = Deadline(left_s)
    while not deadline.expired:
        try:
            # One long wait can miss its wake-up, and then lasts until the next refresh.
            if producer.cluster_id(_CONNECT_LOOK_S):
                return
        except KafkaException as error:
            if kafka_error(error).code() != KafkaError._TIMED_OUT:
                raise
