"""Servers behind a network with a delay: a process that passes all bytes on, each some time after it came, in both directions."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from sqlalchemy import make_url

from benchmarks.servers import Ground
from benchmarks.ways import SPAWN, process
from dualwrite.testing.servers.embedded import LOOPBACK


@dataclass(frozen=True)
class Far:
    """Both servers, behind the delay.

    Attributes:
        kafka: The configuration of a client.
        url: The database.
        delay: Its value is the delay in seconds, each way; it may be changed at any time.
    """

    kafka: Mapping[str, str]
    url: str
    delay: Any


@contextmanager
def far_away(ground: Ground) -> Iterator[Far]:
    """The broker and PostgreSQL at a distance that can be chosen. The broker directs its clients to the delaying process."""
    upstream, front = ground.kafka_server.proxy_ports()
    delay = SPAWN.Value("d", 0.0)
    with (
        socket.create_server((LOOPBACK, front), backlog=128) as kafka,
        socket.create_server((LOOPBACK, 0), backlog=128) as postgres,
    ):
        port = postgres.getsockname()[1]
        with process(_pass_on, [(kafka, upstream), (postgres, ground.postgres.port)], delay):
            yield Far(
                {**ground.kafka, "bootstrap.servers": f"{LOOPBACK}:{front}"},
                make_url(ground.url).set(host=LOOPBACK, port=port).render_as_string(hide_password=False),
                delay,
            )


@contextmanager
def far_database(ground: Ground) -> Iterator[Far]:
    """PostgreSQL at a distance that can be chosen; the broker is where it is."""
    delay = SPAWN.Value("d", 0.0)
    with socket.create_server((LOOPBACK, 0), backlog=128) as postgres:
        port = postgres.getsockname()[1]
        with process(_pass_on, [(postgres, ground.postgres.port)], delay):
            url = make_url(ground.url).set(host=LOOPBACK, port=port)
            yield Far(ground.kafka, url.render_as_string(hide_password=False), delay)


def _pass_on(listeners: list[tuple[socket.socket, int]], delay: Any, ready: Event, stop: Event) -> None:
    for listener, port in listeners:
        threading.Thread(target=_accept, args=(listener, port, delay), daemon=True).start()
    ready.set()
    stop.wait()


def _accept(listener: socket.socket, port: int, delay: Any) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection((LOOPBACK, port))
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target in ((near, far), (far, near)):
            due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=_take, args=(source, due, delay), daemon=True).start()
            threading.Thread(target=_give, args=(target, due), daemon=True).start()


def _take(source: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]], delay: Any) -> None:
    data = b"first"
    while data:
        try:
            data = source.recv(1 << 20)
        except OSError:
            data = b""
        due.put((time.perf_counter() + delay.value, data))


def _give(target: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    data = b"first"
    with contextlib.suppress(OSError):
        while data:
            at, data = due.get()
            if (rest := at - time.perf_counter()) > 0:
                time.sleep(rest)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
