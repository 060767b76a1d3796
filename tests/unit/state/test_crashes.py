"""A crash leaves a part of the last write, or of a deleted directory, on disk: the store is as before, or as after."""

import shutil

import pytest

from dualwrite.state import KeyValueStore
from dualwrite.state import store as spilled

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

BEFORE = {b"changed": b"old", b"deleted": b"old"}
AFTER = {b"changed": b"new", **{b"%03d" % number: b"new" * 10 for number in range(20)}}


def written(directory, **more):
    """A store with two commits."""
    with KeyValueStore(directory, **more) as store:
        store.put_all(BEFORE.items())
        store.commit(3)
        (log,) = (directory / "committed").glob("*.log")
        before = log.stat().st_size
        store.put_all(AFTER.items())
        store.put(b"deleted", None)
        store.commit(7)
        shutil.copytree(directory, directory.with_name("written"))  # as a power failure finds it: not closed
    return directory.with_name("written"), log.name, before


def test_whatever_part_of_a_commit_is_on_disk_all_of_it_counts_or_nothing(tmp_path):
    source, log, before = written(tmp_path / "store")
    end = (source / "committed" / log).stat().st_size
    assert end > before > 0
    seen = set()
    for size in sorted({*range(before, end, 67), end - 1, end}):
        shutil.copytree(source, torn := tmp_path / str(size))
        with (torn / "committed" / log).open("rb+") as file:
            file.truncate(size)
        with KeyValueStore(torn) as store:
            found = (dict(store.range()), store.committed.offset)
        assert found in [(BEFORE, 3), (AFTER, 7)]
        seen.add(found[1])
    assert seen == {3, 7}


@pytest.mark.parametrize("left", ["MANIFEST", "CURRENT", ".log", "OPTIONS", "IDENTITY"])
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "discarded"])
def test_a_process_that_dies_while_it_deletes_spilled_writes_leaves_a_store_that_opens(
    tmp_path, monkeypatch, left, committed
):
    class Died(BaseException):
        pass

    def die(directory):
        for path in directory.iterdir():
            if left not in path.name:
                path.unlink()
        raise Died

    with KeyValueStore(tmp_path / "store", max_memory_bytes=0) as store:
        store.put_all(BEFORE.items())
        store.commit(3)
        store.put(b"changed", b"new")
        with monkeypatch.context() as dying:
            dying.setattr(spilled.shutil, "rmtree", die)
            with pytest.raises(Died):
                store.commit(7) if committed else store.recover(0)
    for _ in range(2):
        with KeyValueStore(tmp_path / "store") as store:
            assert dict(store.range()) == BEFORE | ({b"changed": b"new"} if committed else {})
            assert store.committed.offset == (7 if committed else 3)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["committed"]


def test_a_deleted_directory_that_a_power_failure_brings_back_is_not_committed_again(tmp_path, monkeypatch):
    """A file system need not keep the order in which directories and files become durable."""
    real = spilled.shutil.rmtree

    def keep(directory):
        shutil.copytree(directory, tmp_path / "kept")
        real(directory)

    with KeyValueStore(tmp_path / "store", max_memory_bytes=0) as store:
        store.put(b"changed", b"old")
        monkeypatch.setattr(spilled.shutil, "rmtree", keep)
        store.commit(3)
        monkeypatch.undo()
        store.put(b"changed", b"new")
        store.commit(7)
    shutil.copytree(tmp_path / "kept", tmp_path / "store" / "uncommitted")
    with KeyValueStore(tmp_path / "store") as store:
        assert (store.get(b"changed"), store.committed.offset) == (b"new", 7)
