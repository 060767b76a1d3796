"""Settles the slots that a batch's tasks have left."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from dualwrite.recovery.claim import OwnerContext, claim_rows
from dualwrite.recovery.settle import SettleReport, settle

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.stores.sql.slots import Lease, SlotPool

logger = logging.getLogger(__name__)


def settle_leases(
    context: OwnerContext, pool: SlotPool, leases: Collection[Lease], deadline: Deadline, *, name: str, prefix: str
) -> SettleReport:
    """Take leases over, claim their slots, settle them, and free them. A task that still writes on one is fenced.

    Args:
        context: The two servers.
        pool: The slots.
        leases: As they were seen.
        deadline: Limits the call.
        name: For the log.
        prefix: Beginning of our own name, so that later settlers find what we could not finish.

    Returns:
        What was settled. Its losses are recorded, and raised nowhere else.

    Raises:
        ConfigurationError, Unavailable: They could not be settled.
    """
    # Before the claim: a task that claims its slot after us then finds by its lease that it is too late.
    taken = pool.take_over(leases, f"{prefix}settled by {context.owner}", deadline.remaining_s())
    if not taken:
        return SettleReport()
    rows = claim_rows(context, sorted({lease.transactional_id for lease in taken}), deadline)
    report = settle(rows, coordinator=context.coordinator, store=context.store, deadline=deadline)
    pool.release({lease.transactional_id: lease.owner for lease in taken})
    logger.info("%s: settled %d slots, %d transactions rolled forward", name, len(rows), len(report.rolled_forward))
    return report
