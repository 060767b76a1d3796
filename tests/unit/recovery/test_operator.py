"""Termination by force, on simulated servers of both engines: what the database has decided is refused, or lost and recorded."""

from contextlib import nullcontext

import pytest
from harness.simulated import TIMEOUT_S, simulated

from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.operator import terminate_by
from dualwrite.recovery.recover import recover_rows


@pytest.fixture(params=[1, 2], ids=["librdkafka", "native"])
def servers(request):
    with simulated(transaction_version=request.param) as made:
        yield made


def terminating(name="orders", *, lose_decided=False):
    return lambda here: terminate_by(here.context, name, Deadline(TIMEOUT_S), lose_decided=lose_decided)


def recover(here):
    return recover_rows(
        lambda: here.context.store.find(""),
        store=here.context.store,
        connect=lambda: nullcontext(here.context.coordinator),
        deadline=Deadline(TIMEOUT_S),
        owner="R",
    )


def test_an_undecided_transaction_is_aborted_and_its_owner_fenced(servers):
    servers.left_by("write.prepared", "m1")
    kafka_id = servers.row().kafka_id(1)
    report = servers.run(terminating(), "T")
    assert (report.terminated, report.settled, report.losses) == ([kafka_id], ["orders"], [])
    assert servers.rows == servers.visible() == []
    assert servers.row().owner == "T"


def test_a_decided_transaction_is_refused_and_nothing_is_claimed(servers):
    servers.left_by("write.decided", "m1")
    before = servers.shown()
    with pytest.raises(IllegalStateError, match="the database has decided"):
        servers.run(terminating(), "T")
    assert servers.shown() == before
    servers.run(lambda here: here.ready("orders"), "next owner")
    assert servers.rows == servers.visible() == ["m1"]


def test_a_decided_transaction_that_is_given_up_is_aborted_and_recorded_with_who_did_it(servers):
    servers.left_by("write.decided", "m1")
    report = servers.run(terminating(lose_decided=True), "T")
    assert [(loss.row.transactional_id, loss.outcome) for loss in report.losses] == [("orders", Outcome.LOST)]
    assert report.losses[0].detail.endswith("given up by T")
    assert servers.recorded_losses == [("orders", Outcome.LOST)]
    assert (servers.rows, servers.visible()) == (["m1"], [])
    servers.run(lambda here: here.write(here.lane(), "m2"), "next owner")
    assert servers.visible() == ["m2"]


def test_a_termination_that_dies_after_the_abort_leaves_the_loss_to_the_next_settler(servers):
    servers.left_by("write.decided", "m1")
    servers.start(terminating(lose_decided=True), "T").to("terminate.aborted").kill()
    assert servers.recorded_losses == []
    report = servers.run(recover, "R")
    assert [loss.outcome for loss in report.losses] == [Outcome.LOST]
    assert servers.recorded_losses == [("orders", Outcome.LOST)]


def test_what_the_owner_decides_between_the_look_and_the_claim_is_refused_too(servers):
    owner = servers.start(lambda here: here.write(here.lane(), "m1")).to("write.recorded")
    terminator = servers.start(terminating(), "T").to("claim.before")
    owner.to("write.decided").kill()
    with pytest.raises(IllegalStateError, match="the database has decided"):
        terminator.result()
    servers.run(recover, "R")
    assert servers.rows == servers.visible() == ["m1"]


def test_kafkas_own_id_leads_to_its_row(servers):
    """Taken for an id of another program, it would be aborted although the row names it."""
    servers.left_by("write.decided", "m1")
    with pytest.raises(IllegalStateError, match="the database has decided"):
        servers.run(terminating(servers.row().kafka_id(1)), "T")


def test_the_id_of_a_settled_incarnation_leaves_the_present_owner_alone(servers):
    servers.left_by("write.prepared", "m1")
    old = servers.row().kafka_id(1)
    owner = servers.start(lambda here: here.write(here.lane(), "m2"), "next owner").to("write.prepared")
    assert servers.run(terminating(old), "T").terminated == []
    owner.result()
    assert servers.rows == servers.visible() == ["m2"]


def test_what_a_settler_has_begun_under_a_settled_incarnation_is_aborted(servers):
    """It wanted to end what a broker had forgotten, was overtaken by another settler, and died."""
    servers.left_by("write.prepared", "m1")
    old = servers.row().kafka_id(1)
    servers.run(recover, "R")

    def begin(here):
        producer_id, epoch = here.context.coordinator.retire([old], Deadline(TIMEOUT_S))[old]
        here.context.coordinator.add_partitions({old: (producer_id, epoch, {("events", 0)})}, Deadline(TIMEOUT_S))

    servers.run(begin, "late settler")
    owner = servers.start(lambda here: here.write(here.lane(), "m2"), "next owner").to("write.prepared")
    assert servers.run(terminating(old), "T").terminated == [old]
    assert servers.run(terminating(old), "T").terminated == []
    owner.result()
    assert servers.rows == servers.visible() == ["m2"]


def test_where_nothing_is_open_nothing_is_claimed(servers):
    servers.run(lambda here: here.write(here.lane(), "m1"))
    report = servers.run(terminating(), "T")
    assert (report.terminated, report.settled, report.unknown) == ([], [], False)
    assert servers.row().owner != "T"


def test_the_other_lanes_are_settled_as_by_a_recovery(servers):
    servers.run(lambda here: here.ready("orders"))
    servers.left_by("write.decided", "m1", name="orders#1")
    servers.left_by("write.prepared", "m2", name="orders#2")
    report = servers.run(terminating("orders#2", lose_decided=True), "T")
    assert report.rolled_forward == ["orders#1"]
    assert report.losses == []
    assert servers.rows == servers.visible() == ["m1"]
    assert {servers.row(name).owner for name in ("orders", "orders#1", "orders#2")} == {"T"}


def test_an_id_that_nobody_knows_is_reported_as_unknown(servers):
    assert servers.run(terminating("nobody"), "T").unknown
