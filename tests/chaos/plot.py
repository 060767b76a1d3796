"""A picture of how long something took: which share was done after how many seconds. Plain SVG, no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 20, 60
COLORS = ("#1f77b4", "#d62728", "#2ca02c")
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def shares(series: Mapping[str, Sequence[float]]) -> str:
    """One step line a series.

    Args:
        series: By name, the percentiles from 0 to 100, in seconds.
    """
    drawn = {name: values for name, values in series.items() if values}
    low = min(0.1, *(max(values[0], 0.01) for values in drawn.values()))
    high = max(1.0, *(values[-1] for values in drawn.values()))

    def x(seconds: float) -> float:
        share = (math.log(max(seconds, low)) - math.log(low)) / (math.log(high) - math.log(low))
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(percent: float) -> float:
        return TOP + (1 - percent / 100) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for percent in range(0, 101, 25):
        parts += [
            f'<line x1="{LEFT}" y1="{y(percent):.1f}" x2="{WIDTH - RIGHT}" y2="{y(percent):.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent} %</text>',
        ]
    for tick in (tick for tick in TICKS if low <= tick <= high):
        parts += [
            f'<line x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>',
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g} s</text>',
        ]
    for index, (name, values) in enumerate(drawn.items()):
        points = " ".join(f"{x(value):.1f},{y(percent):.1f}" for percent, value in enumerate(values))
        color = COLORS[index % len(COLORS)]
        legend_x = LEFT + index * (WIDTH - LEFT - RIGHT) / len(drawn)
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
            f'<rect x="{legend_x:.1f}" y="{HEIGHT - 26}" width="12" height="12" fill="{color}"/>',
            f'<text x="{legend_x + 18:.1f}" y="{HEIGHT - 16}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
