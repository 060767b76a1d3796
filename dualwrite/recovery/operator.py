"""Ends an open transaction by force: KIP-939's ``forceTerminateTransaction``, which asks the database first.

KIP-939 aborts whatever is open under the id. Here the row says whether the database has decided it, and a decided
transaction is refused: recovery commits it, which ends it as well. If an operator gives it up, the loss is an incident. The
abort comes first, and settling then finds the loss by its proof: if the process is killed in between, the next settler does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.interfaces import StateStore
from dualwrite.interfaces__ports_coordinator import TransactionCoordinator, native_of
from dualwrite.interfaces__ports_observer import Observer
from dualwrite.kafka.config__kafka_config import KafkaConfig
from dualwrite.protocol.by_hand import TerminateStep, step_with_row
from dualwrite.protocol.values import TransactionStatus
from dualwrite.protocol.values__protocol_allowed import check_seconds, check_selection
from dualwrite.protocol.values__protocol_naming import parsed
from dualwrite.protocol.values__protocol_rows import StateRow
from dualwrite.recovery.claim import OwnerContext, claim_writers, unique_owner
from dualwrite.recovery.in_doubt import note_told
from dualwrite.recovery.operator__recovery_foreign import terminate_without_row
from dualwrite.recovery.recover import inspect_rows
from dualwrite.recovery.recover__recovery_plan import IdStatus
from dualwrite.recovery.recover__recovery_servers import connected_coordinator, whole_writers
from dualwrite.recovery.settle import Loss, settle
from dualwrite.stores.opening import opened
from dualwrite.telemetry.loaded import observer_if_loaded

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces__ports_database import Database

logger = logging.getLogger(__name__)


@dataclass
class TerminationReport:
    """The result of :func:`terminate`.

    Attributes:
        terminated: The Kafka ids whose open transaction was aborted.
        settled: The ids of the writer that are settled now; empty for an id without a row.
        rolled_forward: The ids of other lanes of that writer whose decided transaction was committed in Kafka.
        losses: Decided transactions that Kafka does not have, recorded as incidents: the one that was given up, and others that
            settling found.
        unknown: Whether the id has no row, and Kafka does not know it either.
    """

    terminated: list[str] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    rolled_forward: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    unknown: bool = False


def terminate(
    transactional_id: str,
    *,
    kafka: Mapping[str, object],
    database: Engine | Database | str | None = None,
    schema: str | None = None,
    lose_decided: bool = False,
    timeout_s: float = 60.0,
    telemetry: Observer | None = None,
) -> TerminationReport:
    """Abort the open transaction of one id, unless the database has decided it.

    May be called at any time, and repeated. Does nothing if nothing is open. Otherwise it fences the owner: one that is
    alive must open its writer again. Of a writer of this library, all lanes are settled as by :func:`dualwrite.recover`.

    An id that this library did not make has no row, so nothing shows whether another program has decided its transaction: it is
    aborted, as KIP-939 has it. Ask that program's own coordinator first.

    Args:
        transactional_id: The id of a writer, a lane or a slot, as in its row; or Kafka's ``transactional.id``.
        kafka: librdkafka configuration. Its ``client.id`` names the caller to people who read the row and the incident.
        database: A SQLAlchemy engine or a database URL: the database of this library's rows. May be left out for ids that this
            library did not make.
        schema: The database schema of the library's tables.
        lose_decided: Abort also what the database has decided: its rows stay, its messages are lost.
        timeout_s: Limits the whole call, in seconds.
        telemetry: As for `DualWriter`.

    Returns:
        The report. Durable on return: what it names is aborted in Kafka, and losses are recorded.

    Raises:
        IllegalStateError: The database has decided the transaction, or another database may have; nothing was aborted.
        ConfigurationError: An argument cannot be used: an empty id or prefix, a time that is NaN or infinite; or the
            tables, the row, the cluster or a right is not as required.
        Unavailable: A server does not answer in time; run it again.

    Source: KIP-939, ``forceTerminateTransaction``.
    """
    check_selection(transactional_id, None)
    check_seconds("timeout_s", timeout_s)
    observer = observer_if_loaded() if telemetry is None else telemetry
    deadline = Deadline(timeout_s)
    with observer.recovering(), connected_coordinator(kafka) as coordinator:
        if database is None:
            return _without_row(transactional_id, coordinator, deadline, lose_decided=lose_decided)
        with opened(database, schema) as used:
            store = used.store()
            context = OwnerContext(coordinator, store, unique_owner(KafkaConfig.parse(kafka).client_id), observer)
            report = terminate_by(context, transactional_id, deadline, lose_decided=lose_decided)
            note_told(store, [(loss.row.transactional_id, loss.row.prepared) for loss in report.losses])
            for loss in report.losses:
                observer.lost(loss.as_error())
            return report


def terminate_by(context: OwnerContext, asked: str, deadline: Deadline, *, lose_decided: bool) -> TerminationReport:
    """:func:`terminate` on given servers."""
    found = _named(context.store, asked)
    if found is None:
        return _without_row(asked, context.coordinator, deadline, lose_decided=lose_decided)
    row, incarnation = found
    if incarnation is not None and incarnation <= row.settled_incarnation:
        return TerminationReport()  # nothing can be open under it, and the present owner has done nothing wrong
    step, _ = _step(context, [row], deadline, lose_decided=lose_decided)
    if step is TerminateStep.NOTHING:
        return TerminationReport()
    if step is TerminateStep.REFUSE:
        raise _decided(row.transactional_id)

    def select() -> Sequence[StateRow]:
        return whole_writers(context.store, context.store.read([row.transactional_id]))

    claimed = claim_writers(context, [one.transactional_id for one in select()], select, deadline)
    return _settle(context, row.transactional_id, claimed, deadline, lose_decided=lose_decided)


def _settle(
    context: OwnerContext, name: str, claimed: Sequence[StateRow], deadline: Deadline, *, lose_decided: bool
) -> TerminationReport:
    # The owner may have decided between the look and the claim: only now does the row no longer change.
    mine = [row for row in claimed if row.transactional_id == name]
    step, items = _step(context, mine, deadline, lose_decided=lose_decided)
    if step is TerminateStep.REFUSE:
        raise _decided(name)
    report = TerminationReport(
        terminated=[
            item.row.kafka_id(item.incarnation) for item in items if item.kafka_status is TransactionStatus.ONGOING
        ]
    )
    given_up = [item for item in items if item.decided_is_open]
    for item in given_up:
        _abort_decided(context.coordinator, item, deadline)
    done = settle(
        claimed,
        coordinator=context.coordinator,
        store=context.store,
        deadline=deadline,
        on_settled=report.settled.append,
        observer=context.observer,
        lost_because={name: f"given up by {context.owner}"} if given_up else {},
    )
    report.rolled_forward += done.rolled_forward
    report.losses += done.losses
    return report


def _step(
    context: OwnerContext, rows: Sequence[StateRow], deadline: Deadline, *, lose_decided: bool
) -> tuple[TerminateStep, Sequence[IdStatus]]:
    items = inspect_rows(rows, context.store, context.coordinator, deadline)
    step = step_with_row(
        needs_settling=any(item.needs_recovery for item in items),
        decided_is_open=any(item.decided_is_open for item in items),
        lose_decided=lose_decided,
    )
    return step, items


def _abort_decided(coordinator: TransactionCoordinator, item: IdStatus, deadline: Deadline) -> None:
    state, kafka_id = item.row.prepared, item.row.kafka_id(item.incarnation)
    logger.warning("%s: aborting %s although the database has decided it: its messages are lost", kafka_id, state)
    if state.is_native:
        exactly = {kafka_id: (state.producer_id, state.epoch)}
        native_of(coordinator).end_exactly(exactly, committed=False, deadline=deadline)
    else:
        coordinator.end({kafka_id: state}, committed=False, deadline=deadline)
    failpoints.hit("terminate.aborted")


def _without_row(
    kafka_id: str, coordinator: TransactionCoordinator, deadline: Deadline, *, lose_decided: bool
) -> TerminationReport:
    step = terminate_without_row(kafka_id, coordinator, deadline, lose_decided=lose_decided)
    aborted = [kafka_id] if step is TerminateStep.ABORT else []
    return TerminationReport(terminated=aborted, unknown=step is TerminateStep.UNKNOWN)


def _named(store: StateStore, asked: str) -> tuple[StateRow, int | None] | None:
    """The row of an id, which may be Kafka's id of one of its incarnations."""
    if rows := store.read([asked]):
        return rows[0], None
    named = parsed(asked)
    if named is None:
        return None
    name, namespace, incarnation = named
    for row in store.read([name]):
        if row.namespace == namespace:
            return row, incarnation
    return None


def _decided(name: str) -> IllegalStateError:
    return IllegalStateError(
        "the database has decided the open transaction: it is not aborted",
        transactional_id=name,
        next_step=f"run `dualwrite recover {name}`, which commits it; or pass lose_decided to lose its messages",
    )
