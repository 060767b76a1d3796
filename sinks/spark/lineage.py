"""OpenLineage: each batch as a run of its sink's job, with its tables and topics, and with what it was read from.

Two processes may report one run: Spark plans a batch of the Data Source in one, and ends it in another, which gets its id. An
event that cannot be sent is logged. It fails no batch, and delays it for some seconds at most.
"""

from __future__ import annotations

import json
import posixpath
import re
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from openlineage.client.event_v2 import InputDataset, OutputDataset

    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.targets import Target
    from dualwrite.telemetry.lineage import LineageRun

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
        self._run: LineageRun | None = None
        if options.lineage_namespace is not None:
            try:
                from openlineage.client import OpenLineageClient  # noqa: PLC0415 - of an extra

                from dualwrite.telemetry.lineage import LineageRun  # noqa: PLC0415 - as above
            except ImportError as error:
                raise ConfigurationError(
                    "lineage_namespace needs OpenLineage's client, which is not installed on the driver",
                    next_step="pip install 'dualwrite[openlineage]'",
                ) from error
            self._run = LineageRun(
                OpenLineageClient(), options.lineage_namespace, options.sink, streaming=streaming, run_id=run_id
            )

    @property
    def run_id(self) -> str | None:
        """The run's id, for the process that ends it."""
        return None if self._run is None else self._run.run_id

    def start(self, targets: Sequence[Target], sources: str | None, at: datetime | None = None) -> None:
        """Report that the run has begun, perhaps earlier. `sources` are as the ledger keeps them."""
        self._targets = targets
        if self._run is None:
            return
        self._inputs = list(inputs_of(sources, self._options.lineage_kafka))
        if not self._is_begun:
            self._emit("START", at=None if at is None else at.isoformat())
        self._is_begun = True

    def complete(self, rows: Mapping[int, int]) -> None:
        """Report the end, and how many rows of each target this run has written, by the target's number."""
        if self._run is not None:
            self._emit("COMPLETE", rows)

    def fail(self, error: BaseException | None) -> None:
        """Report a failure of a run that has begun. The error is None if Spark does not tell it to this process."""
        if self._run is not None and self._is_begun:
            self._emit("FAIL", error=error)

    def _emit(
        self,
        state: str,
        rows: Mapping[int, int] | None = None,
        *,
        error: BaseException | None = None,
        at: str | None = None,
    ) -> None:
        from openlineage.client.event_v2 import RunState  # noqa: PLC0415 - of an extra

        assert self._run is not None
        send = partial(self._run.emit, RunState[state], self._outputs(rows), self._inputs, error=error, at=at)
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
