"""The configurations of the search: what every test run repeats, and the long ones."""

from __future__ import annotations

from typing import NamedTuple

from search.waiting.values import Block, Budgets, Owner
from search.waiting.world import Bounds


class Configuration(NamedTuple):
    """Bounds with a name.

    Attributes:
        sentence: What they are, for people.
        bounds: The bounds.
        quick: Seconds, and a part of every test run.
    """

    sentence: str
    bounds: Bounds
    quick: bool = False


def owner(name: str, *blocks: tuple[Block, ...], sends: int = 1, outbox: str = "fallback") -> Owner:
    """An owner with these blocks on its two lanes."""
    first, second = (*blocks, (), ())[:2]
    return Owner(name, outbox, (first, second), sends)


A, B, C, D, E = (Block(name) for name in "abcde")
_EVERYTHING = Budgets(outage=1, answer=1, abort=1)

WAITING = {
    "waiting_one_lane": Configuration(
        "an owner of `fallback` with two blocks, one after the other; a COMMIT and an abort go wrong",
        Bounds((owner("P", (A, C), sends=2),), _EVERYTHING),
        quick=True,
    ),
    "waiting_two_partitions": Configuration(
        "blocks with a message for each of two partitions, the last one in a savepoint that may be rolled back",
        Bounds((owner("P", (Block("a", (0, 1), savepoint=True), Block("c", (1, 0))), sends=1),)),
        quick=True,
    ),
    "waiting_a_block_that_asks_for_it": Configuration(
        "a block of `always` and one of `never` between two others of a writer of `fallback`",
        Bounds((owner("P", (Block("a", outbox="always"), C), (Block("b", outbox="never"),)),), Budgets(outage=0)),
        quick=True,
    ),
    "waiting_always": Configuration(
        "an owner of `always`, whose blocks take no share, with two lanes",
        Bounds((owner("P", (A, C), (B,), sends=2, outbox="always"),), Budgets(outage=0)),
        quick=True,
    ),
    "waiting_floors": Configuration(
        "the same, and its sender raises the number from which on it looks, in three sends",
        Bounds((owner("P", (A, C), (B,), sends=3, outbox="always"),), Budgets(outage=0), floors=True),
    ),
    "waiting_always_then_fallback": Configuration(
        "an owner of `always` that goes on after one of `fallback` has claimed",
        Bounds((owner("P", (A,), (B,), outbox="always"), owner("Q", (E,))), Budgets(outage=0)),
    ),
    "waiting_fallback_always_fallback": Configuration(
        "owners of `fallback`, `always` and `fallback`, each of which goes on after the next has claimed",
        Bounds(
            (owner("P", (A,)), owner("Q", (B,), sends=0, outbox="always"), owner("R", (C,))),
            Budgets(outage=0),
            later=True,
        ),
    ),
    "waiting_then_never": Configuration(
        "an owner of `fallback` that goes on after one of `never` has claimed",
        Bounds((owner("P", (A,), sends=0), owner("Q", (E,), outbox="never"))),
        quick=True,
    ),
    "waiting_restored": Configuration(
        "the database is put back to a copy of before, and another owner claims",
        Bounds((owner("P", (A,)), owner("Q")), Budgets(outage=0, restore=1), later=True),
        quick=True,
    ),
    "waiting_marker_skipped": Configuration(
        "the broker skips a marker in one of two partitions; messages wait already, and the owner has two sends",
        Bounds(
            (owner("P", (Block("a", (0, 1)), Block("c", (1,))), sends=2),),
            Budgets(outage=0, abort=1, forgotten=1),
            later=True,
        ),
        quick=True,
    ),
    "waiting_marker_skipped_directly": Configuration(
        "the same for blocks that go directly, and fall back while Kafka is away",
        Bounds(
            (owner("P", (Block("a", (0, 1)), Block("c", (1,)), Block("d", (0,)))),),
            Budgets(outage=1, abort=1, forgotten=1),
        ),
    ),
    "waiting_marker_skipped_new_owner": Configuration(
        "the same with an owner that goes on after a new one has claimed, each with a block and a sender",
        Bounds(
            (owner("P", (Block("a", (0, 1)),)), owner("Q", (Block("e", (1,)),))),
            Budgets(outage=1, forgotten=1),
        ),
    ),
    "waiting_marker_skipped_always": Configuration(
        "the same with an owner of `always` and three sends; a COMMIT is not answered",
        Bounds(
            (owner("P", (Block("a", (0, 1)), Block("c", (1,))), sends=3, outbox="always"),),
            Budgets(outage=0, answer=1, forgotten=1),
        ),
        quick=True,
    ),
    "waiting_one_owner": Configuration(
        "an owner of `fallback` with three blocks on two lanes", Bounds((owner("P", (A, C), (B,), sends=2),))
    ),
    "waiting_twice_away": Configuration(
        "an owner of `fallback` with a block on each of two lanes, and Kafka goes away twice",
        Bounds((owner("P", (A,), (B,), sends=3),), Budgets(outage=2)),
    ),
    "waiting_a_new_owner": Configuration(
        "an owner that goes on after a new one has claimed, each with a block and a sender",
        Bounds((owner("P", (A,)), owner("Q", (E,)))),
    ),
    "waiting_a_new_owner_of_two": Configuration(
        "an owner of two blocks that goes on after a new one of two has claimed; no outage: messages wait already",
        Bounds((owner("P", (A,), (B,)), owner("Q", (D, E))), Budgets(outage=0), later=True),
    ),
    "waiting_a_dead_owner": Configuration(
        "an owner that dies anywhere, and its COMMIT, or that of the next one, is not answered",
        Bounds((owner("P", (A, C)), owner("Q", (E,))), Budgets(outage=1, answer=1, death=1)),
    ),
}
