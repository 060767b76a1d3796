"""A Kafka that does not answer: who waits, for how long, and what ends it. The broker is suspended, or killed, in each test."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
from harness.engines import ENGINES
from harness.orders import on_postgresql, write
from harness.patience import PATIENCE_S, patient, wait_until
from sqlalchemy import insert, select, text, update

from dualwrite import (
    CompletionPending,
    DualWriteError,
    DualWriter,
    TransactionAborted,
    Unavailable,
    WriterLimits,
    failpoints,
)
from dualwrite.protocol.process import Redo, redo_after
from dualwrite.testing.checker import read_committed

pytestmark = on_postgresql


@pytest.fixture
def topic(mortal_kafka, request):
    return mortal_kafka.create_topic(f"silence-{abs(hash(request.node.name))}", 1)


@contextmanager
def suspended(kafka):
    kafka.suspend()
    try:
        yield
    finally:
        kafka.resume()


@contextmanager
def killed(kafka):
    kafka.kill()
    try:
        yield
    finally:
        kafka.start()


@pytest.mark.parametrize("away", [suspended, killed])
@pytest.mark.parametrize("engine_name", ENGINES)
def test_once_kafka_is_known_to_be_silent_blocks_are_refused_at_once_and_told_of_kafka(
    mortal_kafka, engine, orders, topic, engine_name, away
):
    settings = patient(mortal_kafka.client_config())
    limits = WriterLimits(max_lanes=2, lane_timeout_s=PATIENCE_S, timeout_s=120)
    is_away = threading.Event()

    def produce(tx, number):
        tx.produce(topic, value=str(number))
        tx.connection.execute(insert(orders).values(id=number))

    def block(number):
        with writer.transaction() as tx:
            produce(tx, number)
            inside.release()
            assert is_away.wait(PATIENCE_S)

    with DualWriter(
        "silent", kafka={**settings, "dualwrite.engine": engine_name}, database=engine, limits=limits
    ) as writer:
        inside = threading.Semaphore(0)
        with ThreadPoolExecutor(2) as threads:
            under_way = [threads.submit(block, number) for number in range(2)]
            for _ in under_way:
                assert inside.acquire(timeout=PATIENCE_S)
            with away(mortal_kafka):
                is_away.set()
                # It waits for a lane, and is refused as soon as it is known that those who have the lanes wait for Kafka.
                with pytest.raises(Unavailable, match="has not answered since") as told, writer.transaction():
                    pass
                assert told.value.silent
                assert f"Kafka at {mortal_kafka.bootstrap_servers}" in str(told.value)
                found = writer.health()
                assert not found.ready
                assert str(found.silence) in found.problems
                with pytest.raises(Unavailable, match="has not answered since"), writer.transaction():
                    pass
            wait_until(lambda: writer.ready)
            assert writer.health().silence is None
            for one in under_way:
                with suppress(DualWriteError):
                    one.result()
        write(writer, topic, orders, 10)


@pytest.fixture
def writer(mortal_kafka, engine, engine_name):
    settings = patient(mortal_kafka.client_config())
    limits = WriterLimits(max_lanes=2, flush_timeout_s=1.0, timeout_s=120, lane_timeout_s=5)
    with DualWriter(
        "silent", kafka={**settings, "dualwrite.engine": engine_name}, database=engine, limits=limits
    ) as writer:
        yield writer


@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_block_lets_go_of_its_rows_although_kafka_stays_silent_and_others_are_refused(
    mortal_kafka, engine, orders, topic, writer
):
    """It holds them for ``flush_timeout_s``, one second here. A busy machine adds some."""

    def change_too(silent_since):
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '60s'"))
            changed = connection.execute(update(orders).where(orders.c.id == 1).values(id=3)).rowcount
            return changed, time.monotonic() - silent_since

    write(writer, topic, orders, 1)
    with ThreadPoolExecutor(1) as threads, ExitStack() as until_back:
        with pytest.raises((TransactionAborted, Unavailable)) as told, writer.transaction() as tx:
            tx.connection.execute(update(orders).where(orders.c.id == 1).values(id=2))
            until_back.enter_context(suspended(mortal_kafka))
            other = threads.submit(change_too, time.monotonic())
            tx.produce(topic, value="2")
        assert redo_after(told.value) is Redo.AGAIN
        changed, seconds = other.result()
        assert changed == 1
        assert seconds < 10, f"another transaction had the row {seconds:.1f} s after Kafka fell silent"
        wait_until(lambda: writer.health().silence is not None)
        with pytest.raises(Unavailable) as refused:
            writer.submit(lambda tx: tx.produce(topic, value="4")).result()
        assert refused.value.silent
    wait_until(lambda: writer.ready)
    write(writer, topic, orders, 5)


def hold_soon(condition, what):
    """Wait for it, no longer than a busy machine takes for what the pages say takes two seconds."""
    began = time.monotonic()
    wait_until(condition)
    seconds = time.monotonic() - began
    assert seconds < 15, f"{what} after {seconds:.1f} s"


@pytest.mark.parametrize("engine_name", ENGINES)
def test_readiness_follows_a_flush_that_is_stuck_and_the_return_of_kafka_without_any_dual_write(
    mortal_kafka, orders, topic, writer
):
    for number in (1, 2):
        write(writer, topic, orders, number)
    with ThreadPoolExecutor(1) as threads, suspended(mortal_kafka):
        stuck = threads.submit(write, writer, topic, orders, 3)
        hold_soon(lambda: not writer.ready, "a flush was stuck, and the writer not ready")
        assert stuck.exception() is not None
        assert not writer.ready
    hold_soon(lambda: writer.ready, "Kafka was back, and the writer ready")
    assert writer.health().problems == ()


FOREVER = WriterLimits(max_lanes=4, timeout_s=3600, lane_timeout_s=3600)


@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_decided_block_is_told_as_soon_as_kafka_is_known_to_be_silent_and_is_completed_later(
    mortal_kafka, engine, orders, topic, engine_name
):
    settings = patient(mortal_kafka.client_config())

    def suspend(name):
        if name == "write.decided":
            mortal_kafka.suspend()

    with DualWriter(
        "silent", kafka={**settings, "dualwrite.engine": engine_name}, database=engine, limits=FOREVER
    ) as writer:
        with failpoints.watched(suspend), ThreadPoolExecutor(1) as threads:
            decided = threads.submit(write, writer, topic, orders, 1)
            try:
                error = decided.exception(PATIENCE_S)
                assert writer.health().silence is not None
            finally:
                mortal_kafka.resume()
        assert isinstance(error, CompletionPending)
        assert error.outcome == "unknown"
        values = [message.value for message in read_committed(mortal_kafka.client_config(), topic)]
        assert values == [b"1"]
        wait_until(lambda: writer.ready)
        assert writer.health().unreported_losses == 0


def test_a_block_whose_lane_asks_kafka_in_vain_is_refused_as_soon_as_that_is_known(mortal_kafka, engine, topic):
    settings, suspended_now = patient(mortal_kafka.client_config()), threading.Event()

    def block():
        with writer.transaction():
            inside.release()
            assert suspended_now.wait(PATIENCE_S)

    with (
        DualWriter("silent", kafka=settings, database=engine, limits=FOREVER) as writer,
        ThreadPoolExecutor(4) as threads,
    ):
        inside = threading.Semaphore(0)
        others = [threads.submit(block) for _ in range(3)]
        for _ in others:
            assert inside.acquire(timeout=PATIENCE_S)
        with suspended(mortal_kafka):
            try:
                error = threads.submit(block).exception(PATIENCE_S)  # on a lane that must be claimed first
            finally:
                suspended_now.set()
        assert isinstance(error, Unavailable)
        assert error.silent
        assert [one.exception() for one in others] == [None] * 3


def test_a_service_with_few_threads_answers_every_request_and_does_nothing_for_clients_that_have_gone(
    mortal_kafka, engine, orders, topic
):
    """With the default times, of which the page says that every request is answered within ten seconds."""

    def block(number):
        write(writer, topic, orders, number)

    def unit(number):
        def work(tx):
            tx.produce(topic, value=str(number))
            tx.connection.execute(insert(orders).values(id=number))

        writer.submit(work, within_s=1).result()

    def noop(_):
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))

    def serve(handler, number, due):
        error = None
        try:
            handler(number)
        except (Unavailable, TransactionAborted) as raised:
            error = raised
        return handler, time.monotonic() - due, error

    with DualWriter("silent", kafka=patient(mortal_kafka.client_config()), database=engine) as writer:
        for number, handler in enumerate((block, unit)):
            handler(number)
        with ThreadPoolExecutor(8) as threads, suspended(mortal_kafka):
            answers = []
            for number in range(2, 34):
                handlers = (unit if number % 2 else block, noop)
                answers += [threads.submit(serve, handler, number, time.monotonic()) for handler in handlers]
                time.sleep(0.25)
            answered = [one.result(PATIENCE_S) for one in answers]
            assert not writer.ready
        assert max(seconds for _, seconds, _ in answered) < 20
        assert [error for handler, _, error in answered if handler is noop] == [None] * 32
        refused = [error for handler, _, error in answered if handler is not noop]
        assert None not in refused
        assert refused[-1].silent
        hold_soon(lambda: writer.ready, "Kafka was back, and the writer ready")
        block(34)
    with engine.connect() as connection:
        assert sorted(connection.scalars(select(orders.c.id))) == [0, 1, 34]
    messages = [int(message.value) for message in read_committed(mortal_kafka.client_config(), topic)]
    assert sorted(messages) == [0, 1, 34]
