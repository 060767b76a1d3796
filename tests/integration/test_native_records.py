"""Batches of the native engine on a real broker, judged by librdkafka's consumer, by Java's, and by the broker's own tool."""

import struct
import time
from contextlib import closing

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from harness import kafka_tools
from harness.kafka_tools import NULL
from harness.native import NativeProducer
from harness.patience import PATIENCE_S

from dualwrite.kafka.native.arrow import batches
from dualwrite.kafka.native.records import Codec, RecordsBuilder
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.testing.checker import read_committed

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
"""The codec of each partition."""
NOW_MS = int(time.time() * 1000)
HEADERS = [[], [("trace", b"1"), ("ключ", None), ("trace", b"")], [("many", b"x")] * 70]
ROWS = [
    (None, None), (b"", b""), (None, b"tombstone"), ("wert ä😀".encode(), "ключ".encode()), (b"v" * 200_000, b"k" * 9000),
    *((b'{"id":%d,"name":"customer %d"}' % (number, number % 7), b"%d" % (number % 100)) for number in range(500)),
]  # fmt: skip
ROWS = [(*row, HEADERS[number % 3]) for number, row in enumerate(ROWS)]
TIMES = [NOW_MS + number * 37 % 1009 - 500 for number in range(len(ROWS))]
LIMIT = 150_000
HEADERS_TYPE = pa.map_(pa.string(), pa.binary())


class Written:
    """One topic: in each partition, rows from the builder and then from columns, committed; then the same rows, aborted."""

    def __init__(self, kafka, topic):
        self.topic = topic
        with closing(NativeProducer(kafka, timeout_ms=60_000)) as producer:
            self.ids = producer.ids
            for commit in (True, False):
                for partition, codec in enumerate(CODECS):
                    for body in (*from_builder(Codec(codec)), *from_columns(Codec(codec))):
                        producer.send(topic, partition, body)
                producer.end(commit=commit)
            self.sent = producer.sent
        self.records = [
            *((*row, timestamp_ms) for row, timestamp_ms in zip(ROWS, TIMES, strict=True)),
            *((*row, NOW_MS) for row in ROWS),
        ]


def from_builder(codec):
    builder = RecordsBuilder(codec, limit_bytes=LIMIT)
    for (value, key, headers), timestamp_ms in zip(ROWS, TIMES, strict=True):
        if not builder.append(value, key, headers, timestamp_ms):
            yield builder.build()
            builder = RecordsBuilder(codec, limit_bytes=LIMIT)
            assert builder.append(value, key, headers, timestamp_ms)
    yield builder.build()


def from_columns(codec):
    values, keys, headers = (
        pa.array([row[place] for row in ROWS], kind) for place, kind in enumerate((None, None, HEADERS_TYPE))
    )
    made = batches(values, keys, headers, timestamp_ms=NOW_MS, codec=codec, limit_bytes=LIMIT)
    return (body for _, body in made)


@pytest.fixture(scope="module")
def written(mortal_kafka):
    topic = mortal_kafka.create_topic("native-records", len(CODECS))
    return Written(mortal_kafka.client_config(), topic)


def test_librdkafkas_consumer_reads_every_record_as_it_was_given(written, mortal_kafka):
    found = {partition: [] for partition in range(len(CODECS))}
    consumer = Consumer(
        {
            **mortal_kafka.client_config(), "group.id": "native-records", "isolation.level": "read_committed",
            "check.crcs": True, "enable.auto.commit": False,
        }
    )  # fmt: skip
    with closing(consumer):
        consumer.assign([TopicPartition(written.topic, partition, 0) for partition in found])
        missing = len(CODECS) * len(written.records)
        while missing:
            messages = consumer.consume(missing, PATIENCE_S)
            assert messages
            missing -= len(messages)
            for one in messages:
                assert one.error() is None, one.error()
                record = (one.value(), one.key(), one.headers() or [], one.timestamp()[1])
                found[one.partition()].append(record)
    assert found == dict.fromkeys(found, written.records)
    assert len(read_committed(mortal_kafka.client_config(), written.topic)) == len(CODECS) * len(written.records)


def test_javas_read_committed_consumer_reads_every_record_as_it_was_given(written, mortal_kafka):
    found = {partition: [] for partition in range(len(CODECS))}
    for one in kafka_tools.consume(mortal_kafka.client_config(), written.topic, len(CODECS) * len(written.records)):
        found[one.partition].append(one[1:])
    expected = [
        (timestamp_ms, shown_headers(headers), shown(key), shown(value))
        for value, key, headers, timestamp_ms in written.records
    ]
    assert found == dict.fromkeys(found, expected)


def shown(content):
    return NULL if content is None else content.decode()


def shown_headers(headers):
    return ",".join(f"{name}:{shown(value)}" for name, value in headers) or "NO_HEADERS"


@pytest.mark.parametrize("codec", ["zstd", *(pytest.param(one, marks=pytest.mark.thorough) for one in CODECS[:-1])])
def test_the_brokers_own_tool_finds_every_batch_valid_and_as_it_was_sent(written, mortal_kafka, codec):
    partition = CODECS.index(codec)
    directory = mortal_kafka._members[0].process.directory / "data" / f"{written.topic}-{partition}"
    [log] = directory.glob("*.log")
    batches, records = kafka_tools.dump(log)
    assert all(one.is_valid and one.is_transactional for one in batches)
    data = [one for one in batches if not one.is_control]
    assert {one.codec for one in data} == {codec}
    assert len(data) > 6
    assert [(one.size, one.crc) for one in data] == [
        (len(batch), struct.unpack_from(">I", batch, 17)[0]) for batch in written.sent[partition]
    ]
    assert [(one.producer_id, one.epoch) for one in batches if one.is_control] == [
        (written.ids[0], written.ids[1] + 1), (written.ids[0], written.ids[1] + 2)
    ]  # fmt: skip
    assert sum(one.count for one in data) == 2 * len(written.records)
    assert len(records) == 2 * len(written.records) + 2
    content = log.read_bytes()
    assert all(batch[21:] in content for batch in written.sent[partition])


def test_bulk_mode_compresses_the_batches_that_become_half_as_long_and_no_others(mortal_kafka):
    topic = mortal_kafka.create_topic("native-bulk", 1)
    digits = [str(number**60).encode() for number in range(5000, 6000)]
    texts = [b'{"id":%d,"name":"customer %d"}' % (number, number % 7) for number in range(5000)]
    values = [*digits, *texts, *digits]
    config = {**mortal_kafka.client_config(), "dualwrite.bulk": True, "dualwrite.engine": "native"}
    with closing(TransactionalProducer(config, topic)) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for part in (digits, texts, digits):
            producer.produce_arrow(topic, pa.array(part))
        producer.commit_transaction()
    assert [record.value for record in read_committed(mortal_kafka.client_config(), topic)] == values
    batches, _ = kafka_tools.dump(*(mortal_kafka._members[0].process.directory / "data" / f"{topic}-0").glob("*.log"))
    assert [one.codec for one in batches if not one.is_control] == ["none", "lz4", "none"]
