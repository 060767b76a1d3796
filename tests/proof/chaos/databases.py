"""The part of the run for one kind of database: ``make chaos DATABASE=rocksdb N=500``.

Writers of one id, one after the other on a database of that kind, die at a fail point or at any moment; of those that settle,
some die while they settle. The next one goes on. Others are paused there, and go on when the next one has come to its end. Of
RocksDB, which one process has open at a time, each opens it again, and none is paused. Every 25 kills a round ends: a last
writer settles and ends by itself, nothing may be left to recover, and both sides must be equal.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from harness.checker import Case
from harness.worker import FENCED, UNAVAILABLE
from harness.zookeeper_worker import ZooKeeperCase
from harness.zookeeper_worker import database_of as zookeeper_of
from sqlalchemy import create_engine

from chaos.plan import ABORTING, LEFT_BY, NEEDS_DECIDED, SETTLING, WRITING
from chaos.results import Results
from chaos.tables import MOMENT
from dualwrite import status
from dualwrite.interfaces import Database
from dualwrite.migrations import upgrade
from dualwrite.stores.keyed.rocksdb import RocksDatabase
from dualwrite.stores.sql.database import database_of
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres

KILLS_PER_ROUND: Final = 25
OPERATIONS: Final = 4
ZOMBIE: Final = "zombie"
ALONE: Final = frozenset({"rocksdb", "sqlite"})
"""Kinds of which no second process can go on while one is paused: it has the files, or a lock that knows no time-out."""
PAUSED_OWNER_S: Final = 1.0
MOST_IN_VAIN: Final = 3
"""No round goes on after so many writers per kill: they do not reach what they are to die at."""

Make = Callable[[Path, EmbeddedKafka, str], Case]
"""Makes an empty database for a round, whose files are in the directory, with the topic."""


def _rocksdb(stack: ExitStack) -> Make:
    del stack

    def make(directory: Path, kafka: EmbeddedKafka, topic: str) -> Case:
        RocksDatabase(directory / "rocks").close()
        return Case(directory, kafka.client_config(), f"rocksdb://{directory / 'rocks'}", topic)

    return make


def _zookeeper(stack: ExitStack) -> Make:
    from kazoo.client import KazooClient

    from dualwrite.testing import EmbeddedZooKeeper

    server = stack.enter_context(EmbeddedZooKeeper())

    def make(directory: Path, kafka: EmbeddedKafka, topic: str) -> Case:
        root = f"chaos-{secrets.token_hex(4)}"
        client = KazooClient(server.hosts)
        client.start(timeout=60)
        client.create(f"/{root}-user")
        client.stop()
        client.close()
        return ZooKeeperCase(directory, kafka.client_config(), f"{server.hosts}/{root}", topic)

    return make


def _sql(new_url: Callable[[Path], str]) -> Make:
    def make(directory: Path, kafka: EmbeddedKafka, topic: str) -> Case:
        url = new_url(directory)
        engine = create_engine(url)
        with engine.connect() as connection:
            upgrade(connection)
        engine.dispose()
        return Case(directory, kafka.client_config(), url, topic)

    return make


def _mariadb(stack: ExitStack) -> Make:
    from dualwrite.testing import EmbeddedMariaDB

    server = stack.enter_context(EmbeddedMariaDB())
    return _sql(lambda _: server.create_database())


def _postgresql(stack: ExitStack) -> Make:
    server = stack.enter_context(EmbeddedPostgres())
    return _sql(lambda _: server.create_database())


def _sqlite(stack: ExitStack) -> Make:
    del stack
    return _sql(lambda directory: f"sqlite:///{directory / 'rows.db'}")


KINDS: Final[dict[str, Callable[[ExitStack], Make]]] = {
    "rocksdb": _rocksdb,
    "zookeeper": _zookeeper,
    "mariadb": _mariadb,
    "postgresql": _postgresql,
    "sqlite": _sqlite,
}


class Databases:
    """Kills writers on one kind of database.

    Args:
        kind: Its name in :data:`KINDS`.
        directory: For the rounds' files.
        results: Takes the counts.
        seed: Draws what happens.
        save: Called after each round.
    """

    def __init__(self, kind: str, directory: Path, results: Results, seed: int, save: Callable[[], None]) -> None:
        self._kind = kind
        self._directory = directory
        self._results = results
        self._save = save
        self._deck: list[str] = []
        for name in ("killed", "missed", "zombies", "counts"):
            results.databases.setdefault(f"{kind} {name}", Counter())
        # A run that goes on draws other things than before.
        self._random = random.Random(f"{seed} {kind} {self._counts['rounds'] or ''}".rstrip())

    def run(self, kills: int, stop_after_s: float = float("inf")) -> None:
        """Kill so many. No round begins after that time."""
        start = time.monotonic()
        with ExitStack() as stack:
            kafka = stack.enter_context(EmbeddedKafka())
            make = KINDS[self._kind](stack)
            while self._killed.total() < kills and not self._results.findings:
                if time.monotonic() - start > stop_after_s:
                    return
                began = time.monotonic()
                number = self._counts["rounds"]
                directory = self._directory / f"{self._kind}-{number}-{secrets.token_hex(3)}"
                directory.mkdir(parents=True)
                topic = kafka.create_topic(f"{self._kind}-{secrets.token_hex(4)}", 2)
                try:
                    self._round(make(directory, kafka, topic), min(KILLS_PER_ROUND, kills - self._killed.total()))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                    detail = f"{error}\n{traceback.format_exc()}"
                    self._results.findings.append({"kind": "error", "subject": str(directory), "detail": detail})
                    sys.stdout.write(f"  FOUND {detail[:3000]}\n")
                self._counts["rounds"] += 1
                self._results.seconds += time.monotonic() - began
                self._save()
                sys.stdout.write(
                    f"{self._kind}, round {number}: {self._killed.total()} of {kills} killed, "
                    f"{self._counts['operations']} operations, {len(self._results.findings)} findings, "
                    f"{time.monotonic() - began:.0f} s\n"
                )
                sys.stdout.flush()

    @property
    def _killed(self) -> Counter[str]:
        return self._results.databases[f"{self._kind} killed"]

    @property
    def _counts(self) -> Counter[str]:
        return self._results.databases[f"{self._kind} counts"]

    def _round(self, case: Case, kills: int) -> None:
        before, tried = self._killed.total(), 0
        while self._killed.total() - before < kills and tried < MOST_IN_VAIN * kills:
            tried += 1
            self._episode(case)
        case.run(operations=1)
        with _opened(case) as database:
            left = [item for item in status(kafka=case.kafka, database=database) if item.needs_recovery]
        if left:
            raise AssertionError(f"left to recover after the last writer: {left}")
        rows = case.verify()
        history = case.history
        self._counts["operations"] += len(history.begun)
        self._counts["acknowledged"] += len(history.acknowledged)
        self._counts["present"] += len(rows)

    def _episode(self, case: Case) -> None:
        point = self._next()
        if point == ZOMBIE:
            self._zombie(case, self._random.choice([one for one in WRITING if one not in ABORTING]))
            return
        if point == MOMENT:
            self._play(case, MOMENT, "", after_s=self._random.triangular(0.005, 1.2, 0.2))
            return
        if point in SETTLING:
            left_by = "write.decided" if point in NEEDS_DECIDED else self._random.choice(LEFT_BY)
            self._play(case, left_by, self._dying(left_by))
            self._play(case, point, point)
            return
        abort = [1] if point in ABORTING else []
        self._play(case, point, f"{point}:1" if abort else self._dying(point), abort=abort)

    def _zombie(self, case: Case, point: str) -> None:
        """One is paused, the next one writes and ends, and the paused one goes on."""
        zombie = case.fork(
            failpoint=f"{self._dying(point)}:stop", operations=OPERATIONS, paused_owner_timeout_s=PAUSED_OWNER_S
        )
        if zombie.stops():
            case.run(operations=1, paused_owner_timeout_s=PAUSED_OWNER_S)
            os.kill(zombie.process.pid, signal.SIGCONT)
            self._results.databases[f"{self._kind} zombies"][point] += 1
        zombie.end({0, FENCED, UNAVAILABLE})

    def _next(self) -> str:
        if not self._deck:
            zombies = 0 if self._kind in ALONE else 6
            self._deck = [*WRITING, *SETTLING, *([MOMENT] * 4), *([ZOMBIE] * zombies)]
            self._random.shuffle(self._deck)
        return self._deck.pop()

    def _dying(self, point: str) -> str:
        nth = self._random.randint(1, OPERATIONS - 1)
        return f"{point}:{nth * 2 if point == 'write.produced' else nth}"

    def _play(self, case: Case, point: str, failpoint: str, **more: object) -> None:
        code = case.run(killed=None, failpoint=failpoint, operations=OPERATIONS, **more)
        died = code == -signal.SIGKILL
        self._results.databases[f"{self._kind} {'killed' if died else 'missed'}"][point] += 1


@contextmanager
def _opened(case: Case) -> Generator[Database, None, None]:
    database = zookeeper_of(case.url) if isinstance(case, ZooKeeperCase) else database_of(case.url)
    try:
        yield database
    finally:
        database.close()
