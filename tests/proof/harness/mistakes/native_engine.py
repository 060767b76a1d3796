"""Mistakes of the native engine: the names, numbers and ends of its own transactions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualwrite.kafka import producer
from dualwrite.kafka.engine import ProducerEngine
from dualwrite.kafka.native import producer as native_producer
from dualwrite.kafka.native.coordination import Answered, CoordinatorRequests
from dualwrite.kafka.native.produce_state import Batch, Code, Meaning, PartitionQueue, ProduceCore
from dualwrite.kafka.native.producer import Evidence, NativeInstance
from dualwrite.kafka.native.sender import Sender
from dualwrite.protocol.lives import PRODUCER_LIFE, ProducerEvent, ProducerState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.recovery.settle import NativeSettling
from dualwrite.writing.lane import Lane
from harness.mistakes.registry import Check, mistake

_INSTANCE = "unit/kafka/native/test_producer.py::"
_CORE = "unit/kafka/native/test_produce_state.py::"
_ENDED = frozenset({Code.INVALID_TXN_STATE, Code.PRODUCER_FENCED, Code.INVALID_PRODUCER_EPOCH})


def _in_messages(test: str, shows: str) -> Check:
    return Check("conformance/test_engines_messages.py::" + test, shows)


def _in_instance(test: str, shows: str) -> Check:
    return Check(_INSTANCE + test, shows)


@mistake(
    _in_instance(
        "test_each_transaction_has_the_epoch_that_the_answer_to_the_one_before_has_named", "INVALID_PRODUCER_EPOCH"
    )
)
def epoch_not_taken_over(patch: pytest.MonkeyPatch) -> None:
    """A producer begins its next transaction under the epoch of the last one."""
    real = NativeInstance._end

    def end(self, ended, deadline):
        ids = self._ids
        real(self, ended, deadline)
        self._ids = ids

    patch.setattr(NativeInstance, "_end", end)


@mistake(_in_instance("test_a_batch_behind_a_repeated_one_has_its_own_number", r"\['a'\]"))
def sequence_reused_after_a_retry(patch: pytest.MonkeyPatch) -> None:
    """After a batch was sent again, the next one gets its sequence number."""
    real = PartitionQueue.note_answer

    def note_answer(self, batch, code, meaning, base_offset, ready_at):
        found = real(self, batch, code, meaning, base_offset, ready_at)
        if found is Meaning.AGAIN:
            self._next_sequence = batch.sequence
        return found

    patch.setattr(PartitionQueue, "note_answer", note_answer)


@mistake(
    Check(_CORE + "test_a_batch_that_is_not_acknowledged_keeps_its_sequence_number_and_bytes", "assert"),
    _in_instance("test_a_batch_without_an_answer_is_written_once", r"'a', 'a'"),
)
def batch_resent_with_another_sequence(patch: pytest.MonkeyPatch) -> None:
    """A batch that was not answered is sent again under the next sequence number."""
    real = PartitionQueue.note_unanswered

    def note_unanswered(self, batch: Batch, ready_at):
        real(self, batch, ready_at)
        batch.sequence, self._next_sequence = self._next_sequence, self._next_sequence + batch.body.count

    patch.setattr(PartitionQueue, "note_unanswered", note_unanswered)


@mistake(_in_instance("test_a_message_without_an_acknowledgement_stops_the_preparation", "DID NOT RAISE"))
def prepared_before_all_acknowledgements(patch: pytest.MonkeyPatch) -> None:
    """A transaction counts as prepared once everything is sent: its commit may overtake a batch."""

    def flush(self, deadline):
        self._prepare_to_send(deadline)
        self._serve(0.001)
        return True

    patch.setattr(Sender, "flush", flush)


@mistake(
    _in_messages(
        "test_what_delivery_callbacks_produce_at_the_end_is_a_part_of_the_transaction[native-collected]", "assert"
    ),
    Check(
        "integration/test_delivery_callbacks.py"
        "::test_what_callbacks_produce_at_the_end_of_a_block_commits_with_it[native-postgresql-block]",
        "order 1",
    ),
)
def prepared_before_what_callbacks_produce(patch: pytest.MonkeyPatch) -> None:
    """A transaction is flushed once, and prepared: what its delivery callbacks have produced then is left out of it."""

    def flush(self, deadline):
        flushed = self._sender.flush(deadline)
        self._report()
        return flushed

    patch.setattr(NativeInstance, "_flush", flush)


@mistake(_in_messages("test_nothing_can_be_produced_while_the_transaction_gets_its_name[native]", "DID NOT RAISE"))
def produced_after_the_last_flush(patch: pytest.MonkeyPatch) -> None:
    """Messages are still taken while the transaction gets its name, which lists the partitions written so far."""
    flushed = {**PRODUCER_LIFE[ProducerState.FLUSHED], ProducerEvent.PRODUCE: ProducerState.FLUSHED}
    patch.setattr(producer, "PRODUCER_LIFE", {**PRODUCER_LIFE, ProducerState.FLUSHED: flushed})


@mistake(Check(_CORE + "test_the_first_batch_of_a_partition_goes_alone", "too many values"))
def first_batches_sent_together(patch: pytest.MonkeyPatch) -> None:
    """Several batches are sent to a partition that does not know the producer: it may take a later one first."""
    patch.setattr(PartitionQueue, "_takes", lambda self, before: before < self._in_flight)


@mistake(Check(_CORE + "test_five_batches_are_in_flight_at_most", "assert"))
def more_in_flight_than_brokers_remember(patch: pytest.MonkeyPatch) -> None:
    """More batches are in flight than a broker recognises repetitions of."""
    patch.setattr(PartitionQueue, "_takes", lambda self, before: before < (9 if self._knows_us else 1))


@mistake(Check(_CORE + "test_batches_behind_a_failed_one_are_sent_again_behind_it", "assert|Refusal"))
def gap_behind_a_failed_batch_taken_for_a_loss(patch: pytest.MonkeyPatch) -> None:
    """A batch refused for a gap aborts the transaction, though the batch before it explains the gap."""
    real = PartitionQueue.note_sent

    def note_sent(self, batch: Batch):
        real(self, batch)
        batch.sent_behind = False

    patch.setattr(PartitionQueue, "note_sent", note_sent)


@mistake(
    _in_instance("test_a_refused_commit_is_no_abort[INVALID_TXN_STATE-CompletionPending-decided]", "DID NOT RAISE")
)
def ended_by_the_time_out_taken_for_a_commit(patch: pytest.MonkeyPatch) -> None:
    """A commit refused because the transaction is not open any more counts as a repetition that succeeded."""
    real = CoordinatorRequests.end

    def end(self, ids, deadline, *, committed):
        answered = real(self, ids, deadline, committed=committed)
        if committed and answered is not None and answered.code in _ENDED:
            return Answered(Code.NONE, (ids[0], ids[1] + 1))
        return answered

    patch.setattr(CoordinatorRequests, "end", end)


@mistake(_in_instance("test_a_refused_commit_is_no_abort[INVALID_TXN_STATE-CompletionPending-decided]", "Aborted"))
def refused_commit_taken_for_an_abort(patch: pytest.MonkeyPatch) -> None:
    """A refused commit is reported as an aborted transaction, although the database has decided it."""
    real = NativeInstance._answered

    def answered(self, found, phase, subject=None):
        if phase is native_producer.Phase.COMMIT and found is not None and found.code in _ENDED:
            phase = native_producer.Phase.DELIVERY
        return real(self, found, phase, subject)

    patch.setattr(NativeInstance, "_answered", answered)


@mistake(_in_instance("test_an_abort_with_an_unacknowledged_batch_is_sent_and_ends_the_producer", "DID NOT RAISE"))
def unacknowledged_batch_not_aborted(patch: pytest.MonkeyPatch) -> None:
    """An abort is not sent where no batch was acknowledged, and the producer goes on."""
    real = ProduceCore.sent_to.fget

    def acknowledged(self):
        return frozenset(key for key in real(self) if self._queues[key].first_offset is not None)

    patch.setattr(ProduceCore, "sent_to", property(acknowledged))


@mistake(_in_instance("test_the_state_names_the_engine_and_every_partition_with_its_topic", "assert"))
def state_without_a_partition(patch: pytest.MonkeyPatch) -> None:
    """The state names only the first partition of the transaction."""
    real = ProduceCore.first_offsets.fget
    patch.setattr(ProduceCore, "first_offsets", property(lambda self: dict(list(real(self).items())[:1])))


@mistake(_in_instance("test_the_states_offsets_are_those_of_its_own_transaction", "assert"))
def witnesses_of_the_wrong_transaction(patch: pytest.MonkeyPatch) -> None:
    """The state names the first offsets that the producer has ever had in its partitions."""
    real = Evidence.state

    def state(self, *arguments):
        found = real(self, *arguments)
        kept = self.__dict__.setdefault("_ever", {})
        firsts = tuple(kept.setdefault((one.topic, one.partition), one) for one in found.first_offsets)
        return replace(found, first_offsets=firsts)

    patch.setattr(Evidence, "state", state)


@mistake(_in_instance("test_consumed_offsets_are_a_part_of_the_transaction", "assert"))
def consumed_offsets_left_out_of_the_state(patch: pytest.MonkeyPatch) -> None:
    """The state does not name the partition of the consumed offsets."""
    patch.setattr(Evidence, "_groups_offsets", lambda *_: {})


@mistake(_in_instance("test_the_state_names_the_engine_and_every_partition_with_its_topic", "is not known"))
def state_without_topic_ids(patch: pytest.MonkeyPatch) -> None:
    """The state names its topics by their names alone: one that was made again counts as the same."""
    real = PreparedTxnState.native

    def native(producer_id, epoch, incarnation, offsets, topic_ids):
        del topic_ids
        return real(producer_id, epoch, incarnation, offsets, {})

    patch.setattr(PreparedTxnState, "native", native)


@mistake(_in_instance("test_nothing_begins_before_the_leaders_have_shown_the_end", "DID NOT RAISE"))
def begins_on_the_coordinators_word(patch: pytest.MonkeyPatch) -> None:
    """A native producer begins its next transaction on the answer to its last one."""
    patch.setattr(Lane, "know_end", lambda *_: None)
    patch.setattr(NativeInstance, "_require_end_known", lambda *_: None)


@mistake(_in_instance("test_a_producer_is_thrown_away_long_before_its_last_epoch", "DID NOT RAISE"))
def incarnation_not_renewed(patch: pytest.MonkeyPatch) -> None:
    """A producer uses up its epochs."""
    real = NativeInstance._note_ended

    def note_ended(self, event):
        self._renews = False
        real(self, event)

    patch.setattr(NativeInstance, "_note_ended", note_ended)


@mistake(_in_instance("test_an_old_transaction_that_another_process_has_ended_may_not", "isinstance\\(None"))
def old_transaction_decided_without_a_look(patch: pytest.MonkeyPatch) -> None:
    """A transaction that may have timed out is decided on without a question."""
    patch.setattr(NativeInstance, "_require_open", lambda *_: None)


@mistake(_in_instance("test_an_old_transaction_that_a_tool_has_ended_in_one_partition_may_not", "isinstance\\(None"))
def only_the_coordinator_asked_before_a_decision(patch: pytest.MonkeyPatch) -> None:
    """Before a decision the coordinator is asked, and not the leaders, which an operator's tool has asked, too."""
    patch.setattr(
        native_producer, "sorted", lambda _shown: (), raising=False
    )  # it goes through their answers in this order


@mistake(_in_instance("test_an_interruption_in_any_verb_makes_the_producer_doubtful[EndTxn]", "doubtful"))
def goes_on_after_an_interruption(patch: pytest.MonkeyPatch) -> None:
    """A producer whose verb was interrupted is used again."""
    patch.setattr(ProducerEngine, "doubt", lambda *_: None)


@mistake(
    Check(
        "unit/recovery/test_settle_native.py::test_a_forgotten_marker_is_written_under_the_fenced_epoch",
        "did not finish in time",
    )
)
def fence_not_written(patch: pytest.MonkeyPatch) -> None:
    """A settler raises the epoch without writing first into the row that it will."""
    real = NativeSettling._raise_fence

    class Forgetful:
        def __init__(self, store):
            self._store = store

        def raise_fence(self, *_):
            return True

        def __getattr__(self, name):
            return getattr(self._store, name)

    def raise_fence(self, items):
        store, self._store = self._store, Forgetful(self._store)
        try:
            real(self, items)
        finally:
            self._store = store

    patch.setattr(NativeSettling, "_raise_fence", raise_fence)


@mistake(
    Check(
        "unit/recovery/test_settle_native.py::test_a_transaction_left_open_is_committed_then_fenced",
        "end is not needed here",
    )
)
def native_settled_by_the_request_of_the_other_engine(patch: pytest.MonkeyPatch) -> None:
    """A settler ends the decided transaction by the request that leaves the epoch as it is."""
    real = NativeSettling._end

    def end(self, items):
        named, coordinator = {item.kafka_id: item.row.prepared for item in items}, self._coordinator

        class Old:
            def end_exactly(self, _, *, committed, deadline):
                return coordinator.end(named, committed=committed, deadline=deadline)

            def __getattr__(self, name):
                return getattr(coordinator, name)

        self._coordinator = Old()
        try:
            real(self, items)
        finally:
            self._coordinator = coordinator

    patch.setattr(NativeSettling, "_end", end)
