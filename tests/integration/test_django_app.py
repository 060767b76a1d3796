"""The Django app, as docs/django.md shows it: a message commits with the outermost ``atomic()``, whatever Django does in it."""

import asyncio
import json
import os
import pkgutil
import secrets
import signal
import subprocess
import sys
import textwrap
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import StringIO
from unittest.mock import Mock
from wsgiref.util import setup_testing_defaults

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.base import BaseHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, connections, models, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpResponse
from django.test import TestCase, TransactionTestCase, override_settings
from django.urls import path
from harness.django_site import database, using
from harness.interruption import Interruption
from harness.orders import on_postgresql
from harness.page_examples import example, run_example
from sqlalchemy import create_engine, text

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    TransactionAborted,
    Unavailable,
    WriterLimits,
    failpoints,
    status,
)
from dualwrite.django import captured_messages, database_url, join, produce, writers
from dualwrite.django.apps import check_settings
from dualwrite.errors import IllegalStateError, OutcomeUnverifiable
from dualwrite.failpoints import FailpointError
from dualwrite.protocol.lives import WriteState
from dualwrite.stores.sql.short_transactions import SCHEMA_REVISION
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import PostgresProxy
from dualwrite.writing.lane import Lane
from dualwrite.writing.lane_pool import Lanes

pytestmark = on_postgresql


@pytest.fixture
def site(url, engine, kafka):
    """A site with one database, and its writer."""
    with engine.begin() as made:
        made.execute(text("CREATE TABLE items (id serial PRIMARY KEY, item text UNIQUE)"))
    with (
        using(
            {"default": database(url), "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        ) as found,
        override_settings(DUALWRITE={"default": {"FLEET": "shop", "KAFKA": kafka}}),
    ):
        yield found["default"]
        writers.close()


@pytest.fixture
def there(engine, kafka, dualwrite_topic):
    """Both sides: the items of the rows, and the messages in their order."""

    def read():
        messages = [message.value.decode() for message in read_committed(kafka, dualwrite_topic)]
        with engine.connect() as made:
            return list(made.scalars(text("SELECT item FROM items ORDER BY item"))), sorted(messages)

    return read


@pytest.fixture
def put(site, dualwrite_topic):
    """Adds a row and a message."""

    def put(item, **options):
        with connections[options.get("using", "default")].cursor() as cursor:
            cursor.execute("INSERT INTO items (item) VALUES (%s)", [item])
        produce(dualwrite_topic, item, partition=0, **options)

    return put


def test_a_message_commits_with_the_rows_of_atomic_and_is_aborted_with_them(site, there, put):
    with transaction.atomic():
        put("tea")
        put("milk")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        put("soup")
        raise ZeroDivisionError
    with transaction.atomic():
        put("juice")
    assert site.get_autocommit()
    assert there() == (["juice", "milk", "tea"],) * 2


def test_transactions_without_messages_are_djangos_own(site, there):
    with override_settings(DUALWRITE={}), transaction.atomic(), site.cursor() as cursor:
        cursor.execute("INSERT INTO items (item) VALUES ('tea')")
    assert there() == (["tea"], [])


def test_outside_of_a_transaction_there_is_nothing_that_a_message_could_commit_with(site, put, there):
    with pytest.raises(IllegalStateError, match="no transaction on the database 'default'.*transaction.atomic"):
        put("tea")
    assert there() == (["tea"], [])  # the row is Django's autocommit


def test_an_inner_atomic_that_is_rolled_back_takes_its_messages_along(there, put):
    with transaction.atomic():
        with suppress(KeyError), transaction.atomic():
            put("first of all, in a savepoint")  # which is older than the dual write
            raise KeyError
        with transaction.atomic():
            put("tea")
            with suppress(KeyError), transaction.atomic():
                put("milk")
                raise KeyError
        put("soup")
    with suppress(KeyError), transaction.atomic(), transaction.atomic():
        with transaction.atomic():
            put("water")
        raise KeyError
    assert there() == (["soup", "tea"],) * 2


def test_the_first_message_may_come_in_any_depth(there, put):
    with transaction.atomic(), transaction.atomic(), transaction.atomic():
        put("tea")
    with transaction.atomic():
        with transaction.atomic():
            with suppress(KeyError), transaction.atomic():
                put("milk")
                raise KeyError
            put("soup")
        with suppress(KeyError), transaction.atomic():
            put("juice")
            raise KeyError
    assert there() == (["soup", "tea"],) * 2


make_savepoint = getattr(transaction, "savepoint_create", None) or transaction.savepoint
"""Django 6.1 has renamed it."""


def test_a_savepoint_by_hand_that_is_older_than_the_first_message_aborts_if_it_is_rolled_back(there, put):
    with pytest.raises(TransactionAborted, match="lost track"), transaction.atomic():
        mark = make_savepoint()
        put("tea")
        transaction.savepoint_rollback(mark)
    with transaction.atomic():
        put("milk")
        mark = make_savepoint()
        put("soup")
        transaction.savepoint_rollback(mark)
    assert there() == (["milk"],) * 2


def test_durable_is_the_outermost_and_marks_for_rollback_count(there, put):
    with transaction.atomic(durable=True):
        put("tea")
        with pytest.raises(RuntimeError, match="durable"), transaction.atomic(durable=True):
            pytest.fail("begun")
        with suppress(ZeroDivisionError), transaction.atomic():
            raise ZeroDivisionError
    with transaction.atomic():
        put("milk")
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            join()
    with transaction.atomic():
        put("soup")
        with suppress(ZeroDivisionError), transaction.atomic(savepoint=False):
            raise ZeroDivisionError
        with pytest.raises(TransactionManagementError):
            put("water")
    with pytest.raises(DatabaseError), transaction.atomic():
        put("juice")
        put("juice")  # not twice
    assert there() == (["tea"],) * 2


def test_hooks_of_on_commit_run_once_both_sides_have_committed(there, put):
    seen = []
    with transaction.atomic():
        put("tea")
        transaction.on_commit(lambda: seen.append(there()))
        with suppress(KeyError), transaction.atomic():
            transaction.on_commit(lambda: seen.append("of a savepoint that was rolled back"))
            raise KeyError
        assert not seen
    with suppress(KeyError), transaction.atomic():
        put("milk")
        transaction.on_commit(lambda: seen.append("rolled back"))
        raise KeyError
    failpoints.arm("write.recorded:1:raise")
    with pytest.raises(FailpointError), transaction.atomic():
        put("soup")
        transaction.on_commit(lambda: seen.append("aborted"))
    failpoints.arm("")
    with transaction.atomic():
        put("juice")
    assert seen == [(["tea"],) * 2]
    assert there() == (["juice", "tea"],) * 2


@pytest.mark.parametrize("error", [CompletionPending, DecidedTransactionLost, OutcomeUnverifiable])
def test_hooks_run_after_an_error_that_came_after_the_decision(site, there, put, monkeypatch, error):
    hooks = []

    def fail(*_):
        raise error("Kafka does not answer")

    monkeypatch.setattr(Lane, "complete", fail)
    with pytest.raises(error, match="does not answer"), transaction.atomic():
        put("tea")
        transaction.on_commit(lambda: hooks.append("run"))
    monkeypatch.undo()
    assert hooks == ["run"]
    assert site.get_autocommit()
    with transaction.atomic():
        put("soup")
    assert hooks == ["run"]
    assert there() == (["soup", "tea"],) * 2


def test_a_message_that_cannot_be_sent_keeps_its_rows_from_being_committed(
    site, there, put, dualwrite_topic, monkeypatch
):
    def refuse(*_, **__):
        raise Unavailable("no lane is free")

    with (
        pytest.raises(TransactionAborted, match="the transaction continued after an error: no lane is free") as raised,
        transaction.atomic(),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Lanes, "take", refuse)
            with suppress(Unavailable):
                put("tea")
            with connection.cursor() as cursor:  # Django's transaction goes on, with its rows
                cursor.execute("SELECT count(*) FROM items")
                assert cursor.fetchone() == (1,)
        with pytest.raises(TransactionAborted):
            put("milk")
    assert raised.value.retryable
    with pytest.raises(TransactionAborted), transaction.atomic():
        put("soup")
        with suppress(ConfigurationError, TransactionAborted):
            produce(dualwrite_topic, b"x" * 2_000_000)
    assert site.get_autocommit()
    with transaction.atomic():
        put("juice")
    assert there() == (["juice"],) * 2


def test_without_a_writer_no_row_is_committed_that_should_have_had_a_message(site, there, put, kafka):
    for given in ({}, {"default": {"FLEET": "shop", "KAFKA": {**kafka, "no.such.setting": 1}}}):
        with (
            override_settings(DUALWRITE=given),
            pytest.raises(TransactionAborted, match="the transaction continued after an error"),
            transaction.atomic(),
            suppress(ConfigurationError, ImproperlyConfigured),
        ):
            put("tea")
    assert site.get_autocommit()
    with transaction.atomic():
        put("juice")
    assert there() == (["juice"],) * 2


@pytest.mark.parametrize("end", ["_commit", "_roll_back"])
def test_an_end_that_is_interrupted_at_its_first_lines_has_ended_both_sides(site, there, put, end):
    hooks, kept = [], []
    for line in range(4, 28, 2):  # before, Django has not begun to end it
        interruption = Interruption(line, inside=end)
        with suppress(KeyboardInterrupt, ZeroDivisionError), interruption.armed(), transaction.atomic():
            put(f"first {line}")
            transaction.on_commit(lambda: hooks.append("run"))
            if end == "_roll_back":
                raise ZeroDivisionError
        assert interruption.at is not None
        with transaction.atomic():
            put(f"then {line}")
        assert site.get_autocommit(), interruption.at
        assert not hooks, interruption.at
        kept.append(f"then {line}")
    assert there() == (sorted(kept),) * 2


def test_a_connection_that_is_closed_inside_aborts_both_sides(there, put):
    with transaction.atomic():
        put("tea")
        connection.close()
    with transaction.atomic():
        put("soup")
    assert there() == (["soup"],) * 2


def test_transactions_by_hand(site, there, put):
    site.set_autocommit(False)
    put("tea")
    site.commit()
    put("milk")
    site.rollback()
    put("soup")
    site.commit()
    with transaction.atomic():
        put("water")
    site.rollback()
    site.set_autocommit(True)
    assert there() == (["soup", "tea"],) * 2


def test_a_request_that_is_atomic_commits_both_sides_or_neither(site, there, put):
    def view(item):
        put(item)
        if item == "milk":
            raise ZeroDivisionError

    connections.settings["default"]["ATOMIC_REQUESTS"] = True
    BaseHandler().make_view_atomic(view)("tea")
    with suppress(ZeroDivisionError):
        BaseHandler().make_view_atomic(view)("milk")
    assert there() == (["tea"],) * 2


@pytest.fixture
def keep(site):
    """Lets Django keep its connections in the way that the settings say."""

    def keep(**settings):
        site.close()
        site.settings_dict.update(settings)

    yield keep
    site.close()
    site.close_pool()


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"CONN_MAX_AGE": 0}, 24),
        ({"CONN_MAX_AGE": None}, 4),
        ({"CONN_MAX_AGE": 600, "CONN_HEALTH_CHECKS": True}, 4),
        ({"OPTIONS": {"pool": True}}, 4),
        ({"OPTIONS": {"pool": {"min_size": 1, "max_size": 2}}, "CONN_HEALTH_CHECKS": True}, 2),
    ],
)
def test_atomic_requests_in_several_threads_on_connections_that_django_keeps_or_pools(
    site, keep, there, put, settings, most
):
    """Whole requests, with what Django does to connections before and after each."""
    keep(ATOMIC_REQUESTS=True, **settings)
    backends = set()

    def view(_, item):
        put(item)
        backends.add(connection.connection.info.backend_pid)
        if item.startswith("bad"):
            raise ZeroDivisionError
        return HttpResponse()

    def status_of(item):
        environ, seen = {"PATH_INFO": f"/{item}", "HTTP_HOST": "testserver"}, []
        setup_testing_defaults(environ)
        WSGIHandler()(environ, lambda status, _: seen.append(status)).close()
        return seen[0].partition(" ")[0]

    def work(number):
        try:
            return [status_of(f"{kind}-{number}-{turn}") for turn in range(3) for kind in ("good", "bad")]
        finally:
            connections.close_all()

    with override_settings(ROOT_URLCONF=(path("<item>", view),)), ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [["200", "500"] * 3] * 4
    assert len(backends) <= most
    assert there() == ([f"good-{number}-{turn}" for number in range(4) for turn in range(3)],) * 2


def test_a_pool_of_one_connection_gets_it_back_clean_however_a_transaction_ends(keep, there, put, engine, monkeypatch):
    keep(OPTIONS={"pool": {"min_size": 1, "max_size": 1, "timeout": 20}})

    def elsewhere(item):
        """What the pool has is usable, by another thread, and nothing is open there."""

        def place():
            try:
                with transaction.atomic():
                    put(item)
            finally:
                connection.close()

        connection.close()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(place).result()

    def fail(*_):
        raise CompletionPending("Kafka does not answer")

    with transaction.atomic():
        put("committed")
    elsewhere("1")
    with suppress(KeyError), transaction.atomic():
        put("an exception")
        raise KeyError
    elsewhere("2")
    with transaction.atomic():
        put("closed inside")
        connection.close()
    elsewhere("3")
    with pytest.raises(CompletionPending), monkeypatch.context() as patch, transaction.atomic():
        put("pending")
        patch.setattr(Lane, "complete", fail)
    elsewhere("4")
    with pytest.raises(TransactionAborted), transaction.atomic():
        put("lost")
        with engine.begin() as made:
            made.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": connection.connection.info.backend_pid})
    elsewhere("5")
    assert there() == (["1", "2", "3", "4", "5", "committed", "pending"],) * 2


def test_an_asynchronous_view_calls_it_in_a_thread(there, put):
    def place():
        with transaction.atomic():
            put("tea")
        connections.close_all()

    async def view():
        await sync_to_async(place)()

    asyncio.run(view())
    assert there() == (["tea"],) * 2


def test_a_block_of_the_writers_own_and_the_dual_write_itself(site, there, put, dualwrite_topic):
    with writers["default"].transaction(connection) as tx:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO items (item) VALUES ('tea')")
        tx.produce(dualwrite_topic, "tea")
    with transaction.atomic():
        tx = join()
        assert join() is not None
        put("soup")
        tx.produce_many(dualwrite_topic, [b"soup"])
        with pytest.raises(IllegalStateError), writers["default"].transaction(connection):
            pytest.fail("begun")
    assert tx.state is WriteState.COMPLETED
    assert there() == (["soup", "tea"], ["soup", "soup", "tea"])


def test_each_database_has_a_writer_of_its_own(site, there, put, kafka, dualwrite_topic, dualwrite_engine):
    with dualwrite_engine.begin() as made:
        made.execute(text("CREATE TABLE items (id serial PRIMARY KEY, item text UNIQUE)"))
    url = dualwrite_engine.url.render_as_string(hide_password=False)
    settings = {"default": {"FLEET": "shop", "KAFKA": kafka}, "other": {"WRITER": "others", "KAFKA": kafka}}
    site.close()
    with (
        using({"default": dict(site.settings_dict), "other": database(url)}),
        override_settings(DUALWRITE=settings),
    ):
        with transaction.atomic(), suppress(KeyError), transaction.atomic(using="other"):
            put("tea")
            put("milk", using="other")
            raise KeyError
        with suppress(KeyError), transaction.atomic(), transaction.atomic(using="other"):
            put("soup")
            put("juice", using="other")
            transaction.get_connection("other").needs_rollback = False
            raise KeyError
        with transaction.atomic(using="other"):
            put("water", using="other")
        assert [writers[alias].transactional_id for alias in settings] == ["shop-0", "others"]
        with dualwrite_engine.connect() as made:
            assert list(made.scalars(text("SELECT item FROM items"))) == ["water"]
        assert there() == (["tea"], ["tea", "water"])
        writers.close()


@pytest.mark.parametrize(("fault", "outcome"), [("reset_answer", ["tea"]), ("reset_request", [])])
def test_a_commit_that_is_not_answered_is_resolved_and_its_hooks_run_if_it_has_committed(
    site, there, dualwrite_postgres, url, kafka, put, fault, outcome
):
    hooks = []
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        site.close()
        site.settings_dict.update(HOST=through.url.host, PORT=through.url.port)
        with override_settings(DUALWRITE={"default": {"WRITER": "one", "KAFKA": kafka}}):
            with suppress(TransactionAborted), transaction.atomic():
                put("tea")
                transaction.on_commit(lambda: hooks.append("tea"))
                getattr(proxy.on("COMMIT"), fault)()
            with transaction.atomic():
                put("soup")
            site.close()
        through.dispose()
    assert hooks == outcome
    assert there() == (sorted([*outcome, "soup"]),) * 2


@pytest.mark.parametrize("outbox", ["never", "fallback"])
def test_while_kafka_is_away(site, engine, put, kafka, outbox):
    away = {**kafka, "bootstrap.servers": "localhost:1"}
    options = {"outbox": outbox, "limits": WriterLimits(fallback_after_s=0.5, timeout_s=5)}
    with override_settings(DUALWRITE={"default": {"WRITER": "away", "KAFKA": away, "OPTIONS": options}}):
        with suppress(Unavailable, TransactionAborted), transaction.atomic():
            put("tea")
        with engine.connect() as made:
            rows = list(made.scalars(text("SELECT item FROM items")))
            waiting = made.scalar(text("SELECT count(*) FROM dualwrite_outbox"))
        assert (rows, waiting) == ((["tea"], 1) if outbox == "fallback" else ([], 0))
        assert not writers["default"].health().unreported_losses


# Tests of a user.


def test_what_a_test_case_sees(site, put, dualwrite_topic):
    """In a TestCase nothing commits: the messages can be looked at; a TransactionTestCase commits, in memory or for real."""

    def place_order(item):
        with transaction.atomic(durable=True):
            put(item)
            with suppress(KeyError), transaction.atomic():
                put(f"{item} that is rolled back")
                raise KeyError

    class Rolled(TestCase):
        def test_messages(self):
            with captured_messages() as messages, self.captureOnCommitCallbacks(execute=True) as hooks:
                place_order("tea")
                transaction.on_commit(lambda: None)
            assert [(one.topic, one.value) for one in messages] == [(dualwrite_topic, "tea")]
            assert writers["default"].messages == []
            assert hooks

        def test_messages_again(self):
            with captured_messages() as messages:
                place_order("tea")
            assert len(messages) == 1

    class Committed(TransactionTestCase):
        available_apps = ()

        def _fixture_teardown(self):
            """The rows stay: they are no model's."""

        def test_messages(self):
            with captured_messages() as messages:
                place_order("soup")
            assert [one.value for one in messages] == ["soup"]
            assert [one.value for one in writers["default"].messages] == [b"soup"]

    with override_settings(DUALWRITE={"default": {"IN_MEMORY": True}}):
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, [Rolled, Committed]))
        result = unittest.TextTestRunner(stream=StringIO()).run(suite)
    assert result.testsRun == 3
    assert result.wasSuccessful(), result.failures + result.errors


@cache
def model():
    """The page's model; Django's settings must be there."""

    class Order(models.Model):  # noqa: DJ008 - nobody reads it
        item = models.TextField()

        class Meta:
            app_label = "shop"
            db_table = "items"

    return Order


def test_the_examples_of_the_page(site, there, dualwrite_topic, kafka):
    """They run as they stand, with the model of the page, and a site's settings."""
    settings = run_example(example("django.md", "Set it up")[0], dualwrite_topic)
    assert settings["DUALWRITE"]["default"].keys() == {"FLEET", "KAFKA", "OPTIONS"}
    given = {"default": {**settings["DUALWRITE"]["default"], "KAFKA": dict(kafka)}}
    (place_order,) = example("django.md", "Django")
    with override_settings(DUALWRITE=given):
        names = run_example(place_order, dualwrite_topic, Order=model())
        names["place_order"]("tea")
    assert there() == (["tea"],) * 2
    with override_settings(DUALWRITE={"default": {"IN_MEMORY": True}}):
        names = run_example(example("django.md", "Tests")[0], dualwrite_topic, **names)
        kinds = [names["OrderTest"], type("Kept", (names["CommitTest"],), {"_fixture_teardown": lambda _: None})]
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, kinds))
        with site.cursor() as cursor:
            cursor.execute("DELETE FROM items")
        result = unittest.TextTestRunner(stream=StringIO()).run(suite)
    assert (result.testsRun, result.failures + result.errors) == (2, [])
    assert there()[0] == ["soup"]


# Commands, checks, migrations.


def test_the_commands_are_those_of_dualwrite_on_the_servers_of_the_settings(site, there, put, kafka, engine):
    with transaction.atomic():
        put("tea")
    shown, out = StringIO(), StringIO()
    call_command("dualwrite", "status", "--json", stdout=shown)
    assert {one["transactional_id"] for one in json.loads(shown.getvalue())["ids"]} >= {"shop-0"}
    call_command("dualwrite", "doctor", "--json", stdout=out)
    found = json.loads(out.getvalue())
    assert {"database", "brokers"} & {one["area"] for one in found["findings"]}
    with pytest.raises(SystemExit) as no_such_id:
        call_command("dualwrite", "recover", "nobody", stdout=StringIO())
    assert no_such_id.value.code == 6
    with pytest.raises(SystemExit) as usage:
        call_command("dualwrite", "recover", stdout=StringIO())
    assert usage.value.code == 2
    call_command("dualwrite", "outbox", "list", "--json", stdout=StringIO())
    with pytest.raises(ImproperlyConfigured, match="has no 'lite'"):
        call_command("dualwrite", "--database", "lite", "status")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "is not a dictionary"),
        ({"default": []}, "is not a dictionary"),
        ({"default": {"KAFKA": {}}}, "needs either FLEET.*or WRITER"),
        ({"default": {"FLEET": "a", "WRITER": "a", "KAFKA": {}}}, "needs either FLEET.*or WRITER"),
        ({"default": {"FLEET": "a"}}, "needs KAFKA"),
        ({"default": {"FLEET": "a", "KAFKA": {}, "TOPIC": "a"}}, "has TOPIC; it may have FLEET"),
        ({"none": {"FLEET": "a", "KAFKA": {}}}, "DATABASES has no 'none'"),
        ({"lite": {"FLEET": "a", "KAFKA": {}}}, "SQLite.*PostgreSQL through psycopg 3 alone"),
    ],
)
@pytest.mark.usefixtures("site")
def test_settings_that_cannot_work_are_found_by_the_check_and_refused(given, words):
    with override_settings(DUALWRITE=given):
        (found,) = check_settings()
        with pytest.raises(ImproperlyConfigured, match=words):
            _ = writers[next(iter(given), "default")]
    assert found.id == "dualwrite.E001"
    with override_settings(DUALWRITE={}):
        assert check_settings() == []


def test_the_url_says_what_djangos_settings_say(site, engine):
    found = database_url()
    reached = create_engine(found)
    with reached.connect() as made:
        assert made.scalar(text("SELECT current_database()")) == engine.url.database
    reached.dispose()
    site.settings_dict["OPTIONS"] = {"assume_role": "a role", "sslmode": "prefer", "pool": True, "isolation_level": 1}
    assert dict(database_url().query) == {
        **dict(found.query), "options": "-c role=a\\ role", "sslmode": "prefer"
    }  # fmt: skip


def test_the_role_that_django_assumes_is_the_librarys_too(site, engine):
    role = f"the app {secrets.token_hex(4)}"
    with engine.begin() as made:
        made.execute(text(f'CREATE ROLE "{role}"'))
    site.settings_dict["OPTIONS"] = {"assume_role": role}
    assumed = create_engine(database_url())
    with assumed.connect() as made:
        assert made.scalar(text("SELECT current_user")) == role
    assumed.dispose()
    with engine.begin() as made:
        made.execute(text(f'DROP ROLE "{role}"'))


def test_psycopg2_is_refused(site, monkeypatch):
    monkeypatch.setattr(site, "Database", unittest)
    with pytest.raises(ImproperlyConfigured, match="psycopg2.*dualwrite\\[postgresql\\]"):
        database_url()


def test_the_command_names_the_extra_that_it_needs(site, monkeypatch):
    monkeypatch.setattr("dualwrite.django.management.commands.dualwrite.find_spec", lambda _: None)
    with pytest.raises(CommandError, match="dualwrite\\[cli\\]"):
        call_command("dualwrite", "status")


# A process of its own, that is killed.

PROGRAM = """
import sys, django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["dualwrite.django"], DATABASES={{"default": {database!r}}}, DUALWRITE={{"default": {dualwrite!r}}}, USE_TZ=True
)
if sys.argv[1] != "place":
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
    sys.exit()
django.setup()
from django.db import connection, transaction
from dualwrite.django import produce

for item in ("first", "second"):
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO items (item) VALUES (%s)", [item])
        produce({topic!r}, item, partition=0)
"""


@pytest.fixture
def manage(site, kafka, dualwrite_topic, tmp_path):
    """Runs ``manage.py`` of a site on the same servers: ``place`` places two orders."""
    file = tmp_path / "manage.py"
    given = {"FLEET": "shop", "KAFKA": dict(kafka), "OPTIONS": {}}
    code = PROGRAM.format(database=dict(site.settings_dict), dualwrite=given, topic=dualwrite_topic)
    file.write_text(textwrap.dedent(code), encoding="utf-8")

    def run(*arguments, failpoint=""):
        return subprocess.run(
            [sys.executable, str(file), *arguments],
            env={**os.environ, "DUALWRITE_FAILPOINT": failpoint},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("failpoint", "outcome"),
    [
        ("write.prepared:2", ["first"]),  # between prepare and decision
        pytest.param("write.recorded:2", ["first"], marks=pytest.mark.thorough),
        ("write.decided:2", ["first", "second"]),  # between decision and completion
    ],
)
def test_a_process_that_is_killed_leaves_both_sides_or_neither(site, manage, there, failpoint, outcome):
    died = manage("place", failpoint=failpoint)
    assert died.returncode == -signal.SIGKILL, died.stderr
    settled = manage("dualwrite", "recover", "--all", "--open-for", "0", "--json")
    assert settled.returncode == 0, settled.stderr
    assert there() == (outcome, outcome)


def test_a_process_that_ends_closes_its_writer(manage, there, engine, kafka):
    ended = manage("place")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert there() == (["first", "second"],) * 2
    assert not any(row.needs_recovery for row in status(kafka=kafka, database=engine))
    with engine.connect() as made:  # the lease is given back
        assert made.scalar(text("SELECT count(*) FROM dualwrite_lease WHERE lease_until > now()")) == 0


@pytest.fixture
def empty(url, dualwrite_database, kafka):
    """A site whose database has no tables yet."""
    with (
        using({"default": database(dualwrite_database)}) as found,
        override_settings(DUALWRITE={"default": {"FLEET": "shop", "KAFKA": kafka}}),
    ):
        yield found["default"]
        writers.close()


CATALOG = """
    SELECT 'column', table_name, column_name, data_type || is_nullable || coalesce(column_default, '') || coalesce(collation_name, '')
    FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'django_migrations'
    UNION ALL SELECT 'index', tablename, indexname, indexdef FROM pg_indexes
    WHERE schemaname = 'public' AND tablename <> 'django_migrations'
    UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'django_migrations'
    UNION ALL SELECT 'view', viewname, '', definition FROM pg_views WHERE schemaname = 'public'
    ORDER BY 1, 2, 3
"""


def catalog(url):
    made = create_engine(url)
    with made.connect() as found:
        rows = [tuple(row) for row in found.execute(text(CATALOG))]
        version = list(found.scalars(text("SELECT version_num FROM dualwrite_version"))) if rows else []
    made.dispose()
    return rows, version


def migrate(*arguments):
    call_command("migrate", "dualwrite", *arguments, verbosity=0)


def test_djangos_migrations_make_the_tables_that_the_librarys_own_make(empty, dualwrite_database, url):
    migrate()
    assert catalog(dualwrite_database) == catalog(url)
    migrate()
    migrate("zero")
    assert {table for _, table, _, _ in catalog(dualwrite_database)[0]} == {"dualwrite_version"}
    assert catalog(dualwrite_database)[1] == []
    migrate()
    assert catalog(dualwrite_database) == catalog(url)


def test_the_last_of_djangos_migrations_reaches_the_librarys_newest_revision(url):
    """A release with a new revision needs another file in dualwrite/django/migrations."""
    names = sorted(found.name for found in pkgutil.iter_modules(import_module("dualwrite.django.migrations").__path__))
    steps = [import_module(f"dualwrite.django.migrations.{name}").Migration for name in names]
    reached = [operation for step in steps for operation in step.operations]
    assert reached[-1].revision == SCHEMA_REVISION
    assert [one.before for one in reached] == ["base", *(one.revision for one in reached[:-1])]


def test_tables_that_are_there_are_taken_over(site, url, there, put):
    before = catalog(url)
    migrate()
    assert catalog(url) == before
    with transaction.atomic():
        put("tea")
    assert there() == (["tea"],) * 2


def test_a_migration_that_fails_leaves_nothing(empty, dualwrite_database, monkeypatch):
    failing = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr("dualwrite.migrations.MigrationContext.run_migrations", failing)
    with pytest.raises(ZeroDivisionError):
        migrate()
    monkeypatch.undo()
    with connection.cursor() as cursor:
        assert connection.introspection.table_names(cursor) == ["django_migrations"]
    migrate()
    assert catalog(dualwrite_database)[1] == [SCHEMA_REVISION]


def test_only_databases_that_have_a_writer_get_tables(empty, dualwrite_database):
    with override_settings(DUALWRITE={}):
        migrate()
    assert connection.introspection.table_names() == ["django_migrations"]
    call_command("dualwrite", "migrate", stdout=StringIO())  # a writer came later
    assert catalog(dualwrite_database)[1] == [SCHEMA_REVISION]
