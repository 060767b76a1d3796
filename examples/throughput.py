"""Draw how many rows per second Spark sinks have written, from the ledger alone: batches and streams, of any age.

    python examples/throughput.py --url postgresql+psycopg://db/air --sink flights --out throughput.svg

A batch counts from its start until the database had decided on all of it; concurrent batches add up. So the area under a
line is the number of rows. Batches for which the ledger has no start time are left out.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from line_chart import Points, line_chart, linear
from sqlalchemy import create_engine

from dualwrite.sinks import Batch, read_batches

SHORTEST_S = 0.001


def timed(batches: Sequence[Batch]) -> list[tuple[Batch, datetime, float]]:
    """The decided batches with a start time, each with that time and its duration in seconds."""
    return [
        (batch, batch.started_at, max(batch.decided_after_s, SHORTEST_S))
        for batch in batches
        if batch.started_at is not None and batch.decided_after_s is not None
    ]


def rates(batches: Sequence[Batch], begun: datetime) -> Points:
    """Rows per second over the seconds since ``begun``: two points where the rate changes."""
    changes: dict[float, float] = defaultdict(float)
    for batch, started_at, took_s in timed(batches):
        start_s = (started_at - begun).total_seconds()
        changes[start_s] += batch.row_count / took_s
        changes[start_s + took_s] -= batch.row_count / took_s
    points, rate = [(0.0, 0.0)], 0.0
    for at_s in sorted(changes):
        points.append((at_s, rate))
        rate = max(0.0, rate + changes[at_s])
        points.append((at_s, rate))
    return points


def picture(batches: Sequence[Batch]) -> str:
    """The picture as SVG, one line for each sink.

    Raises:
        SystemExit: There is nothing to draw.
    """
    drawn = timed(batches)
    if not drawn:
        raise SystemExit("no decided batch has a start time in the ledger")
    begun = min(started_at for _, started_at, _ in drawn)
    sinks = sorted({batch.sink for batch, _, _ in drawn})
    series = {sink: rates([batch for batch, _, _ in drawn if batch.sink == sink], begun) for sink in sinks}
    return line_chart(
        series,
        linear([at_s for points in series.values() for at_s, _ in points], "{:g} s".format),
        linear([rate for points in series.values() for _, rate in points]),
        title=f"rows/s since {begun:%Y-%m-%d %H:%M:%S} UTC: {sum(batch.row_count for batch, _, _ in drawn):,} rows "
        f"in {len(drawn):,} batches",
    )


def main() -> None:
    """Read the ledger and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    url = os.environ.get("DUALWRITE_DATABASE_URL")
    parser.add_argument("--url", default=url, required=url is None, help="or DUALWRITE_DATABASE_URL")
    parser.add_argument("--schema", help="schema of the library's tables")
    parser.add_argument("--sink", help="only this sink")
    parser.add_argument("--last", type=int, help="only this number of batches, the newest")
    parser.add_argument("--out", type=Path, default=Path("throughput.svg"))
    arguments = parser.parse_args()
    engine = create_engine(arguments.url)
    found = read_batches(engine, sink=arguments.sink, limit=arguments.last, schema=arguments.schema)
    engine.dispose()
    arguments.out.write_text(picture(found), encoding="utf-8")
    print(f"{len(timed(found))} batches drawn into {arguments.out.name}")


if __name__ == "__main__":
    main()
