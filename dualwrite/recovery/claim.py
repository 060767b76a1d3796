"""Claiming: become the one owner of a transactional id, who must then settle what former owners left behind."""

from __future__ import annotations

import getpass
import logging
import os
import re
import secrets
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import Fenced
from dualwrite.interfaces import NO_OBSERVER, Observer, StateStore, TransactionCoordinator
from dualwrite.protocol.leases import Place
from dualwrite.protocol.values import StateRow, TransactionStatus, gone_back, lane_id, writer_of
from dualwrite.recovery.settle import settle

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
    """As :func:`unique_owner`, with the place of this process: processes beside it then see at once that it has died."""
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
) -> Sequence[StateRow]:
    """Raise the incarnations. From its return on, no former owner of these ids can decide anything.

    The Kafka ids of the new incarnations must be unknown to the coordinator. If it knows one, the database has gone back in
    time (restored, cloned, failed over to an older state): the claim is rolled back, and every retry fails the same way until
    a person has looked. ``Fenced`` if another owner has claimed ``guard``. If it raises, nothing was claimed.
    """
    failpoints.hit("claim.before")
    rows = context.store.claim(
        transactional_ids,
        owner=context.owner,
        cluster_id=context.coordinator.cluster_id(deadline),
        guard=guard,
        verify=lambda claimed: _check_new_ids(context.coordinator, claimed, deadline),
        raise_to=raise_to,
    )
    failpoints.hit("claim.row_raised")
    for row in rows:
        logger.info("%s: claimed incarnation %d as %s", row.transactional_id, row.incarnation, row.owner)
    return rows


def _check_new_ids(coordinator: TransactionCoordinator, rows: Sequence[StateRow], deadline: Deadline) -> None:
    views = coordinator.describe([row.kafka_id(row.incarnation) for row in rows], deadline)
    for row in rows:
        kafka_id = row.kafka_id(row.incarnation)
        if views[kafka_id].status is not TransactionStatus.NO_SUCH_ID:
            raise gone_back(
                f"Kafka already knows {kafka_id}, which the database is only now making", row.transactional_id
            )


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


def claim_lanes(context: OwnerContext, name: str, count: int, deadline: Deadline) -> Mapping[str, StateRow]:
    """Claim the first lane, then every other that has a row, and settle them. Returns the rows by id.

    The first lane comes first: from its claim on, the former owner can add no lane. There are ``count`` lanes at least.

    If settling found a loss, it is recorded and raised (``DecidedTransactionLost``, ``OutcomeUnverifiable``); the next claim
    succeeds.
    """
    rows = {row.transactional_id: row for row in claim_rows(context, [name], deadline)}
    others = [
        row.transactional_id
        for row in context.store.find(f"{name}#")
        if re.fullmatch(r"[1-9][0-9]*", row.transactional_id[len(name) + 1 :])
    ]
    if more := sorted({*others, *(lane_id(name, number) for number in range(1, count))}):
        guard = (name, rows[name].incarnation)
        rows.update((row.transactional_id, row) for row in claim_rows(context, more, deadline, guard=guard))
    report = settle(
        rows.values(),
        coordinator=context.coordinator,
        store=context.store,
        deadline=deadline,
        observer=context.observer,
    )
    failpoints.hit("claim.settled")
    report.raise_losses()
    return rows
