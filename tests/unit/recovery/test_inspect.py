"""Inspecting what is unsettled, on simulated servers: it names the step that settling would take, and changes nothing."""

import pytest
from harness.simulated import TIMEOUT_S
from simulator.environment import time_out

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.protocol.settle import SettleStep
from dualwrite.recovery.claim import claim_rows
from dualwrite.recovery.recover import inspect
from dualwrite.recovery.settle import settle
from dualwrite.writing.dual_write import Ending


def inspecting(here):
    context = here.context
    rows = context.store.find("")
    return inspect(
        rows,
        coordinator=context.coordinator,
        deadline=Deadline(TIMEOUT_S),
        participants=context.store.participants(rows),
    )


@pytest.mark.parametrize(
    ("left", "step"),
    [
        ("write.prepared", SettleStep.RETIRE),
        ("write.decided", SettleStep.COMMIT),
        ("write.completed", SettleStep.RECORD_COMMITTED),
        ("lost", SettleStep.RECORD_LOST),
    ],
)
def test_it_names_the_step_that_settling_would_take_and_changes_nothing(servers, left, step):
    servers.left_by("write.decided" if left == "lost" else left, "m1")
    if left == "lost":
        servers.simulation.broker = time_out(servers.simulation.broker, servers.row().kafka_id(1))
        servers.simulation.write_markers()
    before = servers.shown()
    [(item, found)] = servers.run(inspecting, "B")
    assert (item.row, item.incarnation, found) == (servers.row(), 1, step)
    assert servers.shown() == before


def test_the_owners_own_incarnation_and_every_unsettled_one_below_it_are_shown(servers):
    servers.left_by("write.decided", "m1")
    servers.start(lambda here: claim_rows(here.context, ["orders"], Deadline(TIMEOUT_S)), "B").result()
    assert [(item.incarnation, step) for item, step in servers.run(inspecting, "C")] == [
        (1, SettleStep.COMMIT),
        (2, SettleStep.FINISH),
    ]


def test_what_a_fenced_owner_has_prepared_in_the_database_is_shown_although_its_incarnation_is_settled(servers):
    def prepares(here):
        here.write(here.lane(), "m1", ending=Ending.PREPARE)

    def takes_over(here):
        rows = claim_rows(here.context, ["orders"], Deadline(TIMEOUT_S))
        settle(rows, coordinator=here.context.coordinator, store=here.context.store, deadline=Deadline(TIMEOUT_S))

    late = servers.start(prepares).to("write.prepared")
    servers.run(takes_over, "B")
    late.result()
    assert servers.row().settled_incarnation == 1
    assert 1 in [item.incarnation for item, _ in servers.run(inspecting, "C")]


def test_nothing_is_shown_of_a_cluster_that_does_not_answer(servers):
    servers.left_by("write.decided", "m1")
    cut_off = servers.start(inspecting, "B")
    cut_off.cut_off()
    with pytest.raises(Unavailable):
        cut_off.result()
