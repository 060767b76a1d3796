"""A trace goes through the topic: from a request to its dual write, to the consumer's, and to the topic after that."""

import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.orders import on_postgresql
from harness.recorded import Recorded
from opentelemetry import propagate, trace
from sqlalchemy import insert

from dualwrite import DualWriter
from dualwrite.telemetry import names


@pytest.fixture
def recorded():
    recorded = Recorded()
    yield recorded
    recorded.close()


def read(kafka, topic, count):
    """The headers of committed messages of partition 0, by value."""
    consumer = Consumer(
        {**kafka, "group.id": "reader", "isolation.level": "read_committed", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = {}
    while len(found) < count:
        for message in consumer.consume(count, 1.0):
            found[message.value()] = dict(message.headers() or ())
    consumer.close()
    return found


def text(headers):
    return {name: value.decode() for name, value in headers.items()}


@on_postgresql
def test_a_trace_goes_through_the_topic_to_a_consumer_and_on(
    kafka, engine, orders, dualwrite_kafka, dualwrite_topic, recorded
):
    incoming, bills = (dualwrite_kafka.create_topic(f"{dualwrite_topic}-{name}", 1) for name in ("orders", "bills"))
    user = recorded.tracers.get_tracer("user")
    with DualWriter("orders", kafka=kafka, database=engine, telemetry=recorded.telemetry) as writer:
        recorded.clear()
        with user.start_as_current_span("request") as request, writer.transaction() as tx:
            tx.connection.execute(insert(orders).values(id=1))
            tx.produce(incoming, value="order 1", headers={"kind": "order"})
            tx.produce_many(incoming, ["order 2", "order 3"])
        headers = read(kafka, incoming, 3)
        assert headers[b"order 2"] == headers[b"order 3"] == {}
        assert headers[b"order 1"].keys() == {"kind", "traceparent"}

        context = propagate.extract(text(headers[b"order 1"]))
        with user.start_as_current_span("process orders", context), writer.transaction() as tx:
            tx.connection.execute(insert(orders).values(id=2))
            tx.produce(bills, value="bill 1")
    spans = [span for span in recorded.all if span.name != "settle"]
    assert {span.context.trace_id for span in spans} == {request.get_span_context().trace_id}
    by_id = {span.context.span_id: span for span in spans}

    def ancestors(span):
        while span.parent is not None:
            span = by_id[span.parent.span_id]
            yield span.name

    [first], [last] = recorded.named(f"send {incoming}"), recorded.named(f"send {bills}")
    assert first.attributes[names.MESSAGE_COUNT] == 3
    assert list(ancestors(last)) == ["dual_write", "process orders", f"send {incoming}", "dual_write", "request"]
    assert by_id[last.parent.span_id].attributes[names.OUTCOME] == "committed"
    shown = trace.get_current_span(propagate.extract(text(read(kafka, bills, 1)[b"bill 1"])))
    assert shown.get_span_context().span_id == last.context.span_id
