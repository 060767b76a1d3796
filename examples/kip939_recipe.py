"""KIP-939's two recipes by hand: ``TransactionalProducer`` and a state table of your own, here in SQLite.

``DualWriter`` is built on this. Used alone, it leaves one thing to you: before you recover an id, make sure that its former
process is dead, not paused. ``DualWriter`` needs no such guarantee; prefer it where it fits.

Run it without arguments: it starts a Kafka broker of its own, or uses the one that ``DUALWRITE_TEST_KAFKA`` names.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from dualwrite import PreparedTxnState, TransactionalProducer
from dualwrite.testing import EmbeddedKafka, read_committed

SCHEMA = """
CREATE TABLE kafka_transaction_state (transactional_id TEXT PRIMARY KEY, prepared_transaction_state TEXT NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY);
"""


def write(kafka: dict[str, str], database: str, topic: str, event: int, die: str = "") -> None:
    """The normal recipe, in the KIP's order. ``topic`` is also the transactional id."""
    with TransactionalProducer(kafka, topic) as producer, closing(sqlite3.connect(database)) as rows:
        producer.init_transactions()  # aborts what is open: always recover first
        rows.execute("BEGIN IMMEDIATE")
        producer.begin_transaction()
        producer.produce(topic, value=str(event))
        state = producer.prepare_transaction()
        rows.execute("INSERT INTO events VALUES (?)", (event,))
        rows.execute("INSERT OR REPLACE INTO kafka_transaction_state VALUES (?, ?)", (topic, str(state)))
        if die == "before the decision":
            os.kill(os.getpid(), signal.SIGKILL)
        rows.commit()  # the decision
        if die == "after the decision":
            os.kill(os.getpid(), signal.SIGKILL)
        producer.commit_transaction()


def recover(kafka: dict[str, str], database: str, topic: str) -> str:
    """The recovery recipe: commit what the database names, abort anything else."""
    with closing(sqlite3.connect(database)) as rows:
        query = "SELECT prepared_transaction_state FROM kafka_transaction_state WHERE transactional_id = ?"
        row = rows.execute(query, (topic,)).fetchone()
    state = PreparedTxnState.from_string(row[0] if row else "")
    with TransactionalProducer(kafka, topic) as producer:
        producer.init_transactions(keep_prepared_txn=True)
        return producer.complete_transaction(state).value


def main() -> None:
    """Write three events; the processes of two of them die on either side of the decision."""
    with EmbeddedKafka() as servers, tempfile.TemporaryDirectory() as directory:
        kafka, database = servers.client_config(), str(Path(directory) / "events.db")
        topic = servers.create_topic(f"events-{secrets.token_hex(4)}")
        with closing(sqlite3.connect(database)) as rows:
            rows.executescript(SCHEMA)

        for event, die in [(1, ""), (2, "before the decision"), (3, "after the decision")]:
            process = multiprocessing.get_context("spawn").Process(
                target=write, args=(kafka, database, topic, event, die)
            )
            process.start()
            process.join()
            assert process.exitcode == (-signal.SIGKILL if die else 0)
            fate = f"killed {die}" if die else "written"
            print(f"event {event}: {fate}; recovery: {recover(kafka, database, topic)}")

        with closing(sqlite3.connect(database)) as rows:
            events = [number for (number,) in rows.execute("SELECT id FROM events ORDER BY id")]
        messages = [int(record.value or b"") for record in read_committed(kafka, topic)]
        print(f"rows {events}, messages {messages}")
        assert events == messages == [1, 3]


if __name__ == "__main__":
    main()
