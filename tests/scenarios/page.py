"""The page of all scenarios, made from the files: ``python -m scenarios.page`` (in the directory of the tests) writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from scenarios.language import ENGINES, Scenario, load

PAGE: Final = Path(__file__).parents[2] / "docs" / "proof-scenarios.md"

HEAD: Final = """\
# Scenarios

Hazards of systems that write to two places, step by step, and what both sides must show in the end. These are files of
`tests/scenarios`, performed as they stand on real servers: processes are stopped by SIGSTOP and killed by SIGKILL,
requests are held, lost and repeated by proxies, operators act through the brokers' own requests.

`A`, `B`, `R` are processes that share one transactional id. `m1` is a dual write: one row, and one message to each of two
partitions. "up to write.decided" means that the process stands at that [fail point](testing.md#fail-points), paused; "A goes
on: Fenced" that its call ends with that error. *Natively* is what differs with the native [engine](engines.md).

`make scenarios` performs {both} of them through both engines, {librdkafka} through librdkafka alone, {native} through the
native engine alone.
"""


def render(scenarios: Iterable[Scenario]) -> str:
    """The page as Markdown."""
    scenarios = list(scenarios)
    counts = Counter(scenario.engines for scenario in scenarios)
    parts = [HEAD.format(both=counts[ENGINES], librdkafka=counts["librdkafka",], native=counts["native",])]
    for scenario in scenarios:
        statements = "\n".join(statement.text for statement in scenario.statements)
        hazard = scenario.head["hazard"]
        differs = f"\n\n*Natively:* {scenario.head['natively']}" if "natively" in scenario.head else ""
        only = "" if scenario.engines == ENGINES else f" (*{scenario.engines[0]} only*)"
        text = f"{hazard[0].upper()}{hazard[1:]}{only}{differs}"
        parts.append(f"## {scenario.title}\n\n{text}\n\n```text\n{statements}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(load(Path(__file__).parent)), encoding="utf-8")
