"""``DualWriter.leased`` on a simulated Kafka and SQLite: members of a fleet, alive, paused, dead and forked."""

import inspect
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.databases import age
from harness.patience import wait_until
from harness.served import SETTINGS, TOPIC
from sqlalchemy.orm import sessionmaker

from dualwrite import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriter,
    Fenced,
    TransactionAborted,
    Unavailable,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.asyncio.writer import AsyncDualWriter
from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.recovery.operator import forget
from dualwrite.stores.sql.leases import read_leases
from dualwrite.stores.sql.operators import Forgetting
from dualwrite.writing import lane_pool, leased
from dualwrite.writing import leased as lease_keeper
from dualwrite.writing.lane import Lane
from dualwrite.writing.transaction import AsyncWriterSettings, WriterSettings


@pytest.fixture
def member(shop):
    """Makes members, whose heartbeats a test sends."""
    made = []

    def make(**kwargs):
        limits = WriterLimits(timeout_s=10.0)
        settings = {"kafka": SETTINGS, "database": shop.engine, "lease_timeout_s": 3600.0, "limits": limits, **kwargs}
        made.append(DualWriter.leased("orders", **settings))
        return made[-1]

    yield make
    failpoints.arm("")
    for writer in made:
        writer.close()


@pytest.fixture
def leases(shop):
    return lambda: {lease.transactional_id: lease.state.value for lease in read_leases(shop.engine)}


def put(shop, writer, number):
    with writer.transaction() as tx:
        shop.put(tx, number)


def expire(shop, name):
    """As time does."""
    shop.database.execute(
        "UPDATE dualwrite_lease SET lease_until = '2020-01-01 00:00:00.000000' WHERE transactional_id = :id", id=name
    )


def die(shop, writer):
    """End a member as SIGKILL does: nothing is closed or settled, and its lease expires."""
    writer._keeper._stopped.set()
    writer._closing.set()
    # Its thread would go on with the database after the test.
    lanes = writer._current._lanes
    lanes._queue.close()
    lanes.look_again()
    lanes._housekeeper.join()
    writer._pid = writer._current._pid = -1
    expire(shop, writer.transactional_id)


@pytest.fixture
def no_housekeeping(monkeypatch):
    """No lane is settled in the background: its process is about to die."""
    monkeypatch.setattr(lane_pool, "_see_to", lambda *_, **__: None)


def leave_open(shop, writer, number):
    """Leave a Kafka transaction open, whose rows are rolled back."""
    failpoints.arm("write.prepared:1:raise,write.rolled_back:1:raise")
    with pytest.raises(FailpointError):
        put(shop, writer, number)
    failpoints.arm("")


def leave_decided(shop, writer, number):
    """Leave a Kafka transaction open, whose rows are committed."""
    failpoints.arm("write.decided:1:raise")
    with pytest.raises(FailpointError):
        put(shop, writer, number)
    failpoints.arm("")


def beat(writer):
    """Send a heartbeat, and wait for what it starts."""
    assert writer._keeper.beat_once()
    if writer._helper is not None:
        writer._helper.join(60)


def test_members_of_one_name_take_ids_of_their_own_and_give_them_back(shop, member, leases):
    members = [member() for _ in range(3)]
    assert [one.transactional_id for one in members] == ["orders"] * 3
    for number, one in enumerate(members):
        one.open()
        assert one.transactional_id == f"orders-{number}"
        assert one.ready
    for number, one in enumerate(members):
        put(shop, one, number)
    assert shop.both_have(0, 1, 2)
    members[1].close()
    members[1].close()
    assert leases() == {"orders-0": "held", "orders-1": "free", "orders-2": "held"}
    with member() as another:
        assert another.transactional_id == "orders-1"
        put(shop, another, 3)
    assert shop.both_have(0, 1, 2, 3)


def no_answer(*_, **__):
    raise Unavailable("no answer")


def test_an_id_is_given_back_only_after_it_is_settled_and_not_free_if_something_is_left(
    shop, member, leases, monkeypatch
):
    first = member()
    first.open()
    inner, seen = first._current, []
    real = inner.close
    inner.close = lambda: (real(), seen.append(leases()))
    first.close()
    assert (seen, leases()) == ([{"orders-0": "held"}], {"orders-0": "free"})

    second = member()
    second.open()
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "settle", no_answer)  # nor does the housekeeping before it closes
        leave_open(shop, second, 1)
        second.close()
    assert leases() == {"orders-0": "expired"}, "its transaction is open in Kafka"


@pytest.mark.usefixtures("no_housekeeping")
def test_what_a_dead_member_has_left_is_settled_by_the_next_one_that_takes_its_id(shop, member):
    dead = member()
    dead.open()
    leave_decided(shop, dead, 1)
    die(shop, dead)
    with member() as heir:
        assert heir.transactional_id == "orders-0"
        assert shop.both_have(1)


@pytest.mark.usefixtures("no_housekeeping")
@pytest.mark.parametrize(("leave", "numbers"), [(leave_open, []), (leave_decided, [1])])
def test_what_a_dead_member_has_left_is_settled_by_a_living_one_though_nobody_takes_its_id(
    shop, member, leases, leave, numbers
):
    living, dead = member(), member()
    living.open()
    dead.open()
    leave(shop, dead, 1)
    die(shop, dead)
    with pytest.raises(AssertionError, match="held back"):
        shop.both_have()
    beat(living)
    assert leases() == {"orders-0": "held", "orders-1": "free"}
    assert living.transactional_id == "orders-0"
    assert shop.both_have(*numbers)


def test_a_member_taken_for_dead_with_nothing_open_can_begin_nothing_under_its_former_id(shop, member, leases):
    """It may die before its next heartbeat: what it began would be left under an id that is free, and so settled by nobody."""
    living, paused = member(), member()
    living.open()
    paused.open()
    expire(shop, "orders-1")
    beat(living)
    assert leases() == {"orders-0": "held", "orders-1": "free"}
    with pytest.raises(TransactionAborted, match="has lost its id"):
        put(shop, paused, 1)
    assert shop.both_have()


def test_a_member_paused_before_its_claim_does_not_stay_under_an_id_that_was_given_back(shop, member, leases):
    living, paused = member(), member()
    living.open()
    real, paused_under = paused._make, []

    def make(name):
        if not paused_under:
            paused_under.append(name)
            expire(shop, name)
            beat(living)
            assert leases()[name] == "free"
        return real(name)

    paused._make = make
    paused.open()
    assert paused_under == ["orders-1"]
    assert leases()[paused.transactional_id] == "held"
    put(shop, paused, 1)
    assert shop.both_have(1)


@pytest.mark.usefixtures("no_housekeeping")
def test_a_loss_of_a_dead_member_is_reported_by_the_one_that_settles_it(shop, member, leases):
    told = []
    living, dead = member(on_loss=told.append), member()
    living.open()
    dead.open()
    leave_decided(shop, dead, 1)
    row = shop.state("orders-1")
    shop.kafka.abort_by_timeout(f"orders-1.{row.namespace}.{row.incarnation}")
    die(shop, dead)
    beat(living)
    assert [type(loss) for loss in told] == [DecidedTransactionLost]
    assert leases()["orders-1"] == "free"


def test_a_dead_member_that_cannot_be_settled_now_is_left_to_the_next_attempt(
    shop, member, leases, monkeypatch, caplog
):
    living, dead = member(), member()
    living.open()
    dead.open()
    die(shop, dead)
    with monkeypatch.context() as patch:
        patch.setattr(leased, "take_over", no_answer)
        beat(living)
    assert "cannot settle a dead member's id yet" in caplog.text
    assert leases()["orders-1"] == "held", "by its settler, whose lease nobody renews"
    expire(shop, "orders-1")
    beat(living)
    assert leases()["orders-1"] == "free"


def test_a_paused_member_whose_id_was_taken_aborts_once_and_goes_on_under_another(shop, member, leases):
    paused = member()
    paused.open()
    put(shop, paused, 1)
    expire(shop, "orders-0")
    with member() as heir:
        assert heir.transactional_id == "orders-0"
        put(shop, heir, 2)
        with pytest.raises(TransactionAborted, match="has lost its id") as caught:
            put(shop, paused, 3)
        assert caught.value.retryable
        assert caught.value.outcome == "aborted"
        assert isinstance(caught.value.__cause__, Fenced)
        wait_until(lambda: paused.ready)
        assert paused.transactional_id == "orders-1"
        put(shop, paused, 4)
        put(shop, heir, 5)
        assert shop.both_have(1, 2, 4, 5)
        assert leases() == {"orders-0": "held", "orders-1": "held"}


def test_a_block_that_waits_for_a_lane_while_its_member_takes_another_id_is_to_run_again(shop, member):
    paused = member(limits=WriterLimits(timeout_s=10.0, max_lanes=1))
    paused.open()
    lanes = paused._current._lanes
    busy = lanes.ticket()  # the lane alone: a block would hold SQLite's lock
    lanes.take(busy)
    expire(shop, "orders-0")
    with member() as heir, ThreadPoolExecutor(1) as thread:
        waits = thread.submit(put, shop, paused, 1)
        wait_until(lambda: lanes.waiting)
        assert paused._keeper.beat_once()
        with pytest.raises(TransactionAborted, match="nothing was begun") as caught:
            waits.result(60)
        assert caught.value.retryable
        busy.end()
        put(shop, paused, 2)
        put(shop, heir, 3)
        paused.close()
        with pytest.raises(IllegalStateError, match="the writer is closed"):
            put(shop, paused, 4)
        assert shop.both_have(2, 3)


def test_a_heartbeat_finds_that_the_lease_is_taken_before_any_dual_write_does(shop, member):
    paused = member()
    paused.open()
    expire(shop, "orders-0")
    with member() as heir:
        go_on, real = threading.Event(), paused._next
        paused._next = lambda keeper: (go_on.wait(60), real(keeper))[1]
        assert paused._keeper.beat_once()
        health = paused.health()
        assert (health.ready, health.lease_lost) == (False, True)
        with pytest.raises(TransactionAborted, match="nothing was begun"):
            put(shop, paused, 1)
        go_on.set()
        wait_until(lambda: paused.ready)
        assert paused.health().writer == "orders-1"
        put(shop, paused, 2)
        put(shop, heir, 3)
        assert shop.both_have(2, 3)


def test_a_member_whose_new_id_cannot_be_opened_yet_tries_until_it_can(shop, member, monkeypatch):
    paused = member()
    paused.open()
    expire(shop, "orders-0")
    with member():
        real, errors = paused._make, [Unavailable("not now"), RuntimeError("?")]

        def make(name):
            if errors:
                raise errors.pop()
            return real(name)

        monkeypatch.setattr(paused, "_make", make)
        monkeypatch.setattr(leased, "_FIRST_PAUSE_S", 0.001)
        beat(paused)
        assert (errors, paused.ready) == ([], True)
        put(shop, paused, 1)
        assert shop.both_have(1)


def test_run_runs_the_work_again_under_the_new_id(shop, member):
    paused = member()
    paused.open()
    expire(shop, "orders-0")
    with member():
        paused.run(lambda tx: shop.put(tx, 1), attempts=1000, longest_pause_s=0.05)
        assert paused.transactional_id == "orders-1"
    assert shop.both_have(1)


@pytest.mark.usefixtures("no_housekeeping")
def test_a_member_that_a_recovery_has_fenced_goes_on_by_itself(shop, member):
    with member() as one:
        put(shop, one, 1)
        leave_open(shop, one, 2)
        assert recover("orders-0", kafka=SETTINGS, database=shop.engine).settled
        with pytest.raises(TransactionAborted, match="has lost its id"):
            put(shop, one, 2)
        wait_until(lambda: one.ready)
        put(shop, one, 3)
        assert (one.transactional_id, shop.both_have(1, 3)) == ("orders-0", True)


def test_an_error_of_another_writer_in_the_block_says_nothing_about_this_one(shop, member):
    with member() as one:
        for error in (Fenced("x", transactional_id="payments"), Fenced("x")):
            with pytest.raises(Fenced), one.transaction():
                raise error
        put(shop, one, 1)
        assert one.transactional_id == "orders-0"


def test_a_lease_that_was_not_renewed_in_time_makes_it_unready_until_it_is(shop, member, monkeypatch):
    with member() as one:
        with monkeypatch.context() as patch:
            patch.setattr(lease_keeper, "now_s", lambda: 1e12)
            assert one.health().problems == ("its lease was not renewed in time",)
        assert one.ready


def test_sessions_join_under_the_id_of_the_moment(shop, member):
    sessions = sessionmaker(shop.engine)
    with member() as one:
        messages = one.bind(sessions)
        with sessions.begin() as session:
            session.connection().exec_driver_sql("INSERT INTO orders (id) VALUES (1)")
            messages.produce(session, TOPIC, "1", partition=0)
        assert shop.both_have(1)
        expire(shop, "orders-0")
        with member():
            beat(one)
            with sessions.begin() as session:
                session.connection().exec_driver_sql("INSERT INTO orders (id) VALUES (2)")
                messages.produce(session, TOPIC, "2", partition=0)
        assert shop.both_have(1, 2)


def test_units_of_groups_commit_and_are_done_before_the_id_is_given_back(shop, member):
    with member() as one:
        futures = [one.submit(lambda tx, number=number: shop.put(tx, number)) for number in range(5)]
        with one.transaction(), pytest.raises(IllegalStateError, match="nested"):
            one.submit(lambda _: None)
    assert [future.result(0) for future in futures] == [None] * 5
    assert shop.both_have(*range(5))
    with pytest.raises(IllegalStateError, match="closed"):
        one.submit(lambda _: None)


def test_a_member_that_cannot_be_opened_leaves_its_id_to_the_next(shop, member, leases):
    failpoints.arm("claim.row_raised:1:raise")
    with pytest.raises(FailpointError):
        member().open()
    failpoints.arm("")
    assert leases() == {"orders-0": "expired"}
    with member() as next_one:
        assert next_one.transactional_id == "orders-0"


def test_it_is_opened_once_and_used_only_while_it_is_open(shop, member):
    one = member()
    assert (one.ready, repr(one)) == (False, "<DualWriter of fleet orders not open>")
    with pytest.raises(IllegalStateError, match="not open"):
        put(shop, one, 1)
    one.open()
    assert repr(one) == "<DualWriter orders-0 open, 3 lanes>"
    with pytest.raises(IllegalStateError, match="already opened"):
        one.open()
    one.close()
    assert (one.ready, repr(one)) == (False, "<DualWriter of fleet orders closed>")
    with pytest.raises(IllegalStateError, match="closed"):
        put(shop, one, 1)
    with pytest.raises(IllegalStateError, match="already opened"):
        one.open()


@pytest.mark.parametrize("wrong", [{"kafka": {}}, {"lease_timeout_s": 0}, {"heartbeat_s": 20.0}, {"database": "?"}])
def test_a_setting_that_cannot_work_is_refused_before_anything_connects(wrong):
    with pytest.raises(ConfigurationError):
        DualWriter.leased("orders", **{"kafka": SETTINGS, "database": "sqlite://", **wrong})


def test_a_name_that_cannot_be_a_fleets_is_refused():
    with pytest.raises(ConfigurationError, match="fleet"):
        DualWriter.leased("orders#1", kafka=SETTINGS, database="sqlite://")


def in_child(work):
    """Fork, run the work there, and return what it says."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run():
        there.send(work())
        there.close()
        os._exit(0)

    process = context.Process(target=run)
    process.start()
    there.close()
    said = here.recv()
    process.join(60)
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_writer_opened_before_a_fork_is_refused_in_the_child_and_stays_the_parents(shop, member, leases):
    def child():
        try:
            put(shop, one, 1)
        except IllegalStateError as error:
            refusal = str(error)
        ready = one.ready
        one.close()
        return refusal, ready

    with member() as one:
        refusal, ready = in_child(child)
        assert "after the fork" in refusal
        assert not ready
        assert leases() == {"orders-0": "held"}
        put(shop, one, 2)
    assert shop.both_have(2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_writer_made_before_a_fork_may_be_opened_in_each_child(shop, member, leases):
    one = member(database=shop.database.url)

    def child():
        with one:
            put(shop, one, 1)
            return one.transactional_id, leases()

    with member() as other:
        assert other.transactional_id == "orders-0"
        assert in_child(child) == ("orders-1", {"orders-0": "held", "orders-1": "held"})
    assert leases() == {"orders-0": "free", "orders-1": "free"}
    assert shop.rows == ["1"]


@pytest.mark.parametrize(
    ("settings", "takes_them"), [(WriterSettings, DualWriter), (AsyncWriterSettings, AsyncDualWriter)]
)
def test_the_settings_of_a_leased_writer_are_those_of_the_other(settings, takes_them):
    expected = [name for name in inspect.signature(takes_them).parameters if name != "transactional_id"]
    assert sorted(settings.__annotations__) == sorted(expected)


@pytest.mark.usefixtures("no_housekeeping")
def test_a_recovery_of_all_ids_leaves_a_live_member_alone_and_one_of_its_id_does_not(shop, member):
    with member() as one:
        leave_open(shop, one, 1)
        names = {"kafka": SETTINGS, "database": shop.engine}
        assert recover(open_for_s=0.001, **names).skipped == ["orders-0"]
        expire(shop, "orders-0")
        assert recover(open_for_s=0.001, **names).settled == ["orders-0"]


def test_a_live_member_is_not_forgotten_and_one_that_has_ended_is_with_its_lease(shop, member, leases):
    names = {"kafka": SETTINGS, "database": shop.engine, "untouched_for_s": 1.0}
    with member(), member() as second:
        second.close()
        age(shop.engine)
        report = forget(**names)
        assert report.forgotten == ["orders-1", "orders-1#1", "orders-1#2"]
        assert report.kept["orders-0"] == "a worker holds it"
        assert leases() == {"orders-0": "held"}
        with member() as third:
            assert third.transactional_id == "orders-1", "the gap is filled"


def test_what_was_leased_since_it_was_read_is_not_forgotten(shop, member):
    with member():
        pass
    [*rows] = shop.database.store(shop.engine).find("orders-0")
    with member():
        assert not Forgetting(shop.engine).forget(rows)
