"""``InMemoryWriter``: a ``DualWriter`` for unit tests, without servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import DualWriteError, IllegalStateError
from dualwrite.interfaces import NO_OBSERVER
from dualwrite.protocol.message import ProducerRecord
from dualwrite.protocol.outbox import Outbox, check_setting
from dualwrite.protocol.process import Silence
from dualwrite.protocol.values import DEFAULT_LIMITS, OutboxMode, WriterLimits, check_writer_name, lane_id
from dualwrite.stores.sql.access import engine_of
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.testing.memory.lane import (
    Log,
    MemoryLane,
    MemoryOutbox,
    Place,
    Planted,
    RecordedTransaction,
    TransactionState,
    dialect_for_tests,
    is_shared,
)
from dualwrite.writing.dual_write import Ground, WriterBlock, session_of_block
from dualwrite.writing.group_commit import Groups
from dualwrite.writing.health import HealthMonitor
from dualwrite.writing.lane_pool import Lanes
from dualwrite.writing.outbox import Outboxes
from dualwrite.writing.transaction import Serializers, Serializing
from dualwrite.writing.work import Submitting, runners_for

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session, scoped_session, sessionmaker
    from typing_extensions import Self

    from dualwrite.interfaces import Handle, Observer, StateStore
    from dualwrite.protocol.process import Health
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.stores.sql.adopted import DjangoConnection
    from dualwrite.writing.lane import Lane
    from dualwrite.writing.sessions import Block, BoundSessions
    from dualwrite.writing.transaction import Transaction

Result = TypeVar("Result")
SessionT = TypeVar("SessionT", bound="Session")
_TIMEOUT_S: Final = 60.0
_MARGIN_S: Final = 10.0
_AT_ONCE: Final = 0.0
_KAFKA_AT: Final = "no address: it is in memory"


class Inside(NamedTuple):
    """The parts of a writer in memory that a test looks at and changes."""

    log: Log
    outbox: MemoryOutbox
    planted: Planted
    monitor: HealthMonitor
    lanes: Lanes


class InMemory:
    """What both writers in memory show to a test, and what it can plant there: the same for threads and for tasks."""

    _inside: Inside

    @property
    def messages(self) -> list[ProducerRecord]:
        """The messages that a consumer of committed ones sees, in the order of the commits."""
        return [message for transaction in self._inside.log.committed for message in transaction.messages]

    def messages_of(self, topic: str) -> list[ProducerRecord]:
        """Those of :attr:`messages` in one topic."""
        return [message for message in self.messages if message.topic == topic]

    @property
    def waiting(self) -> list[ProducerRecord]:
        """The messages that wait in the outbox, in the order of the commits."""
        return self._inside.outbox.rows

    @property
    def aborted(self) -> list[ProducerRecord]:
        """The messages of aborted and lost dual writes: handed to the producer, but never visible."""
        aborted = [one for one in self._inside.log.transactions if one.state is TransactionState.ABORTED]
        return [message for transaction in aborted for message in transaction.messages]

    @property
    def transactions(self) -> list[RecordedTransaction]:
        """The dual writes that have produced messages or committed rows, in the order of the first such step."""
        return self._inside.log.transactions

    def fail_next(
        self,
        place: Place | str,
        error: type[DualWriteError] | DualWriteError,
        *,
        rows_committed: bool | None = None,
        times: int = 1,
    ) -> None:
        """Let the next dual write fail that reaches a place. Failures at one place happen in the order of these calls.

        After `Fenced` every later block fails with it, too: another owner has the id.

        Args:
            place: A `Place`, or its name: ``begin``, ``produce``, ``prepare``, ``decide``, ``commit`` or ``complete``.
            error: What the server's part raises there: an error, or its class. The page on testing shows which can happen
                where, and what the caller gets.
            rows_committed: For `TransactionInDoubt` at ``commit``: whether the database has committed, which it has if not
                given.
            times: The number of failures.

        Raises:
            ValueError: The real writer cannot fail in this way.
        """
        at = Place(place)
        for _ in range(times):
            self._inside.planted.add(at, error, rows_committed=rows_committed)

    def kafka_goes_away(self) -> None:
        """Let Kafka be away from now on. No call of the writer waits for it: that it is silent is known at once.

        With ``outbox="never"`` blocks are refused with `Unavailable`, and :meth:`health` says what is silent; otherwise their
        messages wait, and the health is degraded. Does nothing if it is away.
        """
        if not self._inside.outbox.away:
            self._inside.outbox.away = True
            self._inside.monitor.silence = Silence(
                _KAFKA_AT, datetime.now(timezone.utc), now_s(), "a test has planted an outage"
            )

    def kafka_returns(self) -> None:
        """Let Kafka answer again. On return all that waited is sent, in the order of the commits, and what was left is settled.

        A block that is running meanwhile ends in the way that it has taken. Does nothing if Kafka is not away.
        """
        self._inside.outbox.away = False
        self._inside.monitor.silence = None
        self.settle()
        self._inside.outbox.send()

    @contextmanager
    def outage(self) -> Generator[None, None, None]:
        """Let Kafka be away while this block runs: :meth:`kafka_goes_away`, and :meth:`kafka_returns` at its end."""
        self.kafka_goes_away()
        try:
            yield
        finally:
            self.kafka_returns()

    def settle(self) -> None:
        """Settle what dual writes left behind, as the real writer does in the background and a recovery after a crash.

        Messages of dual writes whose rows are committed become visible; the others are aborted. Lanes in use are left alone. A
        lane is also settled before its next use, and by :meth:`close`.
        """
        for pooled in self._inside.lanes.all:
            if pooled.taken_at is None and not self._inside.outbox.away:
                pooled.lane.settle(Deadline(_AT_ONCE))


class InMemoryWriter(InMemory, Submitting):
    """Stands in for a `DualWriter` in unit tests: no broker, no tables of the library, no Kafka client.

    The blocks, their savepoints, refusals and errors, and :meth:`run` are the product's own code. Rows are really committed and
    rolled back in the engine's database; messages are kept in :attr:`messages`. Failures are planted with :meth:`fail_next`.

    To test crashes, what brokers and clients do to a message, or the rights, settings and limits of servers, use real servers.

    Args:
        transactional_id: As for `DualWriter`.
        database: A SQLAlchemy engine or a URL; a new SQLite database in memory if not given. Dual writes on an engine with a
            ``StaticPool`` run one at a time, and other code must not use the engine inside a block: it would be on the same
            connection.
        outbox: As for `DualWriter`. What waits is sent when the outage ends that :meth:`outage` makes; without one at once.
        limits: As for `DualWriter`. Its times count only where a caller waits: for a lane, and for a place.
        session_factory: As for `DualWriter`.
        bulk: As ``dualwrite.bulk`` among the Kafka settings of a `DualWriter`.
        serializers: As for `DualWriter`.
        telemetry: As for `DualWriter`; without one nothing is recorded, whatever the application has imported.
        max_message_bytes: The greatest size of key and value together in one message.

    Raises:
        ConfigurationError: A setting cannot work with a `DualWriter` either.
    """

    def __init__(
        self,
        transactional_id: str = "in-memory",
        *,
        database: Engine | str | None = None,
        outbox: Outbox = "never",
        limits: WriterLimits = DEFAULT_LIMITS,
        session_factory: Callable[..., Session] = session_of_block,
        bulk: bool = False,
        serializers: Serializers | None = None,
        telemetry: Observer | None = None,
        max_message_bytes: int = 1_000_000,
    ) -> None:
        check_writer_name(transactional_id)
        self.transactional_id = transactional_id
        self._owns_engine = not hasattr(database, "connect")
        self._engine = _new_database() if database is None else engine_of(database)
        self._dialect = dialect_for_tests(self._engine)
        self._bulk = bulk
        self._max_message_bytes = max_message_bytes
        self._planted = Planted(transactional_id)
        self._log = Log()
        check_setting(outbox)
        self._observer = NO_OBSERVER if telemetry is None else telemetry
        self._unobserve: Callable[[], None] | None = None
        self._outbox = MemoryOutbox(transactional_id, self._log, self._observer, always=outbox == "always")
        self._open = False
        self._lanes = Lanes(
            transactional_id,
            self._new_lane,
            max_lanes=1 if is_shared(self._engine) else limits.max_lanes,
            timeout_s=_TIMEOUT_S,
            lane_timeout_s=limits.lane_timeout_s,
            idle_after_s=_TIMEOUT_S,
            kafka_at=_KAFKA_AT,
        )
        self._monitor = HealthMonitor(transactional_id, self._outbox.require_kafka, ask_database=lambda: None)
        self._inside = Inside(self._log, self._outbox, self._planted, self._monitor, self._lanes)
        rows = SqlDatabase(self._engine)
        self._ground = Ground(
            transactional_id,
            self._context,
            self._lanes,
            rows,
            self._monitor,
            self._observer,
            Serializing.of(serializers),
            session_factory,
            _MARGIN_S,
            _TIMEOUT_S,
            _TIMEOUT_S,
            None
            if outbox == "never"
            else Outboxes(transactional_id, outbox, self._outbox, limits, max_message_bytes, bulk),
        )
        self._limits = limits
        self._making_groups = threading.Lock()
        self._group_runners = 1 if is_shared(self._engine) else runners_for(rows.traits, limits.max_lanes)

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    def open(self, *, wait: bool = True) -> None:
        """See :meth:`DualWriter.open`. There is nothing to wait for.

        Args:
            wait: As there.

        Raises:
            IllegalStateError: The writer is open, or was closed.
        """
        del wait
        if self._open or self._lanes.closed:
            raise IllegalStateError("the writer was already opened", transactional_id=self.transactional_id)
        self._lanes.open([self._new_lane(0)], keep_house=False)
        self._open = True
        if self._outbox.mode is OutboxMode.LATER:
            self._outbox.note_mode(later=True, why="the writer always does so")
        self._unobserve = self._observer.opened(self.health, lambda: None)

    def _new_lane(self, number: int) -> Lane:
        lane = MemoryLane(
            lane_id(self.transactional_id, number),
            self._engine,
            self._dialect,
            self._planted,
            self._log,
            outbox=self._outbox,
            bulk=self._bulk,
            max_message_bytes=self._max_message_bytes,
        )
        return cast("Lane", lane)

    def transaction(
        self,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None = None,
        *,
        outbox: Outbox | None = None,
    ) -> AbstractContextManager[Transaction]:
        """See :meth:`DualWriter.transaction`."""
        return self._block(connection, outbox=outbox)

    def bind(
        self,
        sessions: sessionmaker[SessionT] | scoped_session[SessionT] | type[SessionT],
        *,
        outbox: Outbox | None = None,
    ) -> BoundSessions:
        """See :meth:`DualWriter.bind`."""
        from dualwrite.writing.sessions import BoundSessions  # noqa: PLC0415 - the ORM is large, and loaded where it is used

        joins_first, block = self._joined(outbox)
        return BoundSessions(self.transactional_id, sessions, block, joins_first=joins_first)

    def _joined(self, outbox: Outbox | None) -> tuple[Engine | None, Block]:
        """As that of :class:`DualWriter`."""
        return (
            SqlDatabase(self._engine).joins_first,
            lambda _, connection: self._block(connection, joined=True, outbox=outbox),
        )

    def _block(
        self,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None,
        *,
        joined: bool = False,
        outbox: Outbox | None = None,
    ) -> AbstractContextManager[Transaction]:
        first = cast("MemoryLane", self._lanes.first) if self._open else None
        store = first.joined.store if joined and first is not None else None
        return _MemoryBlock(self._ground, connection, store, outbox=outbox)

    def _context(self, joined: StateStore | None) -> OwnerContext:
        self._require_open()
        first = cast("MemoryLane", self._lanes.first)
        return first.context if joined is None else first.joined

    def _make_groups(self) -> Groups:
        return Groups(
            self.transactional_id, self.transaction, self._limits, runners=self._group_runners, grouped=self._note_group
        )

    def _note_group(self, units: int) -> None:
        self._observer.grouped(self.transactional_id, units)

    def _require_open(self) -> None:
        if not self._open:
            raise IllegalStateError(
                "the writer is not open",
                transactional_id=self.transactional_id,
                next_step="use `with writer:` or open()",
            )

    def health(self) -> Health:
        """See :meth:`DualWriter.health`."""
        is_open = self._open and not self._lanes.closed
        outboxes = self._ground.outboxes
        return self._monitor.health(
            self._lanes,
            is_open=is_open,
            unreported_losses=0,
            setting="never" if outboxes is None else outboxes.setting,
            outbox=self._outbox.state,
            full=None if outboxes is None else outboxes.full,
        )

    @property
    def ready(self) -> bool:
        """See :attr:`DualWriter.ready`."""
        return self.health().ready

    def close(self) -> None:
        """Finish running transactions and units, and settle what is left. May be called more than once.

        Raises:
            AssertionError: A failure was planted that no dual write has reached, so the test has not tested it. Raised once.
        """
        self._close_groups(_TIMEOUT_S)
        self._lanes.close()
        self._open = False
        if self._unobserve is not None:
            self._unobserve()
        if self._owns_engine:
            self._engine.dispose()
        if unreached := self._planted.take_all():
            raise AssertionError(f"planted, but no dual write came there: {', '.join(map(str, unreached))}")

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except AssertionError:
            if error is None:
                raise

    def __repr__(self) -> str:
        shown = "closed" if self._lanes.closed else "open" if self._open else "not open"
        return f"<InMemoryWriter {self.transactional_id} {shown}>"


class _MemoryBlock(WriterBlock):
    """As that of :class:`DualWriter`: but each lane in memory has a store of its own, and checks every connection."""

    def _adopt(self, context: OwnerContext) -> tuple[AbstractContextManager[Handle], Handle]:
        adopted, handle = super()._adopt(context)
        context.store.check_same_database(handle)
        return adopted, handle

    def _context_on(self, lane: Lane, context: OwnerContext) -> OwnerContext:
        del context
        own = cast("MemoryLane", lane)
        return own.context if self._joined is None else own.joined


def _new_database() -> Engine:
    return create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
