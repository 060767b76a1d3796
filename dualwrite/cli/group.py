"""The group of commands. Each is imported only when it is called, so that none waits for another's libraries."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

COMMANDS: Final = {
    "acknowledge": ("dualwrite.cli.tables", "Note that a person has looked at a loss."),
    "batches": ("dualwrite.cli.tables", "Show what Spark sinks have written, batch by batch."),
    "forget": ("dualwrite.cli.recovery", "Delete ids that never come back, and old incidents."),
    "migrate": ("dualwrite.cli.tables", "Create or upgrade the library's tables."),
    "recover": ("dualwrite.cli.recovery", "Settle what dead owners left behind."),
    "status": ("dualwrite.cli.recovery", "Show what is unsettled."),
    "terminate": ("dualwrite.cli.recovery", "Abort an open transaction, unless the database has decided it."),
}
"""For each command, the module that defines it under its own name, and its line in the help."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in the help without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(COMMANDS.items())])


@click.group(name="dualwrite", cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dualwrite")
def commands() -> None:
    """Commit Kafka messages and database rows together or not at all."""
