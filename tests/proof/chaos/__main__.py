"""Kill processes and servers, compare both sides: ``make chaos N=1000 SEED=1``. Exit code 0: clean; 1: something is wrong."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from harness import class_archive

from chaos.databases import KINDS
from chaos.plan import KILLS_PER_ROUND
from chaos.run import CACHE, Run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=500, help="how many processes to kill (500)")
    parser.add_argument("--seed", type=int, default=1, help="draws the plan (1)")
    parser.add_argument("--arenas", type=int, default=1, help="sets of servers that work at once (1)")
    parser.add_argument("--kills-per-round", type=int, default=KILLS_PER_ROUND, help="between two checks (240, or all)")
    parser.add_argument(
        "--consumers", type=int, default=0, help="how many members of consumer groups to kill, afterwards"
    )
    parser.add_argument("--state", type=int, default=0, help="how many tasks with state stores to kill, afterwards")
    parser.add_argument(
        "--database", choices=list(KINDS), help="kill so many writers on this kind, and do nothing else"
    )
    parser.add_argument("--brokers", type=int, default=1, help="in each set of servers (1)")
    parser.add_argument(
        "--outages", action="store_true", help="Kafka is away for seconds to minutes, and writers go on"
    )
    parser.add_argument("--engine", choices=["native", "librdkafka"], default="native", help="of the producers")
    parser.add_argument("--mistake", default="", help="a mistake of harness.mistakes, planted into the product")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no round after that time")
    parser.add_argument("--directory", type=Path, help="where results and evidence go")
    parser.add_argument("--again", action="store_true", help="forget what an earlier run of the directory has done")
    options = parser.parse_args()
    name = f"seed-{options.seed}" + (f"-brokers-{options.brokers}" if options.brokers > 1 else "")
    name += "-outages" if options.outages else ""
    name += f"-{options.mistake}" if options.mistake else ""
    os.environ["DUALWRITE_PRODUCER_ENGINE"] = options.engine  # every process of the run sees it
    if options.database:
        name += f"-{options.database}"
    if options.engine != "native":
        name += f"-{options.engine}"
    directory = (options.directory or CACHE / name).resolve()
    if options.again and directory.exists():
        shutil.rmtree(directory)
    class_archive.use()
    run = Run(
        directory,
        kills=options.kills,
        seed=options.seed,
        arenas=options.arenas,
        kills_per_round=min(options.kills_per_round, max(1, options.kills)),
        mistake=options.mistake,
        brokers=options.brokers,
        engine=options.engine,
        stop_after_s=options.stop_after_s,
        consumers=options.consumers,
        states=options.state,
        database=options.database or "",
        outages=options.outages,
    )
    if options.database:
        run.database(options.database)
        results = run.results
    else:
        results = run.run() if options.kills else run.results
    if options.consumers:
        run.consumers(options.consumers)
    if options.state:
        run.states(options.state)
    sys.stdout.write(f"{len(results.findings)} findings; results: {directory / 'results.json'}\n")
    return 1 if results.findings else 0


if __name__ == "__main__":
    sys.exit(main())
