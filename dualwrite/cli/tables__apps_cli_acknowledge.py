"""``dualwrite acknowledge``: note that a person has looked at a loss."""

from __future__ import annotations

import click

from dualwrite.cli.options import database_options, not_empty
from dualwrite.cli.options__apps_cli_exit_codes import ERROR, exit_code_for_errors
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.stores.opening import opened


@click.command()
@click.argument("transactional_id", callback=not_empty)
@click.argument("state", required=False, callback=not_empty)
@click.option("--all", "everything", is_flag=True, help="All incidents of the id, instead of that of STATE.")
@database_options
@exit_code_for_errors
def acknowledge(*, transactional_id: str, state: str | None, everything: bool, url: str, schema: str | None) -> None:
    """Note that a person has looked at the loss of STATE (as `dualwrite status --json` shows it) of TRANSACTIONAL_ID.

    The incident stays in the database, but is no longer reported.

    Exit code: 0 done, 1 there is no such incident, or an error.
    """
    if (state is None) != everything:
        raise click.UsageError("give either STATE or --all")
    with opened(url, schema) as database:
        store = database.store()
        if state is not None:
            wanted = [state]
        else:
            found = store.incidents(transactional_id)
            wanted = [item.prepared_transaction_state for item in found if item.transactional_id == transactional_id]
        count = sum(store.acknowledge(transactional_id, PreparedTxnState.from_string(text)) for text in wanted)
    click.echo(f"{transactional_id}: {count} acknowledged")
    if count == 0:
        raise SystemExit(ERROR)
