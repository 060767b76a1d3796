"""One librdkafka producer driven by the state machine: each verb is checked, carried out, judged, then applied.

Columns of Arrow are sent row by row: librdkafka takes nothing else.

The judgement covers side effects that the call's answer does not show: an abort with messages in flight may leave some
behind; after a lost connection the broker may have forgotten a marker. Either makes the producer doubtful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any, Final, NoReturn

from confluent_kafka import KafkaError, KafkaException, Producer

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import DualWriteError, Fenced, TransactionAborted, Unavailable
from dualwrite.kafka.engine import (
    OLD_S,
    SILENT_ABORT_S,
    ProducerEngine,
    agree_on_transaction_timeout_ms,
    asking,
    verb,
)
from dualwrite.kafka.error_codes import Failure, Phase, not_answered
from dualwrite.kafka.librdkafka.evidence import (
    Evidence,
    OpenTransaction,
    failure_of,
    is_purge,
    kafka_error,
    kafka_exception_behind,
)
from dualwrite.kafka.librdkafka.handle import Handle, MakeHandle, NoAnswer, producer_settings
from dualwrite.kafka.transaction_ends import PendingEnd
from dualwrite.protocol.lives import ProducerEvent, ProducerState
from dualwrite.protocol.message import (
    ANY_PARTITION,
    ConsumedOffsets,
    Headers,
    Message,
    MessageBatch,
    MessageColumns,
    Unsendable,
    nameless_header,
)
from dualwrite.protocol.prepared_state import Engine, PreparedTxnState
from dualwrite.protocol.settle import Ended
from dualwrite.waiting import elsewhere

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka._types import HeadersType

    from dualwrite.kafka.engine import EngineArguments
    from dualwrite.protocol.message import DeliveryCallback

_SERVE_EVERY: Final = 256
"""Messages between two polls for delivery reports: often enough to limit memory, rarely enough to cost nothing."""
_NOW: Final = 0
_DRAIN_BEFORE_ABORT_S: Final = 1.0
_CONNECT_LOOK_S: Final = 0.02
_PROBE_S: Final = 2.0

INIT_MAY_COME: Final = "librdkafka asked for a producer id again before an answer; the first request may still arrive"

_Parts = tuple[str, bytes | None, bytes | None, int, "DeliveryCallback", "DeliveryCallback", int, "HeadersType | None"]


class ProducerInstance(ProducerEngine):
    """Carries out the verbs against librdkafka and moves the machine. All calls of librdkafka go through here."""

    engine = Engine.LIBRDKAFKA
    transaction: OpenTransaction

    def __init__(self, given: EngineArguments, make_handle: MakeHandle) -> None:
        super().__init__(given)
        self.transaction = OpenTransaction()
        self._evidence = Evidence(given.coordinator, given.transactional_id, given.incarnation)
        self._silent_retry_after_s = given.config.silent_retry_after_s  # a longer call may have been sent twice
        self._make_handle = make_handle
        self._handle: Handle | None = None

    @property
    def ids(self) -> tuple[int, int] | None:
        """The producer id and epoch; None before ``init_transactions``, and after an abort until the next prepare."""
        return self._evidence.ids

    @verb
    def open(self, event: ProducerEvent, asked_timeout_ms: int | None, deadline: Deadline) -> int:
        """Make and initialise the librdkafka instance: aborts an ongoing transaction and fences earlier producers."""
        timeout_ms = agree_on_transaction_timeout_ms(
            self._coordinator, asked_timeout_ms, self._id, deadline, servers=self._config.listener[0]
        )
        settings = producer_settings(self._config, self._id, timeout_ms, bulk=self.bulk)
        try:
            self._handle = self._make_handle(settings, self._id, deadline)
        except NoAnswer:
            self._raise(not_answered(Phase.CREATE, transactional_id=self._id))
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
        return timeout_ms

    @verb
    def begin(self) -> None:
        """Begin a transaction."""
        deadline = Deadline(self.call_timeout_s)
        if self.pending_end is not None:
            self._require_end_known(self.pending_end)
        self._call(Phase.BEGIN, lambda producer, _: producer.begin_transaction(), deadline)
        self.transaction = OpenTransaction()
        self.prepared = self.unanswered = None
        self.machine.apply(ProducerEvent.BEGIN)

    def send(self, message: Message) -> None:
        """Hand one message to librdkafka."""
        self.require(ProducerEvent.PRODUCE)
        self._take(message)

    def _take(self, message: Message) -> None:
        transaction = self.transaction
        deliveries = transaction.deliveries
        topic, value, key, partition, headers, timestamp_ms, on_delivery, _ = message
        report = deliveries.report if on_delivery is None else deliveries.reporting_to(on_delivery)
        transaction.note_write()
        to = ANY_PARTITION if partition is None else partition
        pairs: HeadersType | None = [*headers] or None
        parts = (topic, value, key, to, report, report, timestamp_ms or _NOW, pairs)
        try:
            self._raw.produce(*parts)
        except BufferError:
            self._produce_when_there_is_room(parts)
        except KafkaException as error:
            self._refused(error, topic)
        deliveries.produced += 1
        if deliveries.produced % _SERVE_EVERY == 0:
            self._serve_deliveries()

    def send_many(self, batch: MessageBatch) -> None:
        """Check many messages, and hand them to librdkafka, in a loop that does nothing else."""
        self.require(ProducerEvent.PRODUCE)
        transaction = self.transaction
        deliveries, report, produce = transaction.deliveries, transaction.deliveries.report, self._raw.produce
        topic = batch.topic
        transaction.note_write()
        try:
            for value, key, _ in batch.rows(self.max_message_bytes):
                try:
                    produce(topic, value, key, ANY_PARTITION, report, report)
                except BufferError:
                    parts = (topic, value, key, ANY_PARTITION, report, report, _NOW, None)
                    self._produce_when_there_is_room(parts)
                except KafkaException as error:
                    self._refused(error, topic)
                deliveries.produced += 1
                if deliveries.produced % _SERVE_EVERY == 0:
                    self._serve_deliveries()
        except Unsendable as error:
            self.refuse(error, topic)

    def send_columns(self, columns: MessageColumns) -> None:
        """Check the rows of Arrow's columns, and hand them to librdkafka, one by one."""
        self.require(ProducerEvent.PRODUCE)
        if columns.headers is columns.partitions is columns.timestamps is None:
            keys = None if columns.keys is None else contents_of(columns.keys)
            self.send_many(MessageBatch(columns.topic, contents_of(columns.values), keys))
            return
        try:
            for message in messages_of(columns, self.max_message_bytes):
                self._take(message)
        except Unsendable as error:
            self.refuse(error, columns.topic)

    def _serve_deliveries(self) -> None:
        self._take_reports(0)
        if self.transaction.deliveries.failed:
            self._raise(self._delivery_failure())

    @asking
    def _produce_when_there_is_room(self, parts: _Parts) -> None:
        deadline, left = self.patience(self.answer_within_s), len(self._raw)
        while True:
            self._take_reports(min(0.1, deadline.remaining_s()))
            if len(self._raw) < left:
                deadline, left = self.patience(self.answer_within_s), len(self._raw)  # the brokers are slow, not silent
            try:
                return self._raw.produce(*parts)
            except BufferError:
                if deadline.expired:
                    error = Unavailable(
                        "produce: librdkafka's queue stayed full",
                        transactional_id=self._id,
                        next_step="abort; the brokers take messages too slowly, or not at all",
                    )
                    self._raise(Failure(error, ProducerEvent.FAIL))
            except KafkaException as error:
                self._refused(error, parts[0])

    def _refused(self, error: KafkaException, topic: str) -> NoReturn:
        # "Erroneous state": the transaction failed before, and the caller must learn of that first failure.
        if kafka_error(error).code() == KafkaError._STATE:
            self._take_reports(0)
            self._raise(self._delivery_failure())
        self._raise(failure_of(error, Phase.PRODUCE, transactional_id=self._id, subject=topic))

    @verb
    def send_offsets(self, consumed: ConsumedOffsets, deadline: Deadline) -> None:
        """Commit consumed offsets as a part of the transaction."""
        self.require(ProducerEvent.SEND_OFFSETS)
        offsets = list(consumed.offsets)
        transaction = self.transaction
        transaction.note_write()
        took_s = self._call(
            Phase.SEND_OFFSETS,
            lambda producer, left_s: producer.send_offsets_to_transaction(offsets, consumed.group_metadata, left_s),
            deadline,
        )
        # A late second copy would overwrite the offsets of the next transaction.
        transaction.maybe_sent_twice |= took_s > self._silent_retry_after_s
        transaction.sent_offsets |= any(offset.offset >= 0 for offset in offsets)
        self.machine.apply(ProducerEvent.SEND_OFFSETS)

    @verb
    def prepare(self, deadline: Deadline) -> PreparedTxnState:
        """Flush, make sure that every message is delivered, and name the transaction."""
        transaction = self.transaction
        left = len(self._raw)
        undelivered = self._served(self._raw.flush, deadline.remaining_s())
        while not undelivered and len(self._raw) and not deadline.expired:
            # Another task has produced after librdkafka was done. What delivery callbacks produce it waits for by itself.
            undelivered = self._served(self._raw.flush, deadline.remaining_s())
        if undelivered:
            longest = Deadline(self.call_timeout_s)
            while undelivered and len(self._raw) < left and not longest.expired:
                # The brokers are slow, not silent: answers have come.
                left, deadline = len(self._raw), self.patience(min(self.answer_within_s, longest.remaining_s()))
                undelivered = self._served(self._raw.flush, deadline.remaining_s())
        self._require_all_delivered(undelivered)
        # After the failures of the transaction itself, which a callback may have raised for.
        transaction.deliveries.raise_callback_error()
        self._require_no_late_init()
        self.machine.apply(ProducerEvent.PREPARE)
        state = PreparedTxnState()
        if transaction.deliveries.produced or transaction.sent_offsets:
            try:
                state = self._evidence.state_of(transaction, bulk=self.bulk, age_s=self.begun_for_s, deadline=deadline)
            except DualWriteError as error:
                self._raise(_refused_evidence(error))
        looked_now = self.bulk or self.begun_for_s > OLD_S
        transaction.looked_at = now_s() if looked_now else transaction.first_write_at or now_s()
        self.prepared = state
        self.machine.apply(ProducerEvent.NAME)
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
        if not self.bulk and deliveries.delivered != deliveries.produced:
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

    def _require_open(self, state: PreparedTxnState, deadline: Deadline) -> None:
        self._evidence.require_open(state, deadline)

    @verb
    def commit(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Commit the prepared transaction."""
        took_s = self._call(Phase.COMMIT, lambda producer, left_s: producer.commit_transaction(left_s), deadline)
        self.machine.apply(event)
        if (state := self.prepared) is not None and state.has_transaction:
            self.pending_end = PendingEnd(Ended(state, committed=True))
        self._judge(Phase.COMMIT, took_s)
        self.prepared = None

    @verb
    def abort(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Abort, after a short wait for messages in flight. If some remain, the producer is discarded instead.

        An abort would then break librdkafka (4849), or crash this process if their produce request fails later.
        """
        has_failed = self.machine.state is ProducerState.FAILED
        if self.machine.allows(ProducerEvent.FAIL):
            self.machine.apply(ProducerEvent.FAIL)  # so that no delivery callback can produce into what is ending
        if self.unanswered is not None:
            deadline = Deadline(min(SILENT_ABORT_S, deadline.remaining_s()))
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
            ended = self._evidence.ended(self.transaction, self.prepared, bulk=self.bulk, deadline=deadline)
            self.transaction.given_up = ended
        self.epoch_may_rise |= has_failed or bool(self.transaction.deliveries.failed)
        took_s = self._call(Phase.ABORT, lambda producer, left_s: producer.abort_transaction(left_s), deadline)
        self._evidence.ids = None  # librdkafka raises the epoch after some errors
        self.machine.apply(event)
        self.pending_end = None if ended is None else PendingEnd(ended)
        self._judge(Phase.ABORT, took_s)
        self.prepared = None

    def close(self) -> None:
        """Destroy the librdkafka instance without ending its transaction."""
        self.machine.apply(ProducerEvent.CLOSE)
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    # Calls to librdkafka, each followed by a judgement of whether this producer can still be trusted.
    #
    # librdkafka may have sent a call twice if it took longer than the first silent retry; it resends an initialisation at
    # once if its connection breaks; a missing answer may still arrive. Each makes the producer doubtful, even after a
    # success.

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
        if first is None or is_purge(first[0]):
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


# The rows of Arrow's columns as librdkafka takes messages: one by one.


def messages_of(columns: MessageColumns, max_bytes: int) -> Iterator[Message]:
    """The messages of the rows, each checked as it is taken."""
    topic, values, keys, headers, partitions, timestamps = columns
    rows = zip(
        contents_of(values),
        repeat(None) if keys is None else contents_of(keys),
        repeat(None) if headers is None else map(_pairs, count(), headers.to_pylist()),
        _numbers(partitions, "partitions"),
        _numbers(timestamps, "timestamps"),
        strict=False,
    )
    for row, (value, key, pairs, partition, timestamp_ms) in enumerate(rows):
        yield Message.checked(
            topic,
            value,
            key,
            partition=partition,
            headers=pairs,
            timestamp_ms=timestamp_ms,
            max_bytes=max_bytes,
            subject=f"row {row}",
        )


def contents_of(column: pa.Array | pa.ChunkedArray) -> list[bytes | None]:
    """Keys or values; text as UTF-8."""
    import pyarrow as pa  # noqa: PLC0415 - needed where columns are given, and not else

    try:
        cast = column.cast(pa.large_binary())
    except pa.ArrowNotImplementedError:
        raise TypeError(f"keys and values are binary or text, not {column.type}") from None
    # Through numpy: five times as fast as to_pylist, which creates a scalar object for each value first.
    chunks = cast.chunks if isinstance(cast, pa.ChunkedArray) else [cast]
    return list(chain.from_iterable(chunk.to_numpy(zero_copy_only=False).tolist() for chunk in chunks))


def _numbers(column: pa.Array | pa.ChunkedArray | None, name: str) -> Iterable[int | None]:
    import pyarrow as pa  # noqa: PLC0415 - as above

    if column is None:
        return repeat(None)
    if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise TypeError(f"{name} are integers, not {column.type}")
    numbers: list[int | None] = column.to_pylist()
    return numbers


def _pairs(row: int, entries: list[Any] | None) -> Headers | None:
    if entries is None:
        return None
    pairs = []
    for entry in entries:
        name, value = (
            entry if isinstance(entry, tuple) else (None, None) if entry is None else (entry["key"], entry["value"])
        )
        if name is None:
            raise nameless_header(f"row {row}")
        pairs.append((name, value))
    return pairs
