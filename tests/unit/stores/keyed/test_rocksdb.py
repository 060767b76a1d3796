"""``RocksDatabase``: URLs, and what it offers as a database."""

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.stores.keyed.rocksdb import RocksDatabase

pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")


def test_a_url_names_a_directory_that_is_there(tmp_path):
    directory = tmp_path / "with space"
    url = f"rocksdb://{tmp_path}/with%20space"
    with pytest.raises(ConfigurationError, match="there is no RocksDB"):
        RocksDatabase.from_url(url)
    RocksDatabase(directory).close()
    with RocksDatabase.from_url(url) as database:
        assert repr(database) == f"<RocksDatabase {directory}>"


@pytest.mark.parametrize("url", ["rocksdb://host/a", "rocksdb:", "sqlite:///a", "rocksdb:///a?b=c"])
def test_other_urls_are_refused(url):
    with pytest.raises(ConfigurationError, match="does not name a RocksDB"):
        RocksDatabase.from_url(url)


def test_what_needs_several_processes_is_refused(tmp_path):
    with RocksDatabase(tmp_path / "db") as database, pytest.raises(ConfigurationError, match="no leases"):
        database.leases("fleet")
