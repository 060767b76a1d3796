"""Questions about the ends of transactions, of both engines in one round, on simulated servers."""

from __future__ import annotations

import pytest
from harness.simulated import TIMEOUT_S, TOPIC, Here, Servers
from harness.simulated_native import NativeOwner
from simulator.environment import expire_producer, resume, suspend

from dualwrite.clock import Deadline, now_s
from dualwrite.kafka.transaction_ends import EARLY_S, PendingEnd, ask_for_ends, know_end
from dualwrite.protocol.known_end import Ended, EndStep
from dualwrite.writing.transaction import Ending


@pytest.fixture
def owner(servers: Servers) -> NativeOwner:
    owner = NativeOwner(servers)
    owner.produce("a")
    owner.produce("b", partition=1)
    return owner


def steps(servers: Servers, *ended: Ended) -> list[EndStep]:
    def work(here: Here) -> list[EndStep]:
        return list(ask_for_ends(here.context.coordinator, [PendingEnd(one) for one in ended], Deadline(TIMEOUT_S)))

    found = servers.run(work, "asks")
    assert isinstance(found, list)
    return found


def known(servers: Servers, ended: Ended) -> tuple[EndStep, float]:
    def work(here: Here) -> tuple[EndStep, float]:
        since = now_s()
        return know_end(here.context.coordinator, PendingEnd(ended), Deadline(TIMEOUT_S)), now_s() - since

    step, waited_s = servers.run(work, "asks")
    return step, waited_s


@pytest.mark.parametrize("committed", [True, False])
def test_both_engines_ends_are_known_in_one_round(servers: Servers, owner: NativeOwner, committed: bool) -> None:
    def prepares(here: Here) -> object:
        with here.block(here.ready("others"), Ending.PREPARE) as transaction:
            transaction.produce(TOPIC, "c", partition=0)
        return transaction.prepared

    shared = servers.run(prepares, "B")
    native = owner.state()
    both = Ended(native, committed), Ended(shared, committed=True)  # type: ignore[arg-type]
    assert steps(servers, *both) == [EndStep.WAIT, EndStep.WAIT]
    owner.end(committed=committed)
    assert steps(servers, *both) == [EndStep.KNOWN, EndStep.WAIT]


def test_a_marker_that_the_broker_has_forgotten_is_settled(servers: Servers, owner: NativeOwner) -> None:
    state = owner.state()
    owner.end(forgets=1)
    step, waited_s = known(servers, Ended(state, committed=True))
    assert step is EndStep.SETTLE
    assert waited_s >= EARLY_S


def test_the_next_transaction_in_the_same_partition_shows_nothing_of_the_last_one(
    servers: Servers, owner: NativeOwner
) -> None:
    """Written into what the broker has forgotten to end, it raises the epoch there."""
    state = owner.state()
    owner.end(forgets=1)
    owner.produce("next", partition=1)
    assert steps(servers, Ended(state, committed=True)) == [EndStep.WAIT]


def test_a_leader_that_does_not_answer_or_does_not_know_the_producer_shows_nothing(
    servers: Servers, owner: NativeOwner
) -> None:
    state = owner.state()
    owner.end()
    simulation, last = servers.simulation, (TOPIC, 1)
    simulation.broker = suspend(simulation.broker, last)
    assert steps(servers, Ended(state, committed=True)) == [EndStep.WAIT]
    simulation.broker = expire_producer(resume(simulation.broker, last), last, owner.producer_id)
    assert steps(servers, Ended(state, committed=True)) == [EndStep.WAIT]
    assert known(servers, Ended(state, committed=True))[0] is EndStep.SETTLE


def test_a_batch_that_was_not_acknowledged_ends_the_incarnation_at_once(servers: Servers, owner: NativeOwner) -> None:
    state = owner.state()
    owner.end(committed=False)
    assert known(servers, Ended(state, committed=False, complete=False)) == (EndStep.SETTLE, 0.0)
