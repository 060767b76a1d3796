"""The library's Alembic migrations, with their own version table (``dualwrite_version``).

What belongs here: changes of the tables, and the functions that run them. May use: ``dualwrite.stores``,
``dualwrite.protocol``, ``dualwrite.errors``.

On the command line: ``dualwrite migrate --url ... [--schema S] [--sql]``. From an application's Alembic, in a
revision::

    import dualwrite.migrations

    def upgrade():
        dualwrite.migrations.upgrade(op.get_bind(), schema=None)

    def downgrade():
        dualwrite.migrations.downgrade(op.get_bind(), "base", schema=None)

and, so that ``alembic revision --autogenerate`` does not drop the library's tables, in ``env.py``::

    context.configure(..., include_name=dualwrite.migrations.include_name)

Each migration takes its ``Operations`` and the schema as arguments instead of using Alembic's global ``op``: when it runs
inside an application's migration, that global is the application's.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, cast

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext, MigrationStep
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Column, Connection, Dialect, Engine, exc, inspect, make_url, text
from sqlalchemy.schema import CreateSchema

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.values import TableFit, table_fit
from dualwrite.stores.sql.access import (
    LEFT_IN_AUTOCOMMIT,
    Meaning,
    driver_words,
    map_database_error,
    meaning_of,
    url_errors_mapped,
)
from dualwrite.stores.sql.dialect import quoted
from dualwrite.stores.sql.tables import MYSQL, OWN_TABLES, TABLE_OPTIONS, VERSION_TABLE

__all__ = ["BASE", "HEAD", "current_revision", "downgrade", "include_name", "include_own_name", "sql_script", "upgrade"]


ParentNames: TypeAlias = MutableMapping[
    Literal["schema_name", "table_name", "schema_qualified_table_name"], "str | None"
]
Direction: TypeAlias = Literal["upgrade", "downgrade"]
_Migration: TypeAlias = "Callable[[Operations, str | None], None]"

HEAD: Final = "head"
BASE: Final = "base"
_LOCK: Final = 0x6475616C77726974  # "dualwrit": one migration at a time
_LOCK_NAME: Final = "dualwrite migrate"  # of the whole server, where the database has no such number
_LOCK_S: Final = 600
_FIND: Final = text(
    "SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE pg_class.oid = to_regclass(:name)"
)


def upgrade(connection: Connection, revision: str = HEAD, *, schema: str | None = None) -> None:
    """Create the tables, or upgrade them to a revision. Does nothing if they are already there, or one version newer and fit.

    Inside a transaction of the caller, the caller commits; otherwise the migrations run in one transaction of their own.
    MariaDB and MySQL commit each step as it is taken: call it again after an interruption, and it continues from there.
    Concurrent migrations run one after the other.

    Args:
        connection: A connection with the right to create tables.
        revision: Number of a migration, or ``head``.
        schema: The database schema for the tables, created if missing; None for the default one.

    Raises:
        ConfigurationError: A right is missing, the tables are newer than this library, there is no such revision, or a
            connection to PostgreSQL is in autocommit.
        Unavailable: The database does not answer.
    """
    _migrate(connection, "upgrade", revision, schema)


def downgrade(connection: Connection, revision: str, *, schema: str | None = None) -> None:
    """Go back to a revision. ``base`` drops the tables, and with them everything that recovery needs.

    Arguments, transactions and errors as in :func:`upgrade`. On MariaDB and MySQL it also takes back what an interrupted
    upgrade has done of the next revision.
    """
    _migrate(connection, "downgrade", revision, schema)


def current_revision(connection: Connection, *, schema: str | None = None) -> str | None:
    """The database's current revision; None if there are no tables yet."""
    return _context(connection, _found_in(connection, schema)).get_current_revision()


def sql_script(
    url: URL | str,
    revision: str = HEAD,
    *,
    start: str = BASE,
    schema: str | None = None,
    direction: Direction = "upgrade",
) -> str:
    """The SQL that :func:`upgrade` or :func:`downgrade` would execute, as a script for the database's own shell.

    Args:
        url: Names the kind of database; nothing connects.
        revision: The target revision.
        start: The database's current revision; ``head`` is the newest.
        schema: As in :func:`upgrade`.
        direction: ``upgrade`` or ``downgrade``.

    Raises:
        ConfigurationError: There is no such revision, or no path between the two, or the URL cannot be used.
    """
    output = io.StringIO()
    with url_errors_mapped():
        kind: Callable[..., Dialect] = make_url(url).get_dialect()
        # Works without its driver. A driver that takes parameters as %s has each % of a name doubled; no shell does.
        dialect = kind(paramstyle="named")
    here = _scripts().get_current_head() if start == HEAD else start
    options = _options(
        schema, fn=_steps(direction, revision, schema), as_sql=True, output_buffer=output, starting_rev=here
    )
    context = MigrationContext.configure(dialect=dialect, opts=options)
    with _mapped_errors(None, schema), context.begin_transaction():
        operations = operations_in(context, schema)
        if schema is not None and dialect.name != "sqlite" and direction == "upgrade":
            operations.execute(CreateSchema(schema, if_not_exists=True))
        context.run_migrations(op=operations, schema=schema)
    return output.getvalue()


def include_name(name: str | None, type_: str, parent_names: ParentNames) -> bool:
    """Use as ``include_name`` in an application's Alembic: excludes the library's tables from autogeneration."""
    del parent_names
    return not (type_ == "table" and name in OWN_TABLES)


def include_own_name(name: str | None, type_: str, parent_names: ParentNames) -> bool:
    """Include only the library's tables, to compare them with the declared ones."""
    del parent_names
    return type_ != "table" or (name in OWN_TABLES and name != VERSION_TABLE)


def _migrate(connection: Connection, direction: Direction, revision: str, schema: str | None) -> None:
    with _mapped_errors(connection.engine, schema), _in_transaction(connection), _one_at_a_time(connection):
        schema = _found_in(connection, schema)
        if schema is not None and schema not in inspect(connection).get_schema_names():
            if connection.dialect.name == "sqlite":
                raise ConfigurationError(
                    f"there is no schema {schema!r}", next_step="attach the database under that name"
                )
            connection.execute(CreateSchema(schema))
        context = _context(connection, schema, fn=_steps(direction, revision, schema))
        context.run_migrations(op=operations_in(context, schema), schema=schema)


def _found_in(connection: Connection, schema: str | None) -> str | None:
    """The schema of tables that are there already; the given one for tables that are not.

    On PostgreSQL ``search_path`` may find them in another schema than the one in which it has new tables made: without this,
    an upgrade would add its tables there.
    """
    translated = "schema_translate_map" in connection.get_execution_options()
    if schema is not None or translated:
        return schema
    if connection.dialect.name in MYSQL and connection.dialect.default_schema_name is None:
        raise ConfigurationError(
            "the connection has no database", next_step="name one in the URL: mysql+pymysql://user@host/DATABASE"
        )
    if connection.dialect.name != "postgresql":
        return schema
    found: str | None = connection.scalar(_FIND, {"name": VERSION_TABLE})
    return found


@contextmanager
def _one_at_a_time(connection: Connection) -> Iterator[None]:
    """Wait for migrations that others run."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    if connection.dialect.name not in MYSQL:
        yield
        return
    if not connection.scalar(text("SELECT get_lock(:name, :seconds)"), {"name": _LOCK_NAME, "seconds": _LOCK_S}):
        raise Unavailable(
            f"another migration has been running for {_LOCK_S} s", next_step="try again when it has ended"
        )
    try:
        yield
        connection.exec_driver_sql("COMMIT")  # the last step's number, before the next one looks at it
    finally:
        if not connection.invalidated:
            connection.execute(text("SELECT release_lock(:name)"), {"name": _LOCK_NAME})


@contextmanager
def _in_transaction(connection: Connection) -> Iterator[None]:
    """The caller's transaction, or a new one. On SQLite, begin it explicitly: the driver begins none for DDL.

    On PostgreSQL its statements see what a migration has done for which it has waited.
    """
    if connection.in_transaction():
        yield
        return
    with connection.begin():
        if connection.dialect.name == "sqlite" and not cast("_SQLite", connection.connection).in_transaction:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        if connection.dialect.name == "postgresql":
            if cast("_PostgreSQL", connection.connection).autocommit:
                raise ConfigurationError(
                    LEFT_IN_AUTOCOMMIT, next_step="give a connection without isolation_level='AUTOCOMMIT'"
                )
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        yield


def _context(connection: Connection, schema: str | None, **options: object) -> MigrationContext:
    return MigrationContext.configure(connection, opts=_options(schema, **options))


def _options(schema: str | None, **options: object) -> dict[str, object]:
    return {
        "version_table": VERSION_TABLE,
        "version_table_schema": schema,
        "transactional_ddl": True,  # on SQLite too, since the transaction begins explicitly
        **options,
    }


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(Path(__file__).parent)


def _steps(
    direction: Direction, revision: str, schema: str | None
) -> Callable[[tuple[str, ...], MigrationContext], Iterable[MigrationStep]]:
    """The function that gives Alembic the migrations to run, in order, once it knows the database's revision."""
    scripts = _scripts()
    ordered = list(reversed(list(scripts.walk_revisions())))
    places = {
        BASE: 0,
        **{script.revision: number for number, script in enumerate(ordered, start=1)},
        HEAD: len(ordered),
    }

    def place(name: str, next_step: str) -> int:
        if name not in places:
            raise ConfigurationError(f"this library knows no migration {name!r}", next_step=next_step)
        return places[name]

    def steps(heads: tuple[str, ...], context: MigrationContext) -> Iterable[MigrationStep]:
        newest = ordered[-1].revision
        if direction == "upgrade" and revision == HEAD and heads and table_fit(heads[0], newest) is TableFit.NEWER:
            return []  # a program that starts by migrating may start again while newer ones are put in its place
        here = place(heads[0], "the tables are newer: install the library's newer version") if heads else 0
        there = place(revision, f"known are: {', '.join(places)}")
        if direction == "upgrade":
            return [MigrationStep.upgrade_from_script(scripts.revision_map, script) for script in ordered[here:there]]
        back = [
            MigrationStep.downgrade_from_script(scripts.revision_map, script)
            for script in reversed(ordered[there:here])
        ]
        if context.dialect.name not in MYSQL:
            return back
        begun = ordered[here : here + 1] if there <= here and not context.as_sql else []
        return _numbered_first(
            back, [script.module.downgrade for script in begun], operations_in(context, schema), schema
        )

    return steps


def _numbered_first(
    back: Iterable[MigrationStep], begun: Iterable[_Migration], op: Operations, schema: str | None
) -> Iterator[MigrationStep]:
    """Steps of a downgrade that the database commits one by one: each sets the number, then takes away.

    So all of the revision that the number says is there, wherever a migration was interrupted, and an upgrade may follow.
    What is there beyond it is of the next revision: ``begun`` take that away.
    """
    for take_back in begun:
        take_back(op, schema)
    for step in back:
        take_back, step.migration_fn = step.migration_fn, _nothing
        yield step  # goes on once the number is set
        take_back(op, schema)


def _nothing(op: Operations, schema: str | None) -> None:
    pass


@contextmanager
def _mapped_errors(engine: Engine | None, schema: str | None) -> Iterator[None]:
    try:
        yield
    except exc.SQLAlchemyError as error:
        if meaning_of(error) is Meaning.PRIVILEGE:
            raise ConfigurationError(
                f"a right is missing: {driver_words(error)}",
                next_step="migrate as a role that may create tables there; the application itself needs no such right",
            ) from error
        raise map_database_error(error, engine, schema) from error


class _PostgreSQL(Protocol):
    autocommit: bool


class _SQLite(Protocol):
    in_transaction: bool


def operations_in(context: MigrationContext, schema: str | None) -> Operations:
    """The operations for migrations of that schema in the context's database."""
    return _Resuming(context, schema) if context.dialect.name in MYSQL else Operations(context)


class _Resuming(Operations):
    """Leaves out what an earlier attempt has done. A script that is printed holds every step."""

    def __init__(self, context: MigrationContext, schema: str | None) -> None:
        super().__init__(context)
        self._schema = schema

    def _has_table(self, name: str) -> bool | None:
        bind = self.get_context().bind
        return None if self.get_context().as_sql or bind is None else inspect(bind).has_table(name, schema=self._schema)

    def _has(self, kind: str, table: str, name: str) -> bool | None:
        bind = self.get_context().bind
        if self.get_context().as_sql or bind is None:
            return None
        return any(found["name"] == name for found in getattr(inspect(bind), f"get_{kind}")(table, schema=self._schema))

    def create_table(self, table_name: str, *columns: Any, **options: Any) -> Any:
        """Make a table in InnoDB, unless it is there."""
        if not self._has_table(table_name):
            super().create_table(table_name, *columns, **options, **TABLE_OPTIONS)

    def drop_table(self, table_name: str, **options: Any) -> None:
        """Drop a table if it is there."""
        if self._has_table(table_name) is not False:
            super().drop_table(table_name, **options)

    def add_column(self, table_name: str, column: Column[Any], **options: Any) -> None:
        """Add a column unless it is there."""
        if not self._has("columns", table_name, column.name):
            super().add_column(table_name, column, **options)

    def drop_column(self, table_name: str, column_name: str, **options: Any) -> None:
        """Drop a column if it is there."""
        if self._has("columns", table_name, column_name) is not False:
            super().drop_column(table_name, column_name, **options)

    def create_index(self, index_name: str | None, table_name: str, columns: Any, **options: Any) -> None:
        """Make an index unless it is there."""
        if not self._has("indexes", table_name, str(index_name)):
            super().create_index(index_name, table_name, columns, **options)

    def drop_index(self, index_name: str, table_name: str | None = None, **options: Any) -> None:
        """Drop an index if it is there."""
        if self._has("indexes", str(table_name), index_name) is not False:
            super().drop_index(index_name, table_name, **options)


# In the ledger, row -1 stands for a whole batch decided at once, row -2 for the beginning of a batch.
_VIEW: Final = """
{create} VIEW {view} AS
SELECT sink, batch_id,
  CASE WHEN completed_at IS NOT NULL THEN 'completed'
       WHEN decided_at IS NOT NULL THEN 'decided'{failed_phase}
       ELSE 'writing' END AS phase,
  partition_count, written_partitions, row_count, message_count, started_at, decided_at, completed_at,
  {decided_after_s} AS decided_after_s,
  {completed_after_s} AS completed_after_s{failed_shown}{seen}
FROM (
  SELECT sink, batch_id, partition_count, written_partitions, row_count, message_count, started_at, completed_at,
    CASE WHEN written_partitions >= partition_count THEN last_written_at END AS decided_at{failed_at}{seen}
  FROM (
    SELECT sink, batch_id,
      MAX(partition_count) AS partition_count,
      CAST(SUM(CASE WHEN partition_id = -1 THEN partition_count WHEN partition_id >= 0 THEN 1 ELSE 0 END) AS {integer})
        AS written_partitions,
      CAST(SUM(row_count) AS {bigint}) AS row_count,
      CAST(SUM(message_count) AS {bigint}) AS message_count,
      {started_at} AS started_at,
      MAX(CASE WHEN partition_id >= -1 THEN written_at END) AS last_written_at,
      MAX(completed_at) AS completed_at{failed_max}{seen_max}
    FROM {ledger} GROUP BY sink, batch_id
  ) AS summed
) AS judged
"""
_STARTED: Final = "MIN(CASE WHEN partition_id = -2 THEN written_at ELSE started_at END)"


def create_batch_view(
    op: Operations, schema: str | None, *, failed: bool, seen: bool = False, replace: bool = False
) -> None:
    """Create the view.

    With `failed`, it shows batches whose last run failed, and undecided batches that are decided as a whole; with `seen`, also
    bytes and sources. `replace` says that it already exists, with fewer columns; its grants stay where the database allows it.
    """
    prefix = prefix_of(op, schema)
    view = f"{prefix}dualwrite_batch"
    create, integer, bigint = "CREATE", "INTEGER", "BIGINT"
    if op.get_context().dialect.name in MYSQL:
        create, integer, bigint = "CREATE OR REPLACE", "SIGNED", "SIGNED"
        ledger = f"{prefix}dualwrite_ledger"
        seconds = "CAST(timestampdiff(MICROSECOND, started_at, {later}) / 1e6 AS DOUBLE)"
    elif op.get_context().dialect.name == "postgresql":
        create = "CREATE OR REPLACE" if replace else "CREATE"
        ledger = f"{prefix}dualwrite_ledger"
        seconds = "CAST(EXTRACT(EPOCH FROM {later} - started_at) AS DOUBLE PRECISION)"
    else:
        if replace:
            drop_batch_view(op, schema)
        # Unqualified: SQLite resolves it in the view's own database, which may be attached under another name next time.
        ledger, seconds = "dualwrite_ledger", "(julianday({later}) - julianday(started_at)) * 86400.0"
    op.execute(
        _VIEW.format(
            create=create,
            integer=integer,
            bigint=bigint,
            view=view,
            ledger=ledger,
            decided_after_s=seconds.format(later="decided_at"),
            completed_after_s=seconds.format(later="completed_at"),
            # A batch decided as a whole begins again with each run.
            started_at=f"COALESCE(MAX(CASE WHEN partition_id = -1 THEN started_at END), {_STARTED})"
            if failed
            else _STARTED,
            failed_phase="\n       WHEN failed_at IS NOT NULL THEN 'failed'" if failed else "",
            failed_shown=",\n  CASE WHEN decided_at IS NULL THEN failed_at END AS failed_at" if failed else "",
            failed_at=", failed_at" if failed else "",
            failed_max=",\n      MAX(failed_at) AS failed_at" if failed else "",
            seen=", byte_count, sources" if seen else "",
            # One row of a batch has its sources: -1 if it is decided at once, otherwise -2.
            seen_max=f",\n      CAST(SUM(byte_count) AS {bigint}) AS byte_count, MAX(sources) AS sources"
            if seen
            else "",
        )
    )


def drop_batch_view(op: Operations, schema: str | None) -> None:
    """Drop the view."""
    there = "IF EXISTS " if op.get_context().dialect.name in MYSQL else ""  # an interrupted step is taken again
    op.execute(f"DROP VIEW {there}{prefix_of(op, schema)}dualwrite_batch")


def prefix_of(op: Operations, schema: str | None) -> str:
    """The quoted prefix of names in a schema, for a statement as text."""
    if schema is None:
        return ""
    return quoted(op.get_context().dialect, schema).replace(":", r"\:") + "."
