"""Breadth-first search: every state once, the nearest first. So the trace to a fault is one of the shortest."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from search.world import State, World


@dataclass
class Found:
    """What a search has come to.

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


class Fingerprints:
    """The states that were seen, by 64 bits of each: 13 bytes a state or fewer than that many times two.

    Two states of the same 64 bits would be taken for one. Among a hundred million that happens once in some thousand
    searches.
    """

    def __init__(self) -> None:
        self._mask = (1 << 20) - 1
        self._table = array("Q", bytes(8 << 20))
        self.count = 0

    def add(self, state: State) -> bool:
        """Add a state; whether it is new."""
        fingerprint = hash(state) & 0xFFFFFFFFFFFFFFFF or 1
        table, mask = self._table, self._mask
        slot = (fingerprint ^ fingerprint >> 32) & mask
        while table[slot]:
            if table[slot] == fingerprint:
                return False
            slot = slot + 1 & mask
        table[slot] = fingerprint
        self.count += 1
        if self.count * 8 > mask * 5:
            self._grow()
        return True

    def _grow(self) -> None:
        old, self._mask = self._table, self._mask * 2 + 1
        table, mask = array("Q", bytes(8 * (self._mask + 1))), self._mask
        for fingerprint in old:
            if fingerprint:
                slot = (fingerprint ^ fingerprint >> 32) & mask
                while table[slot]:
                    slot = slot + 1 & mask
                table[slot] = fingerprint
        self._table = table


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


def explore(
    world: World,
    *,
    longest_s: float = float("inf"),
    traces: bool = True,
    on_level: Callable[[Found, int], None] | None = None,
) -> Found:
    """Go through all states of the world, until the first fault.

    Args:
        world: The states.
        longest_s: Stop after the step at which so many seconds are over.
        traces: Keep every state whole with the way to it. Without, a state takes some 20 bytes, and a fault has no trace.
        on_level: Told after each level how far it is, and how many states the next one has.
    """
    began = time.monotonic()
    found = Found()
    start = world.first()
    width = len(start)
    ways, prints = Ways(), Fingerprints()
    level = array("I", start)
    following, judge = world.following, world.wrong
    new = prints.add
    if traces:
        ways.add(start, None)
    else:
        new(start)
    gc.disable()  # there are no cycles here, and looking for them takes most of the time
    try:
        while level and found.wrong is None and found.whole:
            further = array("I")
            for at in range(0, len(level), width):
                here = tuple(level[at : at + width])
                for text, state, at_once in following(here):
                    found.steps += 1
                    wrong = at_once
                    if ways.add(state, (here, text)) if traces else new(state):
                        wrong = wrong or judge(state)
                        further.extend(state)
                    if wrong is not None:
                        found.wrong = wrong
                        found.trace = ways.to((here, text), world) if traces else []
                        break
                if found.wrong is not None:
                    break
            level = further
            found.depth += bool(level)
            found.states = ways.count if traces else prints.count
            found.seconds = time.monotonic() - began
            if on_level is not None:
                on_level(found, len(level) // width)
            found.whole = not level or found.seconds < longest_s
    finally:
        gc.enable()
    return found
