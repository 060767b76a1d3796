"""What a run of pytest has found, before any of it is left out."""

import pytest

COLLECTED = pytest.StashKey[frozenset[str]]()
"""The node ids, in the configuration's stash."""
