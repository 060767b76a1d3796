"""What people ask of a SQL database: whether it is as required, what it may forget, and what was done by hand.

The look for :mod:`dualwrite.protocol.database_requirements` (the server, the tables, grants, the clock) changes nothing. A
right is tried out by a statement that touches no row, in a transaction that is rolled back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from sqlalchemy import (
    Column,
    ColumnElement,
    Executable,
    Row,
    Table,
    Text,
    and_,
    delete,
    exc,
    false,
    func,
    insert,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    union_all,
    update,
)
from sqlalchemy import table as any_table

from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.protocol.blocking import ActionRecord, Deed, End, Ended, Intent
from dualwrite.protocol.database_requirements import (
    GrantFacts,
    PoolerFacts,
    PostgresFacts,
    database_is_away,
    grants,
    judge_mariadb,
    judge_postgresql,
    old_versions,
)
from dualwrite.protocol.findings import DATABASE, Check, CheckResult, Status, Unasked, clock
from dualwrite.protocol.values import lane_id, owner_prefix, parse_cluster, pool_of_sink
from dualwrite.stores.sql.access import (
    PURPOSES,
    WRITER,
    Meaning,
    driver_words,
    grants_to_delete,
    grants_to_work,
    map_database_error,
    meaning_of,
    version_of,
)
from dualwrite.stores.sql.dialect import name_of
from dualwrite.stores.sql.drivers import own_connection
from dualwrite.stores.sql.short_transactions import FoundTables, ShortTransactions, dialect_of, judge_tables
from dualwrite.stores.sql.tables import MYSQL, VERSION_TABLE, columns_at, database_now, declare_tables, in_chunks

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, FromClause
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from dualwrite.protocol.values import StateRow
    from dualwrite.stores.sql.dialect import Dialect
    from dualwrite.stores.sql.tables import Tables

_MOST_ROWS: Final = 1000
_LOCK_S: Final = 2.0


def look(engine: Engine, schema: str | None, timeout_s: float) -> Iterator[CheckResult]:
    """All findings about the database. Raises nothing for a server that is away or refuses us: that is a finding."""
    try:
        dialect = dialect_of(engine)
        with engine.connect() as connection, dialect.bounded(connection, timeout_s):
            yield from _look(connection, dialect, schema)
    except exc.SQLAlchemyError as error:
        yield database_is_away(map_database_error(error, engine, schema))
    except DualWriteError as error:
        yield database_is_away(error)


def _look(connection: Connection, dialect: Dialect, schema: str | None) -> Iterator[CheckResult]:
    engine = connection.engine
    yield Check(DATABASE, "connection", "the database's commit is the decision of each dual write").ok(
        f"{engine.dialect.name} answers"
    )
    found: FoundTables | None = None
    try:
        found, fit = judge_tables(engine, schema)
        yield fit
        if fit.status is Status.ERROR:
            found = None  # our statements do not fit them: what the role may do is asked once they do
    except ConfigurationError as error:  # the right to read their version is missing
        yield Check(DATABASE, "tables", "a writer must know the version of its tables").refused(error)
    tables = declare_tables(schema if found is None else found.schema)
    if dialect.name == "postgresql":
        yield from _postgresql(connection, tables, found)
    elif engine.dialect.name in MYSQL:
        from dualwrite.stores.sql.mariadb import facts_of  # noqa: PLC0415 - large, as in dialect_of

        yield from judge_mariadb(facts_of(connection, tables))
    else:
        yield _sqlite(connection, dialect, tables)
        return  # which has no roles, and no clock of its own
    connection.rollback()
    if found is not None:
        yield from _grants(connection, tables, schema, found)
    yield _clock(connection)


def _postgresql(connection: Connection, tables: Tables, found: FoundTables | None) -> Iterator[CheckResult]:
    yield from judge_postgresql(_postgresql_facts(connection, None if found is None else tables))
    if found is not None:
        yield kept_versions(connection, tables)


def _sqlite(connection: Connection, dialect: Dialect, tables: Tables) -> CheckResult:
    """By beginning a transaction as a claim does, which checks the settings."""
    check = Check(DATABASE, "settings", "a commit must be on the disk before its messages are committed")
    try:
        dialect.begin_own(connection, tables, lock_timeout_s=_LOCK_S)
    except ConfigurationError as error:
        return check.refused(error)
    except exc.DBAPIError as error:
        if meaning_of(error) is not Meaning.BUSY:
            raise
        return check.unknown(Unasked("another connection holds the write lock", "run it again"))
    else:
        return check.ok("synchronous, and on a local file")
    finally:
        connection.rollback()
        dialect.restore(connection)


# The rights of the role, tried out.


def _grants(connection: Connection, tables: Tables, schema: str | None, found: FoundTables) -> Iterator[CheckResult]:
    known: dict[str, FromClause] = {one.name: one for one in tables.metadata.sorted_tables if found.has(one)}
    known[tables.batch.name] = tables.batch
    known[VERSION_TABLE] = any_table(VERSION_TABLE, Column("version_num", Text), schema=found.schema)
    held: dict[tuple[str, str], bool] = {}
    url = connection.engine.url
    for purpose, wanted in PURPOSES.items():
        pairs = [(name, right) for name, rights in wanted.items() if name in known for right in rights]
        try:
            for pair in pairs:
                if pair not in held:
                    held[pair] = _may(connection, _statement(known[pair[0]], pair[1], found.revision))
        except exc.DBAPIError as error:
            if meaning_of(error) not in {Meaning.READ_ONLY, Meaning.BUSY}:
                raise
            reason = Unasked(driver_words(error), "run it again on a primary, when no migration runs")
            yield Check(DATABASE, f"grants for {purpose}", "a statement without its right fails").unknown(reason)
            continue
        missing: dict[str, list[str]] = {}
        for name, right in pairs:
            if not held[name, right]:
                missing.setdefault(name, []).append(right)
        telling = [pair for pair in pairs if pair[1] != "SELECT"] or pairs
        has_some = any(held[pair] for pair in telling)
        remedy = grants_to_work(url, schema, [purpose])
        yield grants(GrantFacts(purpose, purpose == WRITER, missing, has_some, remedy))


def _statement(table: FromClause, right: str, revision: str) -> Executable:
    """A statement that needs the right, and touches no row."""
    columns = columns_at(table, revision)
    if right == "SELECT" or not isinstance(table, Table):
        return select(columns[0]).where(false())
    if right == "DELETE":
        return delete(table).where(false())
    given = [one for one in columns if one.identity is None]
    if right == "UPDATE":
        return update(table).values({given[-1]: given[-1]}).where(false())
    return insert(table).from_select([one.name for one in given], select(*given).where(false()), include_defaults=False)


def _may(connection: Connection, statement: Executable) -> bool:
    try:
        connection.execute(statement)
    except exc.DBAPIError as error:
        if meaning_of(error) is not Meaning.PRIVILEGE:
            raise
        return False
    else:
        return True
    finally:
        connection.rollback()


# The database's clock, and the clusters that its rows belong to.


def _clock(connection: Connection) -> CheckResult:
    if connection.dialect.name == "postgresql":
        # Another style is a finding of its own, and psycopg cannot read the time in it.
        connection.exec_driver_sql("SET LOCAL DateStyle = ISO")
    asked_at, began = time.time(), time.monotonic()
    now = connection.execute(select(database_now())).scalar_one()
    took_s = time.monotonic() - began
    connection.rollback()
    return clock("the database", asked_at + took_s / 2 - now.timestamp(), took_s / 2)


def clusters_of(engine: Engine, schema: str | None, writer: str | None) -> Mapping[str, str]:
    """By transactional id, the cluster that its row names: of one writer's lanes, or of the first ids.

    `Unavailable` if the rows cannot be read.
    """
    tables = declare_tables(schema)
    state = tables.state
    statement = (
        select(state.c.transactional_id, state.c.cluster_id).order_by(state.c.transactional_id).limit(_MOST_ROWS)
    )
    if writer is not None:
        lanes = dialect_of(engine).begins_with(state.c.transactional_id, lane_id(writer, 1)[:-1])
        statement = statement.where(or_(state.c.transactional_id == writer, lanes))
    try:
        with engine.connect() as connection:
            rows: Sequence[tuple[str, str]] = [(name, text) for name, text in connection.execute(statement)]
    except exc.SQLAlchemyError as error:
        raise Unavailable(driver_words(error)) from error
    return {name: parse_cluster(text)[0] for name, text in rows}


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
        gone: set[str] = set()

        def work(connection: Connection) -> bool:
            state, slot, lease = self._tables.state, self._tables.slot, self._tables.lease
            for row in rows:
                name = state.c.transactional_id == row.transactional_id
                if row.transactional_id in gone and not connection.scalar(select(func.count()).where(name)):
                    continue  # deleted by a run before this one, whose COMMIT was not answered
                unchanged = and_(
                    name,
                    state.c.namespace == row.namespace,
                    state.c.incarnation == row.incarnation,
                    state.c.updated_at == row.updated_at,
                )
                if connection.execute(delete(state).where(unchanged)).rowcount != 1:
                    raise _InUseError
                gone.add(row.transactional_id)
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
        forgotten: list[int] = []  # also by a run before the last one, whose COMMIT was not answered
        self._permitted(
            lambda: self._own.run(
                lambda connection: forgotten.append(connection.execute(delete(table).where(old)).rowcount)
            )
        )
        return max(forgotten)

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

        forgotten: list[int] = []  # as in _forget_old

        def work(connection: Connection) -> None:
            deleted = 0
            for some in in_chunks(find(connection)):
                old = select(run.c.sink, run.c.name).where(of_run.in_(some), run.c.begun_at < begun_before)
                # A transaction that a task handed over, still undecided, locks its run: skip it.
                free = connection.execute(old.with_for_update(skip_locked=True)).all()
                deleted += connection.execute(delete(run).where(of_run.in_(free))).rowcount if free else 0
            forgotten.append(deleted)

        if dry_run:
            return len(self._own.read(find))
        self._permitted(lambda: self._own.run(work))
        return max(forgotten)

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


# The history of what people and services have done, with their reasons.

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
        """Store what is about to be done. An action with the same id begins again, without an outcome."""
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
        begun_at = select(self._action.c.begun_at).where(self._action.c.action_id == intent.action_id)
        mine: list[object] = []

        def work(connection: Connection) -> bool:
            if connection.execute(statement).rowcount == 1:
                mine.append(connection.scalar(begun_at))
                return True
            return connection.scalar(begun_at) in mine  # of a run before this one, whose COMMIT was not answered

        return self._own.run(work)

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


# What shows of PostgreSQL: its settings, a pooler, and old versions of rows.

_DEAD: Final = text("SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = to_regclass(:name)")
_OLDEST_SNAPSHOT: Final = text(
    "SELECT pid, coalesce(nullif(application_name, ''), backend_type), coalesce(state, 'unknown') FROM pg_stat_activity "
    "WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() ORDER BY age(backend_xmin) DESC, pid LIMIT 1"
)


def kept_versions(connection: Connection, tables: Tables) -> CheckResult:
    """What was found about old versions of rows that cannot be removed.

    While any snapshot in the database is older, PostgreSQL keeps a version of each update, and each look-up reads past all of
    them.
    """
    name = name_of(connection, tables.state)
    kept = connection.scalar(_DEAD, {"name": name}) or 0
    return old_versions(name, kept, lambda: _oldest_snapshot(connection))


def _oldest_snapshot(connection: Connection) -> str:
    oldest = connection.execute(_OLDEST_SNAPSHOT).one_or_none()
    if oldest is None:
        return "this role may see no session that holds them"
    return f"of the sessions that this role may see, {oldest[0]} ({oldest[1]}, {oldest[2]}) has the oldest snapshot"


# What shows of the server and of a pooler, for the rules about both.

_SETTINGS: Final = (
    "DateStyle",
    "default_transaction_read_only",
    "fsync",
    "full_page_writes",
    "max_prepared_transactions",
    "synchronous_commit",
    "synchronous_standby_names",
)
_ALL_PREPARED: Final = text(
    "SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float FROM pg_prepared_xacts "
    "WHERE database = current_database() ORDER BY prepared"
)
_IDLE_SESSIONS: Final = text(
    "SELECT pid || ' (' || coalesce(nullif(application_name, ''), usename) || ')', "
    "extract(epoch FROM clock_timestamp() - xact_start)::float FROM pg_stat_activity "
    "WHERE datname = current_database() AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid() "
    "ORDER BY xact_start"
)
_OUTBOX_SIZE: Final = text(
    "SELECT n_dead_tup, n_live_tup, pg_total_relation_size(relid) FROM pg_stat_all_tables WHERE relid = to_regclass(:name)"
)


def _postgresql_facts(connection: Connection, tables: Tables | None) -> PostgresFacts:
    """What shows of the server to this role. ``tables`` is None if they are not there."""
    from dualwrite.stores.sql.postgresql import unlogged_tables  # noqa: PLC0415 - large, as in dialect_of

    settings = text(", ".join(f"current_setting('{name}')" for name in _SETTINGS))
    *values, is_standby = connection.execute(select(settings, literal_column("pg_is_in_recovery()"))).one()
    outbox = None
    if tables is not None:
        name = name_of(connection, tables.outbox)
        outbox = connection.execute(_OUTBOX_SIZE, {"name": name}).one_or_none()
    return PostgresFacts(
        version=version_of(connection),
        is_standby=bool(is_standby),
        settings=dict(zip(_SETTINGS, map(str, values), strict=True)),
        pooler=_pooler(connection),
        prepared=[(gid, age_s) for gid, age_s in connection.execute(_ALL_PREPARED)],
        idle=[(who, age_s) for who, age_s in connection.execute(_IDLE_SESSIONS)],
        unlogged=() if tables is None else tuple(unlogged_tables(connection, tables)),
        outbox=None if outbox is None else (outbox[0], outbox[1], outbox[2]),
    )


def _pooler(connection: Connection) -> PoolerFacts | Unasked:
    """What shows of a pooler.

    It tells each connection a process id of its own, and where it shares sessions, the next connection gets ours.
    """
    from dualwrite.stores.sql.postgresql import WHICH_SERVER  # noqa: PLC0415 - large, as in dialect_of

    driver: Any = own_connection(cast("DBAPIConnection", connection.connection.dbapi_connection))
    ours = connection.exec_driver_sql(WHICH_SERVER).scalar()
    if ours == driver.pgconn.backend_pid:
        return PoolerFacts(is_between=False, shares=False, prepares=False)
    connection.commit()  # a pooler by transaction now gives the session to the next connection that needs one
    try:
        with connection.engine.connect() as other:
            theirs = other.exec_driver_sql(WHICH_SERVER).scalar()
    except exc.SQLAlchemyError as error:
        return Unasked(f"a pooler is there, and a second connection could not be made: {driver_words(error)}")
    return PoolerFacts(is_between=True, shares=theirs == ours, prepares=driver.prepare_threshold is not None)
