"""``dualwrite recover``: settle what dead owners left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dualwrite.cli.options import database_options, id_options, kafka_options, seconds
from dualwrite.cli.options__apps_cli_exit_codes import (
    INCIDENTS,
    LEFT_ALONE,
    NO_SUCH_ID,
    WENT_BACK,
    exit_code_for_errors,
)
from dualwrite.cli.report import forgotten_words, recovery_json, report_console, status_table
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.recovery import recover as recovery
from dualwrite.recovery.operator__recovery_foreign import complete_prepared
from dualwrite.recovery.recover import RecoveryReport


@click.command()
@id_options
@click.option(
    "--open-for",
    "open_for_s",
    default=None,
    type=float,
    callback=seconds(zero=True),
    help="Leave alone writers that began a transaction less than this many seconds ago: their owner may be alive, and recovery "
    "would fence it. Unless it is 0, also Spark tasks whose lease has not expired. Default: 0 for one id, 60 for several.",
)
@click.option(
    "--state",
    "foreign_state",
    help="For a transactional.id that dualwrite did not make: the state that its own database holds (producer_id:epoch, as in "
    "KIP-939, or nothing). The transaction that it names is committed, any other is aborted.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")
@click.option(
    "--after-restore",
    is_flag=True,
    help="The database was restored: continue above the incarnations that Kafka knows, also for lanes and writers younger than "
    "the backup.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.option(
    "--timeout", "timeout_s", default=300.0, show_default=True, callback=seconds(), help="Time limit, in seconds."
)
@partial(database_options, required=False)
@kafka_options
@exit_code_for_errors
def recover(
    *,
    transactional_id: str | None,
    prefix: str | None,
    open_for_s: float | None,
    foreign_state: str | None,
    dry_run: bool,
    after_restore: bool,
    as_json: bool,
    timeout_s: float,
    url: str | None,
    schema: str | None,
    kafka: Mapping[str, object],
) -> None:
    """Commit in Kafka what the database decided, abort the rest.

    A writer is settled with all its lanes, or left alone.

    Exit code: 0 all is settled (with --dry-run: shown), 4 losses were found and recorded, 5 a server does not answer,
    6 there is no such id, 7 all is settled except what was left alone, 8 the database has gone back in time, 1 another error.
    """
    if foreign_state is not None:
        if transactional_id is None or dry_run or after_restore:
            raise click.UsageError("--state needs a transactional id, and nothing else")
        _complete_foreign(transactional_id, foreign_state, kafka, timeout_s)
        return
    if url is None:
        raise click.UsageError("no database: give --url, or set DUALWRITE_DATABASE_URL")
    console = Console(stderr=True, quiet=as_json, soft_wrap=True)
    progress = Progress(
        SpinnerColumn(), TextColumn("settling"), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    task = progress.add_task("settling", total=None)

    with progress:
        report = recovery.recover(
            transactional_id,
            kafka=kafka,
            database=url,
            schema=schema,
            prefix=prefix,
            open_for_s=open_for_s,
            dry_run=dry_run,
            after_restore=after_restore,
            timeout_s=timeout_s,
            progress=lambda settled, planned: progress.update(task, completed=settled, total=planned),
        )
    if as_json:
        click.echo(json.dumps(recovery_json(report), indent=2))
    else:
        _print(report, dry_run=dry_run)
    if report.unknown:
        click.echo(f"dualwrite: there is no row for {transactional_id!r}", err=True)
    code = _exit_code(report)
    if code:
        raise SystemExit(code)


def _complete_foreign(kafka_id: str, state: str, kafka: Mapping[str, object], timeout_s: float) -> None:
    done = complete_prepared(kafka_id, PreparedTxnState.from_string(state), kafka=kafka, timeout_s=timeout_s)
    if done is None:
        click.echo(f"dualwrite: Kafka does not know {kafka_id!r}", err=True)
        raise SystemExit(NO_SUCH_ID)
    click.echo(f"{kafka_id}: {done.value}")


def _print(report: RecoveryReport, *, dry_run: bool) -> None:
    out = report_console()
    if report.planned:
        out.print(status_table(report.planned))
    word = "would be settled" if dry_run else "settled"
    count = len(report.planned) if dry_run else len(report.settled)
    out.print(
        f"{count} ids {word}, {len(report.rolled_forward)} rolled forward, {len(report.skipped)} left alone, "
        f"{len(report.losses)} losses"
    )
    for name in report.skipped:
        out.print(
            f"  {name}: left alone: its owner may be at work: its transaction is young, or its lease has not expired"
        )
    for item in report.forgotten:
        out.print(f"  {forgotten_words(item)}")
    for error in report.went_back:
        out.print(f"  {error}", style="red")
    for loss in report.losses:
        out.print(f"  {loss.row.transactional_id}: {loss.detail}", style="red")


def _exit_code(report: RecoveryReport) -> int:
    if report.unknown:
        return NO_SUCH_ID
    if report.went_back:
        return WENT_BACK
    if report.losses:
        return INCIDENTS
    return LEFT_ALONE if report.skipped else 0
