"""The product with one rule of the decision broken, while a search runs it: the search must find what that does.

Where ``harness.mistakes`` or ``model.counterparts`` plant the same one, it has the same name here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from harness.mistakes import MISTAKES as SAID
from harness.mistakes.handing_over import claiming_nothing_decided, gone_on_when_decided
from model.counterparts import end_of_the_decider_repeated

from dualwrite.protocol.batches import BatchEvent
from dualwrite.protocol.values import Decision as RowDecision
from dualwrite.sinks.batches import Decision
from search.batches import programs
from search.batches.lab import Breaking
from search.batches.world import BatchBounds, BatchBudgets, BatchWorld


class BatchMistake(NamedTuple):
    """A mistake, and the smallest bounds in which it shows."""

    sentence: str
    bounds: BatchBounds
    broken: Breaking | None

    def world(self) -> BatchWorld:
        """The configuration to search."""
        return BatchWorld(self.bounds, self.broken)


BATCH_MISTAKES: dict[str, BatchMistake] = {
    "decided_before_all_have_prepared": BatchMistake(
        "A driver decides as soon as one participant has handed over, without waiting for the other.",
        BatchBounds(needed=1),
        None,
    ),
}


def within(bounds: BatchBounds) -> Callable[[Breaking], Breaking]:
    """Register a mistake under its function's name; its docstring is the sentence."""

    def register(broken: Breaking) -> Breaking:
        sentence = " ".join((broken.__doc__ or SAID[broken.__name__].sentence).split())
        BATCH_MISTAKES[broken.__name__] = BatchMistake(sentence, bounds, broken)
        return broken

    return register


PREPARED = BatchBounds(prepared=True, markers_late=False)
RACE = PREPARED._replace(others=("recoverer",))


@within(PREPARED)
def kafka_committed_before_the_database(patch: pytest.MonkeyPatch) -> None:
    """A driver commits the participants' transactions in Kafka, and then decides on them in the database."""
    real = Decision._commit

    def commit(self):
        named = {f"{part.transactional_id}.{part.namespace}.{part.incarnation}": part.prepared for part in self._parts}
        self._context.coordinator.end(named, committed=True, deadline=programs.Deadline(programs.TIMEOUT_S), once=True)
        return real(self)

    patch.setattr(Decision, "_commit", commit)


@within(RACE)
def decided_after_another_has_claimed(patch: pytest.MonkeyPatch) -> None:
    """A driver that finds a part's id claimed by another process decides on the rest, instead of giving up."""

    def decide_on(self, connection, part):
        self._context.store.decide(
            connection, RowDecision(part.transactional_id, part.incarnation, part.prepared, namespace=part.namespace)
        )

    patch.setattr(Decision, "_decide_on", decide_on)


@within(PREPARED._replace(budgets=BatchBudgets(answer=1)))
def batch_in_doubt_read_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    """A driver whose COMMIT was not answered reads the batch's own row at once, while its old session may yet commit."""

    def resolve(self, _doubt):
        return BatchEvent.FIND if self._batch.is_written() else BatchEvent.ABORT

    patch.setattr(Decision, "_resolve", resolve)


@within(PREPARED._replace(budgets=BatchBudgets(answer=1)))
def batch_in_doubt_taken_for_aborted(patch: pytest.MonkeyPatch) -> None:
    """A driver whose COMMIT was not answered takes it for rolled back."""

    def resolve(self, _doubt):
        self._batch.settle(())
        return BatchEvent.ABORT

    patch.setattr(Decision, "_resolve", resolve)


within(PREPARED._replace(goes_on=True, budgets=BatchBudgets(delay=1)))(end_of_the_decider_repeated)
within(PREPARED._replace(goes_on=True))(gone_on_when_decided)


@within(RACE._replace(goes_on=True))
def decided_by_another_completed_without_a_claim(patch: pytest.MonkeyPatch) -> None:
    """A driver completes without a claim what another one has decided, and perhaps begun to complete."""
    patch.setattr(programs, "claim_rows", claiming_nothing_decided(programs.claim_rows))
