"""The group of commands, the options that they share, how they reach the servers, and the exit codes for scripts.

Each command is imported only when it is called, so that none waits for another's libraries.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import click

from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.protocol.values import check_not_empty, check_seconds

P = ParamSpec("P")
R = TypeVar("R")


def seconds(
    *, zero: bool = False, unit_s: float = 1.0
) -> Callable[[click.Context, click.Parameter, float | None], float | None]:
    """The check of an option that takes a duration, by the rules for the Python calls.

    Args:
        zero: Whether it may be 0.
        unit_s: The option's own unit, in seconds.
    """

    def check(context: click.Context, parameter: click.Parameter, given: float | None) -> float | None:
        del context, parameter
        if given is not None:
            with _wrong_usage():
                check_seconds("it", given * unit_s, zero=zero)
        return given

    return check


def not_empty(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """The check of a text that an unset variable of a script may have left empty."""
    del context, parameter
    if given is not None:
        with _wrong_usage():
            check_not_empty("it", given)
    return given


@contextmanager
def _wrong_usage() -> Generator[None, None, None]:
    try:
        yield
    except ConfigurationError as error:
        raise click.BadParameter(f"{error.what}: {error.next_step}") from error


def database_options(command: Callable[P, R], *, required: bool = True) -> Callable[P, R]:
    """Add ``--url`` and ``--schema``. If they are not required, the URL may be None."""
    command = click.option(
        "--url",
        envvar="DUALWRITE_DATABASE_URL",
        required=required,
        callback=not_empty,
        help="SQLAlchemy URL of the database, e.g. postgresql+psycopg://host/name. Prefer DUALWRITE_DATABASE_URL: other "
        "users can read the command line.",
    )(command)
    return click.option(
        "--schema", envvar="DUALWRITE_SCHEMA", callback=not_empty, help="Schema of the library's tables."
    )(command)


def id_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add an id, ``--prefix`` and ``--all``, of which exactly one must be given; with ``--all`` the other two are None."""

    @click.argument("transactional_id", required=False, callback=not_empty)
    @click.option("--prefix", callback=not_empty, help="All ids with this prefix.")
    @click.option("--all", "everything", is_flag=True, help="All ids of the table.")
    @wraps(command)
    def with_ids(*args: P.args, **kwargs: P.kwargs) -> R:
        everything = bool(kwargs.pop("everything"))
        if sum([kwargs["transactional_id"] is not None, kwargs["prefix"] is not None, everything]) != 1:
            raise click.UsageError("give one of: a transactional id, --prefix, --all")
        return command(*args, **kwargs)

    return with_ids


def timeout_option(default: float, text: str = "Time limit, in seconds.") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Add ``--timeout``, passed on as ``timeout_s``."""
    return click.option("--timeout", "timeout_s", default=default, show_default=True, callback=seconds(), help=text)


def reason_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add ``--reason``, and pass on who acts and why, as ``by``; None without a reason."""

    @click.option(
        "--reason",
        callback=not_empty,
        help="Why. It is stored in the database with the time, your user name, what is done, and how it ends.",
    )
    @wraps(command)
    def with_reason(*args: P.args, **kwargs: P.kwargs) -> R:
        reason = kwargs.pop("reason")
        if reason is not None:
            from dualwrite.writing.by_hand import By  # noqa: PLC0415 - other commands do not need it

            kwargs["by"] = By(actor=getpass.getuser(), reason=str(reason))
        else:
            kwargs["by"] = None
        return command(*args, **kwargs)

    return with_reason


def kafka_options(command: Callable[P, R], *, unless: str | None = None) -> Callable[P, R]:
    """Add ``--bootstrap-server``, ``--config`` and ``-X``, and pass them on as one dictionary, ``kafka``.

    ``unless`` names a flag with which the command asks no broker.
    """

    @click.option("--bootstrap-server", envvar="DUALWRITE_BOOTSTRAP_SERVERS", help="host:port of a broker, or several.")
    @click.option(
        "--config",
        "config_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="DUALWRITE_KAFKA_CONFIG",
        help="File with librdkafka properties, key=value per line: the place for security settings.",
    )
    @click.option("-X", "overrides", multiple=True, metavar="KEY=VALUE", help="One librdkafka property.")
    @wraps(command)
    def with_kafka(*args: P.args, **kwargs: P.kwargs) -> R:
        bootstrap = kwargs.pop("bootstrap_server")
        config_file = kwargs.pop("config_file")
        overrides = kwargs.pop("overrides")
        # A program that has settings of its own gives them so: manage.py of Django.
        kafka: dict[str, object] = dict(click.get_current_context().find_root().obj or {})
        if isinstance(config_file, Path):
            kafka.update(parse_properties(config_file.read_text(encoding="utf-8").splitlines(), str(config_file)))
        assert isinstance(overrides, tuple)
        kafka.update(parse_properties(overrides, "-X"))
        if bootstrap:
            kafka["bootstrap.servers"] = bootstrap
        if "bootstrap.servers" not in kafka and not (unless is not None and kwargs.get(unless)):
            raise click.UsageError("no broker: give --bootstrap-server, or bootstrap.servers in --config")
        kwargs["kafka"] = kafka
        return command(*args, **kwargs)

    return with_kafka


def parse_properties(lines: list[str] | tuple[str, ...], source: str) -> dict[str, object]:
    """Parse ``key=value`` lines; blank lines and ``#`` comments are skipped. Errors never show values."""
    properties: dict[str, object] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.UsageError(f"{source}: line {number} is not key=value")
        properties[key.strip()] = value.strip()
    return properties


# Exit codes for scripts, and the one place that turns our errors into them.

ERROR: Final = 1
NEEDS_RECOVERY: Final = 3
INCIDENTS: Final = 4
UNAVAILABLE: Final = 5
NO_SUCH_ID: Final = 6
LEFT_ALONE: Final = 7
WENT_BACK: Final = 8


def exit_code_for_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn an error of ours into one line on standard error and an exit code; any other error keeps its traceback."""

    @wraps(command)
    def reported(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except DualWriteError as error:
            click.echo(f"dualwrite: {type(error).__name__}: {error}", err=True)
            sys.exit(UNAVAILABLE if isinstance(error, Unavailable) else ERROR)

    return reported


# The group of commands. Each is imported only when it is called, so that none waits for another's libraries.

COMMANDS: Final = {
    "acknowledge": ("dualwrite.cli.tables", "Note that a person has looked at a loss."),
    "batches": ("dualwrite.cli.tables", "Show what Spark sinks have written, batch by batch."),
    "doctor": ("dualwrite.cli.recovery", "Check brokers, database, clocks, clients; say how to fix them."),
    "forget": ("dualwrite.cli.recovery", "Delete ids that never come back, and old incidents."),
    "migrate": ("dualwrite.cli.tables", "Create or upgrade the library's tables."),
    "outbox": ("dualwrite.cli.tables", "Show messages that wait in the database, and handle those moved aside."),
    "recover": ("dualwrite.cli.recovery", "Settle what dead owners left behind."),
    "relay": ("dualwrite.cli.tables", "Send an outbox table that another program fills."),
    "serve": ("dualwrite.cli.serve", "Keep every writer settled, and show it on a page."),
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
