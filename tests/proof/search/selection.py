"""Which of the planted mistakes a test tries: those that the search finds within a second in every run, the others by ``--thorough``."""

import json

import pytest

from search.mistakes import MISTAKES
from search.page import FIGURES

FEW_STATES = 1_000
MANY_STATES = 10_000
_seen = json.loads(FIGURES.read_text("utf-8"))["mistakes"]
CAUGHT = [name for name, mistake in MISTAKES.items() if mistake.caught]
HARMLESS = [name for name, mistake in MISTAKES.items() if not mistake.caught]


def quick_first(names, *, most=FEW_STATES):
    """The names as parameters: those with more states than this are left to thorough runs."""
    quick = {name for name in names if name in _seen and _seen[name]["states"] <= most}
    return [pytest.param(name, marks=() if name in quick else pytest.mark.thorough) for name in names]
