"""Members of a consumer group join, leave, pause and die: each message becomes one row and one message."""

import asyncio
import os
import random
import secrets
import signal
import time
from collections import Counter

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.members import (
    COPIES,
    METADATA,
    PROTOCOLS,
    async_copier,
    copier,
    copies,
    fill,
    make_member,
    numbers,
    running,
    start_member,
)
from harness.patience import wait_until
from sqlalchemy import create_engine, func, select, text

from dualwrite import AsyncExactlyOnceConsumer, ConfigurationError, failpoints
from dualwrite.operations import blocking_transactions
from dualwrite.testing.checker import read_committed

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)

EAGER = ("eager", "kafka")
EACH = [EAGER, ("cooperative", "database"), ("consumer", "kafka")]

SOON_S = 120
"""Far less than the broker's transaction timeout, a quarter of an hour."""


@pytest.fixture
def place(kafka, url, dualwrite_kafka, dualwrite_topic):
    """The servers and topics of a group."""
    engine = create_engine(url)
    METADATA.create_all(engine)
    engine.dispose()
    target = dualwrite_kafka.create_topic(f"{dualwrite_topic}-copies", 2)
    yield {"kafka": kafka, "url": url, "source": dualwrite_topic, "target": target}
    dualwrite_kafka.delete_topic(target)


def written(url):
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.scalar(select(func.count()).select_from(COPIES))
    engine.dispose()
    return found


@pytest.fixture
def group():
    return f"copiers-{secrets.token_hex(4)}"


@pytest.mark.parametrize(
    ("protocol", "offsets"),
    [pytest.param(*one, marks=pytest.mark.thorough if one == EAGER else ()) for one in EACH],
)
def test_members_join_and_leave_and_nothing_is_written_twice(place, group, kafka, url, protocol, offsets):
    # So few at a time that partitions are paused when they go to the other member.
    options = {**place, "protocol": protocol, "offsets": offsets, "max_messages": 4, "workers": 2}
    fill(kafka, place["source"], 300)
    first = make_member("0", group, **options)
    second = make_member("1", group, asynchronous=True, **options)
    with running(first):
        wait_until(lambda: first.progress.messages > 0)
        with running(second):
            wait_until(lambda: second.progress.lag or first.progress.messages == 300)
            fill(kafka, place["source"], 300, begin=300)
            wait_until(lambda: first.progress.messages + second.progress.messages >= 600)
        fill(kafka, place["source"], 100, begin=600)
        wait_until(lambda: first.progress.messages + second.progress.messages >= 700)
    rows, messages = copies(kafka, url, place["target"])
    assert rows == messages == numbers(700)


@pytest.mark.parametrize(
    ("protocol", "offsets"),
    [("eager", "kafka"), pytest.param("cooperative", "database", marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize(
    "asynchronous", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["threads", "tasks"]
)
def test_a_member_that_dies_is_settled_by_its_successor(place, group, kafka, url, protocol, offsets, asynchronous):
    """Its transaction would stay open for a quarter of an hour, and hold back what comes after it."""
    options = {**place, "protocol": protocol, "offsets": offsets, "max_messages": 10, "asynchronous": asynchronous}
    fill(kafka, place["source"], 100)
    for number, failpoint in enumerate(["consume.moved:2", "write.decided:2"]):
        dead = start_member(str(number), group, failpoint, **options)
        assert dead.wait() == -signal.SIGKILL
    successor = make_member("successor", group, **options)
    with running(successor):
        wait_until(lambda: written(url) == 100, SOON_S)
    rows, messages = copies(kafka, url, place["target"])
    assert rows == messages == numbers(100)
    left = blocking_transactions(kafka, topics=[place["target"]], group=group, open_for_s=0)
    assert [one for one in left if one.kafka_id.startswith(group)] == []


@pytest.mark.parametrize(
    ("protocol", "offsets", "failpoint"),
    [
        pytest.param("eager", "kafka", "consume.handled:2:stop", marks=pytest.mark.thorough),
        ("cooperative", "database", "consume.moved:2:stop"),
    ],
)
def test_a_member_paused_through_a_rebalance_writes_nothing_when_it_wakes(
    place, group, kafka, url, protocol, offsets, failpoint
):
    # The database ends the session of a paused member, which holds the row of its offset.
    limits = {"paused_owner_timeout_s": 2.5}
    options = {**place, "protocol": protocol, "offsets": offsets, "max_messages": 10, "limits": limits}
    fill(kafka, place["source"], 100)
    paused = start_member("paused", group, failpoint, idle_s=3, **options)
    try:
        os.waitid(os.P_PID, paused.pid, os.WSTOPPED | os.WNOWAIT)
        other = make_member("other", group, **options)
        with running(other):
            wait_until(lambda: written(url) >= 100)
            os.kill(paused.pid, signal.SIGCONT)
            fill(kafka, place["source"], 20, begin=100)
            assert paused.wait() == 0
            wait_until(lambda: written(url) >= 120)
    finally:
        paused.kill()
        paused.wait()
    rows, messages = copies(kafka, url, place["target"])
    assert rows == messages == numbers(120)


def test_tasks_work_at_once_and_a_cancelled_one_is_read_again(place, group, kafka, url):
    """Each with a partition of its own. What was not decided is aborted, and committed offsets stay behind it."""
    fill(kafka, place["source"], 60)
    options = {"topics": [place["source"]], "kafka": kafka, "database": url, "workers": 2}
    copy = async_copier(place["target"])

    async def main():
        both = asyncio.Event()
        begun = []

        async def handler(tx, messages):
            await copy(tx, messages)
            begun.append({message.partition() for message in messages})
            if len(begun) == 2:
                both.set()
            await asyncio.sleep(60)

        running = asyncio.create_task(AsyncExactlyOnceConsumer(group, "0", handler=handler, **options).run())
        await asyncio.wait_for(both.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(map(sorted, begun)) == [[0], [1]]
        again = AsyncExactlyOnceConsumer(group, "0", handler=copy, **options)
        await again.run(max_messages=60)

    asyncio.run(main())
    rows, messages = copies(kafka, url, place["target"])
    assert rows == messages == numbers(60)


@pytest.mark.parametrize("lost", ["beginning", "end"])
def test_an_offset_in_the_database_that_the_log_does_not_hold_stops_the_member(place, group, kafka, url, lost):
    fill(kafka, place["source"], 20)
    options = {**place, "protocol": "eager", "offsets": "database"}
    make_member("0", group, **options).run(max_messages=20)
    engine = create_engine(url)
    if lost == "beginning":  # retention deletes what the group has not consumed
        fill(kafka, place["source"], 20, 20)
        admin = AdminClient(dict(kafka))
        ends = [TopicPartition(place["source"], partition, OFFSET_END) for partition in range(2)]
        for deleted in admin.delete_records(ends).values():
            deleted.result(30)
    else:
        with engine.begin() as connection:
            connection.execute(text("UPDATE dualwrite_consumed SET next_offset = next_offset + 1000"))
    with pytest.raises(ConfigurationError, match="but its log holds"):
        make_member("0", group, **options).run(max_messages=1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE dualwrite_consumed SET next_offset = -1"))
    engine.dispose()
    fill(kafka, place["source"], 1, 100)
    make_member("0", group, **options).run(max_messages=1)


def test_a_poisoned_message_goes_to_the_dead_letters_with_the_reason(place, group, kafka, url, dualwrite_kafka):
    letters = dualwrite_kafka.create_topic(f"{place['source']}-letters", 1)
    fill(kafka, place["source"], 60)
    options = {**place, "protocol": "eager"}
    copy = copier(place["target"])

    def picky(tx, messages):
        copy(tx, messages)
        if any(message.value() == b"13" for message in messages):
            raise ValueError("thirteen \udcff")

    with pytest.raises(ValueError, match="thirteen"):
        make_member("0", group, handler=picky, attempts=2, **options).run(idle_s=60)
    member = make_member("0", group, handler=picky, attempts=2, dead_letter_topic=letters, **options)
    with running(member):
        wait_until(lambda: written(url) >= 59 and member.progress.dead_letters)
        wait_until(lambda: sum(member.progress.lag.values()) == 0)
    rows, messages = copies(kafka, url, place["target"])
    assert rows == messages == numbers(60) - Counter(["13"])
    [letter] = read_committed(kafka, letters)
    assert letter.value == b"13"
    headers = dict(letter.headers)
    assert headers["dualwrite.dead_letter.exception"] == b"builtins.ValueError"
    assert headers["dualwrite.dead_letter.reason"] == rb"thirteen \udcff"
    assert headers["dualwrite.dead_letter.topic"] == place["source"].encode()
    assert int(headers["dualwrite.dead_letter.attempts"]) >= 3
    assert member.progress.dead_letters == 1


@pytest.mark.thorough
def test_the_group_keeps_a_member_that_waits_for_something_else(place, group, kafka, url):
    """For longer than max.poll.interval.ms: the thread that polls waits for nothing."""
    fill(kafka, place["source"], 20)
    begun = time.monotonic()
    seen = []

    def wait(tx, messages):
        seen.append(tx.transactional_id)
        if time.monotonic() - begun < 15:
            raise LookupError("out of reach")
        copy(tx, messages)

    consumer = {"session.timeout.ms": 6000, "max.poll.interval.ms": 10000}
    options = {"protocol": "eager", "consumer": consumer, "transient": (LookupError,), "attempts": 1}
    member = make_member("0", group, **place, handler=wait, **options)
    copy = copier(place["target"])
    with running(member):
        wait_until(lambda: written(url) == 20)
    assert member.progress.dead_letters == 0
    assert len(seen) > 3
    rows, messages = copies(kafka, url, place["target"])
    assert rows == messages == numbers(20)


@pytest.mark.thorough
@pytest.mark.parametrize("offsets", ["kafka", "database"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_killed_again_and_again_write_each_message_once(place, group, kafka, url, protocol, offsets):
    """Two at a time, each killed at another point, now and then under the name of a former one."""
    options = {**place, "protocol": protocol, "offsets": offsets, "max_messages": 5, "workers": 2}
    chance = random.Random(f"{protocol} {offsets}")
    points = [name for name in failpoints.FAILPOINTS if name.startswith(("consume.", "write.", "claim.", "settle."))]
    chance.shuffle(points)
    running_now, count = [], 0
    for number, point in enumerate(points):
        fill(kafka, place["source"], 20, begin=count)
        count += 20
        name = str(chance.choice([number, number // 4]))
        running_now.append(start_member(name, group, f"{point}:{chance.randint(1, 3)}", **options))
        if len(running_now) == 2:
            assert running_now.pop(0).wait() in {0, 1, -signal.SIGKILL}  # 1: fenced by another of its name
    for member in running_now:
        member.wait()
    last = make_member("last", group, **options)
    with running(last):
        wait_until(lambda: written(url) >= count)
    rows, messages = copies(kafka, url, place["target"])
    assert rows == messages == numbers(count)
