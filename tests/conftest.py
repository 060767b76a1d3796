"""Fixtures that all tests share. The servers themselves come from the library's own pytest plugin."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from harness import class_archive
from harness.collected import COLLECTED
from harness.patience import patient
from harness.planting import plant_from_environment
from harness.users import USERS
from sqlalchemy import create_engine

from dualwrite.migrations import upgrade
from dualwrite.testing import EmbeddedKafka

MARKS = {"dualwrite_kafka": pytest.mark.kafka, "dualwrite_postgres": pytest.mark.postgresql, "spark": pytest.mark.spark}
TESTS = Path(__file__).parent
COMPUTING = {"model", "search", "unit"}
"""Folders of tests that need no server, or little of it."""
SERVERS = ["mortal_kafka", "guarded_kafka", "hasty_kafka", "cluster"]
"""Fixtures of servers that the tests of several modules share."""


def pytest_configure() -> None:
    class_archive.use()
    # Any test can be run on a mistaken product: DUALWRITE_MISTAKE=name python -m pytest ...
    plant_from_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run what `make test` leaves out for its time")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # A test that uses a server says so by its fixture, and needs no second mark.
    for item in items:
        for fixture, mark in MARKS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
    items[:] = _shared_out(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_collection_finish() -> None:
    # What was imported and collected stays: no collection of garbage need look through it.
    gc.collect()
    gc.freeze()


def _shared_out(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Put the tests in the order in which ``--dist worksteal`` shares them out: each worker begins with as many of the list.

    One worker begins with the tests that share Spark's session, another with the longest ones and those that share a server:
    so few workers start these servers, and none begins a long test when all others are done. All others begin with tests that
    wait for servers. What only computes comes last, and is what they steal: it fills the pauses.
    """
    begins: list[list[pytest.Item]] = [[] for _ in range(max(3, workers))]
    waiting, computing = [], []
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            begins[0].append(item)
        elif item.get_closest_marker("longest") is not None or not all(_shared_servers(item)):
            begins[1].append(item)
        elif item.get_closest_marker("spark") is not None:
            begins[0].append(item)
        elif item.path.relative_to(TESTS).parts[0] in COMPUTING:
            computing.append(item)
        else:
            waiting.append(item)
    begins[0].sort(key=lambda item: item.get_closest_marker("longest") is None)
    begins[1].sort(key=lambda item: (item.get_closest_marker("longest") is None, *_shared_servers(item)))
    modules = [list(tests) for _, tests in groupby(waiting, key=lambda item: item.path)]
    for number, module in enumerate(modules):
        begins[2 + number % (len(begins) - 2)] += module
    found: list[pytest.Item] = []
    for begin in begins:
        taken = max(0, len(items) // workers - len(begin))
        found += begin + computing[:taken]
        del computing[:taken]
    return found + computing


def _shared_servers(item: pytest.Item) -> list[bool]:
    fixtures = getattr(item, "fixturenames", ())
    return [server not in fixtures for server in SERVERS]


@pytest.fixture(scope="session")
def mortal_kafka() -> Iterator[EmbeddedKafka]:
    """A broker that a test may stop, kill or suspend, if it starts it again. It allows any time-out, and compacts at once."""
    properties = {"transaction.max.timeout.ms": "2147483647", "log.cleaner.backoff.ms": "100"}
    with EmbeddedKafka(properties) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def guarded_kafka() -> Iterator[EmbeddedKafka]:
    """A broker with users, who may do what a test allows them. Each module has users of its own."""
    with EmbeddedKafka(users=USERS) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def hasty_kafka() -> Iterator[EmbeddedKafka]:
    """A broker that looks for timed-out transactions and forgotten ids all the time."""
    properties = {
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "50",
        "transactional.id.expiration.ms": "4000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
        "producer.id.expiration.ms": "4000",
        "producer.id.expiration.check.interval.ms": "100",
    }
    with EmbeddedKafka(properties) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def spark():
    """One Spark session for all tests; a task may fail twice in it."""
    from harness.spark import session

    found = session()
    yield found
    found.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """One driver on a cluster of two executors, a process of its own, for all tests."""
    from harness.spark_cluster import Cluster

    with Cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def numbers(dualwrite_kafka, dualwrite_database, dualwrite_topic):
    """A sink for numbered rows, in a migrated database."""
    from harness.spark import SparkCase

    migrated = create_engine(dualwrite_database)
    with migrated.connect() as connection:
        upgrade(connection)
    migrated.dispose()
    return SparkCase(patient(dualwrite_kafka.client_config()), dualwrite_database, dualwrite_topic)
