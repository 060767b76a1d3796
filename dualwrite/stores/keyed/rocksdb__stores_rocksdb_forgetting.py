"""Deletes rows of ids that never come back, and incidents acknowledged long ago."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from dualwrite.stores.keyed.store__stores_keyed_encoding import decode_incident, decode_row, state_key
from dualwrite.stores.keyed.store__stores_keyed_keys import INCIDENT

if TYPE_CHECKING:
    from dualwrite.protocol.values__protocol_rows import Incident, StateRow
    from dualwrite.stores.keyed.rocksdb__stores_rocksdb_keys import RocksKeys


class RocksForgetting:
    """Implements :class:`dualwrite.interfaces__ports_database.Forgetting`. There are no leases and no runs."""

    def __init__(self, keys: RocksKeys) -> None:
        self._keys = keys

    def now(self) -> datetime:
        """This process's time, as that of all rows."""
        return datetime.now(timezone.utc)

    def leased(self) -> set[str]:
        """None: RocksDB keeps no leases."""
        return set()

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """See the port. A writer that is still open is thereby fenced."""
        found = self._keys.get([state_key(row.transactional_id) for row in rows])
        if [decode_row(entry.value).row for entry in found.values()] != list(rows):
            return False
        return self._keys.erase(found)

    def forget_incidents(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """See the port."""

        def is_old(incident: Incident) -> bool:
            owner = incident.transactional_id
            chosen = owner.startswith(prefix) if name is None else owner == name or owner.startswith(f"{name}#")
            return chosen and incident.acknowledged_at is not None and incident.acknowledged_at < before

        found = self._keys.scan(INCIDENT, prefix if name is None else name)
        old = {key: entry for key, entry in found.items() if is_old(decode_incident(entry.value))}
        if dry_run:
            return len(old)
        return sum(self._keys.erase({key: entry}) for key, entry in old.items())

    def forget_runs(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """None: there are no runs of Spark batches."""
        del prefix, before, dry_run, name
        return 0
