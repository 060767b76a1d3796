"""The section of the report about state stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaos.results import Results
from chaos.tables import MOMENT
from dualwrite.failpoints import FAILPOINTS


def states_of(run: Results) -> dict[str, Any]:
    """The figures of a run's part with state stores."""
    return {
        "command": run.command,
        "began": run.began,
        "minutes": round(run.seconds / 60),
        "counts": run.states,
        "findings": run.findings,
    }


def section(states: Mapping[str, Any]) -> list[str]:
    """The section as lines of Markdown; empty if nothing was measured."""
    if not states:
        return []
    counts = states["counts"]
    killed = {kind: counts.get(kind, {}) for kind in ("messages", "rows")}
    rows = []
    for point in [*FAILPOINTS, MOMENT]:
        of_point = [killed[kind].get(point, 0) for kind in killed]
        if any(of_point):
            rows.append(f"| `{point}` | {of_point[0]} | {of_point[1]} |")
    sums = {kind: sum(found.values()) for kind, found in killed.items()}
    began = ", ".join(f"{count:,} with {which}" for which, count in sorted(counts["began with"].items()))
    return [
        "## State stores",
        "",
        "Tasks with a [state store](state-stores.md), one after the other on one changelog, four changelogs at once; those of two "
        "write rows by a `DualWriter`, too. Each reads messages that count or delete a key, publishes each value, and moves the "
        "group's offset, all in one transaction; then it dies at its fail point, or at any moment. The next one restores, and "
        "compares before it goes on: the store, a replay of the changelog's committed records by another reader, and the input up "
        "to the group's offset must make the same state; where a task dies before that, the next one compares. Besides, what each "
        "killed task leaves is copied at once; the copy is opened, brought to the changelog's committed end, and compared with a "
        "replay of it. Some begin with another directory: an older copy, that of a standby that "
        "has followed meanwhile, or an empty one. The broker compacts the changelogs all the time. The last task of each also "
        "compares all messages, and all rows, with the input.",
        "",
        f"`{states['command']}`, {states['began']} (UTC), {states['minutes']} minutes, native engine, one broker: "
        f"**{sum(sums.values()):,} tasks killed**, the state compared **{counts['compared']['all']:,} times** by the next task"
        f"{_copies(counts['compared'])}: "
        f"{len(states['findings'])} findings. Directories: {began}. {counts['restored']['records']:,} records of changelogs were "
        f"applied by tasks, {counts['standbys']['records']:,} by standbys. {counts['counted']['inputs']:,} inputs were counted "
        "once.",
        "",
        "| point | Kafka alone | with rows |",
        "|---|---|---|",
        *rows,
        f"| all | {sums['messages']} | {sums['rows']} |",
        "",
        f"Not counted: {sum(counts.get('missed', {}).values())} that ended before they came to their point, because memory had "
        "room, nothing was missing in the store, or nothing was left to settle.",
        "",
    ]


def _copies(compared: Mapping[str, int]) -> str:
    return f", and **{compared['copies']:,} times** in a copy" if "copies" in compared else ""
