"""A Spark batch of 336,776 real flights into a Kafka topic and a PostgreSQL table, and the same batch once more.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from flights import TABLE, messages_of, read_flights, rows_of, spark_session, unpack
from sqlalchemy import create_engine, text

from dualwrite import migrations
from dualwrite.sinks.spark import write_batch
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres


def main() -> None:
    """Write the batch twice, and compare both sides."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        topic = kafka.create_topic(f"flights-{secrets.token_hex(4)}", partitions=4)
        url = postgres.create_database()
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        with engine.begin() as connection:
            connection.execute(text(TABLE))

        spark = spark_session("flights")
        flights = read_flights(spark, unpack(Path(directory)), partitions=4)
        for _ in range(2):
            report = write_batch(
                flights,
                sink="flights",
                batch_id="2013",
                kafka=kafka.client_config(),
                url=url,
                topic=topic,
                table="flights",
                key="tailnum",
            )
            print(f"batch 2013: {report.rows} rows, {report.written_rows} written now")
        spark.stop()

        rows, messages = rows_of(engine), messages_of(kafka.client_config(), topic)
        engine.dispose()
        print(
            f"rows in the table: {sum(rows.values())}, messages in the topic: {sum(messages.values())}, "
            f"equal: {rows == messages}"
        )


if __name__ == "__main__":
    main()
