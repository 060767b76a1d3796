"""OpenLineage: the topics and the tables of a writer, or of a batch, as the outputs of one run.

`LineageRun` sends the events of one run, whoever runs it. `Lineage` is the observer that makes one of each writer, from its
opening to its closing. The names of data sets are those of OpenLineage's naming specification, so that they meet those of other
tools.

Events are sent by a thread of their own: no dual write waits for them, and none fails with them.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from sqlalchemy import Engine, make_url

from dualwrite.errors import (
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    OutcomeUnverifiable,
    extra_missing,
)
from dualwrite.interfaces import NO_OBSERVER, Observer, OutboxNews, SettleObserver, WriteObserver
from dualwrite.protocol.lives import Phase, WriteState

try:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import (
        OutputDatasetFacet,
        RunFacet,
        error_message_run,
        job_type_job,
        output_statistics_output_dataset,
        parent_run,
        processing_engine_run,
    )
except ImportError as error:
    raise extra_missing("openlineage", error) from error

if TYPE_CHECKING:
    from types import TracebackType

    from sqlalchemy import URL
    from typing_extensions import Self

    from dualwrite.interfaces import Headers
    from dualwrite.protocol.process import Health

logger = logging.getLogger(__name__)

_VERSION: Final = version("dualwrite")
_PRODUCER: Final = f"dualwrite/{_VERSION}"
_ROWS_COMMITTED: Final = frozenset({WriteState.DECIDED, WriteState.COMPLETED, WriteState.WAITING, WriteState.LOST})
_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306}
_LAST_EVENT_S: Final = 10.0


def topic_dataset(kafka: Mapping[str, object] | str, topic: str, *, messages: int | None = None) -> OutputDataset:
    """A topic as a data set: ``kafka://host:port`` of the first bootstrap server, and the topic's name.

    Args:
        kafka: A writer's configuration, or its bootstrap servers.
        topic: The topic.
        messages: How many messages the run has written to it so far, if that is known.
    """
    servers = kafka if isinstance(kafka, str) else str(kafka["bootstrap.servers"])
    first = servers.split(",")[0].strip().rpartition("://")[2]
    return OutputDataset(f"kafka://{first}", topic, outputFacets=_statistics(messages))


def table_dataset(database: Engine | URL | str, table: str, *, rows: int | None = None) -> OutputDataset:
    """A table as a data set: ``postgres://host:port`` and ``database.schema.table``; on MariaDB and MySQL ``database.table``.

    Args:
        database: The engine, or its URL. No password is taken from it.
        table: The table's name, with its schema if it is not ``public``.
        rows: How many rows the run has written to it so far, if that is known.
    """
    url = database.url if isinstance(database, Engine) else make_url(database)
    kind, facets = url.get_backend_name(), _statistics(rows)
    if kind not in _PORTS:
        return OutputDataset(f"{kind}://{url.database or ''}", table, outputFacets=facets)
    place = f"{url.host or url.query.get('host', 'localhost')}:{url.port or url.query.get('port') or _PORTS[kind]}"
    if kind == "postgresql":
        named = table if "." in table else f"public.{table}"
        return OutputDataset(f"postgres://{place}", f"{url.database}.{named}", outputFacets=facets)
    return OutputDataset(f"mysql://{place}", table if "." in table else f"{url.database}.{table}", outputFacets=facets)


def _statistics(count: int | None) -> dict[str, OutputDatasetFacet]:
    if count is None:
        return {}
    kind = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet
    return {"outputStatistics": kind(rowCount=count, producer=_PRODUCER)}


class LineageRun:
    """One run of one job: its events carry the same run id, whatever writes the topics and the tables.

    Args:
        client: OpenLineage's client.
        namespace: The namespace of the job.
        job: The job's name: that of a writer, or of a sink.
        streaming: Whether the job runs until it is stopped, as a writer does, or ends with its data, as a batch does.
        parent: The namespace, the job and the run id of the run that this one is part of; for instance of a Spark application.
        run_id: The id of a run that another process has begun; a new one if not given.
    """

    def __init__(
        self,
        client: OpenLineageClient,
        namespace: str,
        job: str,
        *,
        streaming: bool,
        parent: tuple[str, str, str] | None = None,
        run_id: str | None = None,
    ) -> None:
        self.run_id = run_id or str(uuid.uuid4())
        self._client = client
        kind = job_type_job.JobTypeJobFacet(
            "STREAMING" if streaming else "BATCH", "DUALWRITE", "JOB", producer=_PRODUCER
        )
        self._job = Job(namespace, job, {"jobType": kind})
        engine = processing_engine_run.ProcessingEngineRunFacet(
            _VERSION, "dualwrite", openlineageAdapterVersion=_VERSION, producer=_PRODUCER
        )
        self._facets: dict[str, RunFacet] = {"processing_engine": engine}
        if parent is not None:
            of, name, run_id = parent
            self._facets["parent"] = parent_run.ParentRunFacet(
                parent_run.Run(run_id), parent_run.Job(of, name), producer=_PRODUCER
            )

    def emit(
        self,
        state: RunState,
        outputs: Iterable[OutputDataset] = (),
        inputs: Iterable[InputDataset] = (),
        *,
        error: BaseException | None = None,
        at: str | None = None,
    ) -> None:
        """Send one event. An event that cannot be sent is logged, and raises nothing.

        Args:
            state: ``START``, ``RUNNING``, ``COMPLETE``, ``FAIL`` or ``ABORT``.
            outputs: The topics and tables: those of :func:`topic_dataset` and :func:`table_dataset`.
            inputs: What the run has read, if that is known.
            error: What a run that has failed has failed with. Only its class is shown: a driver's text shows values of rows.
            at: The time, as ISO 8601; now if not given.
        """
        facets = dict(self._facets)
        if error is not None:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                type(error).__name__, "python", producer=_PRODUCER
            )
        try:
            self._client.emit(
                RunEvent(
                    eventTime=at or _now(),
                    producer=_PRODUCER,
                    run=Run(self.run_id, facets),
                    job=self._job,
                    inputs=list(inputs),
                    outputs=list(outputs),
                    eventType=state,
                )
            )
        except Exception as failed:  # noqa: BLE001 - a transport of the user's choice
            logger.warning("%s: the lineage event %s was not sent: %s", self._job.name, state.value, failed)


def emit_alone(
    namespace: str,
    job: str,
    state: str,
    outputs: Iterable[OutputDataset],
    inputs: Iterable[InputDataset],
    *,
    run_id: str | None,
    streaming: bool,
    error: BaseException | None = None,
    at: str | None = None,
) -> None:
    """Send one event of a run by a client of its own, which its environment variables configure; see :meth:`LineageRun.emit`.

    The client is closed, so that a transport that sends later has sent it when this returns: the process may end now.
    """
    try:
        client = OpenLineageClient()
        try:
            run = LineageRun(client, namespace, job, streaming=streaming, run_id=run_id)
            run.emit(RunState[state], outputs, inputs, error=error, at=at)
        finally:
            client.close(_LAST_EVENT_S)
    except Exception as failed:  # noqa: BLE001 - a transport of the user's choice
        logger.warning("%s: the lineage event %s was not sent: %s", job, state, failed)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


class Lineage(Observer):
    """Reports each open writer as a run: ``DualWriter(..., telemetry=Lineage(...))``. The writers of a process may share it.

    A run starts when the writer opens, reports new topics and counts every ``every_s`` seconds, and completes when the writer
    is closed; it fails if a loss was found. A process that is killed leaves its run without an end; the next one begins
    another. Dual writes that were aborted do not count. Messages that wait in the database name their topic; they are not
    counted.

    Args:
        kafka: The writers' Kafka configuration, for the names of topics.
        database: Their engine, or its URL, for the names of tables.
        tables: The tables that the writers write to, with their schemas if they are not ``public``. They are yours to name: the
            library does not read your statements.
        namespace: The namespace of the jobs.
        job: The name of the job; that of each writer if not given. Give one to the members of a fleet.
        client: OpenLineage's client; by default one that its own environment variables configure, such as ``OPENLINEAGE_URL``.
        every_s: The time between two events of a run, in seconds.
        also: Another observer that hears everything, too: a `Telemetry`.

    Raises:
        ConfigurationError: ``kafka`` has no bootstrap servers, or ``every_s`` is not positive.
    """

    def __init__(
        self,
        *,
        kafka: Mapping[str, object],
        database: Engine | URL | str,
        tables: Sequence[str] = (),
        namespace: str = "dualwrite",
        job: str | None = None,
        client: OpenLineageClient | None = None,
        every_s: float = 60.0,
        also: Observer = NO_OBSERVER,
    ) -> None:
        if not kafka.get("bootstrap.servers"):
            raise ConfigurationError("kafka has no bootstrap.servers", next_step="give the writer's configuration")
        if every_s <= 0:
            raise ConfigurationError(
                "every_s must be positive", next_step="it is the time between two events, in seconds"
            )
        self._kafka = kafka
        self._tables = [table_dataset(database, table) for table in tables]
        self._namespace = namespace
        self._job = job
        self._client = client or OpenLineageClient()
        self._every_s = every_s
        self._also = also
        self._runs: dict[str, _WriterRun] = {}

    def writing(self, writer: str, database: str) -> WriteObserver:
        return _Counting(self._also.writing(writer, database), self._runs.get(writer))

    def grouped(self, writer: str, units: int) -> None:
        self._also.grouped(writer, units)

    def outbox(self, writer: str, news: OutboxNews, count: int) -> None:
        self._also.outbox(writer, news, count)

    def settling(self, transactional_ids: Sequence[str]) -> SettleObserver:
        return self._also.settling(transactional_ids)

    def recovering(self) -> SettleObserver:
        return self._also.recovering()

    def lost(self, loss: DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack) -> None:
        self._also.lost(loss)
        for name, run in list(self._runs.items()):
            if (loss.transactional_id or "").partition("#")[0] == name:
                run.error = loss

    def opened(self, health: Callable[[], Health], longest_open_s: Callable[[], float | None]) -> Callable[[], None]:
        unobserve = self._also.opened(health, longest_open_s)
        writer = health().writer
        made = LineageRun(self._client, self._namespace, self._job or writer, streaming=True)
        run = self._runs[writer] = _WriterRun(made, self._outputs, self._every_s)
        run.start()

        def closed() -> None:
            unobserve()
            self._runs.pop(writer, None)
            run.end()

        return closed

    def _outputs(self, counts: Mapping[str, int]) -> list[OutputDataset]:
        topics = [topic_dataset(self._kafka, topic, messages=count or None) for topic, count in sorted(counts.items())]
        return [*topics, *self._tables]


class _WriterRun:
    """The run of one open writer, and the thread that sends its events."""

    def __init__(
        self, run: LineageRun, outputs: Callable[[Mapping[str, int]], list[OutputDataset]], every_s: float
    ) -> None:
        self.error: BaseException | None = None
        self._run = run
        self._outputs = outputs
        self._every_s = every_s
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send, name="dualwrite lineage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._counts.update(counts)

    def end(self) -> None:
        """Send the last event, and wait for it a while. May be called more than once."""
        self._ended.set()
        self._thread.join(_LAST_EVENT_S)

    def _send(self) -> None:
        shown = self._now()
        self._run.emit(RunState.START, self._outputs(shown))
        while not self._ended.wait(self._every_s):
            if (found := self._now()) != shown:
                shown = found
                self._run.emit(RunState.RUNNING, self._outputs(shown))
        last = RunState.COMPLETE if self.error is None else RunState.FAIL
        self._run.emit(last, self._outputs(self._now()), error=self.error)

    def _now(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)


class _Counting(WriteObserver):
    """Counts the messages of one dual write, if its rows are committed, and passes everything on."""

    def __init__(self, also: WriteObserver, run: _WriterRun | None) -> None:
        self._also = also
        self._run = run
        self._counts: Counter[str] = Counter()
        self._state: WriteState | None = None

    def lane(self, transactional_id: str) -> None:
        self._also.lane(transactional_id)

    def enter(self, phase: Phase) -> None:
        self._also.enter(phase)

    def moved(self, state: WriteState) -> None:
        self._state = state
        self._also.moved(state)

    def producing(self, topic: str, headers: Headers) -> Headers:
        self._counts[topic] += 0  # it may wait, and be sent later
        return self._also.producing(topic, headers)

    def sent(self, topic: str, count: int) -> None:
        self._counts[topic] += count
        self._also.sent(topic, count)

    def __enter__(self) -> Self:
        self._also.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._also.__exit__(kind, error, traceback)
        if self._run is not None and self._state in _ROWS_COMMITTED:
            self._run.add(self._counts)
            if isinstance(error, (DecidedTransactionLost, OutcomeUnverifiable)):
                self._run.error = error
