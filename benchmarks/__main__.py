"""All figures of ``docs/benchmarks.md``, measured now: ``make bench`` (half an hour, on a machine that does nothing else).

Each part is kept as soon as it is measured. With ``--small`` everything runs once, on little data, into a directory of its own:
it shows that the benchmarks work, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import (
    async_tasks,
    calls,
    consumer,
    first,
    group,
    killed,
    known_end,
    latency,
    mariadb_bulk,
    network,
    outage,
    outbox,
    page,
    records,
    serving,
    settled,
    settling,
    sizes,
    spark_memory,
    state,
    steps,
    telemetry,
    threads,
    units,
    web,
)
from benchmarks.servers import kafka_version, machine, servers

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """One part of the page.

    Attributes:
        measure: Called with the servers.
        small: What it is called with, too, to run once on little data.
    """

    measure: Callable[..., object]
    small: Mapping[str, Any] = field(default_factory=dict)


PARTS = {
    "latency": Part(latency.run, {"operations": 10, "visible": 10, "warm_up": 2}),
    "processor": Part(calls.processor, {"rounds": 1, "operations": 10, "warm_up": 5}),
    "calls": Part(calls.run, {"operations": 20, "warm_up": 10}),
    "steps": Part(steps.run, {"operations": 10, "warm_up": 2}),
    "sizes": Part(sizes.run, {"operations": 5, "warm_up": 1}),
    "threads": Part(threads.run, {"rounds": 1, "slice_s": 1.0}),
    "async": Part(async_tasks.run, {"tasks": (1, 20), "rounds": 1, "slice_s": 1.0}),
    "sampled": Part(async_tasks.sampled, {"tasks": 20, "seconds": 2.0, "warm_up_s": 1.0}),
    "web": Part(web.run, {"rounds": 1, "requests": 5, "warm_up": 2}),
    "group": Part(group.run, {"callers": (1, 20), "rounds": 1, "slice_s": 1.0, "inserts": 50}),
    "consumer": Part(consumer.run, {"messages": 3000, "rounds": 1, "seconds": 3.0, "per_second": 50}),
    "units": Part(units.run, {"records": 2000, "rounds": 1, "large": 5000}),
    "network": Part(network.run, {"operations": 5, "warm_up": 2, "counted": 10}),
    "known_end": Part(known_end.run, {"operations": 20, "rounds": 1, "seconds": 0.3}),
    "killed": Part(killed.run, {"rounds": 1}),
    "first": Part(first.run, {"runs": 1}),
    "state": Part(state.run, {"writes": 2000, "sizes": (500,), "rounds": 1, "entries": (1000, 5000), "kills": 1}),
    "mariadb": Part(mariadb_bulk.run, {"rows": 20_000, "rounds": 1}),
    "settling": Part(settling.run, {"ids": 5}),
    "serve": Part(serving.run, {"ids": 20, "to_settle": 10, "others": 2, "looks": 1, "rounds": 1}),
    "settled": Part(settled.run, {"deaths": 2}),
    "records": Part(records.run, {"rows": 20_000, "rounds": 1}),
    "memory": Part(spark_memory.measure, {"millions": (1,)}),
    "outage": Part(outage.run, {"slice_s": 3.0, "slices": 1, "away_s": dict.fromkeys(outage.AWAY, 6.0)}),
    "outbox": Part(
        outbox.run,
        {
            "messages": 2000,
            "sizes": (100,),
            "few": 100,
            "messages_by_few": 500,
            "of_rivals": 0,
            "rounds": 1,
            "small": {"rounds": 1, "operations": 5, "visible": 10, "slices": 1, "slice_s": 1.0},
        },
    ),
    "telemetry": Part(telemetry.run, {"operations": 5, "warm_up": 1, "repetitions": 10}),
}


def main() -> None:
    """Measure what is asked for, keep the figures, and write the page from all that are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--small", action="store_true", help="everything once, on little data, into .cache/bench")
    arguments = parser.parse_args()
    wanted = set(arguments.only or PARTS)
    directory = ROOT / ".cache" / "bench" if arguments.small else ROOT / "docs"
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / page.FIGURES.name if arguments.small else page.FIGURES
    figures = page.known(store)
    figures["machine"], figures["kafka"] = machine(), kafka_version()
    with servers() as ground:
        for name, part in PARTS.items():
            if name in wanted:
                print(f"{name} ...", flush=True)
                begun = time.perf_counter()
                before = figures.get(name)
                figures[name] = measured = part.measure(ground, **(part.small if arguments.small else {}))
                print(f"{name}: {time.perf_counter() - begun:.0f} s: {measured}", flush=True)
                if name == "calls" and before is not None:
                    print("", *calls.changes(before, measured), sep="\n  ", flush=True)
                # After each: what took minutes to measure is not lost to what comes after it.
                page.keep(figures, store, directory / page.PAGE.name)
    print(f"written: {directory.name}/{page.PAGE.name}", flush=True)


if __name__ == "__main__":
    main()
