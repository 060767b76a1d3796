"""Deletes ids whose writers will not come back, incidents acknowledged long ago, and runs that are long over.

Every name ever used keeps its row, every loss its incident, and every batch of a Spark sink its run. Where names come and go
(one for each tenant, batch or host), the tables would grow forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dualwrite.protocol.by_hand__protocol_forgettable import Facts, by_writer, reasons_to_keep
from dualwrite.protocol.values import TransactionStatus
from dualwrite.protocol.values__protocol_allowed import check_seconds, check_selection
from dualwrite.recovery import recover
from dualwrite.recovery.recover__recovery_servers import rows_of
from dualwrite.stores.opening import opened
from dualwrite.stores.sql.database__stores_sql_forgetting import before

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces__ports_database import Database
    from dualwrite.recovery.recover__recovery_plan import IdStatus

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
    """

    forgotten: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    unsettled: list[str] = field(default_factory=list)
    incidents: int = 0
    runs: int = 0


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
    """Delete the rows of ids that never come back, incidents acknowledged long ago, and runs that are long over.

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
        untouched_for_s: Delete only rows last written, incidents acknowledged and runs begun more than this many seconds ago.
            Runs of the last day stay.
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
        told = {incident.transactional_id for incident in store.incidents(transactional_id or prefix or "")}
        leased = forgetting.leased()
        facts = {
            name: Facts(
                untouched_for_s=(now - row.updated_at).total_seconds(),
                unsettled=name in unsettled,
                leased=name in leased,
                has_open_incident=name in told,
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
        return report


def _is_unsettled(item: IdStatus) -> bool:
    return item.needs_recovery or item.kafka_status not in _ENDED
