"""A batch of one partition whose task and whose driver run in this process, without Spark: each step when a test wants it."""

from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from dualwrite.sinks.spark import SinkOptions
from dualwrite.sinks.spark.partition_task import write_partition
from dualwrite.sinks.spark.per_partition import BatchJob
from dualwrite.sinks.spark.sendable import projected_batches
from dualwrite.sinks.spark.targets import Target
from dualwrite.sinks.spark.whole_batch import WholeBatch, prepare_partition
from dualwrite.stores.sql.ledger import Runs

SCHEMA = StructType().add("id", LongType()).add("name", StringType())
ROWS = 100


class OneTask:
    """One run of a batch of one partition, without Spark.

    Args:
        case: The sink.
        way: "staging", "prepared", "write_batch" or "foreach_partition".
    """

    def __init__(self, case, way):
        self.case = case
        self.way = way
        self.by_partition = way in {"write_batch", "foreach_partition"}
        self._options = SinkOptions(**case.settings)

    def begin(self):
        with self._driver() as driver:
            if self.by_partition:
                self.begin_under(driver)
                driver.leave_to_caller()
            else:
                driver.settle_left()
                self._layout, self._run = driver.layout(SCHEMA), driver.run

    def begin_another_run(self):
        """Without settling what the last one has left: as a stream goes on whose last run could not be given up."""
        with self._driver() as driver:
            self._run = Runs(driver.database.engine).replace(self.case.sink, self._run.name)

    @contextmanager
    def driving(self):
        """A driver of ``write_batch``, as long as the block runs: an error that leaves the block is the job's failure."""
        with self._driver() as driver:
            self.begin_under(driver)
            yield driver

    def begin_under(self, driver):
        self._task = replace(driver.plan(SCHEMA), alone=self.way == "foreach_partition")
        driver.begin(1)
        self._layout, self._run = driver.layout(SCHEMA), driver.run

    def run_task(self, *, ids=range(ROWS), without_name=None, partition=0):
        names = [None if number == without_name else f"row {number}" for number in ids]
        batch = pa.RecordBatch.from_pydict({"id": list(ids), "name": pa.array(names, pa.string())})
        rows = projected_batches([batch] if ids else [], SCHEMA, self._layout)
        if self.by_partition:
            return write_partition(self._task, partition, 0, rows)
        return prepare_partition(
            self._options,
            self._targets,
            "1",
            ((0, batch) for batch in rows),
            partition=partition,
            number=0,
            run=self._run,
            staging=self.way == "staging",
        )

    def fail(self):
        """As Spark's driver does it, when another task has failed for good."""
        if self.by_partition:
            with pytest.raises(ZeroDivisionError), self._driver():
                raise ZeroDivisionError
            return
        with self._driver() as driver:
            driver.give_up(self._targets)

    def finish(self):
        """Run the batch again."""
        self.begin()
        self.decide(self.run_task())
        self.case.verify(ROWS)

    def decide(self, done):
        """As Spark's driver does it, when the task has ended."""
        if not self.by_partition:
            with self._driver() as driver:
                parts = done if isinstance(done, list) else [] if done is None else [done]
                driver.decide(self._targets, parts, empty=None)

    @property
    def _targets(self):
        return (Target.of(self._options, self._layout),)

    def _driver(self):
        if self.by_partition:
            return BatchJob(self._options, "1")
        return WholeBatch(self._options, "1", run_name="1")
