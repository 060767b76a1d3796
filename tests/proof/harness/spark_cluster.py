"""A standalone cluster of Spark on this machine, and a driver on it: each executor is a process that can be killed.

The master, the two workers and the driver share a JVM. Each worker has a host name of its own, because Spark runs a second
attempt at a partition on another host only.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import psutil
from pyspark import SparkContext, TaskContext
from pyspark.sql import SparkSession, functions

from dualwrite.sinks.spark import per_partition, register, write_batch
from harness.driver_process import DriverProcess
from harness.drivers import paused_below
from harness.spark import ArmedTask, SparkCase, newest_job, numbers, session, set_environment
from harness.spark_source import PARTITION, ArmedSource, write_with

HOSTS = ("127.0.0.1", "127.0.0.2")
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_NEVER = "1.0"
_AT_HALF = "0.5"


class Cluster(DriverProcess):
    """A driver process with a session on the cluster. A context manager.

    Args:
        directory: For what executors write.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(_start, str(directory))

    def paused(self, running: Future, count: int = 1) -> list[psutil.Process]:
        """Wait until so many Python workers have stopped at a fail point."""

        def check():
            assert not running.done(), running.exception() or "the job is done, and nothing was paused"

        return paused_below(self.pid, count, check=check)

    @staticmethod
    def executor_of(worker: psutil.Process) -> psutil.Process:
        """The executor that a Python worker belongs to."""
        return next(process for process in worker.parents() if _EXECUTOR in process.cmdline())


def _start(directory: str) -> None:
    """In the driver process: start master and workers, and a session on them."""
    set_environment()
    os.environ["SPARK_LOCAL_IP"] = HOSTS[0]
    SparkContext._ensure_initialized()
    jvm, gateway = SparkContext._jvm, SparkContext._gateway
    conf = jvm.org.apache.spark.SparkConf()
    master = jvm.org.apache.spark.deploy.master.Master.startRpcEnvAndEndpoint(HOSTS[0], 0, 0, conf)
    urls = gateway.new_array(jvm.String, 1)
    urls[0] = f"spark://{HOSTS[0]}:{master._1().address().port()}"
    none = jvm.scala.Option.empty()
    for host in HOSTS:
        jvm.org.apache.spark.deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, 1, 1024, urls, f"{directory}/{host}", none, conf, none
        )
    spark = session(
        urls[0],
        spark__executor__memory="512m",
        spark__executor__cores="1",
        spark__scheduler__minRegisteredResourcesRatio="1.0",
        spark__scheduler__maxRegisteredResourcesWaitingTime="300s",
        # Half a partition shall be on its way when its input stands still.
        spark__buffer__size="256",
        spark__sql__execution__arrow__maxRecordsPerBatch="50",
        spark__speculation="true",
        spark__speculation__multiplier="1.1",
        spark__speculation__quantile=_NEVER,
    )
    register(spark)
    spark.dataSource.register(ArmedSource)


def write(way: str, case: SparkCase, frame: str = "numbers", *, speculation: bool = False, **armed) -> dict:
    """In the driver process: write one batch and tell how it went.

    Args:
        way: "write_batch", or the database leg of the Data Source.
        case: Where to.
        frame: What; see :data:`FRAMES`.
        speculation: Whether a partition that takes longer than others gets a second attempt.
        armed: As :class:`ArmedTask`: ``point``, and perhaps ``attempts``, ``counter`` and ``pid_file``.
    """
    spark = SparkSession.active()
    # Read again for each set of tasks; whether there is speculation at all is a setting of the whole application.
    spark.sparkContext._jsc.sc().conf().set("spark.speculation.quantile", _AT_HALF if speculation else _NEVER)
    df = FRAMES[frame](spark)
    if way == "write_batch":
        original = per_partition.PartitionTask
        per_partition.PartitionTask = partial(ArmedTask, **armed) if armed else original
        try:
            write_batch(df, batch_id="1", **case.settings)
        finally:
            per_partition.PartitionTask = original
    else:
        more = {_OPTIONS[name]: str(value) for name, value in armed.items()}
        write_with(case, df, source="armed" if armed else "dualwrite", batchId="1", databaseLeg=way, **more)
    return newest_job(spark)


_OPTIONS = {"point": "inTask", "attempts": "attempts", "counter": "counter", "pid_file": "pidFile"}


def _gated(spark: SparkSession):
    """The numbers; the input of the first attempt at one partition stands still in its middle, until that attempt is killed."""
    return numbers(spark).mapInArrow(_gate, "id long, name string")


def _gate(batches):
    task = TaskContext.get()
    for number, batch in enumerate(batches):
        if number == 2 and task.attemptNumber() == 0 and task.partitionId() == PARTITION:
            os.kill(os.getpid(), signal.SIGSTOP)
        yield batch


def _shuffled(spark: SparkSession):
    """The numbers by way of a shuffle, whose files the executors keep."""
    return numbers(spark).repartition(4, functions.col("id"))


FRAMES = {"numbers": numbers, "gated": _gated, "shuffled": _shuffled}
