"""Heartbeats: what they report, what they survive, and what the keeper knows between them."""

import os
import signal
import threading

import pytest
from harness.databases import prepare, sqlite_url

from dualwrite import Unavailable
from dualwrite.protocol.members import LeaseState, LeaseTiming, Place
from dualwrite.recovery.claim import lease_owner, place_of_this_process
from dualwrite.stores.sql.leases import Leases, read_leases
from dualwrite.stores.sql.short_transactions import ShortTransactions
from dualwrite.writing import leased
from dualwrite.writing.leased import LeaseKeeper

RARELY = LeaseTiming(3600.0)
"""No heartbeat comes by itself while a test runs."""


@pytest.fixture
def database(tmp_path):
    made = prepare("sqlite", sqlite_url(tmp_path))
    yield made
    made.dispose()


@pytest.fixture
def seen():
    return []


@pytest.fixture
def leases(database):
    return Leases(database.engines[0], "orders")


@pytest.fixture
def keeper(leases, seen):
    made = LeaseKeeper(leases, RARELY, on_lost=lambda: seen.append("lost"), on_dead=seen.append)
    yield made
    made.stop()


def standing(database):
    return {lease.transactional_id: (lease.state.value, lease.owner) for lease in read_leases(database.engines[0])}


def test_it_takes_keeps_and_gives_back_one_lease_after_the_other(database, keeper):
    assert keeper.state is LeaseState.FREE
    assert keeper.take("member") == "orders-0"
    assert keeper.beat_once()
    assert (keeper.state, standing(database)) == (LeaseState.HELD, {"orders-0": ("held", "member")})
    keeper.give_back(settled=True)
    keeper.give_back(settled=True)
    assert (keeper.state, standing(database)) == (LeaseState.FREE, {"orders-0": ("free", None)})
    assert keeper.beat_once(), "there is nothing to renew"
    assert keeper.take("member, again") == "orders-0"
    keeper.give_back(settled=False)
    assert standing(database) == {"orders-0": ("expired", "member, again")}


def test_a_lease_that_another_has_taken_is_reported_until_it_is_given_up_and_not_given_back(
    database, leases, keeper, seen
):
    keeper.take("member")
    leases.renew("orders-0", "member", -1, wait_s=5)
    leases.take("another", 60)
    assert keeper.beat_once()
    assert keeper.beat_once()
    assert (keeper.state, seen) == (LeaseState.TAKEN, ["lost", "lost"])
    keeper.give_back(settled=True)
    assert keeper.beat_once()
    assert seen == ["lost", "lost"]
    assert standing(database) == {"orders-0": ("held", "another")}


def test_expired_leases_of_others_are_reported_but_not_our_own(leases, keeper, seen):
    leases.take("dead", 60)
    keeper.take("member")
    leases.renew("orders-0", "dead", -1, wait_s=5)
    leases.renew("orders-1", "member", -1, wait_s=5)
    assert keeper.beat_once()
    [[dead]] = seen
    assert dead.transactional_id == "orders-0"
    assert keeper.state is LeaseState.HELD


@pytest.fixture
def beside(leases, waiting_process):
    """The process of a member beside this one, which holds the first id for an hour."""
    owner = Place(place_of_this_process().system, waiting_process.pid).sign("beside")
    assert leases.take(owner, 3600) == "orders-0"
    return waiting_process


def kill(process):
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_member_that_dies_beside_this_one_is_reported_before_its_lease_expires(leases, keeper, seen, beside):
    keeper.take(lease_owner("member"))
    assert keeper.beat_once()
    keeper.look()
    assert seen == [], "it lives"
    kill(beside)
    keeper.look()
    keeper.look()
    [[dead]] = seen
    assert (dead.transactional_id, dead.state) == ("orders-0", LeaseState.HELD)
    assert keeper.beat_once()
    assert [lease.transactional_id for [lease] in seen] == ["orders-0"] * 2, (
        "a heartbeat reports it until it is settled"
    )
    assert leases.adopt(dead, lease_owner("member"), 3600)
    assert keeper.beat_once()
    keeper.look()
    assert len(seen) == 2


def test_a_member_that_is_suspended_beside_this_one_keeps_its_lease(keeper, seen, beside):
    os.kill(beside.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(beside.pid, os.WUNTRACED)[1])
    assert keeper.take(lease_owner("member")) == "orders-1"
    assert keeper.beat_once()
    keeper.look()
    assert seen == []


def test_a_member_of_another_place_is_judged_by_its_lease_alone(leases, keeper, seen, waiting_process):
    kill(waiting_process)
    leases.take(Place("another-boot/1", waiting_process.pid).sign("elsewhere"), 3600)
    assert keeper.take(lease_owner("member")) == "orders-1"
    assert keeper.beat_once()
    keeper.look()
    assert seen == []


def test_a_newcomer_takes_the_id_of_a_member_that_has_died_beside_it(keeper, beside):
    kill(beside)
    assert keeper.take(lease_owner("the next one")) == "orders-0"


def test_the_keeper_looks_beside_itself_between_its_heartbeats(leases, beside, monkeypatch):
    pauses = iter([0.01])
    monkeypatch.setattr(LeaseTiming, "pause_s", lambda *_, **__: next(pauses, 3600))
    beaten, reported, real = threading.Event(), threading.Event(), leases.renew

    def renew(*args, **kwargs):
        beaten.set()
        return real(*args, **kwargs)

    monkeypatch.setattr(leases, "renew", renew)
    keeper = LeaseKeeper(leases, RARELY, on_lost=list, on_dead=lambda _: reported.set())
    keeper.take(lease_owner("member"))
    assert beaten.wait(60)
    kill(beside)
    assert reported.wait(60)
    keeper.stop()


def test_a_heartbeat_that_fails_is_logged_and_the_lease_is_known_to_be_over_in_time(
    leases, keeper, seen, monkeypatch, caplog
):
    keeper.take("member")
    now = leased.now_s()
    monkeypatch.setattr(leases, "renew", no_answer)
    assert not keeper.beat_once()
    assert "retrying" in caplog.text
    assert keeper.state is LeaseState.HELD
    monkeypatch.setattr(leased, "now_s", lambda: now + 3600)
    assert keeper.state is LeaseState.EXPIRED, "without a heartbeat that says so"
    assert not keeper.beat_once()
    monkeypatch.undo()
    assert keeper.state is LeaseState.EXPIRED
    assert keeper.beat_once()
    assert (keeper.state, seen) == (LeaseState.HELD, [])


def no_answer(*_, **__):
    raise Unavailable("no answer")


def test_a_database_without_an_answer_lets_the_lease_expire_and_does_not_keep_the_member(leases, keeper, monkeypatch):
    keeper.take("member")
    monkeypatch.setattr(leases, "give_back", no_answer)
    keeper.give_back(settled=True)
    assert keeper.state is LeaseState.FREE


@pytest.mark.parametrize("call", [LeaseKeeper.take, lambda keeper, owner: keeper.take_number(0, owner)])
def test_a_lease_whose_taking_was_not_answered_is_taken_by_the_next_try_and_its_time_begins_anew(
    database, leases, keeper, call, monkeypatch
):
    """Under another name, the member would wait for its own former one."""

    def unanswered(self, work, **_):
        run(self, work)
        raise Unavailable("the answer to COMMIT is missing")

    run = ShortTransactions.run
    with monkeypatch.context() as patch:
        patch.setattr(ShortTransactions, "run", unanswered)
        with pytest.raises(Unavailable):
            call(keeper, "first")
    leases.renew("orders-0", "first", -1, wait_s=5)
    assert call(keeper, "second") == "orders-0"
    assert standing(database) == {"orders-0": ("held", "first")}
    assert keeper.beat_once()
    keeper.give_back(settled=True)
    assert call(keeper, "third") == "orders-0"
    assert standing(database) == {"orders-0": ("held", "third")}


def test_a_heartbeat_under_way_does_not_judge_the_lease_that_was_taken_after_it(leases, keeper, seen, monkeypatch):
    keeper.take("member")
    real = leases.renew

    def renew(*args, **kwargs):
        found = real(*args, **kwargs)
        keeper.give_back(settled=True)
        leases.take("another", 60)
        keeper.take("member, again")
        return False, found[1]

    monkeypatch.setattr(leases, "renew", renew)
    assert keeper.beat_once()
    assert (keeper.state, seen) == (LeaseState.HELD, [])


def test_the_heartbeats_go_on_though_what_they_report_to_fails(leases):
    leases.take("dead", 60)
    asked, again = [], threading.Event()

    def fail(dead):
        asked.append(dead)
        if len(asked) == 2:
            again.set()
        raise RuntimeError("no thread can be started")

    keeper = LeaseKeeper(leases, LeaseTiming(60, 0.01), on_lost=fail, on_dead=fail)
    keeper.take("member")
    leases.renew("orders-0", "dead", -1, wait_s=5)
    assert again.wait(60)
    keeper.stop()


def test_the_heartbeats_go_on_by_themselves_whatever_is_raised_and_end_with_the_keeper(leases, seen, monkeypatch):
    real, errors, renewed = leases.renew, [RuntimeError("?"), Unavailable("?")], threading.Event()

    def renew(*args, **kwargs):
        if errors:
            raise errors.pop()
        found = real(*args, **kwargs)
        renewed.set()
        return found

    monkeypatch.setattr(leases, "renew", renew)
    keeper = LeaseKeeper(leases, LeaseTiming(60, 0.01), on_lost=seen.append, on_dead=seen.append)
    keeper.take("member")
    assert renewed.wait(60)
    keeper.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "dualwrite orders lease"]
    assert keeper.state is LeaseState.HELD, "left to expire"
