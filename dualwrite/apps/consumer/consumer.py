"""``ExactlyOnceConsumer``: consume, transform, write to both sides, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from dualwrite.apps.consumer.deserializing import Deserializers, Deserializing
from dualwrite.apps.consumer.offsets import KafkaOffsets, Offsets, RowOffsets
from dualwrite.apps.consumer.partitions import Partitions
from dualwrite.apps.consumer.peers import Peers
from dualwrite.apps.consumer.reading import Reading
from dualwrite.apps.consumer.settings import consumer_settings
from dualwrite.apps.consumer.working import Counts, CurrentWriter, Handler, Working
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator.client import KafkaCoordinator
from dualwrite.protocol.consuming import member_id
from dualwrite.runtime.deadline import now_s
from dualwrite.stores.connecting import engine_of
from dualwrite.stores.consumed import ConsumedOffsets
from dualwrite.stores.schema import check_schema
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine

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
        lag: By topic and partition assigned to this member, the messages behind the last one written, as of the last fetch.
            Counts the markers of transactions, so it may stay above zero by the few that no message follows.
    """

    messages: int
    transactions: int
    failed_attempts: int
    dead_letters: int
    lag: Mapping[tuple[str, int], int]


class ExactlyOnceConsumer:
    """A member of a consumer group: its input, rows and messages count together or not at all.

    :meth:`run` reads messages, calls the handler inside a dual write, and moves the group's offsets in that same dual write.
    Each message is handled in exactly one transaction that commits, whatever happens to this member, to others, to Kafka or
    to the database in between. A handler runs again after an abort, so it must have no other effects than through ``tx``.

    It finishes or aborts what it is doing before partitions go to other members; it settles what dead members have left open
    when their partitions come to it.

    Args:
        group: The ``group.id``.
        member: This member's name: unique in the group, stable over restarts; not empty, without ``/`` and ``#``. The writer's
            transactional id is ``group/member``.
        topics: The topics to read.
        handler: Called with the transaction and a list of confluent-kafka's messages, in the order of each partition. It must
            not commit, and must not send offsets.
        kafka: librdkafka configuration for all clients; ``bootstrap.servers`` at least.
        engine: A SQLAlchemy engine or a database URL. The tables must exist: ``dualwrite migrate``.
        schema: The database schema of the library's tables, if it is not the default one.
        offsets: ``kafka``: in the Kafka transaction. ``database``: as rows of ``dualwrite_consumed``; if Kafka loses a decided
            transaction, its messages are then not handled twice.
        consumer: librdkafka configuration for the consumer alone, such as ``group.protocol`` or ``session.timeout.ms``.
            ``auto.offset.reset`` is ``earliest`` unless given.
        writer: Further arguments of `DualWriter`.
        max_messages: The maximum number of messages in one transaction.
        linger_s: How long a transaction waits to become full, in seconds.
        workers: How many transactions run at a time. Each has partitions of its own, so that a partition keeps its order.
        attempts: How often the handler may fail with the same messages. Then halves of them are tried, down to the message
            that fails. Deadlocks and servers out of reach do not count: the member waits for them, and stays in the group.
        dead_letter_topic: Where a message goes that fails for good, in a transaction with its offset, the reason in headers.
            Without it, :meth:`run` raises the handler's error.
        transient: Errors of the handler and the deserializers that are waited for instead of counted: something else that they
            need is out of reach.
        key_deserializer: Makes the keys that the handler gets: ``(bytes, SerializationContext) -> object``, as those of
            confluent-kafka; or a dictionary with one for each topic, in which the other topics have none. Used by all workers
            at once, and again after an abort. A message that it cannot read goes to the dead-letter topic as it was read, or
            stops :meth:`run`; a schema registry out of reach is waited for.
        value_deserializer: Makes the values, likewise.

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
        engine: Engine | str,
        schema: str | None = None,
        offsets: Literal["kafka", "database"] = "kafka",
        consumer: Mapping[str, object] | None = None,
        writer: Mapping[str, object] | None = None,
        max_messages: int = 500,
        linger_s: float = 0.0,
        workers: int = 1,
        attempts: int = 5,
        dead_letter_topic: str | None = None,
        transient: tuple[type[Exception], ...] = (),
        key_deserializer: Deserializers = None,
        value_deserializer: Deserializers = None,
    ) -> None:
        if min(max_messages, workers, attempts) < 1 or linger_s < 0 or isinstance(topics, str) or not topics:
            raise ConfigurationError(
                "max_messages, workers and attempts are at least 1, linger_s is not negative, topics is a list"
            )
        if offsets not in {"kafka", "database"}:
            raise ConfigurationError(f"offsets is 'kafka' or 'database', not {offsets!r}")
        try:
            self.transactional_id = member_id(group, member)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self._group = group
        self._topics = list(topics)
        self._kafka = dict(kafka)
        self._settings = consumer_settings(kafka, consumer or {}, group=group, client_id=self.transactional_id)
        self._owns_engine = isinstance(engine, str)
        self._engine = engine_of(engine)
        self._schema = schema
        self._keeps_rows = offsets == "database"
        self._partitions = Partitions(max_messages, linger_s, workers)
        self._workers = workers
        self._stop = threading.Event()
        self._ran = False
        self._failure: BaseException | None = None
        arguments: dict[str, object] = {"max_lanes": max(2, 2 * workers), **(writer or {})}
        self._working = Working(
            group,
            handler,
            CurrentWriter(self._writer_maker(arguments)),
            KafkaOffsets(),
            self._partitions,
            attempts,
            dead_letter_topic,
            transient,
            Deserializing(key_deserializer, value_deserializer),
        )
        self._counts: Counts = self._working.counts
        self._lag: Mapping[tuple[str, int], int] = {}

    def _writer_maker(self, arguments: Mapping[str, object]) -> Callable[[], DualWriter]:
        def make() -> DualWriter:
            given: dict[str, object] = {
                **arguments,
                "kafka": self._kafka,
                "engine": self._engine,
                "schema": self._schema,
            }
            return DualWriter(self.transactional_id, **given)  # type: ignore[arg-type] # checked there

        return make

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

    def run(self, *, max_messages: int | None = None, idle_s: float | None = None) -> None:
        """Join the group, and work until :meth:`stop`. Call it once.

        The handler runs in threads of its own; this one reads. On return the member has left the group, and nothing that it
        began is open.

        Args:
            max_messages: End when at least this many messages are written; for tests.
            idle_s: End when nothing came for this many seconds; for tests.

        Raises:
            ConfigurationError: A setting or a right is missing, or a topic cannot be read.
            Fenced: Another process works under this member's name.
            DecidedTransactionLost, OutcomeUnverifiable, DatabaseWentBack: A person must look. The offsets are where the last
                committed transaction has left them.
            Exception: The handler's own, if it fails for good and there is no dead-letter topic.
            KeyDeserializationError, ValueDeserializationError: Likewise, from a deserializer.
            IllegalStateError: It ran before.
        """
        if self._ran:
            raise IllegalStateError("the consumer has already run", transactional_id=self.transactional_id)
        self._ran = True
        check_schema(self._engine, self._schema)
        with ExitStack() as later:
            if self._owns_engine:
                later.callback(self._engine.dispose)
            offsets = self._make_offsets(later)
            self._working.offsets = offsets
            # Opened before the member joins: peers must not see a member that has something unsettled from its last life.
            later.callback(self._working.writer.close)
            self._working.writer.get()
            peers = Peers(
                self._group, self.transactional_id, kafka=self._kafka, engine=self._engine, schema=self._schema
            )
            reading = Reading(self._settings, self._partitions, offsets, peers, self._stop)
            later.callback(reading.close)
            later.enter_context(self._working_threads())
            reading.subscribe(self._topics)
            self._loop(reading, max_messages, idle_s)
        if self._failure is not None:
            raise self._failure

    def _make_offsets(self, later: ExitStack) -> Offsets:
        if not self._keeps_rows:
            return KafkaOffsets()
        coordinator = KafkaCoordinator(KafkaConfig.parse(self._kafka))
        later.callback(coordinator.close)
        rows = ConsumedOffsets(self._engine, self._schema, self._group, self.transactional_id)
        return RowOffsets(rows, coordinator)

    @contextmanager
    def _working_threads(self) -> Generator[None, None, None]:
        threads = [
            threading.Thread(target=self._work, name=f"{self.transactional_id} worker {number}", daemon=True)
            for number in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._partitions.close()
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while (unit := self._partitions.take()) is not None:
            rewind = True
            try:
                rewind = self._working.perform(unit)
            except BaseException as error:  # noqa: BLE001 - run() raises it
                self._failure = self._failure or error
                self._stop.set()
            finally:
                self._partitions.give_back(unit, rewind=rewind)

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
