"""Line charts as plain SVG, without a library: the same figures always give the same picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 60
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        low: The least value; greater than 0 if the axis is logarithmic.
        high: The greatest value.
        ticks: The values with a line and a number.
        log: Whether the axis is logarithmic.
        shown: Formats a number.
    """

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False
    shown: Callable[[float], str] = "{:g}".format

    def share(self, value: float) -> float:
        """The position of a value: 0 at the low end, 1 at the high one."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def linear(values: Sequence[float], shown: Callable[[float], str] = "{:,.10g}".format) -> Axis:
    """An axis from 0 to the greatest value, with round numbers."""
    high = max([*values, 0.0]) or 1.0
    step = 10.0 ** math.floor(math.log10(high))
    step = next(step * factor for factor in (0.1, 0.2, 0.5, 1, 2) if high / (step * factor) <= 6)
    count = math.ceil(high / step - 1e-9)
    return Axis(0.0, count * step, [number * step for number in range(count + 1)], shown=shown)


def logarithmic(values: Sequence[float], shown: Callable[[float], str] = "{:,.10g}".format) -> Axis:
    """An axis over whole powers of ten that covers every value above 0."""
    found = [value for value in values if value > 0] or [1.0]
    first = math.floor(math.log10(min(found)) + 1e-9)
    last = max(math.ceil(math.log10(max(found)) - 1e-9), first + 1)
    return Axis(10.0**first, 10.0**last, [10.0**power for power in range(first, last + 1)], log=True, shown=shown)


def line_chart(series: Mapping[str, Points], x: Axis, y: Axis, *, title: str = "", dots: bool = False) -> str:
    """Draw the chart: one line for each series, with its name below.

    Args:
        series: The points (x, y) by name, in the order in which a line joins them.
        x: The horizontal axis.
        y: The vertical axis.
        title: The title above the chart.
        dots: Mark each point.
    """

    def across(value: float) -> float:
        return LEFT + x.share(value) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        return TOP + (1 - y.share(value)) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    if title:
        parts.append(f'<text x="{WIDTH / 2:.1f}" y="14" text-anchor="middle">{escape(title)}</text>')
    for tick in y.ticks:
        parts += [
            f'<line x1="{LEFT}" y1="{down(tick):.1f}" x2="{WIDTH - RIGHT}" y2="{down(tick):.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{down(tick) + 4:.1f}" text-anchor="end">{escape(y.shown(tick))}</text>',
        ]
    for tick in x.ticks:
        parts += [
            f'<line x1="{across(tick):.1f}" y1="{TOP}" x2="{across(tick):.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>',
            f'<text x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(x.shown(tick))}</text>',
        ]
    for index, (name, points) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        places = [(across(right), down(up)) for right, up in points]
        joined = " ".join(f"{right:.1f},{up:.1f}" for right, up in places)
        legend = LEFT + index * (WIDTH - LEFT - RIGHT) / len(series)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>')
        if dots:
            parts += [f'<circle cx="{right:.1f}" cy="{up:.1f}" r="3" fill="{color}"/>' for right, up in places]
        parts += [
            f'<rect x="{legend:.1f}" y="{HEIGHT - 26}" width="12" height="12" fill="{color}"/>',
            f'<text x="{legend + 18:.1f}" y="{HEIGHT - 16}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
