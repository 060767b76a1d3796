"""Simulated servers: no test here needs real ones."""

from collections.abc import Iterator

import pytest
from harness.simulated import Servers, simulated


@pytest.fixture
def servers() -> Iterator[Servers]:
    with simulated() as found:
        yield found
