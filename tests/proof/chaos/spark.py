"""Spark's Python workers, deciding processes and drivers die in every way that the sink writes: ``make chaos-spark N=500``.

One session goes on all the time, so that a death costs a task or a Python process and no JVM. A job is some batches of one sink,
in one way, with one kind of rows (:mod:`harness.spark_deaths`). In each batch somebody dies; it is run until it is written, and
at the job's end both sides are compared. In some batches the broker dies as well, or PostgreSQL. Exit code 0: clean; 1:
something is wrong. ``--keep`` writes the figures into the page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness import class_archive
from harness.databases import prepare_mariadb
from harness.places import PROOF
from harness.planting import ENVIRONMENT as MISTAKE
from harness.schema_registry import SchemaRegistry, schema_registry
from harness.spark import SPARKS_ERRORS, session
from harness.spark_deaths import (
    FORMAT_NAMES,
    FORMATS,
    MOMENT,
    PARTITIONS,
    STREAMS,
    WAYS,
    Deaths,
    Job,
    MortalSource,
    environment_of,
)
from sqlalchemy import create_engine

from chaos import page
from chaos.results import machine
from chaos.run import CACHE
from chaos.servers import Servers
from dualwrite.errors import DualWriteError
from dualwrite.failpoints import ENVIRONMENT
from dualwrite.migrations import upgrade
from dualwrite.testing import EmbeddedMariaDB

# The tasks' logs would warn of each producer otherwise.
BROKER = {"transaction.max.timeout.ms": "2147483647"}
BATCHES = 4
TAIL, SHOWN = 1500, 300
BOUND_S = 180
LEFT_S = 60
FAULT_EVERY = 9
RUNS = 6
"""In one of so many batches a server dies as well; a batch is run so often at most."""
IN_A_TASK = [
    "spark.task_started",
    "slot.leased",
    "claim.before",
    "claim.row_raised",
    "claim.initialized",
    "write.begun",
    "write.checked",
    "write.produced",
    "spark.rows_copied",
    "write.body_done",
    "write.prepared",
    "spark.task_done",
    MOMENT,
]
OF_A_PARTITION = [*IN_A_TASK, "ledger.inserted", "write.recorded", "write.decided", "write.completed", "slot.released"]
OF_A_WHOLE = [*IN_A_TASK, "batch.handed_over"]
DECIDING = [
    "batch.prepared",
    "batch.recorded",
    "batch.decided",
    "complete.before",
    "complete.ended",
    "complete.recorded",
    "batch.completed",
    MOMENT,
]
OF_A_DRIVER = {"write_batch", "foreach_batch"}
"""The ways in which the driver itself decides, on each partition or on all."""
DRIVING = ["ledger.begun", "spark.driver_started", "spark.driver_done", MOMENT, MOMENT]


@dataclass(frozen=True)
class Kind:
    """A kind of jobs: a way of writing, what it does with the rows, and whether its messages have schemas of a registry."""

    way: str
    does: str
    has_schemas: bool
    on_mariadb: bool

    @property
    def name(self) -> str:
        formats = [FORMAT_NAMES[one] for one in FORMATS[self.does]] if self.has_schemas else []
        return ", ".join([self.way, self.does, *filter(None, [" and ".join(formats)]), *["MariaDB"] * self.on_mariadb])


def kinds(*, with_mariadb: bool, only: str) -> list[Kind]:
    """Every kind of jobs whose name matches."""
    found = [
        Kind(way, does, has_schemas, on_mariadb)
        for way, many in WAYS.items()
        for does in many
        for has_schemas in (False, True)[: 1 + (does in FORMATS)]
        for on_mariadb in (False, True)[: 1 + (with_mariadb and "prepared" not in way)]
    ]
    return [one for one in found if re.search(only, one.name)]


class Killing:
    """Runs jobs until enough have died.

    Args:
        servers: Where it happens.
        registry: Where the schemas are.
        mariadb: The other database; None without it.
        directory: For notes, logs and sources.
        seed: Draws who dies where.
    """

    def __init__(
        self,
        servers: Servers,
        registry: SchemaRegistry,
        mariadb: EmbeddedMariaDB | None,
        directory: Path,
        seed: int,
    ) -> None:
        self._servers = servers
        self._registry = registry
        self._mariadb = mariadb
        self._directory = directory
        self._notes = directory / "notes"
        self._notes.mkdir()
        self._chance = random.Random(seed)
        self._number = 0
        self.killed: dict[str, Counter[str]] = {}
        self.points: dict[str, Counter[str]] = {"workers": Counter(), "deciding": Counter(), "drivers": Counter()}
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []

    @property
    def deaths(self) -> int:
        return sum(counter.total() for counter in self.points.values())

    def run(self, kinds: Sequence[Kind], kills: int, until: float) -> None:
        """Kill so many in jobs of these kinds, but begin no job after that time."""
        self._spark = session()
        self._spark.dataSource.register(MortalSource)
        left: list[Kind] = []
        try:
            while self.deaths < kills and time.monotonic() < until and len(self.findings) < 3:
                if not left:
                    left = self._chance.sample(kinds, len(kinds))
                self._job(left.pop())
        finally:
            self._spark.stop()

    def _job(self, kind: Kind) -> None:
        name, before, began = kind.name, self.deaths, time.monotonic()
        try:
            job = self._made(kind)
            for number in range(BATCHES):
                self._batch(job, number, name)
            self._compare(job)
            self.counts["jobs"] += 1
            self.counts["jobs on MariaDB"] += kind.on_mariadb
            self.counts["jobs with schemas"] += kind.has_schemas
        except Exception as error:  # noqa: BLE001 - whatever a job ends with is a finding
            self.findings.append(f"{name}: {' '.join(str(error).split())[:SHOWN]}")
            with (self._directory / "findings.log").open("a") as log:
                log.write(f"{name}:\n{traceback.format_exc()}\n")
            sys.stdout.write(f"FOUND: {self.findings[-1]}\n")
        sys.stdout.write(
            f"{name}: {self.deaths - before} died in {time.monotonic() - began:.0f} s; {self.deaths} in all\n"
        )
        sys.stdout.flush()

    def _made(self, kind: Kind) -> Job:
        self._number += 1
        name = f"spark_{self._number}_{secrets.token_hex(3)}"
        if kind.on_mariadb:
            assert self._mariadb is not None
            url = self._mariadb.create_database(name)
            prepare_mariadb(url, own_tables=False).dispose()
            url += "?init_command=SET+sql_mode%3Dconcat(@@sql_mode,%27,NO_AUTO_VALUE_ON_ZERO%27)"
        else:
            url = self._servers.postgres.create_database(name)
            engine = create_engine(url)
            with engine.connect() as connection:
                upgrade(connection)
            engine.dispose()
        case = {"kafka": self._servers.kafka.client_config(), "url": url, "topic": name, "sink": name}
        directory = self._directory / name
        directory.mkdir()
        job = Job(kind.way, kind.does, case, str(directory), self._registry.url if kind.has_schemas else None)
        for topic in job.topics():
            self._servers.kafka.create_topic(topic, 2, timeout_s=120)
        job.prepare()
        return job

    def _batch(self, job: Job, number: int, name: str) -> None:
        """One batch: somebody dies, and it is run until it is written."""
        self.counts["batches"] += 1
        fault = self._fault()
        who, by_partition = self._who(job)
        job.feed(self._spark, number)
        if who == "driver":
            # The Data Source decides in a process of Spark's, which none of a driver's fail points reaches.
            points = DRIVING if by_partition else DECIDING if job.way in OF_A_DRIVER else [MOMENT]
            self._drive(job, number, self._chance.choice(points), name)
        for run in range(RUNS):
            deaths = Deaths(str(self._notes), *(self._points(who, by_partition=by_partition) if run == 0 else ()))
            try:
                job.write(self._spark, number, deaths)
                break
            except (DualWriteError, *SPARKS_ERRORS) as error:
                # The last attempt that Spark makes may wait in vain for keys that one before it has prepared; and what a dead
                # driver has asked of the JVM may begin only now.
                is_told = "prepared" in job.way and "lock timeout" in str(error)
                is_told = is_told or (who == "driver" and "another one has begun" in str(error))
                if run == RUNS - 1 or not (deaths.commit or fault is not None or is_told):
                    raise
                self.counts["run again"] += 1
            finally:
                self._note(name, deaths)
                if fault is not None:
                    fault.join(BOUND_S)
        if number == BATCHES - 1 and job.way not in STREAMS:  # once more: nothing is written twice
            job.write(self._spark, number, Deaths(str(self._notes)))

    def _who(self, job: Job) -> tuple[str, bool]:
        """Who dies: tasks, the process that decides, or a driver; and whether each partition is decided by itself."""
        by_partition = job.way in OF_A_DRIVER and job.does != "several"
        if job.way in OF_A_DRIVER:
            # The tasks of several tables are armed as those of the Data Source: the same code runs there.
            return self._chance.choice(["task", "driver"] if by_partition else ["driver"]), by_partition
        return self._chance.choice(["task", "deciding", "deciding", "deciding", "driver"]), by_partition

    def _points(self, who: str, *, by_partition: bool) -> tuple:
        if who == "task":
            points = OF_A_PARTITION if by_partition else OF_A_WHOLE
            dying = self._chance.sample(range(PARTITIONS), self._chance.choice([3, 4]))
            return ({partition: self._chance.sample(points, self._chance.choice([1, 2, 2])) for partition in dying},)
        if who == "deciding":
            # Without a death of its own, the process that gives up completes what was decided.
            return {}, self._chance.choice(DECIDING), self._chance.choice(["", "settle.looked", "claim.before"])
        return ()

    def _note(self, name: str, deaths: Deaths) -> None:
        for note in self._notes.iterdir():
            point = note.name.rpartition("-")[0]
            who = "workers" if deaths.tasks else "deciding"
            self._count(name, who, point)
            note.unlink()

    def _count(self, name: str, who: str, point: str) -> None:
        self.points[who][point] += 1
        self.killed.setdefault(name, Counter())[who] += 1

    def _drive(self, job: Job, number: int, point: str, name: str) -> None:
        """A driver that dies, as a process on the JVM that goes on; its tasks work on."""
        path = self._directory / "driver.json"
        path.write_text(json.dumps({"job": job.document(), "number": number, "directory": str(self._notes)}))
        armed = {} if point == MOMENT else {ENVIRONMENT: point}
        with (self._directory / "driver.log").open("w") as log:
            driver = subprocess.Popen(
                [sys.executable, "-c", "from harness.spark_deaths import drive; drive()", str(path)],
                cwd=PROOF,
                env={**os.environ, **environment_of(self._spark), **armed},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            # At any moment: it takes some seconds until it has begun.
            driver.wait(self._chance.uniform(1.5, 4.5) if point == MOMENT else BOUND_S)
        except subprocess.TimeoutExpired:
            assert point == MOMENT, f"a driver at {point} did not end: {self._log()}"
            driver.kill()
            driver.wait()
        if driver.returncode == -signal.SIGKILL:
            self._count(name, "drivers", point)
        else:
            self.counts["drivers that lived" if driver.returncode == 0 else "drivers that failed"] += 1
            if driver.returncode:
                sys.stdout.write(f"a driver at {point} has failed: {self._log()}\n")

    def _log(self) -> str:
        return (self._directory / "driver.log").read_text()[-TAIL:]

    def _fault(self) -> threading.Thread | None:
        turn, rest = divmod(self.counts["batches"], FAULT_EVERY)
        if rest:
            return None
        name, disturb = (
            ("broker kills", self._servers.kill_broker),
            ("stops of PostgreSQL", self._servers.stop_database),
        )[turn % 2]
        self.counts[name] += 1
        thread = threading.Thread(target=disturb)
        thread.start()
        return thread

    def _compare(self, job: Job) -> None:
        end = time.monotonic() + LEFT_S
        while True:
            try:
                return job.verify(BATCHES)
            except AssertionError as error:
                # A task of a driver that has died may still be at its end; what it leaves goes with it.
                if not str(error).startswith("left: ") or time.monotonic() > end:
                    raise
                time.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.spark", description=__doc__)
    parser.add_argument("--kills", type=int, default=500, help="how many processes are to die (500)")
    parser.add_argument("--seed", type=int, default=1, help="draws the plan (1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after that time")
    parser.add_argument("--mistake", default="", help="a mistake of harness.mistakes, planted into the product")
    parser.add_argument("--no-mariadb", action="store_true", help="PostgreSQL alone")
    parser.add_argument(
        "--only", default="", help="a regular expression: only jobs whose name matches, such as 'Avro|Protobuf'"
    )
    parser.add_argument("--keep", action="store_true", help="keep the figures for docs/proof-chaos.md")
    options = parser.parse_args()
    wanted = kinds(with_mariadb=not options.no_mariadb, only=options.only)
    if not wanted:
        parser.error(f"no job's name matches {options.only!r}")
    os.environ[MISTAKE] = options.mistake
    directory = CACHE / f"spark-{options.seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    class_archive.use()
    began, clock = dt.datetime.now(dt.timezone.utc), time.monotonic()
    with Servers(properties=BROKER) as servers, schema_registry() as registry, ExitStack() as later:
        mariadb = None if options.no_mariadb else later.enter_context(EmbeddedMariaDB())
        killing = Killing(servers, registry, mariadb, directory, options.seed)
        killing.run(wanted, options.kills, clock + 60 * options.minutes)
    only = f" ONLY='{options.only}'" if options.only else ""
    figures = {
        "command": f"make chaos-spark N={options.kills} SEED={options.seed}{only}",
        "began": f"{began:%Y-%m-%d %H:%M}",
        "machine": machine(),
        "seconds": round(time.monotonic() - clock),
        "killed": {name: dict(sorted(counter.items())) for name, counter in sorted(killing.killed.items())},
        "points": {who: dict(sorted(counter.items())) for who, counter in killing.points.items()},
        "counts": dict(sorted(killing.counts.items())),
        "findings": killing.findings,
    }
    print(json.dumps(figures, indent=1))
    if options.keep:
        known = json.loads(page.SPARK_FIGURES.read_text(encoding="utf-8")) if page.SPARK_FIGURES.exists() else {}
        known[str(options.seed)] = figures
        page.SPARK_FIGURES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        page.main([])
    return 1 if killing.findings else 0


if __name__ == "__main__":
    sys.exit(main())
