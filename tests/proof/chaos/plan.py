"""The plan of a round, drawn from the seed: the same seed and number make the same round."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from dualwrite.failpoints import FAILPOINTS

WAITING = ["write.falls_back", "write.turns", "write.waits"]
"""Passed only while Kafka is away: each outage has a process of its own that is armed there."""
SENDING = [name for name in FAILPOINTS if name.startswith("outbox.") and name != "outbox.moved_aside"]
"""Passed once Kafka is back. No message of the run is refused, so none is moved aside."""
WRITING = [name for name in FAILPOINTS if name.startswith("write.") and name not in WAITING]
SETTLING = [name for name in FAILPOINTS if name.startswith(("claim.", "settle."))]
TASK = [name for name in FAILPOINTS if name.startswith(("slot.", "ledger."))]
# The units of the run are functions. Units of rows are killed in tests/integration/test_group_commit.py.
GROUPING = [name for name in FAILPOINTS if name.startswith("group.") and name != "group.rows_executed"]
LEASING = [name for name in FAILPOINTS if name.startswith("lease.")]
ABORTING = {"write.before_abort", "write.rolled_back"}
LEFT_BY = ["write.decided", "write.recorded", "write.prepared", "write.produced"]
NEEDS_DECIDED = {"settle.before_commit", "settle.committed"}
WITHOUT_LOCK = {"write.decided", "write.completed", *SETTLING}
"""Points at which a paused process holds no lock of SQLite: at others, no process could take over, and none has to."""


@dataclass(frozen=True)
class Way:
    """How a writer writes.

    Attributes:
        runs: In ``threads``, or in ``tasks`` of an event loop.
        writes: In ``blocks``, in ``sessions`` that are bound, or by ``group`` commit.
    """

    runs: str = "threads"
    writes: str = "blocks"


WAYS = (Way(), Way("tasks", "blocks"), Way("threads", "sessions"), Way("tasks", "sessions"))
"""Those of every four writers."""
GROUPED = {1, 2}
"""Of every four writers with several threads or tasks, one writes by group commit in tasks, and one in threads."""
UNITS = 6
"""So many units has each caller of group commit under way at once."""
CLOSING = ("lease.settled", "lease.given_back")
FLEET_EVERY = 2
"""Each fleet has an episode for so many of each writer's: its members live for seconds."""
FLEETS = 2
MEMBER_OPERATIONS = 80
PAUSED_MEMBER_MS = 6000
"""Long enough for another member to settle, and to give the id back as free."""

OUTBOXES = ("fallback", "always", "fallback", "never")
"""Of every four writers, where Kafka has outages: what becomes of their messages meanwhile."""
OUTAGES_PER_ROUND = 24
SECONDS_AWAY = {2: 8, 6: 8, 15: 4, 45: 2, 120: 1}
"""How long an outage lasts, in seconds, with its weight."""
OUTAGE_OPERATIONS = 200
"""So many operations has a process that is to meet an outage, or the sending after it."""

KILLS_PER_ROUND = 240
SQLITE_EVERY = 3
"""Every third round runs on SQLite."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        do: ``write``, ``settle`` (recover from outside), ``task``, ``member`` (of a fleet: its id is leased) or ``last member``
            (waits until no other id of the fleet is left to settle).
        failpoint: What is armed.
        after_ms: When it gets ``moment``, a signal at no particular point; None for none.
        moment: The name of that signal.
        operations: How many operations each thread writes.
        abort: Which of them are aborted on purpose.
        spoils: Which unit of the first caller ends its whole group, by losing the database's connection. The fail point is armed
            then: the process dies while the others run again.
        resumed_after_ms: How long it stays paused if no other process takes over.
    """

    do: str = "write"
    failpoint: str = ""
    after_ms: int | None = None
    moment: str = "SIGKILL"
    operations: int = 4
    abort: tuple[int, ...] = ()
    spoils: int | None = None
    resumed_after_ms: int = 0


@dataclass(frozen=True)
class Episode:
    """The fate of one transactional id: steps one after the other, or a zombie, or rivals at once.

    Attributes:
        kind: ``killed`` (one after the other), ``zombie`` (the first is paused, the second takes over, the first resumes),
            ``suspended`` (paused for a while; no other process takes over), ``rivals`` (the first dies, the others settle at once)
            or ``members`` (of a fleet, all at once; one that is paused goes on when its lease is long over).
        steps: The processes.
    """

    kind: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Outage:
    """Kafka is away, all of it.

    Attributes:
        after_kills: It begins after so many killed processes.
        seconds: How long it lasts.
        how: The brokers are ``killed``, and started again at its end; or ``suspended``: no connection breaks.
        meets: A process that is at work when it begins, and is armed where messages come to wait.
        sends: What becomes of the processes that send these messages afterwards.
    """

    after_kills: int
    seconds: int
    how: str
    meets: Step
    sends: Episode


@dataclass(frozen=True)
class Round:
    """One round: fresh topic and database, several ids at once, servers that die meanwhile, and a check.

    Attributes:
        number: Its number.
        database: ``postgresql`` or ``sqlite``.
        partitions: Of the topic; every operation publishes to each.
        episodes: By id, what it goes through.
        threads: By id, how many threads or tasks write at once.
        ways: By id, how it writes, if not in blocks in threads.
        broker_kills: After so many killed processes a broker is killed.
        broker_suspensions: After so many killed processes a broker is suspended for seconds.
        database_stops: After so many killed processes PostgreSQL is stopped.
        database_suspensions: After so many killed processes PostgreSQL is suspended for seconds.
        outboxes: By id, the setting of its writer.
        outages: When Kafka is away, and the writers go on.
    """

    number: int
    database: str
    partitions: int
    episodes: dict[str, list[Episode]]
    threads: dict[str, int]
    ways: dict[str, Way] = field(default_factory=dict)
    broker_kills: list[int] = field(default_factory=list)
    database_stops: list[int] = field(default_factory=list)
    broker_suspensions: list[int] = field(default_factory=list)
    database_suspensions: list[int] = field(default_factory=list)
    outboxes: dict[str, str] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)


def make_round(
    seed: int, number: int, *, kills: int = KILLS_PER_ROUND, brokers: int = 1, outages: bool = False
) -> Round:
    """The round of that number. Several brokers need longer to come back, and are killed and suspended less often.

    With ``outages``, Kafka is away for seconds to minutes now and then, and most writers let their messages wait meanwhile.
    """
    random_ = random.Random(f"{seed}/{number}")
    database = "sqlite" if number % SQLITE_EVERY == SQLITE_EVERY - 1 else "postgresql"
    names = [f"r{number}-w{index}" for index in range(3 if database == "sqlite" else 6)]
    pool = f"r{number}-pool"
    fleets = [f"r{number}-fleet{index}" for index in range(FLEETS)]
    threads = {name: 1 if index % 3 < 2 else 3 for index, name in enumerate(names)}
    ways = {name: _way((number + index) % 4, threads[name]) for index, name in enumerate(names)}
    draw = _Draw(random_, database)
    episodes: dict[str, list[Episode]] = {name: [] for name in [*names, pool, *fleets]}
    planned = 0
    for turn in itertools.count():
        if planned >= kills:
            break
        for name in names:
            episode = draw.episode(grouped=ways[name].writes == "group")
            episodes[name].append(episode)
            planned += _kills(episode)
        episodes[pool].append(draw.task())
        planned += 1
        for fleet in fleets if turn % FLEET_EVERY == 0 else ():
            episodes[fleet].append(draw.members())
            planned += _kills(episodes[fleet][-1])
    for fleet in fleets:
        episodes[fleet].append(Episode("killed", (Step("last member", operations=2),)))
    often = 4 if brokers > 1 else 8 if database == "sqlite" else 14
    broker = max(1, kills * often // 240)
    stops = 0 if database == "sqlite" else max(1, kills * 18 // 240)
    suspended = max(1, kills * 24 // 240)
    round_ = Round(
        number,
        database,
        random_.choice([2, 2, 3]),
        episodes,
        {**threads, pool: 1, **dict.fromkeys(fleets, 1)},
        ways,
        _spread(random_, kills, broker),
        _spread(random_, kills, stops),
        _spread(random_, kills, suspended),
        _spread(random_, kills, suspended if stops else 0),
    )
    return _with_outages(round_, random.Random(f"{seed}/{number}/outages"), kills, names) if outages else round_


def outage_id(number: int) -> str:
    """The id of the processes that meet the outages of a round."""
    return f"r{number}-outage"


def _with_outages(round_: Round, random_: random.Random, kills: int, names: list[str]) -> Round:
    """The same round, whose Kafka is away now and then. What is drawn besides stays as it is."""
    seconds, weights = list(SECONDS_AWAY), list(SECONDS_AWAY.values())
    draw = _Draw(random_, round_.database)
    outages = [
        Outage(after, random_.choices(seconds, weights)[0], random_.choice(["killed", "suspended"]), *draw.waiting())
        for after in _spread(random_, kills, max(1, kills * OUTAGES_PER_ROUND // 240))
    ]
    outboxes = {name: OUTBOXES[(round_.number + index) % len(OUTBOXES)] for index, name in enumerate(names)}
    outboxes[outage_id(round_.number)] = "fallback"
    return replace(round_, outboxes=outboxes, outages=outages)


def _way(kind: int, threads: int) -> Way:
    """Of a writer that is one of four kinds."""
    return replace(WAYS[kind], writes="group") if threads > 1 and kind in GROUPED else WAYS[kind]


def _kills(episode: Episode) -> int:
    if episode.kind == "members":
        return sum(step.failpoint != "" and not step.resumed_after_ms for step in episode.steps)
    return {"zombie": 1, "suspended": 0, "rivals": 2}.get(episode.kind, len(episode.steps))


def _spread(random_: random.Random, kills: int, count: int) -> list[int]:
    return sorted(random_.randrange(2, max(3, kills - 4)) for _ in range(count))


class _Draw:
    """Draws episodes. Points come from shuffled decks, so that each comes as often as any other."""

    def __init__(self, random_: random.Random, database: str) -> None:
        self._random = random_
        self._database = database
        self._grouped = False
        self._decks: dict[str, list[str]] = {}

    def _next(self, deck: str, points: list[str]) -> str:
        left = self._decks.setdefault(deck, [])
        if not left:
            left.extend(points)
            self._random.shuffle(left)
        return left.pop()

    @property
    def _of_writing(self) -> list[str]:
        return [*WRITING, *GROUPING, *GROUPING] if self._grouped else WRITING

    def episode(self, *, grouped: bool = False) -> Episode:
        """One of a writer's.

        Args:
            grouped: Whether it writes by group commit.
        """
        self._grouped = grouped
        kinds = {"write": 28, "settle": 24, "moment": 14, "rivals": 8, "zombie": 26, "suspended": 26}
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
        if self._grouped:
            return self._dying_in_a_group(point, action)
        nth = self._random.randint(1, 4)
        if point in ABORTING:
            return Step(failpoint=f"{point}:1{action}", abort=(nth - 1,))
        return Step(failpoint=f"{point}:{nth * 2 if point == 'write.produced' else nth}{action}")

    def _dying_in_a_group(self, point: str, action: str) -> Step:
        """As :meth:`_dying`; or while units run again, after one that has ended their group."""
        if point in ABORTING:
            return Step(failpoint=f"{point}:1{action}", operations=UNITS, abort=tuple(range(UNITS)))
        abort = (
            (self._random.randrange(2, UNITS),) if point == "group.unit_dropped" or self._random.random() < 0.3 else ()
        )
        of_units = point in {"write.produced", "group.unit_begun", "group.unit_kept"}
        nth = self._random.randint(1, 2 * UNITS if of_units else 2)
        spoils = None
        if self._database == "postgresql" and not action and self._random.random() < 0.4:
            spoils, nth = self._random.randrange(2), -(-nth // 2)
        return Step(failpoint=f"{point}:{nth}{action}", operations=UNITS, abort=abort, spoils=spoils)

    def members(self) -> Episode:
        """Members of a fleet: one is killed, one is killed or paused beyond its lease, one lives and settles for them."""
        self._grouped = False
        killed = replace(self._dying(self._random.choice(LEFT_BY)), do="member")
        second = self._next("member", [*LEASING, *LEASING, *SETTLING, "paused", "paused", "paused", "paused"])
        living = Step("member", operations=MEMBER_OPERATIONS)
        if second == "paused":
            points = [*LEASING[:2], *WRITING]
            if self._database == "sqlite":
                points = [point for point in ["lease.taken", *WRITING] if point in {"lease.taken", *WITHOUT_LOCK}]
            point = self._next("paused member", [point for point in points if point not in ABORTING])
            paused = replace(
                self._dying(point, ":stop"),
                do="member",
                operations=MEMBER_OPERATIONS // 2,
                resumed_after_ms=PAUSED_MEMBER_MS,
            )
            return Episode("members", (killed, paused, living))
        # A member claims its own id first, and then those of dead ones.
        nth = self._random.randint(1, 4 if second == "lease.heartbeat" else 2 if second.startswith("claim.") else 1)
        operations = 4 if second in CLOSING else MEMBER_OPERATIONS
        return Episode("members", (killed, Step("member", f"{second}:{nth}", operations=operations), living))

    def waiting(self) -> tuple[Step, Episode]:
        """A process that dies as its messages come to wait, and one that dies, or is paused and replaced, as it sends them."""
        meets = Step(failpoint=f"{self._next('waiting', WAITING)}:1", operations=OUTAGE_OPERATIONS)
        # At these points a paused process holds SQLite's lock.
        zombie = self._database == "postgresql" and self._random.random() < 0.5
        point = self._next(f"sending {zombie}", SENDING)
        sender = Step(failpoint=f"{point}:1{':stop' if zombie else ''}", operations=OUTAGE_OPERATIONS)
        if zombie:
            return meets, Episode("zombie", (sender, Step(failpoint="write.completed:2", operations=OUTAGE_OPERATIONS)))
        return meets, Episode("killed", (sender,))

    def _write(self) -> Episode:
        return Episode("killed", (self._dying(self._next(f"write {self._grouped}", self._of_writing)),))

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
        points = [*self._of_writing, *SETTLING]
        if self._database == "sqlite":
            points = [point for point in points if point in WITHOUT_LOCK]
        points = [*points, "moment"] if self._database == "postgresql" else points
        paused = self._paused(self._next(f"zombie {self._grouped}", points))
        return Episode("zombie", (paused, self._dying(self._next("heir", WRITING))))

    def _suspended(self) -> Episode:
        points = [*self._of_writing, *SETTLING, "moment"]
        paused = self._paused(self._next(f"suspended {self._grouped}", points))
        # Shorter and longer than the database lets an owner be paused inside a decision.
        return Episode("suspended", (replace(paused, resumed_after_ms=self._random.choice((100, 800, 2500))),))

    def _paused(self, point: str) -> Step:
        if point == "moment":
            return Step(after_ms=int(self._random.triangular(5, 900, 200)), moment="SIGSTOP", operations=50)
        if point in SETTLING:
            return Step(failpoint=f"{point}:1:stop")
        return self._dying(point, ":stop")
