"""One dual write on simulated servers: both sides or none, wherever its process stops, and the error says which."""

from dataclasses import replace

import pytest
from harness.simulated import TIMEOUT_S, TOPIC, simulated
from simulator.database import Kind, StatementFailed
from simulator.store import SimulatedStore

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import (
    ConfigurationError,
    DatabaseWentBack,
    Fenced,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.writing.dual_write import Ending


class Refused(Exception):
    """Raised by the code of a block."""


def one_write(here):
    here.write(here.lane(), "m1")


def settle_as_next_owner(here):
    here.ready()


def both_have(servers, *values):
    return servers.rows == servers.visible() == list(values)


@pytest.mark.parametrize("kind", Kind)
def test_a_process_that_dies_at_any_step_leaves_both_sides_or_none(kind):
    seen = set()
    for steps in range(1, 100):
        with simulated(kind) as servers:
            owner = servers.start(one_write)
            for _ in range(steps):
                if not owner.ended:
                    owner.step()
            ended, decided = owner.ended, "write.decided" in owner.points
            owner.kill()
            servers.run(settle_as_next_owner, "B")
            assert servers.rows == servers.visible() == (["m1"] if decided else [])
            seen.add(decided)
        if ended:
            break
    assert ended
    assert seen == {True, False}


def test_readers_see_nothing_before_the_database_has_decided(servers):
    owner = servers.start(one_write).to("write.recorded")
    assert servers.rows == []
    with pytest.raises(AssertionError, match="held back"):
        servers.visible()
    owner.result()
    assert both_have(servers, "m1")
    assert servers.row().prepared.has_transaction


def test_a_statement_that_failed_unseen_aborts_both(servers):
    def work(here):
        lane = here.ready()
        with here.block(lane) as transaction:
            transaction.produce(TOPIC, "m1", partition=0)
            with pytest.raises(StatementFailed):
                here.connection.fail()

    with pytest.raises(TransactionAborted):
        servers.run(work)
    assert both_have(servers)


def test_rows_alone_leave_the_newest_decision_as_it_is(servers):
    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        decided = servers.row()
        with here.block(lane) as transaction:
            here.connection.insert("alone")
        return decided, transaction.prepared

    decided, prepared = servers.run(work)
    assert servers.rows == ["m1", "alone"]
    assert servers.visible() == ["m1"]
    assert not prepared.has_transaction
    assert servers.row().prepared == decided.prepared


def test_rows_alone_of_a_fenced_owner_are_refused(servers):
    def work(here):
        lane = here.ready()
        with here.block(lane):
            here.connection.insert("alone")

    owner = servers.start(work).to("write.body_done")
    servers.run(settle_as_next_owner, "B")
    with pytest.raises(Fenced):
        owner.result()
    assert servers.rows == []


def test_messages_alone_need_the_decision_too(servers):
    def work(here):
        with here.block(here.ready()) as transaction:
            transaction.produce(TOPIC, "m1", partition=0)

    owner = servers.start(work).to("write.prepared")
    servers.run(settle_as_next_owner, "B")
    with pytest.raises(Fenced):
        owner.result()
    assert servers.visible() == []
    servers.run(work, "C")
    assert servers.visible() == ["m1"]


def test_a_fenced_owner_finds_out_before_it_produces(servers):
    def work(here):
        lane = here.ready()
        with here.block(lane) as transaction:
            transaction.produce(TOPIC, "m1", partition=0)

    owner = servers.start(work).to("claim.initialized").before("SELECT")
    servers.run(settle_as_next_owner, "B")
    with pytest.raises(Fenced):
        owner.result()
    assert "write.produced" not in owner.points


def test_a_block_that_cannot_leave_the_margin_is_aborted_and_another_attempt_would_be_as_well(servers):
    def work(here):
        here.write(here.lane(), "m1", margin_s=10_000_000.0)

    with pytest.raises(TransactionAborted) as raised:
        servers.run(work)
    assert raised.value.retryable is False
    assert both_have(servers)


def test_a_record_that_waited_until_the_margin_was_gone_is_not_committed(servers):
    """The broker aborts after 900 s; 10 s must be left when the database has committed."""

    def pause_at(name):
        servers.simulation.now_s += {"write.produced": 880.0, "write.recorded": 8.0}.get(name, 0.0)

    with pytest.raises(TransactionAborted, match="must be left"), failpoints.watched(pause_at):
        servers.run(one_write)
    assert both_have(servers)


def test_an_owner_that_was_paused_after_its_last_check_does_not_commit(servers):
    def pause_at(name):
        if name == "write.recorded":
            servers.simulation.now_s += TIMEOUT_S

    with pytest.raises(TransactionAborted, match="paused before its COMMIT"), failpoints.watched(pause_at):
        servers.run(one_write)
    assert both_have(servers)


@pytest.mark.parametrize("executed", [True, False])
def test_a_commit_in_doubt_is_resolved_and_the_block_says_what_is_true(servers, executed):
    owner = servers.start(one_write).to("write.recorded").before("COMMIT")
    owner.break_connection(executed=executed)
    if executed:
        owner.result()
    else:
        with pytest.raises(TransactionAborted):
            owner.result()
    assert both_have(servers, *(["m1"] if executed else []))


@pytest.mark.parametrize("executed", [True, False])
def test_a_doubt_that_cannot_be_resolved_is_raised_as_such_and_left_to_settling(servers, executed, monkeypatch):
    def away(*_):
        raise Unavailable("away")

    owner = servers.start(one_write).to("write.recorded").before("COMMIT")
    with monkeypatch.context() as patch, pytest.raises(TransactionInDoubt):
        patch.setattr(SimulatedStore, "read_locked", away)
        owner.break_connection(executed=executed)
        owner.result()
    servers.run(settle_as_next_owner, "B")
    assert both_have(servers, *(["m1"] if executed else []))


@pytest.mark.parametrize(
    ("executed", "shows"), [(True, TransactionInDoubt), (False, TransactionInDoubt), (False, TransactionAborted)]
)
def test_an_interruption_during_commit_is_passed_on_when_both_sides_have_ended(servers, executed, shows, monkeypatch):
    real = SimulatedStore.commit

    def interrupted(self, connection, **kwargs):
        if executed:
            real(self, connection, **kwargs)
        else:
            self.rollback(connection)
        raise shows("interrupted") from KeyboardInterrupt()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SimulatedStore, "commit", interrupted)
        servers.run(one_write)
    assert both_have(servers, *(["m1"] if executed else []))


def test_a_permit_that_is_refused_aborts_both(servers):
    def refuse(_):
        raise Refused

    for ending in (Ending.COMMIT, Ending.HAND_OVER, Ending.PREPARE):
        with pytest.raises(Refused):
            servers.run(lambda here, ending=ending: here.write(here.lane(), "m1", permit=refuse, ending=ending))
        assert both_have(servers)
        assert servers.database.prepared == {}


def test_a_database_that_has_lost_the_newest_decision_begins_nothing_and_records_it(servers):
    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        servers.database.rows["orders"] = replace(servers.row(), prepared=PreparedTxnState())
        lane.know_end(Deadline(TIMEOUT_S))
        with here.block(lane) as transaction:
            transaction.produce(TOPIC, "m2", partition=0)

    with pytest.raises(DatabaseWentBack):
        servers.run(work)
    assert servers.visible() == ["m1"]
    assert servers.recorded_losses == [("orders", Outcome.UNVERIFIABLE)]


def test_an_abort_that_kafka_does_not_take_is_left_to_the_next_claim(servers):
    def work(here):
        lane = here.ready()
        with here.block(lane) as transaction:
            here.connection.insert("m1")
            transaction.produce(TOPIC, "m1", partition=0)
            raise Refused

    owner = servers.start(work).to("write.before_abort")
    owner.cut_off()
    with pytest.raises(Refused):
        owner.result()
    assert servers.rows == []
    servers.run(one_write, "B")
    assert both_have(servers, "m1")


def test_a_connection_that_is_in_a_transaction_is_refused_and_kafka_has_begun_nothing(servers):
    def work(here):
        lane = here.ready()
        here.context.store.begin(here.connection)
        with here.block(lane):
            raise AssertionError("the block is not entered")

    with pytest.raises((IllegalStateError, ConfigurationError)):
        servers.run(work)
    assert both_have(servers)


def test_what_is_produced_after_the_end_is_refused(servers):
    def work(here):
        lane = here.ready()
        with here.block(lane) as transaction:
            here.connection.insert("m1")
            transaction.produce(TOPIC, "m1", partition=0)
        with pytest.raises(IllegalStateError):
            transaction.produce(TOPIC, "late", partition=0)
        with pytest.raises(IllegalStateError):
            _ = transaction.connection

    servers.run(work)
    assert both_have(servers, "m1")
