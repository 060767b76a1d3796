"""The search without what is at its end, held against the search with it: it comes to the same, and to each fault as soon."""

import logging

import pytest

from search.configurations import EACH_ONCE, mixed, native
from search.ends import Ends
from search.explore import explore
from search.mistakes import MISTAKES
from search.selection import CAUGHT, quick_first
from search.values import Budgets
from search.world import Bounds, World

EQUALS = {
    "two": Bounds((1, 1), 2, Budgets(delay=1, answer=1, abort=1, timeout=1)),
    "two, three incarnations": Bounds((1, 1), 3, Budgets(delay=1, timeout=1)),
    "two with two transactions": Bounds((2, 2), 2, Budgets(delay=1)),
    "two, one marker at a time": Bounds((1, 1), 2, Budgets(delay=1, timeout=1), one_by_one=True),
    "two, a message fails": Bounds((1, 1), 2, Budgets(delay=1, failure=1)),
    "two, ids are forgotten": Bounds((1, 1), 2, Budgets(delay=1, timeout=1, expire=1)),
    "two, an operator": Bounds((1, 1), 2, Budgets(delay=1, terminate=1, marker=1)),
    "two, retention": Bounds((1, 1), 2, Budgets(timeout=1, retention=1)),
    "three": Bounds((1, 1, 1), 3),
    "three, a late request": Bounds((1, 1, 1), 2, Budgets(delay=1)),
    "two native": native(1, 1, budgets=Budgets(delay=1, abort=1)),
    "two native, with all that goes wrong": native(1, 1, budgets=EACH_ONCE),
    "two native, three incarnations": native(1, 1, incarnations=3, budgets=Budgets(delay=1)),
    "two native, a marker is skipped": native(1, 1, budgets=Budgets(delay=1, forgotten=1)),
    "two native, ids are forgotten": native(1, 1, budgets=Budgets(delay=1, expire=1)),
    "one of each engine": mixed(2, 1, budgets=Budgets(delay=1))._replace(incarnations=2),
}
LARGEST = {
    "two, three incarnations", "two, one marker at a time", "two, ids are forgotten", "two, an operator", "three",
    "two native, with all that goes wrong", "two native, three incarnations", "two native, a marker is skipped",
    "two native, ids are forgotten", "one of each engine",
}  # fmt: skip
BUDGETS = 3


class Placed(World):
    """Every process keeps its place, so that their order matters."""

    def following(self, state):
        *around, first, second, third = state
        for index, process in enumerate((first, second, third)):
            for text, (*after, moved), wrong in super().following((*around, process)):
                places = [first, second, third]
                places[index] = moved
                yield text, (*after, *places), wrong


@pytest.fixture(autouse=True)
def quiet():
    """The product logs every loss, and there are thousands here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def states_of(world, kind=World):
    seen = {world.first()}
    level = list(seen)
    while level:
        further = {state for here in level for _, state, _ in kind.following(world, here)} - seen
        seen |= further
        level = list(further)
    return seen


def both(bounds):
    """The states of a search with what is at its end, shortened then, and of one without."""
    world = World(bounds, entire=True)
    entire = states_of(world)
    world.entire = False
    return world, entire, {world.shortened(*state[:4], state[4:]) for state in entire}, states_of(world)


def uncovered(world, expected, found):
    """The states that were not found, not even with more misfortunes to come."""
    richest = {}
    for state in found:
        richest.setdefault((*state[:BUDGETS], *state[BUDGETS + 1 :]), []).append(world.left(state[BUDGETS]))
    return [
        state
        for state in expected
        if not any(
            all(map(int.__le__, world.left(state[BUDGETS]), left))
            for left in richest.get((*state[:BUDGETS], *state[BUDGETS + 1 :]), ())
        )
    ]


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(bounds, id=name, marks=[pytest.mark.thorough] if name in LARGEST else [])
        for name, bounds in EQUALS.items()
    ],
)
def test_the_search_without_ends_comes_to_all_states_and_no_others(bounds):
    world, entire, shortened, found = both(bounds)
    assert found <= shortened
    assert not uncovered(world, shortened, found)
    assert {state[:2] for state in found} == {state[:2] for state in entire}  # rows and brokers
    assert len(found) < len(entire)


def test_processes_without_places_come_to_every_orbit_of_those_with_places_and_to_no_others():
    placed = Placed(EQUALS["three, a late request"], entire=True)
    in_places, without = states_of(placed, Placed), states_of(placed)
    assert {(*state[:4], *sorted(state[4:])) for state in in_places} == without
    assert len(in_places) > 2 * len(without)


def every_late_request(_ends, _request, _broker):
    return True


def every_overtaken_owner(_ends, process, database, _broker):
    return process.owner > 0 and process.doing != "commit" and database.owner != process.owner


def every_owner_whose_epoch_was_raised(ends, process, database, broker, finished=Ends.finished):
    fenced = any(known.producer_epoch > process.epoch >= 0 for known in broker.transactions)
    return (fenced and process.doing == "abort") or finished(ends, process, database, broker)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("refused", every_late_request),
        ("finished", every_owner_whose_epoch_was_raised),
        pytest.param("finished", every_overtaken_owner, marks=pytest.mark.thorough),
    ],
)
def test_what_is_wrongly_taken_for_an_end_shows(monkeypatch, name, taken):
    monkeypatch.setattr(Ends, name, taken)
    world, _, shortened, found = both(EQUALS["two"])
    assert uncovered(world, shortened, found)


@pytest.mark.parametrize("name", quick_first(CAUGHT))
def test_a_mistake_is_caught_by_as_many_steps_as_with_all_that_is_at_its_end(name):
    mistake = MISTAKES[name]
    entire = explore(World(mistake.bounds, mistake.rules, open_is_fine=mistake.open_is_fine, entire=True))
    found = explore(mistake.world())
    assert (found.wrong, len(found.trace)) == (entire.wrong, len(entire.trace))
