"""Mistakes of the Spark sink. PySpark is imported where one is planted: most processes have no use for it."""

from contextlib import nullcontext
from dataclasses import replace
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


# Rows that meet others of the same key.

_MERGING = "conformance/test_merging.py::"
_FOLLOWS = f"{_MERGING}test_the_table_is_what_its_changes_make_of_it[postgresql-staging]"


@mistake(Check(_FOLLOWS, "assert"))
def older_row_of_a_key_wins(patch: pytest.MonkeyPatch) -> None:
    """Of several rows of a key in a batch, the one with the smallest number in its order column counts."""
    from dualwrite.sinks.spark.merging import MergeStatements

    real = MergeStatements.newest
    patch.setattr(MergeStatements, "newest", lambda self: real(self).replace(" DESC", "", 1))


@mistake(Check(f"{_MERGING}test_a_row_meets_one_of_its_key_as_it_is_told[postgresql-direct]", "'newer'"))
def late_older_row_overwrites(patch: pytest.MonkeyPatch) -> None:
    """With on_conflict "newer", a row that comes late overwrites a newer one that the table has."""
    from dualwrite.sinks.spark.merging import MergeStatements

    patch.setattr(MergeStatements, "_is_newer", lambda *_: "")


@mistake(
    Check(f"{_MERGING}test_without_an_order_a_key_twice_is_refused_by_name[postgresql-staging]", "DID NOT RAISE|match")
)
def key_twice_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """A decision does not look whether a key occurs twice in a batch that has no order."""
    from dualwrite.sinks.spark.merging import MergeStatements

    patch.setattr(MergeStatements, "key_twice", lambda _: "SELECT 1 WHERE 1 = 0")


@mistake(Check(_FOLLOWS, "assert"))
def deleted_row_stays(patch: pytest.MonkeyPatch) -> None:
    """Change data inserts and updates, and leaves the row of a deletion in the table."""
    from dualwrite.sinks.spark.merging import MergeStatements

    real = MergeStatements.delete_using
    patch.setattr(MergeStatements, "delete_using", lambda self: f"{real(self)} AND 1 = 0")


@mistake(
    Check(
        "integration/test_spark_changes.py::"
        "test_a_table_and_a_topic_follow_their_source_over_the_death_of_a_task[write_batch]",
        "of a deletion",
    )
)
def deletion_without_a_tombstone(patch: pytest.MonkeyPatch) -> None:
    """A deletion sends the row's last values to its topic, where compaction then keeps them."""
    from dualwrite.sinks.spark import per_partition, writing
    from harness.spark import SameTask

    patch.setattr(writing, "produce_batch", partial(_without, "deleted", writing.produce_batch))
    patch.setattr(per_partition, "PartitionTask", SameTask)


# Rows that are put aside.

_ASIDE = "integration/test_spark_quarantine.py::"
_ASIDE_ONCE = f"{_ASIDE}test_a_killed_task_of_write_batch_puts_each_row_aside_once[spark.rows_copied-postgresql]"


@mistake(Check(_ASIDE_ONCE, "assert"))
def put_aside_in_a_transaction_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """A task writes the rows that it puts aside before the decision; its next attempt writes them again."""
    from dualwrite.sinks.spark import partition_task

    real = partition_task.write_rows

    def write_rows(transaction, batches, target, table, options, *, database, names, **more):
        if target.is_quarantine:
            batches = list(batches)
            with database.engine.connect() as own:
                own.begin()
                with database.writing(own, target.layout, table) as into:
                    for batch in batches:
                        into.write(batch)
                own.commit()
            target = replace(target, in_table=False)
        real(transaction, iter(batches), target, table, options, database=database, names=names, **more)

    patch.setattr(partition_task, "write_rows", write_rows)


@mistake(Check(_ASIDE_ONCE, "assert"))
def put_aside_by_the_first_attempt_alone(patch: pytest.MonkeyPatch) -> None:
    """A task that is run again takes the rows that its former self has put aside for written."""
    from pyspark import TaskContext

    from dualwrite.sinks.spark.quarantine import Sieve

    real = Sieve.sift

    def sift(self, routed):
        for number, batch in real(self, routed):
            if number < len(self._targets) - 1 or TaskContext.get().attemptNumber() == 0:
                yield number, batch

    patch.setattr(Sieve, "sift", sift)


@mistake(
    Check(f"{_ASIDE}test_a_partition_with_more_rows_than_the_limit_fails_before_all_are_looked_for", "DID NOT RAISE")
)
def limit_of_each_task_alone(patch: pytest.MonkeyPatch) -> None:
    """The limit of rows that are put aside holds for each task, and nobody adds them up."""
    from dualwrite.sinks.spark.whole_batch import WholeBatch

    real = WholeBatch.record

    def record(self, connection, targets, prepared, sources):
        return real(self, connection, targets, [replace(one, quarantined=0) for one in prepared], sources)

    patch.setattr(WholeBatch, "record", record)


# The deciding transaction: several tables, and rows that make room for others.


@mistake(
    Check(
        "integration/test_spark_many.py::test_the_process_that_decides_is_killed[batch.recorded-False-staging]",
        r"\[40, 0\]",
    )
)
def first_table_decided_apart(patch: pytest.MonkeyPatch) -> None:
    """Of a batch of two tables, the first one takes its rows over in a transaction of its own."""
    from dualwrite.sinks.spark.whole_batch import _Deciding

    real = _Deciding._bring_into

    def bring_into(self, connection, layout, *arguments):
        is_first = len(self._targets) > 1 and layout is self._targets[0].layout
        with self._driver.database.engine.begin() if is_first else nullcontext(connection) as used:
            real(self, used, layout, *arguments)

    patch.setattr(_Deciding, "_bring_into", bring_into)


_REPLACED = "integration/test_spark_source.py::test_a_part_of_the_table_is_replaced"


@mistake(Check(_REPLACED, r"assert \["))
def rows_replaced_before_the_decision(patch: pytest.MonkeyPatch) -> None:
    """The rows that a batch replaces are deleted in a transaction of their own, before it is decided."""
    from dualwrite.sinks.spark.databases.postgresql import PostgreSQL

    real = PostgreSQL.empty

    def empty(self, _, *arguments):
        with self.engine.begin() as own:
            real(self, own, *arguments)

    patch.setattr(PostgreSQL, "empty", empty)


@mistake(Check(_REPLACED, "1000 missing"))
def new_rows_deleted_by_replacing(patch: pytest.MonkeyPatch) -> None:
    """The rows that a batch replaces are deleted when its own rows are in the table already."""
    from dualwrite.sinks.spark.whole_batch import _Deciding

    real = _Deciding._bring_into

    def bring_into(self, connection, layout, staged, empty):
        database = self._driver.database
        with pytest.MonkeyPatch.context() as later:
            later.setattr(database, "empty", lambda *_: None)
            real(self, connection, layout, staged, empty)
        if empty is not None:
            database.empty(connection, layout.table, empty)

    patch.setattr(_Deciding, "_bring_into", bring_into)


@mistake(
    Check(
        "integration/test_spark_observing.py::test_a_micro_batch_names_the_offsets_of_its_sources[foreach_batch]",
        "assert",
    )
)
def sources_of_the_micro_batch_before(patch: pytest.MonkeyPatch) -> None:
    """The ledger says of a micro-batch that it was made of what the one before it was made of."""
    from dualwrite.sinks.spark import api

    real = api.sources_of_stream
    patch.setattr(api, "sources_of_stream", lambda session, query, number: real(session, query, max(0, number - 1)))


@mistake(
    Check(
        "integration/test_spark_observing.py::test_a_micro_batch_names_the_offsets_of_its_sources[staging]",
        "assert",
    )
)
def checkpoint_read_of_the_micro_batch_before(patch: pytest.MonkeyPatch) -> None:
    """The process that decides reads the checkpoint's offsets of the micro-batch before the one that it decides on."""
    from dualwrite.sinks.spark import source

    real = source.sources_of_checkpoint
    patch.setattr(source, "sources_of_checkpoint", lambda checkpoint, number: real(checkpoint, max(0, number - 1)))


@mistake(
    Check(
        "integration/test_spark_observing.py::test_each_source_of_a_micro_batch_keeps_its_place[staging]",
        "assert",
    )
)
def sources_without_offsets_left_out(patch: pytest.MonkeyPatch) -> None:
    """The process that decides leaves the sources out that have no offsets yet: those of the next one pass for theirs."""
    from dualwrite.sinks.spark import observing

    real = observing._parsed
    patch.setattr(observing, "_parsed", lambda text: real(text.replace("\n-", "")))


@mistake(Check("integration/test_spark_formats.py::test_keys_have_formats_of_their_own[avro-avro]", "assert|Error"))
def first_schema_for_each_part(patch: pytest.MonkeyPatch) -> None:
    """A task writes keys and values with the id of the first schema that the driver has found."""
    from dualwrite.sinks.spark.registry import TaskRegistry

    real = TaskRegistry.__init__

    def init(self, client, settings):
        ids = [one.schema_id for one in client.known.values()]
        client.known = {key: replace(one, schema_id=ids[0]) for key, one in client.known.items()}
        real(self, client, settings)

    patch.setattr(TaskRegistry, "__init__", init)
