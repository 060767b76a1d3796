"""A writer's two sides without servers: simulated ones step by step, or a Kafka that answers at once, and SQLite."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness.databases import Database, prepare, sqlite_url
from harness.served import SETTINGS, TOPIC, ServedKafka
from harness.simulated import Servers, simulated

from dualwrite import DualWriter, Transaction


class Shop:
    """A migrated SQLite database with a table ``orders``, and a simulated Kafka."""

    def __init__(self, kafka: ServedKafka, database: Database) -> None:
        self.kafka = kafka
        self.database = database
        self.engine = database.engines[0]

    def writer(self, name: str = "orders", **kwargs: Any) -> DualWriter:
        return DualWriter(name, **{"kafka": SETTINGS, "database": self.engine, **kwargs})

    @staticmethod
    def put(tx: Transaction, number: int) -> None:
        """A row and a message of this number."""
        tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
        tx.produce(TOPIC, str(number), partition=0)

    @property
    def rows(self) -> list[str]:
        return [str(found) for (found,) in self.database.query("SELECT id FROM orders ORDER BY id")]

    @property
    def messages(self) -> list[object]:
        return self.kafka.visible()

    def both_have(self, *numbers: int) -> bool:
        return self.rows == self.messages == [str(number) for number in numbers]

    def state(self, name: str = "orders") -> Any:
        [found] = self.database.query(
            f"SELECT * FROM {self.database.state_table} WHERE transactional_id = :id", id=name
        )
        return found


@pytest.fixture
def waiting_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process beside this one, which waits until it is killed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


@pytest.fixture
def sqlite() -> Iterator[sqlite3.Connection]:
    """A database in memory, in autocommit."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        yield connection


@pytest.fixture
def servers() -> Iterator[Servers]:
    with simulated() as found:
        yield found


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    kafka = ServedKafka()
    kafka.plant(monkeypatch)
    database = prepare("sqlite", sqlite_url(tmp_path))
    yield Shop(kafka, database)
    database.dispose()
