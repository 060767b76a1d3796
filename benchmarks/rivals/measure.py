"""Other relays of an outbox table, which ``benchmarks.outbox`` measures in turn with this library: each in a process of its own.

``txoutbox`` and ``faststream-outbox`` run in an environment of their own below ``.cache``, since their requirements are not this
project's; Debezium's engine with its outbox event router runs in a JVM. Each begins on a table that is already full and sends
it to its end; what is counted is the time from its first message in the topic to its last, seen by the brokers' offsets, so that
no start-up counts. All of them deliver at least once.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka import Consumer, TopicPartition
from sqlalchemy import make_url

from benchmarks.servers import noise
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres
from dualwrite.testing.servers.embedded import fetched_jars, java

HERE: Final = Path(__file__).parent
PYTHON_ENVIRONMENT: Final = HERE.parents[1] / ".cache" / "rivals"
PARTITIONS: Final = 4
LOGICAL: Final = {"wal_level": "logical"}
"""The setting of PostgreSQL that Debezium needs. The same server serves all, for the same write-ahead log."""


@dataclass(frozen=True)
class Rival:
    """One relay: how its table is made, what an INSERT takes from numbered payloads, and the command that sends the rows."""

    name: str
    make: Sequence[str]
    fill: str
    command: Callable[[], Sequence[str]]


def python_environment() -> Path:
    """The interpreter of the rivals written in Python; makes their environment first if it is not there."""
    wanted = (HERE / "requirements.txt").read_bytes()
    python, made = PYTHON_ENVIRONMENT / "bin" / "python", PYTHON_ENVIRONMENT / "requirements.txt"
    if not made.is_file() or made.read_bytes() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", PYTHON_ENVIRONMENT], check=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", HERE / "requirements.txt"]
        subprocess.run([python, *install], check=True)
        made.write_bytes(wanted)
    return python


def _python(script: str, *arguments: str) -> Sequence[str]:
    return [str(python_environment()), str(HERE / script), *arguments]


def _debezium() -> Sequence[str]:
    jars = fetched_jars(HERE / "debezium" / "pom.xml", "debezium", "Debezium")
    return [java(), "-Xmx1g", "-cp", f"{jars}/*", str(HERE / "debezium" / "Relay.java")]


TXOUTBOX_TABLE: Final = (
    "CREATE TABLE outbox (id bigserial PRIMARY KEY, topic text NOT NULL, key text, payload bytea NOT NULL, "
    "headers jsonb NOT NULL DEFAULT '{}', status text NOT NULL DEFAULT 'pending', attempts int NOT NULL DEFAULT 0, "
    "retry_at timestamptz, leased_by text, lease_until timestamptz, last_error text, "
    "created_at timestamptz NOT NULL DEFAULT now())",
    "CREATE INDEX outbox_pending_idx ON outbox (id) WHERE status = 'pending'",
    "CREATE INDEX outbox_key_pending_idx ON outbox (key, id) WHERE status = 'pending'",
)
_TXOUTBOX_ROWS: Final = (
    "INSERT INTO outbox (topic, key, payload) SELECT %(topic)s, (i %% 1000)::text, convert_to(value, 'UTF8')"
)
_FASTSTREAM_ROWS: Final = (
    "INSERT INTO outbox (queue, payload, headers) SELECT 'events', convert_to(value, 'UTF8'), "
    "jsonb_build_object('content-type', 'text/plain', 'correlation_id', i::text)"
)
_DEBEZIUM_TABLE: Final = (
    "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text NOT NULL, "
    "type text NOT NULL, payload text)",
    "CREATE PUBLICATION rival FOR TABLE outbox",
    "SELECT pg_create_logical_replication_slot('rival', 'pgoutput')",
)
_DEBEZIUM_ROWS: Final = "INSERT INTO outbox SELECT gen_random_uuid(), %(topic)s, (i %% 1000)::text, 'made', value"
_NUMBERED: Final = " FROM generate_series(1, %(rows)s) i JOIN noise ON n = i %% 20000"

RIVALS: Final = (
    Rival("txoutbox, aiokafka", TXOUTBOX_TABLE, _TXOUTBOX_ROWS, lambda: _python("txoutbox_relay.py", "50", "10")),
    Rival("txoutbox, tuned", TXOUTBOX_TABLE, _TXOUTBOX_ROWS, lambda: _python("txoutbox_relay.py", "5000", "1000")),
    Rival("faststream-outbox", (), _FASTSTREAM_ROWS, lambda: _python("faststream_relay.py", "10", "1")),
    Rival("faststream-outbox, tuned", (), _FASTSTREAM_ROWS, lambda: _python("faststream_relay.py", "1000", "32")),
    Rival("Debezium engine", _DEBEZIUM_TABLE, _DEBEZIUM_ROWS, _debezium),
)


def per_second(rival: Rival, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, *, rows: int, size: int) -> float:
    """The messages a second at which the rival sends a full table of that many rows."""
    topic = kafka.create_topic(f"rival-{secrets.token_hex(4)}", PARTITIONS)
    url = make_url(postgres.create_database())
    assert url.database is not None
    dsn = postgres.dsn_of(url.database)
    settings = {
        "RIVAL_KAFKA": kafka.bootstrap_servers,
        "RIVAL_TOPIC": topic,
        "RIVAL_HOST": str(url.host),
        "RIVAL_PORT": str(url.port),
        "RIVAL_USER": str(url.username),
        "RIVAL_PASSWORD": str(url.password),
        "RIVAL_DATABASE": url.database,
    }
    command = rival.command()
    with psycopg.connect(dsn, autocommit=True) as connection:
        if not rival.make:
            subprocess.run([*command, "--make"], env={**os.environ, **settings}, check=True)
        for statement in rival.make:
            connection.execute(statement)
        fill = f"WITH {noise(size)} {rival.fill}{_NUMBERED}"
        psycopg.ClientCursor(connection).execute(fill, {"topic": topic, "rows": rows})
        connection.execute("ANALYZE outbox")
    try:
        with _counting(kafka, topic) as written, _running(command, settings) as process:
            return _rate(written, rows, process)
    finally:
        _drop_slots(dsn)
        postgres.drop_database(url.database)
        kafka.delete_topic(topic)


def _drop_slots(dsn: str) -> None:
    """The server would keep its write-ahead log for a slot that nobody reads."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        here = "FROM pg_replication_slots WHERE database = current_database()"
        while connection.execute(f"SELECT 1 {here} AND active").fetchone():
            time.sleep(0.1)  # the server has not noticed yet that the relay is gone
        connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {here}")


@contextmanager
def _running(command: Sequence[str], settings: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    log = PYTHON_ENVIRONMENT.parent / "rival.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _counting(kafka: EmbeddedKafka, topic: str) -> Iterator[Callable[[], int]]:
    """The messages in the topic: a relay without transactions leaves no control records."""
    consumer = Consumer({**kafka.client_config(), "group.id": topic})
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    try:
        yield lambda: sum(consumer.get_watermark_offsets(one, timeout=30)[1] for one in partitions)
    finally:
        consumer.close()


def _rate(written: Callable[[], int], rows: int, process: subprocess.Popen[bytes], limit_s: float = 900.0) -> float:
    first_at, first, deadline = 0.0, 0, time.monotonic() + limit_s
    while (now := time.monotonic()) < deadline:
        count = written()
        if count and not first:
            first_at, first = now, count
        if count >= rows:
            return (count - first) / (now - first_at) if count > first else float("inf")
        if process.poll() is not None:
            raise RuntimeError(f"the relay ended with {process.returncode} after {count} of {rows} messages")
        time.sleep(0.02)
    raise RuntimeError(f"the relay has sent {written()} of {rows} messages in {limit_s:g} s")
