"""Claiming, on simulated servers: who owns an id afterwards, and when a claim is refused and changes nothing."""

import os
import re
import signal
import subprocess
import sys

import pytest
from harness.simulated import TIMEOUT_S
from simulator.environment import time_out

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, DatabaseWentBack, DecidedTransactionLost, Fenced, Unavailable
from dualwrite.protocol.members import place_of
from dualwrite.protocol.values import Outcome
from dualwrite.recovery import claim as module
from dualwrite.recovery.claim import (
    claim_every_lane,
    claim_lanes,
    claim_rows,
    has_ended,
    lease_owner,
    place_of_this_process,
    unique_owner,
)


def claim(*ids, **kwargs):
    return lambda here: claim_rows(here.context, ids, Deadline(TIMEOUT_S), **kwargs)


def open_lanes(count, name="orders"):
    return lambda here: claim_lanes(here.context, name, count, Deadline(TIMEOUT_S))


def test_a_claim_makes_missing_rows_and_raises_each_incarnation(servers):
    servers.run(claim("orders"), "A")
    rows = servers.run(claim("payments", "orders"), "B")
    assert [(row.transactional_id, row.incarnation, row.owner) for row in rows] == [
        ("orders", 2, "B"),
        ("payments", 1, "B"),
    ]
    assert [servers.row(row.transactional_id) for row in rows] == list(rows)


def test_from_a_claim_on_the_former_owner_can_decide_nothing(servers):
    former = servers.start(lambda here: here.write(here.ready(), "m1"), "A").to("write.prepared")
    servers.run(claim("orders"), "B")
    with pytest.raises(Fenced):
        former.result()
    assert servers.rows == []
    assert servers.visible() == []
    assert not servers.row().prepared.has_transaction


def test_a_claim_waits_for_the_decision_under_way_and_returns_it(servers):
    owner = servers.start(lambda here: here.write(here.ready(), "m1"), "A").to("write.recorded")
    claimant = servers.start(claim("orders"), "B").before("UPDATE")
    claimant.step()
    assert claimant.waits_for_lock
    owner.to("write.decided")
    [row] = claimant.result()
    assert row.prepared == servers.row().prepared
    assert row.prepared.incarnation == 1


def test_a_claim_whose_kafka_id_is_known_already_is_refused_and_rolled_back(servers):
    before = servers.restored("orders")
    with pytest.raises(DatabaseWentBack) as raised:
        servers.run(claim("orders", "payments"))
    assert raised.value.transactional_id == "orders"
    assert raised.value.state is None, "nothing is recorded"
    assert servers.database.rows == {"orders": before}


def test_after_a_restore_a_claim_goes_above_what_kafka_knows(servers):
    servers.restored("orders")
    [row] = servers.run(claim("orders", raise_to={"orders": 7}))
    assert row.incarnation == servers.row().incarnation == 7


def test_a_row_of_another_cluster_is_not_claimed(servers):
    servers.run(claim("orders"))
    servers.simulation.broker = servers.simulation.broker._replace(cluster_id="another")
    before = dict(servers.database.rows)
    with pytest.raises(ConfigurationError):
        servers.run(claim("payments", "orders"))
    assert servers.database.rows == before


def test_nothing_is_claimed_once_another_owner_has_the_guard(servers):
    [first] = servers.run(claim("orders"), "A")
    servers.run(claim("orders"), "B")
    before = dict(servers.database.rows)
    with pytest.raises(Fenced):
        servers.run(claim("orders#1", guard=("orders", first.incarnation)), "A")
    assert servers.database.rows == before


def test_nothing_is_claimed_while_kafka_does_not_answer(servers):
    claimant = servers.start(claim("orders"))
    claimant.cut_off()
    with pytest.raises(Unavailable):
        claimant.result()
    assert servers.database.rows == {}


def test_opening_claims_the_lanes_asked_for_and_every_other_that_has_a_row(servers):
    servers.run(claim("orders", "orders#7", "orders#x", "orders#01", "orders2", "orders2#1"), "former")
    rows = servers.run(open_lanes(3), "B")
    assert sorted(rows) == ["orders", "orders#1", "orders#2", "orders#7"]
    owned = {name for name, row in servers.database.rows.items() if row.owner == "B"}
    assert owned == set(rows)


def test_opening_settles_what_every_former_lane_has_left(servers):
    servers.left_by("write.decided", "m1", name="orders#3")
    servers.left_by("write.prepared", "m2", name="orders#4")
    servers.run(open_lanes(1), "B")
    assert servers.visible() == servers.rows == ["m1"]
    for name in ("orders#3", "orders#4"):
        row = servers.row(name)
        assert row.settled_incarnation == row.incarnation - 1


def test_two_that_open_one_writer_do_not_share_its_lanes(servers):
    slow = servers.start(open_lanes(3), "A").to("claim.row_raised")
    servers.run(open_lanes(3), "B")
    with pytest.raises(Fenced):
        slow.result()
    assert {row.owner for row in servers.database.rows.values()} == {"B"}


def test_a_loss_found_at_opening_is_raised_and_recorded_and_the_next_opening_goes_on(servers):
    servers.left_by("write.decided", "m1")
    row = servers.row()
    servers.simulation.broker = time_out(servers.simulation.broker, row.kafka_id(1))
    servers.simulation.write_markers()
    with pytest.raises(DecidedTransactionLost) as raised:
        servers.run(open_lanes(1), "B")
    assert raised.value.state == str(row.prepared)
    assert servers.recorded_losses == [("orders", Outcome.LOST)]
    assert servers.run(open_lanes(1), "C")["orders"].incarnation == 3


def claim_away(*ids, **kwargs):
    return claim(*ids, without_kafka=True, **kwargs)


def test_a_claim_without_kafka_asks_it_nothing_and_the_row_says_so_until_a_claim_with_it(servers):
    claimant = servers.start(claim_away("orders"), "A")
    claimant.cut_off()
    [row] = claimant.result()
    assert (row.incarnation, row.cluster_id, row.unverified_from) == (1, "", 1)
    [row] = servers.run(claim_away("orders"), "B")
    assert (row.incarnation, row.cluster_id, row.unverified_from) == (2, "", 1)
    [row] = servers.run(claim("orders"), "C")
    assert (row.incarnation, row.unverified_from) == (3, None)
    assert row.cluster_id == servers.simulation.broker.cluster_id
    assert servers.row() == row


def test_a_claim_without_kafka_keeps_the_cluster_and_the_decision_of_the_row(servers):
    servers.left_by("write.decided", "m1")
    before = servers.row()
    [row] = servers.run(claim_away("orders"), "B")
    assert (row.cluster_id, row.prepared, row.completed) == (before.cluster_id, before.prepared, before.completed)
    assert row.unverified_from == row.incarnation == before.incarnation + 1


def test_a_database_that_went_back_is_noticed_though_several_claims_did_not_ask_kafka(servers):
    """The last incarnation alone is unknown to Kafka again."""
    servers.restored("orders")
    for _ in range(3):
        [row] = servers.run(claim_away("orders"))
    with pytest.raises(DatabaseWentBack):
        servers.run(claim("orders"))
    assert servers.row() == row, "the claim was rolled back"


def test_after_a_restore_the_incarnations_claimed_without_kafka_are_compared_no_more(servers):
    servers.restored("orders")
    servers.run(claim_away("orders"))
    [row] = servers.run(claim("orders", raise_to={"orders": 7}))
    assert (row.incarnation, row.unverified_from) == (7, None)


def test_a_row_of_another_cluster_that_was_claimed_without_kafka_is_refused_at_the_first_contact(servers):
    servers.run(claim("orders"))
    servers.run(claim_away("orders"))
    servers.simulation.broker = servers.simulation.broker._replace(cluster_id="another")
    before = servers.row()
    with pytest.raises(ConfigurationError):
        servers.run(claim("orders"))
    assert servers.row() == before


def test_of_two_that_open_a_writer_without_kafka_one_is_fenced_by_the_database_alone(servers):
    def open_away(here):
        return claim_every_lane(here.context, "orders", 2, Deadline(TIMEOUT_S), outbox=True, without_kafka=True)

    slow = servers.start(open_away, "A").to("claim.row_raised")
    rows = servers.run(open_away, "B")
    with pytest.raises(Fenced):
        slow.result()
    assert sorted(rows) == ["orders", "orders#1", "orders#outbox"]
    assert {row.owner for row in servers.database.rows.values()} == {"B"}


def test_opening_claims_the_outbox_where_it_has_a_row_and_makes_one_if_asked(servers):
    assert sorted(servers.run(open_lanes(1), "A")) == ["orders"]
    rows = servers.run(lambda here: claim_lanes(here.context, "orders", 1, Deadline(TIMEOUT_S), outbox=True), "B")
    assert sorted(rows) == ["orders", "orders#outbox"]
    assert sorted(servers.run(open_lanes(1), "C")) == ["orders", "orders#outbox"]


def test_a_claimants_name_is_its_own_alone_and_people_can_read_it():
    assert unique_owner("billing") != unique_owner("billing")
    assert re.fullmatch(r"billing [0-9a-f]{12}", unique_owner("billing"))
    assert re.fullmatch(r".+@.+:[0-9]+ [0-9a-f]{12}", unique_owner())


def test_a_process_has_ended_once_it_is_killed_and_not_while_it_is_suspended(waiting_process):
    pid = waiting_process.pid
    assert not has_ended(pid)
    os.kill(pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    assert not has_ended(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(pid), "its parent has not asked for its end"
    waiting_process.wait()
    assert has_ended(pid)


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_a_process_that_cannot_be_seen_has_not_ended(monkeypatch, error):
    def refuse(_):
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not has_ended(1)
    monkeypatch.delattr(os, "pidfd_open")
    assert not has_ended(1)


def test_the_owner_of_a_lease_says_where_it_runs_if_that_is_known(monkeypatch, tmp_path):
    here = place_of_this_process()
    assert here.pid == os.getpid()
    assert place_of(lease_owner("billing")) == here
    monkeypatch.setattr(module, "Path", lambda name: tmp_path / name.lstrip("/"))
    assert re.fullmatch(r"billing [0-9a-f]{12}", lease_owner("billing"))


def test_a_container_is_another_place_though_its_processes_have_the_same_numbers():
    asks = "from dualwrite.recovery.claim import place_of_this_process as ask; place = ask(); print(place.pid, place.system)"
    asked = subprocess.run(
        ["unshare", "--fork", "--pid", sys.executable, "-c", asks], capture_output=True, text=True, check=False
    )
    if "Operation not permitted" in asked.stderr:
        pytest.skip("a namespace of process ids takes rights that this user does not have")
    pid, system = asked.stdout.split()
    assert pid == "1"
    assert system != place_of_this_process().system
