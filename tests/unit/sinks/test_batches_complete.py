"""Completing what was handed over and decided, on simulated servers: recorded only if nothing of it can still be under way."""

from dataclasses import replace

import pytest
from harness.simulated import TIMEOUT_S, TOPIC
from harness.simulated_native import NativeOwner, settled
from simulator.environment import time_out

from dualwrite.clock import Deadline
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.claim import claim_rows
from dualwrite.recovery.settle import settle
from dualwrite.sinks.batches import complete_handed_over
from dualwrite.writing.dual_write import Ending


@pytest.fixture
def decided(servers):
    """A row that names what its owner has handed over, prepared on both sides."""

    def hands_over(here):
        with here.block(here.ready(), Ending.PREPARE) as transaction:
            here.connection.insert("m1")
            transaction.produce(TOPIC, "m1", partition=0)
        return transaction.prepared

    state = servers.run(hands_over)
    servers.database.rows["orders"] = replace(servers.row(), prepared=state)
    return servers.row()


def completing(here, *more):
    context = here.context
    rows = context.store.read(["orders", *more])
    return complete_handed_over(
        rows, coordinator=context.coordinator, store=context.store, deadline=Deadline(TIMEOUT_S)
    )


def settling(here):
    rows = claim_rows(here.context, ["orders"], Deadline(TIMEOUT_S))
    return settle(rows, coordinator=here.context.coordinator, store=here.context.store, deadline=Deadline(TIMEOUT_S))


def test_it_is_committed_on_both_sides_and_recorded_without_a_claim(servers, decided):
    assert servers.run(completing, "D") == [decided]
    assert servers.rows == servers.visible() == ["m1"]
    assert servers.row() == replace(decided, completed=Outcome.COMMITTED)


@pytest.mark.parametrize("arrived", [True, False])
def test_without_an_answer_it_is_left_to_a_claim(servers, decided, arrived):
    """The owner must not go on: the request may still be on its way, and would end its next transaction."""
    decider = servers.start(completing, "D").before("EndTxn")
    if arrived:
        decider.lose_answer()
    else:
        decider.cut_off("EndTxn")
    assert decider.result() == []
    assert servers.row().completed is None
    assert servers.rows == ["m1"]
    servers.run(settling, "S")
    assert servers.visible() == ["m1"]


def test_what_the_broker_has_aborted_is_not_recorded_as_completed(servers, decided):
    servers.simulation.broker = time_out(servers.simulation.broker, decided.kafka_id(1))
    servers.simulation.write_markers()
    assert servers.run(completing, "D") == []
    assert servers.row().completed is None
    [loss] = servers.run(settling, "S").losses
    assert loss.outcome is Outcome.LOST


@pytest.mark.parametrize("point", ["complete.before", "complete.ended"])
def test_a_decider_that_dies_leaves_the_rest_to_a_claim(servers, decided, point):
    servers.start(completing, "D").to(point).kill()
    servers.run(settling, "S")
    assert servers.rows == servers.visible() == ["m1"]
    assert servers.row().completed is Outcome.COMMITTED


@pytest.fixture
def native(servers):
    """An owner that has handed over a native transaction, which its row names as decided."""
    owner = NativeOwner(servers, "native")
    for partition in (0, 1):
        owner.produce("n1", partition)
    owner.decide()
    return owner


def both(here):
    return completing(here, "native")


def test_both_engines_rows_are_completed_in_one_batch(servers, decided, native):
    assert {row.transactional_id for row in servers.run(both, "D")} == {"orders", "native"}
    assert servers.row("native").completed is servers.row().completed is Outcome.COMMITTED
    assert sorted(servers.visible()) == ["m1", "n1"]
    # Only the request for native transactions raises the epoch, so that the owner's next one has another name.
    known = next(one for one in servers.simulation.broker.transactions if one.transactional_id == native.kafka_id)
    assert known.producer_epoch == native.epoch + 1


def test_the_end_of_a_native_transaction_is_asked_for_again_where_the_answer_is_missing(servers, native):
    decider = servers.start(lambda here: completing(here, "native"), "D").before("EndTxn")
    decider.lose_answer()
    assert [row.transactional_id for row in decider.result()] == ["native"]
    assert servers.row("native").completed is Outcome.COMMITTED


def test_a_native_transaction_with_a_forgotten_marker_is_left_to_a_claim(servers, native):
    native.end(forgets=1)
    assert servers.run(lambda here: completing(here, "native"), "D") == []
    assert servers.row("native").completed is None
    assert settled(servers, "native").repaired == ["native"]
    assert servers.visible(0) == servers.visible(1) == ["n1"]


def test_a_native_transaction_that_the_broker_has_aborted_is_left_to_a_claim(servers):
    native = NativeOwner(servers, "native", timeout_ms=60_000)
    native.produce("n1")
    native.decide()
    servers.simulation.broker = time_out(servers.simulation.broker, native.kafka_id)
    servers.simulation.write_markers()
    assert servers.run(lambda here: completing(here, "native"), "D") == []
    assert [loss.outcome for loss in settled(servers, "native").losses] == [Outcome.LOST]
