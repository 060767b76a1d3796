"""Mistakes about native transactions, which producer id and epoch name exactly."""

import pytest

from dualwrite.kafka import transaction_ends
from dualwrite.kafka.abandoned import AbandonedTransaction
from dualwrite.kafka.engine import GREATEST_TIMEOUT_MS
from dualwrite.kafka.native import coordination
from dualwrite.kafka.native.coordination import CoordinatorRequests
from dualwrite.kafka.transaction_ends import PostedQuestion
from dualwrite.protocol import settle
from dualwrite.protocol.batches import CompletionStep, next_native_completion_step
from dualwrite.protocol.settle import Lookup
from dualwrite.recovery import inspect
from dualwrite.sinks import batches
from dualwrite.writing import lane
from harness.mistakes.registry import Check, mistake


@mistake(
    Check(
        "unit/kafka/test_transaction_ends.py::test_a_leader_that_does_not_answer_or_does_not_know_the_producer_shows_nothing",
        "KNOWN",
    )
)
def nothing_open_taken_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """A native transaction counts as ended where the leader shows nothing open, whatever epoch it knows."""
    patch.setattr(settle, "_has_ended", lambda _, found: found is None or found.open_from is None)


@mistake(
    Check(
        "unit/kafka/test_transaction_ends.py::test_the_next_transaction_in_the_same_partition_shows_nothing_of_the_last_one",
        "KNOWN",
    )
)
def a_later_epoch_taken_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """A native transaction counts as ended where the leader knows a later epoch, though something is open there."""
    patch.setattr(settle, "_has_ended", lambda ended, found: found is None or found.epoch > ended.state.epoch)


@mistake(
    Check(
        "unit/kafka/test_posted_question.py"
        "::test_one_question_to_a_leader_is_about_all_producers_and_each_gets_its_own_rows",
        "ShownProducer",
    ),
)
def another_producers_row_shows_the_end(patch: pytest.MonkeyPatch) -> None:
    """In the answer to the question about all lanes, the row with the latest epoch counts for each of them."""

    def rows_of(_producer_id, partitions, shown):
        return {key: max(shown[key].values(), key=lambda row: row.epoch) for key in partitions if shown.get(key)}

    patch.setattr(transaction_ends, "rows_of", rows_of)


@mistake(
    Check(
        "unit/kafka/test_posted_question.py"
        "::test_an_answer_of_a_former_leader_does_not_count_and_the_leader_is_looked_up_again",
        "ShownProducer",
    ),
)
def former_leader_shows_the_end(patch: pytest.MonkeyPatch) -> None:
    """The answer to the question about all lanes counts, whether or not the broker leads the partition."""
    real = PostedQuestion._note_producers
    patch.setattr(
        PostedQuestion,
        "_note_producers",
        lambda self, led, described, _: real(self, led, described, dict.fromkeys(led, (0, 0))),
    )


@mistake(
    Check(
        "unit/kafka/test_abandoned_transaction.py::test_another_native_state_aborts_it[1-False]",
        "aborted by the broker",
    )
)
def native_ended_by_the_request_of_the_other_engine(patch: pytest.MonkeyPatch) -> None:
    """A successor ends an abandoned native transaction by the request that leaves the epoch as it is."""
    real = AbandonedTransaction._end

    def end(self, view, deadline, *, committed, natively):
        del natively
        return real(self, view, deadline, committed=committed, natively=False)

    patch.setattr(AbandonedTransaction, "_end", end)


@mistake(
    Check(
        "unit/sinks/test_batches_complete.py::test_a_native_transaction_with_a_forgotten_marker_is_left_to_a_claim",
        r"== \[\]",
    )
)
def native_completed_on_the_coordinators_word(patch: pytest.MonkeyPatch) -> None:
    """A decider records a native transaction as completed because the coordinator has answered its commit."""

    def next_step(known):
        step = next_native_completion_step(known)
        return CompletionStep.RECORD if step is CompletionStep.LOOK else step

    patch.setattr(batches, "next_native_completion_step", next_step)


@mistake(
    Check(
        "unit/recovery/test_lost_decisions.py::test_a_settlers_fence_and_repair_are_no_lost_decisions[repair.ended]",
        r"== \[\]",
    )
)
def repair_taken_for_a_lost_decision(patch: pytest.MonkeyPatch) -> None:
    """A settler looks for lost decisions by the fence as it claimed it, and another one has repaired since."""
    patch.setattr(inspect, "_fences", lambda items, *_: [row.settle_fence for row, _ in items])


@mistake(
    Check(
        "unit/recovery/test_lost_decisions.py::test_a_native_decision_in_other_partitions_is_found_by_its_epoch_alone",
        r"\[\] == \[",
    )
)
def later_native_decisions_known_by_the_log_alone(patch: pytest.MonkeyPatch) -> None:
    """The epoch that the coordinator shows is not asked whether the database has lost decisions."""

    def look_up(known, view, fence=None):
        answer = real(known, view, fence)
        return Lookup.READ if answer is Lookup.LOST and known.newest is not None else answer

    real = inspect.look_up
    patch.setattr(inspect, "look_up", look_up)


@mistake(
    Check(
        "unit/writing/test_lane.py"
        "::test_a_native_commit_is_recorded_as_complete_only_if_the_log_does_not_speak_against_it[LogProof.ABORTED]",
        "assert True is",
    )
)
def native_closes_without_the_proof(patch: pytest.MonkeyPatch) -> None:
    """An owner that closes or idles records a native transaction as committed because it has ended everywhere."""
    patch.setattr(lane, "end_at_rest", lambda *_: settle.EndStep.KNOWN)


@mistake(
    Check(
        "unit/kafka/native/test_coordination.py::test_a_new_producer_is_not_asked_for_again_after_silence",
        "is None",
    ),
    Check(
        "unit/kafka/native/test_producer.py::test_the_first_request_is_sent_at_most_once_without_an_answer",
        "DID NOT RAISE",
    ),
)
def a_new_producer_asked_for_again_after_silence(patch: pytest.MonkeyPatch) -> None:
    """A producer repeats `InitProducerId` without an answer: the first copy may come late, and abort what it has begun since."""
    real = CoordinatorRequests._answered

    def answered(self, *arguments, after_silence=True):
        del after_silence
        return real(self, *arguments, after_silence=True)

    patch.setattr(CoordinatorRequests, "_answered", answered)


@mistake(
    Check(
        "unit/kafka/native/test_coordination.py::test_the_gravest_answer_of_the_partitions_counts",
        "ILLEGAL_GENERATION",
    )
)
def offsets_judged_by_the_first_partition(patch: pytest.MonkeyPatch) -> None:
    """A producer goes on although the group has moved on, because the first partition's offset was taken."""
    patch.setattr(
        coordination,
        "_read_partitions",
        lambda codes: coordination.Answered(next(iter(codes.values()))),
    )


@mistake(
    Check(
        "unit/kafka/native/test_coordination_initialising.py::test_the_users_own_timeout_else_the_longest_first[None-2147483647-expected0]",
        "2147483547",
    )
)
def librdkafkas_time_limit_for_native_transactions(patch: pytest.MonkeyPatch) -> None:
    """The native engine asks for librdkafka's greatest timeout: after 24.8 days the broker aborts what the database has decided."""
    patch.setattr(coordination, "NEVER_MS", GREATEST_TIMEOUT_MS)
