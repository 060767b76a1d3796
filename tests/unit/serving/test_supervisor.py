"""The rounds of one target on SQLite: who leads, what is tried and when again, and what is said of it. Kafka is stood in for."""

import logging
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from sqlalchemy import create_engine

from dualwrite.clock import now_s
from dualwrite.databases import RocksDatabase
from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.migrations import upgrade
from dualwrite.protocol.blocking import Ended
from dualwrite.protocol.findings import CheckResult, Status
from dualwrite.protocol.supervision import Reason, Rule, Seen
from dualwrite.recovery.recover import RecoveryReport
from dualwrite.serving import supervisor
from dualwrite.serving.configuration import Settings, Target
from dualwrite.serving.supervisor import Round, Supervisor
from dualwrite.stores.sql.operators import History

from .test_rounds import waits

DEAD = [
    Seen(name, needs_recovery=True, decided=True, youngest_s=95.0, unchanged_s=95.0) for name in ("bills", "orders")
]


@pytest.fixture
def url(tmp_path):
    found = f"sqlite:///{tmp_path / 'rows.db'}"
    engine = create_engine(found)
    with engine.connect() as connection:
        upgrade(connection)
    engine.dispose()
    return found


class Servers:
    """What the servers show, and what they were asked to settle."""

    def __init__(self):
        self.seen = list(DEAD)
        self.look_error = self.settle_error = None
        self.settled, self.together, self.together_error = [], [], None
        self.checks, self.check_error = 0, None
        self.report = RecoveryReport
        self.waiting = []
        self.meanwhile = lambda _: None

    def look(self, *_):
        if self.look_error is not None:
            raise self.look_error
        return Round(
            datetime(2026, 1, 1, tzinfo=timezone.utc), 1000.0, [], None, seen=tuple(self.seen), waiting=self.waiting
        )

    def doctor(self, **_):
        self.checks += 1
        if self.check_error is not None:
            raise self.check_error
        return [CheckResult("Kafka", status.value, status, "found", "why", "remedy") for status in Status]

    def recover(self, writer, **given):
        self.settled.append((writer, given["open_for_s"]))
        self.meanwhile(writer)
        if self.settle_error is not None:
            raise self.settle_error
        report = self.report(settled=[writer])
        self.seen = [seen for seen in self.seen if seen.writer not in report.settled]
        return report

    def settle_writers(self, _, writers, **given):
        assert given["open_for_s"] == 60.0
        self.together.append(list(writers))
        if self.together_error is not None:
            raise self.together_error
        reports = {writer: self.report(settled=[writer]) for writer in writers}
        self.seen = [seen for seen in self.seen if not (seen.writer in reports and reports[seen.writer].settled)]
        return reports


@pytest.fixture
def servers(monkeypatch):
    made = Servers()
    monkeypatch.setattr(supervisor, "settle_writers", made.settle_writers)
    monkeypatch.setattr(supervisor, "look", made.look)
    monkeypatch.setattr(supervisor, "recover", made.recover)
    monkeypatch.setattr(supervisor, "doctor", made.doctor)
    return made


@pytest.fixture
def make(url, servers):
    made = []

    def one():
        target = Target("shop", url, {"client.id": "dualwrite-serve"}, rule=Rule(settle_after_s=60.0))
        made.append(Supervisor(target, Settings((target,), interval_s=2.0)))
        made[-1]._answering_since_s = now_s() - 1000.0
        return made[-1]

    yield one
    for each in made:
        each.stop()
        each._run()


def test_the_leader_settles_each_writer_once_and_shows_that_nothing_is_left(make, servers, caplog):
    caplog.set_level(logging.INFO)
    leader = make()
    assert leader._turn() == 2.0
    assert servers.settled == [("bills", 60.0), ("orders", 60.0)]
    assert leader.snapshot.leads
    assert leader.snapshot.plans == ()
    assert leader.snapshot.counts == {"rounds": 1, "settled": 2, "rolled forward": 0, "losses": 0, "sent": 0}
    leader._turn()
    assert len(servers.settled) == 2
    assert [message for message in caplog.messages if "shop: orders" in message] == [
        "shop: orders: settle: the database has decided, Kafka has not followed, and its owner shows no sign of life",
        "shop: orders: 1 id settled, 0 rolled forward",
        "shop: orders: nothing is left",
    ]
    for record in kept(leader):
        assert record.intent.actor == "dualwrite serve"
        assert record.intent.reason.startswith("the database has decided")
        assert (record.outcome, record.result) == (Ended.DONE, "1 id settled, 0 rolled forward")
    assert {record.intent.subject for record in kept(leader)} == {"bills", "orders"}


@pytest.mark.parametrize(("age_s", "pause_s"), [(10.0, 2.0), (58.5, 1.5), (59.8, 1.0)])
def test_the_next_round_comes_when_the_first_writer_is_due(make, servers, age_s, pause_s):
    servers.seen = [Seen("orders", needs_recovery=True, decided=True, youngest_s=age_s), DEAD[0]]
    leader, other = make(), make()
    assert leader._turn() == pytest.approx(pause_s, abs=0.01)
    assert other._turn() == 2.0, "it settles nothing"


def kept(leader):
    """The history that it leaves in its database."""
    return leader._database.history().last("", limit=9)


def test_what_is_tried_again_is_one_action_and_what_is_not_begun_says_so(make, servers):
    leader = make()
    servers.settle_error = Unavailable("Kafka is away")
    leader._turn()
    leader._turn()
    leader._tries = {name: replace(tries, next_s=0.0) for name, tries in leader._tries.items()}
    leader._turn()
    assert len(servers.settled) == 4
    assert [(one.outcome, one.result) for one in kept(leader)] == [
        (Ended.FAILED, "attempt 2: Unavailable: Kafka is away (try again when the server answers)")
    ] * 2
    leader._tries = {name: replace(tries, next_s=0.0) for name, tries in leader._tries.items()}
    servers.settle_error, servers.meanwhile = None, lambda _: leader.stop()
    leader._turn()
    assert {(one.intent.subject, one.outcome, one.result) for one in kept(leader)} == {
        ("bills", Ended.DONE, "1 id settled, 0 rolled forward"),
        ("orders", Ended.REFUSED, "not begun: this replica stops, or another one leads"),
    }


def test_a_history_that_cannot_be_kept_hinders_no_settlement(make, servers, monkeypatch, caplog):
    def away(*_, **__):
        raise Unavailable("the history is away")

    monkeypatch.setattr(History, "begin", away)
    monkeypatch.setattr(History, "end", away)
    make()._turn()
    assert len(servers.settled) == 2
    assert "shop: the history of actions cannot be kept: the history is away" in caplog.text


def many(count):
    return [replace(DEAD[0], writer=f"dead-{number:03d}") for number in range(count)]


def test_many_dead_writers_are_settled_together_but_for_those_of_which_messages_wait(make, servers, monkeypatch):
    servers.seen = many(300)
    servers.waiting = [waits("dead-000", 3)]
    leader = make()
    leader._turn()
    assert [len(some) for some in servers.together] == [250, 49]
    assert servers.settled == [("dead-000", 60.0)]
    assert leader.snapshot.counts["settled"] == 300
    assert leader.snapshot.plans == ()


def test_one_of_many_that_cannot_be_settled_hinders_no_other(make, servers):
    servers.seen, servers.together_error = many(20), ConfigurationError("one row is wrong")
    leader = make()
    leader._turn()
    assert [writer for writer, _ in servers.settled] == [f"dead-{number:03d}" for number in range(20)]


def test_silence_counts_as_a_failed_attempt_of_all_that_were_tried_together(make, servers):
    servers.seen, servers.together_error = many(20), Unavailable("Kafka is away")
    leader = make()
    leader._turn()
    assert servers.settled == [], "each of them would wait for the same silence"
    assert leader.snapshot.counts["failures"] == 20
    assert {planned.reason for planned in leader.snapshot.plans} == {Reason.FAILED}
    leader._turn()
    assert len(servers.together) == 1, "the next attempt is not due yet"


def test_who_stands_by_looks_and_settles_nothing_until_the_leader_is_gone(make, servers):
    servers.settle_error = Unavailable("Kafka is away")
    leader, other = make(), make()
    leader._turn()
    before = list(servers.settled)
    other._turn()
    assert (leader.snapshot.leads, other.snapshot.leads) == (True, False)
    assert [planned.writer for planned in other.snapshot.plans] == ["bills", "orders"]
    assert servers.settled == before
    leader.stop()
    leader._run()
    assert not leader.snapshot.leads
    other._turn()
    assert other.snapshot.leads
    assert len(servers.settled) == 4


def test_a_leader_that_has_lost_its_lease_settles_nothing_more(make, servers, caplog):
    leader = make()

    def lose(writer):
        leader._keeper._leases.give_back("dualwrite-serve-shop-0", leader._keeper._owner, settled=True)
        leader._keeper._leases.take_number(0, "another", 30.0)

    servers.meanwhile = lose
    leader._turn()
    assert [writer for writer, _ in servers.settled] == ["bills"]
    leader._turn()
    assert not leader.snapshot.leads
    assert "shop: another replica leads from now on" in caplog.messages
    assert len(servers.settled) == 1


def test_a_supervisor_that_is_told_to_stop_ends_after_the_present_settlement(make, servers):
    leader = make()
    servers.meanwhile = lambda _: leader.stop()
    leader._run()
    assert [writer for writer, _ in servers.settled] == ["bills"]
    again = make()
    servers.meanwhile = lambda _: None
    again._turn()
    assert again.snapshot.leads, "the lease was given back"


@pytest.mark.parametrize("error", [Unavailable("Kafka is away"), RuntimeError("unforeseen")])
def test_an_attempt_that_fails_hinders_no_other_and_is_repeated_later(make, servers, caplog, error):
    servers.settle_error = error
    leader = make()
    leader._turn()
    assert [writer for writer, _ in servers.settled] == ["bills", "orders"]
    leader._turn()
    assert len(servers.settled) == 2, "the next attempt is not yet due"
    assert [planned.reason for planned in leader.snapshot.plans] == [Reason.FAILED] * 2
    assert leader.snapshot.error is None, "the round itself has not failed"
    assert leader.snapshot.counts["failures"] == 2
    assert leader.snapshot.tries["orders"].failures == 1
    assert str(error) in leader.snapshot.tries["orders"].error
    assert sum("orders: attempt 1 failed" in message for message in caplog.messages) == 1
    assert any(record.exc_info for record in caplog.records) is isinstance(error, RuntimeError)
    leader._tries = {name: replace(tries, next_s=0.0) for name, tries in leader._tries.items()}
    servers.settle_error = None
    leader._turn()
    assert leader.snapshot.plans == ()
    assert leader.snapshot.tries == {}


def test_what_the_recovery_itself_leaves_alone_counts_as_a_failed_attempt(make, servers):
    servers.report = lambda settled: RecoveryReport(skipped=settled)
    leader = make()
    leader._turn()
    assert leader.snapshot.tries["orders"].error == "left alone: its owner has come back"
    assert leader.snapshot.counts["failures"] == 2


@pytest.mark.parametrize("error", [Unavailable("Kafka is away"), RuntimeError("unforeseen")])
def test_a_round_that_fails_is_said_once_and_repeated_after_pauses_that_grow(make, servers, caplog, error):
    caplog.set_level(logging.INFO)
    leader = make()
    servers.look_error = error
    assert [leader._turn() for _ in range(8)] == [2.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert str(error) in leader.snapshot.error
    assert leader.snapshot.counts["failed rounds"] == 8
    assert servers.settled == []
    if isinstance(error, Unavailable):
        servers.look_error = Unavailable("Kafka is away, in other words")
        leader._turn()
        assert sum("a round failed" in message for message in caplog.messages) == 1
    servers.look_error = None
    assert leader._turn() == 2.0
    assert leader.snapshot.error is None
    assert "shop: both servers answer again" in caplog.messages


def test_after_an_outage_owners_get_their_time_again(make, servers):
    leader = make()
    servers.look_error = Unavailable("Kafka is away")
    leader._turn()
    servers.look_error = None
    leader._turn()
    assert [planned.reason for planned in leader.snapshot.plans] == [Reason.KAFKA_IS_BACK] * 2
    leader._answering_since_s -= 60.0
    leader._turn()
    assert len(servers.settled) == 2


def test_a_loss_is_an_error_in_the_log_and_is_counted(make, servers, caplog):
    servers.report = lambda settled: RecoveryReport(settled=settled, losses=["a loss"], sent={"orders": 3})
    make()._turn()
    [record] = [record for record in caplog.records if "orders: 1 id settled" in record.getMessage()]
    assert record.levelno == logging.ERROR
    assert record.getMessage().endswith("3 messages sent, 1 LOST OR UNVERIFIABLE")


def test_the_servers_are_checked_after_the_first_round_and_then_now_and_then(make, servers, monkeypatch):
    leader = make()
    leader._turn()
    leader._turn()
    assert servers.checks == 1
    assert [one.status for one in leader.snapshot.findings] == [Status.WARNING, Status.ERROR]
    monkeypatch.setattr(leader, "_checked_s", now_s() - 301.0)
    leader._turn()
    assert servers.checks == 2


def test_a_check_waits_while_a_writer_is_due_sooner_but_not_for_ever(make, servers, monkeypatch):
    leader = make()
    leader._turn()
    servers.seen = [Seen("orders", needs_recovery=True, decided=True, youngest_s=59.0)]
    for since_s, checks in ((290.0, 1), (310.0, 1), (610.0, 2)):
        leader._checked_s = now_s() - since_s
        leader._turn()
        assert servers.checks == checks
    servers.seen = []
    leader._checked_s = now_s() - 310.0
    leader._turn()
    assert servers.checks == 3


def test_a_check_that_fails_fails_alone(make, servers, caplog):
    servers.check_error = RuntimeError("unforeseen")
    leader = make()
    leader._turn()
    assert (leader.snapshot.error, leader.snapshot.findings) == (None, ())
    assert len(servers.settled) == 2
    assert "shop: the servers could not be checked" in caplog.messages


def test_a_database_without_leases_is_refused(tmp_path):
    pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")
    RocksDatabase(tmp_path / "rocks").close()
    target = Target("rocks", f"rocksdb://{tmp_path / 'rocks'}", {"client.id": "dualwrite-serve"})
    with pytest.raises(ConfigurationError, match=r"target rocks: RocksDB keeps no leases"):
        Supervisor(target, Settings((target,)))
