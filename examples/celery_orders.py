"""Orders from Celery's prefork pool: each worker process takes an id of its own, and one is killed inside a dual write.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name; then a Celery worker, which loads this file. Its queue is a
directory, so it needs no other server.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from billiard.util import set_pdeathsig
from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dualwrite import DualWriter, TransactionAborted, Unavailable, WriterLimits, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

ORDERS = 30


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


# --- the application: Celery imports it once, and forks the worker processes

app = Celery("shop", broker="filesystem://")
app.conf.worker_lost_wait = 1  # the task of a killed process runs again after 10 s by default
if "SHOP_DATABASE" in os.environ:
    queue = os.environ["SHOP_QUEUE"]
    app.conf.broker_transport_options = {"data_folder_in": queue, "data_folder_out": queue, "control_folder": queue}
    writer = DualWriter.leased(
        "shop",
        kafka={"bootstrap.servers": os.environ["SHOP_KAFKA"]},
        database=os.environ["SHOP_DATABASE"],
        limits=WriterLimits(max_lanes=2),
        lease_timeout_s=3.0,  # 30 s by default; the example is in a hurry
    )


@worker_process_init.connect
def open_writer(**_: object) -> None:
    """Open the writer in each worker process, after the fork; at once, also while Kafka or the database is away."""
    if sys.platform == "linux":
        # Celery has Linux kill a process once the thread that has forked it ends. With a broker that is read without an event
        # loop, as this one, the thread that replaces a dead process ends when the worker's shutdown begins: what it has forked
        # would be killed at work, perhaps holding the lock that the other processes wait for.
        set_pdeathsig(0)
    writer.open(wait=False)


@worker_process_shutdown.connect
def close_writer(**_: object) -> None:
    """Close it when the process ends: its id is free at once."""
    writer.close()


@app.task(
    name="place_order",
    acks_late=True,  # a task whose process dies runs again
    reject_on_worker_lost=True,
    autoretry_for=(TransactionAborted, Unavailable),  # nothing was written
    max_retries=None,
    retry_backoff=True,
)
def place_order(number: int) -> None:
    """Write the order to the database and announce it in Kafka."""
    with writer.transaction() as tx:
        if tx.session.get(Order, number) is not None:
            return  # this task has run before: its row and its message are there
        tx.session.add(Order(id=number))
        tx.session.flush()
        tx.produce(os.environ["SHOP_TOPIC"], key=str(number), value=str(number))
        if number == ORDERS // 2 and not (Path(queue) / "killed").exists():
            (Path(queue) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


# --- the example


def main() -> None:
    """Place orders by tasks, one of which dies with its process, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres, tempfile.TemporaryDirectory() as directory:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        engine = create_engine(postgres.create_database())
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        Base.metadata.create_all(engine)
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "celery_orders", "worker", "--concurrency", "3"],
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                "SHOP_DATABASE": engine.url.render_as_string(hide_password=False),
                "SHOP_KAFKA": kafka.client_config()["bootstrap.servers"],
                "SHOP_TOPIC": topic,
                "SHOP_QUEUE": directory,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            app.conf.broker_transport_options = dict.fromkeys(
                ["data_folder_in", "data_folder_out", "control_folder"], directory
            )
            for number in range(ORDERS):
                place_order.delay(number)
            with Session(engine) as session:
                while session.scalar(select(func.count(Order.id))) != ORDERS:
                    session.rollback()
                    time.sleep(0.1)
            # It waits until nothing is open, so the worker must still run: its processes settle what the killed one has left.
            # If all ended first, those that are started next would.
            messages = Counter(int(record.value or b"") for record in read_committed(kafka.client_config(), topic))
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)

        print("a worker process was killed:", (Path(directory) / "killed").exists())
        with Session(engine) as session:
            rows = Counter(session.scalars(select(Order.id)))
        engine.dispose()
        print("rows:    ", rows.total())
        print("messages:", messages.total())
        assert rows == messages == Counter(range(ORDERS)), "the two sides differ"


if __name__ == "__main__":
    main()
