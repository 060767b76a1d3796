"""The results of ``make bench-spark`` as sections and pictures of the benchmarks page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processors import JVM, KINDS, POSTGRESQL, WORKERS
from benchmarks.spark_micro import EMPTY
from benchmarks.spark_ways import (
    DATABASE_LEG,
    KAFKA_LEG,
    NAIVE,
    PREPARED,
    SIZED,
    SPARKS,
    SPARKS_LZ4,
    STAGING,
    WRITE_BATCH,
    ratio,
    through_librdkafka,
)

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from line_chart import line_chart, logarithmic

PICTURES = {"rows": "benchmarks-spark-rows.svg", "partitions": "benchmarks-spark-partitions.svg"}
# The aims beside Spark's two sinks, with and without lz4: for the flights, and for rows of 100 bytes.
_BESIDE_SPARK = (
    ("`write_batch`", WRITE_BATCH, "at least 2.5", "at least 2.0"),
    ("the Data Source with prepared transactions", PREPARED, "at least 2.3", "at least 1.8"),
    ("the Data Source with staging", STAGING, "at least 2.0", "at least 1.5"),
)
# What is compared with what, whether more is better, and the aims.
_AIMS = (
    *(
        (f"{sinks} against {words}", theirs, ours, *aims)
        for sinks, theirs in (("Spark's two sinks", SPARKS), ("Spark's two sinks with lz4", SPARKS_LZ4))
        for words, ours, *aims in _BESIDE_SPARK
    ),
    (
        "Spark's two sinks against `write_batch` with Spark's own limit of a batch's bytes", SPARKS, SIZED,
        "at least 2.5", "at least 2.0",
    ),
    ("the naive way against `write_batch`", NAIVE, WRITE_BATCH, "at least 10", "at least 9"),
    ("`write_batch` through librdkafka against `write_batch`", through_librdkafka(WRITE_BATCH), WRITE_BATCH, "none", "none"),
    (
        "`write_batch` against the slower of its legs alone",
        WRITE_BATCH, (DATABASE_LEG, KAFKA_LEG), "at most 1.3", "at most 1.3",
    ),
)  # fmt: skip

_WHERE = (
    "Where the time goes: all cores are busy, so the way that needs the least processor time is the fastest. Spark's own sinks "
    "build and send a message inside the JVM that has read the row; here the row goes to Python first. With Spark's own limit of a "
    "batch's bytes, the JVM adds up the bytes of all columns after each row: see the second way in both tables. Of the steps of our "
    "Kafka leg alone, without a server (`PYTHONPATH=tests/proof python -m benchmarks.spark_leg --rows 200000`, 0.4 s for a million "
    "rows), the joining of records takes 57 %, JSON texts and keys 30 %, the partitions of keys 8 %, trying lz4 on a part of each "
    "batch 3 %, and reading Arrow 2 %; the digest of `write_batch` takes 0.13 s besides. These rows are sent as they are: lz4 would save a third of their "
    "bytes; with it the Python workers took a third more processor time, and the broker no less. In the JSON of "
    "flights, integers that are close together have one text for each number, with the column's name before it, which rows copy: a "
    "quarter less time for JSON. Tried without gain: other allocators of memory, and a faster lz4; "
    "through librdkafka: `linger.ms` of 50 and 200, confluent-kafka's `produce_batch` (slower than single calls), zstd and "
    "snappy instead of lz4, other partitioners, other sizes of librdkafka's queue, no delivery callbacks."
)


def sections(figures: Mapping[str, Any]) -> list[str]:
    """The sections as lines of Markdown; what was not measured has none."""
    parts = [
        *_compared("Spark: flights, with all their columns", figures.get("flights"), 0),
        *_compared("Spark: rows of 100 bytes", figures.get("small"), 1),
    ]
    if "processor_s" in figures.get("small", {}):
        parts += [_WHERE, ""]
    for name, head in (
        ("comparing", "Spark: what comparing the rows of a batch that runs again costs"),
        ("overwriting", "Spark: overwriting"),
    ):
        if name in figures:
            parts += _pair(head, name, figures[name])
    if "micro" in figures:
        parts += _micro(figures["micro"])
    if "latency" in figures:
        parts += _latency(figures["latency"])
    for name, head in (("rows", "Spark: cost against rows"), ("partitions", "Spark: cost against partitions")):
        if name in figures:
            parts += _costs(head, PICTURES[name], figures[name])
    if "deciding" in figures:
        parts += _deciding(figures["deciding"])
    if "unit" in figures:
        parts += _unit(figures["unit"])
    return parts


def _compared(head: str, figures: Mapping[str, Any] | None, aim: int) -> list[str]:
    if figures is None:
        return []
    medians = figures["median_s"]
    rounds = len(next(iter(figures["seconds"].values())))
    return [
        f"## {head}",
        "",
        f"By `make bench-spark`. {figures['rows']:,} rows with {figures['columns']} columns, JSON messages, `local[2]`, 4 "
        "partitions on both sides. "
        f"{'One round: each figure is of a single run' if rounds == 1 else f'Interleaved, medians of {rounds} rounds'}; "
        "each run writes to a fresh table and topic, after a `CHECKPOINT`. Spark does not count the bytes of an Arrow batch after "
        "each row ([the setting](spark-monitoring.md#speed-and-memory)), but in the way that says so.",
        "",
        "| way | seconds | from | to | rows/s |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {name} | {median:.2f} | {min(figures['seconds'][name]):.2f} | {max(figures['seconds'][name]):.2f} | "
            f"{figures['rows_per_s'][name]:,.0f} |"
            for name, median in medians.items()
        ),
        *([] if SPARKS in medians else [f"| {SPARKS} | not measured | | | |"]),
        "",
        *(f"- {words}: **{_ratio(figures, one, other)}** (aim: {aims[aim]})." for words, one, other, *aims in _AIMS),
        *_kafka_legs(figures),
        *_naive(figures),
        *_bounds(figures, aim),
        "",
        *_processors(figures),
    ]


def _pair(head: str, part: str, figures: Mapping[str, Any]) -> list[str]:
    """Two ways in turn, with the processor time of where they differ."""
    found, kinds = figures["processor_s"], (WORKERS, JVM, POSTGRESQL)
    return [
        f"## {head}",
        "",
        f"By `make bench-spark ONLY={part}`. {figures['rows']:,} rows with {figures['columns']} columns; interleaved, medians.",
        "",
        f"| way | seconds | {kinds[0]}, processor s | {kinds[1]} | {kinds[2]} |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {name} | {median:.2f} | " + " | ".join(f"{found[name][kind]:.1f}" for kind in kinds) + " |"
            for name, median in figures["median_s"].items()
        ),
        "",
    ]


def _kafka_legs(figures: Mapping[str, Any]) -> list[str]:
    """The processor time that the engines of our Kafka leg take in the processes where they run."""
    found = figures.get("processor_s", {})
    other = through_librdkafka(KAFKA_LEG)
    if KAFKA_LEG not in found or other not in found:
        return []
    ours, theirs = found[KAFKA_LEG][WORKERS], found[other][WORKERS]
    return [
        f"- processor time of the Python workers for our Kafka leg alone: {ours:.1f} s, through librdkafka {theirs:.1f} s: "
        f"**{ours / theirs:.2f}** (aim: at most 0.33)."
    ]


def _naive(figures: Mapping[str, Any]) -> list[str]:
    """The reason for the naive way's ratio: its processor time, and the part of ours that is none of our code."""
    found = figures.get("processor_s", {})
    if WRITE_BATCH not in found or NAIVE not in found:
        return []
    naive, ours = sum(found[NAIVE].values()), sum(found[WRITE_BATCH].values())
    others = ours - found[WRITE_BATCH][WORKERS]
    return [
        f"- the naive way takes {naive / ours:.1f} times the processor time of `write_batch`. Spark's JVM, the broker and "
        f"PostgreSQL take {others:.1f} s of `write_batch`'s {ours:.1f} s: if our Python code took none at all, it would be "
        f"{naive / others:.1f} times."
    ]


def _bounds(figures: Mapping[str, Any], aim: int) -> list[str]:
    """What an aim leaves for our Python code, while both cores are busy: the JVM and the servers take theirs for any sink."""
    found, lines = figures.get("processor_s", {}), []
    for words, way, *aims in _BESIDE_SPARK:
        if not {SPARKS, way} <= found.keys():
            continue
        theirs, ours = sum(found[SPARKS].values()), found[way]
        workers, wanted = ours[WORKERS], float(aims[aim].split()[-1])
        others = sum(ours.values()) - workers
        lines.append(
            f"- {words}: Spark's JVM and the servers take {others:.1f} s of processor time; Spark's two sinks take {theirs:.1f} s in "
            f"all. The aim leaves {theirs / wanted - others:.1f} s for the Python workers, which take {workers:.1f} s."
        )
    return lines


def _processors(figures: Mapping[str, Any]) -> list[str]:
    """Where the time goes: with all cores busy, saving processor time saves time."""
    found = figures.get("processor_s")
    if found is None:
        return []
    return [
        "Processor seconds on both cores, which the servers share: medians of the runs, and their sum:",
        "",
        f"| way | {' | '.join(KINDS)} | together |",
        "|---|" + "---:|" * (len(KINDS) + 1),
        *(
            f"| {name} | {' | '.join(f'{by[kind]:.1f}' for kind in KINDS)} | {sum(by.values()):.1f} |"
            for name, by in found.items()
        ),
        *(f"| {name} | not counted |" + " |" * len(KINDS) for name in figures["median_s"] if name not in found),
        "",
    ]


def _ratio(figures: Mapping[str, Any], one: str, others: str | Sequence[str]) -> str:
    """How many times as long one way took as the other, or as the slowest of the others."""
    names = [others] if isinstance(others, str) else list(others)
    medians = figures["median_s"]
    if not {one, *names} <= medians.keys():
        return "not measured"
    return f"{ratio(figures, one, max(names, key=medians.__getitem__)):.2f}"


def _micro(figures: Mapping[str, Any]) -> list[str]:
    ms, first, last = figures["ms"], figures["first_ms"], figures["last_ms"]
    empty = ms[EMPTY]
    return [
        "## Spark: micro-batches",
        "",
        f"A stream of {figures['batches']} micro-batches of {figures['rows']:,} rows in two partitions, {figures['rounds']} times, "
        "the sinks in turn. Milliseconds of a micro-batch, from the second on (`triggerExecution`), and the time that a sink adds "
        "to an empty one.",
        "",
        f"| sink | p50 | p95 | added p50 | added p95 | the 2nd to the 11th | the last ten, up to the {figures['batches']}th |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {one['p50']:.0f} | {one['p95']:.0f} | {one['p50'] - empty['p50']:.0f} | "
            f"{one['p95'] - empty['p95']:.0f} | {first[name]:.0f} | {last[name]:.0f} |"
            for name, one in ms.items()
        ),
        "",
    ]


def _latency(figures: Mapping[str, Any]) -> list[str]:
    return [
        "## Spark: from a row to its readers",
        "",
        f"By `make bench-spark ONLY=latency`. Streams of {figures['batches']} micro-batches of one row, {figures['rounds']} times, "
        "the sinks in turn, with the default trigger; the database is behind a process that delays all bytes, the broker is not. "
        "Milliseconds from the moment at which a file with the row is there until it is in the table and its message with a "
        "`read_committed` consumer; the next file comes after that.",
        "",
        "| round trip to the database | sink | visible p50 | p95 | the micro-batch, p50 |",
        "|---:|---|---:|---:|---:|",
        *(
            f"| {round_trip} ms | {name} | {middle:.0f} | {high:.0f} | {own:.0f} |"
            for round_trip, name, middle, high, own in figures["visible_ms"]
        ),
        "",
    ]


def _costs(head: str, picture: str, figures: Mapping[str, Sequence[tuple[int, int, float]]]) -> list[str]:
    return [
        f"## {head}",
        "",
        "| rows | partitions | " + " | ".join(figures) + " |",
        "|---:|---:|" + "---:|" * len(figures),
        *(
            f"| {lines[0][0]:,} | {lines[0][1]} | " + " | ".join(f"{line[2]:.2f} s" for line in lines) + " |"
            for lines in zip(*figures.values(), strict=True)
        ),
        "",
        *_further_partitions(figures),
        f"![{head}]({picture})",
        "",
    ]


def _further_partitions(figures: Mapping[str, Sequence[tuple[int, int, float]]]) -> list[str]:
    """The time that a further partition takes, where their numbers differ."""
    ways = {way: (lines[min(1, len(lines) - 1)], lines[-1]) for way, lines in figures.items()}
    if any(few[1] == many[1] for few, many in ways.values()):
        return []
    return [
        *(
            f"- {way}: **{(many[2] - few[2]) / (many[1] - few[1]) * 1000:.0f} ms** for each further partition from {few[1]} to "
            f"{many[1]} (aim: at most 30 ms)."
            for way, (few, many) in ways.items()
        ),
        "",
    ]


def _deciding(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "## Deciding and completing prepared transactions",
        "",
        "For a batch that is decided as one, after its tasks have prepared: one database transaction, then Kafka. Each "
        "transaction has records in four partitions. The rows of a staging table are not included.",
        "",
        "| transactions | decided, s | completed, s |",
        "|---:|---:|---:|",
        *(f"| {line['count']:,} | {line['decide_s']:.2f} | {line['complete_s']:.2f} |" for line in figures),
        "",
    ]


def _unit(figures: Mapping[str, Any]) -> list[str]:
    return [
        "## Spark: a batch of many transactions, visible at one moment",
        "",
        f"By `make bench-spark ONLY=unit`: a batch of {figures['rows']:,} rows in {figures['transactions']:,} partitions, each a "
        f"transaction, by {figures['producers']} producers at a time on `local[8]`, [announced](units.md#a-spark-batch-visible-at-one-moment) "
        f"by `unit_topic`. Its driver was killed when {figures['decided before']:,} of the transactions had been decided: no reader "
        "saw anything of the batch. It ran again, and wrote a second, small batch. A reader was killed in the middle of the batch. "
        "The next one began again: it found each row once, each partition in order, and then the second batch.",
        "",
        f"- The reader of {figures['MiB']:,.0f} MiB of messages grew by **{figures['MiB of the reader']:.0f} MiB**, and read "
        f"{figures['per second']:,.0f} messages per second.",
        "",
    ]


def draw(figures: Mapping[str, Any], directory: Path) -> None:
    """Draw the pictures of the measured sections."""
    for name, place in (("rows", 0), ("partitions", 1)):
        if name in figures:
            series = {way: [(line[place], line[2]) for line in lines] for way, lines in figures[name].items()}
            points = [point for lines in series.values() for point in lines]
            picture = line_chart(
                series,
                logarithmic([across for across, _ in points]),
                logarithmic([seconds for _, seconds in points], "{:g} s".format),
                title=f"seconds by {name}",
                dots=True,
            )
            (directory / PICTURES[name]).write_text(picture, encoding="utf-8")
