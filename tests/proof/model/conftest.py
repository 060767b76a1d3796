"""The simulated broker and real ones, side by side."""

from __future__ import annotations

from contextlib import closing

import pytest
from harness.both_brokers import Both


@pytest.fixture(scope="module")
def both(dualwrite_kafka):
    with closing(Both(dualwrite_kafka)) as both:
        yield both


@pytest.fixture(scope="module")
def hasty(hasty_kafka):
    """A broker that times out and forgets within seconds."""
    with closing(Both(hasty_kafka, lanes=1)) as both:
        yield both
