"""An order service whose dual writes are measured, read as Prometheus reads them.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name. It needs ``opentelemetry-exporter-prometheus``.
"""

from __future__ import annotations

import secrets
from urllib.request import urlopen

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server
from sqlalchemy import create_engine, text

from dualwrite import DualWriter, migrations
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres

SHOWN = ("dualwrite_writes_total", "dualwrite_ready", "dualwrite_lane_count", "dualwrite_duration_seconds_count")


class OutOfStockError(Exception):
    """There are not enough items in stock."""


def place_orders(writer: DualWriter, topic: str) -> None:
    """Place two orders, and refuse one."""
    for number, in_stock in ((1, True), (2, False), (3, True)):
        try:
            with writer.transaction() as tx:
                tx.connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": number})
                tx.produce(topic, value=f"order {number}")
                if not in_stock:
                    raise OutOfStockError
        except OutOfStockError:
            pass


def scrape(port: int) -> list[str]:
    """The samples that the example shows, as Prometheus reads them."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sorted(line for line in lines if line.startswith(SHOWN))


def without_scope(sample: str) -> str:
    """A sample without the labels that name the library and its version."""
    name, _, rest = sample.partition("{")
    labels, _, value = rest.partition("} ")
    kept = [label for label in labels.split(",") if not label.startswith("otel_scope")]
    return f"{name}{{{','.join(kept)}}} {value}"


def main() -> None:
    """Measure three dual writes, and print what Prometheus sees while the writer is open."""
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))  # before the writer is made
    server, _ = start_http_server(0, addr="127.0.0.1")
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"orders-{secrets.token_hex(4)}", partitions=2)
        engine = create_engine(postgres.create_database())
        with engine.connect() as connection:
            migrations.upgrade(connection)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id integer PRIMARY KEY)"))
        with DualWriter("order-service", kafka=kafka.client_config(), database=engine) as writer:
            place_orders(writer, topic)
            assert writer.ready, writer.health().problems
            for sample in scrape(server.server_port):
                print(without_scope(sample))
        assert not [sample for sample in scrape(server.server_port) if sample.startswith("dualwrite_ready")]
        engine.dispose()
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
