"""The deciding SQL database as a whole, and the database behind what a caller gives: an engine, a URL, or a database itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Row,
    and_,
    delete,
    exc,
    func,
    insert,
    or_,
    select,
    tuple_,
    union_all,
    update,
)

from dualwrite.errors import ConfigurationError
from dualwrite.interfaces import PAUSED_OWNER_TIMEOUT_S, Database, Traits
from dualwrite.protocol.blocking import ActionRecord, Deed, End, Ended, Intent
from dualwrite.protocol.findings import Status
from dualwrite.protocol.values import owner_prefix, pool_of_sink
from dualwrite.stores.sql import dialect
from dualwrite.stores.sql.access import (
    Borrowed,
    Meaning,
    engine_of,
    grants_to_delete,
    keep,
    let_go,
    map_database_error,
    meaning_of,
    usable,
)
from dualwrite.stores.sql.short_transactions import FoundTables, ShortTransactions, check_schema, dialect_of
from dualwrite.stores.sql.store import SqlStateStore, listen_to
from dualwrite.stores.sql.tables import database_now, declare_tables, in_chunks

if TYPE_CHECKING:
    from sqlalchemy import Table

    from dualwrite.interfaces import StateStore
    from dualwrite.protocol.process import Lease
    from dualwrite.protocol.values import StateRow
    from dualwrite.stores.sql.leases import Leases


_NAMES: Final = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}


class SqlDatabase(Database):
    """Serves the library's own transactions from one engine, and blocks from another one to the same database, if given."""

    def __init__(self, engine: Engine, schema: str | None = None, *, blocks: Engine | None = None) -> None:
        self.engine = engine
        self._schema = schema
        self._blocks = blocks or engine
        self._found: FoundTables | None = None
        name = engine.dialect.name
        self._is_sqlite = name == "sqlite"
        self._traits = Traits(
            _NAMES.get(name, name), "connection", blocks=1 if self._is_sqlite else None, savepoints=True
        )

    @property
    def traits(self) -> Traits:
        """SQLite has one write lock, so that one block at a time can write."""
        return self._traits

    @property
    def schema(self) -> str | None:
        return self._schema

    @property
    def tables_schema(self) -> str | None:
        """The schema in which the library's tables are; the first call asks the database, unless :meth:`check` has."""
        return self._tables().schema

    def _tables(self) -> FoundTables:
        if self._found is None:
            self._found = check_schema(self.engine, self._schema)
        return self._found

    def require_outbox(self) -> None:
        if self.engine.dialect.name == "postgresql":
            from dualwrite.stores.sql.postgresql import refuse_unlogged  # noqa: PLC0415 - large, as in dialect_of

            try:
                with self.engine.connect() as connection:
                    refuse_unlogged(connection, declare_tables(self.tables_schema))
            except exc.SQLAlchemyError as error:
                raise map_database_error(error, self.engine, self._schema) from error

    @property
    def joins_first(self) -> Engine | None:
        return self._blocks if self._is_sqlite else None

    def check(self) -> None:
        """The durability of commits is checked where one begins."""
        self._found = check_schema(self.engine, self._schema)

    def store(self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S) -> SqlStateStore:
        return SqlStateStore(self.engine, schema=self.tables_schema, paused_owner_timeout_s=paused_owner_timeout_s)

    def joined_store(
        self, *, paused_owner_timeout_s: float | None = PAUSED_OWNER_TIMEOUT_S
    ) -> Callable[[], JoinedStore]:
        """Gives the same rows, for dual writes in transactions that other code begins and ends.

        It looks at the database with the first one: sessions may be bound while the database is away, or has no tables yet.
        """
        listen_to(self.engine)

        @cache
        def made() -> JoinedStore:
            return JoinedStore(self.engine, schema=self.tables_schema, paused_owner_timeout_s=paused_owner_timeout_s)

        return made

    def connect(self) -> Borrowed:
        return Borrowed(self._blocks)

    @contextmanager
    def connect_to_send(self) -> Generator[Connection, None, None]:
        """On the library's own engine, whatever serves the blocks. SQLite's write lock alone is enough."""
        with Borrowed(self.engine) as connection:
            if not self._is_sqlite:
                connection.execution_options(isolation_level="READ COMMITTED")
            yield connection

    @contextmanager
    def adopt(self, given: object, store: StateStore) -> Generator[Connection, None, None]:
        """Takes a connection of SQLAlchemy's, psycopg's or Django's."""
        with usable(given, self.engine) as connection:
            if connection.engine.pool is not self._blocks.pool:
                store.check_same_database(connection)
            yield connection

    def close(self) -> None:
        self.engine.dispose()

    def forked(self) -> None:
        self.engine.dispose(close=False)

    def leases(self, fleet: str) -> Leases:
        from dualwrite.stores.sql.leases import Leases  # noqa: PLC0415 - most writers have no lease

        return Leases(self.engine, fleet, schema=self.tables_schema)

    def living(self, names: Collection[str]) -> set[str]:
        """Includes slots, which the tasks of a job hold."""
        from dualwrite.stores.sql.leases import living_leases, living_members  # noqa: PLC0415 - as above

        slots = living_leases(self.engine, names, schema=self.tables_schema)
        return slots | living_members(self.engine, names, schema=self.tables_schema)

    def lease_list(self, transactional_id: str | None, prefix: str) -> Sequence[Lease]:
        from dualwrite.stores.sql.leases import read_leases  # noqa: PLC0415 - as above

        return read_leases(self.engine, transactional_id, prefix=prefix, schema=self.tables_schema)

    def warnings(self) -> Sequence[str]:
        """Only PostgreSQL keeps old versions where look-ups meet them."""
        if self.engine.dialect.name != "postgresql":
            return ()
        from dualwrite.stores.sql.postgresql import kept_versions  # noqa: PLC0415 - large, as in dialect_of

        try:
            with self.engine.connect() as connection:
                finding = kept_versions(connection, declare_tables(self.tables_schema))
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self.engine, self._schema) from error
        return () if finding.status is Status.OK else (f"{finding}: {finding.remedy}",)

    def forgetting(self) -> Forgetting:
        return Forgetting(self.engine, self.tables_schema)

    def history(self) -> History:

        return History(self.engine, schema=self.tables_schema)


def sql_of(database: Database, what: str) -> SqlDatabase:
    """The database, for what only SQL can do; ``what`` is the subject of the message that refuses another kind."""
    if not isinstance(database, SqlDatabase):
        raise ConfigurationError(
            f"{what} need a SQL database, and this writer's database is {database.traits.name}",
            next_step=f"use tx.{database.traits.gives} of transaction(), run() or submit()",
        )
    return database


# The SQL of forgetting: ids that never come back, incidents acknowledged long ago, runs long over.

Result = TypeVar("Result")


class _InUseError(Exception):
    """A row has changed since it was read."""


class Forgetting:
    """Deletes rows that are no longer needed, in short transactions of its own."""

    def __init__(self, engine: Engine, schema: str | None = None) -> None:
        self._engine = engine
        self._dialect = dialect_of(engine)
        self._tables = declare_tables(schema)
        self._own = ShortTransactions(engine, self._dialect, self._tables)

    def now(self) -> datetime:
        def ask(connection: Connection) -> datetime:
            moment: datetime = connection.execute(select(database_now())).scalar_one()
            return moment

        return self._own.read(ask)

    def leased(self) -> set[str]:
        """The ids of slots that a worker holds, or may still continue with, and those of fleets that a member holds."""
        slot, lease = self._tables.slot, self._tables.lease
        statement = union_all(
            select(slot.c.transactional_id).where(self._is_leased()),
            select(lease.c.transactional_id).where(lease.c.lease_until > database_now()),
        )
        return self._own.read(lambda connection: set(connection.scalars(statement)))

    def _is_leased(self) -> ColumnElement[bool]:
        slot, now = self._tables.slot, database_now()
        return or_(slot.c.lease_until > now, slot.c.kept_until > now)

    def forget(self, rows: Sequence[StateRow]) -> bool:
        """Delete the rows with their slots and leases, all or none. Durable on return.

        This fences a writer that is still open: its next dual write aborts on both sides. False if a row was used since it was
        read, its slot or lease is held, or its messages wait: nothing was deleted.
        """

        def work(connection: Connection) -> bool:
            state, slot, lease = self._tables.state, self._tables.slot, self._tables.lease
            for row in rows:
                unchanged = and_(
                    state.c.transactional_id == row.transactional_id,
                    state.c.namespace == row.namespace,
                    state.c.incarnation == row.incarnation,
                    state.c.updated_at == row.updated_at,
                )
                if connection.execute(delete(state).where(unchanged)).rowcount != 1:
                    raise _InUseError
                of_row = slot.c.transactional_id == row.transactional_id
                connection.execute(delete(slot).where(of_row, ~func.coalesce(self._is_leased(), False)))
                if connection.scalar(select(func.count()).where(of_row)):
                    raise _InUseError
                of_row = lease.c.transactional_id == row.transactional_id
                connection.execute(
                    delete(lease).where(of_row, ~func.coalesce(lease.c.lease_until > database_now(), False))
                )
                if connection.scalar(select(func.count()).where(of_row)):
                    raise _InUseError
                self._forget_mode(connection, row.transactional_id)
            return True

        try:
            return self._permitted(lambda: self._own.run(work))
        except _InUseError:
            return False

    def _forget_mode(self, connection: Connection, writer: str) -> None:
        outbox, mode = self._tables.outbox, self._tables.mode
        if connection.scalar(select(outbox.c.seq).where(outbox.c.writer == writer).limit(1)) is not None:
            raise _InUseError
        connection.execute(delete(mode).where(mode.c.writer == writer))

    def forget_incidents(
        self, prefix: str, acknowledged_before: datetime, *, dry_run: bool, name: str | None = None
    ) -> int:
        """Delete incidents that were acknowledged before that time. Durable on return. Returns their number.

        ``name`` is a writer's id, which includes its lanes, instead of the prefix.
        """
        incident = self._tables.incident
        chosen = self._chosen(incident.c.transactional_id, prefix, name)
        return self._forget_old(
            incident, and_(chosen, incident.c.acknowledged_at < acknowledged_before), dry_run=dry_run
        )

    def forget_actions(self, prefix: str, begun_before: datetime, *, dry_run: bool, name: str | None = None) -> int:
        """Delete what the history says of actions that began before that time. Durable on return. Returns their number.

        ``name`` is a writer's id, which includes its lanes, instead of the prefix.
        """
        action = self._tables.action
        chosen = self._chosen(action.c.subject, prefix, name)
        return self._forget_old(action, and_(chosen, action.c.begun_at < begun_before), dry_run=dry_run)

    def _chosen(self, column: ColumnElement[str], prefix: str, name: str | None) -> ColumnElement[bool]:
        if name is None:
            return self._dialect.begins_with(column, prefix)
        return or_(column == name, self._dialect.begins_with(column, f"{name}#"))

    def _forget_old(self, table: Table, old: ColumnElement[bool], *, dry_run: bool) -> int:
        if dry_run:
            count = select(func.count()).select_from(table).where(old)
            return self._own.read(lambda connection: connection.scalar(count) or 0)
        return self._permitted(
            lambda: self._own.run(lambda connection: connection.execute(delete(table).where(old)).rowcount)
        )

    def forget_runs(self, prefix: str, begun_before: datetime, *, dry_run: bool, name: str | None = None) -> int:
        """Delete the rows of runs that began before that time, by the database's clock, and have no worker. Durable on return.

        A batch that is run again, or a stream that continues, begins its next run; a task of a deleted run is refused.
        ``prefix`` is that of the sink's slot pool; ``name`` is one pool's name instead. Returns their number.
        """
        run, slot = self._tables.run, self._tables.slot
        of_run = tuple_(run.c.sink, run.c.name)
        leased = select(slot.c.pool, slot.c.lease_owner).where(slot.c.lease_until > database_now())

        def find(connection: Connection) -> Sequence[tuple[str, str]]:
            owners: dict[str, list[str]] = defaultdict(list)
            for pool, owner in connection.execute(leased):
                owners[pool].append(owner)
            return [
                (sink, of_batch)
                for sink, of_batch in connection.execute(
                    select(run.c.sink, run.c.name).where(run.c.begun_at < begun_before)
                )
                if (pool_of_sink(sink) == name if name is not None else pool_of_sink(sink).startswith(prefix))
                and not any(owner.startswith(owner_prefix(of_batch)) for owner in owners[pool_of_sink(sink)])
            ]

        def work(connection: Connection) -> int:
            deleted = 0
            for some in in_chunks(find(connection)):
                old = select(run.c.sink, run.c.name).where(of_run.in_(some), run.c.begun_at < begun_before)
                # A transaction that a task handed over, still undecided, locks its run: skip it.
                free = connection.execute(old.with_for_update(skip_locked=True)).all()
                deleted += connection.execute(delete(run).where(of_run.in_(free))).rowcount if free else 0
            return deleted

        if dry_run:
            return len(self._own.read(find))
        return self._permitted(lambda: self._own.run(work))

    def _permitted(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except ConfigurationError as error:
            cause = error.__cause__
            if not isinstance(cause, exc.SQLAlchemyError) or meaning_of(cause) is not Meaning.PRIVILEGE:
                raise
            step = grants_to_delete(self._engine.url, self._tables.schema)
            raise ConfigurationError(error.what, next_step=step) from error


def before(moment: datetime, seconds: float) -> datetime:
    """The time that many seconds before the moment."""
    return moment - timedelta(seconds=seconds)


# The state store for dual writes in transactions that other code begins and ends, such as an ORM session.


class JoinedStore(SqlStateStore):
    """As :class:`SqlStateStore`, but the connection is inside a transaction of SQLAlchemy's when a dual write begins on it.

    :meth:`begin` joins that transaction. :meth:`commit` may be called only by the code that SQLAlchemy calls to send its
    COMMIT; it and :meth:`rollback` end the database's transaction, and leave SQLAlchemy's own state to its owner. Nothing
    refuses the owner's COMMIT here: the owner of the connection must turn it into that of the dual write.
    """

    @property
    def with_commit(self) -> None:
        """The owner of the transaction commits."""

    def check_same_database(self, connection: Connection) -> None:
        """The transaction continues."""
        self._same_database.check(connection)

    def begin(self, connection: Connection) -> None:
        """Join the transaction, unless it has gone too far for that. On SQLite this takes the write lock."""
        try:
            joined_late = self._dialect.join(connection, self._tables)
        except exc.SQLAlchemyError as error:
            raise self._as_ours(error) from error
        keep(connection, joined_late=joined_late)

    def commit(self, connection: Connection, *, answer_s: float | None = None) -> None:
        try:
            dialect.commit(connection, self._dialect, self._decided(connection), answer_s=answer_s, joined=True)
        finally:
            let_go(connection)
            self._dialect.restore(connection)

    def rollback(self, connection: Connection) -> None:
        dialect.rollback_joined(connection)
        let_go(connection)
        self._dialect.restore(connection)

    def discard(self, connection: Connection) -> None:
        dialect.discard_joined(connection)
        let_go(connection)


_OTHERS: Final[dict[str, str]] = {
    "rocksdb": "dualwrite.stores.keyed.rocksdb.RocksDatabase",
    "zookeeper": "dualwrite.stores.keyed.zookeeper.ZooKeeperDatabase",
}
"""By the beginning of its URLs, the class of a database that SQLAlchemy does not know; each has ``from_url``."""


def database_of(given: Engine | Database | URL | str, schema: str | None = None) -> Database:
    """The database itself, or a new one over an engine or a URL. It connects on first use."""
    made = _made(given)
    if made is None:
        return SqlDatabase(engine_of(cast("Engine | URL | str", given)), schema)
    if schema not in {None, made.schema}:
        raise ConfigurationError(
            f"schema is {schema!r}, and the database is {made.traits.name}", next_step="leave schema out"
        )
    return made


def _made(given: object) -> Database | None:
    if isinstance(given, Database):
        return given
    if not isinstance(given, str):
        return None
    place = _OTHERS.get(given.partition(":")[0])
    if place is None:
        return None
    module, _, name = place.rpartition(".")
    from_url = cast("Callable[[str], Database]", getattr(import_module(module), name).from_url)
    return from_url(given)


def has_tables(url: str) -> bool:
    """Whether a URL names a database whose tables must be made by a migration."""
    return url.partition(":")[0] not in _OTHERS


def is_made_here(given: object) -> bool:
    """Whether :func:`database_of` makes the connections, so that the caller closes the database."""
    return isinstance(given, (str, URL))


@contextmanager
def opened(given: Engine | Database | URL | str, schema: str | None = None) -> Generator[Database, None, None]:
    """The database for a block, which closes it if it was made from a URL. Checked."""
    database = database_of(given, schema)
    try:
        database.check()
        yield database
    finally:
        if is_made_here(given):
            database.close()


_KNOWN: Final = [deed.value for deed in Deed]
"""A later version may store others, which this one could not show."""


class History:
    """The actions on the ids of one database. Thread-safe; every call is a short transaction of its own, durable on return.

    Every call raises ``Unavailable`` if the database does not answer, and ``ConfigurationError`` if the right to the table is
    missing, or the database is read-only.
    """

    def __init__(self, engine: Engine, *, schema: str | None = None) -> None:
        self._dialect = dialect_of(engine)
        self._tables = declare_tables(schema)
        self._action = self._tables.action
        self._own = ShortTransactions(engine, self._dialect, self._tables)

    def begin(self, intents: Sequence[Intent]) -> None:
        """Store what is about to be done. One whose id is there already begins anew: it has no outcome any more."""
        action = self._action

        def work(connection: Connection) -> None:
            there = self._there(connection, intents)
            for intent in intents:
                if intent.action_id in there:
                    connection.execute(
                        update(action)
                        .where(action.c.action_id == intent.action_id)
                        .values(begun_at=database_now(), ended_at=None, outcome=None, result=None, **_values(intent))
                    )
            if new := [_values(intent) for intent in intents if intent.action_id not in there]:
                connection.execute(insert(action).values(begun_at=database_now()), new)

        if intents:
            self._own.run(work)

    def begin_once(self, intent: Intent) -> bool:
        """Store one intent; False, and nothing is stored, if its id is there already: its form was sent twice."""
        statement = self._dialect.insert_if_missing(self._action).values(begun_at=database_now(), **_values(intent))
        return self._own.run(lambda connection: connection.execute(statement).rowcount) == 1

    def _there(self, connection: Connection, intents: Sequence[Intent]) -> set[str]:
        action = self._action
        found: set[str] = set()
        for some in in_chunks(sorted({intent.action_id for intent in intents})):
            found.update(connection.scalars(select(action.c.action_id).where(action.c.action_id.in_(some))))
        return found

    def end(self, ends: Sequence[End]) -> None:
        """Store how what was begun has ended."""
        action = self._action

        def work(connection: Connection) -> None:
            for end in ends:
                connection.execute(
                    update(action)
                    .where(action.c.action_id == end.action_id)
                    .values(ended_at=database_now(), outcome=end.outcome.value, result=end.result)
                )

        if ends:
            self._own.run(work)

    def read(self, action_id: str) -> ActionRecord | None:
        """One action; None if it is not there."""
        statement = select(self._action).where(self._action.c.action_id == action_id, self._action.c.deed.in_(_KNOWN))
        row = self._own.read(lambda connection: connection.execute(statement).one_or_none())
        return None if row is None else _record(row)

    def last(self, prefix: str, *, limit: int) -> Sequence[ActionRecord]:
        """The last actions on ids and writers with that prefix, newest first."""
        action = self._action
        statement = (
            select(action)
            .where(self._dialect.begins_with(action.c.subject, prefix), action.c.deed.in_(_KNOWN))
            .order_by(action.c.begun_at.desc(), action.c.action_id)
            .limit(limit)
        )
        return [_record(row) for row in self._own.read(lambda connection: connection.execute(statement).all())]


def _values(intent: Intent) -> dict[str, str]:
    return {
        "action_id": intent.action_id,
        "subject": intent.subject,
        "deed": intent.deed.value,
        "detail": intent.detail,
        "reason": intent.reason,
        "actor": intent.actor,
        "program": intent.program,
    }


def _record(row: Row[Any]) -> ActionRecord:
    return ActionRecord(
        Intent(row.action_id, row.subject, Deed(row.deed), row.detail, row.reason, row.actor, row.program),
        row.begun_at,
        row.ended_at,
        None if row.outcome is None else Ended(row.outcome),
        row.result,
    )
