"""Mistakes of a settler: the wrong next step, or the wrong order of queries."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dualwrite.protocol import settle as rules
from dualwrite.protocol.blocking import TerminateStep
from dualwrite.protocol.settle import Knowledge, SettleStep
from dualwrite.protocol.values import StateRow, TransactionStatus, is_open, others_than
from dualwrite.recovery import claim, inspect, operator, recover
from dualwrite.recovery import recover as plan
from dualwrite.recovery import recover as servers
from dualwrite.recovery import settle as settling
from harness.mistakes.registry import Check, mistake, performed


def _instead(patch: pytest.MonkeyPatch, choose: Callable[[Knowledge, SettleStep], SettleStep]) -> None:
    """Let another choice than the product's be taken."""
    real = settling.next_step
    patch.setattr(settling, "next_step", lambda known: choose(known, real(known)))


def _retire_at_once(patch: pytest.MonkeyPatch, instead_of: SettleStep) -> None:
    """Let the id be retired instead, and that be all."""

    def choose(known, step):
        if known.retired:
            return SettleStep.FINISH
        if step is not instead_of:
            return step
        return SettleStep.FINISH if known.is_retired else SettleStep.RETIRE

    _instead(patch, choose)


@mistake(performed("half_of_the_next", "shows \\['m1', 'm2'\\]"))
def commits_what_does_not_match(patch: pytest.MonkeyPatch) -> None:
    """A settler commits what is ongoing under the id and epoch of the row, though it began later and at other offsets."""

    def choose(known, step):
        if step is not SettleStep.PROVE or known.view.status is not TransactionStatus.ONGOING:
            return step
        shown = (known.view.producer_id, known.view.epoch)
        return SettleStep.COMMIT if shown == (known.prepared.producer_id, known.prepared.epoch) else step

    _instead(patch, choose)


@mistake(
    Check(
        "integration/test_counterexamples.py::"
        "test_partitions_that_a_late_request_adds_do_not_hide_a_decided_transaction[postgresql]",
        r"\[\] == \['orders'\]",
    )
)
def added_partitions_taken_for_another_transaction(patch: pytest.MonkeyPatch) -> None:
    """A settler takes a transaction for another one that the coordinator shows in more partitions than the row."""
    same, own_again = rules.shows_same_transaction, rules._is_own_again
    patch.setattr(
        rules, "shows_same_transaction", lambda view, state: same(view, state) and not others_than(state, view)
    )
    patch.setattr(
        rules,
        "_is_own_again",
        lambda known, view, state: own_again(known, view, state) and not others_than(state, view),
    )


@mistake(performed("decided_owner_dead", "shows \\['m2'\\]"))
def retire_before_complete(patch: pytest.MonkeyPatch) -> None:
    """A settler retires an incarnation whose decided transaction it should have committed first."""
    _retire_at_once(patch, SettleStep.COMMIT)


@mistake(performed("operator_aborts_a_decided_transaction", "told None, not DecidedTransactionLost"))
def loss_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """A settler that finds a decided transaction aborted retires its id and does not report the loss."""
    _retire_at_once(patch, SettleStep.RECORD_LOST)


@mistake(performed("forgotten_id_and_a_loss", "told None, not DecidedTransactionLost"))
def no_such_id_means_nothing_to_do(patch: pytest.MonkeyPatch) -> None:
    """A settler takes an id that the coordinator has forgotten for settled, though the row names a transaction of it."""

    def choose(known, step):
        forgotten = known.view is not None and known.view.status is TransactionStatus.NO_SUCH_ID
        return SettleStep.FINISH if forgotten else step

    _instead(patch, choose)


@mistake(performed("nothing_left_to_prove", "told None, not OutcomeUnverifiable"))
def absence_taken_for_proof(patch: pytest.MonkeyPatch) -> None:
    """A settler takes a transaction for committed because the log shows no sign of its abort."""
    _instead(patch, lambda _, step: SettleStep.RECORD_COMMITTED if step is SettleStep.RECORD_UNVERIFIABLE else step)


@mistake(performed("marker_written_past_the_coordinator", "told None, not DecidedTransactionLost"))
def coordinator_outweighs_the_log(patch: pytest.MonkeyPatch) -> None:
    """A settler believes the coordinator's CompleteCommit without reading the log."""

    def choose(known, step):
        done = known.view is not None and known.view.status is TransactionStatus.COMPLETE_COMMIT
        return SettleStep.RECORD_COMMITTED if done and step is SettleStep.PROVE else step

    _instead(patch, choose)


@mistake(
    Check(
        "unit/protocol/test_settle.py::test_what_is_aborted_after_the_decided_one_was_committed_is_aborted_under_the_next_epoch",
        "SettleStep.REPAIR_MARKERS",
    )
)
def two_ends_under_one_epoch(patch: pytest.MonkeyPatch) -> None:
    """A settler aborts what was forgotten under the epoch under which it has committed: late copies may end the wrong one."""
    patch.setattr(rules, "_step_to_end", lambda *_: SettleStep.REPAIR_MARKERS)


@mistake(performed("second_settler_waits", "came not to settle.looked"))
def marked_settled_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """A second settler finds the first one's commit or abort under way, and marks the incarnation settled at once."""
    _instead(patch, lambda _, step: SettleStep.FINISH if step is SettleStep.WAIT else step)


@mistake(performed("undecided_owner_dead", "stays open"))
def never_retired(patch: pytest.MonkeyPatch) -> None:
    """A settler leaves what is open and undecided to the broker's time-out, which may be weeks."""
    _instead(patch, lambda _, step: SettleStep.FINISH if step is SettleStep.RETIRE else step)


@mistake(
    Check(
        "unit/recovery/test_settle.py::test_a_next_transaction_that_begins_between_two_questions_is_not_committed",
        r"\['m1', 'm2'\] == \['m1'\]",
    )
)
def partition_asked_before_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    """A settler asks the partitions what is open before it asks the coordinator."""
    real = settling._Settling._look

    def look(self, items):
        shown = self._coordinator.open_offsets([item.row.prepared for item in items], self._deadline)
        settling.failpoints.hit("settle.looked")
        real(self, items)
        for item, offsets in zip(items, shown, strict=True):
            item.known = replace(item.known, evidence=is_open(item.row.prepared, offsets))

    patch.setattr(settling._Settling, "_look", look)


@mistake(performed("slow_settler_and_a_new_owner", "told (DecidedTransactionLost|DatabaseWentBack)"))
def one_kafka_id_for_all_incarnations(patch: pytest.MonkeyPatch) -> None:
    """Every owner initialises the same Kafka id, as programs do that know nothing of incarnations."""
    patch.setattr(StateRow, "kafka_id", lambda self, _: f"{self.transactional_id}.{self.namespace}")
    patch.setattr(claim, "_check_new_ids", lambda *_: None)
    patch.setattr(recover, "went_back", lambda *_: {})  # every id is known before it is claimed


@mistake(performed("database_failed_over_before_the_next_owner", "told None, not DatabaseWentBack"))
def never_looks_back(patch: pytest.MonkeyPatch) -> None:
    """A settler does not ask whether Kafka has committed what the row does not name."""
    patch.setattr(settling, "lost_decisions", lambda *_, **__: [])


@mistake(
    Check(
        "proof/model/test_schedules.py::test_what_was_found_once_is_fixed[late_partitions_then_a_second_commit]",
        "a false alarm: DatabaseWentBack",
    )
)
def newest_start_alone_taken_for_a_lost_decision(patch: pytest.MonkeyPatch) -> None:
    """A settler takes every commit that began later for one with records."""
    real = inspect.lost_decision
    patch.setattr(
        inspect,
        "lost_decision",
        lambda known, view, incarnation, answer, later: real(
            known, view, incarnation, answer, later and replace(later, idle_since_ms=None)
        ),
    )


@mistake(
    Check(
        "integration/test_command_recover.py::"
        "test_a_loss_whose_finder_died_before_it_told_is_told_by_the_next_opening[postgresql]",
        "DID NOT RAISE",
    )
)
def recorded_taken_for_told(patch: pytest.MonkeyPatch) -> None:
    """A recorded loss counts as reported, though its finder may have died in between."""
    patch.setattr(claim, "unreported", lambda _: [])


@mistake(
    Check(
        "proof/model/test_schedules.py::test_what_was_found_once_is_fixed[loss_recorded_while_a_partition_had_no_leader]",
        "held back",
    )
)
def recorded_loss_taken_for_settled(patch: pytest.MonkeyPatch) -> None:
    """A recovery takes a recorded loss for settled, though its finder may have died before it ended what the broker forgot."""
    patch.setattr(plan, "_left_unended", lambda _: False)


@mistake(
    Check(
        "integration/test_command_recover.py::"
        "test_a_living_writer_is_taken_with_all_its_lanes_or_left_alone[postgresql]",
        r"\{1, 2\} == \{2\}|DID NOT RAISE",
    )
)
def recovery_takes_a_lane_alone(patch: pytest.MonkeyPatch) -> None:
    """A recovery claims the lane that has something open, and leaves the others to an owner that lives."""
    for module in (plan, claim, servers):
        patch.setattr(module, "writer_of", lambda name: name)


@mistake(
    Check("unit/recovery/test_operator.py::test_kafkas_own_id_leads_to_its_row[librdkafka]", "DID NOT RAISE"),
    Check("unit/recovery/test_operator.py::test_kafkas_own_id_leads_to_its_row[native]", "DID NOT RAISE"),
)
def kafkas_id_taken_for_another_programs(patch: pytest.MonkeyPatch) -> None:
    """A termination by Kafka's own id does not ask the row that the id belongs to."""
    patch.setattr(
        operator, "_named", lambda store, asked: (store.read([asked])[0], None) if store.read([asked]) else None
    )


@mistake(
    Check(
        "unit/recovery/test_operator.py::test_what_the_owner_decides_between_the_look_and_the_claim_is_refused_too"
        "[librdkafka]",
        "DID NOT RAISE",
    )
)
def termination_looks_before_its_claim_only(patch: pytest.MonkeyPatch) -> None:
    """A termination decides by what it saw before its claim, while the owner could still decide."""
    real = operator._settle
    looked = operator._step

    def settle_without_a_look(context, name, claimed, deadline, *, lose_decided):
        patch.setattr(operator, "_step", lambda *_, **__: (TerminateStep.SETTLE, []))
        try:
            return real(context, name, claimed, deadline, lose_decided=lose_decided)
        finally:
            patch.setattr(operator, "_step", looked)

    patch.setattr(operator, "_settle", settle_without_a_look)
