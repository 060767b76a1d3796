"""The report in the documentation is what its command makes of the figures in the repository."""

import json

from model import page


def test_the_report_is_that_of_the_figures():
    figures, tasks = (json.loads(kept.read_text(encoding="utf-8")) for kept in (page.FIGURES, page.TASKS))
    assert page.PAGE.read_text(encoding="utf-8") == page.render(figures, tasks)


def test_runs_are_added_up():
    run = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    one = {**run["runs"][0], **{name: run[name] for name in ("findings", "happened", "passed", "places", "told")}}
    both = page.summary([one, one])
    assert both["schedules"] == 2 * one["schedules"]
    assert both["happened"]["kills"] == 2 * one["happened"]["kills"]
    assert both["places"]["kills"]["COMMIT"] == 2 * one["places"]["kills"]["COMMIT"]


def test_more_runs_are_added_to_what_is_kept():
    kept = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    run = {**kept["runs"][0], **{name: kept[name] for name in ("findings", "happened", "passed", "places", "told")}}
    both = page.added(kept, page.summary([run]))
    assert both["schedules"] == kept["schedules"] + run["schedules"]
    assert both["runs"] == [*kept["runs"], kept["runs"][0]]
    assert both["happened"]["kills"] == 2 * kept["happened"]["kills"]
    assert both["places"]["held"]["EndTxn"] == 2 * kept["places"]["held"]["EndTxn"]
    assert page.render(both)


def test_a_finding_counts_until_its_seed_has_run_again_without_it():
    figures = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    run = {
        **figures["runs"][0],
        **{name: figures[name] for name in ("findings", "happened", "passed", "places", "told")},
    }
    found = {**run, "first_seed": 0, "last_seed": 7, "began": "2026-01-01 01:00", "findings": [{"seed": 7, "what": ""}]}
    again = {**run, "first_seed": 7, "last_seed": 9, "began": "2026-01-01 02:00", "findings": []}
    assert len(page.summary([found])["findings"]) == 1
    assert "**1** findings." in page.render(page.summary([found]))
    assert page.summary([found, again])["findings"] == []
    assert "(seed 7)" in page.render(page.summary([found, again]))
    assert len(page.summary([found, {**again, "findings": found["findings"]}])["findings"]) == 2
