"""A decided transaction of a dead owner, over topics of which some are gone when it is settled."""

import secrets
from contextlib import closing

import pytest
from confluent_kafka.admin import AdminClient
from harness.death import mortal
from harness.engines import ENGINES
from kafka.admin import AbortTransactionSpec, KafkaAdminClient
from kafka.structs import TopicPartition as Place
from sqlalchemy import insert

from dualwrite import DualWriter, WriterLimits, failpoints, recover
from dualwrite.clock import Deadline
from dualwrite.failpoints import FailpointError
from dualwrite.protocol.values import TransactionStatus
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.fixture(params=ENGINES)
def producer_engine(request):
    return request.param


@pytest.fixture
def topics(dualwrite_kafka):
    names = [dualwrite_kafka.create_topic(f"topic-{secrets.token_hex(6)}") for _ in range(3)]
    yield names
    for name in set(names) & set(AdminClient(dualwrite_kafka.client_config()).list_topics(timeout=120).topics):
        dualwrite_kafka.delete_topic(name)


@pytest.fixture
def left(kafka, engine, topics, orders, producer_engine):
    """A transaction over all topics whose owner died between the two commits; each topic has another message before it."""

    def write(writer, number):
        with writer.transaction() as tx:
            for topic in topics:
                tx.produce(topic, str(number))
            tx.connection.execute(insert(orders).values(id=number))

    with DualWriter(
        "orders",
        kafka={**kafka, "dualwrite.engine": producer_engine},
        database=engine,
        limits=WriterLimits(max_lanes=1),
    ) as writer:
        write(writer, 1)
        mortal(writer)
        failpoints.arm("write.decided:1:raise")
        with pytest.raises(FailpointError):
            write(writer, 2)
    failpoints.arm("")
    (row,) = SqlStateStore(engine).read(["orders"])
    assert row.completed is None
    return row


def values(kafka, topic):
    return [record.value for record in read_committed(kafka, topic)]


def test_what_is_left_of_it_is_committed(kafka, engine, left, topics, dualwrite_kafka, coordinator):
    dualwrite_kafka.delete_topic(topics[1])
    report = recover(open_for_s=0, kafka=kafka, database=engine)
    assert (report.rolled_forward, report.losses) == (["orders"], [])
    assert values(kafka, topics[0]) == values(kafka, topics[2]) == [b"1", b"2"]
    assert SqlStateStore(engine).read(["orders"])[0].completed.value == "committed"


def test_a_topic_that_was_made_anew_under_the_name_is_no_evidence_against_it(
    kafka, engine, left, topics, dualwrite_kafka
):
    dualwrite_kafka.delete_topic(topics[0])
    dualwrite_kafka.create_topic(topics[0])
    report = recover(open_for_s=0, kafka=kafka, database=engine)
    assert (report.rolled_forward, report.losses) == (["orders"], [])
    assert values(kafka, topics[0]) == []
    assert values(kafka, topics[1]) == values(kafka, topics[2]) == [b"1", b"2"]


def test_without_any_of_its_topics_only_a_native_transaction_is_known_to_be_committed(
    kafka, engine, left, topics, dualwrite_kafka, coordinator, producer_engine, caplog
):
    """Its coordinator names it exactly, and says so; that nobody has read its messages is in the log."""
    for topic in topics:
        dualwrite_kafka.delete_topic(topic)
    report = recover(open_for_s=0, kafka=kafka, database=engine)
    if producer_engine == "native":
        assert (report.rolled_forward, report.losses) == (["orders"], [])
        assert "is committed, but its first records are no longer in the log" in caplog.text
        return
    [loss] = report.losses
    assert loss.outcome.value == "unverifiable"
    kafka_id = left.kafka_id(left.incarnation)
    status = coordinator.describe([kafka_id], Deadline(30))[kafka_id].status
    assert status not in {TransactionStatus.ONGOING, TransactionStatus.COMPLETE_COMMIT}


def test_a_topic_that_is_there_and_shows_another_end_outweighs_the_others(
    kafka, engine, left, topics, dualwrite_kafka, producer_engine
):
    """An operator has aborted it by hand in one topic. The rest is aborted, too; a native one is committed before it is proved."""
    dualwrite_kafka.delete_topic(topics[2])
    with closing(KafkaAdminClient(bootstrap_servers=kafka["bootstrap.servers"])) as admin:
        ids = left.prepared.producer_id, left.prepared.epoch
        admin.abort_transaction(AbortTransactionSpec(Place(topics[1], 0), *ids, coordinator_epoch=0))
    [loss] = recover(open_for_s=0, kafka=kafka, database=engine).losses
    assert loss.outcome.value == "lost"
    assert values(kafka, topics[0]) == ([b"1", b"2"] if producer_engine == "native" else [b"1"])
    assert values(kafka, topics[1]) == [b"1"]
    assert len(SqlStateStore(engine).incidents("orders")) == 1
