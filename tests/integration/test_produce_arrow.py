"""Arrow's columns become the same messages with either engine, straight and through Spark's Kafka leg."""

from contextlib import closing
from operator import itemgetter
from types import SimpleNamespace

import pyarrow as pa
import pytest
from confluent_kafka import Consumer
from harness.patience import PATIENCE_S, patient

from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.sinks.spark.writing import produce_batch

ENTRY = pa.struct([("key", pa.string()), ("value", pa.binary())])
ROWS = 3000
COLUMNS = {
    "value": pa.array([None if row % 100 == 7 else b"value %d" % row for row in range(ROWS)]),
    "key": pa.array([b"key %d" % (row % 37) for row in range(ROWS)]),
    "headers": pa.array(
        [
            None if row % 3 else [{"key": "row", "value": b"%d" % row}, {"key": "none", "value": None}]
            for row in range(ROWS)
        ],
        pa.list_(ENTRY),
    ),
    "partition": pa.array([row % 2 if row % 5 == 0 else None for row in range(ROWS)], pa.int32()),
    "timestamp": pa.array([1_767_225_600_000 + row for row in range(ROWS)], pa.int64()),
}
BATCH = pa.RecordBatch.from_pydict(COLUMNS)
ALL = {"key": 1, "headers": 2, "partition": 3, "timestamp": 4}


def layout(**parts):
    message = {"value": 0, "topic": None, **dict.fromkeys(ALL), **parts}
    return SimpleNamespace(message=SimpleNamespace(**message))


def written(config, topic, name, parts):
    """By partition, the messages that one engine makes of the rows, in the order of the log."""
    settings = {**patient(config, name), "partitioner": "murmur2_random"}
    with closing(
        TransactionalProducer({**settings, "dualwrite.engine": name, "dualwrite.bulk": True}, f"{topic}-{name}")
    ) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        produce_batch(producer, BATCH, layout(**parts), topic, None)
        producer.commit_transaction()
    own = {"group.id": f"{topic}-{name}", "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    with closing(Consumer({**config, **own})) as consumer:
        consumer.subscribe([topic])
        messages = []
        while len(messages) < ROWS:
            found = consumer.consume(ROWS - len(messages), PATIENCE_S)
            assert found
            messages += found
    assert not any(message.error() for message in messages)
    rows = [
        (
            (message.partition(), message.offset()),
            (message.value(), message.key(), message.headers(), message.timestamp() if "timestamp" in parts else None),
        )
        for message in messages
    ]
    return [(where[0], row) for where, row in sorted(rows, key=itemgetter(0))]


@pytest.mark.parametrize("parts", [{"key": 1}, ALL], ids=["keys", "everything"])
def test_both_engines_make_the_same_messages(dualwrite_kafka, parts):
    found = {}
    for name in ("librdkafka", "native"):
        topic = dualwrite_kafka.create_topic(f"arrow-{name}-{len(parts)}", 4)
        found[name] = written(dualwrite_kafka.client_config(), topic, name, parts)
        dualwrite_kafka.delete_topic(topic)
    assert found["native"] == found["librdkafka"]
