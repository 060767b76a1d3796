"""The page about the search, made from what it has found, so that no figure is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualwrite.protocol.prepared_state import Engine
from search.batches.configurations import BATCHES
from search.batches.mistakes import BATCH_MISTAKES
from search.batches.world import BatchBounds
from search.configurations import CONFIGURATIONS
from search.mistakes import MISTAKES
from search.values import Budgets
from search.waiting.configurations import WAITING
from search.waiting.mistakes import WAITING_MISTAKES
from search.waiting.values import Budgets as WaitingBudgets
from search.waiting.world import Bounds as WaitingBounds
from search.world import Bounds

FIGURES = Path(__file__).parent / "figures.json"
PAGE = Path(__file__).parents[3] / "docs" / "proof-search.md"

HEAD = """\
# Every interleaving, within bounds

A test tries what its author thought of. This search tries everything: every order in which the steps of several processes,
the broker, the database and late requests can happen, within bounds, each state once, the nearest first.

What decides is the product itself: `dualwrite.protocol.settle.next_step`, `dualwrite.protocol.process.next_doubt_step`, the
tables of producers and dual writes, the scan of the log in `dualwrite.kafka.log`. Of native transactions:
`next_native_step` in `dualwrite.protocol.settle_native`, and `next_native_end_step`, `native_step_at_rest` and
`left_undecided` in `dualwrite.protocol.settle`; and the tables of answers in
`dualwrite.kafka.native.produce_state` and `dualwrite.kafka.error_codes`. The broker is the simulated one, which
`make simulator` holds against a real broker, answer for answer. The recipes around the decisions (who asks what, and in
which order) are retold as steps, since they run on threads and servers; each step is one request or one statement.

Of batches that a driver decides for several participants, nothing is retold. The product's own recipes run:
`dualwrite.sinks.batches.Decision` with all that it calls, claims and settling, the participants' lanes and producers. They are
stopped before each request and each statement, and go on from there with every answer that there can be. A batch of several
tables (Spark's `write_many`) needs no search of its own: it adds rows to the same transactions and no step to the protocol, because
`Batch.bring` takes over the rows of every table inside the one transaction whose COMMIT decides.

A process may stop anywhere and for ever: that is a crash, and also a pause, if it goes on later. **Every state** is held
against the same demands as the real runs: it is settled to the end by a fresh process, then settled again, then everything
that was still on its way arrives, in every order.

- What the database has is whole in Kafka, once, in order; or its loss is recorded, and something has happened that
  excuses a loss.
- What the database does not have is not in Kafka, not even a part.
- No caller was told "committed" of what the database does not have, or "aborted" of what it has or may yet commit.
- Nothing stays open for readers, settling comes to an end, a second settling changes nothing.
- No false alarm about a database that has gone back in time.
"""

OF_WAITING = """\
Blocks of several owners, of which each goes on after the next has claimed: direct ones, those that fall back in the middle or before,
and those whose messages always wait; with the senders of all owners. Each statement and each request is a step, so numbers are not
drawn in the order of commits; Kafka goes away and comes back at any step. Besides being whole and there once, messages keep their
order: *if X was decided before Y began, X comes before Y in every partition*, whichever way each took. Which way a
block goes, which send may be the last one, from which number on it reads, whether a COMMIT that was not answered has happened, whether a
producer goes on after a transaction, and how what lacks a marker is repaired are the product's own decisions; the rest is retold. The broker
may skip a marker in one partition, when an owner, its sender or a settler ends a transaction: what is committed must then come to have
one in each partition, and no later marker may end it otherwise."""

TOGETHER = """\
## What is taken together

- Processes have no names: states that differ in who is called first are one.
- What is at its end is left out: owners that others have overtaken, in the row and in Kafka, and that can change nothing any
  more, whatever they try; and late requests that the broker will refuse whenever they arrive. A process is taken to be at its
  end only when all steps that it has left have been tried, and what it depends on never changes back.

The tests hold this search against the one in which nothing is left out: the same rows, the same brokers, each mistake found
by as many steps, and an end that is wrongly called one shows.
"""

FOOT = """\
## What it does not show

- Bounds are bounds: three processes, two transactions each (once three), at most six incarnations, two partitions, one message each,
  and of each misfortune as many as the table says.
- Every configuration of librdkafka's transactions has its counterpart with native ones, except three owners with two transactions
  each: the 21 million states of librdkafka's take three quarters of an hour, and native transactions have more states in most of the
  configurations that both have.
- A leader asks the coordinator about a native transaction's message and writes it in one step. No marker is late or sent twice.
- Producers do not come near their last epoch, and no transaction has consumed offsets in it.
- One broker: no leader that changes and no coordinator that moves, except in the two mistakes that believe deposed ones.
- Settling of several incarnations is searched one incarnation after the other. They share nothing but the row's mark.
- States that were seen are known by 64 bits each, where no trace is kept. That two of twenty million share theirs, so that
  one is taken for the other, happens in one of some ten thousand searches.
- Where markers are skipped, ids are not forgotten, and no request is late by which settlers end what is not a decided native
  transaction: [limits](limits.md#markers-that-a-broker-forgets). An undecided transaction whose abort was skipped unnoticed is ended as an operator does.
- Slots, their leases and Spark are not in it; nor is a database that loses commits. Lanes are only those of a batch's participants.
- A batch has two participants with one message each. A recipe's time does not pass, except that a missing answer takes a second:
  no deadline comes before the recipe has ended. A recipe that asks the same as before its pause is taken to stand where it stood.
- Where messages wait, settling is one step, and a marker is there at once or never: the search of native transactions takes both
  apart. `dualwrite relay`, which sends a table of another program, is not in it.
- A tool's marker for an owner that is alive is [a limit](limits.md#people-with-rights), and left out; except for an owner with
  one native transaction, which reads the log when it closes.
"""

_TABLES = {
    "Transactions of librdkafka": {Engine.LIBRDKAFKA},
    "Native transactions": {Engine.NATIVE},
    "A row of one engine, settled and continued by the other": {Engine.NATIVE, Engine.LIBRDKAFKA},
}
"""The tables, by the engines of the processes."""
_COLUMNS = (
    "| what | bounds | states | steps | longest | seconds | date | verdict |",
    "|---|---|--:|--:|--:|--:|---|---|",
)
_WORDS = {
    "delay": "late or repeated request",
    "answer": "lost answer to COMMIT",
    "claim": "lost answer to a claim",
    "abort": "abort",
    "failure": "failed message",
    "timeout": "time-out",
    "expire": "forgotten id",
    "terminate": "force-termination",
    "marker": "marker by a tool",
    "retention": "deletion by retention",
    "forgotten": "skipped marker",
    "unseen": "unseen end of the database's transaction",
    "session": "session that the database ends",
    "outage": "outage of Kafka",
    "death": "death of an owner",
    "restore": "database put back to a copy",
}


def render(seen: Mapping[str, Any]) -> str:
    """The page as Markdown.

    Args:
        seen: By configuration and by mistake, what came of it.
    """
    runs, mistakes = seen.get("configurations", {}), seen.get("mistakes", {})
    lines = [
        HEAD,
        "## The product",
        "",
    ]
    for title, engines in _TABLES.items():
        names = [
            name for name, one in CONFIGURATIONS.items() if name in runs and set(one.bounds.of_processes) == engines
        ]
        lines += [f"### {title}", "", *_COLUMNS, *(_run(name, runs[name]) for name in names), ""]
    batches, of_batches = seen.get("batches", {}), seen.get("batch_mistakes", {})
    lines += ["### Batches of two participants", "", *_COLUMNS]
    lines += [
        _row(BATCHES[name].sentence, _batch_bounds(BATCHES[name].bounds), batches[name])
        for name in BATCHES
        if name in batches
    ]
    waiting, of_waiting = seen.get("waiting", {}), seen.get("waiting_mistakes", {})
    lines += ["", "### Messages that wait in the database", "", OF_WAITING, "", *_COLUMNS]
    lines += [
        _row(WAITING[name].sentence, _waiting_bounds(WAITING[name].bounds), waiting[name])
        for name in WAITING
        if name in waiting
    ]
    lines += ["", *_unfinished(waiting), *_walks(seen)]
    every_run = (*runs.values(), *batches.values(), *waiting.values())
    peak_mib = max((run["peak_mib"] for run in every_run), default=0)
    total = sum(run["states"] for run in every_run)
    planted = {**MISTAKES, **BATCH_MISTAKES, **WAITING_MISTAKES}
    sentences = {name: one.sentence for name, one in planted.items()}
    found_by_name = {**of_waiting, **of_batches, **mistakes}
    mistakes = {name: found_by_name[name] for name in sentences if name in found_by_name}
    caught = [name for name in mistakes if mistakes[name]["wrong"]]
    lines += [
        f"{total:,} states in all. *Longest*: steps to the state that is farthest away. Run by `make search`: one process, at most "
        f"{peak_mib / 1024:.1f} GiB, {seen['machine']}, other work beside it.",
        "",
        TOGETHER,
        *(_saved(CONFIGURATIONS[name].sentence, run) for name, run in runs.items() if run["entire"]),
        "",
        "## Planted mistakes",
        "",
        "A search that finds nothing might be blind. So one rule is broken at a time, in the rules that the search goes by, or, for "
        f"a batch, in the recipes that it runs, and it must find what that does. {len(caught)} of {len(mistakes)} show; *steps* is the "
        "length of the shortest way to the fault.",
        "",
        "| mistake | steps | what becomes of it |",
        "|---|--:|---|",
    ]
    lines += [_mistake(name, sentences[name], found) for name, found in mistakes.items()]
    lines += ["", FOOT, "## The shortest way to each fault", ""]
    for name in caught:
        lines += [f"### {name.replace('_', ' ').capitalize()}", "", sentences[name], "", "```text"]
        lines += [f"{number:2} {step}" for number, step in enumerate(mistakes[name]["trace"], 1)]
        lines += [f"=> {mistakes[name]['wrong']}", "```", ""]
    return "\n".join(lines)


def _run(name: str, run: Mapping[str, Any]) -> str:
    return _row(CONFIGURATIONS[name].sentence, _bounds(CONFIGURATIONS[name].bounds), run)


def _row(sentence: str, bounds: str, run: Mapping[str, Any]) -> str:
    verdict = run["wrong"] or ("nothing wrong" if run["whole"] else "not finished, nothing wrong so far")
    return (
        f"| {sentence} | {bounds} | {run['states']:,} | {run['steps']:,} | {run['depth']} | "
        f"{run['seconds']:,.0f} | {run['date']} | {verdict} |"
    )


def _saved(sentence: str, run: Mapping[str, Any]) -> str:
    entire = run["entire"]
    assert (entire["whole"], entire["wrong"]) == (run["whole"], run["wrong"])
    return (
        f"{sentence.capitalize()}: {run['states']:,} states in {run['seconds']:,.0f} s; with what is at its end "
        f"{entire['states']:,} in {entire['seconds']:,.0f} s."
    )


def _bounds(bounds: Bounds) -> str:
    words = [
        f"{len(bounds.transactions)} processes ({', '.join(map(str, bounds.transactions))} transactions)",
        f"{bounds.incarnations} incarnations",
    ]
    if len(set(bounds.of_processes)) > 1:
        words.append(", ".join(engine.value for engine in bounds.of_processes))
    words += [f"{bounds.epochs} epochs"] if bounds.epochs else []
    words += [f"{count} x {_WORDS[what]}" for what, count in zip(Budgets._fields, bounds.budgets, strict=True) if count]
    return "; ".join(words)


def _batch_bounds(bounds: BatchBounds) -> str:
    processes = ["2 participants", "a driver", *(f"a {name}" for name in bounds.others)]
    words = [", ".join(processes), bounds.engine.value]
    words += [] if bounds.markers_late else ["markers at once"]
    words += [f"{count} x {_WORDS[what]}" for what, count in bounds.budgets._asdict().items() if count]
    return "; ".join(words)


def _waiting_bounds(bounds: WaitingBounds) -> str:
    words = [
        f"{one.outbox}: {' + '.join(str(len(blocks)) for blocks in one.blocks if blocks) or 'no'} blocks, {one.sends} sends"
        for one in bounds.owners
    ]
    words += ["messages wait at first"] if bounds.later else []
    budgets = zip(WaitingBudgets._fields, bounds.budgets, strict=True)
    words += [f"{count} x {_WORDS[what]}" for what, count in budgets if count]
    return "; ".join(words)


def _unfinished(waiting: Mapping[str, Any]) -> list[str]:
    """The searches of messages that wait which no run has kept."""
    left = [f"- `{name}`: {one.sentence}" for name, one in WAITING.items() if name not in waiting]
    return ["Not searched to their end, and so not in this table:", "", *left, ""] if left else []


def _walks(seen: Mapping[str, Any]) -> list[str]:
    """What random ways beyond the bounds have met."""
    walks, mistakes = seen.get("walks", {}), seen.get("walked_mistakes", {"found": {}})
    if not walks:
        return []
    found = sorted(ways for ways in mistakes["found"].values() if ways is not None)
    lines = [
        "Beyond these bounds, by random walks: a seed draws two to four owners of any setting with up to eight blocks each, of up to three "
        "messages, savepoints and settings of their own; up to three outages, lost answers and aborts, two skipped markers, a death, a database that is put "
        "back; then one step after the other until nothing more can happen. "
        f"**{sum(run['ways'] for run in walks.values()):,} walks**:"
    ]
    for seed, run in walks.items():
        lines[0] += (
            f" `make search WALKS={run['ways']} SEED={seed}`, {run['steps']:,} steps, {run['blocks']:,} blocks, "
            f"{run['waited']:,} messages that waited, on {run['date']}: {run['wrong'] or 'nothing wrong'}."
        )
    if found:
        lines[0] += (
            f" {len(found)} of the {len(mistakes['found'])} planted mistakes are found in this way, too, each sought in at most "
            f"{mistakes['ways']:,} walks: half of them took at most {found[len(found) // 2]:,}, the last one in {found[-1]:,}."
        )
    return [*lines, ""]


def _mistake(name: str, sentence: str, found: Mapping[str, Any]) -> str:
    what = f"`{name}`<br>{sentence}"
    if not found["wrong"]:
        return f"| {what} | | nothing, in {found['states']:,} states |"
    return f"| {what} | {len(found['trace'])} | {found['wrong']} |"
