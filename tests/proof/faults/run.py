"""Plays many cases side by side: they mostly wait."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.places import PROOF

from dualwrite import DualWriter
from dualwrite.kafka.config import EngineName
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres
from faults.case import run_case
from faults.cells import TWO_PHASE, Cell, Series
from faults.late import Late
from faults.silence import Draw, Silence
from faults.stage import OwnerContext, Result, Slot

TWO_PHASE_COMMIT = {"unstable.api.versions.enable": "true", "transaction.two.phase.commit.enable": "true"}
Task = tuple["Cell | Series", int]
"""A cell, or another series, and a seed."""


def tasks(cells: Sequence[Cell], seeds: Iterable[int], series: Mapping[Series, Iterable[int]]) -> list[Task]:
    """All of them, in an order that shows something of everything early."""
    found: list[Task] = [(cell, seed) for seed in seeds for cell in cells]
    found += [(name, seed) for name, its_seeds in series.items() for seed in its_seeds]
    random.Random(0).shuffle(found)
    return found


def needs_two_phase(task: Task) -> bool:
    """Whether it needs a broker with KIP-939's two-phase commit."""
    return isinstance(task[0], Cell) and task[0].request == TWO_PHASE


def owners_can_import() -> None:
    """Let the server that forks the owners find this package."""
    paths = [str(PROOF), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


@contextlib.contextmanager
def servers(slots: int, producer_engine: EngineName, *, two_phase: bool = False) -> Iterator[OwnerContext]:
    """A broker with room for so many proxies, if asked for with KIP-939's two-phase commit, and a database."""
    owners_can_import()
    properties = TWO_PHASE_COMMIT if two_phase else {"transaction.max.timeout.ms": "2147483647"}
    with EmbeddedKafka(properties, proxies=slots) as kafka, EmbeddedPostgres() as postgres:
        context = OwnerContext.prepare(kafka, postgres, producer_engine)
        # The first transaction of a broker makes its internal topics, which takes longer than the cases' patience.
        with DualWriter("warm-up", kafka=kafka.client_config(), database=context.engine):
            pass
        try:
            yield context
        finally:
            context.close()


def play(
    context: OwnerContext,
    todo: Sequence[Task],
    slots: int,
    *,
    mistake: str = "",
    stop_after_s: float = float("inf"),
    log: Path | None = None,
    stopped: threading.Event | None = None,
) -> list[tuple[Task, Result]]:
    """Play them all, or as many as there is time for. What became of each.

    Args:
        context: The servers.
        todo: What to play.
        slots: How many at a time.
        mistake: A planted mistake.
        stop_after_s: No task is begun after that time.
        log: Where each result is written to as soon as it is there.
        stopped: Once set, no task is begun.
    """
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in todo:
        waiting.put(task)
    results: list[tuple[Task, Result]] = []
    end = time.monotonic() + stop_after_s

    def work(number: int) -> None:
        slot = Slot(context, number)
        with contextlib.closing(slot), contextlib.suppress(queue.Empty):
            while time.monotonic() < end and not (stopped and stopped.is_set()):
                task = waiting.get_nowait()
                result = play_one(slot, task, mistake=mistake)
                results.append((task, result))
                told(task, result)

    def told(task: Task, result: Result) -> None:
        if log is not None:
            keep_line(log, name_of(task), task[1], result, context.producer_engine)
        if result.findings:
            show_story(f"{name_of(task)}, seed {task[1]}", result)
        if len(results) % 100 == 0:
            sys.stdout.write(f"{len(results)} of {len(todo)}\n")
            sys.stdout.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(slots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def keep_line(log: Path, name: str, seed: int, result: Result, engine: EngineName) -> None:
    """Append one result, as a line of JSON. The story only where something is wrong: it is long."""
    day = f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}"
    document = {"engine": engine, "case": name, "seed": seed, "day": day, **asdict(result)}
    if not result.findings:
        del document["story"]
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(document) + "\n")


def play_one(slot: Slot, task: Task, *, mistake: str = "") -> Result:
    """Play one task."""
    cell, seed = task
    if isinstance(cell, Cell):
        return run_case(slot, cell, seed, mistake=mistake)
    return {Series.LATE: Late, Series.SILENCE: Silence}[cell](slot, seed, mistake=mistake).run()


def name_of(task: Task) -> str:
    """For people, and for the page."""
    cell, seed = task
    if cell is Series.SILENCE:
        return f"{cell.value}: {Draw.of(seed).point}"
    return cell.value if isinstance(cell, Series) else str(cell)


def show_story(name: str, result: Result) -> None:
    """Tell the story of a case."""
    lines = [f"== {name}: {result.occurred} struck, {result.seconds:.1f} s"]
    lines += [f"   ! {finding}" for finding in result.findings]
    lines += [f"     {line}" for line in result.story]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
