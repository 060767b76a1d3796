"""What a connection is asked once, or only after a while: whether its server is a primary, and whether it is there."""

import pytest
from harness.pgbouncer import NEEDS_PGBOUNCER, PgBouncer
from sqlalchemy import create_engine, event, exc, text

from dualwrite.stores.sql import access
from dualwrite.stores.sql.access import ping_idle_connections
from dualwrite.stores.sql.store import SqlStateStore

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


def asked_in_two_reads(url):
    """How often two reads on one connection ask whether it leads to a standby."""
    engine, asked = create_engine(url), []

    def note(_connection, _cursor, statement, *_):
        asked.append("pg_is_in_recovery" in statement)

    event.listen(engine, "before_cursor_execute", note)
    store = SqlStateStore(engine)
    for _ in range(2):
        assert store.read(["orders"]) == []
    engine.dispose()
    return sum(asked)


def test_a_connection_is_asked_once_whether_its_server_is_a_primary(url):
    assert asked_in_two_reads(url) == 1


@NEEDS_PGBOUNCER
def test_a_pooler_may_lead_each_transaction_to_another_server(url, tmp_path):
    with PgBouncer(tmp_path, url) as bouncer:
        assert asked_in_two_reads(bouncer.url) == 2


def use(engine):
    with engine.connect() as connection:
        return connection.scalar(text("SELECT pg_backend_pid()"))


@pytest.mark.parametrize("idle", [True, False])
def test_a_lost_connection_is_replaced_if_it_was_idle(engine, engine_of, url, monkeypatch, idle):
    monkeypatch.setattr(access, "_IDLE_S", 0.0 if idle else 3600.0)
    pooled = engine_of(url)
    ping_idle_connections(pooled)
    first = use(pooled)
    assert use(pooled) == first
    with engine.connect() as other:
        other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": first})
    if idle:
        assert use(pooled) != first
        return
    with pytest.raises(exc.OperationalError):
        use(pooled)
