"""The ground of all benchmarks: embedded servers, a fresh topic and database, and how samples are reported."""

from __future__ import annotations

import os
import platform
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine

from dualwrite.migrations import upgrade
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres
from dualwrite.testing.servers import kafka as kafka_broker
from dualwrite.testing.servers.embedded import kafka_jars

KAFKAS_OWN_JVM = ("-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
"""The options of Kafka's start script. An embedded broker has others, by which it starts sooner, and then is slower."""


@dataclass(frozen=True)
class Ground:
    """The servers of one benchmark."""

    kafka_server: EmbeddedKafka
    postgres: EmbeddedPostgres
    kafka: dict[str, str]
    url: str

    def topic(self, partitions: int = 2) -> str:
        """A fresh topic."""
        return self.kafka_server.create_topic(f"bench-{secrets.token_hex(4)}", partitions)


@contextmanager
def servers(
    properties: Mapping[str, str] | None = None, *, brokers: int = 1, database: Mapping[str, str] | None = None
) -> Iterator[Ground]:
    """Start the servers and make a migrated database.

    Args:
        properties: Of the brokers, beside or instead of those that tests have.
        brokers: How many.
        database: Settings of PostgreSQL.
    """
    kafka_broker.JVM_OPTIONS = KAFKAS_OWN_JVM
    with EmbeddedKafka(properties, brokers=brokers) as kafka, EmbeddedPostgres(database) as postgres:
        url = postgres.create_database("bench")
        engine = create_engine(url)
        with engine.connect() as connection:
            upgrade(connection)
        engine.dispose()
        yield Ground(kafka, postgres, dict(kafka.client_config()), url)


def noise(size: int) -> str:
    """A CTE of so many bytes of text that lz4 cannot make shorter, as ``value``, by ``n`` from 0 to 19,999.

    A backlog repeats them, at distances that are beyond lz4's window of 64 KiB.
    """
    one = "left(translate(encode(sha512(convert_to(n || '.' || m, 'UTF8')), 'base64'), E'\\n', ''), 86)"
    value = f"SELECT left(string_agg({one}, ''), {size}) FROM generate_series(0, {size // 86}) m"
    return f"noise AS MATERIALIZED (SELECT n, ({value}) AS value FROM generate_series(0, 19999) n)"


def peak_mib() -> float:
    """The most memory that this process has had.

    Not by ``getrusage``: a process that was started by a large one shows the size of that one.
    """
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def machine() -> str:
    """The machine and the versions that this was measured with, in one line."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def kafka_version() -> str:
    """The version of the embedded brokers."""
    return kafka_jars().name.split("-")[1]


def p50(samples: Sequence[float]) -> float:
    """The median."""
    return statistics.median(samples)


def p95(samples: Sequence[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(samples, n=20)[18]
