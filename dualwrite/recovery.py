"""Recovery from outside the writer: settle ids whose owner is gone, and show what is open.

For start-up hooks, commands and operators; works from another process and machine than the writer's. Everyone who settles
claims: an owner that is still alive is fenced by it. So only ids are touched that have something to settle, and, where asked
for, only those whose transaction has been open for some time.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from dualwrite.claiming import Ground, claim_rows, unique_owner
from dualwrite.deadline import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.lane import lane_id
from dualwrite.looking import Unsettled, inspect
from dualwrite.mismatch import other_cluster
from dualwrite.observations import TransactionStatus
from dualwrite.ports import StateRow, StateStore, TransactionCoordinator
from dualwrite.protocol.settle import SettleStep
from dualwrite.settling import Loss, SettleReport, settle
from dualwrite.stores.connecting import engine_of
from dualwrite.stores.schema import check_schema
from dualwrite.stores.state import SqlStateStore
from dualwrite.telling import note_told, untold

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)

_BATCH = 100
_WORKERS = 4


@dataclass(frozen=True)
class IdStatus:
    """One transactional id as the row and the coordinator show it.

    Attributes:
        row: The row.
        incarnation: The unsettled incarnation that this is about: the owner's own, or one that it has not settled.
        kafka_status: What the coordinator shows of that incarnation.
        open_for_s: Seconds since its Kafka transaction began; None where none is open.
        step: What settling would do in Kafka.
        needs_recovery: Whether settling changes anything in Kafka or in the database's tables, or would report a loss.
        prepared_for_s: Seconds since that incarnation has prepared a database transaction that is not ended; None where there
            is none.
    """

    row: StateRow
    incarnation: int
    kafka_status: TransactionStatus
    open_for_s: float | None
    step: SettleStep
    needs_recovery: bool
    prepared_for_s: float | None = None


@dataclass
class RecoveryReport:
    """What :func:`recover` did, or, in a dry run, would do.

    Attributes:
        planned: The ids that needed recovery, with what was found.
        settled: The ids that are settled now.
        rolled_forward: Those whose decided transaction was committed in Kafka now.
        losses: Decided transactions that Kafka does not have. They are recorded in the table of incidents. Also those that
            another process has recorded, and ended before it told anybody.
        skipped: Ids that would need recovery, whose transaction was not open for long enough.
    """

    planned: list[IdStatus] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    rolled_forward: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def status(
    transactional_id: str | None = None,
    *,
    kafka: Mapping[str, object],
    engine: Engine | str,
    schema: str | None = None,
    prefix: str | None = None,
    timeout_s: float = 60.0,
) -> list[IdStatus]:
    """Show every id with something unsettled, its owner's present incarnation included. Changes nothing.

    Args:
        transactional_id: One writer's id, with its lanes; not together with ``prefix``.
        kafka: librdkafka configuration.
        engine: A SQLAlchemy engine or a database URL.
        schema: The database schema of the library's tables.
        prefix: All ids that begin so; all ids if neither is given.
        timeout_s: Bounds the whole, in seconds.

    Raises:
        ConfigurationError: The tables, a row or a right is not as it should be.
        Unavailable: A server does not answer in time.
    """
    with _connected(engine, schema) as store, _coordinator(kafka) as coordinator:
        return _inspect(_select(store, transactional_id, prefix), store, coordinator, Deadline(timeout_s))


def recover(
    transactional_id: str | None = None,
    *,
    kafka: Mapping[str, object],
    engine: Engine | str,
    schema: str | None = None,
    prefix: str | None = None,
    open_for_s: float = 0.0,
    dry_run: bool = False,
    after_restore: bool = False,
    timeout_s: float = 300.0,
    owner: str | None = None,
    on_settled: Callable[[str], None] = lambda _: None,
    on_planned: Callable[[Sequence[IdStatus]], None] = lambda _: None,
) -> RecoveryReport:
    """Settle what dead owners left: commit in Kafka what the database decided, abort the rest.

    May be called at any time, by any number of processes at once. An owner that is alive and has a transaction open is
    fenced: its transaction aborts on both sides and it must open its writer anew.

    Args:
        transactional_id: One writer's id, with its lanes; not together with ``prefix``.
        kafka: librdkafka configuration.
        engine: A SQLAlchemy engine or a database URL.
        schema: The database schema of the library's tables.
        prefix: All ids that begin so; all ids if neither is given.
        open_for_s: Leave ids alone whose Kafka transaction began less than this many seconds ago, or who prepared something
            in the database less than that ago.
        dry_run: Only find out what would be done.
        after_restore: The database was restored, and that Kafka may show newer messages is accepted: go on above every
            incarnation that Kafka knows, aborting what is open there.
        timeout_s: Bounds the whole, in seconds.
        owner: Who recovers, for people who read the row.
        on_settled: Told each id that is done, from several threads.
        on_planned: Told what will be settled before anything is.

    Returns:
        The report. Durable on return: everything decided is complete in Kafka, or stands among the losses.

    Raises:
        ConfigurationError: The tables, a row, the cluster or a right is not as it should be.
        Unavailable: A server does not answer in time; run it again.

    Source: KIP-939, "recovery recipe".
    """
    with _connected(engine, schema) as store:
        report = recover_rows(
            partial(_select, store, transactional_id, prefix),
            store=store,
            connect=partial(_coordinator, kafka),
            open_for_s=open_for_s,
            dry_run=dry_run,
            after_restore=after_restore,
            deadline=Deadline(timeout_s),
            owner=unique_owner(owner),
            on_settled=on_settled,
            on_planned=on_planned,
        )
        if not dry_run:
            _tell(report, _select(store, transactional_id, prefix), store)
        return report


def _tell(report: RecoveryReport, rows: Sequence[StateRow], store: StateStore) -> None:
    """Report also what somebody else has found lost who ended before telling anybody."""
    by_id = {row.transactional_id: row for row in rows}
    reported = {(loss.row.transactional_id, loss.row.prepared) for loss in report.losses}
    for found in untold(store.incidents_of(by_id.keys())):
        if (found.transactional_id, found.state) not in reported:
            row = replace(by_id[found.transactional_id], prepared=found.state)
            report.losses.append(Loss(row, found.outcome, found.detail))
    note_told(store, [(loss.row.transactional_id, loss.row.prepared) for loss in report.losses])


def recover_rows(
    select: Callable[[], Sequence[StateRow]],
    *,
    store: StateStore,
    connect: Callable[[], AbstractContextManager[TransactionCoordinator]],
    open_for_s: float = 0.0,
    dry_run: bool = False,
    after_restore: bool = False,
    deadline: Deadline,
    owner: str,
    on_settled: Callable[[str], None] = lambda _: None,
    on_planned: Callable[[Sequence[IdStatus]], None] = lambda _: None,
) -> RecoveryReport:
    """:func:`recover` on servers at hand: the rows that ``select`` reads, through coordinators that ``connect`` opens."""
    report = RecoveryReport()
    rows = select()
    with connect() as coordinator:
        found = _inspect(rows, store, coordinator, deadline)
        raise_to = _known_incarnations(rows, coordinator, deadline) if after_restore else {}
    for item in found:
        waits_s = item.prepared_for_s if item.open_for_s is None else item.open_for_s
        if item.needs_recovery and (waits_s is None or waits_s >= open_for_s):
            report.planned.append(item)
        elif item.needs_recovery:
            report.skipped.append(item.row.transactional_id)
    on_planned(report.planned)
    if dry_run:
        return report
    ids = sorted({item.row.transactional_id for item in report.planned} | raise_to.keys())
    batches = [ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH)]

    def settle_batch(batch: Sequence[str]) -> SettleReport:
        with connect() as own:
            ground = Ground(own, store, owner)
            claimed = claim_rows(
                ground, batch, deadline, raise_to={key: raise_to[key] for key in batch if key in raise_to}
            )
            return settle(claimed, coordinator=own, store=store, deadline=deadline, on_settled=on_settled)

    for batch, done in zip(batches, _each(settle_batch, batches), strict=True):
        report.settled.extend(batch)
        report.rolled_forward.extend(done.rolled_forward)
        report.losses.extend(done.losses)
    return report


def _each(
    settle_batch: Callable[[Sequence[str]], SettleReport], batches: Sequence[Sequence[str]]
) -> Iterable[SettleReport]:
    if len(batches) <= 1:  # most recoveries, and they need no threads
        return [settle_batch(batch) for batch in batches]
    with ThreadPoolExecutor(_WORKERS) as threads:
        return list(threads.map(settle_batch, batches))


def _select(store: SqlStateStore, transactional_id: str | None, prefix: str | None) -> Sequence[StateRow]:
    if transactional_id is None:
        return store.find(prefix or "")
    if prefix is not None:
        raise TypeError("transactional_id and prefix exclude each other")
    return [*store.read([transactional_id]), *store.find(lane_id(transactional_id, 1)[:-1])]


def _inspect(
    rows: Sequence[StateRow], store: StateStore, coordinator: TransactionCoordinator, deadline: Deadline
) -> list[IdStatus]:
    check_cluster(rows, coordinator.cluster_id(deadline))
    participants = store.participants(rows)
    prepared_at = {(found.row.transactional_id, found.incarnation): found.prepared_at for found in participants}
    inspected = inspect(rows, coordinator=coordinator, deadline=deadline, participants=participants)
    return [
        _describe(item, step, prepared_at.get((item.row.transactional_id, item.incarnation)))
        for item, step in inspected
    ]


def _describe(item: Unsettled, step: SettleStep, prepared_at: datetime | None) -> IdStatus:
    view = item.known.view
    assert view is not None
    is_open = view.status is TransactionStatus.ONGOING
    matters = is_open or step in _MATTERS or (item.known.is_pending and step is SettleStep.RETIRE)
    return IdStatus(
        row=item.row,
        incarnation=item.incarnation,
        kafka_status=view.status,
        open_for_s=_seconds_since(view.started_ms / 1000) if view.started_ms is not None and is_open else None,
        step=step,
        needs_recovery=matters or prepared_at is not None,
        prepared_for_s=None if prepared_at is None else _seconds_since(prepared_at.timestamp()),
    )


def _seconds_since(instant: float) -> float:
    return max(0.0, time.time() - instant)


def check_cluster(rows: Iterable[StateRow], cluster_id: str) -> None:
    """Refuse rows of another cluster: what is not found there would be taken for gone.

    Raises:
        ConfigurationError: A row belongs to another cluster.
    """
    for row in rows:
        if row.cluster_id != cluster_id:
            raise other_cluster(row.cluster_id, cluster_id, row.transactional_id)


_MATTERS = frozenset(
    {
        SettleStep.COMMIT,
        SettleStep.RECORD_LOST,
        SettleStep.RECORD_UNVERIFIABLE,
        SettleStep.WAIT,
        SettleStep.END_FORGOTTEN,
    }
)


def _known_incarnations(
    rows: Iterable[StateRow], coordinator: TransactionCoordinator, deadline: Deadline
) -> dict[str, int]:
    """For each id that Kafka knows newer incarnations of than the database, the first number above them all."""
    result = {}
    for row in rows:
        known = [
            int(match[1])
            for kafka_id in coordinator.list_ids(row.kafka_id(0)[:-1], deadline)
            if (match := re.fullmatch(re.escape(row.kafka_id(0)[:-1]) + r"([0-9]+)", kafka_id))
        ]
        if known and max(known) > row.incarnation:
            result[row.transactional_id] = max(known) + 1
    return result


@contextmanager
def _connected(engine: Engine | str, schema: str | None) -> Generator[SqlStateStore, None, None]:
    used = engine_of(engine)
    try:
        check_schema(used, schema)
        yield SqlStateStore(used, schema=schema)
    finally:
        if used is not engine:
            used.dispose()


@contextmanager
def _coordinator(kafka: Mapping[str, object]) -> Generator[KafkaCoordinator, None, None]:
    coordinator = KafkaCoordinator(KafkaConfig.parse(kafka))
    try:
        yield coordinator
    finally:
        coordinator.close()
