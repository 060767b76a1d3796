"""Ways to write to a database and to Kafka, as programs do it: each with its steps, at any of which it may die.

All of them do their best: transactions on both sides where they can, a restart that aborts or completes what it finds, and no
operation run again whose row is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Producer
from harness.engines import answered
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, delete, insert, select

from dualwrite import DualWriter, WriterLimits, failpoints
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.protocol.prepared_state import PreparedTxnState

METADATA: Final = MetaData()
# Not unique: an operation that is written twice must be able to show.
OPERATIONS: Final = Table(
    "operations", METADATA, Column("number", Integer, primary_key=True), Column("id", Text, nullable=False)
)
STATE: Final = Table("plain_state", METADATA, Column("producer_id", Integer), Column("epoch", Integer))
PATIENCE_S: Final = 60.0
PARTITIONS: Final = (0, 1)


@dataclass(frozen=True)
class OwnerContext:
    """The servers and names that a way uses.

    Attributes:
        kafka: librdkafka's configuration.
        engine: The database.
        topic: A topic of two partitions; each operation sends one message to each.
        name: For transactional ids, the same after a restart.
        reach: Called at each step with its name; it may not return.
    """

    kafka: dict[str, Any]
    engine: Engine
    topic: str
    name: str
    reach: Callable[[str], None]


class Way:
    """One way. Making it is a restart: it recovers what its former self has left.

    Attributes:
        title: For the table.
        steps: The names of its steps, in order.
    """

    title: str
    steps: Sequence[str]

    def __init__(self, context: OwnerContext) -> None:
        self.context = context
        self.reach = context.reach

    def write(self, operation: str) -> None:
        """Write one operation to both sides."""
        raise NotImplementedError

    def close(self) -> None:
        """End in good order."""

    def _insert(self, connection: Any, operation: str) -> None:
        connection.execute(insert(OPERATIONS).values(id=operation))
        self.reach("row inserted")

    def _send(self, producer: Producer, operation: str) -> None:
        """One message to each partition, each in the broker's log before the next step."""
        failed = []
        for partition, step in zip(PARTITIONS, ("first message sent", "all messages sent"), strict=True):
            producer.produce(
                self.context.topic,
                operation,
                partition=partition,
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
            assert producer.flush(PATIENCE_S) == 0
            assert not failed
            self.reach(step)

    def _transactional(self) -> Producer:
        producer = Producer({**self.context.kafka, "transactional.id": self.context.name, "linger.ms": 0})
        producer.init_transactions(PATIENCE_S)  # aborts what the former self has left open
        return producer


class DualWrite(Way):
    """This library."""

    title = "**dualwrite**"
    steps = tuple(
        name
        for name in failpoints.FAILPOINTS
        if name.startswith("write.")
        and name not in {"write.before_abort", "write.rolled_back", "write.falls_back", "write.turns", "write.waits"}
    )

    def __init__(self, context: OwnerContext) -> None:
        super().__init__(context)
        failpoints.hit = context.reach
        self._writer = DualWriter(
            context.name, kafka=context.kafka, database=context.engine, limits=WriterLimits(max_lanes=1)
        )
        self._writer.open()

    def write(self, operation: str) -> None:
        with self._writer.transaction() as tx:
            tx.connection.execute(insert(OPERATIONS).values(id=operation))
            for partition in PARTITIONS:
                tx.produce(self.context.topic, operation, partition=partition)

    def close(self) -> None:
        self._writer.close()


class PlainKip939(Way):
    """KIP-939's recipe to the letter: one transactional id, the row holds ``{producer id, epoch}``, and recovery commits what
    is ongoing if it equals the row."""

    title = "KIP-939's recipe, plain, with today's clients"
    steps = (
        "row inserted",
        "first message sent",
        "all messages sent",
        "prepared",
        "state recorded",
        "database committed",
        "Kafka committed",
    )

    def __init__(self, context: OwnerContext) -> None:
        super().__init__(context)
        self._producer = TransactionalProducer({**context.kafka, "dualwrite.engine": "librdkafka"}, context.name)
        self._producer.init_transactions(keep_prepared_txn=True)
        with context.engine.connect() as connection:
            found = connection.execute(select(STATE)).one_or_none()
        self._producer.complete_transaction(PreparedTxnState(*found) if found else PreparedTxnState())

    def write(self, operation: str) -> None:
        with self.context.engine.connect() as connection:
            self._insert(connection, operation)
            self._producer.begin_transaction()
            self._send_prepared(operation)
            state = self._producer.prepare_transaction()
            self.reach("prepared")
            connection.execute(delete(STATE))
            connection.execute(insert(STATE).values(producer_id=state.producer_id, epoch=state.epoch))
            self.reach("state recorded")
            connection.commit()
            self.reach("database committed")
            self._producer.commit_transaction()
            self.reach("Kafka committed")

    def _send_prepared(self, operation: str) -> None:
        for partition, step in zip(PARTITIONS, ("first message sent", "all messages sent"), strict=True):
            self._producer.produce(self.context.topic, operation, partition=partition)
            answered(self._producer)
            self.reach(step)

    def close(self) -> None:
        self._producer.close()


class KafkaInside(Way):
    """A Kafka transaction inside a database transaction."""

    title = "Kafka transaction inside the database transaction"
    steps = ("row inserted", "first message sent", "all messages sent", "Kafka committed", "database committed")

    def __init__(self, context: OwnerContext) -> None:
        super().__init__(context)
        self._producer = self._transactional()

    def write(self, operation: str) -> None:
        with self.context.engine.connect() as connection:
            self._insert(connection, operation)
            self._producer.begin_transaction()
            self._send(self._producer, operation)
            self._producer.commit_transaction(PATIENCE_S)
            self.reach("Kafka committed")
            connection.commit()
            self.reach("database committed")


class DatabaseInside(Way):
    """A database transaction inside a Kafka transaction."""

    title = "database transaction inside the Kafka transaction"
    steps = ("first message sent", "all messages sent", "row inserted", "database committed", "Kafka committed")

    def __init__(self, context: OwnerContext) -> None:
        super().__init__(context)
        self._producer = self._transactional()

    def write(self, operation: str) -> None:
        self._producer.begin_transaction()
        self._send(self._producer, operation)
        with self.context.engine.connect() as connection:
            self._insert(connection, operation)
            connection.commit()
        self.reach("database committed")
        self._producer.commit_transaction(PATIENCE_S)
        self.reach("Kafka committed")


class CommitThenSend(Way):
    """Commit the database, then produce and flush."""

    title = "commit the database, then produce and flush"
    steps = ("row inserted", "database committed", "first message sent", "all messages sent")

    def __init__(self, context: OwnerContext) -> None:
        super().__init__(context)
        self._producer = Producer({**context.kafka, "enable.idempotence": True, "linger.ms": 0})

    def write(self, operation: str) -> None:
        with self.context.engine.connect() as connection:
            self._insert(connection, operation)
            connection.commit()
        self.reach("database committed")
        self._send(self._producer, operation)


class SendThenCommit(Way):
    """Produce and flush, then commit the database."""

    title = "produce and flush, then commit the database"
    steps = ("row inserted", "first message sent", "all messages sent", "database committed")

    def __init__(self, context: OwnerContext) -> None:
        super().__init__(context)
        self._producer = Producer({**context.kafka, "enable.idempotence": True, "linger.ms": 0})

    def write(self, operation: str) -> None:
        with self.context.engine.connect() as connection:
            self._insert(connection, operation)
            self._send(self._producer, operation)
            connection.commit()
        self.reach("database committed")


WAYS: Final[dict[str, type[Way]]] = {
    "dualwrite": DualWrite,
    "kip939": PlainKip939,
    "kafka-inside": KafkaInside,
    "database-inside": DatabaseInside,
    "commit-then-send": CommitThenSend,
    "send-then-commit": SendThenCommit,
}
