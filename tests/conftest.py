"""What all tests share. The servers themselves come from the library's own pytest plugin."""

from __future__ import annotations

import pytest
from harness.planting import plant_from_environment

MARKS = {"dualwrite_kafka": pytest.mark.kafka, "dualwrite_postgres": pytest.mark.postgresql}


def pytest_configure() -> None:
    # Any test can be run on a mistaken product: DUALWRITE_MISTAKE=name python -m pytest ...
    plant_from_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A test that uses a server says so by its fixture; nobody has to say it twice.
    for item in items:
        for fixture, mark in MARKS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
