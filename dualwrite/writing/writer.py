"""``DualWriter``: rows and messages, together or not at all."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.kafka.config import KafkaConfig
from dualwrite.protocol.outbox import NO_OUTBOX, Outbox, check_setting
from dualwrite.protocol.values import DEFAULT_LIMITS, OutboxMode, WriterLimits, check_limits, check_writer_name
from dualwrite.recovery.claim import LOSSES, noting_reported, unique_owner
from dualwrite.stores.sql.database import database_of, is_made_here, sql_of
from dualwrite.telemetry import observer_if_loaded
from dualwrite.writing.dual_write import Ground, WriterBlock, session_of_block
from dualwrite.writing.health import HealthMonitor
from dualwrite.writing.lane import Losses, OnLoss
from dualwrite.writing.lane_pool import Lanes
from dualwrite.writing.transaction import Serializers, Serializing, Transaction
from dualwrite.writing.work import Submitting, runners_for
from dualwrite.writing.writer_resources import (
    Opened,
    ProducerSettings,
    refuse_fork,
    require_opened,
)

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session, scoped_session, sessionmaker
    from typing_extensions import Self, Unpack

    from dualwrite.interfaces import Database, Observer, StateStore
    from dualwrite.protocol.process import Health, Silence
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.stores.sql.adopted import DjangoConnection
    from dualwrite.writing.group_commit import Groups
    from dualwrite.writing.lane import Lane
    from dualwrite.writing.opening import Opening
    from dualwrite.writing.outbox import Outbox as News
    from dualwrite.writing.outbox import Outboxes
    from dualwrite.writing.sender import Sender
    from dualwrite.writing.sessions import Block, BoundSessions
    from dualwrite.writing.transaction import WriterSettings

logger = logging.getLogger(__name__)

SessionT = TypeVar("SessionT", bound="Session")


class DualWriter(Submitting):
    """Commits Kafka messages and database rows together or not at all.

    The database commit is the decision; Kafka follows it. After any crash, opening a writer with the same transactional id
    settles what was left behind: committed rows get their messages, everything else is aborted on both sides.

    One process at a time owns a transactional id: opening a second writer of that name fences the first. Threads share one
    writer. Each concurrent transaction takes a *lane*, which has its own transactional id (``orders``, ``orders#1``, ...).

    Args:
        transactional_id: Name of the writer: stable across restarts, unique among writers that run at the same time. At most
            240 characters, without ``#``.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least. Its ``client.id`` names the owner to people who read
            the row; the default is ``user@host:pid``. Two settings are this library's: ``dualwrite.engine`` (``auto``,
            ``native`` or ``librdkafka``; see `TransactionalProducer`), and ``dualwrite.bulk`` for large transactions: less
            work for each message, but no ``on_delivery``.
        database: A SQLAlchemy engine or a database URL. The tables must exist: ``dualwrite migrate``.
        schema: The database schema of the library's tables, if it is not the default one.
        outbox: What a block does while Kafka does not answer. ``never``: it is refused, with `Unavailable`. ``fallback``: after
            ``fallback_after_s`` its messages become rows that commit with its own. They are sent once, in their order, when
            Kafka answers, so readers may not see them yet when the block ends: see `Transaction.outbox`. ``always``: messages
            always become rows, and this process sends them a moment later; calls are then shortest. Only silence makes a block
            fall back: what Kafka refuses still aborts the block. RocksDB and ZooKeeper have no outbox.
        limits: The times and counts of the writer, among them ``max_lanes`` and ``timeout_s``: a `WriterLimits`.
        session_factory: Makes the ORM session of ``tx.session``, called with ``bind=connection``.
        serializers: Make the keys and values of ``tx.produce``: ``{"key": ..., "value": ...}``, each ``(object,
            SerializationContext) -> bytes`` like those of confluent-kafka, or a dictionary with one for each topic that has
            one. Many threads use them at once.
        on_loss: Called with a `DecidedTransactionLost`, `OutcomeUnverifiable` or `DatabaseWentBack` that is found only after
            its block has ended, for instance with `CompletionPending`. The thread that found the loss calls it, and may be
            about to begin another block. Without ``on_loss``, or if it raises (which is logged), :meth:`close` raises the loss.
        telemetry: A `Telemetry`, which records spans and metrics. The default uses OpenTelemetry's global providers if the
            application has imported OpenTelemetry; without its SDK nothing is recorded.

    Raises:
        ConfigurationError: A setting cannot work.

    Source: KIP-939, "dual write recipe".
    """

    def __init__(
        self,
        transactional_id: str,
        *,
        kafka: Mapping[str, object],
        database: Engine | Database | str,
        schema: str | None = None,
        outbox: Outbox = "never",
        limits: WriterLimits = DEFAULT_LIMITS,
        session_factory: Callable[..., Session] = session_of_block,
        serializers: Serializers | None = None,
        on_loss: OnLoss | None = None,
        telemetry: Observer | None = None,
    ) -> None:
        check_writer_name(transactional_id)
        self.transactional_id = transactional_id
        self._owns_database = is_made_here(database)
        self._database = database_of(database, schema)
        check_limits(limits)
        self._limits = limits
        self._producers = ProducerSettings(KafkaConfig.parse(kafka), limits.timeout_s, limits.flush_timeout_s)
        check_setting(outbox)
        self._outbox: Outbox = outbox
        self._owner = unique_owner(self._producers.config.client_id)
        self._pid = os.getpid()
        self._connected: Opened | None = None
        self._lanes = Lanes(
            transactional_id,
            lambda number: self._opened().lane(number),
            max_lanes=limits.max_lanes,
            timeout_s=limits.timeout_s,
            lane_timeout_s=limits.lane_timeout_s,
            idle_after_s=limits.idle_after_s,
            kafka_at=self._producers.config.listener[0],
        )
        self._lanes.refuses_in_silence = outbox == "never"
        serializing = Serializing.of(serializers)
        self._observer = observer_if_loaded() if telemetry is None else telemetry
        self._losses = Losses(on_loss, self._observer)
        self._monitor = HealthMonitor(
            transactional_id,
            lambda: self._opened().probe(),
            ask_database=lambda: self._opened().ask_database(),
            kafka_at=self._producers.config.listener[0],
            ask_kafka=lambda partitions: self._opened().ask_kafka(partitions),
            knock=None if outbox == "never" else lambda: self._opened().knock(),
            turned=self._note_silence,
        )
        self._signals: News | None = None
        self._sender: Sender | None = None
        self._unobserve: Callable[[], None] | None = None
        self._falls_back_after_s = None if outbox == "never" else limits.fallback_after_s
        self._opening: Opening[tuple[Opened, Sequence[Lane]]] | None = None
        self._traits = traits = self._database.traits
        self._ground = Ground(
            transactional_id,
            self._context,
            self._lanes,
            self._database,
            self._monitor,
            self._observer,
            serializing,
            session_factory,
            limits.margin_s,
            limits.timeout_s,
            min(limits.timeout_s, max(limits.lane_timeout_s, limits.flush_timeout_s)),
            self._outboxes(),
        )
        self._group_runners = runners_for(traits, limits.max_lanes)
        self._making_groups = threading.Lock()

    @classmethod
    def leased(
        cls,
        fleet: str,
        *,
        lease_timeout_s: float = 30.0,
        heartbeat_s: float | None = None,
        **settings: Unpack[WriterSettings],
    ) -> DualWriter:
        """Make a writer for one of many processes that run the same code. It takes a numbered id by itself.

        ``open()`` takes the lowest free id of ``fleet-0``, ``fleet-1``, ...; heartbeats keep it, and ``close()`` gives it back.
        Live members settle what a dead one left, and its id becomes free. A member that was paused for longer than the lease
        may find its id taken: its dual writes then raise a retryable `TransactionAborted` until it has taken another one. The
        writer may be made before a fork and opened in the child.

        Args:
            fleet: The name that all members share. At most 229 characters, without ``#``. No other writer may use its ids.
            lease_timeout_s: A member without a heartbeat for this long counts as dead, in seconds.
            heartbeat_s: The mean time between two heartbeats, in seconds; a sixth of the timeout by default.
            settings: The keyword arguments of `DualWriter`.

        Raises:
            ConfigurationError: A setting cannot work.
        """
        from dualwrite.protocol.members import LeaseTiming  # noqa: PLC0415 - most writers have no lease
        from dualwrite.writing.leased import LeasedWriter  # noqa: PLC0415 - it is made of this class

        return LeasedWriter(fleet, LeaseTiming(lease_timeout_s, heartbeat_s), **settings)

    def open(self, *, wait: bool = True) -> None:
        """Claim the transactional id, settle what former owners left behind, and make the producers.

        Call it once, before the first transaction; ``with writer:`` does so. On return no former owner can write any more,
        and everything that was decided is complete in Kafka.

        Args:
            wait: False returns at once, without asking a server, for processes that must start while Kafka or the database is
                away. A thread then opens the writer, and tries again until it succeeds. Until then a block waits for at most
                two seconds, and only until an attempt has failed, and raises `Unavailable`, which says what is missing since
                when; so does :meth:`health`. An error that waiting cannot fix (`Fenced`, a lost claim, a `ConfigurationError`
                without ``may_pass``) ends the attempts: each block raises it. Losses of former owners go to ``on_loss``.

        Raises:
            ConfigurationError: The tables are missing or of another version, the cluster is another one, the database has
                gone back in time, or a right is missing. Nothing was changed.
            DatabaseWentBack: The database has lost decisions. If it has lost a claim, nothing was changed, and every ``open()``
                fails until ``dualwrite recover --after-restore``; otherwise it is recorded, and the next ``open()`` succeeds.
            DecidedTransactionLost, OutcomeUnverifiable: Kafka does not have what the database decided, or that can no longer be
                known. It is recorded; the next ``open()`` succeeds. Also raised if another process found the loss, but ended
                before it could report it.
            Unavailable: A server does not answer.
            IllegalStateError: The writer is open, or was closed, or was made in another process, before a fork.
        """
        refuse_fork(self.transactional_id, self._pid)
        if self._connected is not None or self._opening is not None or self._lanes.closed:
            raise IllegalStateError("the writer was already opened", transactional_id=self.transactional_id)
        if not wait:
            self._open_in_background()
            return
        self._connected = opened = self._connect()
        self._observe()
        try:
            self._publish((opened, self._claim(opened)))
        except BaseException as error:
            if isinstance(error, LOSSES):
                self._observer.lost(error)
            self.close()
            raise

    def _connect(self) -> Opened:
        self._database.check()
        if self._outbox != "never":
            self._database.require_outbox()
        return Opened(
            self.transactional_id,
            self._database.store(paused_owner_timeout_s=self._limits.paused_owner_timeout_s),
            self._producers,
            owner=self._owner,
            lanes=self._lanes,
            losses=self._losses,
            observer=self._observer,
            falls_back_after_s=self._falls_back_after_s,
        )

    def _observe(self) -> None:
        self._unobserve = self._observer.opened(
            self.health, lambda: None if (opened := self._connected) is None else opened.longest_open_s()
        )

    def _open_in_background(self) -> None:
        from dualwrite.writing.opening import Opening  # noqa: PLC0415 - most writers are open when open() returns

        self._opening = Opening(
            self.transactional_id,
            self._attempt,
            publish=self._publish,
            discard=_discard,
            report=self._losses.report,
        )
        self._observe()
        self._opening.start()

    def _attempt(self) -> tuple[Opened, Sequence[Lane]]:
        """Try to open. If it fails, it leaves nothing behind."""
        if self._falls_back_after_s is None:  # otherwise Kafka is not needed
            from dualwrite.writing.opening import ask_first  # noqa: PLC0415 - as above

            ask_first(self._producers.config, self.transactional_id)
        opened = self._connect()
        try:
            return opened, self._claim(opened)
        except BaseException:
            opened.close()
            raise

    def _claim(self, opened: Opened) -> Sequence[Lane]:
        deadline = Deadline(self._limits.timeout_s)
        lanes = opened.claim(deadline)
        try:
            self._prepare_sending(opened, lanes[0], deadline)
        except BaseException:
            for lane in lanes:
                lane.discard()
            raise
        return lanes

    def _publish(self, made: tuple[Opened, Sequence[Lane]]) -> None:
        self._connected, lanes = made
        self._lanes.open(lanes)
        sends_on = self._connected.outbox_lane
        self._monitor.watch(self._lanes, self._connected.unanswered, sends_on=() if sends_on is None else (sends_on,))
        if self._sender is not None:
            self._sender.start()

    def _note_silence(self, silence: Silence | None) -> None:
        self._lanes.note_silence(silence)
        if silence is None and self._sender is not None:
            self._sender.kafka_is_back()

    def _prepare_sending(self, opened: Opened, first: Lane, deadline: Deadline) -> None:
        """Make the sender of what waits, once the writer is claimed, before its first block.

        The blocks of a writer with ``never`` do not look at the mode, and would overtake what another setting left waiting: so
        that is sent here. The blocks of ``always`` rely on the mode *later*, which is set here.
        """
        store, name = opened.context.store, self.transactional_id
        if self._outbox == "never" and store.outbox_mode(name) is OutboxMode.DIRECT:
            return
        # Loaded only here: most writers have no messages that wait.
        from dualwrite.writing.outbox import Outbox as News  # noqa: PLC0415 - as above
        from dualwrite.writing.sender import Sender, Sending, send_all  # noqa: PLC0415 - as above

        signals = self._signals = self._signals or News(name, self._observer)
        sending = Sending(
            name,
            opened.lane_to_send(first),
            opened.context,
            self._database,
            signals,
            turns_back=self._outbox != "always",
            when_refused=self._limits.outbox_refused,
            margin_s=self._limits.margin_s,
            timeout_s=self._limits.timeout_s,
        )
        if self._outbox == "never":
            try:
                send_all(sending, name, deadline)
            finally:
                sending.close()
            return
        if self._outbox == "always":
            assert store.outbox is not None  # it was required
            store.outbox.begin_later(name)
        self._sender = Sender(
            name,
            signals,
            sending,
            always=self._outbox == "always",
            monitor=self._monitor,
            losses=self._losses,
            idle_after_s=self._limits.idle_after_s,
        )

    def _outboxes(self) -> Outboxes | None:
        if self._outbox == "never":
            return None
        from dualwrite.writing.outbox import Outbox as News  # noqa: PLC0415 - as in _prepare_sending
        from dualwrite.writing.outbox import Outboxes  # noqa: PLC0415 - as in _prepare_sending

        self._signals = News(self.transactional_id, self._observer)
        return Outboxes(
            self.transactional_id,
            self._outbox,
            self._signals,
            self._limits,
            self._producers.config.max_message_bytes,
            self._producers.config.bulk,
        )

    def transaction(
        self,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None = None,
        *,
        outbox: Outbox | None = None,
    ) -> AbstractContextManager[Transaction]:
        """Run one dual write: the block's end commits both sides, an exception in the block aborts both.

        Args:
            connection: A connection of the engine, not inside a transaction; one of psycopg 3 with ``autocommit=False``; or
                ``django.db.connection``, outside of ``atomic()``, which the block then replaces. By default one is taken from
                the engine. The library checks once for each connection that it leads to the writer's database. After
                `TransactionInDoubt` it is closed.
            outbox: Replaces the writer's setting for this block, if that is not ``never``. ``always``: its messages become
                rows. ``never``: the block does not fall back, and is refused while messages of the writer wait, which come
                first.

        Returns:
            A context manager, which gives the transaction; it is usable until the block ends.

        Raises:
            TransactionAborted: Neither side changed. Also raised, with the cause, if a deadlock or a serialization failure of a
                statement leaves the block.
            Fenced: Another owner took over; neither side changed.
            TransactionInDoubt: The database's answer is missing. Do not run the work again.
            CompletionPending: The rows of this block are committed. Do not run the work again: settling completes the messages,
                or finds that they are lost. ``outcome`` is ``decided`` if Kafka shows that they will become visible, and
                ``unknown`` if Kafka could not be asked.
            DecidedTransactionLost, OutcomeUnverifiable: The rows of this block are committed; its messages are not, or that
                can no longer be known. Losses of other blocks go to the log and to ``on_loss``.
            DatabaseWentBack: The database has lost commits. Nothing was begun; or, with ``outcome`` ``unknown``, this block was
                committed, and the database lost it before Kafka had answered.
            ConfigurationError, Unavailable: Nothing was begun, or both sides are aborted. Also raised for a connection to
                another database.
            IllegalStateError: The writer is not open, the argument is not a connection or is in a transaction, or this thread
                is already inside a transaction of this writer.

        A transaction that Django has marked for rollback (``set_rollback(True)``) aborts both sides without an error, as
        ``atomic()`` does. Every other exception from the block is passed on unchanged. A block may be entered in one thread and
        left in another; two threads must not use it at the same time.
        """
        return self._block(connection, outbox=outbox)

    def bind(
        self,
        sessions: sessionmaker[SessionT] | scoped_session[SessionT] | type[SessionT],
        *,
        outbox: Outbox | None = None,
    ) -> BoundSessions:
        """Let the sessions of a factory produce messages that commit with their rows.

        The sessions need no change. A session that produces through the result joins a dual write of this open writer; the
        others are left alone. Bind a factory once, and use the result in every thread.

        Args:
            sessions: A ``sessionmaker``, a ``scoped_session`` of one (Flask-SQLAlchemy's ``db.session``), or a class
                (SQLModel's ``Session``). Its sessions must lead to the writer's database, and to no other in the same
                transaction.
            outbox: For the dual writes of these sessions, as for :meth:`transaction`.

        Raises:
            ConfigurationError: Its sessions are asynchronous or in two-phase mode, or it is not such a factory.
        """
        from dualwrite.writing.sessions import BoundSessions  # noqa: PLC0415 - the ORM is large, and loaded where it is used

        joins_first, block = self._joined(outbox)
        return BoundSessions(self.transactional_id, sessions, block, joins_first=joins_first)

    def _joined(self, outbox: Outbox | None) -> tuple[Engine | None, Block]:
        """For sessions: see :class:`dualwrite.writing.sessions.Joining`."""
        sql = sql_of(self._database, "sessions")
        store = sql.joined_store(paused_owner_timeout_s=self._limits.paused_owner_timeout_s)
        return sql.joins_first, lambda _, connection: self._block(connection, store(), outbox=outbox)

    def _block(
        self,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None,
        joined: StateStore | None = None,
        *,
        outbox: Outbox | None = None,
    ) -> AbstractContextManager[Transaction]:
        """One dual write: in a transaction of its own or, with the store ``joined``, in the connection's transaction."""
        return WriterBlock(self._ground, connection, joined, outbox=outbox)

    _uncompared = False

    def _compare_first(self) -> None:
        """For a writer of tasks that was opened in the background: compare its two engines, once, in the first block."""

    def _context(self, joined: StateStore | None) -> OwnerContext:
        if (opening := self._opening) is not None and not opening.done and os.getpid() == self._pid:
            opening.wait(self._limits.lane_timeout_s)
        opened = self._connected
        if opened is None or os.getpid() != self._pid:
            opened = self._opened()  # which raises
        if self._uncompared:
            self._compare_first()
        context = opened.context
        return context if joined is None else replace(context, store=joined)

    def health(self) -> Health:
        """Return the writer's knowledge of itself, for probes of a platform, at once. Any thread may call it at any time.

        If the database or Kafka did not answer last, both are asked in the background, at most once a second.
        """
        # Lanes exist from the end of open() to the beginning of close().
        is_open = len(self._lanes) > 0 and not self._lanes.closed and os.getpid() == self._pid
        known = self._monitor.health(
            self._lanes,
            is_open=is_open,
            unreported_losses=self._losses.unreported,
            setting=self._outbox,
            outbox=NO_OUTBOX if self._signals is None else self._signals.state,
            full=None if (outboxes := self._ground.outboxes) is None else outboxes.full,
        )
        return known if is_open or self._opening is None else self._opening.shown_in(known)

    @property
    def ready(self) -> bool:
        """Whether dual writes are expected to work now: ``health().ready``. ``health().problems`` says what is wrong."""
        return self.health().ready

    def close(self) -> None:
        """Finish running transactions and units, settle and record what is left, and disconnect. May be called more than once.

        Leaves transactions that have not ended after ``timeout_s``, and whatever cannot be settled within seconds, to the next
        settler. In a forked process it does nothing: the connections are the parent's.

        Raises:
            DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable: A loss that only the log has reported: ``on_loss``
                was not given, or has failed. It is recorded.
            Unavailable: The database could not record that everything is complete; the next opening proves it from the log.
        """
        if os.getpid() != self._pid:
            return
        if self._opening is not None:
            self._opening.stop()
        opened = self._connected
        try:
            with noting_reported(opened.context.store) if opened is not None else nullcontext():
                self._close_groups(self._limits.timeout_s)
                self._monitor.close()
                try:
                    self._lanes.close()
                finally:
                    if self._sender is not None:  # after the last block, which may have put something
                        self._sender.close(self._limits.timeout_s)
                self._losses.raise_unreported()
        finally:
            if self._unobserve is not None:
                self._unobserve()
            if opened is not None:
                opened.close()
                self._connected = None
            if self._owns_database:
                self._database.close()

    def _make_groups(self) -> Groups:
        from dualwrite.writing.group_commit import Groups, limits_for  # noqa: PLC0415 - loaded with the first unit

        return Groups(
            self.transactional_id,
            self.transaction,
            limits_for(self._traits, self._limits),
            runners=self._group_runners,
            grouped=self._note_group,
        )

    def _note_group(self, units: int) -> None:
        self._observer.grouped(self.transactional_id, units)

    def _require_open(self) -> None:
        if self._connected is None and (opening := self._opening) is not None and os.getpid() == self._pid:
            opening.check(patient=True)  # the block of a unit waits
            if not opening.stopped:
                return
        self._opened()

    def _opened(self) -> Opened:
        if self._connected is None and (opening := self._opening) is not None and os.getpid() == self._pid:
            opening.check()
        return require_opened(self._connected, self.transactional_id, self._pid)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except LOSSES:
            if error is None:
                raise
            logger.exception(
                "%s: loss reported only in this log: the block raises another error", self.transactional_id
            )

    def __repr__(self) -> str:
        opens = self._opening is not None and not self._opening.done
        shown = "closed" if self._lanes.closed else "opening" if opens else "open" if self._connected else "not open"
        return f"<DualWriter {self.transactional_id} {shown}, {len(self._lanes)} lanes>"


def _discard(made: tuple[Opened, Sequence[Lane]]) -> None:
    opened, lanes = made
    for lane in lanes:
        lane.discard()
    opened.close()
