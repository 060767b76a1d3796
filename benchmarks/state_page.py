"""The figures of state stores as a section and a picture of the benchmarks page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.state import KILLED, LAST, PLAIN, SYNCED, UNSYNCED, WIPED

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from line_chart import line_chart, logarithmic

PICTURE = "benchmarks-state.svg"
DEFAULT = "64 MiB"
_COLUMNS = ("get", "put", "commit", "together")


def section(figures: Mapping[str, Any]) -> list[str]:
    """The section as lines of Markdown."""
    lines = [
        "## State stores",
        "",
        "Microseconds of a read, of a write, and of a write's share in the commit, which is synced; keys of 12 bytes, values of "
        "100. *RocksDB alone* has no transactions, and is synced as often. The other rows are the bound of the memory for "
        "uncommitted writes: above it they move to a second RocksDB; with 0 all do, as the KIP proposes. By `make bench ONLY=state`"
        + (
            f", on a machine with a load average of {figures['load']:.0f}: compare within a table."
            if "load" in figures
            else "."
        ),
        "",
    ]
    for size, ways in figures["costs"].items():
        lines += [
            f"| {int(size):,} writes in a transaction | {' | '.join(_COLUMNS)} | against RocksDB alone |",
            "|---|" + "---:|" * (len(_COLUMNS) + 1),
            *(
                f"| {name} | {' | '.join(f'{way[column]:.1f}' for column in _COLUMNS)} | "
                f"{way['together'] / ways[PLAIN]['together']:.2f} |"
                for name, way in ways.items()
            ),
            "",
        ]
    recovery = figures["recovery"]
    first, last = (recovery[key] for key in (min(recovery, key=int), max(recovery, key=int)))
    return [
        *lines,
        f"Seconds from opening a store until its task can begin a block. The process is killed after a transaction of {LAST:,} "
        "writes has committed in Kafka, and before its store has.",
        "",
        f"| entries | {KILLED} | {WIPED} |",
        "|---:|---:|---:|",
        *(f"| {int(count):,} | {found[KILLED]:.2f} | {found[WIPED]:.1f} |" for count, found in recovery.items()),
        "",
        f"- From the fewest entries to the most, rolling forward takes **{last[KILLED] / first[KILLED]:.1f}** times as long (aim: "
        f"flat), the replay **{last[WIPED] / first[WIPED]:.0f}** times.",
        "",
        *(_reads(figures) if "reads" in figures else []),
        f"![Seconds until a state store is usable]({PICTURE})",
        "",
    ]


def _reads(figures: Mapping[str, Any]) -> list[str]:
    commits, reads = figures["commits"], figures["reads"]
    return [
        f"A commit of one write takes {commits[SYNCED]:.0f} µs, and {commits[UNSYNCED]:.0f} with `sync=False`.",
        "",
        "Reads of single keys through `store.reader()` by other threads of the process, beside a writer that commits ten writes at "
        "a time, synced. Python's interpreter lock lets one of these threads run at a time.",
        "",
        "| threads that read | commits/s | reads/s |",
        "|---:|---:|---:|",
        *(f"| {readers} | {found['commits']:,} | {found['reads']:,} |" for readers, found in reads.items()),
        "",
    ]


def draw(figures: Mapping[str, Any], directory: Path) -> None:
    """Draw the picture."""
    (directory / PICTURE).write_text(picture(figures), encoding="utf-8")


def picture(figures: Mapping[str, Any]) -> str:
    """The picture as SVG."""
    recovery = figures["recovery"]
    series = {way: [(int(count), found[way]) for count, found in recovery.items()] for way in (KILLED, WIPED)}
    return line_chart(
        series,
        logarithmic([int(count) for count in recovery]),
        logarithmic([seconds for points in series.values() for _, seconds in points], "{:g} s".format),
        title="seconds until a state store is usable, by its entries",
        dots=True,
    )
