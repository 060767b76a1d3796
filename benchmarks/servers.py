"""The ground of all benchmarks: embedded servers, a fresh topic and database, and how samples are reported."""

from __future__ import annotations

import os
import platform
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import create_engine

from dualwrite.migrations import upgrade
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres
from dualwrite.testing.servers import kafka as kafka_broker

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
def servers(properties: Mapping[str, str] | None = None, *, brokers: int = 1) -> Iterator[Ground]:
    """Start the servers and make a migrated database.

    Args:
        properties: Of the brokers, beside or instead of those that tests have.
        brokers: How many.
    """
    kafka_broker.JVM_OPTIONS = KAFKAS_OWN_JVM
    with EmbeddedKafka(properties, brokers=brokers) as kafka, EmbeddedPostgres() as postgres:
        url = postgres.create_database("bench")
        engine = create_engine(url)
        with engine.connect() as connection:
            upgrade(connection)
        engine.dispose()
        yield Ground(kafka, postgres, dict(kafka.client_config()), url)


def machine() -> str:
    """The machine and the versions that this was measured with, in one line."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def p50(samples: Sequence[float]) -> float:
    """The median."""
    return statistics.median(samples)


def p95(samples: Sequence[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(samples, n=20)[18]
