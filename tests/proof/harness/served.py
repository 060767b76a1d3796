"""A simulated Kafka that answers at once, for threads, and the product's writer on it: with SQLite it needs no server."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import pytest
from model.owners import TOPIC
from simulator.database import Database
from simulator.environment import time_out
from simulator.handle import make_handle
from simulator.outside import SimulatedCoordinator
from simulator.partition import Partition, committed_values, last_stable_offset
from simulator.process import Unanswered
from simulator.requests import Request, Response
from simulator.scheduler import Simulation
from simulator.state import Broker, new_broker

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.blocking import BlockingTransaction, OpenTransactions
from dualwrite.kafka.producer import LaneProducer
from dualwrite.protocol.blocking import blockers
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import TransactionView
from dualwrite.recovery import recover
from dualwrite.writing import opening, writer_resources

if TYPE_CHECKING:
    from typing_extensions import Self

SETTINGS: Final = {"bootstrap.servers": "simulated:9092"}
__all__ = ["SETTINGS", "TOPIC", "ServedKafka"]


class ServedKafka(Simulation):
    """Serves each request in the thread that sends it. While it is ``away``, no request has an answer."""

    away = False

    def __init__(self) -> None:
        super().__init__(new_broker({TOPIC: 2}), Database())
        self._one_at_a_time = threading.Lock()

    def ask(self, request: Request) -> Response:
        if self.away:
            raise Unanswered
        with self._one_at_a_time:
            self.now_s = time.time()
            return self._handle(request)

    def ask_all(self, requests: list[Request]) -> list[Response]:
        return [self.ask(request) for request in requests]

    def answers_at_once(self, requests: list[Request]) -> list[Response]:
        """The answers to requests that nobody waits for, as if they had been on their way while something else was done."""
        with self._one_at_a_time:
            return [self._handle(request) for request in requests]

    def abort_by_timeout(self, kafka_id: str) -> None:
        """Abort what is open under this id, as the broker does after the transaction's timeout."""
        with self._one_at_a_time:
            self.broker = time_out(self.broker, kafka_id)
            self.write_markers()

    def visible(self, partition: int = 0) -> list[object]:
        """The messages that a reader of committed ones sees; asserts that no open transaction holds it back."""
        assert not self.holds_back(partition), "readers are held back"
        return self.visible_so_far(partition)

    def visible_so_far(self, partition: int = 0) -> list[object]:
        """The same while transactions may be under way: those before the first open one."""
        return list(committed_values(self._partition(partition)))

    def holds_back(self, partition: int = 0) -> bool:
        """Whether an open transaction holds readers back."""
        found = self._partition(partition)
        return last_stable_offset(found) != found.log_end

    def _partition(self, partition: int) -> Partition:
        [found] = [one for one in self.broker.partitions if one.topic_partition == (TOPIC, partition)]
        return found

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Let every writer and every recovery of this process use this Kafka."""
        patch.setattr(writer_resources, "KafkaCoordinator", lambda _, **_like: _Coordinator(self))
        patch.setattr(opening, "KafkaCoordinator", lambda _: _Coordinator(self))
        patch.setattr(recover, "KafkaCoordinator", lambda _: _Coordinator(self))
        patch.setattr(writer_resources, "LaneProducer", partial(LaneProducer, make_handle=make_handle(self)))


class _AtOnce:
    """The same Kafka, on which no time passes."""

    def __init__(self, kafka: ServedKafka) -> None:
        self.ask_all = kafka.answers_at_once
        self._kafka = kafka

    @property
    def broker(self) -> Broker:
        return self._kafka.broker


class _Posted(NamedTuple):
    """The answer to a question that was posted."""

    native: Sequence[Mapping[tuple[str, int], Any]]
    shared: Sequence[Mapping[tuple[str, int], Any]]

    def has_come(self) -> bool:
        return True


class _Coordinator(SimulatedCoordinator):
    def __init__(self, kafka: ServedKafka) -> None:
        super().__init__(kafka)
        self._kafka = kafka

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is no connection."""

    def cluster_id(self, deadline: Deadline) -> str:
        if self._kafka.away:
            raise Unavailable("the brokers did not report a cluster id in time")
        return super().cluster_id(deadline)

    def post_question(self, native: Sequence[PreparedTxnState], shared: Sequence[PreparedTxnState]) -> _Posted:
        at_once, deadline = SimulatedCoordinator(cast("Simulation", _AtOnce(self._kafka))), Deadline(0)
        return _Posted(at_once.producer_epochs(native, deadline), at_once.prove_now(shared, deadline, read_on=False))

    def compacted(self, topics: Collection[str], deadline: Deadline) -> Collection[str]:
        del topics, deadline
        return ()

    def longest_open_s(self, deadline: Deadline) -> float:
        del deadline
        return 0.0

    def open_now(self, deadline: Deadline) -> Mapping[str, TransactionView]:
        del deadline
        return {}

    def what_blocks(self, opened: Mapping[str, TransactionView], deadline: Deadline) -> OpenTransactions:
        del deadline
        return OpenTransactions(blockers(opened, {}, time.time() * 1000))

    def newly_held_back(self, deadline: Deadline) -> Sequence[BlockingTransaction]:
        del deadline
        return []
