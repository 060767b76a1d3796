"""Checks that a batch gives the same rows when it runs again: by its plan beforehand, and by a digest of each partition.

Written partitions stay when a batch runs again. If the new run gives other rows, or the same rows in other partitions, both
sides end up with a mixture of two runs: some rows twice, others nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from py4j.protocol import Py4JError
from pyspark.sql import functions
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from py4j.java_gateway import JavaObject
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame

    from dualwrite.sinks.spark.columns.layout import Layout

_DIGEST: Final = "digest"
_HASHED: Final = (
    spark.BooleanType, spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType, spark.FloatType, spark.DoubleType,
    spark.DecimalType, spark.StringType, spark.BinaryType, spark.DateType, spark.TimestampType, spark.TimestampNTZType,
    spark.DayTimeIntervalType,
)  # fmt: skip
"""The types that ``xxhash64`` accepts in every version of Spark."""
_SHOWS_NO_PLAN: Final = (Py4JError, AttributeError)
"""Raised if a version of Spark lacks a method, or returns null: py4j gives ``None``, which has no attributes."""
_INDETERMINATE: Final = "INDETERMINATE"


def require_deterministic(df: DataFrame, rows: RDD[object] | None = None) -> None:
    """Refuse a DataFrame that gives other rows when it is computed again, as far as Spark itself knows.

    Args:
        df: The user's DataFrame.
        rows: The RDD that runs, if it already exists: the order of its shuffles matters, too.

    Raises:
        ConfigurationError: The DataFrame may give other rows.
    """
    _require_deterministic(df._jdf.queryExecution().analyzed())  # noqa: SLF001 - Spark has no public way to it in Python
    if rows is not None and rows._jrdd.rdd().outputDeterministicLevel().toString() == _INDETERMINATE:  # noqa: SLF001 - as above
        raise _not_repeatable("a shuffle distributes its rows in the order of their arrival")


def require_deterministic_stream(df: DataFrame, query_id: str) -> bool:
    """As :func:`require_deterministic`, for the stream of a micro-batch: the micro-batch's DataFrame does not show its plan.

    Args:
        df: The micro-batch, while ``foreachBatch`` runs.
        query_id: The id of the stream's query.

    Returns:
        Whether Spark has shown the stream's plan.

    Raises:
        ConfigurationError: The stream may give other rows.
    """
    session = df.sparkSession
    try:
        number = session._jvm.java.util.UUID.fromString(query_id)  # type: ignore[union-attr] # noqa: SLF001 - as above
        running = session._jsparkSession.sharedState().activeStreamingQueries().get(number)  # noqa: SLF001 - as above
        # Not the analyzed plan: there, the micro-batch's time, which Spark keeps for replays, is not yet a constant.
        plan = running.lastExecution().optimizedPlan()
    except _SHOWS_NO_PLAN:
        return False
    _require_deterministic(plan)
    return True


def _require_deterministic(plan: JavaObject) -> None:
    if not plan.deterministic():
        raise _not_repeatable("it has expressions such as rand(), uuid(), first() or monotonically_increasing_id()")


def _not_repeatable(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the DataFrame may give other rows when it is computed again: {why}. Partition by partition, a batch that is run "
        "again would mix the rows of two runs",
        next_step='use format("dualwrite"), which writes whole batches; or materialize the DataFrame first (a table, '
        "df.checkpoint()) and write that; or set allow_nondeterministic=True if you know that the rows are the same each time",
    )


def with_digest(df: DataFrame, schema: spark.StructType, layout: Layout) -> DataFrame:
    """Add a column to the DataFrame: a hash of each row's written columns, as far as they can be hashed.

    Args:
        df: Has the columns of the schema, in its order.
        schema: The DataFrame's own schema.
        layout: Which column goes where.
    """
    forms = [(name, hashed_form(schema[number].dataType)) for number, name in _written(df.columns, layout)]
    hashed = [form(df[name]) for name, form in forms if form is not None]
    # If no column can be hashed, only the number of rows is compared.
    return df.withColumn(_DIGEST, functions.xxhash64(*hashed or [functions.lit(0)]))


def left_out(schema: spark.StructType, layout: Layout) -> Sequence[str]:
    """The written columns that the digest leaves out.

    Args:
        schema: The DataFrame's own schema.
        layout: Which column goes where.
    """
    return [name for number, name in _written(schema.names, layout) if hashed_form(schema[number].dataType) is None]


def _written(names: Sequence[str], layout: Layout) -> Sequence[tuple[int, str]]:
    used = {column.source for column in layout.projected} | {number for number, _ in layout.json_columns}
    return [(number, name) for number, name in enumerate(names) if number in used]


def hashed_form(data_type: spark.DataType) -> Callable[[Column], Column] | None:
    """The conversion of a type for ``xxhash64``, so that equal values have equal hashes; None if it cannot be hashed."""
    if _can_hash(data_type):
        return lambda column: column
    if isinstance(data_type, spark.MapType) and _can_hash(data_type.keyType) and _can_hash(data_type.valueType):
        # Equal maps may have their entries in different orders.
        return lambda column: functions.sort_array(functions.map_entries(column))
    if isinstance(data_type, spark.VariantType):
        return functions.to_json
    if type(data_type).__name__ == "TimeType":  # PySpark 4.0 has none
        return lambda column: column.cast(spark.StringType())
    return None


def _can_hash(data_type: spark.DataType) -> bool:
    if isinstance(data_type, spark.ArrayType):
        return _can_hash(data_type.elementType)
    if isinstance(data_type, spark.StructType):
        return all(_can_hash(field.dataType) for field in data_type.fields)
    return isinstance(data_type, _HASHED)


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the rows of a partition, in any order.

    Attributes:
        rows: Their number.
        digest: The sum of their hashes, 64 bits with a sign; None if it is not known.
    """

    rows: int
    digest: int | None

    def differs_from(self, other: Fingerprint) -> bool:
        """Whether the two are certain to be of different rows."""
        if self.digest is None or other.digest is None:
            return False
        return self != other


def may_mix(what: str, partition_count: int, written: int, remedy: str = "") -> str | None:
    """The warning, for people, that a run of the batch cannot compare its rows with those of another run.

    Args:
        what: First words of the warning: what is not compared, or not known.
        partition_count: Of the batch. A single partition is written as a whole, so no runs mix.
        written: Number of partitions already written. If all are, no run writes any more.
        remedy: A remedy besides the Data Source.

    Returns:
        The warning; None if no two runs can mix.
    """
    if partition_count <= 1 or written >= partition_count:
        return None
    return (
        f"{what}; should they differ when the batch is run again, both sides get the rows of two runs. "
        f'{remedy}format("dualwrite") writes whole batches, and needs no comparison'
    )


def other_rows(name: str, ours: Fingerprint, theirs: Fingerprint) -> ConfigurationError:
    """The error for a partition that was written with other rows than this run has for it."""
    found = f"has {ours.rows} rows now" if ours.rows != theirs.rows else "has other rows now"
    return ConfigurationError(
        f"{name}: the partition is written already with {theirs.rows} rows, and {found}: the DataFrame has changed, or gives "
        "other rows when it is computed again",
        next_step="nothing more of the batch is written: run it with the rows of its first run; or undo what is written, and "
        'use a new batch id with a DataFrame that is materialized first, or with format("dualwrite")',
    )


class Fingerprinted:
    """Passes a partition's batches on and takes their fingerprint.

    Args:
        batches: As Spark gives them: the DataFrame's columns, and the hashes if :func:`with_digest` has added them.
        columns: The number of the DataFrame's columns.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], columns: int) -> None:
        self._batches = batches
        self._columns = columns
        self._rows = 0
        self._sum: np.uint64 | None = np.uint64(0)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self._rows += batch.num_rows
            if batch.num_columns > self._columns:
                hashes = batch.column(self._columns).to_numpy(zero_copy_only=False)
                with np.errstate(over="ignore"):
                    self._sum = None if self._sum is None else self._sum + hashes.view(np.uint64).sum(dtype=np.uint64)
            else:
                self._sum = None
            yield batch

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of all batches passed on so far."""
        return Fingerprint(self._rows, None if self._sum is None else int(self._sum.astype(np.int64)))

    def take_all(self) -> Fingerprint:
        """Consume the remaining batches, and return the fingerprint of all."""
        for _ in self:
            pass
        return self.fingerprint()
