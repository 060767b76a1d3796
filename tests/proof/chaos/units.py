"""Writers of units die at every point, and wake up when another has taken over: ``make units N=300 SEED=1``.

Each partition has one writer at a time, sometimes two; brokers and PostgreSQL die meanwhile. A reader follows each partition
from the beginning to the end. Whatever it shows at any time are whole units; at the end they are those whose rows are there.
Exit code 0: clean; 1: something is wrong. ``--keep`` writes the figures into the page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from harness import class_archive
from harness.unit_worker import WholeUnits
from harness.worker import FENCED, LOST, OPERATIONS, UNAVAILABLE
from sqlalchemy import create_engine, select

from chaos import page
from chaos.conductor import BOUND_S, TAIL, TIMEOUT_S
from chaos.processes import Forks, Process
from chaos.results import machine
from chaos.run import CACHE
from chaos.servers import Servers
from chaos.tables import MOMENT
from chaos.units_page import FIGURES
from dualwrite import Unavailable
from dualwrite.failpoints import FAILPOINTS
from dualwrite.units import UnitReader
from dualwrite.units.records import UnitState

TOPIC = "units"
PARTITIONS = 4
UNITS = 4
DISTURB_EVERY_S = 15.0
OWN = [name for name in FAILPOINTS if name.startswith("unit.") and name != "unit.batch"]
RARE = {"write.before_abort", "write.rolled_back"}
POINTS = [*OWN, *(name for name in FAILPOINTS if name.startswith(("write.", "claim.", "settle.")) and name not in RARE)]
MAY_END = {0, FENCED, UNAVAILABLE}


class Units:
    """Kills writers of units until there were enough.

    Args:
        servers: Where it happens.
        forks: Makes the processes.
        directory: For their logs.
        seed: Draws points and moments.
    """

    def __init__(self, servers: Servers, forks: Forks, directory: Path, seed: int) -> None:
        self._servers = servers
        self._forks = forks
        self._directory = directory
        self._seed = seed
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._busy = threading.Barrier(PARTITIONS)
        self.killed: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []

    def run(self, kills: int) -> None:
        """Kill so many, and compare."""
        self._url = self._servers.postgres.create_database("units")
        self._forks.prepare(self._url)
        self._servers.kafka.create_topic(TOPIC, PARTITIONS)
        disturber = threading.Thread(target=self._tried, args=("servers", self._disturb))
        disturber.start()
        each = -(-kills // PARTITIONS)
        with ThreadPoolExecutor(PARTITIONS) as threads:
            list(
                threads.map(
                    lambda number: self._tried(f"partition {number}", self._partition, number, each), range(PARTITIONS)
                )
            )
        self._over.set()
        disturber.join()

    def _tried(self, subject: str, do, *arguments) -> None:
        try:
            do(*arguments)
        except Exception as error:  # noqa: BLE001 - the harness's own failure is a finding as well
            self._find(f"{subject}: {error}\n{traceback.format_exc()}")

    def _disturb(self) -> None:
        while True:
            for name, disturb in (("database", self._servers.stop_database), ("broker", self._servers.kill_broker)):
                if self._over.wait(DISTURB_EVERY_S):
                    return
                disturb()
                self._add(name)

    def _partition(self, number: int, kills: int) -> None:
        image, over = WholeUnits(), threading.Event()
        told: list[str] = []
        with UnitReader(TOPIC, number, kafka=self._servers.kafka.client_config(), image=image) as reader:

            def follow() -> None:
                while not over.is_set():
                    reader.poll(0.2)

            following = threading.Thread(target=self._tried, args=(f"the reader of partition {number}", follow))
            following.start()
            try:
                self._kill(number, kills, told)
            finally:
                self._busy.wait(4 * BOUND_S)
                self._over.set()
                over.set()
                following.join()
            self._write_last(number, told)
            self._compare(number, reader, image, told)

    def _kill(self, partition: int, kills: int, told: list[str]) -> None:
        chance = random.Random(f"{self._seed} {partition}")
        deck: list[str] = []
        zombie: Process | None = None
        killed = process_number = 0
        while killed < kills and not self.findings:
            if not deck:
                deck = [*POINTS, *OWN, *OWN, MOMENT, MOMENT, MOMENT]
                chance.shuffle(deck)
            point, process_number = deck.pop(), process_number + 1
            stops = zombie is None and point != MOMENT and chance.random() < 0.2
            passes = chance.randint(1, 3) if point.startswith(("write.", "unit.part")) else 1
            armed = "" if point == MOMENT else f"{point}:{passes}{':stop' if stops else ''}"
            self._servers.wait_up(BOUND_S)
            process = self._start(partition, f"{partition}-{process_number}", armed)
            if stops:
                process.wait_stopped(BOUND_S)
                if process.code is None:
                    zombie = process
                    continue
            if point == MOMENT:
                threading.Timer(chance.uniform(0.1, 3), process.signal, [signal.SIGKILL]).start()
            killed += self._end(process, point, told)
            if zombie is not None:
                zombie.signal(signal.SIGCONT)
                self._add("zombies")
                self._end(zombie, "", told)
                zombie = None
        if zombie is not None:
            zombie.signal(signal.SIGKILL)
            killed += self._end(zombie, MOMENT, told)

    def _write_last(self, partition: int, told: list[str]) -> None:
        """Let a writer come to its end. No server is killed any more, but one may still be away."""
        for attempt in range(100):
            self._servers.wait_up(BOUND_S)
            last = self._start(partition, f"{partition}-last{attempt}", "")
            self._end(last, "", told)
            if last.code == 0:
                return
        raise AssertionError("no writer came to its end")

    def _start(self, partition: int, name: str, failpoint: str) -> Process:
        job = {
            "do": "units",
            "name": name,
            "url": self._url,
            "topic": TOPIC,
            "partition": partition,
            "kafka": self._servers.kafka.client_config(),
            "units": UNITS,
            "timeout_s": TIMEOUT_S,
        }
        return self._forks.start(job, self._log(partition), failpoint)

    def _end(self, process: Process, point: str, told: list[str]) -> bool:
        """Wait for its end and count it. Whether it was killed."""
        if not process.end(BOUND_S):
            self._find(f"a writer at {point} did not end in {BOUND_S} s: see the stacks in its log")
            return False
        told += process.told
        if process.killed:
            with self._lock:
                self.killed[point] += 1
        elif point:
            self._add("missed")
        if process.code == LOST:
            self._find(f"a writer at {point} met a loss")
        elif not process.killed and process.code not in MAY_END:
            self._find(f"a writer at {point} ended with {process.code}: see its log")
        return process.killed

    def _compare(self, partition: int, reader: UnitReader, image: WholeUnits, told: list[str]) -> None:
        fresh = WholeUnits()
        with UnitReader(TOPIC, partition, kafka=self._servers.kafka.client_config(), image=fresh) as again:
            for one in (reader, again):
                for _ in range(10):
                    with suppress(Unavailable):
                        one.catch_up()
                        break
                if one._follower.state is not UnitState.OUTSIDE:
                    self._find(f"partition {partition} ends inside a unit")
        shown = image.contents()
        engine = create_engine(self._url)
        with engine.connect() as connection:
            rows = {name for (name,) in connection.execute(select(OPERATIONS.c.id)) if name.startswith(f"{partition}-")}
        engine.dispose()
        said = {
            what: {line.split()[1] for line in told if line.startswith(what)} for what in ("begun", "ended", "aborted")
        }
        for what, units in {
            "ended for their writer, and not shown": said["ended"] - shown,
            "aborted for their writer, and shown": said["aborted"] & shown,
            "shown without their rows": shown - rows,
            "not shown, with rows": rows - shown,
            "shown to one reader only": shown ^ fresh.contents(),
            "not whole": {*image.wrong, *fresh.wrong},
        }.items():
            if units:
                self._find(f"partition {partition}: {what}: {sorted(units)}")
        for what, units in {**said, "shown": shown}.items():
            self._add(f"units {what}", len(units))

    def _log(self, partition: int) -> Path:
        return self._directory / f"partition-{partition}.log"

    def _add(self, what: str, count: int = 1) -> None:
        with self._lock:
            self.counts[what] += count

    def _find(self, detail: str) -> None:
        with self._lock:
            self.findings.append(detail[-TAIL:])
        sys.stdout.write(f"  FOUND: {detail[-TAIL:]}\n")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.units", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="how many processes to kill (300)")
    parser.add_argument("--seed", type=int, default=1, help="draws the plan (1)")
    parser.add_argument("--engine", choices=["native", "librdkafka"], default="native", help="of the producers")
    parser.add_argument("--mistake", default="", help="a mistake of harness.mistakes, planted into the product")
    parser.add_argument("--keep", action="store_true", help="keep the figures for docs/proof-chaos.md")
    options = parser.parse_args()
    os.environ["DUALWRITE_PRODUCER_ENGINE"] = options.engine
    directory = CACHE / f"units-{options.seed}-{options.engine}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    class_archive.use()
    began, clock = dt.datetime.now(dt.timezone.utc), time.monotonic()
    with Servers() as servers, Forks(directory, options.mistake) as forks:
        units = Units(servers, forks, directory, options.seed)
        units.run(options.kills)
    figures = {
        "command": f"make units N={options.kills} SEED={options.seed} ENGINE={options.engine}",
        "began": f"{began:%Y-%m-%d %H:%M}",
        "machine": machine(),
        "seconds": round(time.monotonic() - clock),
        "killed": dict(sorted(units.killed.items())),
        "counts": dict(sorted(units.counts.items())),
        "findings": units.findings,
    }
    print(json.dumps(figures, indent=1))
    if options.keep:
        known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
        FIGURES.write_text(json.dumps({**known, options.engine: figures}, indent=1) + "\n", encoding="utf-8")
        page.main([])
    return 1 if units.findings else 0


if __name__ == "__main__":
    sys.exit(main())
