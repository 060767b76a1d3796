"""The interleavings that break simpler recipes, brought about on real servers. Each names the rule that it is the reason for."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
from confluent_kafka import Producer
from harness.checker import Case
from harness.death import mortal
from harness.orders import write as write_order
from harness.patience import wait_until
from sqlalchemy import create_engine, insert, text, update

from dualwrite import (
    ConfigurationError,
    DecidedTransactionLost,
    DualWriter,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.clock import Deadline
from dualwrite.failpoints import FailpointError
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.values import EndAnswer, LogProof, TransactionStatus
from dualwrite.recovery.inspect import lost_decisions
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing.proxy import Api, KafkaProxy, PostgresProxy
from dualwrite.writing.lane import Lane

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
STATE = declare_tables(None).state


write = partial(write_order, partitions=(0, 1))


def crash_after_decision(kafka, engine, topic, orders, number, name="orders"):
    """A writer whose owner is gone after the database commit, before Kafka's."""
    writer = mortal(DualWriter(name, kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)))
    writer.open()
    failpoints.arm("write.decided:1:raise")
    with pytest.raises(FailpointError):
        write(writer, topic, orders, number)
    failpoints.arm("")
    return writer


def test_late_first_copy_of_a_retried_end_txn_cannot_end_the_next_transaction(
    dualwrite_kafka, engine, orders, dualwrite_topic, both
):
    """KAFKA-17754: an incarnation ends after any call that may have been sent twice, even if it answered success."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        kafka = {**proxy.client_config(), "retry.backoff.ms": "500", "retry.backoff.max.ms": "500"}
        with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
            held = proxy.on(Api.END_TXN).hold_request()
            cutter = threading.Thread(target=lambda: (held.wait(), held.cut()))
            cutter.start()
            write(writer, dualwrite_topic, orders, 1)
            cutter.join()
            assert len([r for r in proxy.requests if r.api_key == Api.END_TXN]) >= 2, "librdkafka did not retry"
            with pytest.raises(ValueError, match="half"), writer.transaction() as tx:
                tx.produce(dualwrite_topic, value="2", partition=0)
                tx.connection.execute(insert(orders).values(id=2))
                tx._dual_write._lane.producer.poll(0.5)
                held.release()
                held.wait_answered()
                tx.produce(dualwrite_topic, value="2", partition=1)
                raise ValueError("half")
            write(writer, dualwrite_topic, orders, 3)
        assert both() == ([1, 3], [1, 1, 3, 3])


def test_without_that_rule_the_late_copy_commits_half_a_transaction(
    dualwrite_kafka, kafka, engine, orders, dualwrite_topic, both
):
    """The negative control: the same moment with a producer that is kept."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        config = {**proxy.client_config(), "retry.backoff.ms": 100, "retry.backoff.max.ms": 100}
        producer = Producer({**config, "transactional.id": "kept", "linger.ms": 0})
        producer.init_transactions(120)
        held = proxy.on(Api.END_TXN).hold_request()
        cutter = threading.Thread(target=lambda: (held.wait(), held.cut()))
        cutter.start()
        producer.begin_transaction()
        producer.produce(dualwrite_topic, "1", partition=0)
        producer.commit_transaction(120)
        cutter.join()
        producer.begin_transaction()
        producer.produce(dualwrite_topic, "2", partition=0)
        producer.flush(10)
        held.release()
        held.wait_answered()
        assert both() == ([], [1, 2]), "half of a transaction that nobody has committed is visible"


@pytest.mark.usefixtures("through_librdkafka")
def test_a_newer_transaction_of_the_same_epoch_is_never_committed_by_an_older_row(
    tmp_path, kafka, url, dualwrite_topic
):
    """All transactions of one librdkafka producer share id and epoch: the state holds the first offsets too."""
    case = Case(tmp_path, kafka, url, dualwrite_topic)
    case.run(failpoint="write.prepared:2", killed=True)
    (item,) = status(kafka=kafka, database=url)
    coordinator = KafkaCoordinator(KafkaConfig.parse(kafka))
    kafka_id = item.row.kafka_id(item.incarnation)
    view = coordinator.describe([kafka_id], Deadline(30))[kafka_id]
    coordinator.close()
    assert view.status is TransactionStatus.ONGOING
    assert (item.row.prepared.producer_id, item.row.prepared.epoch) == (view.producer_id, view.epoch), (
        "the row names the producer of the open transaction, and yet not that transaction"
    )
    report = recover(open_for_s=0, kafka=kafka, database=url)
    assert (report.settled, report.rolled_forward, report.losses) == (["case"], [], [])
    assert case.verify() == {"w1-0"}


def test_partitions_that_a_late_request_adds_do_not_hide_a_decided_transaction(
    kafka, engine, orders, dualwrite_kafka, dualwrite_topic, both
):
    """A copy of an earlier transaction's AddPartitionsToTxn, that comes late, names the producer id and epoch of the next."""
    elsewhere = dualwrite_kafka.create_topic(f"{dualwrite_topic}-elsewhere", 1)
    crash_after_decision(kafka, engine, dualwrite_topic, orders, 1)
    (row,) = SqlStateStore(engine).read(["orders"])
    kafka_id, state = row.kafka_id(row.incarnation), row.prepared
    with KafkaCoordinator(KafkaConfig.parse(kafka)) as coordinator:
        late = {kafka_id: (state.producer_id, state.epoch, {(elsewhere, 0)})}
        assert coordinator.add_partitions(late, Deadline(30)) == {kafka_id: True}
    assert recover(open_for_s=0, kafka=kafka, database=engine).rolled_forward == ["orders"]
    assert both() == ([1], [1, 1])


def test_a_commit_of_what_a_late_request_alone_has_begun_is_no_lost_decision(
    kafka, engine, orders, dualwrite_topic, both
):
    """After a commit, a late AddPartitionsToTxn begins a transaction without records, and a second EndTxn commits it."""
    crash_after_decision(kafka, engine, dualwrite_topic, orders, 1)
    (row,) = SqlStateStore(engine).read(["orders"])
    kafka_id, state = row.kafka_id(row.incarnation), row.prepared
    with KafkaCoordinator(KafkaConfig.parse(kafka)) as coordinator:

        def newest_started_ms():
            return coordinator.describe([kafka_id], Deadline(30))[kafka_id].newest_started_ms

        def end():
            assert coordinator.end({kafka_id: state}, committed=True, deadline=Deadline(30)) == {
                kafka_id: EndAnswer.ENDED
            }
            wait_until(lambda: coordinator.prove([state], Deadline(30))[0] is LogProof.COMMITTED, timeout_s=30)

        started_ms = newest_started_ms()
        end()
        written = {(first.topic, first.partition) for first in state.first_offsets}
        late = {kafka_id: (state.producer_id, state.epoch, written)}
        assert coordinator.add_partitions(late, Deadline(30)) == {kafka_id: True}
        end()
        assert newest_started_ms() > started_ms
        # As an owner records it whose transaction was open for over a second.
        rows = [replace(row, incarnation=row.incarnation + 1, prepared=replace(state, started_ms=started_ms))]
        wait_until(
            lambda: (
                lost_decisions(rows, coordinator=coordinator, store=SqlStateStore(engine), deadline=Deadline(30)) == []
            ),
            timeout_s=30,
        )
    assert recover(open_for_s=0, kafka=kafka, database=engine).losses == []
    assert both() == ([1], [1, 1])


def test_a_row_read_before_the_claim_would_be_stale(kafka, engine, orders, dualwrite_topic, both):
    """The claim returns the state in the same statement that raises the incarnation."""
    store = SqlStateStore(engine)
    writer = mortal(DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)))
    writer.open()
    (stale,) = store.read(["orders"])
    failpoints.arm("write.decided:1:raise")
    with pytest.raises(FailpointError):
        write(writer, dualwrite_topic, orders, 1)
    failpoints.arm("")
    (claimed,) = store.claim(["orders"], owner="test", cluster_id=stale.cluster_id)
    assert not stale.prepared.has_transaction
    assert claimed.prepared.has_transaction
    report = recover(open_for_s=0, kafka=kafka, database=engine)
    assert report.rolled_forward == ["orders"]
    assert both() == ([1], [1, 1])


def test_claiming_waits_for_a_decision_under_way(
    dualwrite_postgres, url, kafka, engine, orders, dualwrite_topic, both, monkeypatch
):
    """The deciding UPDATE holds the row: a claim that comes between it and COMMIT sees what the COMMIT left."""
    monkeypatch.setattr(failpoints, "may_stop_at", lambda _: True)  # one after the other: COMMIT is held alone
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        with DualWriter("orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer:
            commit = proxy.on("COMMIT").hold_request()
            first = threading.Thread(target=write, args=(writer, dualwrite_topic, orders, 1))
            first.start()
            commit.wait()
            claimed = threading.Event()
            second = threading.Thread(target=lambda: (recover("orders", kafka=kafka, database=engine), claimed.set()))
            second.start()
            waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
            with engine.connect() as observer:
                while not observer.execute(waiting).scalar():
                    observer.rollback()
            assert not claimed.is_set()
            commit.release()
            first.join()
            second.join()
        through.dispose()
    assert both() == ([1], [1, 1])


@pytest.mark.parametrize("arrives", ["after the claim", "before the claim", "never"])
def test_a_decision_that_is_late_with_its_commit_is_what_its_caller_was_told(
    dualwrite_postgres, url, kafka, engine, orders, dualwrite_topic, both, monkeypatch, arrives
):
    """Until the server has the text of both, no lock keeps it from what the row is taken to say."""
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        with DualWriter("orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer:
            write(writer, dualwrite_topic, orders, 1)
            exchange = proxy.on("COMMIT").hold_request()
            fence = Lane.fence

            def late(self, deadline):
                if arrives == "before the claim":
                    exchange.release()
                    exchange.wait_answered()
                fence(self, deadline)

            monkeypatch.setattr(Lane, "fence", late)
            with ThreadPoolExecutor(1) as other:
                told = other.submit(write, writer, dualwrite_topic, orders, 2)
                exchange.wait()
                exchange.withdraw()
                exchange.cut()
                error = told.exception(60)
            decided = arrives == "before the claim"
            assert type(error) is (type(None) if decided else TransactionAborted)
            if arrives == "after the claim":
                exchange.release()
                exchange.wait_answered()
            elif arrives == "never":
                exchange.discard()
            write(writer, dualwrite_topic, orders, 3)
        through.dispose()
    there = [1, 2, 3] if decided else [1, 3]
    assert both() == (there, sorted(2 * there))


def test_nothing_is_retired_before_its_outcome_is_proved_and_recorded(kafka, engine, orders, dualwrite_topic, both):
    """The broker aborts a decided transaction (an operator's InitProducerId): reported, recorded, and counted."""
    writer = crash_after_decision(kafka, engine, dualwrite_topic, orders, 1)
    (row,) = SqlStateStore(engine).read(["orders"])
    Producer({**kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(120)
    with pytest.raises(DecidedTransactionLost) as caught:
        DualWriter("orders", kafka=kafka, database=engine).open()
    assert dualwrite_topic in str(caught.value)
    assert caught.value.state == str(row.prepared)
    (incident,) = SqlStateStore(engine).incidents("orders")
    assert incident.outcome.value == "lost"
    with DualWriter("orders", kafka=kafka, database=engine) as second:
        write(second, dualwrite_topic, orders, 2)
    assert len(SqlStateStore(engine).incidents("orders")) == 1, "a later decision has erased the loss"
    assert both() == ([1, 2], [2, 2])
    writer.close()


def test_a_database_that_went_back_in_time_is_found_until_a_person_has_looked(
    kafka, engine, orders, dualwrite_topic, both
):
    """The coordinator already knows the Kafka id that the restored row is about to make."""
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, dualwrite_topic, orders, 1)
    (backup,) = SqlStateStore(engine).read(["orders"])
    for number in (2, 3):
        with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
            write(writer, dualwrite_topic, orders, number)
    with engine.begin() as connection:
        connection.execute(
            update(STATE).values(
                incarnation=backup.incarnation,
                settled_incarnation=backup.settled_incarnation,
                prepared_transaction_state=str(backup.prepared),
            )
        )
    for _ in range(4):
        with pytest.raises(ConfigurationError, match="back in time"):
            DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open()
    assert recover("orders", kafka=kafka, database=engine, after_restore=True).settled == ["orders"]
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        write(writer, dualwrite_topic, orders, 4)
    assert both()[0] == [1, 2, 3, 4]


@pytest.mark.parametrize("fault", ["drop_answer", "reset_answer", "reset_request"])
def test_connection_lost_during_commit_is_resolved_by_the_row(
    dualwrite_postgres, url, kafka, engine, orders, dualwrite_topic, both, fault
):
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url), connect_args={"tcp_user_timeout": 1000})
        with DualWriter("orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer:
            rule = getattr(proxy.on("COMMIT"), fault)()
            if fault == "drop_answer":
                cutter = threading.Thread(target=lambda: (rule.wait_answered(), rule.cut()))
                cutter.start()
            if fault == "reset_request":
                with pytest.raises(TransactionAborted):
                    write(writer, dualwrite_topic, orders, 1)
                assert both() == ([], [])
            else:
                write(writer, dualwrite_topic, orders, 1)
                assert both() == ([1], [1, 1])
            write(writer, dualwrite_topic, orders, 2)
        through.dispose()
    assert both()[0][-1] == 2


@pytest.mark.parametrize("fault", ["reset_answer", "reset_request"])
def test_connection_lost_during_commit_of_rows_alone_is_resolved_by_the_database(
    dualwrite_postgres, url, kafka, engine, orders, both, fault
):
    """The row names nothing of such a transaction; the server is out of reach for a while."""
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        with DualWriter("orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1)) as writer:
            getattr(proxy.on("COMMIT"), fault)()
            # How every transaction of our own begins, which is tried five times.
            away = [proxy.on("SELECT PG_IS_IN_RECOVERY", nth=nth).reset_request() for nth in range(1, 7)]
            expected = pytest.raises(TransactionAborted) if fault == "reset_request" else nullcontext()
            with expected, writer.transaction() as tx:
                tx.connection.execute(insert(orders).values(id=1))
            away[-1].wait()
            with writer.transaction() as tx:
                tx.connection.execute(insert(orders).values(id=2))
        through.dispose()
    assert both() == ([2] if fault == "reset_request" else [1, 2], [])


def test_lost_commit_with_the_database_out_of_reach_is_in_doubt_and_never_guessed(
    dualwrite_postgres, url, kafka, engine, orders, dualwrite_topic, both
):
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        writer = mortal(
            DualWriter("orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1, timeout_s=3))
        )
        writer.open()
        proxy.on("COMMIT").reset_answer()
        proxy.on("SELECT PG_IS_IN_RECOVERY", nth=None).reset_request()  # how every transaction of our own begins
        with pytest.raises(TransactionInDoubt):
            write(writer, dualwrite_topic, orders, 1)
    through.dispose()
    report = recover(open_for_s=0, kafka=kafka, database=engine)
    assert report.rolled_forward == ["orders"]
    assert both() == ([1], [1, 1])


@pytest.mark.parametrize("verdict_known", [True, False])
@pytest.mark.parametrize("committed", [True, False])
def test_in_doubt_row_that_the_next_owner_has_overwritten_is_resolved_by_the_log(
    dualwrite_postgres, url, kafka, engine, orders, dualwrite_topic, both, committed, verdict_known, monkeypatch
):
    """Only the database's status of the transaction, the recorded incidents and the log are left to tell."""
    if not verdict_known:
        from dualwrite.protocol.process import DatabaseVerdict

        monkeypatch.setattr(SqlStateStore, "transaction_verdict", lambda *_: DatabaseVerdict.UNKNOWN)
    with PostgresProxy(dualwrite_postgres) as proxy:
        through = create_engine(proxy.url(url))
        writer = DualWriter("orders", kafka=kafka, database=through, limits=WriterLimits(max_lanes=1))
        writer.open()
        rule = proxy.on("COMMIT").hold_answer() if committed else proxy.on("COMMIT").drop_request()
        outcome = []

        def first():
            try:
                write(writer, dualwrite_topic, orders, 1)
                outcome.append("committed")
            except TransactionAborted:
                outcome.append("aborted")

        thread = threading.Thread(target=first)
        thread.start()
        rule.wait()
        if not committed:
            end = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction'")
            with engine.begin() as observer:
                observer.execute(end)
        with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as second:
            write(second, dualwrite_topic, orders, 2)
        rule.cut()
        thread.join()
        through.dispose()
    assert outcome == ["committed" if committed else "aborted"]
    assert both() == (([1, 2], [1, 1, 2, 2]) if committed else ([2], [2, 2]))


def test_wrong_epoch_in_init_producer_id_is_no_compare_and_set(kafka, engine, orders, dualwrite_topic):
    """Why every incarnation has a Kafka id of its own: it must not be called on an id whose decision might be pending."""
    writer = crash_after_decision(kafka, engine, dualwrite_topic, orders, 1)
    (row,) = SqlStateStore(engine).read(["orders"])
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as second:
        (now,) = SqlStateStore(engine).read(["orders"])
        assert now.kafka_id(now.incarnation) != row.kafka_id(row.incarnation)
        write(second, dualwrite_topic, orders, 2)
    writer.close()


def test_coordinator_is_the_same_from_outside(kafka, engine, orders, dualwrite_topic):
    """Another process can commit the transaction of a crashed producer, and repeating it is harmless."""
    crash_after_decision(kafka, engine, dualwrite_topic, orders, 1)
    (row,) = SqlStateStore(engine).read(["orders"])
    kafka_id = row.kafka_id(row.incarnation)
    coordinator = KafkaCoordinator(KafkaConfig.parse(kafka))
    deadline = Deadline(30)
    assert coordinator.end({kafka_id: row.prepared}, committed=True, deadline=deadline)[kafka_id] is EndAnswer.ENDED
    wait_until(lambda: coordinator.describe([kafka_id], deadline)[kafka_id].status is TransactionStatus.COMPLETE_COMMIT)
    assert coordinator.end({kafka_id: row.prepared}, committed=True, deadline=deadline)[kafka_id] is EndAnswer.ENDED
    coordinator.close()


def test_a_row_that_was_deleted_and_made_anew_has_another_owner(kafka, engine, orders, dualwrite_topic, both):
    """The new row counts incarnations from the start again: its namespace tells the two owners apart."""
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as first:
        write(first, dualwrite_topic, orders, 1)
        with engine.begin() as connection:
            connection.execute(STATE.delete())
        with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as second:
            with pytest.raises(Fenced):
                write(first, dualwrite_topic, orders, 2)
            write(second, dualwrite_topic, orders, 3)
    assert both() == ([1, 3], [1, 1, 3, 3])
