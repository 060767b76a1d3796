"""Messages that wait, as rows of the user's SQL database: put with a decision, read in order, deleted as they are sent.

**Cheap to put.** On PostgreSQL a block's few messages go out with its decision, in one request; many go as binary arrays, in
statements of their own after it. MariaDB, MySQL and SQLite take them in their drivers' form for many rows.

**The count comes first.** A block raises the count in the row of its lane before its messages draw their numbers. So whoever
has numbers that are not committed yet holds the lock on that row, and :class:`Floor` can tell when nobody has.

**Fast to read, all day.** A table that is written and emptied all the time has its dead rows at the head of the index: while
any snapshot in the database is older than they are, a read that begins at the first number steps over every one of them. So
a read begins at a floor: a number below which nothing is, nor can come any more.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy import (
    and_,
    bindparam,
    delete,
    exc,
    func,
    insert,
    literal,
    or_,
    select,
    union,
    update,
)

from dualwrite.clock import now_s
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.protocol.values import AsideMessage, FirstLook, OutboxMode, Waiting, WaitingMessages
from dualwrite.stores.sql.access import map_database_error
from dualwrite.stores.sql.drivers import CompiledOnce
from dualwrite.stores.sql.store import mode_in
from dualwrite.stores.sql.tables import MAX_ID_LENGTH, check_not_gone_back, database_now, in_chunks
from dualwrite.stores.sql.waiting_rows import (
    PUT_COLUMNS,
    Asked,
    Put,
    decode_headers,
    encode_headers,
    on_server,
    rows_of,
    size_of_row,
)

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Engine

    from dualwrite.clock import Deadline
    from dualwrite.protocol.message import Sendable
    from dualwrite.protocol.values import Decision, StateRow
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.short_transactions import ShortTransactions
    from dualwrite.stores.sql.store import Decisions
    from dualwrite.stores.sql.tables import Tables

Result = TypeVar("Result")


# The floor of a writer's rows.

_WORTH: Final = 2000
"""So many rows may be dead behind the floor: a read steps over them in less time than it takes to prove another floor."""
_AGAIN_S: Final = 0.2


@dataclass
class Floor:
    """A number of one writer's below which nothing waits, nor can come any more; and what is known of the next one.

    *Claim.* A read that begins above the floor misses nothing.

    *Proof.* Take any number S that a read has shown: its row is committed. Numbers of a sequence grow, so every number up to S
    was drawn before that read. A transaction that draws numbers has, before the first of them, changed and so locked the row
    of its lane (``decide``), or locked the writer's mode alone (``replay``), and keeps that lock until it ends. After the read,
    the rows of all lanes, and of the mode, are looked at in other transactions. If a row can be locked, or is gone, or its
    count is another one than after the read, then whoever had locked it at the time of the read has ended: the count changes
    with the commit of such a transaction, or of a later one that had to wait for the lock. Lanes that are born later draw
    greater numbers. So once this was seen of each row, one after the other, no number up to S can be committed any more that
    is not committed already. A read whose snapshot is taken after that, and which begins at the former floor, shows all that is
    left of them; if its first row has the number m, nothing is left, nor can come, below the smaller of S + 1 and m. That is
    the next floor. What this read takes away counts only when a later one no longer shows it: the transaction may roll back.

    *Where it holds.* On the server that has said all this. After a failover to one that lags behind, numbers may be drawn once
    more; so the floor counts only where the server's mark is the same, which the statement that reads compares itself. A
    restored database is another server. `setval` by hand is not foreseen.

    It is one process's knowledge, found again in a moment by the next. One thread at a time reads a writer's rows.

    Attributes:
        number: The floor.
        server: The mark of the server that it holds on.
        candidate: The number S of the proof; None while none is under way.
        unseen: The rows that were locked each time since, with their counts after the read.
        proved_in: The transaction in which the last of them was seen; None before. Its own snapshot may be older.
        taken: The rows read since the floor was raised.
        asked_s: When the rows were looked at last.
    """

    number: int = 0
    server: str = ""
    candidate: int | None = None
    unseen: Mapping[str, object] = field(default_factory=dict)
    proved_in: object = None
    taken: int = 0
    asked_s: float = float("-inf")

    def read(self, transaction: object, numbers: Sequence[int]) -> None:
        """A read in that transaction, which began at this floor, has shown these numbers."""
        if self.proved_in is not None and self.proved_in is not transaction:
            assert self.candidate is not None
            self.number = min(self.candidate, numbers[0] - 1) if numbers else self.candidate
            self.candidate, self.proved_in, self.taken = None, None, 0
        self.taken += len(numbers)

    @property
    def is_due(self) -> bool:
        """Whether to look at the rows of the lanes, in another transaction than the one that reads."""
        if self.proved_in is not None:
            return False
        return (self.candidate is not None or self.taken >= _WORTH) and now_s() >= self.asked_s + _AGAIN_S

    def look(self, transaction: object, last: int, seen: Seen) -> None:
        """What the look has shown, after a read in that transaction whose last number was this."""
        self.asked_s = now_s()
        if seen.server != self.server:
            self.number, self.server, self.candidate = 0, seen.server, None
        if self.candidate is None:
            self.candidate, before = last, seen.counts
        else:
            before = self.unseen
        self.unseen = {
            name: count
            for name, count in before.items()
            if name not in seen.free and name in seen.counts and seen.counts[name] == count
        }
        self.proved_in = None if self.unseen else transaction


class Seen(NamedTuple):
    """The rows of a writer's lanes, and of its mode: their counts, and those that could be locked after that."""

    server: str
    counts: Mapping[str, object]
    free: Collection[str]


# The rows, in the caller's transaction and in our own.

_SAMPLE: Final = 5000
_MODE_KEY: Final = "#mode of "  # no lane has a name like that


LOCK_S: Final = 75.0


class SqlOutbox:
    """The messages that wait in a SQL database. Implements :class:`dualwrite.interfaces.OutboxRows`. Thread-safe.

    Writers of ``never`` use none of it, and work on tables that lack it.
    """

    def __init__(
        self, engine: Engine, tables: Tables, dialect: Dialect, decisions: Decisions, own: ShortTransactions
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._dialect = dialect
        self._decisions = decisions
        self._own = own
        self._floors: dict[str, Floor] = {}
        mode = tables.mode
        named = mode.c.writer == bindparam("writer_")
        # Blocks that share the lock and want to turn the mode would wait for each other, if only one could have the lock that
        # turns it despite all shares. MariaDB has no such lock: it ends one of them.
        self._share = CompiledOnce(select(mode.c.mode).where(named).with_for_update(read=True, key_share=True))
        self._lock_to_turn = CompiledOnce(select(mode.c.mode).where(named).with_for_update(key_share=True))
        self._lock = CompiledOnce(select(mode.c.mode).where(named).with_for_update())
        self._turn = CompiledOnce(update(mode).where(named).values(mode=bindparam("mode_"), changed_at=database_now()))

    # Inside the caller's transaction

    def read_first(
        self,
        connection: Connection,
        transactional_id: str,
        writer: str,
        *,
        namespace: str | None = None,
        known: StateRow | None = None,
    ) -> FirstLook:
        bound = {"id_": transactional_id, "namespace_": namespace, "writer_": writer}
        with self._mapped(transactional_id):
            first = self._dialect.read_first(connection, self._decisions.start_waiting, bound)
        _, decisions, incarnation, prepared, *values = first
        self._dialect.check_start(connection, values)
        if incarnation is not None and known is not None:
            check_not_gone_back(known, int(incarnation), prepared)
        return FirstLook(
            None if incarnation is None else int(incarnation),
            mode_in(first),
            0 if decisions is None else int(decisions),
        )

    def mode(self, connection: Connection, writer: str) -> OutboxMode:
        with self._mapped():
            return self._decisions.mode_of(connection, writer)

    def share(self, connection: Connection, writer: str, *, within_s: float) -> OutboxMode:
        with self._mapped():
            return mode_in(self._dialect.ask_locked(connection, self._share, {"writer_": writer}, within_s))

    def lock(self, connection: Connection, writer: str, *, within_s: float, beside_shares: bool = False) -> OutboxMode:
        statement = self._lock_to_turn if beside_shares else self._lock
        with self._mapped():
            row = self._dialect.ask_locked(connection, statement, {"writer_": writer}, within_s)
            if row is None:
                self._insert_mode(connection, writer, OutboxMode.DIRECT)
                row = self._dialect.ask_locked(connection, statement, {"writer_": writer}, within_s)
            return mode_in(row)

    def _insert_mode(self, connection: Connection, writer: str, mode: OutboxMode) -> None:
        connection.execute(self._dialect.insert_if_missing(self._tables.mode), {"writer": writer, "mode": mode.value})

    def turn(self, connection: Connection, writer: str, mode: OutboxMode) -> None:
        with self._mapped():
            self._turn.execute(connection, {"writer_": writer, "mode_": mode.value})

    def decide(
        self, connection: Connection, decision: Decision, writer: str, messages: Sequence[Sendable]
    ) -> tuple[bool, str | None]:
        transactional_id = decision.transactional_id
        if decision.waits is None or decision.state is not None:
            raise IllegalStateError("the decision has no number, or names a state", transactional_id=transactional_id)
        put = Put(self._tables.outbox, writer, transactional_id, rows_of(messages))
        with self._mapped(transactional_id), self._dialect.bounded(connection, decision.answer_s):
            row = self._decisions.decide(connection, decision, None, put)
            return self._decisions.ended(connection, transactional_id, row)

    def read(self, connection: Connection, writer: str, *, limit: int, max_bytes: int) -> WaitingMessages:
        floor = self._floors.setdefault(writer, Floor())
        with self._mapped():
            found = self._dialect.read_waiting(
                connection, self._tables, Asked(writer, floor.number, floor.server, limit, max_bytes)
            )
        transaction = connection.get_transaction()
        floor.read(transaction, found.numbers)
        mark = self._dialect.server_mark()
        if mark is not None and found.numbers and floor.is_due:
            floor.look(transaction, found.numbers[-1], self._own.run(lambda own: self._seen(own, writer, mark)))
        return found

    def _seen(self, connection: Connection, writer: str, mark: ColumnElement[Any]) -> Seen:
        state, mode = self._tables.state, self._tables.mode
        of_lanes = or_(
            state.c.transactional_id == writer,
            self._dialect.begins_with(state.c.transactional_id, f"{writer}#"),
        )
        of_mode = mode.c.writer == writer
        counts: dict[str, object] = {
            name: count or 0
            for name, count in connection.execute(
                select(state.c.transactional_id, state.c.outbox_decisions).where(of_lanes)
            )
        }
        counts.update((_MODE_KEY + name, None) for name in connection.scalars(select(mode.c.writer).where(of_mode)))
        # Only now: a lane that is locked later has drawn its numbers after the counts were read, or has been free since then.
        # With a column that no index holds: InnoDB would lock the index's record alone, which a decision does not.
        locked = select(state.c.transactional_id, state.c.outbox_decisions).where(of_lanes)
        free = {name for name, _ in connection.execute(locked.with_for_update(read=True, skip_locked=True))}
        locked = select(mode.c.writer, mode.c.changed_at).where(of_mode)
        free |= {
            _MODE_KEY + name for name, _ in connection.execute(locked.with_for_update(read=True, skip_locked=True))
        }
        return Seen(str(connection.scalar(select(mark))), counts, free)

    def delete(self, connection: Connection, writer: str, numbers: Sequence[int]) -> int:
        del writer  # no number is another's
        if not numbers:
            return 0
        with self._mapped():
            return self._dialect.delete_waiting(connection, self._tables.outbox, numbers)

    def move_aside(self, connection: Connection, writer: str, numbers: Sequence[int], reason: str) -> int:
        outbox, aside = self._tables.outbox, self._tables.aside
        moved = 0
        with self._mapped():
            for some in in_chunks(numbers):
                chosen = and_(outbox.c.writer == writer, outbox.c.seq.in_(some))
                names = ["seq", *PUT_COLUMNS, "put_at"]
                row = select(*(outbox.c[name] for name in names), literal(reason.replace("\x00", "?"))).where(chosen)
                connection.execute(insert(aside).from_select([*names, "reason"], row, include_defaults=False))
                moved += connection.execute(delete(outbox).where(chosen)).rowcount
        return moved

    def put_aside(self, connection: Connection, message: AsideMessage) -> None:
        # It takes its number from those of messages that wait, by which `replay` and people know it.
        values = {
            "writer": message.writer,
            "transactional_id": message.transactional_id,
            "topic": message.topic[:MAX_ID_LENGTH],
            "topic_partition": message.partition,
            "key": message.key,
            "value": message.value,
            "headers": encode_headers(message.headers) if message.headers else None,
            "timestamp_ms": message.timestamp_ms,
        }
        with self._mapped(message.transactional_id):
            made = connection.execute(insert(self._tables.outbox).values(values)).inserted_primary_key
        assert made is not None
        self.move_aside(connection, message.writer, [made[0]], message.reason)

    # In transactions of our own

    def writers(self) -> Sequence[str]:
        mode, aside = self._tables.mode, self._tables.aside
        both = union(select(mode.c.writer), select(aside.c.writer))
        return sorted(self._own.read(lambda connection: connection.scalars(both).all()))

    def topics(self, writer: str) -> Mapping[str, int]:
        outbox = self._tables.outbox
        first = select(outbox.c.topic).where(outbox.c.writer == writer).order_by(outbox.c.seq).limit(_SAMPLE).subquery()
        counted = select(first.c.topic, func.count()).group_by(first.c.topic)
        found = self._own.read(lambda connection: connection.execute(counted).all())
        return dict(sorted((topic, int(count)) for topic, count in found))

    def begin_later(self, writer: str) -> None:
        def work(connection: Connection) -> None:
            self._insert_mode(connection, writer, OutboxMode.LATER)
            found = mode_in(self._lock_to_turn.execute(connection, {"writer_": writer})[0])
            if found is not OutboxMode.LATER:
                self.turn(connection, writer, OutboxMode.LATER)

        self._own.run(work)

    def decisions_locked(self, transactional_id: str, namespace: str | None, deadline: Deadline) -> int:
        state = self._tables.state
        statement = select(state.c.outbox_decisions, state.c.namespace).where(
            state.c.transactional_id == transactional_id
        )
        row = self._own.run(
            lambda connection: connection.execute(statement.with_for_update()).one_or_none(),
            lock_timeout_s=deadline.remaining_s(),
            answer_s=deadline.remaining_s() + 2.0,  # the server answers when the wait for the lock ends
        )
        if row is None or namespace not in {None, row.namespace}:
            raise ConfigurationError(
                f"the row in {state.fullname} is gone, or is another one of that name",
                transactional_id=transactional_id,
                next_step="restore it",
            )
        return row.outbox_decisions or 0

    def waiting(self, writer: str) -> Waiting:
        return self._own.read(lambda connection: self._waiting(connection, writer))

    def _waiting(self, connection: Connection, writer: str) -> Waiting:
        outbox = self._tables.outbox
        floor = self._floors.get(writer, Floor())
        size = size_of_row(outbox)
        mine = and_(outbox.c.writer == writer, outbox.c.seq > self.above(floor))
        samples = []
        for order in (outbox.c.seq, outbox.c.seq.desc()):
            some = select(outbox.c.seq, size.label("size_")).where(mine).order_by(order).limit(_SAMPLE).subquery()
            summed = select(func.count(), func.sum(some.c.size_), func.min(some.c.seq), func.max(some.c.seq))
            samples.append(connection.execute(summed.select_from(some)).one())
            if samples[0][0] < _SAMPLE:
                break
        count, total, first, last = samples[0]
        if not count:
            return Waiting(0, 0, None, exact=True)
        oldest = connection.execute(select(outbox.c.put_at, database_now()).where(outbox.c.seq == first)).one_or_none()
        oldest_s = None if oldest is None else max(0.0, (oldest[1] - oldest[0]).total_seconds())
        if len(samples) == 1:
            return Waiting(int(count), int(total), oldest_s, exact=True)
        end_count, end_total, end_first, end_last = samples[1]
        if end_first <= last:  # the two meet
            between = select(func.count(), func.sum(size)).where(mine, outbox.c.seq.between(first, end_last))
            found, found_size = connection.execute(between).one()
            return Waiting(int(found), int(found_size), oldest_s, exact=True)
        density = (count + end_count) / (last - first + 1 + end_last - end_first + 1)
        between = (end_first - last - 1) * density
        mean = (int(total) + int(end_total)) / (count + end_count)
        return Waiting(
            int(count + end_count + between), int(total) + int(end_total) + int(between * mean), oldest_s, exact=False
        )

    def above(self, floor: Floor) -> Any:
        """The number above which rows may be: the floor, if it was proved on the server that executes this."""
        mark = self._dialect.server_mark()
        return literal(0) if mark is None or not floor.number else on_server(mark, floor.server, floor.number)

    def aside(self, writer: str, *, limit: int, after: int = 0) -> Sequence[AsideMessage]:
        aside = self._tables.aside
        statement = (
            select(aside).where(aside.c.writer == writer, aside.c.seq > after).order_by(aside.c.seq).limit(limit)
        )
        rows = self._own.read(lambda connection: connection.execute(statement).all())
        return [
            AsideMessage(
                number=row.seq,
                writer=row.writer,
                transactional_id=row.transactional_id,
                topic=row.topic,
                partition=row.topic_partition,
                key=row.key,
                value=row.value,
                headers=() if row.headers is None else decode_headers(row.headers),
                timestamp_ms=row.timestamp_ms,
                put_at=row.put_at,
                reason=row.reason,
                moved_at=row.moved_at,
            )
            for row in rows
        ]

    def count_aside(self, writer: str) -> int:
        statement = select(func.count()).select_from(self._tables.aside).where(self._tables.aside.c.writer == writer)
        return self._own.read(lambda connection: connection.scalar(statement) or 0)

    def replay(self, writer: str, numbers: Sequence[int] | None = None) -> int:
        outbox, aside = self._tables.outbox, self._tables.aside
        replayed: set[int] = set()

        def work(connection: Connection) -> None:
            self.lock(connection, writer, within_s=LOCK_S, beside_shares=True)
            self.turn(connection, writer, OutboxMode.LATER)
            for chosen in self._chosen_aside(connection, writer, numbers, replayed):
                row = select(*(aside.c[name] for name in PUT_COLUMNS)).where(chosen).order_by(aside.c.seq)
                connection.execute(insert(outbox).from_select(PUT_COLUMNS, row, include_defaults=False))
                connection.execute(delete(aside).where(chosen))

        # Its row is there, committed, before numbers are drawn under its lock: see Floor.
        self._own.run(lambda connection: self._insert_mode(connection, writer, OutboxMode.DIRECT))
        self._own.run(work)
        return len(replayed)

    def drop(self, writer: str, numbers: Sequence[int] | None = None) -> int:
        dropped: set[int] = set()

        def work(connection: Connection) -> None:
            for chosen in self._chosen_aside(connection, writer, numbers, dropped):
                connection.execute(delete(self._tables.aside).where(chosen))

        self._own.run(work)
        return len(dropped)

    def _chosen_aside(
        self, connection: Connection, writer: str, numbers: Sequence[int] | None, done: set[int]
    ) -> Iterator[ColumnElement[bool]]:
        """The messages that are there now, by number: its sender may move others aside between two statements.

        Adds their numbers to those that are ``done``, perhaps by a run before this one, whose COMMIT was not answered.
        """
        aside = self._tables.aside
        of_writer = select(aside.c.seq).where(aside.c.writer == writer).order_by(aside.c.seq)
        if numbers is None:
            found = connection.scalars(of_writer).all()
        else:
            asked = [of_writer.where(aside.c.seq.in_(some)) for some in in_chunks(sorted(set(numbers)))]
            found = [number for one in asked for number in connection.scalars(one)]
        done.update(found)
        for some in in_chunks(found):
            yield and_(aside.c.writer == writer, aside.c.seq.in_(some))

    @contextmanager
    def _mapped(self, transactional_id: str | None = None) -> Generator[None, None, None]:
        try:
            yield
        except exc.SQLAlchemyError as error:
            raise map_database_error(
                error, self._engine, self._tables.schema, transactional_id=transactional_id
            ) from error
