"""Whether a batch that runs again gives the same rows, and how errors name a row.

Written partitions stay when a batch runs again. If the new run gives other rows, or the same rows in other partitions, both
sides end up with a mixture of two runs: some rows twice, others nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c
from py4j.protocol import Py4JError

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.layout import WHOLE_ROW

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from py4j.java_gateway import JavaObject
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

    from dualwrite.sinks.spark.layout import Layout

_NULL: Final = np.uint64(0x6E756C6C6E756C6C)
_ALL_BITS: Final = (1 << 64) - 1
_FORM_BITS: Final = 0xFFFF
# The form of a digest, in its lowest bits. Raise it when the same rows get other digests: a batch that an earlier version
# began may hold digests of another form, which cannot be compared. (Form 1 was a sum of hashes of 64 bits, without this mark.)
_FORM: Final = 2
_SHORT: Final = 256
"""Bytes of a value, on average."""
# Raised if a version of Spark lacks a method, or returns null: py4j gives None, which has no attributes.
_SHOWS_NO_PLAN: Final = (Py4JError, AttributeError)
_INDETERMINATE: Final = "INDETERMINATE"


def require_deterministic(df: DataFrame, rows: RDD[object] | None = None) -> None:
    """Refuse a DataFrame that gives other rows when it is computed again, as far as Spark itself knows.

    If the RDD that runs already exists, pass it as `rows`: the order of its shuffles matters, too.
    """
    _require_deterministic(df._jdf.queryExecution().analyzed())  # noqa: SLF001 - Spark has no public way to it in Python
    if rows is not None and rows._jrdd.rdd().outputDeterministicLevel().toString() == _INDETERMINATE:  # noqa: SLF001 - as above
        raise _not_repeatable("a shuffle distributes its rows in the order of their arrival")


def require_deterministic_stream(df: DataFrame, query_id: str) -> bool:
    """As :func:`require_deterministic`, for a stream. Returns whether Spark has shown the stream's plan.

    The micro-batch's DataFrame does not show it. Call it while ``foreachBatch`` runs.
    """
    session = df.sparkSession
    try:
        running = running_query(session, query_id)
        # Not the analyzed plan: there, the micro-batch's time, which Spark keeps for replays, is not yet a constant.
        plan = running.lastExecution().optimizedPlan()
    except _SHOWS_NO_PLAN:
        return False
    _require_deterministic(plan)
    return True


def running_query(session: SparkSession, query_id: str) -> JavaObject:
    """Spark's own object for a query that runs. Raises what py4j raises if this Spark has none."""
    number = session._jvm.java.util.UUID.fromString(query_id)  # type: ignore[union-attr] # noqa: SLF001 - PySpark has no way
    return session._jsparkSession.sharedState().activeStreamingQueries().get(number)  # noqa: SLF001 - as above


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


def hashed_columns(layout: Layout) -> Sequence[int]:
    """The projected columns that tell one row from another: all, less those whose values the message's JSON shows anyway."""
    value = layout.message.value
    whole = isinstance(value, int) and layout.projected[value].source == WHOLE_ROW
    # A row's JSON that is no message does not count: the digest is the same whether rows may be put aside or not.
    shown = {number for number, _ in layout.json_columns} if whole else {WHOLE_ROW}
    return [place for place, column in enumerate(layout.projected) if column.source not in shown]


def row_hashes(columns: Sequence[pa.Array], length: int) -> NDArray[np.uint64]:
    """A hash of each row, which depends on the order of its columns.

    A CRC costs a third of a cryptographic hash (``hashlib.blake2b``) of a value; it is for accidents, not for forgers. Unlike
    CRCs, the steps between columns are not linear, so values that rows exchange with each other do not cancel out in a sum.
    """
    found = np.zeros(length, np.uint64)
    for column in columns:
        found = _mixed(found ^ _hashes(column))
    return found


def _hashes(array: pa.Array) -> NDArray[np.uint64]:
    kind = array.type
    if pa.types.is_null(kind) or not len(array):
        return np.full(len(array), _NULL)
    if pa.types.is_struct(kind):
        found = row_hashes([array.field(number) for number in range(kind.num_fields)], len(array))
    elif pa.types.is_map(kind):
        found = _list_hashes(array, [array.keys, array.items])
    elif pa.types.is_list(kind):
        found = _list_hashes(array, [array.values])
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        found = _text_hashes(array)
    else:
        found = _word_hashes(array)
    # A null counts, too: otherwise nobody would notice a value and a null of two columns changing places.
    return np.where(array.is_null().to_numpy(zero_copy_only=False), _NULL, found) if array.null_count else found


def _list_hashes(array: pa.Array, inner: Sequence[pa.Array]) -> NDArray[np.uint64]:
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    lengths, first = np.diff(offsets), offsets[0]
    entries = [values.slice(first, offsets[-1] - first) for values in inner]
    places = (np.arange(offsets[-1] - first) - np.repeat(offsets[:-1] - first, lengths)).astype(np.uint64)
    hashes = _mixed(row_hashes(entries, len(places)) ^ _mixed(places))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])[offsets - first]
    return _mixed(np.diff(sums) ^ lengths.astype(np.uint64))


def _text_hashes(array: pa.Array) -> NDArray[np.uint64]:
    """CRC-32C and length of each value.

    Arrow copies short values faster than Python finds them where they are; copies of long ones would take twice the time.
    """
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    values: Iterable[bytes | memoryview]
    if ends[-1] - ends[0] <= _SHORT * len(array):
        values = array.cast(pa.binary()).fill_null(b"").to_numpy(zero_copy_only=False)
    else:
        content = memoryview(b"" if data is None else data)
        values = (content[start:end] for start, end in pairwise(ends.tolist()))
    sums = np.fromiter(map(crc32c, values), np.uint64, len(array))
    found: NDArray[np.uint64] = sums | np.diff(ends).astype(np.uint64) << np.uint64(32)
    return found


def _word_hashes(array: pa.Array) -> NDArray[np.uint64]:
    """Of numbers and times: their bits, of which decimals have two words."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    width = array.type.bit_width // 8
    size = min(width, 8)
    words = np.frombuffer(array.buffers()[1], f"<u{size}")[array.offset * width // size :][: len(array) * width // size]
    found = np.zeros(len(array), np.uint64)
    for word in words.reshape(len(array), -1).T:
        found = _mixed(found ^ word.astype(np.uint64))
    return found


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Let every bit affect all others (the finalizer of splitmix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: NDArray[np.uint64] = words ^ words >> np.uint64(31)
    return found


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the rows of a partition, in any order: by their number and the sum of their hashes.

    The digest has 64 bits with a sign. Its lowest bits say how it was made. It is None if it is not known.
    """

    rows: int
    digest: int | None

    def differs_from(self, other: Fingerprint) -> bool:
        """Whether the two certainly belong to different rows."""
        if self.rows != other.rows:
            return True
        if self.digest is None or other.digest is None or (self.digest ^ other.digest) & _FORM_BITS:
            return False
        return self.digest != other.digest


def may_mix(what: str, partition_count: int, written: int, remedy: str = "") -> str | None:
    """The warning, for people, that a run of the batch cannot compare its rows with those of another run.

    None if no two runs can mix: one partition holds the whole batch, or all are written, and no run writes any more. `what`
    begins the warning; `remedy` is one besides the Data Source.
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
    """Passes a partition's projected batches on and takes their fingerprint: what is hashed is what both sides get.

    `hashed` are the positions of the columns that tell rows apart; None to count the rows only.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], hashed: Sequence[int] | None) -> None:
        self._batches = batches
        self._hashed = hashed
        self._rows = 0
        self._sum = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self._rows += batch.num_rows
            if self._hashed is not None:
                hashes = row_hashes([batch.column(number) for number in self._hashed], batch.num_rows)
                # A sum: the order of the rows does not matter, but their number does.
                self._sum += int(hashes.sum(dtype=np.uint64))
            yield batch

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of all batches passed on so far."""
        if self._hashed is None:
            return Fingerprint(self._rows, None)
        unsigned = (self._sum & _ALL_BITS & ~_FORM_BITS) | _FORM
        return Fingerprint(self._rows, unsigned - (1 << 64) if unsigned >> 63 else unsigned)

    def take_all(self) -> Fingerprint:
        """Consume the remaining batches, and return the fingerprint of all."""
        for _ in self:
            pass
        return self.fingerprint()


# Names a row in errors: by its number in its partition, and by its key if that is known without reading rows again.

_MOST_BYTES: Final = 4 * 2**20
_LONGEST: Final = 64


class RowNames:
    """Names the rows of one partition. Takes each batch before it is sent.

    The database reports a bad row only after all rows are sent, and by its number. So the keys are kept, up to a few
    megabytes.
    """

    def __init__(self, partition: int, layout: Layout) -> None:
        self.partition = partition
        self._key = next(iter(_key_columns(layout)), None)
        self._kept: list[pa.Array] = []
        self._bytes = 0
        self._before = 0
        self._counted_from = 0
        self._batch: pa.RecordBatch | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the next projected batch."""
        if self._batch is not None:
            self._before += self._batch.num_rows
        self._batch = batch
        if self._key is None or self._bytes > _MOST_BYTES:
            return
        keys = batch.column(self._key)
        keys = pa.concat_arrays([keys, keys.slice(0, 0)])  # a copy: a slice would keep Spark's whole batch
        self._kept.append(keys)
        self._bytes += keys.nbytes

    def begin(self) -> None:
        """The database counts the rows that follow from 1 again."""
        if self._batch is not None:
            self._before += self._batch.num_rows
        self._batch = None
        self._counted_from = self._before
        self._kept.clear()
        self._bytes = 0

    def in_batch(self, index: int) -> str:
        """The name of a row of the last batch, counted from 0."""
        assert self._batch is not None
        key = None if self._key is None else self._batch.column(self._key)[index]
        return row_name(self.partition, self._before + index + 1, () if key is None else (key.as_py(),))

    def of(self, number: int) -> str:
        """The name of a row, as the database counts it, from 1."""
        index = number - 1
        number += self._counted_from
        for keys in self._kept:
            if index < len(keys):
                return row_name(self.partition, number, (keys[index].as_py(),))
            index -= len(keys)
        return row_name(self.partition, number)


def row_name(partition: int, number: int, key: Sequence[object] = ()) -> str:
    """A row's name, for people: numbers count from 1; the key is empty if it is not known."""
    name = f"row {number} of partition {partition}"
    return f"{name}, key {', '.join(map(_shown, key))}" if key else name


def lists_with(lists: pa.Array, is_bad: pa.Array) -> pa.Array:
    """Which lists have an entry that is bad; `is_bad` speaks of the entries as ``flatten`` gives them."""
    found = pc.list_parent_indices(lists).filter(is_bad)
    return pc.is_in(pa.array(range(len(lists)), found.type), value_set=found)


def table_key(layout: Layout) -> Sequence[str]:
    """The table's columns that hold the message's key; empty if a part of the key is not in the table."""
    sources = [layout.projected[number].source for number in _key_columns(layout)]
    names = {layout.projected[column.source].source: column.name for column in layout.table_columns}
    return [names[source] for source in sources] if all(source in names for source in sources) else ()


def _key_columns(layout: Layout) -> Sequence[int]:
    key = layout.message.key
    if key is None:
        return ()
    return (key,) if isinstance(key, int) else key.columns


def _shown(value: object) -> str:
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
