"""The parts of the search that take seconds: the product within small bounds, and every planted mistake."""

import json
import logging

import pytest
from simulator import requests as sim

from dualwrite.errors import DatabaseWentBack
from dualwrite.protocol.process import DoubtStep
from dualwrite.protocol.settle import SettleStep
from search import views
from search.configurations import CONFIGURATIONS
from search.explore import explore
from search.levels import explore_levels
from search.mistakes import MISTAKES, OWNER_AND_SETTLER
from search.page import FIGURES, PAGE, render
from search.rules import Rules
from search.selection import CAUGHT, HARMLESS, MANY_STATES, quick_first
from search.values import Budgets
from search.world import World

QUICK = [name for name, one in CONFIGURATIONS.items() if one.quick]


@pytest.fixture(autouse=True)
def quiet():
    """The product logs every loss, and there are thousands here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def figures():
    return json.loads(FIGURES.read_text("utf-8"))


def words(found):
    return "\n".join([*found.trace, f"=> {found.wrong}"])


@pytest.mark.parametrize("name", QUICK)
def test_the_product_does_nothing_wrong_within_small_bounds(name, figures):
    found = explore(World(CONFIGURATIONS[name].bounds))
    assert found.wrong is None, words(found)
    assert found.whole
    # A search that has become smaller without anybody's wish shows less.
    assert (found.states, found.steps, found.depth) == tuple(
        figures["configurations"][name][what] for what in ("states", "steps", "depth")
    ), f"the search has changed: python -m search {name}"


@pytest.mark.parametrize("name", quick_first(CAUGHT, most=MANY_STATES))
def test_a_mistake_is_caught_by_its_shortest_way(name, figures):
    found = explore(MISTAKES[name].world())
    known = figures["mistakes"][name]
    assert found.wrong is not None
    assert (found.wrong, len(found.trace)) == (known["wrong"], len(known["trace"])), words(found)


@pytest.mark.parametrize("name", quick_first(HARMLESS))
def test_a_mistake_that_does_no_harm_is_not_called_one(name):
    found = explore(MISTAKES[name].world())
    assert found.wrong is None, words(found)


def test_the_page_is_made_of_the_figures(figures):
    assert PAGE.read_text("utf-8") == render(figures)


def test_the_page_has_all_that_is_searched(figures):
    assert figures["configurations"].keys() == CONFIGURATIONS.keys()
    assert figures["mistakes"].keys() == MISTAKES.keys()


def test_a_search_without_traces_sees_the_same_states(figures):
    """As many as the one with traces, which the first test here holds to the same figures."""
    by_levels = explore_levels(World(CONFIGURATIONS["in_doubt_with_a_verdict"].bounds))
    known = figures["configurations"]["in_doubt_with_a_verdict"]
    assert (by_levels.states, by_levels.steps, by_levels.depth) == (known["states"], known["steps"], known["depth"])
    assert by_levels.whole
    assert by_levels.wrong is None


@pytest.mark.parametrize("name", quick_first(CAUGHT))
def test_a_search_without_traces_catches_the_same_mistakes(name, figures):
    found = explore_levels(MISTAKES[name].world())
    assert found.wrong is not None
    assert found.depth == len(figures["mistakes"][name]["trace"])


def test_a_search_without_time_says_that_it_is_not_finished():
    for search in (explore, explore_levels):
        found = search(World(OWNER_AND_SETTLER), longest_s=0)
        assert not found.whole
        assert found.depth == 1


# --- demands that none of the mistakes breaks: each must be able to fail


class EveryAnswerIsYes(Rules):
    @staticmethod
    def next_doubt_step(_known):
        return DoubtStep.COMMITTED


class EveryAnswerIsLost(Rules):
    @staticmethod
    def next_doubt_step(_known):
        return DoubtStep.LOST


class LooksForEver(Rules):
    @staticmethod
    def next_step(_known):
        return SettleStep.LOOK


class IdsServeTwice(Rules):
    @staticmethod
    def kafka_id(incarnation):
        return f"T.{incarnation // 2}"


class EverythingIsOlder(Rules):
    @staticmethod
    def is_older(*_states):
        return True


class EveryRowHasGoneBack(Rules):
    @staticmethod
    def check_not_gone_back(*_seen):
        raise DatabaseWentBack("the row has gone back")


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        (EveryAnswerIsYes, "the caller is told that 1.0 is committed, and the database does not have it"),
        (EveryAnswerIsLost, "the caller is told of a loss"),
        (LooksForEver, "settling does not end"),
        (IdsServeTwice, "false alarm: the coordinator knows an incarnation that is new"),
        (EverythingIsOlder, "false alarm: the row shows an older decision than its owner knows"),
        (EveryRowHasGoneBack, "false alarm: the row has gone back"),
    ],
)
def test_what_is_wrong_at_once_is_seen(rules, wrong):
    found = explore(World(OWNER_AND_SETTLER._replace(incarnations=3, budgets=Budgets(delay=1, answer=1)), rules()))
    assert wrong in (found.wrong or ""), words(found)


EVERY_REQUEST = {
    sim.InitProducerId,
    sim.AddPartitionsToTxn,
    sim.Produce,
    sim.EndTxn,
    sim.DescribeTransactions,
    sim.DescribeProducers,
    sim.Fetch,
}


@pytest.mark.parametrize(
    ("name", "version"), [("failed_message", 1), pytest.param("native_marker_skipped", 2, marks=pytest.mark.thorough)]
)
def test_the_search_asks_the_broker_by_every_request_of_the_protocol(monkeypatch, name, version):
    asked = set()

    def noted(broker, request, handle=views.handle):
        asked.add((type(request), getattr(request, "transaction_version", version)))
        return handle(broker, request)

    for module in ("search.views.handle", "search.stepping.handle"):
        monkeypatch.setattr(module, noted)
    explore(World(CONFIGURATIONS[name].bounds))
    assert asked >= {(request, version) for request in EVERY_REQUEST}
    assert {request for request, _ in asked} == EVERY_REQUEST
