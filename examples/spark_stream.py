"""A stream of flights whose driver dies in the middle; after a restart it writes what is missing, and nothing twice.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from flights import KEY, TABLE, read_flights, start_spark, write_parquet
from sqlalchemy import create_engine, text

from dualwrite import migrations
from dualwrite.sinks.spark import foreach_batch
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

STREAMED = 30_000
"""Number of flights, in three files, each a micro-batch."""


def run_query(bootstrap_servers: str, url: str, topic: str, directory: str) -> None:
    """Write every file that is not written yet, one micro-batch for each, and end."""
    spark = start_spark()
    source = f"{directory}/source"
    query = (
        spark.readStream.schema(spark.read.parquet(source).schema)
        .option("maxFilesPerTrigger", "1")
        .parquet(source)
        .writeStream.foreachBatch(
            foreach_batch(
                sink="flight-stream",
                kafka={"bootstrap.servers": bootstrap_servers},
                url=url,
                topic=topic,
                table="flights",
                key=KEY,
            )
        )
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def main() -> None:
    """Run the query in a process that dies in its second micro-batch, run it again, and look at both sides."""
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres, tempfile.TemporaryDirectory() as directory:
        topic = kafka.create_topic(f"flights-{secrets.token_hex(4)}", partitions=4)
        url = postgres.create_database()
        engine = create_engine(url)
        with engine.begin() as connection:
            migrations.upgrade(connection)
            connection.execute(text(TABLE))
        write_parquet(read_flights().slice(0, STREAMED), Path(directory) / "source", files=3)
        arguments = [sys.executable, __file__, kafka.bootstrap_servers, url, topic, directory]

        # The fail point makes the driver send SIGKILL to itself after the second micro-batch, before Spark has recorded it.
        first = subprocess.run(arguments, env={**os.environ, "DUALWRITE_FAILPOINT": "spark.driver_done:2"}, check=False)
        assert first.returncode == -signal.SIGKILL
        with engine.connect() as connection:
            print(f"killed: {connection.scalar(text('SELECT count(*) FROM flights'))} rows")

        subprocess.run(arguments, check=True)
        with engine.connect() as connection:
            rows = sorted(map(tuple, connection.execute(text("SELECT month, day, carrier, flight, dest FROM flights"))))
        engine.dispose()
        found = [json.loads(record.value or b"") for record in read_committed(kafka.client_config(), topic)]
        messages = sorted((m["month"], m["day"], m["carrier"], m["flight"], m["dest"]) for m in found)
        print(f"started again: {len(rows)} rows, {len(messages)} messages, equal: {rows == messages}")


if __name__ == "__main__":
    if sys.argv[1:]:
        run_query(*sys.argv[1:])
    else:
        main()
