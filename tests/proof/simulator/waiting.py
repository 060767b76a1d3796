"""How a process of the simulation waits for another one of its own: it stops, as for a server, until the scheduler lets it go on.

See :mod:`dualwrite.waiting`. The scheduler may let time pass instead, in slices: whatever the process waits for comes
earlier, or later, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, TypeVar

from dualwrite import waiting
from dualwrite.clock import Deadline, pause
from dualwrite.waiting import Event
from simulator.process import Call, Server, nothing

if TYPE_CHECKING:
    from simulator.scheduler import Simulation

T = TypeVar("T")

_SLICE_S: Final = 20.0


class SimulatedWaiting:
    """:class:`dualwrite.waiting.Waiting` for the processes of a simulation."""

    cancelled: tuple[type[BaseException], ...] = ()

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def caller(self) -> object:
        """The process."""
        return self._simulation.inside()

    def sleep(self, seconds: float) -> None:
        """See the protocol."""
        pause(seconds)

    def wait_for(self, event: Event, seconds: float) -> None:
        """See the protocol."""
        deadline = Deadline(seconds)
        process = self._simulation.inside()
        while not event.is_set and not deadline.expired:
            until_s = self._simulation.now_s + min(_SLICE_S, deadline.remaining_s())
            process.need(Call(process, Server.CLOCK, "wait", nothing, until_s=until_s, event=event))

    def poll(self, poll: Callable[[float], None], fileno: Callable[[], int] | None, seconds: float) -> None:
        """See the protocol."""
        del fileno
        poll(seconds)

    def elsewhere(self, work: Callable[[], T]) -> T:
        """See the protocol."""
        return work()

    def interruptible(self, allowed: bool) -> AbstractContextManager[object]:
        """See the protocol."""
        del allowed
        return nullcontext()


_running: list[Simulation] = []


def _form() -> waiting.Waiting | None:
    return SimulatedWaiting(_running[-1]) if _running and _running[-1].running is not None else None


def now_running(simulation: Simulation) -> None:
    """Let the processes of this simulation wait in it."""
    _running.append(simulation)


def over() -> None:
    """The newest simulation has ended."""
    _running.pop()


waiting.install(_form)
