"""``dualwrite terminate``: abort an open transaction, unless the database has decided it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

import click

from dualwrite.cli.options import database_options, kafka_options, not_empty, seconds
from dualwrite.cli.options__apps_cli_exit_codes import (
    INCIDENTS,
    NEEDS_RECOVERY,
    NO_SUCH_ID,
    WENT_BACK,
    exit_code_for_errors,
)
from dualwrite.cli.report import loss_json, report_console
from dualwrite.errors import DatabaseWentBack, IllegalStateError
from dualwrite.recovery import operator as terminating
from dualwrite.recovery.operator import TerminationReport


@click.command()
@click.argument("transactional_id", callback=not_empty)
@click.option(
    "--lose-decided",
    is_flag=True,
    help="Abort also what the database has decided: its rows stay, its messages are LOST, and an incident records that.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of lines.")
@click.option(
    "--timeout", "timeout_s", default=60.0, show_default=True, callback=seconds(), help="Time limit, in seconds."
)
@partial(database_options, required=False)
@kafka_options
@exit_code_for_errors
def terminate(
    *,
    transactional_id: str,
    lose_decided: bool,
    as_json: bool,
    timeout_s: float,
    url: str | None,
    schema: str | None,
    kafka: Mapping[str, object],
) -> None:
    """Abort the open transaction of an id: of a writer, a lane or a slot, or Kafka's own transactional.id.

    Refuses what the database has decided: `dualwrite recover` commits that. For an id that dualwrite did not make, no
    database is needed, and nothing shows whether its own program has decided the transaction.

    Exit code: 0 nothing of it is open any more, 3 refused, 4 losses were recorded, 5 a server does not answer, 6 there is
    no such id, 8 the database has gone back in time, 1 another error.
    """
    try:
        report = terminating.terminate(
            transactional_id, kafka=kafka, database=url, schema=schema, lose_decided=lose_decided, timeout_s=timeout_s
        )
    except IllegalStateError as error:
        click.echo(f"dualwrite: refused: {error}", err=True)
        raise SystemExit(NEEDS_RECOVERY) from error
    except DatabaseWentBack as error:
        click.echo(f"dualwrite: {error}", err=True)
        raise SystemExit(WENT_BACK) from error
    if as_json:
        document = {
            "terminated": report.terminated,
            "settled": report.settled,
            "rolled_forward": report.rolled_forward,
            "losses": [loss_json(loss) for loss in report.losses],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        _print(report)
    if report.unknown:
        click.echo(f"dualwrite: neither the database nor Kafka knows {transactional_id!r}", err=True)
        raise SystemExit(NO_SUCH_ID)
    if report.losses:
        raise SystemExit(INCIDENTS)


def _print(report: TerminationReport) -> None:
    out = report_console()
    for kafka_id in report.terminated:
        out.print(f"{kafka_id}: aborted")
    out.print(
        f"{len(report.terminated)} terminated, {len(report.settled)} ids settled, {len(report.rolled_forward)} rolled forward, "
        f"{len(report.losses)} losses"
    )
    for loss in report.losses:
        out.print(f"  {loss.row.transactional_id}: {loss.detail}", style="red")
