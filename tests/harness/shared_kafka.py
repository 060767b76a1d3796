"""One broker for all workers of a run: each of them would start and warm up a JVM of its own.

The process that starts the workers listens, and starts the broker when the first of them asks for it.
"""

from __future__ import annotations

import secrets
import types
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from threading import Thread
from typing import Any

import pytest

from dualwrite.testing import EmbeddedKafka

PLACE = "shared_kafka"


class SharedKafka:
    """The broker, for that many workers, each with a proxy of its own; it is stopped by `close`."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
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
        kafka = EmbeddedKafka(proxies=self._workers)
        asked = 0
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    if not kafka.running:
                        self._later.enter_context(kafka)
                    # A worker that takes the place of a dead one takes its proxy, too.
                    ports = kafka.proxy_ports(asked % self._workers)
                    connection.send((kafka.bootstrap_servers, kafka.cluster_id, ports))
                except Exception as error:  # noqa: BLE001 - the worker's test fails with it
                    connection.send(error)
            asked += 1


class BorrowedKafka(EmbeddedKafka):
    """The shared broker as a worker sees it: to connect to, straight or by one proxy, and never to stop."""

    def __init__(self, bootstrap_servers: str, cluster_id: str, ports: tuple[int, int]) -> None:
        super().__init__()
        self._external = bootstrap_servers
        self.cluster_id = cluster_id
        self._ports = ports

    def proxy_ports(self, number: int = 0, *, broker: int = 1) -> tuple[int, int]:
        assert (number, broker) == (0, 1)
        return self._ports


def plugin(workerinput: Mapping[str, Any]) -> types.SimpleNamespace:
    """The fixture for a worker that was told the place of the shared broker."""
    address, key = workerinput[PLACE]

    @pytest.fixture(scope="session")
    def dualwrite_kafka() -> EmbeddedKafka:
        with Client(tuple(address), authkey=bytes.fromhex(key)) as asking:
            found = asking.recv()
        if isinstance(found, Exception):
            raise found
        return BorrowedKafka(*found)

    return types.SimpleNamespace(dualwrite_kafka=dualwrite_kafka)
