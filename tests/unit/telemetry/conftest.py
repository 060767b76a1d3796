"""The records of OpenTelemetry in these tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.recorded import Recorded

if find_spec("opentelemetry.sdk") is None:  # an environment from before it was required: `make venv` installs it
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    from harness.recorded import Recorded

    recorded = Recorded()
    yield recorded
    recorded.close()
