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

COLUMNS = """\
The first column of results names the test that must fail, and fails: on real servers, unless it says "simulated". The second
tells after how many states the [exhaustive search](proof-search.md) comes to something wrong ("-": it has no such mistake), the
third after how many [random schedules](proof-model.md), of 5,000 at most, something is found ("-": not tried). "Not run" is a
mistake whose tests have not run with it yet. Schedules find
nothing of a mistake whose place is not in what is simulated (SQL, the wire, Spark), or that takes an order of steps which
chance rarely draws.
"""


TRAPS = """\
## What outboxes and relays are known to get wrong

Where this one has a line that could be wrong in that way, a mistake is planted there:

| trap | planted as |
|---|---|
| rows count as sent before the broker has them | `delivery_failures_ignored`: sends are dual writes, and have no flush of their own |
| a relay stops for good after an exception, or sends only after a restart | `relay_ends_with_an_error` |
| retention deletes what has waited, by its old timestamp | `sent_with_the_time_of_its_block` |
| a lease is shorter than a send | no lease: `sender_without_a_fence`, `deletes_not_counted` |
| ids are taken for the order of commits | `looks_only_above_what_was_sent`, `floor_without_a_proof` |
| half a batch is sent again, behind the other half | a send is one transaction: `sender_goes_on_unsettled` |
| direct sends overtake the backlog | `sends_although_messages_wait` and the other mistakes of the mode |
| an open breaker counts as a failed delivery | no row has a count of tries, so there is no such line |
| an alert watches the backlog, and not what was moved aside | not planted: `dualwrite outbox list` counts both, and an alert is the user's |
| what waits fills the disk | not planted: `test_a_full_outbox_refuses_blocks_and_is_a_problem_until_it_is_sent` |
"""


def render(
    seen: Mapping[str, Mapping[str, Any]],
    searched: Mapping[str, Mapping[str, Any]],
    modelled: Mapping[str, Mapping[str, Any]],
) -> str:
    """The page as Markdown.

    Args:
        seen: By mistake, what the tests on real servers came to.
        searched: By mistake, what the exhaustive search came to.
        modelled: By mistake, what the random schedules came to.
    """
    caught = [name for name in MISTAKES if _caught(seen.get(name))]
    searchable = [name for name in MISTAKES if name in searched]
    by_search = [name for name in searchable if searched[name]["wrong"]]
    on_real = [
        name for name in caught if any(_is_real(result) for result in seen[name]["scenario"] if result["caught"])
    ]
    by_model = [name for name in MISTAKES if name in modelled and modelled[name]["what"]]
    lines = [
        HEAD,
        f"{len(caught)} of {len(MISTAKES)} mistakes are caught, {len(on_real)} of them on real servers. Of the {len(searchable)} that can be planted "
        f"into the search, it catches {len(by_search)}. Random schedules catch {len(by_model)}.",
        "",
        COLUMNS,
        "| mistake | test | search | schedules | its first symptom |",
        "|---|---|---|---|---|",
        *(_row(name, seen.get(name, {}), searched.get(name), modelled.get(name)) for name in sorted(MISTAKES)),
        "",
        TRAPS,
    ]
    return "\n".join(lines)


def _caught(results: Mapping[str, Any] | None) -> bool:
    return bool(results) and any(result["caught"] for result in results["scenario"])


def _is_real(result: Mapping[str, Any]) -> bool:
    return not result["test"].startswith(("unit/", "proof/model/"))


def _row(
    name: str, seen: Mapping[str, Any], searched: Mapping[str, Any] | None, modelled: Mapping[str, Any] | None
) -> str:
    caught = [result for result in seen.get("scenario", []) if result["caught"]]
    by = "<br>".join(_name(result["test"]) + ("" if _is_real(result) else " (simulated)") for result in caught)
    by = by or ("**nothing**" if "scenario" in seen else "not run")
    by_search = "-" if searched is None else f"{searched['states']:,}" if searched["wrong"] else "nothing"
    by_model = "-" if modelled is None else f"{modelled['schedules']:,}" if modelled["what"] else "nothing"
    symptom = _escaped(caught[0]["symptom"]) if caught else ""
    return f"| `{name}`<br>{MISTAKES[name].sentence} | {by} | {by_search} | {by_model} | {symptom} |"


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
