"""The leases of a fleet on the simulated database, for one process: each call is a short transaction, of one step or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar, cast

from dualwrite import failpoints
from dualwrite.errors import Unavailable
from dualwrite.protocol.members import Lease, LeaseState, numbers_to_try, place_of
from dualwrite.protocol.values import member_id
from simulator.database import ConnectionLost

if TYPE_CHECKING:
    from simulator.database import Session
    from simulator.scheduler import Simulation

_ATTEMPTS: Final = 5
_MORE: Final = 20
Result = TypeVar("Result")


class SimulatedLeases:
    """:class:`dualwrite.stores.sql.leases.Leases` over the simulated database, whose clock is the simulation's.

    Args:
        simulation: The simulation with the database.
        fleet: The fleet's name.
        taken_over: Called with the former holder's name when another one takes its lease.
    """

    def __init__(self, simulation: Simulation, fleet: str, taken_over: Callable[[str], None]) -> None:
        self.fleet = fleet
        self.simulation = simulation
        self._leases = simulation.database.leases
        self._taken_over = taken_over

    def take(self, owner: str, timeout_s: float, *, has_died: Callable[[Lease], bool]) -> str:
        """See :meth:`dualwrite.stores.sql.leases.Leases.take`."""
        taken = self._run(lambda session: self._take(session, owner, timeout_s, has_died))
        failpoints.hit("lease.taken")
        return taken

    def _take(self, session: Session, owner: str, timeout_s: float, has_died: Callable[[Lease], bool]) -> str:
        there = self._statement(session, "SELECT lease", self.read)
        for lease in there:
            if lease.owner == owner:  # the answer to an earlier attempt was lost
                self._leases[lease.transactional_id] = (owner, self.simulation.now_s + timeout_s)
                return lease.transactional_id
        by_number = {lease.number: lease for lease in there}
        for number in islice(numbers_to_try(there, has_died), len(there) + _MORE):
            found = by_number.get(number, Lease(member_id(self.fleet, number), self.fleet, number))
            if self._statement(session, "UPDATE lease", partial(self._take_over, found, owner, timeout_s)):
                return found.transactional_id
        raise Unavailable("too many members are asking at once")

    def _take_over(self, found: Lease, owner: str, timeout_s: float) -> bool:
        name = found.transactional_id
        former = self._leases.get(name, (None, 0.0))
        died = found.state is LeaseState.HELD and former[0] == found.owner
        if former[0] is not None and former[1] > self.simulation.now_s and not died:
            return False
        if former[0] is not None:
            self._taken_over(former[0])
        self._leases[name] = (owner, self.simulation.now_s + timeout_s)
        return True

    def renew(
        self, transactional_id: str, owner: str, timeout_s: float, *, wait_s: float
    ) -> tuple[bool, Sequence[Lease]]:
        """See :meth:`dualwrite.stores.sql.leases.Leases.renew`."""
        del wait_s
        place = place_of(owner)

        def is_seen(lease: Lease) -> bool:
            return lease.state is LeaseState.EXPIRED or (
                place is not None and lease.owner is not None and place.mark in lease.owner
            )

        def update() -> tuple[bool, Sequence[Lease]]:
            is_ours = self._leases[transactional_id][0] == owner
            if is_ours:
                self._leases[transactional_id] = (owner, self.simulation.now_s + timeout_s)
            return is_ours, [lease for lease in self.read() if is_seen(lease)]

        found = self._run(lambda session: self._statement(session, "UPDATE lease", update))
        failpoints.hit("lease.heartbeat")
        return found

    def adopt(self, dead: Lease, owner: str, timeout_s: float) -> bool:
        """See :meth:`dualwrite.stores.sql.leases.Leases.adopt`."""

        def update() -> bool:
            return self._leases[dead.transactional_id][0] == owner or self._take_over(dead, owner, timeout_s)

        return self._run(lambda session: self._statement(session, "UPDATE lease", update))

    def give_back(self, transactional_id: str, owner: str, *, settled: bool) -> None:
        """See :meth:`dualwrite.stores.sql.leases.Leases.give_back`."""

        def update() -> None:
            if self._leases[transactional_id][0] == owner:
                self._leases[transactional_id] = (None, 0.0) if settled else (owner, self.simulation.now_s)

        self._run(lambda session: self._statement(session, "UPDATE lease", update))
        failpoints.hit("lease.given_back")

    def holder(self, transactional_id: str) -> str | None:
        """The holder of a lease. Not a statement."""
        return self._leases[transactional_id][0]

    def read(self) -> Sequence[Lease]:
        """The leases of the fleet, in order. Not a statement."""
        found = [
            Lease(
                name,
                self.fleet,
                int(name.rpartition("-")[2]),
                owner,
                None if owner is None else until_s - self.simulation.now_s,
            )
            for name, (owner, until_s) in self._leases.items()
        ]
        return sorted(found, key=lambda lease: lease.number)

    def _statement(self, session: Session, label: str, statement: Callable[[], Result]) -> Result:
        return cast("Result", self.simulation.execute(session, label, statement))

    def _run(self, work: Callable[[Session], Result]) -> Result:
        for _ in range(_ATTEMPTS):
            session = self.simulation.database.connect(self.simulation.inside())
            try:
                return work(session)
            except ConnectionLost:
                continue
            finally:
                if not session.broken:
                    self.simulation.database.disconnect(session)
        raise Unavailable("the database does not answer")
