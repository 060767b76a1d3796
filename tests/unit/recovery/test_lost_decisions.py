"""Looking back for decisions that Kafka has and the database has lost: on simulated servers whose database was restored."""

from dataclasses import replace

import pytest
from harness.simulated import TIMEOUT_S
from harness.simulated_native import NativeOwner, settle_row, settled
from simulator.outside import SimulatedCoordinator

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.inspect import lost_decisions, lost_detail


def looking(*, of=None, **kwargs):
    def work(here):
        rows = here.context.store.find("") if of is None else of
        return lost_decisions(
            rows,
            coordinator=here.context.coordinator,
            store=here.context.store,
            deadline=Deadline(TIMEOUT_S),
            **kwargs,
        )

    return work


def wrote(servers, *values, then=lambda: None, name="orders"):
    """One owner writes each value; ``then`` is called after the first."""

    def work(here):
        lane = here.lane(name)
        for number, value in enumerate(values):
            here.write(lane, value)
            if number == 0:
                then()

    servers.run(work)


@pytest.fixture
def backups():
    return []


@pytest.fixture
def restored(servers, backups):
    """The row names the first of three decisions of its incarnation; Kafka has all of them."""
    wrote(servers, "m1", "m2", "m3", then=lambda: backups.append(servers.row()))
    newest = servers.row().prepared
    servers.database.rows["orders"] = replace(backups[0], completed=Outcome.COMMITTED)
    return newest


def test_a_database_that_has_lost_nothing_shows_nothing(servers):
    wrote(servers, "m1", "m2")
    assert servers.run(looking(upto_own=True)) == []


def test_the_newest_lost_decision_of_the_owners_incarnation_is_found(servers, restored, backups):
    before = servers.shown()
    [found] = servers.run(looking(upto_own=True))
    assert found == replace(backups[0], prepared=restored, completed=None), "nothing is known of its outcome"
    assert servers.shown() == before, "it changes nothing"


def test_the_owners_own_incarnation_is_left_out_unless_asked_for(servers, restored):
    del restored
    assert servers.run(looking()) == []


def test_of_incarnations_below_the_claim_only_those_that_are_not_settled_are_looked_at(servers, restored):
    row = replace(servers.row(), incarnation=2)
    assert [found.prepared for found in servers.run(looking(of=[row]))] == [restored]
    settled = replace(row, settled_incarnation=1)
    asked = servers.start(looking(of=[settled]))
    asked.cut_off()
    assert asked.result() == [], "and Kafka is not even asked"


def test_a_decision_that_an_incident_names_is_not_lost_again(servers, restored):
    def records(here):
        row = replace(servers.row(), prepared=restored)
        here.context.store.record_outcomes([(row, Outcome.UNVERIFIABLE, "lost before")])

    servers.run(records)
    assert servers.run(looking(upto_own=True)) == []


def test_a_decision_of_an_incarnation_that_no_row_names_is_lost(servers):
    wrote(servers, "m1")
    row = servers.row()
    servers.database.rows["orders"] = replace(row, prepared=PreparedTxnState())
    [found] = servers.run(looking(upto_own=True))
    assert (found.prepared.producer_id, found.prepared.epoch) == (row.prepared.producer_id, row.prepared.epoch)
    assert found.prepared.incarnation == 1
    assert found.prepared.first_offsets == (), "only the coordinator has shown it"


def test_each_id_is_found_once_and_in_order(servers, backups):
    for name in ("b", "a"):
        wrote(servers, "m1", "m2", name=name, then=lambda name=name: backups.append((name, servers.row(name))))
    servers.database.rows.update(backups)
    rows = [row for _, row in backups]
    assert [found.transactional_id for found in servers.run(looking(of=rows, upto_own=True))] == ["a", "b"]


@pytest.mark.parametrize("error", [ConfigurationError("no right to read"), Unavailable("no answer")])
def test_logs_that_cannot_be_read_hold_nothing_up_and_are_warned_of(servers, restored, monkeypatch, caplog, error):
    """Consumers wait for the settling that comes after it."""
    del restored

    def unreadable(*_):
        raise error

    monkeypatch.setattr(SimulatedCoordinator, "later_commits", unreadable)
    row = replace(servers.row(), prepared=replace(servers.row().prepared, started_ms=None))
    assert servers.run(looking(of=[row], upto_own=True)) == []
    assert error.what in caplog.text


def test_a_coordinator_that_does_not_answer_is_an_error(servers, restored):
    del restored
    cut_off = servers.start(looking(upto_own=True))
    cut_off.cut_off()
    with pytest.raises(Unavailable):
        cut_off.result()


def test_a_loss_is_described_by_the_place_where_it_was_seen(servers, restored):
    row = replace(servers.row(), prepared=restored)
    [first] = restored.first_offsets
    assert f"begins at {first.topic}[{first.partition}]@{first.offset}," in lost_detail(row)
    nowhere = replace(row, prepared=PreparedTxnState(7, 0, 1))
    assert "incarnation 1 of producer 7:0," in lost_detail(nowhere)
    both = PreparedTxnState(7, 0, 1, (FirstOffset("a", 0, 5), FirstOffset("b", 1, 6)))
    assert "a[0]@5, b[1]@6" in lost_detail(replace(row, prepared=both))


@pytest.fixture
def native(servers):
    """An owner that has decided and committed one native transaction, in the first partition."""
    owner = NativeOwner(servers)
    owner.produce("first")
    owner.decide()
    owner.end()
    return owner


def write(owner, value, partition=0, *, committed=True, decided=True):
    owner.produce(value, partition)
    state = owner.decide() if decided else owner.state()
    owner.end(committed=committed)
    return state


def found_natively(servers, **kwargs):
    return [found.prepared for found in servers.run(looking(upto_own=True, **kwargs))]


def test_a_native_decision_in_other_partitions_is_found_by_its_epoch_alone(servers, native):
    backup = native.row
    newest = write(native, "second", partition=1)
    assert found_natively(servers) == []
    servers.database.rows["orders"] = backup
    assert found_natively(servers) == [newest]


def test_a_native_decision_is_found_in_the_log_where_the_last_transaction_was_aborted(servers, native):
    backup = native.row
    write(native, "aborted", decided=False, committed=False)
    lost = write(native, "second")
    write(native, "aborted", decided=False, committed=False)
    servers.database.rows["orders"] = backup
    [found] = found_natively(servers)
    assert (found, found.first_offsets) == (lost, lost.first_offsets)


def test_undecided_native_transactions_are_no_lost_decisions(servers, native):
    for _ in range(2):
        write(native, "aborted", decided=False, committed=False)
    native.produce("left open")
    assert found_natively(servers) == []


@pytest.mark.parametrize("point", ["settle.retired", "repair.added", "repair.ended"])
def test_a_settlers_fence_and_repair_are_no_lost_decisions(servers, native, point):
    """The fence counts as it is after the coordinator was asked: another settler may have raised it since the claim."""
    native.produce("second", 0)
    native.produce("second", 1)
    native.decide()
    native.end(forgets=1)
    write(native, "aborted", decided=False, committed=False)
    before = native.row

    def settles(here):
        settle_row(here, before.transactional_id)

    servers.start(settles, "settler").to(point).kill()
    row = replace(native.row, incarnation=before.incarnation)
    assert row.settle_fence is not None
    assert servers.run(looking(of=[before], upto_own=True)) == []
    assert settled(servers).losses == []
    assert servers.visible(1) == ["second"]


def test_a_lost_native_decision_is_recorded_once_when_the_restored_row_is_settled(servers, native):
    backup = native.row
    newest = write(native, "second", partition=1)
    servers.database.rows["orders"] = backup
    [loss] = settled(servers).losses
    assert (loss.went_back, loss.row.prepared) == (True, newest)
    servers.database.rows["orders"] = replace(servers.row(), settled_incarnation=0)
    assert settled(servers).losses == []
