"""Does a batch that is run again give the same rows? Seen in the plan before, and in a digest of each partition's rows after.

Partitions that are written stay when a batch is run again. If the run gives other rows, or the same rows in other partitions,
both sides end up with a mixture of two runs: some rows twice, others nowhere.
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
"""The types that ``xxhash64`` takes in every version of Spark."""
_SHOWS_NO_PLAN: Final = (Py4JError, AttributeError)
"""Raised where a version of Spark lacks a method, or returns null: py4j gives ``None``, which has no attributes."""
_INDETERMINATE: Final = "INDETERMINATE"


def require_deterministic(df: DataFrame, rows: RDD[object] | None = None) -> None:
    """Refuse a DataFrame that gives other rows when it is computed again, as far as Spark itself knows.

    Args:
        df: What the user has given.
        rows: What runs, where that is known by now: the order of its shuffles matters, too.

    Raises:
        ConfigurationError: It gives other rows.
    """
    _require_deterministic(df._jdf.queryExecution().analyzed())  # noqa: SLF001 - Spark offers it to nobody in Python
    if rows is not None and rows._jrdd.rdd().outputDeterministicLevel().toString() == _INDETERMINATE:  # noqa: SLF001 - as above
        raise _not_repeatable("a shuffle deals its rows out in the order in which they come")


def require_deterministic_stream(df: DataFrame, query_id: str) -> bool:
    """As :func:`require_deterministic`, for the stream that a micro-batch belongs to: of that, its DataFrame shows nothing.

    Args:
        df: The micro-batch, while ``foreachBatch`` runs.
        query_id: Of the stream's query.

    Returns:
        Whether Spark has shown the stream's plan.

    Raises:
        ConfigurationError: It gives other rows.
    """
    session = df.sparkSession
    try:
        number = session._jvm.java.util.UUID.fromString(query_id)  # type: ignore[union-attr] # noqa: SLF001 - as above
        running = session._jsparkSession.sharedState().activeStreamingQueries().get(number)  # noqa: SLF001 - as above
        # Not the analyzed one: in that, the time of the micro-batch, which Spark keeps, is no constant yet.
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
        next_step='use format("dualwrite"), which writes whole batches; or write the DataFrame down first (a table, '
        "df.checkpoint()) and write that; or set allow_nondeterministic=True if the rows are the same each time all the same",
    )


def with_digest(df: DataFrame, schema: spark.StructType, layout: Layout) -> DataFrame:
    """The DataFrame with one more column, a hash of each row's columns that are written, as far as they can be hashed.

    Args:
        df: With the columns of the schema, in its order.
        schema: The DataFrame's own schema.
        layout: Which column goes where.
    """
    forms = [(name, hashed_form(schema[number].dataType)) for number, name in _written(df.columns, layout)]
    hashed = [form(df[name]) for name, form in forms if form is not None]
    # Where no column can be hashed, the number of rows is compared.
    return df.withColumn(_DIGEST, functions.xxhash64(*hashed or [functions.lit(0)]))


def left_out(schema: spark.StructType, layout: Layout) -> Sequence[str]:
    """The columns that are written, and that the digest knows nothing of.

    Args:
        schema: The DataFrame's own schema.
        layout: Which column goes where.
    """
    return [name for number, name in _written(schema.names, layout) if hashed_form(schema[number].dataType) is None]


def _written(names: Sequence[str], layout: Layout) -> Sequence[tuple[int, str]]:
    used = {column.source for column in layout.projected} | {number for number, _ in layout.json_columns}
    return [(number, name) for number, name in enumerate(names) if number in used]


def hashed_form(data_type: spark.DataType) -> Callable[[Column], Column] | None:
    """How ``xxhash64`` is given a column of that type, so that equal values have equal hashes; None where it cannot be."""
    if _can_hash(data_type):
        return lambda column: column
    if isinstance(data_type, spark.MapType) and _can_hash(data_type.keyType) and _can_hash(data_type.valueType):
        # Equal maps may have their entries in another order.
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
    """Which rows a partition has, in whatever order.

    Attributes:
        rows: How many.
        digest: The sum of their hashes, 64 bits with a sign; None where it is not known.
    """

    rows: int
    digest: int | None

    def differs_from(self, other: Fingerprint) -> bool:
        """Whether they are of other rows for certain."""
        if self.digest is None or other.digest is None:
            return False
        return self != other


def may_mix(what: str, partition_count: int, written: int, remedy: str = "") -> str | None:
    """The warning for rows that a run of the batch cannot compare with those of another one, for people.

    Args:
        what: Is not compared, or not known.
        partition_count: Of the batch. One partition is written as a whole, so that no runs mix.
        written: How many of them are written already; with all of them, no run writes any more.
        remedy: Beside the Data Source.

    Returns:
        None where no two runs can mix.
    """
    if partition_count <= 1 or written >= partition_count:
        return None
    return (
        f"{what}; should they differ when the batch is run again, both sides get the rows of two runs. "
        f'{remedy}format("dualwrite") writes whole batches, and needs no comparison'
    )


def other_rows(name: str, ours: Fingerprint, theirs: Fingerprint) -> ConfigurationError:
    """The error for a partition that is written with other rows than this run has for it."""
    found = f"has {ours.rows} rows now" if ours.rows != theirs.rows else "has other rows now"
    return ConfigurationError(
        f"{name}: the partition is written already with {theirs.rows} rows, and {found}: the DataFrame has changed, or gives "
        "other rows when it is computed again",
        next_step="nothing more of the batch is written: run it with the rows of its first run; or undo what is written, and "
        'use a new batch id with a DataFrame that is written down first, or with format("dualwrite")',
    )


class Fingerprinted:
    """A partition's batches, passed on while their fingerprint is taken.

    Args:
        batches: As Spark gives them: the DataFrame's columns, and the hashes where :func:`with_digest` has added them.
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
        """Of all batches that were passed on so far."""
        return Fingerprint(self._rows, None if self._sum is None else int(self._sum.astype(np.int64)))

    def take_all(self) -> Fingerprint:
        """Take what is left, and return the fingerprint of all."""
        for _ in self:
            pass
        return self.fingerprint()
