"""Arrow batches as the rows of a COPY into PostgreSQL: binary, or text if a column's type has no binary form of ours.

Binary is what almost every table gets. Text says everything, in the words of SQL: the type's own function reads it (``inet``, a
range, an extension's type, an array of such), and refuses a value by its line and its column. All columns of a COPY travel in
one form, so each type has both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pgpq import ArrowToPostgresBinaryEncoder
from pgpq.encoders import StringEncoderBuilder
from pgpq.schema import Jsonb
from psycopg import sql

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.column_types import LITERAL, VECTOR
from dualwrite.sinks.spark.databases.database import require_kept
from dualwrite.sinks.spark.digests import lists_with
from dualwrite.sinks.spark.layout import BOOLEAN
from dualwrite.sinks.spark.merging import staged_arrays

if TYPE_CHECKING:
    from psycopg import Copy

    from dualwrite.sinks.spark.digests import RowNames
    from dualwrite.sinks.spark.layout import Copied, Layout

_UUID_BYTES: Final = 16
_UUID: Final = pa.binary(_UUID_BYTES)
# From 4713 BC, in days and in microseconds since 1970, to what each type holds (IS_VALID_DATE, IS_VALID_TIMESTAMP in
# PostgreSQL's timestamp.h). Numbers outside stand for its infinities, or have no binary form.
_JULIAN_1970: Final = 2440588
_DAYS: Final = (-_JULIAN_1970, 2145042905)
_DAY_US: Final = 86_400_000_000
_MICROSECONDS: Final = (-_JULIAN_1970 * _DAY_US, 2**63 - 1)


class TableCopy:
    """A running COPY. Batches may be written until the block ends."""

    def __init__(
        self, copy: Copy, layout: Layout, names: RowNames | None = None, columns: Sequence[Copied] | None = None
    ) -> None:
        self.sent_rows = 0
        self._names = names
        self._copy = copy
        self._layout = layout
        self._columns = columns or layout.staged_columns
        self._schema = pa.schema([(f"c{number}", _wire_type(layout, one)) for number, one in enumerate(self._columns)])
        self._encoder: ArrowToPostgresBinaryEncoder | TextEncoder
        if _is_text(self._columns):
            self._encoder = TextEncoder(self._columns)
        else:
            self._encoder = _binary_encoder(self._schema, self._columns)
        copy.write(self._encoder.write_header())

    def write(self, batch: pa.RecordBatch, deleted: pa.Array | None = None) -> None:
        """Send the rows of one projected batch. They are in the table once the transaction commits.

        A row that the database refuses raises psycopg's error, which `copying` maps.
        """
        arrays = []
        values = staged_arrays(self._layout, batch, deleted)[: len(self._columns)]
        for one, array in zip(self._columns, values, strict=True):
            require_kept(one, changes(one, array), self._name)
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


def copy_into(table: tuple[str, str], columns: Sequence[Copied]) -> sql.Composed:
    """The statement whose data a :class:`TableCopy` of these columns sends."""
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {})").format(
        sql.Identifier(*table),
        listed([column.name for column in columns]),
        sql.SQL("TEXT" if _is_text(columns) else "BINARY"),
    )


def listed(names: Sequence[str]) -> sql.Composed:
    """Names of columns, quoted, with commas between."""
    return sql.SQL(", ").join(map(sql.Identifier, names))


def is_uuid(value: str) -> bool:
    """Whether a text is a UUID as :class:`TableCopy` takes it."""
    try:
        return len(bytes.fromhex(value.replace("-", ""))) == _UUID_BYTES
    except ValueError:
        return False


def changes(column: Copied, array: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Values that PostgreSQL would change without an error, or that have no form there: words, and which rows have one."""
    lists: list[pa.Array] = []
    while pa.types.is_list(array.type):
        if lists:
            lost = pc.fill_null(pc.equal(pc.list_value_length(array), 0), True)
            yield "an array in it is null or empty, and PostgreSQL has no such dimension", _rows_with(lists, lost)
        lists.append(array)
        array = array.flatten()
    if column.longest is not None:
        # What is too long by spaces alone is cut, as the SQL standard says.
        too_long = pc.fill_null(pc.greater(pc.utf8_length(array), column.longest), False)
        yield f"it has more than {column.longest} characters", _rows_with(lists, too_long)
    if pa.types.is_date(array.type):
        numbers, (first, last) = array.cast(pa.int32()), _DAYS
    elif pa.types.is_timestamp(array.type):
        numbers, (first, last) = array.cast(pa.int64()), _MICROSECONDS
    else:
        return
    outside = pc.fill_null(pc.or_(pc.less(numbers, first), pc.greater(numbers, last)), False)
    yield "it is not in the years that the type has", _rows_with(lists, outside)


def _rows_with(lists: Sequence[pa.Array], is_bad: pa.Array) -> pa.Array:
    for one in reversed(lists):
        is_bad = lists_with(one, is_bad)
    return is_bad


def _wire_type(layout: Layout, column: Copied) -> pa.DataType:
    if column.encoding == BOOLEAN:
        return pa.bool_()
    return _UUID if column.encoding == "uuid" else layout.projected[column.source].arrow


def _is_text(columns: Sequence[Copied]) -> bool:
    return any(column.encoding in {LITERAL, VECTOR} for column in columns)


def _binary_encoder(schema: pa.Schema, columns: Sequence[Copied]) -> ArrowToPostgresBinaryEncoder:
    return ArrowToPostgresBinaryEncoder.new_with_encoders(
        schema,
        {
            field.name: StringEncoderBuilder.new_with_output(field, Jsonb())
            if column.encoding == "jsonb"
            else ArrowToPostgresBinaryEncoder.infer_encoder(field)
            for field, column in zip(schema, columns, strict=True)
        },
    )


# The text form. Arrow's kernels make it column by column.

_ESCAPED: Final = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))


class TextEncoder:
    """Rows of Arrow as COPY's text; the methods are those of pgpq's encoder."""

    def __init__(self, columns: Sequence[Copied]) -> None:
        self._columns = columns

    def write_header(self) -> bytes:
        """Return the bytes before the first row."""
        return b""

    def write_batch(self, batch: pa.RecordBatch) -> bytes:
        """Return rows, a line for each."""
        fields = []
        for column, array in zip(self._columns, batch.columns, strict=True):
            texts = literals(array, "[]" if column.encoding == VECTOR else "{}")
            for plain, escaped in _ESCAPED:
                texts = pc.replace_substring(texts, plain, escaped)
            fields.append(pc.fill_null(texts, "\\N"))
        lines = pc.binary_join_element_wise(pc.binary_join_element_wise(*fields, "\t"), "", "\n")
        return "".join(lines.to_pylist()).encode()

    def finish(self) -> bytes:
        """Return the bytes after the last row."""
        return b""


def literals(array: pa.Array, brackets: str = "{}") -> pa.Array:
    """Each value as SQL writes it in quotes; null stays null. `brackets` are those of a list."""
    kind = array.type
    if pa.types.is_list(kind):
        texts = literals(array.values)
        if not _is_bare(kind.value_type):
            texts = _quoted(texts)
        return _joined(array, texts, brackets)
    if pa.types.is_map(kind):
        pairs = pc.binary_join_element_wise(_quoted(array.keys), pc.fill_null(_quoted(array.items), "NULL"), "=>")
        return _joined(array, pairs, "")
    make = next((make for is_kind, make in _MAKERS if is_kind(kind)), _cast)
    return make(array)


def _cast(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _is_bare(kind: pa.DataType) -> bool:
    """Whether texts of this type stand in an array without quotes: numbers, and what has more dimensions."""
    return any(is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_integer, pa.types.is_floating))


def _joined(lists: pa.Array, texts: pa.Array, brackets: str) -> pa.Array:
    """One text for each list, from the texts of all their entries."""
    entries = pa.ListArray.from_arrays(lists.offsets, pc.fill_null(texts, "NULL"))
    joined = pc.binary_join(entries, ",")
    if brackets:
        joined = pc.binary_join_element_wise(brackets[0], joined, brackets[1], "")
    return pc.if_else(lists.is_valid(), joined, None)


def _quoted(texts: pa.Array) -> pa.Array:
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
        texts = pc.replace_substring(texts, plain, escaped)
    return pc.binary_join_element_wise('"', texts, '"', "")


def _hex(array: pa.Array) -> pa.Array:
    return pa.array([None if value is None else f"\\x{value.hex()}" for value in array.to_pylist()], pa.string())


def _uuid_hex(array: pa.Array) -> pa.Array:
    return pa.array([None if value is None else value.hex() for value in array.to_pylist()], pa.string())


def _days(array: pa.Array) -> pa.Array:
    # As Julian days, which PostgreSQL reads for each of its dates: of years before 1 Arrow has no text that it reads.
    return _julian(array.cast(pa.int32()).cast(pa.int64()))


def _julian(days: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise("J", pc.add(days, _JULIAN_1970).cast(pa.string()), "")


def _moments(array: pa.Array) -> pa.Array:
    mask = array.is_null().to_numpy(zero_copy_only=False)
    days, rest = np.divmod(array.cast(pa.int64()).fill_null(0).to_numpy(), _DAY_US)
    times = pa.array(rest, pa.time64("us"), mask=mask).cast(pa.string())
    zone = "" if array.type.tz is None else "+00"
    return pc.binary_join_element_wise(_julian(pa.array(days, mask=mask)), " ", times, zone, "")


def _spans(array: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(array.cast(pa.int64()).cast(pa.string()), " microseconds", "")


_MAKERS: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...]] = (
    (pa.types.is_fixed_size_binary, _uuid_hex),
    (pa.types.is_binary, _hex),
    (pa.types.is_date, _days),
    (pa.types.is_timestamp, _moments),
    (pa.types.is_duration, _spans),
)
