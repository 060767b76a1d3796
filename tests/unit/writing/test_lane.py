"""A lane: what it takes for known about its transactions, when it claims again, and what becomes of a decided one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness.simulated import TOPIC
from simulator.environment import time_out
from simulator.store import SimulatedStore

from dualwrite.clock import Deadline
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    Fenced,
    Unavailable,
)
from dualwrite.kafka.transaction_ends import EndQuestions, PendingEnd
from dualwrite.protocol.findings import refuse, standby
from dualwrite.protocol.lives import LaneEvent, ProducerState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle import Ended, EndStep
from dualwrite.protocol.values import LogProof, Outcome, ShownProducer
from dualwrite.writing import lane as lanes
from dualwrite.writing.dual_write import Ending
from dualwrite.writing.lane import Lane

NATIVE = PreparedTxnState.native(7, 3, 1, {(TOPIC, 0): 5, (TOPIC, 1): None}, {TOPIC: "id"})


class Producer:
    """Has a transaction whose end is not known yet."""

    undecided_in = frozenset()
    question = None

    def __init__(self):
        self.state = ProducerState.READY
        self.pending_end = PendingEnd(Ended(NATIVE, committed=True))
        self.noted = []

    @property
    def reusable(self):
        return self.state is ProducerState.READY

    @property
    def unknown_end(self):
        return self.pending_end if self.reusable else None

    def begins_again(self):
        if self.reusable and self.pending_end is not None and self.pending_end.known:
            self.note_end(EndStep.KNOWN)
        return self.reusable and self.pending_end is None

    def note_end(self, step):
        self.noted.append(step)
        if step is EndStep.KNOWN:
            self.pending_end = None
        else:
            self.state = ProducerState.DOUBTFUL

    def close(self):
        self.state = ProducerState.CLOSED


class Coordinator:
    """Answers the question about all lanes once ``shown`` is set, and the one about one lane by ``epochs``."""

    def __init__(self):
        self.proofs = {}
        self.shown = self.epochs = None
        self.asked_alone = 0
        self.native, self.shared = [], []

    def post_question(self, native, shared):
        assert not shared
        self._posted = native
        return self

    def has_come(self):
        if self.shown is None:
            return False
        self.native = [dict.fromkeys(state.partitions, self.shown) for state in self._posted]
        return True

    def producer_epochs(self, states, _deadline):
        self.asked_alone += 1
        return [{} if self.epochs is None else dict.fromkeys(state.partitions, self.epochs) for state in states]

    def prove_now(self, _states, _deadline, *, read_on):
        assert read_on
        return [self.proofs]

    def cluster_id(self, _deadline):
        return "cluster"


class Store:
    """Takes the outcomes, and refuses every claim."""

    def __init__(self):
        self.outcomes = []

    def record_outcomes(self, outcomes):
        self.outcomes += outcomes

    def claim(self, _ids, **_):
        raise Unavailable("away")


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def coordinator():
    return Coordinator()


@pytest.fixture
def ends(coordinator):
    return EndQuestions(coordinator)


@pytest.fixture
def lane(ends, store, coordinator, monkeypatch):
    monkeypatch.setattr("dualwrite.kafka.transaction_ends.native_of", lambda found: found)
    found = Lane("orders", SimpleNamespace(coordinator=coordinator, store=store, owner="me"), None, ends=ends)
    found.adopt(SimpleNamespace(incarnation=1, prepared=PreparedTxnState(), unverified_from=None))
    found._producer = Producer()
    return found


def test_a_lane_is_ready_at_once_where_the_answer_about_all_lanes_has_shown_its_end(lane, ends, coordinator):
    pending = lane.come_to_rest()
    ends.ask()
    assert not pending.known
    coordinator.shown = ShownProducer(4)
    ends.take_answer()
    assert pending.known
    lane.ready(Deadline(0))
    assert lane.producer.noted == [EndStep.KNOWN]
    assert lane.pending_end is None


def test_what_was_found_of_a_discarded_producer_is_not_taken_for_the_end_of_the_next_one(lane, ends, coordinator):
    first = lane.come_to_rest()
    ends.ask()
    lane.discard()
    lane._producer = second = Producer()
    lane.come_to_rest()
    coordinator.shown = ShownProducer(4)
    ends.take_answer()
    assert first.known
    assert not second.pending_end.known
    assert second.noted == []


def test_what_was_found_is_not_taken_for_the_end_of_the_same_producers_next_transaction(lane, ends, coordinator):
    lane.come_to_rest()
    ends.ask()
    lane.producer.pending_end = later = PendingEnd(Ended(NATIVE, committed=True))
    coordinator.shown = ShownProducer(4)
    ends.take_answer()
    assert not later.known


def test_a_lane_whose_end_the_questions_do_not_show_asks_for_it_alone(lane, coordinator):
    coordinator.epochs = ShownProducer(4)
    lane.know_end(Deadline(60))
    assert lane.producer.noted == [EndStep.KNOWN]
    assert coordinator.asked_alone == 1


def test_a_producer_whose_end_is_not_known_at_the_deadline_is_not_used_again(lane):
    lane.know_end(Deadline(0))
    assert lane.producer.noted == [EndStep.SETTLE]
    assert lane.pending_end is None


def test_a_commit_is_recorded_as_complete_once_its_end_is_known(lane, store):
    lane._unrecorded = row = lane.row
    lane.producer.note_end(EndStep.KNOWN)
    lane.record_completed()
    assert [(found, outcome) for found, outcome, _ in store.outcomes] == [(row, Outcome.COMMITTED)]
    assert lane.unrecorded is None


@pytest.mark.parametrize("proof", [None, *LogProof])
def test_a_native_commit_is_recorded_as_complete_only_if_the_log_does_not_speak_against_it(lane, store, proof):
    """That it has ended in every partition does not show how: an operator may have aborted it in one."""
    lane._unrecorded = SimpleNamespace(incarnation=1, prepared=NATIVE)
    lane._context.coordinator.proofs = {} if proof is None else {(TOPIC, 0): proof}
    lane._machine.apply(LaneEvent.START)
    lane.producer.note_end(EndStep.KNOWN)
    lane.record_completed()
    assert bool(store.outcomes) is (proof in {LogProof.COMMITTED, LogProof.UNKNOWABLE, LogProof.PARTLY})
    assert lane.needs_settling is (proof is LogProof.ABORTED)


def test_a_commit_whose_end_was_not_found_is_not_recorded_as_complete_once_settling_it_has_failed(lane, store):
    lane._unrecorded = row = lane.row
    lane.producer.note_end(EndStep.SETTLE)
    lane.record_completed()
    assert store.outcomes == []
    with pytest.raises(Unavailable):
        lane.settle(Deadline(1))
    lane.record_completed()
    assert store.outcomes == []
    assert lane.unrecorded is row


# On simulated servers: the lane claims, settles and completes with the product's own recipes.


def two_writes(here):
    lane = here.lane()
    here.write(lane, "m1")
    here.write(lane, "m2")
    return here


def both_have(servers, *values):
    return servers.rows == servers.visible() == list(values)


def test_one_claim_serves_many_dual_writes(servers):
    servers.run(two_writes)
    assert both_have(servers, "m1", "m2")
    assert servers.row().incarnation == 1


def test_an_initialisation_that_may_have_been_sent_twice_costs_a_claim_and_nothing_else(servers):
    """A late copy would abort what the producer has open by then."""
    owner = servers.start(two_writes).before("InitProducerId")
    owner.lose_answer()
    owner.result()
    assert both_have(servers, "m1", "m2")
    assert servers.row().incarnation == 2


def test_a_commit_whose_answer_is_missing_is_completed_by_settling_and_its_producer_is_not_used_again(servers):
    owner = servers.start(two_writes).to("write.decided").before("EndTxn")
    owner.lose_answer()
    here = owner.result()
    assert both_have(servers, "m1", "m2")
    assert servers.row().incarnation == 2
    assert here.losses == []


def test_a_commit_that_kafka_never_answers_is_pending_and_the_next_settler_completes_it(servers):
    owner = servers.start(two_writes).to("write.decided")
    owner.cut_off()
    with pytest.raises(CompletionPending) as raised:
        owner.result()
    assert raised.value.outcome == "unknown"
    assert servers.rows == ["m1"]
    servers.run(lambda here: here.ready(), "B")
    assert both_have(servers, "m1")


def test_a_commit_that_is_left_to_the_next_owners_settling_is_pending_and_decided(servers):
    owner = servers.start(lambda here: here.write(here.lane(), "m1")).to("write.decided")
    claimant = servers.start(lambda here: here.ready(), "B").to("claim.row_raised")
    owner.cut_off("EndTxn")
    with pytest.raises(CompletionPending) as raised:
        owner.result()
    assert raised.value.outcome == "decided"
    claimant.result()
    assert both_have(servers, "m1")


def test_a_commit_that_the_next_owner_has_completed_is_a_success(servers):
    owner = servers.start(lambda here: here.write(here.lane(), "m1")).to("write.decided")
    servers.run(lambda here: here.ready(), "B")
    owner.result()
    assert both_have(servers, "m1")


def test_a_decided_transaction_that_the_broker_has_aborted_is_raised_in_its_own_block_and_recorded(servers):
    owner = servers.start(lambda here: here.write(here.lane(), "m1")).to("write.decided")
    abort_by_the_broker(servers)
    with pytest.raises(DecidedTransactionLost) as raised:
        owner.result()
    assert raised.value.state == str(servers.row().prepared)
    assert servers.recorded_losses == [("orders", Outcome.LOST)]
    assert servers.rows == ["m1"]


def test_a_loss_of_an_earlier_block_is_reported_and_the_block_that_finds_it_runs(servers):
    def work(here):
        lane = here.lane()
        with pytest.raises(CompletionPending):
            here.write(lane, "m1")
        here.write(lane, "m2")
        return here.losses

    owner = servers.start(work).to("write.decided")
    owner.cut_off()
    owner.to("claim.before", 3)
    abort_by_the_broker(servers)
    owner.reconnect()
    [loss] = owner.result()
    assert isinstance(loss, DecidedTransactionLost)
    assert servers.visible() == ["m2"]
    assert servers.recorded_losses == [("orders", Outcome.LOST)]


def test_a_fenced_lane_stays_fenced(servers):
    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        errors = []
        for _ in range(2):
            with pytest.raises(Fenced) as raised:
                here.write(lane, "m2")
            errors.append(raised.value)
            lane.discard()
        return errors

    owner = servers.start(work).to("write.completed")
    servers.run(lambda here: here.ready(), "B")
    owner.result()
    assert both_have(servers, "m1")
    assert servers.row().owner == "B"


def test_a_lane_whose_writer_was_taken_over_is_not_added(servers):
    first = servers.run(lambda here: here.ready(), "A")
    servers.run(lambda here: here.ready(), "B")
    with pytest.raises(Fenced):
        servers.run(
            lambda here: here.lane("orders#1", guard=lambda: ("orders", first.row.incarnation)).ready(Deadline(60))
        )
    assert "orders#1" not in servers.database.rows


@pytest.mark.parametrize(("holds_s", "claims"), [(60.0, 1), (-1.0, 2)])
def test_a_lane_without_a_producer_that_was_claimed_long_ago_claims_again(servers, monkeypatch, holds_s, claims):
    """The claim compares the cluster, to which the producer that is made now would connect."""
    monkeypatch.setattr(lanes, "_CLAIM_HOLDS_S", holds_s)

    def work(here):
        lane = here.lane()
        lane.settle(Deadline(60))
        here.write(lane, "m1")

    servers.run(work)
    assert servers.row().incarnation == claims
    assert servers.visible() == ["m1"]


def test_completion_is_recorded_once_the_partitions_show_the_end_and_not_before(servers):
    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        lane.record_completed()
        return lane.unrecorded

    servers.simulation.markers_delayed = True
    assert servers.run(work) is not None
    assert servers.row().completed is None
    servers.simulation.markers_delayed = False
    servers.simulation.write_markers()
    servers.run(lambda here: here.ready(), "B")
    assert servers.run(work, "C") is None
    assert servers.row().completed is Outcome.COMMITTED


def test_a_decision_that_the_database_has_lost_is_reported_when_the_lane_rests(servers):
    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        lane.compare_with_row()
        before = list(here.losses)
        servers.database.rows["orders"] = replace(servers.row(), prepared=PreparedTxnState())
        lane.compare_with_row()
        lane.compare_with_row()
        return before, here.losses, lane.row.prepared

    before, losses, lost = servers.run(work)
    assert before == []
    assert [type(loss) for loss in losses] == [DatabaseWentBack], "reported once"
    assert losses[0].state == str(lost)
    assert servers.recorded_losses == [("orders", Outcome.UNVERIFIABLE)]


def test_a_renewed_claim_finds_that_the_database_has_lost_its_decision_and_goes_on(servers):
    def work(here):
        lane = here.lane()
        here.write(lane, "m1")
        servers.database.rows["orders"] = replace(servers.row(), prepared=PreparedTxnState())
        lane.discard()
        here.write(lane, "m2")
        return here.losses

    [loss] = servers.run(work)
    assert isinstance(loss, DatabaseWentBack)
    assert servers.visible() == ["m1", "m2"]
    assert servers.recorded_losses == [("orders", Outcome.UNVERIFIABLE)]


@pytest.mark.parametrize("completed", [None, Outcome.COMMITTED])
def test_a_lane_that_handed_over_goes_on_only_once_its_decider_has_completed_it(servers, completed):
    def work(here):
        lane = here.ready()
        here.write(lane, "m1", ending=Ending.HAND_OVER)
        state = lane.producer.prepared_state
        row = servers.database.rows["orders"] = replace(servers.row(), prepared=state, completed=completed)
        here.context.coordinator.end({row.kafka_id(1): state}, committed=True, deadline=Deadline(60))
        goes_on = lane.may_go_on(row)
        if not goes_on:
            lane.discard()
        here.write(lane, "m2")
        return goes_on

    assert servers.run(work) is (completed is Outcome.COMMITTED)
    assert servers.visible() == ["m1", "m2"]
    assert servers.row().incarnation == (1 if completed else 2)


@pytest.mark.parametrize(("discarded", "needs"), [(False, False), (True, True)])
def test_a_lane_needs_settling_while_no_producer_of_its_own_can_end_what_is_open(servers, discarded, needs):
    def work(here):
        lane = here.ready()
        if discarded:
            lane.discard()
        return lane.needs_settling

    assert servers.run(work) is needs


def test_settling_a_lane_at_rest_aborts_what_its_producer_has_left_open(servers):
    def work(here):
        lane = here.ready()
        lane.producer.begin_transaction()
        lane.producer.produce(TOPIC, "m1", partition=0)
        lane.producer.prepare_transaction()
        lane.discard()
        lane.settle(Deadline(60))
        return lane.needs_settling

    assert servers.run(work) is False
    assert servers.visible() == []
    assert servers.row().settled_incarnation == 1


# While Kafka is away: a lane that is claimed in the database alone.


def test_a_lane_becomes_ready_to_wait_without_a_request_to_kafka_and_ready_once_kafka_is_back(servers):
    def work(here):
        lane = here.lane()
        assert not lane.may_wait
        lane.ready_to_wait(Deadline(60))
        lane.ready_to_wait(Deadline(60))
        shown = lane.may_wait, lane.usable, lane.needs_settling, lane.row.incarnation
        here.write(lane, "m1")
        return shown, lane

    owner = servers.start(work)
    owner.cut_off()
    owner.to("claim.before", 2)
    owner.reconnect()
    shown, lane = owner.result()
    assert shown == (True, False, True, 1)
    assert both_have(servers, "m1")
    assert (servers.row().incarnation, servers.row().unverified_from) == (2, None)
    assert not lane.needs_settling


def test_the_decision_of_the_last_owner_stays_in_the_row_and_is_completed_once_kafka_is_back(servers):
    servers.left_by("write.decided", "m1")
    decided = servers.row().prepared

    def work(here):
        lane = here.lane()
        lane.ready_to_wait(Deadline(60))
        before = servers.row()
        lane.ready(Deadline(60))
        return before, here.losses

    before, losses = servers.run(work, "B")
    assert (before.prepared, before.completed) == (decided, None)
    assert losses == []
    assert both_have(servers, "m1")


def test_a_lane_whose_producer_was_discarded_is_claimed_once_more_and_then_waits_without_kafka(servers):
    def work(here):
        lane = here.ready()
        lane.discard()
        assert not lane.may_wait
        lane.ready_to_wait(Deadline(60))
        return lane.may_wait, servers.row()

    waits, row = servers.run(work)
    assert waits
    assert (row.incarnation, row.unverified_from) == (2, 2)


def test_no_block_waits_on_a_lane_whose_database_went_back_and_the_error_stays(servers):
    servers.restored("orders")

    def work(here):
        lane = here.lane()
        lane.ready_to_wait(Deadline(60))
        with pytest.raises(DatabaseWentBack):
            lane.ready(Deadline(60))
        errors = []
        for _ in range(2):
            with pytest.raises(DatabaseWentBack) as raised:
                lane.ready_to_wait(Deadline(60))
            errors.append(raised.value)
        return lane.refused, errors

    refused, errors = servers.run(work, "B")
    assert [str(error) for error in errors] == [str(refused)] * 2
    assert errors[0] is not errors[1]


def test_a_lane_that_a_standby_has_refused_waits_once_that_is_promoted(servers, monkeypatch):
    def work(here):
        lane = here.lane()
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedStore, "claim", lambda *_, **__: refuse(standby(is_standby=True)))
            for claim in (lane.ready, lane.ready_to_wait):
                with pytest.raises(ConfigurationError, match="standby"):
                    claim(Deadline(60))
        lane.ready_to_wait(Deadline(60))
        return lane.may_wait, lane.refused

    assert servers.run(work) == (True, None)


def test_a_lane_that_was_first_claimed_without_kafka_looks_for_lost_decisions_of_its_former_owner(servers):
    servers.run(lambda here: here.ready(), "A")
    row = servers.row()
    servers.run(lambda here: here.write(here.lane(), "lost"), "B")
    servers.database.rows["orders"] = replace(servers.row(), prepared=row.prepared, completed=None)

    def work(here):
        lane = here.lane()
        lane.ready_to_wait(Deadline(60))
        lane.ready(Deadline(60))
        return here.losses

    [loss] = servers.run(work, "C")
    assert isinstance(loss, DatabaseWentBack)


def abort_by_the_broker(servers):
    servers.simulation.broker = time_out(servers.simulation.broker, servers.row().kafka_id(1))
    servers.simulation.write_markers()
