"""The scheduler: runs processes with the library's own recipes, one step at a time, against the simulated servers.

A *process* is a greenlet. It runs until it needs a server or time, and then stops with a :class:`Call`. The scheduler
chooses what happens next: it serves the call, holds it in the network, loses it or its answer, lets another process go
first, or kills this one on the spot. Nothing happens by itself, with no threads and no clock, so the same choices lead
to the same run.

Between two calls a process changes nothing that another one can see, so killing or pausing it before a call covers all
the points since its previous call. A paused process is one that the scheduler does not choose.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from greenlet import getcurrent

from dualwrite import failpoints
from dualwrite.clock import running_on
from simulator import waiting
from simulator.broker import answers, handle
from simulator.database import ConnectionLost, Database, MustWait, Session
from simulator.environment import write_markers
from simulator.process import Call, Process, Server, Unanswered, nothing
from simulator.requests import (
    AddOffsetsToTxn,
    AddPartitionsToTxn,
    EndTxn,
    InitProducerId,
    Produce,
    Request,
    Response,
    TopicPartition,
    TxnOffsetCommit,
)
from simulator.state import Broker

_STEP_S: Final = 0.000_5
_CHANGES: Final = frozenset({InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, Produce, TxnOffsetCommit, EndTxn})


class Held:
    """A request that the network holds. Its process may or may not still be waiting for the answer."""

    def __init__(self, call: Call) -> None:
        self.call = call

    @property
    def label(self) -> str:
        """The request's name."""
        return self.call.label

    @property
    def owner(self) -> str:
        """The name of the process that sent it."""
        return self.call.process.name


class Simulation:
    """The servers, the network, the time and the processes of one run.

    Args:
        broker: Kafka's state at the start.
        database: The database.

    Attributes:
        broker: Kafka's current state.
        database: The database.
        now_s: The simulated time in seconds.
        processes: By name, the newest process of that name.
        held: The requests that the network holds, in order.
        markers_delayed: Whether prepared transactions wait for :meth:`write_markers`; else markers are written at once.
        outages: How often the leader of a partition went away, with every connection to it.
        written_ms: When each marker was written, by its partition and offset. Simulated logs hold no times.
        steps: Number of calls served.
    """

    def __init__(self, broker: Broker, database: Database) -> None:
        self.broker = broker
        self.database = database
        self.now_s = 1000.0
        self.processes: dict[str, Process] = {}
        self.held: list[Held] = []
        self.markers_delayed = False
        self.outages = 0
        self.written_ms: dict[tuple[TopicPartition, int], int] = {}
        self.steps = 0
        self.running: Process | None = None
        self.hub = getcurrent()

    @contextmanager
    def clock_and_points(self) -> Generator[None, None, None]:
        """Give processes this run's clock inside the block, and record the fail points that they pass.

        Wrap everything that lets processes run. At the end, kills those that still run.
        """
        with running_on(self), failpoints.watched(self._note_point):
            waiting.now_running(self)
            try:
                yield
            finally:
                for process in self.processes.values():
                    process.kill()
                waiting.over()

    def _note_point(self, name: str) -> None:
        if self.running is not None:
            self.running.passed.append(name)

    # The clock, as the recipes see it

    def monotonic(self) -> float:
        """The current simulated time."""
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        """Pause the running process."""
        process = self.inside()
        process.need(Call(process, Server.CLOCK, "pause", nothing, until_s=self.now_s + seconds))

    def inside(self) -> Process:
        """The running process."""
        assert self.running is not None, "called outside of a process"
        return self.running

    # What a process asks for

    def ask(self, request: Request) -> Response:
        """Inside a process: ask Kafka.

        Raises:
            Unanswered: No answer came.
        """
        process = self.inside()
        kind = type(request)
        call = Call(
            process,
            Server.KAFKA,
            kind.__name__,
            lambda: self._handle(request),
            changes=kind in _CHANGES,
            requests=(request,),
        )
        return process.need(call)  # type: ignore[return-value] # the result of serving the call

    def ask_all(self, requests: list[Request]) -> list[Response]:
        """Inside a process: send Kafka several read-only requests in one step.

        Raises:
            Unanswered: No answer came.
        """
        process = self.inside()

        def serve() -> list[Response]:
            return [self._handle(request) for request in requests]

        label = type(requests[0]).__name__ if requests else "nothing"
        return process.need(Call(process, Server.KAFKA, label, serve, requests=requests))  # type: ignore[return-value] # as above

    def execute(self, session: Session, label: str, statement: Callable[[], object]) -> object:
        """Inside a process: run a statement in a session; waits for the locks that it needs.

        Raises:
            ConnectionLost: The session's connection broke; the statement may or may not have run.
        """
        process = self.inside()
        return process.need(Call(process, Server.DATABASE, label, statement, session=session))

    def _handle(self, request: Request) -> Response:
        kind = type(request)
        # Only the start of a transaction shows the broker's clock.
        if kind is AddPartitionsToTxn or kind is AddOffsetsToTxn or getattr(request, "transaction_version", 1) > 1:
            self.broker = self.broker._replace(clock_ms=int(self.now_s * 1000))
        self.broker, answer = handle(self.broker, request)
        if not self.markers_delayed and (kind is EndTxn or kind is InitProducerId):
            self.write_markers()
        return answer

    def write_markers(self) -> None:
        """Let the broker write all pending markers."""
        before = self.broker.partitions
        self.broker = write_markers(self.broker)
        for old, new in zip(before, self.broker.partitions, strict=True):
            for batch in new.batches[len(old.batches) :]:
                self.written_ms[new.topic_partition, batch.base_offset] = int(self.now_s * 1000)

    # What the scheduler can do

    def spawn(self, name: str, body: Callable[[Process], object]) -> Process:
        """Start a process; it runs to its first call."""
        process = self.processes[name] = Process(name, body, self)
        process.resume()
        return process

    def can_step(self, process: Process) -> bool:
        """Whether :meth:`step` can do anything for it."""
        call = process.call
        if call is None or call.server is Server.COMMAND or self.waits_for_an_answer(process):
            return False
        return call.session is None or not self.database.is_blocked(call.session)

    def waits_for_an_answer(self, process: Process) -> bool:
        """Whether no answer can come now: the request is held or lost, or needs a suspended leader."""
        call = process.call
        return call is not None and (call.held or call.lost or not self._is_answered(call))

    def _is_answered(self, call: Call) -> bool:
        return not self.broker.suspended or all(answers(self.broker, request) for request in call.requests)

    def step(self, process: Process) -> bool:
        """Serve the process's call and let it run to the next. Returns False if it has to wait for a lock."""
        call = process.call
        assert call is not None
        self.steps += 1
        if call.until_s > self.now_s and not (call.event and call.event.is_set):
            self.now_s = call.until_s
        else:
            self.now_s += _STEP_S
        try:
            answer = call.serve()
        except MustWait:
            return False
        except Exception as error:  # noqa: BLE001 - raised in the process
            process.resume(error=error)
            return True
        process.resume(answer)
        return True

    def command(self, process: Process, command: object) -> None:
        """Give a command to a process that awaits one; it runs to its next call."""
        assert process.call is not None
        assert process.call.server is Server.COMMAND
        process.resume(command)

    def hold(self, process: Process) -> Held:
        """Hold the process's request in the network."""
        call = process.call
        assert call is not None
        call.held = True
        held = Held(call)
        self.held.append(held)
        return held

    def lose_request(self, process: Process) -> None:
        """Lose the process's request: it never arrives."""
        assert process.call is not None
        process.call.lost = True

    def lose_answer(self, process: Process) -> None:
        """Deliver the process's request, but lose the answer."""
        assert process.call is not None
        process.call.serve()
        process.call.lost = True

    def wait_in_vain(self, process: Process, seconds: float) -> None:
        """Let a process whose call gets no answer give up waiting after some time."""
        assert self.waits_for_an_answer(process)
        self.now_s += seconds
        process.resume(error=Unanswered())

    def can_arrive(self, held: Held) -> bool:
        """Whether the held request's receiver can take it."""
        return self._is_answered(held.call)

    def arrive(self, held: Held, *, answered: bool = True) -> None:
        """Deliver a held request. Its process continues if it still waits for the answer."""
        self.held.remove(held)
        call = held.call
        try:
            answer = call.serve()
        finally:
            waits = call.process.call is call
            call.held, call.lost = False, waits
        if waits and answered:
            call.process.resume(answer)

    def drop(self, held: Held) -> None:
        """Drop a held request: it never arrives."""
        self.held.remove(held)
        held.call.held, held.call.lost = False, True

    def restart_broker(self, restarted: Broker) -> None:
        """Replace the broker by its restarted state: held requests are lost, and no pending call gets an answer."""
        self.broker = restarted
        for held in list(self.held):
            self.drop(held)

    def break_connection(self, process: Process, *, executed: bool = False, under_way: bool = False) -> None:
        """Break the connection of the process's pending statement.

        Args:
            process: The process.
            executed: Whether the statement was run, so that only its answer is lost.
            under_way: Whether the statement is a COMMIT that the server still processes.
        """
        call = process.call
        assert call is not None
        assert call.session is not None
        if executed:
            try:
                call.serve()
            except MustWait:
                pass
            except Exception:  # noqa: BLE001 - the answer is lost, whatever it was
                pass
        self.database.abandon(call.session, committing=under_way)
        process.resume(error=ConnectionLost())

    def kill(self, process: Process) -> None:
        """SIGKILL the process. Its database sessions live on until the server notices."""
        process.kill()
        process.call = None
        self.database.abandon_all(process)

    def end_sessions(self, process: Process) -> None:
        """End the sessions of a client that was idle too long, as the server does. Its next statement shows it."""
        self.database.disconnect_all(process)

    def stop_database(self) -> None:
        """Stop the database at once and start it: all sessions are gone, with everything uncommitted."""
        self.database.stop()
