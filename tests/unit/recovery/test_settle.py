"""The settling recipe, on simulated servers: both sides agree afterwards, the report says what was done, and any step may be the last."""

from dataclasses import replace

import pytest
from harness.simulated import TIMEOUT_S, TOPIC, NotReached, Servers, simulated
from simulator.environment import delete_records, forget_marker, time_out
from simulator.store import SimulatedStore

from dualwrite.clock import Deadline
from dualwrite.errors import (
    DatabaseWentBack,
    DecidedTransactionLost,
    Fenced,
    OutcomeUnverifiable,
    TransactionAborted,
    Unavailable,
)
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.claim import claim_rows
from dualwrite.recovery.settle import settle
from dualwrite.writing.dual_write import Ending


def settling(*names, timeout_s=TIMEOUT_S, **kwargs):
    """Claims the ids and settles them."""

    def work(here):
        rows = claim_rows(here.context, names or ["orders"], Deadline(TIMEOUT_S))
        coordinator, store = here.context.coordinator, here.context.store
        return settle(rows, coordinator=coordinator, store=store, deadline=Deadline(timeout_s), **kwargs)

    return work


def timed_out(servers, name="orders", incarnation=1):
    """The broker aborts what is open under this id, as after its transaction timeout."""
    kafka_id = servers.row(name).kafka_id(incarnation)
    servers.simulation.broker = time_out(servers.simulation.broker, kafka_id)
    servers.simulation.write_markers()


def test_what_the_database_has_decided_is_committed_and_recorded(servers):
    servers.left_by("write.decided", "m1", "m2")
    report = servers.run(settling())
    assert servers.visible() == servers.rows == ["m1", "m2"]
    row = servers.row()
    assert (row.settled_incarnation, row.completed) == (1, Outcome.COMMITTED)
    assert (report.incarnations, report.rolled_forward, report.losses) == (1, ["orders"], [])


@pytest.mark.parametrize("point", ["claim.initialized", "write.produced", "write.prepared", "write.recorded"])
def test_what_the_database_has_not_decided_is_aborted(servers, point):
    servers.left_by(point, "m1")
    report = servers.run(settling())
    assert servers.visible() == servers.rows == []
    row = servers.row()
    assert (row.settled_incarnation, row.completed, row.prepared.has_transaction) == (1, None, False)
    assert (report.incarnations, report.rolled_forward, report.losses) == (1, [], [])


@pytest.mark.parametrize("point", ["write.produced", "write.prepared", "write.decided", "write.completed"])
def test_a_settled_owner_that_wakes_up_changes_nothing_any_more(servers, point):
    def two_writes(here):
        lane = here.ready()
        here.write(lane, "m1")
        here.write(lane, "m2")

    owner = servers.start(two_writes).to(point)
    servers.run(settling(), "B")
    before = servers.rows, servers.visible()
    with pytest.raises((Fenced, TransactionAborted)):
        owner.result()
    assert (servers.rows, servers.visible()) == before
    assert before[0] == before[1]


def test_a_decision_that_stays_open_after_its_coordinator_has_lost_its_log_is_unverifiable(servers):
    servers.left_by("write.decided", "m1")
    servers.simulation.broker = servers.simulation.broker._replace(transactions=())
    [loss] = servers.run(settling(timeout_s=5)).losses
    assert f"it is still open in {TOPIC}[0]" in loss.detail
    assert servers.row().settled_incarnation == 1
    assert servers.run(settling()).losses == []


def test_what_kafka_has_committed_already_is_only_recorded(servers):
    servers.left_by("write.completed", "m1")
    report = servers.run(settling())
    assert servers.visible() == ["m1"]
    assert servers.row().completed is Outcome.COMMITTED
    assert report.rolled_forward == []


def test_a_decided_transaction_that_the_broker_has_aborted_is_recorded_and_reported_once(servers):
    servers.left_by("write.decided", "m1")
    timed_out(servers)
    report = servers.run(settling())
    [loss] = report.losses
    assert (loss.outcome, loss.row.prepared) == (Outcome.LOST, servers.row().prepared)
    assert "events[0]@0" in loss.detail
    assert servers.row().completed is Outcome.LOST
    assert servers.recorded_losses == [("orders", Outcome.LOST)]
    with pytest.raises(DecidedTransactionLost) as raised:
        report.raise_losses()
    assert (raised.value.transactional_id, raised.value.state) == ("orders", str(servers.row().prepared))
    again = servers.run(settling(), "B")
    again.raise_losses()
    assert servers.row().settled_incarnation == 2


def test_a_decided_transaction_whose_log_is_gone_cannot_be_verified(servers):
    servers.left_by("write.decided", "m1")
    timed_out(servers)
    servers.simulation.broker = delete_records(servers.simulation.broker, (TOPIC, 0), 2)
    report = servers.run(settling())
    assert servers.recorded_losses == [("orders", Outcome.UNVERIFIABLE)]
    with pytest.raises(OutcomeUnverifiable):
        report.raise_losses()


def test_a_decision_that_the_database_has_lost_is_recorded_with_the_transaction_that_kafka_has(servers):
    servers.left_by("write.completed", "m1")
    lost = servers.row().prepared
    servers.database.rows["orders"] = without_decision(servers)
    report = servers.run(settling())
    [loss] = report.losses
    assert loss.went_back
    assert (loss.row.prepared.producer_id, loss.row.prepared.epoch) == (lost.producer_id, lost.epoch)
    assert servers.recorded_losses == [("orders", Outcome.UNVERIFIABLE)]
    with pytest.raises(DatabaseWentBack):
        report.raise_losses()
    assert servers.run(settling(), "B").losses == []


def test_an_owner_that_renews_its_own_claim_does_not_look_back(servers):
    servers.left_by("write.completed", "m1")
    servers.database.rows["orders"] = without_decision(servers)
    assert servers.run(settling(look_back=False)).losses == []


def without_decision(servers):
    return replace(servers.row(), prepared=PreparedTxnState(), completed=None)


def test_many_ids_are_settled_at_once_each_in_its_own_way(servers):
    servers.left_by("write.decided", "m1", name="a")
    servers.left_by("write.prepared", "m2", name="b")
    servers.left_by("write.decided", "m3", name="c")
    timed_out(servers, "c")
    settled = []
    report = servers.run(settling("a", "b", "c", on_settled=settled.append))
    assert servers.visible() == ["m1"]
    assert report.rolled_forward == ["a"]
    assert [loss.row.transactional_id for loss in report.losses] == ["c"]
    assert sorted(settled) == ["a", "b", "c"]
    assert report.incarnations == 3


def test_every_incarnation_below_the_claimed_one_is_settled(servers):
    servers.left_by("write.decided", "m1")
    for name in ("B", "C"):
        servers.start(settling(), name).to("claim.row_raised").kill()
    report = servers.run(settling(), "D")
    assert report.incarnations == 3
    assert servers.row().settled_incarnation == 3
    assert servers.visible() == ["m1"]


@pytest.mark.parametrize("decided", [False, True])
def test_what_was_prepared_in_the_database_ends_as_the_row_says(servers, decided):
    state = servers.run(prepares_both_sides)
    assert servers.rows == []
    assert servers.database.prepared
    if decided:
        servers.database.rows["orders"] = replace(servers.row(), prepared=state)
    servers.run(settling())
    assert servers.database.prepared == {}
    assert servers.rows == servers.visible() == (["m1"] if decided else [])


def test_what_a_fenced_owner_prepares_after_its_incarnation_was_settled_is_rolled_back(servers):
    late = servers.start(prepares_both_sides).to("write.prepared")
    servers.run(settling(), "B")
    late.result()
    assert servers.database.prepared
    servers.run(settling(), "C")
    assert servers.database.prepared == {}
    assert servers.rows == servers.visible() == []


def prepares_both_sides(here):
    with here.block(here.ready(), Ending.PREPARE) as transaction:
        here.connection.insert("m1")
        transaction.produce(TOPIC, "m1", partition=0)
    return transaction.prepared


def test_markers_that_the_broker_has_forgotten_are_written_by_settling(servers):
    servers.simulation.markers_delayed = True
    servers.left_by("write.completed", "m1")
    kafka_id = servers.row().kafka_id(1)
    servers.simulation.broker = forget_marker(servers.simulation.broker, kafka_id, (TOPIC, 0))
    servers.simulation.markers_delayed = False
    servers.simulation.write_markers()
    with pytest.raises(AssertionError, match="held back"):
        servers.visible()
    report = servers.run(settling())
    assert servers.visible() == ["m1"]
    assert report.repaired == ["orders"]


def test_at_the_deadline_settling_says_how_far_it_came_and_what_is_done_stays_done(servers):
    servers.left_by("write.decided", "m1", name="a")
    servers.left_by("write.decided", "m2", name="b", partition=1)
    servers.run(settling("a"))
    late = servers.start(settling("a", "b"))
    late.before("EndTxn")
    late.cut_off()
    with pytest.raises(Unavailable):
        late.result()
    assert servers.visible() == ["m1"]
    assert servers.run(settling("a", "b"), "C").rolled_forward == ["b"]
    assert servers.visible(1) == ["m2"]


def test_settling_waits_for_markers_until_the_deadline_and_not_longer(servers):
    servers.simulation.markers_delayed = True
    servers.left_by("write.completed", "m1")
    with pytest.raises(Unavailable, match="did not finish in time"):
        servers.run(settling(timeout_s=5.0))
    servers.simulation.markers_delayed = False
    servers.simulation.write_markers()
    servers.run(settling(), "B")
    assert servers.visible() == ["m1"]


def test_a_next_transaction_that_begins_between_two_questions_is_not_committed(servers):
    """The partitions are asked last, so that what they show is never older than what the coordinator has shown.

    No writer begins one unchecked; here its producer does, past the row.
    """

    def owner(here):
        lane = here.ready()
        here.write(lane, "m1")
        lane.producer.begin_transaction()
        lane.producer.produce(TOPIC, "m2", partition=0)
        lane.producer.prepare_transaction()

    running = servers.start(owner, "A").to("write.decided")
    settler = servers.start(settling(), "R").to("settle.looked")
    running.result()
    settler.result()
    assert servers.visible() == servers.rows == ["m1"]


def test_a_partition_that_a_late_request_adds_does_not_hide_a_decided_transaction(servers):
    servers.left_by("write.decided", "m1")
    kafka_id, state = servers.row().kafka_id(1), servers.row().prepared
    late = {kafka_id: (state.producer_id, state.epoch, {(TOPIC, 1)})}
    assert servers.run(lambda here: here.context.coordinator.add_partitions(late, Deadline(TIMEOUT_S)))[kafka_id]
    assert servers.run(settling(), "R").rolled_forward == ["orders"]
    assert servers.visible() == servers.rows == ["m1"]


def test_only_the_settler_that_commits_it_reports_that_it_was_rolled_forward(servers):
    servers.left_by("write.decided", "m1")
    slow = servers.start(settling()).to("settle.before_commit")
    assert servers.run(settling(), "B").rolled_forward == ["orders"]
    assert slow.result().rolled_forward == []


def test_a_loss_is_raised_though_settling_could_not_finish(servers, monkeypatch):
    """It is recorded, so no later settling would report it."""
    servers.left_by("write.decided", "m1")
    timed_out(servers)

    def away(*_):
        raise Unavailable("away")

    with monkeypatch.context() as patch, pytest.raises(DecidedTransactionLost):
        patch.setattr(SimulatedStore, "mark_settled", away)
        servers.run(settling())
    assert servers.recorded_losses == [("orders", Outcome.LOST)]
    assert servers.run(settling(), "B").losses == []


POINTS = [
    "settle.looked", "settle.before_commit", "settle.committed", "settle.recorded", "settle.before_retire",
    "settle.retired", "settle.marked",
]  # fmt: skip


@pytest.mark.parametrize("left", ["write.prepared", "write.decided", "write.completed", "lost"])
def test_a_settler_may_die_at_each_of_its_steps_and_the_next_one_comes_to_the_same(left):
    died = set()
    for point in POINTS:
        with simulated() as servers:
            leave(servers, left)
            settler = servers.start(settling())
            try:
                settler.to(point)
            except NotReached:
                continue  # what was left has no need of that step
            settler.kill()
            died.add(point)
            servers.run(settling(), "B")
            assert outcome(servers) == undisturbed(left)
            before = servers.shown()[0]
            assert servers.run(settling(), "C").rolled_forward == []
            assert servers.shown()[0] == before, "it was settled, and settling changed the logs"
    assert {"settle.looked", "settle.before_retire", "settle.retired", "settle.marked"} <= died


@pytest.mark.parametrize("left", ["write.prepared", "write.decided", "lost"])
def test_two_settlers_come_to_the_same_as_one(left):
    met = set()
    for point in POINTS:
        with simulated() as servers:
            leave(servers, left)
            first = servers.start(settling())
            try:
                first.to(point)
            except NotReached:
                continue
            met.add(point)
            servers.run(settling(), "B")
            first.result()
            assert outcome(servers) == undisturbed(left)
    assert met > {"settle.looked", "settle.before_retire", "settle.retired"}


def leave(servers: Servers, what):
    servers.left_by("write.decided" if what == "lost" else what, "m1")
    if what == "lost":
        timed_out(servers)


def outcome(servers):
    return servers.rows, servers.visible(), servers.recorded_losses, servers.row().completed


def undisturbed(left):
    return {
        "write.prepared": ([], [], [], None),
        "write.decided": (["m1"], ["m1"], [], Outcome.COMMITTED),
        "write.completed": (["m1"], ["m1"], [], Outcome.COMMITTED),
        "lost": (["m1"], [], [("orders", Outcome.LOST)], Outcome.LOST),
    }[left]
