"""Members of a consumer group, in this process or in one of their own that can be killed and paused.

Each copies every message of its topic to a row and to a message of another topic.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager

from confluent_kafka import Producer
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert, select

from dualwrite import AsyncExactlyOnceConsumer, ExactlyOnceConsumer, WriterLimits
from dualwrite.state import KeyValueStore, PartitionStores
from dualwrite.testing.checker import read_committed
from harness.planting import plant_from_environment

METADATA = MetaData()
COPIES = Table("copies", METADATA, Column("id", Integer, primary_key=True), Column("body", Text))

PROTOCOLS = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}
QUICK = {"session.timeout.ms": 6000 if os.environ.get("DUALWRITE_TEST_KAFKA") else 2000, "heartbeat.interval.ms": 300}
"""A group that goes on soon after a member has died; with KIP-848 the broker's own settings count.

Brokers allow no session below 6 s unless they are told to, as those of the tests are.
"""


def settings_of(protocol: str) -> dict[str, object]:
    """The consumer's settings."""
    return {**({} if protocol == "consumer" else QUICK), **PROTOCOLS[protocol]}


def fill(kafka: Mapping[str, object], topic: str, count: int, begin: int = 0, prefix: str = "") -> None:
    """Write this many numbers, with that before each."""
    producer = Producer({**kafka, "log_level": 0})  # a broker may be away
    for number in range(begin, begin + count):
        producer.produce(topic, value=f"{prefix}{number}")
    producer.flush()


def copier(target: str):
    """A handler that copies."""

    def copy(tx, messages):
        bodies = [message.value().decode() for message in messages]
        tx.connection.execute(insert(COPIES), [{"body": body} for body in bodies])
        tx.produce_many(target, bodies)

    return copy


def async_copier(target: str):
    """A handler that copies, as a coroutine function."""

    async def copy(tx, messages):
        bodies = [message.value().decode() for message in messages]
        await tx.connection.execute(insert(COPIES), [{"body": body} for body in bodies])
        await tx.produce_many(target, bodies)

    return copy


def counting(stores: PartitionStores, target: str):
    """A handler that counts messages by key, in state stores."""

    def count(tx, messages):
        for message in messages:
            tx.produce(target, key=message.key(), value=_one_more(stores.of(message), message.key()))

    return count


def async_counting(stores: PartitionStores, target: str):
    """A handler that counts, as a coroutine function."""

    async def count(tx, messages):
        for message in messages:
            await tx.produce(target, key=message.key(), value=_one_more(stores.of(message), message.key()))

    return count


def _one_more(store: KeyValueStore, key: bytes) -> str:
    count = str(int(store.get(key) or 0) + 1)
    store.put(key, count.encode())
    return count


class AsyncMember:
    """An asynchronous consumer in an event loop of its own, with the methods of the other kind."""

    def __init__(self, *args, **options) -> None:
        self._consumer = AsyncExactlyOnceConsumer(*args, **options)
        self._loop = asyncio.new_event_loop()

    @property
    def progress(self):
        return self._consumer.progress

    def run(self, **ends) -> None:
        try:
            self._loop.run_until_complete(self._consumer.run(**ends))
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._consumer.stop)


def make_member(
    name: str,
    group: str,
    *,
    kafka,
    url,
    source: str,
    target: str,
    protocol: str,
    asynchronous: bool = False,
    limits: Mapping[str, float] | None = None,
    state: PartitionStores | None = None,
    **options,
) -> ExactlyOnceConsumer | AsyncMember:
    """A member that copies; with state stores, one that counts."""
    if state is None:
        handler = (async_copier if asynchronous else copier)(target)
    else:
        handler = (async_counting if asynchronous else counting)(state, target)
    given = {"handler": handler, "consumer": settings_of(protocol), "state": state, **options}
    if limits is not None:
        given["writer"] = {"limits": WriterLimits(**limits)}
    kind = AsyncMember if asynchronous else ExactlyOnceConsumer
    return kind(group, name, topics=[source], kafka=kafka, database=url, **given)


@contextmanager
def running(consumer: ExactlyOnceConsumer | AsyncMember):
    """Runs a member in a thread of its own while the block runs."""
    failures: list[BaseException] = []

    def run():
        try:
            consumer.run()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield consumer
    finally:
        consumer.stop()
        thread.join()
    if failures:
        raise failures[0]


def start_member(name: str, group: str, failpoint: str = "", **options) -> subprocess.Popen:
    """A member in a process of its own, which copies until nothing comes for some seconds."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness.members", json.dumps({"name": name, "group": group, **options})],
        env={**os.environ, "DUALWRITE_FAILPOINT": failpoint, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def copies(kafka: Mapping[str, str], url: str, topic: str, prefix: str = "") -> tuple[Counter[str], Counter[str]]:
    """The rows that begin with the prefix, and the messages; without the prefix."""
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = Counter(connection.scalars(select(COPIES.c.body).where(COPIES.c.body.startswith(prefix))).all())
    engine.dispose()
    messages = Counter((record.value or b"").decode() for record in read_committed(kafka, topic))
    return tuple(
        Counter({body.removeprefix(prefix): count for body, count in found.items()}) for found in (rows, messages)
    )


def numbers(count: int) -> Counter[str]:
    """The numbers that were filled in, once each."""
    return Counter(map(str, range(count)))


def main(arguments: Sequence[str]) -> None:
    """Run a member until it is idle."""
    plant_from_environment()
    options = json.loads(arguments[0])
    idle_s = options.pop("idle_s", 8)
    if directory := options.pop("directory", None):
        changelog = options.pop("changelog")
        options["state"] = PartitionStores(directory, kafka=options["kafka"], changelog=changelog)
    make_member(**options).run(idle_s=idle_s)


if __name__ == "__main__":
    main(sys.argv[1:])
