"""The processes of the model: owners that write, and recoverers. They run the library's recipes; nothing here is protocol."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from simulator.connection import SimulatedConnection
from simulator.database import (
    Conflict,
    ConnectionLost,
    LockTimeout,
    StatementFailed,
    TransactionFailed,
)
from simulator.handle import make_handle
from simulator.outside import SimulatedCoordinator
from simulator.store import SimulatedStore
from simulator.wire import make_wire

from dualwrite.clock import Deadline
from dualwrite.errors import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
)
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.producer import LaneProducer
from dualwrite.protocol.values import lane_id
from dualwrite.recovery.claim import OwnerContext, claim_lanes
from dualwrite.recovery.operator import terminate_by
from dualwrite.recovery.recover import recover_rows
from dualwrite.writing.dual_write import DualWrite, Ending
from dualwrite.writing.lane import Lane, Losses

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.process import Process
    from simulator.scheduler import Simulation

    from dualwrite.kafka.config import EngineName
    from dualwrite.protocol.values import StateRow

NAME = "orders"
TOPIC = "events"
KAFKA = KafkaConfig.parse({"bootstrap.servers": "simulated:9092"})
TIMEOUT_S = 60.0

OF_THE_USERS_STATEMENT = (ConnectionLost, Conflict, LockTimeout, StatementFailed, TransactionFailed)


class CodeFailed(Exception):
    """The error that the user's own code raises inside a block."""


@dataclass
class Write:
    """One dual write: its plan, and the outcome that its owner was told.

    Attributes:
        number: Counts all writes; the name of its row.
        owner: Whose it is.
        messages: Message names with their partitions.
        rows: Whether it has rows.
        fails: ``code`` or ``statement`` where the user's code makes it abort; of a unit also ``once``, where its first run has a
            conflict, and ``connection`` or ``transaction``, where it ends its group.
        told: None before any answer; else ``committed``, ``decided``, ``aborted``, ``lost`` or ``unknown``; of one that was
            handed over, also ``handed over`` and, once its decider has completed it, ``completed``.
        lane: The transactional id that it ran under.
        ending: Whether its owner leaves the decision to another process, and how.
        key: Of a unit of a group: its caller, whose units keep their order.
        runs: How often a unit has begun.
    """

    number: int
    owner: str
    messages: tuple[tuple[str, int], ...]
    rows: bool = True
    fails: str | None = None
    told: str | None = None
    lane: str = ""
    ending: Ending = Ending.COMMIT
    key: str | None = None
    runs: int = 0


@dataclass
class Told:
    """Reports to processes, besides those on their writes. Survives the processes, as a log file would.

    Attributes:
        losses: The states that were reported as lost.
        opened: How opening or recovering ended, by process.
        alarms: Errors that blame the caller or an operator.
        counts: How often processes found that something could be done the short way.
    """

    losses: set[str] = field(default_factory=set)
    opened: dict[str, str] = field(default_factory=dict)
    alarms: list[BaseException] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, error: DualWriteError) -> None:
        """Note what an error says beside what it says of one dual write."""
        if isinstance(error, (ConfigurationError, IllegalStateError)):
            self.alarms.append(error)  # this world has neither callers' nor operators' mistakes
        if isinstance(error, (DecidedTransactionLost, OutcomeUnverifiable)) and error.state:
            self.losses.add(error.state)


def make_producer(
    simulation: Simulation, context: OwnerContext, *, eager: bool, engine: EngineName = "librdkafka"
) -> Callable[[StateRow], LaneProducer]:
    """Return the function that makes the producers of a lane in the model.

    Args:
        simulation: Where they run.
        context: Their coordinator's and store's.
        eager: Whether messages are sent when they are produced.
        engine: What sends them.
    """

    def make(row: StateRow) -> LaneProducer:
        return LaneProducer(
            KAFKA,
            row.kafka_id(row.incarnation),
            coordinator=context.coordinator,
            incarnation=row.incarnation,
            call_timeout_s=TIMEOUT_S / 2,
            engine=engine,
            make_handle=make_handle(simulation, eager=eager),
            make_wire=make_wire(simulation, eager=eager),
        )

    return make


class Owner:
    """A process that opens the writer's lanes and writes on command."""

    def __init__(
        self, simulation: Simulation, told: Told, *, lanes: int, eager: bool, engine: EngineName = "librdkafka"
    ) -> None:
        self._simulation = simulation
        self._told = told
        self._lanes: list[Lane] = []
        self._count = lanes
        self._eager = eager
        self._engine = engine
        self._name = NAME

    def run(self, process: Process) -> None:
        coordinator = SimulatedCoordinator(self._simulation)
        context = OwnerContext(coordinator, SimulatedStore(self._simulation, process), process.name)
        if not self._open(context):
            return
        connection = SimulatedConnection(self._simulation)
        while (command := process.await_command()) is not None:
            if not self._obey(context, connection, command):
                return
        self._close(context)

    def _open(self, context: OwnerContext) -> bool:
        """Claim, settle and make the producers; False where that failed."""
        try:
            rows = claim_lanes(context, self._name, self._count, Deadline(TIMEOUT_S))
            self._lanes = [self._lane(context, number) for number in range(self._count)]
            for lane in self._lanes:
                lane.adopt(rows[lane.transactional_id])
            for lane in self._lanes:
                lane.ready(Deadline(TIMEOUT_S))
        except DualWriteError as error:
            self._told.note(error)
            self._told.opened[context.owner] = type(error).__name__
            return False
        self._told.opened[context.owner] = "open"
        return True

    def _close(self, context: OwnerContext) -> None:
        del context
        self._keep_house()
        try:
            for lane in self._lanes:
                lane.record_completed()
        except DualWriteError as error:
            self._told.note(error)

    def _obey(self, context: OwnerContext, connection: SimulatedConnection, command: object) -> bool:
        """Do what it was told; False where the owner has to stop."""
        if isinstance(command, Write):
            return self._write(context, connection, command)
        self._keep_house()
        return True

    def _keep_house(self) -> None:
        """The work of a writer for its lanes in the background, and when it closes."""
        for lane in self._lanes:
            try:
                lane.know_end(Deadline(10.0))
                if lane.needs_settling:
                    lane.settle(Deadline(10.0))
            except DualWriteError as error:
                self._told.note(error)

    def _lane(self, context: OwnerContext, number: int) -> Lane:
        def first_lane() -> tuple[str, int]:
            return self._name, self._lanes[0].row.incarnation

        return Lane(
            lane_id(self._name, number),
            context,
            make_producer(self._simulation, context, eager=self._eager, engine=self._engine),
            guard=first_lane if number else None,
            losses=Losses(self._told.note),
        )

    def _next_lane(self) -> Lane:
        lane = self._lanes.pop(0)
        self._lanes.append(lane)
        return lane

    def _write(self, context: OwnerContext, connection: SimulatedConnection, write: Write) -> bool:
        """Do one dual write; False where the owner has to stop."""
        lane = self._next_lane()
        write.lane = lane.transactional_id
        begun = False
        try:
            lane.ready(Deadline(TIMEOUT_S))
            with DualWrite(lane, context, connection, margin_s=10.0, timeout_s=TIMEOUT_S) as transaction:
                begun = True
                connection.about(write)
                for name, partition in write.messages:
                    if write.rows:
                        connection.insert(name)
                    transaction.produce(TOPIC, name, partition=partition)
                if write.rows and not write.messages:
                    connection.insert(f"row {write.number}")
                if write.fails == "statement":
                    connection.fail()
                if write.fails == "code":
                    raise CodeFailed
        except (CodeFailed, *OF_THE_USERS_STATEMENT):
            write.told = "aborted"
        except DualWriteError as error:
            self._told.note(error)
            write.told = MEANING[error.outcome] if begun else "aborted"
            if isinstance(error, Fenced):
                return False
        else:
            write.told = "committed"
        return True


MEANING = {"none": "aborted", "aborted": "aborted", "decided": "decided", "lost": "lost", "unknown": "unknown"}


class Recoverer:
    """A process that recovers everything that needs it."""

    def __init__(self, simulation: Simulation, told: Told) -> None:
        self._simulation = simulation
        self._told = told
        self.planned: int | None = None

    def run(self, process: Process) -> None:
        store = SimulatedStore(self._simulation, process)
        try:
            report = recover_rows(
                partial(store.find, ""),
                store=store,
                connect=lambda: nullcontext(SimulatedCoordinator(self._simulation)),
                deadline=Deadline(5 * TIMEOUT_S),
                owner=process.name,
            )
        except DualWriteError as error:
            self._told.note(error)
            self._told.opened[process.name] = type(error).__name__
            return
        self._told.opened[process.name] = "recovered"
        self.planned = len(report.planned)


class Operator:
    """A process that ends by force what is open under a Kafka id, unless the database has decided it."""

    def __init__(self, simulation: Simulation, kafka_id: str) -> None:
        self._simulation = simulation
        self._kafka_id = kafka_id

    def run(self, process: Process) -> None:
        store = SimulatedStore(self._simulation, process)
        context = OwnerContext(SimulatedCoordinator(self._simulation), store, process.name)
        terminate_by(context, self._kafka_id, Deadline(5 * TIMEOUT_S), lose_decided=False)
