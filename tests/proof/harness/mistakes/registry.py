"""The planted mistakes: their description, and how to plant one into the running product."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from harness.planting import ENGINE, ENVIRONMENT

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Check:
    """A test that passes on the product and must fail with the mistake.

    Attributes:
        test: Its node id, from the directory of the tests on.
        shows: A regular expression for what it fails with. A test that fails with anything else has caught nothing.
    """

    test: str
    shows: str


def performed(scenario: str, shows: str) -> Check:
    """A scenario, performed on real servers."""
    return Check(f"scenarios/test_scenarios.py::test_scenario_on_real_servers[{scenario}]", shows)


@dataclass(frozen=True)
class Mistake:
    """A program that breaks one rule of the protocol, and is the product otherwise.

    Attributes:
        name: The name of the function that plants it.
        sentence: What the mistaken program does.
        plant: Patches the product.
        checks: The tests on real servers that must catch it.
        engine: The producer engine of the mistaken program.
    """

    name: str
    sentence: str
    plant: Plant
    checks: tuple[Check, ...]
    engine: str


MISTAKES: dict[str, Mistake] = {}
_OF_NATIVE = frozenset({"native", "native_engine", "state"})
"""The modules of mistakes that only the native engine can make, or none; the checks of the others show them through librdkafka."""


def mistake(*checks: Check) -> Callable[[Plant], Plant]:
    """Register a function that plants a mistake; its docstring is the sentence."""

    def register(plant: Plant) -> Plant:
        assert plant.__doc__ is not None
        engine = "native" if plant.__module__.rpartition(".")[2] in _OF_NATIVE else "librdkafka"
        MISTAKES[plant.__name__] = Mistake(plant.__name__, " ".join(plant.__doc__.split()), plant, checks, engine)
        return plant

    return register


_planted: list[str] = []


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break one rule in this process, and in those that are started meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, name)
        patch.setenv(ENGINE, MISTAKES[name].engine)
        MISTAKES[name].plant(patch)
        _planted.append(name)
        try:
            yield
        finally:
            _planted.remove(name)


def plant_for_good(name: str) -> None:
    """Break one rule for the life of this process, unless that is done already."""
    import harness.mistakes  # noqa: F401 - fills the registry

    if name not in _planted:
        _planted.append(name)
        os.environ[ENGINE] = MISTAKES[name].engine
        MISTAKES[name].plant(pytest.MonkeyPatch())
