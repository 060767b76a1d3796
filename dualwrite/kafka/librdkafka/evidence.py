"""What one librdkafka transaction has left behind: delivery reports, its offsets in each partition, its failures.

librdkafka hides the producer's id, epoch and sequence numbers, so the evidence of a prepared transaction is read from
the brokers: its first offset in every partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, KafkaException, Message

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import ConfigurationError, DualWriteError, TransactionAborted
from dualwrite.interfaces import TransactionCoordinator
from dualwrite.kafka.engine import OLD_S, Callbacks, Transaction
from dualwrite.kafka.error_codes import (
    CONNECTING,
    NO_PARTITION,
    WITHIN_A_TRANSACTION,
    Advice,
    Code,
    Failure,
    Kind,
    Phase,
    advice_on,
    ended_by_hand,
    error_for,
    not_open,
    other_producer,
)
from dualwrite.protocol.lives import ProducerEvent
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import Ended
from dualwrite.protocol.values import OFFSETS_TOPIC, TransactionStatus, TransactionView

if TYPE_CHECKING:
    from dualwrite.protocol.message import DeliveryCallback

logger = logging.getLogger("dualwrite.kafka.producer")

_TOPIC_ID_LIFE_S: Final = 10.0
_ASK_S: Final = 2.0
"""Limits the requests before an abort: an abort must not wait for a broker that is down."""


class Evidence:
    """Makes the prepared states of one producer.

    Small transactions take their first offsets from the delivery reports. The partitions are asked where only failures are
    reported (bulk), where a transaction wrote only consumer offsets, or where librdkafka did not know an offset.
    """

    def __init__(self, coordinator: TransactionCoordinator, kafka_id: str, incarnation: int | None) -> None:
        self._coordinator = coordinator
        self._kafka_id = kafka_id
        self._incarnation = incarnation
        self._topic_ids = _TopicIds(coordinator)
        self._may_read_groups = True
        self._sequences = Sequences()
        self.ids: tuple[int, int] | None = None

    def learn_ids(self, deadline: Deadline) -> tuple[int, int]:
        """Ask for the producer id and epoch. All transactions share them until an abort, which may raise the epoch."""
        return self._take_ids(self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id])

    def state_of(
        self, transaction: OpenTransaction, *, bulk: bool, age_s: float, deadline: Deadline
    ) -> PreparedTxnState:
        """The state of a transaction that wrote something, all of it delivered.

        `TransactionAborted`: the broker ended it, or shows nothing of it. `Fenced`: the coordinator shows another producer.
        """
        deliveries = transaction.deliveries
        offsets = {
            key: first for key, first in deliveries.first_offsets.items() if key not in deliveries.without_offset
        }
        to_ask: Collection[tuple[str, int]] = deliveries.without_offset
        started_ms = None
        nothing_reported = bulk or not (offsets or to_ask)
        if nothing_reported or self.ids is None or age_s > OLD_S or transaction.sent_offsets:
            view = self._open_view(deadline)
            started_ms = view.started_ms
            if nothing_reported:
                to_ask = view.partitions
            elif transaction.sent_offsets:
                groups = [key for key in view.partitions if key[0] == OFFSETS_TOPIC]
                offsets.update(self._ask_about_groups(groups, deadline))
        assert self.ids is not None
        if age_s > OLD_S and not nothing_reported:
            self._require_open(offsets, self.ids, deadline)
        if to_ask:
            offsets.update(self._ask_partitions(to_ask, self.ids, deadline))
        if bulk:
            self._require_no_gap(offsets, self.ids, deadline)
        if not offsets:
            raise TransactionAborted("no partition shows anything of the transaction", transactional_id=self._kafka_id)
        return replace(self._named(offsets, self.ids, deadline), started_ms=started_ms)

    def ended(
        self, transaction: OpenTransaction, state: PreparedTxnState | None, *, bulk: bool, deadline: Deadline
    ) -> Ended:
        """Describe a transaction that is about to be aborted, as completely as possible."""
        deliveries = transaction.deliveries
        if state is not None and state.has_transaction:
            return Ended(state, committed=False)
        deadline = Deadline(min(_ASK_S, deadline.remaining_s()))
        try:
            if not deliveries.failed:
                return Ended(self.state_of(transaction, bulk=bulk, age_s=0.0, deadline=deadline), committed=False)
            self._sequences.forget()
            # Failed messages may be in the log. None arrives later: librdkafka raises the epoch before it continues.
            view = self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id]
            ids = self._take_ids(view)
            written = deliveries.partitions.union(view.partitions)
            shown = self._coordinator.producer_open_offsets(*ids, written, deadline)
            firsts = {key: first for key, first in shown.items() if first is not None}
            return Ended(self._named(firsts, ids, deadline), committed=False)
        except DualWriteError as error:
            logger.info("%s: aborting a transaction that is only partly known: %s", self._kafka_id, error)
            self._sequences.forget()
            seen = tuple(FirstOffset(*key, first) for key, first in deliveries.first_offsets.items())
            state = PreparedTxnState(*(self.ids or (0, 0)), self._incarnation, seen)
            return Ended(state, committed=False, complete=False)

    def require_open(self, state: PreparedTxnState, deadline: Deadline) -> None:
        """Check that a prepared transaction is still open everywhere.

        `TransactionAborted` if the broker or an operator ended it, `Fenced` if the coordinator shows another producer.
        """
        self._open_view(deadline)
        offsets = {(first.topic, first.partition): first.offset for first in state.first_offsets}
        self._require_open(offsets, (state.producer_id, state.epoch), deadline)

    def _require_open(self, offsets: Mapping[tuple[str, int], int], ids: tuple[int, int], deadline: Deadline) -> None:
        """Ask the leaders: the coordinator does not show that an operator's tool ended it in one partition."""
        if not offsets:
            return
        shown = self._coordinator.producer_open_offsets(*ids, offsets, deadline)
        for (topic, partition), first in offsets.items():
            if shown[topic, partition] != first:
                raise ended_by_hand((topic, partition), transactional_id=self._kafka_id)

    def _require_no_gap(self, offsets: Mapping[tuple[str, int], int], ids: tuple[int, int], deadline: Deadline) -> None:
        """Check that each partition's first record is the transaction's first, not the first after an operator's marker."""
        numbered = {key: first for key, first in offsets.items() if key[0] != OFFSETS_TOPIC}
        gap = self._sequences.take(ids, self._coordinator.sequences(*ids, numbered, deadline))
        if gap is not None:
            raise ended_by_hand(gap, transactional_id=self._kafka_id)

    def _named(
        self, offsets: Mapping[tuple[str, int], int], ids: tuple[int, int], deadline: Deadline
    ) -> PreparedTxnState:
        topic_ids = self._topic_ids.of(offsets, deadline)
        firsts = tuple(
            FirstOffset(topic, part, first, topic_ids.get(topic)) for (topic, part), first in offsets.items()
        )
        return PreparedTxnState(*ids, self._incarnation, firsts)

    def _open_view(self, deadline: Deadline) -> TransactionView:
        view = self._coordinator.describe([self._kafka_id], deadline)[self._kafka_id]
        if view.status is not TransactionStatus.ONGOING:
            raise not_open(view.status, transactional_id=self._kafka_id)
        self._take_ids(view)
        return view

    def _take_ids(self, view: TransactionView) -> tuple[int, int]:
        ids = (view.producer_id, view.epoch)
        if self.ids is not None and self.ids != ids:
            raise other_producer(ids, self.ids, transactional_id=self._kafka_id)
        self.ids = ids
        return ids

    def _ask_partitions(
        self, partitions: Collection[tuple[str, int]], ids: tuple[int, int], deadline: Deadline
    ) -> Mapping[tuple[str, int], int]:
        answer = self._coordinator.producer_open_offsets(*ids, partitions, deadline)
        for key, first in answer.items():
            if first is None and key[0] != OFFSETS_TOPIC:
                raise ended_by_hand(key, transactional_id=self._kafka_id)
        return {key: first for key, first in answer.items() if first is not None}

    def _ask_about_groups(
        self, partitions: Collection[tuple[str, int]], deadline: Deadline
    ) -> Mapping[tuple[str, int], int]:
        """The first offsets of consumed offsets. Without the right to read them, one left open there goes unnoticed."""
        assert self.ids is not None
        if not self._may_read_groups:
            return {}
        try:
            return self._ask_partitions(partitions, self.ids, deadline)
        except ConfigurationError as error:
            self._may_read_groups = False
            logger.warning("%s: cannot check whether its consumed offsets have ended: %s", self._kafka_id, error)
            return {}


class _TopicIds:
    """Topic ids, refreshed after ten seconds, or when a partition's offsets go back, which shows a new topic."""

    def __init__(self, coordinator: TransactionCoordinator) -> None:
        self._coordinator = coordinator
        self._known: dict[str, tuple[str | None, float]] = {}
        self._newest: dict[tuple[str, int], int] = {}

    def of(self, offsets: Mapping[tuple[str, int], int], deadline: Deadline) -> Mapping[str, str | None]:
        now = now_s()
        for (topic, partition), first in offsets.items():
            if first <= self._newest.get((topic, partition), -1):
                self._known.pop(topic, None)
            self._newest[(topic, partition)] = first
        topics = {topic for topic, _ in offsets}
        stale = [topic for topic in topics if now > self._known.get(topic, (None, 0.0))[1]]
        if stale:
            ids = self._coordinator.topic_ids(stale, deadline)
            self._known.update({topic: (ids.get(topic), now + _TOPIC_ID_LIFE_S) for topic in stale})
        return {topic: self._known[topic][0] for topic in topics}


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


# Maps librdkafka's errors to ours, and to the state in which each leaves a producer.
#
# A confluent-kafka error carries a code and up to three flags: *fatal* (the instance is dead), *requires abort* (the
# transaction is), *retriable*. Codes above 0 are the protocol's, those below are librdkafka's own.
#
# An error of a transactional call without any flag is treated as fatal: the client's view of the transaction and ours
# disagree. A delivery report carries no flags; there the transaction must be aborted.

_LOCAL: Final[Mapping[int, Advice]] = MappingProxyType(
    {
        KafkaError._FENCED: Advice(Kind.FENCED),
        KafkaError._AUTHENTICATION: CONNECTING,
        KafkaError._SSL: CONNECTING,
        KafkaError._UNSUPPORTED_FEATURE: advice_on(Code.UNSUPPORTED_VERSION),
        KafkaError._INVALID_ARG: Advice(Kind.SETTINGS, "correct the value that the message names"),
        KafkaError._NOT_CONFIGURED: Advice(Kind.SETTINGS, "correct the setting that the message names"),
        KafkaError._UNKNOWN_TOPIC: advice_on(Code.UNKNOWN_TOPIC_OR_PARTITION),
        KafkaError._UNKNOWN_PARTITION: NO_PARTITION,
    }
)
"""The advice on errors that librdkafka finds by itself."""
_LOST, _HIDDEN = "without setting an exception", "'ClientLog' object has no attribute 'log'"


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside a confluent-kafka exception."""
    error = exception.args[0] if exception.args else None
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def kafka_exception_behind(
    error: KafkaException | SystemError | AttributeError, ask: Callable[[], object]
) -> KafkaException:
    """Recover librdkafka's exception from the Python exception that hides it; raise that one again if it has another cause.

    librdkafka raises a fatal error from inside ``poll`` and ``flush``. If a delivery callback runs after it, Python raises
    a ``SystemError``: the callback returned with an exception set or, if confluent-kafka has lost the exception by then,
    ``flush`` failed without one. If a log line follows it, the pending exception makes the look-up of the logger's method
    fail. In these last two cases the fatal error itself is lost, but librdkafka keeps it, and answers ``ask`` with it.
    """
    cause: BaseException | None = error
    while isinstance(cause, SystemError) and not _is_lost(cause):
        cause = cause.__cause__
    if isinstance(cause, KafkaException):
        return cause
    if cause is not None and _is_lost(cause):
        return _asked(ask) or KafkaException(
            KafkaError(KafkaError._FATAL, "a fatal error that confluent-kafka lost", fatal=True)
        )
    raise error


def _asked(ask: Callable[[], object]) -> KafkaException | None:
    try:
        ask()
    except KafkaException as again:
        return again if kafka_error(again).fatal() else None
    return None


def _is_lost(error: BaseException) -> bool:
    if isinstance(error, AttributeError):
        return str(error) == _HIDDEN
    return error.__cause__ is None and _LOST in str(error)


def failure_of(
    cause: KafkaError | KafkaException, phase: Phase, *, transactional_id: str, subject: str | None = None
) -> Failure:
    """Map an error of confluent-kafka. The hint for a missing right names the subject: a topic or consumer group."""
    exception = cause if isinstance(cause, KafkaException) else KafkaException(cause)
    cause = kafka_error(exception)
    advice = _LOCAL.get(cause.code()) or advice_on(cause.code(), phase)
    what = f"{cause.str()} ({cause.name()})"
    error = error_for(advice, what, phase, transactional_id=transactional_id, subject=subject)
    error.__cause__ = exception
    return Failure(error, _event(cause, advice, phase))


def _event(cause: KafkaError, advice: Advice, phase: Phase) -> ProducerEvent:
    if cause.fatal() or advice.kind is Kind.FENCED or phase not in WITHIN_A_TRANSACTION:
        return ProducerEvent.DOUBT
    if phase is Phase.SEND_OFFSETS and not (cause.txn_requires_abort() or cause.retriable()):
        return ProducerEvent.DOUBT
    return ProducerEvent.FAIL


# The delivery reports of one transaction: every message is known to be delivered, or the transaction must abort.

_NEVER_SENT: Final = frozenset({KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError._PURGE_QUEUE})


class Deliveries(Callbacks):
    """Counts the messages of one transaction and keeps the first offset by partition.

    Each transaction has its own instance, so a late report cannot count towards the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.produced = 0  # taken by librdkafka
        self.delivered = 0  # stays 0 where only failures are reported
        self.failed = 0
        self.first_failure: tuple[KafkaError, str | None] | None = None  # its error and topic
        self.first_offsets: dict[tuple[str, int], int] = {}  # the smallest offset reported
        self.without_offset: set[tuple[str, int]] = set()  # confirmed, but librdkafka did not know the offset
        self.failed_in: set[tuple[str, int]] = set()  # failed messages may be in the log nevertheless

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take one delivery report; librdkafka calls it from ``poll`` and ``flush``."""
        if error is not None:
            self.failed += 1
            if error.code() in _NEVER_SENT:
                pass
            elif (failed_topic := message.topic()) is not None and (failed_partition := message.partition() or 0) >= 0:
                self.failed_in.add((failed_topic, failed_partition))
            if self.first_failure is None or is_purge(self.first_failure[0]):
                self.first_failure = (error, message.topic())
            return
        self.delivered += 1
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        if offset is None or offset < 0:
            # A retried batch that the broker already had: it is in the log, but the answer carried no offset.
            self.without_offset.add((topic, partition))
            return
        known = self.first_offsets.get((topic, partition))
        if known is None or offset < known:
            self.first_offsets[(topic, partition)] = offset

    def reporting_to(self, callback: DeliveryCallback) -> DeliveryCallback:
        """A callback that takes the report and then calls the user's callback."""

        def report(error: KafkaError | None, message: Message) -> None:
            self.report(error, message)
            self.call(callback, error, message)

        return report

    @property
    def partitions(self) -> frozenset[tuple[str, int]]:
        """The partitions reported, for delivered and failed messages alike."""
        return frozenset({*self.first_offsets, *self.without_offset, *self.failed_in})


def is_purge(error: KafkaError) -> bool:
    """Whether librdkafka has dropped the message, after another failure."""
    # librdkafka purges the rest after the failure that matters, and may report the purged messages first.
    return error.code() in {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}


# A transaction's records have unbroken sequence numbers; a gap before its first record shows that others were its own.
#
# A tool that writes an abort marker into a partition (`kafka-transactions.sh abort`) ends there what a producer has
# written so far. The broker takes the producer's next message for the first of another transaction, and shows only that
# one. In bulk mode librdkafka reports no offsets, so nothing else tells that there were earlier messages. But it
# numbers the records of an epoch in each partition one by one.

_SEQUENCES: Final = 2**31
Partition = tuple[str, int]
Span = tuple[int, int]


class Sequences:
    """The sequence numbers of one producer's last transaction in each partition."""

    def __init__(self) -> None:
        self._ids: tuple[int, int] | None = None
        self._spans: dict[Partition, Span] = {}
        self._knows_all = True
        self._has_forgotten = False

    def take(self, ids: tuple[int, int], shown: Mapping[Partition, Span | None]) -> Partition | None:
        """Take the sequence numbers of a transaction whose messages are all delivered. It may be taken twice.

        A new epoch numbers its records from 0. Returns a partition that holds earlier messages of the same transaction;
        None if there is no such gap.
        """
        if ids != self._ids:
            # What was forgotten may have been written under these ids.
            self._ids, self._spans, self._knows_all = ids, {}, not self._has_forgotten
        self._has_forgotten = False
        gaps = [key for key, span in shown.items() if span is not None and not self._follows(key, span)]
        for key, span in shown.items():
            if span is None:
                self._spans.pop(key, None)
                self._knows_all = False
            else:
                self._spans[key] = span
        return min(gaps, default=None)

    def _follows(self, key: Partition, span: Span) -> bool:
        last = self._spans.get(key)
        if last is None:
            return span[0] == 0 or not self._knows_all
        return span[0] in {last[0], (last[1] + 1) % _SEQUENCES}

    def forget(self) -> None:
        """Forget them all: a transaction ends whose messages are only partly known, such as one that is aborted."""
        self._spans, self._knows_all, self._has_forgotten = {}, False, True
