"""Mistakes of an owner: in a dual write, in the use of its lane afterwards, and in becoming an owner."""

from dataclasses import replace
from functools import partial
from typing import Final

import pytest

from dualwrite.asyncio import transaction as async_transaction
from dualwrite.clock import Deadline
from dualwrite.errors import CompletionPending, DualWriteError, Fenced
from dualwrite.protocol.process import Allowance, Doubt, DoubtStep, Redo
from dualwrite.protocol.values import Outcome
from dualwrite.recovery import claim, in_doubt, recover
from dualwrite.recovery.settle import SettleReport
from dualwrite.stores.sql import access, adopted, postgresql, savepoint_probe
from dualwrite.stores.sql.savepoint_probe import PsycopgWitness
from dualwrite.stores.sql.savepoints import SavepointWatch
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.writing import dual_write, lane, sessions, transaction, work
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.fair_queue import FairQueue
from dualwrite.writing.lane import Lane, Losses
from harness.mistakes.registry import Check, mistake, performed


@mistake(performed("owner_goes_on_while_it_is_settled", "shows \\['m1', 'm2'\\]"))
def no_check_before_the_first_produce(patch: pytest.MonkeyPatch) -> None:
    """An owner does not read the row's incarnation before it produces."""
    real = DualWrite._begin

    def begin(self):
        store = self._context.store
        read = store.read_incarnation

        def read_in_vain(*args, **options):
            read(*args, **options)
            return self._lane.row.incarnation

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(store, "read_incarnation", read_in_vain)
            real(self)

    patch.setattr(DualWrite, "_begin", begin)


@mistake(
    Check(
        "integration/test_forks.py::test_a_child_that_leaves_the_block_does_not_end_it[raises-ChildEnds-postgresql]",
        "was ended inside it",
    )
)
def forked_process_ends_the_dual_write(patch: pytest.MonkeyPatch) -> None:
    """A process that was forked inside a block, and leaves it by an exception, aborts both sides on its parent's connections."""
    patch.setattr(access, "_leave", lambda _: None)
    patch.setattr(DualWrite, "is_parents", False)


# Where the broker has timed it out already, the last look at the coordinator still refuses: so both checks decide before that.
@mistake(
    Check("integration/test_faults.py::test_too_little_of_the_time_out_left_aborts_both[postgresql]", "DID NOT RAISE"),
    Check(
        "unit/writing/test_dual_write.py::test_a_record_that_waited_until_the_margin_was_gone_is_not_committed",
        "DID NOT RAISE",
    ),
)
def margin_of_the_timeout_not_checked(patch: pytest.MonkeyPatch) -> None:
    """An owner decides although the broker is about to time the transaction out."""
    patch.setattr(dual_write, "allow", lambda *_: Allowance(decide_s=60, answer_s=60, margin_s=0))
    patch.setattr(Allowance, "fits", lambda *_: True)


@mistake(
    performed("commit_never_answered", "says nothing"),
    Check(
        "integration/test_adversary.py::test_sqlite_is_not_waited_for_as_long_as_its_driver_would[sqlite]",
        "waited",
    ),
)
def commit_waited_for_without_an_end(patch: pytest.MonkeyPatch) -> None:
    """An owner waits for the answer to its COMMIT as long as the connection lives."""
    real = SqlStateStore.commit
    patch.setattr(SqlStateStore, "with_commit", None)
    patch.setattr(SqlStateStore, "commit", lambda self, connection, **_: real(self, connection))


@mistake(
    Check(
        "integration/test_adversary.py"
        "::test_a_process_that_was_paused_before_its_commit_does_not_send_it[sqlite-with messages]",
        "DID NOT RAISE",
    )
)
def commits_after_a_pause(patch: pytest.MonkeyPatch) -> None:
    """An owner sends its COMMIT without a look at the clock, however long it was paused before."""
    real = DualWrite._decide
    patch.setattr(DualWrite, "_decide", lambda self, state, _, deadline: real(self, state, Deadline(60), deadline))


@mistake(
    performed("database_restarts_in_a_commit", "A gave up: .*TransactionInDoubt"),
    Check(
        "integration/test_counterexamples.py"
        "::test_connection_lost_during_commit_of_rows_alone_is_resolved_by_the_database[reset_answer-postgresql]",
        "TransactionInDoubt",
    ),
    Check(
        "integration/test_failover.py"
        "::test_a_commit_under_which_the_primary_dies_is_resolved_on_the_standby[which the standby has]",
        "TransactionInDoubt",
    ),
)
def doubt_left_at_the_first_error(patch: pytest.MonkeyPatch) -> None:
    """An owner whose COMMIT was not answered gives up when the database cannot be reached at once."""

    def resolve_at_once(*given):
        *about, fence = given
        return in_doubt._verdict(partial(in_doubt._asked, *about), fence)

    patch.setattr(in_doubt, "resolve_commit", resolve_at_once)


@mistake(
    Check(
        "integration/test_dual_writer.py::test_what_is_deferred_to_commit_takes_its_time_before_the_decision[postgresql]",
        "DID NOT RAISE|the database has rolled back",
    )
)
def deferred_triggers_left_to_commit(patch: pytest.MonkeyPatch) -> None:
    """Triggers that are deferred to COMMIT run in it, after the last look at the clock."""
    real = postgresql.PostgreSQL.ask_last
    patch.setattr(SqlStateStore, "with_commit", None)
    patch.setattr(
        postgresql.PostgreSQL,
        "ask_last",
        lambda self, connection, statement, bound, *, decides, **_: real(
            self, connection, statement, bound, decides=decides
        ),
    )


@mistake(performed("commit_answer_lost", "told TransactionAborted"))
def lost_commit_answer_taken_for_no(patch: pytest.MonkeyPatch) -> None:
    """An owner whose COMMIT was not answered takes it for rolled back, aborts in Kafka, and may run the work again."""
    patch.setattr(in_doubt, "resolve_commit", lambda *_: DoubtStep.ABORTED)


@mistake(performed("row_in_doubt_was_overwritten", "told TransactionAborted"))
def overwritten_row_taken_for_aborted(patch: pytest.MonkeyPatch) -> None:
    """An owner whose COMMIT was not answered finds another's state in the row, and takes its own for rolled back."""
    real = in_doubt.next_doubt_step

    def next_step(doubt: Doubt) -> DoubtStep:
        return DoubtStep.COMMITTED if doubt.row == doubt.ours else DoubtStep.ABORTED

    assert real is not next_step
    patch.setattr(in_doubt, "next_doubt_step", next_step)


@mistake(performed("owner_finds_its_loss", "told None, not DecidedTransactionLost"))
def fenced_taken_for_committed(patch: pytest.MonkeyPatch) -> None:
    """An owner whose commit in Kafka is answered with "fenced" believes that the process that fenced it has committed."""
    real = Lane.complete

    def complete(self, state, deadline, leaves):
        commit = self.producer.commit_transaction

        def commit_or_fenced():
            try:
                commit()
            except Fenced:
                return

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.producer, "commit_transaction", commit_or_fenced)
            return real(self, state, deadline, leaves)

    patch.setattr(Lane, "complete", complete)


@mistake(
    Check(
        "integration/test_unanswered.py::test_a_clone_that_opens_costs_a_loss_that_is_raised_and_recorded[lost-postgresql]",
        "CompletionPending",
    )
)
def unsettled_taken_for_pending(patch: pytest.MonkeyPatch) -> None:
    """An owner whose decided transaction was neither answered nor settled says that it is pending, and asks no log."""

    def pending(_context, row, *_):
        raise CompletionPending("not answered", transactional_id=row.transactional_id)

    patch.setattr(in_doubt, "prove_committed", pending)


@mistake(performed("decided_owner_dead", "transaction stays open|shows"))
def nothing_settled_at_the_start(patch: pytest.MonkeyPatch) -> None:
    """A new owner begins without settling what former owners have left."""
    for module in (claim, lane):
        patch.setattr(module, "settle", lambda *_, **__: SettleReport())


@mistake(performed("owner_goes_on_while_it_is_settled", "shows \\['m1', 'm2'\\]"))
def settling_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    """A recovery command settles what it finds in the rows without raising their incarnations first."""

    def only_read(context, ids, *_, **__):
        return [replace(row, incarnation=row.incarnation + 1) for row in context.store.read(ids)]

    patch.setattr(recover, "claim_writers", only_read)


@mistake(performed("database_restored", "told None, not DatabaseWentBack"))
def known_new_id_accepted(patch: pytest.MonkeyPatch) -> None:
    """A claim accepts a new Kafka id that the coordinator knows already: the database was restored."""
    patch.setattr(claim, "_check_new_ids", lambda *_: None)


@mistake(
    Check(
        "integration/test_housekeeping.py::test_an_owner_that_was_taken_over_can_add_no_lane[postgresql]",
        "DID NOT RAISE Fenced",
    )
)
def lanes_without_a_guard(patch: pytest.MonkeyPatch) -> None:
    """An owner that was taken over adds a lane that the new owner knows nothing of."""
    real = claim.claim_rows

    def unguarded(context, names, *known, guard=None, **more):
        return real(context, names, *known, guard=guard if guard is None or guard[0] in names else None, **more)

    for module in (claim, lane):
        patch.setattr(module, "claim_rows", unguarded)


@mistake(
    Check(
        "integration/test_database_went_back.py::test_the_idle_owner_and_its_closing_find_it_out[postgresql]",
        "DID NOT RAISE",
    )
)
def closing_compares_nothing(patch: pytest.MonkeyPatch) -> None:
    """An owner that closes does not compare its newest decision with the row."""
    patch.setattr(Lane, "compare_with_row", lambda _: None)


@mistake(
    Check(
        "unit/writing/test_lane.py"
        "::test_a_commit_whose_end_was_not_found_is_not_recorded_as_complete_once_settling_it_has_failed",
        "assert",
    ),
    Check(
        "proof/model/test_schedules.py::test_what_was_found_once_is_fixed[suspended_leader_then_closed_while_settling_fails]",
        "held back",
    ),
)
def commit_recorded_although_settling_failed(patch: pytest.MonkeyPatch) -> None:
    """An owner that could not settle its last transaction records it as complete when it idles or closes."""
    real = Lane.record_completed

    def record_completed(self):
        real(self)
        if self._unrecorded is not None and self._producer is None:
            outcome = (self._unrecorded, Outcome.COMMITTED, "committed by its owner")
            self._context.store.record_outcomes([outcome])
            self._unrecorded = None

    patch.setattr(Lane, "record_completed", record_completed)


@mistake(
    Check(
        "integration/test_dual_write_savepoints.py::test_insert_or_skip[postgresql-add_by_session]",
        "'again'",
    )
)
def messages_sent_out_of_savepoints(patch: pytest.MonkeyPatch) -> None:
    """A message that is produced inside a savepoint is sent at once, whatever becomes of the savepoint."""
    patch.setattr(SavepointWatch, "direct", True)


@mistake(
    Check(
        "integration/test_dual_write_savepoints.py::test_a_savepoint_that_the_library_cannot_see_aborts_both[postgresql]",
        "DID NOT RAISE",
    )
)
def driver_trusted_to_open_no_savepoint(patch: pytest.MonkeyPatch) -> None:
    """An owner takes it that no savepoint is opened unseen, and asks the database for no witness."""
    patch.setattr(PsycopgWitness, "doubtful", property(lambda _: False, lambda *_: None), raising=False)


@mistake(
    Check(
        "conformance/test_store_savepoints.py::test_savepoints_that_are_seen_take_their_messages_along[postgresql-ways0]",
        "assert",
    ),
    Check(
        "integration/test_django.py"
        "::test_an_error_aborts_both_sides_and_an_inner_savepoint_takes_its_messages_along[postgresql]",
        "assert",
    ),
)
def savepoints_in_statements_not_followed(patch: pytest.MonkeyPatch) -> None:
    """An owner does not look for savepoints in what psycopg sends: a message outlives the rollback of its rows."""
    patch.setattr(savepoint_probe, "may_move", lambda _: False)


@mistake(
    Check(
        "integration/test_another_database.py"
        "::test_a_connection_of_a_copy_of_the_database_is_refused_and_left_as_it_is[postgresql]",
        "DID NOT RAISE",
    )
)
def connection_of_any_database_accepted(patch: pytest.MonkeyPatch) -> None:
    """A writer takes a connection without asking which database it leads to."""
    patch.setattr(SqlStateStore, "check_same_database", lambda *_: None)


@mistake(
    Check(
        "integration/test_housekeeping.py::test_a_loss_that_the_next_block_finds_is_told_and_that_block_runs[postgresql]",
        "DecidedTransactionLost",
    ),
    Check(
        "integration/test_database_went_back.py"
        "::test_a_renewed_lane_finds_it_out_and_the_block_that_renews_it_runs[postgresql]",
        "DatabaseWentBack",
    ),
)
def loss_raised_into_the_block_that_finds_it(patch: pytest.MonkeyPatch) -> None:
    """A block that settles its lane raises a loss of the transaction before, and its body never runs."""

    def report(_, loss):
        raise loss

    patch.setattr(Losses, "report", report)


@mistake(
    Check(
        "integration/test_dual_writer.py"
        "::test_a_verb_of_the_block_that_is_called_inside_it_aborts_both[postgresql-_commit]",
        "while the dual write is completed",
    )
)
def blocks_end_from_inside(patch: pytest.MonkeyPatch) -> None:
    """A block's own verbs do what they say even if the user's code calls them."""
    patch.setattr(DualWrite, "_refuse_inside", lambda _: None)


@mistake(
    Check(
        "unit/writing/test_fair_queue.py::test_those_who_wait_get_what_is_given_back_in_the_order_in_which_they_came",
        "assert",
    ),
    Check(
        "integration/test_fairness.py::test_the_slowest_of_many_threads_on_few_lanes_wait_little_longer_than_most",
        r"<= \(3 \*|fewest|were busy for",
    ),
)
def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    """A lane goes to the thread that has asked for it last."""

    real = FairQueue._enqueue

    def enqueue(self, ticket):
        real(self, ticket)
        self._waiting[ticket.kind].move_to_end(ticket, last=False)

    patch.setattr(FairQueue, "_enqueue", enqueue)


@mistake(
    Check(
        "unit/writing/test_work.py::test_work_is_not_run_again_while_its_commit_is_in_doubt",
        "it ran twice",
    ),
    Check(
        "unit/writing/test_work.py::test_work_is_not_run_again_while_its_completion_is_pending",
        "it ran twice",
    ),
)
def redone_after_any_error(patch: pytest.MonkeyPatch) -> None:
    """A writer runs work again after each error of its own, also while its commit is in doubt or its completion is pending."""
    patch.setattr(work, "redo_after", lambda error: Redo.AGAIN if isinstance(error, DualWriteError) else Redo.FOREIGN)


@mistake(
    Check(
        "unit/writing/test_sessions_joining.py::test_a_session_that_could_not_join_cannot_commit_its_rows_alone",
        "DID NOT RAISE",
    )
)
def session_commits_its_rows_alone(patch: pytest.MonkeyPatch) -> None:
    """A session whose message was refused because it could not join a dual write commits its rows without it."""
    real = sessions._Joined.begin

    def begin(self, session):
        try:
            real(self, session)
        except BaseException:
            self._close()
            raise

    patch.setattr(sessions._Joined, "begin", begin)


@mistake(
    Check(
        "unit/writing/test_sessions_joining.py::test_a_message_right_after_begin_nested_belongs_to_the_savepoint",
        "both_have",
    )
)
def session_sends_its_savepoints_late(patch: pytest.MonkeyPatch) -> None:
    """A bound session sends SAVEPOINT with its first statement: a message before that outlives the savepoint's rollback."""
    patch.setattr(sessions.Joining, "_created", lambda *_: None)


@mistake(
    Check(
        "integration/test_sessions.py::test_a_snapshot_that_is_older_than_the_dual_write_is_refused[postgresql]",
        "DID NOT RAISE",
    )
)
def old_snapshots_may_produce(patch: pytest.MonkeyPatch) -> None:
    """A session joins a dual write with a snapshot that is older than the check whether its writer is still the owner."""
    patch.setattr(postgresql, "_FRESH", {"read committed", "repeatable read", "serializable"})


_CANCELLED: Final = (
    "unit/asyncio/test_{}.py::test_a_cancellation_aborts_both_sides_before_the_decision_and_comes_after_it_from_then_on"
)


@mistake(
    Check(
        "unit/writing/test_sessions.py::"
        "test_a_session_on_a_connection_that_another_has_joined_is_refused_until_that_one_has_ended",
        "DID NOT RAISE",
    )
)
def sessions_share_a_dual_write(patch: pytest.MonkeyPatch) -> None:
    """A second session on a connection produces into the dual write of the first: one ends it under the other."""
    patch.setattr(sessions._Joined, "is_of", lambda *_: True)


@mistake(
    Check(
        "unit/asyncio/test_sessions.py::test_a_commit_waits_for_the_message_that_another_task_still_produces",
        "both_have|IllegalStateError",
    )
)
def session_commits_while_it_produces(patch: pytest.MonkeyPatch) -> None:
    """An asynchronous session's commit() does not wait for a message that another task still hands over."""
    patch.setattr(async_transaction.OneByOne, "do", lambda _, work: work())


@mistake(
    Check(f"{_CANCELLED.format('cancelled')}[at_once]", "aborted after its COMMIT|after await|has vanished"),
    Check(f"{_CANCELLED.format('sessions')}[at_once-commit]", "aborted after its COMMIT|after await|has vanished"),
)
def cancelled_after_the_decision(patch: pytest.MonkeyPatch) -> None:
    """A task that is cancelled after COMMIT was sent leaves its dual write there."""
    real = async_transaction._Worker.interruptible
    patch.setattr(async_transaction._Worker, "interruptible", lambda self, _: real(self, True))


@mistake(
    Check(
        "unit/writing/test_sessions_joining.py::test_a_session_that_is_dropped_after_a_refused_message_gives_its_lane_back",
        "is None",
    )
)
def errors_kept_with_their_frames(patch: pytest.MonkeyPatch) -> None:
    """A dual write keeps the error that it must not survive, and through its traceback the session that was dropped after it."""
    for module in (sessions, transaction):
        patch.setattr(module, "as_value", lambda error: error)


@mistake(
    Check(
        "integration/test_django.py::test_what_django_marks_for_rollback_is_on_neither_side",
        "WriteState.COMPLETED.*WriteState.ABORTED",
    )
)
def marks_of_django_overlooked(patch: pytest.MonkeyPatch) -> None:
    """A block on Django's connection commits what Django has marked for rollback."""
    patch.setattr(adopted, "permit_of", lambda _: lambda _: None)
