"""Orders from Flask under gunicorn: three forked workers take ids of their own; one is killed, then all are replaced.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name; then gunicorn, which loads this file as its application and as
its configuration.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from flask import Flask
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dualwrite import DualWriter, WriterLimits, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


# --- the application: gunicorn imports it once, and forks the workers

app = Flask("shop")
if "SHOP_DATABASE" in os.environ:
    writer = DualWriter.leased(
        "shop",
        kafka={"bootstrap.servers": os.environ["SHOP_KAFKA"]},
        database=os.environ["SHOP_DATABASE"],
        limits=WriterLimits(max_lanes=2),
        lease_timeout_s=3.0,  # 30 s by default; the example is in a hurry
    )


@app.post("/orders/<int:number>")
def place_order(number: int) -> dict[str, Any]:
    """Write the order to the database and announce it in Kafka."""
    with writer.transaction() as tx:
        tx.session.add(Order(id=number))
        tx.produce(os.environ["SHOP_TOPIC"], key=str(number), value=str(number))
    return {"worker": os.getpid(), "id": writer.transactional_id}


# --- the configuration: usually a file of its own, gunicorn.conf.py

preload_app = True
workers = 3


def post_worker_init(worker: object) -> None:
    """Open the writer in each worker, after the fork; at once, also while Kafka or the database is away."""
    del worker
    import gunicorn_orders as shop  # noqa: PLC0415 - a configuration is loaded before the application

    shop.writer.open(wait=False)


def worker_exit(server: object, worker: object) -> None:
    """Close it when the worker ends: its id is free at once."""
    del server, worker
    import gunicorn_orders as shop  # noqa: PLC0415 - as above

    shop.writer.close()


# --- the example


def main() -> None:
    """Place orders at all workers, kill one, add one, replace all, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        engine = create_engine(postgres.create_database())
        with engine.connect() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
        Base.metadata.create_all(engine)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        gunicorn = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "-c", __file__, "-b", f"127.0.0.1:{port}", "gunicorn_orders:app"],
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                "SHOP_DATABASE": engine.url.render_as_string(hide_password=False),
                "SHOP_KAFKA": kafka.client_config()["bootstrap.servers"],
                "SHOP_TOPIC": topic,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            placed = serve_orders(port, gunicorn)
        finally:
            gunicorn.send_signal(signal.SIGTERM)
            gunicorn.wait(60)

        with Session(engine) as session:
            rows = Counter(session.scalars(select(Order.id)))
        engine.dispose()
        messages = Counter(int(record.value or b"") for record in read_committed(kafka.client_config(), topic))
        print("rows equal messages:", rows == messages == Counter(range(placed)))
        assert rows == messages, "the two sides differ"


def serve_orders(port: int, gunicorn: subprocess.Popen[bytes]) -> int:
    """Place orders, one after another, while the workers come and go; returns how many were placed."""
    placed = 0
    ids: dict[int, str] = {}  # of the workers that live, as far as they have answered
    used: set[str] = set()

    def place_until(workers: int, *, others_than: Collection[int] = ()) -> list[str]:
        """Place orders until exactly that many workers live, have each taken one, and are other processes than these."""
        nonlocal placed
        while len(ids) != workers or ids.keys() & others_than:
            answer = ask(port, placed)
            placed += 1
            ids[answer["worker"]] = answer["id"]
            used.add(answer["id"])
            for pid in [pid for pid in ids if not lives(pid)]:
                del ids[pid]
        return sorted(ids.values())

    print("workers take:", *place_until(3))
    killed = min(ids)
    os.kill(killed, signal.SIGKILL)
    place_until(3, others_than={killed})
    print("one was killed, and another has taken its place")
    gunicorn.send_signal(signal.SIGTTIN)
    print("scaled out:", len(set(place_until(4))), "ids for 4 workers")
    gunicorn.send_signal(signal.SIGTTOU)
    print("scaled in:", len(set(place_until(3))), "ids for 3 workers")
    gunicorn.send_signal(signal.SIGHUP)  # new workers start beside the old ones, as in a rolling update
    print("all replaced:", len(set(place_until(3, others_than=set(ids)))), "ids for 3 workers")
    print("ids are below shop-8:", used <= {f"shop-{number}" for number in range(8)})
    return placed


def lives(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ask(port: int, number: int) -> dict[str, Any]:
    """Place one order; ask again while no worker listens."""
    for _ in range(600):
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        with suppress(OSError, HTTPException):
            connection.request("POST", f"/orders/{number}")
            answer = connection.getresponse()
            text = answer.read()
            connection.close()
            if answer.status == 200:
                placed: dict[str, Any] = json.loads(text)
                return placed
        time.sleep(0.1)
    raise TimeoutError("no worker answers")


if __name__ == "__main__":
    main()
