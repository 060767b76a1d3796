"""Native transactions that another producer left open: compared, and ended by the request that raises the epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness.simulated import TIMEOUT_S, Servers
from harness.simulated_native import NativeOwner, settled
from simulator.environment import time_out

from dualwrite.clock import Deadline
from dualwrite.errors import DecidedTransactionLost
from dualwrite.kafka.abandoned import AbandonedTransaction, Completion
from dualwrite.kafka.transaction_ends import steady_view
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import TransactionStatus, TransactionView

LAST = 32_766
"""The epoch after which the coordinator gives another producer id."""


def after(epoch: int) -> int:
    return 0 if epoch == LAST else epoch + 1


@pytest.fixture(params=[1, LAST])
def left(servers: Servers, request: pytest.FixtureRequest) -> NativeOwner:
    """Left open by an owner that has committed an earlier one."""
    owner = NativeOwner(servers)
    owner.produce("first")
    owner.decide()
    owner.end()
    owner.go_on_with(request.param)
    owner.produce("left")
    owner.produce("left", partition=1)
    return owner


def kept(
    servers: Servers, owner: NativeOwner, work: Callable[[AbandonedTransaction], Any], *, natively: bool = True
) -> Any:
    return servers.run(
        lambda here: work(AbandonedTransaction(here.context.coordinator, owner.kafka_id, natively=natively)),
        "successor",
    )


def shown(servers: Servers, owner: NativeOwner) -> tuple[str, int]:
    [known] = [one for one in servers.simulation.broker.transactions if one.transactional_id == owner.kafka_id]
    return known.state, known.producer_epoch


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("witnesses", [0, 8])
def test_its_state_commits_it_whatever_the_successors_engine(
    servers: Servers, left: NativeOwner, natively: bool, witnesses: int
) -> None:
    state = left.state(witnesses=witnesses)
    done = kept(servers, left, lambda one: one.complete(state, Deadline(TIMEOUT_S)), natively=natively)
    assert done is Completion.COMMITTED
    assert shown(servers, left) == ("CompleteCommit", after(state.epoch))
    assert (servers.visible(0), servers.visible(1)) == (["first", "left"], ["left"])


@pytest.mark.parametrize("natively", [True, False])
def test_another_native_state_aborts_it(servers: Servers, left: NativeOwner, natively: bool) -> None:
    first = left.row.prepared
    done = kept(servers, left, lambda one: one.complete(first, Deadline(TIMEOUT_S)), natively=natively)
    assert done is Completion.ABORTED
    ended = shown(servers, left)
    # Under the epoch after the decided transaction's, the abort would pass for that one's.
    assert settled(servers).losses == []
    assert ended == ("CompleteAbort", after(left.epoch))
    assert (servers.visible(0), servers.visible(1)) == (["first"], [])


def test_without_a_state_the_successors_engine_decides(servers: Servers, left: NativeOwner) -> None:
    empty = PreparedTxnState()
    assert kept(servers, left, lambda one: one.complete(empty, Deadline(TIMEOUT_S))) is Completion.ABORTED
    assert shown(servers, left) == ("CompleteAbort", after(left.epoch))


def test_it_can_be_committed_by_word(servers: Servers, left: NativeOwner) -> None:
    kept(servers, left, lambda one: one.commit_ongoing(Deadline(TIMEOUT_S)))
    assert shown(servers, left) == ("CompleteCommit", after(left.epoch))


def shown_to(one: AbandonedTransaction) -> TransactionView:
    return steady_view(one._coordinator, one._kafka_id, Deadline(TIMEOUT_S))


@pytest.mark.parametrize("committed", [True, False])
def test_its_commit_may_be_repeated_and_is_never_taken_for_an_abort(
    servers: Servers, left: NativeOwner, committed: bool
) -> None:
    state = left.state()

    def work(one: AbandonedTransaction) -> None:
        view = shown_to(one)
        left.end(committed=committed)
        one.commit(view, state, Deadline(TIMEOUT_S))

    if committed:
        kept(servers, left, work)
    else:
        with pytest.raises(DecidedTransactionLost):
            kept(servers, left, work)


@pytest.mark.parametrize("epoch", [0, LAST])
def test_what_the_broker_has_timed_out_is_lost_even_without_a_witness(servers: Servers, epoch: int) -> None:
    owner = NativeOwner(servers, timeout_ms=60_000)
    owner.go_on_with(epoch)
    owner.produce("timed out")
    state = owner.state(witnesses=0)

    def work(one: AbandonedTransaction) -> None:
        view = shown_to(one)
        servers.simulation.broker = time_out(servers.simulation.broker, owner.kafka_id)
        servers.simulation.write_markers()
        assert shown_to(one).status is TransactionStatus.COMPLETE_ABORT
        one.commit(view, replace(state, incarnation=None), Deadline(TIMEOUT_S))

    with pytest.raises(DecidedTransactionLost):
        kept(servers, owner, work)
