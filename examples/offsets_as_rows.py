"""Consume, transform, write to both sides, with offsets kept as rows: a member that lost its partition writes nothing twice.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import secrets
from collections import Counter

from confluent_kafka import Consumer, Message, Producer, TopicPartition
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql

from dualwrite import DualWriter, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

METADATA = MetaData()
RECEIPTS = Table("receipts", METADATA, Column("id", Integer, primary_key=True), Column("body", Text))
OFFSETS = Table(
    "consumed",
    METADATA,
    Column("topic", Text, primary_key=True),
    Column("partition", Integer, primary_key=True),
    Column("next_offset", BigInteger, nullable=False),
)


class TakenOver(Exception):
    """Another member has written what this one has read: abort, and continue from the row."""


def first_offset(engine: Engine, topic: str, partition: int) -> int:
    """The offset to continue from; inserts the row if there is none."""
    made = postgresql.insert(OFFSETS).values(topic=topic, partition=partition, next_offset=0).on_conflict_do_nothing()
    found = select(OFFSETS.c.next_offset).where(OFFSETS.c.topic == topic, OFFSETS.c.partition == partition)
    with engine.begin() as connection:
        connection.execute(made)
        return connection.execute(found).scalar_one()


def move_offset(connection: Connection, topic: str, partition: int, *, expected: int, to: int) -> None:
    """Move the offset only if no other member has: after an upsert, a member that lost its partition would write twice."""
    moved = connection.execute(
        update(OFFSETS)
        .where(OFFSETS.c.topic == topic, OFFSETS.c.partition == partition, OFFSETS.c.next_offset == expected)
        .values(next_offset=to)
    )
    if moved.rowcount != 1:
        raise TakenOver


class Member:
    """One member of the consumer group, with a writer of its own."""

    def __init__(self, name: str, kafka: dict[str, str], engine: Engine, source: str, target: str) -> None:
        self._engine = engine
        self._target = target
        self._next: dict[tuple[str, int], int] = {}  # as the rows say, by partition
        self.writer = DualWriter(name, kafka=kafka, database=engine)
        self.writer.open()
        # Short timeouts, so that another member takes over within seconds.
        timeouts = {"session.timeout.ms": 6000, "max.poll.interval.ms": 6000}
        # The rows are the offsets; nothing is committed to Kafka.
        self.consumer = Consumer({**kafka, **timeouts, "group.id": source, "enable.auto.commit": False})
        self.consumer.subscribe([source], on_assign=self._assigned)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for one in partitions:
            one.offset = self._next[one.topic, one.partition] = first_offset(self._engine, one.topic, one.partition)
        consumer.assign(partitions)

    def read(self, count: int) -> list[Message]:
        """Read this number of messages."""
        messages: list[Message] = []
        while len(messages) < count:
            messages += [one for one in self.consumer.consume(count - len(messages), 1.0) if one.error() is None]
        return messages

    def write(self, messages: list[Message]) -> None:
        """Write rows, messages and offsets: all of them or none.

        Raises:
            TakenOver: Nothing is written; the partitions belong to another member.
        """
        last = {(one.topic() or "", one.partition() or 0): (one.offset() or 0) + 1 for one in messages}
        with self.writer.transaction() as tx:
            for (topic, partition), to in last.items():
                move_offset(tx.connection, topic, partition, expected=self._next[topic, partition], to=to)
            for one in messages:
                body = (one.value() or b"").decode()
                tx.connection.execute(insert(RECEIPTS).values(body=body))
                tx.produce(self._target, value=body)
        self._next.update(last)

    def close(self) -> None:
        """Leave the group."""
        self.consumer.close()
        self.writer.close()


def main() -> None:
    """Pause a member after it has read, let another one take over, then let the first one try to write."""
    with EmbeddedKafka() as servers, EmbeddedPostgres() as postgres:
        kafka, url = servers.client_config(), postgres.create_database()
        source, target = (
            servers.create_topic(f"{name}-{secrets.token_hex(4)}", 1) for name in ("payments", "receipts")
        )
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        METADATA.create_all(engine)
        producer = Producer(kafka)
        for number in range(20):
            producer.produce(source, value=str(number))
        producer.flush()

        slow = Member(f"{source}-0", kafka, engine, source, target)
        read = slow.read(10)
        print("member 0 has read 10 messages, and pauses")
        quick = Member(f"{source}-1", kafka, engine, source, target)
        quick.write(quick.read(20))
        print("member 1 has taken over, and written 20")
        try:
            slow.write(read)
            print("member 0 has written 10")
        except TakenOver:
            print("member 0 was taken over: it writes nothing, and continues from the row")
        slow.close()
        quick.close()

        with engine.connect() as connection:
            rows = Counter(connection.scalars(select(RECEIPTS.c.body)))
        messages = Counter((record.value or b"").decode() for record in read_committed(kafka, target))
        print(f"rows: {rows.total()}, messages: {messages.total()}, written twice: {sum(n > 1 for n in rows.values())}")
        engine.dispose()
        assert rows == messages == Counter(map(str, range(20))), "written twice"


if __name__ == "__main__":
    main()
