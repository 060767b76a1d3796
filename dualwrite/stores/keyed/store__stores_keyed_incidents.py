"""The incidents of databases without SQL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from dualwrite.stores.keyed.store__stores_keyed_attempts import Conflict, until_unchanged
from dualwrite.stores.keyed.store__stores_keyed_encoding import decode_incident, encode_incident, incident_key
from dualwrite.stores.keyed.store__stores_keyed_keys import INCIDENT, Change, Keys

if TYPE_CHECKING:
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import Outcome
    from dualwrite.protocol.values__protocol_rows import Incident


class Incidents:
    """The part of :class:`~dualwrite.stores.keyed.store.KeyedStore` that reads and acknowledges recorded incidents."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        """See :meth:`dualwrite.interfaces.StateStore.incident`."""
        key = incident_key(transactional_id, state)
        entry = self._keys.get([key]).get(key)
        return None if entry is None else decode_incident(entry.value).outcome

    def incidents(self, prefix: str = "", *, acknowledged: bool = False) -> Sequence[Incident]:
        """See :meth:`dualwrite.interfaces.StateStore.incidents`."""
        found = map(decode_incident, (entry.value for entry in self._keys.scan(INCIDENT, prefix).values()))
        return _by_age(
            one
            for one in found
            if one.transactional_id.startswith(prefix) and (acknowledged or one.acknowledged_at is None)
        )

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        """See :meth:`dualwrite.interfaces.StateStore.incidents_of`."""
        return _by_age(
            one
            for name in sorted(set(transactional_ids))
            for one in self.incidents(name, acknowledged=True)
            if one.transactional_id == name
        )

    def note_told(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.note_told`."""
        self._change_incidents(losses, lambda one: None if one.told_at is not None else replace(one, told_at=now()))

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
        """See :meth:`dualwrite.interfaces.StateStore.acknowledge`."""
        changed = self._change_incidents(
            [(transactional_id, state)],
            lambda one: None if one.acknowledged_at is not None else replace(one, acknowledged_at=now()),
        )
        return changed > 0

    def _change_incidents(
        self, losses: Collection[tuple[str, PreparedTxnState]], change: Callable[[Incident], Incident | None]
    ) -> int:
        keys = [incident_key(name, state) for name, state in losses]

        def attempt() -> int:
            entries = self._keys.get(keys)
            changed = {key: change(decode_incident(entry.value)) for key, entry in entries.items()}
            values = {key: encode_incident(one) for key, one in changed.items() if one is not None}
            self._write(Change(key, entries[key], value) for key, value in values.items())
            return len(values)

        return until_unchanged(attempt) if keys else 0

    def _write(self, changes: Iterable[Change]) -> None:
        """Write all changes.

        Raises:
            Conflict: A key is not as expected.
        """
        wanted = list(changes)
        if wanted and not self._keys.write(wanted):
            raise Conflict


def _by_age(incidents: Iterable[Incident]) -> Sequence[Incident]:
    return sorted(incidents, key=lambda one: (one.detected_at, one.transactional_id))


def now() -> datetime:
    """The time, by the clock of this process."""
    return datetime.now(timezone.utc)
