"""The reason to use this library: other ways to write to both sides, killed at each of their steps. ``make reason``."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

from sqlalchemy import create_engine, select

from controls.dying import Death, Job, plan, work
from controls.reason_page import render
from controls.running import Servers, servers
from controls.ways import METADATA, OPERATIONS, WAYS
from dualwrite.migrations import upgrade
from dualwrite.testing import Journal, read_committed
from dualwrite.testing.checker import Kind, Place, compare

RESULTS: Final = Path(__file__).parent / "reason.json"
PAGE: Final = Path(__file__).parents[3] / "docs" / "why.md"
TIMEOUT_S: Final = 120.0


def suffer(way: str, deaths: list[Death], given: Servers, directory: Path) -> dict[str, dict[str, int]]:
    """Run one way through all its deaths, and compare both sides.

    Returns:
        By step: how many ``runs``, and how many of them ``lost`` something, have it ``twice``, or ``torn``.
    """
    name = f"reason_{secrets.token_hex(6)}"
    url = given.postgres.create_database(name)
    topic = given.kafka.create_topic(name, 2)
    engine = create_engine(url)
    with engine.connect() as connection:
        upgrade(connection)
    METADATA.create_all(engine)
    journal = directory / f"{name}.journal"
    # With the library's default a producer is discarded after a call of 0.8 s: on a busy machine, too often.
    kafka = {**given.kafka.client_config(), "retry.backoff.ms": 5000, "retry.backoff.max.ms": 5000}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["controls.dying"])
    before = None
    for death in [*deaths, None]:
        process = context.Process(
            target=work, args=(Job(way, kafka, url, topic, str(journal), before, death),), daemon=True
        )
        process.start()
        process.join(TIMEOUT_S)
        expected = -signal.SIGKILL if death else 0
        if process.exitcode != expected:
            process.kill()
            raise AssertionError(f"{way}, {death}: the process ended with {process.exitcode}, not with {expected}")
        before = death.run if death else None
    with engine.connect() as connection:
        rows = list(connection.execute(select(OPERATIONS.c.id)).scalars())
    engine.dispose()
    messages = [
        Place(topic, record.partition, record.offset, (record.value or b"").decode())
        for record in read_committed(given.kafka.client_config(), topic, timeout_s=TIMEOUT_S)
    ]
    found = compare(Journal.read(journal), rows, messages, messages_per_operation=2)
    given.postgres.drop_database(name)
    return _count(deaths, [(finding.kind, finding.subject) for finding in found], messages)


def _count(deaths: list[Death], found: list[tuple[Kind, str]], messages: list[Place]) -> dict[str, dict[str, int]]:
    seen: defaultdict[int, set[str]] = defaultdict(set)
    partitions = Counter((place.operation, place.partition) for place in messages)
    for kind, operation in found:
        counts = {partitions[operation, partition] for partition in (0, 1)}
        # In one partition and not, or not as often, in the other: half of it.
        word = "torn" if len(counts) > 1 else {Kind.TWICE: "twice"}.get(kind, "lost")
        seen[int(operation.partition("-")[0])].add(word)
    by_step: dict[str, dict[str, int]] = {}
    for death in deaths:
        counted = by_step.setdefault(death.step, {"runs": 0, "lost": 0, "twice": 0, "torn": 0})
        counted["runs"] += 1
        for word in seen[death.run]:
            counted[word] += 1
    return by_step


def main() -> int:
    """Kill each way, keep the counts, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=25, help="for each step of each way (25)")
    parser.add_argument("--seed", type=int, default=1, help="draws the plan (1)")
    parser.add_argument("--way", choices=WAYS, action="append", help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to keep the counts")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.results.read_text("utf-8")) if options.results.exists() else {}
    with servers() as given, tempfile.TemporaryDirectory() as directory:
        for way in options.way or WAYS:
            counts = suffer(way, plan(way, options.runs, options.seed), given, Path(directory))
            known[way] = {"runs": options.runs, "seed": options.seed, "steps": counts}
            options.results.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
            total = {word: sum(step[word] for step in counts.values()) for word in ("runs", "lost", "twice", "torn")}
            print(f"{way}: {total}", flush=True)
    if options.results == RESULTS:
        PAGE.write_text(render(known), "utf-8")
    return (
        1
        if any(step[word] for step in known["dualwrite"]["steps"].values() for word in ("lost", "twice", "torn"))
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
