"""The Data Source with fail points that a test arms by an option: in one task, or in the process that decides."""

from __future__ import annotations

import json
from dataclasses import dataclass
from unittest import mock

from pyspark import TaskContext

from dualwrite import failpoints
from dualwrite.sinks.spark import DualWriteDataSource, foreach_batch, foreach_partition, register, write_batch
from dualwrite.sinks.spark.databases import postgresql
from dualwrite.sinks.spark.options import OPTION_NAMES
from dualwrite.sinks.spark.source import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
)  # not every PySpark has them
from dualwrite.testing.checker import read_committed
from harness.spark import attempt_number, leave_group

PARTITION = 1


def options_of(settings):
    """The sink's settings as the options of the Data Source."""
    found = {f"kafka.{key}": str(value) for key, value in settings["kafka"].items()}
    found |= {f"schema.registry.{key}": str(value) for key, value in (settings.get("schema_registry") or {}).items()}
    for name, setting in OPTION_NAMES.items():
        value = settings.get(setting)
        if value is not None:
            found[name] = str(value) if isinstance(value, (str, int, float)) else json.dumps(value)
    return found


def options(case, **more):
    """The options of a case; those that are None in ``more`` are left out."""
    return {key: value for key, value in {**options_of(case.settings), **more}.items() if value is not None}


def write_with(case, df, mode="append", source="dualwrite", **more):
    """Write a DataFrame with the options of a case."""
    df.write.format(source).mode(mode).options(**options(case, **more)).save()


LEGS = ["staging", "prepared"]
WAYS = ["write_batch", "foreach_partition", *LEGS]


def write_by(case, df, way, batch_id="1", **more):
    """Write a DataFrame in one of the ways, or as micro-batch 1 of "foreach_batch".

    That is partition by partition, or as a whole over a database leg of the Data Source.
    """
    settings = {**case.settings, **more}
    if way == "write_batch":
        write_batch(df, batch_id=batch_id, **settings)
    elif way == "foreach_partition":
        df.foreachPartition(foreach_partition(df, batch_id=batch_id, **settings))
    elif way == "foreach_batch":
        foreach_batch(**settings)(df, 1)
    else:
        register(df.sparkSession)
        given = {**options_of(settings), "batchId": batch_id, "databaseLeg": way}
        df.write.format("dualwrite").mode("append").options(**given).save()


def staging_tables(case):
    here = "table_schema = database() AND " if case.on_mariadb else ""
    return case.execute(
        f"SELECT table_name FROM information_schema.tables WHERE {here}table_name LIKE 'dualwrite_staging_%'"
    )


def prepared_transactions(case):
    if case.on_mariadb:
        return case.execute("XA RECOVER")
    return case.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")


def nothing_is_left(case):
    """No staging table, nothing prepared, no slot taken, no transaction open."""
    found = {
        "staging tables": staging_tables(case),
        "prepared transactions": prepared_transactions(case),
        "leases": case.execute("SELECT transactional_id FROM dualwrite_slot WHERE lease_owner IS NOT NULL"),
    }
    # In words: pytest explains the asserts of tests alone.
    left = ", ".join(f"{what} {rows}" for what, rows in found.items() if rows)
    assert not left, f"left: {left}"
    assert read_committed(case.kafka, case.topic) is not None  # it waits until no transaction is open


@dataclass(frozen=True)
class Armed:
    """As in :class:`harness.spark.ArmedTask`; and for how long a task waits for a lock, as PostgreSQL has it."""

    attempts: int
    counter: str
    pid_file: str
    waits: str


class ArmedSource(DualWriteDataSource):
    """``format("armed")``: the option ``inTask`` arms a point in the first attempts at one partition, ``inTasks`` one for each
    partition (as JSON), ``inCommit`` where it is decided, ``inAbort`` where it is given up. ``attempts``, ``counter`` and
    ``pidFile`` are those of :class:`Armed`. Its tasks wait for a lock for ``waits`` at most."""

    def __init__(self, options):
        self.points = {where: options.pop(where, "") for where in ("inTask", "inTasks", "inCommit", "inAbort")}
        self.armed = Armed(
            int(options.pop("attempts", "1")),
            options.pop("counter", ""),
            options.pop("pidFile", ""),
            options.pop("waits", postgresql._LONGEST_WAIT),
        )
        super().__init__(options)

    @classmethod
    def name(cls):
        return "armed"

    def writer(self, schema, overwrite):
        return ArmedWriter(super().writer(schema, overwrite), self.points, self.armed)

    def streamWriter(self, schema, overwrite):  # noqa: N802 - Spark's name
        return ArmedStreamWriter(super().streamWriter(schema, overwrite), self.points, self.armed)


@dataclass
class _Armed:
    inner: object
    points: dict
    armed: Armed

    def write(self, iterator):
        task = TaskContext.get()
        failpoints.arm("")  # a worker is used again
        points = json.loads(self.points["inTasks"] or "{}") or {str(PARTITION): self.points["inTask"]}
        point = points.get(str(task.partitionId()))
        if point is not None and attempt_number(task, self.armed.counter) < self.armed.attempts:
            if self.armed.pid_file:
                leave_group(self.armed.pid_file)
            failpoints.arm(point)
        with mock.patch.object(postgresql, "_LONGEST_WAIT", self.armed.waits):
            return self.inner.write(iterator)

    def commit(self, *arguments):
        failpoints.arm(self.points["inCommit"])
        self.inner.commit(*arguments)

    def abort(self, *arguments):
        failpoints.arm(self.points["inAbort"])
        self.inner.abort(*arguments)


class ArmedWriter(_Armed, DataSourceArrowWriter):
    pass


class ArmedStreamWriter(_Armed, DataSourceStreamArrowWriter):
    pass
