"""Mistakes of the Spark sink. PySpark is imported where one is planted: most processes have no use for it."""

from functools import partial

import pytest

from harness.mistakes.registry import Check, mistake

_DIES = "integration/test_spark_batch.py::test_a_task_that_dies_at_any_point_is_run_again_and_its_rows_are_there_once"


@mistake(Check(f"{_DIES}[write.recorded-kill]", "missing"))
def ledger_outside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """A task writes its row of the ledger in a transaction of its own, before the decision."""
    from dualwrite.sinks.spark.partition_task import _Writing

    real = _Writing._record

    def record(self, _, partition_count, started_at):
        with self._attempt.engine.begin() as own:
            real(self, own, partition_count, started_at)

    patch.setattr(_Writing, "_record", record)


# The driver of write_batch gives the run up before the task decides, and so refuses the half partition, too.
@mistake(
    Check(
        "integration/test_spark_batch.py::"
        "test_a_failure_in_the_middle_of_the_input_leaves_no_half_partition[foreach_partition]",
        "missing",
    )
)
def cut_input_taken_as_whole(patch: pytest.MonkeyPatch) -> None:
    """A task takes the end of its input for the end of its partition, though Spark may have cut it short."""
    from dualwrite.sinks.spark import partition_task, per_partition
    from harness.spark import SameTask

    patch.setattr(partition_task, "whole_input", iter)
    patch.setattr(per_partition, "PartitionTask", SameTask)


@mistake(Check(f"{_DIES}[write.decided-kill]", "too many|missing|IntegrityError|0 of 4 partitions are in the ledger"))
def no_ledger(patch: pytest.MonkeyPatch) -> None:
    """A task does not look whether its partition is written already: Spark runs tasks again that have succeeded."""
    from dualwrite.sinks.spark.partition_task import _Writing
    from dualwrite.sinks.spark.worker import Attempt

    patch.setattr(Attempt, "seen", lambda *_: False)
    patch.setattr(_Writing, "_record", lambda *_: None)


_REFUSED = "integration/test_spark_refused.py::"


@mistake(
    Check(
        "conformance/test_sinks.py::"
        "test_a_batch_is_not_taken_for_one_of_the_same_name_that_has_another_table[write_batch]",
        "DID NOT RAISE",
    )
)
def destination_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A batch that is for another table than its former run, under the same names, counts as begun there."""
    from dualwrite.protocol.batches import Entry
    from dualwrite.stores.sql import ledger

    patch.setattr(ledger, "next_entry", lambda recorded, _: Entry.GO_ON if recorded.begun else Entry.FIRST)


_RUNS = "integration/test_spark_runs.py"
_GOES_ON = f"{_RUNS}::test_a_task_that_goes_on_when_its_job_has_failed_leaves_nothing"


def _without(name, function, *arguments, **options):
    """Call it without that option."""
    del options[name]
    return function(*arguments, **options)


@mistake(Check(f"{_GOES_ON}[staging-write.prepared]", "DID NOT RAISE"))
def run_not_checked_at_the_hand_over(patch: pytest.MonkeyPatch) -> None:
    """A task hands its rows over without a look whether its run was given up meanwhile."""
    from dualwrite.sinks.spark import whole_batch

    patch.setattr(whole_batch, "DualWrite", partial(_without, "permit", whole_batch.DualWrite))


_STREAMS = "integration/test_spark_streams.py::"


@mistake(
    Check(f"{_STREAMS}test_a_commit_is_refused_if_a_task_has_handed_nothing_over[0-postgresql]", "DID NOT RAISE"),
)
def commit_without_the_messages_of_all_tasks(patch: pytest.MonkeyPatch) -> None:
    """A driver decides on what some tasks have handed over, though Spark has counted more of them as done."""
    from dualwrite.sinks.spark import source

    patch.setattr(source, "_complete", lambda messages, *_: source._own(messages))


_SLOTS = "integration/test_spark_slots.py::"


@mistake(
    Check(
        f"{_SLOTS}test_a_task_fails_at_once_where_another_partition_of_its_run_has_outlasted_its_time[postgresql-staging]",
        "DID NOT RAISE",
    )
)
def slot_taken_from_a_part_of_the_same_run(patch: pytest.MonkeyPatch) -> None:
    """A task takes the slot of a part that its own run has prepared, once the time of that part is over."""
    from dualwrite.sinks.spark.worker import Attempt

    patch.setattr(Attempt, "_require_in_time", lambda *_: None)


@mistake(
    Check(
        f"{_SLOTS}test_a_decision_names_the_time_of_a_part_whose_slot_a_later_task_of_the_run_has_taken"
        "[postgresql-staging]",
        "another decider",
    )
)
def lease_looked_at_once_for_two_parts_of_a_slot(patch: pytest.MonkeyPatch) -> None:
    """A driver looks whether each slot is still leased, not whether each part still has it."""
    from dualwrite.sinks.spark.whole_batch import WholeBatch

    real = WholeBatch.require_leases

    def require_leases(self, connection, prepared):
        real(self, connection, list({one.transactional_id: one for one in prepared}.values()))

    patch.setattr(WholeBatch, "require_leases", require_leases)


@mistake(Check(f"{_GOES_ON}[write_batch-spark.task_started]", "left: leases"))
def slot_leased_for_a_run_that_was_given_up(patch: pytest.MonkeyPatch) -> None:
    """A task leases a slot without a look whether its run was given up before."""
    from dualwrite.sinks.spark import worker

    patch.setattr(worker, "leased_slot", partial(_without, "require", worker.leased_slot))


@mistake(Check(f"{_GOES_ON}[write_batch-claim.before]", "write.begun"))
def slot_claimed_after_it_was_settled(patch: pytest.MonkeyPatch) -> None:
    """A task continues with a slot that it has claimed after a settler had, without a look at its lease."""
    from dualwrite.sinks.spark.worker import SlotPool

    patch.setattr(SlotPool, "renew", lambda _, lease, *__: lease)


@mistake(
    Check(
        f"{_REFUSED}test_rows_that_a_trigger_leaves_out_are_not_told_as_written[write_batch]",
        "DID NOT RAISE",
    )
)
def left_out_rows_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A task takes the rows that it has sent for the rows that the table has taken."""
    from dualwrite.sinks.spark import per_partition
    from dualwrite.sinks.spark.databases import postgresql
    from harness.spark import SameTask

    patch.setattr(postgresql, "require_all_taken", lambda *_, **__: None)
    patch.setattr(per_partition, "PartitionTask", SameTask)


@mistake(
    Check(
        f"{_RUNS}::test_a_job_that_fails_waits_for_the_task_that_is_handing_over_and_undoes_that[prepared-False]",
        "is_set",
    )
)
def run_replaced_while_a_task_hands_over(patch: pytest.MonkeyPatch) -> None:
    """Giving up does not wait for a task that was let through, and looks for what it leaves before it is there."""
    from sqlalchemy.sql.selectable import Select

    from dualwrite.stores.sql.ledger import Runs

    real = Runs.holding

    def holding(self, run, **_):
        with patch.context() as unlocked:
            unlocked.setattr(Select, "with_for_update", lambda statement, **_: statement)
            return real(self, run)

    patch.setattr(Runs, "holding", holding)


@mistake(
    Check(
        f"{_REFUSED}test_a_run_of_other_rows_is_refused_and_one_of_the_same_rows_in_another_order_completes_the_batch",
        "DID NOT RAISE",
    )
)
def other_rows_taken_for_the_same(patch: pytest.MonkeyPatch) -> None:
    """A run takes a partition that is written for its own, whatever rows it has for it."""
    from dualwrite.sinks.spark import digests, per_partition
    from harness.spark import SameTask

    patch.setattr(digests.Fingerprint, "differs_from", lambda *_: False)
    patch.setattr(per_partition, "PartitionTask", SameTask)


@mistake(
    Check(
        "integration/test_spark_compared.py::"
        "test_a_value_that_moves_to_a_column_that_was_null_makes_another_row[id_alone]",
        "DID NOT RAISE",
    )
)
def nulls_not_seen_by_the_digest(patch: pytest.MonkeyPatch) -> None:
    """The digest of a row skips its nulls, and does not see that a value has moved from one column to another."""
    import numpy as np

    from dualwrite.sinks.spark import digests, per_partition
    from harness.spark import SameTask

    def row_hashes(columns, length):
        found = np.zeros(length, np.uint64)
        for column in columns:
            hashed = digests._mixed(found ^ digests._hashes(column))
            found = np.where(column.is_valid().to_numpy(zero_copy_only=False), hashed, found)
        return found

    patch.setattr(digests, "row_hashes", row_hashes)
    patch.setattr(per_partition, "PartitionTask", SameTask)


@mistake(
    Check(
        f"{_RUNS}::test_nothing_is_committed_after_write_batch_has_raised_though_it_could_not_settle[_end_run-1]",
        "assert",
    )
)
def tasks_not_awaited_where_settling_fails(patch: pytest.MonkeyPatch) -> None:
    """The driver raises when it could not give a failed run up, without a wait for the tasks of that run."""
    from dualwrite.sinks.spark.per_partition import BatchJob

    patch.setattr(BatchJob, "_end_tasks", lambda self, _: self._settle())


@mistake(
    Check(
        f"{_RUNS}::test_a_task_commits_nothing_after_its_job_has_failed_though_its_slot_could_not_be_settled",
        "DID NOT RAISE",
    )
)
def run_not_checked_at_the_decision(patch: pytest.MonkeyPatch) -> None:
    """A task decides without a look whether its run was given up meanwhile."""
    from dualwrite.sinks.spark.worker import Attempt

    real = Attempt.require_written

    def require_written(self, *arguments):
        run, self._run = self._run, None
        try:
            return real(self, *arguments)
        finally:
            self._run = run

    patch.setattr(Attempt, "require_written", require_written)


@mistake(
    Check(
        f"{_RUNS}::test_a_recovery_on_a_schedule_leaves_alone_a_task_that_is_at_work[write_batch-write.prepared]",
        "Fenced",
    )
)
def lease_not_looked_at_by_a_recovery(patch: pytest.MonkeyPatch) -> None:
    """A recovery takes a task that is at work for a dead one, though its lease has not expired."""
    from dualwrite.stores.sql import leases

    patch.setattr(leases, "living_leases", lambda *_, **__: frozenset())
