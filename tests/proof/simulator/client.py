"""A simulated librdkafka: the requests of confluent-kafka's transactional producer, and its failures.

It follows librdkafka 2.16 as a client without version 2 transactions. It adds partitions, then writes to them. It
silently sends another copy of an unanswered request, while the first may still arrive: after ``retry.backoff.ms``, or,
for ``InitProducerId``, as soon as it reconnects, which a log line reports. An answer maps to an error that is fatal,
requires an abort, or is retried. Only the part that the library uses is simulated. Source: ``rdkafka_txnmgr.c``,
``rdkafka_request.c``, ``rdkafka_idempotence.c``.

A message is sent when it is produced (``eager``), or at the next ``poll``, ``flush`` or end of the transaction: in the
real client a thread sends it at any time in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException

from dualwrite.clock import Deadline, pause
from dualwrite.kafka.native.coordination import group_of
from simulator.process import Unanswered
from simulator.requests import (
    AddOffsetsToTxn,
    AddPartitionsToTxn,
    AddPartitionsToTxnResponse,
    EndTxn,
    ErrorCode,
    ErrorResponse,
    InitProducerId,
    InitProducerIdResponse,
    Produce,
    ProduceResponse,
    TopicPartition,
    TxnOffsetCommit,
)
from simulator.scheduler import Simulation

if TYPE_CHECKING:
    from confluent_kafka import Message

    from dualwrite.kafka.native.coordination import ConsumedOffset

Answer = TypeVar("Answer")
Report = Callable[["KafkaError | None", "Message"], None]

_FENCED: Final = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED})
_INIT_AGAIN_S: Final = 0.5
_RECONNECT_S: Final = 0.001
_ADD_AGAIN_S: Final = 0.02


class _Message:
    """One message on its way, with the attributes that delivery reports need."""

    __slots__ = ("_offset", "_partition", "_report", "_topic", "value")

    def __init__(self, topic: str, partition: int, value: Hashable, report: Report) -> None:
        self._topic = topic
        self._partition = partition
        self._report = report
        self._offset: int | None = None
        self.value = value

    def topic(self) -> str:
        """The topic."""
        return self._topic

    def partition(self) -> int:
        """The partition."""
        return self._partition

    def offset(self) -> int | None:
        """The offset, once delivered."""
        return self._offset

    def delivered(self, offset: int) -> None:
        """Note the broker's confirmation."""
        self._offset = offset

    def tell(self, error: KafkaError | None) -> None:
        """Call the delivery callback."""
        self._report(error, cast("Message", self))


class _Batch:
    """Messages sent together; a retry sends the same ones."""

    def __init__(self, place: TopicPartition) -> None:
        self.place = place
        self.messages: list[_Message] = []
        self.sequence: int | None = None


class _TooLate(Exception):
    """The call's deadline has passed."""


def _shown(value: Hashable) -> Hashable:
    """Text as it was given, for tests to compare: the engine has made bytes of it. Other bytes stay what they are."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


class SimulatedProducer:
    """Stands in for ``confluent_kafka.Producer``.

    Args:
        simulation: The simulation with the broker.
        settings: librdkafka's settings.
        eager: Whether messages are sent when they are produced.

    Attributes:
        init_unanswered: Whether a log line taken by :meth:`poll` said that the client asks for a producer id again.
        deadline: When the current call gives up.
    """

    def __init__(self, simulation: Simulation, settings: Mapping[str, object], *, eager: bool = False) -> None:
        self._simulation = simulation
        self._id = str(settings["transactional.id"])
        self._timeout_ms = int(str(settings["transaction.timeout.ms"]))
        self._backoff_s = int(str(settings.get("retry.backoff.ms", 1000))) / 1000
        self._eager = eager
        self._producer_id, self._epoch = -1, -1
        self._sequences: dict[TopicPartition, int] = {}
        self._inside = False
        self._registered: set[TopicPartition] = set()
        self._asked = False
        self._failed: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._fatal_told = False
        self._bump = False
        self._queue: list[_Message] = []
        self._under_way: list[_Batch] = []
        self._reports: list[tuple[_Message, KafkaError | None]] = []
        self._registering = False
        self._init_again = False
        self.init_unanswered = False
        self.deadline = Deadline(0.0)

    # What the library calls

    def cluster_id(self, timeout_s: float) -> str:
        """The cluster's id: there is a connection."""
        del timeout_s
        return self._simulation.broker.cluster_id

    def init_transactions(self, timeout_s: float) -> None:
        """Send ``InitProducerId`` until it is answered."""
        del timeout_s
        try:
            self._init(InitProducerId(self._id, self._timeout_ms))
        except _TooLate:
            raise _error(KafkaError._TIMED_OUT, retriable=True) from None

    def begin_transaction(self) -> None:
        """Begin; sends nothing."""
        self._raise_fatal()
        if self._failed is not None:
            raise KafkaException(self._failed)
        if self._inside:
            raise _error(KafkaError._STATE)
        self._inside = True

    def produce(self, topic: str, value: Hashable, key: object, partition: int, report: Report, *rest: object) -> None:
        """Queue one message. Confluent-kafka's further positional arguments are ignored."""
        del key, rest
        if self._fatal is not None or self._failed is not None or not self._inside:
            raise _error(KafkaError._STATE)
        shown = _shown(value)
        self._queue.append(_Message(topic, max(partition, 0), shown, report))  # there is no partitioner: the first
        if self._eager:
            self.deadline = Deadline(1.0)
            self._send()

    def send_offsets_to_transaction(
        self, offsets: Sequence[ConsumedOffset], group_metadata: object, timeout_s: float
    ) -> None:
        """Register the group with the coordinator, and send it the offsets."""
        del timeout_s
        self._raise_failure()
        if not self._inside:
            raise _error(KafkaError._STATE)
        group = group_of(group_metadata)
        self._asked = True
        try:
            self._until_taken(AddOffsetsToTxn(self._id, self._producer_id, self._epoch, group.group_id))
            places = tuple(((one.topic, one.partition), one.offset) for one in offsets)
            ids = (self._producer_id, self._epoch)
            self._until_taken(
                TxnOffsetCommit(
                    self._id, group.group_id, *ids, places, member_id=group.member_id, generation=group.generation
                )
            )
        except _TooLate:
            raise _error(KafkaError._TIMED_OUT, retriable=True) from None

    def _until_taken(self, request: AddOffsetsToTxn | TxnOffsetCommit) -> None:
        while True:
            error = cast("ErrorResponse", self._until_answered(lambda: self._simulation.ask(request))).error_code
            if error is ErrorCode.NONE:
                return
            if error in _FENCED or (error is ErrorCode.INVALID_TXN_STATE and isinstance(request, AddOffsetsToTxn)):
                self._die(error)
            if error is not ErrorCode.CONCURRENT_TRANSACTIONS:
                self._bump = error is ErrorCode.INVALID_PRODUCER_ID_MAPPING
                self._fail(error)
                self._raise_failure()
            self._pause(_ADD_AGAIN_S)

    def poll(self, timeout_s: float) -> int:
        """Call the delivery callbacks that are due."""
        del timeout_s
        self.init_unanswered = self._init_again
        reports, self._reports = self._reports, []
        for message, error in reports:
            message.tell(error)
        if self._fatal is not None and not self._fatal_told:
            self._fatal_told = True
            raise KafkaException(self._fatal)
        return len(reports)

    def flush(self, timeout_s: float) -> int:
        """Send queued messages until they are confirmed or the time is up."""
        self.deadline = Deadline(timeout_s)
        self._send()
        self.poll(0)
        return len(self)

    def purge(self) -> None:
        """Drop all messages, queued or in flight."""
        self._purge_queue()
        for batch in self._under_way:
            self._drop(batch.messages, KafkaError._PURGE_INFLIGHT)
        self._under_way = []

    def _purge_queue(self) -> None:
        unsent = [batch for batch in self._under_way if batch.sequence is None]
        self._under_way = [batch for batch in self._under_way if batch.sequence is not None]
        for messages in (*(batch.messages for batch in unsent), self._queue):
            self._drop(messages, KafkaError._PURGE_QUEUE)
        self._queue = []

    def __len__(self) -> int:
        return len(self._queue) + len(self._reports) + sum(len(batch.messages) for batch in self._under_way)

    def commit_transaction(self, timeout_s: float) -> None:
        """Send ``EndTxn`` until it is answered."""
        del timeout_s
        self._raise_fatal()
        self._send()
        self._raise_failure()
        try:
            self._end(committed=True)
        except _TooLate:
            raise _error(KafkaError._TIMED_OUT, retriable=True) from None
        self._done()

    def abort_transaction(self, timeout_s: float) -> None:
        """Drop unsent messages, send ``EndTxn``, and after some errors get a new epoch."""
        del timeout_s
        assert not self._registering, "librdkafka ends the process when AddPartitionsToTxn fails after the abort"
        self._raise_fatal()
        self._purge_queue()
        self._send()
        self._raise_fatal()
        self.poll(0)
        if self._under_way:
            raise _error(KafkaError._TIMED_OUT, retriable=True)
        try:
            self._end(committed=False)
            if self._bump:
                self._init(InitProducerId(self._id, self._timeout_ms, self._producer_id, self._epoch))
        except _TooLate:
            raise _error(KafkaError._TIMED_OUT, retriable=True) from None
        self._done()

    # What it does

    def _done(self) -> None:
        self._inside, self._asked, self._bump = False, False, False
        self._failed = None
        self._registered.clear()

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise KafkaException(self._fatal)

    def _raise_failure(self) -> None:
        self._raise_fatal()
        if self._failed is not None:
            raise KafkaException(self._failed)

    def _until_answered(self, request: Callable[[], Answer]) -> Answer:
        """Send the request, and resend it after each backoff until an answer comes. Every copy may still arrive."""
        while True:
            try:
                return request()
            except Unanswered:
                self._pause(self._backoff_s)

    def _pause(self, seconds: float) -> None:
        if self.deadline.expired:
            raise _TooLate
        pause(min(seconds, self.deadline.remaining_s()))
        if self.deadline.expired:
            raise _TooLate

    def _init(self, request: InitProducerId) -> None:
        while True:
            try:
                answer = cast("InitProducerIdResponse", self._simulation.ask(request))
            except Unanswered:
                self._init_again = True
                self._pause(_RECONNECT_S)
                continue
            if answer.error_code is ErrorCode.NONE:
                self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
                self._sequences = {}
                return
            if answer.error_code is not ErrorCode.CONCURRENT_TRANSACTIONS:
                self._die(answer.error_code)
            self._pause(_INIT_AGAIN_S)

    def _end(self, *, committed: bool) -> None:
        if not self._asked:
            return  # nothing was registered with the coordinator
        request = EndTxn(self._id, self._producer_id, self._epoch, committed)
        while True:
            error = cast("ErrorResponse", self._until_answered(lambda: self._simulation.ask(request))).error_code
            if error is ErrorCode.NONE:
                return
            if error is ErrorCode.INVALID_PRODUCER_ID_MAPPING:
                self._bump = True
                if committed:
                    self._failed = KafkaError(int(error), "EndTxn failed", txn_requires_abort=True)
                    raise KafkaException(self._failed)
                return
            if error is not ErrorCode.CONCURRENT_TRANSACTIONS:
                self._die(error)
            self._pause(self._backoff_s)

    def _die(self, error: ErrorCode) -> NoReturn:
        code = KafkaError._FENCED if error in _FENCED else int(error)
        self._fatal = KafkaError(code, error.name, fatal=True)
        raise KafkaException(self._fatal)

    def _send(self) -> None:
        """Register the partitions and write queued messages; those without an answer by the deadline stay queued."""
        if self._fatal is not None or self._failed is not None:
            return
        batches: dict[TopicPartition, _Batch] = {}
        for message in self._queue:
            place = (message.topic(), message.partition())
            batches.setdefault(place, _Batch(place)).messages.append(message)
        self._queue = []
        self._under_way.extend(batches.values())
        try:
            self._register(sorted({batch.place for batch in self._under_way} - self._registered))
            while self._under_way and self._failed is None:
                self._write(self._under_way[0])
        except _TooLate:
            pass
        except KafkaException:
            self.purge()

    def _register(self, places: list[TopicPartition]) -> None:
        request = AddPartitionsToTxn(self._id, self._producer_id, self._epoch, tuple(places))
        while places:
            self._asked = self._registering = True
            answer = cast("AddPartitionsToTxnResponse", self._until_answered(lambda: self._simulation.ask(request)))
            self._registering = False
            error = max(answer.error_codes)
            if error is ErrorCode.NONE:
                self._registered.update(places)
                return
            if error in _FENCED or error is ErrorCode.INVALID_TXN_STATE:
                self._die(error)
            if error is not ErrorCode.CONCURRENT_TRANSACTIONS:
                self._bump = error is ErrorCode.INVALID_PRODUCER_ID_MAPPING
                self._fail(error)
                return
            self._pause(_ADD_AGAIN_S)

    def _write(self, batch: _Batch) -> None:
        place, messages = batch.place, batch.messages
        base = batch.sequence = self._sequences.get(place, 0)
        values = tuple(message.value for message in messages)
        request = Produce(self._id, self._producer_id, self._epoch, place, base, values)
        while True:
            answer = cast("ProduceResponse", self._until_answered(lambda: self._simulation.ask(request)))
            error = answer.error_code
            if error is ErrorCode.NONE:
                self._sequences[place] = base + len(values)
                self._under_way.remove(batch)
                for position, message in enumerate(messages):
                    message.delivered(answer.base_offset + position)
                    self._reports.append((message, None))
                return
            if error is ErrorCode.INVALID_PRODUCER_EPOCH:
                self._die(error)
            if error is not ErrorCode.NOT_ENOUGH_REPLICAS:
                self._bump = error is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
                self._under_way.remove(batch)
                self._fail(error, messages)
                return
            self._pause(_ADD_AGAIN_S)

    def _fail(self, error: ErrorCode, messages: list[_Message] | None = None) -> None:
        """Fail the transaction, which must then be aborted, and drop its messages."""
        self._failed = KafkaError(int(error), error.name, txn_requires_abort=True)
        self._drop(messages or [], int(error))
        self.purge()

    def _drop(self, messages: list[_Message], code: int) -> None:
        self._reports.extend((message, KafkaError(code, "given up")) for message in messages)


def _error(code: int, *, retriable: bool = False) -> KafkaException:
    return KafkaException(KafkaError(code, KafkaError(code).name(), retriable=retriable))
