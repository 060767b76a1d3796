"""Speculation: Spark runs a second attempt at a partition while the first still works. One counts, the other is undone."""

import pytest
from harness.patience import PATIENCE_S
from harness.spark_cluster import write
from harness.spark_source import nothing_is_left

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize("way", ["write_batch", thorough("staging"), thorough("prepared")])
def test_an_attempt_whose_input_stands_still_is_overtaken(cluster, numbers, way):
    cluster.run(write, way, numbers, "gated", speculation=True)
    numbers.verify()
    cluster.run(write, way, numbers)
    numbers.verify()
    nothing_is_left(numbers)


@pytest.mark.parametrize(
    ("way", "point"),
    [
        thorough("write_batch", "spark.rows_copied"),
        thorough("write_batch", "spark.task_started"),
        thorough("write_batch", "write.prepared"),
        ("staging", "batch.handed_over"),
        thorough("staging", "spark.rows_copied"),
        thorough("prepared", "batch.handed_over"),
        thorough("prepared", "spark.rows_copied"),
    ],
)
def test_of_two_attempts_that_go_on_at_the_same_time_one_counts(cluster, numbers, way, point):
    running = cluster.start(write, way, numbers, speculation=True, point=f"{point}:1:stop", attempts=2)
    attempts = cluster.paused(running, 2)
    assert len({cluster.executor_of(attempt) for attempt in attempts}) == 2
    for attempt in attempts:
        attempt.resume()
    running.result(PATIENCE_S)
    numbers.verify()
    cluster.run(write, way, numbers)
    numbers.verify()
    nothing_is_left(numbers)
