"""The state stores' part of the run: tasks die at every step of a transaction, of a spilled commit and of a restore.

Each life is one changelog, whose tasks come one after the other; half of them write rows as well. Each task compares itself
as soon as it is restored (:mod:`chaos.tally`), then works until it dies. A copy of what it leaves is opened then, brought to
the changelog's committed end, and compared with a replay of it. Now and then its directory is an older copy, that of a standby which
has followed the changelog meanwhile, or empty.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer

from chaos.part import MAY_END, Part
from chaos.processes import Process
from chaos.tables import MOMENT
from chaos.tally import committed_before, key_of
from dualwrite.failpoints import FAILPOINTS
from dualwrite.state import KeyValueStore, Standby

OF_STORE = [name for name in FAILPOINTS if name.startswith("state.")]
OF_ROWS = [
    "write.prepared",
    "write.recorded",
    "write.decided",
    "write.completed",
    "claim.settled",
    "settle.before_commit",
]
OF_SPILLED = {"state.spilled", "state.decided", "state.copied", "state.finished"}
SAME, COPY, STANDBY, EMPTY = "its own", "an older copy", "a standby's", "empty"
LIVES = 4
"""How many changelogs are written at once."""
KILLS_PER_LIFE = 25
INPUTS = 3500
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "1000",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "1500",
}
BROKER = {"log.cleaner.backoff.ms": "500"}
"""With these the broker compacts a changelog while its tasks die."""


@dataclass
class _Life:
    """One changelog, with its directories."""

    name: str
    rows: bool
    url: str
    root: Path
    number: int = 0

    @property
    def input(self) -> str:
        return f"{self.name}-in"

    @property
    def output(self) -> str:
        return f"{self.name}-out"

    @property
    def changelog(self) -> str:
        return f"{self.name}-changelog"

    @property
    def directory(self) -> Path:
        """The store's; each copy gets another one."""
        return self.root / f"store-{self.number}"

    @property
    def copy(self) -> Path:
        return self.root / "copy"

    @property
    def left(self) -> Path:
        """A copy of what the last task that died has left."""
        return self.root / "left"

    @property
    def standby(self) -> Path:
        return self.root / "standby"


class States(Part[_Life]):
    """Runs lives until enough tasks were killed.

    Args:
        servers: Where it happens, with the properties of :data:`BROKER`.
        forks: Makes the processes.
        directory: For the stores, and the logs of the tasks.
        results: Where it counts.
    """

    COUNTS = "states"
    KILLED = ("rows", "messages")
    LOSS = "differs"

    def run(self, kills: int) -> None:
        """Kill so many tasks. The counts are kept after each round of lives."""
        for number in itertools.count(self._count("rounds", "done")):
            killed = self._killed
            if killed >= kills or self._results.findings:
                return
            each = max(1, min(KILLS_PER_LIFE, -(-(kills - killed) // LIVES)))
            began = time.monotonic()
            self._round(number, each)
            self._add("rounds", "done")
            self._results.seconds += time.monotonic() - began
            self._results.save(self._directory / "results.json")
            sys.stdout.write(
                f"state stores, round {number}: {self._killed} of {kills} tasks killed, {self._count('compared', 'all')} "
                f"comparisons, {len(self._results.findings)} findings, {time.monotonic() - began:.0f} s\n"
            )
            sys.stdout.flush()

    def _round(self, number: int, kills: int) -> None:
        database = f"states_{number}"
        url = self._servers.postgres.create_database(database)
        self._forks.prepare(url)
        lives = [
            _Life(f"s{number}-{index}", bool(index % 2), url, self._directory / f"s{number}-{index}")
            for index in range(LIVES)
        ]
        with ThreadPoolExecutor(LIVES) as pool:
            list(pool.map(lambda life: self._tried(life, kills), lives))
        self._servers.postgres.drop_database(database)

    def _tried(self, life: _Life, kills: int) -> None:
        try:
            self._live(life, kills)
        except Exception as error:  # noqa: BLE001 - the harness's own failure is a finding as well
            self._find("error", life.name, f"{error}\n{traceback.format_exc()}")

    def _live(self, life: _Life, kills: int) -> None:
        shutil.rmtree(life.root, ignore_errors=True)
        life.root.mkdir()
        self._make_topics(life)
        chance = random.Random(f"{self._results.seed} {life.name}")
        deck: list[str] = []
        killed = 0
        while killed < kills:
            if not deck:
                deck = [*OF_STORE, *OF_STORE, *(OF_ROWS if life.rows else []), MOMENT, MOMENT, MOMENT]
                chance.shuffle(deck)
            point = deck.pop()
            self._place(life, chance, point)
            process = self._start(life, chance, point)
            if chance.random() < 0.2:
                self._follow(life)
            died = self._end(life, process, point)
            killed += died
            if died:
                self._compare(life, point)
            if self._results.findings:
                return
        self._end(life, self._start(life, chance, "", blocks=0), "")
        if not self._results.findings:
            shutil.rmtree(life.root)

    def _make_topics(self, life: _Life) -> None:
        for topic in (life.input, life.output):
            self._servers.create_topic(topic, 1)
        self._servers.kafka.create_topic(life.changelog, 1, config=COMPACTED)
        producer = Producer({**self._servers.kafka.client_config(), "log_level": 0})
        for number in range(INPUTS):
            producer.produce(life.input, key=key_of(number), value=b"", partition=0)
        producer.flush()

    def _place(self, life: _Life, chance: random.Random, point: str) -> None:
        """Decide which directory the next task begins with."""
        ways = [COPY, STANDBY, EMPTY] if point == "state.restored" else [SAME] * 9 + [COPY, STANDBY, EMPTY]
        way = chance.choice(ways)
        former = life.directory
        source = {COPY: life.copy, STANDBY: life.standby}.get(way)
        if way == SAME or (source is not None and not source.exists()):
            way = SAME
        else:
            life.number += 1
            if source is not None:
                shutil.copytree(source, life.directory)
            shutil.rmtree(former, ignore_errors=True)
        self._add("began with", way)
        if chance.random() < 0.15 and life.directory.exists():
            shutil.rmtree(life.copy, ignore_errors=True)
            shutil.copytree(life.directory, life.copy)

    def _start(self, life: _Life, chance: random.Random, point: str, blocks: int | None = None) -> Process:
        blocks = chance.randint(3, 5) if blocks is None else blocks
        job = {
            "do": "tally",
            "name": life.name,
            "kafka": self._servers.kafka.client_config(),
            "url": life.url,
            "rows": life.rows,
            "input": life.input,
            "output": life.output,
            "changelog": life.changelog,
            "directory": str(life.directory),
            "memory": chance.choice([0, 1500]) if point in OF_SPILLED else chance.choice([0, 1500, 64 << 20]),
            "blocks": blocks,
            "fails_in": chance.choice([0, 1, None, None, None]),
        }
        nth = chance.randint(1, 3)
        process = self._forks.start(job, self._log(life), f"{point}:{nth}" if point not in {"", MOMENT} else "")
        if point == MOMENT:
            threading.Timer(chance.uniform(0.05, 2.0), process.signal, [signal.SIGKILL]).start()
        return process

    def _follow(self, life: _Life) -> None:
        """Catch up with what the tasks have committed, while one of them works."""
        with KeyValueStore(life.standby) as store:
            standby = Standby(
                store, kafka=self._servers.kafka.client_config(), changelog=life.changelog, partition=0, timeout_s=60
            )
            self._add("standbys", "records", standby.catch_up())

    def _compare(self, life: _Life, point: str) -> None:
        """Open a copy of what a dead task has left, and compare it with the changelog's committed records."""
        shutil.rmtree(life.left, ignore_errors=True)
        if life.directory.exists():
            shutil.copytree(life.directory, life.left)
        kafka = self._servers.kafka.client_config()
        with KeyValueStore(life.left) as store:
            Standby(store, kafka=kafka, changelog=life.changelog, partition=0, timeout_s=60).catch_up()
            end = store.committed.offset or 0
            found = {key.decode(): value.decode() for key, value in store.range()}
        replayed = committed_before(kafka, life.changelog, end)
        self._add("compared", "copies")
        if found != replayed:
            self._find(
                "differs", life.name, f"killed at {point}, up to {end}: the copy {found}, the changelog {replayed}"
            )

    def _end(self, subject: _Life, process: Process, point: str) -> bool:
        killed = super()._end(subject, process, point)
        for line in process.told:
            if line.startswith("restored"):
                self._add("restored", "records", int(line.split()[2]))
        self._add("compared", "all", process.told.count("compared"))
        if process.code in MAY_END and not point:
            self._add("counted", "inputs", sum(int(line.split()[1]) for line in process.told if "counted" in line))
        return killed

    def _count_kill(self, subject: _Life, point: str) -> None:
        self._add("rows" if subject.rows else "messages", point)
