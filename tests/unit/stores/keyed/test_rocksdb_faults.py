"""A disk that is full, a log that ends in the middle of a record, and one that is damaged: both parts of a decision, or neither."""

import os
import shutil
import subprocess
import sys

import pytest
from harness.places import PROOF, TESTS

from dualwrite.errors import ConfigurationError
from dualwrite.stores.keyed.rocksdb import RocksDatabase

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")


DECIDE = """
import os, resource, signal, sys
from dualwrite.errors import TransactionInDoubt, Unavailable
from dualwrite.recovery.claim import OwnerContext
from dualwrite.recovery.in_doubt import resolve_commit
from dualwrite.clock import Deadline
from dualwrite.stores.keyed.rocksdb import RocksDatabase
from unit.stores.keyed.test_rocksdb_store import claim, write

database = RocksDatabase(sys.argv[1])
database.check()
claim(database)
store = database.store()


def decide(number, size=10):
    with database.connect() as handle:
        found = write(database, handle, number)
        handle.batch.put(f"large/{number}", b"x" * size)
        try:
            store.commit(handle)
        except TransactionInDoubt:
            return found
    return None
"""
DIE = DECIDE + "[decide(number) for number in range(3)]\nos._exit(1)\n"
FULL = (
    DECIDE
    + """
decide(0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = max(database._client.path.glob("*.log"))
unlimited = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + int(sys.argv[2]), unlimited))
state, name = decide(1, 1 << 20)
for call in (store.find, store.incidents):
    try:
        call("")
    except Unavailable:
        pass
resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
print(resolve_commit(OwnerContext(None, store, "me"), "orders", state, name, Deadline(5)).name)
assert decide(2) is None
"""
)


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(PROOF)},
        capture_output=True,
        text=True,
        check=False,
    )


def shown(path):
    """The content after a start: the number in the newest state, and those of the orders."""
    with RocksDatabase(path, create=False) as database:
        database.check()
        rows = database.store().find("")
        orders = sorted(value for key, value in database.rdict.items() if str(key).startswith("order/"))
    newest = [row.prepared.first_offsets[0].offset for row in rows if row.prepared.has_transaction]
    return newest, orders


@pytest.mark.parametrize("room", [0, 100, 40_000])
def test_a_disk_that_is_full_in_the_middle_of_a_decision(tmp_path, room):
    done = run(FULL, tmp_path / "db", room)
    assert (done.stdout, done.returncode) == ("ABORTED\n", 0), done.stderr
    assert shown(tmp_path / "db") == ([2], [0, 2])


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """The directory of a process that has died after its third decision."""
    path = tmp_path_factory.mktemp("died") / "db"
    done = run(DIE, path)
    assert done.returncode == 1, done.stderr
    return path


def edited(died, to, edit):
    shutil.copytree(died, to)
    [log] = [file for file in to.glob("*.log") if file.stat().st_size]
    content = bytearray(log.read_bytes())
    log.write_bytes(edit(content))
    return to


def test_all_decisions_of_a_killed_process_are_there(died, tmp_path):
    assert shown(edited(died, tmp_path / "db", bytes)) == ([2], [0, 1, 2])


@pytest.mark.parametrize(
    "cut", [1, 7, 60, 200, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(2, 400, 9))]
)
def test_a_torn_record_takes_both_parts_of_its_decision_along(died, tmp_path, cut):
    newest, orders = shown(edited(died, tmp_path / "db", lambda content: content[:-cut]))
    assert orders == [0, 1]
    assert newest == [1]


def flipped(content, place):
    content[place] ^= 1
    return content


def test_a_damaged_record_is_no_end_of_the_log(died, tmp_path):
    path = edited(died, tmp_path / "db", lambda content: flipped(content, -900))
    with pytest.raises(ConfigurationError, match="Corruption.*point_in_time"):
        RocksDatabase(path)
    options, families = rocksdict.Options.load_latest(str(path))
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    rocksdict.Rdict(str(path), options, families).close()
    newest, orders = shown(path)
    assert orders == list(range(len(orders)))
    assert newest == orders[-1:]
