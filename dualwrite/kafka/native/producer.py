"""One native producer driven by the state machine: every transaction has a producer id and epoch of its own.

It speaks Kafka's protocol itself (transaction version 2), so it knows the identity of each transaction, reports its
deliveries and statistics, and maps what stopped it to our errors.

The engine's rules, in addition to those of the port:

- ``InitProducerId`` is the one request that could hit a later transaction: without an answer to it the producer is doubtful.
- ``EndTxn`` names its transaction, so it is sent again until it is answered. The answer names the next transaction.
- A prepared transaction is acknowledged, batch by batch, by every partition that it was sent to.
- An abort is sent whenever a message may have reached a broker. With a request unanswered a late copy of its batch may be on
  its way, so the partitions must show the end before anything else is sent; see :mod:`dualwrite.kafka.transaction_ends`.
- Long before its last epoch a producer is replaced: brokers have had faults there (KAFKA-18660, KAFKA-19367).

Everything happens in the thread that calls. Source: KIP-890, KIP-939.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline, GrowingPause, now_s
from dualwrite.errors import ConfigurationError, DualWriteError, Fenced, TransactionAborted, Unavailable
from dualwrite.kafka import engine as forks
from dualwrite.kafka.brokers import Brokers, Connections
from dualwrite.kafka.cluster import internal_partition
from dualwrite.kafka.engine import (
    OLD_S,
    SILENT_ABORT_S,
    Callbacks,
    EngineArguments,
    IdLogger,
    ProducerEngine,
    Transaction,
    asking,
    verb,
    whole,
)
from dualwrite.kafka.error_codes import (
    Advice,
    Code,
    Failure,
    Kind,
    Phase,
    advice_on,
    code_name,
    ended_by_hand,
    error_for,
    not_answered,
    not_open,
    other_producer,
)
from dualwrite.kafka.native.accumulator import Filling
from dualwrite.kafka.native.coordination import (
    CoordinatorRequests,
    attempts,
    group_of,
    initialise,
    log_time_limit,
    offsets_of,
    refusal_of_two_phase,
)
from dualwrite.kafka.native.produce_state import Meaning, Partition, ProduceCore, Refusal, Request, meaning_of
from dualwrite.kafka.native.sender import Sender
from dualwrite.kafka.native.settings import OTHER_ENGINE, native_settings
from dualwrite.kafka.transaction_ends import PendingEnd
from dualwrite.protocol.lives import ProducerEvent, ProducerState
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, MessageColumns, Unsendable
from dualwrite.protocol.prepared_state import Engine, PreparedTxnState
from dualwrite.protocol.settle import Ended
from dualwrite.protocol.values import OFFSETS_TOPIC, TransactionStatus
from dualwrite.waiting import here

if TYPE_CHECKING:
    from dualwrite.interfaces import TransactionCoordinator
    from dualwrite.kafka.cluster import Topic
    from dualwrite.kafka.config import KafkaConfig
    from dualwrite.kafka.native.coordination import Answered
    from dualwrite.kafka.native.produce_state import Delivered
    from dualwrite.kafka.native.records import RecordsBuilder
    from dualwrite.kafka.native.settings import NativeSettings, StatisticsCallback

_EPOCHS: Final = 30_000
"""The epoch at which a producer is replaced; the protocol's last one is 32,767."""
_DRAIN_S: Final = 1.0
"""How long an abort waits for outstanding answers. Each one that arrives saves settling a partition."""
_ASK_S: Final = 2.0
"""Limits the requests before an abort: an abort must not wait for a broker that is down."""
_WHOLE_BETWEEN_WAITS: Final = frozenset(
    {"_require_end_known", "require_topic", "produce", "send_many", "send_columns", "prepare"}
)
"""Verbs that an interruption can stop only between two steps. After stopping another verb, the broker may still carry out a
request."""
_LOOK_UP_S: Final = 0.5
"""Limits the look-up of a unit's topic: without an answer, the end of its group looks again."""
_ASKED_ENOUGH_S: Final = 0.5
"""A missing topic is looked up again only after this time."""
_FORGOTTEN_S: Final = 60.0
"""A topic that nobody has asked for so long is given time again to appear."""
_MOST_MISSING: Final = 1000
_PURGED: Final = -152
"""librdkafka's code for a message that an abort has dropped."""


@dataclass(frozen=True)
class Wire:
    """The connections of one producer: ``sender`` reaches the leaders, ``requests`` the coordinators."""

    sender: Sender
    requests: CoordinatorRequests


def connect(config: KafkaConfig, kafka_id: str, *, like: Brokers | None = None) -> Wire:
    """The connections of one producer; made when they are first used, to the brokers that ``like`` knows."""
    brokers = Connections(config, like=like)
    return Wire(Sender(brokers, kafka_id), CoordinatorRequests(brokers, kafka_id))


MakeWire = Callable[["KafkaConfig", str], Wire]


class NativeInstance(ProducerEngine):
    """Carries out the verbs on the wire and moves the machine."""

    engine = Engine.NATIVE
    _sender: Sender
    _open: OpenTransaction

    def __init__(self, given: EngineArguments, make_wire: MakeWire) -> None:
        super().__init__(given)
        self._evidence = Evidence(given.transactional_id, given.coordinator, given.incarnation)
        self._make_wire = make_wire
        self._wire: Wire | None = None
        self._settings: NativeSettings | None = None
        self._make_builder: Callable[[], RecordsBuilder] | None = None
        self._filling: Filling | None = None
        self._ids = (-1, -1)
        self._missing: dict[str, tuple[float, float]] = {}
        self._renews = True
        self._begun_at = 0.0
        self._statistics: Statistics | None = None

    @property
    def ids(self) -> tuple[int, int] | None:
        """The producer id, and the epoch of the current or next transaction; None before ``init_transactions``."""
        return None if self._ids[0] < 0 else self._ids

    @verb
    def open(self, event: ProducerEvent, asked_timeout_ms: int | None, deadline: Deadline) -> int:
        """Connect, and get the producer id: aborts an ongoing transaction and fences earlier producers."""
        maximum_ms = self._coordinator.max_transaction_timeout_ms(deadline)
        ways = attempts(asked_timeout_ms, maximum_ms, two_phase_commit=self._config.two_phase_commit)
        # Refuse settings before anything is sent: with the shortest time limit that there may be.
        self._settings = native_settings(self._config, bulk=self.bulk, transaction_timeout_ms=ways[-1].timeout_ms)
        self._make_builder = self._settings.make_builder
        if self._settings.stats_cb is not None and self._settings.statistics_s:
            self._statistics = Statistics(self._id, self._settings.statistics_s, self._settings.stats_cb)
        self._wire = self._make_wire(self._config, self._id)
        self._sender = self._wire.sender
        initialised = initialise(self._wire.requests, ways, deadline)
        if refused := refusal_of_two_phase(initialised, self._id):
            self._raise(Failure(refused, ProducerEvent.DOUBT))
        self._ids = self._answered(initialised.answered, Phase.INIT).ids
        granted = initialised.granted
        servers = self._config.listener[0]
        log_time_limit(granted, asked_timeout_ms, maximum_ms, servers=servers, transactional_id=self._id)
        self._renews = self._ids[1] < _EPOCHS
        self.machine.apply(event)
        self.log.info("ready as producer %d:%d, native transactions", *self._ids)
        return granted.timeout_ms

    def _answered(self, answered: Answered | None, phase: Phase, subject: str | None = None) -> Answered:
        if answered is None or answered.code != Code.NONE:
            code = None if answered is None else answered.code
            self._raise(failure_of(code, phase, transactional_id=self._id, subject=subject))
        return answered

    def begin(self) -> None:
        """Begin a transaction. Nothing is sent.

        So an interruption may come between any two lines: before the machine moves, the next call starts again; after that
            there
        is a transaction, which an abort ends.
        """
        if self.pending_end is not None:
            self._require_end_known(self.pending_end)
        settings = self._settings
        assert settings is not None
        assert self._make_builder is not None
        core = ProduceCore(settings.limits, self._make_builder)
        self.transaction = self._open = OpenTransaction(core)
        self.prepared = self.unanswered = None
        if self._filling is None:
            self._filling = Filling(core, settings, self._find_topic)
        else:
            self._filling.begin(core)
        self._sender.begin(self._ids, core)
        self.machine.apply(ProducerEvent.BEGIN)

    @whole
    def require_topic(self, topic: str) -> None:
        """Ask for the topic, if it was not found yet; see :meth:`dualwrite.kafka.engine.ProducerEngine.require_topic`."""
        if self._sender.has_found(topic):
            return
        since, asked = self._missing.get(topic, (0.0, 0.0))
        now = now_s()
        if now >= asked + _ASKED_ENOUGH_S:
            try:
                found = self._sender.finds(topic, Deadline(_LOOK_UP_S))
            except Unavailable:
                return  # the end of the group tells what keeps Kafka from answering
            if found:
                self._missing.pop(topic, None)
                return
            if len(self._missing) >= _MOST_MISSING:
                self._missing.clear()
            since = now if now >= asked + _FORGOTTEN_S else since
            self._missing[topic] = since, now
        assert self._settings is not None
        raise TransactionAborted(
            f"produce ({topic}): no broker knows the topic (UNKNOWN_TOPIC_OR_PARTITION)",
            transactional_id=self._id,
            next_step="create the topic, or correct its name",
            retryable=now < since + self._settings.limits.topic_s,
        )

    def send(self, message: Message) -> None:
        """Take one message, and send what may be sent."""
        # What `whole` does for other verbs stands here: a frame of its own would be paid for every message.
        if self.machine.state is not ProducerState.BEGUN or self._made_in != forks.process:
            self.require(ProducerEvent.PRODUCE)
        filling = self._filling
        assert filling is not None
        try:
            if message.on_delivery is not None and message.timestamp_ms is None:
                message = message._replace(timestamp_ms=int(time.time() * 1000))  # shown to its callback
            self._begun_at = now = now_s()
            if self.transaction.first_write_at is None:
                self.transaction.first_write_at = now
            filling.append(message, now=now)
            if not self.corked:
                self._sender.pump()
            self._take_stock(filling)
        except Unsendable as error:
            self.refuse(error, message.topic)
        except Exception:
            raise
        except BaseException as interruption:
            self._note_interrupted("produce", interruption)
            raise

    @whole
    def send_many(self, batch: MessageBatch) -> None:
        """Take many messages; send them as batches fill up."""
        self.require(ProducerEvent.PRODUCE)
        assert self._filling is not None
        self._take_all(batch.topic, self._filling.append_many(batch))

    @whole
    def send_columns(self, columns: MessageColumns) -> None:
        """Take the rows of Arrow's columns; send each batch once it is made."""
        self.require(ProducerEvent.PRODUCE)
        assert self._filling is not None
        self._take_all(columns.topic, self._filling.append_columns(columns))

    def _take_all(self, topic: str, taking: Iterator[None]) -> None:
        assert self._filling is not None
        self._begin_writing()
        core = self._open.core
        resumed_at = core.queued_bytes
        try:
            for _ in taking:
                resumed_at = min(resumed_at, core.queued_bytes)  # answers come while a topic is looked up, too
                # One request for the partitions of a broker: each further one costs it an entry in the transaction's log, too.
                if core.queued_bytes >= resumed_at + core.limits.request_bytes or self._filling.is_full:
                    self._resume(self._filling)
                    resumed_at = core.queued_bytes
                self._begin_writing()
        except Unsendable as error:
            self.refuse(error, topic)
        self._resume(self._filling)

    def _begin_writing(self) -> None:
        self.transaction.note_write()
        self._begun_at = now_s()

    @property
    def _deadline(self) -> Deadline:
        """Limits the call that takes messages now. Most of these calls wait for nothing, and need none."""
        return Deadline(max(0.0, self._begun_at + self.call_timeout_s - now_s()))

    def _for_an_answer(self, within: Deadline) -> Deadline:
        """Limits the wait for one answer: brokers that are silent must not keep the database's locks for long."""
        return self.patience(min(self.answer_within_s, within.remaining_s()))

    def _find_topic(self, name: str, fresh: bool) -> Topic | None:  # noqa: FBT001 - a callback
        """The topic, once a broker knows it: one that was made a moment ago may not be known everywhere yet."""
        assert self._settings is not None
        if not fresh and (known := self._sender.known(name)) is not None:
            return known
        try:
            if (found := self._ask_for_topic(name, fresh=fresh)) is not None:
                return found
            # Half of the call's time at most: a topic that the brokers do not know must not be told as brokers that do not
            # answer.
            patience = Deadline(min(self._settings.limits.topic_s, self._deadline.remaining_s() / 2))
            between = GrowingPause()
            while found is None and not patience.expired:
                between.wait(patience)
                found = self._ask_for_topic(name, fresh=fresh)
        except DualWriteError as error:
            self._raise(Failure(error, ProducerEvent.FAIL))
        return found

    @asking
    def _ask_for_topic(self, name: str, *, fresh: bool) -> Topic | None:
        return self._sender.topic(name, self._for_an_answer(self._deadline), fresh=fresh)

    def _resume(self, filling: Filling) -> None:
        if not self.corked:
            self._sender.pump()
        self._take_stock(filling)

    def _take_stock(self, filling: Filling) -> None:
        """Report what was acknowledged, wait while too much is queued, and raise if the messages were refused."""
        if self._sender.delivered or self._statistics is not None:
            self._report()
        if filling.is_full:
            self._wait_for_room(filling, self._deadline)
        if self._open.core.refusal is not None:
            self._raise_refusal()

    @asking
    def _wait_for_room(self, filling: Filling, deadline: Deadline) -> None:
        core, answer = self._open.core, self._for_an_answer(deadline)
        while filling.is_full and core.refusal is None:
            if answer.expired:
                error = Unavailable(
                    "produce: the queue stayed full",
                    transactional_id=self._id,
                    next_step="abort; the brokers take messages too slowly, or not at all",
                )
                self._raise(Failure(error, ProducerEvent.FAIL))
            left = core.queued_messages
            self._sender.wait(answer)
            self._report()
            if core.queued_messages < left:
                answer = self._for_an_answer(deadline)

    def _report(self) -> int:
        """Tell callbacks and statistics what has been acknowledged; returns how many callbacks there were."""
        sender = self._sender
        if self._statistics is not None:
            self._statistics.note(sender.delivered, self._open.core, now_s())
        if not sender.delivered:
            return 0
        found, sender.delivered = sender.delivered, []
        return self._open.deliveries.delivered(found)

    def _raise_refusal(self) -> None:
        core = self._open.core
        # What else is in flight may be refused for a better reason, and an end outweighs an abort.
        self._sender.drain(Deadline(_DRAIN_S))
        self._report()
        assert core.refusal is not None
        self._raise(refused(core.refusal, Phase.DELIVERY, transactional_id=self._id))

    @verb
    def send_offsets(self, consumed: ConsumedOffsets, deadline: Deadline) -> None:
        """Commit consumed offsets as a part of the transaction."""
        self.require(ProducerEvent.SEND_OFFSETS)
        assert self._wire is not None
        group = group_of(consumed.group_metadata)
        committed = offsets_of(consumed.offsets)
        if not committed:
            self.machine.apply(ProducerEvent.SEND_OFFSETS)
            return
        transaction = self._open
        transaction.note_write()
        transaction.offsets_in |= self._find_group(group.group_id, Deadline(min(_ASK_S, deadline.remaining_s())))
        topics = {topic for topic, _ in committed}
        topic_ids = self._sender.ids_of(topics, Deadline(min(_ASK_S, deadline.remaining_s())))
        transaction.sent_offsets = transaction.late_offsets = True
        answered = self._wire.requests.commit_offsets(self._ids, group, committed, deadline, topic_ids=topic_ids)
        if answered is not None:
            if answered.code == Code.UNKNOWN_TOPIC_ID:
                self._sender.forget(topics)
            # A late copy of offsets that are part of the transaction is written in the same partition: one that we know.
            transaction.late_offsets = answered.late and answered.code != Code.NONE
        self._answered(answered, Phase.SEND_OFFSETS, subject=group.group_id)
        self.machine.apply(ProducerEvent.SEND_OFFSETS)

    def _find_group(self, group_id: str, deadline: Deadline) -> frozenset[Partition]:
        """The partition that holds the group's offsets; empty if it is not there yet, or we may not describe its topic."""
        try:
            found = self._sender.topic(OFFSETS_TOPIC, deadline)
        except DualWriteError as error:
            self.log.info("cannot tell which partition holds the offsets of group %s: %s", group_id, error)
            return frozenset()
        if found is None:
            return frozenset()
        return frozenset({(OFFSETS_TOPIC, internal_partition(group_id, len(found.leaders)))})

    @verb
    def prepare(self, deadline: Deadline) -> PreparedTxnState:
        """Send what is left, wait until everything is acknowledged, and name the transaction."""
        transaction = self._open
        left = transaction.core.queued_messages
        flushed = self._flush(deadline)
        if not flushed and transaction.core.refusal is None:
            deadline, flushed = self._flush_on(left)
        if transaction.core.refusal is not None:
            self._raise_refusal()
        if not flushed:
            error = Unavailable(
                "prepare_transaction: not every message was acknowledged in time",
                transactional_id=self._id,
                next_step="nothing was decided: abort, and run the work again",
            )
            self._raise(Failure(error, ProducerEvent.FAIL))
        # After the failures of the transaction itself, which a callback may have raised for.
        if transaction.deliveries.callback_error is not None:
            transaction.deliveries.raise_callback_error()
        self.machine.apply(ProducerEvent.PREPARE)
        try:
            state = self._evidence.state(transaction, self._ids, self._sender.topic_ids, deadline)
            transaction.looked_at = begun_at = transaction.first_write_at or now_s()
            if state.has_transaction and (self.bulk or now_s() - begun_at > OLD_S):
                self._require_open(state, deadline)
                transaction.looked_at = now_s()
        except DualWriteError as error:
            self._raise(Failure(error, ProducerEvent.DOUBT if isinstance(error, Fenced) else ProducerEvent.FAIL))
        self.prepared = state
        self.machine.apply(ProducerEvent.NAME)
        return state

    def _flush(self, deadline: Deadline) -> bool:
        """Wait until every message is acknowledged; returns whether they are. Delivery callbacks may produce more."""
        flushed = self._sender.flush(deadline)
        while self._report() and flushed:
            # Otherwise the commit would leave out, without an error, what the callbacks have produced just now.
            flushed = self._sender.flush(deadline)
        return flushed

    def _flush_on(self, left: int) -> tuple[Deadline, bool]:
        """Go on as long as answers come, up to the time of a call. Returns the time for the rest, and whether all is done.

        ``left`` messages were not acknowledged when the time for an answer began.
        """
        core, longest, flushed = self._open.core, Deadline(self.call_timeout_s), False
        answer = self._for_an_answer(longest)
        while not flushed and core.refusal is None and core.queued_messages < left and not longest.expired:
            left, answer = core.queued_messages, self._for_an_answer(longest)
            flushed = self._flush(answer)
        return answer, flushed

    def _require_open(self, state: PreparedTxnState, deadline: Deadline) -> None:
        self._evidence.require_open(state, deadline)

    @verb
    def commit(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Commit the prepared transaction."""
        state = self.prepared
        if state is not None and state.has_transaction:
            self._end(Ended(state, committed=True), deadline)
        self._note_ended(event)

    @verb
    def abort(self, event: ProducerEvent, deadline: Deadline) -> None:
        """Abort, after a short wait for the answers to what was sent."""
        transaction = self._open
        core = transaction.core
        if self.machine.allows(ProducerEvent.FAIL):
            self.machine.apply(ProducerEvent.FAIL)  # so that no delivery callback can produce into what is ending
        if self.unanswered is not None:
            deadline = Deadline(min(SILENT_ABORT_S, deadline.remaining_s()))
        self._sender.drain(Deadline(min(_DRAIN_S, deadline.remaining_s())))
        self._report()
        transaction.deliveries.failed(core.callbacks(), _PURGED)
        if core.sent_to or transaction.sent_offsets:
            transaction.given_up = ended = self._evidence.given_up(
                transaction,
                self._ids,
                self._sender.topic_ids,
                Deadline(min(_ASK_S, deadline.remaining_s())),
                prepared=self.prepared,
            )
            self._end(ended, deadline)
        self._note_ended(event)

    def _end(self, ended: Ended, deadline: Deadline) -> None:
        assert self._wire is not None
        answered = self._wire.requests.end(self._ids, deadline, committed=ended.committed)
        self._ids = self._answered(answered, Phase.COMMIT if ended.committed else Phase.ABORT).ids
        self.pending_end = PendingEnd(ended)

    def _note_ended(self, event: ProducerEvent) -> None:
        self.machine.apply(event)
        self.prepared = None
        if self._renews and self._ids[1] >= _EPOCHS:
            self.doubt("its epochs are nearly used up")

    def _note_interrupted(self, verb: str, interruption: BaseException) -> None:
        """A cancelled task leaves at a wait, between two steps: what was sent is known, and an abort ends it."""
        if verb not in _WHOLE_BETWEEN_WAITS or not isinstance(interruption, here().cancelled):
            super()._note_interrupted(verb, interruption)
        elif self.machine.allows(ProducerEvent.FAIL):
            self.machine.apply(ProducerEvent.FAIL)

    def serve(self, timeout_s: float) -> int:
        """Send what may be sent, take answers for so long, and call delivery callbacks."""
        if not isinstance(self.transaction, OpenTransaction):
            return 0
        self._sender.pump()
        called = self._report()
        # Also if nothing is in flight: a message whose leader has moved waits until the new one is looked up.
        if timeout_s and not called and not self.transaction.core.is_flushed:
            self._sender.wait(Deadline(timeout_s))
            called = self._report()
        self.transaction.deliveries.raise_callback_error()
        return called

    def close(self) -> None:
        """Close the connections without ending the transaction."""
        self.machine.apply(ProducerEvent.CLOSE)
        if self._wire is not None:
            self._wire.sender.close()


# The evidence of a native transaction: the state that names it, and whether its brokers still show it open.


class OpenTransaction(Transaction):
    """The current transaction, with its messages on their way."""

    deliveries: Deliveries

    def __init__(self, core: ProduceCore) -> None:
        super().__init__(Deliveries())
        self.core = core
        self.offsets_in: set[Partition] = set()  # its consumers' groups, as far as we may describe that topic
        self.late_offsets = False  # whether consumed offsets may still be on their way there

    @property
    def sent_to(self) -> frozenset[Partition]:
        """The partitions that a batch or consumed offsets were sent to."""
        return self.core.sent_to | self.offsets_in

    @property
    def first_offsets(self) -> dict[Partition, int | None]:
        """Its first offset in each partition, as far as answers have named it or may still come."""
        late: dict[Partition, int | None] = dict.fromkeys(self.offsets_in) if self.late_offsets else {}
        return late | dict(self.core.first_offsets)


class Evidence:
    """Makes the states of one producer's transactions, and looks whether they are open."""

    def __init__(self, transactional_id: str, coordinator: TransactionCoordinator, incarnation: int | None) -> None:
        self._id = transactional_id
        self._coordinator = coordinator
        self._incarnation = incarnation
        self._may_read_groups = True
        self._groups_seen: set[Partition] = set()
        self._log = IdLogger(transactional_id)

    def state(
        self,
        transaction: OpenTransaction,
        ids: tuple[int, int],
        topic_ids: Mapping[str, str],
        deadline: Deadline,
    ) -> PreparedTxnState:
        """The state of a transaction, with every partition that it was sent to."""
        offsets = transaction.first_offsets
        known = dict(topic_ids)
        if transaction.sent_offsets:
            of_groups = self._groups_offsets(transaction, ids, deadline)
            offsets.update(of_groups)
            if of_groups and OFFSETS_TOPIC not in known:
                known.update(self._coordinator.topic_ids([OFFSETS_TOPIC], deadline))
        if not offsets and not transaction.sent_offsets:
            return PreparedTxnState()
        return PreparedTxnState.native(*ids, self._incarnation, offsets, known)

    def _groups_offsets(
        self, transaction: OpenTransaction, ids: tuple[int, int], deadline: Deadline
    ) -> Mapping[Partition, int | None]:
        """Where consumed offsets were written. Without the right to read that topic, what is left open there goes unnoticed."""
        if not self._may_read_groups:
            return {}
        written: Collection[Partition] = transaction.offsets_in
        if not written or not self._groups_seen.issuperset(written):
            view = self._coordinator.describe([self._id], deadline)[self._id]
            written = [key for key in view.partitions if key[0] == OFFSETS_TOPIC]
        try:
            found = self._coordinator.producer_open_offsets(*ids, written, deadline)
        except ConfigurationError as error:
            self._may_read_groups = False
            self._log.warning("cannot check whether its consumed offsets have ended: %s", error)
            return {}
        # The coordinator has named them once, so its word is not needed for the group's next offsets.
        self._groups_seen.update(found)
        return found

    def require_open(self, state: PreparedTxnState, deadline: Deadline) -> None:
        """Ask the coordinator, then the leaders: it does not show that an operator's tool ended it in one partition."""
        view = self._coordinator.describe([self._id], deadline)[self._id]
        if view.producer_id != state.producer_id or view.epoch > state.epoch + 1:
            shown = (view.producer_id, view.epoch)
            raise other_producer(shown, (state.producer_id, state.epoch), transactional_id=self._id)
        if view.status is not TransactionStatus.ONGOING or view.epoch != state.epoch:
            raise not_open(view.status, transactional_id=self._id)
        firsts = {(first.topic, first.partition): first.offset for first in state.first_offsets}
        found = self._coordinator.producer_open_offsets(state.producer_id, state.epoch, state.partitions, deadline)
        for partition in sorted(found):
            start = found[partition]
            # It begins after its first message where a tool ended it in between.
            if start is None or start > firsts.get(partition, start):
                raise ended_by_hand(partition, transactional_id=self._id)

    def given_up(
        self,
        transaction: OpenTransaction,
        ids: tuple[int, int],
        topic_ids: Mapping[str, str],
        deadline: Deadline,
        *,
        prepared: PreparedTxnState | None,
    ) -> Ended:
        """A transaction that is about to be aborted. Where a late copy of a request may come, it is not known completely."""
        complete = not transaction.core.late and not transaction.late_offsets
        if prepared is not None:
            return Ended(prepared, committed=False, complete=complete)
        try:
            state = self.state(transaction, ids, topic_ids, deadline)
            return Ended(state, committed=False, complete=complete)
        except DualWriteError as error:
            self._log.info("aborting a transaction that is only partly known: %s", error)
            state = PreparedTxnState.native(*ids, self._incarnation, transaction.first_offsets, topic_ids)
            return Ended(state, committed=False, complete=False)


# Calls `on_delivery` with the result of each message.

_NO_OFFSET: Final = -1001
"""The offset of a message that is not in the log, or whose offset the broker did not tell; as in librdkafka."""
_CREATED: Final = 1


class Deliveries(Callbacks):
    """Calls the callbacks of one transaction. What waits with a batch for its acknowledgement is the message itself."""

    def delivered(self, found: Iterable[Delivered]) -> int:
        """Tell the callbacks of acknowledged batches; returns how many there were."""
        called = 0
        for one in found:
            for index, awaited in one.batch.callbacks:
                offset = one.base_offset + index if one.base_offset >= 0 else _NO_OFFSET
                self._call_back(awaited, one.partition, None, offset)
                called += 1
        return called

    def failed(self, awaited: Iterable[tuple[Partition, object]], code: int) -> None:
        """Tell the callbacks of messages that were not delivered."""
        for partition, one in awaited:
            self._call_back(one, partition, code, _NO_OFFSET)

    def _call_back(self, awaited: object, partition: Partition, code: int | None, offset: int) -> None:
        # Loaded where callbacks are used, and not else.
        from confluent_kafka import KafkaError  # noqa: PLC0415 - as above
        from confluent_kafka import Message as KafkaMessage  # noqa: PLC0415 - as above

        assert isinstance(awaited, Message)
        assert awaited.on_delivery is not None
        error = None if code is None else KafkaError(code)
        shown = KafkaMessage(
            topic=partition[0],
            partition=partition[1],
            offset=offset,
            value=awaited.value,
            key=awaited.key,
            headers=list(awaited.headers) or None,
            timestamp=(_CREATED, awaited.timestamp_ms or 0),
            error=error,
        )
        self.call(awaited.on_delivery, error, shown)


# Maps what stopped a native transaction to our errors, and to the state in which it leaves the producer.
#
# The error and its advice are those of both engines. The state follows the wire's table: a producer may continue after
# an answer whose meaning is to abort; where the incarnation must end, and where an answer is missing, it must be
# discarded.

_OWN: Final[Mapping[int, Advice]] = MappingProxyType(
    {
        Code.UNSUPPORTED_VERSION: Advice(
            Kind.SETTINGS, f"the brokers do not serve transaction version 2: finalize it, {OTHER_ENGINE}"
        ),
    }
)
"""Where this engine needs other brokers than librdkafka's."""
_REQUESTS: Final = MappingProxyType(
    {
        Phase.PRODUCE: Request.PRODUCE,
        Phase.DELIVERY: Request.PRODUCE,
        Phase.SEND_OFFSETS: Request.TXN_OFFSET_COMMIT,
    }
)
"""The request of each step after which an abort may make the producer usable again."""
_LATE: Final = Advice(Kind.PASSING)


def failure_of(code: int | None, phase: Phase, *, transactional_id: str, subject: str | None = None) -> Failure:
    """Map the answer to a step; a code of None means that no answer came in time.

    The hint for a missing right names the subject: a topic or consumer group.
    """
    if code is None:
        return not_answered(phase, transactional_id=transactional_id, subject=subject)
    advice = _advice_on(code, phase)
    error = error_for(advice, code_name(code), phase, transactional_id=transactional_id, subject=subject)
    request = _REQUESTS.get(phase)
    goes_on = request is not None and meaning_of(request, code) is not Meaning.END
    return Failure(error, ProducerEvent.FAIL if goes_on else ProducerEvent.DOUBT)


def refused(refusal: Refusal, phase: Phase, *, transactional_id: str) -> Failure:
    """Map the refusal of a transaction's messages, as ``PRODUCE`` or ``DELIVERY`` has found it."""
    topic, number = refusal.partition
    if refusal.code is None:
        # An abort raises the epoch, so no late copy of the batch can be written behind it.
        advice, what = _LATE, f"partition {number} did not acknowledge its messages in time"
    else:
        advice, what = _advice_on(refusal.code, phase), f"partition {number}: {code_name(refusal.code)}"
    error = error_for(advice, what, phase, transactional_id=transactional_id, subject=topic)
    return Failure(error, ProducerEvent.FAIL if refusal.meaning is Meaning.ABORT else ProducerEvent.DOUBT)


def _advice_on(code: int, phase: Phase) -> Advice:
    return _OWN.get(code) or advice_on(code, phase)


# Statistics of one producer, for `stats_cb`: librdkafka's names and units for those that mean the same here.

logger = logging.getLogger(__name__)


class Statistics:
    """Counts what one producer sends, and calls ``stats_cb`` in the thread that uses the producer, whenever it is due.

    The callback gets JSON text, at most once per ``interval_s``.
    """

    def __init__(self, transactional_id: str, interval_s: float, callback: StatisticsCallback) -> None:
        self._id = transactional_id
        self._interval_s = interval_s
        self._callback = callback
        self._next_at: float | None = None
        self._messages = self._bytes = self._batches = 0

    def note(self, delivered: Iterable[Delivered], core: ProduceCore, now: float) -> None:
        """Count acknowledged batches, and call the callback if it is due. Its exceptions are logged."""
        for one in delivered:
            self._batches += 1
            self._messages += one.batch.body.count
            self._bytes += one.batch.body.size
        if self._next_at is not None and now < self._next_at:
            return
        first, self._next_at = self._next_at is None, now + self._interval_s
        if first:
            return
        found = {
            "name": self._id,
            "type": "producer",
            "engine": "native",
            "ts": int(now * 1_000_000),
            "time": int(time.time()),
            "msg_cnt": core.queued_messages,
            "msg_size": core.queued_bytes,
            "txmsgs": self._messages,
            "txmsg_bytes": self._bytes,
            "batches": self._batches,
            "requests_in_flight": core.in_flight,
        }
        try:
            self._callback(json.dumps(found))
        except Exception:
            logger.exception("%s: stats_cb raised", self._id)
