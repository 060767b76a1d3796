"""The section of the report about kinds of databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from chaos.results import Results
from chaos.tables import table

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


def section(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The section as lines of Markdown; empty if nothing was measured."""
    kinds = [kind for kind in NAMES if runs.get(kind)]
    if not kinds:
        return []
    killed = {kind: _added(runs[kind], f"{kind} killed") for kind in kinds}
    return [
        "## Other databases",
        "",
        "Writers of one id, one after the other, die at a fail point or at any moment; of those that settle, some die while they "
        "settle, and the next one goes on. Later runs also pause some, and let them go on when the next one has ended. RocksDB, "
        "which one process has open at a time, is opened again by each. Every 25 kills "
        "a last writer ends by itself: then nothing may be left to recover, and rows, messages and the answers that the writers "
        "got must agree. Of a run that went on later, the table shows its last command.",
        "",
        "| database | run | date (UTC) | minutes | killed | zombies | operations | acknowledged | on both sides | findings |",
        f"|---|---|---|{'---|' * 7}",
        *(_row(kind, run) for kind in kinds for run in runs[kind]),
        "",
        "What this does not find: with `DATABASE=zookeeper MISTAKE=zookeeper_version_not_required`, 101 kills and 15 zombies "
        "showed nothing wrong. `test_a_decision_on_a_key_that_has_changed_writes_nothing` in `tests/integration/test_zookeeper_keys.py` finds it.",
        "",
        *table([NAMES[kind] for kind in kinds], [killed[kind] for kind in kinds]),
        f"| all | {' | '.join(f'{killed[kind].total():,}' for kind in kinds)} |",
        "",
    ]


def _added(runs: Iterable[Mapping[str, Any]], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run["counts"].get(name, {}))
    return total


def _row(kind: str, run: Mapping[str, Any]) -> str:
    counts = run["counts"][f"{kind} counts"]
    killed, zombies = (_added([run], f"{kind} {what}").total() for what in ("killed", "zombies"))
    return (
        f"| {NAMES[kind]} | `{run['command']}` | {run['began']} | {run['minutes']} | {killed:,} | {zombies:,} | "
        f"{counts['operations']:,} | {counts['acknowledged']:,} | {counts['present']:,} | {len(run['findings'])} |"
    )
