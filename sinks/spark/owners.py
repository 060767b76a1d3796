"""How the tasks of a batch name themselves in leases, and how the slots are settled that they have left."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from dualwrite.claiming import Ground, claim_rows
from dualwrite.settling import settle

if TYPE_CHECKING:
    from dualwrite.deadline import Deadline
    from dualwrite.stores.slots import Lease, SlotPool

logger = logging.getLogger(__name__)


def owner_prefix(batch_id: str, partition: int | None = None) -> str:
    """How the names of the lease owners of a batch begin, or of a partition of it, and of no other."""
    prefix = f"{json.dumps(batch_id)} "
    return prefix if partition is None else f"{prefix}partition {partition} "


def settle_leases(ground: Ground, pool: SlotPool, leases: Collection[Lease], deadline: Deadline, name: str) -> None:
    """Claim the slots of these leases, settle them, and free them. Whoever still writes on one is fenced.

    Raises:
        ConfigurationError, Unavailable: They could not be settled.
    """
    if not leases:
        return
    rows = claim_rows(ground, sorted({lease.transactional_id for lease in leases}), deadline)
    report = settle(rows, coordinator=ground.coordinator, store=ground.store, deadline=deadline)
    pool.release({lease.transactional_id: lease.owner for lease in leases})
    logger.info("%s: settled %d slots, %d transactions rolled forward", name, len(rows), len(report.rolled_forward))
