"""``dualwrite forget``: what goes, what stays and why, on real servers."""

import json

import pytest
from click.testing import CliRunner
from harness.checker import Case
from harness.databases import age
from harness.orders import on_both, write
from sqlalchemy import make_url, text

from dualwrite import ConfigurationError, DualWriter, WriterLimits, recover
from dualwrite.cli.options import commands
from dualwrite.operations import forget
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.ledger import Runs
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed

MONTH_S = 30 * 86400.0


def names(engine):
    return [row.transactional_id for row in SqlStateStore(engine).find("")]


@on_both
def test_a_writer_that_never_comes_back_is_forgotten_and_its_name_may_be_used_again(
    kafka, engine, url, orders, dualwrite_topic
):
    with DualWriter("orders", kafka=kafka, database=engine) as writer:
        write(writer, dualwrite_topic, orders, 1)
    assert names(engine) == ["orders", "orders#1", "orders#2"]
    assert forget("orders", kafka=kafka, database=engine).kept.keys() == {"orders", "orders#1", "orders#2"}, (
        "it is young"
    )
    age(engine)
    assert forget("orders", kafka=kafka, database=url, dry_run=True).forgotten == ["orders", "orders#1", "orders#2"]
    assert names(engine) == ["orders", "orders#1", "orders#2"], "a dry run deletes nothing"
    assert forget("orders", kafka=kafka, database=url).forgotten == ["orders", "orders#1", "orders#2"]
    assert names(engine) == []
    with DualWriter("orders", kafka=kafka, database=engine) as writer:
        write(writer, dualwrite_topic, orders, 2)
    assert sorted(record.value for record in read_committed(kafka, dualwrite_topic)) == [b"1", b"2"]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_what_is_unsettled_stays_until_it_is_recovered(tmp_path, kafka, engine, url, dualwrite_topic):
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint="write.decided:2", killed=True)
    age(engine)
    report = forget(kafka=kafka, database=engine)
    assert report.forgotten == []
    assert "recover" in report.kept["case"]
    assert report.unsettled == ["case"]
    recover(kafka=kafka, database=engine, open_for_s=0)
    age(engine)
    assert forget(kafka=kafka, database=engine).kept == {}
    assert {record.value for record in read_committed(kafka, dualwrite_topic)}


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_incidents_go_when_they_were_acknowledged_long_ago_and_slots_when_nobody_holds_them(kafka, engine, url):
    store = SqlStateStore(engine)
    cluster_id = None
    with DualWriter("probe", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)):
        cluster_id = store.read(["probe"])[0].cluster_id
    with engine.begin() as connection:
        for name, acknowledged in (("orders", "now()"), ("untold", "NULL")):
            connection.execute(
                text(
                    "INSERT INTO dualwrite_incident (transactional_id, state_sha256, prepared_transaction_state, outcome, "
                    f"detail, acknowledged_at) VALUES ('{name}', 'x', '', 'lost', 'd', {acknowledged})"
                )
            )
    store.claim(["untold"], owner="test", cluster_id=cluster_id)
    pool = SlotPool(engine, "pool")
    held = pool.lease("worker 1", 600)
    store.claim([held.transactional_id], owner="test", cluster_id=cluster_id)
    age(engine)
    report = forget(kafka=kafka, database=url)
    assert report.incidents == 1
    assert report.forgotten == ["probe"]
    assert set(report.kept) == {"pool#1", "untold"}
    pool.release({held.transactional_id: held.owner})
    free = forget(prefix="pool", kafka=kafka, database=url)
    assert free.forgotten == ["pool#1"]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM dualwrite_slot")) == 0
        assert connection.scalar(text("SELECT string_agg(transactional_id, ' ') FROM dualwrite_incident")) == "untold"


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_the_command_shows_what_it_does_and_names_the_grant_that_it_needs(kafka, engine, url):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)):
        pass
    Runs(engine).replace("flights", "2013-01-01")
    age(engine)

    def run(*arguments, at=url):
        return CliRunner().invoke(
            commands, ["forget", *arguments, "--url", at, "--bootstrap-server", kafka["bootstrap.servers"]]
        )

    assert run().exit_code == 2
    dry = run("--all", "--dry-run")
    assert (dry.exit_code, "orders: would be forgotten" in dry.output) == (0, True), dry.output
    role = "clerk_" + make_url(url).database.rpartition("_")[2]
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'clerk'"))
        connection.execute(text(f"GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}"))
    as_clerk = make_url(url).set(username=role, password="clerk").render_as_string(hide_password=False)
    with pytest.raises(
        ConfigurationError, match=f'GRANT SELECT, DELETE ON .*dualwrite_incident.* TO "{role}"'
    ) as caught:
        forget("orders", kafka=kafka, database=as_clerk)
    grant = caught.value.next_step.partition(": ")[2]
    with engine.begin() as connection:
        connection.execute(text(grant))
    done = run("--all", "--json", at=as_clerk)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"forgotten": ["orders"], "kept": {}, "incidents": 0, "runs": 1, "actions": 0}
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))
