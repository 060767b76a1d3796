"""``DualWriter.leased``: writers whose ids are leased from a pool, and the thread that keeps the lease.

A ``LeasedWriter`` uses one ordinary writer after another: if it loses its id, it opens the next writer and closes the previous
one.

The lease decides which member tries which id, so that no newcomer fences a live owner. Safety does not rest on it: the member
claims the id as every writer does, and the row and Kafka fence its former owner.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn

from dualwrite import failpoints
from dualwrite.clock import now_s
from dualwrite.errors import DualWriteError, Fenced, IllegalStateError, TransactionAborted
from dualwrite.interfaces import Leases
from dualwrite.protocol.lives import Machine
from dualwrite.protocol.members import (
    LEASE_LIFE,
    Lease,
    LeaseEvent,
    LeaseState,
    LeaseTiming,
    check_fleet,
    heard,
    holder_has_died,
)
from dualwrite.protocol.process import Health
from dualwrite.protocol.values import writer_of
from dualwrite.recovery.claim import LOSSES, has_ended, lease_owner, place_of_this_process
from dualwrite.writing import transaction
from dualwrite.writing.left_behind import take_over
from dualwrite.writing.opening import Opening, ask_first
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from types import TracebackType

    import psycopg
    from sqlalchemy import Connection
    from typing_extensions import Unpack

    from dualwrite.interfaces import StateStore
    from dualwrite.protocol.outbox import Outbox
    from dualwrite.stores.sql.adopted import DjangoConnection
    from dualwrite.writing.transaction import Transaction, WriterSettings
    from dualwrite.writing.writer_resources import Opened

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_RUN_AGAIN: Final = "run the work again: this writer takes another id by itself"


class LeasedWriter(DualWriter):
    """A `DualWriter` that uses one writer after another, each with a leased id.

    ``make`` makes the writer of an id; by default one with the same settings.
    """

    def __init__(
        self,
        fleet: str,
        timing: LeaseTiming,
        *,
        make: Callable[[str], DualWriter] | None = None,
        **settings: Unpack[WriterSettings],
    ) -> None:
        check_fleet(fleet)
        super().__init__(fleet, **settings)
        shared: WriterSettings = {**settings, "database": self._database}
        self._make = make or (lambda name: DualWriter(name, **shared))
        self._fleet = fleet
        self._timing = timing
        self._kafka = settings["kafka"]
        self._owner_name = self._producers.config.client_id
        self._leases: Leases | None = None
        self._keeper: LeaseKeeper | None = None
        self._current: DualWriter | None = None
        self._lost: str | None = None
        self._late: BaseException | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._helper: threading.Thread | None = None
        self._member_opening: Opening[DualWriter] | None = None

    def open(self, *, wait: bool = True) -> None:
        """Lease the lowest free id of the fleet, then claim and settle it. See :meth:`DualWriter.open`.

        It may be called in a process that was forked after the writer was made, and before it was opened.
        """
        if self._keeper is not None or self._member_opening is not None or self._closing.is_set():
            raise IllegalStateError("the writer was already opened", transactional_id=self.transactional_id)
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            if self._owns_database:
                self._database.forked()
        if not wait:
            self._member_opening = Opening(
                self._fleet,
                self._try_next,
                publish=self._use,
                discard=DualWriter.close,  # its own method, as for opening
                report=self._losses.report,
            )
            self._member_opening.start()
            return
        self._database.check()
        keeper = self._make_keeper()
        try:
            self._use(self._next(keeper))
        except BaseException:
            self.close()
            raise

    def _make_keeper(self) -> LeaseKeeper:
        self._leases = leases = self._database.leases(self._fleet)
        self._keeper = LeaseKeeper(leases, self._timing, on_lost=self._note_taken, on_dead=self._help_dead)
        return self._keeper

    def _try_next(self) -> DualWriter:
        """Try to open a writer, in the background. If it raises, it leaves no id leased."""
        self._database.check()
        if self._falls_back_after_s is None:  # otherwise Kafka is not needed
            ask_first(self._producers.config, self._fleet)  # before an id is leased
        return self._next(self._keeper or self._make_keeper())

    def _use(self, writer: DualWriter) -> None:
        self._current, self.transactional_id = writer, writer.transactional_id

    def _next(self, keeper: LeaseKeeper) -> DualWriter:
        while True:
            name = keeper.take(lease_owner(self._owner_name))
            try:
                writer = self._make(name)
                DualWriter.open(writer)  # DualWriter's own method, whatever the class: this is a thread
                if self._keeps(writer, keeper):
                    return writer
            except BaseException:
                keeper.give_back(settled=False)
                raise
            keeper.give_back(settled=False)

    @staticmethod
    def _keeps(writer: DualWriter, keeper: LeaseKeeper) -> bool:
        """Whether the id is still leased after its claim. If not, closes the writer.

        If we were paused before the claim, another member may have settled the id already, and nobody would settle it after us.
        """
        held = False
        try:
            held = keeper.still_held()
        finally:
            if not held:
                logger.warning(
                    "%s: another member took the lease before the id was claimed; trying another id",
                    writer.transactional_id,
                )
                writer.close()
        return held

    def _block(
        self,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None,
        joined: StateStore | None = None,
        *,
        outbox: Outbox | None = None,
    ) -> AbstractContextManager[Transaction]:
        return _MembersBlock(self, connection, joined, outbox)

    def _lost_with(self, writer: DualWriter, error: BaseException | None) -> TransactionAborted | None:
        """The error to raise in place of the block's, if that says that another owner has taken this member's id."""
        if not isinstance(error, Fenced) or error.outcome != "aborted":
            return None
        if writer_of(error.transactional_id or "") != writer.transactional_id:
            return None
        self._note_lost(writer, f"{writer.transactional_id} has another owner")
        return TransactionAborted(
            f"this member of fleet {self._fleet!r} has lost its id: {error.what}",
            transactional_id=error.transactional_id,
            next_step=_RUN_AGAIN,
        )

    def _await_opening(self) -> None:
        """Wait a moment for an opening in the background; see :meth:`Opening.wait`."""
        if (opening := self._member_opening) is not None and not opening.done and os.getpid() == self._pid:
            opening.wait(self._limits.lane_timeout_s)

    def _usable(self) -> DualWriter:
        writer = self._current
        if writer is None and self._member_opening is not None and os.getpid() == self._pid:
            self._member_opening.check()
        if writer is None or os.getpid() != self._pid:
            self._refuse(writer)
        if self._lost is not None:
            raise self._nothing_begun(writer, self._lost)
        return writer

    def _nothing_begun(self, writer: DualWriter, why: str) -> TransactionAborted:
        return TransactionAborted(
            f"this member of fleet {self._fleet!r} has lost its id: {why}; nothing was begun",
            transactional_id=writer.transactional_id,
            next_step=_RUN_AGAIN,
        )

    def _left_behind(self, writer: DualWriter) -> TransactionAborted | None:
        """The error of a block that found its writer closed because this member continues under another id."""
        present = self._current
        if present is None or present is writer:
            return None
        return self._nothing_begun(writer, f"it goes on as {present.transactional_id}")

    def _opened(self) -> Opened:
        return self._usable()._opened()  # noqa: SLF001 - its own class

    def _require_open(self) -> None:
        writer, opening = self._current, self._member_opening
        if writer is None and opening is not None and os.getpid() == self._pid:
            opening.check(patient=True)  # the block of a unit waits
            if not opening.stopped:
                return
        if writer is None or os.getpid() != self._pid:
            self._refuse(writer)
        transaction.refuse_nested(writer._lanes, self.transactional_id)  # noqa: SLF001 - its own class; its blocks are the writer's

    def _refuse(self, writer: DualWriter | None) -> NoReturn:
        if writer is not None:
            raise IllegalStateError(
                f"the writer was opened in another process, {self._pid}",
                transactional_id=writer.transactional_id,
                next_step="a fork cannot share a producer: open the writer in each process, after the fork",
            )
        raise IllegalStateError(
            "the writer is closed" if self._closing.is_set() else "the writer is not open",
            transactional_id=self.transactional_id,
            next_step="use `with writer:` or open()",
        )

    def _note_taken(self) -> None:
        if (writer := self._current) is not None:
            self._note_lost(writer, f"another member has taken the lease of {writer.transactional_id}")

    def _note_lost(self, writer: DualWriter, why: str) -> None:
        """Start taking over another id, unless already doing so."""
        with self._lock:
            if self._current is not writer or self._lost is not None or self._closing.is_set():
                return
            former = self._helper
            self._helper = self._started(lambda: self._go_on(writer, former), "takes over")
            self._lost = why

    def _help_dead(self, dead: Sequence[Lease]) -> None:
        """Begin to settle what dead members left. Does nothing if this member is busy: the next heartbeat shows them again."""
        with self._lock:
            if self._closing.is_set() or (self._helper is not None and self._helper.is_alive()):
                return
            self._helper = self._started(lambda: self._settle(dead), "settles")

    def _started(self, work: Callable[[], None], does: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"dualwrite {self._fleet} {does}", daemon=True)
        thread.start()
        return thread

    def _go_on(self, former: DualWriter, busy: threading.Thread | None) -> None:
        """Open a writer under another id, retrying until that succeeds, and close the previous one."""
        if busy is not None:
            busy.join()
        keeper = self._keeper
        assert keeper is not None
        # If a recovery has fenced us, the id is still ours, and we probably take it again.
        keeper.give_back(settled=False)
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                writer = self._next(keeper)
            except Exception as error:  # noqa: BLE001 - whatever it is, only another attempt can help
                if isinstance(error, LOSSES):
                    self._losses.report(error)
                logger.warning("%s: no free id yet; retrying: %s", former.transactional_id, error)
                self._closing.wait(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            with self._lock:
                self._use(writer)
                self._lost = None
            logger.warning(
                "%s: lost its id; this member continues as %s", former.transactional_id, writer.transactional_id
            )
            break
        try:
            former.close()
        except LOSSES as error:
            self._late = error  # close() raises it: only the log has reported it
        except DualWriteError as error:
            logger.warning("%s: closed: %s", former.transactional_id, error)

    def _settle(self, dead: Sequence[Lease]) -> None:
        """Settle what dead members left, so that nobody waits for a newcomer to take their ids."""
        leases = self._leases
        assert leases is not None
        limit_s = min(self._limits.timeout_s, self._timing.timeout_s)
        for lease in dead:
            name, owner = lease.transactional_id, lease_owner(self._owner_name)
            if self._closing.is_set():
                return
            try:
                # Not renewed: if this takes longer, another member helps. Every settler claims.
                if not leases.adopt(lease, owner, self._timing.timeout_s):
                    continue
                # Claims it in any case: a member that was only paused must not begin anything under a free id.
                report = take_over(
                    name,
                    kafka=self._kafka,
                    database=self._database,
                    timeout_s=limit_s,
                    owner=self._owner_name,
                    observer=self._observer,
                    when_refused=self._limits.outbox_refused,
                )
                for loss in report.losses:
                    self._losses.report(loss.as_error())
                if report.went_back:
                    raise report.went_back[0]
                leases.give_back(name, owner, settled=True)
                logger.info("%s: settled for a member that ended without giving it back", name)
            except Exception as error:  # noqa: BLE001 - it is retried, here or by another member, when the lease expires
                logger.warning("%s: cannot settle a dead member's id yet, will retry: %s", name, error)

    def health(self) -> Health:
        """Also says whether the lease is lost, or was not renewed in time."""
        writer, keeper = self._current, self._keeper
        if writer is None or keeper is None or os.getpid() != self._pid:
            known = Health(self.transactional_id, open=False)
            opening = self._member_opening if os.getpid() == self._pid else None
            return known if opening is None else opening.shown_in(known)
        known = writer.health()
        return replace(
            known,
            lease_lost=self._lost is not None,
            lease_expired=self._lost is None and keeper.state is LeaseState.EXPIRED,
            unreported_losses=known.unreported_losses + self._losses.unreported,
        )

    def close(self) -> None:
        """Close the writer, then give the lease back. See :meth:`DualWriter.close`."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing.set()
        if self._member_opening is not None:
            self._member_opening.stop()
        if self._helper is not None:
            self._helper.join(2 * self._limits.timeout_s)
        settled = False
        self._close_groups(self._limits.timeout_s)
        writer, self._current = self._current, None
        try:
            if writer is not None:
                writer.close()
                settled = writer._lanes.left_settled  # noqa: SLF001 - its own class
                failpoints.hit("lease.settled")
            late, self._late = self._late, None
            if late is not None:
                raise late
            self._losses.raise_unreported()
        finally:
            if self._keeper is not None:
                # The heartbeats continue until here: closing may take longer than a lease lasts.
                self._keeper.give_back(settled=settled)
                self._keeper.stop()
            if self._owns_database:
                self._database.close()

    def __repr__(self) -> str:
        if self._current is not None:
            return repr(self._current)
        opens = "not open" if self._member_opening is None else "opening"
        return f"<DualWriter of fleet {self._fleet} {'closed' if self._closing.is_set() else opens}>"


class _MembersBlock(AbstractContextManager["Transaction"]):
    """A block of the writer that the member has when the block is entered."""

    def __init__(
        self,
        member: LeasedWriter,
        connection: Connection | psycopg.Connection[object] | DjangoConnection | None,
        joined: StateStore | None,
        outbox: Outbox | None,
    ) -> None:
        self._member = member
        self._given = connection, joined
        self._outbox = outbox

    def __enter__(self) -> Transaction:
        self._member._await_opening()  # noqa: SLF001 - of this module
        self._writer = writer = self._member._usable()  # noqa: SLF001 - of this module
        self._block = block = writer._block(*self._given, outbox=self._outbox)  # noqa: SLF001 - its own class
        try:
            return block.__enter__()
        except Fenced as error:
            if (lost := self._member._lost_with(writer, error)) is not None:  # noqa: SLF001 - of this module
                raise lost from error
            raise
        except IllegalStateError as error:  # the writer was closed before it had a lane
            if (lost := self._member._left_behind(writer)) is not None:  # noqa: SLF001 - of this module
                raise lost from error
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            left = self._block.__exit__(kind, error, traceback)
        except Fenced as raised:
            if (lost := self._member._lost_with(self._writer, raised)) is not None:  # noqa: SLF001 - of this module
                raise lost from raised
            raise
        if not left and (lost := self._member._lost_with(self._writer, error)) is not None:  # noqa: SLF001 - as above
            raise lost from error
        return left


# Keeps the lease of one member of a fleet by heartbeats, on a thread of its own.

_LOOK_S: Final = 0.5
"""The time between two looks at the other processes here. A look asks no server, and takes microseconds for each process."""


class LeaseKeeper:
    """One lease at a time. Its methods are called by one thread at a time, except for ``state``.

    Both callbacks are called in the heartbeats' thread, and return at once: ``on_lost`` once another member has taken the
    lease, with each heartbeat until it is given up; ``on_dead`` with leases of other members that have expired, or whose
    processes have died where this one runs.
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
        # A call that raised may have taken a lease under this name, if only the answer to its COMMIT is missing.
        self._asking_as = ""
        self._here = place_of_this_process()
        self._beside: Sequence[Lease] = ()
        self._renewed_at = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> LeaseState:
        """The lease as we know it. Becomes ``EXPIRED`` without waiting for an unanswered heartbeat. Any thread may ask."""
        state = self._machine.state
        if state is LeaseState.HELD and self._timing.is_over(now_s() - self._renewed_at):
            return LeaseState.EXPIRED
        return state

    def take(self, owner: str) -> str:
        """Take the lowest free number, and keep it from now on. Returns the id, which is not claimed yet."""
        asked_at, owner = now_s(), self._asking_as or owner
        self._asking_as = owner
        name = self._leases.take(owner, self._timing.timeout_s, has_died=self._has_died)
        self._keep(name, owner, asked_at)
        return name

    def take_number(self, number: int, owner: str) -> str | None:
        """As :meth:`take`, but that number and no other; None if another member holds it."""
        asked_at, owner = now_s(), self._asking_as or owner
        self._asking_as = owner
        name = self._leases.take_number(number, owner, self._timing.timeout_s, has_died=self._has_died)
        if name is not None:
            self._keep(name, owner, asked_at)
        return name

    def _keep(self, name: str, owner: str, asked_at: float) -> None:
        self._asking_as = ""
        with self._lock:
            self._machine.apply(LeaseEvent.TAKE)
            self._name, self._owner, self._renewed_at = name, owner, asked_at
        logger.info("%s: leased to %s", name, owner)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._beat, name=f"dualwrite {self._leases.fleet} lease", daemon=True
            )
            self._thread.start()

    def still_held(self) -> bool:
        """Renew the lease now. Returns False if another member has taken it; raises if nobody can tell."""
        asked_at = now_s()
        renewed, _ = self._leases.renew(self._name, self._owner, self._timing.timeout_s, wait_s=self._timing.timeout_s)
        with self._lock:
            if self._machine.state is LeaseState.TAKEN:
                return False
            event = heard(renewed=renewed)
            self._machine.apply(event)
            if event is LeaseEvent.RENEW:
                self._renewed_at = asked_at
        return event is LeaseEvent.RENEW

    def give_back(self, *, settled: bool) -> None:
        """Give the lease back, if there is one: free if nothing is left to settle, otherwise expired.

        If the database does not answer, the lease expires later.
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
        """Wait for the next heartbeat, and meanwhile look at the other processes here. False if the keeper has stopped."""
        until = now_s() + pause_s
        # After a pause of the process, Event.wait returns at once. A heartbeat is due then, which asks whether the lease is
        # still ours.
        while (left_s := until - now_s()) > 0:
            if self._stopped.wait(min(left_s, _LOOK_S) if self._beside else left_s):
                return False
            try:
                self.look()
            except Exception:
                logger.exception("%s: could not report a member that has died; the next heartbeat does", self._name)
        return not self._stopped.is_set()

    def look(self) -> None:
        """Report members whose processes have died here since the last heartbeat, each once. Asks no server."""
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
            renewed, found = self._leases.renew(name, owner, self._timing.timeout_s, wait_s=self._timing.beat_s)
        except Exception as error:  # noqa: BLE001 - no error may end the heartbeats
            logger.warning("%s: a heartbeat failed; retrying: %s", name, error)
            with self._lock:
                if self._owner == owner and self.state is LeaseState.EXPIRED:
                    self._machine.apply(LeaseEvent.EXPIRE)
            return False
        with self._lock:
            if self._owner != owner or self._machine.state is LeaseState.FREE:
                return True
            event = heard(renewed=renewed)
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
