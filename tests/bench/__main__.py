"""All figures of ``docs/benchmarks.md``, measured now: ``make bench`` (about half an hour on two cores)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench import latency, page, settling, spark_batch
from bench.servers import machine, servers

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
    with servers() as ground:
        if "latency" in wanted:
            print("latency ...", flush=True)
            figures["latency"] = latency.run(ground)
        if "settling" in wanted:
            print("settling ...", flush=True)
            figures["settling"] = settling.run(ground)
        if "spark" in wanted:
            print("spark ...", flush=True)
            figures["spark"] = spark_batch.speed(ground, arguments.rounds, 10)
        if "memory" in wanted:
            print("memory ...", flush=True)
            figures["memory"] = spark_batch.memory(ground, (1, 10))
    store.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page.render(figures), encoding="utf-8")
    print(f"written: {PAGE.name}", flush=True)


if __name__ == "__main__":
    main()
