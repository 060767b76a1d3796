"""Mistakes of the Spark sink. PySpark is imported where one is planted: most processes have no use for it."""

import pytest

from harness.mistakes.registry import Check, mistake

_DIES = "integration/test_spark_batch.py::test_a_task_that_dies_at_any_point_is_run_again_and_its_rows_are_there_once"


@mistake(Check(f"{_DIES}[write.recorded-kill]", "missing"))
def ledger_outside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """A task writes its row of the ledger in a transaction of its own, before the decision."""
    from dualwrite.sinks.spark.task import _Writing

    real = _Writing._record

    def record(self, _, started_at):
        with self._attempt.engine.begin() as own:
            real(self, own, started_at)

    patch.setattr(_Writing, "_record", record)


@mistake(
    Check(
        "integration/test_spark_batch.py::test_a_failure_in_the_middle_of_the_input_leaves_no_half_partition[write_batch]",
        "missing|row_count|assert",
    )
)
def cut_input_taken_as_whole(patch: pytest.MonkeyPatch) -> None:
    """A task takes the end of its input for the end of its partition, though Spark may have cut it short."""
    from dualwrite.sinks.spark import job, task
    from harness.spark import SameTask

    patch.setattr(task, "whole_input", iter)
    patch.setattr(job, "PartitionTask", SameTask)


@mistake(Check(f"{_DIES}[write.decided-kill]", "too many|missing|IntegrityError|0 of 4 partitions are in the ledger"))
def no_ledger(patch: pytest.MonkeyPatch) -> None:
    """A task does not look whether its partition is written already: Spark runs tasks again that have succeeded."""
    from dualwrite.sinks.spark.attempt import Attempt
    from dualwrite.sinks.spark.task import _Writing

    patch.setattr(Attempt, "seen", lambda *_: False)
    patch.setattr(_Writing, "_record", lambda *_: None)
