"""What both ways of writing do on the driver: plan a batch, run its Spark jobs, and give a failure's reason in one line."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from sqlalchemy import exc

from dualwrite import failpoints
from dualwrite.clock import Deadline, pause
from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    OutcomeUnverifiable,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.kafka_requirements import require_rights
from dualwrite.protocol.values import Outcome, owner_prefix
from dualwrite.recovery.claim import OwnerContext, unique_owner
from dualwrite.recovery.settle import end_participants
from dualwrite.sinks.batches import RUN_AGAIN
from dualwrite.sinks.spark.databases.database import open_database
from dualwrite.sinks.spark.formats.serializing import given_schemas, registered_layout
from dualwrite.sinks.spark.layout import plan_layout
from dualwrite.sinks.spark.quarantine import quarantine_target, require_checkable
from dualwrite.sinks.spark.targets import Target, require_all_used, require_different, tag_number
from dualwrite.sinks.spark.worker import settle_leases, spare_collections
from dualwrite.stores.sql.access import map_database_error
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.ledger import Ledger, Runs, batch_in_part, newest_batch
from dualwrite.stores.sql.short_transactions import check_schema
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import check_name
from dualwrite.telemetry import observer_if_loaded
from dualwrite.units.writer import Written, announce_batch

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import types as spark
    from sqlalchemy import Connection, Engine
    from typing_extensions import Self

    from dualwrite.protocol.values import Incident, Participant, StateRow
    from dualwrite.sinks.spark.databases.database import Emptying, SinkDatabase
    from dualwrite.sinks.spark.layout import Layout
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.targets import Wanted
    from dualwrite.stores.sql.leases import SlotLease
    from dualwrite.stores.sql.ledger import Run

logger = logging.getLogger(__name__)

_LOOKS_AGAIN_S: Final = 0.05
_OTHERS_S: Final = 10.0


@dataclass(frozen=True)
class Left:
    """What the tasks of earlier runs left.

    Attributes:
        has_ended: Whether their runs have ended. If not, one of them is handing over: settle, and look again.
        run: The run that has begun instead; None if runs are not known.
        leases: The slots to settle.
        rows: The rows of all the sink's slots.
        prepared: What is prepared for them in the database.
    """

    has_ended: bool
    run: Run | None
    leases: Sequence[SlotLease]
    rows: Sequence[StateRow]
    prepared: Sequence[Participant]


class DriverSide:
    """One batch, seen from the driver. A context manager; entering it checks the names, the rights and the schema.

    `run_name` names the runs: the batch, or the stream that it belongs to; None if the stream is not known. `run` is the run
    that may write, from :meth:`settle_left` on; None if runs are not known. `is_planned` says that the settings are those of a
    plan: it has checked the schema, and they name it.
    """

    run: Run | None = None
    _has_claimed = False

    def __init__(self, options: SinkOptions, batch_id: str, run_name: str | None, *, is_planned: bool = False) -> None:
        check_name(batch_id, "the name of a batch")
        self._options = options
        self._is_planned = is_planned
        self._batch_id = batch_id
        self._run_name = run_name
        self.name = f"sink {options.sink!r} batch {batch_id!r}"
        self.database = open_database(options)
        self._engine = self.database.engine
        self._coordinator = KafkaCoordinator(options.kafka_config())
        self._known_incidents: set[tuple[str, str]] | None = None

    def __enter__(self) -> Self:
        try:
            if not self._is_planned:
                self._options = with_found_schema(self._options, self._engine)
            options = self._options
            self._store = SqlStateStore(self._engine, schema=options.schema)
            self._ledger = Ledger(options.schema, options.tables_revision)
            self._pool = SlotPool(self._engine, options.pool, schema=options.schema, max_slots=options.max_slots)
            self._runs = Runs(self._engine, options.schema)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def words_of_quarantined(self, rows: int) -> str:
        """The end of a line of the log: how many rows were put aside, and nothing where none may be."""
        return f"; {rows} rows were put aside" if self._options.quarantines else ""

    @property
    def batch_id(self) -> str:
        """The batch's name."""
        return self._batch_id

    @property
    def options(self) -> SinkOptions:
        """The sink's settings, for its tasks: inside the context manager they name the schema of the library's tables."""
        return self._options

    def settle_left(self, *, have_run: bool = False) -> Sequence[StateRow]:
        """End the current run; settle what it left, including tasks that still run, and slots whose leases have ended.

        On return, no task of an earlier run can write, and the tasks of :attr:`run` can. A loss that settling finds is
        recorded and raised (`DecidedTransactionLost`, `OutcomeUnverifiable`), and one that tasks found, if they `have_run`;
        the next run continues. Returns the rows of all the sink's slots, as they are then.
        """
        logger.info("%s: settling what tasks have left", self.name)
        rows = self._settle()
        if have_run or self._has_claimed:
            self._raise_new_incidents()
        return rows

    def _close(self) -> None:
        self._coordinator.close()
        self._engine.dispose()

    def layout(self, schema: spark.StructType) -> Layout:
        """Check topic, table and every column, and register the messages' schemas; writes nothing else."""
        with connected(self._engine, self._options) as connection:
            _require_ids(self._options, self._coordinator)
            return _read_layout(connection, self._options, schema, self.database, self._coordinator)

    def targets(self, wanted: Sequence[Wanted], tag_column: str | None = None) -> tuple[Target, ...]:
        """As :func:`plan_stream` plans them."""
        with connected(self._engine, self._options) as connection:
            return _plan_targets(connection, wanted, tag_column, self.database, self._coordinator)

    def quarantine(self, targets: Sequence[Target]) -> Target | None:
        """The target of rows that the others do not take, if there is one. Refuses it if it could not take them."""
        with connected(self._engine, self._options) as connection:
            found = planned_quarantine(connection, self._options, self.database, self._coordinator, targets)
        require_different([*targets, *found])
        return found[0] if found else None

    def announce(self) -> None:
        """Write the batch's unit into the unit topic, if the sink has one. Call it when Kafka has all of the batch.

        If a newer batch of the sink is written and not announced, the unit bears its name and holds both. After an error, run
        the batch again: it is written, and then announced. Another batch of the sink that is at work, or written in part, is
        refused.
        """
        options, topic = self._options, self._options.topic
        if options.unit_topic is None or topic is None:
            return
        failpoints.hit("unit.batch")
        try:
            announce_batch(
                self._batch_id,
                topic,
                unit_topic=options.unit_topic,
                kafka=options.kafka_settings(),
                database=self._engine,
                schema=options.schema,
                timeout_s=options.timeout_s,
                written=lambda: self._written_to(topic),
            )
        except (CompletionPending, TransactionInDoubt) as error:
            error.next_step = RUN_AGAIN
            raise

    def _written_to(self, topic: str) -> Written:
        """The newest batch of the sink, and the newest decision of each slot. Both change once a batch decides anything.

        A driver that was paused may find tasks of the next batch, what they have written before it looks at their slots, or a
        complete batch that nobody has announced. It refuses a batch at work or written in part: the unit would show that part.
        """
        options = self._options
        other = batch_in_part(self._engine, options.sink, self._batch_id, schema=options.schema)
        if other is not None:
            raise ConfigurationError(
                f"{self.name} is written, but not announced: batch {other!r} of the same sink is written in part",
                next_step=f"run batch {other!r} until it is written, then this one again",
            )
        deadline = Deadline(_OTHERS_S)
        while held := self._pool.held_by(""):
            if deadline.expired:
                raise ConfigurationError(
                    f"{self.name} is written, but not announced: {held[0].owner} is at work in the same sink",
                    transactional_id=held[0].transactional_id,
                    next_step="with unit_topic, write one batch of a sink at a time; run this one again",
                )
            pause(_LOOKS_AGAIN_S)
        newest = newest_batch(self._engine, options.sink, topic, schema=options.schema)
        return Written(newest, {row.transactional_id: row.prepared for row in self._store.find(f"{self._pool.pool}#")})

    def _note_failed(self) -> None:
        """Note the failure for people who look at batches. May fail: nothing relies on it."""
        try:
            self._ledger.fail(self._engine, self._options.sink, self._batch_id)
        except DualWriteError as error:
            logger.warning("%s: could not record its failure in the ledger: %s", self.name, error)

    def _settle(self) -> Sequence[StateRow]:
        """Begin the next run; settle slots whose leases have ended, and slots that earlier runs have left.

        Tasks that still run, of an earlier driver or of a failed job, are fenced: by the claim of their slots, or, if they
        have none yet, by the end of their run. A prepared transaction holds a lock on the run until it is ended here. A task
        that is handing over holds the lock until it is done; then the part that it handed over is found here, too.
        """
        deadline = Deadline(self._options.timeout_s)
        while True:
            left = self._store.own_transaction(self._end_run)
            self.run = left.run
            rows = self._settle_slots(left, deadline)
            if left.has_ended:
                return rows
            if deadline.expired:
                raise Unavailable(f"{self.name}: a task of an earlier run is stuck while it hands its rows over")
            pause(_LOOKS_AGAIN_S)

    def _settle_slots(self, left: Left, deadline: Deadline) -> Sequence[StateRow]:
        rows, prepared = left.rows, left.prepared
        if left.leases:
            self._has_claimed = True
            context = OwnerContext(self._coordinator, self._store, unique_owner(), observer_if_loaded())
            settle_leases(context, self._pool, left.leases, deadline, name=self.name, prefix=self._lease_prefix)
            # A paused task may have prepared a transaction after its slot was settled.
            rows, prepared = self._store.find_with_participants(f"{self._pool.pool}#")
        end_participants(self._store, [one for one in prepared if is_stale(one)])
        return rows

    @property
    def _lease_prefix(self) -> str:
        return owner_prefix(self._run_name or self._batch_id)

    def _end_run(self, connection: Connection, *, prepared: bool = True) -> Left:
        """Begin the next run, and look for what the tasks of earlier ones have left, in one transaction.

        Until it ends, no task of an earlier run can lease a slot, or hand over what it has: what is left is then all there is.
        Without `prepared`, no task has left a transaction prepared in the database.
        """
        if self._known_incidents is None:
            self._note_incidents(connection)
        run = None if self._run_name is None else self._runs.replace(self._options.sink, self._run_name, connection)
        leases = self._pool.to_settle(self._lease_prefix, connection)
        found = self._store.find_with_participants(f"{self._pool.pool}#", connection) if prepared else ((), ())
        return Left(self._run_name is None or run is not None, run, leases, *found)

    @property
    def _ends_light(self) -> bool:
        """Whether :meth:`_end_run` checks what a ``light`` transaction leaves to it: as it replaces a run."""
        return self._run_name is not None

    def _note_completed(self, partition_id: int, decided_ago_s: float | None) -> None:
        """Note the completion for people who look at batches. May fail: nothing relies on it."""
        sink, batch_id = self._options.sink, self._batch_id
        try:
            self._ledger.complete(self._engine, sink, batch_id, partition_id, decided_ago_s=decided_ago_s)
        except DualWriteError as error:
            logger.warning("%s: could not record its completion in the ledger: %s", self.name, error)

    def _note_incidents(self, connection: Connection) -> None:
        """Note those that are recorded by now, in the caller's transaction: others than these are raised."""
        self._known_incidents = {_identity(incident) for incident in self._incidents(connection)}

    def _incidents(self, connection: Connection | None = None) -> Sequence[Incident]:
        try:
            return self._store.incidents(f"{self._pool.pool}#", connection=connection)
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, self._engine, self._options.schema) from error

    def _raise_new_incidents(self, connection: Connection | None = None) -> None:
        """Raise the first that was not noted, perhaps from the caller's transaction."""
        for incident in self._incidents(connection):
            if _identity(incident) not in (self._known_incidents or ()):
                kind = DecidedTransactionLost if incident.outcome is Outcome.LOST else OutcomeUnverifiable
                raise kind(
                    incident.detail,
                    transactional_id=incident.transactional_id,
                    state=incident.prepared_transaction_state,
                )


def with_found_schema(options: SinkOptions, database: Connection | Engine) -> SinkOptions:
    """The settings with the schema and version of the library's tables: a trigger of the user's may set another search_path."""
    found = check_schema(database, options.schema)
    return replace(options, schema=found.schema, tables_revision=found.revision)


def read_layout(options: SinkOptions, schema: spark.StructType) -> Layout:
    """Check topic, table and every column, and register the messages' schemas; writes nothing else."""
    with _servers(options) as (database, coordinator), connected(database.engine, options) as connection:
        return _read_layout(connection, options, schema, database, coordinator)


@dataclass(frozen=True)
class StreamPlan:
    """What the driver has planned for a micro-batch and its tasks. Pickles.

    Attributes:
        options: The settings, with the schema in which the library's tables are.
        targets: Where the rows go.
        run: The run of the stream whose tasks may write: that of its current micro-batch, whose end alone replaces it. None
            if the stream is not known.
        staging: Whether the tasks use staging tables (:func:`uses_staging`).
    """

    options: SinkOptions
    targets: tuple[Target, ...]
    run: Run | None
    staging: bool


def plan_stream(
    options: SinkOptions, wanted: Sequence[Wanted], tag_column: str | None, *, stream: str | None
) -> StreamPlan:
    """Check every target, for one micro-batch of the stream of that name: its topic, table and columns."""
    with _servers(options) as (database, coordinator), connected(database.engine, options) as connection:
        # All in one transaction: each of its own would cost two statements more, with each micro-batch.
        options = with_found_schema(options, connection)
        targets = _plan_targets(connection, wanted, tag_column, database, coordinator)
        staging = uses_staging(connection, database, options, targets, empty=None)
        run = (
            None if stream is None else Runs(database.engine, options.schema).present(options.sink, stream, connection)
        )
        return StreamPlan(options, targets, run, staging)


def uses_staging(
    connection: Connection,
    database: SinkDatabase,
    options: SinkOptions,
    targets: Sequence[Target],
    *,
    empty: Emptying | None,
) -> bool:
    """Whether the tasks of a batch decided as a whole use staging tables; refuses it if their rows could not be moved."""
    tables = [target for target in targets if target.in_table]

    def empties(target: Target) -> bool:
        return empty is not None and not target.is_quarantine

    def choose(wanted: str) -> bool:
        return all(database.choose_staging(connection, wanted, one.layout, empties=empties(one)) for one in tables)

    staging = choose(options.database_leg)
    if not staging and len(tables) > 1:
        choose("prepared")  # all go one way, and one of them may need staging tables
    for target in tables:
        layout = target.layout
        if layout.merge is not None and not staging and target.tag is not None:
            raise ConfigurationError(
                f"upserts into table {layout.table[1]!r}, one of several by a tag column, need staging tables",
                next_step=f'set databaseLeg to "staging"; the user needs CREATE on the schema {layout.table[0]!r}',
            )
        if layout.merge is not None or empties(target):
            database.require_replaceable(connection, layout, empty=empty, direct=False)
    return staging


def _plan_targets(
    connection: Connection,
    wanted: Sequence[Wanted],
    tag_column: str | None,
    database: SinkDatabase,
    coordinator: KafkaCoordinator,
) -> tuple[Target, ...]:
    _require_ids(wanted[0].options, coordinator)
    if tag_column is not None:
        tag_number(wanted[0].schema, tag_column)
    found = []
    for one in wanted:
        layout = _read_layout(connection, one.options, one.schema, database, coordinator, shared=tag_column is not None)
        found.append(Target.of(one.options, layout, one.tag))
    if tag_column is not None:
        require_all_used(wanted[0].schema, found, tag_column)
    found += planned_quarantine(connection, wanted[0].options, database, coordinator, found)
    require_different(found)
    return tuple(found)


def planned_quarantine(
    connection: Connection,
    options: SinkOptions,
    database: SinkDatabase,
    coordinator: KafkaCoordinator,
    targets: Sequence[Target],
) -> list[Target]:
    """The target of rows that the others do not take, if there is one. Refuses it if it could not take them."""
    target = quarantine_target(connection, options, database)
    if target is None:
        return []
    if target.topic is not None:
        _require_topics([target.topic], options, coordinator)
    require_checkable(database, targets)
    return [target]


def _require_ids(options: SinkOptions, coordinator: KafkaCoordinator) -> None:
    """Refuse a user who may not write under the ids of the sink's slots."""
    may_write = coordinator.may_write_as(f"{options.pool}#0.plan", Deadline(options.timeout_s))
    require_rights(options.pool, may_write=may_write)


def _require_topics(names: Sequence[str], options: SinkOptions, coordinator: KafkaCoordinator) -> str:
    """Refuse topics that are not there, or that this user may not write to. Returns the cluster's id."""
    cluster_id, found = coordinator.cluster_and_topics(names, Deadline(options.timeout_s))
    for name in names:
        if name not in found:
            raise ConfigurationError(f"there is no topic {name!r}", next_step="create it")
    require_rights(options.pool, topics={name: found[name].rights for name in names})
    return cluster_id


@contextmanager
def _servers(options: SinkOptions) -> Generator[tuple[SinkDatabase, KafkaCoordinator], None, None]:
    database = open_database(options)
    try:
        with closing(KafkaCoordinator(options.kafka_config())) as coordinator:
            yield database, coordinator
    finally:
        database.engine.dispose()


@contextmanager
def connected(engine: Engine, options: SinkOptions) -> Generator[Connection, None, None]:
    """A connection that only reads, in one transaction."""
    try:
        with engine.connect() as connection:
            yield connection
    except exc.SQLAlchemyError as error:
        raise map_database_error(error, engine, options.schema) from error


def _read_layout(
    connection: Connection,
    options: SinkOptions,
    schema: spark.StructType,
    database: SinkDatabase,
    coordinator: KafkaCoordinator,
    *,
    shared: bool = False,
) -> Layout:
    named = [name for name in (options.topic, options.unit_topic) if name is not None]
    cluster_id = _require_topics(named, options, coordinator)
    table = database.read_table(connection, options.table)
    planned = registered_layout(options, plan_layout(schema, options, table, given_schemas(options), shared=shared))
    return replace(planned, cluster_id=cluster_id)


def is_stale(participant: Participant) -> bool:
    """Whether its slot is settled, so that nobody else will end it."""
    return participant.incarnation <= participant.row.settled_incarnation


def _identity(incident: Incident) -> tuple[str, str]:
    return incident.transactional_id, incident.prepared_transaction_state


# Puts the reason of a failed job first: Spark buries it in a hundred lines of its own.

_OURS: Final = re.compile(r"^(?:[\w.]*: )*dualwrite\.errors\.(\w+): (.+)$", re.MULTILINE)
_OTHER_PYTHON: Final = (
    (
        re.compile(r"No module named '(dualwrite|sqlalchemy|psycopg|pymysql|pgpq|confluent_kafka|kafka)"),
        "Spark's workers run a Python in which dualwrite[spark] is not installed: no module named {}",
    ),
    (
        re.compile(r"PYTHON_VERSION_MISMATCH\](.*)"),
        "Spark's workers run another version of Python than the driver:{}",
    ),
)
# The last line of a traceback: it follows an indented one.
_RAISED: Final = re.compile(r"^  .*\n(\w\S*(?:: .*)?)$", re.MULTILINE)
_CALLING: Final = "An error occurred while calling"
_SET_PYTHON: Final = (
    "let PYSPARK_PYTHON (spark.pyspark.python) name the driver's Python, or one of the same version with the same packages, "
    "on every machine"
)

# Spark's variable for spark.sql.execution.pyspark.udf.hideTraceback.enabled, which Spark reads after our code has raised.
_HIDES_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"


# The exceptions of a failed job; the call and the version of Spark decide which of them.
JOB_ERRORS: Final = (PySparkException, Py4JJavaError)


class JobFailed(PySparkException):
    """A Spark job of this library failed, or was cancelled. ``__cause__`` is Spark's own exception.

    The first line is the reason; the second line says which partitions are committed.
    """


def reason_of(error: Exception) -> str:
    """The reason of a failed job, in one line: this library's error if there is one, otherwise what the task raised last."""
    text = str(error)
    for pattern, words in _OTHER_PYTHON:
        if found := pattern.search(text):
            return f"{words.format(found[1])} ({_SET_PYTHON})"
    if ours := _OURS.findall(text):
        return "{}: {}".format(*ours[-1])
    if raised := _RAISED.findall(text):
        return str(raised[-1])
    lines = (line.removeprefix(": ") for line in text.splitlines() if line and not line.startswith(_CALLING))
    return next(lines, type(error).__name__)


@contextmanager
def without_cause() -> Generator[None, None, None]:
    """Leave an error's causes to the log. A stream's own exception shows them all as text, and before the error itself."""
    try:
        yield
    except (JobFailed, DualWriteError) as error:
        logger.exception("traceback of the error that the stream shows")
        raise error from None


@contextmanager
def shown_first() -> Generator[None, None, None]:
    """In a Spark process that ends with the block's error, let Spark show the error without a traceback before it.

    The traceback goes to the log. Errors that are not this library's stay as they are. If Spark reuses the process, its garbage
    collections take no time (:func:`spare_collections`).
    """
    spare_collections()
    try:
        yield
    except DualWriteError:
        logger.exception("the traceback of the error that Spark shows")
        # Harmless: a process that fails with an error runs nothing more, even if Spark reuses others.
        os.environ[_HIDES_TRACEBACK] = "1"
        raise


# The Spark jobs of one batch: cancelled, and awaited until none of their tasks runs any more.
#
# Spark reports a failed job to its caller while other tasks of the job still run. Until these end, they hold the locks of the
# rows that they have copied.

# Where the classes of Spark Connect stand, which has no driver in this process.
CONNECT: Final = "pyspark.sql.connect"


class SparkJobs:
    """Jobs that this process has started, recognised by a tag of their own."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._tag = f"dualwrite-{secrets.token_hex(8)}"

    @contextmanager
    def started(self) -> Generator[None, None, None]:
        """Count the jobs that this thread starts in the block as ours."""
        self._context.addJobTag(self._tag)
        try:
            yield
        finally:
            self._context.removeJobTag(self._tag)

    def end(self, name: str, deadline: Deadline) -> None:
        """Cancel running jobs, and wait until none of their tasks runs. Raises nothing: a failure of Spark must not stop us."""
        try:
            self._context.cancelJobsWithTag(self._tag)
            while running := self._running():
                if deadline.expired:
                    logger.warning("%s: %d tasks still run, and may hold locks", name, running)
                    return
                pause(_LOOKS_AGAIN_S)
        except Py4JError as error:  # usually, because Spark itself has ended
            logger.warning(
                "%s: cannot find out from Spark whether its tasks have ended: %s", name, type(error).__name__
            )

    def _running(self) -> int:
        # Not PySpark's own tracker: it knows no tags, and makes a list for each stage.
        tracker = self._context._jsc.sc().statusTracker()  # noqa: SLF001 - as PySpark's own tracker does
        running = 0
        for job in tracker.getJobIdsForTag(self._tag):
            found = tracker.getJobInfo(job)
            for stage in found.get().stageIds() if found.isDefined() else ():
                shown = tracker.getStageInfo(stage)
                running += shown.get().numActiveTasks() if shown.isDefined() else 0
        return running
