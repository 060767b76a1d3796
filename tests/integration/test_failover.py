"""The primary dies during COMMIT, and a standby takes its place: the writer resolves its doubt there."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from harness.orders import Base, Order, write
from harness.patience import PATIENCE_S, wait_until
from harness.relay import Relay
from harness.standby import StandbyPostgres
from sqlalchemy import create_engine, make_url, select

from dualwrite import DualWriter, TransactionAborted, WriterLimits
from dualwrite.migrations import upgrade
from dualwrite.testing import EmbeddedPostgres, read_committed


def query(server, statement, database=None):
    with psycopg.connect(server.dsn_of(database), autocommit=True) as connection:
        return connection.execute(statement).fetchall()


@pytest.fixture
def primary():
    with EmbeddedPostgres({"wal_level": "replica"}) as server:
        yield server


@pytest.fixture
def url(primary):
    made = primary.create_database("shop")
    engine = create_engine(made)
    with engine.connect() as connection:
        upgrade(connection)
    Base.metadata.create_all(engine)
    engine.dispose()
    return made


@pytest.fixture
def standby(primary, url):
    """Synchronous: no COMMIT of the primary is answered without it."""
    with StandbyPostgres(primary) as server:
        with psycopg.connect(primary.dsn, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: query(primary, "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))
        yield server


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("replicated", [True, False], ids=["which the standby has", "which the standby lacks"])
def test_a_commit_under_which_the_primary_dies_is_resolved_on_the_standby(
    kafka, primary, standby, url, dualwrite_topic, orders, replicated
):
    relay = Relay(primary.port)
    through = make_url(url).set(port=relay.port).render_as_string(hide_password=False)
    with (
        DualWriter(
            "orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1, timeout_s=PATIENCE_S)
        ) as writer,
        ThreadPoolExecutor(1) as thread,
    ):
        write(writer, dualwrite_topic, orders, 1)
        standby.suspend()  # its kernel still takes what the primary sends
        if not replicated:
            query(primary, "SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        under_way = thread.submit(write, writer, dualwrite_topic, orders, 2)
        wait_until(lambda: query(primary, "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"))
        if replicated:
            wait_until(
                lambda: query(primary, "SELECT 1 FROM pg_stat_replication WHERE sent_lsn >= pg_current_wal_flush_lsn()")
            )
        primary.kill()
        standby.resume()
        wait_until(lambda: query(standby, "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_wal_receiver)"))
        query(standby, "SELECT pg_promote()")
        relay.join(standby.port)
        if replicated:
            under_way.result(PATIENCE_S)
        else:
            with pytest.raises(TransactionAborted):
                under_way.result(PATIENCE_S)
        write(writer, dualwrite_topic, orders, 3)
    relay.close()
    expected = [1, 2, 3] if replicated else [1, 3]
    assert sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic)) == expected
    engine = create_engine(standby.url_of("shop"))
    with engine.connect() as connection:
        assert sorted(connection.scalars(select(Order.id))) == expected
    engine.dispose()
