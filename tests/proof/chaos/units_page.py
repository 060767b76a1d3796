"""The part of the report about writers of units, from the figures that ``make units KEEP=1`` keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos.tables import MOMENT
from dualwrite.failpoints import FAILPOINTS

FIGURES = Path(__file__).with_name("units.json")


def section() -> list[str]:
    """The part of the page; empty if nothing is kept."""
    runs: Mapping[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    if not runs:
        return []
    rows = []
    for point in [*FAILPOINTS, MOMENT]:
        counts = [run["killed"].get(point, 0) for run in runs.values()]
        if any(counts):
            rows.append(f"| `{point}` | {' | '.join(map(str, counts))} |")
    return [
        "## Writers of units",
        "",
        "Writers of [units](units.md) of up to nine records in up to five transactions, one after the other in each of four "
        "partitions; a row commits with the end of each unit. Each is killed at a fail point or at any moment, or stopped there and "
        "resumed once the next one has ended; the next one aborts the unit that it has left. Meanwhile the broker is killed and "
        "PostgreSQL stopped. A reader follows each partition from the beginning. It may show whole units alone; at the end those "
        "whose rows are there, none that its writer has dropped, and all that have ended for their writer.",
        "",
        *(
            f"- `{run['command']}`, {run['began']} (UTC), {run['seconds'] / 60:.0f} minutes, {run['machine']}: "
            f"**{sum(run['killed'].values()):,} writers killed**, {run['counts'].get('zombies', 0)} resumed after the next one; "
            f"{run['counts'].get('broker', 0)} broker kills, {run['counts'].get('database', 0)} stops of PostgreSQL. Of "
            f"{run['counts']['units begun']:,} units {run['counts']['units shown']:,} are shown, each whole and with its row; "
            f"{len(run['findings'])} findings."
            for run in runs.values()
        ),
        "",
        "With a mistake planted (`make units N=60 SEED=3 ENGINE=native MISTAKE=unfinished_unit_not_aborted`), the readers of all "
        "four partitions find a unit that begins inside another one.",
        "",
        f"| point | {' | '.join(runs)} |",
        f"|---|{'---|' * len(runs)}",
        *rows,
        "",
    ]
