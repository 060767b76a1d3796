"""The SQL of an outbox table that another program fills: reads its first rows, deletes or marks them, tells of new ones.

Numbers are not in the order of commits: a row with a lower number appears later, if its transaction was concurrent. So a read
begins at the head of the table, or at a number below which there is no row and can be none. No row is skipped, and none
overtakes another one that was committed before it was inserted.

It deletes exactly what was read. On PostgreSQL a relay's transaction runs at REPEATABLE READ: both statements see one snapshot,
so a range of a unique column names the rows that were read and no others. Elsewhere rows are named one by one, and the number
of deleted rows is compared.

The rows are read with a cursor of the server, as many as are wanted and no more bytes than are allowed.

**Where a read begins.** As long as any snapshot in the database is older than they are, rows that were sent stay dead at the
head of the index, and a read that begins there steps over every one of them. :class:`dualwrite.stores.sql.outbox.Floor` has the
rule and its proof, which needs to know who may have drawn numbers that are not committed yet. Of a table of another program
that is known on PostgreSQL, where the number is the identity that the database always generates, and generates one by one: who
inserts a row has locked the table (``ROW EXCLUSIVE``) before its number is drawn, and keeps that lock until its transaction
ends. ``pg_locks`` shows the holders after the read; one that is prepared meanwhile keeps its name there. Once none of them is
there any more, the next read shows all that is left below.

A row whose number was given by hand (``OVERRIDING SYSTEM VALUE``, ``COPY``), or whose mark somebody takes off again, may stand
below. So once a minute a read begins at the head whatever is known. Other tables have no floor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from sqlalchemy import (
    Boolean,
    Column,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    and_,
    any_,
    bindparam,
    delete,
    exc,
    func,
    inspect,
    literal_column,
    select,
    text,
    true,
    update,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.types import DateTime, NullType, String

from dualwrite.clock import now_s
from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.protocol.message import columns_of
from dualwrite.protocol.outbox_table import channel, fields_of, schema_and_name
from dualwrite.stores.sql.access import map_database_error
from dualwrite.stores.sql.dialect import quoted
from dualwrite.stores.sql.outbox import Floor, Seen
from dualwrite.stores.sql.postgresql import SERVER
from dualwrite.stores.sql.tables import MYSQL, OWN_TABLES, database_now
from dualwrite.stores.sql.waiting_rows import on_server

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Engine, Select

    from dualwrite.protocol.outbox_table import Field, OutboxTable

ISOLATION: Final = {"postgresql": "REPEATABLE READ", "mysql": "READ COMMITTED", "mariadb": "READ COMMITTED"}
"""The level of a relay's transactions. On MariaDB and MySQL, deletes at a higher one would lock the gaps that others insert
into."""
_FIRST_FETCH: Final = 200
_MOST_FETCHED: Final = 5_000
_NAMED_AT_ONCE: Final = 900
"""Rows named one by one in a statement: MariaDB turns longer lists into a join."""
_EPOCH: Final = "1970-01-01"
_WHOLE_EVERY_S: Final = 60.0
_GROWS: Final = """
SELECT c.relkind = 'r' AND NOT EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhparent, i.inhrelid))
 AND a.attidentity = 'a' AND s.seqcache = 1 AND s.seqincrement > 0 AND s.seqmin > 0 AND NOT s.seqcycle
 FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = CAST(:column AS text)
 JOIN pg_sequence s ON s.seqrelid = CAST(pg_get_serial_sequence(CAST(:name AS text), CAST(:column AS text)) AS regclass)
 WHERE c.oid = to_regclass(CAST(:name AS text))"""
"""Whether the numbers of a column grow in the order in which they are drawn, and are drawn by each INSERT alone."""
_INSERTING: Final = """
SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = to_regclass(:name) AND granted
 AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND mode = 'RowExclusiveLock'"""
_BYTES: Final = re.compile("BINARY|BLOB|BYTEA")
"""In the names of types that hold bytes: SQLAlchemy gives those of a database no class in common."""


class Rows(NamedTuple):
    """Rows of the table: the columns of ``fields_of``, and behind them what names the row.

    ``size`` are the bytes of what was read, ``full`` says that there may be more.
    """

    rows: Sequence[Sequence[Any]]
    size: int
    full: bool


@dataclass(frozen=True)
class _Names:
    """How a row is named: by columns that are unique together, or by its place in the table (PostgreSQL's ``ctid``)."""

    columns: Sequence[ColumnElement[Any]]
    ranged: bool  # they are also the order, so that the first and the last one name all between them
    place: bool = False


class OutboxTableRows:
    """One outbox table in one database, looked at and found fit.

    The methods that take a connection work inside the caller's transaction, and leave SQLAlchemy's errors as they are.
    """

    def __init__(self, engine: Engine, table: OutboxTable) -> None:
        self._engine = engine
        self._is_postgresql = engine.dialect.name == "postgresql"
        self._table = table
        try:
            self._look()
        except exc.SQLAlchemyError as error:
            raise map_database_error(error, engine, None) from error

    # What the table is

    def _look(self) -> None:
        schema, name = schema_and_name(self._table)
        if name.lower() in OWN_TABLES:
            raise ConfigurationError(
                f"{self._table.name!r} is a table of this library's own, which writers and `dualwrite recover` send from",
                next_step="give --table the table that your program fills",
            )
        inspector = inspect(self._engine)
        if not (inspector.has_table(name, schema) or name in inspector.get_view_names(schema)):
            raise ConfigurationError(
                f"there is no table {self._table.name!r}", next_step="correct --table, or give its schema: SCHEMA.TABLE"
            )
        found = inspector.get_columns(name, schema)
        self._types = {one["name"]: one["type"] for one in found}
        nullable = {one["name"] for one in found if one["nullable"]}
        columns = [Column(one["name"], one["type"]) for one in found]
        self._rows = Table(name, MetaData(), *columns, schema=schema)
        for field in fields_of(self._table):
            self._require(field.column)
        for column in (*self._table.order_by, *filter(None, [self._table.mark])):
            self._require(column)
        key = list(inspector.get_pk_constraint(name, schema).get("constrained_columns") or ())
        unique = [key] if key else []
        unique += [list(one["column_names"]) for one in inspector.get_unique_constraints(name, schema)]
        unique += [
            list(cast("list[str]", one["column_names"])) for one in inspector.get_indexes(name, schema) if one["unique"]
        ]
        self._full_name = quoted(self._engine.dialect, schema, name)
        partitioned = self._is_postgresql and self._is_partitioned()
        self._mark = self._marking()
        self._order = self._ordering(key)
        self._names = self._naming(key, [one for one in unique if not nullable.intersection(one)], partitioned)
        self.statement(1)  # refuses columns of types that cannot be what they are named for
        self.floor = Floor() if self._numbers_grow() else None
        self._whole_at = now_s() + _WHOLE_EVERY_S
        self._last: tuple[object, int] | None = None

    def _is_partitioned(self) -> bool:
        kind = text(
            "SELECT c.relkind IN ('p', 'v') OR EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid)"
            " FROM pg_class c WHERE c.oid = to_regclass(:name)"
        )
        with self._engine.connect() as connection:
            return bool(connection.scalar(kind, {"name": self._full_name}))

    def _numbers_grow(self) -> bool:
        if not (self._is_postgresql and self._names.ranged):
            return False
        (column,) = self._names.columns
        asked = {"name": self._full_name, "column": cast("Column[Any]", column).name}
        with self._engine.connect() as connection:
            return bool(connection.scalar(text(_GROWS), asked))

    def _require(self, column: str) -> None:
        if column not in self._types:
            raise ConfigurationError(
                f"table {self._table.name!r} has no column {column!r}",
                next_step=f"name its columns by the options; it has {', '.join(self._types)}",
            )

    def _ordering(self, key: Sequence[str]) -> Sequence[ColumnElement[Any]]:
        if self._table.unordered:
            return ()
        if self._table.order_by:
            return [self._rows.c[one] for one in self._table.order_by]
        for candidate in (self._table.id_column, *(key if len(key) == 1 else ())):
            if candidate is not None and isinstance(self._types.get(candidate), Integer):
                return [self._rows.c[candidate]]
        shown = self._table.id_column or ", ".join(key) or "no key"
        raise ConfigurationError(
            f"the rows of {self._table.name!r} cannot be put into the order of insertion by {shown}",
            next_step="give --order-by a column that grows with each insert; if there is none, add one "
            f"({self._adding()}), or give --unordered",
        )

    def _adding(self) -> str:
        column = (
            "bigint GENERATED ALWAYS AS IDENTITY" if self._is_postgresql else "bigint NOT NULL AUTO_INCREMENT UNIQUE"
        )
        return f"ALTER TABLE {self._table.name} ADD COLUMN seq {column}"

    def _naming(self, key: Sequence[str], unique: Sequence[Sequence[str]], partitioned: bool) -> _Names:  # noqa: FBT001
        order = [column.name for column in self._order]
        one = len(order) == 1 and [order[0]] in [list(names) for names in unique]
        if one and (self._is_postgresql or self._engine.dialect.name == "sqlite"):
            return _Names(self._order, ranged=True)
        if self._is_postgresql and not partitioned:
            return _Names([literal_column("ctid::text")], ranged=False, place=True)
        if one:
            return _Names(self._order, ranged=False)
        if len(key) == 1:
            return _Names([self._rows.c[key[0]]], ranged=False)
        for names in unique:
            if len(names) == 1:
                return _Names([self._rows.c[names[0]]], ranged=False)
        raise ConfigurationError(
            f"no single column of {self._table.name!r} names its rows",
            next_step="give it a primary key of one column, or a unique column that is not null",
        )

    def _marking(self) -> tuple[ColumnElement[bool], dict[str, Any]] | None:
        if self._table.mark is None:
            return None
        column, kind = self._rows.c[self._table.mark], self._types[self._table.mark]
        if isinstance(kind, Boolean) or (isinstance(kind, Integer) and self._engine.dialect.name in {*MYSQL, "sqlite"}):
            return column.is_not(true()), {column.name: true()}
        if isinstance(kind, DateTime):
            return column.is_(None), {column.name: database_now()}
        raise ConfigurationError(
            f"column {column.name!r} is {kind}, which cannot mark what was sent", next_step="use a boolean or a time"
        )

    @property
    def describes(self) -> str:
        """In words: in which order rows go, and what becomes of them."""
        order = ", ".join(column.name for column in self._order)
        after = "deleted" if self._mark is None else f"marked in {self._table.mark}"
        return f"{f'in the order of {order}' if order else 'in no order'}, and then {after}"

    # What is read of a row

    def _selected(self, field: Field) -> ColumnElement[Any]:
        column, kind = self._rows.c[field.column], self._types[field.column]
        if field.use == "partition":
            if not isinstance(kind, Integer):
                raise ConfigurationError(
                    f"column {field.column!r} is {kind}, which is no partition", next_step="give a column of integers"
                )
            return column
        if field.use == "timestamp":
            return self._in_ms(column, kind)
        if field.use == "envelope" and isinstance(kind, (Integer, Boolean)):
            return column
        return self._in_bytes(column, kind)

    def _in_bytes(self, column: ColumnElement[Any], kind: object) -> ColumnElement[Any]:
        if isinstance(kind, LargeBinary) or _BYTES.search(type(kind).__name__):
            return column
        if self._is_postgresql:  # no Python text is made
            return func.convert_to(sql_cast(column, Text), "UTF8")
        if isinstance(kind, (String, NullType)):
            return sql_cast(column, Text) if self._engine.dialect.name == "sqlite" else column
        return sql_cast(column, String(255) if isinstance(kind, (Integer, Numeric, DateTime)) else Text)

    def _in_ms(self, column: ColumnElement[Any], kind: object) -> ColumnElement[Any]:
        if isinstance(kind, Integer):
            return column
        if not isinstance(kind, DateTime):
            raise ConfigurationError(
                f"column {self._table.timestamp_column!r} is {kind}, which is no time",
                next_step="give a column of times, or of integers: ms since 1970",
            )
        if self._is_postgresql:
            return literal_column(f"floor(extract(epoch FROM {self._quoted(column)}) * 1000)::bigint")
        if self._engine.dialect.name in MYSQL:
            shown = self._quoted(column)
            if type(kind).__name__ == "TIMESTAMP":  # kept as a moment, shown in the session's zone
                return literal_column(f"CAST(UNIX_TIMESTAMP({shown}) * 1000 AS SIGNED)")
            return literal_column(f"TIMESTAMPDIFF(MICROSECOND, '{_EPOCH}', {shown}) DIV 1000")
        return literal_column(f"CAST(strftime('%s', {self._quoted(column)}) AS INTEGER) * 1000")

    def _quoted(self, column: ColumnElement[Any]) -> str:
        return quoted(self._engine.dialect, cast("Column[Any]", column).name)

    def statement(self, limit: int, above: ColumnElement[int] | None = None) -> Select[Any]:
        """The statement that reads the first rows, of those above a number if it is given."""
        chosen = [self._selected(field).label(f"f{place}") for place, field in enumerate(fields_of(self._table))]
        names = [name.label(f"n{place}") for place, name in enumerate(self._names.columns)]
        found = select(*chosen, *names).select_from(self._rows).order_by(*self._order).limit(limit)
        if above is not None:
            found = found.where(self._names.columns[0] > above)
        return found if self._mark is None else found.where(self._mark[0])

    # In the caller's transaction

    def read(self, connection: Connection, limit: int, max_bytes: int) -> Rows:
        """The first rows, in their order: so many, and no more bytes than allowed; but one in any case."""
        floor = self.floor
        if floor is None:
            return self._read(connection, self.statement(limit), limit, max_bytes)
        above = None
        if now_s() >= self._whole_at:
            self._whole_at = now_s() + _WHOLE_EVERY_S
        elif floor.number:
            above = on_server(literal_column(SERVER), floor.server, floor.number)
        found = self._read(connection, self.statement(limit, above), limit, max_bytes)
        place, transaction = len(fields_of(self._table)), connection.get_transaction()
        numbers = [row[place] for row in found.rows]
        floor.read(transaction, numbers)
        if numbers:
            self._last = transaction, numbers[-1]
        return found

    def raise_floor(self) -> None:
        """Look whether a read may begin at a higher number. Call it between two transactions that read; it may raise."""
        if self.floor is None or self._last is None or not self.floor.is_due:
            return
        with self._engine.connect() as connection:
            inserting = connection.scalars(text(_INSERTING), {"name": self._full_name}).all()
            server = str(connection.scalar(select(literal_column(SERVER))))
        self.floor.look(*self._last, Seen(server, dict.fromkeys(inserting), ()))

    def _read(self, connection: Connection, statement: Select[Any], limit: int, max_bytes: int) -> Rows:
        rows: list[Sequence[Any]] = []
        size = 0
        for some, bytes_ in self._fetched(connection, statement, limit, max_bytes):
            if size + bytes_ > max_bytes:
                for row in some:
                    size += _size_of([row])
                    if rows and size > max_bytes:
                        return Rows(rows, size, full=True)
                    rows.append(row)
            else:
                size += bytes_
                rows += some
        return Rows(rows, size, full=len(rows) >= limit)

    def _fetched(
        self, connection: Connection, statement: Select[Any], limit: int, max_bytes: int
    ) -> Iterator[tuple[Sequence[Sequence[Any]], int]]:
        """Some rows after others, and the bytes of each part."""
        if not self._is_postgresql:
            with connection.execute(
                statement, execution_options={"stream_results": True, "max_row_buffer": _FIRST_FETCH}
            ) as result:
                while some := result.fetchmany(_FIRST_FETCH):
                    yield some, _size_of(some)
            return
        # The driver's own cursor, and binary: SQLAlchemy's text form doubles the bytes, and costs as much again for each row.
        compiled = statement.compile(dialect=self._engine.dialect, compile_kwargs={"literal_binds": True})
        driver = cast("Any", connection.connection.driver_connection)
        try:
            with driver.cursor(name="dualwrite_relay") as cursor:
                cursor.execute(str(compiled), {}, binary=True)
                wanted = min(_FIRST_FETCH, limit)
                while some := cursor.fetchmany(wanted):
                    yield some, (size := _size_of(some))
                    if len(some) < wanted:
                        return
                    wanted = max(1, min(_MOST_FETCHED, max_bytes // 4 * len(some) // max(size, 1)))
        except driver_error(self._engine) as error:
            raise exc.DBAPIError.instance(
                str(compiled), None, error, driver_error(self._engine), dialect=self._engine.dialect
            ) from error

    def remove(self, connection: Connection, rows: Sequence[Sequence[Any]], *, some: bool = False) -> None:
        """Delete the rows, or mark them as sent. They are all that a read has returned, or ``some`` of those.

        Raises:
            TransactionAborted: Some are gone already, or are others by now: another program has taken them.
        """
        place = len(fields_of(self._table))
        if self._names.ranged and not some:
            (name,) = self._names.columns
            count = self._change(connection, name.between(rows[0][place], rows[-1][place]))
        else:
            names = [row[place] for row in rows]
            count = sum(
                self._change(connection, self._named(part))
                for part in ([names] if self._is_postgresql else _parts(names))
            )
        if count != len(rows):
            raise TransactionAborted(
                f"{count} rows of {self._table.name!r} are left of {len(rows)} that were read: another program takes them, too",
                next_step="let one relay alone take rows from this table",
            )

    def _named(self, names: Sequence[Any]) -> ColumnElement[bool]:
        if self._names.place:
            listed = "{" + ",".join(f'"{one if isinstance(one, str) else bytes(one).decode()}"' for one in names) + "}"
            return text("ctid = ANY(CAST(:places AS tid[]))").bindparams(places=listed)  # type: ignore[return-value]
        (column,) = self._names.columns
        if not self._is_postgresql:
            return column.in_(names)
        from sqlalchemy.dialects.postgresql import ARRAY  # noqa: PLC0415 - of this database alone

        return column == any_(bindparam("names", list(names), type_=ARRAY(column.type)))

    def _change(self, connection: Connection, chosen: ColumnElement[bool]) -> int:
        if self._mark is None:
            return connection.execute(delete(self._rows).where(chosen)).rowcount
        unsent, values = self._mark
        return connection.execute(update(self._rows).where(and_(chosen, unsent)).values(values)).rowcount

    def shown(self, row: Sequence[Any]) -> str:
        """How people find a row: its name in the table."""
        names = row[len(fields_of(self._table)) :]
        what = "ctid" if self._names.place else cast("Column[Any]", self._names.columns[0]).name
        value = names[0]
        return f"{what} {value.decode() if isinstance(value, bytes) else value}"


def _size_of(rows: Sequence[Sequence[Any]]) -> int:
    """The bytes of rows; characters of texts count as bytes."""
    size = 0
    for column in columns_of(rows):
        if isinstance(next(filter(None, column), None), (bytes, str)):  # a column holds one type, and nulls
            size += sum(map(len, filter(None, column)))
    return size


def _parts(names: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(names), _NAMED_AT_ONCE):
        yield names[first : first + _NAMED_AT_ONCE]


def driver_error(engine: Engine) -> type[Exception]:
    """The base class of the errors of the engine's driver."""
    return cast("type[Exception]", cast("Any", engine.dialect.dbapi).Error)


def trigger_sql(engine: Engine, table: OutboxTable) -> str:
    """The script that lets a table on PostgreSQL tell of new rows, for its owner."""
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(
            "only PostgreSQL tells of new rows", next_step="leave it to the poll: --poll-interval says how often"
        )
    schema, name = schema_and_name(table)
    full = quoted(engine.dialect, schema, name)
    function, trigger = quoted(engine.dialect, schema, channel(table)), quoted(engine.dialect, channel(table))
    return (
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS\n"
        f"$$ BEGIN PERFORM pg_notify('{channel(table)}', ''); RETURN NULL; END $$;\n"
        f"DROP TRIGGER IF EXISTS {trigger} ON {full};\n"
        f"CREATE TRIGGER {trigger} AFTER INSERT ON {full}\n"
        f"    FOR EACH STATEMENT EXECUTE FUNCTION {function}();\n"
    )


class Listener:
    """Waits until the table's trigger tells of new rows, on a connection of its own; without one, for as long as it is told.

    The next wait replaces a lost connection. Used by one thread.
    """

    def __init__(self, engine: Engine, channel: str) -> None:
        self._engine = engine
        self._channel = channel
        self._connection: Any = None

    def wait(self, seconds: float) -> bool:
        """Wait at most so long. Returns whether there was news; raises the driver's error."""
        if self._connection is None:
            lent = self._engine.raw_connection()
            self._connection = driver = cast("Any", lent.driver_connection)
            lent.detach()
            driver.set_autocommit(True)
            driver.execute(f"LISTEN {quoted(self._engine.dialect, self._channel)}")
            return True  # what came before it listened
        try:
            return any(True for _ in self._connection.notifies(timeout=seconds, stop_after=1))
        except driver_error(self._engine):
            self.close()
            raise

    def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
