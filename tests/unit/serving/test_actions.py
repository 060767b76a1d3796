"""Who may act on the page, and what its forms refuse: nothing is done without a token or a proxy, a reason, and our own form."""

import re
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, insert
from starlette.testclient import TestClient

from dualwrite.migrations import upgrade
from dualwrite.protocol.blocking import Deed, Ended
from dualwrite.serving.app import make_app
from dualwrite.serving.configuration import ActionRules, Target
from dualwrite.stores.sql.operators import History
from dualwrite.stores.sql.tables import declare_tables

from .test_page import CALM, Stub, waits, with_round

TOKEN = "a token of sixteen and more"
BY_TOKEN = ActionRules(frozenset(Deed), token=TOKEN)
BY_PROXY = ActionRules(frozenset(Deed), user_header="X-User", origin="https://dualwrite.example")
DROP = "/act/shop/drop?id=orders"


@pytest.fixture
def engine(tmp_path):
    made = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with made.connect() as connection:
        upgrade(connection)
    aside = declare_tables(None).aside
    with made.begin() as connection:
        connection.execute(
            insert(aside),
            [
                {
                    "seq": n,
                    "writer": "orders",
                    "transactional_id": "orders",
                    "topic": "<b>",
                    "value": b"v",
                    "reason": "large",
                }
                for n in (3, 4, 9)
            ],
        )
    yield made
    made.dispose()


@pytest.fixture
def page(engine):
    """A browser on the page with given rules."""

    def at(rules, peer="127.0.0.1", base="http://shop.example"):
        stub = Stub(CALM)
        stub.target = Target(
            "shop", str(engine.url), {"bootstrap.servers": "127.0.0.1:1", "client.id": "dualwrite-serve"}, timeout_s=0.3
        )
        return TestClient(make_app([stub], rules), base_url=base, client=(peer, 5000), follow_redirects=False)

    return at


def fields(page):
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.text))


def sent(browser, address=DROP, *, headers=None, **changed):
    """Open a form, fill it in, and send it."""
    headers = headers or {}
    form = {**fields(browser.get(address, headers=headers)), "reason": "too large", "user": "anna", "token": TOKEN}
    origin = {"origin": str(browser.base_url).rstrip("/")}
    form = {name: value for name, value in {**form, **changed}.items() if value is not None}
    return browser.post(address, data=form, headers={**origin, **headers})


def left(engine):
    with engine.connect() as connection:
        return sorted(connection.exec_driver_sql("SELECT seq FROM dualwrite_outbox_aside").scalars())


def history(engine):
    return History(engine).last("", limit=9)


def test_the_form_says_what_is_lost_and_the_deed_is_stored_with_its_reason(page, engine):
    browser = page(BY_TOKEN)
    asked = browser.get(DROP)
    assert "3 messages are deleted for good. Nobody will read them" in asked.text
    assert "<li>3: &lt;b&gt;, 1 bytes, moved aside " in asked.text
    assert 'http-equiv="refresh"' not in asked.text, "somebody may be filling it in"
    assert "<script" not in asked.text
    answer = sent(browser)
    assert answer.status_code == 303
    [record] = history(engine)
    assert (record.intent.actor, record.intent.reason, record.outcome) == ("anna", "too large", Ended.DONE)
    assert (record.intent.detail, record.result) == ("messages 3-4, 9", "3 messages deleted")
    assert left(engine) == []
    ended = browser.get(answer.headers["location"])
    assert "done: 3 messages deleted" in ended.text
    assert TOKEN not in ended.text + asked.text


def test_only_what_was_shown_is_deleted(page, engine):
    browser = page(BY_TOKEN)
    form = {**fields(browser.get(DROP)), "reason": "large", "user": "anna", "token": TOKEN}
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO dualwrite_outbox_aside (seq, writer, transactional_id, topic, reason) VALUES (10, 'orders', 'orders', 't', 'x')"
        )
    assert browser.post(DROP, data=form, headers={"origin": "http://shop.example"}).status_code == 303
    assert left(engine) == [10]


def test_a_form_that_is_sent_twice_is_done_once(page, engine):
    browser = page(BY_TOKEN)
    first = sent(browser)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO dualwrite_outbox_aside (seq, writer, transactional_id, topic, reason) VALUES (3, 'orders', 'orders', 't', 'x')"
        )
    number = first.headers["location"].rpartition("/")[2]
    again = sent(browser, action_id=number)
    assert again.headers["location"] == first.headers["location"]
    assert left(engine) == [3]


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"token": "another token, long enough"}, 403, "the token is wrong"),
        ({"token": None}, 403, "the token is wrong"),
        ({"form": "x" * 43}, 403, "not of this browser"),
        ({"form": None}, 403, "not of this browser"),
        ({"headers": {"origin": "http://evil.example"}}, 403, "comes from http://evil.example"),
        ({"headers": {"origin": "null"}}, 403, "comes from null"),
        ({"headers": {"sec-fetch-site": "cross-site"}}, 403, "not from this page"),
        ({"reason": "  "}, 400, "give your name and a reason"),
        ({"user": ""}, 400, "give your name and a reason"),
        ({"reason": "x" * 1001}, 400, "give your name and a reason"),
        ({"reason": "x" * 70000}, 413, "too long"),
        ({"action_id": "1"}, 400, "no number of its own"),
        ({"seen": "all"}, 400, "does not name the messages"),
    ],
)
def test_a_form_that_is_not_as_it_should_be_does_nothing(page, engine, monkeypatch, changed, code, words):
    monkeypatch.setattr("dualwrite.serving.actions._WRONG_TOKEN_S", 0.0)
    answer = sent(page(BY_TOKEN), **changed)
    assert (answer.status_code, words in answer.text) == (code, True), answer.text
    assert (left(engine), history(engine)) == ([3, 4, 9], [])


def test_what_was_written_is_kept_when_the_form_comes_back(page):
    answer = sent(page(BY_TOKEN), user="", reason="the host is gone")
    assert ">the host is gone</textarea>" in answer.text


def test_a_proxy_names_the_user(page, engine):
    browser = page(BY_PROXY, base="https://dualwrite.example")
    assert 'name="token"' not in browser.get(DROP, headers={"x-user": "berta"}).text
    assert sent(browser, headers={"x-user": "berta"}, token=None, user="somebody else").status_code == 303
    assert history(engine)[0].intent.actor == "berta"


@pytest.mark.parametrize(
    ("peer", "headers", "base"),
    [
        ("10.0.0.9", {"x-user": "berta"}, "https://dualwrite.example"),
        ("127.0.0.1", {}, "https://dualwrite.example"),
        ("127.0.0.1", {"x-user": "  "}, "https://dualwrite.example"),
        ("127.0.0.1", {"x-user": "berta"}, "http://rebound.example"),
    ],
)
def test_a_user_that_no_trusted_proxy_names_is_nobody(page, engine, peer, headers, base):
    answer = sent(page(BY_PROXY, peer, base), headers=headers)
    assert answer.status_code == 403
    assert (left(engine), history(engine)) == ([3, 4, 9], [])


def test_what_is_not_enabled_is_not_there(page, engine):
    assert page(None).get(DROP).status_code == 404
    only = page(replace(BY_TOKEN, enabled=frozenset({Deed.REPLAY})))
    assert only.get(DROP).status_code == 404
    assert sent(only).status_code == 404
    assert only.get("/act/shop/replay?id=orders").status_code == 200
    assert only.get("/act/other/replay?id=orders").status_code == 404
    assert only.get("/act/shop/replay").status_code == 404
    assert left(engine) == [3, 4, 9]


@pytest.mark.parametrize("deed", ["replay", "drop", "acknowledge"])
def test_what_there_is_nothing_of_has_no_form(page, deed):
    asked = page(BY_TOKEN).get(f"/act/shop/{deed}?id=bills")
    assert "It cannot be done: no " in asked.text
    assert "<form" not in asked.text


def test_a_server_that_is_away_is_named(page):
    asked = page(BY_TOKEN).get("/act/shop/terminate?id=flink")
    assert "It cannot be done: Unavailable: " in asked.text
    assert "<form" not in asked.text


def test_nothing_is_done_where_the_reason_cannot_be_stored(page, engine):
    browser = page(BY_TOKEN)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE dualwrite_action")
    answer = sent(browser)
    assert (answer.status_code, "the reason could not be stored" in answer.text) == (503, True)
    assert left(engine) == [3, 4, 9]


def test_the_page_links_to_what_is_enabled_and_to_nothing_else(engine):
    held = with_round(waiting=[waits("a/b#1", 3)._replace(aside=2)])
    every = TestClient(make_app([Stub(held)], BY_TOKEN)).get("/").text
    assert 'href="/act/shop/settle?id=a%2Fb%231"' in every
    assert 'href="/act/shop/drop?id=a%2Fb%231"' in every
    assert 'href="/act/shop/terminate?id=orders"' in every
    one = TestClient(make_app([Stub(held)], replace(BY_TOKEN, enabled=frozenset({Deed.DROP})))).get("/").text
    assert set(re.findall(r'href="/act/shop/(\w+)', one)) == {"drop"}
    assert "/act/" not in TestClient(make_app([Stub(held)])).get("/").text
