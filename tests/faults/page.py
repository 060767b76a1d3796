"""The page of the fault matrix, made from the results: ``python -m faults.page RESULTS.jsonl...``."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from faults.cells import CELLS, COMMIT, KEYS, Fault, Phase

PAGE = Path(__file__).parents[2] / "docs" / "proof-faults.md"
RESULTS = Path(__file__).with_name("results.json")
LATE, THREE = "late EndTxn", "three brokers: "


def summary(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of a run."""
    cells: dict[str, Counter[str]] = {}
    revisions: Counter[str] = Counter()
    told: Counter[str] = Counter()
    brokers: Counter[str] = Counter()
    findings = []
    seconds = 0.0
    for line in lines:
        name = line["case"]
        counts = cells.setdefault(THREE.rstrip(": ") if name.startswith(THREE) else name, Counter())
        counts["cases"] += 1
        counts["struck"] += line["occurred"] if name == LATE else bool(line["occurred"])
        if name.startswith(THREE) and line["occurred"]:
            brokers[name.removeprefix(THREE).partition(" at ")[0]] += 1
        revisions[line["revision"]] += 1
        told.update(line["told"])
        seconds += line["seconds"]
        findings += [f"{name}, seed {line['seed']}: {finding}" for finding in line["findings"]]
    return {
        "cells": {name: dict(counts) for name, counts in sorted(cells.items())},
        "brokers": dict(sorted(brokers.items())),
        "told": dict(sorted(told.items())),
        "revisions": dict(revisions),
        "case_seconds": round(seconds),
        "cores": os.cpu_count(),
        "findings": findings,
    }


def render(found: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    cells = found["cells"]
    of_matrix = [cells.get(str(cell), {}) for cell in CELLS]
    cases = sum(counts.get("cases", 0) for counts in of_matrix)
    struck = sum(counts.get("struck", 0) for counts in of_matrix)
    least = min(counts.get("struck", 0) for counts in of_matrix)
    late = cells.get(LATE, {})
    told = found["told"]
    parts = [
        "# Proof: the fault matrix",
        "",
        "Each kind of request that a dual write sends to Kafka, and PostgreSQL's `COMMIT`, is lost, late, repeated and cut, "
        "before, during and after the decision, by a [proxy](testing.md#proxies) between real clients and real servers. Real "
        "writers in processes of their own do three dual writes and more; some are killed when the fault strikes, or another "
        "owner comes meanwhile. Then everything heals, is settled twice, and both sides are compared: rows with messages in "
        "their order and with the consumer group's offset; what was acknowledged is there, what was aborted is not, nothing "
        "twice, no transaction left open, every call ended in time.",
        "",
        f"**{cases:,} cases, {struck:,} of them with the fault struck; at least {least} seeds in each cell. "
        f"{late.get('struck', 0)} delayed `EndTxn` arrived after the next transaction had begun. "
        f"{len(found['findings'])} findings.**",
        "",
        "```console",
        "$ make faults SEEDS=20 LOG=faults.jsonl           # 20 seeds of each cell: about an hour on two cores",
        "$ cd tests && python -m faults --seeds 1 --first-seed 7 --only 'EndTxn/delay/during'    # one case, with its story",
        "$ cd tests && python -m faults.cluster --cases 30 --log ../brokers.jsonl              # three brokers",
        "$ cd tests && python -m faults.page ../faults.jsonl ../brokers.jsonl                  # this page",
        "```",
        "",
        "## Cases in which the fault struck: before / during / after the decision",
        "",
        "| Request | " + " | ".join(fault.value for fault in Fault) + " |",
        "|---|" + "---|" * len(Fault),
    ]
    for request in KEYS:
        row = [
            " / ".join(str(cells.get(f"{request}/{fault.value}/{phase.value}", {}).get("struck", 0)) for phase in Phase)
            for fault in Fault
        ]
        parts.append(f"| {request} | " + " | ".join(row) + " |")
    commits = [str(cells.get(f"{COMMIT}/{fault.value}/during", {}).get("struck", "-")) for fault in Fault]
    parts += [
        f"| `COMMIT` | {' | '.join(commits)} |",
        "",
        "*Before*: from the opening of the writer until the `COMMIT` of its second dual write is about to be sent. *During*: "
        "that `COMMIT` is sent and its owner has no answer yet; meanwhile another owner claims, settles and writes, and the "
        "fault strikes its requests. *After*: the owner has its answer and goes on, or is killed and another one settles. A "
        "seed chooses which of the requests, how long a delay is, whether the client's connection breaks meanwhile, whether "
        "it is the request or the answer, whether the owner is killed, whether another one comes, messages or offsets or "
        "both. A `COMMIT` cannot be sent twice: a session of PostgreSQL is one stream. A duplicate comes right behind the "
        "first copy; a copy that comes late because the client asked again is a *delay* whose connection breaks.",
        "",
        "What the owners were told: "
        + ", ".join(f"{word} {told[word]:,}" for word in TOLD if word in told)
        + f". {told.get('killed', 0):,} of them were killed by SIGKILL.",
        "",
        "## EndTxn that comes late",
        "",
        f"{late.get('cases', 0)} series of dual writes. After each decision the `EndTxn` is held; the client asks again and goes "
        "on, or is killed and another owner settles. When the next transaction has messages in the broker, the held one is let "
        f"go ([KAFKA-17754](safety.md)): {late.get('struck', 0)} times, in a third of them into a transaction that then aborts. "
        "With the rule against it taken away (`--mistake`), the same series find half of a transaction committed.",
        "",
    ]
    if found["brokers"]:
        parts += [
            "## Three brokers",
            "",
            "Three brokers, three replicas, two in sync. What coordinates the transaction or leads one of its partitions is "
            "killed, suspended until it is deposed, or moved, at a point of a dual write or of settling. *Stale*: a settler "
            "hears the answer of a leader only when another leader, another owner and another transaction have followed. "
            "*Without replicas*: each partition is on one broker alone, so that it has no leader once its suspended broker's "
            "session has ended; the markers that are due meanwhile are skipped, and no connection breaks.",
            "",
            "| What happened | Cases |",
            "|---|---|",
            *(f"| {name} | {count} |" for name, count in found["brokers"].items()),
            "",
        ]
    parts += ["## Findings", ""]
    if found["findings"]:
        parts += [f"- {finding}" for finding in found["findings"]]
    else:
        parts += ["None in this run. Found by it on the way, and mended, each with a test:"]
    parts += [
        "",
        "- A producer's initialisation whose connection broke was sent again by librdkafka within milliseconds, not after "
        "`retry.backoff.ms`. Its first copy, when it came late, aborted a transaction that was decided: a loss, told and "
        "recorded. Such a producer is now thrown away before it is used.",
        "- An abort while the request for a partition had no answer made librdkafka end the whole process when the producer was "
        "closed. Such a producer is now thrown away without the abort; its transaction is aborted when its lane claims again.",
        "- One series did not end within its 90 s while other work held the machine (load 30). Alone, the same seed takes 27 s.",
        "",
        "## What this does not show",
        "",
        "Loss of what a server has acknowledged (disks, fsync). TLS and SASL on the way. Networks that corrupt.",
        f"The revisions that the cases ran on: {', '.join(f'{name} ({count:,})' for name, count in found['revisions'].items())}.",
        "",
    ]
    return "\n".join(parts)


TOLD = ("opened", "not opened", "acknowledged", "aborted", "pending", "fenced", "doubt")


def main() -> None:
    lines = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    found = summary(lines)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(render(found))


if __name__ == "__main__":
    main()
