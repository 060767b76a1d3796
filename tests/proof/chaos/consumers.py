"""The consumers' part of the run: members of groups die at every fail point of a consumer, of a writer and of settling.

Each group copies the numbers of its topic to rows and to messages of another topic. Two members at a time, each armed, now
and then under the name of a former one; brokers and PostgreSQL die meanwhile. At the end a member that nobody kills writes
what is left, and each number is one row and one message.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.members import PROTOCOLS, copies, fill, numbers, settings_of

from chaos.conductor import PAUSED_OWNER_S, TIMEOUT_S
from chaos.part import Part
from chaos.processes import Forks, Process
from chaos.results import Results
from chaos.servers import Servers
from chaos.tables import MOMENT
from dualwrite.failpoints import FAILPOINTS

BROKER = {
    "group.min.session.timeout.ms": "3000",
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "4000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
}
"""Deaths are noticed within seconds."""
SESSION_MS = 4000
POINTS = [name for name in FAILPOINTS if name.startswith(("consume.", "write.", "claim.", "settle."))]
CONSUMING = [name for name in POINTS if name.startswith("consume.")]
GROUPS = 6
"""How many groups work at once; twice as many combinations are taken in turn."""
KILLS_PER_GROUP = 25
INPUTS = 20
IDLE_S, LAST_IDLE_S = 6, 12
DISTURB_EVERY_S = 15.0
KINDS = [
    {"protocol": protocol, "offsets": offsets, "asynchronous": asynchronous}
    for asynchronous, (protocol, offsets) in itertools.product(
        (False, True), itertools.product(PROTOCOLS, ("kafka", "database"))
    )
]


@dataclass
class _Group:
    """A group, its topics, and how many inputs it has got."""

    name: str
    kind: dict
    options: dict
    filled: int = 0

    @property
    def source(self) -> str:
        return f"{self.name}-in"

    @property
    def target(self) -> str:
        return f"{self.name}-out"

    @property
    def prefix(self) -> str:
        """Before each number: the groups of a round share a table."""
        return f"{self.name}:"


class Consumers(Part[_Group]):
    """Runs rounds of groups until enough members were killed.

    Args:
        servers: Where it happens, with the properties of :data:`BROKER`.
        forks: Makes the processes.
        directory: For the logs of the members.
        results: Where it counts.
    """

    COUNTS = "consumers"
    KILLED = ("kafka", "database")
    LOSS = "lost"

    def __init__(self, servers: Servers, forks: Forks, directory: Path, results: Results) -> None:
        super().__init__(servers, forks, directory, results)
        self._over = threading.Event()

    def run(self, kills: int) -> None:
        """Kill so many members."""
        kinds = itertools.cycle(KINDS)
        for number in itertools.count(self._count("rounds", "done")):
            killed = self._killed
            if killed >= kills or self._results.findings:
                return
            each = max(2, min(KILLS_PER_GROUP, -(-(kills - killed) // GROUPS)))
            began = time.monotonic()
            self._round(number, [next(kinds) for _ in range(GROUPS)], each)
            self._add("rounds", "done")
            sys.stdout.write(
                f"consumers, round {number}: {self._killed} of {kills} members killed, "
                f"{self._count('inputs', 'counted')} inputs counted once, {len(self._results.findings)} findings, "
                f"{time.monotonic() - began:.0f} s\n"
            )
            sys.stdout.flush()

    def _round(self, number: int, kinds: list[dict], kills: int) -> None:
        database = f"consumers_{number}"
        url = self._servers.postgres.create_database(database)
        self._forks.prepare(url)
        groups = [_Group(f"c{number}-{index}", kind, self._job(url, kind)) for index, kind in enumerate(kinds)]
        for group in groups:
            self._servers.kafka.create_topic(group.source, 2)
            self._servers.kafka.create_topic(group.target, 2)
        self._over.clear()
        disturber = threading.Thread(target=self._disturb)
        disturber.start()
        self._each(groups, lambda group: self._kill(group, kills))
        self._over.set()
        disturber.join()
        self._each(groups, self._compare)
        self._servers.postgres.drop_database(database)

    def _each(self, groups: list[_Group], do: Callable[[_Group], None]) -> None:
        def tried(group: _Group) -> None:
            try:
                do(group)
            except Exception as error:  # noqa: BLE001 - the harness's own failure is a finding as well
                self._find("error", group.name, f"{group.kind}: {error}\n{traceback.format_exc()}")

        with ThreadPoolExecutor(len(groups)) as threads:
            list(threads.map(tried, groups))

    def _job(self, url: str, kind: dict) -> dict:
        consumer = settings_of(kind["protocol"])
        if "session.timeout.ms" in consumer:
            consumer["session.timeout.ms"] = SESSION_MS
        return {
            **kind,
            "kafka": self._servers.kafka.client_config(),
            "url": url,
            "consumer": consumer,
            "max_messages": 5,
            "workers": 2,
            "limits": {"paused_owner_timeout_s": PAUSED_OWNER_S, "timeout_s": TIMEOUT_S},
        }

    def _start(self, group: _Group, name: str, failpoint: str = "", idle_s: float = IDLE_S) -> Process:
        member = {**group.options, "name": name, "group": group.name, "source": group.source, "target": group.target}
        job = {"do": "consume", "name": f"{group.name}.{name}", "url": group.options["url"]}
        return self._forks.start({**job, "member": member, "idle_s": idle_s}, self._log(group), failpoint)

    def _disturb(self) -> None:
        for name, disturb in itertools.cycle(
            [("PostgreSQL", self._servers.stop_database), ("broker", self._servers.kill_broker)]
        ):
            if self._over.wait(DISTURB_EVERY_S):
                return
            try:
                disturb()
            except Exception as error:  # noqa: BLE001 - a server that does not come back is a finding
                self._find("error", name, f"{error}\n{traceback.format_exc()}")
                return
            self._add("servers", name)

    def _kill(self, group: _Group, kills: int) -> None:
        chance = random.Random(f"{self._results.seed} {group.name}")
        alive: list[tuple[Process, str]] = []
        deck: list[str] = []
        killed = 0
        for number in itertools.count():
            if killed >= kills:
                break
            if not deck:
                deck = [*POINTS, *CONSUMING, *CONSUMING, MOMENT, MOMENT]
                chance.shuffle(deck)
            fill(group.options["kafka"], group.source, INPUTS, begin=group.filled, prefix=group.prefix)
            group.filled += INPUTS
            point = deck.pop()
            name = str(chance.choice([number, number // 4]))
            process = self._start(group, name, "" if point == MOMENT else f"{point}:{chance.randint(1, 3)}")
            if point == MOMENT:
                threading.Timer(chance.uniform(0.3, 5), process.signal, [signal.SIGKILL]).start()
            alive.append((process, point))
            if len(alive) == 2:
                killed += self._end(group, *alive.pop(0))
        for process, point in alive:
            self._end(group, process, point)

    def _compare(self, group: _Group) -> None:
        """Let a member that nobody kills write what is left, and compare both sides."""
        self._end(group, self._start(group, "last", idle_s=LAST_IDLE_S), "")
        rows, messages = copies(group.options["kafka"], group.options["url"], group.target, prefix=group.prefix)
        expected = numbers(group.filled)
        for side, found in (("rows", rows), ("messages", messages)):
            if found != expected:
                detail = f"{group.kind}: {side} lost {dict(expected - found)}, twice {dict(found - expected)}"
                self._find("lost" if expected - found else "twice", group.name, detail)
        self._add("inputs", "counted", group.filled if rows == messages == expected else 0)

    def _story(self, subject: _Group, point: str) -> str:
        return f"{subject.kind} at {point}"

    def _count_kill(self, subject: _Group, point: str) -> None:
        self._add(subject.kind["offsets"], point)
        self._add("by", subject.kind["protocol"])
        self._add("by", "tasks" if subject.kind["asynchronous"] else "threads")
