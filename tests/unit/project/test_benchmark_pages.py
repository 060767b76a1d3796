"""The pages of figures are what their commands make of the figures in the repository."""

import json

from benchmarks import page, sizing, spark_page
from benchmarks.processors import KINDS, POSTGRESQL, WORKERS, used
from benchmarks.spark_ways import (
    ALL_WAYS,
    DATABASE_LEG,
    KAFKA_LEG,
    NAIVE,
    PREPARED,
    SPARKS,
    SPARKS_LZ4,
    STAGING,
    WRITE_BATCH,
)


def test_the_page_and_its_picture_are_those_of_the_figures():
    figures = json.loads(sizing.FIGURES.read_text(encoding="utf-8"))
    assert sizing.PAGE.read_text(encoding="utf-8") == sizing.render(figures)
    assert sizing.PICTURE.read_text(encoding="utf-8") == sizing.picture(figures)


def test_the_page_of_figures_is_that_of_the_figures():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(page.known())


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
        PREPARED: 12.5,
        STAGING: 20.0,
        SPARKS: 25.0,
        SPARKS_LZ4: 22.0,
        NAIVE: 90.0,
        DATABASE_LEG: 8.0,
        KAFKA_LEG: 4.0,
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
    for aim in (
        "against `write_batch`: **2.50** (aim: at least 2)",
        "with prepared transactions: **2.00** (aim: at least 1.8)",
        "with staging: **1.25** (aim: at least 1.2)",
        "with lz4 against `write_batch`: **2.20** (aim: none)",
        "the naive way against `write_batch`: **9.00** (aim: at least 8)",
        "the slower of its legs alone: **1.25** (aim: at most 1.3)",
        "medians of 3",
        "| 10,000 | 4 | 5.00 s | 7.00 s |",
    ):
        assert aim in text
    spark_page.draw({"rows": costs}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks-spark-rows.svg"]


def test_the_time_of_a_process_that_has_ended_is_nobodys():
    # PostgreSQL's first process has taken over the time of a session that has ended.
    before = {(1, 0.5): (WORKERS, 90.0), (2, 0.5): (POSTGRESQL, 1.0), (3, 0.5): (POSTGRESQL, 4.0)}
    after = {(2, 0.5): (POSTGRESQL, 5.5), (1, 7.5): (WORKERS, 3.0)}
    assert used(before, after) == {**dict.fromkeys(KINDS, 0.0), WORKERS: 3.0, POSTGRESQL: 0.5}
