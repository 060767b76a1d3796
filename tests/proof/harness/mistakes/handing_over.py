"""Mistakes about transactions that were handed over: who ends them in Kafka, how often, and when the owner may continue."""

from dataclasses import replace

import pytest

from dualwrite.errors import DualWriteError
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol import batches
from dualwrite.protocol.lives import ProducerState
from dualwrite.protocol.values import Outcome, belongs
from dualwrite.recovery import settle
from dualwrite.sinks.batches import complete_handed_over
from dualwrite.writing.lane import Lane
from harness.mistakes.registry import Check, mistake

_TESTS = "integration/test_handed_over.py"


@mistake(
    Check(
        f"{_TESTS}::test_an_owner_goes_on_with_its_producer_once_its_transaction_is_recorded_as_completed[postgresql]",
        "decided is not enough",
    )
)
def gone_on_when_decided(patch: pytest.MonkeyPatch) -> None:
    """An owner goes on as soon as its transaction is decided, while the decider's request may be on its way."""
    real = batches.may_go_on

    def may_go_on(known, found, handed_over):
        return real(known, replace(found, completed=Outcome.COMMITTED), handed_over)

    patch.setattr(batches, "may_go_on", may_go_on)


@mistake(
    Check(
        f"{_TESTS}::test_a_request_whose_connection_breaks_is_not_sent_again[reset_answer-postgresql]",
        r"== \[\]|sent once",
    )
)
def end_of_the_decider_repeated(patch: pytest.MonkeyPatch) -> None:
    """A decider whose request was not answered sends it again, and reports to the owner that all is completed."""
    real = KafkaCoordinator.end

    def end(self, transactions, *, committed, deadline, once=False):
        del once
        return real(self, transactions, committed=committed, deadline=deadline)

    patch.setattr(KafkaCoordinator, "end", end)


def claiming_nothing_decided(claim):
    """A claim that leaves alone what is decided and not completed, and completes that instead."""

    def claim_the_rest(context, transactional_ids, deadline, **kwargs):
        decided = [
            row
            for row in context.store.read(transactional_ids)
            if belongs(row.prepared, row.incarnation) and row.completed is None
        ]
        completed = complete_handed_over(
            decided, coordinator=context.coordinator, store=context.store, deadline=deadline
        )
        done = {row.transactional_id for row in completed}
        return claim(context, [name for name in transactional_ids if name not in done], deadline, **kwargs)

    return claim_the_rest


@mistake(Check(f"{_TESTS}::test_who_comes_after_a_decider_claims_what_it_has_decided[postgresql]", "the owner went on"))
def decided_by_another_completed_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    """A driver completes without a claim what another one has decided, and perhaps begun to complete."""
    from dualwrite.sinks.spark import worker

    patch.setattr(worker, "claim_rows", claiming_nothing_decided(worker.claim_rows))


@mistake(
    Check(
        f"{_TESTS}::test_what_an_owner_prepares_after_it_went_on_is_not_decided_by_what_was_decided_before[postgresql]",
        r"assert \[1, 2\] == \[1\]",
    )
)
def prepared_known_by_its_incarnation_alone(patch: pytest.MonkeyPatch) -> None:
    """A prepared database transaction follows any decision of its incarnation, even one on an earlier transaction."""
    real = settle.end_participants

    def end_participants(store, participants):
        real(store, [replace(found, decided=belongs(found.row.prepared, found.incarnation)) for found in participants])

    patch.setattr(settle, "end_participants", end_participants)


@mistake(
    Check(
        f"{_TESTS}::test_an_owner_whose_transaction_nobody_has_decided_does_not_go_on[postgresql]",
        "assert not True",
    )
)
def handed_over_aborted_by_its_owner(patch: pytest.MonkeyPatch) -> None:
    """An owner that is to go on aborts what it has handed over, and does."""
    real = Lane.may_go_on

    def may_go_on(self, found):
        producer = self._producer
        if producer is None or producer.state is not ProducerState.PREPARED:
            return real(self, found)
        try:
            producer.abort_transaction()
        except DualWriteError:
            return False
        return self.usable

    patch.setattr(Lane, "may_go_on", may_go_on)
