"""Forgetting, on SQLite and a simulated Kafka: an id goes only when nothing can come of it any more."""

import pytest
from harness.databases import age, prepared
from harness.served import SETTINGS, TOPIC, ServedKafka

from dualwrite import ConfigurationError, Fenced, Unavailable, WriterLimits, failpoints
from dualwrite.protocol.values import Outcome
from dualwrite.recovery import recover
from dualwrite.recovery.operator import forget
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.ledger import Runs

DAY_S = 86400.0


def write(writer, number):
    with writer.transaction() as tx:
        tx.connection.exec_driver_sql(f"INSERT INTO orders (id) VALUES ({number})")
        tx.produce(TOPIC, str(number), partition=0)


@pytest.fixture
def names(shop):
    return lambda: [name for (name,) in shop.database.query("SELECT transactional_id FROM kafka_transaction_state")]


@pytest.fixture
def call(shop):
    return lambda *args, **kwargs: forget(*args, kafka=SETTINGS, database=shop.engine, **kwargs)


@pytest.fixture
def old(shop):
    """``payments``, with two lanes, was last used 40 days ago."""
    with shop.writer("payments") as writer:
        write(writer, 1)
    age(shop.engine)


def test_a_writer_that_is_unused_for_so_long_goes_with_its_lanes_and_its_name_may_be_used_again(shop, names, old, call):
    del old
    planned = call("payments", dry_run=True)
    assert planned.forgotten == ["payments", "payments#1", "payments#2"]
    assert len(names()) == 3, "a dry run deletes nothing"
    assert call("payments") == planned
    assert names() == []
    with shop.writer("payments") as writer:
        write(writer, 2)
    assert shop.both_have(1, 2)


@pytest.mark.usefixtures("old")
def test_a_writer_that_was_used_since_stays_and_the_report_says_when(call):
    report = call("payments", untouched_for_s=50 * DAY_S)
    assert report.forgotten == []
    assert report.kept == dict.fromkeys(["payments", "payments#1", "payments#2"], "used 40.0 days ago")


@pytest.mark.usefixtures("old")
def test_a_lane_stays_with_another_one_of_its_writer_that_stays(shop, call):
    shop.database.execute(
        "UPDATE kafka_transaction_state SET updated_at = CURRENT_TIMESTAMP || '.000000'"
        " WHERE transactional_id = 'payments#1'"
    )
    stays = "another id of its writer stays"
    assert call().kept == {"payments": stays, "payments#1": "used 0.0 days ago", "payments#2": stays}


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(("chosen", "gone"), [({"prefix": "pay"}, True), ({"prefix": "ord"}, False), ({}, True)])
def test_only_ids_that_were_asked_for_go(call, chosen, gone):
    assert bool(call(**chosen).forgotten) is gone


@pytest.mark.usefixtures("old")
def test_a_writer_whose_name_begins_alike_is_another_one(call):
    assert call("pay").forgotten == []


def test_one_id_and_a_prefix_exclude_each_other(call):
    with pytest.raises(TypeError, match="cannot be combined"):
        call("orders", prefix="o")


def test_what_the_database_has_decided_and_kafka_has_not_committed_stays(shop, call):
    reports = []

    def look(point):
        if point == "write.decided":
            reports.append(call(untouched_for_s=0.0, dry_run=True))

    with shop.writer(limits=WriterLimits(max_lanes=1)) as writer, failpoints.watched(look):
        write(writer, 1)
    [report] = reports
    assert (report.forgotten, report.unsettled) == ([], ["orders"])
    assert "recover" in report.kept["orders"]


def test_an_open_writer_that_is_idle_for_so_long_is_fenced_and_tears_nothing(shop, call):
    with shop.writer(limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, 1)
        age(shop.engine)
        assert call("orders").forgotten == ["orders"]
        with pytest.raises(Fenced):
            write(writer, 2)
    assert shop.both_have(1)


def test_a_writer_that_writes_meanwhile_stays(shop, call, monkeypatch):
    with shop.writer(limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, 1)
        age(shop.engine)
        real = recover.status

        def status(*args, **kwargs):
            found = real(*args, **kwargs)
            write(writer, 2)
            return found

        monkeypatch.setattr(recover, "status", status)
        assert call("orders").kept == {"orders": "used just now"}
        write(writer, 3)
    assert shop.both_have(1, 2, 3)


@pytest.mark.usefixtures("old")
def test_a_loss_that_nobody_has_acknowledged_keeps_its_id_and_goes_long_after_it_was(shop, call):
    store = shop.database.store(shop.engine)
    [row] = store.read(["payments"])
    state = prepared(row.incarnation)
    store.record_outcomes([(row.__class__(**{**vars(row), "prepared": state}), Outcome.LOST, "lost")])
    assert "nobody has acknowledged" in call().kept["payments"]
    store.acknowledge("payments", state)
    assert call().incidents == 0, "it was acknowledged just now"
    age(shop.engine)
    assert call(dry_run=True).incidents == call().incidents == 1
    assert store.incidents(acknowledged=True) == []


def test_a_slot_that_a_worker_holds_stays(shop, names, call):
    pool, store = SlotPool(shop.engine, "pool"), shop.database.store(shop.engine)
    held = pool.lease("worker 1", 600)
    store.claim([held.transactional_id], owner="worker 1", cluster_id=ServedKafka().broker.cluster_id)
    age(shop.engine)
    assert call().kept == {held.transactional_id: "a worker holds it"}
    pool.release({held.transactional_id: held.owner})
    assert call().forgotten == [held.transactional_id]
    assert names() == []


def test_runs_of_the_last_day_stay_whatever_was_asked_for(shop, call):
    """A run gives no sign of life before its tasks write: its job would fail."""
    Runs(shop.engine).replace("flights", "2013-01-01")
    age(shop.engine, days=0.9)
    assert call(untouched_for_s=0.0).runs == 0
    age(shop.engine, days=1.1)
    assert call(untouched_for_s=0.0, dry_run=True).runs == 1
    assert call(untouched_for_s=0.0).runs == 1
    assert call(untouched_for_s=0.0).runs == 0


@pytest.mark.usefixtures("old")
def test_nothing_goes_while_kafka_does_not_answer(shop, names, call, monkeypatch):
    def away(*_args, **_kwargs):
        raise Unavailable("away")

    monkeypatch.setattr(recover, "status", away)
    with pytest.raises(Unavailable):
        call()
    assert len(names()) == 3


def test_a_database_without_the_tables_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="migrate"):
        forget(kafka=SETTINGS, database=f"sqlite:///{tmp_path / 'empty.db'}")
