"""The fault matrix: ``make faults SEEDS=20``. Exit code 0: clean; 1: something is wrong."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path

from faults.cells import Series, cells_of
from faults.run import Task, name_of, needs_two_phase, play, servers, show_story, tasks
from faults.stage import Result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--engine", choices=["native", "librdkafka"], default="native", help="of the producers")
    parser.add_argument("--seeds", type=int, default=20, help="of each cell (20)")
    parser.add_argument("--first-seed", type=int, default=0, help="where they begin (0)")
    parser.add_argument("--late", type=int, default=110, help="series of late EndTxn, five or so in each (110)")
    parser.add_argument(
        "--silence", type=int, default=70, help="times that Kafka is silent for writers with an outbox (70)"
    )
    parser.add_argument("--slots", type=int, default=6, help="cases at a time (6)")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no case after that time")
    parser.add_argument("--only", default="", help="only cells whose name contains this; shows each case's story")
    parser.add_argument("--mistake", default="", help="a mistake of harness.mistakes, planted into the owners")
    parser.add_argument(
        "--log", type=Path, help="where each result goes as a line of JSON; what it holds is not done again"
    )
    options = parser.parse_args()
    chosen = [cell for cell in cells_of(options.engine) if options.only in str(cell)]
    first = options.first_seed
    series = {
        one: range(first, first + count)
        for one, count in {Series.LATE: options.late, Series.SILENCE: options.silence}.items()
        if options.only in one.value
    }
    todo: list[Task] = tasks(chosen, range(first, first + options.seeds), series)
    if options.log is not None and options.log.exists():
        lines = map(json.loads, options.log.read_text().splitlines())
        done = {(line["case"], line["seed"]) for line in lines if line["engine"] == options.engine}
        todo = [task for task in todo if (name_of(task), task[1]) not in done]
    began = time.monotonic()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    results: list[tuple[Task, Result]] = []
    for two_phase in (False, True):
        for_these = [task for task in todo if needs_two_phase(task) is two_phase]
        if not for_these:
            continue
        with servers(options.slots, options.engine, two_phase=two_phase) as context:
            results += play(
                context,
                for_these,
                options.slots,
                mistake=options.mistake,
                stop_after_s=options.stop_after_s - (time.monotonic() - began),
                log=options.log,
                stopped=stopped,
            )
    for task, result in results:
        if result.findings or options.only:
            show_story(f"{name_of(task)}, seed {task[1]}", result)
    findings = sum(bool(result.findings) for _, result in results)
    sys.stdout.write(f"{len(results)} cases, {findings} with findings, {time.monotonic() - began:.0f} s\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
