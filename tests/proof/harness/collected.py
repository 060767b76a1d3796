"""The node ids that a run of pytest finds, before it leaves any of them out."""

import pytest

COLLECTED = pytest.StashKey[frozenset[str]]()
"""Their key in the configuration's stash."""
