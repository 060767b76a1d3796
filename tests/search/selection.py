"""Which of the planted mistakes a test tries: those that the search finds within a second in every run, the others by ``--thorough``."""

import json

import pytest

from search.mistakes import MISTAKES
from search.page import FIGURES

FEW_STATES = 1_000
_seen = json.loads(FIGURES.read_text("utf-8"))["mistakes"]
CAUGHT = [name for name, mistake in MISTAKES.items() if mistake.caught]
HARMLESS = [name for name, mistake in MISTAKES.items() if not mistake.caught]


def _is_quick(name):
    return name in _seen and _seen[name]["states"] <= FEW_STATES


def quick_first(names):
    """The names as parameters."""
    return [pytest.param(name, marks=() if _is_quick(name) else pytest.mark.thorough) for name in names]
