"""`DualWriter` on ZooKeeper, with a real broker: kills, faults of both servers, and the calls for people."""

import itertools
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.checker import FALLS_BACK
from harness.patience import wait_until
from harness.zookeeper_proxy import ZooKeeperProxy
from harness.zookeeper_worker import ZooKeeperCase
from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, ConnectionLoss

from dualwrite import (
    ConfigurationError,
    DualWriteError,
    DualWriter,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.databases import ZooKeeperDatabase
from dualwrite.errors import DatabaseWentBack, IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.operations import forget, terminate
from dualwrite.recovery.recover import status
from dualwrite.stores.keyed.zookeeper import Session
from dualwrite.testing import EmbeddedZooKeeper, read_committed

names = (f"/writer-{secrets.token_hex(4)}" for _ in itertools.count())
WRITE_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith("write.") and name not in FALLS_BACK]
SETTLE_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith(("claim.", "settle."))]
DECIDED = {"write.decided", "write.completed"}
IN_EVERY_RUN = {"write.recorded", "write.decided"}


@pytest.fixture
def root():
    return next(names)


@pytest.fixture
def client(dualwrite_zookeeper, root):
    # A server that is away for as long as the session lives costs the session; kazoo's own pauses grow to an hour.
    again = {"max_tries": -1, "max_delay": 1.0}
    made = KazooClient(dualwrite_zookeeper.hosts, connection_retry=again, command_retry=again)
    made.start(timeout=60)
    made.create(f"{root}-user")
    yield made
    made.stop()
    made.close()


@pytest.fixture
def database(dualwrite_zookeeper, root):
    with ZooKeeperDatabase(dualwrite_zookeeper.hosts, root=root) as made:
        yield made


@pytest.fixture
def writer(kafka, database):
    with DualWriter("orders", kafka=kafka, database=database) as made:
        yield made


@pytest.fixture
def sides(kafka, client, root, dualwrite_topic):
    """The names of the user's znodes, and the committed messages."""

    def both():
        client.retry(client.sync, "/")
        znodes = sorted(client.retry(client.get_children, f"{root}-user"))
        return znodes, sorted(record.value.decode() for record in read_committed(kafka, dualwrite_topic))

    return both


@pytest.fixture
def put(root, dualwrite_topic):
    """One znode and its message."""

    def one(writer, name):
        with writer.transaction() as tx:
            tx.produce(dualwrite_topic, value=name)
            tx.multi.create(f"{root}-user/{name}")

    return one


def test_znodes_and_messages_come_together(writer, sides, put):
    for number in range(5):
        put(writer, f"n{number}")
    assert sides() == ([f"n{number}" for number in range(5)],) * 2


def test_an_exception_in_the_block_leaves_neither(writer, sides, put, root, dualwrite_topic):
    with pytest.raises(ZeroDivisionError), writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="a")
        tx.multi.create(f"{root}-user/a")
        raise ZeroDivisionError
    with pytest.raises(IllegalStateError):
        tx.multi.create(f"{root}-user/later")
    put(writer, "b")
    assert sides() == (["b"], ["b"])


def test_a_condition_that_does_not_hold_aborts_both_and_is_the_cause(writer, sides, client, root, dualwrite_topic):
    client.create(f"{root}-user/stock", b"1")
    with pytest.raises(TransactionAborted, match="refuses set_data") as caught, writer.transaction() as tx:
        _, stat = client.get(f"{root}-user/stock")
        tx.multi.set_data(f"{root}-user/stock", b"0", version=stat.version)
        tx.produce(dualwrite_topic, value="sold")
        client.set(f"{root}-user/stock", b"0")
    assert isinstance(caught.value.__cause__, BadVersionError)
    assert caught.value.retryable
    assert sides() == (["stock"], [])


def test_run_repeats_the_work_until_its_condition_holds(writer, sides, client, root, dualwrite_topic):
    client.create(f"{root}-user/count", b"0")
    attempts = []

    def count(tx):
        value, stat = client.get(f"{root}-user/count")
        if not attempts:
            client.set(f"{root}-user/count", b"10")
        attempts.append(value)
        tx.multi.set_data(f"{root}-user/count", str(int(value) + 1).encode(), version=stat.version)
        tx.produce(dualwrite_topic, value="counted")

    writer.run(count)
    assert attempts == [b"0", b"10"]
    assert client.get(f"{root}-user/count")[0] == b"11"
    assert sides() == (["count"], ["counted"])


def test_a_block_without_messages_is_one_multi(writer, sides, root):
    with writer.transaction() as tx:
        tx.multi.create(f"{root}-user/a")
    assert sides() == (["a"], [])


def test_threads_share_a_writer(writer, sides, put):
    threads = [
        threading.Thread(target=lambda own=own: [put(writer, f"t{own}-{number}") for number in range(5)])
        for own in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(f"t{own}-{number}" for own in range(4) for number in range(5))
    assert sides() == (expected, expected)


def test_a_second_writer_fences_the_first(kafka, dualwrite_zookeeper, root, writer, sides, put, dualwrite_topic):
    put(writer, "a")
    with ZooKeeperDatabase(dualwrite_zookeeper.hosts, root=root) as other:
        with pytest.raises((Fenced, TransactionAborted)), writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="late")
            tx.multi.create(f"{root}-user/late")
            with DualWriter("orders", kafka=kafka, database=other) as second:
                put(second, "b")
        with pytest.raises(Fenced):
            put(writer, "c")
    assert sides() == (["a", "b"], ["a", "b"])


def left_decided(kafka, hosts, root, put, name):
    """An owner that is gone between the two commits."""
    from harness.death import mortal

    with ZooKeeperDatabase(hosts, root=root) as database:
        writer = mortal(DualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(max_lanes=1)))
        writer.open()
        failpoints.arm("write.decided:1:raise")
        with pytest.raises(FailpointError):
            put(writer, name)
        failpoints.arm("")
        writer.close()


def test_the_calls_for_people(kafka, dualwrite_zookeeper, database, root, sides, put):
    left_decided(kafka, dualwrite_zookeeper.hosts, root, put, "a")
    servers = {"kafka": kafka, "database": database}
    [shown] = status("orders", **servers)
    assert shown.needs_recovery
    assert "orders" in forget(**servers, untouched_for_s=0).kept
    assert recover("orders", **servers, open_for_s=0).rolled_forward == ["orders"]
    assert sides() == (["a"], ["a"])
    assert recover("orders", **servers, open_for_s=0).rolled_forward == []
    assert forget(**servers, untouched_for_s=0).forgotten == ["orders"]
    assert status(**servers) == []
    with DualWriter("orders", kafka=kafka, database=database) as again:
        put(again, "b")
    assert sides() == (["a", "b"], ["a", "b"])


def test_a_decided_transaction_given_up_by_an_operator_is_a_recorded_loss(
    kafka, dualwrite_zookeeper, database, root, sides, put
):
    left_decided(kafka, dualwrite_zookeeper.hosts, root, put, "a")
    servers = {"kafka": kafka, "database": database}
    [shown] = status("orders", **servers)
    kafka_id = shown.row.kafka_id(shown.row.incarnation)
    terminate(kafka_id, **servers, lose_decided=True)
    assert sides() == (["a"], [])
    [incident] = database.store().incidents("orders", acknowledged=True)
    assert incident.outcome.value == "lost"


@pytest.mark.parametrize("fault", ["reset_request", "reset_answer"])
def test_a_lost_answer_is_resolved(kafka, dualwrite_zookeeper, root, sides, put, fault, client):
    with (
        ZooKeeperProxy(dualwrite_zookeeper) as proxy,
        ZooKeeperDatabase(proxy.hosts, root=root) as database,
        DualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(max_lanes=1)) as writer,
    ):
        put(writer, "a")
        getattr(proxy.on(), fault)()
        if fault == "reset_request":
            with pytest.raises(TransactionAborted) as caught:
                put(writer, "b")
            assert caught.value.retryable
        else:
            put(writer, "b")
        put(writer, "c")
    expected = ["a", "c"] if fault == "reset_request" else ["a", "b", "c"]
    assert sides() == (expected, expected)


def test_a_multi_that_arrives_after_its_settler_happens_no_more(writer, sides, put, client, monkeypatch):
    """Nobody but the network knows of it: the owner must make it impossible before it believes what it reads."""
    put(writer, "a")
    send, late = Session.send, []

    def lose(session, request, answer_s=None):
        if answer_s is not None and not late:
            late.append(request)
            raise ConnectionLoss
        return send(session, request, answer_s)

    monkeypatch.setattr(Session, "send", lose)
    with pytest.raises(TransactionAborted) as caught:
        put(writer, "b")
    assert caught.value.retryable
    late[0].client = client
    assert [type(one) for one in late[0].commit()].count(BadVersionError) == 1
    put(writer, "c")
    assert sides() == (["a", "c"], ["a", "c"])


def test_a_suspended_server_leaves_no_half(kafka, dualwrite_zookeeper, database, sides, put):
    with DualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(max_lanes=1, timeout_s=20)) as writer:
        put(writer, "a")
        resumed = threading.Timer(4, dualwrite_zookeeper.resume)
        dualwrite_zookeeper.suspend()
        resumed.start()
        done = ["a"]
        try:
            put(writer, "b")
            done.append("b")
        except (TransactionAborted, TransactionInDoubt):
            pass
        resumed.join()
    with DualWriter("orders", kafka=kafka, database=database) as writer:
        put(writer, "c")
    znodes, messages = sides()
    assert znodes == messages
    assert set(znodes) >= {*done, "c"}


def test_a_killed_server_comes_back_with_all_that_was_decided(kafka, dualwrite_zookeeper, database, sides, put):
    with (
        DualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(max_lanes=1)) as writer,
        ThreadPoolExecutor(1) as threads,
    ):
        done = []

        def die():
            for _ in range(2):
                time.sleep(1)
                dualwrite_zookeeper.kill()
                dualwrite_zookeeper.start()

        deaths = threads.submit(die)
        number, before = 0, None
        while before in {None, len(done)}:  # until one is written after the last death: close() needs the server, too
            if before is None and deaths.done():
                deaths.result()
                before = len(done)
            number += 1
            try:
                put(writer, f"n{number:05}")
                done.append(f"n{number:05}")
            except DualWriteError:  # whatever it says, both sides must agree
                time.sleep(0.05)
    recover("orders", kafka=kafka, database=database, open_for_s=0)
    znodes, messages = sides()
    assert znodes == messages
    assert set(done) <= set(znodes)


def test_a_tree_that_has_gone_back_in_time_is_noticed(kafka, database, client, root, put):
    """As after a restore: the znode of the state is that of an earlier decision."""
    with DualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(max_lanes=1)) as writer:
        put(writer, "a")
        before, _ = client.get(f"{root}/state/orders")
        put(writer, "b")
        client.set(f"{root}/state/orders", before)
        with pytest.raises(DatabaseWentBack):
            put(writer, "c")


@pytest.mark.thorough
def test_an_ensemble_that_loses_its_leader_keeps_both_sides_equal(kafka, dualwrite_topic):
    with (
        EmbeddedZooKeeper(servers=3) as ensemble,
        ZooKeeperDatabase(ensemble.hosts) as database,
        DualWriter("orders", kafka=kafka, database=database, limits=WriterLimits(max_lanes=2)) as writer,
    ):
        done, over = [], threading.Event()

        def write(own):
            number = 0
            while not over.is_set():
                number += 1
                name = f"t{own}-{number:05}"
                try:
                    with writer.transaction() as tx:
                        tx.multi.create(f"/{name}")
                        tx.produce(dualwrite_topic, value=name)
                    done.append(name)
                except DualWriteError:  # whatever it says, both sides must agree
                    time.sleep(0.05)

        threads = [threading.Thread(target=write, args=(own,)) for own in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            written = len(done)
            wait_until(lambda written=written: len(done) > written + 10)
            [leader] = [one for one in (1, 2, 3) if ensemble.mode(one) == "leader"]
            ensemble.kill(leader)
            ensemble.start(leader)
        written = len(done)
        wait_until(lambda: len(done) > written + 10)
        over.set()
        for thread in threads:
            thread.join()
        recover("orders", kafka=kafka, database=database, open_for_s=0)
        znodes = {name for name in database.keys._session.children("/") if name.startswith("t")}
        messages = [record.value.decode() for record in read_committed(kafka, dualwrite_topic)]
        assert sorted(messages) == sorted(znodes)
        assert set(done) <= znodes


def test_a_session_that_expires_in_the_block_aborts_both(writer, database, sides, put, root, dualwrite_topic):
    from test_zookeeper_keys import expire

    with pytest.raises(TransactionAborted, match="session") as caught, writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="a")
        tx.multi.create(f"{root}-user/a")
        session = database._kazoo.client_id
        expire(database._kazoo)
        wait_until(lambda: database._kazoo.connected and database._kazoo.client_id[0] != session[0])
    assert caught.value.retryable
    put(writer, "b")
    assert sides() == (["b"], ["b"])


def test_an_operation_that_no_request_can_hold_is_refused_at_once(writer, sides, root, dualwrite_topic):
    with pytest.raises(ConfigurationError, match="jute.maxbuffer"), writer.transaction() as tx:
        tx.produce(dualwrite_topic, value="a")
        tx.multi.create(f"{root}-user/a", bytes(1_100_000))
    assert sides() == ([], [])


def test_what_only_other_databases_have_is_refused(kafka, writer, database):
    with writer.transaction() as tx:
        with pytest.raises(IllegalStateError, match=r"tx\.multi"):
            _ = tx.connection
        with pytest.raises(IllegalStateError, match=r"tx\.multi"):
            _ = tx.session
    with pytest.raises(ConfigurationError, match="ZooKeeper"):
        DualWriter.leased("fleet", kafka=kafka, database=database).open()
    for outbox in ("fallback", "always"):
        with pytest.raises(ConfigurationError, match="ZooKeeper has no outbox"):
            DualWriter("waits", kafka=kafka, database=database, outbox=outbox).open()
    assert database.store().find("waits") == []


def test_a_chroot_is_made_with_all_its_levels(dualwrite_zookeeper, client, root):
    hosts = f"{dualwrite_zookeeper.hosts}{root}-no/such/chroot"
    mine = KazooClient(hosts)
    mine.start_async().wait(30)
    with pytest.raises(ConfigurationError, match="does not exist"):
        ZooKeeperDatabase(mine).check()
    for _ in range(2):
        with ZooKeeperDatabase(hosts) as database:
            database.check()
    assert client.exists(f"{root}-no/such/chroot/kafka_transaction_state/state")
    ZooKeeperDatabase(mine).check()
    mine.stop()
    mine.close()
    client.delete(f"{root}-no", recursive=True)


def test_a_url_names_the_database(kafka, dualwrite_zookeeper, client, root, sides, put):
    client.create(f"{root}-user/inner")
    url = f"zookeeper://{dualwrite_zookeeper.hosts}{root}-user/chroot"
    with DualWriter("orders", kafka=kafka, database=url) as writer, writer.transaction() as tx:
        tx.multi.create("/a")
    assert client.exists(f"{root}-user/chroot/kafka_transaction_state/state/orders")
    assert client.exists(f"{root}-user/chroot/a")
    assert [one.row.transactional_id for one in status(kafka=kafka, database=url)] == ["orders", "orders#1", "orders#2"]


@pytest.fixture
def case(tmp_path, kafka, dualwrite_zookeeper, root, client, dualwrite_topic):
    return ZooKeeperCase(tmp_path, kafka, f"{dualwrite_zookeeper.hosts}{root}", dualwrite_topic)


def aborting(point):
    """Points of the abort path are passed only by an operation that aborts."""
    return {"abort": [1]} if point in {"write.before_abort", "write.rolled_back"} else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", [pytest.param(one, marks=() if one in IN_EVERY_RUN else pytest.mark.thorough) for one in WRITE_POINTS]
)
def test_writer_killed_then_next_start_makes_both_sides_equal(case, point, dualwrite_zookeeper):
    nth = 1 if aborting(point) else 3 if point == "write.produced" else 2
    case.run(failpoint=f"{point}:{nth}", killed=True, **aborting(point))
    case.run(operations=2)
    rows = case.verify()
    assert ("w1-1" in rows) is (point in DECIDED)
    assert {"w1-0", "w2-0", "w2-1"} <= rows


@pytest.mark.slow
@pytest.mark.parametrize("left_by", ["write.decided", "write.recorded"])
@pytest.mark.parametrize(
    "point",
    [pytest.param(one, marks=() if one == "settle.before_commit" else pytest.mark.thorough) for one in SETTLE_POINTS],
)
def test_settler_killed_then_another_settles(case, point, left_by):
    case.run(failpoint=f"{left_by}:2", killed=True)
    case.run(failpoint=point, killed=left_by == "write.decided" or None, operations=1)
    case.run(operations=1)
    rows = case.verify()
    assert ("w1-1" in rows) is (left_by == "write.decided")
