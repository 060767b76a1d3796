"""The processor time of a run, by process: where all cores are busy, only that can be saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

import psutil

Process: TypeAlias = tuple[int, float]
"""Its id and when it was started: ids are given again."""

WORKERS, JVM, BROKER, POSTGRESQL, DRIVER = "Python workers", "Spark's JVM", "the broker", "PostgreSQL", "the driver"
KINDS = (WORKERS, JVM, BROKER, POSTGRESQL, DRIVER)
_SIGNS = {"kafka.Kafka": BROKER, "org.apache.spark.deploy": JVM, "pyspark": WORKERS}


def servers_s(benchmark: psutil.Process) -> dict[str, float]:
    """The seconds that the broker and PostgreSQL below this process have used, with sessions that have ended."""
    found = {BROKER: 0.0, POSTGRESQL: 0.0}
    for process in benchmark.children(recursive=True):
        try:
            kind = {"java": BROKER, "postgres": POSTGRESQL}.get(process.name())
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        if kind is not None:
            found[kind] += times.user + times.system + times.children_user + times.children_system
    return found


def processor_s() -> dict[Process, tuple[str, float]]:
    """This process, its descendants and PostgreSQL's servers, each with the seconds that it has used since its start."""
    found: dict[Process, tuple[str, float]] = {}
    below = {process.pid for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            kind = _kind(process, below)
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        if kind is not None:
            seconds = times.user + times.system
            if kind == POSTGRESQL:  # whose first process has the time of the sessions that have ended
                seconds += times.children_user + times.children_system
            found[process.pid, process.create_time()] = kind, seconds
    return found


def used(before: Mapping[Process, tuple[str, float]], after: Mapping[Process, tuple[str, float]]) -> dict[str, float]:
    """The seconds used in between by processes that still run. One of PostgreSQL's includes those that have ended."""
    found = dict.fromkeys(KINDS, 0.0)
    for process, (kind, seconds) in after.items():
        found[kind] += seconds - before.get(process, (kind, 0.0))[1]
    found[POSTGRESQL] -= sum(
        seconds for process, (kind, seconds) in before.items() if kind == POSTGRESQL and process not in after
    )
    return found


def _kind(process: psutil.Process, below: set[int]) -> str | None:
    if process.name().startswith("postgres"):  # a daemon: not below us
        return POSTGRESQL
    if process.pid not in below and process.pid != os.getpid():
        return None
    command = " ".join(process.cmdline())
    return next((kind for sign, kind in _SIGNS.items() if sign in command), DRIVER)
