"""The benchmarks page, generated from the figures, so that no number is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import known_end, spark_page
from benchmarks.fairness import LANES, THREADS

FIGURES = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

OURS = "dual write"
SEQUENTIAL = "one after the other, no protocol"
UNSAFE = "unsafe: commit, then produce and flush"
OUTBOX = "outbox, 10 ms poll"


def known(store: Path = FIGURES) -> dict[str, Any]:
    """The stored figures."""
    return json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}


def keep(figures: Mapping[str, Any], store: Path = FIGURES, page: Path = PAGE) -> None:
    """Store the figures, and write the page from them."""
    store.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    page.write_text(render(figures), encoding="utf-8")


def render(figures: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    parts = [
        "# Benchmarks",
        "",
        f"Measured by `make bench` on {figures['machine']}: embedded Kafka 4.3.1 (one broker) and PostgreSQL 18 with fsync, "
        "on the same machine. The ways are interleaved in one run; figures are medians. Trust the ratios, not the absolute "
        "numbers: the machine is small and shared.",
        "",
    ]
    if "latency" in figures:
        parts += _latency(figures["latency"])
    if "known_end" in figures:
        parts += _known_end(figures["known_end"])
    if "fairness" in figures:
        parts += _fairness(figures["fairness"])
    parts += spark_page.sections(figures.get("bench_spark", {}))
    if "memory" in figures:
        parts += _memory(figures["memory"])
    if "settling" in figures:
        parts += _settling(figures["settling"])
    return "\n".join(parts)


def _fairness(figures: Mapping[str, float]) -> list[str]:
    return [
        f"## {THREADS} threads on {LANES} lanes",
        "",
        "Each thread does one dual write after another, each with one message and one row. Milliseconds, including the wait for "
        "a lane:",
        "",
        "| p50 | p99 | longest | dual writes per second | by one thread, fewest and most |",
        "|---|---|---|---|---|",
        f"| {figures['p50']:.0f} | {figures['p99']:.0f} | {figures['longest']:.0f} | {figures['per second']:.0f} "
        f"| {figures['fewest of a thread']:.0f}, {figures['most of a thread']:.0f} |",
        "",
        f"The p99 is **{figures['p99'] / figures['p50']:.1f}** times the p50 (aim: at most 3): lanes go to whichever thread came "
        "first.",
        "",
    ]


def _latency(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [
        f"| {name} | {way['call p50']:.2f} | {way['call p95']:.2f} | {way['visible p50']:.2f} | {way['visible p95']:.2f} |"
        for name, way in ways.items()
    ]
    ours = ways[OURS]
    return [
        "## One caller, one message and one row",
        "",
        "Milliseconds from the start of the call until it returns, and until a `read_committed` consumer has the message.",
        "",
        "| way | call p50 | p95 | visible p50 | p95 |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"- Against the same two transactions one after another without a protocol: **{_ratio(ours, ways[SEQUENTIAL])}** "
        "(aim: at most 1.2).",
        f"- Against the unsafe way: **{_ratio(ours, ways[UNSAFE])}** (aim: at most 3.5).",
        f"- Visibility against a 10 ms outbox poll: **{_ratio(ours, ways[OUTBOX], 'visible p50')}** (aim: at most 0.6).",
        "",
        "Where the time goes: reading the row before the first message and the deciding UPDATE cost one round trip each, which "
        "is the ratio to the first way. The rest is the same requests as without a protocol: AddPartitionsToTxn and Produce "
        "(about 2.2 ms, 1 ms of it from librdkafka's timer), INSERT, COMMIT with its fsync, EndTxn, and about 1 ms for markers "
        "and fetch. Visibility misses its aim because on this machine those alone take more than 0.6 of the outbox's half poll "
        "plus publishing. Tried without gain: BEGIN and the first read in one pipeline, committing without the thread that "
        "bounds the call (0.03 ms).",
        "",
        "The ways without a protocol alternate between two producers, as two lanes do; with one producer, each transaction "
        "would wait 20 ms for the markers of the one before. *Overlapped* runs the database transaction while librdkafka "
        "sends; no safe way can do that with its COMMIT, which must name what was sent.",
        "",
    ]


def _known_end(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [
        f"| {name} | {way['call p50']:.2f} | {way['call p95']:.2f} | {way['per second']:.0f} | "
        f"{way['per second by 8 threads']:.0f} |"
        for name, way in ways.items()
    ]
    knowing, believing = ways[known_end.WITH], ways[known_end.WITHOUT]
    fewer = [f"{1 - knowing[rate] / believing[rate]:.0%}" for rate in ("per second", "per second by 8 threads")]
    return [
        "## Knowing how each transaction has ended",
        "",
        "In the background, the writer reads the end of each transaction from the log of each partition before it uses that "
        "lane again. Compared, in alternation, with the same writer trusting Kafka's answer: milliseconds of a call by one "
        "thread, and dual writes per second, each with one message and one row, all to one partition.",
        "",
        "| writer | call p50 | p95 | per second | by 8 threads |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"One thread has another lane in the meantime: {fewer[0]} fewer dual writes per second. Threads that keep all lanes busy "
        f"wait for the answers: {fewer[1]} fewer.",
        "",
    ]


def _ratio(ours: Mapping[str, float], other: Mapping[str, float], figure: str = "call p50") -> str:
    return f"{ours[figure] / other[figure]:.2f}"


def _memory(figures: Mapping[str, Any]) -> list[str]:
    peaks = figures["peak_mib_by_million_rows"]
    return [
        "## Spark: memory of a task",
        "",
        "Maximum resident size of the Python worker that writes one partition (aim: flat).",
        "",
        "| million rows | MiB |",
        "|---|---|",
        *(f"| {count} | {peak:.0f} |" for count, peak in peaks.items()),
        "",
    ]


def _settling(figures: Mapping[str, float]) -> list[str]:
    return [
        "## Settling decided transactions of dead owners",
        "",
        f"`recover(prefix=...)` on {figures['ids']:.0f} ids, each with a decided transaction of a dead owner: "
        f"**{figures['seconds']:.1f} s**, {figures['ms per id']:.1f} ms for each.",
        "",
    ]
