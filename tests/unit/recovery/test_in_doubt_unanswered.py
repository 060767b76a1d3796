"""An owner whose commit was not answered, and that could not settle: it learns what became of it by reading alone."""

import pytest
from harness.databases import prepared

from dualwrite.clock import Deadline, running_on
from dualwrite.errors import CompletionPending, DecidedTransactionLost, Fenced, OutcomeUnverifiable, Unavailable
from dualwrite.protocol.values import LogProof, Outcome, StateRow, TransactionStatus, TransactionView
from dualwrite.recovery.claim import OwnerContext
from dualwrite.recovery.in_doubt import prove_committed

STATE, NEWER = prepared(1), prepared(2)
ROW = StateRow("orders", STATE, "0123456789ab", 3, 0, None, "c", "me", None)
UNSETTLED = Fenced("another owner has claimed the row")


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds, /):
        self.now += seconds


class Kafka:
    """Answers with these proofs and views in turn, and then with the last of them; each question takes a second."""

    def __init__(self, clock, proofs, views=()):
        self.clock, self.proofs, self.views = clock, list(proofs), list(views)
        self.asked = []

    def _next(self, answers):
        self.clock.now += 1.0
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def prove(self, states, _deadline):
        assert states == [STATE]
        return [self._next(self.proofs)]

    def describe(self, kafka_ids, _deadline):
        self.asked += kafka_ids
        return {kafka_id: self._next(self.views) for kafka_id in kafka_ids}


class Store:
    """Takes outcomes."""

    def __init__(self, refusal=None):
        self.outcomes = []
        self.refusal = refusal

    def record_outcomes(self, outcomes):
        if self.refusal is not None:
            raise self.refusal
        self.outcomes += [(row.prepared, outcome) for row, outcome, _ in outcomes]


def view(status, epoch=0):
    return TransactionView(status, 42, epoch)


@pytest.fixture
def clock():
    found = Clock()
    with running_on(found):
        yield found


@pytest.fixture
def store():
    return Store()


def prove(clock, store, proofs, views=(), row=ROW):
    kafka = Kafka(clock, proofs, views)
    prove_committed(OwnerContext(kafka, store, "me"), row, STATE, Deadline(60), UNSETTLED)
    return kafka


def test_what_the_log_shows_committed_is_no_error_although_another_owner_took_over(clock, store):
    assert prove(clock, store, [LogProof.COMMITTED]).asked == []
    assert store.outcomes == []


@pytest.mark.parametrize(
    ("proof", "kind", "outcome"),
    [
        (LogProof.ABORTED, DecidedTransactionLost, Outcome.LOST),
        (LogProof.UNKNOWABLE, OutcomeUnverifiable, Outcome.UNVERIFIABLE),
    ],
)
@pytest.mark.parametrize("row", [ROW, StateRow(**{**vars(ROW), "prepared": NEWER})], ids=["ours", "another's"])
def test_a_loss_is_recorded_of_the_owners_own_transaction_and_raised(clock, store, proof, kind, outcome, row):
    with pytest.raises(kind) as caught:
        prove(clock, store, [proof], row=row)
    assert (caught.value.transactional_id, caught.value.state) == ("orders", str(STATE))
    assert store.outcomes == [(STATE, outcome)]


def test_a_loss_that_cannot_be_recorded_is_raised_and_logged(clock, caplog):
    with pytest.raises(DecidedTransactionLost):
        prove(clock, Store(Unavailable("away")), [LogProof.ABORTED])
    assert "the next settling will" in caplog.text
    assert str(STATE) in caplog.text


@pytest.mark.parametrize(
    "status", [TransactionStatus.ONGOING, TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT]
)
def test_what_the_next_settler_commits_is_pending_and_known_to_be_decided(clock, store, status):
    with pytest.raises(CompletionPending, match="Kafka has not yet: .*another owner") as caught:
        prove(clock, store, [LogProof.OPEN], [view(status)])
    assert (caught.value.outcome, caught.value.transactional_id) == ("decided", "orders")


def test_the_coordinator_is_asked_about_the_incarnation_that_decided_not_about_the_newest(clock, store):
    proofs, views = [LogProof.OPEN, LogProof.OPEN, LogProof.COMMITTED], [view(TransactionStatus.PREPARE_ABORT)]
    assert prove(clock, store, proofs, views).asked == [ROW.kafka_id(1)] * 2


def test_what_may_be_about_to_abort_is_looked_at_until_the_log_shows_it(clock, store):
    views = [view(TransactionStatus.PREPARE_ABORT), view(TransactionStatus.COMPLETE_ABORT)]
    with pytest.raises(DecidedTransactionLost):
        prove(clock, store, [LogProof.OPEN, LogProof.OPEN, LogProof.ABORTED], views)


def test_at_the_deadline_the_outcome_is_unknown_and_not_called_decided(clock, store):
    with pytest.raises(CompletionPending, match="what Kafka did is not known: .*another owner") as caught:
        prove(clock, store, [LogProof.OPEN], [view(TransactionStatus.ONGOING, epoch=1)])
    assert (caught.value.outcome, caught.value.__cause__) == ("unknown", None)
    assert "do not run the work again" in caught.value.next_step
    assert 60 <= clock.now <= 63
    assert store.outcomes == []


def test_a_server_that_does_not_answer_leaves_the_outcome_unknown_with_both_reasons(clock, store):
    error = Unavailable("no broker answers")
    with pytest.raises(CompletionPending, match="another owner.*; no broker answers") as caught:
        prove(clock, store, [error])
    assert caught.value.outcome == "unknown"
    assert caught.value.__cause__ is error
