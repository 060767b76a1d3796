"""Fixtures that all tests share. The servers themselves come from the library's own pytest plugin."""

from __future__ import annotations

import pytest
from harness.planting import plant_from_environment

MARKS = {"dualwrite_kafka": pytest.mark.kafka, "dualwrite_postgres": pytest.mark.postgresql}


def pytest_configure() -> None:
    # Any test can be run on a mistaken product: DUALWRITE_MISTAKE=name python -m pytest ...
    plant_from_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run what `make test` leaves out for its time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # The longest first, so that no worker begins one when all others are done.
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
    # A test that uses a server says so by its fixture, and needs no second mark.
    for item in items:
        for fixture, mark in MARKS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
