"""A process of the simulation: a greenlet that stands still before each call of a server, until somebody serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from greenlet import getcurrent, greenlet

from dualwrite.testing.simulator.database import Session
from dualwrite.testing.simulator.requests import Request

if TYPE_CHECKING:
    from dualwrite.testing.simulator.scheduler import Simulation


class Unanswered(Exception):
    """The process has waited in vain: its request may have arrived or not, and may yet arrive."""


class Killed(BaseException):
    """Takes a killed process off its stack; whatever it calls on its way raises this again."""


class Server(Enum):
    """What a call is for."""

    KAFKA = "kafka"
    DATABASE = "database"
    CLOCK = "clock"
    COMMAND = "command"


class Call:
    """What a process needs before it can go on.

    Attributes:
        process: Who needs it.
        server: Of whom.
        label: For people: the request's or statement's name.
        serve: Does it, at the moment it is called; raises what the process is to see.
        changes: Whether the request may change something, so that a late copy of it matters.
        session: The database session it runs in.
        held: The network has it: it may arrive, late, or never.
        lost: No answer will come.
        until_s: For a pause: when it is over.
        requests: What it asks of Kafka.
    """

    __slots__ = ("changes", "held", "label", "lost", "process", "requests", "serve", "server", "session", "until_s")

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
        requests: Sequence[Request] = (),
    ) -> None:
        self.process = process
        self.server = server
        self.label = label
        self.serve = serve
        self.changes = changes
        self.session = session
        self.until_s = until_s
        self.requests = requests
        self.held = False
        self.lost = False


class Process:
    """One process: a name, a stack of its own, and what it stands before.

    Attributes:
        name: Its name.
        call: What it needs to go on; None once it has ended.
        error: What has come out of it, if anything has: a fault of the code that it runs.
        passed: The fail points that it has passed in its last step.
        commands: What it is asked to do next, one by one, by whoever drives it.
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
        """Whether it is over, by itself or killed."""
        return self.call is None

    def need(self, call: Call) -> object:
        """Called inside the process: stand still until the scheduler serves the call; gives its answer."""
        if self.dead:
            raise Killed
        self.call = call
        answer: object = self._simulation.hub.switch()
        return answer

    def await_command(self) -> object:
        """Called inside the process: stand still until whoever drives it gives it something to do."""
        return self.need(Call(self, Server.COMMAND, "", nothing))

    def _run(self, _: object = None) -> None:
        try:
            self._body(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - told by whoever checks the run
            self.error = error
        self.call = None

    def resume(self, answer: object = None, error: BaseException | None = None) -> None:
        """Let it run on to its next call."""
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
        """Take it off its stack. Nothing that it does on the way reaches a server."""
        if self.call is not None:
            self.dead = True
            self.resume(error=Killed())

    def __repr__(self) -> str:
        return f"<{self.name} before {self.call.label if self.call else 'nothing'}>"


def nothing() -> None:
    """What serving a call comes to that asks nothing of a server."""
