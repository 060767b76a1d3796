"""Units on the simulated servers: writers over the library's own lanes, killed at any step, and readers of what they leave."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, KafkaError
from confluent_kafka.admin import OffsetSpec
from model.owners import OF_THE_USERS_STATEMENT
from simulator.environment import time_out
from simulator.partition import committed_records, fetch, last_stable_offset
from simulator.process import Server, Unanswered
from simulator.requests import EARLIEST, LATEST, NEVER_MS, READ_COMMITTED, READ_UNCOMMITTED, Fetch, ListOffsets
from simulator.state import create_topic, partition

from dualwrite import DualWriteError, Unavailable
from dualwrite.clock import Deadline, pause
from dualwrite.units import UnitRecord, log, writer
from dualwrite.units import writer as announcing
from dualwrite.units.log import PartitionLogs
from dualwrite.units.records import Offsets, Partition
from harness.simulated import TIMEOUT_S, Here, Running, Servers, simulated

UNIT_TOPIC = "units"
SCHEDULES = int(os.environ.get("UNIT_SCHEDULES", "300"))
"""So many of each kind does a thorough run play."""
EXPECTED = (DualWriteError, *OF_THE_USERS_STATEMENT)
"""The errors by which a process ends that a schedule has disturbed."""
_EARLIEST = type(OffsetSpec.earliest())


def _encoded(value: bytes | None, key: bytes | None, headers: Any) -> str:
    """Simulated messages have a text and nothing else."""
    parts = [value, key, *(part for name, word in headers for part in (name.encode(), word))]
    return json.dumps([None if part is None else part.decode() for part in parts])


def _decoded(text: Any) -> UnitRecord:
    value, key, *rest = (None if part is None else part.encode() for part in json.loads(text))
    return UnitRecord(key, value, tuple((rest[at].decode(), rest[at + 1]) for at in range(0, len(rest), 2)))


class Messages:
    """A transaction whose messages have keys and headers."""

    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction
        self.connection = None

    @property
    def state(self) -> Any:
        return self._transaction.state

    def produce(self, topic: str, value: Any = None, key: Any = None, *, partition: int, headers: Any = ()) -> None:
        self._transaction.produce(topic, _encoded(value, key, headers), partition=partition)


class LaneWriter:
    """Stands in for `DualWriter`: one lane, in the thread that calls."""

    def __init__(self, here: Here, name: str) -> None:
        self.transactional_id = name
        self._here = here
        self._lane = here.lane(name)

    def open(self) -> None:
        self._lane.ready(Deadline(TIMEOUT_S))

    @contextmanager
    def transaction(self) -> Iterator[Messages]:
        self._lane.ready(Deadline(TIMEOUT_S))
        with self._here.block(self._lane) as transaction:
            yield Messages(transaction)

    def close(self) -> None:
        self._lane.discard()

    def __exit__(self, *_: object) -> None:
        self.close()


class AskedLogs(PartitionLogs):
    """The product's reader of logs, over requests of a simulated process."""

    def __init__(self, simulation: Any) -> None:
        self._simulation = simulation

    def close(self) -> None:
        pass

    def partitions(self, topic: str, deadline: Deadline) -> list[int]:
        del deadline
        return [
            number
            for name, number in (one.topic_partition for one in self._simulation.broker.partitions)
            if name == topic
        ]

    def _asked(
        self, partitions: list[Partition], which: OffsetSpec, isolation: IsolationLevel, deadline: Deadline
    ) -> dict[Partition, int]:
        level = READ_COMMITTED if isolation is IsolationLevel.READ_COMMITTED else READ_UNCOMMITTED
        timestamp = EARLIEST if isinstance(which, _EARLIEST) else LATEST
        return {name: self._answer(ListOffsets(name, level, timestamp), deadline).offset for name in partitions}

    def read(
        self, ranges: Mapping[Partition, Offsets], *, timeout_s: float
    ) -> Iterator[tuple[Partition, int, UnitRecord]]:
        for name, wanted in ranges.items():
            if wanted.begin < wanted.end:
                answer = self._answer(Fetch(name, wanted.begin, READ_COMMITTED), Deadline(timeout_s))
                yield from ((name, *found) for found in _within(answer, wanted))

    def _answer(self, request: Any, deadline: Deadline) -> Any:
        while True:
            try:
                return self._simulation.ask(request)
            except Unanswered:
                if deadline.expired:
                    raise Unavailable("no answer") from None
                pause(0.1)


def _within(answer: Any, wanted: Offsets) -> Iterator[tuple[int, UnitRecord]]:
    for offset, text in committed_records(answer):
        if wanted.begin <= offset < wanted.end:
            yield offset, _decoded(text)


class SeenLogs(PartitionLogs):
    """The same for a reader that no process of the simulation is: it sees the broker as it is."""

    def __init__(self, simulation: Any) -> None:
        self._simulation = simulation

    def close(self) -> None:
        pass

    def follow(self, name: Partition, begin: int | None) -> None:
        self._followed, self._next, self._exact = name, begin, True

    def poll(self, timeout_s: float) -> list[Any]:
        del timeout_s
        topic, number = self._followed
        found = list(self.read({self._followed: Offsets(self.reached, 1 << 60)}, timeout_s=0))
        messages = [_message(name, offset, record) for name, offset, record in found]
        end = found[-1][1] + 1 if found else self.reached
        return [*messages, SimpleNamespace(
            topic=lambda: topic, partition=lambda: number, offset=lambda: end,
            error=lambda: SimpleNamespace(code=lambda: KafkaError._PARTITION_EOF),
        )]  # fmt: skip

    def read(
        self, ranges: Mapping[Partition, Offsets], *, timeout_s: float
    ) -> Iterator[tuple[Partition, int, UnitRecord]]:
        del timeout_s
        for name, wanted in ranges.items():
            found = partition(self._simulation.broker, name)
            assert found is not None
            if wanted.begin < min(wanted.end, last_stable_offset(found)):
                answer = fetch(found, wanted.begin, READ_COMMITTED)
                yield from ((name, *record) for record in _within(answer, wanted))


def _message(name: Partition, offset: int, record: UnitRecord) -> Any:
    return SimpleNamespace(
        topic=lambda: name[0],
        partition=lambda: name[1],
        offset=lambda: offset,
        key=lambda: record.key,
        value=lambda: record.value,
        headers=lambda: list(record.headers),
        error=lambda: None,
    )


class Schedule:
    """Processes that come, are killed and cut off, at random; by one seed the same every time.

    Attributes:
        chance: Draws everything.
        servers: The simulated ones.
        happened: What was done to the processes, and how often.
    """

    def __init__(self, seed: int, servers: Servers) -> None:
        self.chance = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.servers = servers
        self.simulation = servers.simulation
        self._held: list[Any] = []
        self._started = 0

    def play(self, work: Callable[[Here], None], look: Callable[[], None], *, steps: int = 400) -> None:
        """Let processes do the work, two at a time, and look after each step; the last one comes to its end."""
        alive: list[Running] = []
        for _ in range(steps):
            if len(alive) < 2 and self.chance.random() < (0.05 if alive else 1):
                alive.append(self._start(work))
            self._disturb(alive)
            alive = [one for one in alive if not self._has_ended(one)]
            look()
        for one in alive:
            one.kill()
        self.simulation.markers_delayed = False
        self.simulation.write_markers()
        for held in list(self.simulation.held):
            self.simulation.arrive(held)
        look()
        self._start(work).result()
        look()

    def _start(self, work: Callable[[Here], None]) -> Running:
        self._started += 1
        self.happened["processes"] += 1
        return self.servers.start(work, f"P{self._started}")

    @staticmethod
    def _has_ended(one: Running) -> bool:
        if one.ended and one._error is not None and not isinstance(one._error, EXPECTED):
            raise one._error
        return one.ended

    def _disturb(self, alive: list[Running]) -> None:
        one = self.chance.choice(alive)
        call = one.process.call
        if call is None:
            return
        draw = self.chance.random()
        waits = self.simulation.waits_for_an_answer(one.process)
        if draw < 0.015:
            self.happened["killed"] += 1
            one.kill()
        elif draw < 0.03 and call.server is Server.KAFKA and not waits:
            self.happened["requests lost or late"] += 1
            one.lose_answer() if self.chance.random() < 0.5 else self.simulation.hold(one.process)
        elif draw < 0.04 and call.server is Server.DATABASE and call.session is not None and not one.waits_for_lock:
            self.happened["connections broken"] += 1
            one.break_connection(executed=self.chance.random() < 0.5)
        elif draw < 0.045 and self.simulation.held:
            self.simulation.arrive(self.chance.choice(self.simulation.held))
        elif draw < 0.05:
            known = self.chance.choice(self.simulation.broker.transactions or (None,))
            if known is not None:
                self.simulation.broker = time_out(self.simulation.broker, known.transactional_id)
        elif draw < 0.06:
            self.simulation.markers_delayed = not self.simulation.markers_delayed
        elif draw < 0.1 and self.simulation.markers_delayed:
            self.simulation.write_markers()
        else:
            one.step()


@contextmanager
def scheduled(seed: int, *, transaction_version: int = 2, forever: bool = False) -> Iterator[Schedule]:
    """Simulated servers on which `UnitWriter`, `announce_batch` and `BatchReader` work; two topics.

    Args:
        seed: Of the schedule.
        transaction_version: Of the broker.
        forever: Whether it never times a transaction out.
    """
    with simulated(transaction_version=transaction_version) as servers, pytest.MonkeyPatch.context() as patch:
        simulation = servers.simulation
        simulation.broker = create_topic(simulation.broker, UNIT_TOPIC, 1)
        if forever:
            simulation.broker = simulation.broker._replace(max_timeout_ms=NEVER_MS)

        def here() -> Here:
            return Here(simulation, simulation.inside(), servers.engine)

        patch.setattr(writer, "DualWriter", lambda name, **_: LaneWriter(here(), name))
        for module in (writer, announcing):
            patch.setattr(module, "PartitionLogs", lambda _: AskedLogs(simulation))
        patch.setattr(log, "PartitionLogs", lambda _, **__: SeenLogs(simulation))
        yield Schedule(seed, servers)
