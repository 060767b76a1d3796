"""The report: ``python -m chaos.page RUN...`` takes the results of runs, adds them up, and writes page and picture.

Without runs it writes them again from the figures that the repository keeps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos import units_page
from chaos.consumers_page import consumers_of
from chaos.consumers_page import section as consumers
from chaos.database_page import NAMES as KINDS_SHOWN
from chaos.database_page import database_of
from chaos.database_page import section as databases
from chaos.later_page import killed_by, later_of
from chaos.later_page import section as later
from chaos.plot import shares
from chaos.results import Results
from chaos.state_page import section as states
from chaos.state_page import states_of
from chaos.tables import sum_of, table
from dualwrite.testing import Kind

DOCS = Path(__file__).parents[3] / "docs"
PAGE, PICTURE = DOCS / "proof-chaos.md", DOCS / "proof-chaos-recovery.svg"
FIGURES = Path(__file__).with_name("figures.json")
SPARK_FIGURES = Path(__file__).with_name("spark.json")
SERIES = {
    "up": "all servers up",
    "away": "a server was away meanwhile",
    "paused": "a paused owner held the row",
}


def summary(runs: Sequence[Results]) -> dict[str, Any]:
    """The figures of the page, of several runs together."""
    total = Results("", 0)
    for run in runs:
        total.add(run)
    return {
        "runs": [
            {
                "command": run.command,
                "seed": run.seed,
                "began": run.began,
                "machine": run.machine,
                "minutes": round(run.seconds / 60),
                "rounds": len(run.rounds),
                "kills": run.kills,
                "brokers": run.brokers,
                "engine": run.engine,
                "tasks": True,  # earlier runs had threads alone
                "broker_kills": run.broker_kills,
                "broker_suspensions": run.broker_suspensions,
            }
            for run in runs
        ],
        "killed": total.killed,
        "missed": total.missed,
        "killed_again": total.killed_again,
        "zombies": total.zombies,
        "zombies_ended": total.zombies_ended,
        "rivals": total.rivals,
        "suspended": total.suspended,
        "broker_kills": total.broker_kills,
        "broker_suspensions": total.broker_suspensions,
        "leaderless": total.leaderless,
        "hanging": total.hanging,
        "database_stops": total.database_stops,
        "database_suspensions": total.database_suspensions,
        "operations": total.operations,
        "ended": total.ended,
        "findings": total.findings,
        "recovery": {
            key: {"count": len(values), "percentiles": _percentiles(values)} for key, values in total.recovery_s.items()
        },
    }


def _percentiles(values: Iterable[float]) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[round(percent * (len(ordered) - 1) / 100)], 3) for percent in range(101)] if ordered else []


def render(figures: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    kills, zombies = sum_of(figures["killed"]), sum_of(figures["zombies"])
    kinds = Counter(finding["kind"] for finding in figures["findings"])
    operations = figures["operations"]
    wrong = ", ".join(f"**{kinds.get(kind.value, 0)}** {kind.value}" for kind in Kind)
    parts = [
        "# What killing it has shown",
        "",
        f"**{kills:,} processes** killed with SIGKILL, of them {figures['killed_again']:,} while they recovered what another "
        f"had left; **{zombies:,} zombies** (SIGSTOP, resumed after another owner had taken over); "
        f"**{figures['broker_kills']:,} broker kills** (SIGKILL, restarted with its data); "
        f"**{figures['database_stops']:,} immediate stops of PostgreSQL**; {figures['rivals']:,} times several recovered one "
        f"id at once. [Later runs](#group-commit-tasks-and-fleets) have killed {killed_by(figures['later']):,} more.",
        "",
        *_suspensions(figures),
        f"{operations['operations']:,} operations were begun, {operations['acknowledged']:,} acknowledged, "
        f"{operations['present']:,} are on both sides.",
        "",
        f"What was wrong in the {len(figures['runs'])} runs of this table: {wrong}, **{kinds.get('error', 0)}** unexpected errors. "
        "The sections on other runs have their own findings.",
        "",
        "| run | date (UTC) | seed | engine | brokers | minutes | rounds | killed | machine |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| `{run['command']}` | {run['began']} | {run['seed']} | {run.get('engine', 'librdkafka')} | {run.get('brokers', 1)} | {run['minutes']} | "
            f"{run['rounds']} | {run['kills']:,} | {run['machine']} |"
            for run in figures["runs"]
        ),
        "",
        *(_wrong(figures["findings"]) if figures["findings"] else []),
        *_method(figures["runs"]),
        *_by_point(figures),
        *_zombies(figures),
        *_recovery(figures["recovery"]),
        *later(figures["later"]),
        *consumers(figures.get("consumers", {})),
        *states(figures.get("states", {})),
        *units_page.section(),
        *databases({kind: figures[kind] for kind in KINDS_SHOWN}),
        *_spark(),
        *_fixed(),
        *_limits(),
    ]
    return "\n".join(parts)


def _suspensions(figures: Mapping[str, Any]) -> list[str]:
    if not figures.get("broker_suspensions"):
        return []
    return [
        f"**Suspended** (SIGSTOP, then SIGCONT; no connection breaks): {sum_of(figures['suspended']):,} processes for up to 2.5 s, "
        f"a broker {figures['broker_suspensions']:,} times, PostgreSQL with all its back ends "
        f"{figures['database_suspensions']:,} times. {figures['leaderless']:,} times a partition lost its leader by that, and "
        "its coordinators skipped its markers.",
        "",
        f"{figures['hanging']:,} undecided transactions were left open in a partition after the recovery, since their abort was "
        "[skipped while nobody looked](limits.md#markers-that-a-broker-forgets): they were aborted as an operator does.",
        "",
    ]


def _method(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    with_tasks = any(run.get("tasks") for run in runs)
    return [
        "## How it runs",
        "",
        "In rounds, each with a fresh topic and database. Several writers (six with PostgreSQL, three with SQLite; a third of "
        "them with three threads on lanes of their own"
        + ("; of every four, one in tasks of an event loop, and one in tasks with bound sessions" if with_tasks else "")
        + ") publish each operation to every one of two or three partitions and "
        "insert its row; processes on leased slots write the partitions of batches under a ledger. Each process is armed with "
        "a fail point, or is killed at any moment; the next one of its id recovers, and is perhaps killed at that. Meanwhile "
        "brokers and PostgreSQL are killed and suspended. All is drawn from the seed. With three brokers, each partition of the "
        "topic is on one of them alone, so that it has no leader while that one is away; what Kafka keeps for itself is on all.",
        "",
        "At the end of a round a [checker](prove-your-own-pipeline.md) of its own process settles twice and compares: the "
        "workers' journal, which is on disk before their next step; the rows; a `read_committed` consumer that ran all the "
        "time; and one that reads afterwards. A process that does not end in five minutes hangs.",
        "",
    ]


def _by_point(figures: Mapping[str, Any]) -> list[str]:
    killed, missed = figures["killed"], figures["missed"]
    databases = sorted(killed)
    sums = " | ".join(f"{sum(killed[database].values()):,}" for database in databases)
    return [
        "## Killed processes by fail point",
        "",
        *table(databases, [killed[database] for database in databases]),
        f"| all | {sums} |",
        "",
        f"Not counted: {sum_of(missed):,} armed processes that ended before they came to their point, because nothing was left to "
        "settle, another owner had taken over, or a server was away.",
        "",
    ]


def _zombies(figures: Mapping[str, Any]) -> list[str]:
    zombies = figures["zombies"]
    databases = sorted(zombies)
    ended = ", ".join(f"{count:,} {how}" for how, count in sorted(figures["zombies_ended"].items()))
    return [
        "## Zombies by the point where they were paused",
        "",
        *table(databases, [zombies[database] for database in databases]),
        "",
        f"How the resumed processes ended: {ended}. (*Done* are those that were paused before their claim, or after all their "
        "work. SQLite knows no time-out for a paused session, so there a zombie is paused only where it holds no lock.)",
        "",
    ]


def _recovery(recovery: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| {SERIES[key]} | {found['count']:,} | {found['percentiles'][50]:.2f} | {found['percentiles'][90]:.2f} | "
        f"{found['percentiles'][99]:.2f} | {found['percentiles'][100]:.2f} |"
        for key, found in recovery.items()
        if found["percentiles"]
    ]
    return [
        "## Recovery times",
        "",
        "How long it took from the start of opening a writer until it was usable, for processes that came after another one of "
        "their id: claiming, settling what was left, and making new producers. In seconds.",
        "",
        "| | openings | median | 90 % | 99 % | longest |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "![Recovery times](proof-chaos-recovery.svg)",
        "",
        "The machine was busy with up to twenty processes of this run and with other work: idle, a start takes a fraction of "
        "a second (see the [benchmarks](benchmarks.md)).",
        "",
    ]


def _spark() -> list[str]:
    if not SPARK_FIGURES.exists():
        return []
    runs: Sequence[Mapping[str, Any]] = list(json.loads(SPARK_FIGURES.read_text(encoding="utf-8")).values())
    who = {"workers": "Python workers", "deciding": "deciding processes", "drivers": "drivers"}
    ways: dict[str, Counter[str]] = {}
    points: dict[str, Counter[str]] = {key: Counter() for key in who}
    for run in runs:
        for name, killed in run["killed"].items():
            ways.setdefault(name, Counter()).update(killed)
        for key, counted in points.items():
            counted.update(run["points"][key])
    return [
        "## Spark",
        "",
        "Batches in every way that the sink writes, in one long-lived session: workers die in the first two attempts at a "
        "partition, the process that decides on a whole batch dies there or as it gives up, and drivers die as Python processes "
        "while the JVM and their tasks go on. Each dies at a fail point or at any moment, and notes it just before. In every "
        "ninth batch the broker dies as well, or PostgreSQL. Each batch is run until it is written; after four of them both "
        "sides must have every row once, as the changes leave it, and nothing may be left of any attempt. Where a row of the table "
        "does not say MariaDB, it is about PostgreSQL; the first three runs counted both there.",
        "",
        "Messages are JSON, or as a row of the table says Avro, JSON Schema or Protobuf with a schema registry (where it names two, in two "
        "topics). Those are read with confluent-kafka's own deserializers, keys and values, and must be what the table's rows "
        "say. `ONLY=Avro` runs the jobs whose row of the table matches. A planted `first_schema_for_each_part` shows in the "
        "first job that has schemas for keys and values.",
        "",
        *(_spark_run(run) for run in runs),
        "",
        "The first two runs were made before the statements of a micro-batch were cut. Their four findings are refusals that the sink is "
        "to give, and that these runs did not follow by the next run of the batch: three times the last attempt that Spark makes "
        "waited in vain for keys that one before it had prepared (2 s here, 30 s elsewhere), and once what a killed driver had "
        "asked of the JVM began when the next driver was at work, which was fenced. Those four sinks were not compared; now the "
        "batch is run again. In all that were compared, nothing was lost, torn or there twice.",
        "",
        f"| way, and what it does | {' | '.join(who.values())} |",
        f"|---|{'---|' * len(who)}",
        *(f"| {name} | {' | '.join(str(ways[name][key]) for key in who)} |" for name in sorted(ways)),
        "",
        *table(list(who.values()), list(points.values())),
        "",
    ]


def _spark_run(run: Mapping[str, Any]) -> str:
    counts, dead = run["counts"], {who: sum(points.values()) for who, points in run["points"].items()}
    return (
        f"- `{run['command']}`, {run['began']} (UTC), {run['seconds'] / 60:.0f} minutes, {run['machine']}: "
        f"**{sum(dead.values()):,} processes killed** ({dead['workers']} workers, {dead['deciding']} that decide, "
        f"{dead['drivers']} drivers) in {counts['batches']} batches of {counts['jobs']} sinks, {counts['jobs on MariaDB']} of them "
        f"on MariaDB; {counts.get('broker kills', 0)} broker kills, {counts.get('stops of PostgreSQL', 0)} stops of PostgreSQL; "
        f"findings: {len(run['findings'])}."
    )


def _wrong(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "## What was wrong",
        "",
        "| what | where | seen |",
        "|---|---|---|",
        *(f"| {finding['kind']} | {finding['subject']} | {finding['detail']} |" for finding in findings),
        "",
    ]


def _fixed() -> list[str]:
    return [
        "## What earlier runs have found",
        "",
        "Fixed since, each with a test.",
        "",
        "- A broker that is killed between the answer to a commit and its markers takes the transaction for complete without "
        "them after its restart ([KAFKA-20734](limits.md#markers-that-a-broker-forgets)): in 10,421 kills one operation lost "
        "one of its two messages, and twice readers waited for a transaction that nobody ended. Settling now asks the "
        "partitions, and ends there what was forgotten.",
        "- An owner that was paused inside its claim until PostgreSQL ended its session took the Kafka id of its successor for "
        "the mark of a database gone back in time. Now such a finding counts only while the claim still holds its rows. Both "
        "sides had aborted.",
        "- A producer that was fenced while it was paused: confluent-kafka loses the fatal error on its way out of `flush()` "
        "where a callback or a log line follows it, so that a `SystemError` or an `AttributeError` came out of the dual write "
        "instead of `TransactionAborted`. Both sides had aborted.",
        "- A broker that came back gave its partitions higher leader epochs. librdkafka's `list_offsets` went on with those that "
        "it had cached and was refused each time, so that a standby, and a reader of units, failed when their time was over. "
        "Now their metadata is refreshed before they ask again.",
        "- A block that waited for a lane while its member of a fleet took another id was told that the writer is closed, as if "
        "its caller had done wrong. Now it is told to run again. Nothing had begun.",
        "- A writer that was paused while it opened, and PostgreSQL restarted meanwhile, took it for another database, as its start "
        "time had changed between two questions. Now the older connection is asked again, and shows that it has ended. Nothing "
        "had begun.",
        "",
        "The run with outages and seed 42 has six more findings, and all are waits: five members did not end in five minutes, and "
        "the consumer that runs beside them did not come to the end of its topic in time. Up to a hundred other programs shared "
        "the two processors then. The stacks show each member at work, in a statement or at SQLite's lock; what they had done is "
        "whole, and one that reads afterwards has found all of it. The runs with seeds 7 and 43 had few programs beside them: in "
        "their 751 kills and 40 outages nothing hung.",
        "",
    ]


def _limits() -> list[str]:
    return [
        "## What this does not show",
        "",
        "- A loss of power, a disk or file system that loses what was flushed, a database that loses a commit: SIGKILL leaves "
        "the operating system's caches whole.",
        "- Leaders that move: a partition of the topic is on one broker. Coordinators do move where there are three.",
        "- A network that delays, loses or repeats single requests: that is shown by other tests, with a proxy.",
        "- PostgreSQL with a standby, and fail-over.",
        "- Weeks: ids that Kafka forgets, transactions that time out. Other tests make the broker forget quickly.",
        "- Operating systems other than Linux.",
        "",
    ]


def picture(figures: Mapping[str, Any]) -> str:
    """The picture as SVG."""
    return shares({SERIES[key]: found["percentiles"] for key, found in figures["recovery"].items()})


PARTS = {"consumers": consumers_of, "states": states_of}
"""The parts that one run shows, with what makes its figures."""
LISTS = {"later": later_of, **dict.fromkeys(KINDS_SHOWN, database_of)}
"""The parts that show several runs. A run that is taken in replaces the one of the same command."""


def main(arguments: Sequence[str]) -> None:
    """Take in the runs, if there are any, and write page and picture."""
    parser = argparse.ArgumentParser(prog="python -m chaos.page", description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="the directories of all runs")
    for part in (*PARTS, *LISTS):
        parser.add_argument(f"--{part}", type=Path, metavar="RUN", help="shows this part of the run")
    options = parser.parse_args(arguments)
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    if options.runs:
        runs = [Results.load(run / "results.json") for run in options.runs]
        figures = {**summary(runs), **{part: figures[part] for part in (*PARTS, *LISTS)}}
    for part, shown_of in PARTS.items():
        if directory := getattr(options, part):
            figures[part] = shown_of(Results.load(directory / "results.json"))
    for part, shown_of in LISTS.items():
        if directory := getattr(options, part):
            run = shown_of(Results.load(directory / "results.json"))
            figures[part] = [*(one for one in figures[part] if one["command"] != run["command"]), run]
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(render(figures), encoding="utf-8")
    PICTURE.write_text(picture(figures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
