"""First use of ``DualWriter`` in a fresh process, until its first dual write is done.

``PYTHONPATH=tests/proof python -m benchmarks --only first``
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50
from benchmarks.ways import ENGINES, METADATA, ROWS

LIBRARIES = ("sqlalchemy", "kafka", "psycopg")
"""The packages without which no dual write can be done."""
STEPS = ("import", "construct", "open", "one dual write", "together")
_PROGRAM = """
import json, sys, time
name, kafka, url, topic, table, producer_engine = json.loads(sys.argv[1])
at = [time.perf_counter()]
from dualwrite import DualWriter
at.append(time.perf_counter())
writer = DualWriter(name, kafka=kafka, database=url, producer_engine=producer_engine)
at.append(time.perf_counter())
writer.open()
at.append(time.perf_counter())
with writer.transaction() as tx:
    tx.produce(topic, value="a message")
    tx.connection.exec_driver_sql(f"INSERT INTO {table} (note) VALUES ('a row')")
at.append(time.perf_counter())
writer.close()
print(json.dumps(at))
"""


_IMPORT = """
import sys, time
at = time.perf_counter()
for name in sys.argv[1:]:
    __import__(name)
print(time.perf_counter() - at)
"""


def run(ground: Ground, *, runs: int = 9) -> dict[str, Any]:
    """Measure, the engines in turn, after one run of each that makes the id.

    Returns:
        Median seconds: ``steps`` by way, and the import of the ``libraries`` alone, in another process.
    """
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    engine.dispose()
    topic = ground.topic(1)
    samples: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
    libraries = []
    for number in range(runs + 1):
        libraries.append(float(_printed(_IMPORT, *LIBRARIES)))
        for name, producer_engine in ENGINES.items():
            setting = [f"first-{producer_engine}", ground.kafka, ground.url, topic, ROWS.name, producer_engine]
            at = json.loads(_printed(_PROGRAM, json.dumps(setting)))
            if number:
                samples[name].append([later - one for one, later in pairwise(at)] + [at[-1] - at[0]])
    steps = {
        name: {step: p50([one[place] for one in found]) for place, step in enumerate(STEPS)}
        for name, found in samples.items()
    }
    return {"steps": steps, "libraries": p50(libraries[1:])}


def _printed(program: str, *arguments: str) -> str:
    """The last line that a program prints, in a process of its own. Modules are compiled once, as those of an installed package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()[-1]
