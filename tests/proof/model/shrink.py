"""Makes a schedule that has found something shorter, as long as it finds the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from model.checker import Finding
from model.schedule import fine_lines_of, run_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.world import World


def kind_of_finding(error: BaseException) -> str:
    """The common key of two findings that are the same."""
    return re.sub(r"\[.*?\]|m?\d+|write \d+ of \w+( \(told \w+\))?|[A-Z] ", "", str(error))[:60]


def shrink(world: World, finding: BaseException) -> World:
    """A shorter run with the same finding; the given one if there is none."""
    lines = fine_lines_of(world.trace)
    wanted = kind_of_finding(finding)
    best = _found(lines, wanted)
    if best is None:
        return world  # not found again by its lines; the seed does
    lines = fine_lines_of(best.trace)
    size = max(1, len(lines) // 2)
    while size:
        position, shorter = 0, False
        while position < len(lines):
            attempt = _found(lines[:position] + lines[position + size :], wanted)
            if attempt is not None and len(fine_lines_of(attempt.trace)) < len(lines):
                best, lines, shorter = attempt, fine_lines_of(attempt.trace), True
            else:
                position += size
        size = size if shorter and size > 1 else size // 2
    return best


def _found(lines: Sequence[str], wanted: str) -> World | None:
    try:
        run_lines(lines, lenient=True)
    except Finding as error:
        if kind_of_finding(error) == wanted:
            return error.world  # type: ignore[attr-defined] # set by run_lines
    except Exception:  # noqa: BLE001 - another finding than the one wanted
        return None
    return None
