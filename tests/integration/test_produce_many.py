"""Many messages of one dual write in one call: the same promise as one by one."""

import pytest
from harness.engines import ENGINES

from dualwrite import DualWriter, TransactionAborted
from dualwrite.testing.checker import read_committed


@pytest.fixture(params=ENGINES)
def producer_engine(request):
    return request.param


@pytest.fixture
def writer(kafka, engine, kafka_id, producer_engine):
    with DualWriter(
        kafka_id, kafka={**kafka, "dualwrite.bulk": True, "dualwrite.engine": producer_engine}, database=engine
    ) as writer:
        yield writer


def test_all_messages_arrive_in_order_with_their_keys(writer, kafka, engine, orders, dualwrite_topic):
    values = [f"value {number}" for number in range(1000)]
    with writer.transaction() as tx:
        tx.produce_many(dualwrite_topic, values, ["same key"] * 1000)
        tx.produce_many(dualwrite_topic, [None, b"bytes"])
        tx.connection.execute(orders.insert().values(id=1))
    found = read_committed(kafka, dualwrite_topic)
    keyed = [record.value.decode() for record in found if record.key == b"same key"]
    assert keyed == values
    assert {record.value for record in found if record.key is None} == {None, b"bytes"}


def test_one_message_that_is_refused_aborts_all(writer, kafka, engine, orders, dualwrite_topic):
    with pytest.raises(TransactionAborted, match=r"message\.max\.bytes"), writer.transaction() as tx:
        tx.connection.execute(orders.insert().values(id=1))
        tx.produce_many(dualwrite_topic, ["a", "b" * 2_000_000, "c"])
    assert read_committed(kafka, dualwrite_topic) == []
    with engine.connect() as connection:
        assert connection.execute(orders.select()).all() == []


def test_more_messages_than_the_queue_holds_wait_for_room(kafka, engine, kafka_id, dualwrite_topic, producer_engine):
    own = {"dualwrite.bulk": True, "dualwrite.engine": producer_engine}
    small = {**kafka, "queue.buffering.max.messages": 100, **own}
    with DualWriter(kafka_id, kafka=small, database=engine) as writer, writer.transaction() as tx:
        tx.produce_many(dualwrite_topic, [str(number) for number in range(5000)])
    assert len(read_committed(kafka, dualwrite_topic)) == 5000
