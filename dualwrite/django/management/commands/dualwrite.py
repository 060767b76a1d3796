"""``manage.py dualwrite``: the commands of ``dualwrite``, with the servers of Django's settings.

The commands are those of the console script. What stands on the command line counts before the settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS

from dualwrite.django.writers import database_url, settings_of

if TYPE_CHECKING:
    import click


class Command(BaseCommand):  # type: ignore[misc] # Django ships no types
    """Runs a command of ``dualwrite``."""

    help = "status, recover, doctor, and the other commands of dualwrite, on the servers of settings.DUALWRITE."
    requires_system_checks: Sequence[str] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """``--database`` comes first; all from the command's name on is the command's."""
        parser.add_argument(
            "--database", default=DEFAULT_DB_ALIAS, help="Alias in DATABASES and DUALWRITE. Default: %(default)s."
        )
        parser.add_argument(
            "arguments", nargs=argparse.REMAINDER, help="As for the command dualwrite, e.g. status --json"
        )

    def handle(self, *args: object, **options: Any) -> None:
        """Run it. Its exit code is that of the command."""
        del args
        missing = [name for name in ("click", "rich") if find_spec(name) is None]
        if missing:
            raise CommandError(f"the command needs {' and '.join(missing)}: pip install 'dualwrite[cli]'")
        import click  # noqa: PLC0415 - see above

        from dualwrite.cli.options import commands  # noqa: PLC0415 - as above

        using = options["database"]
        found = settings_of(using)
        out = options.get("stdout")
        with nullcontext() if out is None else redirect_stdout(out):
            try:
                commands.main(
                    list(_with_database(options["arguments"], using, found.get("SCHEMA"))),
                    prog_name="manage.py dualwrite",
                    standalone_mode=False,
                    obj=dict(found.get("KAFKA", {})),
                )
            except click.ClickException as error:
                error.show()
                sys.exit(error.exit_code)
            except click.exceptions.Abort:
                sys.exit(1)


def _with_database(arguments: Sequence[str], using: str, schema: str | None) -> Iterator[str]:
    """The arguments, with the URL behind the command's name: not in the process's own, which other users can read."""
    import click  # noqa: PLC0415 - the extra "cli"

    from dualwrite.cli.options import commands  # noqa: PLC0415 - as above

    command: click.Command | None = commands
    rest = list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        yield name
        command = command.get_command(click.Context(command), name)
    taken = set() if command is None else {parameter.name for parameter in command.params}
    if "url" in taken:
        yield from ("--url", database_url(using).render_as_string(hide_password=False))
    if "schema" in taken and schema is not None:
        yield from ("--schema", schema)
    yield from rest
