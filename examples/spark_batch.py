"""Write all flights of a year to a topic and a table, with a Spark job that may run again.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections import Counter
from pathlib import Path

from flights import FLIGHTS, KEY, TABLE, read_flights, start_spark, write_parquet
from sqlalchemy import create_engine, text

from dualwrite import migrations
from dualwrite.sinks.spark import write_batch
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed


def main() -> None:
    """Write the flights, write them again, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres, tempfile.TemporaryDirectory() as directory:
        topic = kafka.create_topic(f"flights-{secrets.token_hex(4)}", partitions=4)
        url = postgres.create_database()
        engine = create_engine(url)
        with engine.begin() as connection:
            migrations.upgrade(connection)  # in production: `dualwrite migrate`, as the owner of the tables
            connection.execute(text(TABLE))

        source = Path(directory) / "flights"
        write_parquet(read_flights(), source, files=4)
        spark = start_spark()
        for attempt in ("first", "second"):
            report = write_batch(
                spark.read.parquet(str(source)),
                sink="flights",
                batch_id="2013",
                kafka=kafka.client_config(),
                url=url,
                topic=topic,
                table="flights",
                key=KEY,
            )
            print(f"{attempt} run: {report.written_rows} rows written, {report.rows} in all")
        spark.stop()

        query = "SELECT month, day, dep_time, carrier, flight, tailnum, origin, dest FROM flights"
        with engine.connect() as connection:
            rows = Counter(tuple(row) for row in connection.execute(text(query)))
        engine.dispose()
        names = query.removeprefix("SELECT ").removesuffix(" FROM flights").split(", ")
        messages: Counter[tuple[object, ...]] = Counter()
        for record in read_committed(kafka.client_config(), topic, timeout_s=600):
            assert record.value is not None
            message = json.loads(record.value)
            messages[tuple(message[name] for name in names)] += 1
        print(f"rows: {rows.total()}, messages: {messages.total()}, equal: {rows == messages}")
        assert rows.total() == FLIGHTS


if __name__ == "__main__":
    main()
