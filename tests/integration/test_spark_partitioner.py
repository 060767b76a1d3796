"""The partition of a key is the one that Java's producers choose, on topics that others write as well."""

import secrets

import pytest
from harness.spark import SparkCase

from dualwrite.sinks.spark import write_batch
from dualwrite.testing.checker import read_committed
from dualwrite.testing.servers.embedded import kafka_jars

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PARTITIONS = 7
KEYS = [None, "", "ä€😀", *(f"customer {number}" for number in range(100))]


@pytest.fixture
def java(spark):
    """Java's own choice of a partition for a key."""
    jvm, gateway = spark._jvm, spark.sparkContext._gateway
    [jar] = kafka_jars().glob("kafka-clients-*.jar")
    urls = gateway.new_array(jvm.java.net.URL, 1)
    urls[0] = jvm.java.io.File(str(jar)).toURI().toURL()
    partitioner = jvm.java.net.URLClassLoader(urls).loadClass(
        "org.apache.kafka.clients.producer.internals.BuiltInPartitioner"
    )
    [choose] = [method for method in partitioner.getMethods() if method.getName() == "partitionForKey"]

    def partition_of(key):
        arguments = gateway.new_array(jvm.java.lang.Object, 2)
        arguments[0], arguments[1] = bytearray(key), PARTITIONS
        return choose.invoke(None, arguments)

    return partition_of


def test_a_key_goes_into_the_partition_that_java_chooses(spark, dualwrite_kafka, numbers, java):
    topic = dualwrite_kafka.create_topic(f"keys-{secrets.token_hex(4)}", PARTITIONS)
    case = SparkCase(numbers.kafka, numbers.url, topic)
    rows = spark.createDataFrame([(number, key) for number, key in enumerate(KEYS)], "id long, name string").coalesce(1)
    write_batch(rows, batch_id="1", **{**case.settings, "key": "name"})
    found = read_committed(case.kafka, topic)
    assert sorted((one.key or b"").decode() for one in found) == sorted(key or "" for key in KEYS)
    keyed = [one for one in found if one.key is not None]
    assert {one.key: one.partition for one in keyed} == {one.key: java(one.key) for one in keyed}
    assert len(keyed) == len(KEYS) - 1
