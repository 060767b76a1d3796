"""Processor time of a web request, in threads and in tasks: one block, against the same request with a row for an outbox.

FastAPI under uvicorn, in a process of its own; its plain functions run in threads, as Flask's do. Nothing relays the outbox here.
``PYTHONPATH=tests/proof python -m benchmarks --only web`` (a minute)
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing
from http.client import HTTPConnection
from multiprocessing.synchronize import Event
from typing import Any

from sqlalchemy import create_engine, insert
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.async_tasks import ours_in_tasks, unsafe_in_tasks
from benchmarks.servers import Ground, p50
from benchmarks.threads import LANES, shared_unsafe
from benchmarks.ways import METADATA, NATIVE, OUTBOX_TABLE, ROWS, UNSAFE, ours, process

THREADS, TASKS = "threads", "tasks"
BLOCK, OUTBOX_ROW = NATIVE, "a row for an outbox"
WAYS = (BLOCK, OUTBOX_ROW, UNSAFE)
CLIENTS = 8


def serve(kafka: Mapping[str, str], url: str, topic: str, port: int, ready: Event, stop: Event) -> None:
    """The web server: an endpoint for each way, and one that tells how much processor time the process has used."""
    asyncio.run(_serve(kafka, url, topic, port, ready, stop))


async def _serve(kafka: Mapping[str, str], url: str, topic: str, port: int, ready: Event, stop: Event) -> None:
    import uvicorn  # the process that measures needs neither
    from fastapi import FastAPI

    engine, others = (create_engine(url, pool_size=size, max_overflow=0) for size in (2 * LANES, 2 * LANES))
    tasks, other_tasks = (create_async_engine(url, pool_size=size, max_overflow=0) for size in (LANES, 2 * LANES))
    app = FastAPI()
    async with AsyncExitStack() as later:
        with ExitStack() as stack:
            write = stack.enter_context(ours(kafka, engine, topic, NATIVE, lanes=LANES))
            unsafe = stack.enter_context(shared_unsafe(kafka, others, topic))
            write_in_task = await later.enter_async_context(ours_in_tasks(kafka, tasks, topic, NATIVE))
            unsafe_in_task = await later.enter_async_context(unsafe_in_tasks(kafka, other_tasks, topic))

            def outbox() -> None:
                with others.begin() as connection:
                    connection.execute(insert(ROWS).values(note="x"))
                    connection.execute(insert(OUTBOX_TABLE).values(note="x"))

            async def outbox_in_task() -> None:
                async with other_tasks.begin() as connection:
                    await connection.execute(insert(ROWS).values(note="x"))
                    await connection.execute(insert(OUTBOX_TABLE).values(note="x"))

            in_threads: Iterable[Callable[[], None]] = (lambda: write(["x"]), outbox, lambda: unsafe(["x"]))
            in_tasks: Iterable[Callable[[], Awaitable[None]]] = (write_in_task, outbox_in_task, unsafe_in_task)
            for number, (call, call_in_task) in enumerate(zip(in_threads, in_tasks, strict=True)):
                app.post(f"/{THREADS}/{number}")(_endpoint(call))
                app.post(f"/{TASKS}/{number}")(_endpoint_in_task(call_in_task))
            app.get("/processor")(lambda: time.process_time())  # noqa: PLW0108 - a built-in function has no signature
            server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))

            def end() -> None:
                while not server.started:
                    time.sleep(0.01)
                ready.set()
                stop.wait()
                server.should_exit = True

            ending = threading.Thread(target=end)
            ending.start()
            await server.serve()
            ending.join()
    for pool in (engine, others):
        pool.dispose()
    for pool in (tasks, other_tasks):
        await pool.dispose()


def _endpoint(call: Callable[[], None]) -> Callable[[], dict[str, str]]:
    def place_order() -> dict[str, str]:
        call()
        return {"order": "placed"}

    return place_order


def _endpoint_in_task(call: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[dict[str, str]]]:
    async def place_order() -> dict[str, str]:
        await call()
        return {"order": "placed"}

    return place_order


def run(ground: Ground, *, rounds: int = 7, requests: int = 50, warm_up: int = 20) -> dict[str, dict[str, float]]:
    """Measure in slices, the ways in turn.

    Args:
        ground: The servers.
        rounds: How many slices of each way.
        requests: How many each of the clients sends in a slice.
        warm_up: How many of them in the first slice, which is not measured.

    Returns:
        Median milliseconds of the web server's processor time for a request, by threads or tasks, and way.
    """
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    engine.dispose()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    samples: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in WAYS} for kind in (THREADS, TASKS)}
    with process(serve, ground.kafka, ground.url, ground.topic(), port), ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(rounds + 1):
            count = requests if number else warm_up
            for kind, by_way in samples.items():
                for place, found in enumerate(by_way.values()):
                    before = _processor_s(port)
                    list(pool.map(_ask, [port] * CLIENTS, [f"/{kind}/{place}"] * CLIENTS, [count] * CLIENTS))
                    if number:
                        found.append(1000 * (_processor_s(port) - before) / (CLIENTS * count))
    return {kind: {way: p50(found) for way, found in by_way.items()} for kind, by_way in samples.items()}


def _ask(port: int, path: str, times: int) -> None:
    """One client, on one connection."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        for _ in range(times):
            connection.request("POST", path)
            answer = connection.getresponse()
            if answer.read() != b'{"order":"placed"}':
                raise RuntimeError(f"{path}: {answer.status}")


def _processor_s(port: int) -> float:
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/processor")
        found: float = json.loads(connection.getresponse().read())
        return found


def section(
    figures: Mapping[str, Mapping[str, float]], *, table: Callable[[Sequence[str], Any], list[str]]
) -> list[str]:
    """The section of ``docs/benchmarks.md``."""
    return [
        "## A web request",
        "",
        f"FastAPI under uvicorn, one process, {CLIENTS} clients. Endpoints that are plain functions run in threads, with "
        "`DualWriter`; coroutines run as tasks, with `AsyncDualWriter`. Milliseconds of the server's processor time for a "
        "request, its framework and all of its threads included, medians; each request writes one row, and one message or "
        "one row for an outbox. The relay of that outbox, which would need processor time too, does not run.",
        "",
        *table(
            ("endpoints", *WAYS),
            ([kind, *(f"{by_way[way]:.2f}" for way in WAYS)] for kind, by_way in figures.items()),
        ),
        *(
            f"- {kind.capitalize()}: a block takes **{by_way[BLOCK] / by_way[OUTBOX_ROW]:.2f}** of the processor time of a row for an "
            f"outbox (aim: at most {aim}), **{by_way[BLOCK] / by_way[UNSAFE]:.2f}** of the unsafe way's."
            for (kind, by_way), aim in zip(figures.items(), (1.8, 1.6), strict=True)
        ),
        "",
        "Where the time goes: the framework's part is the same for all. A row for an outbox is one more statement of the "
        "database's; a block sends two requests to the broker and takes their answers, checks its row, records the decision, "
        "and is told how transactions have ended: the [functions of a dual write](#the-calls-of-a-dual-write). In tasks each of "
        "its waits goes through the event loop as well: see the [samples of tasks](#tasks-of-one-event-loop-8-transactions-at-a-time).",
        "",
    ]
