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
DATABASES = [*URLS, "mariadb", "rocksdb"]
# One real death on each side of each decision. The search and the model put one at every step.
WRITERS_IN_EVERY_RUN = {
    ("write.produced", "postgresql"),
    ("write.before_abort", "postgresql"),
    ("write.recorded", "sqlite"),
    ("write.decided", "postgresql"),
    ("write.recorded", "mariadb"),
    ("write.decided", "mariadb"),
    ("write.recorded", "rocksdb"),
    ("write.decided", "rocksdb"),
}
SESSIONS_IN_EVERY_RUN = {("write.decided", "postgresql")}
SETTLERS_IN_EVERY_RUN = {
    ("postgresql", "claim.row_raised", "write.recorded"),
    ("postgresql", "settle.before_commit", "write.decided"),
}


@pytest.fixture
def case(tmp_path, kafka, url, dualwrite_topic):
    return Case(tmp_path, kafka, url, dualwrite_topic)


def aborting(point: str) -> dict:
    """Points of the abort path are passed only by an operation that aborts."""
    return {"abort": [1]} if point in {"write.before_abort", "write.rolled_back"} else {}


@pytest.mark.parametrize(
    ("point", "url"),
    [
        pytest.param(point, url, marks=() if (point, url) in WRITERS_IN_EVERY_RUN else pytest.mark.thorough)
        for point in WRITE_POINTS
        for url in DATABASES
    ],
    indirect=["url"],
)
def test_writer_killed_then_next_start_makes_both_sides_equal(case, point):
    nth = 1 if aborting(point) else 3 if point == "write.produced" else 2
    case.run(failpoint=f"{point}:{nth}", killed=True, **aborting(point))
    case.run(operations=2)
    rows = case.verify()
    assert ("w1-1" in rows) is (point in DECIDED)
    assert {"w1-0", "w2-0", "w2-1"} <= rows
    recover(open_for_s=0, kafka=case.kafka, database=case.url)
    assert case.verify() == rows, "a second settling changed something"


@pytest.mark.parametrize(
    ("point", "url"),
    [
        pytest.param(point, url, marks=() if (point, url) in SESSIONS_IN_EVERY_RUN else pytest.mark.thorough)
        for point in WRITE_POINTS
        for url in URLS
    ],
    indirect=["url"],
)
def test_a_process_killed_in_the_commit_of_a_session_then_next_start_makes_both_sides_equal(case, point):
    nth = 1 if aborting(point) else 3 if point == "write.produced" else 2
    case.run(session=True, failpoint=f"{point}:{nth}", killed=True, **aborting(point))
    case.run(session=True, operations=2)
    rows = case.verify()
    assert ("w1-1" in rows) is (point in DECIDED)
    assert {"w1-0", "w2-0", "w2-1"} <= rows


@pytest.mark.parametrize(
    ("url", "point", "left_by"),
    [
        pytest.param(
            url, point, left_by, marks=() if (url, point, left_by) in SETTLERS_IN_EVERY_RUN else pytest.mark.thorough
        )
        for point in SETTLE_POINTS
        for left_by in LEFT_BY
        for url in DATABASES
    ],
    indirect=["url"],
)
def test_settler_killed_then_another_settles(case, point, left_by):
    case.run(failpoint=f"{left_by}:2", killed=True)
    # The row also names the transaction before, whose commit no row has recorded: settling asks for its end, too.
    case.run(failpoint=point, killed=True, operations=1)
    case.run(operations=1)
    rows = case.verify()
    assert ("w1-1" in rows) is (left_by == "write.decided")
    assert not [item for item in status(kafka=case.kafka, database=case.url) if item.needs_recovery]
