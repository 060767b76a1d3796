"""The group and the offsets that consumers hand over, of both client libraries."""

import sys
from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, TopicPartition
from kafka import ConsumerGroupMetadata

from dualwrite.kafka.native.coordination import Group, Offset, group_of, offsets_of

UNUSED = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


@pytest.mark.parametrize("instance", [None, "instance-1"])
def test_a_consumer_of_confluent_kafka(instance):
    settings = UNUSED | {"group.id": "grüppe"} | ({"group.instance.id": instance} if instance else {})
    consumer = Consumer(settings)
    try:
        assert group_of(consumer.consumer_group_metadata()) == Group("grüppe", -1, "", instance)
    finally:
        consumer.close()


def test_a_member_as_librdkafka_serialises_it():
    serialised = b"CGMDv2:" + (17).to_bytes(4, sys.byteorder) + b"g\0member-1\0\0instance-1\0"
    assert group_of(serialised) == Group("g", 17, "member-1", "instance-1")


def test_a_consumer_of_kafka_python():
    assert group_of(ConsumerGroupMetadata("g", 17, "member-1", "instance-1")) == Group(
        "g", 17, "member-1", "instance-1"
    )
    assert group_of(ConsumerGroupMetadata("g")) == Group("g")


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "g",
        b"g",
        b"CGMDv2:",
        b"CGMDv2:\0\0\0\0g\0m",
        b"CGMDv2:\0\0\0\0g\0m\0",
        b"CGMDv2:\0\0\0\0g\0m\0\0cut",
        b"CGMDv2:\0\0\0\0\xff\0m\0\1",
        ConsumerGroupMetadata(),
    ],
)
def test_anything_else_is_refused(wrong):
    with pytest.raises(TypeError, match="group"):
        group_of(wrong)


def test_offsets_of_confluent_kafka():
    consumed = [
        TopicPartition("t", 0, 5),
        TopicPartition("t", 1, 6, "here", 3),
        TopicPartition("t", 2, OFFSET_INVALID),
    ]
    assert offsets_of(consumed) == {("t", 0): Offset(5), ("t", 1): Offset(6, 3, "here")}


def test_a_partition_without_a_leader_epoch_has_none():
    nothing = SimpleNamespace(topic="t", partition=0, offset=1, leader_epoch=None, metadata=None)
    assert offsets_of([nothing]) == {("t", 0): Offset(1, -1, "")}
