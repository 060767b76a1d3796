"""``DualWriter`` with RocksDB on a real broker: both sides or neither, in one process, whatever its writes come to."""

import random
import subprocess
import sys
import threading
import time

import pytest
from harness.checker import Case
from harness.failing_rocksdb import Failing

import dualwrite.operations
from dualwrite import (
    ConfigurationError,
    DualWriter,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
    failpoints,
    recover,
    status,
)
from dualwrite.databases import RocksDatabase
from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.testing.checker import read_committed

rocksdict = pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")


@pytest.fixture
def database(tmp_path):
    with RocksDatabase(tmp_path / "db") as database:
        yield database


@pytest.fixture
def writer(kafka, database):
    with DualWriter("orders", kafka=kafka, database=database) as writer:
        yield writer


@pytest.fixture
def write(dualwrite_topic):
    def call(writer, number):
        with writer.transaction() as tx:
            tx.batch.put(number, "an order")
            tx.produce(dualwrite_topic, value=str(number))

    return call


@pytest.fixture
def both(kafka, dualwrite_topic):
    def read(database):
        messages = sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic))
        return sorted(database.rdict.keys()), messages

    return read


def test_blocks_write_both_sides_or_neither(database, writer, write, both, dualwrite_topic):
    write(writer, 1)
    with pytest.raises(ValueError, match="no"), writer.transaction() as tx:
        tx.batch.put(2, "an order")
        tx.produce(dualwrite_topic, value="2")
        raise ValueError("no")
    with writer.transaction() as tx:
        tx.batch.put(3, "an order without a message")
    with writer.transaction() as tx:
        batch = tx.batch
        assert batch.get(3) == "an order without a message"
        tx.batch.delete(3)
        tx.produce(dualwrite_topic, value="4")
    for late in (lambda: tx.batch, lambda: batch.put(5, "late")):
        with pytest.raises(IllegalStateError):
            late()
    assert both(database) == ([1], [1, 4])


def test_threads_take_turns_at_what_they_get_for_update(database, writer, dualwrite_topic):
    database.rdict["stock"] = 20

    def sell(tx):
        left = tx.batch.get_for_update("stock")
        tx.batch.put("stock", left - 1)
        tx.produce(dualwrite_topic, value=str(left))

    def work():
        for _ in range(5):
            writer.run(sell, attempts=100, longest_pause_s=0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.rdict["stock"] == 0


@pytest.mark.parametrize("written", [True, False])
def test_a_failed_write_is_resolved_by_opening_the_database_again(database, writer, write, both, written):
    write(writer, 1)
    database._client._db = Failing(database.rdict, written=written, entries=2)
    if written:
        write(writer, 2)
    else:
        with pytest.raises(TransactionAborted):
            write(writer, 2)
    write(writer, 3)
    expected = [1, 2, 3] if written else [1, 3]
    assert both(database) == (expected, expected)


@pytest.mark.parametrize("written", [True, False])
def test_a_failed_write_of_the_users_own_rdict_stays_in_doubt_until_it_is_opened_again(
    tmp_path, kafka, write, both, written
):
    db = Failing(rocksdict.Rdict(str(tmp_path / "db")), written=written, entries=2)
    with (
        RocksDatabase(db) as database,
        DualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(timeout_s=2, max_lanes=1)) as writer,
        pytest.raises(TransactionInDoubt),
    ):
        write(writer, 1)
    db.close()
    with RocksDatabase(tmp_path / "db") as database:
        [left] = [item for item in status(kafka=kafka, database=database) if item.needs_recovery]
        report = recover(kafka=kafka, database=database, open_for_s=0)
        assert (report.settled, report.losses) == ([left.row.transactional_id], [])
        expected = [1] if written else []
        assert both(database) == (expected, expected)


def test_ids_are_recovered_by_url_terminated_and_forgotten(tmp_path, kafka, write, both):
    url = f"rocksdb://{tmp_path / 'db'}"
    with RocksDatabase(tmp_path / "db") as database, DualWriter("orders", kafka=kafka, database=database) as writer:
        write(writer, 1)
        failpoints.arm("write.decided:1:raise")
        with pytest.raises(FailpointError):
            write(writer, 2)
        failpoints.arm("")
        assert both(database) == ([1, 2], [1, 2])
    assert not [item for item in status(kafka=kafka, database=url) if item.needs_recovery]
    assert recover("orders", kafka=kafka, database=url).settled == []
    forgotten = dualwrite.operations.forget("orders", kafka=kafka, database=url, untouched_for_s=0).forgotten
    assert forgotten == ["orders", "orders#1", "orders#2"]
    with RocksDatabase(tmp_path / "db") as database:
        assert database.store().find("") == []


@pytest.mark.parametrize("rounds", [2, pytest.param(25, marks=pytest.mark.thorough)])
def test_processes_killed_at_any_moment_leave_both_sides_equal(tmp_path, kafka, dualwrite_topic, rounds):
    RocksDatabase(tmp_path / "db").close()
    case = Case(tmp_path, kafka, f"rocksdb://{tmp_path / 'db'}", dualwrite_topic)
    for _ in range(rounds):
        with case.start(operations=10_000, threads=3, max_lanes=3) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline().startswith("open")
            time.sleep(random.uniform(0, 1))  # any moment is right
            worker.kill()
    case.run(operations=1)
    assert len(case.verify()) > rounds


def test_what_rocksdb_cannot_do_is_refused(kafka, database, writer, write):
    with pytest.raises(ConfigurationError, match="leases"):
        DualWriter.leased("fleet", kafka=kafka, database=database).open()
    for outbox in ("fallback", "always"):
        with pytest.raises(ConfigurationError, match="RocksDB has no outbox"):
            DualWriter("waits", kafka=kafka, database=database, outbox=outbox).open()
    assert database.store().find("waits") == []
    with writer.transaction() as tx:
        for call in (lambda: tx.connection, lambda: tx.session):
            with pytest.raises(IllegalStateError, match=r"tx\.batch"):
                call()
    with pytest.raises(IllegalStateError, match=r"tx\.batch"), writer.transaction(database.rdict):
        raise AssertionError
    with pytest.raises((ConfigurationError, IllegalStateError), match="RocksDB"):
        writer.bind(object)


def test_units_run_in_dual_writes_of_their_own(database, writer, both, dualwrite_topic):
    def unit(number):
        def work(tx):
            tx.batch.put(number, "an order")
            tx.produce(dualwrite_topic, value=str(number))
            if number == 3:
                raise ValueError("no")

        return work

    units = [writer.submit(unit(number)) for number in range(6)]
    assert [type(one.exception()) for one in units].count(ValueError) == 1
    assert both(database) == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path, writer, kafka):
    code = (
        "import sys\nfrom dualwrite import DualWriter\n"
        "DualWriter('orders', kafka={'bootstrap.servers': sys.argv[1]}, database=sys.argv[2]).open()"
    )
    other = [sys.executable, "-c", code, kafka["bootstrap.servers"], f"rocksdb://{tmp_path / 'db'}"]
    done = subprocess.run(other, capture_output=True, text=True, check=False)
    assert "Unavailable" in done.stderr
    assert "has the RocksDB" in done.stderr


def test_a_database_that_cannot_decide_is_refused_before_anything_is_claimed(tmp_path, kafka):
    options = rocksdict.Options()
    options.set_paranoid_checks(False)
    database = RocksDatabase(rocksdict.Rdict(str(tmp_path / "db"), options))
    with pytest.raises(ConfigurationError, match="paranoid_checks"):
        DualWriter("orders", kafka=kafka, database=database).open()
    with pytest.raises(Unavailable, match="this process"):
        RocksDatabase(tmp_path / "db")
