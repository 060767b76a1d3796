"""A block around one dual write: how each of its ends ends both sides, and what nobody may use again afterwards."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from harness.simulated import TOPIC
from simulator.environment import time_out
from simulator.store import SimulatedStore
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite import failpoints
from dualwrite.errors import (
    DecidedTransactionLost,
    Fenced,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.lives import WriteState
from dualwrite.writing.dual_write import Ending, session_of_block


class Refused(Exception):
    """Raised by the code of a block."""


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def put(here, transaction, value="m1"):
    here.connection.insert(value)
    transaction.produce(TOPIC, value, partition=0)


def one_block(here, **kwargs):
    with here.block(here.ready(), **kwargs) as transaction:
        put(here, transaction)
    return transaction.state


def test_the_end_of_the_block_commits_both_sides(servers):
    assert servers.run(one_block) is WriteState.COMPLETED
    assert servers.rows == servers.visible() == ["m1"]


@pytest.mark.parametrize("error", [Refused, KeyboardInterrupt, GeneratorExit])
def test_whatever_leaves_the_block_aborts_both_sides_and_is_passed_on(servers, error):
    def work(here):
        lane = here.ready()
        with pytest.raises(error), here.block(lane) as transaction:
            put(here, transaction)
            raise error
        assert transaction.state is WriteState.ABORTED
        here.write(lane, "m2")

    servers.run(work)
    assert servers.rows == servers.visible() == ["m2"]
    assert servers.row().incarnation == 1, "the lane is used again without a new claim"


@pytest.mark.parametrize("ending", [Ending.HAND_OVER, Ending.PREPARE])
def test_what_is_handed_over_is_named_nowhere_and_open_in_kafka(servers, ending):
    def work(here):
        lane = here.ready()
        with here.block(lane, ending) as transaction:
            here.connection.insert("m1")
            transaction.produce(TOPIC, "m1", partition=0)
        return transaction.prepared, transaction.state

    prepared, state = servers.run(work)
    assert state is WriteState.HANDED_OVER
    assert prepared.has_transaction
    assert not servers.row().prepared.has_transaction
    assert servers.rows == (["m1"] if ending is Ending.HAND_OVER else [])
    assert bool(servers.database.prepared) is (ending is Ending.PREPARE)
    with pytest.raises(AssertionError, match="held back"):
        servers.visible()


@pytest.mark.parametrize("ending", Ending)
def test_a_permit_that_refuses_aborts_both_sides(servers, ending):
    def refuse(_connection):
        raise TransactionAborted("not permitted")

    def work(here):
        with pytest.raises(TransactionAborted, match="not permitted"):
            one_block(here, ending=ending, permit=refuse)

    servers.run(work)
    assert servers.rows == servers.visible() == []


@pytest.mark.parametrize("verb", ["_commit", "_abort", "_begin", "__enter__"])
def test_a_verb_called_inside_the_block_is_refused_and_the_block_aborts_both(servers, verb):
    def work(here):
        lane = here.ready()
        with here.block(lane) as transaction:
            here.connection.insert("m1")
            transaction.produce(TOPIC, "m1", partition=0)
            with pytest.raises(IllegalStateError, match="inside its block"):
                getattr(transaction._dual_write, verb)()

    with pytest.raises(TransactionAborted):
        servers.run(work)
    assert servers.rows == servers.visible() == []


def test_a_block_whose_id_another_owner_has_claimed_is_not_entered(servers):
    def work(here):
        lane = here.ready()
        servers.database.rows["orders"] = replace(servers.row(), incarnation=2)
        with here.block(lane):
            raise AssertionError("the block was entered")

    with pytest.raises(Fenced):
        servers.run(work)


@contextmanager
def noting(patch, method):
    calls = []
    real = getattr(SimulatedStore, method)
    with patch.context() as patched:
        patched.setattr(SimulatedStore, method, lambda store, *args: (calls.append(args), real(store, *args))[1])
        yield calls


def test_after_an_end_in_doubt_neither_the_connection_nor_the_producer_is_used_again(servers, monkeypatch):
    """An end that is not known may come late: a claim waits for the old backend, and settles."""

    def away(*_):
        raise Unavailable("away")

    def work(here):
        lane = here.ready()
        with pytest.raises(TransactionInDoubt):
            here.write(lane, "m1")
        return lane.needs_settling

    with noting(monkeypatch, "discard") as discarded, monkeypatch.context() as patch:
        patch.setattr(SimulatedStore, "read_locked", away)
        owner = servers.start(work).to("write.recorded").before("COMMIT")
        owner.break_connection(executed=True)
        assert owner.result()
    assert len(discarded) == 1


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize(("point", "decided"), [("write.rolled_back", False), ("write.decided", True)])
def test_after_an_interrupted_end_neither_is_used_again_and_the_next_claim_settles(
    servers, monkeypatch, point, decided, messages
):
    def interrupt(name):
        if name == point:
            raise KeyboardInterrupt

    def work(here):
        lane = here.ready()
        with failpoints.watched(interrupt), pytest.raises(KeyboardInterrupt), here.block(lane) as transaction:
            here.connection.insert("m1")
            if messages:
                transaction.produce(TOPIC, "m1", partition=0)
            if not decided:
                raise Refused
        needs_settling = lane.needs_settling
        here.write(lane, "m2")
        return needs_settling

    with noting(monkeypatch, "discard") as discarded:
        assert servers.run(work)
    assert len(discarded) == 1
    assert servers.rows == (["m1", "m2"] if decided else ["m2"])
    assert servers.visible() == (["m1", "m2"] if decided and messages else ["m2"])


@pytest.mark.parametrize("ending", Ending)
def test_after_an_end_that_is_known_the_connection_is_used_again(servers, monkeypatch, ending):
    with noting(monkeypatch, "discard") as discarded:
        servers.run(lambda here: one_block(here, ending=ending))
    assert discarded == []


def test_a_loss_that_a_block_raises_is_noted_as_reported(servers, monkeypatch):
    def work(here):
        with pytest.raises(DecidedTransactionLost) as caught:
            one_block(here)
        return caught.value

    with noting(monkeypatch, "note_reported") as told:
        owner = servers.start(work).to("write.decided")
        servers.simulation.broker = time_out(servers.simulation.broker, servers.row().kafka_id(1))
        servers.simulation.write_markers()
        loss = owner.result()
    assert [[(name, str(state)) for name, state in losses] for (losses,) in told] == [[("orders", loss.state)]]


def test_objects_of_the_blocks_session_stay_readable_after_it():
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with engine.connect() as connection:
        session = session_of_block(connection)
        session.add(order := Order(id=1))
        session.commit()
        session.close()
        assert order.id == 1
    engine.dispose()
