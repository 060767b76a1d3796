"""The section of the report about kinds of databases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from chaos.results import Results
from chaos.tables import MOMENT
from dualwrite.runtime.failpoints import FAILPOINTS

NAMES: Final = {
    "rocksdb": "RocksDB",
    "zookeeper": "ZooKeeper",
    "mariadb": "MariaDB",
    "postgresql": "PostgreSQL",
    "sqlite": "SQLite",
}


def database_of(run: Results) -> dict[str, Any]:
    """The figures of a run on one kind of database."""
    return {
        "command": run.command,
        "began": run.began,
        "minutes": round(run.seconds / 60),
        "counts": run.databases,
        "findings": run.findings,
    }


def section(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The section as lines of Markdown; empty if nothing was measured."""
    kinds = [kind for kind in NAMES if runs.get(kind)]
    if not kinds:
        return []
    killed = {kind: runs[kind]["counts"][f"{kind} killed"] for kind in kinds}
    counts = {kind: runs[kind]["counts"][f"{kind} counts"] for kind in kinds}
    rows = []
    for point in [*FAILPOINTS, MOMENT]:
        of_point = [killed[kind].get(point, 0) for kind in kinds]
        if any(of_point):
            rows.append(f"| `{point}` | {' | '.join(map(str, of_point))} |")
    return [
        "## Other databases",
        "",
        "Writers of one id, one after the other, die at a fail point or at any moment; of those that settle, some die while they "
        "settle, and the next one goes on. RocksDB, which one process has open at a time, is opened again by each. Every 25 kills "
        "a last writer ends by itself: then nothing may be left to recover, and rows, messages and the answers that the writers "
        "got must agree.",
        "",
        "| database | run | date (UTC) | minutes | killed | operations | acknowledged | on both sides | findings |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {NAMES[kind]} | `{runs[kind]['command']}` | {runs[kind]['began']} | {runs[kind]['minutes']} | "
            f"{sum(killed[kind].values()):,} | {counts[kind]['operations']:,} | {counts[kind]['acknowledged']:,} | "
            f"{counts[kind]['present']:,} | {len(runs[kind]['findings'])} |"
            for kind in kinds
        ),
        "",
        f"| point | {' | '.join(NAMES[kind] for kind in kinds)} |",
        f"|---|{'---|' * len(kinds)}",
        *rows,
        "",
    ]
