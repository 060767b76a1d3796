"""The writer itself settles, while it is idle, what a broken dual write has left open in Kafka."""

import threading

import pytest
from harness.death import ended_by_hand
from harness.engines import answered
from harness.orders import write
from harness.patience import patient, wait_until
from sqlalchemy import create_engine

from dualwrite import DecidedTransactionLost, DualWriter, Fenced, WriterLimits, failpoints
from dualwrite.errors import CompletionPending, Unavailable
from dualwrite.failpoints import FailpointError
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.proxy import Api, KafkaProxy, PostgresProxy
from dualwrite.writing.lane_pool import Lanes

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.fixture
def proxy(dualwrite_kafka):
    with KafkaProxy(dualwrite_kafka) as proxy:
        yield proxy


@pytest.fixture
def through(proxy, engine):
    """A writer through the proxy, with one lane, that waits 2.5 s for each of Kafka's answers: most tests wait for one in vain."""
    kafka = patient(proxy.client_config())
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, timeout_s=5)) as writer:
        yield writer


def fail_at(point, writer, topic, orders, number):
    failpoints.arm(f"{point}:1:raise")
    with pytest.raises(FailpointError):
        write(writer, topic, orders, number)
    failpoints.arm("")


def wait_for_log(caplog, text, count=1):
    wait_until(lambda: sum(text in record.getMessage() for record in caplog.records) >= count)


@pytest.mark.parametrize("lost", ["drop_request", "drop_answer"])
def test_an_abort_that_kafka_did_not_answer_holds_no_reader_back(through, proxy, dualwrite_topic, orders, both, lost):
    rule = getattr(proxy.on(Api.END_TXN), lost)()
    fail_at("write.prepared", through, dualwrite_topic, orders, 1)
    rule.wait()
    assert both() == ([], [])


def test_an_abort_with_messages_on_their_way_holds_no_reader_back(through, proxy, dualwrite_topic, orders, both):
    held = proxy.on(Api.PRODUCE).hold_request()
    with pytest.raises(LookupError), through.transaction() as tx:
        tx.produce(dualwrite_topic, value="1", partition=0)
        held.wait()
        raise LookupError
    held.release()
    assert both() == ([], [])
    write(through, dualwrite_topic, orders, 2)
    assert both() == ([2], [2])


def test_messages_that_were_not_delivered_hold_no_reader_back(through, proxy, dualwrite_topic, orders, both):
    """The first message opens the transaction; the second is never answered, so that nothing can be aborted any more."""
    with pytest.raises(LookupError), through.transaction() as tx:
        tx.produce(dualwrite_topic, value="1", partition=0)
        answered(tx._dual_write._lane.producer)
        proxy.on(Api.PRODUCE, nth=None).drop_request()
        proxy.on(Api.END_TXN).drop_request()
        tx.produce(dualwrite_topic, value="2", partition=0)
        raise LookupError
    assert both() == ([], [])


def test_a_decision_whose_owner_could_not_go_on_is_completed(through, dualwrite_topic, orders, both):
    fail_at("write.decided", through, dualwrite_topic, orders, 1)
    wait_until(lambda: both() == ([1], [1]))


def test_a_completion_that_was_pending_is_completed(through, proxy, dualwrite_topic, orders, both):
    dropped = proxy.on(
        Api.END_TXN, nth=None
    ).drop_request()  # the owner's, and those of settling, however often it asks
    with pytest.raises(CompletionPending):
        write(through, dualwrite_topic, orders, 1)
    dropped.withdraw()
    assert len(dropped.taken) > 1
    assert both() == ([1], [1])


def test_settling_waits_for_a_kafka_that_is_silent_and_is_then_tried_again(
    through, proxy, dualwrite_topic, orders, both, caplog
):
    with pytest.raises(LookupError), through.transaction() as tx:
        tx.produce(dualwrite_topic, value="1", partition=0)
        answered(tx._dual_write._lane.producer)
        proxy.on(Api.END_TXN).drop_request()
        held = proxy.on(Api.DESCRIBE_TRANSACTIONS, nth=None).hold_request()
        raise LookupError
    wait_for_log(caplog, "has not answered since")
    held.release()
    wait_for_log(caplog, "Kafka answers again")
    assert both() == ([], [])


def test_other_lanes_go_on_while_one_is_settled(proxy, engine, dualwrite_topic, orders, both):
    kafka = patient(proxy.client_config())
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=2, timeout_s=8)) as writer:
        write(writer, dualwrite_topic, orders, 1)
        write(writer, dualwrite_topic, orders, 2)
        held = proxy.on(Api.DESCRIBE_TRANSACTIONS).hold_request()
        fail_at("write.decided", writer, dualwrite_topic, orders, 3)
        held.wait()
        write(writer, dualwrite_topic, orders, 4)
        write(writer, dualwrite_topic, orders, 5)
        held.release()
    assert both() == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])


@pytest.mark.parametrize("outage", [False, True])
def test_a_claim_of_our_own_whose_answer_was_lost_is_not_taken_for_another_owners(
    dualwrite_postgres, url, kafka, engine, dualwrite_topic, orders, both, caplog, outage
):
    """The answer to the COMMIT of a renewal is missing; with an outage nothing else gets through for a while, either."""
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url), connect_args={"connect_timeout": 5})
        with DualWriter("orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer:
            with pytest.raises(LookupError), writer.transaction() as tx:
                tx.produce(dualwrite_topic, value="1", partition=0)
                tx._dual_write._lane.producer._instance.doubt("for the test")
                lost = proxy.on("COMMIT").reset_answer()
                if outage:
                    for nth in range(2, 6):  # each of the attempts that are left
                        proxy.on("SELECT PG_IS_IN_RECOVERY", nth=nth).reset_request()
                raise LookupError
            lost.wait()
            if outage:
                wait_for_log(caplog, "not settled yet; retrying later")
            write(writer, dualwrite_topic, orders, 2)
        through.dispose()
    assert both() == ([2], [2])


@pytest.fixture
def operator(kafka, engine, monkeypatch):
    monkeypatch.setattr(failpoints, "hit", ended_by_hand(kafka, engine))


def told_losses(caplog):
    """The losses that the log shows, by what collects them: the fields of its records."""
    return [
        (record.dualwrite_transactional_id, record.dualwrite_outcome, record.dualwrite_state)
        for record in caplog.records
        if getattr(record, "dualwrite_event", None) == "loss"
    ]


def test_a_loss_found_in_the_background_is_told_and_the_next_block_runs(
    kafka, engine, dualwrite_topic, orders, both, operator, monkeypatch, caplog
):
    found, told = [], threading.Event()

    def on_loss(loss):
        found.append((loss, threading.current_thread().name))
        told.set()

    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1), on_loss=on_loss
    ) as writer:
        fail_at("write.decided", writer, dualwrite_topic, orders, 1)
        monkeypatch.undo()
        assert told.wait(90)
        for number in (2, 3):
            write(writer, dualwrite_topic, orders, number)
    assert both() == ([1, 2, 3], [2, 3])
    [(loss, thread)] = found
    assert isinstance(loss, DecidedTransactionLost)
    assert dualwrite_topic in loss.state
    assert thread == "dualwrite orders"
    assert told_losses(caplog) == [("orders", "lost", loss.state)]
    [incident] = SqlStateStore(engine).incidents("orders")
    assert incident.reported_at is not None


def test_a_loss_that_the_next_block_finds_is_told_and_that_block_runs(
    kafka, engine, dualwrite_topic, orders, both, operator, monkeypatch, caplog
):
    """Where the background comes too late, the block that needs the lane settles it."""
    monkeypatch.setattr(Lanes, "_choose_due", lambda *_: None)
    found = []
    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1), on_loss=found.append
    ) as writer:
        fail_at("write.decided", writer, dualwrite_topic, orders, 1)
        monkeypatch.undo()
        write(writer, dualwrite_topic, orders, 2)
        [loss] = found
    assert both() == ([1, 2], [2])
    assert told_losses(caplog) == [("orders", "lost", loss.state)]


def test_a_block_whose_lane_cannot_be_settled_after_a_loss_is_told_that_it_was_not_begun(
    kafka, engine, dualwrite_topic, orders, both, operator, monkeypatch
):
    monkeypatch.setattr(Lanes, "_choose_due", lambda *_: None)
    found = []
    with DualWriter(
        "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1), on_loss=found.append
    ) as writer:
        fail_at("write.decided", writer, dualwrite_topic, orders, 1)

        def no_answer(*_):
            raise Unavailable("the database does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(SqlStateStore, "mark_settled", no_answer)
            with pytest.raises(Unavailable, match="nothing was begun") as caught:
                write(writer, dualwrite_topic, orders, 2)
        assert caught.value.outcome == "none"
        monkeypatch.undo()
        write(writer, dualwrite_topic, orders, 2)
    assert [type(loss) for loss in found] == [DecidedTransactionLost]
    assert both() == ([1, 2], [2])


def test_a_loss_that_nobody_was_told_is_raised_by_close(
    kafka, engine, dualwrite_topic, orders, both, operator, monkeypatch
):
    writer = DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))
    writer.open()
    fail_at("write.decided", writer, dualwrite_topic, orders, 1)
    monkeypatch.undo()
    with pytest.raises(DecidedTransactionLost):
        writer.close()
    writer.close()
    assert len(SqlStateStore(engine).incidents("orders")) == 1
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as second:
        write(second, dualwrite_topic, orders, 2)
    assert both() == ([1, 2], [2])


def test_a_loss_whose_callback_has_failed_is_raised_by_close(
    kafka, engine, dualwrite_topic, orders, operator, monkeypatch, caplog
):
    def on_loss(_loss):
        raise LookupError

    writer = DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1), on_loss=on_loss)
    writer.open()
    fail_at("write.decided", writer, dualwrite_topic, orders, 1)
    with pytest.raises(DecidedTransactionLost):
        writer.close()
    assert "on_loss raised" in caplog.text


def test_a_loss_does_not_take_the_place_of_the_error_that_ends_the_writers_block(
    kafka, engine, dualwrite_topic, orders, operator, caplog
):
    with (
        pytest.raises(FailpointError),
        DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer,
    ):
        failpoints.arm("write.decided:1:raise")
        write(writer, dualwrite_topic, orders, 1)
    assert len(SqlStateStore(engine).incidents("orders")) == 1
    assert "loss reported only in this log" in caplog.text


def test_a_fenced_writer_leaves_settling_to_the_new_owner(kafka, engine, dualwrite_topic, orders, both, caplog):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as first:
        with pytest.raises(LookupError), first.transaction() as tx:
            tx.produce(dualwrite_topic, value="1", partition=0)
            second = DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))
            second.open()
            raise LookupError
        wait_for_log(caplog, "left to the new owner to settle")
        with pytest.raises(Fenced):
            write(first, dualwrite_topic, orders, 2)
        wait_for_log(caplog, "left to the new owner to settle", count=2)
        write(second, dualwrite_topic, orders, 3)
        second.close()
    assert sum("left to the new owner" in record.getMessage() for record in caplog.records) == 2, "tried for ever"
    assert both() == ([3], [3])


def test_closing_settles_what_is_open(through, proxy, dualwrite_topic, orders, both, engine, kafka):
    proxy.on(Api.END_TXN).drop_request()
    fail_at("write.prepared", through, dualwrite_topic, orders, 1)
    through.close()
    assert not [item for item in status(kafka=kafka, database=engine) if item.needs_recovery]
    assert both() == ([], [])


def test_closing_does_not_wait_for_a_kafka_that_does_not_answer(through, proxy, dualwrite_topic):
    with pytest.raises(LookupError), through.transaction() as tx:
        tx.produce(dualwrite_topic, value="1", partition=0)
        answered(tx._dual_write._lane.producer)
        proxy.on(Api.DESCRIBE_TRANSACTIONS, nth=None).drop_request()
        proxy.on(Api.END_TXN, nth=None).drop_request()
        raise LookupError
    closed = threading.Thread(target=through.close)
    closed.start()
    closed.join(120)
    assert not closed.is_alive()


def test_an_owner_that_was_taken_over_can_add_no_lane(kafka, engine, dualwrite_topic, orders, both):
    """The new owner has claimed the lanes that there were; it knows nothing of one that is added later."""
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=4)) as first:
        first._lanes.most = 0  # housekeeping makes none before the block needs it
        busy = [first._lanes.ticket() for _ in range(len(first._lanes))]
        for ticket in busy:
            first._lanes.take(ticket)
        with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=2)) as second:
            with pytest.raises(Fenced):
                write(first, dualwrite_topic, orders, 1)
            write(second, dualwrite_topic, orders, 2)
        for ticket in busy:
            ticket.end()
    assert both() == ([2], [2])
