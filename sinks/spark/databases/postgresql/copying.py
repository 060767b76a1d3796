"""Arrow batches into PostgreSQL by binary COPY, inside the dual write's own database transaction, with bounded memory."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, cast

import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder
from pgpq.encoders import StringEncoderBuilder
from pgpq.schema import Jsonb
from psycopg import sql

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark.databases.database import require_all_taken
from dualwrite.sinks.spark.databases.postgresql.catalog import require_types
from dualwrite.stores.sql.access.failures import driver_words

if TYPE_CHECKING:
    from psycopg import Copy, Cursor
    from sqlalchemy import Connection

    from dualwrite.sinks.spark.columns.layout import Copied, Layout
    from dualwrite.sinks.spark.columns.row_names import RowNames

_UUID_BYTES: Final = 16
_UUID: Final = pa.binary(_UUID_BYTES)
_NAMES_KEY: Final = frozenset({"23503", "23505", "23P01"})
"""SQLSTATEs whose detail names a key: missing in another table, duplicate, or in conflict with an exclusion constraint."""
_KEY: Final = re.compile(r"Key \(.*?\)=\(.*?\)")
_LINE: Final = re.compile(r", line ([0-9]+)")
"""In the first line of the context, which may name a staging table; in binary COPY it holds no values."""
_DATA_CLASSES: Final = frozenset({"21", "22", "23", "42"})
"""SQLSTATE classes that the same rows cause again: duplicate keys, bad values, violated constraints, missing rights."""


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
            ConfigurationError: A text in a ``uuid`` column is no UUID.
            psycopg.Error: The database refuses a row, or is gone; `copying` maps it.
        """
        arrays = [
            self._uuids(one.name, batch.column(one.source)) if one.encoding == "uuid" else batch.column(one.source)
            for one in self._columns
        ]
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
            row = "" if self._names is None else f": {self._names.in_batch(index)}"
            raise ConfigurationError(f"a value for column {name!r} of type uuid is not a UUID{row}") from error

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


def _wire_type(layout: Layout, column: Copied) -> pa.DataType:
    return _UUID if column.encoding == "uuid" else layout.projected[column.source].arrow
