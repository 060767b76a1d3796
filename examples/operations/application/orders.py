"""A service that places an order each second: the application of ``compose.yaml`` and of the Kubernetes base beside it.

Its settings are environment variables:

- ``DATABASE_URL``, ``BOOTSTRAP_SERVERS`` and ``TOPIC``: where it writes.
- ``WRITER``: the name of its writer, such as a StatefulSet's pod has; or ``FLEET``: a fleet, of which it leases an id.
- ``OUTBOX``: what becomes of messages while Kafka is away; ``fallback`` by default.
- ``PAUSE_S``: between two orders.
- ``LISTEN``: the address of ``/metrics``, ``/ready`` (readiness) and ``/live`` (liveness).

SIGTERM ends it after the present order, with its writer closed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import create_engine, text

from dualwrite import DualWriteError, DualWriter

logger = logging.getLogger("orders")


def serve(writer: DualWriter, host: str, port: int) -> ThreadingHTTPServer:
    """Answer the probes and Prometheus, in threads of their own."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            health = writer.health()
            if self.path == "/metrics":
                self._answer(200, generate_latest(), CONTENT_TYPE_LATEST)
            elif self.path == "/ready":
                self._answer(200 if health.ready else 503, "\n".join(health.problems or ["ready"]).encode())
            elif self.path == "/live":  # only a restart helps a writer that was fenced
                self._answer(503 if health.fenced else 200, b"fenced" if health.fenced else b"live")
            else:
                self._answer(404, b"")

        def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes are no news."""

    server = ThreadingHTTPServer((host, port), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def make_writer(engine: Any) -> DualWriter:
    """The writer, under a name of its own or with an id of the fleet. Not yet open."""
    settings: dict[str, Any] = {
        "kafka": {"bootstrap.servers": os.environ["BOOTSTRAP_SERVERS"]},
        "database": engine,
        "outbox": os.environ.get("OUTBOX", "fallback"),
    }
    if fleet := os.environ.get("FLEET"):
        return DualWriter.leased(fleet, **settings)
    return DualWriter(os.environ["WRITER"], **settings)


def place_order(writer: DualWriter, topic: str) -> None:
    """One row and one message."""
    with writer.transaction() as tx:
        number = tx.connection.execute(text("INSERT INTO shop_orders (item) VALUES ('tea') RETURNING id")).scalar_one()
        tx.produce(topic, key=str(number), value=f'{{"order": {number}}}')


def main() -> None:
    """Place orders until SIGTERM comes."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))  # before the writer is made
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    engine = create_engine(os.environ["DATABASE_URL"])
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(4711)"))  # several processes may start at once
        connection.execute(
            text(
                "CREATE TABLE IF NOT EXISTS shop_orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item text)"
            )
        )
    host, _, port = os.environ.get("LISTEN", "127.0.0.1:8000").rpartition(":")
    writer = make_writer(engine)
    server = serve(writer, host, int(port))
    logger.info("listening on http://%s:%s", host, server.server_port)
    with writer:
        while not stopping.wait(float(os.environ.get("PAUSE_S", "1"))):
            try:
                place_order(writer, os.environ["TOPIC"])
            except DualWriteError as error:
                logger.warning("no order: %s", error)  # a real caller looks at error.outcome before it tries again
    server.shutdown()
    engine.dispose()


if __name__ == "__main__":
    main()
