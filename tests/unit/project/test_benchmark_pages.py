"""The pages of figures are what their commands make of the figures in the repository."""

import importlib
import json
import pkgutil
from types import SimpleNamespace

import psutil
import pytest

import benchmarks
from benchmarks import (
    calls,
    first,
    page,
    pipelined,
    records,
    settled,
    sizing,
    spark_page,
    state_page,
    steps,
    units,
    web,
)
from benchmarks.known_end import WITH, WITHOUT, writer_name
from benchmarks.network import DELAYS_MS
from benchmarks.processors import BROKER, KINDS, POSTGRESQL, WORKERS, servers_s, used
from benchmarks.spark_ways import (
    ALL_WAYS,
    DATABASE_LEG,
    KAFKA_LEG,
    NAIVE,
    PREPARED,
    SIZED,
    SPARKS,
    SPARKS_LZ4,
    STAGING,
    WRITE_BATCH,
    through_librdkafka,
)
from benchmarks.ways import ENGINES, LIBRDKAFKA, NATIVE, OUTBOX, SEQUENTIAL, UNSAFE


@pytest.mark.parametrize("name", sorted(found.name for found in pkgutil.iter_modules(benchmarks.__path__)))
def test_every_command_finds_what_it_imports(name):
    """Some are started by hand, and rarely."""
    if name != "__main__":
        importlib.import_module(f"benchmarks.{name}")


def test_the_page_and_its_picture_are_those_of_the_figures():
    figures = json.loads(sizing.FIGURES.read_text(encoding="utf-8"))
    assert sizing.PAGE.read_text(encoding="utf-8") == sizing.render(figures)
    assert sizing.PICTURE.read_text(encoding="utf-8") == sizing.picture(figures)


def test_the_page_of_figures_is_that_of_the_figures():
    figures = page.known()
    assert page.PAGE.read_text(encoding="utf-8") == page.render(figures)
    picture = page.PAGE.with_name(state_page.PICTURE)
    assert picture.read_text(encoding="utf-8") == state_page.picture(figures["state"])
    settled_picture = page.PAGE.with_name(settled.PICTURE)
    assert settled_picture.read_text(encoding="utf-8") == settled.picture(figures["settled"])


def test_the_time_of_a_service_is_held_against_its_limit():
    seconds = {way: [1.0, 2.0, 4.0] for way in settled.WAYS} | {settled.USUAL: [61.0, 66.5], settled.QUICK: [5.5, 7.25]}
    text = "\n".join(settled.section({"deaths": 3, "seconds": seconds, "load": 1.0}))
    assert "`settle_after_s = 5`: **2.2 s** after the limit at the longest; `settle_after_s = 60`: **6.5 s**" in text
    assert "which sees the process end | 2.0 s | 4.0 s |" in text
    steps = settled._steps([3.0, 1.0], 0.1, 10.0)
    assert steps == [(0.1, 0.0), (1.0, 0.0), (1.0, 50.0), (3.0, 50.0), (3.0, 100.0), (10.0, 100.0)]


def test_the_arithmetic_is_proportional():
    figures = json.loads(sizing.FIGURES.read_text(encoding="utf-8"))
    small = sizing.arithmetic(sizing.Cluster(10), figures)
    assert small["tasks at a time"] == 40
    assert small["slots, whole batches"] == 80
    assert small["connections to brokers, partition by partition, at most"] == 40 * 8
    assert small["connections to brokers, whole batches, at most"] == 40 * 13
    great = sizing.arithmetic(sizing.Cluster(1000), figures)
    sessions = "sessions of PostgreSQL"
    assert great[sessions] - 2 == 100 * (small[sessions] - 2)
    other = {
        name: value for name, value in small.items() if name not in {sessions, "the longest transaction of a batch, s"}
    }
    for name, value in other.items():
        assert abs(great[name] / value - 100) < 1e-9, name


def test_the_figures_of_spark_are_compared_the_right_way_round(tmp_path):
    seconds = {
        WRITE_BATCH: 10.0,
        SIZED: 12.0,
        PREPARED: 12.5,
        STAGING: 20.0,
        SPARKS: 25.0,
        SPARKS_LZ4: 22.0,
        NAIVE: 90.0,
        DATABASE_LEG: 8.0,
        KAFKA_LEG: 4.0,
        through_librdkafka(WRITE_BATCH): 30.0,
        through_librdkafka(KAFKA_LEG): 16.0,
    }
    assert seconds.keys() == ALL_WAYS.keys()
    compared = {
        "rows": 100,
        "columns": 19,
        "seconds": {name: [took - 1, took, took + 5] for name, took in seconds.items()},
        "median_s": seconds,
        "processor_s": {name: dict.fromkeys(KINDS, took / 4) for name, took in seconds.items()},
        "rows_per_s": {name: 100 / took for name, took in seconds.items()},
    }
    costs = {WRITE_BATCH: [[1000, 4, 0.5], [10000, 4, 5.0]], STAGING: [[1000, 4, 0.7], [10000, 4, 7.0]]}
    text = "\n".join(spark_page.sections({"flights": compared, "rows": costs}))
    small = "\n".join(spark_page.sections({"small": compared}))
    once = {**compared, "seconds": {name: [took] for name, took in seconds.items()}}
    assert "One round: each figure is of a single run;" in "\n".join(spark_page.sections({"flights": once}))
    assert "against `write_batch`: **2.50** (aim: at least 2.0)" in small
    assert "with staging: **1.25** (aim: at least 1.5)" in small
    for aim in (
        "against `write_batch`: **2.50** (aim: at least 2.5)",
        "with Spark's own limit of a batch's bytes: **2.08** (aim: at least 2.5)",
        "with prepared transactions: **2.00** (aim: at least 2.3)",
        "with staging: **1.25** (aim: at least 2.0)",
        "with lz4 against `write_batch`: **2.20** (aim: at least 2.5)",
        "with lz4 against the Data Source with staging: **1.10** (aim: at least 2.0)",
        "the naive way against `write_batch`: **9.00** (aim: at least 10)",
        "`write_batch` through librdkafka against `write_batch`: **3.00** (aim: none)",
        "our Kafka leg alone: 1.0 s, through librdkafka 4.0 s: **0.25** (aim: at most 0.33)",
        "the slower of its legs alone: **1.25** (aim: at most 1.3)",
        "- the naive way takes 9.0 times the processor time of `write_batch`",
        "take 10.0 s of `write_batch`'s 12.5 s: if our Python code took none at all, it would be 11.2 times.",
        "Interleaved, medians of 3 rounds;",
        "| 10,000 | 4 | 5.00 s | 7.00 s |",
    ):
        assert aim in text
    pair = "\n".join(spark_page.sections({"comparing": compared, "overwriting": compared}))
    assert "By `make bench-spark ONLY=comparing`. 100 rows with 19 columns; interleaved, medians." in pair
    assert f"| {WRITE_BATCH} | 10.00 | 2.5 | 2.5 | 2.5 |" in pair
    far = {"batches": 30, "rounds": 2, "visible_ms": [[5, SPARKS, 120.4, 150.0, 90.0]]}
    latency = "\n".join(spark_page.sections({"latency": far}))
    assert f"| 5 ms | {SPARKS} | 120 | 150 | 90 |" in latency
    spark_page.draw({"rows": costs}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks-spark-rows.svg"]


def test_the_time_of_a_process_that_has_ended_is_nobodys():
    # PostgreSQL's first process has taken over the time of a session that has ended.
    before = {(1, 0.5): (WORKERS, 90.0), (2, 0.5): (POSTGRESQL, 1.0), (3, 0.5): (POSTGRESQL, 4.0)}
    after = {(2, 0.5): (POSTGRESQL, 5.5), (1, 7.5): (WORKERS, 3.0)}
    assert used(before, after) == {**dict.fromkeys(KINDS, 0.0), WORKERS: 3.0, POSTGRESQL: 0.5}


def test_the_time_of_servers_has_that_of_sessions_that_have_ended():
    def process(name, *seconds):
        names = ("user", "system", "children_user", "children_system")
        times = SimpleNamespace(**dict(zip(names, seconds, strict=True)))
        return SimpleNamespace(name=lambda: name, cpu_times=lambda: times)

    def gone():
        raise psutil.NoSuchProcess(1)

    below = [
        process("java", 4.0, 1.0, 0.0, 0.0),
        process("postgres", 0.25, 0.25, 2.0, 0.5),
        process("postgres", 1.0, 0.0, 0.0, 0.0),
        process("python", 9.0, 9.0, 9.0, 9.0),
        SimpleNamespace(name=gone),
    ]
    benchmark = SimpleNamespace(children=lambda *, recursive: below if recursive else [])
    assert servers_s(benchmark) == {BROKER: 5.0, POSTGRESQL: 4.0}


def test_both_engines_are_compared_the_right_way_round():
    p50s = {NATIVE: 3.0, LIBRDKAFKA: 6.0, SEQUENTIAL: 5.0, UNSAFE: 2.0, OUTBOX: 1.0}
    figures = {
        "machine": "a machine", "kafka": "4.4.0",
        "latency": {
            name: {"call p50": p50, "call p95": 2 * p50, "visible p50": 10 * p50, "visible p95": 20 * p50}
            for name, p50 in p50s.items()
        },
        "steps": {name: dict.fromkeys((*steps.STEPS.values(), "together"), p50s[name]) for name in ENGINES},
        "sizes": {name: {"1": p50, "10": 2 * p50, "100": 3 * p50} for name, p50 in p50s.items()},
        "network": {
            "p50": {name: {str(delay): p50 + 8 * delay for delay in DELAYS_MS} for name, p50 in p50s.items()},
            "requests": {
                name: {"in the call": {"Kafka: Produce": p50, "PostgreSQL: COMMIT": 1.0}, "after it": {"Kafka: Fetch": 0.5}}
                for name, p50 in p50s.items()
            },
            "pipelined": {name: dict.fromkeys(map(str, pipelined.DELAYS_MS), 1.5) for name in (pipelined.APART, pipelined.TOGETHER)},
        },
        "threads": {
            threads: {
                name: {"per second": 100 / p50s[name], "p50": 1.0, "p99": p50s[name], "longest": 9.0,
                       "fewest of a thread": 7, "most of a thread": 8, "process": p50s[name] / 2, BROKER: 1.0, POSTGRESQL: 0.5}
                for name in (*ENGINES, UNSAFE)
            }
            for threads in ("8", "64")
        },
        "known_end": {
            writer_name(known, way): {"call p50": 1.0, "call p95": 2.0, "per second": rate, "per second by 8 threads": 2 * rate}
            for way in ENGINES
            for known, rate in ((WITH, 90.0), (WITHOUT, 100.0))
        },
        "first": {
            "steps": {name: dict.fromkeys(first.STEPS, p50s.get(name, 0.25)) for name in (first.APPLICATION, *ENGINES)},
            "imports": {"dualwrite.kafka": 0.0301},
        },
        "units": {
            "records": 1000,
            "per second": {units.UNITS: 900.0, units.PLAIN: 1000.0, "read": 5000.0},
            "large": {"records": 2000, "MiB": 600.0, "per second": 7000.0, "MiB of the reader": 40.4},
        },
        "processor": {name: {"process": 2 * p50, "caller": p50, BROKER: 1.5, POSTGRESQL: 0.5} for name, p50 in p50s.items()},
        "calls": {
            "own": 700.4, "python": 3000.2, "background": 600.0, "built_in": 1500.0,
            "packages": {"dualwrite": 700.4, "kafka": 2299.8}, "functions": {"dualwrite/errors.py:a": 2.5}, "microseconds": {"len": 8.1},
            "always": {"own": 300.0, "python": 900.0, "background": 400.0, "own_background": 100.0},
        },
        "web": {kind: {web.BLOCK: 3.0, web.OUTBOX_ROW: 1.5, web.UNSAFE: 1.2} for kind in (web.THREADS, web.TASKS)},
        "records": {"rows": 1000, "seconds": {**{name: [4.0, 5.0] for name in records.WAYS}, records.NATIVE_ARROW: [0.8, 1.0]}},
    }  # fmt: skip
    text = page.render(figures)
    for line in (
        "without a protocol: **0.60**, through librdkafka **1.20** (aim: at most 0.65).",
        "- Against the unsafe way: **1.50**, through librdkafka **3.00** (aim: at most 1.9).",
        "outbox poll: **3.00**, through librdkafka **6.00** (aim: at most 0.5).",
        "| dual write | 3.00 | 6.00 | 9.00 |",
        "| the record and COMMIT in one request | 1.50 | 1.50 |",
        "| dual write | 3.00 | 7.00 | 19.00 | 4.0 |",
        "| Kafka: Produce | 3 | 6 | 5 | 2 | 1 |",
        "| together | 4 | 7 | 6 | 3 | 2 |",
        "| Kafka: Fetch | 0.5 | 0.5 |",
        "of 64 threads against the unsafe way: **0.67**, through librdkafka **0.33** (aim: none).",
        "The p99 of 64 threads against their p50: **3.00**, through librdkafka **6.00** (aim: at most 3).",
        "- With its own producer: 10% fewer dual writes per second by one thread, 10% fewer by 8.",
        "against librdkafka: **0.20** (aim: at most 0.33)",
        "- A unit against plain transactions: **0.90** of the records per second.",
        "| 7 to 8 | 1.50 | 1.00 | 0.50 | 3.00 |",
        "8 threads use 3.00 ms for a dual write and 2.50 for an unsafe one: 0.83.",
        "take **0.25**, and of its processor time 0.25 of 3.00.",
        "the shortest of all runs: `dualwrite.kafka` 30.",
        "| dual write | 6.00 | 3.00 | 1.50 | 0.50 | 8.00 | 1.5 |",
        "a dual write can reach **0.75** of the unsafe way's, and the same two transactions one after the other, without a protocol, 0.50.",
        "- A dual write against the unsafe way: **1.5** (aim: at most 3.5).",
        "- This library's own functions: **700** (aim: at most 250).",
        "- All functions written in Python: **3000** (aim: at most 1,200), of which 600 in threads",
        "| `dualwrite/errors.py:a` | 2.5 |",
        "200 of this library's own in the caller's thread, and 100 in the sender's; of all, 500 and 400.",
        "- Tasks: a block takes **2.00** of the processor time of a row for an outbox (aim: at most 1.6), **2.50** of the unsafe way's.",
        "grew by **40 MiB**, and read 7,000 records per second.",
    ):
        assert line in text, line


def test_the_functions_that_are_called_more_often_or_less_are_named():
    totals = {"own": 10.0, "python": 20.0, "background": 5.0}
    before = {**totals, "functions": {"a": 4.0, "b": 2.0, "same": 4.0}}
    now = {**totals, "own": 12.0, "functions": {"a": 1.0, "c": 5.0, "same": 4.2}}
    assert calls.changes(before, now) == [
        "own: 10 calls before, 12 now",
        "python: 20 calls before, 20 now",
        "background: 5 calls before, 5 now",
        "   +5.0  c",
        "   -3.0  a",
        "   -2.0  b",
    ]
