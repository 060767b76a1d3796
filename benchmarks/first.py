"""First use of ``DualWriter`` in a fresh process, until its first dual write is done.

``PYTHONPATH=tests python -m benchmarks --only first``
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

from sqlalchemy import create_engine

from benchmarks.servers import Ground, p50
from benchmarks.ways import ENGINES, METADATA, ROWS

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


def run(ground: Ground, *, runs: int = 9) -> dict[str, dict[str, float]]:
    """Measure, the engines in turn, after one run of each that makes the id; median seconds of each step by way."""
    engine = create_engine(ground.url)
    METADATA.create_all(engine)
    engine.dispose()
    topic = ground.topic(1)
    samples: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
    for number in range(runs + 1):
        for name, producer_engine in ENGINES.items():
            setting = [f"first-{producer_engine}", ground.kafka, ground.url, topic, ROWS.name, producer_engine]
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, json.dumps(setting)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            at = json.loads(done.stdout.splitlines()[-1])
            if number:
                samples[name].append([later - one for one, later in pairwise(at)] + [at[-1] - at[0]])
    return {
        name: {step: p50([one[place] for one in found]) for place, step in enumerate(STEPS)}
        for name, found in samples.items()
    }
