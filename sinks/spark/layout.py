"""Plans which column of the DataFrame goes where: on the driver, from names and types, before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import types as spark

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types import Form, check_json, wire_for
from dualwrite.sinks.spark.merging import DELETED, ORDER, Merge
from dualwrite.sinks.spark.options import DELETE, REGISTERED, UPSERT, Format
from dualwrite.sinks.spark.schema_parts import Given, Part, PartSchema, module_of

if TYPE_CHECKING:
    from dualwrite.sinks.spark.column_types import Table
    from dualwrite.sinks.spark.options import SinkOptions
    from dualwrite.sinks.spark.registry import Registered

BOOLEAN: Final = "boolean"
WHOLE_ROW: Final = -1
"""The source of the JSON value: all columns that go into the table."""
WRONG: Final = "wrong"
"""The column that says what is wrong with a row."""
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

_TEXTUAL: Final = (spark.StringType, spark.CharType, spark.VarcharType)
_WHOLE_NUMBERS: Final = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)
_ORDERED: Final = (*_WHOLE_NUMBERS, spark.TimestampType, spark.TimestampNTZType, spark.DateType)


@dataclass(frozen=True)
class Projected:
    """One column as it reaches a task.

    `source` is the number of the DataFrame's column, or ``WHOLE_ROW``; `arrow` is its type after the conversion.
    """

    source: int
    form: Form
    arrow: pa.DataType


@dataclass(frozen=True)
class Encoded:
    """A message's key or value that is written with a schema, and the positions of its columns among the projected ones.

    `registered` has the driver's findings in the registry; tasks ask the registry only for a topic column's subjects.
    """

    schema: PartSchema
    columns: tuple[int, ...]
    registered: tuple[Registered, ...] = ()


@dataclass(frozen=True)
class MessageColumns:
    """The positions of a message's parts among the projected columns; None for a part that has no column."""

    value: int | Encoded
    key: int | Encoded | None
    topic: int | None
    headers: int | None
    partition: int | None
    timestamp: int | None


@dataclass(frozen=True)
class Copied:
    """A column of the table that is written; `source` is the position of its value among the projected columns.

    `shown_type` and `longest` are as in :class:`TableColumn`, when the batch was planned.
    """

    name: str
    source: int
    encoding: str
    shown_type: str
    longest: int | None = None


@dataclass(frozen=True)
class Layout:
    """The plan. Small, and pickles.

    `cluster_id` is the Kafka cluster that the driver has found; empty before that. `merge` says how rows meet those of the same
    key; None if rows are only added. `whole_row` is the position of the row's JSON among the projected columns if rows may be
    put aside; their batches then end in one more column, with what is wrong with a row, or null. `defers` says
    that constraints may be deferred: of the table, or of others, into which what a merge changes or deletes may cascade.
    """

    projected: tuple[Projected, ...]
    json_columns: tuple[tuple[int, str], ...]
    message: MessageColumns
    table: tuple[str, str]
    table_columns: tuple[Copied, ...]
    cluster_id: str = ""
    merge: Merge | None = None
    whole_row: int | None = None
    defers: bool = False

    @property
    def arrow_schema(self) -> pa.Schema:
        """The projected columns as an Arrow schema."""
        columns = [(f"c{number}", column.arrow) for number, column in enumerate(self.projected)]
        return pa.schema(columns if self.whole_row is None else [*columns, (WRONG, pa.string())])

    @property
    def table_column_names(self) -> tuple[str, ...]:
        """The table's columns that are written."""
        return tuple(column.name for column in self.table_columns)

    @property
    def own_columns(self) -> tuple[Copied, ...]:
        """What a staging table needs for the merge besides the table's columns, in types that every database has."""
        columns: tuple[Copied, ...] = ()
        if self.merge is not None and self.merge.order is not None:
            columns += (Copied(ORDER, self.merge.order, "", "bigint"),)
        if self.merge is not None and self.merge.op is not None:
            columns += (Copied(DELETED, self.merge.op, BOOLEAN, BOOLEAN),)
        return columns

    @property
    def staged_columns(self) -> tuple[Copied, ...]:
        """The columns of a staging table."""
        return self.table_columns + self.own_columns

    @property
    def table_types(self) -> dict[str, str]:
        """The types of those columns when the batch was planned."""
        return {column.name: column.shown_type for column in self.table_columns}


def plan_layout(
    schema: spark.StructType,
    options: SinkOptions,
    table: Table,
    given: Mapping[str, Given] | None = None,
    *,
    shared: bool = False,
) -> Layout:
    """Match the DataFrame's columns with the message's parts and the table's columns.

    `given` has the schemas of ``key`` and ``value``, if they are written with one. The error for a column that is missing,
    ambiguous, or does not fit names it and its type. `shared` says that other tables take rows of the DataFrame, too: by
    default this one then takes the columns that it has.
    """
    return _Planning(schema, options, table, given or {}, shared=shared).run()


def _twice(names: Collection[str]) -> str | None:
    """A name that is there twice; None if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


class _Planning:
    def __init__(
        self,
        schema: spark.StructType,
        options: SinkOptions,
        table: Table,
        given: Mapping[str, Given],
        *,
        shared: bool,
    ) -> None:
        self._shared = shared
        self._given = given
        self._fields = schema.fields
        self._numbers = {field.name: number for number, field in enumerate(schema.fields)}
        self._options = options
        self._table = table
        self._projected: dict[Projected, int] = {}

    def run(self) -> Layout:
        if (twice := _twice([field.name for field in self._fields])) is not None:
            raise ConfigurationError(f"the DataFrame has two columns named {twice!r}", next_step="rename one")
        options = self._options
        topic = self._textual("topic_column", options.topic_column)
        key = self._key()
        value = self._textual("value", options.value, binary=True) if options.format_of_value is Format.RAW else None
        headers, partition, timestamp = self._headers(), self._partition(), self._timestamp()
        wanted = self._wanted_columns()
        shown = dict.fromkeys(wanted)
        if options.op_column is not None and options.on_delete == "record":
            shown.setdefault(options.op_column)  # or a reader would take the record of a deleted row for an update
        json_columns = tuple((self._number("columns", name), name) for name in shown)
        table_columns = tuple(self._table_column(name, target) for name, target in wanted.items())
        self._check_all_given(wanted.values())
        merge = self._merge(wanted)
        whole_row = self._row_as_json(json_columns) if options.quarantines else None
        return Layout(
            json_columns=json_columns,
            message=MessageColumns(
                value=self._whole_value(json_columns) if value is None else value,
                key=key,
                topic=topic,
                headers=headers,
                partition=partition,
                timestamp=timestamp,
            ),
            table=(self._table.schema, self._table.name),
            defers=self._table.defers or merge is not None,
            table_columns=table_columns,
            merge=merge,
            whole_row=whole_row,
            projected=tuple(self._projected),
        )

    def _wanted_columns(self) -> dict[str, str]:
        options = self._options
        columns = options.columns
        if isinstance(columns, str):
            raise ConfigurationError("columns is a string; give a list of names, or a mapping")
        if isinstance(columns, Mapping):
            return dict(columns)
        if columns is not None:
            return {name: name for name in columns}
        elsewhere = {options.topic_column, options.headers, options.partition, options.timestamp, options.value}
        elsewhere |= {options.op_column, options.order_column}.difference(self._table.columns)
        if self._shared:
            elsewhere |= {field.name for field in self._fields}.difference(self._table.columns)
        return {field.name: field.name for field in self._fields if field.name not in elsewhere}

    def _merge(self, wanted: Mapping[str, str]) -> Merge | None:
        options = self._options
        if not options.upsert_keys:
            return None
        written = tuple(wanted.values())
        for setting, names in (("upsert_keys", options.upsert_keys), ("upsert_columns", options.upsert_columns or ())):
            for name in names:
                self._check_written(setting, name, written)
            if (twice := _twice(names)) is not None:
                raise ConfigurationError(f"{setting} names the column {twice!r} twice", next_step="name it once")
        reserved = next((name for name in self._table.columns if name in {ORDER, DELETED}), None)
        if reserved is not None:
            raise ConfigurationError(
                f"column {reserved!r} of table {self._table.name!r} has a name that upserts use themselves",
                next_step="rename it",
            )
        newer_by = wanted.get(options.order_column or "") if options.on_conflict == "newer" else None
        if options.on_conflict == "newer" and newer_by is None:
            raise ConfigurationError(
                f"on_conflict is newer, and the column {options.order_column!r} does not go into table {self._table.name!r}, "
                "which does not tell how old its rows are",
                next_step="add such a column to the table, or name it in `columns`",
            )
        if newer_by is not None and options.upsert_columns and newer_by not in options.upsert_columns:
            raise ConfigurationError(
                f"on_conflict is newer, and upsert_columns leaves out the column {newer_by!r}: a replaced row would look as "
                "old as it was, and the next older row would replace it",
                next_step=f"name {newer_by!r} in upsert_columns (upsertColumns)",
            )
        letters = options.operations
        return Merge(
            keys=tuple(options.upsert_keys),
            updated=() if options.on_conflict == "nothing" else self._updated(options.upsert_columns or written),
            newer_by=newer_by,
            order=self._order(),
            op=self._textual("op_column", options.op_column),
            upserts=tuple(letter for letter, operation in letters.items() if operation == UPSERT),
            deletes=tuple(letter for letter, operation in letters.items() if operation == DELETE),
            tombstones=options.on_delete == "tombstone",
        )

    def _updated(self, names: Collection[str]) -> tuple[str, ...]:
        """The columns that an upsert replaces: of those, all but a key's that the table lets nobody change."""
        fixed = [name for name in names if self._table.columns[name].set_once]
        lost = [name for name in fixed if name not in (self._options.upsert_keys or ())]
        if lost:
            raise ConfigurationError(
                f"column {lost[0]!r} of table {self._table.name!r} is GENERATED ALWAYS AS IDENTITY: a row that is there keeps "
                "its value",
                next_step="leave it out of `columns`, or out of upsert_columns (upsertColumns)",
            )
        return tuple(name for name in names if name not in fixed)

    def _check_written(self, setting: str, name: str, written: Collection[str]) -> None:
        if name not in self._table.columns:
            raise ConfigurationError(
                f"{setting} names the column {name!r}, which table {self._table.name!r} does not have",
                next_step=f"its columns are {', '.join(self._table.columns)}",
            )
        if name not in written:
            raise ConfigurationError(
                f"{setting} names the column {name!r} of table {self._table.name!r}, and no column of the DataFrame goes into "
                "it",
                next_step="add it to the DataFrame, or name it in `columns`",
            )

    def _order(self) -> int | None:
        name = self._options.order_column
        if name is None:
            return None
        number = self._number("order_column", name)
        data_type = self._fields[number].dataType
        if not isinstance(data_type, _ORDERED):
            raise self._refused("order_column", name, data_type, "a whole number, a timestamp or a date")
        return self._project(number, Form.ORDER, pa.int64())

    def _table_column(self, name: str, target_name: str) -> Copied:
        number = self._number("columns", name)
        target = self._table.columns.get(target_name)
        if target is None:
            raise ConfigurationError(
                f"table {self._table.name!r} has no column {target_name!r} for the DataFrame's column {name!r}",
                next_step="add it to the table, rename it, or say with `columns` which columns go into the table",
            )
        if target.generated:
            raise ConfigurationError(
                f"column {target_name!r} of table {self._table.name!r} is computed by the database",
                next_step="leave it out of `columns`",
            )
        wire = wire_for(name, self._fields[number].dataType, target, self._table)
        source = self._project(number, wire.form, wire.arrow)
        return Copied(target_name, source, wire.encoding, target.shown_type, target.longest)

    def _check_all_given(self, targets: Collection[str]) -> None:
        if not targets:
            raise ConfigurationError("no column goes into the table", next_step="name some in `columns`")
        if (twice := _twice(targets)) is not None:
            raise ConfigurationError(
                f"two columns of the DataFrame go into column {twice!r} of table {self._table.name!r}",
                next_step="say with `columns` which one does",
            )
        given = set(targets)
        missing = [name for name, column in self._table.columns.items() if column.must_be_given and name not in given]
        if missing:
            raise ConfigurationError(
                f"column {missing[0]!r} of table {self._table.name!r} is NOT NULL without a default, and no column of the "
                "DataFrame goes into it",
                next_step="add it to the DataFrame, or give it a default",
            )

    def _whole_value(self, row: tuple[tuple[int, str], ...]) -> int | Encoded:
        options = self._options
        if options.format_of_value is Format.JSON:
            return self._row_as_json(row)
        if options.value is not None:
            return self._encoded("value", ((self._number("value", options.value), options.value),), whole=True)
        return self._encoded("value", row, whole=False)

    def _encoded(self, field: str, columns: tuple[tuple[int, str], ...], *, whole: bool) -> Encoded:
        part_format = self._options.format_of_value if field == "value" else Format(self._options.key_format)
        part = Part(
            field=field,
            name=self._table.name if field == "value" else f"{self._table.name}_key",
            columns=tuple((name, self._fields[number].dataType) for number, name in columns),
            whole=whole,
        )
        schema = module_of(part_format).plan(part, self._given.get(field, Given()))
        places = [
            self._project(number, Form.PLAIN, arrow) for (number, _), arrow in zip(columns, schema.arrow, strict=True)
        ]
        return Encoded(schema, tuple(places))

    def _row_as_json(self, json_columns: tuple[tuple[int, str], ...]) -> int:
        for number, name in json_columns:
            check_json(name, self._fields[number].dataType)
        return self._project(WHOLE_ROW, Form.JSON, pa.string())

    def _key(self) -> int | Encoded | None:
        name = self._options.key
        if name is not None and Format(self._options.key_format) in REGISTERED:
            return self._encoded("key", ((self._number("key", name), name),), whole=True)
        if name is not None:
            number = self._number("key", name)
            if isinstance(self._fields[number].dataType, _WHOLE_NUMBERS):
                return self._project(number, Form.TEXT, pa.string())
        return self._textual("key", name, binary=True)

    def _textual(self, setting: str, name: str | None, *, binary: bool = False) -> int | None:
        if name is None:
            return None
        number = self._number(setting, name)
        data_type = self._fields[number].dataType
        if isinstance(data_type, _TEXTUAL):
            return self._project(number, Form.PLAIN, pa.string())
        if binary and isinstance(data_type, spark.BinaryType):
            return self._project(number, Form.PLAIN, pa.binary())
        raise self._refused(setting, name, data_type, "string or binary" if binary else "string")

    def _headers(self) -> int | None:
        name = self._options.headers
        if name is None:
            return None
        number = self._number("headers", name)
        data_type = self._fields[number].dataType
        key: spark.DataType | None = None
        value: spark.DataType | None = None
        if isinstance(data_type, spark.MapType):
            key, value = data_type.keyType, data_type.valueType
        elif isinstance(data_type, spark.ArrayType) and isinstance(data_type.elementType, spark.StructType):
            parts = data_type.elementType
            if parts.names == ["key", "value"]:
                key, value = parts.fields[0].dataType, parts.fields[1].dataType
        if not isinstance(key, _TEXTUAL) or not isinstance(value, (*_TEXTUAL, spark.BinaryType)):
            wanted = "map<string,string|binary> or array<struct<key:string,value:string|binary>>"
            raise self._refused("headers", name, data_type, wanted)
        return self._project(number, Form.HEADERS, HEADERS)

    def _partition(self) -> int | None:
        name = self._options.partition
        if name is None:
            return None
        number = self._number("partition", name)
        data_type = self._fields[number].dataType
        if not isinstance(data_type, _WHOLE_NUMBERS):
            raise self._refused("partition", name, data_type, "int")
        return self._project(number, Form.PLAIN, pa.int32())

    def _timestamp(self) -> int | None:
        name = self._options.timestamp
        if name is None:
            return None
        number = self._number("timestamp", name)
        data_type = self._fields[number].dataType
        if not isinstance(data_type, spark.TimestampType):
            raise self._refused("timestamp", name, data_type, "timestamp")
        return self._project(number, Form.MILLIS, pa.int64())

    def _number(self, setting: str, name: str) -> int:
        if name not in self._numbers:
            raise ConfigurationError(
                f"{setting} names the column {name!r}, which the DataFrame does not have",
                next_step=f"its columns are {', '.join(self._numbers)}",
            )
        return self._numbers[name]

    def _project(self, source: int, form: Form, arrow: pa.DataType) -> int:
        return self._projected.setdefault(Projected(source, form, arrow), len(self._projected))

    @staticmethod
    def _refused(setting: str, name: str, data_type: spark.DataType, wanted: str) -> ConfigurationError:
        return ConfigurationError(
            f"{setting} names the column {name!r} of type {data_type.simpleString()}; it must be {wanted}",
            next_step="cast it",
        )
