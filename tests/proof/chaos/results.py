"""The counts of a run, kept in a file after each round, so that a stopped run can be continued."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_ADDED = (
    "killed_again",
    "rivals",
    "members",
    "spoiled",
    "broker_kills",
    "broker_suspensions",
    "leaderless",
    "hanging",
    "database_stops",
    "database_suspensions",
    "outages_killed",
    "outages_suspended",
    "away_s",
    "cpu_s",
    "seconds",
)


def machine() -> str:
    """The machine and versions of this run, in one line."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


@dataclass
class Results:
    """Counts of one run.

    Attributes:
        command: How to run it again.
        seed: The seed.
        mistake: What was planted, if anything.
        began: Date and time (UTC).
        machine: What it ran on.
        seconds: How long it has run.
        rounds: The rounds that are done.
        killed: Killed processes, by database and fail point.
        killed_again: How many of them died while they recovered what another had left.
        missed: Armed processes that ended before they came to their point, by database and fail point.
        ended: How the others ended, by exit.
        zombies: Paused processes that were resumed after another had taken over, by database and fail point.
        zombies_ended: How the resumed ones ended, by exit.
        suspended: Processes that were paused for a while and resumed, by database and fail point.
        rivals: How often several recovered one id at once.
        ways: Killed processes by how they wrote.
        members: How many of the killed processes were members of a fleet.
        spoiled: How many of them died while units ran again, after one that had ended their group.
        brokers: How many brokers there were.
        engine: The producers' engine.
        broker_kills: How often a broker was killed.
        broker_suspensions: How often a broker was suspended for seconds.
        outages_killed: How often all brokers were killed, and started again after seconds to minutes.
        outages_suspended: Likewise of brokers that were suspended.
        away_s: How long Kafka was away by that, and until it answered again.
        leaderless: How many partitions had no leader while a broker was suspended.
        hanging: Undecided transactions that were left open in a partition after the recovery, and ended as an operator does.
        database_stops: How often PostgreSQL was stopped.
        database_suspensions: How often PostgreSQL was suspended for seconds.
        operations: Begun, acknowledged, aborted, present on both sides.
        recovery_s: How long opening took after a kill: all servers up, and with a server away meanwhile,
            and where a paused former owner held the row.
        cpu_s: CPU time of the processes.
        consumers: Counts of the consumers' part.
        states: Counts of the state stores' part.
        databases: Counts of the part for one kind of database.
        findings: What is wrong.
    """

    command: str
    seed: int
    mistake: str = ""
    began: str = field(default_factory=lambda: dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M"))
    machine: str = field(default_factory=machine)
    seconds: float = 0
    rounds: list[int] = field(default_factory=list)
    killed: dict[str, Counter[str]] = field(default_factory=dict)
    killed_again: int = 0
    missed: dict[str, Counter[str]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    zombies: dict[str, Counter[str]] = field(default_factory=dict)
    zombies_ended: Counter[str] = field(default_factory=Counter)
    suspended: dict[str, Counter[str]] = field(default_factory=dict)
    rivals: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    members: int = 0
    spoiled: int = 0
    brokers: int = 1
    engine: str = "librdkafka"  # as in all runs before there was another
    broker_kills: int = 0
    broker_suspensions: int = 0
    leaderless: int = 0
    hanging: int = 0
    database_stops: int = 0
    database_suspensions: int = 0
    outages_killed: int = 0
    outages_suspended: int = 0
    away_s: float = 0
    operations: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: {"up": [], "away": [], "paused": []})
    cpu_s: float = 0
    consumers: dict[str, Counter[str]] = field(default_factory=dict)
    states: dict[str, Counter[str]] = field(default_factory=dict)
    databases: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[dict[str, object]] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(counter.total() for counter in self.killed.values())

    @property
    def zombie_count(self) -> int:
        return sum(counter.total() for counter in self.zombies.values())

    @property
    def outages(self) -> int:
        return self.outages_killed + self.outages_suspended

    @property
    def suspended_count(self) -> int:
        return sum(counter.total() for counter in self.suspended.values()) + (
            self.broker_suspensions + self.database_suspensions
        )

    def add(self, other: Results) -> None:
        """Take in the counts of one more round, or of another run."""
        self.rounds = sorted({*self.rounds, *other.rounds})
        for name in ("killed", "missed", "zombies", "suspended", "consumers", "states", "databases"):
            mine = getattr(self, name)
            for key, counter in getattr(other, name).items():
                mine.setdefault(key, Counter()).update(counter)
        for name in ("ended", "zombies_ended", "operations", "ways"):
            getattr(self, name).update(getattr(other, name))
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, values in other.recovery_s.items():
            self.recovery_s[key] = [*self.recovery_s[key], *values]
        self.findings += other.findings

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(vars(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        partial.rename(path)

    @classmethod
    def from_document(cls, document: dict) -> Results:
        for name in ("killed", "missed", "zombies", "suspended", "consumers", "states", "databases"):
            document[name] = {key: Counter(value) for key, value in document.get(name, {}).items()}
        for name in ("ended", "zombies_ended", "operations", "ways"):
            document[name] = Counter(document.get(name, {}))
        return cls(**document)

    @classmethod
    def load(cls, path: Path) -> Results:
        return cls.from_document(json.loads(path.read_text(encoding="utf-8")))
