"""The thread that finds out how transactions have ended: it passes on each end once, and nobody waits for it in vain."""

import threading
from collections import deque

import pytest
from harness.databases import Thread, prepared

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.log import BlockingTransaction
from dualwrite.kafka.transaction_ends import PendingEnd
from dualwrite.protocol.known_end import Ended, EndStep
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.values import LogProof
from dualwrite.writing.end_watcher import EndWatcher

PATIENCE_S = 60.0
OPEN, COMMITTED = LogProof.OPEN, LogProof.COMMITTED


class Coordinator:
    """Answers each question with the next of ``answers``, and then with ``last``: that everything is committed.

    Attributes:
        asked: For each question, the transactions that it was about.
        asking: Set by each question; ``go_on`` lets it be answered.
    """

    def __init__(self):
        self.answers = deque()
        self.last = COMMITTED
        self.asked = []
        self.asking = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.held_back = deque()
        self.compacted_topics = deque()
        self.looked_up = []
        self.closed = 0

    def prove_now(self, states, deadline, *, read_on):
        del deadline, read_on
        if not states:
            return []
        self.asked.append(list(states))
        self.asking.set()
        assert self.go_on.wait(PATIENCE_S)
        answer = self.answers.popleft() if self.answers else self.last
        if isinstance(answer, Exception):
            raise answer
        return [dict.fromkeys(((one.topic, one.partition) for one in state.first_offsets), answer) for state in states]

    def newly_held_back(self, deadline):
        del deadline
        found = self.held_back.popleft() if self.held_back else []
        if isinstance(found, Exception):
            raise found
        return found

    def compacted(self, topics, deadline):
        del deadline
        self.looked_up.append(set(topics))
        found = self.compacted_topics.popleft() if self.compacted_topics else []
        if isinstance(found, Exception):
            raise found
        return found

    def close(self):
        self.closed += 1


class Noted:
    """Takes the steps of one transaction."""

    def __init__(self, fails_with=None):
        self.steps = []
        self.thread = None
        self.happened = threading.Event()
        self._fails_with = fails_with

    def __call__(self, step):
        self.thread = threading.current_thread()
        self.steps.append(step)
        self.happened.set()
        if self._fails_with is not None:
            raise self._fails_with


class Settler:
    """Is called where there may be something to settle."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1


@pytest.fixture
def coordinator():
    return Coordinator()


@pytest.fixture
def settler():
    return Settler()


@pytest.fixture
def watcher(coordinator, settler):
    found = EndWatcher("orders", coordinator, settler)
    yield found
    coordinator.go_on.set()
    found.close()


def pending(number=0):
    return PendingEnd(Ended(prepared(1, number), committed=True))


def known(watcher, one):
    return watcher.wait(one, Deadline(PATIENCE_S))


def test_the_end_is_passed_on_once_and_by_the_watchers_own_thread(watcher, coordinator, settler):
    one, noted = pending(), Noted()
    watcher.watch(one, noted)
    assert known(watcher, one)
    assert noted.steps == [EndStep.KNOWN]
    assert noted.thread is not threading.current_thread()
    watcher.close()
    assert (len(coordinator.asked), settler.calls) == (1, 0)


def test_it_asks_until_the_end_is_known(watcher, coordinator):
    one, noted = pending(), Noted()
    coordinator.answers += [OPEN, OPEN, OPEN]
    watcher.watch(one, noted)
    assert known(watcher, one)
    assert noted.steps == [EndStep.KNOWN]
    assert len(coordinator.asked) == 4


def test_ends_that_need_settling_are_passed_on_too_and_wake_who_settles(watcher, coordinator, settler):
    one, noted = pending(), Noted()
    coordinator.answers.append(LogProof.ABORTED)
    watcher.watch(one, noted)
    assert known(watcher, one)
    assert noted.steps == [EndStep.SETTLE]
    watcher.close()
    assert settler.calls == 1


def test_the_ends_of_many_lanes_are_asked_for_in_one_question(watcher, coordinator):
    first, others = pending(), [pending(number) for number in (1, 2, 3)]
    coordinator.answers.append(OPEN)
    coordinator.go_on.clear()
    watcher.watch(first, Noted())
    assert coordinator.asking.wait(PATIENCE_S)
    for one in others:
        watcher.watch(one, Noted())
    coordinator.go_on.set()
    assert all(known(watcher, one) for one in others)
    assert coordinator.asked == [[first.ended.state], [one.ended.state for one in [first, *others]]]


def test_one_that_still_waits_does_not_keep_the_others_waiting(watcher, coordinator):
    slow, quick, noted = pending(), pending(1), Noted()
    answered = coordinator.prove_now

    def quick_alone(states, deadline, *, read_on):
        proofs = answered(states, deadline, read_on=read_on)
        return [
            dict.fromkeys(proof, OPEN) if state == slow.ended.state else proof
            for state, proof in zip(states, proofs, strict=True)
        ]

    coordinator.prove_now = quick_alone
    watcher.watch(slow, noted)
    watcher.watch(quick, Noted())
    assert known(watcher, quick)
    assert not watcher.wait(slow, Deadline(0))
    coordinator.prove_now = answered
    assert known(watcher, slow)
    assert noted.steps == [EndStep.KNOWN]


def test_a_transaction_that_is_watched_already_is_not_asked_for_twice(watcher, coordinator):
    one, noted, again = pending(), Noted(), Noted()
    coordinator.go_on.clear()
    watcher.watch(one, noted)
    assert coordinator.asking.wait(PATIENCE_S)
    watcher.watch(one, again)
    coordinator.go_on.set()
    assert known(watcher, one)
    watcher.close()
    assert (noted.steps, again.steps) == ([EndStep.KNOWN], [])


def test_waiting_ends_at_the_deadline_and_says_that_a_step_may_yet_come(watcher, coordinator):
    one = pending()
    coordinator.go_on.clear()
    watcher.watch(one, Noted())
    assert coordinator.asking.wait(PATIENCE_S)
    assert watcher.wait(one, Deadline(0)) is False


def test_nobody_waits_for_what_is_not_asked_for(watcher):
    assert watcher.wait(pending(), Deadline(PATIENCE_S)) is True


def test_a_question_that_fails_is_left_to_the_lane_and_the_watcher_goes_on(watcher, coordinator, settler, caplog):
    one, noted = pending(), Noted()
    coordinator.answers.append(ConfigurationError("no right to read the topic"))
    watcher.watch(one, noted)
    assert known(watcher, one), "the lane must ask itself, and raise it"
    assert noted.steps == []
    assert "no right to read the topic" in caplog.text
    another = Noted()
    watcher.watch(one, another)
    assert known(watcher, one)
    assert another.steps == [EndStep.KNOWN]


def test_a_step_that_cannot_be_noted_is_logged_and_the_watcher_goes_on(watcher, caplog):
    one, noted = pending(), Noted(fails_with=ConfigurationError("not recorded"))
    watcher.watch(one, noted)
    assert known(watcher, one)
    assert "not recorded" in caplog.text
    another = pending(1)
    watcher.watch(another, Noted())
    assert known(watcher, another)


def state_in(topic):
    return PendingEnd(Ended(PreparedTxnState(7, 0, None, (FirstOffset(topic, 0, 5),)), committed=True))


@pytest.mark.parametrize("answer", [["ledger"], [], RuntimeError("no answer")])
def test_a_compacted_topic_is_warned_of_once_and_offsets_are_none(watcher, coordinator, caplog, answer):
    coordinator.compacted_topics.append(answer)
    for topic in ("ledger", "__consumer_offsets", "ledger", "orders"):
        one = state_in(topic)
        watcher.watch(one, Noted())
        assert known(watcher, one)
    watcher.close()
    assert coordinator.looked_up == [{"ledger"}, {"orders"}]
    assert caplog.text.count("the topic 'ledger' is compacted") == (answer == ["ledger"])


def test_transactions_of_other_writers_that_hold_back_readers_are_warned_of(watcher, coordinator, caplog):
    own, other = (
        BlockingTransaction("t", 0, 1, 7, 0, f"{name}.0123456789ab.1", 1000) for name in ("orders#1", "payments")
    )
    coordinator.held_back += [RuntimeError("no answer"), [own, other]]
    for number in range(3):
        watcher.watch(one := pending(number), Noted())
        assert known(watcher, one)
    watcher.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"orders: read_committed consumers are held back in {other}"
    ]


def test_closing_lets_go_of_everybody_who_waits_and_closes_the_connection(watcher, coordinator):
    coordinator.last = OPEN
    ends, noted = [pending(), pending(1)], Noted()
    for one in ends:
        watcher.watch(one, noted)
    waiting = [Thread(lambda one=one: known(watcher, one)) for one in ends]
    watcher.close()
    assert [one.result() for one in waiting] == [True, True]
    assert noted.steps == []
    assert coordinator.closed == 1


def test_a_closed_watcher_asks_for_nothing_more_and_may_be_closed_again(watcher, coordinator):
    watcher.close()
    watcher.close()
    one = pending()
    watcher.watch(one, Noted())
    assert known(watcher, one)
    assert coordinator.asked == []


def test_an_interrupted_call_leaves_no_end_that_is_waited_for_and_not_asked_for(watcher, monkeypatch):
    one = pending()

    class Interrupted:
        def put(self, _watched):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(watcher, "_new", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            watcher.watch(one, Noted())
    assert known(watcher, one)
