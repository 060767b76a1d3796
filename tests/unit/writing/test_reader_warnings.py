"""The warnings about what readers suffer from: each once, and nothing that fails on the way disturbs the writer."""

from collections import deque

import pytest

from dualwrite.kafka.blocking import BlockingTransaction
from dualwrite.kafka.transaction_ends import EndQuestions, PendingEnd
from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.settle import Ended
from dualwrite.writing.writer_resources import ReaderWarnings


class Coordinator:
    """Answers each question with the next of what is planted.

    Attributes:
        asked: The transactions of each question about partitions.
        looked_up: The topics of each question about topics.
    """

    def __init__(self):
        self.asked, self.looked_up = [], []
        self.held_back, self.compacted_topics = deque(), deque()

    def prove_now(self, states, _deadline, *, read_on):
        assert not read_on
        self.asked.append(list(states))
        return []

    def newly_held_back(self, _deadline):
        return self._next(self.held_back)

    def compacted(self, topics, _deadline):
        self.looked_up.append(set(topics))
        return self._next(self.compacted_topics)

    def _next(self, planted):
        found = planted.popleft() if planted else []
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def coordinator():
    return Coordinator()


@pytest.fixture
def ends():
    return EndQuestions(None)


@pytest.fixture
def warnings(coordinator, ends):
    return ReaderWarnings("orders", coordinator, ends)


def written(ends, topic="t"):
    state = PreparedTxnState(7, 0, None, (FirstOffset(topic, 0, 5),))
    ends.note(PendingEnd(Ended(state, committed=True)))
    return state


def test_it_looks_where_was_written_since_the_last_look(warnings, coordinator, ends):
    first, second = written(ends), written(ends, "u")
    warnings.look()
    warnings.look()
    third = written(ends)
    warnings.look()
    assert coordinator.asked == [[first, second], [third]]


@pytest.mark.parametrize("answer", [["ledger"], [], RuntimeError("no answer")])
def test_a_compacted_topic_is_warned_of_once_and_offsets_are_none(warnings, coordinator, ends, caplog, answer):
    coordinator.compacted_topics.append(answer)
    for topic in ("ledger", "__consumer_offsets", "ledger", "orders"):
        written(ends, topic)
        warnings.look()
    assert coordinator.looked_up == [{"ledger"}, {"orders"}]
    assert caplog.text.count("the topic 'ledger' is compacted") == (answer == ["ledger"])


def test_transactions_of_other_writers_that_hold_back_readers_are_warned_of(warnings, coordinator, ends, caplog):
    own, other = (
        BlockingTransaction("t", 0, 1, 7, 0, f"{name}.0123456789ab.1", 1000) for name in ("orders#1", "payments")
    )
    coordinator.held_back += [RuntimeError("no answer"), [own, other]]
    for _ in range(3):
        written(ends)
        warnings.look()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"orders: read_committed consumers are held back in {other}"
    ]
