"""Transactions of version 2: the simulated broker answers as a real one, to clients of either version.

What the rules of a client with such transactions rest on stands here as one sequence each, with the claim.
"""

from __future__ import annotations

from contextlib import closing

import pytest
from harness.both_brokers import Both, Difference, codes, committed, in_time
from harness.broker_mistakes import MISTAKES
from harness.broker_steps import (
    ALPHABETS_V2,
    EVERYBODY_V2,
    EVERYTHING_V2,
    Client,
    last_epochs,
    random_sequences,
    transition_cover,
)
from simulator import requests as sim
from simulator.broker import handle
from simulator.requests import ErrorCode
from simulator.state import transaction

from dualwrite.testing import EmbeddedKafka

pytestmark = pytest.mark.kafka

X = Client("X", version=2)
OWNER, PAIR = {"a": X}, {"a": X, "b": X}
INIT, WRITE, COMMIT, ABORT = ("init", "a"), ("produce", "a", 0), ("end", "a", True), ("end", "a", False)
OK = ErrorCode.NONE


def test_every_transaction_has_an_epoch_of_its_own(both):
    answers, broker = both.play_one(OWNER, INIT, WRITE, COMMIT, WRITE, ABORT, WRITE, ("produce", "a", 1), COMMIT)
    assert set(codes(answers)) == {OK}
    assert [answers[index] for index in (2, 4, 7)] == [sim.EndTxnResponse(OK, 0, epoch) for epoch in (1, 2, 3)]
    assert [(len(committed(broker, number))) for number in (0, 1)] == [2, 1]


def test_an_end_may_be_repeated_with_the_same_next_epoch(both):
    again = ("repeat end", "a")
    answers, _ = both.play_one(OWNER, INIT, WRITE, COMMIT, again, again, ("end", "a", False, -1), WRITE, again)
    assert answers[2] == answers[3] == answers[4]
    assert codes(answers)[5:] == [ErrorCode.INVALID_TXN_STATE, OK, ErrorCode.PRODUCER_FENCED]


def test_late_copies_are_refused(both):
    late = (("late", "a", 0), ("late", "a", 1), ("repeat end", "a"), ("end", "a", False, -1), ("late offsets", "a"))
    answers, broker = both.play_one(OWNER, INIT, WRITE, COMMIT, WRITE, *late, COMMIT)
    assert codes(answers)[4:9] == [
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_EPOCH,
    ]
    assert answers[9] == sim.EndTxnResponse(OK, 0, 2)
    assert len(committed(broker)) == 2


def test_nothing_can_be_done_to_a_prepared_transaction(both):
    hold = ("mark", "a", 1, True, 0, 1000)
    tried = (("repeat end", "a"), ("end", "a", False, -1), COMMIT, ABORT, ("init", "b"), ("reinit", "a"), WRITE)
    answers, broker = both.play_one(PAIR, INIT, ("add", "a", 0, 1), WRITE, hold, COMMIT, *tried)
    assert codes(answers)[5:] == [ErrorCode.CONCURRENT_TRANSACTIONS] * 7
    assert transaction(broker, "X").state == sim.PREPARE_COMMIT


def test_an_abort_of_nothing_raises_the_epoch_and_a_commit_of_nothing_is_refused(both):
    answers, _ = both.play_one(OWNER, INIT, COMMIT, ABORT, COMMIT, ABORT)
    assert codes(answers)[1::2] == [ErrorCode.INVALID_TXN_STATE] * 2
    assert answers[2::2] == [sim.EndTxnResponse(OK, 0, epoch) for epoch in (1, 2)]


def test_a_fenced_owner_learns_the_next_epoch_by_an_abort_until_somebody_initialises(both):
    answers, _ = both.play_one(PAIR, INIT, WRITE, ("init", "b"), COMMIT, ABORT, WRITE)
    assert codes(answers)[2:4] == [ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.INVALID_TXN_STATE]
    assert answers[4] == sim.EndTxnResponse(OK, 0, 1)
    assert answers[5].error_code is OK
    answers, _ = both.play_one(PAIR, INIT, WRITE, ("init", "b"), ("init", "b"), COMMIT, ABORT, WRITE)
    assert codes(answers)[4:] == [ErrorCode.PRODUCER_FENCED] * 2 + [ErrorCode.INVALID_PRODUCER_EPOCH]


def test_a_partition_that_was_only_added_gets_the_marker_with_the_next_epoch(both):
    _, broker = both.play_one(OWNER, INIT, ("add", "a", 1), COMMIT)
    [shown] = handle(broker, sim.DescribeProducers(("t", 1)))[1].active_producers
    assert (shown.producer_epoch, shown.current_txn_start_offset) == (1, -1)


def test_group_offsets_need_no_announcement_and_share_the_outcome(both):
    steps = (INIT, ("commit offsets", "a", 7), COMMIT, ("late offsets", "a"), ("commit offsets", "a", 9), ABORT)
    answers, broker = both.play_one(OWNER, *steps)
    assert codes(answers)[3] is ErrorCode.INVALID_PRODUCER_EPOCH
    assert handle(broker, sim.OffsetFetch("g", ("t", 0)))[1].committed_offset == 7


@pytest.mark.parametrize("depth", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("alphabet", ALPHABETS_V2)
def test_every_step_in_every_state_that_few_steps_reach(both, alphabet, depth):
    clients, steps = ALPHABETS_V2[alphabet]
    both.play(clients, transition_cover(steps, clients, depth))


@pytest.mark.parametrize("count", [16, pytest.param(96, marks=pytest.mark.thorough)])
def test_long_random_sequences(both, count):
    both.play_and_shrink(EVERYBODY_V2, random_sequences(count, 30, 1, EVERYTHING_V2))


@pytest.fixture(scope="module")
def few_partitions(dualwrite_kafka):
    """For tests that leave their partitions as they are."""
    with closing(Both(dualwrite_kafka, lanes=1)) as both:
        yield both


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_of_the_simulated_broker_is_a_difference(few_partitions, monkeypatch, mistake):
    monkeypatch.setattr("harness.broker_steps.handle", mistake)
    with pytest.raises(Difference, match=r"simulated.*\n *real"):
        few_partitions.play_one(PAIR, *MISTAKES[mistake])


def test_a_timed_out_transaction_is_aborted_under_the_next_epoch(hasty):
    zombie = (COMMIT, ("produce", "a", 0), ("produce", "a", 1), ABORT, ("produce", "a", 0))
    answers, broker = in_time(
        lambda: hasty.play_one(OWNER, ("init", "a", 1000), ("produce", "a", 0), ("time out", "a"), *zombie)
    )
    assert codes(answers)[3:6] == [ErrorCode.INVALID_TXN_STATE] + [ErrorCode.INVALID_PRODUCER_EPOCH] * 2
    assert answers[6] == sim.EndTxnResponse(OK, 0, 1)
    assert answers[7].error_code is OK
    assert committed(broker) == ()


def test_a_forgotten_id_is_unknown_and_an_open_transaction_is_kept(hasty):
    steps = (
        INIT,
        WRITE,
        COMMIT,
        ("init", "c"),
        ("produce", "c", 0),
        ("forget", "a"),
        COMMIT,
        WRITE,
        ("end", "c", True),
    )
    answers, _ = in_time(lambda: hasty.play_one({**OWNER, "c": Client("Y", version=2)}, *steps))
    assert codes(answers)[6:8] == [ErrorCode.INVALID_PRODUCER_ID_MAPPING] * 2
    assert answers[8] == sim.EndTxnResponse(OK, 1, 1)


@pytest.mark.thorough
def test_a_restarted_broker_has_lost_nothing(mortal_kafka):
    held = (
        ("init", "c"),
        ("add", "c", 0, 1),
        ("produce", "c", 0),
        ("mark", "c", 1, False, 0, 1000),
        ("end", "c", True),
    )
    after = (("repeat", "a"), ("produce", "a", 0), COMMIT, ("repeat end", "a"), ("repeat end", "c"), ("init", "c"))
    steps = (INIT, WRITE, *held, ("restart", "a"), *after)
    with closing(Both(mortal_kafka, lanes=1)) as both:
        answers, broker = both.play_one({**OWNER, "c": Client("Y", version=2)}, *steps)
    assert answers[steps.index(("repeat", "a"))] == answers[1]
    assert transaction(broker, "Y").state == sim.PREPARE_COMMIT


@pytest.mark.thorough
def test_the_last_epoch_of_a_producer_id_is_followed_by_another_id(both):
    both.play(PAIR, last_epochs(count=4, seed=1))


@pytest.mark.thorough
@pytest.mark.parametrize("enabled", [True, False])
def test_two_phase_commit_where_it_is_offered(enabled):
    properties = {
        "transaction.max.timeout.ms": str(sim.NEVER_MS),
        "transaction.two.phase.commit.enable": str(enabled).lower(),
        "unstable.api.versions.enable": "true",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "50",
    }
    two_phase = ("init 2pc", "a", 1)
    offered = {"max_timeout_ms": sim.NEVER_MS, "two_phase_commit": enabled}
    with EmbeddedKafka(properties) as kafka, closing(Both(kafka, lanes=1, settings=offered)) as both:
        answers, _ = both.play_one(
            OWNER, two_phase, ("init", "a", sim.NEVER_MS), WRITE, COMMIT, two_phase, WRITE, COMMIT
        )
        assert answers[0].error_code is (OK if enabled else ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        assert codes(answers)[1:4] == [OK] * 3
