"""``DualWriter`` on a simulated Kafka and SQLite: who may write, which lane, and what opening and closing report."""

import logging
import os
import queue
import threading
from contextlib import suppress

import pytest
from harness.databases import prepare, sqlite_url
from harness.served import SETTINGS, TOPIC
from model.owners import make_producer
from simulator.outside import SimulatedCoordinator
from sqlalchemy import create_engine, inspect
from sqlalchemy.orm import Session

from dualwrite import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriter,
    Fenced,
    TransactionAborted,
    Unavailable,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.kafka.librdkafka.producer import ProducerInstance
from dualwrite.protocol.values import Outcome
from dualwrite.recovery.claim import OwnerContext, claim_rows
from dualwrite.recovery.settle import settle
from dualwrite.stores.sql.tables import VERSION_TABLE
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.lane import Lane


class Refused(Exception):
    """Raised by the code of a block."""


@pytest.fixture
def armed():
    yield failpoints.arm
    failpoints.arm("")


@pytest.mark.parametrize("name", ["", "orders#1", "x" * 241])
def test_a_name_that_cannot_be_a_writers_is_refused(name):
    with pytest.raises(ConfigurationError, match="transactional id"):
        DualWriter(name, kafka=SETTINGS, database="sqlite://")


@pytest.mark.parametrize(
    "wrong",
    [
        {"kafka": {}},
        {"kafka": {**SETTINGS, "transactional.id": "x"}},
        {"database": object()},
        {"database": "?"},
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_connects(wrong):
    with pytest.raises(ConfigurationError):
        DualWriter("orders", **{"kafka": SETTINGS, "database": "sqlite://", **wrong})


def test_limits_that_are_a_dictionary_are_refused_with_what_to_write():
    with pytest.raises(ConfigurationError, match=r"limits is of type dict \(give a WriterLimits"):
        DualWriter("orders", kafka=SETTINGS, database="sqlite:///x.db", limits={"max_lanes": 2})


def test_a_block_commits_both_sides_or_neither_and_passes_its_exception_on(shop):
    with shop.writer() as writer:
        with writer.transaction() as tx:
            shop.put(tx, 1)
        with pytest.raises(Refused), writer.transaction() as tx:
            shop.put(tx, 2)
            raise Refused
        with pytest.raises(KeyboardInterrupt), writer.transaction() as tx:
            shop.put(tx, 3)
            raise KeyboardInterrupt
        with writer.transaction() as tx:
            shop.put(tx, 4)
        assert shop.both_have(1, 4)


def test_the_users_connection_is_used_and_stays_open(shop):
    with shop.writer() as writer, shop.engine.connect() as connection:
        with writer.transaction(connection) as tx:
            assert tx.connection is connection
            shop.put(tx, 1)
        assert not connection.closed
        assert not connection.in_transaction()
        assert shop.both_have(1)


def test_an_argument_that_is_no_connection_is_refused(shop):
    with shop.writer() as writer:
        for wrong in (shop.engine, Session(shop.engine)):
            with (
                pytest.raises(IllegalStateError, match="takes a connection of SQLAlchemy"),
                writer.transaction(wrong),
            ):
                raise AssertionError("the block is not entered")


def test_a_connection_in_a_transaction_or_to_another_database_is_refused_and_left_as_it_is(shop, tmp_path):
    (tmp_path / "other").mkdir()
    elsewhere = prepare("sqlite", sqlite_url(tmp_path / "other"))
    with shop.writer() as writer:
        with shop.engine.connect() as connection:
            connection.exec_driver_sql("INSERT INTO orders (id) VALUES (7)")
            with pytest.raises(IllegalStateError), writer.transaction(connection):
                raise AssertionError("the block is not entered")
            connection.commit()
        with elsewhere.engines[0].connect() as other, pytest.raises(ConfigurationError), writer.transaction(other):
            raise AssertionError("the block is not entered")
        assert (shop.rows, shop.messages) == (["7"], [])
        with writer.transaction() as tx:
            shop.put(tx, 8)
    elsewhere.dispose()


def test_a_block_inside_another_of_the_same_writer_is_refused_and_the_outer_one_commits(shop):
    with shop.writer() as writer:
        with writer.transaction() as tx:
            shop.put(tx, 1)
            with pytest.raises(IllegalStateError, match="nested"), writer.transaction():
                raise AssertionError("the block is not entered")
        assert shop.both_have(1)


def test_concurrent_blocks_have_lanes_of_their_own_up_to_the_most(shop):
    """Without rows until the end: SQLite has one writer at a time."""
    with shop.writer(limits=WriterLimits(max_lanes=2, lane_timeout_s=0.01)) as writer:
        first, second = writer._lanes.ticket(), writer._lanes.ticket()
        lanes = [writer._lanes.take(first), writer._lanes.take(second)]
        assert {lane.transactional_id for lane in lanes} == {"orders", "orders#1"}
        with pytest.raises(Unavailable, match="all 2 lanes were busy"), writer.transaction():
            raise AssertionError("the block is not entered")
        first.end()
        with writer.transaction() as tx:
            shop.put(tx, 1)
        second.end()
        assert shop.both_have(1)


def test_threads_share_one_writer_and_each_value_is_on_both_sides_once(shop):
    def work(numbers):
        for number in numbers:
            with writer.transaction() as tx:
                shop.put(tx, number)

    with shop.writer(limits=WriterLimits(max_lanes=3)) as writer:
        threads = [threading.Thread(target=work, args=(range(first, first + 5),)) for first in (0, 5, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(int, shop.messages)) == sorted(map(int, shop.rows)) == list(range(15))


def test_opening_a_second_writer_of_the_name_fences_the_first(shop):
    with shop.writer() as first, shop.writer() as second:
        with pytest.raises(Fenced), first.transaction() as tx:
            shop.put(tx, 1)
        with second.transaction() as tx:
            shop.put(tx, 2)
        assert shop.both_have(2)


def test_a_fenced_writer_adds_no_lane(shop):
    with shop.writer(limits=WriterLimits(max_lanes=4)) as first, shop.writer():
        tickets = [first._lanes.ticket() for _ in range(3)]
        assert [first._lanes.take(ticket).transactional_id for ticket in tickets] == ["orders", "orders#1", "orders#2"]
        with pytest.raises(Fenced), first.transaction() as tx:
            shop.put(tx, 1)
        assert shop.database.store(shop.engine).read(["orders#3"]) == []
        for ticket in tickets:
            ticket.end()


def test_a_writer_serves_blocks_only_while_it_is_open_and_opens_once(shop):
    writer = shop.writer()
    with pytest.raises(IllegalStateError, match="not open"), writer.transaction():
        raise AssertionError("the block is not entered")
    with writer:
        with pytest.raises(IllegalStateError, match="already opened"):
            writer.open()
        assert "open" in repr(writer)
    with pytest.raises(IllegalStateError), writer.transaction():
        raise AssertionError("the block is not entered")
    with pytest.raises(IllegalStateError):
        writer.open()
    writer.close()
    assert "closed" in repr(writer)


def test_without_the_tables_it_does_not_open_and_names_the_command(tmp_path, monkeypatch, shop):
    empty = create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(ConfigurationError, match="dualwrite migrate"):
        shop.writer(database=empty).open()
    assert inspect(empty).get_table_names() == []
    assert shop.kafka.broker.transactions == ()
    empty.dispose()


@pytest.mark.parametrize("revision", ["0001", "9999"])
def test_on_tables_of_another_version_it_does_not_open(shop, revision):
    shop.database.execute(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'")
    with pytest.raises(ConfigurationError, match=f"of version {revision}"):
        shop.writer().open()
    assert shop.kafka.broker.transactions == ()


def test_an_opening_that_fails_leaves_nothing_open_and_the_next_one_works(shop, armed):
    armed("claim.settled:1:raise")
    with pytest.raises(FailpointError):
        shop.writer().open()
    armed("")
    with shop.writer() as writer, writer.transaction() as tx:
        shop.put(tx, 1)
    assert shop.both_have(1)


def test_opening_completes_what_a_dead_owner_has_decided(shop, armed):
    die_once_decided(shop, armed)
    assert shop.rows == ["1"]
    with pytest.raises(AssertionError, match="held back"):
        _ = shop.messages
    with shop.writer():
        assert shop.both_have(1)


def test_the_row_names_the_owner_as_kafka_names_the_client(shop):
    with shop.writer(kafka={**SETTINGS, "client.id": "shop-7"}):
        assert shop.state("orders").owner.startswith("shop-7 ")
    with shop.writer():
        assert "@" in shop.state("orders").owner  # user@host:pid


def test_a_recovery_tells_how_many_ids_are_settled_and_names_itself_in_the_row(shop, armed):
    die_once_decided(shop, armed)
    told = []
    kafka = {**SETTINGS, "client.id": "cron"}
    report = recover(
        "orders", kafka=kafka, database=shop.engine, progress=lambda settled, planned: told.append((settled, planned))
    )
    assert report.rolled_forward == ["orders"]
    assert told[0] == (0, len(report.planned))
    assert told[-1] == (len(report.settled), len(report.planned))
    assert shop.state("orders").owner.startswith("cron ")


def test_closing_records_that_the_last_transaction_is_complete(shop):
    with shop.writer() as writer:
        with writer.transaction() as tx:
            shop.put(tx, 1)
        writer.close()
        assert shop.state(tx.transactional_id).completed == Outcome.COMMITTED.value


def test_a_loss_is_raised_by_one_opening_and_the_next_one_goes_on(shop, armed):
    die_once_decided(shop, armed)
    lose(shop)
    with pytest.raises(DecidedTransactionLost) as raised:
        shop.writer().open()
    assert raised.value.transactional_id == "orders"
    with shop.writer() as writer, writer.transaction() as tx:
        shop.put(tx, 2)
    assert shop.messages == ["2"]


def test_a_loss_whose_finder_died_before_it_reported_it_is_raised_by_the_next_opening(shop, armed):
    die_once_decided(shop, armed)
    lose(shop)
    context = OwnerContext(SimulatedCoordinator(shop.kafka), shop.database.store(shop.engine), "dies, too")
    rows = claim_rows(context, ["orders"], Deadline(60))
    settle(rows, coordinator=context.coordinator, store=context.store, deadline=Deadline(60))
    with pytest.raises(DecidedTransactionLost, match="before it reported"):
        shop.writer().open()
    with shop.writer():
        pass


def test_a_loss_that_the_background_finds_reaches_on_loss(shop):
    told = queue.SimpleQueue()

    def lose_once_decided(point):
        if point == "write.decided":
            lose(shop)
            raise FailpointError(point)

    with shop.writer(on_loss=told.put, limits=WriterLimits(max_lanes=1)) as writer:
        with failpoints.watched(lose_once_decided), pytest.raises(FailpointError), writer.transaction() as tx:
            shop.put(tx, 1)
        loss = told.get(timeout=60)
    assert isinstance(loss, DecidedTransactionLost)
    assert loss.state == str(tx.prepared)
    assert told.empty()


def test_a_loss_that_nobody_was_given_is_raised_by_close_unless_the_body_raises(shop, caplog):
    loss = DecidedTransactionLost("lost", transactional_id="orders", state="")
    with pytest.raises(DecidedTransactionLost):  # noqa: SIM117
        with shop.writer() as writer:
            writer._losses.report(loss)
    with pytest.raises(Refused), caplog.at_level(logging.ERROR, "dualwrite"):  # noqa: SIM117
        with shop.writer() as writer:
            writer._losses.report(loss)
            raise Refused
    assert "loss reported only in this log" in caplog.text


def test_a_loss_that_on_loss_took_is_not_raised_again(shop):
    told = []
    with shop.writer(on_loss=told.append) as writer:
        writer._losses.report(DecidedTransactionLost("lost", transactional_id="orders", state=""))
    assert len(told) == 1


def test_in_a_forked_process_it_refuses_blocks_and_closing_leaves_the_parents_connections(shop, monkeypatch):
    with shop.writer() as writer:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            with pytest.raises(IllegalStateError, match="another process"), writer.transaction():
                raise AssertionError("the block is not entered")
            writer.close()
        with writer.transaction() as tx:
            shop.put(tx, 1)
        assert shop.both_have(1)


def test_it_disposes_of_an_engine_that_it_made_and_of_no_other(shop):
    with shop.writer(database=shop.database.url) as writer:
        pool = writer._database.engine.pool
    assert writer._database.engine.pool is not pool
    own = shop.engine.pool
    with shop.writer():
        pass
    assert shop.engine.pool is own


def die_once_decided(shop, armed):
    """A process ends right after its database has committed; nothing of it works on in the background."""
    context = OwnerContext(SimulatedCoordinator(shop.kafka), shop.database.store(shop.engine), "dead owner")
    lane = Lane("orders", context, make_producer(shop.kafka, context, eager=False))
    lane.ready(Deadline(60))
    armed("write.decided:1:raise")
    with (
        pytest.raises(FailpointError),
        shop.engine.connect() as connection,
        DualWrite(lane, context, connection, margin_s=10.0, timeout_s=60.0) as tx,
    ):
        shop.put(tx, 1)
    armed("")


def lose(shop):
    row = shop.state()
    shop.kafka.abort_by_timeout(f"orders.{row.namespace}.{row.incarnation}")


def test_the_sender_ends_with_the_writer_also_if_the_database_takes_no_record(shop, monkeypatch):
    def away(_):
        raise Unavailable("the database is away")

    writer = shop.writer(outbox="fallback")
    writer.open()
    with writer.transaction() as tx:
        shop.put(tx, 1)
    monkeypatch.setattr(Lane, "record_completed", away)
    with pytest.raises(Unavailable):
        writer.close()
    assert "dualwrite orders outbox" not in [one.name for one in threading.enumerate()]


def test_a_block_whose_message_was_cut_short_aborts_although_its_code_goes_on(shop, monkeypatch):
    """As by the soft time limit of a task queue, whose exception comes between any two lines, and may be caught."""

    class TimeIsOver(Exception):
        pass

    def cut_short(self, message):
        send(self, message)
        raise TimeIsOver

    send = ProducerInstance.send
    with shop.writer() as writer:
        with monkeypatch.context() as patch, pytest.raises(TransactionAborted, match="TimeIsOver"):
            patch.setattr(ProducerInstance, "send", cut_short)
            with writer.transaction() as tx, suppress(TimeIsOver):
                shop.put(tx, 1)
        with writer.transaction() as tx:
            shop.put(tx, 2)
    assert shop.both_have(2)


def test_a_block_with_some_of_many_messages_aborts_although_its_code_goes_on(shop):
    words = "continued after an error: TypeError"
    with shop.writer() as writer:
        with pytest.raises(TransactionAborted, match=words), writer.transaction() as tx, suppress(TypeError):
            tx.produce_many(TOPIC, ["1", 7])
        with writer.transaction() as tx:
            with pytest.raises(TypeError):
                tx.produce(TOPIC, 7)
            shop.put(tx, 2)
    assert shop.both_have(2)
