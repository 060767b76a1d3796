"""What an operator may do by hand: end transactions by force, delete ids, take an id over, find what blocks readers.

These calls serve where recovery cannot know enough: a transaction of a program that has no row here, an id whose writer
will never come back, a consumer that waits for an open transaction of unknown origin.

KIP-939 aborts whatever is open under the id. Here the row says whether the database has decided it, and a decided
transaction is refused: recovery commits it, which ends it as well. If an operator gives it up, the loss is an incident. The
abort comes first, and settling then finds the loss by its proof: if the process is killed in between, the next settler does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from dualwrite import failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.interfaces import Observer, StateStore, TransactionCoordinator, native_of
from dualwrite.kafka.abandoned import AbandonedTransaction, Completion
from dualwrite.kafka.blocking import BlockingTransaction
from dualwrite.kafka.cluster import HELD_BACK_S, internal_partition
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.transaction_ends import steady_view
from dualwrite.protocol.blocking import (
    Facts,
    TerminateStep,
    by_writer,
    reasons_to_keep,
    step_with_row,
    step_without_row,
)
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import StateRow, TransactionStatus, check_seconds, check_selection, is_drawn, parsed
from dualwrite.recovery import recover
from dualwrite.recovery.claim import OwnerContext, claim_writers, note_reported, unique_owner
from dualwrite.recovery.recover import (
    IdStatus,
    RecoveryReport,
    connected_coordinator,
    inspect_rows,
    recover_rows,
    report_losses,
    rows_of,
    whole_writers,
)
from dualwrite.recovery.settle import Loss, settle
from dualwrite.stores.sql.database import opened
from dualwrite.stores.sql.operators import before
from dualwrite.telemetry import observer_if_loaded

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces import Database

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

    May be called at any time, and repeated. Does nothing if nothing is open. Otherwise it fences the owner: one that is alive
    must open its writer again. If a writer of this library owns the id, all its lanes are settled, as
    :func:`dualwrite.recover` settles them.

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
            note_reported(store, [(loss.row.transactional_id, loss.row.prepared) for loss in report.losses])
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
        return _of_settled(asked, context.coordinator, deadline)
    step, _ = _step(context, [row], deadline, lose_decided=lose_decided)
    if step is TerminateStep.NOTHING:
        return TerminationReport()
    if step is TerminateStep.REFUSE:
        raise _decided(row.transactional_id)

    def select() -> Sequence[StateRow]:
        return whole_writers(context.store, context.store.read([row.transactional_id]))

    claimed = claim_writers(context, [one.transactional_id for one in select()], select, deadline)
    return _settle(context, row.transactional_id, claimed, deadline, lose_decided=lose_decided)


def _of_settled(kafka_id: str, coordinator: TransactionCoordinator, deadline: Deadline) -> TerminationReport:
    """Abort what a settler has begun under a settled incarnation, and leave its present owner alone: it has done nothing wrong.

    Nothing decided is open there. But a settler that another one has overtaken may have begun to end an undecided transaction
    that a broker had forgotten, and have died: no row leads to it any more.
    """
    view = steady_view(coordinator, kafka_id, deadline)
    if view.status is not TransactionStatus.ONGOING:
        return TerminationReport()
    logger.warning("%s: aborting what a settler has left open under a settled incarnation", kafka_id)
    coordinator.retire([kafka_id], deadline)
    return TerminationReport(terminated=[kafka_id])


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


# Deletes ids whose writers will not come back, incidents acknowledged long ago, and runs that are long over.
#
# Every name ever used keeps its row, every loss its incident, and every batch of a Spark sink its run. Where names come
# and go (one for each tenant, batch or host), the tables would grow forever.

UNTOUCHED_FOR_S: Final = 30 * 86400.0
_RUN_AT_LEAST_S: Final = 86400.0
"""A run gives no sign of life before its tasks write; forgetting it then would only fail its job."""
_ENDED: Final = frozenset(
    {
        TransactionStatus.EMPTY,
        TransactionStatus.COMPLETE_COMMIT,
        TransactionStatus.COMPLETE_ABORT,
        TransactionStatus.NO_SUCH_ID,
        TransactionStatus.DEAD,
    }
)


@dataclass
class ForgetReport:
    """The result of :func:`forget`; of a dry run, its plan.

    Attributes:
        forgotten: The ids whose rows are deleted.
        kept: The ids that stay, and why.
        unsettled: The ids among those that recovery must settle first.
        incidents: How many acknowledged incidents are deleted.
        runs: How many runs of Spark batches are deleted.
        actions: How many actions the history loses.
    """

    forgotten: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    unsettled: list[str] = field(default_factory=list)
    incidents: int = 0
    runs: int = 0
    actions: int = 0


def forget(
    transactional_id: str | None = None,
    *,
    kafka: Mapping[str, object],
    database: Engine | Database | str,
    schema: str | None = None,
    prefix: str | None = None,
    untouched_for_s: float = UNTOUCHED_FOR_S,
    dry_run: bool = False,
    timeout_s: float = 60.0,
) -> ForgetReport:
    """Delete the rows of ids that never come back, incidents acknowledged and actions done long ago, and runs long over.

    An id stays, and all ids of its writer with it, if anything of it is unsettled, a loss of it is not acknowledged, a worker
    holds it, or its row was written recently. May be called at any time. A writer that is still open, but has been idle that
    long, is fenced: its next dual write aborts on both sides. A forgotten name may be used again. The ledger of Spark sinks
    stays: it keeps batches from being written twice.

    Args:
        transactional_id: One writer's id, with its lanes; not together with ``prefix``.
        kafka: librdkafka configuration.
        database: A SQLAlchemy engine or a database URL. Its role needs ``DELETE``.
        schema: The database schema of the library's tables.
        prefix: All ids with this prefix; all ids if neither is given.
        untouched_for_s: Delete only rows last written, incidents acknowledged, runs and actions begun more than this many
            seconds ago. Runs of the last day stay.
        dry_run: Only find out what would be done.
        timeout_s: Limits the questions to Kafka, in seconds.

    Returns:
        The report. Durable on return.

    Raises:
        ConfigurationError: An argument cannot be used: an empty id or prefix, a time that is NaN or infinite; or the
            tables, a row, the cluster or a right is not as required.
        Unavailable: A server does not answer in time.
    """
    check_selection(transactional_id, prefix)
    check_seconds("untouched_for_s", untouched_for_s, zero=True)
    check_seconds("timeout_s", timeout_s)
    with opened(database, schema) as used:
        store, forgetting = used.store(), used.forgetting()
        now = forgetting.now()
        rows = {row.transactional_id: row for row in rows_of(store, transactional_id, prefix)}
        # Read before Kafka is asked: a row written since then is not deleted.
        found = recover.status(transactional_id, kafka=kafka, database=used, prefix=prefix, timeout_s=timeout_s)
        unsettled = {item.row.transactional_id for item in found if _is_unsettled(item)}
        with_incidents = {incident.transactional_id for incident in store.incidents(transactional_id or prefix or "")}
        leased = forgetting.leased()
        facts = {
            name: Facts(
                untouched_for_s=(now - row.updated_at).total_seconds(),
                unsettled=name in unsettled,
                leased=name in leased,
                has_open_incident=name in with_incidents,
            )
            for name, row in rows.items()
        }
        report = ForgetReport(kept=dict(reasons_to_keep(facts, untouched_for_s)), unsettled=sorted(unsettled))
        for names in by_writer(rows.keys() - report.kept.keys()).values():
            if dry_run or forgetting.forget([rows[name] for name in names]):
                report.forgotten += names
            else:
                report.kept |= dict.fromkeys(names, "used just now")
        report.incidents = forgetting.forget_incidents(
            prefix or "", before(now, untouched_for_s), dry_run=dry_run, name=transactional_id
        )
        report.runs = forgetting.forget_runs(
            prefix or "",
            before(now, max(untouched_for_s, _RUN_AT_LEAST_S)),
            dry_run=dry_run,
            name=transactional_id,
        )
        report.actions = forgetting.forget_actions(
            prefix or "", before(now, untouched_for_s), dry_run=dry_run, name=transactional_id
        )
        return report


def _is_unsettled(item: IdStatus) -> bool:
    return item.needs_recovery or item.kafka_status not in _ENDED


# Ends open transactions of ids that have no row: those of other programs, for which the operator stands in (KIP-939).


def terminate_without_row(
    kafka_id: str, coordinator: TransactionCoordinator, deadline: Deadline, *, lose_decided: bool
) -> TerminateStep:
    """Abort what is open under a Kafka id that no row names, by ``InitProducerId`` as KIP-939's admin client does.

    An id of this library is refused with ``IllegalStateError``, unless ``lose_decided``: the row of another database may name
    the transaction.
    """
    view = steady_view(coordinator, kafka_id, deadline)
    step = step_without_row(view.status, is_ours=_is_ours(kafka_id), lose_decided=lose_decided)
    if step is TerminateStep.REFUSE:
        raise IllegalStateError(
            "dualwrite made this id, and no row was given that shows whether the database has decided its transaction",
            transactional_id=kafka_id,
            next_step="name its writer's database; if that is gone, pass lose_decided to lose what it decided",
        )
    if step is TerminateStep.ABORT:
        logger.warning("%s: aborting producer %d:%d by force: no row names it", kafka_id, view.producer_id, view.epoch)
        coordinator.retire([kafka_id], deadline)
    return step


def complete_prepared(
    kafka_id: str, state: PreparedTxnState, *, kafka: Mapping[str, object], timeout_s: float = 60.0
) -> Completion | None:
    """KIP-939's recovery recipe for an id that this library did not make: commit what the state names, abort anything else.

    ``state`` is the one that the other program's database holds; the empty state if it holds none. Fences every producer of
    the id afterwards. Returns None if Kafka does not know the id. Refuses an id of this library, whose row holds the state;
    otherwise raises as `TransactionalProducer.complete_transaction`.

    Source: KIP-939, "recovery recipe".
    """
    check_selection(kafka_id, None)
    check_seconds("timeout_s", timeout_s)
    if _is_ours(kafka_id):
        raise ConfigurationError(
            "dualwrite has made this id, and its row holds the state",
            transactional_id=kafka_id,
            next_step="name no state",
        )
    deadline = Deadline(timeout_s)
    with connected_coordinator(kafka) as coordinator:
        if coordinator.describe([kafka_id], deadline)[kafka_id].status is TransactionStatus.NO_SUCH_ID:
            return None
        natively = coordinator.transaction_version(deadline) >= 2  # noqa: PLR2004 - the version's own number
        done = AbandonedTransaction(coordinator, kafka_id, natively=natively).complete(state, deadline)
        coordinator.retire([kafka_id], deadline)
        return done


def _is_ours(kafka_id: str) -> bool:
    named = parsed(kafka_id)
    return named is not None and is_drawn(named[1])


# Finds what holds back a consumer: open transactions in its topics, and in the offsets of its group.

_OFFSETS: Final = "__consumer_offsets"


def blocking_transactions(
    kafka: Mapping[str, object],
    *,
    topics: Collection[str] = (),
    group: str | None = None,
    open_for_s: float = HELD_BACK_S,
    timeout_s: float = 30.0,
) -> Sequence[BlockingTransaction]:
    """Find the open transactions that hold back ``read_committed`` consumers: Kafka does not tell consumers why they wait.

    May be called at any time; it changes nothing.

    Args:
        kafka: librdkafka configuration.
        topics: The topics that the consumer reads.
        group: The consumer's group. Its committed offsets are held back by transactions that contain offsets. A transaction
            found this way may hold offsets of another group in the same partition of ``__consumer_offsets``.
        open_for_s: Leave out transactions that began less than this many seconds ago: their owners are at work.
        timeout_s: Time limit, in seconds.

    Returns:
        One entry for each transaction and partition. As text, each names the owner, and says since when it is open, and what
        to do.

    Raises:
        ConfigurationError: A topic does not exist, or a right is missing: Read on the topics, and with ``group`` on
            ``__consumer_offsets``.
        Unavailable: The brokers did not answer in time.

    Source: KIP-664, ``DescribeProducers``, ``ListTransactions``, ``DescribeTransactions``.
    """
    check_seconds("open_for_s", open_for_s, zero=True)
    check_seconds("timeout_s", timeout_s)
    deadline = Deadline(timeout_s)
    with connected_coordinator(kafka) as coordinator:
        asked = {*topics, _OFFSETS} if group is not None else set(topics)
        counts = coordinator.partitions_of(asked, deadline)
        if missing := sorted(set(topics) - counts.keys()):
            raise ConfigurationError(f"there is no topic {', '.join(map(repr, missing))}")
        places = [(topic, partition) for topic in topics for partition in range(counts[topic])]
        if group is not None and _OFFSETS in counts:  # Kafka creates the topic with the first offset of any group
            places.append((_OFFSETS, internal_partition(group, counts[_OFFSETS])))
        return coordinator.blocking(places, deadline, open_for_s=open_for_s)


# Takes over the id of a writer that counts as dead: settles what it left, and lets no late request of it open anything.


def take_over(
    transactional_id: str,
    *,
    kafka: Mapping[str, object],
    database: Database,
    deadline: Deadline,
    owner: str | None,
    observer: Observer,
) -> RecoveryReport:
    """As `recover` for one writer, but claims it even if its owner has left nothing to settle.

    An owner that was only paused can begin no transaction there from then on, and a late request of a dead one opens none.
    """
    store = database.store()
    with observer.recovering():
        report = recover_rows(
            lambda: whole_writers(store, rows_of(store, transactional_id, None)),
            store=store,
            connect=partial(connected_coordinator, kafka),
            claims_all=True,
            deadline=deadline,
            owner=unique_owner(owner),
            observer=observer,
        )
        report_losses(report, rows_of(store, transactional_id, None), store, observer)
        return report
