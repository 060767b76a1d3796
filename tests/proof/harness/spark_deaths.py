"""Batches in every way that the sink knows, whose Python workers, deciding processes and drivers die: each death is noted.

A process notes where it dies before it kills itself, so that none is counted that did not happen. A driver that dies is a
Python process of its own on the JVM of the session that goes on: its tasks work on, as those of a driver that is cut off.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

from py4j.java_gateway import java_import
from pyspark import SparkContext, TaskContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession

from dualwrite import failpoints
from dualwrite.sinks.spark import (
    DualWriteDataSource,
    foreach_batch,
    foreach_many,
    per_partition,
    write_batch,
    write_many,
)
from dualwrite.sinks.spark.databases import postgresql
from dualwrite.sinks.spark.options import OPTION_NAMES
from dualwrite.sinks.spark.partition_task import PartitionTask
from dualwrite.sinks.spark.source import DataSourceArrowWriter, DataSourceStreamArrowWriter
from dualwrite.testing.checker import read_committed
from harness.messages import protobuf_file
from harness.spark import SparkCase
from harness.spark_source import nothing_is_left, options_of

MOMENT = "any moment"
LONGEST_S = 1.5
"""Until a process that is to die at any moment."""
ROWS, PARTITIONS = 24, 4
# Instead of 30 s for keys that an attempt holds which has died.
WAITS = "2s"


@contextmanager
def mortal(directory: str, point: str) -> Iterator[None]:
    """Let this process die at the point, or at any moment of the block; an empty point is none."""

    def die(name: str) -> None:
        if name == point:
            (Path(directory) / f"{name}-{secrets.token_hex(6)}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if point == MOMENT:
        timer = threading.Timer(random.uniform(0, LONGEST_S), die, [MOMENT])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
    elif point:
        with failpoints.watched(die):
            yield
    else:
        yield


@dataclass(frozen=True)
class Deaths:
    """Who dies in one run of a batch, and where.

    Attributes:
        directory: For the notes.
        tasks: By partition, where its first attempts die.
        commit: Where the process dies that decides.
        abort: Where it dies as it gives up.
    """

    directory: str
    tasks: Mapping[int, Sequence[str]] = field(default_factory=dict)
    commit: str = ""
    abort: str = ""

    def of_task(self) -> str:
        context = TaskContext.get()
        points = self.tasks.get(context.partitionId(), ())
        return points[context.attemptNumber()] if context.attemptNumber() < len(points) else ""


@dataclass(frozen=True)
class MortalTask(PartitionTask):
    """A task of a batch that is written partition by partition."""

    deaths: Deaths = Deaths("")

    def run_arrow(self, batches):
        with mortal(self.deaths.directory, self.deaths.of_task()):
            yield from super().run_arrow(batches)


class MortalSource(DualWriteDataSource):
    """``format("mortal")``: the option ``deaths`` is a :class:`Deaths` as JSON."""

    def __init__(self, options):
        given = json.loads(options.pop("deaths"))
        self.deaths = Deaths(**{**given, "tasks": {int(key): points for key, points in given["tasks"].items()}})
        super().__init__(options)

    @classmethod
    def name(cls):
        return "mortal"

    def writer(self, schema, overwrite):
        return MortalWriter(super().writer(schema, overwrite), self.deaths)

    def streamWriter(self, schema, overwrite):  # noqa: N802 - Spark's name
        return MortalStreamWriter(super().streamWriter(schema, overwrite), self.deaths)


@dataclass
class _Mortal:
    inner: object
    deaths: Deaths

    def write(self, iterator):
        died_at = mortal(self.deaths.directory, self.deaths.of_task())
        with died_at, mock.patch.object(postgresql, "_LONGEST_WAIT", WAITS):
            return self.inner.write(iterator)

    def commit(self, *arguments):
        with mortal(self.deaths.directory, self.deaths.commit):
            self.inner.commit(*arguments)

    def abort(self, *arguments):
        with mortal(self.deaths.directory, self.deaths.abort):
            self.inner.abort(*arguments)


class MortalWriter(_Mortal, DataSourceArrowWriter):
    pass


class MortalStreamWriter(_Mortal, DataSourceStreamArrowWriter):
    pass


STREAMS = ["stream staging", "stream prepared", "foreach_batch"]
WAYS = {
    "write_batch": ["append", "upsert", "changes", "newer changes", "several", "quarantine"],
    "staging": ["append", "upsert", "changes", "newer changes", "several", "replace", "quarantine"],
    "prepared": ["append", "upsert", "changes", "several", "quarantine"],
    "foreach_batch": ["append", "upsert", "changes", "several", "quarantine"],
    "stream staging": ["append", "upsert", "changes", "newer changes", "several", "quarantine"],
    "stream prepared": ["append", "upsert", "changes", "several", "quarantine"],
}
"""Each way to write, with what it does with the rows."""
FORMATS = {
    "append": ["avro"],
    "upsert": ["jsonschema"],
    "changes": ["protobuf"],
    "several": ["protobuf", "avro"],
    "quarantine": ["jsonschema"],
}
"""What is done with the rows where messages have schemas of a registry, and the format of the values in each topic; else JSON."""
FORMAT_NAMES = {"avro": "Avro", "jsonschema": "JSON Schema", "protobuf": "Protobuf"}
_MESSAGE = "test.Number"
_DESCRIPTOR = protobuf_file(Number={"id": "optional int64", "name": "optional string", "lsn": "optional int64"})
NEW_ROWS = {"append", "several", "quarantine"}
CHANGES = {"changes", "newer changes"}


@dataclass(frozen=True)
class Job:
    """Some batches of one sink, one after the other.

    Attributes:
        way: Of :data:`WAYS`.
        does: What it does with the rows.
        case: The fields of its :class:`SparkCase`, which are settings, too.
        directory: For the source and the checkpoint of a stream.
        registry: The address of the schema registry, if the messages are in :data:`FORMATS`.
    """

    way: str
    does: str
    case: Mapping
    directory: str
    registry: str | None = None

    def document(self) -> Mapping:
        return asdict(self)

    def of_case(self) -> SparkCase:
        return SparkCase(**self.case)

    def topics(self) -> list[str]:
        """The case's, and a second one where there are two."""
        first = self.case["topic"]
        return [first, f"{first}-second"] if self.does in {"several", "quarantine"} else [first]

    @property
    def _formats(self) -> list[str]:
        """The format of the values in each topic, where it is not JSON; keys have it, too, unless it is Protobuf."""
        return [] if self.registry is None else FORMATS[self.does]

    def _format(self, number: int) -> dict:
        """The settings of one topic's messages."""
        if number >= len(self._formats):
            return {}
        value_format = self._formats[number]
        if value_format == "protobuf":
            return {"value_format": value_format, "value_message": _MESSAGE, "descriptor": self._descriptor}
        return {"value_format": value_format, "key_format": value_format}

    @property
    def _descriptor(self) -> str:
        return f"{self.directory}/number.desc"

    def prepare(self) -> None:
        """Make the tables."""
        Path(self._descriptor).write_bytes(_DESCRIPTOR)
        case = self.of_case()
        case.execute("DROP TABLE IF EXISTS numbers")
        age = ", lsn bigint" if self.does == "newer changes" else ""
        case.execute(f"CREATE TABLE numbers (id bigint PRIMARY KEY, name varchar(99) NOT NULL{age})")
        case.execute("CREATE TABLE second (id bigint PRIMARY KEY, name varchar(99) NOT NULL)")
        row = "`row`" if case.on_mariadb else '"row"'
        case.execute(f"CREATE TABLE aside (reason text NOT NULL, {row} text NOT NULL)")
        if self.does == "replace":
            case.execute("INSERT INTO numbers VALUES (-1, 'old')")

    def settings(self) -> dict:
        """The sink's settings."""
        found = {**self.case, "table": "numbers", "key": "id"}
        if self.registry is not None:
            found |= {"schema_registry": {"url": self.registry}}
        if self.does in {"upsert", *CHANGES}:
            found |= {"upsert_keys": ["id"]}
        if self.does in CHANGES:
            found |= {"op_column": "op", "order_column": "lsn"}
        if self.does == "newer changes":
            found |= {"on_conflict": "newer"}
        if self.does == "quarantine":
            found |= {"quarantine_table": "aside", "quarantine_topic": self.topics()[1]}
        if self.does == "several":
            parts = {tag: {"table": table, "topic": topic, "key": "id", **self._format(number)}
                     for number, (tag, table, topic) in enumerate(zip("ab", ("numbers", "second"), self.topics(), strict=True))}  # fmt: skip
            found = {key: value for key, value in found.items() if key not in {"table", "topic", "key"}}
            found |= {"tag_column": "kind", "targets": parts}
        else:
            found |= self._format(0)
        return found

    def options(self, deaths: Deaths, number: int) -> dict[str, str]:
        """Those of the Data Source."""
        settings = self.settings()
        targets = settings.pop("targets", None)
        found = options_of(settings)
        if targets:
            named = {tag: {option: one[setting] for option, setting in OPTION_NAMES.items() if setting in one}
                     for tag, one in targets.items()}  # fmt: skip
            found |= {"tagColumn": "kind", "targets": json.dumps(named)}
        if self.does == "replace":
            found["replaceWhere"] = "id >= 0"
        leg = self.way.rpartition(" ")[2]
        more = {} if self.way in STREAMS else {"batchId": str(number)}
        return {**found, **more, "databaseLeg": leg, "deaths": json.dumps(asdict(deaths))}

    def rows(self, number: int) -> list[tuple[int, str | None, str]]:
        """Id, name and operation of each row of a batch; what a table does not take has no name."""
        first = ROWS * number if self.does in NEW_ROWS else 0
        bad, gone = self.does == "quarantine", self.does in CHANGES
        return [
            (
                first + one,
                None if bad and one % 5 == 0 else f"{number} of {one}",
                "d" if gone and (one + number) % 3 == 0 else "u",
            )
            for one in range(ROWS)
        ]

    def frame(self, spark: SparkSession, number: int) -> DataFrame:
        """The same rows as a DataFrame, each time in the same partitions."""
        rows = [(*row, number, "ab"[row[0] % 2]) for row in self.rows(number)]
        made = spark.createDataFrame(rows, "id bigint, name string, op string, lsn bigint, kind string")
        more = ["op", "lsn"] if self.does in CHANGES else ["kind"] if self.does == "several" else []
        names = ["id", "name", *more]
        return made.select(*names).repartition(PARTITIONS, "id")

    @property
    def _source(self) -> str:
        return f"{self.directory}/source"

    def feed(self, spark: SparkSession, number: int) -> None:
        """Give a stream its next rows, before anybody dies: a driver that does so may be followed by one that does it again."""
        if self.way in STREAMS:
            self.frame(spark, number).coalesce(1).write.parquet(f"{self._source}/{number}")

    def write(self, spark: SparkSession, number: int, deaths: Deaths) -> None:
        """Write a batch, or have the stream read what is new of its source."""
        if self.way in STREAMS:
            self._stream(spark, number, deaths)
        elif self.way == "write_batch":
            write = write_many if self.does == "several" else write_batch
            with self._armed(deaths):
                write(self.frame(spark, number), batch_id=str(number), **self.settings())
        else:
            writer = self.frame(spark, number).write.format("mortal").options(**self.options(deaths, number))
            writer.mode("overwrite" if self.does == "replace" else "append").save()

    @contextmanager
    def _armed(self, deaths: Deaths) -> Iterator[None]:
        with mock.patch.object(per_partition, "PartitionTask", partial(MortalTask, deaths=deaths)):
            yield

    def _stream(self, spark: SparkSession, number: int, deaths: Deaths) -> None:
        read = spark.readStream.schema(self.frame(spark, number).schema).parquet(f"{self._source}/*")
        stream = read.repartition(PARTITIONS, "id").writeStream
        if self.way == "foreach_batch":
            _take_callbacks(spark)
            write = foreach_many if self.does == "several" else foreach_batch
            stream = stream.foreachBatch(write(**self.settings()))
        else:
            stream = stream.format("mortal").options(**self.options(deaths, number))
        stream = stream.option("checkpointLocation", f"{self.directory}/checkpoint")
        with self._armed(deaths):
            query = stream.trigger(availableNow=True).start()
            try:
                query.awaitTermination()
            finally:
                query.stop()

    def verify(self, batches: int) -> None:
        """Both sides have what so many batches leave, each once, and nothing is left of any."""
        case, topics = self.of_case(), self.topics()
        tables: list[dict[int, str | None]] = [{-1: "old"} if self.does == "replace" else {}, {}]
        messages: list[Counter] = [Counter() for _ in topics]
        aside: list[int] = []
        for number in range(batches):
            if self.does == "replace":
                tables[0] = {-1: "old"}
            for key, name, op in self.rows(number):
                place = key % 2 if self.does == "several" else 0
                if name is None:
                    aside.append(key)
                    messages[1][key] += 1
                    continue
                messages[place][key, None if op == "d" else name] += 1
                if op == "d":
                    tables[place].pop(key, None)
                else:
                    tables[place][key] = name
        for table, expected in zip(("numbers", "second"), tables, strict=True):
            _equal(table, dict(case.execute(f"SELECT id, name FROM {table}")), expected)
        row = "`row`" if case.on_mariadb else '"row"'
        _equal("aside", sorted(json.loads(one)["id"] for (one,) in case.execute(f"SELECT {row} FROM aside")), aside)
        for number, (topic, sent) in enumerate(zip(topics, messages, strict=True)):
            with self._readers(number, topic) as (key, value):
                found = Counter(_content(one, key, value) for one in read_committed(case.kafka, topic))
            _equal(topic, found, sent)
        nothing_is_left(case)

    @contextmanager
    def _readers(self, number: int, topic: str) -> Iterator[tuple[Callable, Callable]]:
        """What reads the keys and the values of a topic."""
        if number >= len(self._formats):
            yield int, json.loads
            return
        from confluent_kafka.schema_registry import SchemaRegistryClient

        from harness.schema_registry import deserializer

        value_format = self._formats[number]
        with SchemaRegistryClient({"url": self.registry}) as client:
            read = partial(deserializer, client, value_format, topic, descriptor=_DESCRIPTOR, message=_MESSAGE)
            yield int if value_format == "protobuf" else read(field="key"), read()


def _content(message, read_key: Callable, read_value: Callable) -> object:
    if message.value is None:
        return read_key(message.key), None
    value = read_value(message.value)
    if "row" in value:
        return value["row"]["id"]
    key = int(value["id"])  # text in what Protobuf makes of it
    assert read_key(message.key) == key, f"the key {message.key!r} of {value}"
    return key, value["name"]


def _equal(what: str, found: object, expected: object) -> None:
    # In words: pytest explains the asserts of tests alone.
    assert found == expected, f"{what}: {_shown(found, expected)}"


def _shown(found, expected) -> str:
    as_counter = Counter if isinstance(found, (list, Counter)) else (lambda one: Counter(one.items()))
    surplus, missing = as_counter(found) - as_counter(expected), as_counter(expected) - as_counter(found)
    return f"too many {list(surplus.items())[:5]}, missing {list(missing.items())[:5]}"


def _take_callbacks(spark: SparkSession) -> None:
    """Have the JVM call this process: it calls the one that has asked last, which may be dead."""
    gateway = spark.sparkContext._gateway
    server = gateway.__dict__.get("_callback_server")
    if server is not None:
        address = gateway.java_gateway_server.getCallbackClient().getAddress()
        gateway.java_gateway_server.resetCallbackClient(address, gateway.get_callback_server().get_listening_port())


def attached() -> SparkSession:
    """A session on the JVM of another process, which ``PYSPARK_GATEWAY_PORT`` and ``PYSPARK_GATEWAY_SECRET`` name."""
    gateway = launch_gateway()
    java_import(gateway.jvm, "org.apache.spark.SparkContext")
    jsc = gateway.jvm.JavaSparkContext.fromSparkContext(gateway.jvm.SparkContext.getOrCreate())
    return SparkSession(SparkContext(gateway=gateway, jsc=jsc))


def environment_of(spark: SparkSession) -> dict[str, str]:
    """For a process that calls :func:`attached`."""
    given = spark.sparkContext._gateway.gateway_parameters
    return {"PYSPARK_GATEWAY_PORT": str(given.port), "PYSPARK_GATEWAY_SECRET": given.auth_token}


def drive() -> None:
    """Write one batch of a job as a driver of its own, on the JVM of another."""
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Without a format of its own: Spark would look for this process, once it is dead, whenever another uses it.
    Job(**document["job"]).write(attached(), document["number"], Deaths(document["directory"]))
    sys.stdout.flush()
    os._exit(0)  # at its end, Spark's Python would stop what the other process uses
