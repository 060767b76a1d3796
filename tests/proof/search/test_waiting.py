"""Messages that wait in the database: the configurations that take seconds, and every planted mistake."""

import json

import pytest

from search.explore import explore
from search.page import FIGURES
from search.selection import MANY_STATES
from search.waiting.configurations import WAITING
from search.waiting.mistakes import WAITING_MISTAKES
from search.waiting.walks import until_caught, walk
from search.waiting.world import World

QUICK = [name for name, one in WAITING.items() if one.quick]


@pytest.fixture(scope="module")
def figures():
    return json.loads(FIGURES.read_text("utf-8"))


def words(found):
    return "\n".join([*found.trace, f"=> {found.wrong}"])


@pytest.mark.parametrize("name", QUICK)
def test_waiting_messages_are_there_once_and_in_order_within_small_bounds(name, figures):
    found = explore(World(WAITING[name].bounds))
    assert found.wrong is None, words(found)
    assert found.whole
    assert (found.states, found.steps, found.depth) == tuple(
        figures["waiting"][name][what] for what in ("states", "steps", "depth")
    ), f"the search has changed: python -m search {name}"


def test_random_ways_beyond_the_bounds_are_right_and_end():
    for seed in range(150):
        gone = walk(seed)
        assert gone.wrong is None, "\n".join([f"seed {seed}", *gone.steps, f"=> {gone.wrong}"])


@pytest.mark.parametrize(
    "name",
    [
        "sends_on_in_an_open_transaction",
        "pending_state_overwritten",
        "sender_goes_on_unsettled",
        "sender_goes_on_without_a_marker",
        "always_ends",
    ],
)
def test_random_ways_find_a_mistake(name):
    assert until_caught(name, 100) is not None


_SEEN = json.loads(FIGURES.read_text("utf-8")).get("waiting_mistakes", {})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _SEEN and _SEEN[name]["states"] <= MANY_STATES else pytest.mark.thorough)
        for name in WAITING_MISTAKES
    ],
)
def test_a_mistake_with_waiting_messages_is_caught_by_its_shortest_way(name, figures):
    found = explore(WAITING_MISTAKES[name].world())
    known = figures["waiting_mistakes"][name]
    assert found.wrong is not None
    assert (found.wrong, len(found.trace)) == (known["wrong"], len(known["trace"])), words(found)
