"""Actions on the page of ``dualwrite serve``, over real servers: a live owner, and a service that is killed in the middle."""

import http.client
import json
import re
import signal
from contextlib import ExitStack
from urllib.parse import urlencode, urlsplit

import pytest
from confluent_kafka import KafkaException, Producer
from harness.checker import Case
from harness.patience import PATIENCE_S, wait_until
from harness.service import replicas, serve_file
from sqlalchemy import text

from dualwrite import DualWriter, WriterLimits
from dualwrite.errors import DualWriteError
from dualwrite.testing.checker import read_committed

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)

TOKEN = "a token of sixteen and more"
ACTIONS = f"""
[actions]
enabled = ["settle", "terminate", "acknowledge", "replay", "drop"]
token = "{TOKEN}"
"""


@pytest.fixture
def serve(tmp_path, kafka, url):
    """Starts a replica that settles nothing by itself for ten minutes, unless told otherwise."""
    with ExitStack() as later:
        start = replicas(later)

        def run(more="", failpoint="", **given):
            return start(
                serve_file(tmp_path, kafka, url, more + ACTIONS, **{"settle_after_s": 600, **given}), failpoint
            )

        yield run


@pytest.fixture
def case(tmp_path, kafka, url, dualwrite_topic):
    return Case(tmp_path, kafka, url, dualwrite_topic)


class Browser:
    """Opens the form of an action, and sends it."""

    def __init__(self, replica):
        replica.get("/healthz")
        self.place = urlsplit(replica.address).netloc

    def ask(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(self.place, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer, answer.read().decode()
        finally:
            connection.close()

    def form(self, deed, name):
        return self.ask("GET", f"/act/shop/{deed}?{urlencode({'id': name})}")

    def send(self, deed, name, **more):
        answer, page = self.form(deed, name)
        fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))
        fields |= {"reason": "ticket 4711", "user": "anna", "token": TOKEN, **more}
        sent, page = self.ask(
            "POST",
            f"/act/shop/{deed}?{urlencode({'id': name})}",
            urlencode(fields),
            **{
                "Content-Type": "application/x-www-form-urlencoded",
                "Origin": f"http://{self.place}",
                "Cookie": answer.headers.get("Set-Cookie", "").partition(";")[0],
            },
        )
        if sent.status != 303:
            return page
        return self.ask("GET", sent.headers["Location"])[1]


def history(replica):
    replica.looks_again()
    return [(one["action"], one["id"], one["user"], one["outcome"]) for one in replica.target()["history"]]


def put(engine, table, topic, *numbers):
    more, value = (", reason", ", 'too large'") if table.endswith("aside") else ("", "")
    with engine.begin() as connection:
        for number in numbers:
            connection.execute(
                text(
                    f"INSERT INTO {table} (seq, writer, transactional_id, topic, topic_partition, value{more}) "
                    f"{'OVERRIDING SYSTEM VALUE ' if not more else ''}"
                    f"VALUES (:number, 'case', 'case', :topic, 0, :value{value})"
                ),
                {"number": number, "topic": topic, "value": f"waits {number}".encode()},
            )


def left(engine):
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM dualwrite_outbox_aside"))


def test_what_the_database_has_decided_is_given_up_only_by_a_tick_and_the_loss_is_acknowledged(serve, case):
    case.run(failpoint="write.decided:2", killed=True)
    replica = serve()
    browser = Browser(replica)
    _, form = browser.form("terminate", "case")
    assert "THE DATABASE HAS DECIDED THIS TRANSACTION" in form
    assert f"Its messages in {case.topic} 0-1 are lost" in form
    assert "not done: tick that you give up" in browser.send("terminate", "case")
    assert "done: 1 transaction aborted" in browser.send("terminate", "case", lose_decided="yes")
    assert "done: 1 acknowledged" in browser.send("acknowledge", "case")
    replica.looks_again()
    assert replica.target()["incidents"] == []
    assert history(replica) == [("acknowledge", "case", "anna", "done"), ("terminate", "case", "anna", "done")]
    assert replica.end() == 0


def test_nothing_but_terminate_touches_a_live_owner_and_that_says_so(serve, kafka, engine, dualwrite_topic):
    replica = serve(settle_after_s=0.5)
    browser = Browser(replica)
    with DualWriter.leased("fleet", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        with writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="one", partition=0)
        with pytest.raises(DualWriteError), writer.transaction() as tx:  # the row names the first one
            tx.produce(dualwrite_topic, value="two", partition=0)
            wait_until(lambda: "its lease is held for" in browser.form("settle", "fleet-0")[1], 60)
            refused = browser.form("settle", "fleet-0")[1]
            assert "If it hangs, stop its process" in refused
            assert "showed no sign of life" not in refused
            assert "ITS OWNER IS ALIVE" in browser.form("terminate", "fleet-0")[1]
            assert "done: 1 transaction aborted" in browser.send("terminate", "fleet-0")
        assert [record.value for record in read_committed(kafka, dualwrite_topic)] == [b"one"]
    assert replica.end() == 0


def test_what_settles_a_silent_owner_sooner_is_said_where_the_page_refuses(serve, case):
    case.run(failpoint="write.decided:2", killed=True)
    replica = serve()
    refused = Browser(replica).form("settle", "case")[1]
    assert re.search(r"If it stays silent, the service settles it in \d+ min( \d+ s)?\.", refused)
    assert "If you know that it is dead, `dualwrite recover case` settles it now." in refused
    assert "<form" not in refused
    assert replica.end() == 0


def test_the_transaction_of_another_program_is_terminated_only_after_the_form_has_named_what_is_lost(
    serve, kafka, kafka_id, dualwrite_topic
):
    producer = Producer({**kafka, "transactional.id": f"{kafka_id}-0-17"})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(dualwrite_topic, b"lost", partition=1)
    producer.flush(PATIENCE_S)
    replica = serve()
    browser = Browser(replica)
    form = browser.form("terminate", f"{kafka_id}-0-17")[1]
    assert "another program made it. Only that program knows what it has decided." in form
    assert f"If it has decided this transaction, its messages in {dualwrite_topic} 1 are lost." in form
    assert re.search(rf"{kafka_id}-0-17: producer \d+, epoch 0, open for \d+ s, in {dualwrite_topic} 1", form)
    assert "done: 1 transaction aborted" in browser.send("terminate", f"{kafka_id}-0-17")
    with pytest.raises(KafkaException):
        producer.commit_transaction(PATIENCE_S)
    assert read_committed(kafka, dualwrite_topic) == []
    assert replica.end() == 0


def test_a_person_sends_what_the_service_may_not(serve, case, kafka, engine):
    case.run()
    put(engine, "dualwrite_outbox", case.topic, 1)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO dualwrite_outbox_mode (writer, mode) VALUES ('case', 'later')"))
    replica = serve("send_waiting = false", settle_after_s=1)
    browser = Browser(replica)
    wait_until(
        lambda: "<form" in browser.form("settle", "case")[1], otherwise=lambda: browser.form("settle", "case")[1]
    )
    assert "1 message sent" in browser.send("settle", "case")
    assert b"waits 1" in [record.value for record in read_committed(kafka, case.topic)]
    assert replica.end() == 0


@pytest.mark.parametrize(("point", "count"), [("action.intended", 2), ("action.done", 0)])
def test_a_service_that_is_killed_in_the_middle_leaves_a_history_that_is_true(serve, case, engine, point, count):
    case.run()
    put(engine, "dualwrite_outbox_aside", case.topic, 1, 2)
    replica = serve(failpoint=f"{point}:1:kill")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        Browser(replica).send("drop", "case")
    assert replica.wait() == -signal.SIGKILL
    assert left(engine) == count
    again = serve()
    assert history(again) == [("drop", "case", "anna", None)]
    assert "not known: it still runs, or its process was killed" in again.get("/")[1]
    browser = Browser(again)
    if count:
        assert "done: 2 messages deleted" in browser.send("drop", "case")
    assert "no message of it was moved aside" in browser.form("drop", "case")[1]
    assert left(engine) == 0
    assert history(again)[-1] == ("drop", "case", "anna", None), "what came later does not speak for it"
    assert again.end() == 0


def test_a_service_that_is_killed_while_it_settles_leaves_an_intent_without_an_end(serve, case):
    case.run(failpoint="write.decided:2", killed=True)
    first = serve(settle_after_s=1, failpoint="settle.before_commit:1:kill")
    assert first.wait() == -signal.SIGKILL
    second = serve(settle_after_s=1)
    second.says("1 id settled")
    wait_until(lambda: second.target()["history"] and second.target()["history"][0]["outcome"])
    ended, killed = second.target()["history"]
    assert (killed["user"], killed["outcome"], killed["result"]) == ("dualwrite serve", None, None)
    assert (ended["outcome"], ended["id"]) == ("done", "case")
    assert json.dumps(killed)
    assert second.end() == 0
