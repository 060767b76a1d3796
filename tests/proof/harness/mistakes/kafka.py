"""Mistakes about Kafka: what a transaction is known by, what librdkafka's answers mean, what the log proves."""

from dataclasses import replace

import pytest
from kafka.protocol.producer.transaction import InitProducerIdRequest

from dualwrite.kafka import abandoned, log
from dualwrite.kafka.cluster import Place
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.engine import ProducerEngine
from dualwrite.kafka.librdkafka.evidence import Evidence
from dualwrite.kafka.librdkafka.handle import Handle
from dualwrite.kafka.librdkafka.producer import ProducerInstance
from dualwrite.kafka.log import Scan
from dualwrite.kafka.transaction_ends import EndQuestions
from dualwrite.protocol.values import LogProof
from dualwrite.recovery import inspect
from dualwrite.stores.sql import store, tables
from dualwrite.writing.lane import Lane
from harness.mistakes.registry import MISTAKES, Check, mistake, performed


@mistake(performed("half_of_the_next", "shows \\['m1', 'm2'\\]"))
def state_without_first_offsets(patch: pytest.MonkeyPatch) -> None:
    """The row names a transaction by producer id and epoch alone, as KIP-939 does."""
    real = Evidence.state_of

    def state_of(self, *args, **kwargs):
        return replace(real(self, *args, **kwargs), first_offsets=(), started_ms=None)

    patch.setattr(Evidence, "state_of", state_of)
    patch.setattr(tables, "_incomplete", lambda *_: None)
    patch.setattr(store, "check_decidable", lambda decision: str(decision.state))
    patch.setattr(inspect, "is_open", lambda *_: True)
    patch.setattr(inspect, "others_than", lambda *_: frozenset())


@mistake(
    Check(
        "conformance/test_kip_939.py::test_a_late_recoverer_ends_nothing_of_the_others[librdkafka-begun]",
        "DID NOT RAISE",
    ),
    Check(
        "conformance/test_kip_939.py::test_a_late_recoverer_ends_nothing_of_the_others[native-prepared]",
        "DID NOT RAISE",
    ),
)
def ends_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    """A producer that has kept a transaction ends the one that it finds later, without comparing the two."""
    patch.setattr(abandoned, "another_owner_since", lambda *_: False)


@mistake(performed("late_first_copy_of_a_commit", "shows \\['m1', 'm2'\\]"))
def kept_after_a_doubtful_end(patch: pytest.MonkeyPatch) -> None:
    """A producer goes on after a commit that may have been sent twice, because it answered success."""
    patch.setattr(ProducerInstance, "_judge", lambda *_: None)


@mistake(
    Check(
        "integration/test_faults.py::test_what_a_tool_aborts_between_two_messages_in_bulk_mode_aborts_both_sides[postgresql]",
        "DID NOT RAISE",
    ),
)
def bulk_believes_what_is_open(patch: pytest.MonkeyPatch) -> None:
    """In bulk mode, a producer takes what is open in a partition for all that it has written there."""
    patch.setattr(Evidence, "_require_no_gap", lambda *_: None)


@mistake(
    Check(
        "integration/test_forgotten_markers.py::test_an_owner_aborts_nothing_before_it_knows_that_its_commit_has_ended",
        "a/0",
    ),
    Check(
        "integration/test_suspended_brokers.py::test_a_broker_is_suspended_at_every_point_of_a_dual_write",
        r"(lost|hanging): write\.",
    ),
    Check(
        "integration/test_forgotten_markers.py::"
        "test_a_broker_is_cut_off_from_its_controllers_at_every_fail_point[write.decided]",
        "a/0",
    ),
)
def goes_on_before_the_end_is_known(patch: pytest.MonkeyPatch) -> None:
    """A producer begins its next transaction on the answer to its last one."""
    patch.setattr(Lane, "know_end", lambda *_: None)
    patch.setattr(ProducerEngine, "_require_end_known", lambda *_: None)


@mistake(
    Check(
        "unit/writing/test_lane.py::test_what_was_found_of_a_discarded_producer_is_not_taken_for_the_end_of_the_next_one",
        "not True",
    )
)
def end_of_a_former_producer_taken_for_the_next_one(patch: pytest.MonkeyPatch) -> None:
    """An end that a question has shown is taken for the end of every transaction that is not known by then."""
    real = EndQuestions._take

    def take(self):
        asked = self._asked
        real(self)
        if any(pending.known for pending in asked):
            for pending in list(self._unknown):
                pending.known = True

    patch.setattr(EndQuestions, "_take", take)


@mistake(
    Check(
        "integration/test_faults.py"
        "::test_what_a_tool_aborts_under_a_live_owner_is_recorded_when_it_closes[write.decided-postgresql]",
        "DID NOT RAISE",
    ),
    Check(
        "integration/test_faults.py::test_what_a_tool_aborts_under_a_live_owner_is_recorded_when_it_idles[postgresql]",
        "Outcome.COMMITTED",
    ),
    Check(
        "integration/test_suspended_brokers.py::test_a_broker_is_suspended_at_every_point_of_a_dual_write",
        r"(lost|hanging): write\.",
    ),
)
def closes_without_the_proof(patch: pytest.MonkeyPatch) -> None:
    """An owner that closes or idles records "committed" because Kafka has answered so."""
    patch.setattr(Lane, "know_end", lambda *_: None)


@mistake(
    Check(
        "integration/test_forgotten_markers.py::test_what_an_owner_has_aborted_does_not_come_back_with_its_next_commit",
        r"\[0\]",
    )
)
def settles_without_what_the_owner_knows(patch: pytest.MonkeyPatch) -> None:
    """Settling does not learn in which partitions the owner's last abort may have been forgotten."""
    patch.setattr(ProducerInstance, "undecided_in", frozenset())


@mistake(
    Check(
        "integration/test_faults.py"
        "::test_what_somebody_has_aborted_is_not_decided_if_there_is_time_to_look[markers-postgresql]",
        "DID NOT RAISE",
    ),
    Check(
        "integration/test_faults.py"
        "::test_what_somebody_has_aborted_is_not_decided_if_there_is_time_to_look[new-producer-postgresql]",
        "DecidedTransactionLost",
    ),
)
def decides_without_a_last_look(patch: pytest.MonkeyPatch) -> None:
    """An owner decides a transaction that was open for long without asking whether it still is."""
    patch.setattr(ProducerInstance, "require_still_open", lambda *_: None)


@mistake(
    Check(
        "integration/test_late_initialisation.py"
        "::test_a_first_copy_that_comes_late_finds_nothing_that_it_could_abort[postgresql]",
        "DecidedTransactionLost",
    )
)
def kept_after_a_repeated_init(patch: pytest.MonkeyPatch) -> None:
    """A producer goes on although librdkafka has asked for its producer id twice, because both calls took no time."""
    patch.setattr(Handle, "init_unanswered", False)


@mistake(performed("delivery_fails_after_flush", "not TransactionAborted"))
def delivery_failures_ignored(patch: pytest.MonkeyPatch) -> None:
    """A prepare is good because flush returned 0, whatever the delivery reports said."""
    patch.setattr(ProducerInstance, "_require_all_delivered", lambda *_: None)


@mistake(
    Check(
        "integration/test_adversary.py::test_consumed_offsets_alone_are_rolled_forward_with_their_rows[postgresql]",
        r"\[\] == \['orders'\]",
    )
)
def offsets_alone_taken_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A transaction of nothing but consumed offsets is taken for empty: the row does not name it."""
    real = ProducerInstance.prepare

    def prepare(self, deadline):
        self.transaction.sent_offsets = False
        return real(self, deadline)

    patch.setattr(ProducerInstance, "prepare", prepare)


@mistake(
    Check(
        "integration/test_coordinator_log.py::test_the_topics_id_tells_a_topic_made_anew_when_nothing_else_does",
        "UNKNOWABLE",
    )
)
def topic_id_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A topic that was deleted and created again under its name is taken for the one that was written to."""
    patch.setattr(Scan, "place", property(lambda self: Place(self.first.topic, self.first.partition)))


@mistake(
    Check(
        "integration/test_coordinator_log.py::test_records_of_somebody_else_at_the_offset_prove_nothing",
        "UNKNOWABLE",
    )
)
def anybodys_marker_taken_for_ones_own(patch: pytest.MonkeyPatch) -> None:
    """The proof takes the next marker of the producer for the transaction's own, though its records are gone."""
    patch.setattr(log.Scan, "_is_own_first", lambda *_: True)


@mistake(
    Check(
        "integration/test_forgotten_markers.py"
        "::test_what_was_forgotten_is_committed_although_records_of_the_transaction_are_gone[deleted-where-open]",
        r"\[0\]",
    )
)
def partly_taken_as_whole(patch: pytest.MonkeyPatch) -> None:
    """A commit marker in one partition is taken for the commit of the whole transaction."""
    real = log.combined

    def combined(state, proofs):
        found = real(state, proofs)
        return LogProof.COMMITTED if found is LogProof.PARTLY else found

    patch.setattr(log, "combined", combined)


@mistake(performed("slow_settler_and_a_new_owner", "told (DecidedTransactionLost|DatabaseWentBack)"))
def conditional_init_taken_for_a_compare_and_set(patch: pytest.MonkeyPatch) -> None:
    """All owners share a Kafka id, and a settler that retires it names the producer id and epoch that it has seen, to be safe."""
    MISTAKES["one_kafka_id_for_all_incarnations"].plant(patch)
    describe, seen = KafkaCoordinator.describe, {}

    def describe_and_remember(self, kafka_ids, deadline):
        views = describe(self, kafka_ids, deadline)
        for kafka_id, view in views.items():
            seen.setdefault(kafka_id, view)
        return views

    def retire(self, kafka_ids, deadline, *, timeouts_ms=None):
        def requests(ids):
            for kafka_id in ids:
                request = InitProducerIdRequest(
                    transactional_id=kafka_id,
                    transaction_timeout_ms=1000,
                    producer_id=seen[kafka_id].producer_id,
                    producer_epoch=seen[kafka_id].epoch,
                    max_version=5,
                )
                yield request, [kafka_id]

        def read(ids, _):
            yield (
                ids[0],
                (seen[ids[0]].producer_id, seen[ids[0]].epoch),
            )  # fenced: then it belongs to another owner, which was left alone

        return self._coordinators.ask(kafka_ids, requests, read, deadline, "retire the transactional ids")

    patch.setattr(KafkaCoordinator, "describe", describe_and_remember)
    patch.setattr(KafkaCoordinator, "retire", retire)
