"""The commands about tables: ``migrate``, ``batches``, ``acknowledge``. None of them needs Kafka."""

from __future__ import annotations

import json

import click
from sqlalchemy import exc

from dualwrite.cli.options import ERROR, database_options, exit_code_for_errors, not_empty, reason_option
from dualwrite.cli.report import batch_json, batch_table, report_console
from dualwrite.migrations import BASE, HEAD, Direction, current_revision, sql_script
from dualwrite.migrations import downgrade as go_down
from dualwrite.migrations import upgrade as go_up
from dualwrite.stores.opening import has_tables, opened
from dualwrite.stores.sql.access import engine_of, map_database_error
from dualwrite.stores.sql.ledger import read_batches, read_nobody_at_work
from dualwrite.stores.sql.short_transactions import check_schema
from dualwrite.writing import by_hand
from dualwrite.writing.by_hand import By


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


# `dualwrite batches`: show what the ledger knows about each batch of a Spark sink.


@click.command()
@click.argument("sink", required=False, callback=not_empty)
@click.option("--last", "limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many to show.")
@click.option("--all", "everything", is_flag=True, help="All batches, instead of the newest.")
@click.option("--sources", is_flag=True, help="Also what each batch is made of: offsets, or files.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@database_options
@exit_code_for_errors
def batches(
    *, sink: str | None, limit: int, everything: bool, sources: bool, as_json: bool, url: str, schema: str | None
) -> None:
    """Show the batches of SINK, or of all sinks: rows, messages, phase and duration. Changes nothing.

    A batch that was begun, but has had no lease and written nothing for five minutes, is shown as "writing, nobody at work
    since": its driver was killed, or its job computes for long before it writes.

    Asks only the database, not Kafka: `dualwrite status` shows what is unsettled there.

    Exit code: 0 shown, 1 an error, 5 the database does not answer.
    """
    engine = engine_of(url)
    try:
        check_schema(engine, schema)
        found = read_batches(engine, sink=sink, limit=None if everything else limit, schema=schema)
        deserted = read_nobody_at_work(engine, found, schema=schema)
    finally:
        engine.dispose()
    if as_json:
        click.echo(json.dumps({"batches": [batch_json(batch, deserted) for batch in found]}, indent=2))
        return
    console = report_console()
    console.print(batch_table(found, deserted, sources=sources))
    unfinished = sum(batch.decided_at is None for batch in found)
    console.print(f"\n{len(found)} batches, {unfinished} not all written, {sum(one.row_count for one in found):,} rows")


# `dualwrite acknowledge`: note that a person has looked at a loss.


@click.command()
@click.argument("transactional_id", callback=not_empty)
@click.argument("state", required=False, callback=not_empty)
@click.option("--all", "everything", is_flag=True, help="All incidents of the id, instead of that of STATE.")
@reason_option
@database_options
@exit_code_for_errors
def acknowledge(
    *, transactional_id: str, state: str | None, everything: bool, url: str, schema: str | None, by: By | None
) -> None:
    """Note that a person has looked at the loss of STATE (as `dualwrite status --json` shows it) of TRANSACTIONAL_ID.

    The incident stays in the database, but is no longer reported.

    Exit code: 0 done, 1 there is no such incident, or an error.
    """
    if (state is None) != everything:
        raise click.UsageError("give either STATE or --all")
    with opened(url, schema) as database:
        count = by_hand.acknowledge(transactional_id, None if state is None else [state], database=database, by=by)
    click.echo(f"{transactional_id}: {count} acknowledged")
    if count == 0:
        raise SystemExit(ERROR)
