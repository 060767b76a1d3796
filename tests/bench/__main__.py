"""All figures of ``docs/benchmarks.md``, measured now: ``make bench`` (some minutes)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from bench import latency, page, settling, spark_memory
from bench.servers import Ground, machine, servers

PARTS = ("latency", "settling", "memory")
FIGURES = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def main() -> None:
    """Measure what is asked for, keep the figures, and write the page from all that are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    arguments = parser.parse_args()
    wanted = set(arguments.only or PARTS)
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    figures["machine"] = machine()
    measures: dict[str, Callable[[Ground], object]] = {
        "latency": latency.run,
        "settling": settling.run,
        "memory": lambda ground: spark_memory.measure(ground, (1, 10)),
    }
    with servers() as ground:
        for name, measure in measures.items():
            if name in wanted:
                print(f"{name} ...", flush=True)
                figures[name] = measure(ground)
                # After each: what took minutes to measure is not lost to what comes after it.
                FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
                PAGE.write_text(page.render(figures), encoding="utf-8")
    print(f"written: {PAGE.name}", flush=True)


if __name__ == "__main__":
    main()
