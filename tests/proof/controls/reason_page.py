"""The page that says why, made from the counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controls.ways import WAYS

WORDS = ("lost", "twice", "torn")

HEAD = """\
# Why not simply ...?

Two commits, one after the other, have a moment in between. These are the usual ways to live with that moment, each killed
with SIGKILL at each of its own steps, on real servers, again and again. An operation is one row and two messages, one in each
of two partitions. After each kill the program starts again, recovers as well as its way allows, and runs an operation again
whose row is not there. Counted are runs, of three operations each, in which afterwards

- something was **lost**: the row is there, the messages are not;
- something is there **twice**: the messages were published again;
- something is **torn**: one partition has a message that the other one does not have, or not as often.
"""

TAIL = """\
Where it happens, by the step after which the process was killed:
"""

NOTES = """\
Only the order of the two steps connects the sides. An outbox table does connect them, through the database; it costs a
relay, a second write of everything, the delay of the relay's poll ([benchmarks](benchmarks.md)), and duplicates when the relay
crashes. What it gives, to go on [while Kafka is away](outage.md), a writer has as well: [`outbox="fallback"`](outbox.md), without a
relay process and without duplicates. Plain KIP-939 connects them too, and is what this library is built on;
with today's clients all transactions of a producer share the producer id and epoch that it compares, so a crash in the
middle of a transaction publishes half of it ([why](safety.md)).
"""


def render(known: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    lines = [HEAD, "| way | runs | lost | twice | torn |", "|---|---|---|---|---|"]
    ordered = [way for way in WAYS if way in known]
    for way in ordered:
        steps = known[way]["steps"].values()
        counts = " | ".join(_shown(sum(step[word] for step in steps)) for word in WORDS)
        lines.append(f"| {WAYS[way].title} | {sum(step['runs'] for step in steps)} | {counts} |")
    seeds = sorted({known[way]["seed"] for way in ordered})
    runs = sorted({known[way]["runs"] for way in ordered})
    command = f"make reason RUNS={_list(runs)} SEED={_list(seeds)}"
    lines += ["", f"Measured by `{command}`: that many runs for each step.", "", TAIL]
    lines += ["| way | killed after | runs | lost | twice | torn |", "|---|---|---|---|---|---|"]
    for way in ordered:
        for step in WAYS[way].steps:
            counts = known[way]["steps"].get(step)
            if counts:
                shown = " | ".join(_shown(counts[word]) for word in WORDS)
                lines.append(f"| {WAYS[way].title} | {step} | {counts['runs']} | {shown} |")
    return "\n".join([*lines, "", NOTES])


def _shown(count: int) -> str:
    return f"**{count}**" if count else "0"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
