"""The decision over many participants: each way through its table, on a store that answers as a test says."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from harness.databases import prepared

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.batches import BatchState
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.sinks import batches

STATE = prepared(1)


@dataclass(frozen=True)
class Part:
    transactional_id: str
    incarnation: int = 1
    namespace: str = "n"
    prepared: PreparedTxnState = STATE


class Store:
    """Notes what it is asked to do; ``commit`` raises what a test wants."""

    def __init__(self):
        self.done = []
        self.ours = True
        self.commit_raises = None
        self.rows = {}

    def begin(self, _connection):
        self.done.append("begin")

    def read_incarnation(self, _connection, transactional_id):
        self.done.append(f"read {transactional_id}")

    def decide(self, _connection, decision):
        self.done.append(f"decide {decision.transactional_id}")
        return self.ours, None

    def hold(self, _connection, decision):
        assert decision.state is None
        self.done.append(f"hold {decision.transactional_id}")
        return self.ours, None

    def commit(self, _connection, **_):
        self.done.append("commit")
        if self.commit_raises is not None:
            raise self.commit_raises

    def rollback(self, _connection):
        self.done.append("rollback")

    def read(self, ids):
        return [self.rows.get(one, SimpleNamespace(transactional_id=one, incarnation=1, prepared=STATE)) for one in ids]


class Batch:
    """A batch that is recorded, held and settled as a test says."""

    name = "batch"

    def __init__(self, done):
        self.done = done
        self.recorded = True
        self.written = False
        self.settle_raises = None
        self.settled = []

    def record(self, _connection):
        self.done.append("record")
        return self.recorded

    def require_held(self, _connection):
        self.done.append("require held")

    def bring(self, _connection):
        self.done.append("bring")

    def decided(self):
        self.done.append("decided")

    def is_written(self):
        return self.written

    def settle(self, completed):
        self.settled.append(set(completed))
        if self.settle_raises is not None:
            raise self.settle_raises


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def batch(store):
    return Batch(store.done)


@pytest.fixture
def decision(store, batch, monkeypatch):
    """Two parts; the first one's transaction can be completed without a claim."""
    monkeypatch.setattr(batches, "complete_handed_over", lambda rows, **_: rows[:1])
    context = SimpleNamespace(store=store, coordinator=None, owner="me")
    parts = [Part("b"), Part("a")]
    return batches.Decision(batch, parts, context, connect=lambda: nullcontext(object()), timeout_s=1, idle_s=1)


def test_all_parts_are_decided_in_one_transaction_in_the_order_of_their_ids(decision, batch, store):
    assert decision.run() is True
    assert store.done == [
        *("begin", "read a", "record", "decide a", "decide b", "bring", "require held"),
        *("commit", "decided"),
    ]
    assert batch.settled == [{"a"}]
    assert [part.transactional_id for part in decision.completed] == ["a"]
    assert decision.state is BatchState.WRITTEN


def test_a_part_that_has_sent_nothing_keeps_its_row_and_has_nothing_to_complete(decision, batch, store):
    decision._parts = [Part("a", prepared=PreparedTxnState()), Part("b")]
    assert decision.run() is True
    assert store.done[3:5] == ["hold a", "decide b"]
    assert batch.settled == [{"a", "b"}]


def test_a_part_whose_row_names_something_else_is_left_to_a_claim(decision, batch, store):
    store.rows["a"] = SimpleNamespace(transactional_id="a", incarnation=2, prepared=STATE)
    assert decision.run() is True
    assert batch.settled == [{"b"}]


def test_a_batch_that_is_written_is_only_settled(decision, batch, store):
    batch.recorded = False
    assert decision.run() is False
    assert store.done == ["begin", "read a", "record", "rollback"]
    assert batch.settled == [set()]
    assert decision.state is BatchState.WRITTEN


def test_a_part_that_another_has_claimed_leaves_the_batch_undecided(decision, batch, store):
    store.ours = False
    with pytest.raises(Fenced, match=r"another decider.*\(run the batch again"):
        decision.run()
    assert store.done[-1] == "rollback"
    assert batch.settled == []
    assert decision.state is BatchState.UNDECIDED


def test_a_commit_that_was_rolled_back_leaves_the_batch_undecided(decision, batch, store):
    store.commit_raises = TransactionAborted("deadlock")
    with pytest.raises(TransactionAborted, match="deadlock"):
        decision.run()
    assert batch.settled == []
    assert decision.state is BatchState.UNDECIDED


@pytest.mark.parametrize("written", [True, False])
def test_a_commit_without_an_answer_is_found_out_after_the_ids_are_claimed(decision, batch, store, written):
    store.commit_raises = TransactionInDoubt("no answer")
    batch.written = written
    if written:
        assert decision.run() is True
        assert decision.state is BatchState.WRITTEN
    else:
        with pytest.raises(TransactionAborted, match="rolled back"):
            decision.run()
        assert decision.state is BatchState.UNDECIDED
    assert batch.settled == [set()]
    assert "decided" not in store.done


def test_a_doubt_that_nobody_can_resolve_is_raised_as_it_came(decision, batch, store):
    store.commit_raises = TransactionInDoubt("no answer")
    batch.settle_raises = Unavailable("nobody answers")
    with pytest.raises(TransactionInDoubt, match=r"no answer \(run the batch again with the same batch id") as caught:
        decision.run()
    assert isinstance(caught.value.__cause__, Unavailable)
    assert decision.state is BatchState.IN_DOUBT


@pytest.mark.parametrize("why", [Unavailable("Kafka is away"), ConfigurationError("Kafka does not let us in")])
def test_what_is_decided_and_cannot_be_settled_is_pending_until_the_batch_runs_again(decision, batch, why):
    batch.settle_raises = why
    with pytest.raises(CompletionPending, match=f"{why.what} .run the batch again with the same batch id"):
        decision.run()
    assert decision.state is BatchState.FOLLOWING


def test_a_decision_that_the_database_has_lost_is_not_pending(decision, batch):
    batch.settle_raises = DatabaseWentBack("restored")
    with pytest.raises(DatabaseWentBack, match="restored"):
        decision.run()


def test_what_cannot_be_completed_without_a_claim_is_claimed(decision, batch, monkeypatch):
    def complete(_rows, **_):
        raise Unavailable("Kafka is slow")

    monkeypatch.setattr(batches, "complete_handed_over", complete)
    assert decision.run() is True
    assert batch.settled == [set()]
    assert decision.completed == ()
