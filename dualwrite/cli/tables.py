"""``dualwrite migrate``: create or upgrade the library's tables."""

from __future__ import annotations

import click
from sqlalchemy import exc

from dualwrite.cli.options import database_options, not_empty
from dualwrite.cli.options__apps_cli_exit_codes import exit_code_for_errors
from dualwrite.migrations import BASE, HEAD, Direction, current_revision, sql_script
from dualwrite.migrations import downgrade as go_down
from dualwrite.migrations import upgrade as go_up
from dualwrite.stores.opening import has_tables
from dualwrite.stores.sql.access__stores_sql_access_connecting import engine_of
from dualwrite.stores.sql.access__stores_sql_access_failures import map_database_error


@click.command()
@database_options
@click.option(
    "--revision", default=HEAD, show_default=True, callback=not_empty, help="The target; with --sql also FROM:TO."
)
@click.option("--sql", "as_sql", is_flag=True, help="Print a script instead of connecting.")
@click.option("--downgrade", is_flag=True, help="Go back to --revision. 'base' drops the tables and all their rows.")
@exit_code_for_errors
def migrate(*, url: str, schema: str | None, revision: str, as_sql: bool, downgrade: bool) -> None:
    """Create the library's tables, or upgrade them to this version. Does nothing if they are up to date.

    Needs the right to create tables; the application itself needs SELECT, INSERT and UPDATE on them. --sql prints a script
    without connecting. The script starts from an empty database, or from FROM if --revision is FROM:TO.

    Exit code: 0 done, 1 an error, 2 wrong usage, 5 the database does not answer.
    """
    if not has_tables(url):
        raise click.UsageError("a database of this kind has no tables: opening a writer makes what it needs")
    if downgrade and revision == HEAD:
        raise click.UsageError("--downgrade needs a --revision to go back to")
    start, colon, target = revision.rpartition(":")
    if colon and not as_sql:
        raise click.UsageError("--revision FROM:TO is for --sql: a database knows its own revision")
    if as_sql:
        if downgrade and not colon:
            raise click.UsageError("--downgrade --sql needs --revision FROM:TO")
        direction: Direction = "downgrade" if downgrade else "upgrade"
        click.echo(
            sql_script(url, target, start=start or BASE, schema=schema, direction=direction),
            nl=False,
        )
        return
    before, after = _migrate(url, schema, revision, downgrade=downgrade)
    if before == after:
        click.echo(f"The tables are already at {after or BASE}.")
    else:
        click.echo(f"The tables are now at {after or BASE}; they were at {before or BASE}.")


def _migrate(url: str, schema: str | None, revision: str, *, downgrade: bool) -> tuple[str | None, str | None]:
    engine = engine_of(url)
    try:
        with engine.connect() as connection, connection.begin():
            before = current_revision(connection, schema=schema)
        with engine.connect() as connection:
            if downgrade:
                go_down(connection, revision, schema=schema)
            else:
                go_up(connection, revision, schema=schema)
        with engine.connect() as connection:
            return before, current_revision(connection, schema=schema)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error
    finally:
        engine.dispose()
