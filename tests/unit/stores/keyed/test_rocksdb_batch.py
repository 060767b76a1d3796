"""``tx.batch``: what a block sees of its own writes, and what it refuses."""

from enum import Enum, IntEnum

import pytest

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.stores.keyed.rocksdb import RocksDatabase, RocksHandle

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")


@pytest.fixture
def database(tmp_path):
    with RocksDatabase(tmp_path / "db") as database:
        database.check()
        database.rdict.create_column_family("orders", rocksdict.Options())
        yield database


@pytest.fixture
def handle(database):
    return RocksHandle(database._client)


@pytest.fixture
def batch(handle):
    return handle.batch


def test_a_block_sees_its_own_writes_and_nobody_else_does(database, batch):
    database.rdict["a"] = "old"
    batch.put("a", "new")
    batch.put("a", 1, column_family="orders")
    assert (batch.get("a"), batch.get("a", column_family="orders"), batch.get("b", "none")) == ("new", 1, "none")
    batch.delete("a")
    assert (batch.get("a"), batch.get("a", "gone")) == (None, "gone")
    assert database.rdict["a"] == "old"
    assert len(batch) == 2


def test_keys_of_other_types_are_other_keys(batch):
    for key in (1, 1.0, True, "1", b"1"):
        batch.put(key, type(key).__name__)
    assert [batch.get(key) for key in (1, 1.0, True, "1", b"1")] == ["int", "float", "bool", "str", "bytes"]


def test_a_member_of_an_enum_is_the_key_that_its_value_is(batch):
    class Name(str, Enum):
        A = "a"

    class Number(IntEnum):
        ONE = 1

    for member in (Name.A, Number.ONE):
        batch.put(member, "first")
        assert batch.get(member.value) == "first"
        batch.delete(member.value)
        assert batch.get(member) is None
    assert len(batch) == 2


def test_another_block_sees_what_was_written_since(database, batch):
    assert batch.get("a") is None
    database.rdict["a"] = 1
    assert batch.get("a") == 1


def test_what_cannot_be_stored_is_refused_at_once(batch):
    for key, value in (("a", {"b": 1}), (("a",), 1), ("a", None)):
        with pytest.raises(TypeError, match="encode it first"):
            batch.put(key, value)
    assert len(batch) == 0


def test_a_value_that_cannot_be_compared_cannot_be_got_for_update(database, batch):
    database.rdict["a"] = {"pickled": True}
    assert batch.get("a") == {"pickled": True}
    with pytest.raises(TypeError, match="dict"):
        batch.get_for_update("a")


def test_in_raw_mode_only_bytes_are_stored(tmp_path):
    db = rocksdict.Rdict(str(tmp_path / "raw"), rocksdict.Options(raw_mode=True))
    batch = RocksHandle(RocksDatabase(db)._client).batch
    with pytest.raises(TypeError, match="is bytes, not str"):
        batch.put("a", b"1")
    with pytest.raises(TypeError, match="is bytes, not int"):
        batch.get(1)


def test_a_missing_column_family_is_named(batch):
    for call in (
        lambda: batch.put("a", 1, "orderz"),
        lambda: batch.delete("a", "orderz"),
        lambda: batch.get("a", None, "orderz"),
    ):
        with pytest.raises(ConfigurationError, match="orderz"):
            call()


@pytest.mark.parametrize("name", ["kafka_transaction_state", "dualwrite_incident"])
def test_the_librarys_own_families_are_not_for_users(batch, name):
    with pytest.raises(IllegalStateError, match="library's own"):
        batch.put(b"a", b"1", name)


def test_nothing_works_after_the_block(handle, batch):
    batch.put("a", 1)
    handle.end()
    for call in (
        lambda: batch.put("a", 1),
        lambda: batch.get("a"),
        lambda: batch.delete("a"),
        lambda: batch.get_for_update("a"),
    ):
        with pytest.raises(IllegalStateError, match="has ended"):
            call()
