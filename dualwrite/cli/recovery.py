"""The commands about ids: ``recover``, ``status``, ``terminate``, ``forget``; and ``doctor``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dualwrite.cli.options import (
    INCIDENTS,
    LEFT_ALONE,
    NEEDS_RECOVERY,
    NO_SUCH_ID,
    WENT_BACK,
    database_options,
    exit_code_for_errors,
    id_options,
    kafka_options,
    not_empty,
    reason_option,
    seconds,
    timeout_option,
)
from dualwrite.cli.report import (
    MOST_SHOWN,
    batch_outlooks,
    blocker_table,
    forgotten_words,
    lease_table,
    loss_json,
    plain_table,
    recovery_json,
    report_console,
    status_document,
    status_table,
    summary,
    waiting_words,
)
from dualwrite.errors import DatabaseWentBack, IllegalStateError
from dualwrite.protocol.blocking import Blocker
from dualwrite.protocol.findings import CheckResult, Status, worst
from dualwrite.protocol.members import Lease
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Incident, writer_of
from dualwrite.recovery import doctor as diagnosis
from dualwrite.recovery import operator
from dualwrite.recovery import recover as recovery
from dualwrite.recovery.operator import UNTOUCHED_FOR_S, TerminationReport, complete_prepared
from dualwrite.recovery.recover import IdStatus, RecoveryReport, is_young
from dualwrite.stores.sql.database import opened
from dualwrite.stores.sql.ledger import UnfinishedBatch, batches_of
from dualwrite.writing import by_hand
from dualwrite.writing.by_hand import By
from dualwrite.writing.left_behind import Waits, what_waits


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
@timeout_option(300.0)
@reason_option
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
    by: By | None,
) -> None:
    """Commit in Kafka what the database decided, abort the rest.

    A writer is settled with all its lanes, or left alone.

    Exit code: 0 all is settled (with --dry-run: shown), 4 losses were found and recorded, 5 a server does not answer,
    6 there is no such id, 7 all is settled except what was left alone, 8 the database has gone back in time, 1 another error.
    """
    if foreign_state is not None:
        if transactional_id is None or dry_run or after_restore or by is not None:
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

    with progress, opened(url, schema) as database:
        report = by_hand.settle(
            transactional_id,
            kafka=kafka,
            database=database,
            prefix=prefix,
            by=by,
            open_for_s=open_for_s,
            dry_run=dry_run,
            after_restore=after_restore,
            timeout_s=timeout_s,
            progress=lambda settled, planned: progress.update(
                task, completed=settled, total=planned, visible=planned > 0
            ),
        )
    if as_json:
        click.echo(json.dumps(recovery_json(report), indent=2))
    else:
        _print_recovered(report, dry_run=dry_run)
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


def _print_recovered(report: RecoveryReport, *, dry_run: bool) -> None:
    out = report_console()
    if report.planned:
        out.print(status_table(report.planned))
    word = "would be settled" if dry_run else "settled"
    count = len(report.planned) if dry_run else len(report.settled)
    out.print(
        f"{count} ids {word}, {len(report.rolled_forward)} rolled forward, {len(report.skipped)} left alone, "
        f"{len(report.losses)} losses"
    )
    for name, count in report.sent.items():
        out.print(f"  {name}: {count} messages that waited {'would be' if dry_run else 'were'} sent")
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


# `dualwrite status`: show for every id what the row says, what the coordinator shows and what recovery would do.


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
@timeout_option(60.0)
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
        found = recovery.overview(transactional_id, kafka=kafka, database=database, prefix=prefix, timeout_s=timeout_s)
        items = found.items
        incidents = database.store().incidents(transactional_id or prefix or "")
        leases = database.lease_list(transactional_id, prefix or "")
        batches, unknown = batches_of(database, prefix or "") if transactional_id is None else ((), ())
        warnings = [*database.warnings(), *found.unknown, *unknown]
        waiting = what_waits(database, {writer_of(item.row.transactional_id) for item in items})
    known, blockers = bool(items), found.blockers
    if problems:
        blockers = [one for one in blockers if one.open_for_s >= open_for_s]
        items = [item for item in items if item.needs_recovery and not is_young(item, open_for_s)]
    open_incidents = [incident for incident in incidents if incident.acknowledged_at is None]
    if as_json:
        document = status_document(
            items,
            found.longest_s,
            open_incidents,
            leases=leases,
            blockers=blockers,
            batches=batches,
            waiting=waiting,
            warnings=warnings,
        )
        click.echo(json.dumps(document, indent=2))
    else:
        _print_status(items, found.longest_s, open_incidents, () if problems else leases, blockers)
        _print_left(waiting, batches, found.items)
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


def _print_status(
    items: Sequence[IdStatus],
    longest_s: float | None,
    open_incidents: Sequence[Incident],
    leases: Sequence[Lease],
    blockers: Sequence[Blocker],
) -> None:
    console = report_console()
    console.print(status_table(items))
    if blockers:
        own = {item.row.kafka_id(item.incarnation): item.row.transactional_id for item in items}
        console.print()
        console.print(blocker_table(blockers, own))
        if len(blockers) > MOST_SHOWN:
            console.print(f"and {len(blockers) - MOST_SHOWN} more")
    if leases:
        console.print()
        console.print(lease_table(leases))
    console.print(f"\n{summary(items, longest_s, len(open_incidents))}")
    for item in items:
        if item.went_back is not None:
            console.print(f"  {item.row.transactional_id}: {item.went_back}", style="red")
    for incident in open_incidents:
        console.print(f"  {incident.transactional_id}: {incident.outcome.value}: {incident.detail}", style="red")


def _print_left(waiting: Sequence[Waits], batches: Sequence[UnfinishedBatch], items: Sequence[IdStatus]) -> None:
    for one in waiting:
        click.echo(f"  {waiting_words(one)}")
    for left, words in batch_outlooks(batches, items):
        click.echo(f"  batch {left.batch.batch_id} of {left.batch.sink}: {left.batch.phase}: {words}")


# `dualwrite terminate`: abort an open transaction, unless the database has decided it.


@click.command()
@click.argument("transactional_id", callback=not_empty)
@click.option(
    "--lose-decided",
    is_flag=True,
    help="Abort also what the database has decided: its rows stay, its messages are LOST, and an incident records that.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of lines.")
@timeout_option(60.0)
@reason_option
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
    by: By | None,
) -> None:
    """Abort the open transaction of an id: of a writer, a lane or a slot, or Kafka's own transactional.id.

    Refuses what the database has decided: `dualwrite recover` commits that. For an id that dualwrite did not make, no
    database is needed, and nothing shows whether its own program has decided the transaction.

    Exit code: 0 nothing of it is open any more, 3 refused, 4 losses were recorded, 5 a server does not answer, 6 there is
    no such id, 8 the database has gone back in time, 1 another error.
    """
    if by is not None and url is None:
        raise click.UsageError("--reason needs a database to store it in: give --url, or set DUALWRITE_DATABASE_URL")
    try:
        if url is None:
            report = operator.terminate(transactional_id, kafka=kafka, lose_decided=lose_decided, timeout_s=timeout_s)
        else:
            with opened(url, schema) as database:
                report = by_hand.terminate(
                    transactional_id,
                    kafka=kafka,
                    database=database,
                    by=by,
                    lose_decided=lose_decided,
                    timeout_s=timeout_s,
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
        _print_terminated(report)
    if report.unknown:
        click.echo(f"dualwrite: neither the database nor Kafka knows {transactional_id!r}", err=True)
        raise SystemExit(NO_SUCH_ID)
    if report.losses:
        raise SystemExit(INCIDENTS)


def _print_terminated(report: TerminationReport) -> None:
    out = report_console()
    for kafka_id in report.terminated:
        out.print(f"{kafka_id}: aborted")
    out.print(
        f"{len(report.terminated)} terminated, {len(report.settled)} ids settled, {len(report.rolled_forward)} rolled forward, "
        f"{len(report.losses)} losses"
    )
    for loss in report.losses:
        out.print(f"  {loss.row.transactional_id}: {loss.detail}", style="red")


# `dualwrite forget`: delete ids, incidents and runs that are no longer needed.

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
@timeout_option(60.0)
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
    """Delete the rows of ids that never come back, incidents acknowledged and actions done long ago, and runs long over.

    An id stays if it has anything unsettled or a loss that nobody has acknowledged, or is or recently was in use; all ids of
    its writer stay with it. Needs the right to DELETE.

    Exit code: 0 done (with --dry-run: shown), 3 something is unsettled and stays, 5 a server does not answer, 1 another error.
    """
    report = operator.forget(
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
            "actions": report.actions,
        }
        click.echo(json.dumps(document, indent=2))
    else:
        out = report_console()
        for name in report.forgotten:
            out.print(f"{name}: {'would be forgotten' if dry_run else 'forgotten'}")
        for name, why in report.kept.items():
            out.print(f"{name}: kept: {why}")
        out.print(
            f"{len(report.forgotten)} ids, {report.incidents} incidents, {report.runs} runs, {report.actions} actions; "
            f"{len(report.kept)} ids kept"
        )
    if report.unsettled:
        raise SystemExit(NEEDS_RECOVERY)


_WARNINGS: Final = 1
_ERRORS: Final = 2
_STYLES: Final = {Status.OK: "green", Status.UNKNOWN: "cyan", Status.WARNING: "yellow", Status.ERROR: "bold red"}


@click.command()
@click.option(
    "--topic", "topics", multiple=True, metavar="TOPIC", help="A topic that the writer sends to. May be repeated."
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="A consumer group whose offsets its transactions commit. May be repeated.",
)
@click.option(
    "--writer", callback=not_empty, help="The writer's name: checks the rights on its transactional ids, and its rows."
)
@click.option("--strict", is_flag=True, help="Exit code 1 if anything is not ok, and nothing is an error.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@timeout_option(30.0, "Time limit of each server, in seconds.")
@partial(database_options, required=False)
@kafka_options
@exit_code_for_errors
def doctor(
    *,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    writer: str | None,
    strict: bool,
    as_json: bool,
    timeout_s: float,
    url: str | None,
    schema: str | None,
    kafka: Mapping[str, object],
) -> None:
    """Check everything that dual writes rest on, and say how to fix what is wrong. Changes nothing.

    Run it with the application's own settings and rights: brokers and their settings, topics, rights, the database, its tables
    and grants, clocks, and the versions of clients. Without --url only Kafka is checked.

    An error: a writer refuses to open, or its dual writes fail. A warning: the guarantee is weaker than it could be. Unknown:
    it could not be asked, and the reason says why.

    Exit code: 0 no errors, 1 with --strict also no error, but a warning or something unknown, 2 errors (or wrong usage).
    """
    found = diagnosis.doctor(
        kafka=kafka, database=url, schema=schema, topics=topics, groups=groups, writer=writer, timeout_s=timeout_s
    )
    if as_json:
        click.echo(
            json.dumps({"status": worst(found).value, "findings": [finding_json(one) for one in found]}, indent=2)
        )
    else:
        _print(found)
    status = worst(found)
    if status is Status.ERROR:
        raise SystemExit(_ERRORS)
    if strict and status is not Status.OK:
        raise SystemExit(_WARNINGS)


def _print(found: Sequence[CheckResult]) -> None:
    console = report_console()
    console.print(findings_table(found))
    for finding in found:
        if finding.status is not Status.OK:
            console.print()
            console.print(Text(f"{finding.area}, {finding.check}: {finding}", _STYLES[finding.status]), soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"  {finding.remedy}"), soft_wrap=True)
    counts = [f"{sum(one.status is status for one in found)} {status.value}" for status in Status]
    console.print(f"\n{len(found)} checks: {', '.join(counts)}")


def findings_table(found: Sequence[CheckResult]) -> Table:
    """The table of ``dualwrite doctor``. Why each check matters, and what to do, stands below it for those not ok."""
    table = plain_table("area", "check", "status", "found")
    for one in found:
        table.add_row(one.area, Text(one.check), Text(one.status.value, _STYLES[one.status]), Text(one.found))
    return table


def finding_json(finding: CheckResult) -> dict[str, str]:
    """One finding as ``dualwrite doctor --json`` shows it."""
    return {
        "area": finding.area,
        "check": finding.check,
        "status": finding.status.value,
        "found": finding.found,
        "why": finding.why,
        "remedy": finding.remedy,
    }
