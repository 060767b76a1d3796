"""Puts the simulated broker under the native engine's own sender and requests: their messages are those of the real wire.

Stands in for :class:`~dualwrite.kafka.brokers.Connections`. What leaders and coordinators decide upon (Produce, EndTxn, InitProducerId, TxnOffsetCommit) is a call of the process, which can be held, lost
and late as every other. What clients have anyway, the addresses of leaders and coordinators, is sent without one.

Each partition has a leader of its own, so that one that does not answer keeps no other waiting. Requests in flight are served
in their order; the next one is served even if the one before it was lost, as another connection may carry it.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from kafka.record.default_records import DefaultRecordBatch

from dualwrite.clock import Deadline, pause
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.brokers import Connections, NotYet
from dualwrite.kafka.messages import EndTxn, NotOffered, Produce
from dualwrite.kafka.messages import TxnOffsetCommit as WireTxnOffsetCommit
from dualwrite.kafka.native.coordination import CoordinatorRequests
from dualwrite.kafka.native.producer import MakeWire, Wire
from dualwrite.kafka.native.sender import Sender
from dualwrite.kafka.opening_messages import InitProducerId as WireInitProducerId
from simulator.process import Unanswered
from simulator.requests import EndTxn as SimulatedEndTxn
from simulator.requests import (
    EndTxnResponse,
    ErrorCode,
    ErrorResponse,
    InitProducerId,
    InitProducerIdResponse,
    ProduceResponse,
    Request,
    Response,
    TxnOffsetCommit,
)
from simulator.requests import Produce as SimulatedProduce
from simulator.scheduler import Simulation
from simulator.state import topic_id

if TYPE_CHECKING:
    from dualwrite.kafka.config import KafkaConfig

Message = Any

_COORDINATOR: Final = 0
_FIRST_LEADER: Final = 1
_VERSION: Final = 2


class SimulatedBrokers:
    """Stands in for :class:`~dualwrite.kafka.brokers.Connections`.

    Args:
        simulation: The simulation with the broker.
        eager: Whether messages arrive while their owner goes on. Otherwise they do when it waits for answers.
    """

    def __init__(self, simulation: Simulation, *, eager: bool) -> None:
        self._simulation = simulation
        self._eager = eager
        self._posted: deque[tuple[Produce, Callable[[Message | Exception], None]]] = deque()

    def ask(self, node: int, request: Message, deadline: Deadline) -> Message | NotYet:
        """Send a coordinator a request."""
        del node, deadline
        return self._asked(request)

    def _asked(self, message: Message) -> Message | NotYet:
        request, read = _COORDINATED[type(message)](message)
        is_two_phase = isinstance(request, InitProducerId) and request.enable_2pc
        if is_two_phase and self._simulation.broker.two_phase_commit is None:  # clients know what brokers offer
            refused = NotOffered("the broker does not offer InitProducerId 6")
            raise ConfigurationError(str(refused)) from refused
        try:
            return read(self._simulation.ask(request))
        except Unanswered:
            return NotYet("no answer", unreachable=True)

    def metadata(self, topics: Collection[str], deadline: Deadline, *, node: int | None = None) -> Message:
        """The topics with their leaders. A suspended leader is still shown as one."""
        del deadline, node
        described = [self._described(name) for name in topics]
        return SimpleNamespace(cluster_id=self._simulation.broker.cluster_id, topics=described)

    def _described(self, name: str) -> Message:
        known = topic_id(self._simulation.broker, name)
        if known is None:
            return SimpleNamespace(name=name, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        partitions = [
            SimpleNamespace(partition_index=number, leader_id=_FIRST_LEADER + number, leader_epoch=0)
            for topic, number in (found.topic_partition for found in self._simulation.broker.partitions)
            if topic == name
        ]
        return SimpleNamespace(
            name=name, error_code=ErrorCode.NONE, topic_id=_bytes(known), partitions=partitions, operations=0
        )

    def has_just_answered(self, node: int) -> bool:
        """Whether a connection to the broker is known to be open: there are none."""
        del node
        return False

    def nodes(self, deadline: Deadline) -> list[int]:
        """The brokers that may know a topic: one."""
        del deadline
        return [_COORDINATOR]

    def lookup(self, request: Callable[[], Message], deadline: Deadline) -> Message:
        """The coordinators."""
        del deadline
        return dict.fromkeys(request().keys, (ErrorCode.NONE, _COORDINATOR))

    def close(self) -> None:
        """There is nothing to close. Requests already sent may still arrive."""

    def post(self, node: int, request: Produce, done: Callable[[Message | Exception], None]) -> None:
        """Send a Produce request without a wait for its answer."""
        del node
        self._posted.append((request, done))
        if self._eager:
            self.serve(0)

    def serve(self, seconds: float) -> None:
        """Take the answer to the oldest request in flight, or let time pass."""
        if self._posted and (seconds or self._eager):
            message, done = self._posted.popleft()
            done(self._produced(message))
        elif seconds:
            pause(seconds)

    def _produced(self, message: Produce) -> dict[tuple[str, int], tuple[int, int]] | Exception:
        try:
            return {
                (topic.name, number): self._written(message.transactional_id, (topic.name, number), records)
                for topic, partitions in message.batches
                for number, records in partitions
            }
        except Unanswered as error:
            return error

    def _written(self, kafka_id: str, partition: tuple[str, int], records: bytes) -> tuple[int, int]:
        batch = DefaultRecordBatch(records)
        request = SimulatedProduce(
            kafka_id,
            batch.producer_id,
            batch.producer_epoch,
            partition,
            batch.base_sequence,
            tuple(bytes(record.value).decode() for record in batch),
            _VERSION,
        )
        answer = cast("ProduceResponse", self._simulation.ask(request))
        return int(answer.error_code), answer.base_offset


def make_wire(simulation: Simulation, *, eager: bool = False) -> MakeWire:
    """The argument for ``TransactionalProducer(make_wire=...)``."""

    def make(_: KafkaConfig, kafka_id: str) -> Wire:
        brokers = cast("Connections", SimulatedBrokers(simulation, eager=eager))
        return Wire(Sender(brokers, kafka_id), CoordinatorRequests(brokers, kafka_id))

    return make


_Read = Callable[[Response], Message]


def _init_producer_id(message: Message) -> tuple[Request, _Read]:
    request = InitProducerId(
        message.transactional_id,
        message.timeout_ms,
        -1,
        -1,
        message.two_phase,
    )
    return request, _with_ids


def _end_txn(message: Message) -> tuple[Request, _Read]:
    request = SimulatedEndTxn(
        message.transactional_id, message.producer_id, message.producer_epoch, message.committed, _VERSION
    )
    return request, _with_ids


def _txn_offset_commit(message: Message) -> tuple[Request, _Read]:
    request = TxnOffsetCommit(
        message.transactional_id,
        message.group.group_id,
        message.ids[0],
        message.ids[1],
        tuple((partition, offset.offset) for partition, offset in message.offsets.items()),
        _VERSION,
        message.group.member_id,
        message.group.generation,
    )

    def read(answer: Response) -> Message:
        return dict.fromkeys(message.offsets, int(cast("ErrorResponse", answer).error_code))

    return request, read


def _with_ids(answer: Response) -> Message:
    found = cast("InitProducerIdResponse | EndTxnResponse", answer)
    return SimpleNamespace(
        error_code=int(found.error_code), producer_id=found.producer_id, producer_epoch=found.producer_epoch
    )


_COORDINATED: Final[Mapping[type[Message], Callable[[Message], tuple[Request, _Read]]]] = {
    WireInitProducerId: _init_producer_id,
    EndTxn: _end_txn,
    WireTxnOffsetCommit: _txn_offset_commit,
}


def _bytes(printed: str) -> bytes:
    return base64.urlsafe_b64decode(printed + "==")
