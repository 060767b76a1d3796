"""The file of rocksdict that a process leaves empty which is killed while it opens the database."""

import pytest

from dualwrite.databases import RocksDatabase

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("left", [None, "", '{"raw_mo', "[]", '{"raw_mode":true,"prefix_extractors":{}}'])
def test_a_database_whose_opener_was_killed_opens_again(tmp_path, raw, left):
    key, value = (b"a", b"1") if raw else ("a", 1)
    db = rocksdict.Rdict(str(tmp_path / "db"), rocksdict.Options(raw_mode=raw))
    db[key] = value
    db.close()
    file = tmp_path / "db" / "rocksdict-config.json"
    file.unlink() if left is None else file.write_text(left)
    with RocksDatabase(tmp_path / "db") as database:
        assert database.rdict[key] == value


def test_a_file_that_is_right_is_left_alone(tmp_path):
    RocksDatabase(tmp_path / "db").close()
    file = tmp_path / "db" / "rocksdict-config.json"
    from dualwrite.stores.keyed.rocksdb import restore_config

    before = file.stat().st_mtime_ns, file.read_text()
    restore_config(tmp_path / "db")
    assert (file.stat().st_mtime_ns, file.read_text()) == before
