"""``ExactlyOnceConsumer``: consume, transform, write to both sides, once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from dualwrite.consumer.consumer__apps_consumer_member import ConsumerProgress, Member
from dualwrite.consumer.working import Handler
from dualwrite.consumer.working__apps_consumer_deserializing import Deserializers
from dualwrite.stores.opening import database_of, is_made_here
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces__ports_database import Database
    from dualwrite.state import PartitionStores
    from dualwrite.writing.transaction__writing_arguments import WriterOptions

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
    """The workers are threads. Implements :class:`dualwrite.consumer.consumer__apps_consumer_member.Workers`."""

    def call(self, work: Callable[[], T]) -> T:
        return work()

    def start(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread.join
