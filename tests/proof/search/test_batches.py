"""Batches of two participants: the product's recipes within small bounds, every planted mistake, and what runs them."""

import json

import pytest
from harness.simulated import TOPIC
from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.database import ALWAYS
from simulator.state import new_broker

from dualwrite.protocol.settle import SettleStep
from dualwrite.protocol.values import Incident, Outcome
from dualwrite.recovery import settle as recipes
from search.batches import lab
from search.batches.configurations import BATCHES
from search.batches.judge import look
from search.batches.lab import Kept, Lab
from search.batches.mistakes import BATCH_MISTAKES
from search.batches.world import BatchBounds, BatchWorld
from search.explore import explore
from search.page import FIGURES
from search.test_search import quiet, words

FEW_STATES = 150
assert quiet  # a fixture

figures = json.loads(FIGURES.read_text("utf-8"))


def searched(world):
    try:
        return explore(world)
    finally:
        world.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if one.quick else pytest.mark.thorough) for name, one in BATCHES.items()]
)
def test_the_decision_on_a_batch_does_nothing_wrong_within_small_bounds(name):
    found = searched(BatchWorld(BATCHES[name].bounds))
    assert found.wrong is None, words(found)
    assert found.whole
    known = figures["batches"][name]
    assert (found.states, found.steps, found.depth) == (known["states"], known["steps"], known["depth"]), (
        f"the search has changed: python -m search {name}"
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if found["states"] <= FEW_STATES else pytest.mark.thorough)
        for name, found in figures["batch_mistakes"].items()
    ],
)
def test_a_mistake_about_batches_is_caught_by_its_shortest_way(name):
    found = searched(BATCH_MISTAKES[name].world())
    known = figures["batch_mistakes"][name]
    assert found.wrong is not None
    assert (found.wrong, len(found.trace)) == (known["wrong"], len(known["trace"])), words(found)


def test_the_page_has_all_batches():
    assert figures["batches"].keys() == BATCHES.keys()
    assert figures["batch_mistakes"].keys() == BATCH_MISTAKES.keys()


# --- what runs them


def test_where_a_recipe_stands_follows_from_its_answers(monkeypatch):
    """Each step by a recipe that was started for it, and given the answers of its history."""
    monkeypatch.setattr(lab, "_MOST_AT_HAND", 0)
    found = searched(BatchWorld(BATCHES["batch"].bounds))
    known = figures["batches"]["batch"]
    assert (found.states, found.steps, found.depth) == (known["states"], known["steps"], known["depth"])


def test_a_recipe_that_looks_in_vain_stands_where_it_stood(monkeypatch):
    """Otherwise it comes to the same databases and brokers, by more states."""
    usual = BatchWorld(BATCHES["batch"].bounds)
    searched(usual)
    monkeypatch.setattr(Lab, "_asks_again", lambda *_: False)
    longer = BatchWorld(BATCHES["batch"].bounds)
    assert searched(longer).states > figures["batches"]["batch"]["states"]
    for parts in ("_kept", "_brokers"):
        assert set(getattr(longer, parts).parts) == set(getattr(usual, parts).parts)


# --- demands that none of the mistakes breaks: each must be able to fail


def kafka_with(*values, is_open=False):
    """A broker with these messages in the first partition; the last one's transaction may be open."""
    broker, mine = handle(new_broker({TOPIC: 2}, offsets_partitions=0), sim.InitProducerId("a"))
    for number, value in enumerate(values):
        broker, _ = handle(broker, sim.AddPartitionsToTxn("a", mine.producer_id, 0, ((TOPIC, 0),)))
        broker, _ = handle(broker, sim.Produce("a", mine.producer_id, 0, (TOPIC, 0), number, (value,)))
        if not is_open or number < len(values) - 1:
            broker, _ = handle(broker, sim.EndTxn("a", mine.producer_id, 0, committed=True))
            broker = environment.write_markers(broker)
    return broker


def incident(outcome):
    return Incident("a", "state", outcome, "", ALWAYS, None)


ROWS = ("1a", "1b", "batch, run 1")


@pytest.mark.parametrize(
    ("rows", "kafka", "incidents", "timed_out", "told"),
    [
        (("batch, run 1", "batch, run 2"), (), (), False, "written twice"),
        (("1a", "batch, run 1"), ("1a",), (), False, "written by run 1, and the row of b is not there"),
        (("2a",), (), (), False, "not written by run 2, and the row of a is there"),
        ((), ("2a",), (), False, "2a is not decided, and readers see it"),
        (ROWS, ("1a", "1a"), (), False, "readers see 1a twice"),
        (ROWS, (), (), True, "1a is decided, readers do not see it, and nobody was told"),
        (ROWS, (), (Outcome.LOST,), False, "the protocol itself has aborted it"),
        (ROWS, ("1a",), (Outcome.LOST,), True, "recorded as lost, and nothing is lost"),
        (ROWS, (), (Outcome.UNVERIFIABLE,), True, "recorded as unverifiable"),
    ],
)
def test_both_sides_are_compared(rows, kafka, incidents, timed_out, told):
    found = look("now", Kept((), tuple(map(incident, incidents)), rows), kafka_with(*kafka), timed_out=timed_out)
    assert told in found


def test_what_stays_open_is_seen():
    assert "stays open in partition 0" in look("now", Kept(), kafka_with("1a", is_open=True), timed_out=False)


def test_what_agrees_is_right():
    assert look("now", Kept(), kafka_with(), timed_out=False) is None


def test_settling_that_does_not_end_is_seen(monkeypatch):
    monkeypatch.setattr(recipes, "next_step", lambda _known: SettleStep.LOOK)
    assert "settling does not end" in searched(BatchWorld(BatchBounds())).wrong
