"""Arrow batches into PostgreSQL by binary COPY, inside the dual write's own database transaction, with bounded memory."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, cast

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pgpq import ArrowToPostgresBinaryEncoder
from pgpq.encoders import StringEncoderBuilder
from pgpq.schema import Jsonb
from psycopg import sql

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark.databases.database import require_all_taken, require_kept
from dualwrite.sinks.spark.databases.postgresql__sinks_spark_databases_postgresql_catalog import require_types
from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import lists_with
from dualwrite.stores.sql.access__stores_sql_access_failures import driver_words

if TYPE_CHECKING:
    from psycopg import Copy, Cursor
    from sqlalchemy import Connection

    from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import RowNames
    from dualwrite.sinks.spark.layout import Copied, Layout

_UUID_BYTES: Final = 16
_UUID: Final = pa.binary(_UUID_BYTES)
_NAMES_KEY: Final = frozenset({"23503", "23505", "23P01"})
"""SQLSTATEs whose detail names a key: missing in another table, duplicate, or in conflict with an exclusion constraint."""
_KEY: Final = re.compile(r"Key \(.*?\)=\(.*?\)")
_LINE: Final = re.compile(r", line ([0-9]+)")
"""In the first line of the context, which may name a staging table; in binary COPY it holds no values."""
_DATA_CLASSES: Final = frozenset({"21", "22", "23", "42"})
"""SQLSTATE classes that the same rows cause again: duplicate keys, bad values, violated constraints, missing rights."""


_DAYS: Final = (-2440588, 2145042905)
_MICROSECONDS: Final = (-210866803200000000, 2**63 - 1)
"""From 4713 BC, in days and in microseconds since 1970, to what each type holds (``IS_VALID_DATE``, ``IS_VALID_TIMESTAMP`` in
PostgreSQL's timestamp.h). Numbers outside stand for its infinities, or have no binary form.
"""


class _Driver(Protocol):
    """The part of a ``psycopg.Connection`` that is used here."""

    def cursor(self) -> Cursor[tuple[object, ...]]:
        """A new cursor."""
        ...


class TableCopy:
    """A running COPY. Batches may be written until the block ends.

    Attributes:
        sent_rows: Number of rows sent so far.
    """

    def __init__(self, copy: Copy, layout: Layout, names: RowNames | None = None) -> None:
        self.sent_rows = 0
        self._names = names
        self._copy = copy
        self._columns = layout.table_columns
        schema = pa.schema([(f"c{number}", _wire_type(layout, one)) for number, one in enumerate(self._columns)])
        self._schema = schema
        self._encoder = ArrowToPostgresBinaryEncoder.new_with_encoders(
            schema,
            {
                field.name: StringEncoderBuilder.new_with_output(field, Jsonb())
                if column.encoding == "jsonb"
                else ArrowToPostgresBinaryEncoder.infer_encoder(field)
                for field, column in zip(schema, self._columns, strict=True)
            },
        )
        copy.write(self._encoder.write_header())

    def write(self, batch: pa.RecordBatch) -> None:
        """Send the rows of one projected batch. They are in the table once the transaction commits.

        Raises:
            ConfigurationError: A text in a ``uuid`` column is no UUID, or a column would change a value.
            psycopg.Error: The database refuses a row, or is gone; `copying` maps it.
        """
        arrays = []
        for one in self._columns:
            array = batch.column(one.source)
            require_kept(one, _changes(one, array), self._name)
            arrays.append(self._uuids(one.name, array) if one.encoding == "uuid" else array)
        self._copy.write(self._encoder.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema)))
        self.sent_rows += batch.num_rows

    def _uuids(self, name: str, texts: pa.Array) -> pa.Array:
        found: list[bytes | None] = []
        try:
            found.extend(None if text is None else bytes.fromhex(text.replace("-", "")) for text in texts.to_pylist())
            return pa.array(found, _UUID)
        except (ValueError, pa.ArrowInvalid) as error:
            # A text that is not hexadecimal ends the list; a number of the wrong length is an entry of it.
            index = next(
                (index for index, one in enumerate(found) if one is not None and len(one) != _UUID_BYTES), len(found)
            )
            raise ConfigurationError(
                f"a value for column {name!r} of type uuid is not a UUID: {self._name(index)}"
            ) from error

    def _name(self, index: int) -> str:
        return f"row {index + 1}" if self._names is None else self._names.in_batch(index)

    def finish(self) -> None:
        """Send the end of the data."""
        self._copy.write(self._encoder.finish())


@contextmanager
def copying(
    connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
) -> Generator[TableCopy, None, None]:
    """COPY the layout's table columns into a table; an exception in the block cancels it.

    Args:
        connection: Inside the dual write.
        layout: Which column goes where.
        table: Schema and name of the table.
        names: Names a row that the database refuses.

    Raises:
        TransactionAborted: The database refused a row, left one out, or is gone, or the table's types are no longer those of
            the plan: leave the dual write, both sides abort.
    """
    driver = cast("_Driver", connection.connection.dbapi_connection)
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier(*table),
        sql.SQL(", ").join(map(sql.Identifier, layout.table_column_names)),
    )
    try:
        with driver.cursor() as cursor:
            with cursor.copy(statement) as copy:
                table_copy = TableCopy(copy, layout, names)
                yield table_copy
                table_copy.finish()
            taken = cursor.rowcount  # known once the COPY has ended, and until the cursor is closed
    except psycopg.Error as error:
        line = _LINE.search((error.diag.context or "").partition("\n")[0])
        row = names.of(int(line[1])) if line and names is not None else None
        raise refused(f"table {layout.table[1]!r} does not take the rows", error, row) from error
    require_all_taken(layout.table[1], sent=table_copy.sent_rows, taken=taken)
    require_types(connection, table, layout.table_types, shown_name=layout.table[1])


def refused(what: str, error: psycopg.Error, row: str | None = None) -> TransactionAborted:
    """The error for rows that a table refuses; it says whether a retry with the same rows may succeed.

    Args:
        what: First words of the message: what failed.
        error: The database's error.
        row: The name of the row, if it is known.
    """
    shown = []
    # Only this detail: others show the values of whole rows.
    if error.sqlstate in _NAMES_KEY and (key := _KEY.match(error.diag.message_detail or "")):
        shown.append(key[0])
    if column := error.diag.column_name:
        shown.append(f"column {column!r}")
    if row is not None:
        shown.append(row)
    place = f" ({', '.join(shown)})" if shown else ""
    return TransactionAborted(
        f"{what}: {driver_words(error)}{place}", retryable=(error.sqlstate or "")[:2] not in _DATA_CLASSES
    )


def _changes(column: Copied, array: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Values that PostgreSQL would change without an error, or that have no binary form: words, and which rows have one."""
    if column.longest is not None:
        # What is too long by spaces alone is cut, as the SQL standard says.
        too_long = pc.greater(pc.utf8_length(array), column.longest)
        yield f"it has more than {column.longest} characters", pc.fill_null(too_long, False)
    is_list = pa.types.is_list(array.type)
    inner = array.flatten() if is_list else array
    if pa.types.is_date(inner.type):
        numbers, (first, last) = inner.cast(pa.int32()), _DAYS
    elif pa.types.is_timestamp(inner.type):
        numbers, (first, last) = inner.cast(pa.int64()), _MICROSECONDS
    else:
        return
    outside = pc.fill_null(pc.or_(pc.less(numbers, first), pc.greater(numbers, last)), False)
    yield "it is not in the years that the type has", lists_with(array, outside) if is_list else outside


def _wire_type(layout: Layout, column: Copied) -> pa.DataType:
    return _UUID if column.encoding == "uuid" else layout.projected[column.source].arrow
