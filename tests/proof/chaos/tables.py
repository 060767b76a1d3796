"""The tables of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dualwrite.failpoints import FAILPOINTS

MOMENT: Final = "any moment"


def table(titles: Sequence[str], counts: Sequence[Mapping[str, int]]) -> list[str]:
    """By point, with a column for each of these counts."""
    rows = [
        f"| `{point}` | " + " | ".join(f"{count.get(point, 0):,}" for count in counts) + " |"
        for point in [*FAILPOINTS, MOMENT]
        if any(count.get(point) for count in counts)
    ]
    return [f"| point | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}", *rows]


def sum_of(counters: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(counter.values()) for counter in counters.values())
