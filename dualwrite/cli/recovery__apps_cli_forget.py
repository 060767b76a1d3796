"""``dualwrite forget``: delete ids, incidents and runs that are no longer needed."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from dualwrite.cli.options import database_options, id_options, kafka_options, seconds
from dualwrite.cli.options__apps_cli_exit_codes import NEEDS_RECOVERY, exit_code_for_errors
from dualwrite.cli.report import report_console
from dualwrite.recovery import operator__recovery_forget as forgetting
from dualwrite.recovery.operator__recovery_forget import UNTOUCHED_FOR_S

_DAY_S = 86400.0


@click.command()
@id_options
@click.option(
    "--untouched-for",
    "untouched_for_days",
    default=UNTOUCHED_FOR_S / _DAY_S,
    show_default=True,
    type=float,
    callback=seconds(zero=True, unit_s=_DAY_S),
    help="Keep what was written, acknowledged or begun less than this many days ago.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; delete nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of lines.")
@click.option(
    "--timeout", "timeout_s", default=60.0, show_default=True, callback=seconds(), help="Time limit, in seconds."
)
@database_options
@kafka_options
@exit_code_for_errors
def forget(
    *,
    transactional_id: str | None,
    prefix: str | None,
    untouched_for_days: float,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
    url: str,
    schema: str | None,
    kafka: Mapping[str, object],
) -> None:
    """Delete the rows of ids that never come back, incidents acknowledged long ago, and runs that are long over.

    An id stays if it has anything unsettled or a loss that nobody has acknowledged, or is or recently was in use; all ids of
    its writer stay with it. Needs the right to DELETE.

    Exit code: 0 done (with --dry-run: shown), 3 something is unsettled and stays, 5 a server does not answer, 1 another error.
    """
    report = forgetting.forget(
        transactional_id,
        kafka=kafka,
        database=url,
        schema=schema,
        prefix=prefix,
        untouched_for_s=untouched_for_days * _DAY_S,
        dry_run=dry_run,
        timeout_s=timeout_s,
    )
    if as_json:
        document = {
            "forgotten": report.forgotten,
            "kept": report.kept,
            "incidents": report.incidents,
            "runs": report.runs,
        }
        click.echo(json.dumps(document, indent=2))
    else:
        out = report_console()
        for name in report.forgotten:
            out.print(f"{name}: {'would be forgotten' if dry_run else 'forgotten'}")
        for name, why in report.kept.items():
            out.print(f"{name}: kept: {why}")
        out.print(
            f"{len(report.forgotten)} ids, {report.incidents} incidents, {report.runs} runs; {len(report.kept)} ids kept"
        )
    if report.unsettled:
        raise SystemExit(NEEDS_RECOVERY)
