"""A picture of how long something took: which share was done after how many seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from line_chart import Axis, line_chart

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def shares(series: Mapping[str, Sequence[float]]) -> str:
    """One line a series.

    Args:
        series: By name, the percentiles from 0 to 100, in seconds.
    """
    drawn = {name: values for name, values in series.items() if values}
    low = min(0.1, *(max(values[0], 0.01) for values in drawn.values()))
    high = max(1.0, *(values[-1] for values in drawn.values()))
    return line_chart(
        {name: [(value, percent) for percent, value in enumerate(values)] for name, values in drawn.items()},
        Axis(low, high, [tick for tick in TICKS if low <= tick <= high], log=True, shown="{:g} s".format),
        Axis(0, 100, range(0, 101, 25), shown="{:g} %".format),
    )
