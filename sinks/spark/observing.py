"""What a batch was made from, according to Spark, and who is told: a listener of a stream's micro-batches, and OpenLineage.

A micro-batch is made from a range of offsets of each of the stream's sources, a batch from files. The ledger keeps that, so
that people can trace an output back to its input. Nothing relies on it: what Spark does not show is left out.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JError
from pyarrow import ArrowException, fs
from pyspark.errors import PySparkException
from pyspark.sql.streaming.listener import StreamingQueryListener
from sqlalchemy import Engine, create_engine

from dualwrite.errors import ConfigurationError, DualWriteError
from dualwrite.sinks.spark.digests import running_query
from dualwrite.stores.sql.ledger import Batch, read_batch

if TYPE_CHECKING:
    from openlineage.client.event_v2 import InputDataset, OutputDataset
    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from sqlalchemy.engine import URL

    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.targets import Target

logger = logging.getLogger(__name__)

_MOST_FILES: Final = 100
"""A batch may have a million files, and its row in the ledger should stay a row."""

_UNKNOWN: Final = (Py4JError, PySparkException, TypeError, AttributeError)
"""What Spark raises if it cannot show what is asked for: a catalog that lists no files, a version without that method."""


def sources_of(*frames: DataFrame) -> str | None:
    """The files that DataFrames are read from, as JSON: for the option ``sources`` of ``format("dualwrite")``.

    May be called at any time on the driver. Spark must list the files for it, and runs no job.

    Args:
        frames: The DataFrames of one batch, before it is written: usually one.

    Returns:
        A hundred of the files' names at most, in order, and how many there are. None if Spark knows none, as for Kafka or JDBC.
    """
    try:
        files = sorted({file for df in frames for file in df.inputFiles()})
    except _UNKNOWN as error:
        logger.info("the files that the batch is made of are not known: %s", error)
        return None
    if not files:
        return None
    return _text([{"files": files[:_MOST_FILES], "file_count": len(files)}])


def sources_of_stream(session: SparkSession, query_id: str, number: int) -> str | None:
    """The offsets of which a micro-batch is made, as JSON, from the running query. Call it while ``foreachBatch`` runs."""
    try:
        running = running_query(session, query_id)
        log = running.offsetLog()
        ends = _logged(log.get(number))
        starts = _logged(log.get(number - 1)) or [None] * len(ends)
        names = [_items(running.sources())[place].toString() for place in range(len(ends))]
        return _ranges(starts, ends, names)
    except (*_UNKNOWN, ValueError, IndexError) as error:
        logger.info("the offsets that micro-batch %d is made of are not known: %s", number, error)
        return None


def _items(sequence: JavaObject) -> Sequence[JavaObject]:
    return [sequence.apply(number) for number in range(sequence.size())]


def _logged(found: JavaObject) -> list[object]:
    """The offsets of an entry of Spark's log of offsets; none if the entry is missing."""
    if not found.isDefined():
        return []
    return [json.loads(one.get().json()) if one.isDefined() else None for one in _items(found.get().offsets())]


def sources_of_checkpoint(checkpoint: str | None, number: int) -> str | None:
    """As :func:`sources_of_stream`, from the stream's checkpoint: the process that decides sees nothing of the query.

    Spark logs the offsets before it runs the micro-batch. None if this process cannot read the checkpoint: local directories
    it can, and those that Arrow reads by their address (``s3://``, ``gs://``, ``hdfs://``, with Arrow's own credentials).
    """
    if checkpoint is None:
        return None
    try:
        ends = _parsed(_read(checkpoint, number))
        starts = _parsed(_read(checkpoint, number - 1)) if number else [None] * len(ends)
        return _ranges(starts, ends, None)
    except (OSError, ArrowException, ValueError) as error:
        logger.info("the offsets that micro-batch %d is made of are not known: %s", number, error)
        return None


def _read(checkpoint: str, number: int) -> str:
    name = f"offsets/{number}"
    address = urlsplit(checkpoint)
    if address.scheme in {"", "file"}:
        path = Path(checkpoint if not address.scheme else unquote(address.path))
        return (path / name).read_text(encoding="utf-8")
    place, directory = fs.FileSystem.from_uri(checkpoint.replace("s3a://", "s3://", 1))
    with place.open_input_stream(f"{directory.rstrip('/')}/{name}") as stream:
        return str(stream.read(), "utf-8")


def _parsed(text: str) -> list[object]:
    """The offsets in a file of Spark's log: a version, a line of its own, and one line for each source, ``-`` without one."""
    version, _, *offsets = text.split("\n")
    if version != "v1":
        raise ValueError(f"Spark's log of offsets has the version {version!r}")
    return [None if one == "-" else json.loads(one) for one in offsets]


def _ranges(starts: Iterable[object], ends: Iterable[object], names: Sequence[str] | None) -> str:
    found = [{"start": start, "end": end} for start, end in zip(starts, ends, strict=True)]
    if names is not None:
        found = [{"source": name, **one} for name, one in zip(names, found, strict=True)]
    return _text(found)


def _text(sources: Sequence[Mapping[str, object]]) -> str:
    return json.dumps(sources, separators=(",", ":"), ensure_ascii=False)


# Spark's progress of a query does not say how much a Python data source has written: its numOutputRows stays -1.


@dataclass(frozen=True)
class StreamProgress:
    """What one micro-batch of a stream has written.

    Attributes:
        query_id: The query's id, which its checkpoint keeps.
        query_name: The query's name; None if it has none.
        number: Of the micro-batch.
        duration_ms: How long Spark took for it.
        sinks: What the ledger says, sink by sink: rows, messages, bytes, sources and times. Usually one.
    """

    query_id: str
    query_name: str | None
    number: int
    duration_ms: int
    sinks: Sequence[Batch]

    @property
    def rows(self) -> int:
        """Rows written, in all sinks."""
        return sum(one.row_count for one in self.sinks)

    @property
    def bytes(self) -> int:
        """Bytes written, in all sinks; see :attr:`Batch.byte_count`."""
        return sum(one.byte_count or 0 for one in self.sinks)


class DualWriteListener(StreamingQueryListener):
    """Reports how many rows and bytes each micro-batch has written: ``spark.streams.addListener(DualWriteListener(url))``.

    It reads the ledger at each progress of any query, in the session's driver or in a client of Spark Connect. Queries that
    write nothing by this library are left out. By default it logs a line. A database that does not answer is logged, too; no
    error reaches the query.

    Args:
        url: SQLAlchemy URL of the database with the library's tables. Its role needs to read the view ``dualwrite_batch``.
        report: Called for each micro-batch that has written, in Spark's thread for listeners.
        schema: The database schema of the library's own tables.
    """

    def __init__(
        self,
        url: str | URL,
        report: Callable[[StreamProgress], None] | None = None,
        *,
        schema: str | None = None,
    ) -> None:
        self._engine: Engine = create_engine(url, pool_pre_ping=True)
        self._report = _log if report is None else report
        self._schema = schema

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Report what the micro-batch has written."""
        progress = event.progress
        try:
            sinks = read_batch(self._engine, f"{progress.id}/{progress.batchId}", schema=self._schema)
        except DualWriteError as error:
            logger.warning(
                "query %s micro-batch %d: what it has written is not known: %s", progress.id, progress.batchId, error
            )
            return
        if sinks:
            number, duration_ms = progress.batchId, progress.batchDuration
            self._report(StreamProgress(str(progress.id), progress.name, number, duration_ms, sinks))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing: other queries may still run."""


def _log(progress: StreamProgress) -> None:
    logger.info(
        "query %s micro-batch %d: %d rows, %d bytes written in %.3f s",
        progress.query_name or progress.query_id,
        progress.number,
        progress.rows,
        progress.bytes,
        progress.duration_ms / 1000,
    )


# OpenLineage: each batch as a run of its sink's job, with its tables and topics, and with what it was read from.
#
# Two processes may report one run: Spark plans a batch of the Data Source in one, and ends it in another, which gets its id. An
# event that cannot be sent is logged. It fails no batch, and delays it for some seconds at most.

_LONGEST_S: Final = 10.0
# As Spark names its sources of files, and Delta's: FileStreamSource[file:/data], DeltaSource[s3a://bucket/table].
_OF_FILES: Final = re.compile(r"^\w+\[(\w+:/.*)\]$")
_PARTITION: Final = re.compile(r"/[^/=]+=.*")


class BatchLineage:
    """Reports one run of one batch, if the sink's settings have a ``lineage_namespace``; otherwise it does nothing.

    Args:
        options: The sink's settings.
        streaming: Whether the batch is a micro-batch of a stream.
        run_id: The id of a run that another process has begun.

    Raises:
        ConfigurationError: OpenLineage's client is not installed.
    """

    def __init__(self, options: SinkOptions, *, streaming: bool, run_id: str | None = None) -> None:
        self._options = options
        self._is_begun = run_id is not None
        self._targets: Sequence[Target] = ()
        self._inputs: list[InputDataset] = []
        self._streaming = streaming
        self.run_id: str | None = None
        """The run's id, for the process that ends it."""
        if options.lineage_namespace is not None:
            # Not imported: that takes longer than to plan a micro-batch, and the process that plans it reports nothing.
            # `openlineage` alone has no code: any directory of that name would be taken for it.
            if find_spec("openlineage") is None or find_spec("openlineage.client") is None:
                raise ConfigurationError(
                    "lineage_namespace needs OpenLineage's client, which is not installed on the driver",
                    next_step="pip install 'dualwrite[openlineage]'",
                )
            self.run_id = run_id or str(uuid.uuid4())

    def start(self, targets: Sequence[Target], sources: str | None, at: datetime | None = None) -> None:
        """Report that the run has begun, perhaps earlier. `sources` are as the ledger keeps them."""
        self._targets = targets
        if self.run_id is None:
            return
        self._inputs = list(inputs_of(sources, self._options.lineage_kafka))
        if not self._is_begun:
            self._emit("START", at=None if at is None else at.isoformat())
        self._is_begun = True

    def complete(self, rows: Mapping[int, int]) -> None:
        """Report the end, and how many rows of each target this run has written, by the target's number."""
        if self.run_id is not None:
            self._emit("COMPLETE", rows)

    def fail(self, error: BaseException | None) -> None:
        """Report a failure of a run that has begun. The error is None if Spark does not tell it to this process."""
        if self.run_id is not None and self._is_begun:
            self._emit("FAIL", error=error)

    def _emit(
        self,
        state: str,
        rows: Mapping[int, int] | None = None,
        *,
        error: BaseException | None = None,
        at: str | None = None,
    ) -> None:
        from dualwrite.telemetry.lineage import emit_alone  # noqa: PLC0415 - of an extra

        options = self._options
        assert options.lineage_namespace is not None
        send = partial(
            emit_alone,
            options.lineage_namespace,
            options.sink,
            state,
            list(self._outputs(rows)),
            self._inputs,
            run_id=self.run_id,
            streaming=self._streaming,
            error=error,
            at=at,
        )
        thread = threading.Thread(target=send, name="dualwrite lineage", daemon=True)
        thread.start()
        thread.join(_LONGEST_S)

    def _outputs(self, rows: Mapping[int, int] | None) -> Iterator[OutputDataset]:
        from dualwrite.telemetry.lineage import table_dataset, topic_dataset  # noqa: PLC0415 - of an extra

        database, kafka = self._options.database_url(), self._options.kafka_settings()
        messages: Counter[str] = Counter()
        for number, target in enumerate(self._targets):
            count = 0 if rows is None else rows.get(number, 0)
            if target.topic is not None:
                messages[target.topic] += count
            if target.in_table:
                yield table_dataset(database, ".".join(target.layout.table), rows=None if rows is None else count)
        for topic, count in messages.items():
            yield topic_dataset(kafka, topic, messages=None if rows is None else count)


@contextmanager
def reported(options: SinkOptions, *, streaming: bool) -> Generator[BatchLineage, None, None]:
    """The lineage of a batch that one process begins and ends. An error that leaves the block fails the run."""
    lineage = BatchLineage(options, streaming=streaming)
    try:
        yield lineage
    except BaseException as error:
        lineage.fail(error)
        raise


def inputs_of(sources: str | None, kafka: str | None) -> Iterator[InputDataset]:
    """The data sets that a batch was read from, of what the ledger keeps of it: directories of files, tables of files, topics.

    `kafka` names the cluster of the topics, which Spark does not tell: without it, topics are left out.
    """
    from openlineage.client.event_v2 import InputDataset  # noqa: PLC0415 - of an extra

    from dualwrite.telemetry.lineage import topic_dataset  # noqa: PLC0415 - as above

    places: dict[tuple[str, str], None] = {}
    for one in _entries(sources):
        if found := _OF_FILES.match(str(one.get("source", ""))):
            places[_place(found[1])] = None
        files, end = one.get("files"), one.get("end")
        for file in files if isinstance(files, list) else ():
            places[_place(_PARTITION.sub("", posixpath.dirname(str(file))))] = None
        if kafka is not None and isinstance(end, dict):
            for topic, offsets in end.items():
                if isinstance(offsets, dict):
                    named = topic_dataset(kafka, topic)
                    places[named.namespace, named.name] = None
    for namespace, name in places:
        yield InputDataset(namespace, name)


def _entries(sources: str | None) -> list[Mapping[str, object]]:
    """The sources one by one; none for a text of the user's own."""
    try:
        found = json.loads(sources or "[]")
    except ValueError:
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _place(address: str) -> tuple[str, str]:
    """A directory's name in OpenLineage's naming specification."""
    parts = urlsplit(address)
    path = unquote(parts.path).rstrip("/")
    if parts.scheme in {"", "file"}:
        return "file", path
    scheme = "s3" if parts.scheme in {"s3a", "s3n"} else parts.scheme
    return f"{scheme}://{parts.netloc}", path if scheme == "hdfs" else path.lstrip("/")
