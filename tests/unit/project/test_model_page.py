"""The report in the documentation is what its command makes of the figures in the repository."""

import json

from model import page


def test_the_report_is_that_of_the_figures():
    figures = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    assert page.PAGE.read_text(encoding="utf-8") == page.render(figures)


def test_runs_are_added_up():
    run = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    one = {**run["runs"][0], **{name: run[name] for name in ("findings", "happened", "passed", "places", "told")}}
    both = page.summary([one, one])
    assert both["schedules"] == 2 * one["schedules"]
    assert both["happened"]["kills"] == 2 * one["happened"]["kills"]
    assert both["places"]["kills"]["COMMIT"] == 2 * one["places"]["kills"]["COMMIT"]
