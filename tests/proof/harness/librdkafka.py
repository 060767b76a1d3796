"""librdkafka's own partitioners: the functions of the library that confluent-kafka brings along, and a whole producer."""

import ctypes
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import confluent_kafka

from harness.patience import PATIENCE_S

MOCK_PARTITIONS = 4
"""The partitions of every topic of librdkafka's mock cluster."""


@cache
def partitioner(name):
    """librdkafka's function for a hashed key, one of its public ones: key and number of partitions to partition.

    It must not be asked where a key may go anywhere: it would look at the topic, and there is none.
    """
    function = getattr(ctypes.CDLL(str(_library())), f"rd_kafka_msg_partitioner_{name}")
    function.restype = ctypes.c_int32
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int32, *[ctypes.c_void_p] * 2]
    return lambda key, count: function(None, key, len(key or b""), count, None, None)


def _library():
    package = Path(confluent_kafka.__file__).parent
    [found] = [*package.parent.glob("confluent_kafka.libs/librdkafka*"), *package.glob(".dylibs/librdkafka*")]
    return found


@contextmanager
def producer(name, **settings):
    """A producer on a mock cluster in this process. Yields a function: keys to the partitions where they landed."""
    made = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "", "partitioner": name, "log_level": 4, **settings}
    )

    def produce(keys):
        landed = [None] * len(keys)
        for number, key in enumerate(keys):

            def delivered(error, message, number=number):
                assert error is None, error
                landed[number] = message.partition()

            made.produce("keys", b"", key, on_delivery=delivered)
            made.poll(0)
        assert made.flush(PATIENCE_S) == 0
        return landed

    yield produce
    assert made.flush(PATIENCE_S) == 0
