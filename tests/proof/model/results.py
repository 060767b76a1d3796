"""The counts of a run of random schedules, and their file."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from model.world import World


def machine() -> str:
    """The machine and versions of this run, in one line."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


@dataclass
class Counts:
    """Counts of what happened in some schedules.

    Attributes:
        schedules: How many there were.
        happened: How often each kind of thing happened.
        places: For what happens to a process or its request: before which call, by kind.
        passed: How often each fail point was passed.
        told: What the owners were told of their writes.
        findings: What was wrong: the seed, the finding, the shortest schedule that shows it.
    """

    schedules: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    places: dict[str, Counter[str]] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, object]] = field(default_factory=list)

    def add_world(self, world: World) -> None:
        """Take in one schedule that has come to its end."""
        self.schedules += 1
        self.happened.update(world.counts)
        self.happened.update(world.told.counts)
        self.happened["calls served"] += world.simulation.steps
        self.happened["messages"] += world.messages
        if world.engines == {"native"}:
            self.happened["schedules with the native engine"] += 1
        elif "native" in world.engines:
            self.happened["schedules with both engines"] += 1
        self.happened.update("units that run again" for write in world.writes if write.runs > 1)
        self.happened["losses told"] += len(world.told.losses)
        self.told.update(write.told or "nothing: its process was killed" for write in world.writes)
        self.passed.update(world.passed)
        self._add_places(world.places)

    def add(self, other: Counts) -> None:
        """Take in the counts of other schedules."""
        self.schedules += other.schedules
        self.happened.update(other.happened)
        self.told.update(other.told)
        self.passed.update(other.passed)
        self._add_places(other.places)
        self.findings += other.findings

    def _add_places(self, places: dict[str, Counter[str]]) -> None:
        for kind, counter in places.items():
            self.places.setdefault(kind, Counter()).update(counter)


@dataclass
class Results:
    """One run.

    Attributes:
        command: How to run it again.
        first_seed: Its schedules have the seeds from this one on, without a gap.
        wanted: How many schedules were asked for.
        jobs: Processes at a time.
        mistake: What was planted, if anything.
        began: Date and time (UTC).
        machine: What it ran on.
        seconds: How long it has run.
        stopped: The signal that has stopped it.
        counts: What happened.
    """

    command: str
    first_seed: int
    wanted: int
    jobs: int
    mistake: str = ""
    began: str = field(default_factory=lambda: dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M"))
    machine: str = field(default_factory=machine)
    seconds: float = 0
    stopped: str = ""
    counts: Counts = field(default_factory=Counts)

    @property
    def rate(self) -> float:
        """Schedules in a second."""
        return self.counts.schedules / self.seconds if self.seconds else 0.0

    def document(self) -> dict[str, object]:
        """As JSON has it."""
        done = self.counts.schedules
        own = {name: value for name, value in vars(self).items() if name != "counts"}
        return {
            **own,
            "seconds": round(self.seconds, 1),
            "last_seed": self.first_seed + done - 1,
            "complete": done == self.wanted,
            "schedules_per_second": round(self.rate, 1),
            **vars(self.counts),
        }

    def save(self, path: Path) -> None:
        """Keep it; a file that is there is replaced whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.document(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        partial.rename(path)
