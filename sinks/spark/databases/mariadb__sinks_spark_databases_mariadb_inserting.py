"""Arrow batches into MariaDB or MySQL by INSERTs of many rows, inside the dual write's own database transaction.

``LOAD DATA LOCAL INFILE`` takes about three quarters of the time (``make bench ONLY=mariadb``), but needs ``local_infile``,
which MySQL switches off, and turns errors into warnings.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from pymysql.err import MySQLError

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark.databases.database import require_all_taken
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_catalog import require_types
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_literals import literal_rows, statements
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_quoting import listed, table_name
from dualwrite.sinks.spark.databases.mariadb__sinks_spark_databases_mariadb_refusals import (
    is_about_rows,
    refused,
    wrapped,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlalchemy import Connection

    from dualwrite.sinks.spark.digests__sinks_spark_columns_row_names import RowNames
    from dualwrite.sinks.spark.layout import Layout

MOST_BYTES: Final = 2**20
"""The size of one INSERT: larger ones are no faster, and every server takes this one by default."""
_LONGEST_CHARACTER: Final = 4
_CHANGED: Final = frozenset({1264, 1265, 1292, 1366, 1406})
"""Warnings that a value was changed. In strict mode these are errors, but not for all types."""


class Inserts:
    """Writes rows into one table.

    Attributes:
        sent_rows: Number of rows sent so far.
        taken_rows: Number of rows that the server has counted.
    """

    def __init__(self, connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None) -> None:
        self.sent_rows = 0
        self.taken_rows = 0
        self._layout = layout
        self._names = names
        self._cursor: Any = cast("Any", connection.connection.dbapi_connection).cursor()
        self._into = f"INSERT INTO {table_name(table)} ({listed(layout.table_column_names)}) VALUES "

    def write(self, batch: pa.RecordBatch) -> None:
        """See :class:`~dualwrite.sinks.spark.databases.database.RowWriter`."""
        columns = self._layout.table_columns
        rows = literal_rows(columns, [batch.column(one.source) for one in columns], self._name)
        for start, end in statements(rows, MOST_BYTES):
            if end - start == 1 and len(rows[start]) > MOST_BYTES // _LONGEST_CHARACTER:
                self._require_packet(rows[start], start)
            try:
                self._insert(rows[start:end])
            except MySQLError as error:
                failed = wrapped(error)
                bad = self._first_refused(rows[start:end]) if is_about_rows(failed) else None
                name = None if bad is None else self._name(start + bad)
                raise refused(f"table {self._layout.table[1]!r} does not take the rows", failed, name) from error
        self.sent_rows += batch.num_rows

    def _require_packet(self, row: str, index: int) -> None:
        """Refuse a row that is larger than the server accepts: it would close the connection without an explanation."""
        self._cursor.execute("SELECT @@max_allowed_packet")
        [most] = self._cursor.fetchone()
        size = len(self._into) + len(row.encode()) + 3
        if size >= most:
            raise ConfigurationError(
                f"a row takes {size} bytes as an INSERT, and the server's max_allowed_packet is {most} ({self._name(index)})",
                next_step="raise max_allowed_packet on the server; a byte of a binary value takes two",
            )

    def _insert(self, rows: Sequence[str]) -> None:
        # Not through SQLAlchemy, which would look for parameters in the values.
        self.taken_rows += self._cursor.execute(f"{self._into}({'),('.join(rows)})")
        if self._cursor.warning_count:
            self._refuse_changes(len(rows))

    def _refuse_changes(self, rows: int) -> None:
        self._cursor.execute("SHOW WARNINGS")
        for _, number, words in self._cursor.fetchall():
            if number in _CHANGED:
                raise TransactionAborted(
                    f"table {self._layout.table[1]!r} would change a value of these {rows} rows: {words}",
                    next_step="nothing of the partition was written on either side: change the value, or the column's type",
                    retryable=False,
                )

    def _first_refused(self, rows: Sequence[str]) -> int | None:
        """The first row that the table refuses, if it can be found.

        Not every server says which it was. A failed statement is undone, and the transaction continues; it is aborted later.
        """
        first, last = 0, len(rows)
        while last - first > 1:
            middle = (first + last) // 2
            try:
                self._insert(rows[first:middle])
                first = middle
            except MySQLError as error:
                if not is_about_rows(wrapped(error)):
                    return None
                last = middle
        return first

    def _name(self, index: int) -> str:
        return f"row {index + 1}" if self._names is None else self._names.in_batch(index)

    def close(self) -> None:
        """Give up the cursor."""
        self._cursor.close()


@contextmanager
def inserting(
    connection: Connection, layout: Layout, table: tuple[str, str], names: RowNames | None = None
) -> Generator[Inserts, None, None]:
    """See :meth:`SinkDatabase.writing`."""
    with closing(Inserts(connection, layout, table, names)) as inserts:
        yield inserts
    require_all_taken(layout.table[1], sent=inserts.sent_rows, taken=inserts.taken_rows)
    require_types(connection, table, layout.table_types, shown_name=layout.table[1])
