"""The page about planted mistakes, made from what was seen, so that no result is typed by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.mistakes import MISTAKES

HEAD = """\
# Planted mistakes

A check that has never failed proves nothing. So the product's rules are broken one by one, in the running product and from
the test tree, and the checks have to notice. There is no switch for any of this in the library.

Written by `make controls` from what it has seen; `DUALWRITE_MISTAKE=name python -m pytest tests/...` plants a mistake in any
other test by hand.
"""

WAYS = {"scenario": "test on real servers", "model": "model", "search": "exhaustive search", "chaos": "random kills"}


def render(seen: Mapping[str, Mapping[str, Any]]) -> str:
    """The page as Markdown.

    Args:
        seen: By mistake and way, what came of it.
    """
    ways = [way for way in WAYS if any(way in results for results in seen.values())]
    caught = [name for name in MISTAKES if name in seen and any(_caught(seen[name].get(way)) for way in ways)]
    lines = [
        HEAD,
        f"{len(caught)} of {len(MISTAKES)} mistakes are caught.",
        "",
        "| mistake | caught by | first symptom |",
        "|---|---|---|",
    ]
    lines += [_row(name, seen.get(name, {}), ways) for name in sorted(MISTAKES)]
    return "\n".join([*lines, ""])


def _caught(results: Any) -> bool:
    return bool(results) and any(result["caught"] for result in results)


def _row(name: str, results: Mapping[str, Any], ways: list[str]) -> str:
    by, symptoms = [], []
    for way in ways:
        for result in results.get(way, []):
            if result["caught"]:
                by.append(f"{WAYS[way]}: {_name(result['test'])}")
                symptoms.append(_escaped(result["symptom"]))
    what = f"`{name}`<br>{MISTAKES[name].sentence}"
    return f"| {what} | {'<br>'.join(by) or '**nothing**'} | {symptoms[0] if symptoms else ''} |"


def _name(test: str) -> str:
    """A scenario by its file; any other test by its function."""
    scenario = re.fullmatch(r"scenarios/.*\[(\w+)\]", test)
    if scenario:
        return f"`{scenario[1]}.txt`"
    return f"`{test.rpartition('::')[2].partition('[')[0]}`"


def _escaped(text: str) -> str:
    return (
        re.sub(r"(?<=dualwrite-)[0-9a-f]{12}", "...", text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    )
