"""The commands about tables: ``migrate``, ``batches``, ``acknowledge``; ``outbox`` and ``relay`` for messages in them."""

from __future__ import annotations

import gc
import json
import logging
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar, cast

import click
from sqlalchemy import exc

from dualwrite.cli.options import (
    ERROR,
    INCIDENTS,
    LEFT_ALONE,
    NO_SUCH_ID,
    database_options,
    exit_code_for_errors,
    kafka_options,
    not_empty,
    reason_option,
    seconds,
)
from dualwrite.cli.report import (
    OutboxView,
    aside_json,
    aside_table,
    batch_json,
    batch_table,
    outbox_json,
    outbox_table,
    report_console,
)
from dualwrite.clock import now_s
from dualwrite.kafka.config import ENGINE
from dualwrite.migrations import BASE, HEAD, Direction, current_revision, sql_script
from dualwrite.migrations import downgrade as go_down
from dualwrite.migrations import upgrade as go_up
from dualwrite.protocol.outbox import MOST_BYTES, MOST_ROWS
from dualwrite.protocol.outbox_table import OutboxTable, Placement
from dualwrite.stores.sql.access import engine_of, map_database_error
from dualwrite.stores.sql.database import has_tables, opened
from dualwrite.stores.sql.ledger import read_batches, read_nobody_at_work
from dualwrite.stores.sql.outbox_table import trigger_sql
from dualwrite.stores.sql.short_transactions import check_schema
from dualwrite.writing import by_hand
from dualwrite.writing.by_hand import By
from dualwrite.writing.relay import Relay, RelayReport

if TYPE_CHECKING:
    from dualwrite.interfaces import OutboxRows, StateStore
    from dualwrite.protocol.values import WhenRefused


@click.command()
@database_options
@click.option(
    "--revision", default=HEAD, show_default=True, callback=not_empty, help="The target; with --sql also FROM:TO."
)
@click.option("--sql", "as_sql", is_flag=True, help="Print a script instead of connecting.")
@click.option("--downgrade", is_flag=True, help="Go back to --revision. 'base' drops the tables and all their rows.")
@exit_code_for_errors
def migrate(*, url: str, schema: str | None, revision: str, as_sql: bool, downgrade: bool) -> None:
    """Create the library's tables, or upgrade them to this version. Does nothing if they are up to date.

    Needs the right to create tables; the application itself needs SELECT, INSERT and UPDATE on them. --sql prints a script
    without connecting. The script starts from an empty database, or from FROM if --revision is FROM:TO.

    Exit code: 0 done, 1 an error, 2 wrong usage, 5 the database does not answer.
    """
    if not has_tables(url):
        raise click.UsageError("a database of this kind has no tables: opening a writer makes what it needs")
    if downgrade and revision == HEAD:
        raise click.UsageError("--downgrade needs a --revision to go back to")
    start, colon, target = revision.rpartition(":")
    if colon and not as_sql:
        raise click.UsageError("--revision FROM:TO is for --sql: a database knows its own revision")
    if as_sql:
        if downgrade and not colon:
            raise click.UsageError("--downgrade --sql needs --revision FROM:TO")
        direction: Direction = "downgrade" if downgrade else "upgrade"
        click.echo(
            sql_script(url, target, start=start or BASE, schema=schema, direction=direction),
            nl=False,
        )
        return
    before, after = _migrate(url, schema, revision, downgrade=downgrade)
    if before == after:
        click.echo(f"The tables are already at {after or BASE}.")
    else:
        click.echo(f"The tables are now at {after or BASE}; they were at {before or BASE}.")


def _migrate(url: str, schema: str | None, revision: str, *, downgrade: bool) -> tuple[str | None, str | None]:
    engine = engine_of(url)
    try:
        with engine.connect() as connection, connection.begin():
            before = current_revision(connection, schema=schema)
        with engine.connect() as connection:
            if downgrade:
                go_down(connection, revision, schema=schema)
            else:
                go_up(connection, revision, schema=schema)
        with engine.connect() as connection:
            return before, current_revision(connection, schema=schema)
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, schema) from error
    finally:
        engine.dispose()


# `dualwrite batches`: show what the ledger knows about each batch of a Spark sink.


@click.command()
@click.argument("sink", required=False, callback=not_empty)
@click.option("--last", "limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many to show.")
@click.option("--all", "everything", is_flag=True, help="All batches, instead of the newest.")
@click.option("--sources", is_flag=True, help="Also what each batch is made of: offsets, or files.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@database_options
@exit_code_for_errors
def batches(
    *, sink: str | None, limit: int, everything: bool, sources: bool, as_json: bool, url: str, schema: str | None
) -> None:
    """Show the batches of SINK, or of all sinks: rows, messages, phase and duration. Changes nothing.

    A batch that was begun, but has had no lease and written nothing for five minutes, is shown as "writing, nobody at work
    since": its driver was killed, or its job computes for long before it writes.

    Asks only the database, not Kafka: `dualwrite status` shows what is unsettled there.

    Exit code: 0 shown, 1 an error, 5 the database does not answer.
    """
    if not has_tables(url):
        raise click.UsageError("Spark's sinks write to SQL databases: a database of this kind has no batches")
    engine = engine_of(url)
    try:
        check_schema(engine, schema)
        found = read_batches(engine, sink=sink, limit=None if everything else limit, schema=schema)
        deserted = read_nobody_at_work(engine, found, schema=schema)
    finally:
        engine.dispose()
    if as_json:
        click.echo(json.dumps({"batches": [batch_json(batch, deserted) for batch in found]}, indent=2))
        return
    console = report_console()
    console.print(batch_table(found, deserted, sources=sources))
    unfinished = sum(batch.decided_at is None for batch in found)
    console.print(f"\n{len(found)} batches, {unfinished} not all written, {sum(one.row_count for one in found):,} rows")


# `dualwrite acknowledge`: note that a person has looked at a loss.


@click.command()
@click.argument("transactional_id", callback=not_empty)
@click.argument("state", required=False, callback=not_empty)
@click.option("--all", "everything", is_flag=True, help="All incidents of the id, instead of that of STATE.")
@reason_option
@database_options
@exit_code_for_errors
def acknowledge(
    *, transactional_id: str, state: str | None, everything: bool, url: str, schema: str | None, by: By | None
) -> None:
    """Note that a person has looked at the loss of STATE (as `dualwrite status --json` shows it) of TRANSACTIONAL_ID.

    The incident stays in the database, but is no longer reported.

    Exit code: 0 done, 1 there is no such incident, or an error.
    """
    if (state is None) != everything:
        raise click.UsageError("give either STATE or --all")
    with opened(url, schema) as database:
        count = by_hand.acknowledge(transactional_id, None if state is None else [state], database=database, by=by)
    click.echo(f"{transactional_id}: {count} acknowledged")
    if count == 0:
        raise SystemExit(ERROR)


P = ParamSpec("P")
R = TypeVar("R")

_LAYOUT: Final = OutboxTable()
_EVERY_S: Final = 10.0
_NUMBER: Final = click.IntRange(1, 2**63 - 1)
_LOOK: Final = "`dualwrite outbox list` names the writers, and the numbers of what was moved aside"


@click.command()
@click.option("--table", "name", default=_LAYOUT.name, show_default=True, callback=not_empty, help="[SCHEMA.]TABLE.")
@click.option(
    "--topic",
    default=_LAYOUT.topic,
    show_default=True,
    callback=not_empty,
    help="The topic's name; ${routedByValue} in it stands for the value of --topic-column.",
)
@click.option("--topic-column", default=_LAYOUT.topic_column, show_default=True, callback=not_empty)
@click.option(
    "--key-column", default=_LAYOUT.key_column, show_default=True, callback=not_empty, help="What is in order."
)
@click.option("--no-key", is_flag=True, help="Messages without keys.")
@click.option("--value-column", default=_LAYOUT.value_column, show_default=True, callback=not_empty)
@click.option(
    "--id-column", default=_LAYOUT.id_column, show_default=True, callback=not_empty, help="Goes into the header 'id'."
)
@click.option("--no-id", is_flag=True, help="No header 'id'.")
@click.option("--headers-column", callback=not_empty, help="JSON with further headers: an object, or a list of pairs.")
@click.option("--partition-column", callback=not_empty, help="The partition's number; null: by the key.")
@click.option(
    "--timestamp-column",
    callback=not_empty,
    help="The record's timestamp. Default: the time of sending, as retention may delete what is older.",
)
@click.option(
    "--place",
    "placements",
    multiple=True,
    metavar="COLUMN:PLACE[:NAME]",
    help="One more column in a 'header', in an 'envelope' around the value, or as the 'partition'. May be repeated.",
)
@click.option("--tombstone-on-empty", is_flag=True, help="An empty value, too, is a tombstone.")
@click.option("--expand-json", is_flag=True, help="In an envelope, the value is JSON, not text.")
@click.option(
    "--order-by",
    multiple=True,
    metavar="COLUMN",
    help="Tells the order of insertion; may be repeated. Default: --id-column, if it holds integers.",
)
@click.option("--unordered", is_flag=True, help="Send rows in any order.")
@click.option("--mark", callback=not_empty, metavar="COLUMN", help="Mark sent rows there, instead of deleting them.")
@click.option(
    "--id", "relay_id", callback=not_empty, help="The name that all processes of a relay share. Default: relay-TABLE."
)
@click.option("--once", is_flag=True, help="Send what is there, and end.")
@click.option(
    "--poll-interval",
    "poll_s",
    default=0.5,
    show_default=True,
    callback=seconds(),
    help="Between looks for rows, in seconds.",
)
@click.option(
    "--lease-timeout",
    "lease_s",
    default=10.0,
    show_default=True,
    callback=seconds(),
    help="A sender without a sign of life for so long is replaced, in seconds.",
)
@click.option(
    "--most-rows", default=MOST_ROWS, show_default=True, type=click.IntRange(min=1), help="Rows of a dual write."
)
@click.option(
    "--most-bytes", default=MOST_BYTES, show_default=True, type=click.IntRange(min=1), help="Bytes of a dual write."
)
@click.option(
    "--engine",
    "engine_name",
    type=click.Choice(["auto", "native", "librdkafka"]),
    help="Instead of 'dualwrite.engine' among the Kafka settings, which is auto if not given.",
)
@click.option(
    "--on-refused",
    type=click.Choice(["stop", "aside"]),
    default="stop",
    show_default=True,
    help="Whether everything waits for a row that Kafka refuses, or it is moved aside: see 'dualwrite outbox'.",
)
@click.option(
    "--print-trigger", is_flag=True, help="Print the SQL of a trigger that tells of new rows (PostgreSQL), and end."
)
@click.option("--json", "as_json", is_flag=True, help="Show the result as a JSON document.")
@database_options
@partial(kafka_options, unless="print_trigger")
@exit_code_for_errors
def relay(
    *,
    name: str,
    topic: str,
    topic_column: str,
    key_column: str,
    no_key: bool,
    value_column: str,
    id_column: str,
    no_id: bool,
    headers_column: str | None,
    partition_column: str | None,
    timestamp_column: str | None,
    placements: tuple[str, ...],
    tombstone_on_empty: bool,
    expand_json: bool,
    order_by: tuple[str, ...],
    unordered: bool,
    mark: str | None,
    relay_id: str | None,
    once: bool,
    poll_s: float,
    lease_s: float,
    most_rows: int,
    most_bytes: int,
    engine_name: str | None,
    on_refused: str,
    print_trigger: bool,
    as_json: bool,
    url: str,
    schema: str | None,
    kafka: Mapping[str, object],
) -> None:
    """Send the rows of an outbox table that another program fills: each once, those of one key in order.

    By default the columns are those of Debezium's outbox event router. A row is deleted in the transaction that sends it. Start
    as many processes as you like: one sends, the others stand by. SIGTERM and SIGINT end it after the present round.

    Exit code: 0 stopped, or with --once all is sent, 1 an error, 2 wrong usage, 4 rows were refused or losses found, 5 a server
    does not answer, 7 with --once: another process sends.
    """
    table = OutboxTable(
        name=name,
        topic=topic,
        topic_column=topic_column,
        key_column=None if no_key else key_column,
        value_column=value_column,
        id_column=None if no_id else id_column,
        headers_column=headers_column,
        partition_column=partition_column,
        timestamp_column=timestamp_column,
        placements=[Placement.parse(one) for text in placements for one in text.split(",")],
        order_by=order_by,
        unordered=unordered,
        mark=mark,
        tombstone_on_empty=tombstone_on_empty,
        expand_json=expand_json,
    )
    if print_trigger:
        click.echo(trigger_sql(engine_of(url), table), nl=False)
        return
    shown = _Lines(quiet=as_json)
    running = Relay(
        table,
        kafka=kafka if engine_name is None else {**kafka, ENGINE: engine_name},
        database=url,
        name=relay_id,
        schema=schema,
        poll_interval_s=poll_s,
        lease_timeout_s=lease_s,
        most_rows=most_rows,
        most_bytes=most_bytes,
        on_refused=cast("WhenRefused", on_refused),
        progress=shown.show,
    )
    gc.freeze()  # what is imported stays: each round makes many objects, and no collection need look through the others
    with _stopped_by_signals(running):
        report = running.run(once=once)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "messages": report.messages,
                    "rounds": report.rounds,
                    "refused": report.refused,
                    "losses": [str(loss) for loss in report.losses],
                    "other_active": report.other_active,
                },
                indent=2,
            )
        )
    else:
        click.echo(f"{running.name}: {report.messages:,} messages sent in {report.rounds:,} transactions")
    if report.other_active:
        click.echo(f"dualwrite: another process sends for {running.name!r}", err=True)
        raise SystemExit(LEFT_ALONE)
    if report.refused or report.losses:
        raise SystemExit(INCIDENTS)


class _Lines:
    """Says on standard error what a relay does: each change of its state at once, the messages now and then."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._state = ""
        self._said_at = now_s()
        self._said = 0

    def show(self, report: RelayReport) -> None:
        """Show what has changed."""
        if self._quiet:
            return
        now = now_s()
        calm = report.state in {"sending", "waiting for rows"}
        state = "sending" if calm else report.state
        if state not in {self._state, "stopped"}:  # what ends it is said once it has: the sum, or the error
            self._state = state
            click.echo(state, err=True)  # the log has the error that it waits after
        if report.messages > self._said and now - self._said_at >= _EVERY_S:
            rate = (report.messages - self._said) / (now - self._said_at)
            click.echo(f"{report.messages:,} messages sent, {rate:,.0f} a second", err=True)
            self._said, self._said_at = report.messages, now


class _stopped_by_signals:  # noqa: N801 - a context manager, used as a function
    """Lets the first SIGTERM or SIGINT stop the relay after its present round, and the next one end the process."""

    def __init__(self, running: Relay) -> None:
        self._running = running
        self._before: dict[signal.Signals, Any] = {}

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        logging.getLogger(__name__).info("signal %d: stopping after the present round", number)
        self._running.stop()
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._stop)

    def __exit__(self, *raised: object) -> None:
        self._restore()


# `dualwrite outbox`: what waits, and what was moved aside. None of these commands needs Kafka.


@click.group()
def outbox() -> None:
    """Show messages that wait in the database, and those that were moved aside because Kafka refuses them."""


@outbox.command("list")
@click.argument("writer", required=False, callback=not_empty)
@click.option(
    "--last", "limit", default=20, show_default=True, type=click.IntRange(min=1), help="How many of each writer."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@database_options
@exit_code_for_errors
def list_(*, writer: str | None, limit: int, as_json: bool, url: str, schema: str | None) -> None:
    """Show how much waits, by writer and topic, and the first messages that were moved aside.

    Exit code: 0 shown, 1 an error, 4 messages were moved aside, 5 the database does not answer, 6 there is no such writer.
    """
    with _rows(url, schema) as (rows, store):
        if writer is not None and writer not in rows.writers() and not store.read([writer]):
            click.echo(f"dualwrite: there is no writer {writer!r}: {_LOOK}", err=True)
            raise SystemExit(NO_SUCH_ID)
        found = [
            OutboxView(
                name,
                store.outbox_mode(name),
                rows.waiting(name),
                rows.topics(name),
                rows.count_aside(name),
                rows.aside(name, limit=limit),
            )
            for name in ([writer] if writer is not None else rows.writers())
        ]
    if as_json:
        click.echo(json.dumps({"writers": [outbox_json(one) for one in found]}, indent=2))
    else:
        out = report_console()
        out.print(outbox_table(found))
        if any(one.aside for one in found):
            out.print("\nMoved aside:")
            out.print(aside_table([message for one in found for message in one.aside]))
    if any(one.aside_count for one in found):
        raise SystemExit(INCIDENTS)


@outbox.command()
@click.argument("writer", callback=not_empty)
@click.argument("number", type=_NUMBER)
@click.option("--value", "only_value", is_flag=True, help="The bytes of its value, and nothing else.")
@database_options
@exit_code_for_errors
def show(*, writer: str, number: int, only_value: bool, url: str, schema: str | None) -> None:
    """Show the message of WRITER with that NUMBER, which was moved aside, as a JSON document.

    Bytes that are no text are shown in base64.

    Exit code: 0 shown, 1 an error, 6 there is no such message.
    """
    with _rows(url, schema) as (rows, _):
        found = [one for one in rows.aside(writer, limit=1, after=number - 1) if one.number == number]
    if not found:
        _none_aside(writer, [number])
    (message,) = found
    if only_value:
        click.echo(message.value or b"", nl=False)
        return
    click.echo(json.dumps(aside_json(message, whole=True), indent=2))


def _chosen(command: Callable[P, R]) -> Callable[P, R]:
    """Add the writer, and numbers or ``--all``, of which exactly one must be given; with ``--all`` the numbers are None."""

    @click.argument("writer", callback=not_empty)
    @click.argument("numbers", nargs=-1, type=_NUMBER)
    @click.option("--all", "everything", is_flag=True, help="All of the writer's.")
    @wraps(command)
    def with_numbers(*args: P.args, **kwargs: P.kwargs) -> R:
        everything = bool(kwargs.pop("everything"))
        if everything == bool(kwargs["numbers"]):
            raise click.UsageError("give either NUMBERS or --all")
        if everything:
            kwargs["numbers"] = None
        return command(*args, **kwargs)

    return with_numbers


@outbox.command()
@_chosen
@reason_option
@database_options
@exit_code_for_errors
def replay(*, writer: str, numbers: Sequence[int] | None, url: str, schema: str | None, by: By | None) -> None:
    """Let messages of WRITER that were moved aside wait again, behind all that wait already: they are sent as the next ones.

    Fix first what refused them. Later messages of their keys may have been sent meanwhile.

    Exit code: 0 done, 1 an error, 6 there is none, or not all of NUMBERS.
    """
    with opened(url, schema) as database:
        count = by_hand.replay(writer, numbers, database=database, by=by)
    click.echo(f"{writer}: {_messages(count)} wait{'s' if count == 1 else ''} again")
    if count < (1 if numbers is None else len(set(numbers))):
        _none_aside(writer, numbers)


@outbox.command()
@_chosen
@click.option("--yes", "confirmed", is_flag=True, help="Do not ask.")
@reason_option
@database_options
@exit_code_for_errors
def drop(
    *, writer: str, numbers: Sequence[int] | None, confirmed: bool, url: str, schema: str | None, by: By | None
) -> None:
    """Delete messages of WRITER that were moved aside, for good: nobody will read them.

    Exit code: 0 done, 1 an error, or it was not confirmed, 6 there is none, or not all of NUMBERS.
    """
    with opened(url, schema) as database:
        rows = by_hand.outbox_of(database)
        there = (
            rows.count_aside(writer) if numbers is None else sum(_is_aside(rows, writer, one) for one in set(numbers))
        )
        if not there:
            _none_aside(writer, numbers)
        if not confirmed:
            click.confirm(f"Delete {_messages(there)} of {writer} for good?", abort=True, err=True)
        count = by_hand.drop(writer, numbers, database=database, by=by)
    click.echo(f"{writer}: {_messages(count)} deleted")
    if count < (1 if numbers is None else len(set(numbers))):
        _none_aside(writer, numbers)


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"


def _is_aside(rows: OutboxRows, writer: str, number: int) -> bool:
    return any(one.number == number for one in rows.aside(writer, limit=1, after=number - 1))


def _none_aside(writer: str, numbers: Sequence[int] | None) -> NoReturn:
    which = "" if numbers is None else f" with {'this number' if len(numbers) == 1 else 'some of these numbers'}"
    click.echo(f"dualwrite: no message of {writer!r}{which} was moved aside: {_LOOK}", err=True)
    raise SystemExit(NO_SUCH_ID)


@contextmanager
def _rows(url: str, schema: str | None) -> Generator[tuple[OutboxRows, StateStore], None, None]:
    with opened(url, schema) as database:
        yield by_hand.outbox_of(database), database.store()
