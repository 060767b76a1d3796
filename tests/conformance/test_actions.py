"""The history of actions, on every database: what was intended, by whom and why, and how it ended, if that is known."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from harness.databases import Database
from sqlalchemy import update

from dualwrite.protocol.blocking import Deed, End, Ended, Intent
from dualwrite.stores.sql.operators import Forgetting, History, before
from dualwrite.stores.sql.tables import declare_tables

FIRST = Intent(
    "a" * 32,
    "orders",
    Deed.SETTLE,
    "with all lanes",
    'it\'s "stuck", und zwar l\u00e4nger',
    "anna",
    "dualwrite app@host:7",
)
SECOND = replace(FIRST, action_id="b" * 32, subject="orders#1", deed=Deed.DROP, detail="messages 3, 5-7")


@pytest.fixture
def history(database: Database) -> History:
    return History(database.engine(), schema=database.schema)


def test_what_was_begun_has_no_outcome_until_it_is_stored(history: History) -> None:
    history.begin([FIRST])
    found = history.read(FIRST.action_id)
    assert found is not None
    assert (found.intent, found.ended_at, found.outcome, found.result) == (FIRST, None, None, None)
    history.end([End(FIRST.action_id, Ended.DONE, "1 id settled"), End("c" * 32, Ended.DONE, "nobody began this")])
    ended = history.read(FIRST.action_id)
    assert ended is not None
    assert (ended.outcome, ended.result, ended.begun_at) == (Ended.DONE, "1 id settled", found.begun_at)
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.begun_at
    assert history.read("c" * 32) is None


def test_a_form_that_is_sent_twice_begins_once(history: History) -> None:
    assert history.begin_once(FIRST)
    history.end([End(FIRST.action_id, Ended.REFUSED, "young")])
    assert not history.begin_once(replace(FIRST, reason="again"))
    found = history.read(FIRST.action_id)
    assert found is not None
    assert (found.intent.reason, found.outcome) == (FIRST.reason, Ended.REFUSED)


def test_an_intent_whose_commit_was_not_answered_has_begun(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work runs again and finds its own row. It is no second form: the action would never be done."""
    run = history._own.run
    monkeypatch.setattr(history._own, "run", lambda work: (run(work), run(work))[1])
    assert history.begin_once(FIRST)
    assert not history.begin_once(FIRST)


def test_what_is_tried_again_under_its_id_has_the_outcome_of_the_last_attempt_alone(history: History) -> None:
    history.begin([FIRST, SECOND])
    history.end([End(FIRST.action_id, Ended.FAILED, "Kafka is away")])
    history.begin([replace(FIRST, reason="decided")])
    [again] = [one for one in history.last("", limit=5) if one.intent.action_id == FIRST.action_id]
    assert (again.intent.reason, again.outcome, again.ended_at, again.result) == ("decided", None, None, None)


def test_the_last_ones_come_first_and_only_those_of_the_prefix(history: History) -> None:
    for intent in (FIRST, SECOND, replace(FIRST, action_id="d" * 32, subject="bills")):
        history.begin([intent])
        time.sleep(0.002)  # SQLite's clock has whole milliseconds
    assert [one.intent.subject for one in history.last("", limit=2)] == ["bills", "orders#1"]
    assert [one.intent for one in history.last("orders", limit=9)] == [SECOND, FIRST]
    history.begin([])
    history.end([])


def test_a_deed_of_a_later_version_is_left_out(database: Database, history: History) -> None:
    history.begin([FIRST, SECOND])
    action = declare_tables(database.schema).action
    with database.engine().begin() as connection:
        connection.execute(update(action).where(action.c.deed == "settle").values(deed="freeze"))
    assert [one.intent for one in history.last("", limit=9)] == [SECOND]
    assert history.read(FIRST.action_id) is None


def test_what_is_old_is_forgotten_by_prefix_or_by_the_id_of_a_writer(database: Database, history: History) -> None:
    forgetting = Forgetting(database.engine(), database.schema)
    other = replace(FIRST, action_id="e" * 32, subject="orders-eu")
    history.begin([FIRST, SECOND, other])
    now = forgetting.now()
    assert forgetting.forget_actions("", before(now, 60), dry_run=False) == 0
    limit = before(now, -60)
    assert forgetting.forget_actions("bills", limit, dry_run=False) == 0
    assert forgetting.forget_actions("orders", limit, dry_run=True) == 3
    assert forgetting.forget_actions("", limit, dry_run=False, name="orders") == 2
    assert [one.intent for one in history.last("", limit=9)] == [other]


@pytest.mark.usefixtures("unanswered")
def test_what_was_forgotten_counts_although_its_commit_was_not_answered(database: Database, history: History) -> None:
    forgetting, store = Forgetting(database.engine(), database.schema), database.store()
    history.begin([FIRST, SECOND])
    assert forgetting.forget_actions("", before(forgetting.now(), -60), dry_run=False) == 2
    store.claim(["orders", "orders#1"], owner="me", cluster_id="cluster-one")
    rows = store.read(["orders", "orders#1"])
    assert forgetting.forget(rows)
    assert not forgetting.forget(rows)
    assert store.read(["orders", "orders#1"]) == []
