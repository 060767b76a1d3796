"""KIP-939's two recipes by hand: ``TransactionalProducer``, psycopg, and a state table of your own.

``DualWriter`` is built on this. Used alone, it leaves one thing to you: before you recover an id, make sure that its former
process is dead, not paused. ``DualWriter`` needs no such guarantee; prefer it where it fits.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal

import psycopg

from dualwrite import PreparedTxnState, TransactionalProducer
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

SCHEMA = """
CREATE TABLE kafka_transaction_state (transactional_id varchar(249) PRIMARY KEY, prepared_transaction_state text NOT NULL);
CREATE TABLE events (id integer PRIMARY KEY);
"""
READ_STATE = "SELECT prepared_transaction_state FROM kafka_transaction_state WHERE transactional_id = %s"
WRITE_STATE = """
INSERT INTO kafka_transaction_state VALUES (%s, %s) ON CONFLICT (transactional_id)
DO UPDATE SET prepared_transaction_state = excluded.prepared_transaction_state
"""


def write(kafka: dict[str, str], database: str, topic: str, event: int, die: str = "") -> None:
    """The normal recipe; its comments are the KIP's steps. ``topic`` is also the transactional id."""
    with TransactionalProducer(kafka, topic) as producer, psycopg.connect(database) as connection:
        producer.init_transactions()  # aborts what is open: always recover first
        cursor = connection.cursor()  # 1. begin database transaction: psycopg does with the first statement
        producer.begin_transaction()  # 2. beginTransaction in Kafka
        producer.produce(topic, value=str(event))  # 3. send messages to Kafka
        state = producer.prepare_transaction()  # 4. prepareTransaction in Kafka
        cursor.execute("INSERT INTO events VALUES (%s)", (event,))  # 5. update data
        cursor.execute(WRITE_STATE, (topic, str(state)))  # 6. update transactionalId -> preparedTransactionState
        if die == "before the decision":
            os.kill(os.getpid(), signal.SIGKILL)
        connection.commit()  # 7. commit database transaction: the decision
        if die == "after the decision":
            os.kill(os.getpid(), signal.SIGKILL)
        producer.commit_transaction()  # 8. commitTransaction in Kafka


def recover(kafka: dict[str, str], database: str, topic: str) -> str:
    """The recovery recipe: commit what the database names, abort anything else."""
    with psycopg.connect(database) as connection:
        row = connection.execute(READ_STATE, (topic,)).fetchone()  # 1. read preparedTransactionState
    state = PreparedTxnState.from_string(row[0] if row else "")
    with TransactionalProducer(kafka, topic) as producer:
        producer.init_transactions(keep_prepared_txn=True)
        return producer.complete_transaction(state).value  # 2. completePreparedTransaction


def main() -> None:
    """Write three events; the processes of two of them die on either side of the decision."""
    with EmbeddedKafka() as servers, EmbeddedPostgres() as postgres:
        kafka, database = servers.client_config(), postgres.create_database().replace("+psycopg", "", 1)
        topic = servers.create_topic(f"events-{secrets.token_hex(4)}")
        with psycopg.connect(database) as connection:
            connection.execute(SCHEMA)

        for event, die in [(1, ""), (2, "before the decision"), (3, "after the decision")]:
            process = multiprocessing.get_context("spawn").Process(
                target=write, args=(kafka, database, topic, event, die)
            )
            process.start()
            process.join()
            assert process.exitcode == (-signal.SIGKILL if die else 0)
            fate = f"killed {die}" if die else "written"
            print(f"event {event}: {fate}; recovery: {recover(kafka, database, topic)}")

        with psycopg.connect(database) as connection:
            events = [number for (number,) in connection.execute("SELECT id FROM events ORDER BY id")]
        messages = [int(record.value or b"") for record in read_committed(kafka, topic)]
        print(f"rows {events}, messages {messages}")
        assert events == messages == [1, 3]


if __name__ == "__main__":
    main()
