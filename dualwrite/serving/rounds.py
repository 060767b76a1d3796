"""One look at a target's servers, and what it says of each writer as values for the decision."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import inf
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.supervision import Seen
from dualwrite.protocol.values import member_id, writer_of
from dualwrite.recovery.recover import overview, settled_with
from dualwrite.serving.configuration import fleet_of, is_ours
from dualwrite.stores.sql.ledger import batches_of
from dualwrite.writing.left_behind import Waits, what_waits

if TYPE_CHECKING:
    from dualwrite.interfaces import Database
    from dualwrite.protocol.blocking import Blocker
    from dualwrite.protocol.by_hand import ActionRecord
    from dualwrite.protocol.leases import Lease
    from dualwrite.protocol.values import Incident, StateRow
    from dualwrite.recovery.recover import IdStatus
    from dualwrite.serving.configuration import Target
    from dualwrite.stores.sql.ledger import UnfinishedBatch

_SHOWN: Final = 20
"""How many actions of the history a page shows."""


@dataclass(frozen=True)
class Round:
    """What one look has found.

    Attributes:
        at: When it ended.
        took_s: How long it took, in seconds.
        items: As :func:`dualwrite.status` has them.
        longest_s: The age of the oldest open transaction that the brokers list, of any program; None if none is open.
        blockers: Every open transaction of the cluster with what it blocks, what blocks most first; of dualwrite writers only
            those with the target's prefix.
        incidents: Losses that nobody has acknowledged.
        leases: Those of fleets.
        leader: The lease of the replicas of this service; None before any has taken it.
        waiting: What waits in the database, by writer.
        batches: Batches of Spark sinks that are not completed.
        warnings: Conditions in the database that slow dual writes down, and what could not be found out.
        skew_s: By how much this machine's clock is ahead of the database's.
        seen: Every writer that has something to settle or to send.
        history: What people and services did last, newest first.
    """

    at: datetime
    took_s: float
    items: Sequence[IdStatus]
    longest_s: float | None
    blockers: Sequence[Blocker] = ()
    incidents: Sequence[Incident] = ()
    leases: Sequence[Lease] = ()
    leader: Lease | None = None
    waiting: Sequence[Waits] = ()
    batches: Sequence[UnfinishedBatch] = ()
    warnings: Sequence[str] = ()
    skew_s: float = 0.0
    seen: Sequence[Seen] = ()
    history: Sequence[ActionRecord] = ()


def look(target: Target, database: Database) -> Round:
    """Ask both servers. Changes nothing.

    Raises:
        ConfigurationError: The tables, a row, the cluster or a right is not as required.
        Unavailable: A server does not answer in time.
    """
    began = time.monotonic()
    found = overview(
        kafka=target.kafka, database=database, prefix=target.prefix or None, others=True, timeout_s=target.timeout_s
    )
    items = found.items
    store = database.store()
    rows = store.find(target.prefix)  # after the items: a row that has changed meanwhile is a sign of life
    needing = {item.row.transactional_id for item in items if item.needs_recovery}
    leases = database.lease_list(None, target.prefix)
    waiting = what_waits(
        database, [name for name in store.outbox.writers() if name.startswith(target.prefix)] if store.outbox else ()
    )
    history, missing = _history(database, target.prefix)
    batches, unknown = batches_of(database, target.prefix)
    now = database.forgetting().now()
    leader = next(iter(database.lease_list(member_id(fleet_of(target.name), 0), "")), None)
    seen = every_writer(
        items,
        rows,
        leases=leases,
        held=database.living(needing) if needing else (),
        waiting=waiting,
        now=now,
    )
    return Round(
        at=datetime.now(timezone.utc),
        took_s=time.monotonic() - began,
        items=items,
        longest_s=found.longest_s,
        blockers=found.blockers,
        incidents=store.incidents(target.prefix),
        leases=leases,
        leader=leader,
        waiting=waiting,
        batches=batches,
        warnings=[*database.warnings(), *found.unknown, *missing, *unknown],
        skew_s=time.time() - now.timestamp(),
        seen=seen,
        history=history,
    )


def _history(database: Database, prefix: str) -> tuple[Sequence[ActionRecord], Sequence[str]]:
    """The last actions, and why they are not there: for a record alone, settling does not wait."""
    try:
        history = database.history()
        return (() if history is None else history.last(prefix, limit=_SHOWN)), ()
    except ConfigurationError as error:
        return (), [f"the history of actions cannot be read: {error}"]


def every_writer(
    items: Iterable[IdStatus],
    rows: Sequence[StateRow],
    *,
    leases: Iterable[Lease],
    held: Collection[str],
    waiting: Iterable[Waits],
    now: datetime,
) -> list[Seen]:
    """What is seen of each writer that has something to settle or to send, in order of their names.

    Args:
        items: What is unsettled.
        rows: All rows, read after the items.
        leases: The leases of fleets.
        held: Those of the ids whose lease or slot is held.
        waiting: What waits.
        now: The database's time, read after the rows.
    """
    names = {row.transactional_id for row in rows}
    of_writer: dict[str, list[IdStatus]] = defaultdict(list)
    for item in items:
        if item.needs_recovery:
            of_writer[settled_with(item.row.transactional_id, names)].append(item)
    changed: dict[str, float] = {}
    for row in rows:
        if not is_ours(row.owner):
            writer = settled_with(row.transactional_id, names)
            changed[writer] = min(changed.get(writer, inf), (now - row.updated_at).total_seconds())
    waits = {one.writer: one for one in waiting if one.waiting.rows and one.writer in names}
    lease_of = {lease.transactional_id: lease for lease in leases}
    return [
        _seen(
            name,
            of_writer.get(name, ()),
            unchanged_s=changed.get(name, inf),
            lease=lease_of.get(writer_of(name)),
            held=held,
            waits=waits.get(name),
        )
        for name in sorted({*of_writer, *waits})
    ]


def _seen(
    name: str,
    items: Sequence[IdStatus],
    *,
    unchanged_s: float,
    lease: Lease | None,
    held: Collection[str],
    waits: Waits | None,
) -> Seen:
    return Seen(
        name,
        needs_recovery=bool(items),
        decided=any(not item.is_undecided for item in items),
        undecided=any(item.is_undecided for item in items),
        youngest_s=min((item.waits_for_s for item in items if item.waits_for_s is not None), default=None),
        time_left_s=min(
            (item.aborted_in_s for item in items if item.decided_is_open and item.aborted_in_s is not None),
            default=None,
        ),
        unchanged_s=unchanged_s,
        lease=None if lease is None else lease.state,
        lease_left_s=None if lease is None else lease.left_s,
        slot_held=any(item.row.transactional_id in held for item in items),
        claim_lost=any(item.claim_lost for item in items),
        waiting=0 if waits is None else waits.waiting.rows,
        waiting_s=None if waits is None else waits.waiting.oldest_s,
    )
