"""Claiming: become the one owner of a transactional id, who must then settle what former owners left.

A loss that is found then is reported once: the row says whether it was.
"""

from __future__ import annotations

import getpass
import logging
import os
import secrets
import select
import socket
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import (
    CompletionPending,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    OutcomeUnverifiable,
)
from dualwrite.interfaces import NO_OBSERVER, Observer, StateStore, TransactionCoordinator
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import (
    Outcome,
    StateRow,
    TransactionStatus,
    gone_back,
    lane_id,
    lane_number,
    outbox_id,
    writer_of,
)
from dualwrite.recovery.settle import settle

if TYPE_CHECKING:
    from dualwrite.protocol.members import Place
    from dualwrite.protocol.values import Incident


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnerContext:
    """The two servers of a dual write, and our name there, which no other owner has: it marks our own claims."""

    coordinator: TransactionCoordinator
    store: StateStore
    owner: str
    observer: Observer = NO_OBSERVER


def default_owner() -> str:
    """Our name for people who read the row: ``user@host:pid``."""
    return f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"


def unique_owner(name: str | None = None) -> str:
    """The name, or that of :func:`default_owner` if not given, with a suffix that makes it unique."""
    return f"{name or default_owner()} {secrets.token_hex(6)}"


def lease_owner(name: str | None = None) -> str:
    """As :func:`unique_owner`, with the place of this process: other processes there then see at once that it has died."""
    owner, here = unique_owner(name), place_of_this_process()
    return owner if here is None else here.sign(owner)


def place_of_this_process() -> Place | None:
    """Where this process runs; None if the system does not say it. Only Linux does.

    Each container has a namespace of process ids of its own, and so is a place of its own. Two copies of a running virtual
    machine look like one place: a process of one copy may count as dead because its twin in the other has ended. It is then
    fenced, as if its lease had expired.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None
    from dualwrite.protocol.members import Place  # noqa: PLC0415 - most writers have no lease

    return Place(f"{boot}/{namespace}", os.getpid())


def has_ended(pid: int) -> bool:
    """Whether the process of this place with that id has ended, even if its parent has not reaped it yet.

    False if that cannot be known, and if another process has the id by now.
    """
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (
        OSError
    ):  # the kernel is older, the container may not call it, no file can be opened, a thread has the number
        return False
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(process)


def claim_rows(
    context: OwnerContext,
    transactional_ids: Sequence[str],
    deadline: Deadline,
    *,
    guard: tuple[str, int] | None = None,
    raise_to: Mapping[str, int] | None = None,
    without_kafka: bool = False,
) -> Sequence[StateRow]:
    """Raise the incarnations. From its return on, no former owner of these ids can decide anything.

    The Kafka ids of the new incarnations must be unknown to the coordinator. If it knows one, the database has gone back in
    time (restored, cloned, failed over to an older state): the claim is rolled back, and every retry fails the same way until
    a person has looked. ``Fenced`` if another owner has claimed ``guard``. If it raises, nothing was claimed.

    ``without_kafka`` claims while Kafka is away, and the rows say so. Under such an incarnation Kafka must not be asked for
    anything: before that, the id is claimed once more, with Kafka, and all incarnations since are compared.
    """
    failpoints.hit("claim.before")
    verify = None if without_kafka else _Verify(context.coordinator, deadline, raise_to or {})
    rows = context.store.claim(
        transactional_ids,
        owner=context.owner,
        cluster_id=None if without_kafka else context.coordinator.cluster_id(deadline),
        guard=guard,
        verify=verify,
        raise_to=raise_to,
    )
    failpoints.hit("claim.row_raised")
    how = " without Kafka" if without_kafka else ""
    for row in rows:
        logger.info("%s: claimed incarnation %d%s as %s", row.transactional_id, row.incarnation, how, row.owner)
    return rows


@dataclass(frozen=True)
class _Verify:
    """Checks newly claimed rows. ``raised`` has the ids of a recovery after a restore, which has looked already."""

    coordinator: TransactionCoordinator
    deadline: Deadline
    raised: Collection[str]

    def __call__(self, rows: Sequence[StateRow]) -> None:
        _check_new_ids(self.coordinator, rows, self.deadline, self.raised)


def _check_new_ids(
    coordinator: TransactionCoordinator, rows: Sequence[StateRow], deadline: Deadline, raised: Collection[str] = ()
) -> None:
    new = [(row, number) for row in rows for number in _unseen(row, is_raised=row.transactional_id in raised)]
    views = coordinator.describe([row.kafka_id(incarnation) for row, incarnation in new], deadline)
    for row, incarnation in new:
        kafka_id = row.kafka_id(incarnation)
        if views[kafka_id].status is not TransactionStatus.NO_SUCH_ID:
            raise gone_back(
                f"Kafka already knows {kafka_id}, which the database is only now making", row.transactional_id
            )


def _unseen(row: StateRow, *, is_raised: bool) -> range:
    """The incarnations that Kafka must not know: the new one, and all that were claimed while it was away."""
    first = row.incarnation if is_raised or row.unverified_from is None else row.unverified_from
    return range(first, row.incarnation + 1)


def claim_writers(
    context: OwnerContext,
    transactional_ids: Sequence[str],
    select: Callable[[], Sequence[StateRow]],
    deadline: Deadline,
    *,
    raise_to: Mapping[str, int] | None = None,
) -> Sequence[StateRow]:
    """Claim all lanes of writers in one transaction: an owner that loses one of them loses all.

    ``select`` reads the rows again: a lane may have been added just before the claim, and none after it.
    """
    wanted = {name: floor for name, floor in (raise_to or {}).items() if name in transactional_ids}
    claimed = {row.transactional_id: row for row in claim_rows(context, transactional_ids, deadline, raise_to=wanted)}
    for row in select():
        name, first = row.transactional_id, claimed.get(writer_of(row.transactional_id))
        if name not in claimed and first is not None:
            guard = (first.transactional_id, first.incarnation)
            try:
                [claimed[name]] = claim_rows(context, [name], deadline, guard=guard)
            except Fenced as error:
                logger.info("%s: left to the new owner of %s: %s", name, first.transactional_id, error)
    return list(claimed.values())


def claim_lanes(
    context: OwnerContext, name: str, count: int, deadline: Deadline, *, outbox: bool = False
) -> Mapping[str, StateRow]:
    """Claim the first lane, then every other that has a row, and settle them. Returns the rows by id.

    See :func:`claim_every_lane`. If settling found a loss, it is recorded and raised (``DecidedTransactionLost``,
    ``OutcomeUnverifiable``); the next claim succeeds.
    """
    rows = claim_every_lane(context, name, count, deadline, outbox=outbox)
    settle_lanes(context, rows.values(), deadline)
    return rows


def claim_every_lane(
    context: OwnerContext,
    name: str,
    count: int,
    deadline: Deadline,
    *,
    outbox: bool = False,
    without_kafka: bool = False,
) -> Mapping[str, StateRow]:
    """Claim the first lane, then every other that has a row, that of the outbox included. Settles nothing.

    The first lane comes first: from its claim on, the former owner can add no lane. There are ``count`` lanes at least, and
    with ``outbox`` the row under which waiting messages are sent. ``without_kafka`` is that of :func:`claim_rows`.
    """
    rows = {row.transactional_id: row for row in claim_rows(context, [name], deadline, without_kafka=without_kafka)}
    others = {
        row.transactional_id
        for row in context.store.find(f"{name}#")
        if row.transactional_id == outbox_id(name) or lane_number(name, row.transactional_id) is not None
    }
    others |= {lane_id(name, number) for number in range(1, count)}
    if outbox:
        others.add(outbox_id(name))
    if others:
        guard = (name, rows[name].incarnation)
        more = claim_rows(context, sorted(others), deadline, guard=guard, without_kafka=without_kafka)
        rows.update((row.transactional_id, row) for row in more)
    return rows


def settle_lanes(context: OwnerContext, rows: Iterable[StateRow], deadline: Deadline) -> None:
    """Settle what former owners of newly claimed rows have left. Raises the first loss; every loss is recorded."""
    report = settle(
        rows,
        coordinator=context.coordinator,
        store=context.store,
        deadline=deadline,
        observer=context.observer,
    )
    failpoints.hit("claim.settled")
    report.raise_losses()


LOSSES: Final = (DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable)


def note_reported(store: StateStore, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
    """Note that these losses are reported to a caller now. If that cannot be noted, they are reported again later."""
    if not losses:
        return
    try:
        store.note_reported(losses)
    except DualWriteError as error:
        logger.warning("could not record which losses were reported; they will be reported again: %s", error)


def note_raised(store: StateStore, loss: DatabaseWentBack | DecidedTransactionLost | OutcomeUnverifiable) -> None:
    """Note that a loss is reported to a caller by the error that is about to be raised."""
    if loss.state is not None and loss.transactional_id is not None:
        note_reported(store, [(loss.transactional_id, PreparedTxnState.from_string(loss.state))])


@contextmanager
def noting_reported(store: StateStore) -> Generator[None, None, None]:
    """Note that a loss that leaves the block is reported to its caller."""
    try:
        yield
    except LOSSES as loss:
        note_raised(store, loss)
        raise


@contextmanager
def reporting_at_open(store: StateStore, name: str) -> Generator[None, None, None]:
    """Report all unreported losses of a writer, its lanes' included, with a single error, so that the next opening succeeds."""
    try:
        yield
    except LOSSES:
        note_reported(store, [(found.transactional_id, found.state) for found in unreported(_incidents(store, name))])
        raise
    incidents = _incidents(store, name)
    left = [found for found in incidents if found.acknowledged_at is None]
    if left:
        logger.error(
            "%s: %d unacknowledged losses: look at them with `dualwrite status`, then run `dualwrite acknowledge`",
            name,
            len(left),
        )
    new = unreported(incidents)
    note_reported(store, [(found.transactional_id, found.state) for found in new])
    if new:
        raise _as_error(new[0], others=len(new) - 1)


def unreported(incidents: Iterable[Incident]) -> Sequence[Incident]:
    """The incidents that were not reported to any caller, and that no person has looked at."""
    return [found for found in incidents if found.reported_at is None and found.acknowledged_at is None]


def _incidents(store: StateStore, name: str) -> Sequence[Incident]:
    return [
        found
        for found in store.incidents(name)
        if found.transactional_id == name or found.transactional_id.startswith(f"{name}#")
    ]


def _as_error(incident: Incident, *, others: int) -> DecidedTransactionLost | OutcomeUnverifiable:
    kind = DecidedTransactionLost if incident.outcome is Outcome.LOST else OutcomeUnverifiable
    more = f"; {others} more: see `dualwrite status`" if others else ""
    return kind(
        f"{incident.detail} (found at {incident.detected_at:%Y-%m-%d %H:%M:%S} by a process that ended before it "
        f"reported the loss{more})",
        transactional_id=incident.transactional_id,
        state=incident.prepared_transaction_state,
    )


def pending(row: StateRow, why: str, *, known: bool) -> CompletionPending:
    """The error of a decided transaction that is not complete. ``known`` says whether Kafka shows that it will be."""
    if known:
        what = f"the database has committed, and Kafka has not yet: {why}"
        return CompletionPending(what, transactional_id=row.transactional_id)
    error = CompletionPending(
        f"the database has committed, and what Kafka did is not known: {why}",
        transactional_id=row.transactional_id,
        next_step="do not run the work again: settling completes it, or finds and records that it is lost",
    )
    error.outcome = "unknown"
    return error
