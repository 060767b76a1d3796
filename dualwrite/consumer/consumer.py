"""``ExactlyOnceConsumer``: consume, transform, write to both sides, once; and the member of a group that it is.

A member reads in one thread, hands units of work to workers, and leaves nothing open when it ends. The workers are
threads here, tasks in `dualwrite.asyncio.consumer`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from dualwrite.clock import now_s
from dualwrite.consumer.partitions import KafkaOffsets, Offsets, Partitions, RowOffsets
from dualwrite.consumer.reading import Peers, Reading, consumer_settings
from dualwrite.consumer.working import Counts, CurrentWriter, Deserializers, Deserializing, Handler, State, Working
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.consuming import member_id
from dualwrite.protocol.values import DEFAULT_LIMITS, check_seconds
from dualwrite.stores.opening import database_of, is_made_here
from dualwrite.stores.sql.consumed import ConsumedOffsets
from dualwrite.stores.sql.database import sql_of
from dualwrite.writing.transaction import CommonOptions, check_options
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces import Database
    from dualwrite.state import PartitionStores
    from dualwrite.writing.transaction import WriterOptions

T = TypeVar("T")


class ExactlyOnceConsumer:
    """A member of a consumer group: its input, rows and messages count together or not at all.

    :meth:`run` reads messages, calls the handler inside a dual write, and moves the group's offsets in that same dual write.
    Each message is handled in exactly one transaction that commits, whatever happens to this member, to others, to Kafka or
    to the database in between. A handler runs again after an abort, so it must have no other effects than through ``tx``.

    Before partitions go to other members, it finishes or aborts its transactions on them. When partitions come to it from a
    dead member, it settles the transactions that this member left open.

    Args:
        group: The ``group.id``.
        member: This member's name: unique in the group, stable over restarts; not empty, without ``/`` and ``#``. The writer's
            transactional id is ``group/member``.
        topics: The topics to read.
        handler: Called with the transaction and a list of confluent-kafka's messages, in the order of each partition. It must
            not commit, and must not send offsets.
        kafka: librdkafka configuration for all clients; ``bootstrap.servers`` at least.
        database: A SQLAlchemy engine or a database URL. The tables must exist: ``dualwrite migrate``.
        schema: The database schema of the library's tables, if it is not the default one.
        offsets: ``kafka``: in the Kafka transaction. ``database``: as rows of ``dualwrite_consumed``; if Kafka loses a decided
            transaction, its messages are then not handled twice.
        consumer: librdkafka configuration for the consumer alone, such as ``group.protocol`` or ``session.timeout.ms``.
            ``auto.offset.reset`` is ``earliest`` unless given.
        writer: Further arguments of `DualWriter`, such as ``{"limits": WriterLimits(margin_s=5)}``. The number of its lanes is
            made of ``workers``.
        max_messages: The maximum number of messages in one transaction.
        linger_s: How long a transaction waits to become full, in seconds.
        workers: How many transactions run at a time. Each has partitions of its own, so that a partition keeps its order.
        attempts: How often the handler may fail with the same messages. Then halves of them are tried, down to the message
            that fails. Deadlocks and unavailable servers do not count: the member waits, and stays in the group.
        dead_letter_topic: Topic for messages that keep failing: each is written there in a transaction with its offset, the
            reason in headers. Without it, :meth:`run` raises the handler's error.
        transient: Errors of the handler and the deserializers that show that something else they need is unavailable: the
            member waits and retries, and does not count them.
        deserializers: Make the keys and values that the handler gets: ``{"key": ..., "value": ...}``, each ``(bytes,
            SerializationContext) -> object``, as those of confluent-kafka; or a dictionary with one for each topic that has
            one. All workers use them at once, and again after an abort. A message that cannot be read goes to the dead-letter
            topic as it was read, or stops :meth:`run`; while a schema registry is unavailable, the member waits.
        state: Stores whose changes commit with the messages, one for each partition; then the consumer reads one topic. Close
            them after :meth:`run`.

    Raises:
        ConfigurationError: A setting cannot work, or would break the promise.

    Source: KIP-447, KIP-848, KIP-939.
    """

    def __init__(
        self,
        group: str,
        member: str,
        *,
        topics: Sequence[str],
        handler: Handler,
        kafka: Mapping[str, object],
        database: Engine | Database | str,
        schema: str | None = None,
        offsets: Literal["kafka", "database"] = "kafka",
        consumer: Mapping[str, object] | None = None,
        writer: WriterOptions | None = None,
        max_messages: int = 500,
        linger_s: float = 0.0,
        workers: int = 1,
        attempts: int = 5,
        dead_letter_topic: str | None = None,
        transient: tuple[type[Exception], ...] = (),
        deserializers: Deserializers | None = None,
        state: PartitionStores | None = None,
    ) -> None:
        made = database_of(database, schema)
        self._member = Member(
            group,
            member,
            topics=topics,
            handler=handler,
            kafka=kafka,
            database=made,
            dispose=made.close if is_made_here(database) else lambda: None,
            make_writer=DualWriter,
            offsets=offsets,
            consumer=consumer,
            writer=writer,
            max_messages=max_messages,
            linger_s=linger_s,
            workers=workers,
            attempts=attempts,
            dead_letter_topic=dead_letter_topic,
            transient=transient,
            deserializers=deserializers,
            state=state,
        )
        self.transactional_id = self._member.transactional_id

    @property
    def progress(self) -> ConsumerProgress:
        """The messages written, and those that wait. May be read in any thread."""
        return self._member.progress

    def stop(self) -> None:
        """Make :meth:`run` end after the transactions under way. May be called in any thread, and in a signal handler."""
        self._member.stop()

    def run(self, *, max_messages: int | None = None, idle_s: float | None = None) -> None:
        """Join the group, and work until :meth:`stop`. Call it once.

        The handler runs in threads of its own; this one reads. On return the member has left the group, and nothing that it
        began is open.

        Args:
            max_messages: End when at least this many messages are written; for tests.
            idle_s: End when nothing came for this many seconds; for tests.

        Raises:
            ConfigurationError: A setting or a right is missing, or a topic cannot be read.
            Fenced: Another process runs under this member's name.
            DecidedTransactionLost, OutcomeUnverifiable, DatabaseWentBack: A person must look. The offsets are where the last
                committed transaction has left them.
            Exception: The handler's own, if it fails for good and there is no dead-letter topic.
            KeyDeserializationError, ValueDeserializationError: Likewise, from a deserializer.
            IllegalStateError: It ran before.
        """
        self._member.begin()
        self._member.run(_Threads(), max_messages, idle_s)


class _Threads:
    """The workers are threads. Implements :class:`dualwrite.consumer.consumer.Workers`."""

    def call(self, work: Callable[[], T]) -> T:
        return work()

    def start(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread.join


# A member of a group, for handlers in threads and in tasks: it reads, hands units to workers, and leaves nothing open.

logger = logging.getLogger(__name__)


_REPORT_S: Final = 60.0
_LOOK_S: Final = 1.0


@dataclass(frozen=True)
class ConsumerProgress:
    """The messages that a consumer has written, and those that wait.

    Attributes:
        messages: Messages written since the start, dead letters included.
        transactions: Transactions committed.
        failed_attempts: Attempts that did not commit.
        dead_letters: Messages written to the dead-letter topic.
        lag: The number of messages not yet processed, by topic and assigned partition, as of the last fetch. Counts transaction
            markers, so it may stay slightly above zero.
    """

    messages: int
    transactions: int
    failed_attempts: int
    dead_letters: int
    lag: Mapping[tuple[str, int], int]


class Workers(Protocol):
    """Runs work that waits for the writer, in threads or in tasks of an event loop. Called in the thread that reads."""

    def call(self, work: Callable[[], T]) -> T:
        """Do the work, and wait for its result."""
        ...

    def start(self, work: Callable[[], None], name: str) -> Callable[[], object]:
        """Begin the work. Returns a function that waits until it has ended."""
        ...


class Member:
    """The part of a consumer that threads and tasks share. Arguments and errors are those of `ExactlyOnceConsumer`.

    ``database`` is for threads, and ``dispose`` is called when :meth:`run` has ended. ``make_writer`` is called with the
    transactional id and arguments of `DualWriter`.
    """

    def __init__(
        self,
        group: str,
        member: str,
        *,
        topics: Sequence[str],
        handler: Handler,
        kafka: Mapping[str, object],
        database: Database,
        dispose: Callable[[], None],
        make_writer: Callable[..., DualWriter],
        offsets: str,
        consumer: Mapping[str, object] | None,
        writer: CommonOptions | None,
        max_messages: int,
        linger_s: float,
        workers: int,
        attempts: int,
        dead_letter_topic: str | None,
        transient: tuple[type[Exception], ...],
        deserializers: Deserializers | None,
        state: State | None,
    ) -> None:
        check_seconds("linger_s", linger_s, zero=True)
        if min(max_messages, workers, attempts) < 1 or isinstance(topics, str) or not topics:
            raise ConfigurationError("max_messages, workers and attempts must be at least 1, topics must be a list")
        if offsets not in {"kafka", "database"}:
            raise ConfigurationError(f"offsets must be 'kafka' or 'database', not {offsets!r}")
        if state is not None and (len(topics) != 1 or topics[0].startswith("^")):
            raise ConfigurationError("a consumer with state must read one topic: each of its partitions has a store")
        try:
            self.transactional_id = member_id(group, member)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self._group = group
        self._topics = list(topics)
        self._kafka = dict(kafka)
        self._settings = consumer_settings(kafka, consumer or {}, group=group, client_id=self.transactional_id)
        self._database = database
        self._dispose = dispose
        self._keeps_rows = offsets == "database"
        self._partitions = Partitions(max_messages, linger_s, workers)
        self._count = workers
        self._stop = threading.Event()
        self._ran = False
        self._failure: BaseException | None = None
        # While a lane of a worker is settled, the worker takes the other one.
        given: CommonOptions = writer or {}
        check_options(given)
        self.limits = replace(given.get("limits", DEFAULT_LIMITS), max_lanes=2 * workers)
        self._arguments: CommonOptions = {**given, "limits": self.limits}
        self._make_writer = make_writer
        self._working = Working(
            group,
            handler,
            CurrentWriter(self._new_writer),
            KafkaOffsets(),
            self._partitions,
            attempts,
            dead_letter_topic,
            transient,
            Deserializing.of(deserializers),
            state,
        )
        self._counts: Counts = self._working.counts
        self._lag: Mapping[tuple[str, int], int] = {}

    def _new_writer(self) -> DualWriter:
        return self._make_writer(self.transactional_id, kafka=self._kafka, database=self._database, **self._arguments)

    @property
    def progress(self) -> ConsumerProgress:
        """The messages written, and those that wait. May be read in any thread."""
        counts = self._counts
        return ConsumerProgress(
            counts.messages, counts.transactions, counts.failed_attempts, counts.dead_letters, dict(self._lag)
        )

    def stop(self) -> None:
        """Make :meth:`run` end after the transactions under way. May be called in any thread, and in a signal handler."""
        self._stop.set()

    def begin(self) -> None:
        """Note that :meth:`run` is called, which may happen once."""
        if self._ran:
            raise IllegalStateError("the consumer has already run", transactional_id=self.transactional_id)
        self._ran = True

    def run(self, workers: Workers, max_messages: int | None, idle_s: float | None) -> None:
        """Join the group, and read until :meth:`stop`. Called once, after :meth:`begin`; it blocks its thread."""
        with ExitStack() as later:
            later.callback(self._dispose)
            self._database.check()
            offsets = self._make_offsets(later)
            self._working.offsets = offsets
            # Opened before the member joins: peers must not find something unsettled under the name of a member of the group.
            later.callback(workers.call, self._working.writer.close)
            workers.call(self._working.writer.get)
            peers = Peers(self._group, self.transactional_id, kafka=self._kafka, database=self._database)
            reading = Reading(self._settings, self._partitions, offsets, peers, self._stop)
            later.callback(reading.close)
            later.enter_context(self._started(workers))
            reading.subscribe(self._topics)
            self._loop(reading, max_messages, idle_s)
        if self._failure is not None:
            raise self._failure

    def _make_offsets(self, later: ExitStack) -> Offsets:
        if not self._keeps_rows:
            return KafkaOffsets()
        coordinator = KafkaCoordinator(KafkaConfig.parse(self._kafka))
        later.callback(coordinator.close)
        sql = sql_of(self._database, 'consumed offsets in the database (offsets="database")')
        rows = ConsumedOffsets(sql.engine, sql.tables_schema, self._group, self.transactional_id)
        return RowOffsets(rows, coordinator)

    @contextmanager
    def _started(self, workers: Workers) -> Generator[None, None, None]:
        names = [f"{self.transactional_id} worker {number}" for number in range(self._count)]
        wait_for = [workers.start(self._work, name) for name in names]
        try:
            yield
        finally:
            self._partitions.close()
            for wait in wait_for:
                wait()

    def _work(self) -> None:
        try:
            while (unit := self._partitions.take()) is not None:
                rewind = True
                try:
                    rewind = self._working.perform(unit)
                finally:
                    self._partitions.give_back(unit, rewind=rewind)
        except BaseException as error:  # noqa: BLE001 - run() raises it
            self._failure = self._failure or error
            self._stop.set()

    def _loop(self, reading: Reading, max_messages: int | None, idle_s: float | None) -> None:
        report_at, busy_at, look_at = now_s() + _REPORT_S, now_s(), 0.0
        while not self._stop.is_set():
            if reading.poll() or not self._partitions.is_idle:
                busy_at = now_s()
            if max_messages is not None and self._counts.messages >= max_messages:
                return
            if idle_s is not None and now_s() - busy_at >= idle_s:
                return
            if now_s() >= look_at:
                look_at = now_s() + _LOOK_S
                self._lag = reading.lag()
            if now_s() >= report_at:
                report_at = now_s() + _REPORT_S
                logger.info("%s: %s", self.transactional_id, self.progress)
