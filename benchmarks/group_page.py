"""The section of ``docs/benchmarks.md`` about group commit, from its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.group import GROUP, GROUP_OF_ROWS, GROUP_OF_TEXT, INSERT, INSERT_AS_TEXT
from benchmarks.threads import LANES
from benchmarks.ways import NATIVE, UNSAFE

Ways = Mapping[str, Mapping[str, float]]
_HEAD = ("way", "per second", "p50", "p99", "longest", "processor", "units")


def section(
    figures: Mapping[str, Any], *, table: Callable[[Sequence[str], Iterable[Sequence[str]]], list[str]]
) -> list[str]:
    """The section.

    Args:
        figures: Those of ``benchmarks.group``.
        table: Makes a table of its head and its rows.
    """
    threads, tasks, alone = figures["threads"], figures["tasks"], figures["insert"]
    return [
        "## Group commit",
        "",
        "[`writer.submit`](group-commit.md) by threads that each wait for their unit, one message and one row, before the next; "
        f"against a block for each, and against the unsafe way with one producer and {LANES} database connections for all. The "
        "ways take turns. Milliseconds; *processor* is that of the Python process for each dual write; the median number of "
        "units in a group. After the imports the process calls `gc.freeze()`, for all ways.",
        "",
        *table(("threads", *_HEAD), _rows(threads)),
        *_ratios(threads, "threads"),
        "",
        *_ceiling(threads[max(threads, key=int)], alone),
        "",
        *_by_function(figures["calls"], table),
        "The same by tasks of one event loop, through `AsyncDualWriter`; the unsafe way has one `AIOProducer`:",
        "",
        *table(("tasks", *_HEAD), _rows(tasks)),
        *_ratios(tasks, "tasks"),
        "",
    ]


def _rows(counts: Mapping[str, Ways]) -> list[list[str]]:
    return [
        [
            count,
            name,
            f"{way['per second']:.0f}",
            *(f"{way[figure]:.1f}" for figure in ("p50", "p99", "longest")),
            f"{way['process']:.2f}",
            f"{way['units of a group']:.0f}" if "units of a group" in way else "",
        ]
        for count, ways in counts.items()
        for name, way in ways.items()
    ]


def _ratios(counts: Mapping[str, Ways], callers: str) -> list[str]:
    one, many = counts[min(counts, key=int)], counts[max(counts, key=int)]
    return [
        f"- {max(counts, key=int)} {callers} against blocks: "
        f"**{many[GROUP]['per second'] / many[NATIVE]['per second']:.1f}** times as many dual writes per second.",
        f"- Against the unsafe way: **{many[GROUP]['per second'] / many[UNSAFE]['per second']:.2f}** times as many (aim: at least "
        f"2), a p99 of **{many[GROUP]['p99'] / many[UNSAFE]['p99']:.2f}** of its (aim: at most 0.5).",
        f"- One of the {callers} against a block: **{one[GROUP]['p50'] / one[NATIVE]['p50']:.2f}** of its p50 (aim: 1).",
        *(_ratios_of_rows(one, many) if GROUP_OF_ROWS in many else ()),
    ]


def _ratios_of_rows(one: Ways, many: Ways) -> list[str]:
    rows, unsafe = many[GROUP_OF_ROWS], many[UNSAFE]
    return [
        f"- Units given as `RowUnit`, against the unsafe way: **{rows['per second'] / unsafe['per second']:.2f}** times as many "
        f"(aim: at least 4), a p99 of **{rows['p99'] / unsafe['p99']:.2f}** of its; one alone against a block: "
        f"**{one[GROUP_OF_ROWS]['p50'] / one[NATIVE]['p50']:.2f}** of its p50 (the other aims are the same).",
    ]


def _ceiling(ways: Ways, alone: Mapping[str, float]) -> list[str]:
    """Where the time goes: units run one after the other, and Python runs one thread at a time."""
    ours, text, unsafe = (ways[name]["process"] for name in (GROUP, GROUP_OF_TEXT, UNSAFE))
    rest = ours - alone[INSERT]
    return [
        f"One INSERT alone, in one thread and one transaction, takes {alone[INSERT]:.2f} ms of Python's processor time by "
        f"`{INSERT}`, and {alone[INSERT_AS_TEXT]:.2f} ms as {INSERT_AS_TEXT}. An unsafe write takes {unsafe:.2f} ms. Python runs "
        f"one thread at a time, so no grouping of these INSERTs could be more than **{unsafe / alone[INSERT]:.1f}** times as fast "
        f"while that is the limit, even if all else were free; as text **{unsafe / alone[INSERT_AS_TEXT]:.1f}** times. Beside "
        f"the INSERT, a unit takes {rest:.2f} ms ({text - alone[INSERT_AS_TEXT]:.2f} ms with the text): its savepoint, its "
        "message, its share of the group's block, and the wake-up of its caller.",
    ]


def _by_function(
    calls: Mapping[str, Mapping[str, Any]], table: Callable[[Sequence[str], Iterable[Sequence[str]]], list[str]]
) -> list[str]:
    """Which functions these are: the calls of a unit."""
    code, rows = calls[GROUP], calls[GROUP_OF_ROWS]
    most = sorted({*code["functions"], *rows["functions"]}, key=lambda name: (-_of(code, name) - _of(rows, name), name))
    return [
        f"By function: in groups of 64, a unit of code calls {code['python']:.0f} functions written in Python, {code['own']:.0f} of "
        f"them this library's; a `RowUnit` {rows['python']:.0f}, {rows['own']:.0f} of them this library's. A block calls "
        "[some six hundred](#the-calls-of-a-dual-write). Those with the most calls for each unit:",
        "",
        *table(
            ("function", "unit of code", "RowUnit"),
            ([f"`{name}`", f"{_of(code, name):.1f}", f"{_of(rows, name):.1f}"] for name in most[:25]),
        ),
    ]


def _of(calls: Mapping[str, Any], function: str) -> float:
    return float(calls["functions"].get(function, 0.0))
