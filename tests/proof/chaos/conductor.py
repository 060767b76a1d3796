"""One round: every id lives through its episodes, servers die meanwhile, and at the end a checker compares."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from harness.worker import FENCED, LOST, UNAVAILABLE
from sqlalchemy import NullPool, create_engine, select
from sqlalchemy.exc import OperationalError

from chaos.plan import Episode, Outage, Round, Step, Way, outage_id
from chaos.processes import Forks, Process
from chaos.results import Results
from chaos.servers import Servers
from chaos.tables import MOMENT
from dualwrite.protocol.values import OutboxMode
from dualwrite.stores.sql.tables import declare_tables

BOUND_S = 300.0
"""A process that has not ended by then hangs: every call in it is bounded by less, outages included."""
TIMEOUT_S = 40.0
ATTEMPTS = 4
"""How often a process is started again that ended because a server was away."""
PAUSED_OWNER_S = 1.0
LEASE_S = 5.0
MEMBER_LEASE_S = 3.0
"""Shorter than a paused member of a fleet is paused."""
BETWEEN_S = 0.1
"""Rests between two operations: a member of a fleet, which has to live for some heartbeats; who has to meet an outage."""
EXITS = {0: "done", UNAVAILABLE: "a server did not answer", FENCED: "fenced", LOST: "told of a loss"}
TAIL = 4000
OF_A_FLEET = {"member", "last member"}
WITHOUT_A_RECOVERY = {"settle", *OF_A_FLEET}
"""Their start does not show how long it takes to recover the id of a former process."""
OTHER_WAYS = {
    "settle": "recovery from outside",
    "task": "partitions under a ledger",
    "member": "members of a fleet",
    "last member": "members of a fleet",
}
"""By job, how results name the ways of those that are no plain writers."""


class Conductor:
    """Carries one round out. Every id has a thread; what it waits for are processes.

    Args:
        servers: Where it happens.
        forks: Makes the processes.
        round_: What is to happen.
        directory: For journal, logs and verdict; it must be empty.
        results: The counts of this round.
    """

    def __init__(self, servers: Servers, forks: Forks, round_: Round, directory: Path, results: Results) -> None:
        self._servers = servers
        self._forks = forks
        self._round = round_
        self._directory = directory
        self._results = results
        self._results.rounds = [round_.number]
        for name in ("killed", "missed", "zombies", "suspended"):
            getattr(results, name)[round_.database] = Counter()
        self._changed = threading.Condition()
        self._kills = 0
        self._over = False
        self._started: Counter[str] = Counter()
        self._cpu_before_s = forks.cpu_s["processes"]

    def run(self) -> None:
        """Carry it out. What is wrong stands in the results."""
        number = self._round.number
        topic = self._servers.create_topic(f"round-{number}", self._round.partitions)
        name = f"round_{number}"
        if self._round.database == "sqlite":
            url = f"sqlite:///{self._directory / 'rows.db'}"
        else:
            url = self._servers.postgres.create_database(name)
        self._forks.prepare(url)
        self._job = {
            "kafka": self._servers.kafka.client_config(),
            "url": url,
            "topic": topic,
            "partitions": self._round.partitions,
            "journal": str(self._directory / "journal"),
            "timeout_s": TIMEOUT_S,
            "paused_owner_timeout_s": PAUSED_OWNER_S,
            "lease_s": LEASE_S,
        }
        (self._directory / "journal").touch()
        (self._directory / "plan.json").write_text(json.dumps(asdict(self._round), indent=1), encoding="utf-8")
        checker = self._start_checker()
        leaderless = self._servers.leaderless
        self._live()
        self._results.leaderless = self._servers.leaderless - leaderless
        self._check(checker)
        self._results.cpu_s = self._forks.cpu_s["processes"] - self._cpu_before_s
        if self._results.findings:
            (self._directory / "broker.log").write_text(self._servers.kafka.log_tail(2000), encoding="utf-8")
            return
        self._servers.kafka.delete_topic(topic)
        if self._round.database == "postgresql":
            self._servers.postgres.drop_database(name)
        shutil.rmtree(self._directory)

    def _live(self) -> None:
        disturbers = [
            _thread(self._disturb, self._round.broker_kills, self._servers.kill_broker, "broker_kills"),
            _thread(self._disturb, self._round.database_stops, self._servers.stop_database, "database_stops"),
            _thread(self._disturb, self._round.broker_suspensions, self._servers.suspend_broker, "broker_suspensions"),
            _thread(
                self._disturb, self._round.database_suspensions, self._servers.suspend_database, "database_suspensions"
            ),
        ]
        disturbers.append(_thread(self._leave))
        lives = [_thread(self._life, name, episodes) for name, episodes in self._round.episodes.items()]
        for life in lives:
            life.join()
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for disturber in disturbers:
            disturber.join()

    def _disturb(self, after: Iterable[int], disturb: Callable[[], None], name: str) -> None:
        for threshold in after:
            if not self._is_due(threshold):
                return
            try:
                disturb()
            except Exception as error:  # noqa: BLE001 - a server that does not come back ends the round as a finding
                self._find("error", name, f"{error}\n{traceback.format_exc()}")
                return
            with self._changed:
                setattr(self._results, name, getattr(self._results, name) + 1)

    def _is_due(self, kills: int) -> bool:
        """Wait until so many processes are killed. Whether the round still goes on then."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._kills >= kills)
            return not self._over

    def _leave(self) -> None:
        """Take Kafka away as the plan says. The counts of killed processes go on: that is what this is about."""
        name = outage_id(self._round.number)
        for outage in self._round.outages:
            if not self._is_due(outage.after_kills):
                return
            meets = self._start(name, outage.meets)
            meets.wait_opened(BOUND_S)
            self._wait_until_direct(name, meets)
            away = _thread(self._leave_once, outage)
            self._end(name, meets, outage.meets)
            self._play(name, Step())  # opens while Kafka is away, and leaves messages
            away.join()
            self._life(name, [outage.sends])

    def _wait_until_direct(self, name: str, meets: Process) -> None:
        """Wait until it writes to Kafka directly, and so will be the first to find Kafka silent; or until it has ended."""
        engine = create_engine(self._job["url"], poolclass=NullPool)
        mode = declare_tables(None).mode
        question = select(mode.c.mode).where(mode.c.writer == name)
        while not meets.wait(BETWEEN_S):
            # Where the database was stopped just now, it does not matter how the outage begins.
            with suppress(OperationalError), engine.connect() as connection:
                if connection.scalar(question) == OutboxMode.LATER.value:
                    continue
            return

    def _leave_once(self, outage: Outage) -> None:
        began = time.monotonic()
        self._disturb(
            [outage.after_kills],
            lambda: self._servers.leave(outage.seconds, killed=outage.how == "killed"),
            f"outages_{outage.how}",
        )
        with self._changed:
            self._results.away_s += time.monotonic() - began

    def _life(self, name: str, episodes: list[Episode]) -> None:
        play = {
            "killed": self._killed,
            "zombie": self._zombie,
            "suspended": self._suspended,
            "rivals": self._rivals,
            "members": self._members,
        }
        for episode in episodes:
            try:
                play[episode.kind](name, episode.steps)
            except Exception as error:  # noqa: BLE001 - the harness's own failure is a finding as well
                self._find("error", name, f"{error}\n{traceback.format_exc()}")
                return

    def _killed(self, name: str, steps: Iterable[Step]) -> None:
        for index, step in enumerate(steps):
            if self._play(name, step) and index:
                with self._changed:
                    self._results.killed_again += 1

    def _play(self, name: str, step: Step) -> bool:
        """One process, started again as a supervisor would where a server was away. Whether it was killed."""
        for _ in range(ATTEMPTS):
            process = self._start(name, step)
            self._moment(process, step)
            killed = self._end(name, process, step)
            if killed or process.code != UNAVAILABLE:
                return killed
            self._servers.wait_up(BOUND_S)
        return False

    def _rivals(self, name: str, steps: tuple[Step, ...]) -> None:
        left, *rivals = steps
        self._play(name, left)
        started = [self._start(name, step) for step in rivals]
        again = [self._end(name, process, step) for process, step in zip(started, rivals, strict=True)]
        with self._changed:
            self._results.rivals += 1
            self._results.killed_again += sum(again)

    def _suspended(self, name: str, steps: tuple[Step, ...]) -> None:
        [step] = steps
        process = self._start(name, step)
        self._moment(process, step)
        if process.wait_stopped(BOUND_S) and process.stops:
            time.sleep(step.resumed_after_ms / 1000)
            process.signal(signal.SIGCONT)
            with self._changed:
                self._results.suspended[self._round.database][_point(step)] += 1
        self._end(name, process, step, resumed=True)

    def _zombie(self, name: str, steps: tuple[Step, ...]) -> None:
        paused, heir = steps
        for _ in range(ATTEMPTS):
            zombie = self._start(name, paused)
            self._moment(zombie, paused)
            if zombie.wait_stopped(BOUND_S) and zombie.stops:
                break
            self._end(name, zombie, paused)
            if zombie.code != UNAVAILABLE:
                return
            self._servers.wait_up(BOUND_S)
        else:
            return
        took_over = False
        for _ in range(ATTEMPTS):
            successor = self._start(name, heir)
            self._end(name, successor, heir, opening="paused")
            took_over = successor.opened_at is not None
            if took_over:
                break
            self._servers.wait_up(BOUND_S)
        zombie.signal(signal.SIGCONT)
        self._end(name, zombie, paused, resumed=True)
        if took_over:
            with self._changed:
                self._results.zombies[self._round.database][_point(paused)] += 1
                self._results.zombies_ended[EXITS.get(zombie.code, str(zombie.code))] += 1

    def _members(self, name: str, steps: tuple[Step, ...]) -> None:
        """All at once; again where one could not even open its writer, because a server was away."""
        for _ in range(ATTEMPTS):
            self._servers.wait_up(BOUND_S)
            if self._members_at_once(name, steps):
                return

    def _members_at_once(self, name: str, steps: tuple[Step, ...]) -> bool:
        """One that is paused goes on when its lease is over, and others have settled for it. Whether all could open."""
        started = [self._start(name, step) for step in steps]
        for process, step in zip(started, steps, strict=True):
            if step.resumed_after_ms and process.wait_stopped(BOUND_S) and process.stops:
                time.sleep(step.resumed_after_ms / 1000)
                process.signal(signal.SIGCONT)
                with self._changed:
                    self._results.suspended[self._round.database][_point(step)] += 1
        for process, step in zip(started, steps, strict=True):
            if self._end(name, process, step, resumed=bool(step.resumed_after_ms)):
                with self._changed:
                    self._results.members += 1
        return all(process.code != UNAVAILABLE or process.opened_at is not None for process in started)

    @staticmethod
    def _moment(process: Process, step: Step) -> None:
        if step.after_ms is not None and not process.wait(step.after_ms / 1000):
            process.signal(signal.Signals[step.moment])

    def _start(self, name: str, step: Step) -> Process:
        with self._changed:
            self._started[name] += 1
            label = f"{name}.{self._started[name]}"
        threads = self._round.threads.get(name, 1)
        way = self._round.ways.get(name, Way())
        job = {
            **self._job,
            "do": step.do,
            "name": label,
            "transactional_id": name,
            "pool": name,
            "batch": f"{name}-batch-{self._started[name] // 4}",
            "operations": step.operations,
            "abort": step.abort,
            "spoils": step.spoils,
            "armed_when_spoiled": step.failpoint,
            "threads": threads,
            "units_at_once": way.writes == "group",
            "session": way.writes == "sessions",
            "max_lanes": threads,
            "tasks": way.runs == "tasks",
        }
        if outbox := self._round.outboxes.get(name):
            job["outbox"] = outbox
        if name == outage_id(self._round.number):
            job["between_s"] = BETWEEN_S
        if step.do in OF_A_FLEET:
            job |= {"leased": True, "lease_timeout_s": MEMBER_LEASE_S, "between_s": BETWEEN_S, "stream": label}
        with (self._directory / "processes").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.monotonic(), "name": label, **asdict(step)}) + "\n")
        failpoint = step.failpoint if step.spoils is None else ""
        return self._forks.start(job, self._directory / f"{name}.log", failpoint)

    def _end(self, name: str, process: Process, step: Step, *, opening: str = "", resumed: bool = False) -> bool:
        """Wait for its end and count it. Whether it was killed as it should."""
        if not process.end(BOUND_S):
            self._find("hanging", name, f"{step} did not end in {BOUND_S} s: see the stacks in its log")
            return False
        armed = not resumed and (step.failpoint or step.after_ms is not None)
        with self._changed:
            if (
                not resumed
                and process.open_s is not None
                and self._started[name] > 1
                and step.do not in WITHOUT_A_RECOVERY
            ):
                self._record_opening(process, opening)
            if process.killed and armed:
                self._results.killed[self._round.database][_point(step)] += 1
                self._results.ways[self._way(name, step)] += 1
                self._results.spoiled += step.spoils is not None
                self._kills += 1
                self._changed.notify_all()
                return True
            self._results.ended[EXITS.get(process.code, str(process.code))] += 1
            if armed and process.code != UNAVAILABLE:
                self._results.missed[self._round.database][_point(step)] += 1
        if process.code == LOST:
            self._find("lost", name, f"{step} was told of a loss")
        elif process.code not in EXITS:
            log = (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            self._find("error", name, f"{step} ended with {process.code}: {log[-TAIL:]}")
        return False

    def _way(self, name: str, step: Step) -> str:
        """How the process writes, as results name it."""
        if step.do in OTHER_WAYS:
            return OTHER_WAYS[step.do]
        way = self._round.ways.get(name, Way())
        return f"{way.writes} in {way.runs}"

    def _record_opening(self, process: Process, opening: str) -> None:
        assert process.opened_at is not None
        assert process.open_s is not None
        if not opening:
            opening = "up" if self._servers.were_up(process.started_at, process.opened_at) else "away"
        self._results.recovery_s[opening].append(process.open_s)

    def _start_checker(self) -> Process:
        os.mkfifo(self._directory / "go")
        job = {
            **self._job,
            "do": "check",
            "name": "checker",
            "go": str(self._directory / "go"),
            "verdict": str(self._directory / "verdict.json"),
            "prefix": f"r{self._round.number}-",
            "timeout_s": 120.0,
            "aborts_hanging": self._servers.brokers > 1,
        }
        checker = self._forks.start(job, self._directory / "checker.log")
        assert checker.wait_opened(120), "the checker does not start"
        return checker

    def _check(self, checker: Process) -> None:
        if checker.code is None:
            os.close(os.open(self._directory / "go", os.O_WRONLY | os.O_NONBLOCK))
        checker.end(600)
        verdict = self._directory / "verdict.json"
        if not verdict.exists():
            log = (self._directory / "checker.log").read_text(encoding="utf-8", errors="replace")
            self._find("error", "checker", f"no verdict, ended with {checker.code}: {log[-TAIL:]}")
            return
        document = json.loads(verdict.read_text(encoding="utf-8"))
        for finding in document.pop("findings"):
            self._find(**finding)
        if self._results.outages and not document["waited"]:
            self._find("error", "outages", "Kafka was away, and no message has waited: the round shows nothing of that")
        self._results.hanging += document.pop("hanging")
        self._results.operations.update(document)

    def _find(self, kind: str, subject: str, detail: str) -> None:
        with self._changed:
            self._results.findings.append(
                {"round": self._round.number, "kind": kind, "subject": subject, "detail": detail}
            )


def _point(step: Step) -> str:
    return step.failpoint.partition(":")[0] or MOMENT


def _thread(call: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread
