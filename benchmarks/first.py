"""First use of ``DualWriter`` in a fresh process, until its first dual write is done.

``PYTHONPATH=tests/proof python -m benchmarks --only first``
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50
from benchmarks.ways import ENGINES, METADATA, NATIVE, ROWS

STEPS = ("import", "construct", "open", "one dual write", "together", "processor")
"""Seconds from one to the next, of all, and of processor time."""
APPLICATION = "the application's own libraries"
_SMALLEST_S = 0.0005  # of a package's imports that is named
_PROGRAM = """
import json, sys, time
name, kafka, url, topic, table, producer_engine = json.loads(sys.argv[1])
at, began = [time.perf_counter()], time.process_time()
from dualwrite import DualWriter
at.append(time.perf_counter())
writer = DualWriter(name, kafka={**kafka, "dualwrite.engine": producer_engine}, database=url)
at.append(time.perf_counter())
writer.open()
at.append(time.perf_counter())
with writer.transaction() as tx:
    tx.produce(topic, value="a message")
    tx.connection.exec_driver_sql(f"INSERT INTO {table} (note) VALUES ('a row')")
at.append(time.perf_counter())
processor, loaded = time.process_time() - began, list(sys.modules)
writer.close()
print(json.dumps([at, processor, loaded]))
"""
_APPLICATION = """
import json, sys, time
at, began = [time.perf_counter()], time.process_time()
import psycopg, sqlalchemy
at.append(time.perf_counter())
engine = sqlalchemy.create_engine(sys.argv[1])
at.append(time.perf_counter())
connection = engine.connect()
at.append(time.perf_counter())
connection.exec_driver_sql("SELECT 1")
at.append(time.perf_counter())
print(json.dumps([at, time.process_time() - began, list(sys.modules)]))
"""


def run(ground: Ground, *, runs: int = 9) -> dict[str, Any]:
    """Measure, the engines and an application without this library in turn, after one run of each that makes the id.

    Returns:
        Median seconds: ``steps`` by way, those of :data:`APPLICATION` among them; and ``imports`` by package, of what the
        first dual write of the native engine imports beside those libraries: the shortest of all runs for each module.
    """
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    engine.dispose()
    topic = ground.topic(1)
    programs = {APPLICATION: (_APPLICATION, ground.url)}
    for name, producer_engine in ENGINES.items():
        setting = [f"first-{producer_engine}", ground.kafka, ground.url, topic, ROWS.name, producer_engine]
        programs[name] = (_PROGRAM, json.dumps(setting))
    samples: dict[str, list[list[float]]] = {name: [] for name in programs}
    loaded: dict[str, list[str]] = {}
    shortest: dict[str, float] = {}
    for number in range(runs + 1):
        for name, program in programs.items():
            at, processor, loaded[name] = json.loads(_run(*program)[0])
            if number:
                samples[name].append([*(later - one for one, later in pairwise(at)), at[-1] - at[0], processor])
        for module, seconds in _import_times(_run(*programs[NATIVE], options=("-X", "importtime"))[1]):
            shortest[module] = min(shortest.get(module, seconds), seconds)
    steps = {
        name: {step: p50([one[place] for one in found]) for place, step in enumerate(STEPS)}
        for name, found in samples.items()
    }
    more = set(loaded[NATIVE]) - set(loaded[APPLICATION])
    return {"steps": steps, "imports": _by_package({name: shortest[name] for name in more & shortest.keys()})}


def _by_package(seconds: Mapping[str, float]) -> dict[str, float]:
    """The sums of the imports of each package, the largest first; of this library's by its own packages."""
    found: dict[str, float] = {}
    for module, of_module in seconds.items():
        parts = module.split(".")
        name = ".".join(parts[: 2 if parts[0] == "dualwrite" else 1])
        found[name] = found.get(name, 0.0) + of_module
    return {
        name: found[name] for name in sorted(found, key=found.__getitem__, reverse=True) if found[name] >= _SMALLEST_S
    }


def _import_times(lines: str) -> Iterator[tuple[str, float]]:
    """Each module with the seconds of its own code, from what ``python -X importtime`` has written."""
    for line in lines.splitlines():
        if line.startswith("import time:") and "[us]" not in line:
            own, _, module = line.removeprefix("import time:").split("|")
            yield module.strip(), int(own) / 1e6


def _run(program: str, argument: str, options: Sequence[str] = ()) -> tuple[str, str]:
    """The last line that a program prints, and its errors. Modules are compiled once, as those of an installed package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *options, "-c", program, argument],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()[-1], done.stderr
