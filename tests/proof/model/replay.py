"""Run a schedule and print what happens: ``python -m model.replay FILE``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from model.checker import Finding
from model.schedule import Performer, text_lines, world_of


def main() -> int:
    lines = text_lines(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format="      %(message)s")
    world = world_of(lines)
    performer = Performer(world)
    with world.running():
        for line in lines:
            print(line)
            if line.startswith("given "):
                continue
            before = len(world.trace)
            try:
                performer.perform(line)
            except Finding as finding:
                print(f"FOUND: {finding}")
                return 1
            for item in world.trace[before:]:
                if isinstance(item, tuple):
                    passed = "waits for a lock" if item[2] is None else ", ".join(item[2])
                    print(f"    {item[0]}: {item[1]}{f'  [{passed}]' if passed else ''}")
        for write in world.writes:
            print(f"write {write.number} of {write.owner}: told {write.told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
