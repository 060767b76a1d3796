"""Random ways through bounds that are too large to search: ``make search WALKS=100000 SEED=0`` (half an hour on a quiet core).

A seed draws the owners, their blocks and what may go wrong, then one step after the other until nothing more can happen. Each
state on the way is judged as in the search. With ``--mistakes`` every planted mistake is looked for instead, each in ways of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from random import Random
from typing import Any, NamedTuple

from search.page import FIGURES, PAGE, render
from search.waiting.mistakes import WAITING_MISTAKES
from search.waiting.rules import PRODUCT, Rules
from search.waiting.values import Block, Budgets, Owner, State
from search.waiting.world import Bounds, World

_SETTINGS = ("fallback", "fallback", "fallback", "always", "never")
_MOST_STEPS = 2_000
_RARE = ("goes away", "no answer", "fails", "dies", "copied", "put back", "in doubt", "skipped")
"""Words of misfortunes: drawn as often as anything else, most of them would be over before much has waited."""
_PART = 1_000


class Walked(NamedTuple):
    """One way: its words, what is wrong at its end, the blocks that were begun, and how many of their messages waited."""

    steps: list[str]
    wrong: str | None
    blocks: int
    waited: int


def bounds_of(random: Random) -> Bounds:
    """Two to four owners of one to four blocks on each lane, with up to three misfortunes of each kind, and two skipped markers."""
    names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def block(setting: str) -> Block:
        partitions = tuple(random.choice((0, 1)) for _ in range(random.choice((1, 1, 2, 3))))
        own = (
            random.choice(("always", "never", "fallback")) if setting == "fallback" and random.random() < 0.2 else None
        )
        return Block(next(names), partitions, own, savepoint=random.random() < 0.2)

    def owner(name: str) -> Owner:
        setting = random.choice(_SETTINGS)
        first, second = (tuple(block(setting) for _ in range(random.randint(1, 4))) for _ in range(2))
        return Owner(name, setting, (first, second if random.random() < 0.7 else ()), random.randint(1, 4))

    budgets = Budgets(*(random.randint(0, 3) for _ in range(3)), death=random.choice((0, 0, 1)))
    if random.random() < 0.1:
        budgets = budgets._replace(restore=1)
    budgets = budgets._replace(forgotten=random.randint(0, 2))
    owners = tuple(owner(name) for name in "PQRS"[: random.randint(2, 4)])
    return Bounds(owners, budgets, later=random.random() < 0.3, floors=random.random() < 0.3)


def walk(seed: int, rules: Rules = PRODUCT) -> Walked:
    """Go one way, as far as the first fault."""
    random = Random(seed)
    world = World(bounds_of(random), rules)
    state, words, waited = world.first(), [], set()
    weights: dict[int, float] = {}
    while len(words) < _MOST_STEPS:
        steps = list(world.following(state))
        if not steps:
            return Walked(words, None, len(state.written), len(waited))
        for number, _, _ in steps:
            if number not in weights:
                weights[number] = _weight(world.text(number))
        before = state
        number, state, _ = random.choices(steps, [weights[number] for number, _, _ in steps])[0]
        words.append(world.text(number))
        if _judged(state) == _judged(before):
            continue
        waited.update(message for _, message in state.database.waiting)
        if (wrong := world.wrong(state)) is not None:
            return Walked(words, wrong, len(state.written), len(waited))
    return Walked(words, "it does not end", len(state.written), len(waited))


def _judged(state: State) -> tuple[object, ...]:
    """All that the judge looks at."""
    database, kafka = state.database, state.kafka
    of_kafka = kafka.log, kafka.ended, kafka.skipped, kafka.otherwise
    return database.rows, database.waiting, *of_kafka, state.written, state.restored, state.fault


def _weight(step: str) -> float:
    if step.endswith(" claims"):  # a former owner should have done something by then
        return 0.3
    return 1.0 if any(word in step for word in _RARE) else 6.0


def walk_some(seeds: range) -> tuple[Counter[str], int | None]:
    """Go these ways, as far as the first that is wrong. Returns what there was, and the seed of that one."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        gone = walk(seed)
        seen += Counter(ways=1, steps=len(gone.steps), blocks=gone.blocks, waited=gone.waited)
        seen["with messages that waited"] += bool(gone.waited)
        if gone.wrong is not None:
            return seen, seed
    return seen, None


def walk_all(count: int, seed: int, jobs: int) -> dict[str, Any]:
    """Go so many ways, as far as the first that is wrong, in so many processes."""
    began, seen, wrong = time.monotonic(), Counter[str](), None
    parts = [range(first, min(first + _PART, seed + count)) for first in range(seed, seed + count, _PART)]
    with ProcessPoolExecutor(jobs) as pool:
        for found, fault in pool.map(walk_some, parts):
            seen += found
            print(f"{seen['ways']:,} ways, {time.monotonic() - began:,.0f} s", file=sys.stderr, flush=True)
            if fault is not None:
                gone = walk(fault)
                wrong = f"seed {fault}: {gone.wrong}"
                print(*gone.steps, f"=> {wrong}", sep="\n")
                pool.shutdown(cancel_futures=True)
                break
    return {**seen, "seed": seed, "seconds": round(time.monotonic() - began), "wrong": wrong}


def until_caught(name: str, most: int) -> int | None:
    """How many ways it takes to find a planted mistake; None if that many do not."""
    mistaken = type("Mistaken", (Rules,), WAITING_MISTAKES[name].changed)()
    return next((number + 1 for number in range(most) if walk(number, mistaken).wrong is not None), None)


def main() -> int:
    """Go, keep what came of it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument(
        "--mistakes", action="store_true", help="look for every planted mistake, in at most so many ways"
    )
    options = parser.parse_args()
    kept = json.loads(FIGURES.read_text("utf-8"))
    if options.mistakes:
        found = {name: until_caught(name, options.ways) for name in WAITING_MISTAKES}
        print(found)
        kept["walked_mistakes"] = {"ways": options.ways, "found": found}
        failed = not any(found.values())
    else:
        gone = walk_all(options.ways, options.seed, options.jobs) | {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
        print(gone)
        kept.setdefault("walks", {})[str(options.seed)] = gone
        failed = gone["wrong"] is not None
    FIGURES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
    PAGE.write_text(render(kept), "utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
