"""An InitProducerId that arrives late aborts what is open under its id, decided or not: no owner may write there after one.

One rule rests on a line of librdkafka's log. These tests hold its wording, and pass with confluent-kafka 2.16.0 and 2.16.1.
Versions up to 2.15.0 cannot be used at all: they have no ``Producer.cluster_id``.
"""

import threading

import pytest
from sqlalchemy import insert, select

from dualwrite import DualWriter, TransactionAborted, WriterLimits, failpoints
from dualwrite.testing import Api, KafkaProxy, read_committed

pytestmark = [
    pytest.mark.parametrize("url", ["postgresql"], indirect=True),
    pytest.mark.usefixtures("through_librdkafka"),
]


def test_a_first_copy_that_comes_late_finds_nothing_that_it_could_abort(
    dualwrite_kafka, engine, orders, dualwrite_topic, monkeypatch
):
    """librdkafka silently resends it as soon as it has reconnected, long before ``retry.backoff.ms``."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        kafka = {**proxy.client_config(), "retry.backoff.ms": 20_000, "retry.backoff.max.ms": 20_000}
        held = proxy.on(Api.INIT_PRODUCER_ID).hold_request()
        cutter = threading.Thread(target=lambda: (held.wait(), held.cut()))
        cutter.start()

        def arrive_late(name):
            if name == "write.decided":
                held.release()
                held.wait_answered()

        with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
            cutter.join()
            monkeypatch.setattr(failpoints, "hit", arrive_late)
            with writer.transaction() as tx:
                tx.produce(dualwrite_topic, value="1", partition=0)
                tx.connection.execute(insert(orders).values(id=1))
        monkeypatch.undo()
    with engine.connect() as connection:
        assert list(connection.execute(select(orders.c.id)).scalars()) == [1]
    assert [message.value for message in read_committed(dualwrite_kafka.client_config(), dualwrite_topic)] == [b"1"]


@pytest.mark.parametrize("level", [0, 7])
def test_it_is_noticed_whatever_the_user_wants_to_hear(dualwrite_kafka, engine, caplog, level):
    with KafkaProxy(dualwrite_kafka) as proxy:
        kafka = {**proxy.client_config(), "retry.backoff.ms": 20_000, "retry.backoff.max.ms": 20_000}
        proxy.on(Api.INIT_PRODUCER_ID).reset_request()
        with DualWriter(
            "orders", kafka={**kafka, "log_level": level}, database=engine, limits=WriterLimits(max_lanes=1)
        ) as writer:
            assert writer._lanes.first.row.incarnation == 2
        assert any("GETPID" in line for line in caplog.messages) is (level == 7)


def test_nothing_is_decided_when_it_is_noticed_later(dualwrite_kafka, kafka, engine, orders, dualwrite_topic):
    """As after an abort, when librdkafka raises the epoch."""
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        with pytest.raises(TransactionAborted, match="may still arrive"), writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="1", partition=0)
            tx.connection.execute(insert(orders).values(id=1))
            tx._dual_write._lane.producer._instance._handle._log.init_unanswered = True
        with writer.transaction() as tx:
            tx.produce(dualwrite_topic, value="2", partition=0)
            tx.connection.execute(insert(orders).values(id=2))
    with engine.connect() as connection:
        assert list(connection.execute(select(orders.c.id)).scalars()) == [2]
    assert [message.value for message in read_committed(dualwrite_kafka.client_config(), dualwrite_topic)] == [b"2"]
