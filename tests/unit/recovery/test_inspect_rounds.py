"""Rounds: what goes together, what waits, and a repair that ends only what it could add."""

import logging
from dataclasses import dataclass
from enum import Enum

import pytest

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import LogProof, TransactionStatus, TransactionView
from dualwrite.recovery.inspect import Incarnation, by_step, perform, repair, warn_if_deleted
from unit.recovery.test_settle_native import row_of


class Step(Enum):
    GO = "go"
    WAIT = "wait"
    FINISH = "finish"


@dataclass
class Known:
    step: Step
    view: TransactionView


def item(step, number=1):
    return Incarnation(
        row_of(PreparedTxnState()), number, Known(step, TransactionView(TransactionStatus.ONGOING, 7, 3))
    )


def groups_of(*items):
    return by_step(items, lambda known: known.step, {Step.GO, Step.WAIT})


def test_those_at_the_same_step_go_together():
    one, two, done = item(Step.GO), item(Step.GO), item(Step.FINISH)
    assert groups_of(one, two, done) == {Step.GO: [one, two]}


def test_the_error_at_the_deadline_says_what_was_next():
    with pytest.raises(Unavailable, match="incarnation 1 did not finish in time: the coordinator shows Ongoing.* go"):
        perform(groups_of(item(Step.GO)), {}, Deadline(0))


def test_a_repair_ends_only_what_it_could_add():
    ends, asked = [], {}
    mine, theirs = item(Step.GO, 1), item(Step.GO, 2)

    class Coordinator:
        def add_partitions(self, transactions, _):
            asked.update(transactions)
            return {mine.kafka_id: True, theirs.kafka_id: False}

    repaired = repair(
        [mine, theirs],
        lambda _: (frozenset({("t", 0)}), True),
        lambda items, committed: ends.append((items, committed)),
        Coordinator(),
        deadline=Deadline(60),
        logger=logging.getLogger(__name__),
    )
    assert repaired == [mine]
    assert ends == [([mine], True)]
    assert asked == {one.kafka_id: (7, 3, {("t", 0)}) for one in (mine, theirs)}


@pytest.mark.parametrize("proof", [None, *LogProof])
def test_a_committed_transaction_without_its_records_is_warned_of(caplog, proof):
    warn_if_deleted(item(Step.FINISH), proof, logging.getLogger("dualwrite"))
    assert ("has deleted messages" in caplog.text) == (proof is LogProof.UNKNOWABLE)
