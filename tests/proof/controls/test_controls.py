"""A planted mistake that is caught by its check; ``make controls`` plants them all."""

import subprocess
import sys

import pytest
from harness.collected import COLLECTED
from harness.mistakes import MISTAKES, Check, planted
from harness.patience import PATIENCE_S
from harness.places import PROOF, TESTS

from controls.page import render
from controls.running import Run, is_caught
from dualwrite.protocol.settle import Knowledge, SettleStep
from dualwrite.recovery import settle

CAUGHT_HERE = "state_without_first_offsets"


@pytest.mark.longest
def test_a_planted_mistake_is_caught_on_real_servers(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "controls", "--no-baseline", "--results", str(tmp_path / "results.json"), CAUGHT_HERE],
        cwd=PROOF,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("caught ") == 1


def test_every_test_that_must_catch_a_mistake_exists(request):
    """Of the files that this run has collected whole; `make test` collects all."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were asked for")
    there = request.config.stash[COLLECTED]
    there |= {test.partition("[")[0] for test in there}  # with all its parameters
    files = {test.partition("::")[0] for test in there}
    named = {f"tests/{check.test}" for mistake in MISTAKES.values() for check in mistake.checks}
    assert not {test for test in named if test.partition("::")[0] in files} - there


@pytest.mark.parametrize(
    ("word", "symptom", "caught"),
    [
        ("failed", "A was told None, not Fenced", True),
        ("failed", "ImportError: no module named fence", False),
        ("passed", "", False),
        ("broken", "pytest ended with 4, not Fenced", False),
        ("hung", "no end after 240 s", False),
    ],
)
def test_only_the_expected_symptom_is_a_catch(word, symptom, caught):
    assert is_caught(Run(word, symptom, 1.0), Check("any", "not Fenced")) is caught


def test_a_mistake_is_gone_when_its_block_ends():
    real = settle.next_step
    with planted("never_retired"):
        assert settle.next_step is not real
    assert settle.next_step is real
    assert settle.next_step(Knowledge()) is SettleStep.LOOK


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_has_a_sentence_a_check_and_can_be_planted(name):
    mistake = MISTAKES[name]
    assert mistake.sentence.endswith(".")
    assert mistake.checks
    assert all((TESTS / check.test.partition("::")[0]).exists() for check in mistake.checks)
    with planted(name):
        pass


def test_there_are_mistakes_enough():
    assert len(MISTAKES) >= 25


def test_the_page_tells_what_nothing_has_caught_and_what_has_not_run():
    seen = {
        "never_retired": {
            "scenario": [
                {"caught": True, "test": "scenarios/x.py::test[a_b]", "symptom": "open | <shut>", "seconds": 1}
            ]
        },
        "loss_not_recorded": {
            "scenario": [{"caught": False, "test": "scenarios/x.py::test[c]", "symptom": "", "seconds": 1}]
        },
    }
    searched = {"never_retired": {"states": 1021, "wrong": "open"}, "loss_not_recorded": {"states": 7, "wrong": None}}
    modelled = {"never_retired": {"schedules": 3, "what": None}, "loss_not_recorded": {"schedules": 5, "what": "lost"}}
    page = render(seen, searched, modelled)
    assert f"1 of {len(MISTAKES)} mistakes are caught, 1 of them on real servers" in page
    assert "Of the 2 that can be planted into the search, it catches 1. Random schedules catch 1." in page
    assert "| `a_b.txt` | 1,021 | nothing | open \\| &lt;shut> |" in page
    assert "| **nothing** | nothing | 5 |  |" in page
    assert page.count("**nothing**") == 1
    assert page.count("| not run |") == len(MISTAKES) - 2
