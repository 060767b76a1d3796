"""A task's slot while the task runs, and what the driver makes of slots that were left."""

import threading
from datetime import timedelta

import psycopg
import pytest
from harness.one_task import ROWS as ROWS_OF_ONE
from harness.one_task import OneTask
from harness.patience import PATIENCE_S
from harness.spark_source import nothing_is_left
from sqlalchemy import create_engine

from dualwrite import DecidedTransactionLost, TransactionAborted, Unavailable, failpoints
from dualwrite.clock import Deadline
from dualwrite.sinks.spark.worker import Attempt, leased_slot
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.store import SqlStateStore


class WatchedPool(SlotPool):
    """Tells when a renewal is asked for, and when it is over."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.asked = threading.Semaphore(0)
        self.may_renew = threading.Event()
        self.may_renew.set()
        self.renewals = threading.Semaphore(0)

    def renew(self, lease, ttl_s):
        self.asked.release()
        assert self.may_renew.wait(PATIENCE_S)
        try:
            return super().renew(lease, ttl_s)
        finally:
            self.renewals.release()


@pytest.fixture
def pool(numbers):
    engine = create_engine(numbers.url)
    yield WatchedPool(engine, "pool")
    engine.dispose()


def test_a_lease_is_renewed_while_the_task_runs_and_given_back_at_its_end(pool):
    with leased_slot(pool, "me", 0.3) as slot:
        assert pool.renewals.acquire(timeout=PATIENCE_S)
        assert pool.renewals.acquire(timeout=PATIENCE_S)
        [renewed] = pool.held_by("me")
        assert renewed.until > slot.lease.until
    assert not pool.held_by("me")
    assert pool.lease("you", 60).transactional_id == slot.lease.transactional_id


def test_a_slot_that_is_kept_stays_leased_for_as_long_as_was_said(pool):
    with leased_slot(pool, "me", 60) as slot:
        slot.keep_for(1000)
    [kept] = pool.held_by("me")
    assert kept.until > slot.lease.until + timedelta(seconds=900)


def test_a_task_that_is_paused_before_it_can_say_so_keeps_its_slot_for_no_longer(pool, numbers):
    """The broker's timeout goes on meanwhile."""
    with leased_slot(pool, "me", 60) as slot:
        slot.keep_for(1000)
        [(said_at,)] = numbers.execute("SELECT clock_timestamp()")
        numbers.execute("SELECT pg_sleep(1)")
    [kept] = pool.held_by("me")
    assert kept.until < said_at + timedelta(seconds=1000)


def test_a_slot_whose_renewal_may_come_later_cannot_be_kept(pool, numbers):
    """It would end what was said about how long the slot stays leased, while the driver counts on it."""
    pool.may_renew.clear()
    with psycopg.connect(numbers.url.replace("+psycopg", "")) as other:
        with pytest.raises(Unavailable, match="a renewal of it may come later"), leased_slot(pool, "me", 0.6) as slot:
            other.execute(
                "SELECT FROM dualwrite_slot WHERE transactional_id = %s FOR UPDATE", [slot.lease.transactional_id]
            )
            pool.may_renew.set()
            assert pool.asked.acquire(timeout=PATIENCE_S)
            slot.keep_for(1000)
        other.rollback()
        assert pool.renewals.acquire(timeout=PATIENCE_S)


def test_a_task_that_fails_keeps_its_lease_for_the_driver(pool):
    with pytest.raises(KeyError), leased_slot(pool, "me", 60):
        raise KeyError
    assert pool.held_by("me")


def test_a_lost_lease_ends_the_renewals_and_takes_nothing_from_the_new_holder(pool, caplog):
    with leased_slot(pool, "me", 0.6) as slot:
        pool.release({slot.lease.transactional_id: slot.lease.owner})
        other = pool.lease("you", 60)
        assert other.transactional_id == slot.lease.transactional_id
        assert pool.renewals.acquire(timeout=PATIENCE_S)
    assert "the lease is lost" in caplog.text
    assert pool.held_by("you") == [other]


BY_LEG = pytest.mark.parametrize(
    ("numbers", "way"),
    [
        ("postgresql", "staging"),
        ("mariadb", "staging"),
        pytest.param("postgresql", "prepared", marks=pytest.mark.thorough),
    ],
    indirect=["numbers"],
)


@pytest.fixture
def outlasted(numbers, way):
    """A run that has prepared its first partition, whose time to be decided is over."""
    job = OneTask(numbers, way)
    job.begin()
    job.first = job.run_task(ids=range(ROWS_OF_ONE // 2))
    end_leases(numbers)
    return job


def end_leases(numbers):
    numbers.execute("UPDATE dualwrite_slot SET lease_until = '2001-01-01' WHERE lease_owner IS NOT NULL")
    numbers.execute("UPDATE dualwrite_slot SET kept_until = '2001-01-01' WHERE kept_until IS NOT NULL")


@BY_LEG
def test_a_task_fails_at_once_where_another_partition_of_its_run_has_outlasted_its_time(outlasted, numbers):
    """It would take that one's slot, and the driver would blame another decider for it."""
    for _ in range(2):  # and so does its next attempt
        with pytest.raises(TransactionAborted, match=r"prepared too long ago.*raise decide_within_s") as caught:
            outlasted.run_task(ids=range(ROWS_OF_ONE // 2, ROWS_OF_ONE), partition=1)
        assert "partition 1 " in str(caught.value)
    outlasted.fail()
    assert numbers.rows() == numbers.messages() == []
    nothing_is_left(numbers)
    outlasted.finish()
    nothing_is_left(numbers)


@BY_LEG
def test_a_decision_names_the_time_of_a_part_whose_slot_a_later_task_of_the_run_has_taken(
    outlasted, numbers, monkeypatch
):
    with monkeypatch.context() as unlooked:
        unlooked.setattr(Attempt, "_require_in_time", lambda *_: None)
        second = outlasted.run_task(ids=range(ROWS_OF_ONE // 2, ROWS_OF_ONE), partition=1)
    assert second.transactional_id == outlasted.first.transactional_id
    with pytest.raises(
        TransactionAborted, match=r"1 of 2 partitions were prepared too long ago.*raise decide_within_s"
    ):
        outlasted.decide([outlasted.first, second])
    outlasted.fail()
    assert numbers.rows() == numbers.messages() == []
    outlasted.finish()


@BY_LEG
def test_the_slot_of_a_part_that_outlasted_its_time_goes_to_the_next_attempt_at_it_and_to_other_runs(
    outlasted, numbers
):
    again = outlasted.run_task(ids=range(3))
    assert again.transactional_id == outlasted.first.transactional_id
    end_leases(numbers)
    outlasted.begin_another_run()
    outlasted.decide(outlasted.run_task(partition=1))
    numbers.verify(ROWS_OF_ONE)
    nothing_is_left(numbers)


@BY_LEG
def test_the_slot_of_a_task_that_has_died_is_taken_by_another_one_of_its_run(numbers, way):
    """Its lease has ended, but it has prepared nothing that could be decided."""
    job = OneTask(numbers, way)
    job.begin()

    def die(name):
        if name == "write.prepared":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), failpoints.watched(die):
        job.run_task(ids=range(3))
    end_leases(numbers)
    done = job.run_task(partition=1)
    assert numbers.execute("SELECT count(*) FROM dualwrite_slot") == [(1,)]
    job.decide(done)
    numbers.verify(ROWS_OF_ONE)
    nothing_is_left(numbers)


def lose_what_is_decided(numbers, coordinator):
    """As an operator, abort in Kafka what a task has decided and not completed."""
    engine = create_engine(numbers.url)
    pending = {
        row.kafka_id(row.prepared.incarnation): row.prepared
        for row in SqlStateStore(engine).find(f"{numbers.sink}.spark#")
        if row.prepared.has_transaction and row.completed is None
    }
    engine.dispose()
    assert len(pending) == 1
    coordinator.end(pending, committed=False, deadline=Deadline(30))


def test_a_loss_that_a_task_has_left_is_reported_once(numbers, coordinator):
    """A task dies after the decision, and an operator aborts its Kafka transaction before another process settles."""
    job = OneTask(numbers, "write_batch")
    job.begin()

    def die(name):
        if name == "write.decided":
            raise ZeroDivisionError

    with failpoints.watched(die):
        job.run_task()
    lose_what_is_decided(numbers, coordinator)
    with pytest.raises(DecidedTransactionLost, match="aborted by the broker"):
        job.begin()
    job.begin()
    assert len(numbers.rows()) == ROWS_OF_ONE
    assert numbers.messages() == []


def test_a_loss_that_a_task_of_foreach_partition_finds_is_its_error(numbers, coordinator):
    """No driver looks for it at the end; and the next run takes it for one that is known."""
    job = OneTask(numbers, "foreach_partition")
    job.begin()

    def die(name):
        if name == "write.decided":
            lose_what_is_decided(numbers, coordinator)
            raise ZeroDivisionError

    with failpoints.watched(die), pytest.raises(DecidedTransactionLost, match="aborted by the broker"):
        job.run_task()
    assert not job.run_task().written
    assert len(numbers.rows()) == ROWS_OF_ONE
    nothing_is_left(numbers)
