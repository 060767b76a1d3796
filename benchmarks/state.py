"""State stores: writes a second by the room that uncommitted writes have in memory, beside RocksDB without transactions.

``PYTHONPATH=tests python -m benchmarks.state [--writes 100000] [--rounds 3]`` (a minute). No server is needed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import rocksdict

from dualwrite.state import KeyValueStore

MIB = 1 << 20
BOUNDS = (4 * MIB, 16 * MIB, 64 * MIB)
VALUE = b"v" * 100


def plain(directory: Path, keys: list[bytes]) -> None:
    """Read and write each key in RocksDB itself; sync once."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    database = rocksdict.Rdict(str(directory), options)
    for key in keys:
        database.get(key)
        database.put(key, VALUE)
    database.flush_wal(True)
    database.close()


def transactional(directory: Path, keys: list[bytes], bound: int) -> None:
    """The same in one transaction of a state store."""
    with KeyValueStore(directory, max_memory_bytes=bound) as store:
        for key in keys:
            store.get(key)
            store.put(key, VALUE)
        store.commit(1)


def run(*, writes: int, rounds: int) -> dict[str, float]:
    """Measure: writes a second, opening and closing included, the median of the rounds."""
    draw = random.Random(1)
    keys = [b"%012d" % draw.randrange(10**9) for _ in range(writes)]
    ways = {"plain": lambda path: plain(path, keys)}
    for bound in BOUNDS:
        ways[f"{bound // MIB} MiB"] = lambda path, bound=bound: transactional(path, keys, bound)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            directory = Path(tempfile.mkdtemp(dir="."))
            begun = time.perf_counter()
            way(directory)
            found[name].append(writes / (time.perf_counter() - begun))
            shutil.rmtree(directory)
    return {name: round(statistics.median(rates)) for name, rates in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(run(writes=arguments.writes, rounds=arguments.rounds))
