"""The report in the documentation is what its command makes of the figures in the repository."""

import json

from controls.reason import PAGE, RESULTS
from controls.reason_page import render
from controls.ways import WAYS


def test_the_report_is_that_of_the_figures():
    assert PAGE.read_text(encoding="utf-8") == render(json.loads(RESULTS.read_text(encoding="utf-8")))


def test_every_way_was_killed_at_each_of_its_steps():
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))
    killed = {way: {step: found["runs"] for step, found in known["steps"].items()} for way, known in figures.items()}
    assert killed == {way: dict.fromkeys(kind.steps, figures[way]["runs"]) for way, kind in WAYS.items()}
