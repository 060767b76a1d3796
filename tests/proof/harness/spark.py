"""A quiet Spark session; a batch of numbered rows for it; and the verdict on what has become of it on both sides."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, functions
from sqlalchemy import create_engine, text

from dualwrite import failpoints
from dualwrite.sinks.spark.partition_task import PartitionTask
from dualwrite.stores.sql.ledger import Batch, read_batches
from dualwrite.testing.checker import read_committed
from dualwrite.testing.servers.embedded import fetched_jars
from harness import spark_archive
from harness.places import PROOF, TESTS
from harness.planting import plant_from_environment

ROWS = 1000
PARTITIONS = 4
SPARKS_ERRORS = (PySparkException, Py4JJavaError)
"""The errors of a failed job: which one depends on the version and on the call."""


DAEMON = ("spark.python.daemon.module", "harness.spark_daemon")
"""The setting that lets Spark fork its Python workers from a process that has imported what they need."""
_SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData -Xshare:auto"
"""A JVM of a test lives for a minute or two: most of its processor time would go into compiling and collecting in parallel."""


def environment() -> dict[str, str]:
    """Variables by which Spark starts JVMs that suit a test, and their Python processes with half the work."""
    java = " ".join([_SHORT_LIFE, *spark_archive.options()])
    return {
        "SPARK_LAUNCHER_OPTS": _SHORT_LIFE,
        "PYSPARK_SUBMIT_ARGS": f"--driver-java-options '{java}' --conf 'spark.executor.extraJavaOptions={java}' "
        "--conf spark.ui.enabled=false --driver-memory 1g pyspark-shell",
        "PYTHONPATH": _python_path(PROOF / "harness" / "site"),
    }


def _python_path(*before: Path) -> str:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*map(str, before), *filter(None, given)]))


def set_environment() -> None:
    """Set the environment that Spark's JVM and its processes must find at their start in a test."""
    os.environ |= environment()
    _set_python()


def _set_python() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Not UTC, and with an hour that comes twice: what depends on the time zone by mistake shows.
    os.environ["TZ"] = "America/New_York"
    os.environ["PYTHONPATH"] = _python_path(PROOF, TESTS)


def session(master: str = "local[2,3]", **settings: str) -> SparkSession:
    """A session on the loopback interface for tests: its JVM starts soon, and its workers run this Python and know the tests."""
    set_environment()
    return bare_session(master, **dict([DAEMON]), **settings)


def bare_session(master: str, **settings: str) -> SparkSession:
    """The same with Spark's own JVM and its own way to start workers, as users have it: for what is measured."""
    _set_python()
    builder = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
    )
    for key, value in settings.items():
        builder = builder.config(key.replace("__", "."), value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


HAS_CONNECTOR = pyspark.__version__.startswith("4.2.")
"""The connector that is fetched is that of Spark 4.2."""


def connector_jars() -> str:
    """Spark's own Kafka source and sink, and PostgreSQL's JDBC driver, for ``spark.jars``; fetched once."""
    found = fetched_jars(Path(__file__).with_name("spark-pom.xml"), "spark-connectors", "Spark's Kafka connector")
    return ",".join(str(path) for path in sorted(found.glob("*.jar")))


def delta_settings() -> dict[str, str]:
    """The settings of a session that knows Delta Lake, whose jars are fetched once."""
    found = fetched_jars(Path(__file__).with_name("delta-pom.xml"), "spark-delta", "Delta Lake")
    return {
        "spark.jars": ",".join(str(path) for path in sorted(found.glob("*.jar"))),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",  # it would run fifty tasks to read a table's log
    }


def numbers(spark: SparkSession, rows: int = ROWS, partitions: int = PARTITIONS):
    """Rows with an id, the same rows in the same partition each time."""
    return spark.range(0, rows, 1, partitions).select("id", functions.concat(functions.lit("row "), "id").alias("name"))


@dataclass
class SparkCase:
    """One sink, one topic, one table of numbers."""

    kafka: dict
    url: str
    topic: str
    table: str = "numbers"
    sink: str = field(default_factory=lambda: f"sink-{secrets.token_hex(4)}")
    producer_engine: str | None = None
    timeout_s: float = 60.0

    def __post_init__(self):
        self.execute(f"CREATE TABLE IF NOT EXISTS {self.table} (id bigint, name text)")

    @property
    def on_mariadb(self) -> bool:
        return self.url.startswith("mysql")

    @property
    def settings(self) -> dict:
        return {
            "sink": self.sink,
            "kafka": self.kafka,
            "url": self.url,
            "topic": self.topic,
            "table": self.table,
            "key": "id",
            "timeout_s": self.timeout_s,
            **({"producer_engine": self.producer_engine} if self.producer_engine else {}),
        }

    def execute(self, statement: str) -> list:
        engine = create_engine(self.url)
        try:
            with engine.begin() as connection:
                result = connection.execute(text(statement))
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            engine.dispose()

    def batches(self) -> list[Batch]:
        """This sink's batches, as people see them."""
        engine = create_engine(self.url)
        try:
            return list(read_batches(engine, sink=self.sink))
        finally:
            engine.dispose()

    def rows(self) -> list[tuple[int, str]]:
        return sorted(self.execute(f"SELECT id, name FROM {self.table}"))

    def messages(self) -> list[tuple[int, str]]:
        """Id and name in every committed message, whose key must be the id."""
        found = []
        for message in read_committed(self.kafka, self.topic):
            value = json.loads(message.value)
            assert message.key == str(value["id"]).encode()
            found.append((value["id"], value["name"]))
        return sorted(found)

    def verify(self, rows: int = ROWS) -> None:
        """Both sides hold the rows 0, 1, ... each once."""
        expected = [(number, f"row {number}") for number in range(rows)]
        for side, found in (("database", self.rows()), ("Kafka", self.messages())):
            surplus, missing = Counter(found) - Counter(expected), Counter(expected) - Counter(found)
            assert not surplus, f"{side}: {sum(surplus.values())} too many, such as {list(surplus)[:3]}"
            assert not missing, f"{side}: {sum(missing.values())} missing, such as {list(missing)[:3]}"


def newest_job(spark: SparkSession) -> dict:
    """Spark's own counts."""
    store = spark.sparkContext._jsc.sc().statusStore()
    jobs = store.jobsList(None)
    newest = max((jobs.apply(number) for number in range(jobs.size())), key=lambda found: found.jobId())
    return {"failed_tasks": newest.numFailedTasks(), "failed_stages": newest.numFailedStages()}


def attempt_number(context: TaskContext, counter: str) -> int:
    """The number of this attempt, from 0: by a file that all attempts know, or else as Spark counts."""
    if not counter:
        return context.attemptNumber()
    file = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, b".")
        return os.lseek(file, 0, os.SEEK_CUR) - 1
    finally:
        os.close(file)


def leave_group(pid_file: str) -> None:
    """In a Python worker: live on when its executor or driver dies, as on a machine that is cut off.

    Spark's daemon and the kernel would send SIGHUP and SIGCONT to the worker's group.
    """
    os.setsid()
    Path(pid_file).write_text(str(os.getpid()))


@dataclass(frozen=True)
class ArmedTask(PartitionTask):
    """A task whose first attempts at one partition arm a fail point in their worker.

    Attributes:
        point: What to arm.
        partition: Which partition.
        pid_file: Where the worker's process id is written to, before.
        attempts: How many attempts.
        counter: A file that counts the attempts; without it they are counted as Spark does, from 0 in each run of a stage.
        points: What to arm for each partition, instead of one.
    """

    point: str = ""
    partition: int = 1
    pid_file: str = ""
    attempts: int = 1
    counter: str = ""
    points: Mapping[int, str] = field(default_factory=dict)

    def run_arrow(self, batches):
        self._arm()
        yield from super().run_arrow(batches)

    def run_rows(self, rows):
        self._arm()
        super().run_rows(rows)

    def _arm(self):
        context = TaskContext.get()
        point = (self.points or {self.partition: self.point}).get(context.partitionId())
        if point is not None and attempt_number(context, self.counter) < self.attempts:
            if self.pid_file:
                leave_group(self.pid_file)
            failpoints.arm(point)


@dataclass(frozen=True)
class WaitingTask(PartitionTask):
    """One that waits where it has flushed its messages, and decides when a file is there.

    Attributes:
        stands: A file that it makes when it has come there.
        goes_on: The file for which it waits.
    """

    stands: str = ""
    goes_on: str = ""

    def run_arrow(self, batches):
        def wait(name):
            if name == "write.prepared":
                Path(self.stands).touch()
                while not Path(self.goes_on).exists():
                    time.sleep(0.01)

        with failpoints.watched(wait):
            yield from super().run_arrow(batches)


class SameTask(PartitionTask):
    """The product's task, by a name that a worker can find only here: so the worker imports this module, too."""


class _Stopped(Exception):
    """Where a driver stops."""


def stopped_at(write, point, df, number):
    """Write a micro-batch; the driver fails at the point."""

    def stop(name):
        if name == point:
            raise _Stopped(name)

    with failpoints.watched(stop):
        write(df, number)


plant_from_environment()
