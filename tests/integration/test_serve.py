"""``dualwrite serve``: replicas that keep writers settled, whoever dies, and leave alone what has a live owner."""

import json
import os
import re
import secrets
import signal
import socket
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import pytest
from harness.checker import Case
from harness.patience import wait_until
from harness.service import replicas, serve_file
from sqlalchemy import create_engine, text

from benchmarks.settling import leave_decided
from dualwrite import DualWriter, WriterLimits, recover
from dualwrite.migrations import upgrade
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.leases import read_leases
from dualwrite.testing.checker import read_committed

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)

SETTLE_AFTER_S = 2.0


@pytest.fixture
def config(tmp_path, kafka, url):
    """Writes the file of a service for this database and broker."""

    def write(more="", kafka=kafka, settle_after_s=SETTLE_AFTER_S, timeout_s=20):
        return serve_file(tmp_path, kafka, url, more, settle_after_s=settle_after_s, timeout_s=timeout_s)

    return write


@pytest.fixture
def start():
    """Starts replicas, which are gone after the test."""
    with ExitStack() as later:
        yield replicas(later)


@pytest.fixture
def case(tmp_path, kafka, url, dualwrite_topic):
    return Case(tmp_path, kafka, url, dualwrite_topic)


def unsettled(kafka, url):
    return [item.row.transactional_id for item in status(kafka=kafka, database=url) if item.needs_recovery]


@contextmanager
def ended(replica):
    yield
    assert replica.end() == 0, replica.log


def test_what_a_dead_owner_left_is_settled_and_the_process_stops_cleanly(config, start, case, kafka, url, engine):
    case.run(failpoint="write.decided:2", killed=True)
    replica = start(config())
    with ended(replica):
        replica.says("this replica leads")
        replica.says("case: 1 id settled, 1 rolled forward")
        assert unsettled(kafka, url) == []
        assert case.verify() == {"w1-0", "w1-1"}
        assert replica.get("/healthz") == (200, "ok")
        replica.says("case: nothing is left")
    assert "case: leave: both servers have answered for 0 s" in replica.log, "the first look settles nothing"
    assert replica.log.count("case: settle: ") == 1, "each change once"
    assert "shop: stopped" in replica.log
    assert [lease.owner for lease in read_leases(engine, "dualwrite-serve-shop-0")] == [None]


def test_a_crowd_of_dead_owners_is_settled_together(config, start, kafka, url, dualwrite_topic):
    leave_decided(SimpleNamespace(kafka=kafka, url=url), 12, dualwrite_topic)
    replica = start(config())
    with ended(replica):
        for number in range(12):
            replica.says(f"left-{number:05d}: 1 id settled, 1 rolled forward")
        replica.says("left-00011: nothing is left")
    assert unsettled(kafka, url) == []
    assert len(read_committed(kafka, dualwrite_topic)) == 12
    assert "one by one" not in replica.log


def test_an_undecided_transaction_of_a_dead_owner_is_aborted(config, start, case, kafka, url):
    case.run(failpoint="write.recorded:2", killed=True)
    replica = start(config())
    with ended(replica):
        replica.says("case: settle: left open, undecided")
        replica.says("case: 1 id settled, 0 rolled forward")
        assert case.verify() == {"w1-0"}


def test_what_the_broker_is_about_to_abort_although_it_is_decided_goes_first(config, start, case):
    """The broker's limit of 15 minutes is less than the patience here."""
    case.run(failpoint="write.decided:2", killed=True)
    replica = start(config(settle_after_s=3000))
    with ended(replica):
        replica.says("case: settle: decided, and the broker aborts it in ")
        replica.says("case: 1 id settled, 1 rolled forward")
        assert case.verify() == {"w1-0", "w1-1"}


def test_messages_of_a_dead_writer_that_wait_are_sent(config, start, case, kafka, engine, dualwrite_topic):
    case.run()
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO dualwrite_outbox (writer, transactional_id, topic, topic_partition, value) "
                "VALUES ('case', 'case', :topic, 0, 'waits')"
            ),
            {"topic": dualwrite_topic},
        )
        connection.execute(text("INSERT INTO dualwrite_outbox_mode (writer, mode) VALUES ('case', 'later')"))
    replica = start(config())
    with ended(replica):
        replica.says("case: settle: 1 messages wait in the database")
        replica.says("1 message sent")
        assert "waits" in [record.value.decode() for record in read_committed(kafka, dualwrite_topic)]


def test_a_live_owner_is_left_alone_for_as_long_as_it_lives(config, start, kafka, engine, dualwrite_topic):
    """Its lease says that it lives, however old its transaction is."""
    replica = start(config(settle_after_s=0.5))
    limits = WriterLimits(max_lanes=1)
    with ended(replica), DualWriter.leased("fleet", kafka=kafka, database=engine, limits=limits) as writer:
        with writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="one", partition=0)
        with writer.transaction() as tx:  # the row names the first one
            tx.produce(dualwrite_topic, value="two", partition=0)
            replica.says("fleet-0: leave: its owner is alive: its lease is held for ")
            wait_until(lambda: replica.target()["ids"][0]["open_for_s"] > 2.0)
            assert recover(prefix="fleet", kafka=kafka, database=engine, open_for_s=0.5).skipped == ["fleet-0"]
        with writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="three", partition=0)
        assert not writer.health().fenced
    assert "fleet-0: settle" not in replica.log
    assert [record.value for record in read_committed(kafka, dualwrite_topic)] == [b"one", b"two", b"three"]


@pytest.mark.parametrize(
    "point",
    [
        "lease.taken:1:kill",
        "claim.row_raised:1:kill",
        "settle.before_commit:1:kill",
        "settle.committed:1:kill",
        "settle.retired:1:kill",
        "settle.marked:1:kill",
    ],
)
def test_a_replica_that_is_killed_anywhere_leaves_everything_to_the_other_one(config, start, case, kafka, url, point):
    case.run(failpoint="write.decided:2", killed=True)
    first = start(config(), point)
    if point.startswith("lease"):
        assert first.wait() == -signal.SIGKILL
    else:
        first.says("this replica leads")
    second = start(config())
    with ended(second):
        assert first.wait() == -signal.SIGKILL
        second.says("this replica leads")
        wait_until(lambda: not unsettled(kafka, url), otherwise=lambda: second.log)
        assert case.verify() == {"w1-0", "w1-1"}
        second.looks_again()
        assert second.target()["incidents"] == []


def wait_in_the_database(engine, topic, count):
    with engine.begin() as connection:
        for number in range(count):
            connection.execute(
                text(
                    "INSERT INTO dualwrite_outbox (writer, transactional_id, topic, topic_partition, value) "
                    "VALUES ('case', 'case', :topic, 0, :value)"
                ),
                {"topic": topic, "value": f"waits {number}".encode()},
            )
        connection.execute(text("INSERT INTO dualwrite_outbox_mode (writer, mode) VALUES ('case', 'later')"))


@pytest.mark.parametrize("point", ["outbox.read", "outbox.sent", "outbox.deleted", "write.decided", "write.completed"])
def test_a_replica_that_is_killed_while_it_sends_leaves_every_message_to_the_other_one(
    config, start, case, kafka, url, engine, point
):
    case.run()
    wait_in_the_database(engine, case.topic, 3)
    first = start(config(), f"{point}:1:kill")
    first.says("this replica leads")
    second = start(config())
    with ended(second):
        assert first.wait() == -signal.SIGKILL
        second.says("this replica leads")

        def sent():
            return [one.value for one in read_committed(kafka, case.topic) if one.value.startswith(b"waits")]

        wait_until(lambda: len(sent()) >= 3 and not unsettled(kafka, url), otherwise=lambda: second.log)
        second.looks_again()
        assert sent() == [b"waits 0", b"waits 1", b"waits 2"], "each once, in order"


@pytest.mark.parametrize("point", ["claim.row_raised", "settle.before_commit", "settle.committed", "settle.marked"])
def test_a_replica_that_is_killed_while_it_settles_a_crowd_leaves_it_to_the_other_one(
    config, start, kafka, url, dualwrite_topic, point
):
    leave_decided(SimpleNamespace(kafka=kafka, url=url), 12, dualwrite_topic)
    first = start(config(), f"{point}:1:kill")
    first.says("this replica leads")
    second = start(config())
    with ended(second):
        assert first.wait() == -signal.SIGKILL
        second.says("this replica leads")
        wait_until(lambda: not unsettled(kafka, url), otherwise=lambda: second.log)
        assert sorted(int(one.value) for one in read_committed(kafka, dualwrite_topic)) == list(range(12))


def test_targets_of_several_databases_and_clusters_are_served_and_one_that_is_away_hinders_no_other(
    start, case, kafka, url, mortal_kafka, dualwrite_postgres, tmp_path
):
    another, topic = dualwrite_postgres.create_database(), mortal_kafka.create_topic(f"{case.topic}-bills", 2)
    made = create_engine(another)
    with made.connect() as connection:
        upgrade(connection)
    made.dispose()
    (tmp_path / "bills").mkdir()
    bills = Case(tmp_path / "bills", mortal_kafka.client_config(), another, topic, transactional_id="bills")
    for one in (case, bills):
        one.run(failpoint="write.decided:2", killed=True)
    file = tmp_path / "several.toml"
    file.write_text(
        f"""
        listen = "127.0.0.1:0"
        interval_s = 0.2
        settle_after_s = {SETTLE_AFTER_S}
        timeout_s = 3
        [target.shop]
        url = "{url}"
        kafka.bootstrap.servers = "{kafka["bootstrap.servers"]}"
        [target.billing]
        url = "{another}"
        kafka.bootstrap.servers = "{mortal_kafka.bootstrap_servers}"
        """
    )
    mortal_kafka.suspend()
    try:
        replica = start(file)
        replica.says("shop: case: 1 id settled, 1 rolled forward")
        assert case.verify() == {"w1-0", "w1-1"}
        replica.says("billing: a round failed; the next one tries again")
        code, why = replica.get("/readyz")
        assert (code, why.startswith("billing: "), "shop" in why) == (503, True, False)
    finally:
        mortal_kafka.resume()
    with ended(replica):
        replica.says("billing: bills: 1 id settled, 1 rolled forward")
        assert bills.verify() == {"w1-0", "w1-1"}
        assert "bills" not in replica.get("/")[1].partition("<h2>billing</h2>")[0], "each has a section of its own"


def test_a_settlement_that_is_refused_is_repeated_after_pauses_and_shown(start, guarded_kafka, url, tmp_path):
    """The service may look at the writer's ids, and not end their transactions, until it is granted."""
    topic = guarded_kafka.create_topic(f"refused-{secrets.token_hex(4)}", 2)
    case = Case(tmp_path, guarded_kafka.admin_config(), url, topic)
    case.run(failpoint="write.decided:2", killed=True)
    guarded_kafka.allow("service", "describe", "transactional_id", "case", prefixed=True)
    guarded_kafka.allow("service", "read", "topic", topic)
    file = tmp_path / "refused.toml"
    settings = "\n".join(
        f"{json.dumps(key)} = {json.dumps(value)}" for key, value in guarded_kafka.client_config("service").items()
    )
    file.write_text(
        f'listen = "127.0.0.1:0"\ninterval_s = 0.2\nsettle_after_s = {SETTLE_AFTER_S}\n'
        f'[target.shop]\nurl = "{url}"\n[target.shop.kafka]\n{settings}\n'
    )
    replica = start(file)
    with ended(replica):
        replica.says("case: attempt 1 failed: ConfigurationError")
        replica.says("case: attempt 2 failed: ConfigurationError")
        wait_until(lambda: replica.target()["plan"][0]["reason"] == "failed", otherwise=lambda: replica.log)
        [shown] = replica.target()["plan"]
        assert (shown["action"], shown["attempts_failed"] >= 2) == ("leave", True)
        assert 0 <= shown["next_try_in_s"] <= 10 * 2 ** (shown["attempts_failed"] - 2)
        page = replica.get("/")[1]
        assert "1 writer that cannot be settled" in page
        assert re.search(r'data-label="tries">last \d+ s ago, next in \d+ s<', page)
        assert "TRANSACTIONAL_ID_AUTHORIZATION_FAILED" in page
        assert (
            'dualwrite_unsettled_writers{action="leave",reason="failed",target="shop"} 1.0'
            in replica.get("/metrics")[1]
        )
        for kind, name in (("transactional_id", "case"), ("topic", topic)):
            guarded_kafka.allow("service", "write", kind, name, prefixed=True)
        replica.says("case: 1 id settled, 1 rolled forward")
        assert case.verify() == {"w1-0", "w1-1"}
        replica.says("case: nothing is left")
        assert "attempt" not in replica.get("/")[1].partition("<h3>History")[0]


def test_the_other_replica_stands_by_until_the_leader_stops(config, start, case, kafka, url):
    first = start(config())
    first.says("this replica leads")
    second = start(config())
    with ended(second):
        wait_until(lambda: second.get("/readyz") == (200, "ok"), otherwise=lambda: second.log)
        assert (first.target()["leads"], second.target()["leads"]) == (True, False)
        assert first.end(signal.SIGINT) == 0
        second.says("this replica leads")
        case.run(failpoint="write.decided:2", killed=True)
        second.says("case: 1 id settled, 1 rolled forward")


def test_the_page_and_the_metrics_show_what_is_open_what_it_blocks_and_why_it_is_left(config, start, case):
    case.run(failpoint="write.decided:2", killed=True)
    replica = start(config(settle_after_s=600))
    with ended(replica):
        replica.says("case: leave: both servers have answered for ")
        _, page = replica.get("/")
        row = page.partition("<h3>Open transactions</h3>")[2].partition("</tbody>")[0]
        assert f'data-label="blocks">{case.topic} 0-1: 2 records<' in row
        assert re.search(
            r'data-label="database">decided: will be committed; its row names producer \d+, epoch \d+, which', row
        )
        assert re.search(r'data-label="plan">leave; settle in \d+ min( \d+ s)? if its owner stays silent<', row)
        assert "an owner that is alive has until 600 s" in row
        assert "this replica settles" in page
        _, metrics = replica.get("/metrics")
        assert 'dualwrite_open_transactions{decided="true",target="shop"} 1.0' in metrics
        assert 'dualwrite_unsettled_writers{action="leave",reason="kafka is back",target="shop"} 1.0' in metrics
        assert 'dualwrite_serve_leader{target="shop"} 1.0' in metrics
        [shown] = replica.target()["plan"]
        assert (shown["writer"], shown["action"], shown["reason"]) == ("case", "leave", "kafka is back")
        wait_until(lambda: replica.target()["findings"], otherwise=lambda: replica.log)  # a single broker is weak
        assert "<h3>Findings</h3>" in replica.get("/")[1]
        assert "could not be checked" not in replica.log


def test_while_kafka_is_away_it_is_alive_and_not_ready_and_says_so_once(config, start):
    replica = start(config(kafka={"bootstrap.servers": "127.0.0.1:1"}, timeout_s=0.5))
    with ended(replica):
        replica.says("a round failed; the next one tries again: Unavailable")
        code, why = replica.get("/readyz")
        assert (code, why.startswith("shop: Unavailable: ")) == (503, True)
        assert replica.get("/healthz") == (200, "ok")
        wait_until(lambda: 'dualwrite_serve_failed_rounds_total{target="shop"} 1.0' not in replica.get("/metrics")[1])
        assert replica.log.count("a round failed") == 1
        assert "no answer yet" in replica.get("/")[1]


def test_a_second_signal_ends_it_in_the_middle_of_a_round(config, start):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        broker = f"127.0.0.1:{silent.getsockname()[1]}"
        replica = start(config(kafka={"bootstrap.servers": broker}, timeout_s=300))
        replica.says("this replica leads")
        replica.get("/healthz")
        os.kill(replica.process.pid, signal.SIGTERM)
        replica.says("stopping when the present rounds have ended")
        assert replica.process.is_alive()
        assert replica.end() == -signal.SIGTERM


def test_a_wrong_key_ends_the_command_with_its_line(config, start):
    replica = start(config(more="settle_afer_s = 5"))
    assert replica.wait() == 1
    assert re.search(
        r"serve\.toml, line 6: settle_afer_s: there is no such key \(did you mean settle_after_s\?\)", replica.log
    )
