"""One librdkafka producer driven by the state machine: each verb is checked, carried out, judged, then applied.

The judgement covers side effects that the call's answer does not show: an abort with messages in flight may leave some
behind; after a lost connection the broker may have forgotten a marker. Either makes the producer doubtful.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from confluent_kafka import KafkaError, KafkaException, Producer

from dualwrite.runtime.deadline import Deadline, now_s
from dualwrite.errors import (
    DualWriteError,
    Fenced,
    TransactionAborted,
    Unavailable,
)
from dualwrite.kafka.producer.ends import PendingEnd, know_end
from dualwrite.kafka.producer.librdkafka.bounded_call import NoAnswer
from dualwrite.kafka.producer.librdkafka.deliveries import DeliveryCallback
from dualwrite.kafka.producer.librdkafka.doubt import INIT_MAY_COME, JudgedProducer, OpenTransaction, judged_whole
from dualwrite.kafka.producer.librdkafka.evidence import OLD_S
from dualwrite.kafka.producer.librdkafka.failures import Failure, Phase, failure_of, kafka_error
from dualwrite.kafka.producer.librdkafka.handle import MakeHandle
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settling.known_end import Ended, EndStep
from dualwrite.protocol.tables.producer_life import ProducerEvent, ProducerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from confluent_kafka import TopicPartition
    from confluent_kafka._types import HeadersType

    from dualwrite.kafka.producer.librdkafka.evidence import Evidence
    from dualwrite.ports.coordinator import TransactionCoordinator

_SERVE_EVERY: Final = 256
"""Messages between two polls for delivery reports: often enough to limit memory, rarely enough to cost nothing."""
_DRAIN_BEFORE_ABORT_S: Final = 1.0
_CONNECT_LOOK_S: Final = 0.02

_END_UNKNOWN: Final = "the previous transaction is not known to have ended in every partition as decided here"

_Message = tuple[
    str, "str | bytes | None", "str | bytes | None", int, DeliveryCallback, DeliveryCallback, int, "HeadersType | None"
]


class ProducerInstance(JudgedProducer):
    """Carries out the verbs against librdkafka and moves the machine.

    Args:
        transactional_id: Kafka's ``transactional.id``.
        coordinator: Shows whether transactions have ended.
        evidence: Makes the prepared states.
        make_handle: Makes the librdkafka instance.
        bulk: Whether delivery reports cover failures only.
        silent_retry_after_s: A call that took longer may have been sent twice.
    """

    def __init__(
        self,
        transactional_id: str,
        coordinator: TransactionCoordinator,
        evidence: Evidence,
        make_handle: MakeHandle,
        *,
        bulk: bool,
        silent_retry_after_s: float,
    ) -> None:
        super().__init__(transactional_id, silent_retry_after_s=silent_retry_after_s)
        self._coordinator = coordinator
        self._evidence = evidence
        self._bulk = bulk
        self._make_handle = make_handle
        self.epoch_may_rise = False
        self.pending_end: PendingEnd | None = None
        self._looked_at = 0.0

    @judged_whole
    def open(self, event: ProducerEvent, settings: Mapping[str, object], deadline: Deadline) -> None:
        """Make and initialise the librdkafka instance: aborts an ongoing transaction and fences earlier producers."""
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
            self.doubt("its producer id could not be read")
            raise
        self.machine.apply(event)
        self.log.info("ready as producer %d:%d", *ids)
        self._judge(Phase.INIT, took_s)

    @judged_whole
    def begin(self, deadline: Deadline) -> None:
        """Begin a transaction."""
        self._require_end_known(deadline)
        self._call(Phase.BEGIN, lambda producer, _: producer.begin_transaction(), deadline)
        self.transaction = OpenTransaction()
        self.machine.apply(ProducerEvent.BEGIN)

    def _require_end_known(self, deadline: Deadline) -> None:
        if self.pending_end is None:
            return
        step = know_end(self._coordinator, self.pending_end, deadline)
        self.note_end(step)
        if step is not EndStep.KNOWN:
            raise TransactionAborted(f"begin_transaction: {_END_UNKNOWN}", transactional_id=self._id)

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
        # "Erroneous state": the transaction failed before, and the caller must learn of that first failure.
        if kafka_error(error).code() == KafkaError._STATE:
            self.serve(0)
            self._raise(self._delivery_failure())
        self._raise(failure_of(error, Phase.PRODUCE, transactional_id=self._id, subject=topic))

    @judged_whole
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
        # A late second copy would overwrite the offsets of the next transaction.
        transaction.maybe_sent_twice |= took_s > self._silent_retry_after_s
        transaction.sent_offsets |= any(offset.offset >= 0 for offset in offsets)
        self.machine.apply(ProducerEvent.SEND_OFFSETS)

    @judged_whole
    def prepare(self, deadline: Deadline) -> PreparedTxnState:
        """Flush, make sure that every message is delivered, and name the transaction."""
        transaction = self.transaction
        undelivered = self._served(self._raw.flush, deadline.remaining_s())
        transaction.deliveries.raise_callback_error()
        self._require_all_delivered(undelivered)
        self._require_no_late_init()
        state = PreparedTxnState()
        if transaction.deliveries.produced or transaction.sent_offsets:
            try:
                state = self._evidence.state_of(transaction, bulk=self._bulk, age_s=self.begun_for_s, deadline=deadline)
            except DualWriteError as error:
                self._raise(_refused_evidence(error))
        self._looked_at = now_s() if self._bulk or self.begun_for_s > OLD_S else transaction.first_write_at or now_s()
        transaction.prepared = state
        self.machine.apply(ProducerEvent.PREPARE)
        return state

    def _require_all_delivered(self, undelivered: int) -> None:
        deliveries = self.transaction.deliveries
        if deliveries.failed:
            self._raise(self._delivery_failure())
        # len() also counts delivery reports that have not been polled yet.
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
        """After some errors librdkafka initialises again by itself; a late copy of that request aborts what is open."""
        assert self._handle is not None
        if self._handle.init_unanswered:
            error = TransactionAborted(f"prepare_transaction: {INIT_MAY_COME}", transactional_id=self._id)
            self._raise(Failure(error, ProducerEvent.DOUBT))

    def require_still_open(self, deadline: Deadline) -> None:
        """Check before a decision that the prepared transaction is still open; see the producer's method."""
        state = self.transaction.prepared
        if state is None or not state.has_transaction or now_s() - self._looked_at <= OLD_S:
            return
        try:
            self._evidence.require_open(state, deadline)
        except Fenced as error:
            self._raise(Failure(error, ProducerEvent.DOUBT))
        self._looked_at = now_s()

    def note_end(self, step: EndStep) -> None:
        """Take the next step for the last transaction's end: the producer goes on, or becomes doubtful."""
        assert self.pending_end is not None
        if step is EndStep.KNOWN:
            self.pending_end = None
        elif step in {EndStep.SETTLE, EndStep.RECORD} and self.machine.state is ProducerState.READY:
            self.doubt(f"{_END_UNKNOWN}: {self.pending_end.ended.state}")

    @property
    def undecided_in(self) -> frozenset[tuple[str, int]]:
        """Partitions where an aborted or unprepared transaction may be open, even if its coordinator forgot it."""
        if self.pending_end is not None:
            return frozenset() if self.pending_end.ended.committed else self.pending_end.ended.partitions
        # The abort was not answered: settling may find it done at the coordinator, which then shows no partitions.
        if self.transaction.given_up is not None:
            return self.transaction.given_up.partitions
        return frozenset() if self.transaction.prepared is not None else self.transaction.deliveries.partitions

    @property
    def begun_for_s(self) -> float:
        """Seconds since this transaction's first write; 0 if there is none."""
        first = self.transaction.first_write_at
        return 0.0 if first is None else now_s() - first

    @judged_whole
    def commit(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Commit the prepared transaction."""
        took_s = self._call(Phase.COMMIT, lambda producer, left_s: producer.commit_transaction(left_s), deadline)
        self.machine.apply(event)
        if (state := self.transaction.prepared) is not None and state.has_transaction:
            self.pending_end = PendingEnd(Ended(state, committed=True))
        self._judge(Phase.COMMIT, took_s)
        self.transaction.prepared = None

    @judged_whole
    def abort(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Abort, after a short wait for messages in flight. If some remain, the producer is thrown away instead.

        An abort would then break librdkafka (4849), or crash this process if their produce request fails later.
        """
        if len(self._raw):
            self._served(self._raw.flush, min(_DRAIN_BEFORE_ABORT_S, deadline.remaining_s()))
        if in_flight := len(self._raw):
            error = Unavailable(
                f"abort_transaction: {in_flight} messages are still in flight",
                transactional_id=self._id,
                next_step="close this producer and make a new one, which aborts their transaction",
            )
            self._raise(Failure(error, ProducerEvent.DOUBT))
        ended = None
        if self.transaction.deliveries.produced or self.transaction.sent_offsets:
            ended = self._evidence.ended(self.transaction, bulk=self._bulk, deadline=deadline)
            self.transaction.given_up = ended
        self.epoch_may_rise |= self.machine.state is ProducerState.FAILED or bool(self.transaction.deliveries.failed)
        took_s = self._call(Phase.ABORT, lambda producer, left_s: producer.abort_transaction(left_s), deadline)
        self._evidence.ids = None  # librdkafka raises the epoch after some errors
        self.machine.apply(event)
        self.pending_end = None if ended is None else PendingEnd(ended)
        self._judge(Phase.ABORT, took_s)
        self.transaction.prepared = None

    def close(self) -> None:
        """Destroy the librdkafka instance without ending its transaction."""
        self.machine.apply(ProducerEvent.CLOSE)
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _refused_evidence(error: DualWriteError) -> Failure:
    return Failure(error, ProducerEvent.DOUBT if isinstance(error, Fenced) else ProducerEvent.FAIL)


def _connect(producer: Producer, left_s: float) -> None:
    """Wait for the first connection: librdkafka retries a failed coordinator look-up only after 500 ms."""
    deadline = Deadline(left_s)
    while not deadline.expired:
        try:
            # A single long wait can miss its wake-up and then last until the next refresh.
            if producer.cluster_id(_CONNECT_LOOK_S):
                return
        except KafkaException as error:
            if kafka_error(error).code() != KafkaError._TIMED_OUT:
                raise
