"""A Spark stream of flights that is killed in the middle, restarts from its checkpoint, and loses or repeats nothing.

The first run is killed by a fail point between the database's commit and Kafka's, the worst moment there is. Run it without
arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that ``DUALWRITE_TEST_KAFKA`` and
``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from flights import COLUMNS, TABLE, messages_of, rows_of, spark_session, unpack
from sqlalchemy import create_engine, text

from dualwrite import migrations
from dualwrite.sinks.spark import foreach_batch
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres

DAYS = 6
PER_DAY = 800


def run_stream(job: dict[str, object]) -> None:
    """The streaming job, in a process of its own: one micro-batch for each file that is there."""
    spark = spark_session("flights stream")
    query = (
        spark.readStream.schema(COLUMNS.format(string="string", timestamp="timestamp"))
        .option("header", "true")
        .option("nullValue", "NA")
        .option("maxFilesPerTrigger", 1)
        .csv(str(job["source"]))
        .writeStream.foreachBatch(foreach_batch(**job["sink"]))  # type: ignore[arg-type]
        .option("checkpointLocation", str(job["checkpoint"]))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def write_days(flights: Path, directory: Path) -> None:
    """Some days of flights, a file for each."""
    header, *lines = flights.read_text(encoding="utf-8").splitlines()
    for day in range(DAYS):
        part = lines[day * PER_DAY : (day + 1) * PER_DAY]
        (directory / f"day-{day}.csv").write_text("\n".join([header, *part]) + "\n", encoding="utf-8")


def main() -> None:
    """Run the stream, kill it, run it again, and compare both sides."""
    with tempfile.TemporaryDirectory() as name, EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        directory = Path(name)
        source = directory / "days"
        source.mkdir()
        write_days(unpack(directory), source)
        topic = kafka.create_topic(f"flights-{secrets.token_hex(4)}", partitions=2)
        url = postgres.create_database()
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        with engine.begin() as connection:
            connection.execute(text(TABLE))

        sink = {"sink": "flights", "kafka": kafka.client_config(), "url": url, "topic": topic, "table": "flights"}
        job = {"source": str(source), "checkpoint": str(directory / "checkpoint"), "sink": sink}
        job_file = directory / "job.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        for number, failpoint in enumerate(["write.decided:3", ""], start=1):
            done = subprocess.run(
                [sys.executable, __file__, str(job_file)],
                env=os.environ | {"DUALWRITE_FAILPOINT": failpoint},
                stderr=subprocess.DEVNULL,
                check=False,
            )
            print(f"run {number}: {'died in the middle' if done.returncode else 'came to its end'}")

        rows, messages = rows_of(engine), messages_of(kafka.client_config(), topic)
        engine.dispose()
        print(
            f"rows in the table: {sum(rows.values())}, messages in the topic: {sum(messages.values())}, "
            f"equal: {rows == messages}"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_stream(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        main()
