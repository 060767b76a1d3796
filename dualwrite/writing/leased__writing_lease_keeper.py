"""Keeps the lease of one member of a fleet by heartbeats, on a thread of its own."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Final

from dualwrite.clock import now_s
from dualwrite.errors import DualWriteError
from dualwrite.interfaces__ports_database import Leases
from dualwrite.protocol.leases import Lease, LeaseTiming, heard, holder_has_died
from dualwrite.protocol.lives import Machine
from dualwrite.protocol.lives__protocol_tables_lease_life import LEASE_LIFE, LeaseEvent, LeaseState
from dualwrite.recovery.claim import has_ended, place_of_this_process

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
"""The time between two looks at the processes beside this one. A look asks no server: it takes microseconds for each."""


class LeaseKeeper:
    """One lease at a time. Its methods are called by one thread at a time, except for ``state``.

    Args:
        leases: The leases of the fleet.
        timing: How long a lease lasts, and how often it is renewed.
        on_lost: Called in the heartbeats' thread once another member has taken the lease, with each heartbeat until it is given
            up. It returns at once.
        on_dead: Called there with leases of other members that have expired, or whose processes have died beside this one. It
            returns at once.
    """

    def __init__(
        self,
        leases: Leases,
        timing: LeaseTiming,
        *,
        on_lost: Callable[[], object],
        on_dead: Callable[[Sequence[Lease]], object],
    ) -> None:
        self._leases = leases
        self._timing = timing
        self._on_lost = on_lost
        self._on_dead = on_dead
        self._lock = threading.Lock()  # a heartbeat must not judge a lease that is taken or given back meanwhile
        self._machine = Machine("lease", LEASE_LIFE, LeaseState.FREE)
        self._name = self._owner = ""
        self._here = place_of_this_process()
        self._beside: Sequence[Lease] = ()
        self._renewed_at = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> LeaseState:
        """The lease as we know it. ``EXPIRED`` does not wait for a heartbeat that gets no answer. Any thread may ask."""
        state = self._machine.state
        if state is LeaseState.HELD and self._timing.is_over(now_s() - self._renewed_at):
            return LeaseState.EXPIRED
        return state

    def take(self, owner: str) -> str:
        """Take the lowest free number, and keep it from now on. Returns the id, which is not claimed yet.

        Raises:
            ConfigurationError, Unavailable: Nothing was taken.
        """
        asked_at = now_s()
        name = self._leases.take(owner, self._timing.timeout_s, has_died=self._has_died)
        with self._lock:
            self._machine.apply(LeaseEvent.TAKE)
            self._name, self._owner, self._renewed_at = name, owner, asked_at
        logger.info("%s: leased to %s", name, owner)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._beat, name=f"dualwrite {self._leases.fleet} lease", daemon=True
            )
            self._thread.start()
        return name

    def still_held(self) -> bool:
        """Renew the lease now. Returns False if another member has taken it.

        Raises:
            ConfigurationError, Unavailable: That could not be found out.
        """
        asked_at = now_s()
        renewed, _ = self._leases.renew(self._owner, self._timing.timeout_s, wait_s=self._timing.timeout_s)
        with self._lock:
            if self._machine.state is LeaseState.TAKEN:
                return False
            event = heard(self._name, renewed)
            self._machine.apply(event)
            if event is LeaseEvent.RENEW:
                self._renewed_at = asked_at
        return event is LeaseEvent.RENEW

    def give_back(self, *, settled: bool) -> None:
        """Give the lease back, if there is one: free if nothing is left to settle, otherwise expired.

        A database that does not answer only delays it: the lease expires.
        """
        with self._lock:
            name, owner = self._name, self._owner
            if self._machine.state is LeaseState.FREE:
                return
            self._machine.apply(LeaseEvent.GIVE_BACK)
        try:
            self._leases.give_back(name, owner, settled=settled)
        except DualWriteError as error:
            logger.warning("%s: its lease is left to expire: %s", name, error)

    def stop(self) -> None:
        """End the heartbeats. A lease that is still held expires."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._timing.timeout_s)

    def _beat(self) -> None:
        failed = False
        while self._rest(self._timing.pause_s(random.random(), failed=failed)):  # noqa: S311 - jitter
            try:
                failed = not self.beat_once()
            except Exception:
                failed = True
                logger.exception("%s: a heartbeat failed; retrying", self._name)

    def _rest(self, pause_s: float) -> bool:
        """Wait for the next heartbeat, and look at the processes beside this one meanwhile. False if the keeper has stopped."""
        until = now_s() + pause_s
        # Event.wait resumes right after a pause of the process: then it is time for a heartbeat, which asks for the lease.
        while (left_s := until - now_s()) > 0:
            if self._stopped.wait(min(left_s, _LOOK_S) if self._beside else left_s):
                return False
            try:
                self.look()
            except Exception:
                logger.exception("%s: could not report a member that has died; the next heartbeat does", self._name)
        return not self._stopped.is_set()

    def look(self) -> None:
        """Report members whose processes have died beside this one since the last heartbeat, each once. Asks no server."""
        self._report(())

    def _report(self, expired: Sequence[Lease]) -> None:
        died = [lease for lease in self._beside if self._has_died(lease)]
        self._beside = [
            lease for lease in self._beside if lease not in died
        ]  # the next heartbeat shows those still unsettled
        if dead := [*expired, *died]:
            self._on_dead(dead)

    def _has_died(self, lease: Lease) -> bool:
        return holder_has_died(lease, self._here, has_ended)

    def beat_once(self) -> bool:
        """Send one heartbeat, and report what it shows. False if it failed; it is retried soon."""
        with self._lock:
            name, owner, state = self._name, self._owner, self._machine.state
        if state is LeaseState.FREE:
            return True
        if state is LeaseState.TAKEN:
            self._on_lost()  # it may have failed when it was called first
            return True
        asked_at = now_s()
        try:
            renewed, found = self._leases.renew(owner, self._timing.timeout_s, wait_s=self._timing.beat_s)
        except Exception as error:  # noqa: BLE001 - no error may end the heartbeats
            logger.warning("%s: a heartbeat failed; retrying: %s", name, error)
            with self._lock:
                if self._owner == owner and self.state is LeaseState.EXPIRED:
                    self._machine.apply(LeaseEvent.EXPIRE)
            return False
        with self._lock:
            if self._owner != owner or self._machine.state is LeaseState.FREE:
                return True
            event = heard(name, renewed)
            self._machine.apply(event)
            if event is LeaseEvent.RENEW:
                self._renewed_at = asked_at
        if event is LeaseEvent.LOSE:
            logger.warning("%s: another member of the fleet has taken its lease", name)
            self._on_lost()
        others = [lease for lease in found if lease.transactional_id != name]
        self._beside = [lease for lease in others if lease.state is LeaseState.HELD]
        self._report([lease for lease in others if lease.state is LeaseState.EXPIRED])
        return True
