"""Opening while Kafka is away, on real servers: at once, refused or waiting meanwhile, and all is checked when it is back."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from harness.members import METADATA, copies, fill, make_member, numbers
from harness.orders import on_postgresql
from harness.patience import PATIENCE_S, patient, wait_until
from sqlalchemy import insert, select, text

from dualwrite import ConfigurationError, DualWriteError, DualWriter, Fenced, Unavailable, WriterLimits
from dualwrite.clock import Deadline
from dualwrite.errors import DatabaseWentBack
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.values import TransactionStatus
from dualwrite.recovery.recover import status
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed
from dualwrite.units import UnitWriter

pytestmark = on_postgresql
ROOT = Path(__file__).parents[2]
LIMITS = WriterLimits(max_lanes=2, timeout_s=PATIENCE_S)
FALLING_BACK = WriterLimits(max_lanes=2, timeout_s=PATIENCE_S, fallback_after_s=0.5)


DIES_ONCE_DECIDED = """
import sys
from dualwrite import DualWriter
from sqlalchemy import text

servers, url, topic = sys.argv[1:]
with DualWriter("goes-on", kafka={"bootstrap.servers": servers}, database=url) as writer:
    with writer.transaction() as tx:
        tx.produce(topic, value="1", key="k")
        tx.connection.execute(text("INSERT INTO orders (id) VALUES (1)"))
"""


@pytest.fixture
def settings(mortal_kafka):
    return patient(mortal_kafka.client_config())


@pytest.fixture
def topic(mortal_kafka, dualwrite_topic):
    mortal_kafka.create_topic(dualwrite_topic, 1)
    return dualwrite_topic


@contextmanager
def silence(kafka):
    kafka.suspend()
    try:
        yield
    finally:
        kafka.resume()


@pytest.fixture
def place(topic, orders):
    def place(writer, number):
        with writer.transaction() as tx:
            tx.produce(topic, value=str(number), key="k")
            tx.connection.execute(insert(orders).values(id=number))

    return place


@pytest.fixture
def both_have(engine, orders, settings, topic):
    def both_have(*numbers):
        with engine.connect() as connection:
            rows = sorted(connection.execute(select(orders.c.id)).scalars())
        return rows == sorted(int(message.value) for message in read_committed(settings, topic)) == list(numbers)

    return both_have


@pytest.fixture
def kafka_ids(settings, engine):
    """The incarnations of a writer's first lane that Kafka knows."""

    def known(name):
        [row] = SqlStateStore(engine).read([name])
        with KafkaCoordinator(KafkaConfig.parse(settings)) as coordinator:
            views = coordinator.describe([row.kafka_id(number) for number in range(1, 20)], Deadline(PATIENCE_S))
        return {kafka_id for kafka_id, view in views.items() if view.status is not TransactionStatus.NO_SUCH_ID}

    return known


@pytest.fixture
def that_falls_back(settings, engine):
    """Makes writers whose messages may wait. Those that a test does not close are closed after it."""
    made = []

    def make(name):
        writer = DualWriter(name, kafka=settings, database=engine, outbox="fallback", limits=FALLING_BACK)
        made.append(writer)
        return writer

    yield make
    for writer in made:
        with suppress(DualWriteError):
            writer.close()


def state(engine, name):
    with engine.connect() as connection:
        question = text("SELECT cluster_id, incarnation FROM kafka_transaction_state WHERE transactional_id = :name")
        return connection.execute(question, {"name": name}).one()


def test_a_process_starts_while_the_broker_is_stopped_and_writes_once_it_is_started(
    mortal_kafka, settings, engine, place, both_have
):
    mortal_kafka.stop()
    writer = DualWriter("starts", kafka=settings, database=engine, limits=LIMITS)
    try:
        writer.open(wait=False)
        address = settings["bootstrap.servers"]
        wait_until(lambda: address in "".join(writer.health().problems))
        for _ in range(2):
            with pytest.raises(Unavailable, match=rf"Kafka at {address} does not answer.*since \d\d:\d\d:\d\d UTC"):
                place(writer, 0)
        assert not writer.ready
        assert address in writer.health().problems[0]
        mortal_kafka.start()
        wait_until(lambda: writer.ready)
        place(writer, 1)
    finally:
        if not mortal_kafka.running:
            mortal_kafka.start()
        writer.close()
    assert both_have(1)


def test_a_writer_whose_messages_may_wait_opens_in_silence_and_finishes_what_its_former_owner_decided(
    mortal_kafka, settings, url, engine, topic, that_falls_back, place, both_have
):
    former = subprocess.run(
        [sys.executable, "-c", DIES_ONCE_DECIDED, settings["bootstrap.servers"], url, topic],
        env={**os.environ, "DUALWRITE_FAILPOINT": "write.decided:1:kill"},
        check=False,
    )
    assert former.returncode == -signal.SIGKILL
    with silence(mortal_kafka):
        writer = that_falls_back("goes-on")
        writer.open()
        lanes = [pooled.lane for pooled in writer._lanes.all]
        assert all(lane.may_wait and not lane.usable for lane in lanes)
        assert any(lane.row.prepared.has_transaction and lane.row.completed is None for lane in lanes)
        assert " unverified from " in state(engine, "goes-on").cluster_id
        place(writer, 2)
    try:
        wait_until(lambda: both_have(1, 2))
        wait_until(lambda: writer.ready)
        place(writer, 3)
    finally:
        writer.close()
    assert both_have(1, 2, 3)
    assert "unverified" not in state(engine, "goes-on").cluster_id


def test_a_database_that_went_back_is_noticed_before_kafka_is_asked_for_anything_new(
    mortal_kafka, settings, engine, that_falls_back, place, kafka_ids
):
    name = "went-back"
    for number in (1, 2):
        with DualWriter(name, kafka=settings, database=engine, limits=LIMITS) as writer:
            place(writer, 2 * number)
            place(writer, 2 * number + 1)
    with engine.begin() as connection:  # a backup from before all but the first claim
        back = "UPDATE kafka_transaction_state SET incarnation = 1, settled_incarnation = 0, prepared_transaction_state = NULL"
        connection.execute(text(back))
    known = kafka_ids(name)
    with silence(mortal_kafka):
        for _ in range(3):  # in a loop of crashes: the last incarnation alone would be new to Kafka again
            that_falls_back(name).open()
    writer = that_falls_back(name)
    with pytest.raises(DatabaseWentBack):
        writer.open()
    with silence(mortal_kafka):
        writer = that_falls_back(name)
        writer.open()
    wait_until(lambda: writer.health().refused is not None)
    assert "gone back in time" in writer.health().refused
    with pytest.raises(ConfigurationError, match="gone back in time"):
        place(writer, 9)
    assert kafka_ids(name) == known
    with pytest.raises(DatabaseWentBack):
        writer.close()


def test_of_two_that_open_in_silence_the_database_fences_the_first(mortal_kafka, that_falls_back, place, both_have):
    with silence(mortal_kafka):
        first, second = (that_falls_back("two") for _ in range(2))
        first.open()
        second.open()
    try:
        with pytest.raises(Fenced):
            place(first, 1)
        wait_until(lambda: second.ready)
        place(second, 2)
    finally:
        first.close()
        second.close()
    assert both_have(2)


@pytest.mark.parametrize(
    ("away", "back"), [("suspend", "resume"), pytest.param("kill", "start", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_consumer_and_a_writer_of_units_raise_within_their_time_and_work_once_they_are_started_again(
    mortal_kafka, settings, url, engine, topic, away, back, asynchronous
):
    METADATA.create_all(engine)
    target, log = (mortal_kafka.create_topic(f"{topic}-{name}", 1) for name in ("copies", "units"))
    fill(settings, topic, 3)

    def copy(timeout_s, **ends):
        place = {"kafka": settings, "url": url, "source": topic, "target": target, "protocol": "cooperative"}
        limits = {"timeout_s": timeout_s}
        make_member("0", topic, asynchronous=asynchronous, limits=limits, **place).run(**ends)

    def write_unit(timeout_s):
        with UnitWriter(log, kafka=settings, database=url, timeout_s=timeout_s) as writer, writer.unit() as unit:
            unit.produce(b"1", b"k")

    threads = set(threading.enumerate())
    why = f"Kafka could not report its cluster id in time: .*{mortal_kafka.bootstrap_servers}"
    getattr(mortal_kafka, away)()
    try:
        for start in (copy, write_unit):
            began_s = time.monotonic()
            with pytest.raises(Unavailable, match=why):
                start(timeout_s=2)
            assert time.monotonic() - began_s >= 2, "Kafka may answer again so soon"
        wait_until(
            lambda: set(threading.enumerate()) <= threads,
            30,
            otherwise=lambda: f"{set(threading.enumerate()) - threads} go on",
        )
    finally:
        getattr(mortal_kafka, back)()
    copy(PATIENCE_S, max_messages=3)
    write_unit(PATIENCE_S)
    assert copies(settings, url, target) == (numbers(3), numbers(3))
    assert b"1" in [record.value for record in read_committed(settings, log)], "between the markers of its unit"


def test_status_shows_rows_that_no_kafka_has_seen(mortal_kafka, settings, engine, that_falls_back):
    with silence(mortal_kafka):
        that_falls_back("unseen").open()
    shown = {one.row.transactional_id: one for one in status("unseen", kafka=settings, database=engine)}
    assert set(shown) == {"unseen", "unseen#1", "unseen#outbox"}
    assert not any(one.needs_recovery for one in shown.values())


def test_gunicorns_workers_are_replaced_in_silence_and_serve_what_needs_no_writer(
    mortal_kafka, settings, url, engine, topic, place_order, both_have
):
    """A worker that fails to start would end gunicorn, and with it the workers that serve."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = ROOT / "examples" / "gunicorn_orders.py"
    environment = {"SHOP_DATABASE": url, "SHOP_KAFKA": settings["bootstrap.servers"], "SHOP_TOPIC": topic}
    gunicorn = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "-c", program, "-w", "1", "-b", f"127.0.0.1:{port}", "gunicorn_orders:app"],
        cwd=program.parent,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: place_order(port, 1) == 200)
        with silence(mortal_kafka):
            [worker] = children_of(gunicorn.pid)
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: children_of(gunicorn.pid) not in ([], [worker]))
            wait_until(lambda: place_order(port, "no-number") == 404)
            assert place_order(port, 2) == 500, "Unavailable, which the example does not translate"
        wait_until(lambda: place_order(port, 3) == 200)
    finally:
        gunicorn.terminate()
        gunicorn.wait(PATIENCE_S)
    assert both_have(1, 3)


@pytest.fixture
def place_order():
    def place_order(port, number):
        connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.request("POST", f"/orders/{number}")
            return connection.getresponse().status
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    return place_order


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
