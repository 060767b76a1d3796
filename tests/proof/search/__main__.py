"""The whole search: every planted mistake, then every configuration; keeps what it finds and writes the page."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import resource
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from search.batches.configurations import BATCHES
from search.batches.mistakes import BATCH_MISTAKES
from search.batches.world import BatchWorld
from search.configurations import CONFIGURATIONS
from search.explore import Found, explore
from search.levels import explore_levels
from search.mistakes import MISTAKES
from search.page import FIGURES, PAGE, render
from search.waiting.configurations import WAITING
from search.waiting.mistakes import WAITING_MISTAKES
from search.waiting.world import World as WaitingWorld
from search.world import World


def main() -> int:
    """Search, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="only these configurations or mistakes")
    parser.add_argument("--minutes", type=float, default=60, help="stop the last one then, unfinished (default: 60)")
    parser.add_argument("--list", action="store_true", help="list what there is")
    arguments = parser.parse_args()
    every = {**MISTAKES, **BATCH_MISTAKES, **WAITING_MISTAKES, **BATCHES, **WAITING, **CONFIGURATIONS}
    if unknown := set(arguments.names) - every.keys():
        parser.error(f"neither a configuration nor a mistake: {', '.join(sorted(unknown))}")
    if arguments.list:
        for name, one in every.items():
            print(f"{name}: {one.sentence}")
        return 0
    logging.disable(logging.ERROR)  # the product's words about losses, by the million
    until = time.monotonic() + arguments.minutes * 60
    faults = 0
    if not arguments.names:
        FIGURES.unlink(missing_ok=True)  # the whole search keeps nothing of former ones
    for name in arguments.names or every:
        kind, found, is_fault, more = search(name, until - time.monotonic())
        faults += is_fault
        keep(kind, name, found, **more)
        end = found.wrong or ("nothing wrong" if found.whole else "not finished")
        print(f"{name}: {found.states:,} states, {found.seconds:,.1f} s: {end}", flush=True)
    return 1 if faults else 0


def search(name: str, left_s: float) -> tuple[str, Found, bool, dict[str, Any]]:
    """Search one. Returns its kind, what was found, whether that is not what should be, and what else to keep."""
    if name in MISTAKES:
        found = explore(MISTAKES[name].world(), longest_s=left_s)
        return "mistakes", found, bool(found.wrong) is not MISTAKES[name].caught, {}
    if name in BATCH_MISTAKES:
        found = explore_batch(BATCH_MISTAKES[name].world(), left_s)
        return "batch_mistakes", found, not found.wrong, {}
    if name in WAITING_MISTAKES:
        found = explore(WAITING_MISTAKES[name].world(), longest_s=left_s)
        return "waiting_mistakes", found, not found.wrong, {}
    if name in BATCHES:
        found = explore_batch(BatchWorld(BATCHES[name].bounds), left_s)
        return "batches", found, bool(found.wrong), {"peak_mib": peak_mib()}
    if name in WAITING:
        found = explore(WaitingWorld(WAITING[name].bounds), longest_s=left_s)
        return "waiting", found, bool(found.wrong), {"peak_mib": peak_mib()}
    bounds, compared = CONFIGURATIONS[name].bounds, CONFIGURATIONS[name].compared
    found = explore_levels(World(bounds), longest_s=left_s, on_level=told)
    if is_fault := bool(found.wrong):
        found = explore(World(bounds))  # once more, keeping the ways, as far as the fault
    entire = asdict(explore_levels(World(bounds, entire=True), on_level=told)) if compared else None
    return "configurations", found, is_fault, {"peak_mib": peak_mib(), "entire": entire}


def explore_batch(world: BatchWorld, longest_s: float) -> Found:
    """Go through all states of a batch."""
    try:
        return explore(world, longest_s=longest_s)
    finally:
        world.close()


def told(found: Found, waiting: int) -> None:
    """Say how far it is."""
    far = f"{found.depth} steps: {found.states:,} states, {waiting:,} new, {found.seconds:,.0f} s"
    print(f"  {far}, {peak_mib():,} MiB", file=sys.stderr, flush=True)


def peak_mib() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def keep(kind: str, name: str, found: Found, **more: Any) -> None:
    """Add it to what is known, and write the page again."""
    seen: dict[str, Any] = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    kept = asdict(found) | {"seconds": round(found.seconds, 1), "date": today} | more
    seen.setdefault(kind, {})[name] = kept
    seen["machine"] = (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )
    FIGURES.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n", "utf-8")
    PAGE.write_text(render(seen), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
