"""The simulated broker answers as a real one: the same sequences of requests run on both, and everything must be equal.

What the library's rules rest on stands here as one sequence each, with the claim. Then every step in every state that few
steps reach, and long random sequences.
"""

from __future__ import annotations

from contextlib import closing

import pytest
from harness.both_brokers import Both, Difference, codes, committed, in_time
from harness.broker_steps import ALPHABETS, EVERYBODY, random_sequences, transition_cover
from harness.raw_broker import LIBRDKAFKA
from simulator import requests as sim
from simulator.broker import handle
from simulator.requests import ErrorCode
from simulator.state import partition, transaction

pytestmark = pytest.mark.kafka

OWNER = {"owner": "X"}
OWNER_AND_OTHER = {"owner": "X", "other": "X"}
OPEN = (("init", "owner"), ("add", "owner", 0), ("produce", "owner", 0))
OK = ErrorCode.NONE


@pytest.fixture(scope="module")
def as_librdkafka(dualwrite_kafka):
    with closing(Both(dualwrite_kafka, versions=LIBRDKAFKA)) as both:
        yield both


def test_all_transactions_of_a_producer_share_its_id_and_epoch(both):
    again = (("add", "owner", 0), ("produce", "owner", 0), ("end", "owner", True))
    _, broker = both.play_one(OWNER, *OPEN, ("end", "owner", True), *again, *again)
    batches = partition(broker, ("t", 0)).batches
    assert {(batch.producer_id, batch.producer_epoch) for batch in batches} == {(0, 0)}
    assert [batch.control for batch in batches] == ["", "commit"] * 3


def test_an_open_transaction_shows_its_first_offset(both):
    answers, broker = both.play_one(OWNER, *OPEN, ("end", "owner", True), ("add", "owner", 0), ("produce", "owner", 0))
    [shown] = handle(broker, sim.DescribeProducers(("t", 0)))[1].active_producers
    assert shown.current_txn_start_offset == answers[-1].base_offset == 2


def test_the_first_control_record_after_it_tells_how_a_transaction_ended(both):
    _, broker = both.play_one(OWNER, *OPEN, ("end", "owner", False))
    seen = handle(broker, sim.Fetch(("t", 0), 0, sim.READ_COMMITTED))[1]
    assert [batch.control for batch in seen.batches] == ["", "abort"]
    assert seen.aborted_transactions == (sim.AbortedTransaction(0, 0),)


def test_the_list_of_aborted_transactions_forgets_what_its_log_no_longer_holds(both):
    _, broker = both.play_one(
        OWNER, *OPEN, ("end", "owner", False), ("plain", "owner", 0), ("delete records", "owner", 0, 2)
    )
    assert handle(broker, sim.Fetch(("t", 0), 0))[1].error_code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert handle(broker, sim.Fetch(("t", 0), 2, sim.READ_COMMITTED))[1].aborted_transactions == ()


def test_an_end_may_be_repeated_and_the_owners_own_end_succeeds_after_it(both):
    answers, broker = both.play_one(OWNER, *OPEN, *[("end", "owner", True)] * 3, ("end", "owner", False))
    assert codes(answers)[3:] == [OK, OK, OK, ErrorCode.INVALID_TXN_STATE]
    assert len(committed(broker)) == 1


def test_an_initialisation_with_a_wrong_epoch_has_aborted_all_the_same(both):
    answers, broker = both.play_one(OWNER, *OPEN, ("reinit", "owner", 5), ("end", "owner", True))
    assert codes(answers)[3:] == [ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.PRODUCER_FENCED]
    assert transaction(broker, "X").state == sim.COMPLETE_ABORT


def test_an_initialisation_with_the_fenced_epoch_is_given_the_new_one_until_somebody_initialises(both):
    answers, _ = both.play_one(OWNER_AND_OTHER, *OPEN, ("init", "other"), ("reinit", "owner"))
    assert answers[-1] == sim.InitProducerIdResponse(OK, 0, 1)
    answers, _ = both.play_one(OWNER_AND_OTHER, *OPEN, ("init", "other"), ("init", "other"), ("reinit", "owner"))
    assert codes(answers)[-2:] == [OK, ErrorCode.PRODUCER_FENCED]


def test_an_end_does_not_fence(both):
    answers, broker = both.play_one(OWNER, *OPEN, ("end", "owner", True), ("add", "owner", 0), ("produce", "owner", 0))
    assert set(codes(answers)) == {OK}
    assert transaction(broker, "X").producer_epoch == 0


def test_a_retired_id_fences_its_producer_everywhere(both):
    retire = (("init", "other"), ("init", "other"))
    zombie = (("produce", "owner", 0), ("add", "owner", 1), ("end", "owner", True), ("add offsets", "owner"))
    answers, _ = both.play_one(OWNER_AND_OTHER, *OPEN, *retire, *zombie)
    assert OK not in codes(answers)[5:]


def test_a_late_end_ends_the_next_transaction(both):
    following = (("add", "owner", 0, 1), ("produce", "owner", 0), ("end", "owner", True), ("produce", "owner", 1))
    answers, broker = both.play_one(OWNER, *OPEN, ("end", "owner", True), *following)
    assert codes(answers)[-1] is ErrorCode.INVALID_TXN_STATE
    assert (len(committed(broker, 0)), len(committed(broker, 1))) == (2, 0)


def test_nothing_can_be_done_to_a_prepared_transaction(both):
    hold = ("mark", "owner", 1, True, 0, 1000)
    begun = (("init", "owner"), ("add", "owner", 0, 1), ("produce", "owner", 0), hold, ("end", "owner", True))
    tried = (
        ("end", "owner", True),
        ("end", "owner", False),
        ("init", "other"),
        ("reinit", "owner"),
        ("init other", "other"),
        ("add", "owner", 0),
        ("add offsets", "owner"),
    )
    answers, broker = both.play_one(OWNER_AND_OTHER, *begun, *tried, ("produce", "owner", 1))
    assert codes(answers)[5:] == [ErrorCode.CONCURRENT_TRANSACTIONS] * 7 + [ErrorCode.NOT_ENOUGH_REPLICAS]
    assert transaction(broker, "X").state == sim.PREPARE_COMMIT


def test_the_longest_timeout_is_the_brokers(both):
    answers, _ = both.play_one(OWNER, ("init", "owner", 900_000), ("init", "owner", 900_001), ("init", "owner", 0))
    assert codes(answers) == [OK] + [ErrorCode.INVALID_TRANSACTION_TIMEOUT] * 2


def test_a_repeated_message_is_written_once(both):
    answers, broker = both.play_one(
        OWNER, *OPEN, ("repeat", "owner"), ("produce", "owner", 0, 1), ("end", "owner", True)
    )
    assert answers[3] == answers[2]
    assert codes(answers)[4] is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert len(committed(broker)) == 1


def test_a_message_outside_of_a_transaction_is_refused(both):
    late = (("repeat", "owner"), ("produce", "owner", 0), ("produce", "owner", 1))
    answers, _ = both.play_one(OWNER, *OPEN, ("end", "owner", True), *late)
    assert codes(answers)[4:] == [ErrorCode.INVALID_TXN_STATE] * 3


def test_a_marker_that_a_tool_writes_ends_what_the_coordinator_holds_open(both):
    answers, broker = both.play_one(OWNER, *OPEN, ("mark", "owner", 0, False), ("end", "owner", True))
    assert set(codes(answers)) == {OK}
    assert transaction(broker, "X").state == sim.COMPLETE_COMMIT
    assert committed(broker) == ()


def test_offsets_of_a_transaction_are_committed_with_it(both):
    sent = (("init", "owner"), ("add offsets", "owner"), ("commit offsets", "owner", 7))
    look = sim.OffsetFetch("g", ("t", 0))
    _, broker = both.play_one(OWNER, *sent)
    assert handle(broker, look)[1].committed_offset == -1
    _, broker = both.play_one(OWNER, *sent, ("end", "owner", True))
    assert handle(broker, look)[1].committed_offset == 7
    _, broker = both.play_one(OWNER, *sent, ("end", "owner", False))
    assert handle(broker, look)[1].committed_offset == -1


def test_a_group_tells_offsets_that_are_pending_only_to_those_who_do_not_ask_for_stable_ones(both):
    first = (("init", "owner"), ("add offsets", "owner"), ("commit offsets", "owner", 7))
    second = (("init", "other"), ("add offsets", "other"), ("commit offsets", "other", 9), ("end", "other", True))
    look = sim.OffsetFetch("g", ("t", 0))
    clients = {"owner": "X", "other": "Y"}
    _, broker = both.play_one(clients, *first, *second)
    assert handle(broker, look)[1].committed_offset == 9, "another transaction's offsets wait for nobody"
    assert handle(broker, look._replace(require_stable=True))[1].error_code is ErrorCode.UNSTABLE_OFFSET_COMMIT
    _, broker = both.play_one(clients, *first, *second, ("end", "owner", True))
    assert handle(broker, look._replace(require_stable=True))[1].committed_offset == 9, "the log's order counts"


def test_a_partition_that_is_gone_needs_no_marker(both):
    begun = (("create topic", "owner", "u"), ("init", "owner"), ("add topic", "owner", "u"), ("add", "owner", 0))
    answers, broker = both.play_one(
        OWNER, *begun, ("produce", "owner", 0), ("delete topic", "owner", "u"), ("end", "owner", True)
    )
    assert codes(answers)[-1] is OK
    assert transaction(broker, "X").state == sim.COMPLETE_COMMIT


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_every_step_in_every_state_that_few_steps_reach(both, alphabet):
    clients, steps = ALPHABETS[alphabet]
    both.play(clients, transition_cover(steps, clients, 3))


def test_the_versions_of_librdkafka_are_answered_alike(as_librdkafka):
    clients, steps = ALPHABETS["two producers of one id"]
    as_librdkafka.play(clients, transition_cover(steps, clients, 3))


@pytest.mark.parametrize("count", [16, pytest.param(48, marks=pytest.mark.thorough)])
def test_long_random_sequences(both, count):
    both.play_and_shrink(EVERYBODY, random_sequences(count, 30, seed=1))


def test_a_difference_is_found_and_shrunk(both, monkeypatch):
    """The comparison itself: a simulator that would refuse a repeated end is caught, by the fewest steps."""
    real = handle

    def wrong(broker, request):
        known = transaction(broker, "X")
        if isinstance(request, sim.EndTxn) and known is not None and known.state == sim.COMPLETE_COMMIT:
            return broker, sim.ErrorResponse(ErrorCode.INVALID_TXN_STATE)
        return real(broker, request)

    monkeypatch.setattr("harness.broker_steps.handle", wrong)
    sequence = [*OPEN, ("add", "owner", 1), ("end", "owner", True), ("describe", "owner"), ("end", "owner", True)]
    with pytest.raises(Difference, match=r"simulated.*INVALID_TXN_STATE") as found:
        both.play_and_shrink(OWNER, [sequence])
    end = ("end", "owner", True)
    assert list(found.value.sequence) == [("init", "owner"), ("add", "owner", 1), end, end]


def test_a_restarted_broker_has_lost_nothing(mortal_kafka):
    held = (
        ("init", "c"),
        ("add", "c", 0, 1),
        ("produce", "c", 0),
        ("mark", "c", 1, False, 0, 1000),
        ("end", "c", True),
    )
    after = (("repeat", "owner"), ("produce", "owner", 0), ("produce", "owner", 1), ("end", "c", True), ("init", "c"))
    steps = (*OPEN, ("add", "owner", 1), *held, ("restart", "owner"), *after, ("end", "owner", True))
    with closing(Both(mortal_kafka, lanes=1)) as both:
        answers, broker = both.play_one({"owner": "X", "c": "Y"}, *steps)
    assert answers[steps.index(("repeat", "owner"))] == answers[2]
    assert transaction(broker, "X").state == sim.COMPLETE_COMMIT
    assert transaction(broker, "Y").state == sim.PREPARE_COMMIT


def test_a_timed_out_transaction_is_aborted_under_a_raised_epoch(hasty):
    begun = (("init", "owner", 1000), ("add", "owner", 0, 1), ("produce", "owner", 0))
    zombie = (("end", "owner", True), ("produce", "owner", 0), ("produce", "owner", 1), ("add", "owner", 0))
    answers, broker = in_time(
        lambda: hasty.play_one(OWNER, *begun, ("time out", "owner"), *zombie, ("reinit", "owner"))
    )
    assert OK not in codes(answers)[4:8]
    assert answers[8] == sim.InitProducerIdResponse(OK, 0, 1)
    assert committed(broker) == ()


def test_ids_and_producers_at_rest_are_forgotten_and_open_ones_are_not(hasty):
    ended = (("init", "owner"), ("add", "owner", 0), ("produce", "owner", 0), ("end", "owner", True))
    kept = (("init", "c"), ("add", "c", 0), ("produce", "c", 0))
    after = (("end", "owner", True), ("add", "owner", 0), ("produce", "c", 0), ("init", "owner"))
    answers, _ = in_time(lambda: hasty.play_one({"owner": "X", "c": "Y"}, *kept, *ended, ("forget", "owner"), *after))
    assert codes(answers)[8:10] == [ErrorCode.INVALID_PRODUCER_ID_MAPPING] * 2
    assert answers[-1] == sim.InitProducerIdResponse(OK, 2, 0)
