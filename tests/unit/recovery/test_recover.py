"""Recovery from outside, on simulated servers: whom it settles, whom it leaves alone, and that a dry run changes nothing."""

import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from harness import served
from harness.simulated import TIMEOUT_S
from simulator.environment import time_out
from simulator.outside import SimulatedCoordinator

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Fenced
from dualwrite.protocol.values import Outcome, TransactionStatus, TransactionView
from dualwrite.recovery.claim import claim_rows
from dualwrite.recovery.recover import check_cluster, overview, recover_rows
from dualwrite.stores.sql.database import SqlDatabase


def recovering(prefix="", **kwargs):
    def work(here):
        return recover_rows(
            lambda: here.context.store.find(prefix),
            store=here.context.store,
            connect=lambda: nullcontext(SimulatedCoordinator(here.simulation)),
            deadline=Deadline(TIMEOUT_S),
            owner="a recovery",
            **kwargs,
        )

    return work


def both_have(servers, *values):
    return servers.rows == servers.visible() == list(values)


def test_everything_that_dead_owners_left_is_settled(servers):
    servers.left_by("write.decided", "m1", name="a")
    servers.left_by("write.prepared", "m2", name="b")
    servers.run(lambda here: here.write(here.lane("c"), "m3"))
    report = servers.run(recovering())
    assert both_have(servers, "m1", "m3")
    assert report.rolled_forward == ["a"]
    assert {"a", "b"} <= set(report.settled)
    assert report.losses == report.skipped == report.went_back == []


def test_a_second_recovery_finds_nothing_and_claims_nothing(servers):
    servers.left_by("write.decided", "m1", name="a")
    servers.run(recovering())
    before = servers.shown()
    report = servers.run(recovering())
    assert (report.planned, report.settled) == ([], [])
    assert servers.shown() == before


def test_a_writer_at_rest_is_left_alone_and_goes_on(servers):
    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        lane.record_completed()
        here.write(lane, "m2")

    owner = servers.start(work).to("write.begun", 2)
    servers.run(recovering(), "R")
    assert servers.row().incarnation == 1
    owner.result()
    assert both_have(servers, "m1", "m2")


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(servers):
    servers.left_by("write.decided", "m1", name="a")
    servers.left_by("write.prepared", "m2", name="b")
    before, planned = servers.shown(), []
    report = servers.run(recovering(dry_run=True, on_planned=planned.extend))
    assert servers.shown() == before
    assert [item.row.transactional_id for item in report.planned] == ["a", "b"]
    assert planned == report.planned
    assert report.settled == []


def test_an_owner_that_began_just_now_is_left_alone_unless_its_time_is_up(servers):
    servers.simulation.now_s = time.time()
    owner = servers.start(lambda here: here.write(here.lane(), "m1")).to("write.prepared")
    report = servers.run(recovering(open_for_s=3600.0), "R")
    assert (report.skipped, report.settled) == (["orders"], [])
    assert servers.row().owner == "A"
    servers.run(recovering(open_for_s=0.0), "R")
    with pytest.raises(Fenced):
        owner.result()
    assert both_have(servers)


@pytest.mark.parametrize("leased", [True, False])
def test_a_leased_slot_with_something_undecided_is_left_to_its_driver(servers, leased):
    servers.left_by("write.prepared", "m1", name="pool#1")
    report = servers.run(recovering(open_for_s=1.0, leased=lambda ids: ids if leased else ()))
    assert (report.skipped, report.settled) == ((["pool#1"], []) if leased else ([], ["pool#1"]))


def test_a_writer_is_claimed_with_all_its_lanes(servers):
    servers.run(lambda here: here.write(here.lane("orders"), "m1"))
    servers.left_by("write.prepared", "m2", name="orders#1")
    report = servers.run(recovering())
    assert report.settled == ["orders#1"], "it alone needed it"
    assert servers.row("orders").owner == servers.row("orders#1").owner == "a recovery"


def test_a_lane_that_was_added_meanwhile_is_claimed_too(servers):
    servers.left_by("write.prepared", "m1", name="orders")
    recovery = servers.start(recovering(), "R").to("claim.before")
    servers.left_by("write.prepared", "m2", name="orders#1")
    recovery.result()
    assert both_have(servers)
    assert servers.row("orders#1").owner == "a recovery"


def test_a_lane_that_was_added_by_a_new_owner_is_left_to_it(servers):
    servers.left_by("write.prepared", "m1", name="orders")
    recovery = servers.start(recovering(), "R").to("claim.row_raised")

    def new_owner(here):
        claim_rows(here.context, ["orders"], Deadline(TIMEOUT_S))
        here.write(here.lane("orders#1"), "m2")

    servers.run(new_owner, "new")
    recovery.result()
    assert servers.row("orders").owner == servers.row("orders#1").owner == "new"
    assert both_have(servers, "m2")


def test_losses_are_in_the_report_and_recorded(servers):
    servers.left_by("write.decided", "m1")
    servers.simulation.broker = time_out(servers.simulation.broker, servers.row().kafka_id(1))
    servers.simulation.write_markers()
    report = servers.run(recovering())
    assert [(loss.row.transactional_id, loss.outcome) for loss in report.losses] == [("orders", Outcome.LOST)]
    assert servers.recorded_losses == [("orders", Outcome.LOST)]


def test_an_id_whose_claim_the_database_has_lost_is_named_and_the_others_are_settled(servers):
    before = servers.restored("b")
    servers.left_by("write.decided", "m1", name="a")
    report = servers.run(recovering())
    assert [error.transactional_id for error in report.went_back] == ["b"]
    assert report.settled == ["a"]
    assert servers.row("b") == before


def test_an_id_whose_claim_is_lost_after_the_plan_does_not_keep_the_others_from_being_settled(servers):
    servers.left_by("write.prepared", "m1", name="b")
    backup = servers.row("b")
    servers.left_by("write.prepared", "m2", name="b")
    servers.left_by("write.decided", "m3", name="a")
    recovery = servers.start(recovering(), "R").to("claim.before")
    servers.database.rows["b"] = backup
    report = recovery.result()
    assert [error.transactional_id for error in report.went_back] == ["b"]
    assert report.settled == ["a"]
    assert servers.row("b") == backup


def test_after_a_restore_it_goes_on_above_what_kafka_knows(servers):
    servers.restored("b")
    report = servers.run(recovering(after_restore=lambda _: False))
    assert report.went_back == []
    assert servers.row("b").incarnation > 2
    assert all(one.settled for one in report.forgotten)
    servers.run(lambda here: here.write(here.lane("b"), "m2"))
    assert servers.visible() == ["lost", "m2"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_rows_of_another_cluster_are_refused(servers, dry_run):
    servers.left_by("write.decided", "m1")
    servers.simulation.broker = servers.simulation.broker._replace(cluster_id="another")
    before = servers.shown()[-1]
    with pytest.raises(ConfigurationError):
        servers.run(recovering(dry_run=dry_run))
    assert servers.shown()[-1] == before
    check_cluster([replace(servers.row(), cluster_id="another")], "another")


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, {"flink-0-1", "orders.0123456789ab.9", "bills.0123456789ab.9"}),
        ({"prefix": "o"}, set()),
        ({"prefix": "o", "others": True}, {"flink-0-1", "orders.0123456789ab.9"}),
        ({"transactional_id": "orders"}, set()),
    ],
)
def test_the_open_transactions_of_any_program_count_if_all_ids_are_asked_for(shop, monkeypatch, asked, shown):
    """One of another program has no row, and still holds back readers."""
    with shop.writer() as writer, writer.transaction() as tx:
        shop.put(tx, 1)
    began_ms = int((time.time() - 95.0) * 1000)
    open_now = {
        kafka_id: TransactionView(TransactionStatus.ONGOING, 7, 0, began_ms)
        for kafka_id in ("flink-0-1", "orders.0123456789ab.9", "bills.0123456789ab.9")
    }
    monkeypatch.setattr(served._Coordinator, "open_now", lambda *_: open_now)
    found = overview(kafka=served.SETTINGS, database=SqlDatabase(shop.engine), **asked)
    assert {item.open_for_s for item in found.items} == {None}
    assert {one.kafka_id for one in found.blockers} == shown
    assert (found.longest_s is not None and found.longest_s >= 95.0) is bool(shown)
