"""Random schedules in numbers: ``make model N=1000000 SEED=0``. Exit code 0: clean; 1: something was found.

From seed 1,000,000,000,000 on they are of workers that hand over and of drivers that decide. From 2,000,000,000,000 on the
brokers have transaction version 2, and owners the native engine, or each of them one of both; from 3,000,000,000,000 on
workers. From 4,000,000,000,000 on the callers of owners submit units to group commit,
and from 5,000,000,000,000 on the owners are members of a fleet. From 6,000,000,000,000 on the members of a consumer group read,
write and move their offsets.

Prints progress and keeps what happened in a file. The first finding is shrunk, printed as a schedule, and ends the run. With
``--mistake NAME`` the product is broken on purpose: then finding it is success. SIGINT and SIGTERM end the run after the
current schedules, with the figures of what was done, and the shell's exit code of that signal.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from model.results import Results
from model.run import chunks

_TELL_EVERY_S = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model", description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--seed", type=int, default=0, help="the first schedule's seed; the others follow (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--mistake", default="", help="a mistake of harness.mistakes, planted into the product")
    parser.add_argument("--results", type=Path, required=True, help="where to keep the figures, as JSON")
    options = parser.parse_args()
    mistake = f" MISTAKE={options.mistake}" if options.mistake else ""
    results = Results(
        f"make model N={options.schedules} SEED={options.seed} JOBS={options.jobs}{mistake}",
        options.seed,
        options.schedules,
        options.jobs,
        options.mistake,
    )
    _run(results, options.results)
    counts = results.counts
    print(
        f"{counts.schedules:,} of {results.wanted:,} schedules in {results.seconds:.0f} s, {results.rate:.0f} a second; "
        f"{counts.happened['schedules with the native engine']:,} with the native engine alone, "
        f"{counts.happened['schedules with both engines']:,} with both; {len(counts.findings)} findings{f'; stopped by {results.stopped}' if results.stopped else ''}; "
        f"results: {options.results}"
    )
    for finding in counts.findings:
        print(f"\n# {finding['what']}\n# Seed {finding['seed']}.\n", *finding["schedule"], sep="\n")
    if results.stopped:
        return 128 + signal.Signals[results.stopped]
    return int(bool(counts.findings) != bool(options.mistake))


def _run(results: Results, path: Path) -> None:
    def stop(number, _):
        results.stopped = signal.Signals(number).name

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    began = time.monotonic()
    shown = began - _TELL_EVERY_S
    running = chunks(results.first_seed, results.wanted, results.mistake, results.jobs)
    try:
        for counts in running:
            results.counts.add(counts)
            now = time.monotonic()
            results.seconds = now - began
            if results.stopped or counts.findings:
                break
            if now - shown > _TELL_EVERY_S:
                shown = now
                done, wanted = results.counts.schedules, results.wanted
                left_min = (wanted - done) / results.rate / 60
                print(f"{done:,} of {wanted:,}, {results.rate:.0f} a second, {left_min:.0f} min left", flush=True)
                results.save(path)
    finally:
        running.close()
        for number, handler in former.items():
            signal.signal(number, handler)
    if results.counts.schedules == results.wanted:
        results.stopped = ""
    results.save(path)


if __name__ == "__main__":
    sys.exit(main())
