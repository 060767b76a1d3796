"""A store's transaction, step by step: in memory, spilled, and partly spilled."""

import pytest

from dualwrite.errors import IllegalStateError
from dualwrite.state import KeyValueStore

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

NEVER, AT_ONCE, AT_TIMES = 1 << 30, 0, 600
COMMITTED = {b"a": b"1", b"b": b"1", b"c": b"1"}


@pytest.fixture(params=[NEVER, AT_ONCE, AT_TIMES], ids=["memory", "spilled", "both"])
def store(request, tmp_path):
    with KeyValueStore(tmp_path / "store", max_memory_bytes=request.param) as store:
        store.put_all(COMMITTED.items())
        store.commit(3)
        # Each key twice, with enough between that the first ones are spilled where a part is.
        store.put_all([(b"a", b"2"), (b"b", None), (b"d", b"2"), (b"e", None)])
        store.put_all([(b"d", None), (b"a", b"3"), (b"f", b"3")])
        yield store


SEEN = {b"a": b"3", b"c": b"1", b"f": b"3"}
CHANGES = [(b"a", b"3"), (b"b", None), (b"d", None), (b"e", None), (b"f", b"3")]


def test_reads_see_the_newest_writes(store):
    assert dict(store.range()) == SEEN
    assert list(store.range(reverse=True)) == sorted(SEEN.items(), reverse=True)
    assert {key: store.get(key) for key in (b"a", b"b", b"c", b"d", b"e", b"f", b"g")} == {
        **dict.fromkeys((b"b", b"d", b"e", b"g")),
        **SEEN,
    }
    assert list(store.prefix(b"f")) == [(b"f", b"3")]
    assert list(store.uncommitted()) == CHANGES


def test_recovery_discards_them(store):
    assert store.recover(3)
    assert dict(store.range()) == COMMITTED
    assert (store.get(b"a"), store.get(b"f"), store.has_uncommitted) == (b"1", None, False)
    assert list(store.uncommitted()) == []
    store.commit(4)
    assert dict(store.range()) == COMMITTED


def test_recovery_says_whether_the_offset_is_reached(store):
    assert [store.recover(offset) for offset in (2, 3, 4)] == [True, True, False]


def test_a_commit_keeps_all_of_them(store):
    scan = store.range()
    store.commit(7)
    with pytest.raises(IllegalStateError, match="transaction has ended"):
        next(scan)
    assert dict(store.range()) == SEEN
    assert (store.has_uncommitted, store.committed.offset) == (False, 7)
    store.close()
    with KeyValueStore(store.path) as again:
        assert dict(again.range()) == SEEN
        assert again.committed.offset == 7
    assert [path.name for path in store.path.iterdir()] == ["committed"]


def test_a_store_that_is_closed_forgets_them(store):
    store.close()
    with KeyValueStore(store.path) as again:
        assert dict(again.range()) == COMMITTED
        assert (again.committed.offset, again.has_uncommitted) == (3, False)
