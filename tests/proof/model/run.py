"""Runs random schedules: in chunks, in this process or in several."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from model.chance import schedule_of
from model.results import Counts
from model.schedule import lines_of
from model.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from model.chance import Schedule

CHUNK = 250


def run_chunk(first: int, count: int, mistake: str = "") -> Counts:
    """Run the schedules of so many seeds; the first finding ends it."""
    counts = Counts()
    with _quickly(), _broken(mistake):
        for seed in range(first, first + count):
            schedule = schedule_of(seed)
            try:
                schedule.run()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                counts.schedules += 1
                counts.findings.append(_told(schedule, error, seed))
                break
            counts.add_world(schedule.world)
    return counts


def chunks(first: int, count: int, mistake: str, jobs: int) -> Iterator[Counts]:
    """Run the schedules of so many seeds, chunk by chunk; in the order of the seeds, however many processes there are."""
    tasks = [(start, min(CHUNK, first + count - start), mistake) for start in range(first, first + count, CHUNK)]
    if jobs == 1:
        for task in tasks:
            yield run_chunk(*task)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_leave_signals_to_the_parent) as pool:
        running: deque[Future[Counts]] = deque()
        try:
            for task in tasks:
                running.append(pool.submit(run_chunk, *task))
                if len(running) > 2 * jobs:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_signals_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _quickly() -> Iterator[None]:
    """Without logging; what schedules leave behind is collected once for all of them."""
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
        gc.collect()


def _told(schedule: Schedule, error: BaseException, seed: int) -> dict[str, object]:
    shortest = shrink(schedule.world, error)
    return {"seed": seed, "what": f"{type(error).__name__}: {error}", "schedule": lines_of(shortest.trace)}


def _broken(mistake: str) -> AbstractContextManager[None]:
    if not mistake:
        return nullcontext()
    from model.counterparts import planted

    return planted(mistake)
