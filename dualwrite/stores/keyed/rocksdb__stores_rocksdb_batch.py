"""``tx.batch``: what one dual write puts into the user's RocksDB."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeVar, overload

from dualwrite.errors import IllegalStateError, TransactionAborted
from dualwrite.stores.keyed.rocksdb_client__stores_rocksdb_families import OWN
from dualwrite.stores.keyed.store__stores_keyed_handle import KeyedHandle

if TYPE_CHECKING:
    from rocksdict import ColumnFamily, WriteBatch

    from dualwrite.stores.keyed.rocksdb_client import Client

Default = TypeVar("Default")
Plain = bytes | str | int | float | bool
_Place = tuple[str | None, type, Plain]
_PLAIN: Final = (bytes, str, int, float, bool)
_DELETED: Final = object()


class RocksBatch:
    """The writes of one dual write. They become durable together with its decision, in one synced ``WriteBatch``.

    Nothing is in the database before the block ends. Used by the block's thread, until the block ends.

    Keys and values are bytes; where the database is not in rocksdict's raw mode also ``str``, ``int``, ``float`` and ``bool``.
    Encode other objects yourself.
    """

    def __init__(self, writes: Writes) -> None:
        self._writes = writes

    def put(self, key: Plain, value: Plain, column_family: str | None = None) -> None:
        """Write the value. Not durable, and not visible to others, before the block has ended.

        Args:
            key: The key.
            value: The value.
            column_family: Its column family by name; the default one if not given.

        Raises:
            TypeError: The key or the value is of a type that cannot be stored.
            ConfigurationError: There is no such column family, or it is the library's own.
            IllegalStateError: The block has ended.
        """
        self._writes.put(key, value, column_family)

    def delete(self, key: Plain, column_family: str | None = None) -> None:
        """Delete the key, if it is there. Raises as :meth:`put`."""
        self._writes.delete(key, column_family)

    @overload
    def get(self, key: Plain, default: None = None, column_family: str | None = None) -> object: ...
    @overload
    def get(self, key: Plain, default: Default, column_family: str | None = None) -> object | Default: ...
    def get(self, key: Plain, default: object = None, column_family: str | None = None) -> object:
        """The value that this block has written, or else the newest one in the database.

        Another block may change it before this one commits; see :meth:`get_for_update`.

        Raises:
            Unavailable: RocksDB does not answer.
            TypeError, ConfigurationError, IllegalStateError: As :meth:`put`.
        """
        found = self._writes.get(key, column_family)
        return default if found is None else found

    def get_for_update(self, key: Plain, default: object = None, column_family: str | None = None) -> object:
        """Like :meth:`get`; in addition, the block commits only if the key still has that value then.

        Otherwise it ends with a retryable `TransactionAborted`, and :meth:`dualwrite.DualWriter.run` runs it again.

        Raises:
            TypeError: As :meth:`put`; or the stored value is of another type, and cannot be compared.
        """
        self._writes.expect(key, column_family)
        return self.get(key, default, column_family)

    def __len__(self) -> int:
        """The number of keys that this block has written or deleted."""
        return len(self._writes.written)


class Writes:
    """The contents of a block's batch, and the values that it expects in the database. Users get `RocksBatch` alone.

    Attributes:
        written: The newest value of each key that the block has written or deleted.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ended = False
        self._batch = client.new_batch()
        self.written: dict[_Place, object] = {}
        self._expected: dict[_Place, object] = {}

    def put(self, key: Plain, value: Plain, column_family: str | None) -> None:
        """See :meth:`RocksBatch.put`."""
        place = self._place(key, column_family)
        self._check(value, "value")
        self._batch.put(key, value, self._family(column_family))
        self.written[place] = value

    def delete(self, key: Plain, column_family: str | None) -> None:
        """See :meth:`RocksBatch.delete`."""
        place = self._place(key, column_family)
        self._batch.delete(key, self._family(column_family))
        self.written[place] = _DELETED

    def get(self, key: Plain, column_family: str | None) -> object:
        """The value that this block sees; None if there is none."""
        place = self._place(key, column_family)
        found = self.written[place] if place in self.written else self._stored(place)
        return None if found is _DELETED else found

    def expect(self, key: Plain, column_family: str | None) -> None:
        """Commit only if the key then has the value that it has now, or had at the first call."""
        place = self._place(key, column_family)
        if place not in self._expected:
            stored = self._stored(place)
            if stored is not None:
                self._check(stored, "value")
            self._expected[place] = stored

    def _family(self, name: str | None) -> ColumnFamily | None:
        return None if name is None else self._client.family(name)

    def _place(self, key: Plain, column_family: str | None) -> _Place:
        if self._ended:
            raise IllegalStateError("the block has ended: its batch can no longer be used")
        self._check(key, "key")
        if column_family in OWN:
            raise IllegalStateError(f"the column family {column_family} is the library's own")
        return column_family, type(key), key

    def _check(self, given: object, what: str) -> None:
        allowed = (bytes,) if self._client.raw else _PLAIN
        if not isinstance(given, allowed):
            names = ", ".join(one.__name__ for one in allowed)
            raise TypeError(f"a {what} in this RocksDB is {names}, not {type(given).__name__}: encode it first")

    def _stored(self, place: _Place) -> object:
        column_family, _, key = place
        found: object = self._client.get(key, column_family)
        return found

    def check_expectations(self) -> None:
        """Compare what :meth:`get_for_update` has returned with what is in the database now.

        Raises:
            TransactionAborted: It is not the same.
            Unavailable: RocksDB does not answer.
        """
        for place, expected in self._expected.items():
            if not _same(self._stored(place), expected):
                raise TransactionAborted(f"the value of {place[2]!r} has changed since get_for_update")

    def take(self) -> WriteBatch:
        """All writes, for RocksDB to write. Once; the batch is empty then."""
        batch = self._batch
        self._batch = self._client.new_batch()
        return batch

    def clear(self) -> None:
        """Forget all writes and expectations."""
        self._batch = self._client.new_batch()
        self.written.clear()
        self._expected.clear()

    def end(self) -> None:
        """Refuse any further use."""
        self.clear()
        self._ended = True


class RocksHandle(KeyedHandle):
    """The batch of one dual write, with the changes of the library.

    Attributes:
        batch: The user's part.
        writes: What is in it.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.writes = Writes(client)
        self.batch = RocksBatch(self.writes)

    def clear(self) -> None:
        """Forget all that the user has put."""
        self.writes.clear()

    def end(self) -> None:
        """Refuse further use: the block is over."""
        self.writes.end()


def _same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other
