"""A lane without servers: what it takes for known about the end of its transactions."""

from types import SimpleNamespace

import pytest

from dualwrite.deadline import Deadline
from dualwrite.errors import Unavailable
from dualwrite.protocol.known_end import EndStep
from dualwrite.protocol.observations import Outcome
from dualwrite.protocol.tables.producer_life import ProducerState
from dualwrite.writing.lane import Lane


class Producer:
    """Has a transaction whose end is not known yet."""

    epoch_may_rise = False
    undecided_in = frozenset()

    def __init__(self):
        self.state = ProducerState.READY
        self.pending_end = object()
        self.noted = []

    def note_end(self, step):
        self.noted.append(step)
        if step is EndStep.KNOWN:
            self.pending_end = None
        else:
            self.state = ProducerState.DOUBTFUL

    def close(self):
        self.state = ProducerState.CLOSED


class Coordinator:
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


class Watcher:
    """Asks for as long as a test wants."""

    def __init__(self):
        self.note = None
        self.stops_asking = True

    def watch(self, _pending, note):
        self.note = note

    def wait(self, _pending, _deadline):
        return self.stops_asking


@pytest.fixture
def watcher():
    return Watcher()


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def lane(watcher, store):
    found = Lane("orders", SimpleNamespace(coordinator=Coordinator(), store=store, owner="me"), None, watcher=watcher)
    found.adopt(SimpleNamespace(incarnation=1))
    found._producer = Producer()
    return found


def test_what_was_found_of_a_discarded_producer_is_not_taken_for_the_end_of_the_next_one(lane, watcher):
    first = lane.producer
    lane.watch_end()
    lane.discard()
    lane._producer = second = Producer()
    watcher.note(EndStep.KNOWN)
    assert first.noted == [EndStep.KNOWN]
    assert second.noted == []
    assert lane.pending_end is not None


def test_what_was_found_is_not_taken_for_the_end_of_the_same_producers_next_transaction(lane, watcher):
    lane.watch_end()
    lane.producer.pending_end = object()
    watcher.note(EndStep.KNOWN)
    assert lane.producer.noted == []
    assert lane.pending_end is not None


def test_a_producer_whose_end_is_still_asked_for_at_the_deadline_is_not_used_again(lane, watcher):
    lane.watch_end()
    watcher.stops_asking = False
    lane.know_end(Deadline(0))
    assert lane.producer.noted == [EndStep.SETTLE]
    assert lane.pending_end is None


def test_a_commit_is_recorded_as_complete_once_its_end_is_known(lane, store):
    lane._unrecorded = row = lane.row
    lane.producer.note_end(EndStep.KNOWN)
    lane.record_completed()
    assert [(found, outcome) for found, outcome, _ in store.outcomes] == [(row, Outcome.COMMITTED)]
    assert lane.unrecorded is None


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
