"""A writer whose groups a test makes, without servers."""

import pytest

from dualwrite import failpoints
from unit.writing.group.held import Held


@pytest.fixture
def held(shop):
    with shop.writer() as writer:
        yield Held(shop, writer)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm("")
