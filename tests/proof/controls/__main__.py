"""Plants each protocol mistake and runs the checks that must catch it: ``make controls`` (some forty minutes on two busy cores)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from harness.mistakes import MISTAKES, Check

from controls.page import render
from controls.running import Servers, is_caught, run, servers

RESULTS = Path(__file__).parent / "results.json"
SEARCHED = Path(__file__).parents[1] / "search" / "figures.json"
MODELLED = Path(__file__).parents[1] / "model" / "mistakes.json"
PAGE = Path(__file__).parents[3] / "docs" / "proof-mistakes.md"


def main() -> int:
    """Try the mistakes, keep what was seen, and write the page from all that is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="mistake", help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to keep what was seen")
    parser.add_argument("--no-baseline", action="store_true", help="do not show first that the checks pass without")
    parser.add_argument("--list", action="store_true", help="list the mistakes")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - MISTAKES.keys():
        parser.error(f"not a mistake: {', '.join(sorted(unknown))}")
    wanted = [MISTAKES[name] for name in arguments.names or MISTAKES]
    if arguments.list:
        for one in wanted:
            print(f"{one.name}: {one.sentence}")
        return 0
    seen: dict[str, Any] = json.loads(arguments.results.read_text("utf-8")) if arguments.results.exists() else {}
    holes = []
    with servers() as given:
        if not arguments.no_baseline:
            holes += _baseline(given, {check.test for one in wanted for check in one.checks})
        for one in wanted:
            caught = [_try(given, one.name, check) for check in one.checks]
            seen.setdefault(one.name, {})["scenario"] = caught
            if not any(item["caught"] for item in caught):
                holes.append(f"{one.name}: not caught")
            arguments.results.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n", "utf-8")
    if arguments.results == RESULTS:
        write_page()
    for hole in holes:
        print(f"HOLE  {hole}", flush=True)
    return 1 if holes else 0


def write_page() -> None:
    """Write the page from all that is known."""
    searched, modelled = (json.loads(path.read_text("utf-8")) for path in (SEARCHED, MODELLED))
    seen = json.loads(RESULTS.read_text("utf-8"))
    found = {**searched["waiting_mistakes"], **searched["mistakes"]}
    PAGE.write_text(render(seen, found, modelled), "utf-8")


def _baseline(given: Servers, tests: set[str]) -> list[str]:
    """The checks that fail without any mistake, too: they show nothing."""
    faults = []
    for test in sorted(tests):
        ended = run(test, given)
        print(f"{ended.word:8} {ended.seconds:5.1f} s  without a mistake: {test}", flush=True)
        if ended.word != "passed":
            faults.append(f"{test} on the product itself: {ended.word} {ended.symptom}")
    return faults


def _try(given: Servers, name: str, check: Check) -> dict[str, Any]:
    ended = run(check.test, given, name)
    caught = is_caught(ended, check)
    first = next(iter(ended.symptom.splitlines()), "")
    print(f"{'caught' if caught else ended.word.upper():8} {ended.seconds:5.1f} s  {name}: {first[:150]}", flush=True)
    if not caught and ended.symptom:
        print(ended.symptom, flush=True)
    return {"test": check.test, "caught": caught, "symptom": first[:300], "seconds": round(ended.seconds, 1)}


if __name__ == "__main__":
    sys.exit(main())
