"""``Relay``: sends an outbox table that another program fills, each row once, in the order of its key.

Each round is one dual write: it reads the first rows of the table, deletes or marks them, and produces what they hold. So a row
is gone, or marked, exactly if its message is in Kafka, whenever the process dies. The usual faults of relays do not arise:
nothing is marked as sent before the broker has it, and nothing is sent again after later messages.

One process sends, any number stand by. They share one lease, like a fleet with room for a single member: its holder claims the
id, which fences the former owner, so that safety rests on the claim alone. A standby on the same machine as a process that has
died takes over at once, elsewhere once its lease has expired.

A round that fails is tried again forever, after growing pauses: the sender must not need a person only because Kafka was away.
A message that Kafka refuses for good is found by halving (:mod:`dualwrite.protocol.outbox`); then it is moved aside, or
everything waits for it, as configured.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, get_args

from sqlalchemy import exc

from dualwrite.clock import now_s
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    OutcomeUnverifiable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.kafka.config import KafkaConfig
from dualwrite.protocol.members import LeaseTiming, check_fleet
from dualwrite.protocol.outbox import (
    COLUMNS_FROM,
    MOST_BYTES,
    MOST_ROWS,
    MOST_ROWS_ALONE,
    STOPPED_PAUSE_S,
    Sends,
    pause_after,
    refusal_behind,
    refuses_topic,
)
from dualwrite.protocol.outbox_table import BadRow, OutboxTable, channel, relay_id
from dualwrite.protocol.outbox_table import Mapping as RowMapping
from dualwrite.protocol.process import is_for_good
from dualwrite.protocol.values import OutboxMode, WhenRefused, WriterLimits, check_count, check_seconds
from dualwrite.recovery.claim import LOSSES, lease_owner
from dualwrite.stores.sql.access import map_database_error
from dualwrite.stores.sql.database import SqlDatabase, database_of, is_made_here
from dualwrite.stores.sql.outbox_table import ISOLATION, Listener, OutboxTableRows, Rows, driver_error
from dualwrite.writing.leased import LeaseKeeper
from dualwrite.writing.writer import DualWriter

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces import Observer
    from dualwrite.protocol.outbox_table import Messages
    from dualwrite.writing.transaction import Transaction

logger = logging.getLogger(__name__)

_STANDBY_S: Final = 0.5
_SLICE_S: Final = 0.25
"""A wait for news is divided into slices of this length, so that the relay stops soon when it is told to."""
_LOOK_EVERY_S: Final = 5.0
"""How often a relay that waits for rows checks whether messages were put back."""
_ATTEMPTS_ONCE: Final = 5


@dataclass
class RelayReport:
    """What a relay has done so far, and what it does now.

    Attributes:
        state: ``starting``, ``standing by``, ``sending``, ``waiting for rows``, ``waiting after an error`` or ``stopped``.
        messages: Messages sent, with their rows deleted or marked.
        rounds: Dual writes that sent them.
        refused: Rows that Kafka refuses, or that make no message: in words, with the row's name in the table.
        losses: Decisions whose messages are not in Kafka, or may not be; each is recorded as an incident.
        failures: How many rounds in a row have failed.
        error: The error of the last round; None if it succeeded.
        other_active: Whether ``once`` found another process sending.
    """

    state: str = "starting"
    messages: int = 0
    rounds: int = 0
    refused: list[str] = field(default_factory=list)
    losses: list[DualWriteError] = field(default_factory=list)
    failures: int = 0
    error: str | None = None
    other_active: bool = False


class Relay:
    """Sends the rows of an outbox table that another program fills: each once, those of one key in order.

    Run it in as many processes as you like: one sends, the others stand by and take over in seconds. It needs
    the library's tables in the same database (``dualwrite migrate``), and the right to read and delete the rows, or to update
    the column that marks them.

    Args:
        table: The table, and what its columns mean. The default is that of Debezium's outbox event router.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least.
        database: A SQLAlchemy engine or a database URL. PostgreSQL, MariaDB, MySQL or SQLite.
        name: The relay's id, which all processes that send this table share; ``relay-TABLE`` by default. Its transactional ids
            are ``NAME-0`` and its lanes.
        schema: The database schema of the library's tables, if it is not the default one.
        poll_interval_s: How often to look for new rows, in seconds, unless a trigger tells of them.
        lease_timeout_s: After this time without a sign of life from the sender, another process takes over, in seconds.
        most_rows: The maximum number of rows in a round.
        most_bytes: The maximum bytes of a round, which the process holds in memory several times over.
        on_refused: What happens to a row that Kafka refuses for good, or that makes no message. ``stop``: everything waits for
            it. ``aside``: it is moved aside (``dualwrite outbox list``), and the rows after it are sent.
        progress: Called with the `RelayReport` after each round and each change of state, in the thread of :meth:`run`.
        telemetry: As for `DualWriter`.

    Raises:
        ConfigurationError: A setting cannot work; or, from :meth:`run`, the table does not fit.
    """

    def __init__(
        self,
        table: OutboxTable,
        *,
        kafka: Mapping[str, object],
        database: Engine | str,
        name: str | None = None,
        schema: str | None = None,
        poll_interval_s: float = 0.5,
        lease_timeout_s: float = 10.0,
        most_rows: int = MOST_ROWS,
        most_bytes: int = MOST_BYTES,
        on_refused: WhenRefused = "stop",
        progress: Callable[[RelayReport], object] = lambda _: None,
        telemetry: Observer | None = None,
    ) -> None:
        self.table = table
        self.name = relay_id(table) if name is None else name
        check_fleet(self.name)
        check_seconds("poll_interval_s", poll_interval_s)
        check_count("most_rows", most_rows)
        check_count("most_bytes", most_bytes)
        self._timing = LeaseTiming(lease_timeout_s)
        self._kafka = kafka
        self._client_id = KafkaConfig.parse(kafka).client_id
        found = database_of(database, schema)
        if not isinstance(found, SqlDatabase):
            raise ConfigurationError(
                f"there are no tables in {found.traits.name}",
                next_step="give the SQL database that the outbox table is in",
            )
        self._owns_engine = is_made_here(database)
        self._engine = engine = found.engine
        level = ISOLATION.get(engine.dialect.name)
        blocks = engine if level is None else engine.execution_options(isolation_level=level)
        self._database = SqlDatabase(engine, schema, blocks=blocks)
        self._poll_s = poll_interval_s
        self._most_bytes = most_bytes
        alone = found.traits.blocks == 1
        self._first = Sends(turns_back=False, most_rows=min(most_rows, MOST_ROWS_ALONE) if alone else most_rows)
        if on_refused not in get_args(WhenRefused):
            raise ConfigurationError(f"on_refused is {on_refused!r}", next_step="give 'stop' or 'aside'")
        self._aside = on_refused == "aside"
        self._progress = progress
        self._telemetry = telemetry
        self._mapping = RowMapping(table)
        self._stopping = threading.Event()
        self._lost = threading.Event()
        self._listener = Listener(engine, channel(table)) if engine.dialect.name == "postgresql" else None
        self._read: Rows | None = None
        self.report = RelayReport()

    def stop(self) -> None:
        """Let :meth:`run` return after its current round. Any thread may call it, and a signal handler."""
        self._stopping.set()

    def run(self, *, once: bool = False) -> RelayReport:
        """Send rows until :meth:`stop` is called; or, with ``once``, until all present rows have been sent.

        On return another process may take over and, if the servers answered, nothing is left to settle. Call it once.

        Raises:
            ConfigurationError: The table does not fit, or the library's tables or a right are missing.
            DatabaseWentBack: The database has lost commits.
            Unavailable: The database does not answer at the start; or, with ``once``, a server does not.
            DualWriteError: With ``once``, a round has failed several times.
        """
        self._rows: OutboxTableRows
        keeper = None
        try:
            self._database.check()
            if self._aside:
                self._database.require_outbox()
            self._rows = OutboxTableRows(self._engine, self.table)
            logger.info("%s: sends %s %s", self.name, self.table.name, self._rows.describes)
            keeper = LeaseKeeper(
                self._database.leases(self.name), self._timing, on_lost=self._lost.set, on_dead=lambda _: None
            )
            while not self._stopping.is_set() and (name := self._stand_by(keeper, once=once)) is not None:
                settled = False
                try:
                    done = self._lead(name, keeper, once=once)
                    settled = True
                finally:
                    keeper.give_back(settled=settled)
                if done:
                    break
                self._pause(_STANDBY_S)  # others first: we have just lost it
        finally:
            if keeper is not None:
                keeper.stop()
            if self._listener is not None:
                self._listener.close()
            if self._owns_engine:
                self._engine.dispose()
            self._now("stopped")
        return self.report

    def _now(self, state: str) -> None:
        if self.report.state != state:
            self.report.state = state
            self._progress(self.report)

    def _pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    # One process sends

    def _stand_by(self, keeper: LeaseKeeper, *, once: bool) -> str | None:
        """Wait for the lease, and return its id; None to end."""
        failures = 0
        while not self._stopping.is_set():
            try:
                name = keeper.take_number(0, lease_owner(self._client_id))
                failures = 0
            except (ConfigurationError, Unavailable) as error:
                if once or is_for_good(error):
                    raise
                failures += 1
                logger.warning("%s: cannot ask who sends; retrying: %s", self.name, error)
                self._pause(pause_after(failures))
                continue
            if name is not None:
                self._lost.clear()
                return name
            self._now("standing by")
            if once:
                self.report.other_active = True
                return None
            self._pause(_STANDBY_S * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        return None

    def _lead(self, name: str, keeper: LeaseKeeper, *, once: bool) -> bool:
        """Claim the id and send until there is nothing more to do (True), or another process has taken the id (False)."""
        while not self._stopping.is_set():
            writer = DualWriter(
                name,
                kafka=self._kafka,
                database=self._database,
                limits=WriterLimits(max_lanes=2, timeout_s=30.0),
                on_loss=self._note_loss,
                telemetry=self._telemetry,
            )
            try:
                with writer:
                    if not keeper.still_held():
                        return False
                    self._now("sending")
                    if (done := self._send(writer, once=once)) is not None:
                        return done
            except Fenced as error:
                logger.warning("%s: another process sends from now on: %s", self.name, error)
                return False
            except TransactionInDoubt as error:  # the next claim finds out: the rows are there, or not
                self._failed(error, once=once)
            except (DecidedTransactionLost, OutcomeUnverifiable) as error:  # found by the claim, and recorded
                self._note_loss(error)
            except (TransactionAborted, Unavailable, CompletionPending) as error:
                self._failed(error, once=once)
            except ConfigurationError as error:
                if is_for_good(error):
                    raise
                self._failed(error, once=once)
        return True

    def _send(self, writer: DualWriter, *, once: bool) -> bool | None:
        """Round after round. Returns whether all is done; False if another process has taken the lease.

        None if somebody has put messages back that were moved aside (``dualwrite outbox replay``): opening the writer again
        sends them.
        """
        sends, look_at = self._first, now_s() + _LOOK_EVERY_S
        while not self._stopping.is_set():
            if self._lost.is_set():
                return False
            made = sends.next()
            began = now_s()
            try:
                found = self._round(writer, made.rows)
            except BadRow as error:
                assert self._read is not None
                if error.row and not self._aside:
                    sends = sends.behind(error.row)
                else:
                    sends = self._refused(writer, sends, [self._read.rows[error.row]], error.reason, once=once)
                continue
            except (TransactionAborted, ConfigurationError, Unavailable) as error:
                sends = self._after(writer, sends, error, once=once)
                continue
            sends = sends.sent(made, len(found.rows), seconds=now_s() - began, full=found.full)
            self._note_sent(len(found.rows))
            self._raise_floor()
            if not found.full and not sends.suspects:
                if once:
                    return True
                if now_s() >= look_at:
                    if self._database.store().outbox_mode(writer.transactional_id) is OutboxMode.LATER:
                        return None
                    look_at = now_s() + _LOOK_EVERY_S
                self._now("waiting for rows")
                self._await_rows()
        return True

    def _after(self, writer: DualWriter, sends: Sends, error: DualWriteError, *, once: bool) -> Sends:
        """What is known after a round that changed nothing on either side."""
        refusal = refusal_behind(error)
        read = None if self._read is None else self._read.rows
        if refusal is None or not read:
            if is_for_good(error):
                raise error
            self._failed(error, once=once)
            return sends.failed()
        topic, reason = refusal
        if self._aside and refuses_topic(error) and (concerned := self._mapping.rows_of(topic, read)):
            # One by one, each would wait for the topic again.
            return self._refused(writer, sends, concerned, reason, once=once)
        if len(read) > 1:
            return sends.refused(len(read))
        return self._refused(writer, sends, read, reason, once=once)

    def _refused(
        self, writer: DualWriter, sends: Sends, rows: Sequence[Sequence[Any]], reason: str, *, once: bool
    ) -> Sends:
        """As :meth:`_refuse`; a failure of it is one of a round."""
        try:
            return self._refuse(writer, sends, rows, reason, once=once)
        except (TransactionAborted, Unavailable) as error:
            if not self._aside:
                raise
            self._failed(error, once=once)
            return sends.failed()

    def _refuse(
        self, writer: DualWriter, sends: Sends, rows: Sequence[Sequence[Any]], reason: str, *, once: bool
    ) -> Sends:
        """Handle rows that cannot be sent: move them aside, or let everything wait until somebody has fixed the cause."""
        if self._aside:
            self._move_aside(writer, rows, reason)
            self.report.refused += [f"{self._rows.shown(row)}: {reason}" for row in rows]
            shown = self._rows.shown(rows[0]) if len(rows) == 1 else f"{len(rows)} from {self._rows.shown(rows[0])} on"
            logger.error("%s: rows that cannot be sent were moved aside (%s): %s", self.name, shown, reason)
            self._progress(self.report)
            return sends.moved_aside()
        said = f"{self._rows.shown(rows[0])}: {reason}"
        if said not in self.report.refused:
            self.report.refused.append(said)
            logger.error("%s: this row cannot be sent, and the others wait for it: %s", self.name, said)
        if once:
            raise TransactionAborted(
                f"a row of {self.table.name} cannot be sent: {said}",
                transactional_id=self.name,
                next_step="fix or delete the row, or fix what refuses it",
                retryable=False,
            )
        self._now("waiting after an error")
        self._pause(STOPPED_PAUSE_S)
        return sends.failed()

    def _move_aside(self, writer: DualWriter, rows: Sequence[Sequence[Any]], reason: str) -> None:
        """Delete or mark the rows, and keep what they hold among the messages that were moved aside: one transaction."""
        outbox = self._database.store().outbox
        assert outbox is not None
        name = writer.transactional_id
        try:
            with writer.transaction() as tx:
                self._rows.remove(tx.connection, rows, some=True)
                for row in rows:
                    said = f"{self.table.name}, {self._rows.shown(row)}: {reason}"
                    outbox.put_aside(tx.connection, self._mapping.aside(row, name, said))
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, None) from error

    def _failed(self, error: DualWriteError, *, once: bool) -> None:
        """Wait before another try, longer with each failure in a row."""
        report = self.report
        report.failures += 1
        report.error = f"{type(error).__name__}: {error}"
        logger.warning("%s: a round failed; retrying: %s", self.name, error)
        useless = isinstance(error, TransactionAborted) and not error.retryable
        if once and (useless or report.failures >= _ATTEMPTS_ONCE):
            raise error
        self._now("waiting after an error")
        self._pause(pause_after(report.failures))

    def _note_loss(self, error: DualWriteError) -> None:
        self.report.losses.append(error)
        logger.error("%s: %s", self.name, error)
        self._progress(self.report)

    def _note_sent(self, messages: int) -> None:
        report = self.report
        report.failures, report.error = 0, None
        if messages:
            report.messages += messages
            report.rounds += 1
            report.state = "sending"
            self._progress(report)

    def _raise_floor(self) -> None:
        try:
            self._rows.raise_floor()
        except exc.SQLAlchemyError as error:
            logger.info(
                "%s: cannot look who inserts rows; the next reads begin where the last one did: %s", self.name, error
            )

    def _await_rows(self) -> None:
        """Wait for news from the table's trigger, at most for the time between two polls."""
        until = now_s() + self._poll_s
        while (left_s := until - now_s()) > 0 and not self._stopping.is_set():
            if self._listener is None:
                self._pause(left_s)
                continue
            try:
                if self._listener.wait(min(left_s, _SLICE_S)):
                    return
            except (exc.SQLAlchemyError, driver_error(self._engine)) as error:
                logger.warning("%s: cannot listen for new rows; polling: %s", self.name, error)
                self._pause(left_s)

    # One round

    def _round(self, writer: DualWriter, limit: int) -> Rows:
        """Send the first rows, up to that many, in one dual write."""
        self._read = None
        try:
            with writer.transaction() as tx:
                self._read = found = self._rows.read(tx.connection, limit, self._most_bytes)
                if found.rows:
                    for messages in self._mapping.messages(found.rows):
                        _produce(tx, messages)
                    self._rows.remove(tx.connection, found.rows)
        except CompletionPending as error:
            logger.warning("%s: %s", self.name, error)  # decided: the next round waits for it, or settles it
        except LOSSES as error:
            if isinstance(error, DatabaseWentBack):
                raise
            self._note_loss(error)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, None) from error
        assert self._read is not None
        return self._read


def _produce(tx: Transaction, messages: Messages) -> None:
    """Hand messages of one topic to the producer, in the cheapest way that can take them."""
    topic, values, keys, partitions, timestamps, headers, placed = messages
    if headers is None and partitions is None and timestamps is None and not placed:
        tx.produce_many(topic, values, keys)
        return
    if len(values) >= COLUMNS_FROM and find_spec("pyarrow") is not None and find_spec("numpy") is not None:
        _produce_columns(tx, messages)
        return
    for row, value in enumerate(values):
        tx.produce(
            topic,
            value,
            None if keys is None else keys[row],
            partition=None if partitions is None else partitions[row],
            headers=messages.headers_of(row),
            timestamp_ms=None if timestamps is None else timestamps[row],
        )


def _produce_columns(tx: Transaction, messages: Messages) -> None:
    import numpy as np  # noqa: PLC0415 - as pyarrow
    import pyarrow as pa  # noqa: PLC0415 - large, and not there in every installation

    from dualwrite.kafka.native.arrow import column_of  # noqa: PLC0415 - imports pyarrow

    topic, values, keys, partitions, timestamps, headers, placed = messages
    count, lists = len(values), None
    if headers is None and placed:  # as many for each: no Python object is made for a row
        ends: Sequence[int] = range(0, len(placed) * count + 1, len(placed))
        names = column_of([name for name, _ in placed]).take(np.tile(np.arange(len(placed)), count))
        contents: Sequence[Any] = placed[0][1]
        if len(placed) > 1:
            contents = [content for row in zip(*(column for _, column in placed), strict=True) for content in row]
    elif headers is not None:
        pairs = [messages.headers_of(row) for row in range(count)]
        ends = list(accumulate(map(len, pairs), initial=0))
        names = column_of([name for row in pairs for name, _ in row])
        contents = [content for row in pairs for _, content in row]
    if headers is not None or placed:
        entries = pa.StructArray.from_arrays([names, column_of(contents)], ["key", "value"])
        lists = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), entries)
    tx.produce_arrow(
        topic,
        column_of(values),
        None if keys is None else column_of(keys),
        lists,
        None if partitions is None else pa.array(partitions, pa.int64()),
        timestamps=None if timestamps is None else pa.array(timestamps, pa.int64()),
    )
