"""Group commit: ``writer.submit`` by many threads or tasks, against the unsafe way; and by one, against a plain block.

``PYTHONPATH=tests/proof python -m benchmarks --only group``
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks.async_tasks import Write as AsyncWrite
from benchmarks.async_tasks import ours_in_tasks, slice_of_tasks, unsafe_in_tasks
from benchmarks.calls import LEAST_CHANGE, Calls, Counting, in_new_process
from benchmarks.servers import Ground
from benchmarks.threads import LANES, Measured, shared_unsafe, slice_of_threads
from benchmarks.ways import METADATA, NATIVE, ROWS, UNSAFE, Write, ours
from dualwrite import AsyncDualWriter, AsyncTransaction, DualWriter, ProducerRecord, RowUnit, Transaction, WriterLimits
from dualwrite.interfaces import Observer

GROUP = "group commit"
GROUP_OF_TEXT = "group commit, INSERT as text"
GROUP_OF_ROWS = "group commit, RowUnit"
WAYS = (GROUP, GROUP_OF_TEXT, GROUP_OF_ROWS)
CALLERS = (1, 64)
INSERT, INSERT_AS_TEXT = "insert(table)", "text, by exec_driver_sql"
_ROW = insert(ROWS)
_TEXT = "INSERT INTO bench_rows (note) VALUES (%s)"

Figures = dict[str, dict[str, dict[str, float]]]
"""By number of callers, way and figure. Times in milliseconds."""


class Sizes(Observer):
    """Notes the number of units of each group."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def grouped(self, writer: str, units: int) -> None:
        del writer
        self.noted.append(units)


class Sliced:
    """The measurements of all ways, with the numbers of units.

    Args:
        counts: The numbers of callers.
        ways: The names of the ways.
    """

    def __init__(self, counts: Sequence[int], ways: Sequence[str], sizes: Sizes) -> None:
        self._sizes = sizes
        self._found = {count: {name: Measured() for name in ways} for count in counts}
        self._units: dict[tuple[int, str], list[int]] = {}

    @contextmanager
    def slice(self, count: int, name: str) -> Iterator[Measured]:
        """Measure one slice of a way."""
        self._sizes.noted.clear()
        yield self._found[count][name]
        self._units.setdefault((count, name), []).extend(self._sizes.noted)

    def figures(self) -> Figures:
        """Those of the page."""
        found: Figures = {}
        for count, ways in self._found.items():
            found[str(count)] = {}
            for name, measured in ways.items():
                found[str(count)][name] = figures = measured.figures()
                if units := self._units[count, name]:
                    figures["units of a group"] = statistics.median(units)
        return found


@contextmanager
def submitting(
    kafka: Mapping[str, str], engine: Engine, topic: str, sizes: Sizes, way: str
) -> Iterator[Callable[[Sequence[str]], Future[Any]]]:
    """This library's group commit in one of its ways, with its own producer."""
    with DualWriter(
        f"group-{topic}-{WAYS.index(way)}",
        kafka={**kafka, "dualwrite.engine": "native"},
        database=engine,
        limits=WriterLimits(max_lanes=LANES),
        telemetry=sizes,
    ) as writer:

        def submit(notes: Sequence[str]) -> Future[Any]:
            def unit(tx: Transaction) -> None:
                for note in notes:
                    tx.produce(topic, value=note)
                if way == GROUP_OF_TEXT:
                    tx.connection.exec_driver_sql(_TEXT, (notes[0],))
                else:
                    tx.connection.execute(insert(ROWS).values(note=notes[0]))

            return writer.submit(_row_unit(topic, notes) if way == GROUP_OF_ROWS else unit)

        yield submit


@contextmanager
def grouped(kafka: Mapping[str, str], engine: Engine, topic: str, sizes: Sizes, way: str) -> Iterator[Write]:
    """The same, with callers that wait for their units."""
    with submitting(kafka, engine, topic, sizes, way) as submit:
        yield lambda notes: submit(notes).result()


def count_units(kafka: Mapping[str, str], url: str, topic: str, way: str, groups: int = 20, units: int = 64) -> Calls:
    """Count the calls of a unit, in all threads. One caller submits all units of a group before it waits for them.

    Returns:
        Of the groups that were counted one by one, the one with the fewest calls: some groups are divided.
    """
    engine = create_engine(url)
    METADATA.create_all(engine)
    with Counting() as counting, submitting(kafka, engine, topic, Sizes(), way) as submit:

        def group() -> None:
            for future in [submit(["x"]) for _ in range(units)]:
                future.result()

        for _ in range(groups):
            group()
        found = [counting.of(group, 1) for _ in range(groups)]
    engine.dispose()
    fewest = min(found, key=lambda calls: calls.python)
    return replace(
        fewest,
        own=fewest.own / units,
        python=fewest.python / units,
        functions={name: calls / units for name, calls in fewest.functions.items()},
    )


def calls_of_units(ground: Ground) -> dict[str, dict[str, Any]]:
    """The calls of a unit of code and of a `RowUnit`, in new processes."""
    found = {}
    for way in (GROUP, GROUP_OF_ROWS):
        calls = in_new_process(count_units, ground.kafka, ground.url, ground.topic(1), way)
        functions = {name: round(times, 1) for name, times in calls.functions.items() if times >= LEAST_CHANGE}
        found[way] = {"own": calls.own, "python": calls.python, "functions": functions}
    return found


def _row_unit(topic: str, notes: Sequence[str]) -> RowUnit:
    return RowUnit(_ROW, {"note": notes[0]}, messages=[ProducerRecord(topic, note) for note in notes])


@asynccontextmanager
async def grouped_in_tasks(
    kafka: Mapping[str, str], engine: AsyncEngine, topic: str, sizes: Sizes, *, of_rows: bool = False
) -> AsyncIterator[AsyncWrite]:
    """The same of the tasks of an event loop."""
    name = f"group-of-tasks-{topic}-{of_rows}"
    settings: dict[str, Any] = {
        "limits": WriterLimits(max_lanes=LANES),
        "telemetry": sizes,
    }
    async with AsyncDualWriter(
        name, kafka={**kafka, "dualwrite.engine": "native"}, database=engine, **settings
    ) as writer:

        async def unit(tx: AsyncTransaction) -> None:
            await tx.produce(topic, value="x")
            await tx.connection.execute(insert(ROWS).values(note="x"))

        async def write() -> None:
            await writer.submit(_row_unit(topic, ["x"]) if of_rows else unit)

        yield write


def run(
    ground: Ground,
    *,
    callers: Sequence[int] = CALLERS,
    rounds: int = 3,
    slice_s: float = 2.5,
    warm_up_s: float = 1.0,
    inserts: int = 1000,
) -> dict[str, Any]:
    """Measure in slices, the ways in turn; and Python's processor time for an INSERT alone, in milliseconds.

    What has been imported is left to no garbage collection, as ``docs/group-commit.md`` advises: else each full one stops all
    threads for some 45 ms, and whether p99 holds these pauses is chance.
    """
    engine = create_engine(ground.url, pool_size=2 * LANES, max_overflow=0)
    METADATA.create_all(engine)
    alone = _inserts_alone(engine, inserts)
    engine.dispose()
    gc.collect()
    gc.freeze()
    try:
        return {
            "insert": alone,
            "calls": calls_of_units(ground),
            "threads": _by_threads(ground, callers, rounds, slice_s, warm_up_s),
            "tasks": asyncio.run(_by_tasks(ground, callers, rounds, slice_s, warm_up_s)),
        }
    finally:
        gc.unfreeze()


def _inserts_alone(engine: Engine, count: int) -> dict[str, float]:
    """One thread, one connection, one transaction."""
    found = {}
    with engine.connect() as connection:
        ways: dict[str, Callable[[], object]] = {
            INSERT: lambda: connection.execute(insert(ROWS).values(note="x")),
            INSERT_AS_TEXT: lambda: connection.exec_driver_sql(_TEXT, ("x",)),
        }
        for name, execute in ways.items():
            for number in range(count + 100):
                if number == 100:
                    began = time.process_time()
                execute()
            found[name] = 1000 * (time.process_time() - began) / count
    return found


def _by_threads(ground: Ground, callers: Sequence[int], rounds: int, slice_s: float, warm_up_s: float) -> Figures:
    engine = create_engine(ground.url, pool_size=2 * LANES, max_overflow=0)
    unsafes = create_engine(ground.url, pool_size=LANES, max_overflow=0, pool_timeout=60)
    topic, sizes = ground.topic(), Sizes()
    with ExitStack() as stack:
        ways: dict[str, Write] = {
            **{way: stack.enter_context(grouped(ground.kafka, engine, topic, sizes, way)) for way in WAYS},
            NATIVE: stack.enter_context(ours(ground.kafka, engine, topic, NATIVE, lanes=LANES)),
            UNSAFE: stack.enter_context(shared_unsafe(ground.kafka, unsafes, topic)),
        }
        found = Sliced(callers, list(ways), sizes)
        for write in ways.values():
            slice_of_threads(write, max(callers), warm_up_s, 0.0, Measured())  # makes all lanes
        for _ in range(rounds):
            for count in callers:
                for name, write in ways.items():
                    with found.slice(count, name) as measured:
                        slice_of_threads(write, count, slice_s, 0.0, measured)
    engine.dispose()
    unsafes.dispose()
    return found.figures()


async def _by_tasks(ground: Ground, callers: Sequence[int], rounds: int, slice_s: float, warm_up_s: float) -> Figures:
    engine, unsafes = (
        create_async_engine(ground.url, pool_size=LANES, max_overflow=0, pool_timeout=60) for _ in range(2)
    )
    topic, sizes = ground.topic(), Sizes()
    async with AsyncExitStack() as stack:
        ways: dict[str, AsyncWrite] = {
            GROUP: await stack.enter_async_context(grouped_in_tasks(ground.kafka, engine, topic, sizes)),
            GROUP_OF_ROWS: await stack.enter_async_context(
                grouped_in_tasks(ground.kafka, engine, topic, sizes, of_rows=True)
            ),
            NATIVE: await stack.enter_async_context(ours_in_tasks(ground.kafka, engine, topic, NATIVE)),
            UNSAFE: await stack.enter_async_context(unsafe_in_tasks(ground.kafka, unsafes, topic)),
        }
        found = Sliced(callers, list(ways), sizes)
        for write in ways.values():
            await slice_of_tasks(write, max(callers), warm_up_s, 0.0, Measured())
        for _ in range(rounds):
            for count in callers:
                for name, write in ways.items():
                    with found.slice(count, name) as measured:
                        await slice_of_tasks(write, count, slice_s, 0.0, measured)
    await engine.dispose()
    await unsafes.dispose()
    return found.figures()
