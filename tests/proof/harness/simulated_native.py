"""An owner with native transactions on simulated servers, from single requests: it leaves them as a test wants them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from simulator.broker import handle
from simulator.environment import forget_marker, write_markers
from simulator.requests import (
    NEVER_MS,
    EndTxn,
    EndTxnResponse,
    ErrorCode,
    InitProducerId,
    InitProducerIdResponse,
    Produce,
    ProduceResponse,
    Request,
    Response,
)
from simulator.state import topic_id, transaction, with_transaction

from dualwrite.clock import Deadline
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import StateRow
from dualwrite.recovery.claim import claim_rows
from dualwrite.recovery.settle import SettleReport, settle
from harness.simulated import TIMEOUT_S, TOPIC, Here, Servers


class NativeOwner:
    """One incarnation of a row, and its producer.

    Attributes:
        producer_id: The producer's id.
        epoch: The epoch of the next transaction.
        offsets: The first offset of the present transaction in each partition.
    """

    def __init__(self, servers: Servers, name: str = "orders", *, timeout_ms: int = NEVER_MS) -> None:
        self._servers = servers
        self._name = name
        servers.simulation.broker = servers.simulation.broker._replace(max_timeout_ms=NEVER_MS, transaction_version=2)
        servers.run(self._claims, "native owner")
        self.incarnation = self.row.incarnation
        self.kafka_id = self.row.kafka_id(self.incarnation)
        answer = cast("InitProducerIdResponse", self._ask(InitProducerId(self.kafka_id, timeout_ms)))
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        self.offsets: dict[tuple[str, int], int] = {}
        self._sequences: dict[int, int] = {}

    @property
    def row(self) -> StateRow:
        """The row as it is now."""
        return self._servers.row(self._name)

    def _claims(self, here: Here) -> None:
        claim_rows(here.context, [self._name], Deadline(TIMEOUT_S))

    def _ask(self, request: Request) -> Response:
        simulation = self._servers.simulation
        simulation.broker, answer = handle(simulation.broker, request)
        return answer

    def go_on_with(self, epoch: int) -> None:
        """Go on with an epoch that thousands of transactions would lead to. Nothing may be open."""
        broker = self._servers.simulation.broker
        known = transaction(broker, self.kafka_id)
        assert known is not None
        self._servers.simulation.broker = with_transaction(broker, known._replace(producer_epoch=epoch))
        self.epoch = epoch

    def produce(self, value: str, partition: int = 0) -> None:
        """Write one message."""
        place = (TOPIC, partition)
        sequence = self._sequences.get(partition, 0)
        sent = Produce(self.kafka_id, self.producer_id, self.epoch, place, sequence, (value,), 2)
        answer = cast("ProduceResponse", self._ask(sent))
        assert answer.error_code is ErrorCode.NONE, answer
        self._sequences[partition] = sequence + 1
        self.offsets.setdefault(place, answer.base_offset)

    def state(self, *, witnesses: int = 8) -> PreparedTxnState:
        """The state of the present transaction."""
        known = topic_id(self._servers.simulation.broker, TOPIC)
        assert known is not None
        offsets = {place: offset if place[1] < witnesses else None for place, offset in self.offsets.items()}
        return PreparedTxnState.native(self.producer_id, self.epoch, self.incarnation, offsets, {TOPIC: known})

    def decide(self, *values: str, witnesses: int = 8) -> PreparedTxnState:
        """Commit in the database: the row names the present transaction. Each value is a row of the user's."""
        state = self.state(witnesses=witnesses)
        database = self._servers.database
        database.rows[self._name] = replace(self.row, prepared=state, completed=None, settle_fence=None)
        database.user_rows.extend(values)
        return state

    def end(self, *, committed: bool = True, forgets: int | None = None) -> None:
        """End the present transaction; its markers are written, except in the partition where the broker ``forgets`` it."""
        answer = cast("EndTxnResponse", self._ask(EndTxn(self.kafka_id, self.producer_id, self.epoch, committed, 2)))
        assert answer.error_code is ErrorCode.NONE, answer
        simulation = self._servers.simulation
        if forgets is not None:
            simulation.broker = forget_marker(simulation.broker, self.kafka_id, (TOPIC, forgets))
        simulation.broker = write_markers(simulation.broker, self.kafka_id)
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        self.offsets, self._sequences = {}, {}


def settle_row(here: Here, name: str = "orders", **kwargs: Any) -> SettleReport:
    """Inside a process: claim the row and settle it."""
    context = here.context
    rows = claim_rows(context, [name], Deadline(TIMEOUT_S))
    return settle(rows, coordinator=context.coordinator, store=context.store, deadline=Deadline(TIMEOUT_S), **kwargs)


def settled(servers: Servers, name: str = "orders", **kwargs: Any) -> SettleReport:
    """Claim the row and settle it, as another process does."""
    found = servers.run(lambda here: settle_row(here, name, **kwargs), "settler")
    assert isinstance(found, SettleReport)
    return found
