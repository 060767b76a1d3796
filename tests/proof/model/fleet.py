"""Fleets in the model: owners whose id is leased, by the product's own keeper of leases. The schedule sends the heartbeats.

The members with an even number run beside one another, and see when one of them is killed; each of the others is in a place of
its own.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from simulator.leases import SimulatedLeases

from dualwrite.clock import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.protocol.members import LeaseState, LeaseTiming, Place, holder_has_died
from dualwrite.protocol.values import writer_of
from dualwrite.recovery.recover import recover_rows
from dualwrite.writing.leased import LeaseKeeper
from model.checker import Finding
from model.grouped import GroupingOwner
from model.owners import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.connection import SimulatedConnection
    from simulator.process import Process

    from dualwrite.protocol.members import Lease
    from dualwrite.recovery.claim import OwnerContext

FLEET: Final = "fleet"
TIMING: Final = LeaseTiming(30.0)
BEAT: Final = "beat"
_TRIES: Final = 5


class Fleet:
    """The members that believe to hold a lease, by the name under which they hold it."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._processes: list[Process] = []

    def place_of(self, process: Process) -> Place:
        """A place for a new process: one with others, or one of its own."""
        self._processes.append(process)
        number = len(self._processes)
        return Place("shared/0" if number % 2 == 0 else f"own/{number}", number)

    def has_ended(self, pid: int) -> bool:
        """Whether the process with that number in its place was killed."""
        return self._processes[pid - 1].dead

    def joined(self, owner: str, member: Member) -> None:
        """Note that a member has a lease."""
        self._members[owner] = member

    def taken_over(self, owner: str) -> None:
        """Another member takes the lease of this one, which must not take itself for its holder then."""
        member = self._members.get(owner)
        if member is not None and member.believes(owner):
            raise Finding(f"the lease of {owner} is taken, which still believes to hold it")


class _Leases(SimulatedLeases):
    """Also sees whether an id that is given back as free has been settled."""

    def give_back(self, transactional_id: str, owner: str, *, settled: bool) -> None:
        if settled and self.holder(transactional_id) == owner:
            opened = [
                known.transactional_id for known in self.simulation.broker.transactions if known.state == "Ongoing"
            ]
            left = [name for name in opened if writer_of(name.rsplit(".", 2)[0]) == transactional_id]
            if left:
                raise Finding(f"{transactional_id} is given back as free, and {left} are open")
        super().give_back(transactional_id, owner, settled=settled)


class Member(GroupingOwner):
    """A member of a fleet. It does what :class:`dualwrite.writing.leased.LeasedWriter` does, in one thread."""

    def __init__(self, fleet: Fleet, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._fleet = fleet
        self._leases = _Leases(self._simulation, FLEET, fleet.taken_over)
        self._keeper = LeaseKeeper(self._leases, TIMING, on_lost=self._note_lost, on_dead=self._note_dead)
        self._keeper._thread = threading.current_thread()  # it starts none
        vars(self._keeper)["_has_died"] = self._has_died
        self._here: Place | None = None
        self._owner = ""
        self._turns = 0
        self._lost = False
        self._dead: Sequence[Lease] = ()

    @property
    def id(self) -> str:
        """The id that it has leased."""
        return self._name

    def believes(self, owner: str) -> bool:
        """Whether it takes itself for the holder of a lease under this name."""
        return self._owner == owner and self._keeper.state is LeaseState.HELD and not self._process.dead

    def _note_lost(self) -> None:
        self._lost = True

    def _note_dead(self, dead: Sequence[Lease]) -> None:
        self._dead = dead

    def _new_owner(self, context: OwnerContext) -> str:
        self._turns += 1
        if self._here is None:
            self._process = self._simulation.processes[context.owner]
            self._here = self._fleet.place_of(self._process)
        return self._here.sign(f"{context.owner} {self._turns}")

    def _has_died(self, lease: Lease) -> bool:
        if died := holder_has_died(lease, self._here, self._fleet.has_ended):
            self._told.counts["members seen to be dead beside another"] += 1
        return died

    def _open(self, context: OwnerContext) -> bool:
        self._owner = self._new_owner(context)
        self._fleet.joined(self._owner, self)
        try:
            self._name = self._keeper.take(self._owner)
        except DualWriteError as error:
            self._told.opened[context.owner] = type(error).__name__
            return False
        if super()._open(context) and self._keeps(context):
            return True
        self._keeper.give_back(settled=False)
        return False

    def _keeps(self, context: OwnerContext) -> bool:
        """Whether the id is still leased after its claim."""
        try:
            if self._keeper.still_held():
                return True
            self._told.counts["leases lost before the claim"] += 1
        except DualWriteError as error:
            self._told.note(error)
        self._told.opened[context.owner] = "lost its lease"
        super()._close(context)
        return False

    def _obey(self, context: OwnerContext, connection: SimulatedConnection, command: object) -> bool:
        if command != BEAT:
            return super()._obey(context, connection, command) or self._go_on(context)
        self._keeper.beat_once()
        if self.believes(self._owner) and self._leases.holder(self._name) != self._owner:
            raise Finding(
                f"a heartbeat of {self._owner} has found another holder, and it still believes to hold its lease"
            )
        if self._lost:
            self._told.counts["leases found lost"] += 1
            return self._go_on(context)
        dead, self._dead = self._dead, ()
        for lease in dead:
            self._settle(context, lease)
        return True

    def _go_on(self, context: OwnerContext) -> bool:
        """Go on under another id; False where that fails again and again."""
        self._keeper.give_back(settled=False)
        self._lost = False
        former, self._lanes = self._lanes, []
        if not any(self._open(context) for _ in range(_TRIES)):
            return False
        self._told.counts["members go on"] += 1
        present, self._lanes = self._lanes, former
        super()._close(context)
        self._lanes = present
        return True

    def _settle(self, context: OwnerContext, lease: Lease) -> None:
        """Settle what a dead member has left, as :func:`dualwrite.recovery.operator.take_over` does."""
        owner, name = self._new_owner(context), lease.transactional_id
        try:
            if not self._leases.adopt(lease, owner, TIMING.timeout_s):
                return
            report = recover_rows(
                partial(_of, context.store.find, name),
                store=context.store,
                connect=lambda: nullcontext(context.coordinator),
                claims_all=True,
                deadline=Deadline(TIMEOUT_S),
                owner=owner,
            )
            self._told.losses.update(str(loss.row.prepared) for loss in report.losses)
            self._leases.give_back(name, owner, settled=True)
            self._told.counts["dead members settled for"] += 1
        except DualWriteError as error:
            self._told.note(error)

    def _close(self, context: OwnerContext) -> None:
        super()._close(context)
        settled = not any(lane.needs_settling for lane in self._lanes)
        self._keeper.give_back(settled=settled)


def _of(find: Callable[[str], Sequence[Any]], name: str) -> Sequence[Any]:
    return [row for row in find(name) if row.transactional_id.partition("#")[0] == name]
