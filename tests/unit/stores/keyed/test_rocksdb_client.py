"""An open RocksDB: the lock on its directory, failed writes, and closing."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.failing_rocksdb import Failing

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.stores.keyed.rocksdb import Client, RocksDatabase, WriteFailedError

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")

HOLD = """
import sys, rocksdict
db = rocksdict.Rdict(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def put(client, key, value):
    batch = client.new_batch()
    batch.put(key, value)
    with client.locks.writing:
        client.write(batch)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "db"


def test_a_directory_is_made_and_opened_again_as_it_was(path):
    client = Client(path)
    assert not client.raw
    put(client, "a", 1)
    client.close()
    again = Client(path, create=False)
    assert again.get("a") == 1
    again.close()


def test_a_database_in_raw_mode_stays_in_raw_mode(path):
    rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True)).close()
    client = Client(path)
    assert client.raw
    put(client, b"a", b"1")
    client.close()
    assert rocksdict.Rdict(str(path)).get(b"a") == b"1"


def test_a_directory_without_a_database_is_not_made_unasked(path):
    with pytest.raises(ConfigurationError, match="there is no RocksDB"):
        Client(path, create=False)
    assert not path.exists()


def test_another_opener_in_this_process_is_named(path):
    first = Client(path)
    with pytest.raises(Unavailable, match="this process has the RocksDB"):
        Client(path)
    first.close()
    Client(path).close()


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux lists which process holds a lock")
def test_another_process_that_has_it_open_is_named(path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(Unavailable, match=rf"process {other.pid} \(.+\) has the RocksDB"):
            Client(path)
        other.kill()
    Client(path).close()


def test_a_database_of_the_users_own_stays_open(path):
    db = rocksdict.Rdict(str(path))
    client = Client(db)
    client.make_families(["mine"])
    assert client.get(b"a", "mine") is None
    client.close()
    db["a"] = 1
    with pytest.raises(IllegalStateError, match="is closed"):
        client.get("a")
    db.close()
    Client(path).close()  # nothing of the client keeps it open


def test_a_database_that_its_user_has_closed_says_so(path):
    db = rocksdict.Rdict(str(path))
    client = Client(db)
    db.close()
    with pytest.raises(IllegalStateError, match="is closed"):
        client.get("a")


@pytest.mark.parametrize("written", [True, False])
def test_after_a_failed_write_the_database_is_opened_again_and_shows_what_became_of_it(path, written):
    client = Client(path)
    client.make_families(["ours"])
    put(client, "a", 1)
    assert client.get(b"x", "ours") is None
    client._db = Failing(client._db, written=written)
    with pytest.raises(WriteFailedError, match="fdatasync"):
        put(client, "b", 2)
    assert (client.get("a"), client.get("b")) == (1, 2 if written else None)
    put(client, "c", 3)
    client.close()


@pytest.mark.parametrize("written", [True, False])
def test_after_a_failed_write_a_database_of_the_users_own_answers_no_more(path, written):
    db = Failing(rocksdict.Rdict(str(path)), written=written)
    client = Client(db)
    with pytest.raises(WriteFailedError):
        put(client, "b", 2)
    for call in (lambda: client.get("b"), lambda: client.items("ours", b""), lambda: put(client, "c", 3)):
        with pytest.raises(Unavailable, match="close the Rdict, open it again"):
            call()
    client.close()
    db.close()
    assert Client(path).get("b") == (2 if written else None)


def test_a_database_that_cannot_be_opened_again_is_unavailable_until_it_can(path):
    client = Client(path)
    client._db = Failing(client._db, written=True)
    kept = client._db.items()  # an iterator of the user's keeps it open
    with pytest.raises(WriteFailedError):
        put(client, "b", 2)
    with pytest.raises(Unavailable, match="this process has the RocksDB"):
        client.get("b")
    del kept
    assert client.get("b") == 2
    client.close()


def test_a_forked_process_is_refused(path):
    client = Client(path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            client.close()
            client.get("a")
        except IllegalStateError as error:
            code = 0 if "after the fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    put(client, "a", 1)
    client.close()


def test_keys_are_locked_all_or_none(path):
    client = Client(path)
    with client.locks.held(["a", "b"], 1):
        with pytest.raises(Unavailable, match="settling the same ids"), client.locks.held(["b", "c"], 0.01):
            raise AssertionError
        with client.locks.held(["c"], 0.01):
            pass
    client.close()


def test_two_objects_over_one_database_share_its_locks(path):
    db = rocksdict.Rdict(str(path))
    first, second = RocksDatabase(db), RocksDatabase(db)
    assert first._client.locks is second._client.locks


def test_threads_read_and_write_at_once(path):
    client = Client(path)
    client.make_families(["ours"])

    def work(number):
        for position in range(50):
            put(client, f"{number}-{position}", position)
            assert client.get(f"{number}-{position}") == position

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(client.db.keys())) == 200
    client.close()
