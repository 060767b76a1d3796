"""More processes of the model: workers that hand their transactions over, and drivers that decide on several of them at once.

The worker does what a Spark task does, in the same order; the driver runs :class:`dualwrite.sinks.batches.Decision`. Until the
decision, a worker's rows stand in a row of another name, which the decision copies, or in a prepared transaction.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.connection import SimulatedConnection
from simulator.database import ConnectionLost
from simulator.outside import SimulatedCoordinator
from simulator.store import SimulatedStore

from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError, TransactionAborted, Unavailable
from dualwrite.protocol.batches import BatchState
from dualwrite.recovery.claim import OwnerContext, claim_rows
from dualwrite.recovery.settle import settle
from dualwrite.sinks.batches import Decision
from dualwrite.stores.sql.drivers import name_of
from dualwrite.writing.dual_write import DualWrite, Ending
from dualwrite.writing.lane import Lane, Losses
from model.owners import OF_THE_USERS_STATEMENT, TIMEOUT_S, TOPIC, CodeFailed, Write, make_producer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from simulator.process import Process
    from simulator.scheduler import Simulation

    from dualwrite.kafka.config import EngineName
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import StateRow
    from model.owners import Told

_LOOKS = 3


@dataclass(frozen=True)
class HandedOver:
    """The part that a worker has handed over for a driver to decide."""

    write: Write
    incarnation: int
    namespace: str
    prepared: PreparedTxnState

    @property
    def transactional_id(self) -> str:
        """The slot."""
        return self.write.lane


class Worker:
    """A process that runs one task after the other on one slot, and keeps its lane where it may.

    Args:
        simulation: Where it runs.
        told: What processes were told.
        inbox: What can be decided on, by worker: the newest of each.
        slot: The transactional id.
        eager: Whether messages are sent when they are produced.
        engine: What sends them.
    """

    def __init__(
        self,
        simulation: Simulation,
        told: Told,
        inbox: dict[str, HandedOver],
        slot: str,
        *,
        eager: bool,
        engine: EngineName = "librdkafka",
    ) -> None:
        self._simulation = simulation
        self._told = told
        self._inbox = inbox
        self._slot = slot
        self._eager = eager
        self._engine = engine
        self._resting: Lane | None = None

    def run(self, process: Process) -> None:
        context = OwnerContext(
            SimulatedCoordinator(self._simulation), SimulatedStore(self._simulation, process), process.name
        )
        connection = SimulatedConnection(self._simulation)
        while (command := process.await_command()) is not None:
            if isinstance(command, Write):
                self._run_task(context, connection, command)

    def _run_task(self, context: OwnerContext, connection: SimulatedConnection, write: Write) -> None:
        write.lane = self._slot
        lane = self._take(context)
        try:
            lane.ready(Deadline(TIMEOUT_S))
        except DualWriteError as error:
            self._told.note(error)
            write.told = "aborted"
            lane.discard()
            return
        write.told = self._write(lane, context, connection, write)
        if write.told in {"handed over", "committed"}:
            self._resting = lane
        else:
            lane.discard()

    def _take(self, context: OwnerContext) -> Lane:
        lane, self._resting = self._resting, None
        if lane is not None:
            try:
                if lane.may_go_on(next(iter(context.store.read([self._slot])), None)):
                    self._told.counts["workers go on"] += 1
                    return lane
            except DualWriteError as error:
                self._told.note(error)
            lane.discard()
        make = make_producer(self._simulation, context, eager=self._eager, engine=self._engine)
        return Lane(self._slot, context, make, losses=Losses(self._told.note))

    def _write(self, lane: Lane, context: OwnerContext, connection: SimulatedConnection, write: Write) -> str:
        ending = write.ending
        row = lane.row
        try:
            with DualWrite(lane, context, connection, margin_s=10.0, timeout_s=TIMEOUT_S, ending=ending) as transaction:
                if ending is Ending.COMMIT:
                    connection.about(write)
                for name, partition in write.messages:
                    if write.rows:
                        connection.insert(f"staged {name}" if ending is Ending.HAND_OVER else name)
                    transaction.produce(TOPIC, name, partition=partition)
                if write.fails == "statement":
                    connection.fail()
                if write.fails == "code":
                    raise CodeFailed
        except (CodeFailed, *OF_THE_USERS_STATEMENT):
            return "aborted"
        except DualWriteError as error:
            self._told.note(error)
            return {"none": "aborted"}.get(error.outcome, error.outcome)
        if ending is Ending.COMMIT:
            return "committed"
        assert transaction.prepared is not None
        self._inbox[write.owner] = HandedOver(write, row.incarnation, row.namespace, transaction.prepared)
        return "handed over"


@dataclass
class Decided:
    """One transaction of a driver: all of these dual writes, or none."""

    number: int
    writes: Sequence[Write]

    @property
    def ledger_row(self) -> str:
        """The row of the ledger that records it."""
        return f"decision {self.number}"


class Driver:
    """A process that decides on what was handed over, and brings Kafka in line.

    Args:
        simulation: Where it runs.
        told: What processes were told.
        decision: Its number, and what it is about.
        handed_over: What it decides on.
    """

    def __init__(
        self, simulation: Simulation, told: Told, decision: Decided, handed_over: Sequence[HandedOver]
    ) -> None:
        self._simulation = simulation
        self._told = told
        self._decision = decision
        self._handed_over = sorted(handed_over, key=lambda one: one.transactional_id)

    def run(self, process: Process) -> None:
        context = OwnerContext(
            SimulatedCoordinator(self._simulation), SimulatedStore(self._simulation, process), process.name
        )
        self._context = context
        decision = Decision(
            self, self._handed_over, context, connect=self._connect, timeout_s=TIMEOUT_S, idle_s=TIMEOUT_S / 2
        )
        try:
            decision.run()
        except DualWriteError as error:
            self._told.note(error)
            if decision.state is BatchState.IN_DOUBT:
                self._tell("unknown")
            elif decision.state is BatchState.UNDECIDED:
                self._give_up()
        except OF_THE_USERS_STATEMENT:
            self._give_up()
        else:
            self._tell("decided")

    def _connect(self) -> AbstractContextManager[SimulatedConnection]:
        return nullcontext(SimulatedConnection(self._simulation))

    def _give_up(self) -> None:
        self._tell("aborted")
        with suppress(DualWriteError):
            self.settle(())

    @property
    def name(self) -> str:
        return self._decision.ledger_row

    def record(self, connection: SimulatedConnection) -> bool:
        connection.about(self._decision)
        connection.insert(self._decision.ledger_row)
        return True

    def require_held(self, connection: SimulatedConnection) -> None:
        """The model has no leases: a worker waits until its next task."""

    def bring(self, connection: SimulatedConnection) -> None:
        self._require_prepared(connection)
        for one in self._handed_over:
            if one.write.rows and one.write.ending is Ending.HAND_OVER:
                for name, _ in one.write.messages:
                    connection.insert(name)

    def decided(self) -> None:
        self._tell("decided")

    def settle(self, completed: Collection[str]) -> None:
        for one in self._handed_over:
            if one.transactional_id in completed:
                one.write.told = "completed"
        self._told.counts["completed without a claim"] += len(completed)
        claim_and_settle(
            self._context, {one.transactional_id for one in self._handed_over} - set(completed), self._told
        )

    def _require_prepared(self, connection: SimulatedConnection) -> None:
        database = self._simulation.database
        wanted = {
            (name_of(one.namespace, one.prepared), one.transactional_id)
            for one in self._handed_over
            if one.write.ending is Ending.PREPARE
        }
        if wanted and not connection.run("SELECT", lambda session: database.has_prepared(session, wanted)):
            raise TransactionAborted("the transaction prepared in the database has been ended")

    def is_written(self) -> bool:
        """By the claim the old session has ended."""
        database = self._simulation.database
        for _ in range(_LOOKS):
            connection = SimulatedConnection(self._simulation)
            session = connection.session
            try:
                return self._simulation.execute(
                    session, "SELECT", lambda: self._decision.ledger_row in database.user_rows
                )
            except ConnectionLost:
                continue
            finally:
                connection.close()
        raise Unavailable("the database does not answer")

    def _tell(self, told: str) -> None:
        for one in self._handed_over:
            if one.write.told != "completed":
                one.write.told = told


class Settler:
    """A process that claims slots, even leased ones, and settles: a driver that begins a batch again, or gives one up."""

    def __init__(self, simulation: Simulation, told: Told, slots: Collection[str]) -> None:
        self._simulation = simulation
        self._told = told
        self._slots = slots

    def run(self, process: Process) -> None:
        context = OwnerContext(
            SimulatedCoordinator(self._simulation), SimulatedStore(self._simulation, process), process.name
        )
        try:
            claim_and_settle(context, self._slots, self._told)
        except DualWriteError as error:
            self._told.note(error)


def claim_and_settle(context: OwnerContext, slots: Collection[str], told: Told) -> None:
    """Claim and settle slots whose transactions cannot be completed otherwise; as the Spark sink's ``settle_leases``."""
    if slots:
        rows: Sequence[StateRow] = claim_rows(context, sorted(slots), Deadline(TIMEOUT_S))
        report = settle(rows, coordinator=context.coordinator, store=context.store, deadline=Deadline(TIMEOUT_S))
        told.losses.update(str(loss.row.prepared) for loss in report.losses)
