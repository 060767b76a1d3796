"""Deletes the znodes of ids that never come back, and of incidents acknowledged long ago."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from dualwrite.stores.keyed.store__stores_keyed_encoding import decode_incident, decode_row, state_key
from dualwrite.stores.keyed.store__stores_keyed_keys import INCIDENT

if TYPE_CHECKING:
    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.stores.keyed.zookeeper__stores_zookeeper_keys import ZooKeeperKeys


class ZooKeeperForgetting:
    """Implements :class:`dualwrite.interfaces__ports_database.Forgetting`. There are neither leases nor runs in ZooKeeper.

    Raises:
        ConfigurationError: Raised by the methods: the session may not read or delete.
        Unavailable: Raised by the methods: ZooKeeper does not answer.
    """

    def __init__(self, keys: ZooKeeperKeys) -> None:
        self._keys = keys

    def now(self) -> datetime:
        """This process's time: the rows hold that of the processes that wrote them."""
        return datetime.now(timezone.utc)

    def leased(self) -> set[str]:
        """None."""
        return set()

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """Delete the rows, all or none. Durable on return.

        A writer that is still open is thereby fenced: its next dual write aborts on both sides.

        Returns:
            False if a row was used since it was read: nothing was deleted.
        """
        entries = self._keys.get([state_key(row.transactional_id) for row in rows])
        found = {key: decode_row(entry.value).row for key, entry in entries.items()}
        unchanged = all(found.get(state_key(row.transactional_id)) == row for row in rows)
        return unchanged and self._keys.delete(entries)

    def forget_incidents(
        self, prefix: str, acknowledged_before: datetime, /, *, dry_run: bool, name: str | None = None
    ) -> int:
        """Delete incidents that were acknowledged before that time. Durable on return.

        Args:
            prefix: Only ids with this prefix.
            acknowledged_before: By the clocks of the processes.
            dry_run: Only count them.
            name: A writer's id, which includes its lanes, instead of the prefix.

        Returns:
            The number of incidents.
        """
        count = 0
        for key, entry in self._keys.scan(INCIDENT, name or prefix).items():
            incident = decode_incident(entry.value)
            at, owner = incident.acknowledged_at, incident.transactional_id
            is_chosen = owner.startswith(prefix) if name is None else owner == name or owner.startswith(f"{name}#")
            if is_chosen and at is not None and at < acknowledged_before:
                count += 1 if dry_run else self._keys.delete({key: entry})
        return count

    def forget_runs(self, prefix: str, begun_before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        """There are none."""
        del prefix, begun_before, dry_run, name
        return 0
