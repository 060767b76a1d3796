"""The search without traces: all states of one depth at a time, as the rows of an array. For a hundred million of them.

What a step does is worked out once for each process, row and broker that meet, as `World` has it; here it is only laid out
for all states in which they meet. The order within a level, and with it which of several ways to a state comes first, means
nothing to what is found.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from search.explore import Found
from search.world import World

Rows = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

DATABASE, BROKER, LATE, BUDGETS, PROCESSES = range(5)  # the columns of a state; processes are the last ones
_CHUNK = 1 << 19
_BITS = 21  # of a number in a key of three
_LOW = (1 << _BITS) - 1


class Steps:
    """The steps from each of many keys, end to end, so that those of many states are gathered at once.

    Args:
        width: How many numbers a step is.
        work_out: The steps of a key.
    """

    def __init__(self, width: int, work_out: Callable[[int, int, int], list[tuple[int, ...]]]) -> None:
        self._work_out = work_out
        self._known: dict[int, int] = {}
        self._starts, self._counts = array("q"), array("q")
        self._columns = [array("i") for _ in range(width)]

    def of(self, first: Rows, second: Rows, third: Rows) -> tuple[npt.NDArray[np.int64], list[Rows]]:
        """The steps of all keys: for each which key it is of, and its columns."""
        unique, inverse = np.unique(_key(first, second, third), return_inverse=True)
        numbers = np.array([self._number(key) for key in unique.tolist()], dtype=np.int64)[inverse]
        counts = np.frombuffer(self._counts, dtype=np.int64)[numbers]
        of = np.repeat(np.arange(len(numbers)), counts)
        begins = np.frombuffer(self._starts, dtype=np.int64)[numbers] - np.cumsum(counts) + counts
        at = np.repeat(begins, counts) + np.arange(len(of))
        return of, [np.frombuffer(column, dtype=np.int32)[at] for column in self._columns]

    def _number(self, key: int) -> int:
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self._starts)
            steps = self._work_out(*_parts(key))
            self._starts.append(len(self._columns[0]))
            self._counts.append(len(steps))
            for index, column in enumerate(self._columns):
                column.extend([step[index] for step in steps])
        return number


class Seen:
    """The states that were seen, by 64 bits of each: sorted arrays, each more than twice as long as the next."""

    def __init__(self) -> None:
        self._sorted: list[Words] = []
        self.count = 0

    def new_ones(self, words: Words) -> npt.NDArray[np.bool_]:
        """Which of these are not among them."""
        new = np.ones(len(words), dtype=bool)
        for known in self._sorted:
            at = np.searchsorted(known, words)
            at[at == len(known)] = 0
            new &= known[at] != words
        return new

    def add(self, words: Words) -> None:
        """Add new ones, sorted."""
        self.count += len(words)
        self._sorted.append(words)
        while len(self._sorted) > 1 and len(self._sorted[-2]) < 2 * len(self._sorted[-1]):
            last = self._sorted.pop()
            merged = np.concatenate([self._sorted.pop(), last])
            merged.sort(kind="stable")  # two runs: this is a merge
            self._sorted.append(merged)


class Levels:
    """One search."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._faults: list[str] = []
        self._steps = Steps(7, world.steps)
        self._others = Steps(5, world.others)

    def run(self, *, longest_s: float, on_level: Callable[[Found, int], None] | None) -> Found:
        """Go through all states until the first level with a fault."""
        began = time.monotonic()
        found = Found()
        level = np.array([self._world.first()], dtype=np.int32)
        seen = Seen()
        seen.add(_fingerprints(level))
        while len(level) and found.wrong is None and found.whole:
            level = self._next(level, seen, found)
            found.depth += bool(len(level))
            found.states = seen.count
            found.seconds = time.monotonic() - began
            found.wrong = self._faults[0] if self._faults else None
            if on_level is not None:
                on_level(found, len(level))
            found.whole = not len(level) or found.seconds < longest_s
        return found

    def _next(self, level: Rows, seen: Seen, found: Found) -> Rows:
        """The states that are one step further, and were not seen before."""
        rows, words = [level[:0]], [np.empty(0, dtype=np.uint64)]
        for at in range(0, len(level), _CHUNK):
            for reached in self._further(level[at : at + _CHUNK]):
                found.steps += len(reached)
                further = self._shortened(reached)
                prints, first = np.unique(_fingerprints(further), return_index=True)
                new = seen.new_ones(prints)
                rows.append(further[first[new]])
                words.append(prints[new])
        prints, first = np.unique(np.concatenate(words), return_index=True)
        words.clear()
        next_level = np.concatenate(rows)[first]
        rows.clear()
        seen.add(prints)
        self._judge(next_level)
        return next_level

    def _further(self, states: Rows) -> Iterator[Rows]:
        world = self._world
        for column in range(PROCESSES, states.shape[1]):
            moving = states[:, column] != world.done
            if column > PROCESSES:
                moving &= states[:, column] != states[:, column - 1]  # two alike have the same steps
            here = states[moving]
            of, steps = self._steps.of(here[:, column], here[:, DATABASE], here[:, BROKER])
            _, process, database, broker, sent, spends, wrong = steps
            after = here[of]
            after[:, column], after[:, DATABASE], after[:, BROKER] = process, database, broker
            possible = self._spend(after, spends)
            sending = possible & (sent >= 0)
            after[sending, LATE] = _looked_up(world.send, after[sending, LATE], sent[sending])
            self._faults += [world.text(fault) for fault in wrong[possible & (wrong >= 0)][:1].tolist()]
            yield after[possible]
        of, (_, database, broker, late, spends) = self._others.of(
            states[:, DATABASE], states[:, BROKER], states[:, LATE]
        )
        after = states[of]
        after[:, DATABASE], after[:, BROKER], after[:, LATE] = database, broker, late
        yield after[self._spend(after, spends)]

    def _shortened(self, states: Rows) -> Rows:
        """The states without what is at its end, and each with its processes in their order."""
        if not self._world.entire:
            states = states[np.unique(_fingerprints(states), return_index=True)[1]]
            for column in range(PROCESSES, states.shape[1]):
                states[:, column] = self._living(states[:, column], states[:, DATABASE], states[:, BROKER])
            states[:, LATE] = _looked_up(self._world.coming, states[:, LATE], states[:, BROKER])
        states[:, PROCESSES:].sort(axis=1)
        return states

    def _living(self, processes: Rows, databases: Rows, brokers: Rows) -> Rows:
        unique, inverse = np.unique(_key(processes, databases, brokers), return_inverse=True)
        return np.array([self._world.living(*_parts(key)) for key in unique.tolist()], dtype=np.int32)[inverse]

    def _spend(self, after: Rows, spends: Rows) -> npt.NDArray[np.bool_]:
        """Take from the budgets what is spent; whether there was any left."""
        spending = spends >= 0
        after[spending, BUDGETS] = _looked_up(self._world.spend, after[spending, BUDGETS], spends[spending])
        return after[:, BUDGETS] >= 0

    def _judge(self, level: Rows) -> None:
        """Judge what only one state has of row, broker, late requests and excuses, once."""
        for excuse, budgets in self._excuses(level):
            of = level[budgets]
            for key in np.unique(_key(of[:, DATABASE], of[:, BROKER], of[:, LATE])).tolist():
                wrong = self._world.verdict(*_parts(key), excuse)
                if wrong is not None:
                    self._faults.append(wrong)

    def _excuses(self, level: Rows) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
        """The excuses that there are, and the states that have them."""
        by_excuse: dict[int, list[int]] = {}
        for budgets in np.unique(level[:, BUDGETS]).tolist():
            by_excuse.setdefault(self._world.excuses(budgets), []).append(budgets)
        for excuse, budgets in by_excuse.items():
            yield excuse, np.isin(level[:, BUDGETS], budgets)


def explore_levels(
    world: World, *, longest_s: float = float("inf"), on_level: Callable[[Found, int], None] | None = None
) -> Found:
    """Go through all states of the world, until the first level with a fault.

    Args:
        world: The states.
        longest_s: Stop after the level at which so many seconds are over.
        on_level: Told after each level how far it is, and how many states the next one has.
    """
    return Levels(world).run(longest_s=longest_s, on_level=on_level)


def _key(first: Rows, second: Rows, third: Rows) -> npt.NDArray[np.int64]:
    for numbers in (first, second, third):
        assert not len(numbers) or numbers.max() <= _LOW
    return first.astype(np.int64) << 2 * _BITS | second.astype(np.int64) << _BITS | third


def _parts(key: int) -> tuple[int, int, int]:
    return key >> 2 * _BITS, key >> _BITS & _LOW, key & _LOW


def _looked_up(function: Callable[[int, int], int], first: Rows, second: Rows) -> Rows:
    """A function of two numbers, asked once for each pair."""
    pairs, inverse = np.unique(first.astype(np.int64) << 32 | second, return_inverse=True)
    answers = [function(pair >> 32, pair & 0xFFFFFFFF) for pair in pairs.tolist()]
    return np.array(answers, dtype=np.int32)[inverse]


def _fingerprints(rows: Rows) -> Words:
    """64 bits of each state, mixed column by column as SplitMix64 does."""
    mixed = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:
        mixed += column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed
