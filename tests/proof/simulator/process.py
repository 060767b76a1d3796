"""A process of the simulation: a greenlet that stops before each call to a server, until the scheduler serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from greenlet import getcurrent, greenlet

from simulator.database import Session
from simulator.requests import Request

if TYPE_CHECKING:
    from dualwrite.waiting import Event
    from simulator.scheduler import Simulation


class Unanswered(Exception):
    """The process got no answer: its request may have arrived or not, and may yet arrive."""


class Killed(BaseException):
    """Unwinds a killed process's stack; every call that it makes on the way raises this again."""


class Server(Enum):
    """The target of a call."""

    KAFKA = "kafka"
    DATABASE = "database"
    CLOCK = "clock"
    COMMAND = "command"


class Call:
    """A call that a process is waiting for.

    Attributes:
        process: The caller.
        server: The target.
        label: The request's or statement's name, for display.
        serve: Carries out the call when called; raises the error for the process.
        changes: Whether the request may change state, so that a late copy of it matters.
        session: The database session of the call.
        held: Whether the network holds it: it may arrive, late, or never.
        lost: Whether no answer will come.
        until_s: The end of a pause.
        event: What ends a pause early.
        requests: The requests to Kafka.
    """

    __slots__ = (
        "changes", "event", "held", "label", "lost", "process", "requests", "serve", "server", "session", "until_s",
    )  # fmt: skip

    def __init__(
        self,
        process: Process,
        server: Server,
        label: str,
        serve: Callable[[], object],
        *,
        changes: bool = False,
        session: Session | None = None,
        until_s: float = 0.0,
        event: Event | None = None,
        requests: Sequence[Request] = (),
    ) -> None:
        self.process = process
        self.server = server
        self.label = label
        self.serve = serve
        self.changes = changes
        self.session = session
        self.until_s = until_s
        self.event = event
        self.requests = requests
        self.held = False
        self.lost = False


class Process:
    """One process: a name, its own stack, and its pending call.

    Attributes:
        name: Its name.
        call: The pending call; None once the process has ended.
        error: The exception that escaped from it, if any: a fault of the code that it runs.
        passed: The fail points that it passed in its last step.
        commands: Its next commands, given one by one by the driver.
        dead: Whether it was killed.
    """

    def __init__(self, name: str, body: Callable[[Process], object], simulation: Simulation) -> None:
        self.name = name
        self.call: Call | None = None
        self.error: BaseException | None = None
        self.passed: list[str] = []
        self.dead = False
        self._simulation = simulation
        self._body = body
        self._stack = greenlet(self._run)

    @property
    def ended(self) -> bool:
        """Whether it has ended, by itself or killed."""
        return self.call is None

    def need(self, call: Call) -> object:
        """Called inside the process: stop until the scheduler serves the call; returns its answer."""
        if self.dead:
            raise Killed
        self.call = call
        answer: object = self._simulation.hub.switch()
        return answer

    def await_command(self) -> object:
        """Called inside the process: stop until the driver gives a command."""
        return self.need(Call(self, Server.COMMAND, "", nothing))

    def _run(self, _: object = None) -> None:
        try:
            self._body(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - reported by the check of the run
            self.error = error
        self.call = None

    def resume(self, answer: object = None, error: BaseException | None = None) -> None:
        """Let it run to its next call."""
        simulation = self._simulation
        former, simulation.hub, simulation.running = simulation.hub, getcurrent(), self
        self.passed = []
        try:
            if error is None:
                self._stack.switch(answer)
            else:
                self._stack.throw(error)
        finally:
            simulation.hub, simulation.running = former, None

    def kill(self) -> None:
        """Unwind its stack. Nothing that it does on the way reaches a server."""
        if self.call is not None:
            self.dead = True
            self.resume(error=Killed())

    def __repr__(self) -> str:
        return f"<{self.name} before {self.call.label if self.call else 'nothing'}>"


def nothing() -> None:
    """Serve a call that asks nothing of a server."""
