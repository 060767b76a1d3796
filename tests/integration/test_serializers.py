"""The code of docs/serializers.md, as it stands, on real servers and a schema registry; read as consumers read it."""

import json
import re

from cloudevents.core.bindings.kafka import KafkaMessage, from_binary, from_structured
from cloudevents.core.formats.json import JSONFormat
from harness.messages import consume
from harness.orders import on_postgresql
from harness.places import ROOT
from harness.schema_registry import schema_registry

from dualwrite import DualWriter
from dualwrite.testing.checker import read_committed


def read(kafka, topic):
    read_committed(kafka, topic)  # waits until no transaction is open
    return consume(kafka, topic)


@on_postgresql
def test_the_code_of_the_page_writes_what_consumers_read(kafka, engine, dualwrite_kafka, dualwrite_topic):
    page = (ROOT / "docs" / "serializers.md").read_text(encoding="utf-8")
    avro, failing, warming, reading, binary, structured = re.findall(
        r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    topics = {name: f"{dualwrite_topic}-{name}" for name in ("orders", "refused-orders", "bills", "events")}
    for topic in topics.values():
        dualwrite_kafka.create_topic(topic, 1)
    with schema_registry() as registry:
        meant = {
            '{"bootstrap.servers": "localhost:9092"}': "kafka",
            '"postgresql+psycopg://app@localhost/shop"': "engine",
            "http://localhost:8081": registry.url,
            **{f'produce("{name}"': f'produce("{topic}"' for name, topic in topics.items()},
            '{"orders": Avro': f'{{"{topics["orders"]}": Avro',
            'topics=["orders"]': f'topics=["{topics["orders"]}"]',
            'topic="refused-orders"': f'topic="{topics["refused-orders"]}"',
            '"billing"': f'"billing-{dualwrite_topic}"',
        }
        names = {"kafka": kafka, "engine": engine, "DualWriter": DualWriter}

        def run(code, **more):
            for shown, real in meant.items():
                code = code.replace(shown, real)
            names.update(more)
            exec(code, names)

        run(avro)
        made = names["AvroSerializer"](names["registry"], names["ORDER"])
        with DualWriter(
            "again", kafka=kafka, database=engine, serializers={"value": {topics["orders"]: made}}
        ) as writer:
            run(failing, writer=writer)
            names["place"]({"id": 2, "item": "cup"})
            names["place"]({"id": 3})
        asked = len(registry.asked)
        run(warming)
        assert len(registry.asked) > asked
        run(binary)
        run(structured)

        run(reading)
        with DualWriter("junk", kafka=kafka, database=engine) as writer, writer.transaction() as tx:
            tx.produce(topics["orders"], value=b"not Avro", key="4")
        names["consumer"].run(max_messages=3)
        assert names["consumer"].progress.dead_letters == 1
        names["registry"].close()
    bills = [(one.key(), one.value()) for one in read(kafka, topics["bills"])]
    assert bills == [(b"1", b"for tea"), (b"2", b"for cup")]
    refused, unreadable = sorted(read(kafka, topics["refused-orders"]), key=lambda one: one.key())
    assert refused.key() == b"3"
    assert refused.value().startswith(b"{'id': 3}: ")
    assert (unreadable.key(), unreadable.value()) == (b"4", b"not Avro")
    assert b"Deserialization" in dict(unreadable.headers())["dualwrite.dead_letter.exception"]

    first, second = (KafkaMessage(dict(one.headers()), one.key(), one.value()) for one in read(kafka, topics["events"]))
    assert json.loads(first.value) == {"id": 1, "item": "tea"}
    for event in (from_binary(first, JSONFormat()), from_structured(second, JSONFormat())):
        assert event.get_attributes() == {**names["placed"].get_attributes(), "partitionkey": "1"}
        assert event.get_data() == {"id": 1, "item": "tea"}
