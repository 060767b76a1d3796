"""The page of the fault matrix: ``python -m faults.page RESULTS.jsonl...`` takes in results, and writes it.

The results of an engine replace its earlier ones; the other engine's stay, and those of silence stand by themselves. With ``--again`` they stand beside the earlier ones:
a smaller matrix, of newer code. Without results it writes the page again from those that the repository keeps.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dualwrite.kafka.config import EngineName
from faults.cells import COMMIT, Fault, Phase, Series, cells_of, requests_of
from faults.silence import POINTS

PAGE = Path(__file__).parents[3] / "docs" / "proof-faults.md"
RESULTS = Path(__file__).with_name("results.json")
LATE, THREE, SILENCE = Series.LATE.value, "three brokers: ", f"{Series.SILENCE.value}: "
ENGINES: tuple[EngineName, ...] = ("native", "librdkafka")


def summary(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of a run."""
    cells: dict[str, Counter[str]] = {}
    days: Counter[str] = Counter()
    told: Counter[str] = Counter()
    sent: Counter[str] = Counter()
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
        days[line["day"]] += 1
        told.update(line["told"])
        sent.update(line["sent"])
        seconds += line["seconds"]
        findings += [f"{name}, seed {line['seed']}: {finding}" for finding in line["findings"]]
    return {
        "cells": {name: dict(counts) for name, counts in sorted(cells.items())},
        "brokers": dict(sorted(brokers.items())),
        "told": dict(sorted(told.items())),
        "sent": dict(sorted(sent.items())),
        "days": dict(sorted(days.items())),
        "case_seconds": round(seconds),
        "cores": os.cpu_count(),
        "findings": findings,
    }


def render(results: Mapping[EngineName, Mapping[str, Any]]) -> str:
    """The page as Markdown."""
    return "\n".join(
        [
            "# Proof: the fault matrix",
            "",
            "Each kind of request that a dual write sends to Kafka, and PostgreSQL's `COMMIT`, is lost, late, repeated and "
            "cut, before, during and after the decision, by a [proxy](testing.md#proxies) between real clients and real "
            "servers. Real writers in processes of their own do three dual writes and more; some are killed when the fault "
            "strikes, or another owner comes meanwhile. Then everything heals, is settled twice, and both sides are compared: "
            "rows with messages in their order and with the consumer group's offset; what was acknowledged is there, what was "
            "aborted is not, nothing twice, no transaction left open, every call ended in time. Each "
            "[engine](engines.md) has a matrix of its own.",
            "",
            "| Engine | On (UTC) | Cases | Fault struck | Least in a cell | Late `EndTxn` | Three brokers | Findings |",
            "|---|---|---|---|---|---|---|---|",
            *(_totals(engine, found) for engine in ENGINES for found in _runs(results[engine])),
            "",
            "```console",
            "$ make faults ENGINE=native SEEDS=20 LOG=faults.jsonl      # 20 seeds of each cell: about an hour on two cores",
            "$ cd tests/proof && python -m faults --engine native --seeds 0 --late 0 --silence 70    # Kafka silent, some five minutes",
            "$ cd tests/proof && python -m faults --seeds 1 --first-seed 7 --only 'EndTxn/delay/during'    # one case, with its story",
            "$ cd tests/proof && python -m faults.cluster --engine native --cases 30 --log ../../brokers.jsonl      # three brokers",
            "$ cd tests/proof && python -m faults.page ../../faults.jsonl ../../brokers.jsonl              # this page",
            "```",
            "",
            *_method(),
            *_matrix("native", results["native"]),
            *_versions(results["native"]),
            *_matrix("librdkafka", results["librdkafka"]),
            *_late(results),
            *_silence(results),
            *_brokers(results),
            *_findings(results),
            *_limits(),
        ]
    )


def _runs(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The matrix of an engine, and the smaller one of newer code, if there is one."""
    return [found, *([found["again"]] if "again" in found else [])]


def _all_runs(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*_runs(found), *([found["silence"]] if "silence" in found else [])]


def _totals(engine: EngineName, found: Mapping[str, Any]) -> str:
    cells = found["cells"]
    of_matrix = [cells.get(str(cell), {}) for cell in cells_of(engine)]
    counts = (
        sum(cell.get("cases", 0) for cell in of_matrix),
        sum(cell.get("struck", 0) for cell in of_matrix),
        min(cell.get("struck", 0) for cell in of_matrix),
        cells.get(LATE, {}).get("struck", 0),
        sum(found["brokers"].values()),
        len(found["findings"]),
    )
    return f"| {engine} | {' and '.join(found['days'])} | " + " | ".join(f"{count:,}" for count in counts) + " |"


def _method() -> list[str]:
    return [
        "*Before*: from the opening of the writer until the `COMMIT` of its second dual write is about to be sent. *During*: "
        "that `COMMIT` is sent and its owner has no answer yet; meanwhile another owner claims, settles and writes, and the "
        "fault strikes its requests. *After*: the owner has its answer and goes on, or is killed and another one settles. A "
        "seed chooses which of the requests, how long a delay is, whether the client's connection breaks meanwhile, whether "
        "it is the request or the answer, whether the owner is killed, whether another one comes, messages or offsets or "
        "both. A `COMMIT` cannot be sent twice: a session of PostgreSQL is one stream. A duplicate comes right behind the "
        "first copy; a copy that comes late because the client asked again is a *delay* whose connection breaks.",
        "",
    ]


def _matrix(engine: EngineName, found: Mapping[str, Any]) -> list[str]:
    cells, told = found["cells"], found["told"]
    parts = [
        f"## The engine {engine}",
        "",
        "Cases in which the fault struck, before / during / after the decision:",
        "",
        "| Request | " + " | ".join(fault.value for fault in Fault) + " |",
        "|---|" + "---|" * len(Fault),
    ]
    for request in requests_of(engine):
        row = [
            " / ".join(str(cells.get(f"{request}/{fault.value}/{phase.value}", {}).get("struck", 0)) for phase in Phase)
            for fault in Fault
        ]
        parts.append(f"| {request} | " + " | ".join(row) + " |")
    commits = [str(cells.get(f"{COMMIT}/{fault.value}/during", {}).get("struck", "-")) for fault in Fault]
    return [
        *parts,
        f"| `COMMIT` | {' | '.join(commits)} |",
        "",
        "What the owners were told: "
        + ", ".join(f"{word} {told[word]:,}" for word in TOLD if word in told)
        + f". {told.get('killed', 0):,} of them were killed by SIGKILL.",
        "",
    ]


def _versions(found: Mapping[str, Any]) -> list[str]:
    sent = ", ".join(f"{name} {count:,}" for name, count in found["sent"].items())
    return [
        f"Versions on the wire, in all cases together: {sent}. `AddPartitionsToTxn`, `AddOffsetsToTxn` or another version "
        "of these would be a finding of its case. `InitProducerId v6` is asked of a broker with KIP-939's two-phase commit "
        "enabled (`transaction.two.phase.commit.enable`), all else of a broker as it comes. `Produce v13` is v12 with topic ids "
        "in place of names; brokers without it get v12, which [the search](proof-search.md) and the simulator name.",
        "",
        "With a mistake planted (`--engine native --mistake name`), the same cells find it: "
        "`batch_resent_with_another_sequence` writes messages twice (`--only 'Produce/drop answer'`), "
        "`a_new_producer_asked_for_again_after_silence` loses decided transactions (`--only InitProducerId/delay`), and "
        "`epoch_not_taken_over` is fenced by nobody (`--only 'EndTxn/drop answer'`).",
        "",
    ]


def _late(results: Mapping[EngineName, Mapping[str, Any]]) -> list[str]:
    counted = {engine: results[engine]["cells"].get(LATE, {}) for engine in ENGINES}
    series = " and ".join(f"{counts.get('cases', 0)} ({engine})" for engine, counts in counted.items())
    struck = " and ".join(f"{counts.get('struck', 0)} times ({engine})" for engine, counts in counted.items())
    return [
        "## EndTxn that comes late",
        "",
        f"Series of dual writes: {series}. After each decision the `EndTxn` is held; the client asks again and goes on, or is "
        "killed and another owner settles. When the next transaction has messages in the broker, the held one is let go "
        f"([KAFKA-17754](safety.md)): {struck}, in a third of them into a transaction that then aborts.",
        "",
        "A native `EndTxn` names the one transaction that it ends: the late copies hit nothing, and only transactions "
        "whose own blocks raised were aborted. librdkafka's names the next transaction, too, so a producer that may have sent it twice is "
        "discarded; without that rule (`--engine librdkafka --mistake kept_after_a_doubtful_end`) the same series find half "
        "of a transaction committed.",
        "",
    ]


def _silence(results: Mapping[EngineName, Mapping[str, Any]]) -> list[str]:
    found = {engine: results[engine]["silence"] for engine in ENGINES if "silence" in results[engine]}
    told = [
        f"{engine}: " + ", ".join(f"{word} {silent['told'][word]:,}" for word in TOLD if word in silent["told"])
        for engine, silent in found.items()
    ]
    return [
        "## Kafka silent for writers with an outbox",
        "",
        "Kafka answers nobody for half a second, some seconds, or until nobody writes any more; in some cases once "
        "more soon after. Its requests are held and all arrive afterwards, or are lost, or it does what they ask and its answers "
        'are held. The first owner has [`outbox=`](outbox.md) `"fallback"` or `"always"`; it may be killed meanwhile, one of '
        "its `COMMIT`s may be cut off, and another owner, of whatever setting, opens in the silence or after it. The "
        "comparison is that of the matrix, with what has waited. An operation that could wait and is aborted is a finding, "
        "unless its `COMMIT` was cut off.",
        "",
        f"| The first owner stood at | {' | '.join(found)} |",
        "|---|" + "---|" * len(found),
        *(
            f"| {point if ' ' in point else f'`{point}`'} | "
            + " | ".join(str(silent["cells"].get(SILENCE + point, {}).get("struck", 0)) for silent in found.values())
            + " |"
            for point in POINTS
        ),
        "",
        f"What the owners were told ({', '.join(sorted({day for silent in found.values() for day in silent['days']}))}): "
        f"{'; '.join(told)}. They abort what they choose to, and blocks with consumed offsets, which cannot wait.",
        "",
        "With `--mistake claim_in_silence_forgets_the_state` the same seeds find decided transactions that are lost.",
        "",
    ]


def _brokers(results: Mapping[EngineName, Mapping[str, Any]]) -> list[str]:
    names = sorted({name for engine in ENGINES for name in results[engine]["brokers"]})
    return [
        "## Three brokers",
        "",
        "Three brokers, three replicas, two in sync. What coordinates the transaction or leads one of its partitions is "
        "killed, suspended until it is deposed, or moved, at a point of a dual write or of settling. *Stale*: a settler "
        "hears the answer of a leader only when another leader, another owner and another transaction have followed. "
        "*Without replicas*: each partition is on one broker alone, so that it has no leader once its suspended broker's "
        "session has ended; the markers that are due meanwhile are skipped, and no connection breaks.",
        "",
        f"| What happened | {' | '.join(ENGINES)} |",
        "|---|" + "---|" * len(ENGINES),
        *(
            f"| {name} | " + " | ".join(str(results[engine]["brokers"].get(name, 0)) for engine in ENGINES) + " |"
            for name in names
        ),
        "",
    ]


def _findings(results: Mapping[EngineName, Mapping[str, Any]]) -> list[str]:
    found = [
        f"- {engine}: {finding}"
        for engine in ENGINES
        for run in _all_runs(results[engine])
        for finding in run["findings"]
    ]
    return [
        "## Findings",
        "",
        *(found or ["None in these runs."]),
        "",
        "Found by earlier ones, and fixed, each with a test:",
        "",
        "- A producer's initialisation whose connection broke was sent again by librdkafka within milliseconds, not after "
        "`retry.backoff.ms`. Its first copy, when it came late, aborted a transaction that was decided: a loss, told and "
        "recorded. Such a producer is now discarded before it is used.",
        "- An abort while the request for a partition had no answer made librdkafka end the whole process when the producer was "
        "closed. Such a producer is now discarded without the abort; its transaction is aborted when its lane claims again.",
        "- A broker that had just lost a partition's lead answered the comparison's own reader (`dualwrite.testing`) with "
        "`FENCED_LEADER_EPOCH`, and the reader gave up: in one of 40 earlier cases with three brokers and the native engine. "
        "It now asks again.",
        "- One series did not end within its 90 s while other work held the machine (load 30). Alone, the same seed takes 27 s.",
        "",
    ]


def _limits() -> list[str]:
    return [
        "## What this does not show",
        "",
        "Loss of what a server has acknowledged (disks, fsync). TLS and SASL on the way. Networks that corrupt.",
        "",
    ]


TOLD = ("opened", "not opened", "acknowledged", "aborted", "pending", "fenced", "doubt")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults.page", description=__doc__)
    parser.add_argument("logs", nargs="*", type=Path, metavar="RESULTS", help="the logs of all runs")
    parser.add_argument("--again", action="store_true", help="beside the earlier results, not in their place")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    lines = [json.loads(line) for log in options.logs for line in log.read_text().splitlines()]
    for engine in ENGINES:
        mine = [line for line in lines if line["engine"] == engine]
        silent = [line for line in mine if line["case"].startswith(SILENCE)]
        if rest := [line for line in mine if line not in silent]:
            found, former = summary(rest), results[engine]
            kept = {"silence": former["silence"]} if "silence" in former else {}
            results[engine] = {**former, "again": found} if options.again else {**found, **kept}
        if silent:
            results[engine]["silence"] = summary(silent)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(results))


if __name__ == "__main__":
    main()
