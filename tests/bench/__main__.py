"""All figures of ``docs/benchmarks.md``, measured now: ``make bench`` (about half an hour on two cores)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from bench import latency, page, settling, spark_batch
from bench.servers import Ground, machine, servers

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def main() -> None:
    """Measure what is asked for, keep the figures, and write the page from all that are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["latency", "settling", "spark", "memory"], action="append")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of the Spark comparison")
    arguments = parser.parse_args()
    wanted = set(arguments.only or ["latency", "settling", "spark", "memory"])
    store = Path(__file__).parent / "figures.json"
    figures = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    figures["machine"] = machine()
    measures: dict[str, Callable[[Ground], object]] = {
        "latency": latency.run,
        "settling": settling.run,
        "spark": lambda ground: spark_batch.speed(ground, arguments.rounds, 10),
        "memory": lambda ground: spark_batch.memory(ground, (1, 10)),
    }
    with servers() as ground:
        for name, measure in measures.items():
            if name in wanted:
                print(f"{name} ...", flush=True)
                figures[name] = measure(ground)
                # After each: what took minutes to measure is not lost to what comes after it.
                store.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
                PAGE.write_text(page.render(figures), encoding="utf-8")
    print(f"written: {PAGE.name}", flush=True)


if __name__ == "__main__":
    main()
