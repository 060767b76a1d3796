"""The command ``doctor``: checks everything that dual writes rest on, and says how to mend what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import click
from rich.table import Table
from rich.text import Text

from dualwrite.cli.options import database_options, exit_code_for_errors, kafka_options, not_empty, seconds
from dualwrite.cli.report import report_console
from dualwrite.protocol.findings import CheckResult, Status, worst
from dualwrite.recovery import doctor as diagnosis

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
@click.option(
    "--timeout",
    "timeout_s",
    default=30.0,
    show_default=True,
    callback=seconds(),
    help="Time limit of each server, in seconds.",
)
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
    """Check everything that dual writes rest on, and say how to mend what is wrong. Changes nothing.

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
    table = Table(title=None, box=None, pad_edge=False)
    for column in ("area", "check", "status", "found"):
        table.add_column(column, overflow="fold")
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
