"""``TransactionalProducer``: the verbs that users and the writer call, over one of the two engines.

The engine is chosen by the user's wish and by the cluster's transaction version.

No released client or broker serves KIP-939. Three things stand in for it: a prepared state that holds the first offsets of
the transaction, ``DescribeTransactions`` and ``EndTxn`` from outside instead of ``InitProducerId(keepPreparedTxn=true)``,
and the greatest timeout that the broker allows instead of none.

A producer that keeps a transaction ends that one alone: if another producer of the id has been at work since, its verbs raise
``Fenced`` and send nothing. Used without a ``DualWriter``'s row and check, it leaves two races open, each between a look at the
coordinator and the request that follows at once. Meanwhile a paused owner may wake up, complete the kept transaction and begin
its next one. Before ``EndTxn``: librdkafka's next one has the same producer id and epoch, and is ended; a native one is not.
Before ``InitProducerId``, which begins the new producer's own life: the next one is aborted, whichever engine has begun it. So
make sure that the former owner is dead. A state in KIP-939's two-number form, without offsets, cannot tell two transactions of
one librdkafka producer apart at all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.interfaces import Closing, NativeCoordinator, TransactionCoordinator
from dualwrite.kafka import engine as forks
from dualwrite.kafka.config import TWO_PHASE_COMMIT, EngineName, KafkaConfig, wanted_engine
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.engine import Column, EngineArguments, ProducerEngine, is_news, not_allowed
from dualwrite.kafka.transaction_ends import PendingEnd, steady_view
from dualwrite.protocol.lives import PRODUCER_LIFE, WAY_ON, Machine, ProducerEvent, ProducerState
from dualwrite.protocol.message import ConsumedOffsets, Message, MessageBatch, MessageColumns, Unsendable
from dualwrite.protocol.prepared_state import Engine, PreparedTxnState
from dualwrite.protocol.process import VERDICT_S
from dualwrite.protocol.settle import EndStep
from dualwrite.protocol.values import NEVER_MS, TransactionStatus

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition

    from dualwrite.kafka.abandoned import AbandonedTransaction, Completion
    from dualwrite.kafka.librdkafka.handle import MakeHandle
    from dualwrite.kafka.native.producer import MakeWire
    from dualwrite.protocol.message import Content, DeliveryCallback, Headers


class TransactionalProducer(Closing):
    """One transactional producer: one transaction at a time, used by one thread at a time.

    Makes no connection until :meth:`init_transactions`. If a request may have been sent twice, or its answer is missing, the
    producer is ``doubtful``: it refuses to begin another transaction, because a late copy of the request would end that one
    (KAFKA-17754).

    Args:
        kafka: librdkafka's configuration, for both Kafka clients, and two settings of this library.
            ``dualwrite.engine``: ``native`` sends native transactions (transaction version 2), each of which has an epoch of
            its own; ``librdkafka`` sends through confluent-kafka; ``auto``, the default, is native where the cluster has
            finalized transaction version 2. `init_transactions` chooses it.
            ``dualwrite.bulk``: True for many messages in a transaction: delivery reports cover failures only, and
            ``prepare_transaction`` asks the partitions for the first offsets. ``on_delivery`` is not available then.
        transactional_id: Kafka's ``transactional.id``, used exactly as given.
        transaction_timeout_ms: Overrides ``transaction.timeout.ms``. By default, the longest timeout that the brokers allow.
        call_timeout_s: Seconds that each call may take.

    Raises:
        ConfigurationError: A setting is missing, unknown or unsafe.
    """

    _kept: AbandonedTransaction  # once init_transactions has kept one

    def __init__(
        self,
        kafka: Mapping[str, object],
        transactional_id: str,
        *,
        transaction_timeout_ms: int | None = None,
        call_timeout_s: float = 30.0,
    ) -> None:
        config = KafkaConfig.parse(kafka)
        self._set_up(
            config,
            transactional_id,
            transaction_timeout_ms=transaction_timeout_ms,
            call_timeout_s=call_timeout_s,
            bulk=config.bulk,
            engine=config.engine,
        )

    def _set_up(
        self,
        config: KafkaConfig,
        transactional_id: str,
        *,
        transaction_timeout_ms: int | None,
        call_timeout_s: float,
        bulk: bool,
        engine: EngineName,
        coordinator: TransactionCoordinator | None = None,
        incarnation: int | None = None,
        make_handle: MakeHandle | None = None,
        make_wire: MakeWire | None = None,
        flush_timeout_s: float | None = None,
    ) -> None:
        """What both constructors do: this one's, for users, and that of `LaneProducer`, with the library's own arguments."""
        if not transactional_id:
            raise ConfigurationError("the transactional id is empty")
        self._config = config
        self._id = transactional_id
        self._own_coordinator = coordinator is None
        self._coordinator = coordinator if coordinator is not None else KafkaCoordinator(config)
        own_timeout_ms = self._config.transaction_timeout_ms
        self._asked_timeout_ms = own_timeout_ms if transaction_timeout_ms is None else transaction_timeout_ms
        self._timeout_ms: int | None = None
        self._call_timeout_s = self._end_timeout_s = call_timeout_s
        self._flush_timeout_s = call_timeout_s if flush_timeout_s is None else min(flush_timeout_s, call_timeout_s)
        self._commit_timeout_s = call_timeout_s
        self._wanted = wanted_engine(engine)
        self._make_handle = make_handle
        self._make_wire = make_wire
        self._machine = Machine("producer", PRODUCER_LIFE, ProducerState.CREATED)
        self._given = EngineArguments(
            transactional_id, self._machine, self._coordinator, config, incarnation, bulk, call_timeout_s
        )
        self._chosen: ProducerEngine | None = None
        self._made_in = forks.process

    @property
    def transactional_id(self) -> str:
        """Kafka's ``transactional.id``."""
        return self._id

    @property
    def state(self) -> ProducerState:
        """The producer's state in its life cycle."""
        return self._machine.state

    @property
    def doubtful(self) -> bool:
        """Whether this producer must be discarded: one of its requests may still be on its way."""
        return self.state is ProducerState.DOUBTFUL

    @property
    def producer_id(self) -> int | None:
        """The broker's producer id; None before ``init_transactions``, and after an abort until the next prepare."""
        ids = self._chosen and self._chosen.ids
        return ids[0] if ids else None

    @property
    def epoch(self) -> int | None:
        """The producer epoch; None where ``producer_id`` is."""
        ids = self._chosen and self._chosen.ids
        return ids[1] if ids else None

    @property
    def prepared_state(self) -> PreparedTxnState | None:
        """The state of the transaction that is prepared, or whose commit was not answered; None if there is none."""
        return None if self._chosen is None else self._chosen.prepared

    @property
    def transaction_timeout_ms(self) -> int:
        """After how long the broker aborts an open transaction.

        Raises:
            IllegalStateError: ``init_transactions`` has not chosen it yet.
        """
        if self._timeout_ms is None:
            step = WAY_ON[ProducerState.CREATED]
            raise IllegalStateError("no transaction timeout is chosen yet", transactional_id=self._id, next_step=step)
        return self._timeout_ms

    @property
    def begun_for_s(self) -> float:
        """Seconds since the first message or offset, when the broker's timeout starts; 0 if there is none."""
        return 0.0 if self._chosen is None else self._chosen.begun_for_s

    def init_transactions(self, keep_prepared_txn: bool = False) -> None:  # noqa: FBT001, FBT002 - KIP-939's signature
        """Make the producer usable. Call it first, and once.

        Args:
            keep_prepared_txn: Keep the transaction that an earlier producer of this id left open. Then only
                ``commit_transaction``, ``abort_transaction`` and ``complete_transaction`` are allowed, and no producer
                has been fenced yet. False aborts it, and fences every earlier producer of the id.

        Raises:
            ConfigurationError: The settings, rights or timeout do not fit the broker.
            Unavailable: No answer in time.
            Fenced: Another producer of the id was faster.
            IllegalStateError: Called twice.
        """
        event = ProducerEvent.INIT_KEEPING if keep_prepared_txn else ProducerEvent.INIT
        self._initialise(event, Deadline(self._call_timeout_s))

    def _initialise(self, event: ProducerEvent, deadline: Deadline) -> None:
        self._check(event)
        self._choose(deadline)
        # Wait here for a coordinator that is being elected or loading: librdkafka would wait half a second each time.
        if event is ProducerEvent.INIT_KEEPING:
            self._kept = self._abandoned()
            view = self._kept.keep(deadline)
            self._instance.log.info("kept: %s, producer %d:%d", view.status.value, view.producer_id, view.epoch)
            self._machine.apply(event)
            return
        view = steady_view(self._coordinator, self._id, deadline)
        if view.status is TransactionStatus.ONGOING:
            self._abandoned().abort(view, deadline)
        self._open(event, deadline)

    def _abandoned(self) -> AbandonedTransaction:
        from dualwrite.kafka.abandoned import AbandonedTransaction  # noqa: PLC0415 - a new id has left nothing open

        natively = self._instance.engine is Engine.NATIVE
        return AbandonedTransaction(self._coordinator, self._id, natively=natively)

    def begin_transaction(self) -> None:
        """Begin a transaction. Nothing is sent until the first message.

        Waits until the last transaction is known to have ended in every partition.

        Raises:
            IllegalStateError: A transaction is open, or the producer is doubtful: make a new one.
            TransactionAborted: The last transaction has not ended everywhere, or not as decided here; the producer is
                doubtful: make a new one.
            Fenced: Another owner took over.
            Unavailable: The brokers did not answer in time; the producer is doubtful.
        """
        self._engine_for(ProducerEvent.BEGIN).begin()

    def produce(
        self,
        topic: str,
        value: Content = None,
        key: Content = None,
        *,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> None:
        """Send one message, without waiting until it is acknowledged. Waits for room if the queue is full.

        Nothing is durable on return; ``prepare_transaction`` makes sure that everything is.

        Args:
            topic: Topic name.
            value: Payload; a string is encoded as UTF-8.
            key: Key; decides the partition where none is given.
            partition: Partition number.
            headers: Record headers.
            timestamp_ms: Record timestamp in ms since 1970, from 1 on; the current time if not given.
            on_delivery: Called with ``(error or None, message)`` from a later call of this producer. What it produces is a part
                of the transaction, until `prepare_transaction` has every acknowledgement; an abort refuses it. `poll` and
                `prepare_transaction` re-raise the first exception of a callback, unless they fail themselves.

        Raises:
            IllegalStateError: No transaction is open, or it is prepared.
            TransactionAborted: The message was refused, or an earlier one failed: abort.
            ConfigurationError: A right is missing: abort.
            Fenced: Another owner took over.
            Unavailable: The queue stayed full until the deadline.
            TypeError, UnicodeEncodeError: A part is of another type, or a text has a surrogate. Nothing was taken; the
                transaction continues.
        """
        engine = self._engine_for(ProducerEvent.PRODUCE)
        if on_delivery is not None:
            engine.refuse_callback()
        try:
            message = Message.checked(
                topic,
                value,
                key,
                partition=partition,
                headers=headers,
                timestamp_ms=timestamp_ms,
                on_delivery=on_delivery,
                max_bytes=engine.max_message_bytes,
            )
        except Unsendable as error:
            engine.refuse(error, topic)
        engine.send(message)

    def produce_many(self, topic: str, values: Sequence[Content], keys: Sequence[Content] | None = None) -> None:
        """Send many messages: as `produce` for each, with less overhead.

        Args:
            topic: Topic name of all messages.
            values: Payloads.
            keys: One key per value; if not given, the messages have no keys.

        Raises:
            IllegalStateError, TransactionAborted, ConfigurationError, Fenced, Unavailable: As `produce`.
            TypeError, UnicodeEncodeError: As `produce`; messages before that one may have been taken.
            ValueError: The numbers of keys and values differ; nothing was produced.
        """
        self._engine_for(ProducerEvent.PRODUCE).send_many(MessageBatch.of(topic, values, keys))

    def produce_arrow(
        self,
        topic: str,
        values: Column,
        keys: Column | None = None,
        headers: Column | None = None,
        partitions: Column | None = None,
        *,
        timestamps: Column | None = None,
    ) -> None:
        """Send the rows of Arrow's columns: as `produce` for each. The native engine makes no Python object for a row.

        Columns are ``pyarrow.Array`` or ``ChunkedArray``.

        Args:
            topic: Topic name of all messages.
            values: Payloads: binary or text of any Arrow type; a null is a tombstone.
            keys: As many keys, likewise; if not given, the messages have no keys.
            headers: As many lists of headers, each a struct of ``key`` and ``value``, or maps from key to value.
            partitions: As many partition numbers; where it is null, the key decides.
            timestamps: As many timestamps: integers, ms since 1970, from 1 on; null is the current time.

        Raises:
            IllegalStateError, TransactionAborted, ConfigurationError, Fenced, Unavailable: As `produce`.
            ValueError: The columns differ in length; nothing was produced.
            TypeError: A column is of another type.
        """
        self._engine_for(ProducerEvent.PRODUCE).send_columns(
            MessageColumns(topic, values, keys, headers, partitions, timestamps).of_one_length()
        )

    def poll(self, timeout_s: float = 0.0) -> int:
        """Call delivery callbacks, and pass on the log and the statistics. Not needed for correctness.

        Args:
            timeout_s: Seconds to wait for the first event.

        Returns:
            The number of events served.

        Raises:
            IllegalStateError: The producer is closed, or another process made it.
        """
        self._require_no_fork()
        if self.state is ProducerState.CLOSED:
            self._check(ProducerEvent.PRODUCE)
        return 0 if self._chosen is None else self._chosen.serve(timeout_s)

    def take_callback_error(self) -> BaseException | None:
        """The first exception that a delivery callback of the current or last transaction raised, and no call has re-raised.

        Each is returned once: call it after an abort, or after a call that failed for another reason.
        """
        return None if self._chosen is None else self._chosen.transaction.deliveries.take_callback_error()

    def send_offsets_to_transaction(self, offsets: Sequence[TopicPartition], group_metadata: object) -> None:
        """Commit consumed offsets as part of the transaction. They are in the broker's log on return, undecided.

        Args:
            offsets: The next offset to consume in each partition.
            group_metadata: ``Consumer.consumer_group_metadata()``.

        Raises:
            IllegalStateError: No transaction is open, or it is prepared.
            TransactionAborted: The group has moved on, or the broker refuses: abort.
            ConfigurationError: A right is missing: abort.
            Fenced: Another owner took over.
            Unavailable: No answer in time; the producer is doubtful.
        """
        self._check(ProducerEvent.SEND_OFFSETS)
        self._instance.send_offsets(ConsumedOffsets(offsets, group_metadata), Deadline(self._instance.answer_within_s))

    def prepare_transaction(self) -> PreparedTxnState:
        """Flush, and make sure that every message is delivered. Afterwards only commit, abort and complete are allowed.

        Also waits for what delivery callbacks produce meanwhile.

        On return all messages are in the brokers' logs, undecided. They survive this process: until the broker's
        transaction timeout, another process can commit them by ``init_transactions(keep_prepared_txn=True)`` and
        ``complete_transaction`` with the state.

        Returns:
            The identity of the transaction; the empty state if nothing was written.

        Raises:
            TransactionAborted: A message failed, or the broker ended the transaction: abort.
            ConfigurationError: A right is missing: abort.
            Fenced: Another owner took over.
            Unavailable: Not everything was delivered by the deadline; the producer is doubtful.
            IllegalStateError: No transaction is open.
            Exception: What a delivery callback raised, if nothing else fails. Abort.
        """
        engine = self._engine_for(ProducerEvent.PREPARE)
        return engine.prepare(engine.patience(engine.answer_within_s))

    def require_still_open(self) -> None:
        """Check that the prepared transaction is still open, unless checked within the last second.

        Call it as the last step before a decision.

        Raises:
            TransactionAborted: The broker or an operator ended it: abort.
            Fenced: Another owner took over.
            Unavailable: No answer in time: abort.
        """
        self._require_no_fork()
        self._instance.require_still_open()

    def commit_transaction(self) -> None:
        """Commit, preparing first if ``prepare_transaction`` was not called. Consumers see the messages soon after.

        Raises:
            TransactionAborted, ConfigurationError: As :meth:`prepare_transaction`, if it was not called before.
            CompletionPending: The commit was not answered, and the transaction may be committed: complete it with a new
                producer and ``prepared_state``, and do not run the work again.
            Fenced: Another owner took over before the commit; or, with an unknown outcome, the commit was refused:
                another owner took over, or the broker timed the transaction out.
            DecidedTransactionLost: The broker aborted a kept transaction.
            IllegalStateError: There is nothing to commit.
        """
        engine = self._engine_for(ProducerEvent.COMMIT)
        deadline = engine.patience(self._commit_timeout_s)
        if self._machine.state is ProducerState.KEPT:
            self._kept.commit_ongoing(deadline)
            self._open(ProducerEvent.COMMIT, deadline)
            return
        if self._machine.state is ProducerState.BEGUN:
            engine.prepare(deadline)
        engine.commit(ProducerEvent.COMMIT, deadline)

    def abort_transaction(self) -> None:
        """Abort: nothing of the transaction becomes visible. Waits up to a second for messages in flight.

        Raises:
            Unavailable: Messages were still in flight, or the abort was not answered; the producer is doubtful. No
                process can commit the transaction unless its prepared state was stored.
            Fenced: Another owner took over, and ended the transaction.
            IllegalStateError: There is nothing to abort.
        """
        engine = self._engine_for(ProducerEvent.ABORT)
        deadline = engine.patience(self._end_timeout_s)
        if self._machine.state is ProducerState.KEPT:
            self._kept.abort_kept(deadline)
            self._open(ProducerEvent.ABORT, deadline)
        else:
            engine.abort(ProducerEvent.ABORT, deadline)

    def complete_transaction(self, state: PreparedTxnState) -> Completion:
        """Commit the prepared transaction if the state names it, else abort it; KIP-939's recovery.

        Does nothing if no transaction is ongoing. On return the producer is ready for its next transaction. You may
        repeat it with new producers, from other processes too: the first one that ends the transaction fences the others.

        Args:
            state: The state in the database; the empty state if it holds none.

        Raises:
            CompletionPending, DecidedTransactionLost, Unavailable: As commit and abort.
            OutcomeUnverifiable: The broker refused the commit, and the log no longer shows the transaction.
            Fenced: Another producer of the id has been at work since this one kept the transaction; nothing of it was ended.
            IllegalStateError: Neither ``prepare_transaction`` nor ``init_transactions(keep_prepared_txn=True)`` was
                called.
        """
        from dualwrite.kafka.abandoned import Completion  # noqa: PLC0415 - as above

        engine = self._engine_for(ProducerEvent.COMPLETE)
        deadline = Deadline(self._end_timeout_s)
        if self.state is ProducerState.KEPT:
            done = self._kept.complete(state, deadline)
            engine.log.info("completed: %s", done.value)
            self._open(ProducerEvent.COMPLETE, deadline)
            return done
        if state == self.prepared_state:
            engine.commit(ProducerEvent.COMPLETE, deadline)
            return Completion.COMMITTED
        engine.abort(ProducerEvent.COMPLETE, deadline)
        return Completion.ABORTED

    def close(self) -> None:
        """Close without ending the transaction: what is prepared stays prepared. Idempotent.

        Drops undelivered messages. Returns within about two seconds.

        Raises:
            IllegalStateError: Another process made this producer.
        """
        self._require_no_fork()
        if self.state is ProducerState.CLOSED:
            return
        if self._chosen is not None:
            self._chosen.close()
        else:
            self._machine.apply(ProducerEvent.CLOSE)
        if self._own_coordinator:
            self._coordinator.close()

    def __repr__(self) -> str:
        return f"<TransactionalProducer {self._id} {self.state.value}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TransactionalProducer cannot be pickled: make one in each process")

    @property
    def _instance(self) -> ProducerEngine:
        assert self._chosen is not None
        return self._chosen

    def _choose(self, deadline: Deadline) -> None:
        engine = choose_engine(self._wanted, self._config, self._coordinator, deadline, bulk=self._given.bulk)
        self._chosen = chosen = self._make_native() if engine is Engine.NATIVE else self._make_librdkafka()
        chosen.answer_within_s = self._flush_timeout_s

    def _make_native(self) -> ProducerEngine:
        # Each engine loads clients that the other does not need.
        from dualwrite.kafka.native.producer import NativeInstance, connect  # noqa: PLC0415 - as above

        like = self._coordinator.brokers if isinstance(self._coordinator, KafkaCoordinator) else None
        if like is not None and like.listener != self._config.listener:
            like = None  # its brokers have other addresses than ours
        return NativeInstance(self._given, self._make_wire or partial(connect, like=like))

    def _make_librdkafka(self) -> ProducerEngine:
        from dualwrite.kafka.librdkafka.handle import Handle  # noqa: PLC0415 - as above
        from dualwrite.kafka.librdkafka.producer import ProducerInstance  # noqa: PLC0415 - as above

        return ProducerInstance(self._given, self._make_handle or Handle)

    def _open(self, event: ProducerEvent, deadline: Deadline) -> None:
        self._timeout_ms = self._instance.open(event, self._asked_timeout_ms, deadline)

    def _check(self, event: ProducerEvent) -> None:
        """Raise unless the event is allowed now; changes nothing."""
        if self._made_in != forks.process:
            raise forks.forked_error(self._made_in, self._id)
        machine = self._machine
        if event not in machine.table[machine.state]:
            raise not_allowed(event, machine.state, self._id)

    def _engine_for(self, event: ProducerEvent) -> ProducerEngine:
        """The engine, to carry the event out. Raises as :meth:`_check`, in one frame: a dual write calls it three times."""
        machine = self._machine
        if self._chosen is None or self._made_in != forks.process or event not in machine.table[machine.state]:
            self._check(event)
        assert self._chosen is not None
        return self._chosen

    def _require_no_fork(self) -> None:
        if self._made_in != forks.process:
            raise forks.forked_error(self._made_in, self._id)


class LaneProducer(TransactionalProducer):
    """A producer as the library itself holds it, for one incarnation of a transactional id.

    It shows what a lane must know before it uses the producer again: how the last transaction has ended, and what the next
    settler must look for. Users have no lanes, so they get a `TransactionalProducer`.

    ``flush_timeout_s`` limits each wait for an answer while the database may hold locks, and that for the answer to a commit;
    by default a call has all its time. A coordinator that is not given is made, and closed with the producer. Simulators give
    ``make_handle`` and ``make_wire``.
    """

    def __init__(  # Both constructors call _set_up: neither's arguments are the other's.
        self,
        config: Mapping[str, object] | KafkaConfig,
        transactional_id: str,
        *,
        coordinator: TransactionCoordinator | None = None,
        incarnation: int | None = None,
        transaction_timeout_ms: int | None = None,
        call_timeout_s: float = 30.0,
        flush_timeout_s: float | None = None,
        bulk: bool = False,
        engine: EngineName = "auto",
        make_handle: MakeHandle | None = None,
        make_wire: MakeWire | None = None,
    ) -> None:
        self._set_up(
            config if isinstance(config, KafkaConfig) else KafkaConfig.parse(config),
            transactional_id,
            coordinator=coordinator,
            incarnation=incarnation,
            transaction_timeout_ms=transaction_timeout_ms,
            call_timeout_s=call_timeout_s,
            flush_timeout_s=flush_timeout_s,
            bulk=bulk,
            engine=engine,
            make_handle=make_handle,
            make_wire=make_wire,
        )
        # At a commit no locks are held any more: wait until it is known whether Kafka is silent, or only slow.
        self._patient_commit_s = min(call_timeout_s, max(self._flush_timeout_s, VERDICT_S))
        self._commit_timeout_s = self._patient_commit_s

    def init_within(self, deadline: Deadline) -> None:
        """As :meth:`init_transactions`, within the time that a block may wait for its lane: a call may take longer."""
        self._initialise(ProducerEvent.INIT, Deadline(min(self._call_timeout_s, deadline.remaining_s())))

    @property
    def engine(self) -> ProducerEngine:
        """The engine, which takes messages. Only after :meth:`init_transactions`."""
        assert self._chosen is not None
        return self._chosen

    def limit_waits(self, seconds: float | None, in_vain: Callable[[], bool] | None = None) -> None:
        """Wait no longer than this for an answer from now on, nor for those to a commit or an abort; None: as at first.

        A flush may take longer, up to the time of a call: each answer starts the time again. Once ``in_vain`` returns True,
        nothing waits any more. Only after :meth:`init_transactions`.
        """
        self._instance.in_vain = in_vain
        self._end_timeout_s = self._call_timeout_s if seconds is None else min(self._call_timeout_s, seconds)
        self._instance.answer_within_s = min(self._flush_timeout_s, self._end_timeout_s)
        self._commit_timeout_s = self._patient_commit_s if seconds is None else self._end_timeout_s

    @property
    def reusable(self) -> bool:
        """Whether it may begin another transaction, once the end of the last one is known."""
        engine = self._chosen
        return engine is not None and self._machine.state is ProducerState.READY and not engine.epoch_may_rise

    def begins_again(self) -> bool:
        """Whether it may begin another transaction at once: it can, and the end of the last one is known, which it notes."""
        engine = self._chosen
        if engine is None or self._machine.state is not ProducerState.READY or engine.epoch_may_rise:
            return False
        if engine.pending_end is not None and engine.pending_end.known:
            engine.pending_end = None
        return engine.pending_end is None

    @property
    def unknown_end(self) -> PendingEnd | None:
        """The last transaction, while its end is not known but still can be."""
        engine = self._chosen
        if engine is None or self._machine.state is not ProducerState.READY or engine.epoch_may_rise:
            return None
        return engine.pending_end

    @property
    def pending_end(self) -> PendingEnd | None:
        """The last transaction while its end is unknown; None once the producer may continue, or if there was none."""
        return None if self._chosen is None else self._chosen.pending_end

    def note_end(self, step: EndStep) -> None:
        """Take the next step for :attr:`pending_end`: the producer continues, or becomes doubtful."""
        assert self._chosen is not None
        self._chosen.note_end(step)

    @property
    def undecided_in(self) -> frozenset[tuple[str, int]]:
        """Partitions where an aborted or unprepared transaction may be open, for the settler after this producer."""
        return frozenset() if self._chosen is None else self._chosen.undecided_in

    @property
    def asking_since(self) -> float | None:
        """When the step began that asks the brokers now, by the clock of the process; None if there is none."""
        return None if self._chosen is None else self._chosen.asking_since

    @property
    def question(self) -> tuple[float, str] | None:
        """The question that waits for the brokers' answer, or the last one that got none: since when, and for what."""
        engine = self._chosen
        return None if engine is None else engine.asking or engine.unanswered

    @property
    def sends_to(self) -> frozenset[tuple[str, int]]:
        """The partitions that the current transaction has written to. For other threads: it may miss the newest."""
        engine = self._chosen
        try:
            return frozenset() if engine is None else engine.transaction.sent_to
        except RuntimeError:  # another thread adds one just now
            return frozenset()


# The choice of a producer's engine, by the user's wish and the cluster's transaction version.

logger = logging.getLogger("dualwrite.kafka.producer")

_VARIABLE: Final = "DUALWRITE_PRODUCER_ENGINE"
_NATIVE_FROM: Final = 2


def choose_engine(
    wanted: Engine | None, config: KafkaConfig, coordinator: TransactionCoordinator, deadline: Deadline, *, bulk: bool
) -> Engine:
    """The engine to use. Logged once in a process, where neither the user nor the environment decides.

    Where the user leaves it open, ``DUALWRITE_PRODUCER_ENGINE`` in the environment decides, then the cluster. If one of the
    settings is librdkafka's alone, that engine is used unless the native one is wanted.

    `ConfigurationError` if the native engine was asked for, or two-phase commit, which only it has, and the cluster does
    not have transaction version 2.
    """
    wanted = wanted or wanted_engine(os.environ.get(_VARIABLE, "auto"))
    if config.two_phase_commit:
        if wanted is Engine.LIBRDKAFKA:
            raise ConfigurationError(
                f"Kafka setting {TWO_PHASE_COMMIT!r}: librdkafka cannot ask for two-phase commit",
                next_step="choose the native engine, or leave the setting out",
            )
        wanted = Engine.NATIVE
    if wanted is Engine.LIBRDKAFKA:
        return wanted
    native = coordinator if isinstance(coordinator, NativeCoordinator) else None
    version = 0 if native is None else native.transaction_version(deadline)
    if wanted is None:
        found, why = _best(version, config, bulk=bulk)
        if is_news(f"engine: {why}"):
            logger.info("producer engine: %s, as %s", found.value, why)
        return found
    if version < _NATIVE_FROM and native is not None:
        version = native.transaction_version(deadline, fresh=True)  # it may have been finalized a moment ago
    if version < _NATIVE_FROM:
        raise ConfigurationError(
            f"the cluster's transaction.version is {version}: native transactions need {_NATIVE_FROM}",
            next_step="finalize it (kafka-features.sh upgrade --feature transaction.version=2), or choose librdkafka",
        )
    return wanted


def _best(version: int, config: KafkaConfig, *, bulk: bool) -> tuple[Engine, str]:
    if version < _NATIVE_FROM:
        return Engine.LIBRDKAFKA, f"the cluster's transaction.version is {version}"
    from dualwrite.kafka.native.settings import native_settings  # noqa: PLC0415 - loads the codecs of batches

    try:
        native_settings(config, bulk=bulk, transaction_timeout_ms=NEVER_MS)
    except ConfigurationError as error:
        return Engine.LIBRDKAFKA, str(error)
    return Engine.NATIVE, f"the cluster's transaction.version is {version}"
