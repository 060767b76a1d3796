"""The recipe for native transactions, over the small broker of the search."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
from harness.simulated import TOPIC, simulated
from harness.simulated_native import NativeOwner
from harness.simulated_native import settled as settled_on
from search import native as small
from simulator.environment import forget_marker, time_out
from simulator.outside import SimulatedCoordinator
from simulator.partition import last_stable_offset
from simulator.state import offsets_partition

from dualwrite.clock import Deadline
from dualwrite.errors import DecidedTransactionLost, Unavailable
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.settle_native import initial_native
from dualwrite.protocol.values import EndAnswer, Outcome, StateRow, TransactionStatus
from dualwrite.recovery.claim import claim_rows
from dualwrite.recovery.settle import settle

Status = TransactionStatus
KNOWN = small.State()
HUNG = replace(
    KNOWN,
    status=Status.COMPLETE_COMMIT,
    epoch=1,
    due=frozenset(),
    logs=(KNOWN.logs[0].marked(1, committed=True), KNOWN.logs[1]),
)
TIMED_OUT = small.drained(replace(KNOWN, status=Status.PREPARE_ABORT, epoch=1))


class SmallCoordinator:
    """The coordinator of one Kafka id, over one state; other requests are never sent."""

    def __init__(self, state: small.State) -> None:
        self.state = state
        self.sent: list[str] = []

    def end_exactly(self, transactions, *, committed, **_):
        answers = {}
        for kafka_id, (producer_id, epoch) in transactions.items():
            assert producer_id == 0
            self.state, answers[kafka_id] = small.end(self.state, epoch, committed=committed)
            self.sent.append(f"{'commit' if committed else 'abort'} {epoch}: {answers[kafka_id].value}")
        self.state = small.drained(self.state)
        return answers

    def describe(self, kafka_ids, _):
        return {kafka_id: small._view(self.state) for kafka_id in kafka_ids}

    def prove(self, states, _):
        return [small._proof(self.state, state) for state in states]

    def open_transactions(self, asked, _):
        return [
            small._still_open(self.state, replace(initial_native(state, None), suspects=frozenset(partitions)))
            for state, partitions in asked
        ]

    def add_partitions(self, transactions, _):
        added = {}
        for kafka_id, (_producer, epoch, partitions) in transactions.items():
            after = self.state
            for _, number in sorted(partitions):
                after = after and small.add(after, epoch, number)
            self.state, added[kafka_id] = after or self.state, after is not None
            self.sent.append(f"adds {sorted(partitions)} under {epoch}")
        return added

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def not_needed(*_, **__):
            raise AssertionError(f"{name} is not needed here")

        return not_needed


class SmallStore:
    """One row."""

    def __init__(self, row: StateRow) -> None:
        self.row = row
        self.details: list[str] = []

    def read(self, _):
        return [self.row]

    def record_outcomes(self, outcomes):
        for row, outcome, detail in outcomes:
            assert row.prepared == self.row.prepared
            self.row = replace(self.row, completed=self.row.completed or outcome)
            self.details.append(detail)

    def raise_fence(self, row, fence):
        if row.settle_fence != self.row.settle_fence:
            return False
        self.row = replace(self.row, settle_fence=fence)
        return True

    def mark_settled(self, incarnations):
        self.row = replace(self.row, settled_incarnation=incarnations[self.row.transactional_id])

    def participants(self, _):
        return []


def row_of(prepared: PreparedTxnState, **kwargs: object) -> StateRow:
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return replace(StateRow("orders", prepared, "n", 2, 0, None, "c", "me", now), **kwargs)  # type: ignore[arg-type]


def settled(state, *, witnesses=2, **kwargs):
    coordinator = SmallCoordinator(state)
    store = SmallStore(row_of(small.prepared(witnesses=witnesses), **kwargs))
    report = settle([store.row], coordinator=coordinator, store=store, deadline=Deadline(30), look_back=False)
    return report, coordinator, store


def test_a_transaction_left_open_is_committed_then_fenced():
    report, coordinator, store = settled(KNOWN)
    assert coordinator.sent == ["commit 0: ended", "abort 1: ended"]
    assert (report.rolled_forward, report.losses, report.incarnations) == (["orders"], [], 1)
    assert (store.row.completed, store.row.settled_incarnation, store.row.settle_fence) == (Outcome.COMMITTED, 1, 2)


def test_one_that_was_timed_out_is_recorded_as_lost():
    report, coordinator, store = settled(TIMED_OUT)
    assert coordinator.sent[0] == "commit 0: invalid state"
    assert (store.row.completed, store.row.settled_incarnation) == (Outcome.LOST, 1)
    assert "aborted by the broker" in store.details[0]
    with pytest.raises(DecidedTransactionLost):
        report.raise_losses()


def test_a_forgotten_marker_is_written_under_the_fenced_epoch():
    report, coordinator, store = settled(HUNG)
    assert coordinator.sent == [
        "commit 0: ended",
        "abort 1: ended",
        "adds [('t', 1)] under 2",
        "commit 2: ended",
    ]
    assert (report.repaired, store.row.completed) == (["orders"], Outcome.COMMITTED)
    assert "S" in coordinator.state.logs[1].committed


def test_a_repair_that_could_time_out_unnoticed_is_not_begun():
    with pytest.raises(Unavailable, match=r"t\[1\], and could time out the repair unnoticed"):
        settled(replace(HUNG, is_limited=True), witnesses=1)


def test_the_fence_of_an_earlier_settler_is_kept():
    after, answer = small.end(HUNG, 1, committed=False)
    assert answer is EndAnswer.ENDED
    _, coordinator, store = settled(after, settle_fence=2)
    assert coordinator.sent == ["commit 0: fenced", "adds [('t', 1)] under 2", "commit 2: ended"]
    assert (store.row.settle_fence, store.row.completed) == (2, Outcome.COMMITTED)


@pytest.mark.parametrize("ended", [None, True, False])
def test_a_decision_under_the_last_epoch_is_settled_although_its_end_shows_another_producer_id(native_servers, ended):
    owner = NativeOwner(native_servers)
    owner.go_on_with(32_766)
    owner.produce("decided")
    owner.produce("decided", 1)
    decided = owner.decide()
    if ended is not None:
        owner.end(committed=ended)
        assert owner.producer_id != decided.producer_id
    assert bool(settled_on(native_servers).losses) is (ended is False)
    assert owner.row.completed is (Outcome.LOST if ended is False else Outcome.COMMITTED)
    both = [] if ended is False else ["decided"]
    assert (native_servers.visible(0), native_servers.visible(1)) == (both, both)
    assert settled_on(native_servers).losses == []


def test_a_settler_that_is_too_late_says_where_it_stood():
    coordinator, row = SmallCoordinator(KNOWN), row_of(small.prepared())
    with pytest.raises(Unavailable, match="the next step is to end the decided transaction"):
        settle([row], coordinator=coordinator, store=SmallStore(row), deadline=Deadline(0), look_back=False)


def test_an_undecided_transaction_whose_marker_was_forgotten_is_found_in_the_topics_of_the_last_decision(servers):
    owner = NativeOwner(servers)
    owner.produce("decided")
    owner.decide()
    owner.end()
    owner.produce("undecided", 1)
    owner.end(committed=False, forgets=1)
    assert settled_on(servers).repaired == ["orders"]
    assert (servers.visible(0), servers.visible(1)) == (["decided"], [])


@pytest.fixture
def native_servers():
    with simulated(transaction_version=2) as servers:
        yield servers


@pytest.mark.parametrize("left_by", ["librdkafka", "the native engine"])
@pytest.mark.parametrize("hindered", ["is never ended", "cannot be repaired"])
def test_a_decision_that_cannot_be_settled_hinders_no_other_id(native_servers, monkeypatch, hindered, left_by):
    servers, real = native_servers, SimulatedCoordinator.end_exactly
    one = NativeOwner(servers, "a", timeout_ms=60_000)
    one.produce("decided", 1)
    if hindered == "is never ended":
        one.decide()
        monkeypatch.setattr(
            SimulatedCoordinator,
            "end_exactly",
            lambda self, named, **kwargs: (
                {**real(self, {key: of for key, of in named.items() if key != one.kafka_id}, **kwargs)}
                | ({one.kafka_id: EndAnswer.IN_PROGRESS} if one.kafka_id in named else {})
            ),
        )
    else:
        one.decide(witnesses=0)
        one.end(forgets=1)
    if left_by == "librdkafka":
        servers.engine = "librdkafka"
        servers.left_by("write.produced", "undecided", name="b")
    else:
        other = NativeOwner(servers, "b")
        other.produce("too")
        other.decide()

    def work(here):
        rows = claim_rows(here.context, ["a", "b"], Deadline(60))
        settle(rows, coordinator=here.context.coordinator, store=here.context.store, deadline=Deadline(60))

    with pytest.raises(Unavailable, match="did not finish in time" if hindered == "is never ended" else "KAFKA-20734"):
        servers.run(work, "settler")
    assert [servers.row(name).settled_incarnation for name in "ab"] == [0, 1]
    assert servers.visible(0) == ([] if left_by == "librdkafka" else ["too"])


def test_consumed_offsets_that_were_not_answered_and_whose_end_was_forgotten_are_ended_where_their_group_is(
    native_servers,
):
    """Only the group's id says where they are: no answer named the partition, and the coordinator has forgotten it."""
    servers = native_servers
    place = offsets_partition(servers.simulation.broker, "readers")

    def forgets(here, lane):
        broker = time_out(here.simulation.broker, lane.row.kafka_id(1))
        here.simulation.broker = forget_marker(broker, lane.row.kafka_id(1), place)
        here.simulation.write_markers()

    def work(here):
        lane = here.ready()
        offset = SimpleNamespace(topic=TOPIC, partition=0, offset=7, leader_epoch=None, metadata=None)
        with pytest.raises(Unavailable, match="not answered"), here.block(lane) as transaction:
            transaction.produce(TOPIC, "m1", partition=0)
            try:
                transaction.send_offsets_to_transaction([offset], SimpleNamespace(group_id="readers"))
            finally:
                forgets(here, lane)
                assert holds_back(place)
        lane.ready(Deadline(60))

    def holds_back(place):
        [found] = [one for one in servers.simulation.broker.partitions if one.topic_partition == place]
        return last_stable_offset(found) < found.log_end

    running = servers.start(work).before("TxnOffsetCommit")
    running.lose_answer()
    running.cut_off("TxnOffsetCommit")
    running.result()
    assert not holds_back(place)
    assert servers.visible() == []
