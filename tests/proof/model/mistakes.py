"""How many random schedules find each planted mistake: ``cd tests/proof && python -m model.mistakes`` (some ten minutes).

Keeps what came of it in a file, from which ``make controls`` makes its page.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness.mistakes import MISTAKES, consumer, grouping, handing_over, leases, native, native_engine

from model.chance import (
    CONSUMERS_FROM,
    FLEETS_FROM,
    GROUPS_FROM,
    HANDED_OVER_FROM,
    NATIVE_FROM,
    NATIVE_HANDED_OVER_FROM,
)
from model.run import chunks

_FROM = {
    consumer.__name__: CONSUMERS_FROM,
    grouping.__name__: GROUPS_FROM,
    leases.__name__: FLEETS_FROM,
    handing_over.__name__: HANDED_OVER_FROM,
    native.__name__: NATIVE_FROM,
    native_engine.__name__: NATIVE_FROM,
    native.native_completed_on_the_coordinators_word.__name__: NATIVE_HANDED_OVER_FROM,
}
RESULTS = Path(__file__).with_name("mistakes.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model.mistakes", description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=5_000, help="how many at most for each (5000)")
    parser.add_argument("names", nargs="*", metavar="mistake", help="only these")
    options = parser.parse_args()
    if unknown := set(options.names) - MISTAKES.keys():
        parser.error(f"not a mistake: {', '.join(sorted(unknown))}")
    seen = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for name in options.names or MISTAKES:
        seen[name] = found = find(name, options.schedules)
        print(f"{name}: {found['what'] or 'nothing'}, {found['schedules']} schedules", flush=True)
        RESULTS.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n", "utf-8")
    return 0


def find(name: str, schedules: int) -> dict[str, object]:
    """Run schedules of a mistaken product until one finds something; of workers and drivers, natively, or of group commit, where it is theirs.

    Returns:
        How many were run, and what the last of them found, if anything.
    """
    done = 0
    first = _FROM.get(name, _FROM.get(MISTAKES[name].plant.__module__, 0))
    for counts in chunks(first, schedules, name, 1):
        done += counts.schedules
        if counts.findings:
            return {"schedules": done, "what": counts.findings[0]["what"]}
    return {"schedules": done, "what": None}


if __name__ == "__main__":
    sys.exit(main())
