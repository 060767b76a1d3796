"""Whose processor time a run takes: where all cores are busy, it is what there is to save."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import psutil

WORKERS, JVM, BROKER, POSTGRESQL, DRIVER = "Python workers", "Spark's JVM", "the broker", "PostgreSQL", "the driver"
KINDS = (WORKERS, JVM, BROKER, POSTGRESQL, DRIVER)
_SIGNS = {"kafka.Kafka": BROKER, "org.apache.spark.deploy": JVM, "pyspark": WORKERS}


def processor_s() -> Counter[str]:
    """Seconds that this process, all below it, and PostgreSQL's servers have used since they were started, by what they are."""
    found: Counter[str] = Counter()
    below = {process.pid for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            kind = _kind(process, below)
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile: its parent has its time
            continue
        if kind is not None:
            found[kind] += times.user + times.system + times.children_user + times.children_system
    return found


def used(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was used in between."""
    return {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in KINDS}


def _kind(process: psutil.Process, below: set[int]) -> str | None:
    if process.name().startswith("postgres"):  # a daemon: not below us
        return POSTGRESQL
    if process.pid not in below and process.pid != os.getpid():
        return None
    command = " ".join(process.cmdline())
    return next((kind for sign, kind in _SIGNS.items() if sign in command), DRIVER)
