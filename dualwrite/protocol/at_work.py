"""Whether somebody works at a batch that is begun and not written: its driver has no sign of life, its tasks' leases have."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final

QUIET_S: Final = 300.0
"""How long nothing must have happened, in seconds: tasks come after the plan, and rows after a shuffle."""


def nobody_since(changes: Collection[datetime], lease_ends: Collection[datetime], now: datetime) -> datetime | None:
    """Since when nobody is known to work at a batch, by the database's clock; None while somebody is, or was just now.

    Args:
        changes: When it was begun, and when each of its partitions was written.
        lease_ends: When the leases of its tasks end, or have ended without being given back.
        now: Of the same clock.
    """
    if any(end > now for end in lease_ends):
        return None
    last = max((*changes, *lease_ends), default=None)
    return None if last is None or now - last < timedelta(seconds=QUIET_S) else last
