"""``KeyedStore``: the state store over five primitives. No call waits for a lock: each write names the values it comes from.

A claim writes the row, so the commit of a former owner, which names the row as it was, is refused. For the same reason a
commit whose answer is lost can be settled: :meth:`KeyedStore.read_locked` writes the row again, and whatever is still on its
way can no longer happen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted
from dualwrite.protocol.process__protocol_settling_commit_in_doubt import DatabaseVerdict
from dualwrite.protocol.values__protocol_rows import Participant, StateRow
from dualwrite.stores.keyed import store__stores_keyed_changes as rules
from dualwrite.stores.keyed.store__stores_keyed_attempts import Conflict, until_unchanged
from dualwrite.stores.keyed.store__stores_keyed_encoding import (
    Stored,
    decode_row,
    encode_incident,
    encode_row,
    incident_key,
    state_key,
)
from dualwrite.stores.keyed.store__stores_keyed_incidents import Incidents, now
from dualwrite.stores.keyed.store__stores_keyed_keys import STATE, Change, Entry, Key, Keys
from dualwrite.stores.sql.tables__stores_sql_tables_rows import (
    check_decidable,
    check_guard,
    check_name,
    check_not_gone_back,
)

if TYPE_CHECKING:
    from dualwrite.clock import Deadline
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.protocol.values import Outcome
    from dualwrite.stores.keyed.store__stores_keyed_handle import KeyedHandle

Result = TypeVar("Result")


class KeyedStore(Incidents):
    """The rows of one database. Implements :class:`dualwrite.interfaces.StateStore`. Thread-safe.

    Times are those of the process that writes: such a database has no clock of its own.

    Args:
        keys: The database.
        name: Its name, for people.
    """

    def __init__(self, keys: Keys, name: str) -> None:
        super().__init__(keys)
        self._name = name

    # Inside the caller's transaction

    def check_same_database(self, connection: KeyedHandle) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.check_same_database`. Handles are made by the database itself."""

    def watch_savepoints(self, connection: KeyedHandle, transactional_id: str) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.watch_savepoints`. There are none."""

    def begin(self, connection: KeyedHandle) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.begin`. Nothing is sent before the commit."""
        if connection.begun:
            raise IllegalStateError("a dual write has already begun on this handle")
        connection.clear()
        connection.changes = []
        connection.begun = True

    def read_incarnation(
        self,
        connection: KeyedHandle,
        transactional_id: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> int | None:
        """See :meth:`dualwrite.interfaces.StateStore.read_incarnation`."""
        del connection
        found = self._stored(transactional_id)
        if found is None or namespace not in {None, found.row.namespace}:
            return None
        if known is not None:
            check_not_gone_back(known, found.row.incarnation, str(found.row.prepared))
        return found.row.incarnation

    def decide(
        self,
        connection: KeyedHandle,
        transactional_id: str,
        incarnation: int,
        state: PreparedTxnState,
        *,
        namespace: str | None = None,
        idle_s: float | None = None,
        within_s: float | None = None,
        answer_s: float | None = None,
        deferred: bool = False,
    ) -> tuple[bool, str | None]:
        """See :meth:`dualwrite.interfaces.StateStore.decide`. No server ends the session of a paused owner."""
        del idle_s, within_s, answer_s, deferred
        check_decidable(transactional_id, incarnation, state)
        return self._end_with(
            connection,
            transactional_id,
            incarnation,
            namespace,
            lambda found, name: rules.decided(found, state, name, now()),
        )

    def hold(
        self,
        connection: KeyedHandle,
        transactional_id: str,
        incarnation: int,
        *,
        namespace: str | None = None,
        answer_s: float | None = None,
        deferred: bool = False,
    ) -> tuple[bool, str | None]:
        """See :meth:`dualwrite.interfaces.StateStore.hold`. The row is written, with the name of the transaction."""
        del answer_s, deferred
        return self._end_with(
            connection,
            transactional_id,
            incarnation,
            namespace,
            lambda found, name: replace(found, transaction=name),
        )

    def _end_with(
        self,
        handle: KeyedHandle,
        transactional_id: str,
        incarnation: int,
        namespace: str | None,
        change: Callable[[Stored, str], Stored],
    ) -> tuple[bool, str | None]:
        if not handle.begun:
            raise IllegalStateError("no dual write has begun on this handle", transactional_id=transactional_id)
        key = state_key(transactional_id)
        entry = self._keys.get([key]).get(key)
        found = None if entry is None else decode_row(entry.value)
        if found is None or not rules.is_ours(found, incarnation, namespace):
            return False, None
        name = rules.transaction_name(transactional_id, incarnation)
        handle.changes.append(Change(key, entry, encode_row(change(found, name))))
        return True, name

    def run_deferred(self, connection: KeyedHandle, transactional_id: str | None = None) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.run_deferred`. Nothing is deferred."""

    def prepare(
        self, connection: KeyedHandle, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.prepare`.

        Raises:
            ConfigurationError: Always.
        """
        del connection, row, state, answer_s
        raise ConfigurationError(f"{self._name} prepares no transactions", next_step="decide each dual write by itself")

    def commit(self, connection: KeyedHandle, *, answer_s: float | None = None) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.commit`."""
        if not connection.begun:
            raise TransactionAborted("the dual write was rolled back before its commit")
        try:
            if not self._keys.commit(connection, connection.changes, answer_s=answer_s):
                raise TransactionAborted(
                    "the row has changed since it was read: another owner has claimed it, or a settler is inspecting it"
                )
        finally:
            self.rollback(connection)

    def rollback(self, connection: KeyedHandle) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.rollback`. Nothing was sent."""
        connection.clear()
        connection.changes = []
        connection.begun = False

    def discard(self, connection: KeyedHandle) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.discard`."""
        self.rollback(connection)

    # In writes of our own

    def claim(
        self,
        transactional_ids: Sequence[str],
        *,
        owner: str,
        cluster_id: str,
        guard: tuple[str, int] | None = None,
        verify: Callable[[Sequence[StateRow]], None] | None = None,
        raise_to: Mapping[str, int] | None = None,
    ) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.claim`. If a row changes meanwhile, ``verify`` is called again."""
        ids = sorted({check_name(transactional_id) for transactional_id in transactional_ids})
        floors = raise_to or {}

        def attempt() -> Sequence[StateRow]:
            entries = self._entries({*ids, *([guard[0]] if guard is not None else [])})
            if guard is not None:
                held = _row_of(entries.get(state_key(guard[0])))
                check_guard(None if held is None else (held.incarnation, held.owner), guard[0], owner, guard[1])
            moment = now()
            found = {name: _stored_of(entries.get(state_key(name))) for name in ids}
            claimed = [
                rules.claimed(
                    found[name], name, owner=owner, cluster_id=cluster_id, at_least=floors.get(name, 0), now=moment
                )
                for name in ids
            ]
            rows = [one.row for one in claimed]
            if verify is not None:
                try:
                    verify(rows)
                except ConfigurationError:
                    # The error counts only while the rows are as we have read them: an owner that has claimed them since
                    # makes itself known to Kafka under the same incarnation.
                    if self._entries(ids) != {key: entries[key] for key in map(state_key, ids) if key in entries}:
                        raise Conflict from None
                    raise
            values = {state_key(one.row.transactional_id): encode_row(one) for one in claimed}
            self._write(Change(key, entries.get(key), values.get(key)) for key in {*values, *entries})
            return rows

        return until_unchanged(attempt) if ids else []

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.read`."""
        return _rows(self._entries(transactional_ids).values())

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """See :meth:`dualwrite.interfaces.StateStore.read_locked`. Writes the row again, as it is."""
        key = state_key(transactional_id)

        def attempt() -> StateRow:
            entry = self._keys.get([key]).get(key)
            if entry is None:
                raise ConfigurationError(
                    "the row is gone", transactional_id=transactional_id, next_step="restore it from a backup"
                )
            found = decode_row(entry.value)
            self._write([Change(key, entry, encode_row(found))])
            return found.row

        return until_unchanged(attempt, deadline)

    def while_locked(self, transactional_ids: Sequence[str], work: Callable[[], None], deadline: Deadline) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.while_locked`."""
        with self._keys.locked([state_key(name) for name in sorted(set(transactional_ids))], deadline.remaining_s()):
            work()

    def find(self, prefix: str) -> Sequence[StateRow]:
        """See :meth:`dualwrite.interfaces.StateStore.find`."""
        return _rows(self._keys.scan(STATE, prefix).values())

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.record_outcomes`."""

        def attempt() -> None:
            keys = [
                (state_key(row.transactional_id), incident_key(row.transactional_id, row.prepared))
                for row, *_ in outcomes
            ]
            entries = self._keys.get([key for pair in keys for key in pair])
            moment, values, latest = now(), dict[Key, bytes](), dict[Key, Stored]()
            for (row, outcome, detail), (key, noted) in zip(outcomes, keys, strict=True):
                found = latest.get(key) or _stored_of(entries.get(key))
                changed = rules.completed(found, row.prepared, outcome, moment)
                if changed is not None:
                    latest[key], values[key] = changed, encode_row(changed)
                if rules.is_news(found, row.prepared, outcome) and noted not in entries:
                    values[noted] = encode_incident(rules.loss(row, outcome, detail, moment))
            self._write(Change(key, entries.get(key), value) for key, value in values.items())

        until_unchanged(attempt)

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.mark_settled`."""

        def attempt() -> None:
            moment, entries = now(), self._entries(incarnations)
            changed = [
                (entry, rules.settled(found, incarnations[found.row.transactional_id], moment))
                for entry in entries.values()
                for found in [decode_row(entry.value)]
            ]
            self._write(_changes(changed))

        until_unchanged(attempt)

    def raise_fence(self, row: StateRow, fence: int) -> bool:
        """See :meth:`dualwrite.interfaces.StateStore.raise_fence`."""
        key = state_key(row.transactional_id)

        def attempt() -> bool:
            entry = self._keys.get([key]).get(key)
            changed = rules.fenced(_stored_of(entry), row, fence, now())
            if changed is None:
                return False
            self._write([Change(key, entry, encode_row(changed))])
            return True

        return until_unchanged(attempt)

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """See :meth:`dualwrite.interfaces.StateStore.participants`. Nothing is ever prepared."""
        del rows
        return []

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        """See :meth:`dualwrite.interfaces.StateStore.end_participant`. There are none."""

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """See :meth:`dualwrite.interfaces.StateStore.transaction_verdict`. Call :meth:`read_locked` before."""
        if transaction is None:
            return DatabaseVerdict.UNKNOWN
        return rules.verdict(self._stored(rules.id_in(transaction)), transaction)

    def _stored(self, transactional_id: str) -> Stored | None:
        key = state_key(transactional_id)
        return _stored_of(self._keys.get([key]).get(key))

    def _entries(self, transactional_ids: Iterable[str]) -> Mapping[Key, Entry]:
        return self._keys.get([state_key(name) for name in sorted(set(transactional_ids))])


def _changes(changed: Iterable[tuple[Entry, Stored | None]]) -> Sequence[Change]:
    return [
        Change(state_key(stored.row.transactional_id), entry, encode_row(stored))
        for entry, stored in changed
        if stored is not None
    ]


def _stored_of(entry: Entry | None) -> Stored | None:
    return None if entry is None else decode_row(entry.value)


def _row_of(entry: Entry | None) -> StateRow | None:
    return None if entry is None else decode_row(entry.value).row


def _rows(entries: Iterable[Entry]) -> Sequence[StateRow]:
    return sorted((decode_row(entry.value).row for entry in entries), key=lambda row: row.transactional_id)
