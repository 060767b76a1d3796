"""The state store over databases of keys and values: entries, conditions and the changes that they need.

RocksDB and ZooKeeper decide by one atomic write of several entries under conditions. Everything above these five
primitives (claims, decisions, incidents) stands here once.

A claim writes the row, so the commit of a former owner, which names the row as it was, is refused. For the same reason a
commit whose answer is lost can be settled: :meth:`KeyedStore.read_locked` writes the row again, and whatever is still on its
way can no longer happen.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar, cast

from tenacity import Retrying, retry_if_exception_type, wait_random_exponential

from dualwrite.clock import Deadline, pause
from dualwrite.errors import ConfigurationError, IllegalStateError, TransactionAborted, Unavailable
from dualwrite.interfaces import PAUSED_OWNER_TIMEOUT_S, Database
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.process import DatabaseVerdict
from dualwrite.protocol.values import Decision, Incident, OutboxMode, Outcome, Participant, StateRow
from dualwrite.stores.sql.tables import (
    check_claimed,
    check_decidable,
    check_guard,
    check_name,
    check_not_gone_back,
    digest,
    parse_state_row,
)

if TYPE_CHECKING:
    from typing_extensions import Self

# Rows and incidents as JSON, and back. Columns are called as in SQL.


@dataclass(frozen=True)
class Stored:
    """A row, with the name of the newest transaction on it, which SQL databases keep track of by themselves."""

    row: StateRow
    transaction: str | None = None


def state_key(transactional_id: str) -> Key:
    """The key of a row."""
    return STATE, transactional_id


def incident_key(transactional_id: str, state: PreparedTxnState) -> Key:
    """The key of an incident."""
    return INCIDENT, f"{transactional_id}/{digest(state)}"


def encode_row(stored: Stored) -> bytes:
    """The row's value. Two values are never equal, so that a value can serve as its own version."""
    row = stored.row
    return _encode(
        {
            "transactional_id": row.transactional_id,
            "prepared_transaction_state": str(row.prepared),
            "namespace": row.namespace,
            "incarnation": row.incarnation,
            "settled_incarnation": row.settled_incarnation,
            "completed": None if row.completed is None else row.completed.value,
            "cluster_id": row.cluster_id,
            "owner": row.owner,
            "updated_at": row.updated_at.isoformat(),
            "settle_fence": row.settle_fence,
            "transaction": stored.transaction,
        }
    )


def decode_row(value: bytes) -> Stored:
    """The row of a value; refused if this library cannot have written it."""
    found = _decode(STATE, value)
    try:
        moment = datetime.fromisoformat(cast("str", found["updated_at"]))
        row = parse_state_row(STATE, {**found, "updated_at": moment})
        return Stored(row, cast("str | None", found["transaction"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(STATE, f"{error!r}") from error


def encode_incident(incident: Incident) -> bytes:
    """The incident's value, likewise."""
    return _encode(
        {
            "transactional_id": incident.transactional_id,
            "prepared_transaction_state": incident.prepared_transaction_state,
            "outcome": incident.outcome.value,
            "detail": incident.detail,
            "detected_at": incident.detected_at.isoformat(),
            "acknowledged_at": _text(incident.acknowledged_at),
            "reported_at": _text(incident.reported_at),
        }
    )


def decode_incident(value: bytes) -> Incident:
    """The incident of a value; refused if this library cannot have written it."""
    found = _decode(INCIDENT, value)
    try:
        return Incident(
            cast("str", found["transactional_id"]),
            cast("str", found["prepared_transaction_state"]),
            Outcome(found["outcome"]),
            cast("str", found["detail"]),
            datetime.fromisoformat(cast("str", found["detected_at"])),
            _moment(found["acknowledged_at"]),
            _moment(found["reported_at"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(INCIDENT, f"{error!r}") from error


def _encode(values: dict[str, object]) -> bytes:
    return json.dumps({**values, "written": secrets.token_hex(8)}, separators=(",", ":")).encode()


def _decode(table: str, value: bytes) -> dict[str, object]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise _bad(table, "it is not JSON") from error
    if not isinstance(found, dict):
        raise _bad(table, "it is not an object")
    return found


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _moment(text: object) -> datetime | None:
    return None if text is None else datetime.fromisoformat(cast("str", text))


def _bad(table: str, cause: str) -> ConfigurationError:
    return ConfigurationError(
        f"bad value in {table}: {cause}",
        next_step="it was not written by this library, or was edited: restore it before anything is settled",
    )


# The five primitives of which a database without SQL gets its state store.

Key: TypeAlias = tuple[str, str]
"""A table, and a name in it: at most 320 characters, none of them a control character."""

STATE: Final = "state"
INCIDENT: Final = "incident"


@dataclass(frozen=True)
class Entry:
    """A value (JSON) as it was read, with a version that differs from that of every earlier value of the key."""

    value: bytes
    version: Hashable


@dataclass(frozen=True)
class Change:
    """One key of an atomic write, on the condition that it is as it was read (``expected``; None: that it does not exist).

    Without a ``value`` the key is left as it is, and only the condition counts.
    """

    key: Key
    expected: Entry | None
    value: bytes | None


class Keys(Protocol):
    """Keys and values of one database, for all processes that use it. Thread-safe. Only forgetting deletes keys."""

    def get(self, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        """The newest committed values; missing keys are left out."""
        ...

    def scan(self, table: str, prefix: str) -> Mapping[Key, Entry]:
        """All keys of the table whose name begins with the prefix, with their newest committed values."""
        ...

    def write(self, changes: Sequence[Change]) -> bool:
        """Write all changes or none. Durable on return. False if a key was not as expected.

        After ``Unavailable`` it may have been written.
        """
        ...

    def commit(self, handle: KeyedHandle, changes: Sequence[Change], *, answer_s: float | None) -> bool:
        """Write what the user has put into the handle, and the changes, all or nothing: the decision. Durable on return.

        False if a key of ``changes`` was not as expected. ``TransactionAborted`` if it was certainly not written, for instance
        because a condition of the user's own does not hold; ``TransactionInDoubt`` if the answer is missing.
        """
        ...

    def locked(self, keys: Sequence[Key], within_s: float) -> AbstractContextManager[None]:
        """Hold a lock on these keys across processes. It need not stop :meth:`write` or :meth:`commit`."""
        ...


# The incidents of databases without SQL.


class Incidents:
    """The part of :class:`~dualwrite.stores.keyed.store.KeyedStore` that reads and acknowledges recorded incidents."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def incident(self, transactional_id: str, state: PreparedTxnState) -> Outcome | None:
        key = incident_key(transactional_id, state)
        entry = self._keys.get([key]).get(key)
        return None if entry is None else decode_incident(entry.value).outcome

    def incidents(self, prefix: str = "", *, acknowledged: bool = False) -> Sequence[Incident]:
        found = map(decode_incident, (entry.value for entry in self._keys.scan(INCIDENT, prefix).values()))
        return _by_age(
            one
            for one in found
            if one.transactional_id.startswith(prefix) and (acknowledged or one.acknowledged_at is None)
        )

    def incidents_of(self, transactional_ids: Collection[str]) -> Sequence[Incident]:
        return _by_age(
            one
            for name in sorted(set(transactional_ids))
            for one in self.incidents(name, acknowledged=True)
            if one.transactional_id == name
        )

    def note_reported(self, losses: Collection[tuple[str, PreparedTxnState]]) -> None:
        self._change_incidents(
            losses, lambda one: None if one.reported_at is not None else replace(one, reported_at=now())
        )

    def acknowledge(self, transactional_id: str, state: PreparedTxnState) -> bool:
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
        wanted = list(changes)
        if wanted and not self._keys.write(wanted):
            raise Conflict


def _by_age(incidents: Iterable[Incident]) -> Sequence[Incident]:
    return sorted(incidents, key=lambda one: (one.detected_at, one.transactional_id))


def now() -> datetime:
    """The time, by the clock of this process."""
    return datetime.now(timezone.utc)


# Retries an attempt whose input changed underneath it.

_WITHIN_S: Final = 30.0


class Conflict(Exception):
    """A key had changed since it was read: nothing was written."""


def until_unchanged(attempt: Callable[[], Result], deadline: Deadline | None = None) -> Result:
    """Run the attempt until it ends without a conflict, or raise ``Unavailable`` at the deadline (half a minute if not given).

    The attempt reads, computes and writes. After a conflict it runs again from the start, so it must have no other effect.
    """
    until = deadline or Deadline(_WITHIN_S)
    retrying = Retrying(
        retry=retry_if_exception_type(Conflict),
        stop=lambda _: until.expired,
        wait=wait_random_exponential(multiplier=0.005, max=0.25),
        sleep=lambda seconds: pause(min(seconds, until.remaining_s())),
        reraise=True,
    )
    try:
        result: Result = retrying(attempt)
    except Conflict as error:
        raise Unavailable("other processes keep changing the same rows", next_step="try again") from error
    return result


# The handle on which one dual write works in a database without SQL.


class KeyedHandle:
    """The user's part of a dual write, and the library's own changes. A subclass holds the user's part. Used by one thread.

    ``begun`` says that a dual write has begun on it, and not ended; ``changes`` commit with the user's part.
    """

    def __init__(self) -> None:
        self.begun = False
        self.changes: list[Change] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()
        self.end()

    def clear(self) -> None:
        """Forget all that the user has put. Called as a dual write begins, and once it has ended, in any way."""

    def end(self) -> None:
        """Refuse any further use by the user: the block has ended."""


Result = TypeVar("Result")


class KeyedStore(Incidents):
    """The rows of one database. Implements :class:`dualwrite.interfaces.StateStore`. Thread-safe.

    Times are those of the process that writes: such a database has no clock of its own. Messages do not wait in it.
    """

    outbox: Final = None
    with_commit: Final = None

    def outbox_mode(self, writer: str) -> OutboxMode:
        """Direct: no message can wait."""
        del writer
        return OutboxMode.DIRECT

    def __init__(self, keys: Keys, name: str) -> None:
        super().__init__(keys)
        self._name = name

    # Inside the caller's transaction

    def check_same_database(self, connection: KeyedHandle) -> None:
        """Nothing to compare: handles are made by the database itself."""

    def watch_savepoints(self, connection: KeyedHandle, transactional_id: str) -> None:
        """There are no savepoints."""

    def begin(self, connection: KeyedHandle) -> None:
        """Nothing is sent before the commit."""
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
        del connection
        found = self._stored(transactional_id)
        if found is None or namespace not in {None, found.row.namespace}:
            return None
        if known is not None:
            check_not_gone_back(known, found.row.incarnation, str(found.row.prepared))
        return found.row.incarnation

    def decide(self, connection: KeyedHandle, decision: Decision) -> tuple[bool, str | None]:
        """No server ends the session of a paused owner."""
        check_decidable(decision)
        state = decision.state
        assert state is not None
        return self._end_with(connection, decision, lambda found, name: decided(found, state, name, now()))

    def hold(self, connection: KeyedHandle, decision: Decision) -> tuple[bool, str | None]:
        """The row is written, too, with the name of the transaction."""
        return self._end_with(connection, decision, lambda found, name: replace(found, transaction=name))

    def _end_with(
        self, handle: KeyedHandle, decision: Decision, change: Callable[[Stored, str], Stored]
    ) -> tuple[bool, str | None]:
        transactional_id, incarnation = decision.transactional_id, decision.incarnation
        if not handle.begun:
            raise IllegalStateError("no dual write has begun on this handle", transactional_id=transactional_id)
        key = state_key(transactional_id)
        entry = self._keys.get([key]).get(key)
        found = None if entry is None else decode_row(entry.value)
        if found is None or not is_ours(found, incarnation, decision.namespace):
            return False, None
        name = transaction_name(transactional_id, incarnation)
        handle.changes.append(Change(key, entry, encode_row(change(found, name))))
        return True, name

    def run_deferred(self, connection: KeyedHandle, transactional_id: str | None = None) -> None:
        """Nothing is deferred."""

    def prepare(
        self, connection: KeyedHandle, row: StateRow, state: PreparedTxnState, *, answer_s: float | None = None
    ) -> None:
        """Always refused: nothing is ever prepared."""
        del connection, row, state, answer_s
        raise ConfigurationError(f"{self._name} prepares no transactions", next_step="decide each dual write by itself")

    def commit(self, connection: KeyedHandle, *, answer_s: float | None = None) -> None:
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
        """Nothing was sent."""
        connection.clear()
        connection.changes = []
        connection.begun = False

    def discard(self, connection: KeyedHandle) -> None:
        self.rollback(connection)

    # In writes of our own

    def claim(
        self,
        transactional_ids: Sequence[str],
        *,
        owner: str,
        cluster_id: str | None,
        guard: tuple[str, int] | None = None,
        verify: Callable[[Sequence[StateRow]], None] | None = None,
        raise_to: Mapping[str, int] | None = None,
    ) -> Sequence[StateRow]:
        """If a row changes meanwhile, ``verify`` is called again."""
        if cluster_id is None:
            raise ConfigurationError(
                "an id is claimed without Kafka only where messages can wait as rows",
                next_step="use a SQL database, or wait for Kafka",
            )
        ids = sorted({check_name(transactional_id) for transactional_id in transactional_ids})
        floors = raise_to or {}

        def attempt() -> Sequence[StateRow]:
            entries = self._entries({*ids, *([guard[0]] if guard is not None else [])})
            if guard is not None:
                held = _row_of(entries.get(state_key(guard[0])))
                shown = None if held is None else (held.incarnation, held.owner, held.cluster_id)
                check_guard(shown, guard[0], owner, guard[1], cluster_id)
            moment = now()
            found = {name: _stored_of(entries.get(state_key(name))) for name in ids}
            claimed = [
                claimed_row(
                    found[name], name, owner=owner, cluster_id=cluster_id, at_least=floors.get(name, 0), now=moment
                )
                for name in ids
            ]
            rows = [one.row for one in claimed]
            if verify is not None:
                try:
                    verify(rows)
                except ConfigurationError:
                    # The error counts only if the rows are still as we read them: an owner that has claimed them since then
                    # appears in Kafka under the same incarnation.
                    if self._entries(ids) != {key: entries[key] for key in map(state_key, ids) if key in entries}:
                        raise Conflict from None
                    raise
            values = {state_key(one.row.transactional_id): encode_row(one) for one in claimed}
            self._write(Change(key, entries.get(key), values.get(key)) for key in {*values, *entries})
            return rows

        return until_unchanged(attempt) if ids else []

    def read(self, transactional_ids: Sequence[str]) -> Sequence[StateRow]:
        return _rows(self._entries(transactional_ids).values())

    def read_locked(self, transactional_id: str, deadline: Deadline) -> StateRow:
        """Writes the row again, as it is."""
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
        with self._keys.locked([state_key(name) for name in sorted(set(transactional_ids))], deadline.remaining_s()):
            work()

    def find(self, prefix: str) -> Sequence[StateRow]:
        return _rows(self._keys.scan(STATE, prefix).values())

    def record_outcomes(self, outcomes: Sequence[tuple[StateRow, Outcome, str]]) -> None:
        def attempt() -> None:
            keys = [
                (state_key(row.transactional_id), incident_key(row.transactional_id, row.prepared))
                for row, *_ in outcomes
            ]
            entries = self._keys.get([key for pair in keys for key in pair])
            moment, values, latest = now(), dict[Key, bytes](), dict[Key, Stored]()
            for (row, outcome, detail), (key, noted) in zip(outcomes, keys, strict=True):
                found = latest.get(key) or _stored_of(entries.get(key))
                changed = completed(found, row.prepared, outcome, moment)
                if changed is not None:
                    latest[key], values[key] = changed, encode_row(changed)
                if is_news(found, row.prepared, outcome) and noted not in entries:
                    values[noted] = encode_incident(loss(row, outcome, detail, moment))
            self._write(Change(key, entries.get(key), value) for key, value in values.items())

        until_unchanged(attempt)

    def mark_settled(self, incarnations: Mapping[str, int]) -> None:
        def attempt() -> None:
            moment, entries = now(), self._entries(incarnations)
            changed = [
                (entry, settled(found, incarnations[found.row.transactional_id], moment))
                for entry in entries.values()
                for found in [decode_row(entry.value)]
            ]
            self._write(_changes(changed))

        until_unchanged(attempt)

    def raise_fence(self, row: StateRow, fence: int) -> bool:
        key = state_key(row.transactional_id)

        def attempt() -> bool:
            entry = self._keys.get([key]).get(key)
            changed = fenced(_stored_of(entry), row, fence, now())
            if changed is None:
                return False
            self._write([Change(key, entry, encode_row(changed))])
            return True

        return until_unchanged(attempt)

    def participants(self, rows: Collection[StateRow]) -> Sequence[Participant]:
        """Nothing is ever prepared."""
        del rows
        return []

    def end_participant(self, participant: Participant, *, committed: bool) -> None:
        """There are no participants."""

    def transaction_verdict(self, transaction: str | None) -> DatabaseVerdict:
        """Call :meth:`read_locked` before."""
        if transaction is None:
            return DatabaseVerdict.UNKNOWN
        return verdict(self._stored(id_in(transaction)), transaction)

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


# The changes that each call makes to a row: pure, from the row as it was read.


def claimed_row(
    found: Stored | None, transactional_id: str, *, owner: str, cluster_id: str, at_least: int, now: datetime
) -> Stored:
    """The row after a claim; refused if it belongs to another cluster, or names an incarnation that it had not reached."""
    before = found or Stored(
        StateRow(transactional_id, PreparedTxnState(), secrets.token_hex(6), 0, 0, None, cluster_id, owner, now)
    )
    row = before.row
    raised = replace(row, incarnation=max(row.incarnation + 1, at_least), owner=owner, updated_at=now)
    check_claimed(raised, cluster_id, "state")
    return replace(before, row=raised)


def transaction_name(transactional_id: str, incarnation: int) -> str:
    """A new name for a transaction on the row of that id."""
    return f"{incarnation}/{secrets.token_hex(8)}/{transactional_id}"


def id_in(transaction: str) -> str:
    """The id in a transaction's name."""
    return transaction.split("/", 2)[2]


def verdict(found: Stored | None, transaction: str) -> DatabaseVerdict:
    """The row's verdict on a transaction that can no longer commit: only later incarnations replace its name."""
    if found is None:
        return DatabaseVerdict.UNKNOWN
    if found.transaction == transaction:
        return DatabaseVerdict.COMMITTED
    if found.transaction is None or _incarnation(found.transaction) <= _incarnation(transaction):
        return DatabaseVerdict.ABORTED
    return DatabaseVerdict.UNKNOWN


def _incarnation(transaction: str) -> int:
    return int(transaction.partition("/")[0])


def is_ours(found: Stored | None, incarnation: int, namespace: str | None) -> bool:
    """Whether the row still names that incarnation, in that namespace if given."""
    return found is not None and found.row.incarnation == incarnation and namespace in {None, found.row.namespace}


def decided(found: Stored, state: PreparedTxnState, transaction: str, now: datetime) -> Stored:
    """The row after a decision."""
    row = replace(found.row, prepared=state, completed=None, settle_fence=None, updated_at=now)
    return Stored(row, transaction)


def completed(found: Stored | None, prepared: PreparedTxnState, outcome: Outcome, now: datetime) -> Stored | None:
    """The row after the outcome of that transaction is recorded; None if it does not change."""
    if found is None or str(found.row.prepared) != str(prepared) or found.row.completed is not None:
        return None
    return replace(found, row=replace(found.row, completed=outcome, updated_at=now))


def is_news(found: Stored | None, prepared: PreparedTxnState, outcome: Outcome) -> bool:
    """Whether the outcome is an incident: not UNVERIFIABLE if a settler that saw more of the log knew better."""
    if outcome is not Outcome.UNVERIFIABLE:
        return outcome is Outcome.LOST
    same = found is not None and str(found.row.prepared) == str(prepared)
    return not (same and found is not None and found.row.completed not in {None, outcome})


def loss(row: StateRow, outcome: Outcome, detail: str, now: datetime) -> Incident:
    """The incident of a loss."""
    return Incident(row.transactional_id, str(row.prepared), outcome, detail, now, None)


def fenced(found: Stored | None, row: StateRow, fence: int, now: datetime) -> Stored | None:
    """The row with the fence of its transaction; None if it is no longer as it was read."""
    if (
        found is None
        or found.row.namespace != row.namespace
        or str(found.row.prepared) != str(row.prepared)
        or found.row.settle_fence != row.settle_fence
    ):
        return None
    return replace(found, row=replace(found.row, settle_fence=fence, updated_at=now))


def settled(found: Stored | None, incarnation: int, now: datetime) -> Stored | None:
    """The row with at least that settled incarnation; None if it does not change."""
    if found is None or found.row.settled_incarnation >= incarnation:
        return None
    return replace(found, row=replace(found.row, settled_incarnation=incarnation, updated_at=now))


# Deletes rows of ids that never come back, and incidents acknowledged long ago.


class ErasableKeys(Keys, Protocol):
    """Keys of a database that can delete them."""

    def erase(self, entries: Mapping[Key, Entry]) -> bool:
        """Delete all entries or none, if they are as they were read. Durable on return. False if one has changed."""
        ...


class KeyedForgetting:
    """Implements :class:`dualwrite.interfaces.Forgetting`. There are neither leases nor runs."""

    def __init__(self, keys: ErasableKeys) -> None:
        self._keys = keys

    def now(self) -> datetime:
        """This process's time: the rows hold that of the processes that wrote them."""
        return now()

    def leased(self) -> set[str]:
        return set()

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """This fences a writer that is still open: its next dual write aborts on both sides."""
        entries = self._keys.get([state_key(row.transactional_id) for row in rows])
        found = {key: decode_row(entry.value).row for key, entry in entries.items()}
        unchanged = all(found.get(state_key(row.transactional_id)) == row for row in rows)
        return unchanged and self._keys.erase(entries)

    def forget_incidents(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
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
        del prefix, before, dry_run, name
        return 0

    def forget_actions(self, prefix: str, before: datetime, /, *, dry_run: bool, name: str | None = None) -> int:
        del prefix, before, dry_run, name
        return 0


# `KeyedDatabase`: a database without SQL, as the one that decides.


class KeyedDatabase(Database):
    """A subclass adds the primitives, the handle, and what :class:`Database` asks of every kind."""

    @property
    @abstractmethod
    def keys(self) -> Keys:
        """The primitives."""

    @abstractmethod
    def new_handle(self) -> KeyedHandle:
        """A new handle, for one dual write."""

    def store(self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S) -> KeyedStore:
        """A paused owner holds no lock, so no server has to take one from it."""
        del paused_owner_timeout_s
        return KeyedStore(self.keys, self.traits.name)

    def connect(self) -> KeyedHandle:
        return self.new_handle()
