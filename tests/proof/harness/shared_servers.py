"""Servers that all workers of a run share: each of them would start one, and warm up a JVM of its own.

The process that starts the workers listens, and starts a server when the first of them asks for it.
"""

from __future__ import annotations

import secrets
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dualwrite.testing import EmbeddedKafka, EmbeddedMariaDB

STEADY = {"broker.heartbeat.interval.ms": "1000", "broker.session.timeout.ms": "6000"}
"""Settings of a broker that no test kills: it takes a third less processor time while it is idle."""
KAFKA = "shared_kafka"
MARIADB = "shared_mariadb"


class Shared:
    """One server; it is stopped by `close`.

    Args:
        server: The server, not started.
        told: What the n-th worker that asks is told, once it runs.
    """

    def __init__(self, server: Any, told: Callable[[int], object]) -> None:
        self._server = server
        self._told = told
        self._key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=self._key)
        self._later = ExitStack()
        Thread(target=self._answer, daemon=True).start()

    @property
    def place(self) -> tuple[Any, str]:
        """Where it listens, and the key to it: what a worker is given."""
        return self._listener.address, self._key.hex()

    def close(self) -> None:
        self._listener.close()
        self._later.close()

    def _answer(self) -> None:
        asked = 0
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    if not self._server.running:
                        self._later.enter_context(self._server)
                    connection.send(self._told(asked))
                except Exception as error:  # noqa: BLE001 - the worker's test fails with it
                    connection.send(error)
            asked += 1


def shared_kafka(workers: int) -> Shared:
    """The broker, for that many workers, each with a proxy of its own."""
    kafka = EmbeddedKafka(STEADY, proxies=workers)
    # A worker that takes the place of a dead one takes its proxy, too.
    return Shared(kafka, lambda asked: place_of(kafka, asked % workers))


def place_of(kafka: EmbeddedKafka, number: int = 0) -> tuple[Any, ...]:
    """The arguments of :class:`BorrowedKafka`, with the proxy of that number."""
    return kafka.bootstrap_servers, kafka.cluster_id, kafka.proxy_ports(number), data_directory(kafka)


def data_directory(kafka: EmbeddedKafka) -> Path:
    """Where the only broker has its logs."""
    if isinstance(kafka, BorrowedKafka):
        return kafka.data
    [broker] = kafka._members
    return broker.process.directory / "data"


def shared_mariadb() -> Shared:
    """The server, in which each test makes a database of its own."""
    server = EmbeddedMariaDB()
    return Shared(server, lambda _: server.url)


def _ask(place: tuple[Any, str]) -> Any:
    address, key = place
    with Client(tuple(address), authkey=bytes.fromhex(key)) as asking:
        found = asking.recv()
    if isinstance(found, Exception):
        raise found
    return found


class BorrowedKafka(EmbeddedKafka):
    """The shared broker as a worker sees it: to connect to, straight or by one proxy, and never to stop."""

    def __init__(self, bootstrap_servers: str, cluster_id: str, ports: tuple[int, int], data: Path) -> None:
        super().__init__()
        self._external = bootstrap_servers
        self.cluster_id = cluster_id
        self._ports = ports
        self.data = data

    def proxy_ports(self, number: int = 0, *, broker: int = 1) -> tuple[int, int]:
        assert (number, broker) == (0, 1)
        return self._ports


def plugin(told: Mapping[str, Any]) -> types.ModuleType:
    """The fixtures for a worker that was told the places of the shared servers."""

    @pytest.fixture(scope="session")
    def dualwrite_kafka() -> EmbeddedKafka:
        return BorrowedKafka(*_ask(told[KAFKA]))

    @pytest.fixture(scope="session")
    def shared_mariadb_url() -> str:
        return str(_ask(told[MARIADB]))

    fixtures: dict[str, Any] = {"shared_mariadb_url": shared_mariadb_url}
    if KAFKA in told:
        fixtures["dualwrite_kafka"] = dualwrite_kafka
    return plugin_of(fixtures)


def plugin_of(fixtures: Mapping[str, Any]) -> types.ModuleType:
    """A plugin with these fixtures. It is a module: in any other object but a class, pytest finds none."""
    made = types.ModuleType("plugin")
    vars(made).update(fixtures)
    return made
