"""The plan of a round, drawn from the seed: the same seed and number make the same round."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from dualwrite.runtime.failpoints import FAILPOINTS

WRITING = [name for name in FAILPOINTS if name.startswith("write.")]
SETTLING = [name for name in FAILPOINTS if name.startswith(("claim.", "settle."))]
TASK = [name for name in FAILPOINTS if name.startswith(("slot.", "ledger."))]
ABORTING = {"write.before_abort", "write.rolled_back"}
LEFT_BY = ["write.decided", "write.recorded", "write.prepared", "write.produced"]
NEEDS_DECIDED = {"settle.before_commit", "settle.committed"}
WITHOUT_LOCK = {"write.decided", "write.completed", *SETTLING}
"""Points at which a paused process holds no lock of SQLite: at others, no process could take over, and none has to."""

TASKS = {1: "blocks", 3: "sessions"}
"""Of every four writers, one uses blocks in tasks, and one the sessions of tasks."""

KILLS_PER_ROUND = 240
SQLITE_EVERY = 3
"""Every third round runs on SQLite."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        do: ``write``, ``settle`` (recover from outside) or ``task``.
        failpoint: What is armed.
        after_ms: When it gets ``moment``, a signal at no particular point; None for none.
        moment: The name of that signal.
        operations: How many operations each thread writes.
        abort: Which of them are aborted on purpose.
        resumed_after_ms: How long it stays paused if no other process takes over.
    """

    do: str = "write"
    failpoint: str = ""
    after_ms: int | None = None
    moment: str = "SIGKILL"
    operations: int = 4
    abort: tuple[int, ...] = ()
    resumed_after_ms: int = 0


@dataclass(frozen=True)
class Episode:
    """The fate of one transactional id: steps one after the other, or a zombie, or rivals at once.

    Attributes:
        kind: ``killed`` (one after the other), ``zombie`` (the first is paused, the second takes over, the first resumes),
            ``suspended`` (paused for a while; no other process takes over) or ``rivals`` (the first dies, the others settle at once).
        steps: The processes.
    """

    kind: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Round:
    """One round: fresh topic and database, several ids at once, servers that die meanwhile, and a check.

    Attributes:
        number: Its number.
        database: ``postgresql`` or ``sqlite``.
        partitions: Of the topic; every operation publishes to each.
        episodes: By id, what it goes through.
        threads: By id, how many threads or tasks write at once.
        tasks: The ids whose writers are asynchronous: each ``blocks``, or ``sessions`` that are bound.
        grouped: The ids whose threads write by group commit.
        broker_kills: After so many killed processes a broker is killed.
        broker_suspensions: After so many killed processes a broker is suspended for seconds.
        database_stops: After so many killed processes PostgreSQL is stopped.
        database_suspensions: After so many killed processes PostgreSQL is suspended for seconds.
    """

    number: int
    database: str
    partitions: int
    episodes: dict[str, list[Episode]]
    threads: dict[str, int]
    tasks: dict[str, str] = field(default_factory=dict)
    grouped: tuple[str, ...] = ()
    broker_kills: list[int] = field(default_factory=list)
    database_stops: list[int] = field(default_factory=list)
    broker_suspensions: list[int] = field(default_factory=list)
    database_suspensions: list[int] = field(default_factory=list)


def make_round(seed: int, number: int, *, kills: int = KILLS_PER_ROUND, brokers: int = 1) -> Round:
    """The round of that number. Several brokers need longer to come back, and are killed and suspended less often."""
    random_ = random.Random(f"{seed}/{number}")
    database = "sqlite" if number % SQLITE_EVERY == SQLITE_EVERY - 1 else "postgresql"
    names = [f"r{number}-w{index}" for index in range(3 if database == "sqlite" else 6)]
    pool = f"r{number}-pool"
    draw = _Draw(random_, database)
    episodes: dict[str, list[Episode]] = {name: [] for name in [*names, pool]}
    planned = 0
    while planned < kills:
        for name in names:
            episode = draw.episode()
            episodes[name].append(episode)
            planned += _kills(episode)
        episodes[pool].append(draw.task())
        planned += 1
    threads = {name: 1 if index % 3 < 2 else 3 for index, name in enumerate(names)}
    tasks = {name: TASKS[kind] for index, name in enumerate(names) if (kind := (number + index) % 4) in TASKS}
    often = 4 if brokers > 1 else 8 if database == "sqlite" else 14
    broker = max(1, kills * often // 240)
    stops = 0 if database == "sqlite" else max(1, kills * 18 // 240)
    suspended = max(1, kills * 6 // 240)
    return Round(
        number,
        database,
        random_.choice([2, 2, 3]),
        episodes,
        {**threads, pool: 1},
        tasks,
        # Of the ids with several threads, every second one.
        tuple(name for index, name in enumerate(names) if index % 3 == 2 and (index // 3 + number) % 2),
        _spread(random_, kills, broker),
        _spread(random_, kills, stops),
        _spread(random_, kills, suspended),
        _spread(random_, kills, suspended if stops else 0),
    )


def _kills(episode: Episode) -> int:
    return {"zombie": 1, "suspended": 0, "rivals": 2}.get(episode.kind, len(episode.steps))


def _spread(random_: random.Random, kills: int, count: int) -> list[int]:
    return sorted(random_.randrange(2, max(3, kills - 4)) for _ in range(count))


class _Draw:
    """Draws episodes. Points come from shuffled decks, so that each comes as often as any other."""

    def __init__(self, random_: random.Random, database: str) -> None:
        self._random = random_
        self._database = database
        self._decks: dict[str, list[str]] = {}

    def _next(self, deck: str, points: list[str]) -> str:
        left = self._decks.setdefault(deck, [])
        if not left:
            left.extend(points)
            self._random.shuffle(left)
        return left.pop()

    def episode(self) -> Episode:
        kinds = {"write": 28, "settle": 24, "moment": 14, "rivals": 8, "zombie": 20, "suspended": 12}
        kind = self._random.choices(list(kinds), list(kinds.values()))[0]
        return getattr(self, f"_{kind}")()

    def task(self) -> Episode:
        point = self._next("task", TASK * 2 + WRITING)
        if point in ABORTING:
            point = "ledger.inserted"  # nothing aborts a task on purpose
        nth = self._random.randint(1, 2) if point.startswith(("ledger.", "write.")) else 1
        return Episode("killed", (Step("task", f"{point}:{nth}", operations=3),))

    def _dying(self, point: str, action: str = "") -> Step:
        """A writer that meets its end at that point, in its second operation or later."""
        nth = self._random.randint(1, 4)
        if point in ABORTING:
            return Step(failpoint=f"{point}:1{action}", abort=(nth - 1,))
        return Step(failpoint=f"{point}:{nth * 2 if point == 'write.produced' else nth}{action}")

    def _write(self) -> Episode:
        return Episode("killed", (self._dying(self._next("write", WRITING)),))

    def _moment(self) -> Episode:
        return Episode("killed", (Step(after_ms=int(self._random.triangular(5, 900, 150)), operations=50),))

    def _settle(self) -> Episode:
        """Killed; its recoverer is killed, too, and perhaps the next one."""
        first = self._next("settle", SETTLING)
        left_by = "write.decided" if first in NEEDS_DECIDED else self._random.choice(LEFT_BY)
        points = [first]
        while self._random.random() < 0.3:
            points.append(self._random.choice(SETTLING))
        return Episode("killed", (self._dying(left_by), *(self._recoverer(point) for point in points)))

    def _recoverer(self, point: str) -> Step:
        # A command settles, but makes no producer of its own.
        outside = point not in {"claim.settled", "claim.initialized"} and self._random.random() < 0.3
        return Step("settle" if outside else "write", point, operations=2)

    def _rivals(self) -> Episode:
        left = self._dying(self._random.choice(["write.decided", "write.decided", "write.prepared"]))
        armed = self._recoverer(self._next("rival", SETTLING))
        return Episode("rivals", (left, Step("settle"), armed, Step("write", operations=2)))

    def _zombie(self) -> Episode:
        points = [*WRITING, *SETTLING]
        if self._database == "sqlite":
            points = [point for point in points if point in WITHOUT_LOCK]
        paused = self._paused(self._next("zombie", [*points, "moment"] if self._database == "postgresql" else points))
        return Episode("zombie", (paused, self._dying(self._next("heir", WRITING))))

    def _suspended(self) -> Episode:
        paused = self._paused(self._next("suspended", [*WRITING, *SETTLING, "moment"]))
        # Shorter and longer than the database lets an owner be paused inside a decision.
        return Episode("suspended", (replace(paused, resumed_after_ms=self._random.choice((100, 800, 2500))),))

    def _paused(self, point: str) -> Step:
        if point == "moment":
            return Step(after_ms=int(self._random.triangular(5, 900, 200)), moment="SIGSTOP", operations=50)
        if point in SETTLING:
            return Step(failpoint=f"{point}:1:stop")
        return self._dying(point, ":stop")
