"""Simulated servers for the tests of one module: the product's recipes run on them as processes, step by step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, Final

from model.owners import TOPIC, make_producer
from simulator.connection import SimulatedConnection
from simulator.database import Database, Kind
from simulator.outside import SimulatedCoordinator
from simulator.partition import committed_values, last_stable_offset
from simulator.process import Killed, Process, Server
from simulator.scheduler import Simulation
from simulator.state import new_broker
from simulator.store import SimulatedStore

from dualwrite.clock import Deadline
from dualwrite.kafka.config import EngineName
from dualwrite.protocol.values import Outcome, StateRow
from dualwrite.recovery.claim import OwnerContext
from dualwrite.writing.dual_write import DualWrite, Ending
from dualwrite.writing.lane import FoundLoss, Lane, Losses
from dualwrite.writing.transaction import Transaction

__all__ = ["TIMEOUT_S", "TOPIC", "Here", "NotReached", "Running", "Servers", "simulated"]

TIMEOUT_S: Final = 60.0
_MOST_STEPS: Final = 2_000


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


class NotReached(AssertionError):
    """The process ended, or waits, and did not come to the point where a test wants it."""


class Here:
    """The library inside one simulated process: its servers, and the losses that were reported to it."""

    def __init__(self, simulation: Simulation, process: Process, engine: EngineName = "librdkafka") -> None:
        self.simulation = simulation
        self.engine = engine
        self.context = OwnerContext(SimulatedCoordinator(simulation), SimulatedStore(simulation, process), process.name)
        self.connection: Any = SimulatedConnection(simulation)
        self.losses: list[FoundLoss] = []

    def lane(self, name: str = "orders", **kwargs: Any) -> Lane:
        """A lane that is not claimed yet."""
        make = make_producer(self.simulation, self.context, eager=False, engine=self.engine)
        return Lane(name, self.context, make, losses=Losses(self.losses.append), **kwargs)

    def ready(self, name: str = "orders") -> Lane:
        """A lane that is claimed, settled and has its producer."""
        lane = self.lane(name)
        lane.ready(Deadline(TIMEOUT_S))
        return lane

    @contextmanager
    def block(self, lane: Lane, ending: Ending = Ending.COMMIT, **kwargs: Any) -> Iterator[Transaction]:
        """One dual write."""
        given = {"margin_s": 10.0, "timeout_s": TIMEOUT_S, "ending": ending, **kwargs}
        with DualWrite(lane, self.context, self.connection, **given) as transaction:
            yield transaction

    def write(self, lane: Lane, *values: str, partition: int = 0, **kwargs: Any) -> None:
        """One dual write as a writer runs it: each value a row and a message."""
        lane.ready(Deadline(TIMEOUT_S))
        with self.block(lane, **kwargs) as transaction:
            for value in values:
                self.connection.insert(value)
                transaction.produce(TOPIC, value, partition=partition)


class Running:
    """A process that a test lets run.

    Attributes:
        points: The fail points that it has passed.
        process: The process.
    """

    def __init__(self, servers: Servers, name: str, work: Callable[[Here], Any]) -> None:
        self._simulation = servers.simulation
        self._engine = servers.engine
        self._result: Any = None
        self._error: BaseException | None = None
        self.points: list[str] = []
        self._lost: Container[str] = ()
        self.process = self._simulation.spawn(name, lambda process: self._run(work, process))
        self.points += self.process.passed

    def _run(self, work: Callable[[Here], Any], process: Process) -> None:
        try:
            self._result = work(Here(self._simulation, process, self._engine))
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - result() raises it
            self._error = error

    @property
    def ended(self) -> bool:
        """Whether it has ended, by itself or killed."""
        return self.process.call is None

    @property
    def waits_for_lock(self) -> bool:
        """Whether another process holds a lock that it needs. It must have tried to take it."""
        call = self.process.call
        return call is not None and call.session is not None and self._simulation.database.is_blocked(call.session)

    def step(self) -> None:
        """Let its next call be served, or fail where no answer can come."""
        assert self.process.call is not None, "it has ended"
        if self.process.call.server is Server.KAFKA and self.process.call.label in self._lost:
            self._simulation.lose_request(self.process)
        if self._simulation.waits_for_an_answer(self.process):
            self._simulation.wait_in_vain(self.process, 1.0)
        elif not self._simulation.step(self.process):
            return  # it waits for a lock
        self.points += self.process.passed

    def to(self, point: str, times: int = 1) -> Running:
        """Run until it has passed this fail point that many times; it stops before its next call.

        Raises:
            NotReached: It ended, or waits for a lock, and did not pass it.
        """
        return self._until(lambda: self.points.count(point) >= times, point)

    def before(self, label: str) -> Running:
        """Run until its next call is this request or statement.

        Raises:
            NotReached: It ended, or waits for a lock, and did not come to it.
        """
        return self._until(lambda: self.process.call is not None and self.process.call.label == label, label)

    def _until(self, reached: Callable[[], bool], what: str) -> Running:
        for _ in range(_MOST_STEPS):
            if reached():
                return self
            if self.ended or self.waits_for_lock:
                break
            self.step()
        raise NotReached(f"{self.process} did not come to {what}")

    def result(self) -> Any:
        """Run it to its end: its result, or the error that it has raised."""
        for _ in range(_MOST_STEPS):
            if self.ended:
                break
            assert not self.waits_for_lock, "it waits for a lock"
            self.step()
        assert self.ended, "it does not end"
        if self._error is not None:
            raise self._error
        return self._result

    def break_connection(self, *, executed: bool) -> None:
        """Break its database connection before or after the pending statement, and let the server notice at once."""
        self._simulation.break_connection(self.process, executed=executed)
        self.points += self.process.passed
        self._end_orphans()

    def lose_answer(self) -> None:
        """Serve its pending request, but lose the answer."""
        self._simulation.lose_answer(self.process)

    def cut_off(self, *requests: str) -> None:
        """From now on none of these requests reaches Kafka; none at all if none is named."""
        self._lost = requests or _Everything()

    def reconnect(self) -> None:
        """From now on every request reaches Kafka again."""
        self._lost = ()

    def interrupt(self) -> None:
        """Interrupt it where it waits for an answer, as Ctrl-C does."""
        self.process.resume(error=KeyboardInterrupt())

    def kill(self) -> None:
        """SIGKILL. The database notices at once, and rolls back."""
        self._simulation.kill(self.process)
        self._end_orphans()

    def _end_orphans(self) -> None:
        for session in self._simulation.database.orphans:
            self._simulation.database.end_orphan(session)


class Servers:
    """A simulated broker and database.

    Attributes:
        engine: The engine of the processes that start from now on.
    """

    def __init__(self, kind: Kind = Kind.READ_COMMITTED, *, transaction_version: int = 1) -> None:
        broker = new_broker({TOPIC: 2}, transaction_version=transaction_version)
        self.simulation = Simulation(broker, Database(kind))
        self.engine: EngineName = "librdkafka" if transaction_version == 1 else "native"

    @property
    def database(self) -> Database:
        return self.simulation.database

    def start(self, work: Callable[[Here], Any], name: str = "A") -> Running:
        """Start a process; it stops before its first call."""
        return Running(self, name, work)

    def run(self, work: Callable[[Here], Any], name: str = "A") -> Any:
        """Run a process to its end."""
        return self.start(work, name).result()

    def left_by(self, point: str, *values: str, name: str = "orders", **kwargs: Any) -> None:
        """Kill an owner at this point of a dual write of these values."""

        def work(here: Here) -> None:
            here.write(here.lane(name), *values, **kwargs)

        self.start(work, "dead owner").to(point).kill()

    def restored(self, name: str) -> StateRow:
        """A row from a backup: its second claim and what was written under that are only in Kafka."""
        self.run(lambda here: here.ready(name), "former owner")
        row = self.row(name)
        self.run(lambda here: here.write(here.lane(name), "lost"), "next owner")
        self.database.user_rows.remove("lost")
        self.database.rows[name] = row
        return row

    def row(self, name: str = "orders") -> StateRow:
        return self.database.rows[name]

    def visible(self, partition: int = 0) -> list[object]:
        """The messages that a reader of committed ones sees; asserts that no open transaction holds it back."""
        [found] = [one for one in self.simulation.broker.partitions if one.topic_partition == (TOPIC, partition)]
        assert last_stable_offset(found) == found.log_end, "readers are held back"
        return list(committed_values(found))

    @property
    def rows(self) -> list[object]:
        """The user's rows."""
        return list(self.database.user_rows)

    @property
    def recorded_losses(self) -> list[tuple[str, Outcome]]:
        """By id, the losses in the table of incidents."""
        return [(name, found.outcome) for (name, _), found in self.database.incidents.items()]

    def shown(self) -> tuple[object, ...]:
        """Everything durable on both sides, for comparison."""
        broker, database = self.simulation.broker, self.database
        kept = dict(database.rows), dict(database.incidents), list(database.user_rows), dict(database.prepared)
        return broker.partitions, broker.transactions, kept


@contextmanager
def simulated(kind: Kind = Kind.READ_COMMITTED, *, transaction_version: int = 1) -> Iterator[Servers]:
    """Servers without processes; those that still run at the end are killed."""
    servers = Servers(kind, transaction_version=transaction_version)
    with servers.simulation.clock_and_points():
        yield servers
