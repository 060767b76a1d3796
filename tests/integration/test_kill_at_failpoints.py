"""At every fail point of the normal path, the claim and the settling, a real process dies by SIGKILL; then both sides agree."""

import pytest
from harness.checker import Case

from dualwrite import failpoints, recover
from dualwrite.recovery.recover import status

pytestmark = pytest.mark.slow

# The second pass of a point: the first operation is done, so an older row stands there to be taken for the newer one.
WRITE_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith("write.")]
SETTLE_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith(("claim.", "settle."))]
DECIDED = {"write.decided", "write.completed"}
LEFT_BY = ["write.decided", "write.recorded"]
URLS = ["postgresql", "sqlite"]


@pytest.fixture
def case(tmp_path, kafka, url, dualwrite_topic):
    return Case(tmp_path, kafka, url, dualwrite_topic)


def aborting(point: str) -> dict:
    """Points of the abort path are passed only by an operation that aborts."""
    return {"abort": [1]} if point in {"write.before_abort", "write.rolled_back"} else {}


@pytest.mark.parametrize("url", ["postgresql", pytest.param("sqlite", marks=pytest.mark.thorough)], indirect=True)
@pytest.mark.parametrize("point", WRITE_POINTS)
def test_writer_killed_then_next_start_makes_both_sides_equal(case, point):
    nth = 1 if aborting(point) else 3 if point == "write.produced" else 2
    case.run(failpoint=f"{point}:{nth}", killed=True, **aborting(point))
    case.run(operations=2)
    rows = case.verify()
    assert ("w1-1" in rows) is (point in DECIDED)
    assert {"w1-0", "w2-0", "w2-1"} <= rows
    recover(open_for_s=0, kafka=case.kafka, engine=case.url)
    assert case.verify() == rows, "a second settling changed something"


def in_every_run(number, left_by, url):
    """Each point once, after a decision or without one in turn: the database has no part in it."""
    return url == "postgresql" and LEFT_BY[number % 2] == left_by


@pytest.mark.parametrize(
    ("url", "point", "left_by"),
    [
        pytest.param(url, point, left_by, marks=() if in_every_run(number, left_by, url) else pytest.mark.thorough)
        for number, point in enumerate(SETTLE_POINTS)
        for left_by in LEFT_BY
        for url in URLS
    ],
    indirect=["url"],
)
def test_settler_killed_then_another_settles(case, point, left_by):
    case.run(failpoint=f"{left_by}:2", killed=True)
    reached = left_by == "write.decided" or point not in {"settle.before_commit", "settle.committed"}
    case.run(failpoint=point, killed=reached, operations=1)
    case.run(operations=1)
    rows = case.verify()
    assert ("w1-1" in rows) is (left_by == "write.decided")
    assert not [item for item in status(kafka=case.kafka, engine=case.url) if item.needs_recovery]
