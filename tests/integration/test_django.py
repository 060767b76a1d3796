"""A block on Django's own connection, as docs/sessions.md shows it: Django's marks decide, and its hooks come after both sides."""

from contextlib import suppress
from functools import cache

import psycopg
import pytest
from django.core.exceptions import ValidationError
from django.core.handlers.base import BaseHandler
from django.db import connection, connections, models, transaction
from django.db.utils import OperationalError
from harness.django_site import database, using
from harness.orders import on_postgresql
from harness.page_examples import Base, example, run_example
from sqlalchemy import create_engine, text

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    DualWriter,
    TransactionAborted,
    WriterLimits,
    failpoints,
)
from dualwrite.errors import IllegalStateError, OutcomeUnverifiable
from dualwrite.failpoints import FailpointError
from dualwrite.protocol.lives import WriteState
from dualwrite.testing import InMemoryWriter
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import PostgresProxy
from dualwrite.writing.lane import Lane

pytestmark = on_postgresql


@pytest.fixture
def there(engine, kafka, dualwrite_topic):
    """Both sides: the items of the rows, and the messages."""
    Base.metadata.create_all(engine)

    def read():
        messages = sorted(message.value.decode() for message in read_committed(kafka, dualwrite_topic))
        with engine.connect() as connection:
            return sorted(connection.scalars(text("SELECT item FROM items"))), messages

    return read


@pytest.fixture
def django(url, engine, tmp_path):
    """Django's default connection leads to this database."""
    databases = {
        "default": database(url),
        "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "lite.db")},
    }
    with using(databases):
        yield connections["default"]


@pytest.fixture
def put(django, dualwrite_topic):
    """Adds a row and a message."""

    def put(tx, item):
        with django.cursor() as cursor:
            cursor.execute("INSERT INTO items (item) VALUES (%s)", [item])
        tx.produce(dualwrite_topic, item)

    return put


def test_the_examples_of_django(django, there, writer, dualwrite_topic):
    names = run_example(example("sessions.md", "Django")[0], dualwrite_topic, writer=writer)
    assert there() == (["tea"], ["tea"])
    run_example(example("sessions.md", "Django")[1], dualwrite_topic, **names)
    assert there() == (["coffee", "tea"], ["coffee", "tea"])


def test_an_error_aborts_both_sides_and_an_inner_savepoint_takes_its_messages_along(django, there, writer, put):
    with pytest.raises(ZeroDivisionError), writer.transaction(connection) as tx:
        put(tx, "milk")
        raise ZeroDivisionError
    with writer.transaction(connection) as tx, suppress(KeyError), transaction.atomic():
        put(tx, "water")
        raise KeyError
    failpoints.arm("write.recorded:1:raise")
    with pytest.raises(FailpointError), writer.transaction(connection) as tx:
        put(tx, "juice")
    failpoints.arm("")
    with writer.transaction(connection) as tx:
        put(tx, "soup")
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            raise ZeroDivisionError
    assert django.get_autocommit()
    assert there() == (["soup"], ["soup"])


def test_messages_of_a_block_wait_without_those_of_a_savepoint_that_was_rolled_back(
    django, there, kafka, engine, put, dualwrite_topic
):
    done = []
    with DualWriter("orders", kafka=kafka, database=engine, outbox="fallback") as writer:
        with writer.transaction(connection, outbox="always") as tx:
            put(tx, "soup")
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                put(tx, "milk")
                raise ZeroDivisionError
            with transaction.atomic():
                put(tx, "tea")
            transaction.on_commit(lambda: done.append(tx.outbox))
        assert done == [True]
        with writer.transaction(connection, outbox="always") as tx:
            put(tx, "water")
            transaction.set_rollback(True)
        assert django.get_autocommit()
    assert there() == (["soup", "tea"], ["soup", "tea"])


@cache
def model():
    """A model of Django's; its settings must be there."""

    class Item(models.Model):  # noqa: DJ008 - nobody reads it
        item = models.DecimalField(max_digits=5, decimal_places=2)

        class Meta:
            app_label = "shop"
            db_table = "items"

    return Item


def mark():
    transaction.set_rollback(True)


def mark_as_rest_framework_does():
    for found in connections.all():
        if found.settings_dict["ATOMIC_REQUESTS"] and found.in_atomic_block:
            found.set_rollback(True)


def fail_without_a_savepoint():
    with suppress(ZeroDivisionError), transaction.atomic(savepoint=False):
        raise ZeroDivisionError


def fail_to_save():
    with suppress(ValidationError):
        model()(item="no number").save()


@pytest.mark.parametrize("marks", [mark, mark_as_rest_framework_does, fail_without_a_savepoint, fail_to_save])
def test_what_django_marks_for_rollback_is_on_neither_side(django, there, writer, put, marks):
    """As in a plain ``atomic()``, that is no error."""
    django.settings_dict["ATOMIC_REQUESTS"] = True
    hooks = []

    def work(tx):
        put(tx, "tea")
        transaction.on_commit(lambda: hooks.append("run"))
        marks()
        return tx

    with writer.transaction(connection) as tx:
        work(tx)
    assert tx.state is WriteState.ABORTED
    assert writer.run(work, connection=connection).state is WriteState.ABORTED
    assert (hooks, there()) == ([], ([], []))
    with writer.transaction(connection) as tx:
        put(tx, "soup")
        marks()
        transaction.set_rollback(False)  # the caller has put it right
    assert there() == (["soup"], ["soup"])


def test_djangos_marks_and_hooks_count_in_memory_too(django, there, engine, put):
    hooks = []
    with InMemoryWriter("orders", database=engine) as writer:
        for item in ("tea", "soup"):
            with writer.transaction(connection) as tx:
                put(tx, item)
                transaction.on_commit(lambda item=item: hooks.append(item))
                transaction.set_rollback(item == "tea")
        assert [message.value for message in writer.messages] == [b"soup"]
    assert hooks == there()[0] == ["soup"]


def test_a_connection_that_is_closed_in_the_block_aborts_both_sides(django, there, writer, put):
    with pytest.raises(DualWriteError), writer.transaction(connection) as tx:
        put(tx, "tea")
        connection.close()
    with writer.transaction(connection) as tx:
        put(tx, "soup")
    assert there() == (["soup"], ["soup"])


def test_hooks_run_once_both_sides_have_committed_and_what_they_raise_is_raised(django, there, writer, put):
    seen = []

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), writer.transaction(connection) as tx:
        put(tx, "tea")
        transaction.on_commit(fail, robust=True)
        transaction.on_commit(lambda: seen.append(there()))
        with suppress(LookupError), transaction.atomic():
            transaction.on_commit(lambda: seen.append("of a savepoint that was rolled back"))
            raise LookupError
        transaction.on_commit(fail)
        assert not seen
    assert seen == [(["tea"], ["tea"])]


@pytest.mark.parametrize("error", [CompletionPending, DecidedTransactionLost, OutcomeUnverifiable])
def test_hooks_run_after_an_error_that_came_after_the_decision(django, there, writer, put, monkeypatch, error):
    hooks = []

    def fail(*_):
        raise error("Kafka does not answer")

    monkeypatch.setattr(Lane, "complete", fail)
    with pytest.raises(error, match="does not answer"), writer.transaction(connection) as tx:
        put(tx, "tea")
        transaction.on_commit(lambda: hooks.append("run"))
    monkeypatch.undo()
    assert hooks == ["run"]
    assert django.get_autocommit()
    with pytest.raises(error, match="of another writer"), writer.transaction(connection) as tx:
        put(tx, "soup")
        transaction.on_commit(lambda: hooks.append("run, though aborted"))
        raise error("of another writer")
    assert hooks == ["run"]
    assert there() == (["tea"], ["tea"])


def test_hooks_of_an_attempt_that_was_aborted_do_not_run(django, there, writer, put):
    left, hooks = [OperationalError("deadlock detected")], []
    left[0].__cause__ = psycopg.errors.DeadlockDetected("deadlock detected")

    def work(tx):
        put(tx, "cocoa")
        transaction.on_commit(lambda: hooks.append("run"))
        if left:
            raise left.pop()

    writer.run(work, connection=django)
    assert (hooks, there()) == (["run"], (["cocoa"], ["cocoa"]))


def test_a_block_inside_atomic_is_refused_and_a_view_says_that_its_requests_are_not_atomic(django, there, writer, put):
    def view(item):
        with writer.transaction(connection) as tx:
            put(tx, item)

    connections.settings["default"]["ATOMIC_REQUESTS"] = True
    with pytest.raises(IllegalStateError, match="already inside atomic.*non_atomic_requests"):
        BaseHandler().make_view_atomic(view)("tea")
    BaseHandler().make_view_atomic(transaction.non_atomic_requests(view))("soup")
    assert there() == (["soup"], ["soup"])


@pytest.mark.usefixtures("django")
def test_a_connection_to_another_kind_of_database_is_refused(there, writer):
    with pytest.raises(ConfigurationError, match="one of sqlite3"), writer.transaction(connections["lite"]):
        pytest.fail("begun")
    assert connections["lite"].get_autocommit()
    assert there() == ([], [])


@pytest.mark.parametrize(("fault", "outcome"), [("reset_answer", ["tea"]), ("reset_request", [])])
def test_a_commit_that_is_not_answered_is_resolved_and_its_hooks_run_if_it_has_committed(
    django, there, dualwrite_postgres, url, kafka, put, fault, outcome
):
    hooks = []
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        django.close()
        django.settings_dict.update(HOST=through.url.host, PORT=through.url.port)
        with (
            DualWriter("others", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer,
            suppress(TransactionAborted),
            writer.transaction(connection) as tx,
        ):
            put(tx, "tea")
            transaction.on_commit(lambda: hooks.append("tea"))
            getattr(proxy.on("COMMIT"), fault)()
        connection.close()
        through.dispose()
    assert hooks == outcome
    assert (tx.state is WriteState.COMPLETED) == bool(outcome)
    assert there() == (outcome, outcome)


@pytest.mark.parametrize("failing", ["hook", "connect"])
def test_the_outcome_is_told_whatever_fails_in_django_after_it(django, there, writer, put, monkeypatch, failing):
    def fail(*_):
        raise CompletionPending("Kafka does not answer")

    def refuse(*_):
        raise OperationalError("no server")

    monkeypatch.setattr(Lane, "complete", fail)
    with pytest.raises(CompletionPending), writer.transaction(connection) as tx:
        put(tx, "tea")
        if failing == "hook":
            transaction.on_commit(refuse)
        else:
            monkeypatch.setattr(django, "connect", refuse)
    monkeypatch.undo()
    django.close()
    assert there() == (["tea"], ["tea"])
