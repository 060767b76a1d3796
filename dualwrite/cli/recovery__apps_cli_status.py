"""``dualwrite status``: show for every id what the row says, what the coordinator shows and what recovery would do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import click

from dualwrite.cli.options import database_options, kafka_options, not_empty, seconds
from dualwrite.cli.options__apps_cli_exit_codes import (
    INCIDENTS,
    NEEDS_RECOVERY,
    NO_SUCH_ID,
    WENT_BACK,
    exit_code_for_errors,
)
from dualwrite.cli.report import lease_json, lease_table, report_console, status_json, status_table, summary
from dualwrite.protocol.leases import Lease
from dualwrite.protocol.values__protocol_rows import Incident
from dualwrite.recovery import recover as recovery
from dualwrite.recovery.recover__recovery_plan import IdStatus, is_young
from dualwrite.stores.opening import opened


@click.command()
@click.argument("transactional_id", required=False, callback=not_empty)
@click.option("--prefix", callback=not_empty, help="All ids with this prefix. Without an id or a prefix: all ids.")
@click.option(
    "--problems", is_flag=True, help="Only what is open for longer than --open-for, and all else that needs a person."
)
@click.option(
    "--open-for",
    "open_for_s",
    default=60.0,
    show_default=True,
    type=float,
    callback=seconds(zero=True),
    help="With --problems: a transaction younger than this many seconds counts as a writer at work.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.option(
    "--timeout", "timeout_s", default=60.0, show_default=True, callback=seconds(), help="Time limit, in seconds."
)
@database_options
@kafka_options
@exit_code_for_errors
def status(
    *,
    transactional_id: str | None,
    prefix: str | None,
    problems: bool,
    open_for_s: float,
    as_json: bool,
    timeout_s: float,
    url: str,
    schema: str | None,
    kafka: Mapping[str, object],
) -> None:
    """Show what is unsettled. Changes nothing.

    Exit code: 0 nothing to recover, 3 something to recover, 4 losses that nobody has acknowledged, 5 a server does not answer,
    6 there is no such id, 8 the database has gone back in time, 1 another error. With --problems they report only those.
    """
    if transactional_id is not None and prefix is not None:
        raise click.UsageError("give a transactional id or --prefix, not both")
    with opened(url, schema) as database:
        items, longest_s = recovery.status_and_longest(
            transactional_id, kafka=kafka, database=database, prefix=prefix, timeout_s=timeout_s
        )
        incidents = database.store().incidents(transactional_id or prefix or "")
        leases = database.lease_list(transactional_id, prefix or "")
        warnings = database.warnings()
    known = bool(items)
    if problems:
        items = [item for item in items if item.needs_recovery and not is_young(item, open_for_s)]
    open_incidents = [incident for incident in incidents if incident.acknowledged_at is None]
    if as_json:
        document = {
            "ids": [status_json(item) for item in items],
            "longest_open_s": longest_s,
            "incidents": [
                {
                    "transactional_id": incident.transactional_id,
                    "outcome": incident.outcome.value,
                    "prepared_transaction_state": incident.prepared_transaction_state,
                    "detail": incident.detail,
                    "detected_at": incident.detected_at.isoformat(),
                }
                for incident in open_incidents
            ],
            "leases": [lease_json(lease) for lease in leases],
            "warnings": list(warnings),
        }
        click.echo(json.dumps(document, indent=2))
    else:
        _print(items, longest_s, open_incidents, () if problems else leases)
    for warning in warnings:
        click.echo(f"dualwrite: {warning}", err=True)
    if any(item.went_back is not None for item in items):
        raise SystemExit(WENT_BACK)
    if open_incidents:
        raise SystemExit(INCIDENTS)
    if transactional_id is not None and not known:
        click.echo(f"dualwrite: there is no row for {transactional_id!r}", err=True)
        raise SystemExit(NO_SUCH_ID)
    if any(item.needs_recovery for item in items):
        raise SystemExit(NEEDS_RECOVERY)


def _print(
    items: Sequence[IdStatus], longest_s: float | None, open_incidents: Sequence[Incident], leases: Sequence[Lease]
) -> None:
    console = report_console()
    console.print(status_table(items))
    if leases:
        console.print()
        console.print(lease_table(leases))
    console.print(f"\n{summary(items, longest_s, len(open_incidents))}")
    for item in items:
        if item.went_back is not None:
            console.print(f"  {item.row.transactional_id}: {item.went_back}", style="red")
    for incident in open_incidents:
        console.print(f"  {incident.transactional_id}: {incident.outcome.value}: {incident.detail}", style="red")
