"""At every fail point of the normal path, the claim and the settling, a real process dies by SIGKILL; then both sides agree."""

import os
import random
import signal

import pytest
from harness.checker import FALLS_BACK, Case
from harness.orders import on_postgresql
from harness.patience import PATIENCE_S, wait_until
from sqlalchemy import create_engine, text

from dualwrite import failpoints, recover
from dualwrite.recovery.recover import status

pytestmark = pytest.mark.slow

# The second pass of a point: the first operation is done, so an older row stands there to be taken for the newer one.
WRITE_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith("write.") and name not in FALLS_BACK]
SETTLE_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith(("claim.", "settle."))]
DECIDED = {"write.decided", "write.completed", "write.waits"}
LEFT_BY = ["write.decided", "write.recorded"]
URLS = ["postgresql", "sqlite"]
DATABASES = [*URLS, "mariadb", "rocksdb"]
BY_TASKS = ("postgresql", "asyncpg")
"""A database, and the driver by which tasks write there. Threads write by the database's usual one."""
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
    ("write.recorded", "asyncpg"),
    ("write.decided", "asyncpg"),
}
SESSIONS_IN_EVERY_RUN = {("write.decided", "postgresql"), ("write.decided", "asyncpg")}
BLOCK_THAT_WAITS = ["write.turns", "write.recorded", "write.decided", "write.waits"]
SENDER = [
    *(name for name in failpoints.FAILPOINTS if name.startswith("outbox.") and name != "outbox.moved_aside"),
    *(f"{name}:2" for name in ("write.prepared", "write.recorded", "write.decided", "write.completed")),
]
"""Points that the sender passes; those of any dual write for the second time, after the one block of the process."""
SENDERS_IN_EVERY_RUN = {
    ("outbox.deleted", "postgresql"),
    ("write.decided:2", "postgresql"),
    ("write.decided:2", "mariadb"),
    ("outbox.deleted", "sqlite"),
}
WAITS = {"outbox": "fallback", "outbox_of_blocks": "always"}
"""Each block turns the mode to later, and the last send turns it back."""
SETTLERS_IN_EVERY_RUN = {
    ("postgresql", "claim.row_raised", "write.recorded"),
    ("postgresql", "settle.before_commit", "write.decided"),
}


@pytest.fixture
def case(tmp_path, kafka, url, task_url, dualwrite_topic):
    by_asyncpg = {"tasks": True, "task_url": task_url} if "asyncpg" in task_url else {}
    return Case(tmp_path, kafka, url, dualwrite_topic, for_all=by_asyncpg)


def aborting(point: str) -> dict:
    """Points of the abort path are passed only by an operation that aborts."""
    return {"abort": [1]} if point in {"write.before_abort", "write.rolled_back"} else {}


@pytest.mark.parametrize(
    ("point", "url", "task_url"),
    [
        pytest.param(
            point, url, driver, marks=() if (point, driver or url) in WRITERS_IN_EVERY_RUN else pytest.mark.thorough
        )
        for point in WRITE_POINTS
        for url, driver in [*((url, None) for url in DATABASES), BY_TASKS]
    ],
    indirect=["url", "task_url"],
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
    ("point", "url", "task_url"),
    [
        pytest.param(
            point, url, driver, marks=() if (point, driver or url) in SESSIONS_IN_EVERY_RUN else pytest.mark.thorough
        )
        for point in WRITE_POINTS
        for url, driver in [*((url, None) for url in URLS), BY_TASKS]
    ],
    indirect=["url", "task_url"],
)
def test_a_process_killed_in_the_commit_of_a_session_then_next_start_makes_both_sides_equal(case, point):
    # Three times in each operation: once for each message, which waits behind its savepoint, and once as they are sent.
    nth = 1 if aborting(point) else 4 if point == "write.produced" else 2
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


def settle_and_send(case, by):
    """The next owner, or a recovery without one. Then nothing waits any more."""
    if by == "recover":
        recover(case.transactional_id, open_for_s=0, kafka=case.kafka, database=case.url)
    else:
        case.run(operations=1, outbox=by)
    engine = create_engine(case.url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM dualwrite_outbox")) == 0
    engine.dispose()


@pytest.mark.parametrize(
    ("point", "url"),
    [
        pytest.param(point, url, marks=() if (point, url) == ("write.waits", "postgresql") else pytest.mark.thorough)
        for point in BLOCK_THAT_WAITS
        for url in ("postgresql", "sqlite", "mariadb")
    ],
    indirect=["url"],
)
def test_a_process_killed_in_a_block_whose_messages_wait_then_they_are_sent_once_or_never(case, point):
    case.run(operations=2, **WAITS)
    case.run(operations=1, failpoint=point, killed=True, **WAITS)
    settle_and_send(case, "fallback")
    assert ("w2-0" in case.verify()) is (point in DECIDED)


@pytest.mark.parametrize("by", ["recover", "fallback", pytest.param("never", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("point", "url"),
    [
        pytest.param(point, url, marks=() if (point, url) in SENDERS_IN_EVERY_RUN else pytest.mark.thorough)
        for point in SENDER
        for url in ("postgresql", "sqlite", "mariadb")
    ],
    indirect=["url"],
)
def test_a_sender_killed_then_what_waits_is_sent_once_and_in_order(case, point, by):
    case.run(operations=2, **WAITS)
    case.run(operations=1, failpoint=point, killed=True, **WAITS)
    settle_and_send(case, by)
    assert {"w1-0", "w1-1", "w2-0"} <= case.verify()


@on_postgresql
@pytest.mark.parametrize("outbox", ["fallback", pytest.param("always", marks=pytest.mark.thorough)])
def test_a_busy_sender_killed_at_any_moment_then_what_waits_is_sent_once_and_in_order(case, outbox):
    for round_ in range(4):
        before = len(case.in_database())
        worker = case.fork(operations=100_000, outbox=outbox, outbox_of_blocks="always", threads=2)
        wait_until(lambda before=before: len(case.in_database()) > before + 20, pause_s=random.uniform(0.01, 0.1))
        worker.process.kill()
        worker.end({-signal.SIGKILL})
        if round_ == 1:
            settle_and_send(case, "recover")
            case.verify()
    settle_and_send(case, outbox)
    assert len(case.verify()) > 80


def test_a_process_killed_as_its_block_falls_back_leaves_neither_its_row_nor_its_messages(
    tmp_path, mortal_kafka, migrated_database
):
    mortal_kafka.create_topic("killed-as-it-falls-back", 2)
    case = Case(tmp_path, mortal_kafka.client_config(), migrated_database, "killed-as-it-falls-back")
    # A broker that is slow at first is not silent: with less patience, a block before the third falls back, or the opening does.
    worker = case.fork(
        failpoint="write.checked:3:stop,write.falls_back", outbox="fallback", fallback_after_s=PATIENCE_S
    )
    assert worker.stops()
    mortal_kafka.suspend()
    try:
        os.kill(worker.process.pid, signal.SIGCONT)
        worker.end({-signal.SIGKILL})
    finally:
        mortal_kafka.resume()
    settle_and_send(case, "fallback")
    assert case.verify() == {"w1-0", "w1-1", "w2-0"}
