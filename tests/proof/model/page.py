"""The report: ``python -m model.page RESULTS...`` takes the results of runs, adds them up, and writes the page.

Without results it writes the page again from the figures that the repository keeps; after ``--more`` results are added to
these. Give it runs whose seeds do not overlap, except for a seed that has run again once its finding was fixed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualwrite.failpoints import FAILPOINTS

PAGE = Path(__file__).parents[3] / "docs" / "proof-model.md"
FIGURES = Path(__file__).with_name("figures.json")
TASKS = Path(__file__).with_name("tasks.json")

HEAD = """\
# Random schedules

Real servers show a fault where a test has put it. A simulator can put it anywhere. Here the library's own code (claiming,
settling, the dual write, the producer and its judgement, the recovery command) runs as processes that stand still before each
request and each statement, and a seed draws what happens next: which process goes on, which is killed, what the network does
with a request or its answer, what happens to a database session, to the broker, to a transaction.
"""

METHOD = """\
## How it runs

The broker is simulated by rules that `make simulator` holds against a real one, answer for answer; the database has
PostgreSQL's row locks and sessions (READ COMMITTED or REPEATABLE READ), or SQLite's one writer; the client repeats requests,
reports deliveries and fails as librdkafka does. A schedule has one to four processes at a time, of one or two lanes, and
twenty to eighty steps of chance, each of which may be a fault. Then all that is held arrives, or never does, every live process
comes to rest, two recoveries run, and both sides are compared:

- every message that readers see is in the database and the other way round, whole, once, in order; except for recorded losses
  that the environment has caused (a transaction that was timed out or terminated);
- every "committed" and "aborted" that a caller got is true;
- no transaction holds readers back, except undecided ones whose abort was skipped unnoticed: an operator ends these;
- nothing hangs, no error blames the caller or an operator;
- the second recovery finds nothing to do and changes nothing.

What is found is made shorter, and is then a text that can be run again: `tests/proof/model/found` has what was found once.
"""

HANDED_OVER = """\
In the schedules from seed 1,000,000,000,000 on, workers hand over what they have prepared, on one to three slots, and drivers
decide on several of them at once, as the Spark sink does with a whole batch; a worker goes on with its producer where the row
says that it may. What nobody has decided must not be seen, not even a part of it. A batch of several tables has no schedules of its
own: `write_many` takes over the rows of every table inside the one transaction whose COMMIT decides, and adds no step.
"""

NATIVE = """\
In the schedules from seed 2,000,000,000,000 on, the brokers have transaction version 2, with a time limit or without, and
processes send with the native engine: its own sender, requests and rules of the wire, on simulated connections. In some of
them each process has one of the two engines, as in an upgrade and on the way back; settling meets what either has left.
"""

GROUPS = """\
In the schedules from seed 4,000,000,000,000 on, the callers of an owner submit units, and the owner commits them in groups of one to
five, by the product's own functions, each unit in a savepoint. Some fail and are rolled back alone; some have a conflict and run
again; some lose the connection of their group or roll it back, so that the others run again. Every caller must hear once what
became of its unit, and the units of one caller must be decided in their order.
"""

FLEETS = """\
In the schedules from seed 5,000,000,000,000 on, the owners are members of a fleet: the product's own keeper of leases takes their
ids, renews and gives them back, on simulated leases; time passes, so that those who stand still are taken for dead. No lease may be
taken from a member that still believes to hold it, and no id be free under which something is open. In half of these schedules no
recovery runs at the end: all members die, and a last one must settle for all of them.
"""

CONSUMERS = """\
In the schedules from seed 6,000,000,000,000 on, one to three members of a consumer group read messages and write a row and a message
for each, by the product's own thread that reads and its own workers, with the offsets in the Kafka transaction or as rows. They join,
leave, die and start again, stand still through rebalances in the middle of a transaction, are expelled, and settle what dead peers
have left. The simulated group fences by generation, and holds back committed offsets that are pending (KIP-447). Each input must
count once on both sides, in its order, and the offsets stand behind the last one and never move back. In half of these schedules no
recovery runs at the end: all members die, and a last one must settle for them, and read the rest.
"""

OF_TASKS = """\
## Tasks of an event loop

In schedules of their own, three to eight tasks share the one to three lanes of an `AsyncDualWriter`: blocks, bound `AsyncSession`s and units of
`submit`, as code or as a `RowUnit`; in three of ten schedules also the bound sessions of a `DualWriter`, side by side. Each request, each statement and each call of a
thread takes a time that the seed draws. Every second work is cancelled at some `await`, fail points raise, some units
have a limit to begin in, and a part of those that fail goes on after their end. SQLAlchemy, aiosqlite and SQLite
are the real ones; what they do in threads, tasks of the loop do, so that a seed runs the same again. At the end a next owner settles, and:

- each row has its message and the other way round, once, as its caller was told: committed, aborted, or cancelled with one of both;
- a cancelled dual write is over, before the decision or after its completion;
- what goes on after its unit has failed has written nothing;
- lanes are given first come, first served, and no task waits for something that nobody will do.
"""

UNITS = """\
## Units

Schedules of another kind are of [units](units.md): writers of units on brokers of both transaction versions, and jobs whose drivers
announce batches. Processes die at any step, requests are lost or late, connections break, transactions are timed out. Readers look
after every step: they may see whole units and batches alone, in their order, and at the end all that have ended for their writers.
`make model UNITS=4000` plays them, each kind from seed 0 on; 0 findings on 2026-11-24, on 2 cores, Linux x86_64, Python 3.11.7:

| | schedules | processes | killed | requests lost or late | connections broken | shown | aborted |
|---|--:|--:|--:|--:|--:|--:|--:|
| writers, transaction version 1 | 4,000 | 61,943 | 23,884 | 13,409 | 11,981 | 11,803 units | 7,579 |
| writers, transaction version 2 (`UNITS=1500`) | 1,500 | 22,429 | 8,897 | 4,808 | 5,145 | 4,549 units | 2,733 |
| jobs that announce batches | 4,000 | 58,492 | 36,015 | 18,762 | 24,279 | 12,000 batches | |

`tests/unit/units` plants eight mistakes in them, and finds each: such as a writer that does not look for an unfinished unit, or a
driver that announces before all tasks have written.

"""

FOOT = """\
## What this does not show

- The simulated client and database are written by hand, from sources and measurements. Only the simulated broker is held
  against a real one. What they do otherwise than the real ones is shown by the [runs on real servers](proof-chaos.md).
- Code below the ports: SQL, sockets, threads, forks, Spark, slots and ledgers.
- Messages that wait in the database: the simulated one keeps none. The [search](proof-search.md#messages-that-wait-in-the-database)
  has them, with random ways beyond its bounds, and so have the [faults](proof-faults.md) on real servers.
- Leaders that move to other brokers (they go away and come back), topics that are deleted, logs that are truncated, a database that loses commits.
- Chance tries much, not everything: within bounds, the [search](proof-search.md) does.
"""

_HAPPENED = {
    "schedules with the native engine": "schedules in which all processes send natively",
    "schedules with both engines": "schedules in which some send natively and some with librdkafka",
    "opens": "an owner starts, and settles what it finds",
    "recoveries": "an operator runs the recovery command",
    "kills": "a process is killed",
    "held": "a request is held back by the network",
    "late requests": "such a request arrives, late",
    "lost requests": "a request never arrives",
    "lost answers": "a request arrives and its answer is lost",
    "waits": "a process gives up waiting for an answer",
    "connections broken before": "a database connection breaks before a statement",
    "connections broken after": "it breaks after a statement, whose answer is lost",
    "connections broken during": "it breaks while the server works on a COMMIT",
    "orphans": "the server ends the session of a client that is gone",
    "sessions ended": "the server ends the sessions of a client that lives",
    "lock timeouts": "a lock is not free in time",
    "database stops": "the database is stopped at once, and started",
    "broker restarts": "the broker is restarted",
    "markers delayed": "the broker delays its markers",
    "leaders suspended": "the leader of a partition is suspended: no connection breaks",
    "leaders lost": "its session ends: the partition has no leader, and its markers are skipped",
    "leaders resumed": "it goes on, before everything heals",
    "undecided transactions ended by an operator": "an undecided transaction is left open, its abort skipped while nobody looked",
    "time-outs": "the broker times an open transaction out",
    "operator aborts": "an operator aborts an open transaction",
    "expired ids": "the broker forgets an id",
    "workers": "a worker starts, whose transactions others decide",
    "workers go on": "it goes on with its producer after it has rested",
    "units": "a caller submits a unit of group commit",
    "times that units run": "an owner runs the units that wait, group after group",
    "units that run again": "a unit runs more than once",
    "members": "a member of a fleet starts, and takes an id",
    "heartbeats": "a member sends a heartbeat",
    "times that seconds pass": "seconds pass, or the time of a lease",
    "leases found lost": "a heartbeat finds that the lease was taken",
    "leases lost before the claim": "a member finds that its lease was taken before it had claimed the id",
    "members go on": "a member goes on under another id",
    "members seen to be dead beside another": "a member sees that one in its place was killed",
    "dead members settled for": "a member settles for another one",
    "last members": "all members die, and a last one settles for them",
    "consumers": "a consumer starts, and joins its group",
    "times that input comes": "messages come for the group",
    "polls": "a consumer polls",
    "units of consumers": "a consumer's worker takes a unit",
    "members expelled": "the group expels a member, dead or alive",
    "peers settled": "a consumer settles for a dead peer",
    "last consumers": "all consumers die, and a last one settles for them and reads the rest",
    "drivers": "a driver decides on what workers have handed over",
    "completed without a claim": "such a transaction is completed without a claim",
    "settlers": "a driver claims and settles slots, even if tasks work there",
    "closes": "an owner closes",
    "housekeeping": "an owner settles what it has left behind",
    "quiet points": "all comes to rest, and both sides are compared",
}
_PLACES = ("kills", "held", "late requests", "lost requests", "lost answers")
_TOLD = {
    "committed": "committed",
    "completed": "handed over, then decided and completed",
    "handed over": "handed over",
    "decided": "decided, Kafka will follow",
    "aborted": "aborted",
    "lost": "decided and lost, by a time-out or an operator",
    "unknown": "in doubt",
}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the page, of several runs together."""
    about = ("began", "command", "first_seed", "last_seed", "machine", "schedules", "schedules_per_second", "seconds")
    found = [finding for run in runs for finding in run["findings"]]
    total: dict[str, Any] = {
        "runs": [{name: run[name] for name in (*about, "stopped")} for run in runs],
        "schedules": sum(run["schedules"] for run in runs),
        "findings": [finding for finding in found if not _ran_well_since(finding["seed"], runs)],
        "fixed": sorted({finding["seed"] for finding in found if _ran_well_since(finding["seed"], runs)}),
    }
    for name in ("happened", "passed", "told"):
        total[name] = sum((Counter(run[name]) for run in runs), Counter())
    total["places"] = {kind: sum((Counter(run["places"].get(kind, {})) for run in runs), Counter()) for kind in _PLACES}
    return total


def added(kept: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the page, of what is kept and of more runs."""
    total: dict[str, Any] = {name: kept[name] + more[name] for name in ("runs", "schedules", "findings")}
    total["fixed"] = sorted({*kept.get("fixed", ()), *more["fixed"]})
    for name in ("happened", "passed", "told"):
        total[name] = Counter(kept[name]) + Counter(more[name])
    total["places"] = {kind: Counter(kept["places"][kind]) + Counter(more["places"][kind]) for kind in _PLACES}
    return total


def _ran_well_since(seed: int, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the newest run of a seed has found nothing with it."""
    newest = max(
        (run for run in runs if run["first_seed"] <= seed <= run["last_seed"]), key=lambda run: str(run["began"])
    )
    return all(finding["seed"] != seed for finding in newest["findings"])


def render(figures: Mapping[str, Any], tasks: Mapping[str, Any] | None = None) -> str:
    """The page as Markdown; with the figures of the schedules of tasks, if there are any."""
    happened, told = figures["happened"], figures["told"]
    return "\n".join(
        [
            HEAD,
            f"**{figures['schedules']:,} schedules**, {happened['calls served']:,} requests and statements, "
            f"{happened['kills']:,} killed processes, {happened['late requests']:,} requests that came late: "
            f"**{len(figures['findings'])}** findings.",
            *_fixed(figures.get("fixed", ())),
            "",
            "| run | date (UTC) | seeds | schedules | a second | minutes | machine |",
            "|---|---|---|--:|--:|--:|---|",
            *(_run(run) for run in figures["runs"]),
            "",
            METHOD,
            *([HANDED_OVER] if happened.get("drivers") else []),
            *([NATIVE] if happened.get("schedules with the native engine") else []),
            *([GROUPS] if happened.get("units") else []),
            *([FLEETS] if happened.get("members") else []),
            *([CONSUMERS] if happened.get("consumers") else []),
            "## What has happened",
            "",
            "| what | times |",
            "|---|--:|",
            *(f"| {what} | {happened[kind]:,} |" for kind, what in _HAPPENED.items() if kind in happened),
            "",
            f"{happened['writes']:,} dual writes were begun{_units(happened)}. Their owners were told:",
            "",
            "| what | times |",
            "|---|--:|",
            *(f"| {what} | {told[kind]:,} |" for kind, what in _TOLD.items() if kind in told),
            f"| nothing: the process was killed first | {sum(told.values()) - sum(told.get(k, 0) for k in _TOLD):,} |",
            "",
            *_places(figures["places"]),
            *_passed(figures["passed"]),
            *([] if tasks is None else _tasks(tasks)),
            UNITS,
            FOOT,
        ]
    )


def _units(happened: Mapping[str, int]) -> str:
    return f", and {happened['units']:,} units of others submitted" if happened.get("units") else ""


def _tasks(run: Mapping[str, Any]) -> list[str]:
    happened, finding = run["happened"], run["finding"]
    told = sorted((what, times) for what, times in happened.items() if what.startswith("told: "))
    return [
        OF_TASKS,
        f"`{run['command']}`: **{happened['schedules']:,} schedules** in {run['seconds'] / 60:.0f} minutes, "
        f"{happened['dual writes and units']:,} dual writes and units, {happened['cancellations']:,} cancellations, "
        f"{happened['fail points raised']:,} of {happened['fail points']:,} fail points passed raised: "
        f"**{'0' if finding is None else '1'}** findings ({run['machine']}).",
        "",
        "| callers were told | times |",
        "|---|--:|",
        *(f"| {what.removeprefix('told: ')} | {times:,} |" for what, times in told),
        "",
        "With `MISTAKE=cancelled_after_the_decision` some fifty schedules find it.",
        "",
    ]


def _fixed(seeds: Sequence[int]) -> list[str]:
    if not seeds:
        return []
    named = " and ".join(f"{seed:,}" for seed in seeds)
    if len(seeds) == 1:
        return [
            f"On the way, a finding ended the run (seed {named}). It is fixed, and the seed has run again without it."
        ]
    return [
        f"On the way, findings ended runs (seeds {named}). They are fixed, and the seeds have run again without them."
    ]


def _run(run: Mapping[str, Any]) -> str:
    stopped = f" (stopped by {run['stopped']})" if run["stopped"] else ""
    return (
        f"| `{run['command']}`{stopped} | {run['began']} | {run['first_seed']} to {run['last_seed']} | "
        f"{run['schedules']:,} | {run['schedules_per_second']:.0f} | {run['seconds'] / 60:.0f} | {run['machine']} |"
    )


def _places(places: Mapping[str, Mapping[str, int]]) -> list[str]:
    labels = sorted(set().union(*places.values()))
    return [
        "## Before which request or statement",
        "",
        f"| | {' | '.join(_PLACES)} |",
        f"|---|{'--:|' * len(_PLACES)}",
        *(
            f"| `{label}` | " + " | ".join(f"{places[kind].get(label, 0):,}" for kind in _PLACES) + " |"
            for label in labels
        ),
        "",
        "`pause` is a wait before something is asked again.",
        "",
    ]


def _passed(passed: Mapping[str, int]) -> list[str]:
    rows = [f"| `{point}` | {passed[point]:,} |" for point in FAILPOINTS if passed.get(point)]
    return ["## Fail points passed", "", "| point | times |", "|---|--:|", *rows, ""]


def main(paths: Sequence[str]) -> None:
    """Take in the runs, if there are any, and write the page."""
    if paths:
        is_more = paths[0] == "--more"
        figures = summary([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths[is_more:]])
        if is_more:
            figures = added(json.loads(FIGURES.read_text(encoding="utf-8")), figures)
        FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(
        render(*(json.loads(kept.read_text(encoding="utf-8")) for kept in (FIGURES, TASKS))), encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
