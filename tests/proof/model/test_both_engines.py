"""The recipes with native producers, after a change of the engine, and after a restore of the database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.simulated import TIMEOUT_S, Servers, simulated
from simulator.environment import time_out

from dualwrite.clock import Deadline
from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, Fenced
from dualwrite.protocol.prepared_state import Engine
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.claim import claim_rows

ENGINES = ("native", "librdkafka")


@pytest.fixture
def servers() -> Iterator[Servers]:
    with simulated(transaction_version=2) as found:
        yield found


@pytest.mark.parametrize("former", ENGINES)
@pytest.mark.parametrize("following", ENGINES)
@pytest.mark.parametrize("point", ["write.prepared", "write.decided", "write.completed"])
def test_an_owner_of_either_engine_settles_what_one_of_either_has_left(servers, former, following, point):
    servers.engine = former
    servers.left_by(point, "m1")
    left = servers.row().prepared
    servers.engine = following
    servers.run(lambda here: here.write(here.ready(), "m2"), "B")
    expected = ["m2"] if point == "write.prepared" else ["m1", "m2"]
    assert servers.rows == servers.visible() == expected
    assert servers.row().prepared.engine is Engine(following)
    assert not left.has_transaction or left.engine is Engine(former)


@pytest.mark.parametrize("following", ENGINES)
def test_a_native_owner_that_wakes_up_late_is_fenced_by_either_engine(servers, following):
    late = servers.start(lambda here: here.write(here.ready(), "m1")).to("write.prepared")
    servers.engine = following
    servers.run(lambda here: here.write(here.ready(), "m2"), "B")
    with pytest.raises(Fenced):
        late.result()
    assert servers.rows == servers.visible() == ["m2"]


@pytest.mark.parametrize("following", ENGINES)
def test_a_native_loss_is_told_to_the_next_owner_of_either_engine(servers, following):
    servers.left_by("write.decided", "m1")
    servers.simulation.broker = time_out(servers.simulation.broker, servers.row().kafka_id(1))
    servers.simulation.write_markers()
    servers.engine = following

    def opens(here):
        here.ready()
        return here.losses

    [loss] = servers.run(opens, "B")
    assert isinstance(loss, DecidedTransactionLost)
    assert servers.recorded_losses == [("orders", Outcome.LOST)]


def test_a_claim_of_a_restored_row_is_refused(servers):
    before = servers.restored("orders")
    with pytest.raises(DatabaseWentBack):
        servers.run(lambda here: claim_rows(here.context, ["orders"], Deadline(TIMEOUT_S)))
    assert servers.database.rows == {"orders": before}


@pytest.mark.parametrize("following", ENGINES)
def test_native_decisions_that_a_restored_database_has_lost_are_told(servers, following):
    backups = []

    def work(here):
        lane = here.ready()
        here.write(lane, "m1")
        backups.append((servers.row(), list(servers.database.user_rows)))
        here.write(lane, "m2")
        here.write(lane, "m3")

    servers.run(work)
    servers.database.rows["orders"], servers.database.user_rows[:] = backups[0]
    servers.engine = following

    def opens(here):
        here.ready()
        return here.losses

    found = servers.run(opens, "B")
    assert [type(loss) for loss in found] == [DatabaseWentBack]
    assert servers.recorded_losses == [("orders", Outcome.UNVERIFIABLE)]
    assert servers.visible() == ["m1", "m2", "m3"]
