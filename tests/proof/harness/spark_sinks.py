"""Spark's ways into both sides, as the suite for sinks asks for them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from pyspark.sql import DataFrame, SparkSession

from dualwrite import ConfigurationError
from dualwrite.clock import Deadline
from dualwrite.sinks.spark import foreach_batch, per_partition, register
from dualwrite.sinks.spark.plan import SparkJobs
from harness.patience import PATIENCE_S
from harness.sinks import Sink
from harness.spark import SPARKS_ERRORS, ArmedTask, SparkCase, numbers
from harness.spark_source import LEGS, ArmedSource, options, write_by, write_with

TASKS = 2


class _Way:
    errors = (ConfigurationError, *SPARKS_ERRORS)

    def __init__(self, name: str, spark: SparkSession, directory: Path) -> None:
        self.name = name
        self._spark = spark
        self._directory = directory

    def write(self, case: SparkCase, rows: int, *, killed_at: str = "", table: str | None = None) -> None:
        jobs = SparkJobs(self._spark.sparkContext)
        try:
            with jobs.started():
                self._write(case, rows, killed_at, table)
        finally:
            jobs.end(self.name, Deadline(PATIENCE_S))  # Spark reports a failure while other tasks still run

    def _rows(self, rows: int) -> DataFrame:
        return numbers(self._spark, rows, TASKS)


class _ByPartition(_Way):
    """``write_batch``, ``foreach_partition``, and the function of ``foreach_batch``."""

    decided_as_one = False

    def _write(self, case: SparkCase, rows: int, killed_at: str, table: str | None) -> None:
        more = {} if table is None else {"table": table}
        task = partial(ArmedTask, point=killed_at) if killed_at else per_partition.PartitionTask
        with mock.patch.object(per_partition, "PartitionTask", task):
            if self.name == "foreach_batch":
                foreach_batch(**{**case.settings, **more})(self._rows(rows), 0)
            else:
                write_by(case, self._rows(rows), self.name, **more)


class _Whole(_Way):
    """The Data Source, over one of its database legs."""

    decided_as_one = True

    def _write(self, case: SparkCase, rows: int, killed_at: str, table: str | None) -> None:
        self._register()
        given = self._given(killed_at, table)
        write_with(case, self._rows(rows), source=_name(killed_at), batchId="1", **given)

    def _register(self) -> None:
        register(self._spark)
        self._spark.dataSource.register(ArmedSource)

    def _given(self, killed_at: str, table: str | None) -> dict[str, str]:
        given = {"databaseLeg": self.name.partition(" ")[0]}
        if killed_at:
            given["inTask"] = killed_at
        return given if table is None else given | {"dbtable": table}


class _Stream(_Whole):
    """The Data Source in a stream of one micro-batch. Run again, it is a stream that died before Spark noted that batch."""

    def _write(self, case: SparkCase, rows: int, killed_at: str, table: str | None) -> None:
        self._register()
        source, checkpoint = self._directory / "source", self._directory / "checkpoint"
        if not source.exists():
            numbers(self._spark, rows, 1).write.parquet(str(source))
        for noted in (checkpoint / "commits").glob("*0*"):
            noted.unlink()
        files = self._spark.readStream.schema("id bigint, name string").parquet(str(source)).repartition(TASKS)
        stream = files.writeStream.format(_name(killed_at)).options(**options(case, **self._given(killed_at, table)))
        stream = stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        stream.start().awaitTermination()


def _name(killed_at: str) -> str:
    return "armed" if killed_at else "dualwrite"


_MADE = {
    **dict.fromkeys(("write_batch", "foreach_partition", "foreach_batch"), _ByPartition),
    **dict.fromkeys(LEGS, _Whole),
    **{f"{leg} stream": _Stream for leg in LEGS},
}
_RARE = {"prepared stream"}
_STREAMS = {"foreach_batch", "staging stream"}
_ON_MARIADB = {"write_batch", "staging"}
"""In every run; the other ways there, but those that prepare, are left to a thorough one."""
_OTHERWISE_ON_MARIADB = {f"{name}-mariadb" for name in _ON_MARIADB - {"staging"}}
"""Where a batch fails, the way with tables of its own suffices in every run."""


def _made(name: str, request: pytest.FixtureRequest) -> Sink:
    return _MADE[name](name, request.getfixturevalue("spark"), request.getfixturevalue("tmp_path"))


def _parameters(thorough: set[str]) -> list[object]:
    on_postgresql = [(name, "postgresql", name, name in thorough) for name in _MADE]
    on_mariadb = [
        (name, "mariadb", f"{name}-mariadb", name not in _ON_MARIADB or f"{name}-mariadb" in thorough)
        for name in _MADE
        if not name.startswith("prepared")
    ]
    through_librdkafka = [(name, "librdkafka", f"{name}-librdkafka", True) for name in _MADE]
    return [
        pytest.param(
            partial(_made, name),
            kind,
            id=shown,
            marks=[
                pytest.mark.spark,
                *([pytest.mark.mariadb] if kind == "mariadb" else []),
                *([pytest.mark.thorough] if is_rare else []),
            ],
        )
        for name, kind, shown, is_rare in (*on_postgresql, *on_mariadb, *through_librdkafka)
    ]


SINKS = _parameters(_RARE)
"""For ``pytest.mark.parametrize``: functions of a test's request, and the kind of database."""
BATCHES = _parameters(_RARE | _STREAMS | _OTHERWISE_ON_MARIADB)
"""For what a stream does as its batches do: it adds their names."""
