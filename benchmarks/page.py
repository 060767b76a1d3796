"""The benchmarks page, generated from the figures, so that no number is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    async_tasks,
    calls,
    group_page,
    mariadb_bulk,
    outage,
    outbox,
    pipelined,
    records,
    serving,
    settled,
    spark_page,
    state_page,
    units,
    web,
)
from benchmarks.async_tasks import THREADS
from benchmarks.consumer import BATCH, BY_HAND, OURS, PARTITIONS
from benchmarks.first import APPLICATION, STEPS
from benchmarks.known_end import WITH, WITHOUT, writer_name
from benchmarks.network import DELAYS_MS
from benchmarks.processors import BROKER, POSTGRESQL
from benchmarks.servers import p50
from benchmarks.sizes import SIZES
from benchmarks.telemetry import NO_SDK, NONE, SDK
from benchmarks.threads import LANES
from benchmarks.ways import ENGINES, LIBRDKAFKA, NATIVE, OUTBOX, SEQUENTIAL, UNSAFE

FIGURES = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def known(store: Path = FIGURES) -> dict[str, Any]:
    """The stored figures."""
    return json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}


def keep(figures: Mapping[str, Any], store: Path = FIGURES, page: Path = PAGE) -> None:
    """Store the figures, and write the page from them."""
    store.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    page.write_text(render(figures), encoding="utf-8")
    if "state" in figures:
        state_page.draw(figures["state"], page.parent)
    if "outage" in figures:
        outage.draw(figures["outage"], page.parent)
    if "settled" in figures:
        settled.draw(figures["settled"], page.parent)


def render(figures: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    parts = [
        "# Benchmarks",
        "",
        f"Measured by `make bench` on {figures['machine']}: embedded Kafka {figures['kafka']} (one broker) and PostgreSQL 18 with fsync, "
        "on the same machine. The ways are interleaved in one run; figures are medians. Trust the ratios, not the absolute "
        "numbers: the machine is small and shared.",
        "",
    ]
    sections = {
        "latency": _latency,
        "steps": _steps,
        "processor": partial(calls.processor_section, table=_table),
        "calls": partial(calls.section, table=_table),
        "sizes": _sizes,
        "network": _network,
        "threads": _threads,
        "async": _async,
        "sampled": partial(async_tasks.shares, table=_table),
        "web": partial(web.section, table=_table),
        "group": partial(group_page.section, table=_table),
        "consumer": _consumer,
        "units": units.section,
        "known_end": _known_end,
        "outbox": partial(outbox.section, table=_table),
        "outage": partial(outage.section, table=_table),
        "telemetry": partial(_telemetry, alone=figures.get("latency", {})),
        "first": _first,
        "serve": serving.section,
        "settled": settled.section,
        "state": state_page.section,
    }
    for name, section in sections.items():
        if name in figures:
            parts += section(figures[name])
    parts += spark_page.sections(figures.get("bench_spark", {}))
    if "records" in figures:
        parts += _records(figures["records"])
    if "memory" in figures:
        parts += _memory(figures["memory"])
    if "mariadb" in figures:
        parts += mariadb_bulk.section(figures["mariadb"])
    if "settling" in figures:
        parts += _settling(figures["settling"])
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table, and the empty line after it; all columns but the first are numbers."""
    return [
        f"| {' | '.join(head)} |",
        "|---|" + "---:|" * (len(head) - 1),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _against(words: str, found: Mapping[str, float], aim: str) -> str:
    """One ratio of each engine that was measured; the aim is the native engine's."""
    shown = {NATIVE: "", LIBRDKAFKA: "through librdkafka "}
    ratios = ", ".join(f"{shown[way]}**{ratio:.2f}**" for way, ratio in found.items())
    return f"- {words}: {ratios} (aim: {aim})."


def _ratios(ways: Mapping[str, Mapping[str, float]], other: str, figure: str) -> dict[str, float]:
    return {way: ways[way][figure] / ways[other][figure] for way in ENGINES if way in ways}


def _latency(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    figures = ("call p50", "call p95", "visible p50", "visible p95")
    return [
        "## One caller, one message and one row",
        "",
        "Milliseconds from the start of the call until it returns, and until a `read_committed` consumer has the message. "
        "*Dual write* is this library with its own producer (the native engine); the other ways send through "
        "librdkafka.",
        "",
        *_table(
            ("way", "call p50", "p95", "visible p50", "p95"),
            ([name, *(f"{way[figure]:.2f}" for figure in figures)] for name, way in ways.items()),
        ),
        _against(
            "Against the same two transactions one after another without a protocol",
            _ratios(ways, SEQUENTIAL, "call p50"),
            "at most 0.65",
        ),
        _against("Against the unsafe way", _ratios(ways, UNSAFE, "call p50"), "at most 1.9"),
        _against("Visibility against a 10 ms outbox poll", _ratios(ways, OUTBOX, "visible p50"), "at most 0.5"),
        "",
        "The ways without a protocol alternate between two producers, as two lanes do; with one producer, each transaction "
        "would wait for the markers of the one before. *Overlapped* runs the database transaction while librdkafka sends; no "
        "safe way can do that with its COMMIT, which must name what was sent.",
        "",
        "Why aims are missed. The steps of a dual write are a chain: the broker must have the messages before the row can name them, "
        "the row must name them when the database commits, and Kafka's commit follows the database's. The protocol waits no more often "
        "for the database than the unsafe way does: the row is read in one request with BEGIN (`SqlStateStore.read_incarnation`), and "
        "the decision goes with COMMIT. It waits once more for the broker, for Kafka's commit, and both servers work for it: PostgreSQL "
        "for two statements of ours, the broker for that commit, its markers, and the question whether they are written. A message is "
        "visible after the last step; an outbox's message waits for the poll, half of 10 ms on average, and for little else. Of the "
        "caller's processor time, as a profile sees it, the user's INSERT and the connection take a quarter in SQLAlchemy "
        "and an eighth in psycopg; the two statements of ours, the watch for savepoints and the bounds of their waits a sixth "
        "(`stores/sql`, most of it `_ask` and `_talk`); the batch, the wire and the known end a quarter (`kafka`, most of it "
        "`Connection.post`, `Connections.serve` and what reads the answers); the block itself (`DualWrite`) a fifteenth. So two fifths "
        "are not the library's, and nothing of the rest is a tenth alone.",
        "",
    ]


def _steps(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    steps = next(iter(ways.values()))
    return [
        "Where the time goes: milliseconds of each step, medians of a run of its own, the engines in turn. (Medians do not add "
        "up to the median of the whole.) Each step is watched; so the decision and COMMIT, otherwise one exchange, are two here.",
        "",
        *_table(("step", *ways), ([step, *(f"{way[step]:.2f}" for way in ways.values())] for step in steps)),
    ]


def _sizes(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        "## More messages in a transaction",
        "",
        "One caller and one row; milliseconds until the call returns, p50, by the number of messages.",
        "",
        *_table(
            ("way", *(f"{size}" for size in SIZES)),
            ([name, *(f"{way[str(size)]:.2f}" for size in SIZES)] for name, way in ways.items()),
        ),
    ]


def _network(figures: Mapping[str, Any]) -> list[str]:
    p50s, requests = figures["p50"], figures["requests"]
    far = str(DELAYS_MS[-1])
    return [
        "## Over a network",
        "",
        "One caller, one message and one row, with both servers behind a process that passes all bytes on after a delay, in "
        f"both directions: {DELAYS_MS[-1]:g} ms make a round trip {2 * DELAYS_MS[-1]:g} ms longer. Milliseconds until the call "
        "returns, p50; and how many round trips a call takes, by how much longer it takes with the longest delay than with "
        "none.",
        "",
        *_table(
            ("way", *(f"{delay:g} ms" for delay in DELAYS_MS), "round trips"),
            (
                [
                    name,
                    *(f"{found[str(delay)]:.2f}" for delay in DELAYS_MS),
                    f"{(found[far] - found[str(DELAYS_MS[0])]) / (2 * DELAYS_MS[-1]):.1f}",
                ]
                for name, found in p50s.items()
            ),
        ),
        "The requests of a warm call, counted at proxies in front of both servers, means of many calls. Statements that are "
        "sent together are one request.",
        "",
        *_requests(requests, "in the call"),
        "And those that are sent in the background after it, most of them to know how the transaction has ended:",
        "",
        *_requests(requests, "after it"),
        "Why the record of the decision and its COMMIT are two requests. The database's part alone, by psycopg, with its pipeline "
        "and without; milliseconds, p50:",
        "",
        *_table(
            ("way", *(f"{delay:g} ms" for delay in pipelined.DELAYS_MS)),
            (
                [name, *(f"{found[str(delay)]:.2f}" for delay in pipelined.DELAYS_MS)]
                for name, found in figures["pipelined"].items()
            ),
        ),
        "One request less saves one round trip, and nothing on the same machine. But if the connection breaks at that moment, the "
        "whole decision may still be in flight. The owner then reads the row, finds no decision, and aborts, and the server "
        "commits the decision afterwards. With two requests, the server has recorded the decision before COMMIT is sent, and "
        "holds the row's lock: reading the row waits for the outcome. What is deferred to COMMIT (SET CONSTRAINTS) does share a "
        "request with the record: without COMMIT, neither counts. BEGIN and the row's check share one too: the library sends both as "
        "one text.",
        "",
        "So the time over a network is the number of requests that wait for the one before. Of those of a dual write only Produce "
        "travels beside another, the INSERT. The protocol adds two to the database's part, the row's check and the record; the native producer needs no "
        "AddPartitionsToTxn. Therefore a dual write cannot take much less time here than the same two transactions without a protocol.",
        "",
    ]


def _requests(ways: Mapping[str, Mapping[str, Mapping[str, float]]], when: str) -> list[str]:
    known = sorted({what for by in ways.values() for what in by[when]})
    shown = {name: by[when] for name, by in ways.items() if when == "in the call" or name in ENGINES}
    return _table(
        ("request", *shown),
        [
            *([what, *(f"{by.get(what, 0):.3g}" for by in shown.values())] for what in known),
            ["together", *(f"{sum(by.values()):.3g}" for by in shown.values())],
        ],
    )


def _async(counts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    rows = [
        [
            tasks,
            name,
            f"{way['per second']:.0f}",
            *(f"{way[figure]:.1f}" for figure in ("p50", "p99", "longest")),
            f"{way['fewest of a thread']:.0f} to {way['most of a thread']:.0f}",
        ]
        for tasks, ways in counts.items()
        for name, way in ways.items()
    ]
    return [
        f"## Tasks of one event loop, {LANES} transactions at a time",
        "",
        "Each task does one dual write after another, each with one message and one row, through `AsyncDualWriter`. "
        "Milliseconds, including the wait for a lane. The unsafe way commits an `AsyncConnection`, then produces and flushes by "
        f"one `AIOProducer` of all tasks, and has {LANES} database connections. The last way is `DualWriter` with as many "
        "threads as there are tasks. The ways take turns, and each is measured once all its tasks or threads have written.",
        "",
        *_table(("tasks", "way", "per second", "p50", "p99", "longest", "writes of one"), rows),
        *(
            f"- {tasks} tasks: **{ways[NATIVE]['per second'] / ways[THREADS]['per second']:.2f}** times as many dual writes per "
            f"second as threads, **{ways[NATIVE]['per second'] / ways[UNSAFE]['per second']:.2f}** times as many as the unsafe way"
            f"{' (aim: at least 0.60)' if tasks == '64' else ''}."
            for tasks, ways in counts.items()
        ),
        "",
    ]


def _threads(counts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    rows = [
        [
            threads,
            name,
            f"{way['per second']:.0f}",
            *(f"{way[figure]:.1f}" for figure in ("p50", "p99", "longest")),
            f"{way['fewest of a thread']:.0f} to {way['most of a thread']:.0f}",
            *(f"{way[process]:.2f}" for process in ("process", BROKER, POSTGRESQL)),
            f"{calls.together(way):.2f}",
        ]
        for threads, ways in counts.items()
        for name, way in ways.items()
    ]
    most = max(counts, key=int)
    ours, unsafe = (calls.together(counts["8"][way]) for way in (NATIVE, UNSAFE))
    spread = {way: figures["p99"] / figures["p50"] for way, figures in counts[most].items() if way in ENGINES}
    return [
        f"## Many threads, {LANES} transactions at a time",
        "",
        "Each thread does one dual write after another, each with one message and one row; the ways take turns, some seconds "
        f"each. Milliseconds, including the wait for a lane. The unsafe way has one producer and {LANES} database connections "
        "for all threads, and each thread waits for its own message alone. The last columns are milliseconds of processor time "
        "for each write: of the Python process with all its threads, of the servers, and of all of them.",
        "",
        *_table(
            (
                "threads",
                "way",
                "per second",
                "p50",
                "p99",
                "longest",
                "writes of a thread",
                "process",
                BROKER,
                POSTGRESQL,
                "together",
            ),
            rows,
        ),
        *(
            _against(
                f"Writes per second of {threads} threads against the unsafe way",
                {way: ways[way]["per second"] / ways[UNSAFE]["per second"] for way in ENGINES if way in ways},
                "at least 0.35" if threads == "8" else "none",
            )
            for threads, ways in counts.items()
        ),
        _against(f"The p99 of {most} threads against their p50", spread, "at most 3"),
        "",
        "Lanes go to whichever thread came first.",
        "",
        "Where the time goes, and why 0.35 is out of reach here: all cores are busy, so the writes per second go by the processor time "
        f"of all processes together. 8 threads use {ours:.2f} ms for a dual write and {unsafe:.2f} for an unsafe one: "
        f"{unsafe / ours:.2f}. The broker has the largest part. A transaction asks it for an end beside the message; it writes that twice to "
        "the log of its transactions, and a marker to each partition; and now and then it is asked how transactions have ended. The "
        "unsafe way has one producer, which sends what several threads have for it in one request. The same two transactions without "
        "a protocol take the broker [nearly as long](#processor-time-of-a-call), so no transactional way gets far. Where the servers "
        "have cores of their own, the process is what counts: Python runs one thread at a time, and the threads hand the interpreter to "
        "each other at each of the six waits of a dual write. "
        "[Group commit](group-commit.md) is the way to more: many callers share a dual write.",
        "",
    ]


def _consumer(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [
        [name, f"{way['per second']:,.0f}", *(f"{way[figure]:.1f}" for figure in ("p50", "p99"))]
        for name, way in ways.items()
    ]
    return [
        "## Consuming",
        "",
        f"One member of a group reads {PARTITIONS} partitions; each input becomes one row and one message, up to {BATCH} in a "
        "transaction. The loop by hand commits rows, flushes messages, then commits offsets; after a crash it writes again. "
        "Messages per second from a backlog; milliseconds from producing an input to reading its output, at a steady rate.",
        "",
        *_table(("way", "messages per second", "p50", "p99"), rows),
        "- Messages per second against the loop by hand: "
        + ", ".join(f"{name}: **{ways[name]['per second'] / ways[BY_HAND]['per second']:.2f}**" for name in OURS)
        + " (aims: at least 0.8 with offsets in Kafka, 0.9 as rows).",
        "",
    ]


def _known_end(ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = {"call p50": ".2f", "call p95": ".2f", "per second": ".0f", "per second by 8 threads": ".0f"}
    lines = []
    for way in ENGINES:
        if writer_name(WITH, way) in ways:
            knowing, believing = ways[writer_name(WITH, way)], ways[writer_name(WITHOUT, way)]
            one, many = (
                f"{1 - knowing[rate] / believing[rate]:.0%}" for rate in ("per second", "per second by 8 threads")
            )
            name = {NATIVE: "With its own producer", LIBRDKAFKA: "Through librdkafka"}[way]
            lines.append(f"- {name}: {one} fewer dual writes per second by one thread, {many} fewer by 8.")
    return [
        "## Knowing how each transaction has ended",
        "",
        "The writer learns the end of each transaction before it uses that lane again: one question, which nobody waits for, is "
        "about all lanes at rest, and a caller posts it when no other lane is left. Compared, in "
        "alternation, with the same writer trusting Kafka's answer: milliseconds of a call by one thread, and dual writes per "
        "second, each with one message and one row, all to one partition.",
        "",
        *_table(
            ("writer", "call p50", "p95", "per second", "by 8 threads"),
            ([name, *(f"{way[column]:{form}}" for column, form in columns.items())] for name, way in ways.items()),
        ),
        *lines,
        "",
        "A thread has another lane in the meantime: a writer has up to twice as many lanes as transactions that run at a time.",
        "",
    ]


def _telemetry(ways: Mapping[str, Mapping[str, float]], alone: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = {"call p50": ".2f", "call p95": ".2f", "observer alone": ".0f"}
    call_ms = min(figures["call p50"] for figures in (ways[NONE], alone.get(NATIVE, ways[NONE])))
    share = ways[NO_SDK]["observer alone"] / 1000 / call_ms
    return [
        "## Telemetry",
        "",
        "The same writer [without an observer, with OpenTelemetry's API alone, and with its SDK](telemetry.md), in turns: "
        "milliseconds of a call, one message and one row; and *observer alone*, the microseconds of processor time of all that "
        "a dual write asks its observer for, measured without servers, which is not disturbed by their noise.",
        "",
        *_table(
            ("way", "call p50", "p95", "observer alone"),
            ([name, *(f"{way[column]:{form}}" for column, form in columns.items())] for name, way in ways.items()),
        ),
        f"- Without an SDK, the observer takes **{share:.1%}** of a call of {call_ms:.2f} ms, the lower of both medians on this page "
        "(aim: under 2 %).",
        f"- With an SDK that samples every trace, a call takes {ways[SDK]['call p50'] / ways[NONE]['call p50']:.2f} of the time: "
        "four spans, eight durations and two counters, nearly all of it in the SDK.",
        "",
    ]


def _first(figures: Mapping[str, Any]) -> list[str]:
    application, steps = figures["steps"][APPLICATION], figures["steps"][NATIVE]
    imports = ", ".join(f"`{package}` {seconds * 1000:.0f}" for package, seconds in figures["imports"].items())
    return [
        "## First use in a fresh process",
        "",
        "Seconds from the start of `from dualwrite import DualWriter` to the end of the first dual write, with a transactional "
        "id that earlier processes have used (aim: at most 0.35).",
        "",
        *_table(
            ("way", *STEPS),
            ([name, *(f"{way[step]:.2f}" for step in STEPS)] for name, way in figures["steps"].items()),
        ),
        "The first row is an application without this library: it imports SQLAlchemy and psycopg, makes an engine, connects and "
        "sends one query. Of the time of a first dual write, the application's own libraries take "
        f"**{application['together']:.2f}**, and of its processor time {application['processor']:.2f} of {steps['processor']:.2f}. "
        "What this library imports beside them, in milliseconds by package, the shortest of all runs: "
        f"{imports}. Opening connects to both servers, asks the brokers for their versions, claims the id and gets a producer id.",
        "",
    ]


def _records(figures: Mapping[str, Any]) -> list[str]:
    seconds = figures["seconds"]
    medians = {name: p50(found) for name, found in seconds.items()}
    return [
        "## Processor time of the messages",
        "",
        f"Seconds of processor time of this process for {figures['rows']:,} messages of about 100 bytes, lz4, in one "
        "transaction: from Arrow's columns (`produce_arrow`, as the sinks do) or from lists (`produce_many`) until it is "
        "committed. The broker's time is not in it. The ways take turns; medians.",
        "",
        *_table(
            ("way", "seconds", "from", "to"),
            (
                [name, f"{medians[name]:.2f}", f"{min(found):.2f}", f"{max(found):.2f}"]
                for name, found in seconds.items()
            ),
        ),
        f"- From Arrow's columns, against librdkafka: **{medians[records.NATIVE_ARROW] / medians[records.FIRST]:.2f}** "
        "(aim: at most 0.33).",
        "",
    ]


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
