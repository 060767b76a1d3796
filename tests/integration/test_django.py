"""Django's own connection inside ``atomic()``, as docs/sessions.md shows it: its commit and its hooks come after both sides."""

from contextlib import suppress

import psycopg
import pytest
from django.apps import apps
from django.conf import settings
from django.db.utils import OperationalError
from harness.orders import on_postgresql
from harness.page_examples import Base, example, run_example
from sqlalchemy import text

from dualwrite import TransactionAborted
from dualwrite.runtime import failpoints
from dualwrite.runtime.failpoints import FailpointError
from dualwrite.testing.reading import read_committed

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
def django(url, engine):
    """Django's default connection leads to this database."""
    from django.db import connections

    found = engine.url
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": found.database,
        "USER": found.username,
        "PASSWORD": found.password,
        "HOST": found.host or found.query["host"],
        "PORT": found.port or found.query.get("port", ""),
    }
    if not settings.configured:
        settings.configure(DATABASES={"default": database})
        apps.populate(settings.INSTALLED_APPS)
    connections.settings = connections.configure_settings({"default": database})
    if hasattr(connections._connections, "default"):
        del connections["default"]
    yield connections["default"]
    connections.close_all()


def test_the_example_of_django(django, there, writer, dualwrite_topic):
    names = run_example(example("sessions.md", "Django")[0], dualwrite_topic, writer=writer)
    assert there() == (["tea"], ["tea"])
    run_example(example("sessions.md", "Django")[1], dualwrite_topic, **names)
    assert there() == (["coffee", "tea"], ["coffee", "tea"])
    dual_write, transaction = names["dual_write"], names["transaction"]

    def put(tx, item):
        with django.cursor() as cursor:
            cursor.execute("INSERT INTO items (item) VALUES (%s)", [item])
        tx.produce(dualwrite_topic, item)

    hooks = []
    with dual_write() as tx:
        put(tx, "soup")
        transaction.on_commit(lambda: hooks.append(there()))
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            raise ZeroDivisionError
        assert not hooks
    assert hooks == [(["coffee", "soup", "tea"], ["coffee", "soup", "tea"])]
    with pytest.raises(ZeroDivisionError), dual_write() as tx:
        put(tx, "milk")
        raise ZeroDivisionError
    with pytest.raises(TransactionAborted, match="rolled back"), dual_write() as tx, suppress(ZeroDivisionError):  # noqa: SIM117
        with transaction.atomic():
            put(tx, "water")
            raise ZeroDivisionError
    failpoints.arm("write.recorded:1:raise")
    with pytest.raises(FailpointError), dual_write() as tx:
        put(tx, "juice")
    failpoints.arm("")
    left = [OperationalError("deadlock detected")]
    left[0].__cause__ = psycopg.errors.DeadlockDetected("deadlock detected")

    def work(tx):
        put(tx, "cocoa")
        if left:
            raise left.pop()

    with transaction.atomic(durable=True):
        writer.run(work, connection=django.connection)
    assert there() == (["cocoa", "coffee", "soup", "tea"], ["cocoa", "coffee", "soup", "tea"])
