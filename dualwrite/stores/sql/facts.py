"""Looks at a SQL database for :mod:`dualwrite.protocol.database_requirements`: the server, the tables, grants, its clock.

Changes nothing. A right is tried out by a statement that touches no row, in a transaction that is rolled back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from sqlalchemy import Column, Executable, Table, Text, delete, exc, false, insert, or_, select, update
from sqlalchemy import table as any_table

from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.protocol.database_requirements import (
    DATABASE,
    GrantFacts,
    database_is_away,
    grants,
    judge_mariadb,
    judge_postgresql,
)
from dualwrite.protocol.findings import Check, CheckResult, Status, Unasked, clock
from dualwrite.protocol.values import lane_id, parse_cluster
from dualwrite.stores.sql.access import (
    PURPOSES,
    WRITER,
    Meaning,
    driver_words,
    grants_to_work,
    map_database_error,
    meaning_of,
)
from dualwrite.stores.sql.short_transactions import FoundTables, dialect_of, judge_tables
from dualwrite.stores.sql.tables import MYSQL, VERSION_TABLE, columns_at, database_now, declare_tables

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, FromClause

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
    from dualwrite.stores.sql.postgresql import facts_of, kept_versions  # noqa: PLC0415 - large, as in dialect_of

    yield from judge_postgresql(facts_of(connection, None if found is None else tables))
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
    before, began = time.time(), time.monotonic()
    now = connection.execute(select(database_now())).scalar_one()
    took_s = time.monotonic() - began
    connection.rollback()
    return clock("the database", before + took_s / 2 - now.timestamp(), took_s / 2)


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
