"""Messages as any consumer reads them; and Protobuf descriptors without protoc."""

from __future__ import annotations

from confluent_kafka import Consumer, TopicPartition
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet


def consume(kafka, topic):
    """All messages of a topic with everything that they carry."""
    consumer = Consumer(
        {
            **kafka,
            "group.id": "look",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=120).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        found, ended = [], set()
        while ended != set(partitions):
            message = consumer.poll(30)
            assert message is not None
            if message.error():
                ended.add(message.partition())
            else:
                found.append(message)
        return found
    finally:
        consumer.close()


def protobuf_file(name="test.proto", imports=(), **messages):
    """A descriptor set of one file, package ``test``: messages by name, their fields as ``name="[optional|repeated] kind"``.

    A kind with a dot or a capital letter is a message's name; ``map<kind>`` has strings as keys.
    """
    file = FileDescriptorProto(name=name, package="test", syntax="proto3", dependency=list(imports))
    mood = file.enum_type.add(name="Mood")
    mood.value.add(name="HAPPY", number=0)
    for message_name, fields in messages.items():
        message = file.message_type.add(name=message_name)
        for number, (field, described) in enumerate(fields.items(), 1):
            label, _, kind = described.rpartition(" ")
            if kind.startswith("map<"):
                entry = message.nested_type.add(name="".join(p.capitalize() for p in field.split("_")) + "Entry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, kind[4:-1])
                label, kind = "repeated", f"{message_name}.{entry.name}"
            made = _add(message, field, number, kind, repeated=label == "repeated")
            if label == "optional":
                made.proto3_optional = True
                made.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
    return FileDescriptorSet(file=[file]).SerializeToString()


def _add(message, name, number, kind, *, repeated=False):
    made = message.field.add(name=name, number=number, label=3 if repeated else 1)
    if kind == "Mood":
        made.type, made.type_name = FieldDescriptorProto.TYPE_ENUM, ".test.Mood"
    elif kind[0].isupper() or "." in kind:
        made.type = FieldDescriptorProto.TYPE_MESSAGE
        made.type_name = f".{kind}" if kind.startswith("google.") else f".test.{kind}"
    else:
        made.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    return made


def message_class(descriptor, name):
    """The class of a message in a descriptor set."""
    from google.protobuf import duration_pb2, timestamp_pb2

    pool = descriptor_pool.DescriptorPool()
    for known in (timestamp_pb2, duration_pb2):
        own = FileDescriptorProto()
        known.DESCRIPTOR.CopyToProto(own)
        pool.Add(own)
    for file in FileDescriptorSet.FromString(descriptor).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
