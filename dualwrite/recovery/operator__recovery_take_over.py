"""Takes over the id of a writer that counts as dead, so that nothing is left under it and nothing can come."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from dualwrite.clock import Deadline
from dualwrite.recovery.claim import unique_owner
from dualwrite.recovery.recover import RecoveryReport, recover_rows, tell
from dualwrite.recovery.recover__recovery_servers import connected_coordinator, rows_of, whole_writers

if TYPE_CHECKING:
    from dualwrite.interfaces__ports_database import Database
    from dualwrite.interfaces__ports_observer import Observer


def take_over(
    transactional_id: str,
    *,
    kafka: Mapping[str, object],
    database: Database,
    timeout_s: float,
    owner: str | None,
    observer: Observer,
) -> RecoveryReport:
    """As `recover` for one writer, but claims it even if its owner has left nothing to settle.

    An owner that was only paused can begin no transaction there from then on, and a late request of a dead one opens none.

    Raises:
        ConfigurationError, Unavailable: As `recover`.
    """
    store = database.store()
    with observer.recovering():
        report = recover_rows(
            lambda: whole_writers(store, rows_of(store, transactional_id, None)),
            store=store,
            connect=partial(connected_coordinator, kafka),
            claims_all=True,
            deadline=Deadline(timeout_s),
            owner=unique_owner(owner),
            observer=observer,
        )
        tell(report, rows_of(store, transactional_id, None), store, observer)
        return report
