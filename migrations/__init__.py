"""The library's Alembic migrations, with a version table of their own (``dualwrite_version``).

By command: ``dualwrite migrate --url ... [--schema S] [--sql]``. From an application's own Alembic, inside a revision::

    import dualwrite.migrations

    def upgrade():
        dualwrite.migrations.upgrade(op.get_bind(), schema=None)

    def downgrade():
        dualwrite.migrations.downgrade(op.get_bind(), "base", schema=None)

and, so that ``alembic revision --autogenerate`` does not want to drop tables that it does not know, in ``env.py``::

    context.configure(..., include_name=dualwrite.migrations.include_name)

Each migration takes its ``Operations`` and the schema as arguments instead of Alembic's global ``op``: so it can run inside
another Alembic's migration, which that global belongs to.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias, cast

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext, MigrationStep
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, exc, inspect
from sqlalchemy.schema import CreateSchema

from dualwrite.errors import ConfigurationError
from dualwrite.stores.connecting import kind_of
from dualwrite.stores.failures import Meaning, driver_words, map_database_error, meaning_of
from dualwrite.stores.tables import OWN_TABLES, VERSION_TABLE

ParentNames: TypeAlias = MutableMapping[
    Literal["schema_name", "table_name", "schema_qualified_table_name"], "str | None"
]
Direction: TypeAlias = Literal["upgrade", "downgrade"]

HEAD: Final = "head"
BASE: Final = "base"
_LOCK: Final = 0x6475616C77726974  # "dualwrit": one migration at a time


def upgrade(connection: Connection, revision: str = HEAD, *, schema: str | None = None) -> None:
    """Make the tables, or bring them up to that revision. Does nothing where they are there already.

    Inside a transaction of the caller's, the caller commits; otherwise it is done in one transaction. Two at a time wait for
    each other.

    Args:
        connection: To the database, with the right to create tables.
        revision: Number of a migration, or ``head``.
        schema: The database schema to make them in; it is created where it is missing. None for the default one.

    Raises:
        ConfigurationError: A right is missing; the tables are newer than this library; there is no such revision.
        Unavailable: The database does not answer.
    """
    _migrate(connection, "upgrade", revision, schema)


def downgrade(connection: Connection, revision: str, *, schema: str | None = None) -> None:
    """Go back to that revision. To ``base`` drops the tables, with everything that recovery needs to know.

    Arguments, transactions and errors as in :func:`upgrade`.
    """
    _migrate(connection, "downgrade", revision, schema)


def current_revision(connection: Connection, *, schema: str | None = None) -> str | None:
    """The revision that the database is at; None where nothing was made yet."""
    return _context(connection, schema).get_current_revision()


def sql_script(
    url: URL | str,
    revision: str = HEAD,
    *,
    start: str = BASE,
    schema: str | None = None,
    direction: Direction = "upgrade",
) -> str:
    """What :func:`upgrade` or :func:`downgrade` would execute, as a script for the database's own shell.

    Args:
        url: Only the kind of database is taken from it; nothing connects.
        revision: Where to go.
        start: Where the database is.
        schema: As in :func:`upgrade`.
        direction: ``upgrade`` or ``downgrade``.

    Raises:
        ConfigurationError: There is no such revision, or no way between the two; or the URL cannot be used.
    """
    output = io.StringIO()
    dialect = kind_of(url)
    options = _options(schema, fn=_steps(direction, revision), as_sql=True, output_buffer=output, starting_rev=start)
    context = MigrationContext.configure(dialect=dialect, opts=options)
    with _mapped_errors(None, schema), context.begin_transaction():
        operations = Operations(context)
        if schema is not None and dialect.name == "postgresql" and direction == "upgrade":
            operations.execute(CreateSchema(schema, if_not_exists=True))
        context.run_migrations(op=operations, schema=schema)
    return output.getvalue()


def include_name(name: str | None, type_: str, parent_names: ParentNames) -> bool:
    """For ``include_name`` of an application's Alembic: leaves the library's tables out of its autogeneration."""
    del parent_names
    return not (type_ == "table" and name in OWN_TABLES)


def include_own_name(name: str | None, type_: str, parent_names: ParentNames) -> bool:
    """The other way round: only the library's tables. For comparing them with what is declared."""
    del parent_names
    return type_ != "table" or (name in OWN_TABLES and name != VERSION_TABLE)


def _migrate(connection: Connection, direction: Direction, revision: str, schema: str | None) -> None:
    with _mapped_errors(connection.engine, schema), _in_transaction(connection):
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if schema is not None and schema not in inspect(connection).get_schema_names():
            if connection.dialect.name != "postgresql":
                raise ConfigurationError(
                    f"there is no schema {schema!r}", next_step="attach the database under that name"
                )
            connection.execute(CreateSchema(schema))
        context = _context(connection, schema, fn=_steps(direction, revision))
        context.run_migrations(op=Operations(context), schema=schema)


@contextmanager
def _in_transaction(connection: Connection) -> Iterator[None]:
    """The caller's transaction, or one of our own; on SQLite a real one, which its driver does not begin for DDL."""
    if connection.in_transaction():
        yield
        return
    with connection.begin():
        if connection.dialect.name == "sqlite" and not cast("_SQLite", connection.connection).in_transaction:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield


def _context(connection: Connection, schema: str | None, **options: object) -> MigrationContext:
    return MigrationContext.configure(connection, opts=_options(schema, **options))


def _options(schema: str | None, **options: object) -> dict[str, object]:
    return {
        "version_table": VERSION_TABLE,
        "version_table_schema": schema,
        "transactional_ddl": True,  # SQLite too: the transaction is begun explicitly
        **options,
    }


def _steps(
    direction: Direction, revision: str
) -> Callable[[tuple[str, ...], MigrationContext], Iterable[MigrationStep]]:
    """What Alembic asks for once it knows where the database is: the migrations to run, in order."""
    scripts = ScriptDirectory(Path(__file__).parent)
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
        del context
        here = place(heads[0], "the tables are newer: install the library's newer version") if heads else 0
        there = place(revision, f"known are: {', '.join(places)}")
        if direction == "upgrade":
            return [MigrationStep.upgrade_from_script(scripts.revision_map, script) for script in ordered[here:there]]
        return [
            MigrationStep.downgrade_from_script(scripts.revision_map, script)
            for script in reversed(ordered[there:here])
        ]

    return steps


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


class _SQLite(Protocol):
    in_transaction: bool
