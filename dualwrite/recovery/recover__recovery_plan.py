"""Decides what a recovery settles and what it leaves alone, from what the rows and Kafka show. Pure, except for the clock."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dualwrite.protocol.settle import Knowledge, SettleStep
from dualwrite.protocol.values import NEVER_MS, Outcome, TransactionStatus
from dualwrite.protocol.values__protocol_identity import shows_same_transaction
from dualwrite.protocol.values__protocol_naming import writer_of
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.inspect import Unsettled

_MATTERS: Final = frozenset(
    {
        SettleStep.COMMIT,
        SettleStep.RECORD_LOST,
        SettleStep.RECORD_UNVERIFIABLE,
        SettleStep.WAIT,
        SettleStep.REPAIR_MARKERS,
    }
)


@dataclass(frozen=True)
class IdStatus:
    """One transactional id as the row and the coordinator show it.

    Attributes:
        row: The row.
        incarnation: The unsettled incarnation: the owner's own, or one that the owner has not settled.
        kafka_status: The coordinator's status of that incarnation.
        open_for_s: Seconds since its Kafka transaction began; None if none is open.
        step: The step that settling would take in Kafka.
        needs_recovery: Whether settling would change anything in Kafka or in the database's tables, or would report a loss.
        prepared_for_s: Seconds since that incarnation prepared a database transaction that has not ended; None if there is
            none.
        aborted_in_s: Seconds until the broker aborts its open Kafka transaction; None if none is open, or if the broker never
            aborts it.
        went_back: The evidence that the database has lost commits; None if there is none.
        claim_lost: Whether it has lost a claim: then the id can only be claimed by a recovery with ``after_restore``.
        decided_is_open: Whether its open Kafka transaction is the one that the database has decided.
        has_no_time_limit: Whether the broker never aborts a transaction of this incarnation by itself: its producer asked for
            two-phase commit, or for the timeout 2147483647 ms, which brokers keep as the same. None if the coordinator does not
            know the incarnation.
    """

    row: StateRow
    incarnation: int
    kafka_status: TransactionStatus
    open_for_s: float | None
    step: SettleStep
    needs_recovery: bool
    prepared_for_s: float | None = None
    aborted_in_s: float | None = None
    went_back: str | None = None
    claim_lost: bool = False
    decided_is_open: bool = False
    has_no_time_limit: bool | None = None

    @property
    def is_undecided(self) -> bool:
        """Whether settling would undo what the owner has left behind: the row does not name it."""
        prepared = self.row.prepared
        is_named = prepared.has_transaction and prepared.incarnation == self.incarnation
        return not is_named or self.row.completed is not None

    @property
    def waits_for_s(self) -> float | None:
        """Seconds for which something of its owner's has been open on either side; None if nothing is."""
        return self.prepared_for_s if self.open_for_s is None else self.open_for_s


def describe(
    item: Unsettled, step: SettleStep, prepared_at: datetime | None, back: tuple[str, bool] | None
) -> IdStatus:
    """Describe one unsettled incarnation, for people and for the plan.

    Args:
        item: The incarnation, and what is known of it.
        step: The step that settling would take.
        prepared_at: When it prepared a transaction in the database; None if none waits there.
        back: The evidence that the database has lost commits of the id, and whether it has lost a claim.
    """
    view = item.known.view
    assert view is not None
    is_open = view.status is TransactionStatus.ONGOING
    unfinished = item.known.is_pending or _left_unended(item.known)
    matters = is_open or step in _MATTERS or (unfinished and step is SettleStep.RETIRE)
    open_for_s = _seconds_since(view.started_ms / 1000) if view.started_ms is not None and is_open else None
    timeout_s = None if view.timeout_ms in {None, NEVER_MS} else view.timeout_ms / 1000
    return IdStatus(
        row=item.row,
        incarnation=item.incarnation,
        kafka_status=view.status,
        open_for_s=open_for_s,
        step=step,
        needs_recovery=matters or prepared_at is not None or back is not None,
        prepared_for_s=None if prepared_at is None else _seconds_since(prepared_at.timestamp()),
        aborted_in_s=None if open_for_s is None or timeout_s is None else max(0.0, timeout_s - open_for_s),
        went_back=back[0] if back is not None else None,
        claim_lost=back is not None and back[1],
        has_no_time_limit=None if view.timeout_ms is None else view.timeout_ms == NEVER_MS,
        decided_is_open=is_open and step is SettleStep.COMMIT and shows_same_transaction(view, item.row.prepared),
    )


def longest_open_s(items: Iterable[IdStatus]) -> float | None:
    """The age of the oldest of their open Kafka transactions, in seconds; None if none is open."""
    return max((item.open_for_s for item in items if item.open_for_s is not None), default=None)


def _left_unended(known: Knowledge) -> bool:
    """Whether the transaction is recorded as not committed: its finder may have died before it ended what the broker forgot."""
    return known.recorded not in {None, Outcome.COMMITTED}


def _seconds_since(instant: float) -> float:
    return max(0.0, time.time() - instant)


def is_young(item: IdStatus, open_for_s: float) -> bool:
    """Whether its owner began something less than that many seconds ago, and so may be alive."""
    return item.waits_for_s is not None and item.waits_for_s < open_for_s


@dataclass(frozen=True)
class Plan:
    """The ids that a recovery settles, and those that it leaves alone.

    Attributes:
        items: The incarnations to settle.
        skipped: The ids that need recovery and are left alone.
        went_back: The ids that cannot be claimed, with the evidence.
        wanted: The ids that need settling or raising, or were asked for.
        writers: The ids to claim, each writer with all its lanes.
    """

    items: list[IdStatus]
    skipped: list[str]
    went_back: list[tuple[str, str]]
    wanted: frozenset[str]
    writers: list[list[str]]

    @classmethod
    def of(
        cls,
        found: Iterable[IdStatus],
        rows: Sequence[StateRow],
        open_for_s: float,
        raised: Collection[str] = (),
        leased: Collection[str] = (),
        *,
        also: Collection[str] = (),
    ) -> Plan:
        """Decide writer by writer: one whose owner may be alive is left alone as a whole, the others are taken as a whole.

        Args:
            found: Everything that is unsettled.
            rows: All rows that may be taken.
            open_for_s: An owner that began something less than this many seconds ago may be alive.
            raised: Ids whose incarnation a recovery after a restore raises, even if the database has lost their claim.
            leased: Ids whose lease has not expired: their owners may be alive. Decided transactions are settled anyway.
            also: Ids to take even if they need no settling.
        """
        names = {row.transactional_id for row in rows}

        def group(name: str) -> str:
            return writer if (writer := writer_of(name)) in names else name  # a pool's slots have no first lane

        needing = [item for item in found if item.needs_recovery]
        lost = {
            item.row.transactional_id: item.went_back
            for item in needing
            if item.claim_lost and item.went_back is not None and item.row.transactional_id not in raised
        }
        young = {
            group(item.row.transactional_id)
            for item in needing
            if is_young(item, open_for_s) or (item.is_undecided and item.row.transactional_id in leased)
        }
        blocked = {group(name) for name in lost}
        items, skipped = [], []
        for item in needing:
            name = item.row.transactional_id
            if group(name) in blocked:
                continue
            if group(name) in young:
                skipped.append(name)
            else:
                items.append(item)
        wanted = {item.row.transactional_id for item in items} | set(raised)
        wanted |= {name for name in also if group(name) not in blocked}
        taken = {group(name) for name in wanted}
        writers: dict[str, list[str]] = {}
        for name in sorted(names | wanted):
            if group(name) in taken:
                writers.setdefault(group(name), []).append(name)
        return cls(items, list(dict.fromkeys(skipped)), sorted(lost.items()), frozenset(wanted), list(writers.values()))

    def batches(self, size: int) -> list[list[list[str]]]:
        """The writers, in batches of about that many ids."""
        batches: list[list[list[str]]] = []
        count = size
        for writer in self.writers:
            if count >= size:
                batches.append([])
                count = 0
            batches[-1].append(writer)
            count += len(writer)
        return batches
