"""A Kafka that does not answer: who waits, for how long, and what ends it. The broker is suspended, or killed, in each test."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from harness.engines import ENGINES
from harness.orders import on_postgresql, write
from harness.patience import PATIENCE_S, patient, wait_until
from sqlalchemy import insert

from dualwrite import DualWriteError, DualWriter, Unavailable, WriterLimits

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

    with DualWriter("silent", kafka=settings, database=engine, limits=limits, producer_engine=engine_name) as writer:
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
