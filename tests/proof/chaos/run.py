"""A run: rounds until enough processes were killed, on one or more sets of servers at once."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

from harness.planting import ENVIRONMENT as MISTAKE

from chaos.conductor import Conductor
from chaos.consumers import BROKER, Consumers
from chaos.databases import Databases
from chaos.plan import KILLS_PER_ROUND, make_round
from chaos.processes import Forks
from chaos.results import Results
from chaos.servers import Servers
from chaos.states import BROKER as COMPACTING
from chaos.states import States

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache" / "chaos"


class Run:
    """One run of a seed. Goes on where an earlier one of the same directory has stopped.

    Args:
        directory: Results, and the evidence of what was found.
        kills: How many processes to kill.
        seed: Draws the plan.
        arenas: How many sets of servers work at once.
        kills_per_round: How often the checker compares.
        mistake: What is planted into the product, by name; empty for nothing.
        brokers: How many there are in each set of servers.
        engine: The producers' engine.
        stop_after_s: No new round begins after that time.
        consumers: How many members of groups :meth:`consumers` will kill, for the command that the page shows.
        states: How many tasks with state stores :meth:`states` will kill, likewise.
        database: The kind of database for :meth:`database`, likewise.
        outages: Whether Kafka is away now and then, for seconds to minutes, while most writers go on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kills: int,
        seed: int,
        arenas: int = 1,
        kills_per_round: int = KILLS_PER_ROUND,
        mistake: str = "",
        brokers: int = 1,
        engine: str = "native",
        stop_after_s: float = float("inf"),
        consumers: int = 0,
        states: int = 0,
        database: str = "",
        outages: bool = False,
    ) -> None:
        self._directory = directory
        self._kills = kills
        self._seed = seed
        self._arenas = arenas
        self._kills_per_round = kills_per_round
        self._mistake = mistake
        self._stop_after_s = stop_after_s
        self._file = directory / "results.json"
        directory.mkdir(parents=True, exist_ok=True)
        self._brokers = brokers
        self._outages = outages
        more = (
            (f" DATABASE={database}" if database else "")
            + (f" CONSUMERS={consumers}" if consumers else "")
            + (f" STATE={states}" if states else "")
            + (f" BROKERS={brokers}" if brokers > 1 else "")
            + (" OUTAGES=1" if outages else "")
            + (f" MISTAKE={mistake}" if mistake else "")
        )
        command = f"make chaos N={kills} SEED={seed} ENGINE={engine}{more}"
        new = Results(command, seed, mistake, brokers=brokers, engine=engine)
        self.results = Results.load(self._file) if self._file.exists() else new
        self.results.command = command  # of a run that goes on: what has asked for all of it
        self._numbers = (number for number in itertools.count() if number not in self.results.rounds)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._before_s = self.results.seconds
        self._stopped = False

    def run(self) -> Results:
        """Carry it out; results are saved after each round."""
        arenas = [threading.Thread(target=self._arena, args=(index,), daemon=True) for index in range(self._arenas)]
        for arena in arenas:
            arena.start()
        for arena in arenas:
            arena.join()
        return self.results

    def consumers(self, kills: int) -> None:
        """The consumers' part: kill so many members of groups; results are saved at its end."""
        began = time.monotonic()
        with Servers(properties=BROKER) as servers, Forks(self._directory, self._mistake) as forks:
            Consumers(servers, forks, self._directory, self.results).run(kills)
        self.results.seconds += time.monotonic() - began
        self.results.save(self._file)

    def states(self, kills: int) -> None:
        """The state stores' part: kill so many tasks; results are saved after each round of it."""
        with Servers(properties=COMPACTING) as servers, Forks(self._directory, self._mistake) as forks:
            States(servers, forks, self._directory, self.results).run(kills)
        self.results.save(self._file)

    def database(self, kind: str) -> None:
        """Kill the writers on one kind of database; results are saved after each round of it."""
        if self._mistake:
            os.environ[MISTAKE] = self._mistake  # every worker plants it
        part = Databases(kind, self._directory, self.results, self._seed, lambda: self.results.save(self._file))
        part.run(self._kills, self._stop_after_s)

    def _next(self) -> int | None:
        with self._lock:
            late = time.monotonic() - self._began > self._stop_after_s
            if self._stopped or late or self.results.kills >= self._kills:
                return None
            return next(self._numbers)

    def _arena(self, index: int) -> None:
        try:
            with (
                Servers(self._brokers) as servers,
                Forks(self._directory, self._mistake) as forks,
            ):
                while (number := self._next()) is not None:
                    self._round(servers, forks, number)
        except Exception as error:  # noqa: BLE001 - an arena that breaks is a finding, not a shorter run
            detail = f"{error}\n{traceback.format_exc()}"
            with self._lock:
                self._stopped = True
                self.results.findings.append({"kind": "error", "subject": f"arena {index}", "detail": detail})
                self.results.save(self._file)

    def _round(self, servers: Servers, forks: Forks, number: int) -> None:
        directory = self._directory / f"round-{number}"
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir()
        began = time.monotonic()
        own = Results("", self._seed)
        round_ = make_round(
            self._seed, number, kills=self._kills_per_round, brokers=self._brokers, outages=self._outages
        )
        Conductor(servers, forks, round_, directory, own).run()
        with self._lock:
            self.results.add(own)
            self.results.seconds = self._before_s + time.monotonic() - self._began
            self.results.save(self._file)
            self._say(own, round_.database, time.monotonic() - began)
        servers.forget_logs()

    def _say(self, own: Results, database: str, seconds: float) -> None:
        total = self.results
        sys.stdout.write(
            f"round {own.rounds[0]} ({database}): {own.kills} killed, {own.zombie_count} zombies, "
            f"{own.broker_kills} broker kills, {own.outages} outages, {own.database_stops} database stops, {own.suspended_count} suspensions, "
            f"{own.operations['present']} of {own.operations['operations']} operations present, "
            f"{own.operations['waited']} messages waited, "
            f"{len(own.findings)} findings, {seconds:.0f} s; "
            f"in all {total.kills} of {self._kills} killed, {total.zombie_count} zombies, {total.broker_kills} + "
            f"{total.database_stops}, {len(total.findings)} findings, {total.seconds / 60:.1f} min\n"
        )
        for finding in own.findings:
            sys.stdout.write(f"  FOUND {finding['kind']}: {finding['subject']}: {str(finding['detail'])[:1500]}\n")
        sys.stdout.flush()
