"""The servers under the run: killed, stopped and suspended while processes work; they come back with their data."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres

if TYPE_CHECKING:
    from typing_extensions import Self

SHORT_S, LONG_S = 1.0, 2.0
"""How long a suspension lasts; the longer one counts from when a partition has no leader any more."""
WAITED_S = 120.0


class Servers:
    """Brokers and a PostgreSQL server of one's own. A context manager.

    Args:
        properties: Of the brokers, besides the usual ones.
        brokers: How many. Each partition is on one of several alone, and has no leader while that one is away.
    """

    def __init__(self, brokers: int = 1, properties: Mapping[str, str] | None = None) -> None:
        self._closed_later = ExitStack()
        self.brokers = brokers
        self._topic = ""
        self._killed = itertools.count()
        self._suspended = itertools.count()
        self._broker_away = threading.Lock()
        self._database_away = threading.Lock()
        self.leaderless = 0
        self.kafka = EmbeddedKafka(properties, brokers=brokers)
        self.postgres = EmbeddedPostgres()
        self.outages: list[tuple[float, float]] = []
        self._away = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._closed_later.enter_context(self.kafka)
        self._closed_later.enter_context(self.postgres)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed_later.close()

    @cached_property
    def _admin(self) -> AdminClient:
        return AdminClient({**self.kafka.client_config(), "log_level": 0, "socket.timeout.ms": 3000})

    def create_topic(self, name: str, partitions: int) -> str:
        """Create the topic of a round; of several brokers each has a partition alone."""
        self._topic = name
        if self.brokers == 1:
            return self.kafka.create_topic(name, partitions, timeout_s=WAITED_S)
        alone = [[1 + number % self.brokers] for number in range(partitions)]
        topic = NewTopic(name, partitions, replica_assignment=alone, config={"min.insync.replicas": "1"})
        self._admin.create_topics([topic])[name].result(WAITED_S)
        self._wait_until(lambda: len(self._leaders()) == partitions and self._has_all_leaders())
        return name

    def kill_broker(self) -> None:
        """SIGKILL a broker and start it again, with its data. Returns when it answers."""
        with self._broker_away, self._outage():
            broker = self._broker(next(self._killed))
            self.kafka.kill(broker)
            self.kafka.start(broker)

    def suspend_broker(self) -> None:
        """SIGSTOP a broker, and SIGCONT: every other time only when its partitions have no leader any more."""
        with self._broker_away, self._outage():
            turn = next(self._suspended)
            leaders = sorted(set(self._leaders())) or [1]
            broker = None if self.brokers == 1 else leaders[turn // 2 % len(leaders)]
            self.kafka.suspend(broker)
            try:
                if self.brokers > 1 and turn % 2:
                    self._wait_until(lambda: -1 in self._leaders())
                    self.leaderless += 1
                    time.sleep(LONG_S)
                else:
                    time.sleep(SHORT_S)
            finally:
                self.kafka.resume(broker)
            self._wait_until(self._has_all_leaders)

    def leave(self, seconds: float, *, killed: bool) -> None:
        """Take all brokers away for a time, by SIGKILL or by SIGSTOP. Processes are started and end meanwhile, too.

        Returns when all partitions have a leader again.
        """
        with self._broker_away:
            (self.kafka.kill if killed else self.kafka.suspend)()
            try:
                time.sleep(seconds)
            finally:
                with self._outage():  # from here on those who need Kafka may wait for it
                    (self.kafka.start if killed else self.kafka.resume)()
                    self._wait_until(self._has_all_leaders)

    def suspend_database(self) -> None:
        """SIGSTOP PostgreSQL with all its back ends, and SIGCONT."""
        with self._database_away, self._outage():
            server = self.postgres._process.pid
            back_ends = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
            stopped = []
            try:
                for pid in [server, *map(int, back_ends)]:  # the server first: it starts no other one then
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                        stopped.append(pid)
                time.sleep(SHORT_S)
            finally:
                for pid in stopped:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

    def _broker(self, turn: int) -> int | None:
        return None if self.brokers == 1 else 1 + turn % self.brokers

    def _leaders(self) -> list[int]:
        """The leaders of the round's topic, -1 if there is none; empty if no broker answers."""
        try:
            found = self._admin.list_topics(self._topic, timeout=3).topics[self._topic].partitions
        except KafkaException:
            return []
        return [partition.leader for partition in found.values()]

    def _has_all_leaders(self) -> bool:
        return bool(leaders := self._leaders()) and all(leader > 0 for leader in leaders)

    @staticmethod
    def _wait_until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAITED_S
        while not condition():
            assert time.monotonic() < end, "the brokers do not come to that state"
            time.sleep(0.1)

    def stop_database(self) -> None:
        """Stop PostgreSQL at once, without a checkpoint, and start it again."""
        with self._database_away, self._outage():
            self.postgres.restart("immediate")

    @contextmanager
    def _outage(self) -> Iterator[None]:
        began = time.monotonic()
        with self._changed:
            self._away += 1
        try:
            yield
        finally:
            with self._changed:
                self._away -= 1
                self.outages.append((began, time.monotonic()))
                self._changed.notify_all()

    def wait_up(self, timeout_s: float) -> None:
        """Wait until all servers are there."""
        with self._changed:
            self._changed.wait_for(lambda: not self._away, timeout_s)

    def forget_logs(self) -> None:
        """Empty the logs of the servers: hundreds of starts fill them."""
        for process in (self.postgres._process, *(broker.process for broker in self.kafka._members)):
            os.truncate(process.log, 0)

    def were_up(self, since: float, until: float) -> bool:
        """Whether no server was away in between."""
        with self._changed:
            return not self._away and all(until < began or since > ended for began, ended in self.outages)
