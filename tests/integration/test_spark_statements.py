"""What one micro-batch of one row for each partition asks of the database and of Kafka, once the workers are warm.

The tasks and the processes of the driver run here one after the other, without Spark. What each of them would pickle goes through
pickle, and each is left with nothing but what it would have in a process of its own.
"""

import pickle
from collections import deque
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from io import BufferedReader, BytesIO
from unittest import mock

import pyarrow as pa
import pytest
from harness.one_task import SCHEMA
from harness.spark_source import nothing_is_left, options
from pyspark import TaskContext
from sqlalchemy import create_engine, make_url, text

from dualwrite.sinks.spark import DualWriteDataSource, SinkOptions, source, worker, writing
from dualwrite.sinks.spark.partition_task import PartitionReport
from dualwrite.sinks.spark.per_partition import BatchJob
from dualwrite.testing.proxy import KafkaProxy, PostgresProxy

QUERY = "8c0d4e5a-0000-4000-8000-000000000000"


@dataclass
class Asked:
    """What came to the servers.

    Attributes:
        statements: Those that the database was sent. Limits of a transaction that go in the request of its only statement are no
            statements of their own.
        transactions: Of the database, also those of statements that stood alone.
        requests: To the database, for each of which a client waits: statements that are sent together are one, a ping is one, too.
        kafka: Requests to the broker.
    """

    statements: int
    transactions: int
    requests: int
    kafka: int

    def within(self, limit):
        """Whether none of the numbers is higher."""
        return all(mine <= most for mine, most in zip(astuple(self), astuple(limit), strict=True))


class Servers:
    """Both servers behind proxies that count."""

    def __init__(self, database, broker):
        self._database, self._broker = database, broker
        self._seen = 0, 0
        self.statements = []

    def asked(self):
        """What came since the last call; `statements` has the texts."""
        before, self._seen = self._seen, (len(self._database.requests), len(self._broker.requests))
        requests = self._database.requests[before[0] : self._seen[0]]
        statements = self.statements = [one for request in requests for one in without_limits(request.statements)]
        return Asked(len(statements), transactions_of(statements), len(requests), self._seen[1] - before[1])


class GeneralLog:
    """What MariaDB is asked by those who have connected to one database: its own log. Nothing stands between."""

    def __init__(self, url):
        self._engine = create_engine(url, isolation_level="AUTOCOMMIT")
        self._database = make_url(url).database

    def __enter__(self):
        self._run("SET GLOBAL log_output = 'TABLE'")
        self._run("TRUNCATE mysql.general_log")
        self._run("SET GLOBAL general_log = ON")
        return self

    def __exit__(self, *_):
        self._run("SET GLOBAL general_log = OFF")
        self._run("SET GLOBAL log_output = DEFAULT")
        self._engine.dispose()

    def _run(self, statement, **values):
        with self._engine.connect() as connection:
            found = connection.execute(text(statement), values)
            return found.all() if found.returns_rows else []

    def url(self, url):
        return url.partition("?")[0]  # without the tests' own init_command

    @property
    def requests(self):
        """In the order of the log. The times in it are of no use: each session writes them in its own time zone."""
        log = self._run("SELECT thread_id, command_type, convert(argument USING utf8mb4) FROM mysql.general_log")
        ours = {thread for thread, kind, asked in log if kind == "Connect" and f"on {self._database} " in asked}
        asked = [(kind, asked) for thread, kind, asked in log if thread in ours and kind in {"Query", "Ping"}]
        return [Sent(() if kind == "Ping" else (" ".join(one.split()).upper(),)) for kind, one in asked]


@dataclass
class Sent:
    """What a client has sent at once."""

    statements: tuple


def without_limits(statements):
    """The statements of a request without those that set limits for the last one, which then stands alone."""
    return statements[-1:] if statements[:1] == ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED",) else statements


def transactions_of(statements):
    """How many transactions there were: those that were begun, and the statements that stood alone.

    MariaDB's drivers begin without a word. Each transaction ends, and DDL stands alone.
    """
    if not any(one.startswith("BEGIN") for one in statements):
        return sum(one.startswith(("COMMIT", "ROLLBACK", "CREATE", "DROP")) for one in statements)
    found, inside = 0, False
    for one in statements:
        if not inside:
            found += 1
        inside = one.startswith("BEGIN") or (
            inside and not one.startswith(("COMMIT", "ROLLBACK", "PREPARE TRANSACTION"))
        )
    return found


class Task:
    """What the sink asks Spark's own ``TaskContext``."""

    def __init__(self, partition, batch):
        self._partition, self._batch = partition, batch

    def partitionId(self):  # noqa: N802 - Spark's name
        return self._partition

    def attemptNumber(self):  # noqa: N802 - Spark's name
        return 0

    def getLocalProperty(self, name):  # noqa: N802 - Spark's name
        return {"sql.streaming.queryId": QUERY, "streaming.sql.batchId": str(self._batch)}[name]


class Stream:
    """A stream in one of the ways, with a Python worker for each of its partitions, or for as many as there are workers."""

    def __init__(self, case, way, *, most_workers=16):
        self._case, self._way, self._most_workers = case, way, most_workers
        self._workers = deque()
        self._number = 0
        self._rows = 0

    @contextmanager
    def _worker(self, partition):
        """A worker process: what it keeps from task to task, and nothing of the driver's or the other workers'."""
        place = partition % self._most_workers
        kept = self._workers[place] if place < len(self._workers) else {}
        if place == len(self._workers):
            self._workers.append(kept)
        with (
            mock.patch.object(worker, "_kept", kept),
            mock.patch.object(TaskContext, "get", return_value=Task(partition, self._number)),
            mock.patch.object(writing, "_worker_input", return_value=BufferedReader(BytesIO(writing._END))),
        ):
            yield

    def close(self):
        for kept in self._workers:
            for found in kept.values():
                found.close()

    def write(self, partitions):
        """The next micro-batch, of one row for each partition."""
        if self._way == "foreach_batch":
            self._write_by_partition(partitions)
        else:
            self._write_whole(partitions)
        self._number += 1

    def _batches(self):
        number = self._rows
        self._rows += 1
        return iter([pa.RecordBatch.from_pydict({"id": [number], "name": [f"row {number}"]})])

    def _write_whole(self, partitions):
        given = options(self._case, databaseLeg=self._way, checkpointLocation="/nowhere")
        writer = pickle.dumps(DualWriteDataSource(given).streamWriter(SCHEMA, overwrite=False))
        messages = []
        for partition in range(partitions):
            with self._worker(partition):
                messages.append(pickle.dumps(pickle.loads(writer).write(self._batches())))
        with mock.patch.object(source, "_at_the_end_of_a_micro_batch", return_value=True):
            ending = DualWriteDataSource(given).streamWriter(SCHEMA, overwrite=False)
        ending.commit([pickle.loads(one) for one in messages], self._number)

    def _write_by_partition(self, partitions):
        with BatchJob(SinkOptions(**self._case.settings), f"{QUERY}/{self._number}") as job:
            task = pickle.dumps(job.plan(SCHEMA))
            assert not job.begin(partitions)
            done = []
            for partition in range(partitions):
                with self._worker(partition):
                    [report] = pickle.loads(task).run_arrow(self._batches())
                done.append(PartitionReport(**report.to_pylist()[0]))
            job.record_empty(partitions, done)
            job.finish(partitions, done)


@pytest.mark.parametrize(
    ("numbers", "way", "one", "further"),
    [
        pytest.param("postgresql", "staging", Asked(40, 6, 39, 30), Asked(10, 2, 10, 12), id="staging"),
        pytest.param("postgresql", "prepared", Asked(40, 8, 39, 30), Asked(10, 4, 10, 12), id="prepared"),
        pytest.param("postgresql", "foreach_batch", Asked(37, 8, 36, 20), Asked(10, 3, 10, 12), id="foreach_batch"),
        pytest.param("mariadb", "staging", Asked(38, 8, 38, 30), Asked(10, 3, 10, 12), id="staging-mariadb",
                     marks=pytest.mark.mariadb),
        pytest.param("mariadb", "foreach_batch", Asked(40, 8, 40, 20), Asked(16, 3, 16, 12), id="foreach_batch-mariadb",
                     marks=pytest.mark.mariadb),
    ],
    indirect=["numbers"],
)  # fmt: skip
def test_a_micro_batch_of_one_row_asks_no_more_than_this(request, numbers, dualwrite_kafka, way, one, further):
    on_postgresql = None if numbers.on_mariadb else request.getfixturevalue("dualwrite_postgres")
    watched = GeneralLog(numbers.url) if on_postgresql is None else PostgresProxy(on_postgresql)
    with watched as database, KafkaProxy(dualwrite_kafka) as broker:
        kafka = {**numbers.kafka, "bootstrap.servers": broker.client_config()["bootstrap.servers"]}
        stream = Stream(replace(numbers, url=database.url(numbers.url), kafka=kafka), way)
        servers = Servers(database, broker)
        try:
            stream.write(2)
            servers.asked()
            stream.write(1)
            found = servers.asked()
            sent = "\n".join(servers.statements)
            stream.write(2)
            found_two = servers.asked()
        finally:
            stream.close()
    numbers.verify(5)
    nothing_is_left(numbers)
    more = Asked(*(two - one for one, two in zip(astuple(found), astuple(found_two), strict=True)))
    for was, limit in ((found, one), (more, further)):
        assert was.within(limit), f"{was}, and at most {limit} was agreed; one partition sent:\n{sent}"


@pytest.mark.parametrize("way", ["staging", "prepared"])
def test_a_worker_does_not_look_for_slots_that_its_batch_has_filled(numbers, dualwrite_postgres, way):
    with PostgresProxy(dualwrite_postgres) as database:
        stream = Stream(replace(numbers, url=database.url(numbers.url)), way, most_workers=1)
        looked = []
        try:
            for partitions in (1, 2, 2):
                seen = len(database.requests)
                stream.write(partitions)
                sent = [one for request in database.requests[seen:] for one in request.statements]
                looked.append(sum(one.startswith("WITH HELD") and "SKIP LOCKED" in one for one in sent))
        finally:
            stream.close()
    # The first task has nothing at rest. The second batch finds one lane; in the third each task has one.
    assert looked == [0, 1, 2]
    numbers.verify(5)
    nothing_is_left(numbers)
