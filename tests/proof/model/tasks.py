"""Random schedules of the tasks of an event loop: ``make tasks N=10000 SEED=0``. Exit code 0: clean; 1: something was found.

A seed draws how many lanes there are, what each task does (blocks, bound sessions, units of groups as code or as rows; in some schedules also plain sessions of a
second writer), how long each request and each statement takes, at which await a task is cancelled and which fail point raises. Nothing
of it depends on time or threads: a seed runs the same again. The SQL, SQLAlchemy, its drivers and the file are real.

With ``--mistake NAME`` the product is broken on purpose: then finding it is success.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from harness.cancelling import Cancelling, at_last, at_once
from harness.databases import prepare
from harness.mistakes import planted
from harness.queue_order import QueueOrder, watch_queue
from harness.served import SETTINGS
from harness.stepped import Inline, SteppedKafka, SteppedLoop, async_engine, engine
from sqlalchemy.ext.asyncio import async_sessionmaker

from dualwrite import AsyncDualWriter, WriterLimits, failpoints, waiting
from dualwrite.failpoints import FailpointError
from dualwrite.writing import lane_pool, writer_resources
from model.results import machine
from model.task_ways import WAYS, Plain, Ways, Work, WrongOutcome

RESULTS = Path(__file__).with_name("tasks.json")
_TELL_EVERY_S: Final = 10
_LONG_S: Final = 10_000.0


class Ground:
    """The loop and the database of many schedules."""

    def __init__(self, folder: str) -> None:
        file = f"{folder}/test.db"
        self.database = prepare("sqlite", f"sqlite:///{file}")
        self.loop = SteppedLoop()
        self.own = engine(file, self.loop)
        self.blocks = async_engine(file, self.loop)
        self.loop.run_until_complete(self._connect_once())

    async def _connect_once(self) -> None:
        """An engine's first connection does what no later one does."""
        self.own.connect().close()
        async with self.blocks.connect():
            pass
        await self.blocks.dispose()
        self.own.dispose()

    def run(self, seed: int) -> Counter[str]:
        """Run the schedule of this seed, and return what has happened in it.

        Raises:
            Exception: Something was found.
        """
        self.loop.begin(seed)
        with self.loop.on_its_clock():
            return self.loop.run_until_complete(_Schedule(self, seed).run())

    def close(self) -> None:
        """Close all."""
        self.loop.run_until_complete(self.blocks.dispose())
        self.own.dispose()
        self.database.dispose()
        self.loop.close()


class _Schedule:
    def __init__(self, ground: Ground, seed: int) -> None:
        self.ground = ground
        self.loop = ground.loop
        self.random = Random(seed)
        self.name = f"tasks-{seed}"
        self.kafka = SteppedKafka(ground.loop)
        self.counts: Counter[str] = Counter(schedules=1)
        self.works: list[Work] = []
        self.order = QueueOrder()
        self.raises = False
        self.raise_in = 0
        self.lanes = self.random.choice((1, 2, 2, 3))
        self.has_plain = self.random.random() < 0.3
        self.raises_at_all = self.random.random() < 0.6

    async def run(self) -> Counter[str]:
        with without_threads(self.kafka) as self.order, failpoints.watched(self._passed):
            await self._write()
            await _come_to_rest()
            await self._settle()
            await _come_to_rest()
        self._compare()
        await self.ground.blocks.dispose()
        self.ground.own.dispose()
        await _come_to_rest()
        return self.counts

    def _writer(self) -> AsyncDualWriter:
        return AsyncDualWriter(
            self.name,
            kafka=SETTINGS,
            database=self.ground.blocks,
            own_engine=self.ground.own,
            limits=WriterLimits(
                max_lanes=self.lanes, lane_timeout_s=1000.0, group_units=self.random.choice((1, 3, 500))
            ),
        )

    async def _write(self) -> None:
        writer = self._writer()
        plain = Plain(f"{self.name}-plain", self.loop, self.ground.own) if self.has_plain else None
        await writer.open()
        if plain is not None:
            await plain.open()
        sessions = async_sessionmaker(self.ground.blocks)
        do = Ways(writer, sessions, plain)
        tasks = [
            self.loop.create_task(self._task(do, [self._work() for _ in range(self.random.randint(1, 3))]))
            for _ in range(self.random.randint(3, 8))
        ]
        self.raises = self.raises_at_all
        for task in tasks:
            await task
        self.raises = False
        if plain is not None:
            await plain.close()
        await writer.close()

    def _work(self) -> Work:
        way = "plain session" if self.has_plain and self.random.random() < 0.3 else self.random.choice(WAYS)
        fails, is_hasty = self.random.random() < 0.15, self.random.random() < 0.2
        self.works.append(Work(len(self.works), way, fails, 0.001 + self.loop.some_time_s() if is_hasty else None))
        return self.works[-1]

    async def _task(self, do: Ways, works: Sequence[Work]) -> None:
        for work in works:
            await asyncio.sleep(self.loop.some_time_s())
            self.counts[work.way] += 1
            error, raised = None, self.counts["fail points raised"]
            try:
                await self._cancelled(do(work), work)
            except (Exception, asyncio.CancelledError) as ended:  # noqa: BLE001 - judged below
                error = ended
            work.note(error, undisturbed=raised == self.counts["fail points raised"])
            self.counts[f"told: {work.told}"] += 1

    async def _cancelled(self, coroutine: Any, work: Work) -> None:
        """Await it, and cancel it at some await of it; or never."""
        if work.way == "plain session" or self.random.random() < 0.5:
            await coroutine
            return
        # Later ones are rarer, and most of them follow the decision.
        at = self.random.randint(1, self.random.choice((8, 40, 70)))
        cancelling = Cancelling(coroutine, at, self.random.choice((at_once, at_last)), lambda: True)
        try:
            await cancelling
        finally:
            self.counts["cancellations"] += cancelling.came

    def _passed(self, point: str) -> None:
        self.counts["fail points"] += 1
        if not self.raises or not waiting.here().cancelled:
            return
        if self.raise_in == 0:
            self.raise_in = self.random.randint(1, 120)
        self.raise_in -= 1
        if self.raise_in == 0:
            self.counts["fail points raised"] += 1
            raise FailpointError(point)

    async def _settle(self) -> None:
        """A next owner settles what was left."""
        async with self._writer():
            pass
        if self.has_plain:
            last = Plain(f"{self.name}-plain", self.loop, self.ground.own)
            await last.open()
            await last.close()

    def _compare(self) -> None:
        self.order.assert_fair()
        self.counts["lanes given"] += self.order.count
        rows = Counter(str(number) for (number,) in self.ground.database.query("SELECT id FROM orders"))
        messages = Counter(map(str, self.kafka.visible()))
        self.ground.database.execute("DELETE FROM orders")
        if stray := sorted(row for row in rows if row.startswith("-")):
            raise WrongOutcome(f"rows {stray} of what went on after its unit had failed")
        for work in self.works:
            work.check(rows, messages)
        self.counts["dual writes and units"] += len(self.works)
        self.counts["committed on both sides"] += len(rows)


async def _come_to_rest() -> None:
    """Let all that still goes on end, and sessions that were dropped be collected: none of it may reach the next schedule."""
    await asyncio.sleep(_LONG_S)
    gc.collect()
    await asyncio.sleep(_LONG_S)
    [_] = asyncio.all_tasks()


@contextmanager
def without_threads(kafka: SteppedKafka) -> Iterator[QueueOrder]:
    """Let writers use this Kafka, and no thread in the background. Yields the order in which they give lanes."""
    with pytest.MonkeyPatch.context() as patch:
        kafka.plant(patch)
        patch.setattr(writer_resources, "ThreadPoolExecutor", Inline)
        patch.setattr(lane_pool.Lanes, "open", partialmethod(lane_pool.Lanes.open, keep_house=False))
        yield watch_queue(patch)


@contextmanager
def ground() -> Iterator[Ground]:
    """The ground of some schedules, without logging, warnings and collections of garbage."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a driver that is cancelled while it connects leaves the rest to the garbage collector
        logging.disable(logging.CRITICAL)
        made = Ground(folder)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield made
        finally:
            made.close()
            gc.enable()
            gc.unfreeze()
            logging.disable(logging.NOTSET)


def run(first: int, count: int, mistake: str = "", tell: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Run the schedules of so many seeds; the first finding ends it.

    Returns:
        What has happened, and the finding.
    """
    happened: Counter[str] = Counter()
    finding = None
    with planted(mistake) if mistake else nullcontext(), ground() as made:
        for seed in range(first, first + count):
            try:
                happened += made.run(seed)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                finding = {"seed": seed, "what": f"{type(error).__name__}: {error}"}
                break
            tell(seed + 1 - first)
    return {"happened": dict(happened), "finding": finding}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model.tasks", description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first schedule's seed; the others follow (0)")
    parser.add_argument("--mistake", default="", help="a mistake of harness.mistakes, planted into the product")
    parser.add_argument("--keep", action="store_true", help="keep the figures for the page")
    options = parser.parse_args()
    began, shown = time.monotonic(), [time.monotonic()]

    def tell(done: int) -> None:
        if (now := time.monotonic()) - shown[0] > _TELL_EVERY_S:
            shown[0] = now
            print(f"{done:,} of {options.schedules:,}, {done / (now - began):.0f} a second", flush=True)

    found = run(options.seed, options.schedules, options.mistake, tell)
    seconds = time.monotonic() - began
    print(json.dumps(found, indent=1))
    print(f"{found['happened'].get('schedules', 0):,} schedules in {seconds:.0f} s")
    if options.keep:
        kept = {
            **found,
            "command": f"make tasks N={options.schedules} SEED={options.seed}",
            "seconds": round(seconds),
            "machine": machine(),
        }
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int((found["finding"] is not None) != bool(options.mistake))


if __name__ == "__main__":
    sys.exit(main())
