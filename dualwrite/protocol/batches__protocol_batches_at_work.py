"""Detects batches that were begun but that no process works on: drivers give no sign of life, their tasks' leases do."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final

QUIET_S: Final = 300.0
"""Seconds without any event before a batch counts as deserted: tasks start after the plan, rows arrive after a shuffle."""


def nobody_since(changes: Collection[datetime], lease_ends: Collection[datetime], now: datetime) -> datetime | None:
    """Since when no process is known to work on a batch, by the database's clock; None while one does, or did just now.

    Args:
        changes: When the batch was begun, and when each of its partitions was written.
        lease_ends: When the leases of its tasks end; also those that expired without being given back.
        now: The time on the same clock.
    """
    if any(end > now for end in lease_ends):
        return None
    last = max((*changes, *lease_ends), default=None)
    return None if last is None or now - last < timedelta(seconds=QUIET_S) else last
