"""Breadth-first search: every state once, the nearest first. So the trace to a fault is one of the shortest."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from search.world import State

if TYPE_CHECKING:
    from collections.abc import Iterator


class World(Protocol):
    """Whatever has states."""

    def first(self) -> State:
        """The state in which nothing has happened."""
        ...

    def following(self, state: State) -> Iterator[tuple[int, State, str | None]]:
        """Every step from a state: its words, where it leads, and what is wrong with it at once."""
        ...

    def wrong(self, state: State) -> str | None:
        """The fault of a state; None if there is none."""
        ...

    def text(self, number: int) -> str:
        """The words of a step."""
        ...


@dataclass
class Found:
    """The result of a search.

    Attributes:
        states: How many there are, or were seen until the fault.
        steps: How many lead from one to the next.
        depth: The longest way to a state, in steps.
        seconds: The time it took.
        wrong: The fault; None if there is none.
        trace: The way to it, in words.
        whole: Whether every state was seen.
    """

    states: int = 0
    steps: int = 0
    depth: int = 0
    seconds: float = 0.0
    wrong: str | None = None
    trace: list[str] = field(default_factory=list)
    whole: bool = True


class Ways:
    """The states that were seen, with the step that led to each first."""

    def __init__(self) -> None:
        self._came_from: dict[State, tuple[State, int] | None] = {}

    @property
    def count(self) -> int:
        """How many."""
        return len(self._came_from)

    def add(self, state: State, step: tuple[State, int] | None) -> bool:
        """Add a state; whether it is new."""
        if state in self._came_from:
            return False
        self._came_from[state] = step
        return True

    def to(self, step: tuple[State, int] | None, world: World) -> list[str]:
        """The way that ends with a step, in words."""
        words = []
        while step is not None:
            words.append(world.text(step[1]))
            step = self._came_from[step[0]]
        return words[::-1]


def explore(world: World, *, longest_s: float = float("inf")) -> Found:
    """Go through all states of the world, until the first fault, and keep the way to each.

    Args:
        world: The states.
        longest_s: Stop after the level at which so many seconds are over.
    """
    began = time.monotonic()
    found = Found()
    level = [world.first()]
    ways = Ways()
    ways.add(level[0], None)
    while level and found.wrong is None and found.whole:
        level = _next(level, world, ways, found)
        found.depth += bool(level)
        found.states = ways.count
        found.seconds = time.monotonic() - began
        found.whole = not level or found.seconds < longest_s
    return found


def _next(level: list[State], world: World, ways: Ways, found: Found) -> list[State]:
    """The states that are one step further, and were not seen before; as far as the first fault."""
    further = []
    for here in level:
        for text, state, at_once in world.following(here):
            found.steps += 1
            wrong = at_once
            if ways.add(state, (here, text)):
                wrong = wrong or world.wrong(state)
                further.append(state)
            if wrong is not None:
                found.wrong = wrong
                found.trace = ways.to((here, text), world)
                return further
    return further
