"""Schedules as text: what was found once stays found, and any run can be run again by its lines."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from model.chance import HANDED_OVER_FROM, NATIVE_FROM, NATIVE_HANDED_OVER_FROM, schedule_of
from model.schedule import Impossible, lines_of, run_lines, text_lines

FOUND = sorted((Path(__file__).parent / "found").glob("*.txt"))


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once_is_fixed(path):
    world = run_lines(text_lines(path.read_text(encoding="utf-8")))
    assert not world.counts["undecided transactions ended by an operator"]


@pytest.mark.parametrize(
    "seed",
    [
        first + number
        for first in (0, HANDED_OVER_FROM, NATIVE_FROM, NATIVE_HANDED_OVER_FROM)
        for number in range(40 if first < NATIVE_FROM else 20)
    ],
)
def test_a_run_can_be_run_again_by_its_lines(seed):
    first = schedule_of(seed).run()
    again = run_lines(text_lines("\n".join(lines_of(first.trace))))
    assert again.simulation.broker == first.simulation.broker
    assert again.simulation.database.rows == first.simulation.database.rows
    assert [write.told for write in again.writes] == [write.told for write in first.writes]


def test_a_line_that_cannot_happen_is_an_error():
    with pytest.raises(Impossible, match="no B"):
        run_lines(["A opens", "B is killed"])


def test_a_line_that_nobody_understands_is_an_error():
    with pytest.raises(ValueError, match="not a line"):
        run_lines(["A dances"])
