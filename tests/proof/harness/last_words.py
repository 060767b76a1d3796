"""The last paragraph of `make test`: which tests it left out and why, and which ones passed only when they ran again alone.

pytest's own last lines scroll away, and a test that did not run looks like one that passed. Each run of pytest notes its outcome
(``conftest.py`` calls `note`); ``python -m harness.last_words FILE`` prints them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "DUALWRITE_LAST_WORDS"
"""The environment variable that names the file of the notes. Without it nothing is noted."""


@dataclass(frozen=True)
class Run:
    """The outcome of one run of pytest.

    Args:
        passed: How many tests passed.
        failed: The node ids of those that failed, or whose fixtures did.
        left_out: How many were skipped, by pytest's reason.
        thorough: How many `--thorough` would have run besides.
    """

    passed: int
    failed: list[str] = field(default_factory=list)
    left_out: Mapping[str, int] = field(default_factory=dict)
    thorough: int = 0


def note(run: Run, notes: Path) -> None:
    """Add a run to the notes in a file."""
    notes.write_text(json.dumps([*noted(notes), vars(run)]), encoding="utf-8")


def noted(notes: Path) -> list[dict[str, Any]]:
    """The runs in a file, as arguments of `Run`."""
    return json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else []


def reason(report: Any) -> str:
    """Why pytest left a test out, from its report."""
    _, _, told = report.longrepr
    return told.removeprefix("Skipped: ")


def told(runs: Iterable[Run]) -> str:
    """The paragraph. The first run is that of all tests; each later one repeats, alone, what had failed before."""
    first, *again = runs
    left_out = Counter(first.left_out)
    sentences = [f"{first.passed} tests passed, {len(first.failed)} failed, {left_out.total()} were left out."]
    sentences += [f"{count}: {reason}." for reason, count in left_out.most_common()]
    if first.thorough:
        sentences.append(f"{first.thorough} repetitions run with THOROUGH=1.")
    if again:
        still = set(again[-1].failed)
        passed = [name for name in first.failed if name not in still]
        sentences.append(
            f"Alone, {len(passed)} of the {len(first.failed)} passed; each is a test, or a product, to fix:"
        )
        sentences.append(", ".join(passed) + ".")
    return " ".join(sentences)


if __name__ == "__main__":
    runs = [Run(**run) for run in noted(Path(sys.argv[1]))]
    sys.stdout.write((told(runs) if runs else "The tests did not run to their end.") + "\n")
