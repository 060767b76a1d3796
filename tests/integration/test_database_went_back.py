"""A database that loses its last commits while its owner lives, as after an asynchronous failover, is found out."""

import secrets

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from harness.orders import on_both, write
from sqlalchemy import create_engine, insert

from dualwrite import ConfigurationError, DualWriter, WriterLimits, failpoints, recover
from dualwrite.cli.options import commands
from dualwrite.errors import DatabaseWentBack
from dualwrite.protocol import settle
from dualwrite.protocol.values import Outcome, TransactionStatus
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed
from dualwrite.writing.lane_pool import Lanes


@on_both
def test_the_next_dual_write_of_the_same_owner_is_refused_and_an_incident_is_recorded(
    kafka, engine, dualwrite_topic, orders, backup
):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, dualwrite_topic, orders, 1)
        restore = backup()
        write(writer, dualwrite_topic, orders, 2)
        forgotten = writer._lanes.first.row.prepared
        restore()
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="gone back in time"):
                write(writer, dualwrite_topic, orders, 3)
        [incident] = SqlStateStore(engine).incidents("orders")
        assert incident.prepared_transaction_state == str(forgotten)
        assert "gone back in time" in incident.detail
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as second:
        write(second, dualwrite_topic, orders, 4)
    assert sorted(int(record.value) for record in read_committed(kafka, dualwrite_topic)) == [1, 2, 4]


@pytest.fixture
def renewed_by_blocks(monkeypatch):
    """The next block renews a lane, not the background."""
    monkeypatch.setattr(Lanes, "_choose_due", lambda *_: None)


@pytest.mark.usefixtures("renewed_by_blocks")
def test_a_renewed_lane_finds_it_out_and_the_block_that_renews_it_runs(
    kafka, engine, dualwrite_topic, orders, backup, both
):
    told = []
    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1), on_loss=told.append
    ) as writer:
        write(writer, dualwrite_topic, orders, 1)
        restore = backup()
        write(writer, dualwrite_topic, orders, 2)
        forgotten = writer._lanes.first.row.prepared
        with pytest.raises(LookupError), writer.transaction() as tx:
            tx._dual_write._lane.producer._instance.doubt("for the test")
            tx.connection.rollback()
            restore()
            raise LookupError
        write(writer, dualwrite_topic, orders, 3)
    [loss] = told
    assert isinstance(loss, DatabaseWentBack)
    [incident] = SqlStateStore(engine).incidents("orders")
    assert incident.prepared_transaction_state == loss.state == str(forgotten)
    assert incident.reported_at is not None
    assert both()[1] == [1, 2, 3]


@pytest.mark.usefixtures("renewed_by_blocks")
def test_a_decision_that_is_lost_before_kafka_has_answered_is_raised_to_its_own_block(
    kafka, engine, dualwrite_topic, orders, backup
):
    told = []
    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1), on_loss=told.append
    ) as writer:
        write(writer, dualwrite_topic, orders, 1)
        restore = backup()

        def fail_over(name):
            if name == "write.decided":
                writer._lanes.first.producer._instance.doubt("for the test")
                restore()

        with failpoints.watched(fail_over), pytest.raises(DatabaseWentBack) as caught:
            write(writer, dualwrite_topic, orders, 2)
        assert caught.value.outcome == "unknown"
        write(writer, dualwrite_topic, orders, 3)
    [incident] = SqlStateStore(engine).incidents("orders")
    assert incident.prepared_transaction_state == caught.value.state
    assert incident.reported_at is not None
    assert told == []


def test_a_row_that_lost_the_claim_of_its_living_owner_is_no_other_owner(
    kafka, engine, orders, dualwrite_topic, backup
):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, dualwrite_topic, orders, 1)
    restore = backup()
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        restore()  # to the owner this is the same as a copy that claims beside it
        with pytest.raises(
            ConfigurationError, match=r"gone back in time .*or a copy of it is in use.*stop what uses a copy"
        ):
            write(writer, dualwrite_topic, orders, 2)


def test_what_others_record_about_the_row_is_no_sign_of_it(kafka, engine, url, dualwrite_topic, orders):
    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, idle_after_s=0.01)
    ) as writer:
        write(writer, dualwrite_topic, orders, 1)
        own = create_engine(url)
        while SqlStateStore(own).read(["orders"])[0].completed is None:
            pass
        own.dispose()
        write(writer, dualwrite_topic, orders, 2)
        with writer.transaction() as tx:
            tx.connection.execute(insert(orders).values(id=3))
        with pytest.raises(LookupError), writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="no", partition=0)
            raise LookupError
        write(writer, dualwrite_topic, orders, 4)
    assert SqlStateStore(engine).incidents("orders") == []


def test_the_idle_owner_and_its_closing_find_it_out(kafka, engine, dualwrite_topic, orders, backup):
    writer = DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))
    writer.open()
    write(writer, dualwrite_topic, orders, 1)
    restore = backup()
    write(writer, dualwrite_topic, orders, 2)
    forgotten = writer._lanes.first.row.prepared
    restore()
    with pytest.raises(DatabaseWentBack, match="gone back in time"):
        writer.close()
    [incident] = SqlStateStore(engine).incidents("orders")
    assert incident.prepared_transaction_state == str(forgotten)
    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)
    ) as second:  # it is recorded
        write(second, dualwrite_topic, orders, 4)


def test_an_idle_owner_finds_it_out_with_no_write_of_its_own(kafka, engine, url, dualwrite_topic, orders, backup):
    with (
        pytest.raises(DatabaseWentBack),
        DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer,
    ):
        writer._lanes._idle_after_s = 3600.0
        write(writer, dualwrite_topic, orders, 1)
        restore = backup()
        write(writer, dualwrite_topic, orders, 2)
        restore()
        own = create_engine(url)
        writer._lanes._idle_after_s = 0.0
        writer._lanes._look.put(None)
        while not SqlStateStore(own).incidents("orders"):
            pass
        own.dispose()


@pytest.mark.parametrize("place", ["same partition", "other partition", "aborted since"])
def test_the_next_owner_finds_out_what_the_database_has_lost_of_the_last_ones(
    kafka, engine, dualwrite_topic, orders, backup, place, monkeypatch
):
    """No claim was lost: the only sign is that Kafka has committed more than the row and the incidents name."""
    monkeypatch.setattr(settle, "CLOCKS_DIFFER_MS", 0)  # one broker, one clock
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as first:
        write(first, dualwrite_topic, orders, 1)
        restore = backup()
        write(first, dualwrite_topic, orders, 2, partitions=(1,) if place == "other partition" else (0,))
        if place == "aborted since":
            with pytest.raises(LookupError), first.transaction() as tx:
                tx.produce(dualwrite_topic, value="no", partition=0)
                raise LookupError
    restore()
    with pytest.raises(DatabaseWentBack, match="Kafka has committed a transaction"):
        DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()
    [incident] = SqlStateStore(engine).incidents("orders")
    assert incident.outcome is Outcome.UNVERIFIABLE
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as third:
        write(third, dualwrite_topic, orders, 4)
    assert sorted(int(record.value) for record in read_committed(kafka, dualwrite_topic)) == [1, 2, 4]


def test_an_owner_that_decided_nothing_before_the_backup(kafka, engine, dualwrite_topic, orders, backup):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as first:
        restore = backup()
        write(first, dualwrite_topic, orders, 1)
    restore()
    with pytest.raises(DatabaseWentBack, match="Kafka has committed a transaction"):
        DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()
    DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()


def test_what_was_aborted_since_is_no_sign_of_it(kafka, engine, dualwrite_topic, orders):
    for number in (1, 2):
        with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
            write(writer, dualwrite_topic, orders, number)
            with pytest.raises(LookupError), writer.transaction() as tx:
                tx.produce(dualwrite_topic, value="no", partition=0)
                raise LookupError
    assert SqlStateStore(engine).incidents("orders") == []


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_after_a_restore_nothing_stays_open_of_what_is_younger_than_the_backup(kafka, engine, dualwrite_topic, orders):
    """A lane, and a writer, whose row the database has forgotten: no row leads to their Kafka ids."""
    tag = secrets.token_hex(4)  # other tests' ids stand on the same brokers, as those of another database do
    DualWriter(f"orders-{tag}", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()
    left = {f"{name}.{'0123456789ab'}.1" for name in (f"orders-{tag}#1", f"younger-{tag}", f"another-{tag}")}
    owners = [Producer({**kafka, "transactional.id": kafka_id}) for kafka_id in sorted(left)]
    for owner in owners:
        owner.init_transactions(120)
        owner.begin_transaction()
        owner.produce(dualwrite_topic, "undecided", partition=0)
        owner.flush()
    seen = [
        recover(f"orders-{tag}", kafka=kafka, database=engine, after_restore=True),
        recover(f"younger-{tag}", kafka=kafka, database=engine, after_restore=True),
        recover(prefix=f"another-{tag[:4]}", kafka=kafka, database=engine, after_restore=True),
    ]
    told = {(one.kafka_id, one.status, one.has_row, one.settled) for report in seen for one in report.forgotten}
    assert told == {(kafka_id, TransactionStatus.ONGOING, False, True) for kafka_id in left}
    assert not seen[1].unknown
    assert read_committed(kafka, dualwrite_topic) == []  # waits until nothing is open


@on_both
def test_a_lost_claim_is_shown_and_hinders_no_other_id(kafka, engine, dualwrite_topic, orders, backup, url):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, dualwrite_topic, orders, 1)
    restore = backup()
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, dualwrite_topic, orders, 2)
    restore()
    with DualWriter("other", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as other:
        other._opened()
    shown = {one.row.transactional_id: one for one in status(kafka=kafka, database=url)}
    assert shown["orders"].claim_lost
    assert shown["orders"].needs_recovery
    assert shown["other"].went_back is None
    servers = ["--url", url, "--bootstrap-server", kafka["bootstrap.servers"]]
    for command in (["status"], ["status", "--problems"], ["recover", "--all"]):
        told = CliRunner().invoke(commands, [*command, *servers])
        assert (told.exit_code, "gone back" in told.output) == (8, True), told.output
    refused = recover(open_for_s=0, kafka=kafka, database=url)
    assert [error.transactional_id for error in refused.went_back] == ["orders"]
    accepted = recover("orders", kafka=kafka, database=url, after_restore=True)
    assert [one.incarnation for one in accepted.forgotten if one.has_row] == [2]
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, dualwrite_topic, orders, 3)
    assert status("orders", kafka=kafka, database=url)[0].went_back is None
