"""``dualwrite batches``: show what the ledger knows about each batch of a Spark sink."""

from __future__ import annotations

import json

import click

from dualwrite.cli.options import database_options, not_empty
from dualwrite.cli.options__apps_cli_exit_codes import exit_code_for_errors
from dualwrite.cli.report import batch_json, batch_table, report_console
from dualwrite.stores.sql.access__stores_sql_access_connecting import engine_of
from dualwrite.stores.sql.ledger__stores_sql_jobs_batches import read_batches, read_nobody_at_work
from dualwrite.stores.sql.short_transactions__stores_sql_schema import check_schema


@click.command()
@click.argument("sink", required=False, callback=not_empty)
@click.option("--last", "limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many to show.")
@click.option("--all", "everything", is_flag=True, help="All batches, instead of the newest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@database_options
@exit_code_for_errors
def batches(*, sink: str | None, limit: int, everything: bool, as_json: bool, url: str, schema: str | None) -> None:
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
    console.print(batch_table(found, deserted))
    unfinished = sum(batch.decided_at is None for batch in found)
    console.print(f"\n{len(found)} batches, {unfinished} not all written, {sum(one.row_count for one in found):,} rows")
