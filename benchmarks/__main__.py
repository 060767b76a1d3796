"""All figures of ``docs/benchmarks.md``, measured now: ``make bench`` (some minutes)."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks import fairness, known_end, latency, page, settling, spark_memory
from benchmarks.servers import Ground, machine, servers

PARTS = ("latency", "known_end", "fairness", "settling", "memory")


def main() -> None:
    """Measure what is asked for, keep the figures, and write the page from all that are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    arguments = parser.parse_args()
    wanted = set(arguments.only or PARTS)
    figures = page.known()
    figures["machine"] = machine()
    measures: dict[str, Callable[[Ground], object]] = {
        "latency": latency.run,
        "known_end": known_end.run,
        "fairness": fairness.run,
        "settling": settling.run,
        "memory": lambda ground: spark_memory.measure(ground, (1, 10)),
    }
    with servers() as ground:
        for name, measure in measures.items():
            if name in wanted:
                print(f"{name} ...", flush=True)
                figures[name] = measured = measure(ground)
                print(measured, flush=True)
                # After each: what took minutes to measure is not lost to what comes after it.
                page.keep(figures)
    print(f"written: {page.PAGE.name}", flush=True)


if __name__ == "__main__":
    main()
