"""A decided transaction whose commit Kafka has not answered, and that its owner cannot settle: the log says what became of it."""

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from harness.death import mortal
from harness.orders import on_postgresql, write
from harness.patience import wait_until

from dualwrite import CompletionPending, DecidedTransactionLost, DualWriter, WriterLimits, failpoints
from dualwrite.errors import OutcomeUnverifiable
from dualwrite.protocol.values import Outcome
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.proxy import KafkaProxy

pytestmark = on_postgresql


@pytest.fixture
def writer(kafka, engine):
    with mortal(DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1))) as writer:
        yield writer


def at_the_decision(do):
    """Do this once the database has committed, before Kafka is asked to."""

    def passed(name):
        if name == "write.decided":
            do()

    return failpoints.watched(passed)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        pytest.param(DecidedTransactionLost, Outcome.LOST, id="lost"),
        pytest.param(OutcomeUnverifiable, Outcome.UNVERIFIABLE, id="unverifiable"),
    ],
)
def test_a_clone_that_opens_costs_a_loss_that_is_raised_and_recorded(
    kafka, engine, writer, copied, dualwrite_topic, orders, both, error, outcome
):
    """The copy knows no decision, so it aborts. Its claim made the Kafka id that the owner would claim to settle."""

    def clone_opens():
        with DualWriter("orders", kafka=kafka, database=copied, limits=WriterLimits(max_lanes=1)):
            pass
        if outcome is Outcome.UNVERIFIABLE:
            place = TopicPartition(dualwrite_topic, 0, -1)
            admin = AdminClient(kafka)
            admin.delete_records([place])[place].result(120)

    with at_the_decision(clone_opens), pytest.raises(error) as caught:
        write(writer, dualwrite_topic, orders, 1)
    store = SqlStateStore(engine)
    [incident] = store.incidents("orders")
    [row] = store.read(["orders"])
    assert caught.value.state == incident.prepared_transaction_state == str(row.prepared)
    assert incident.outcome is outcome
    assert incident.reported_at is not None
    assert both() == ([1], [])


def test_a_new_owner_that_has_completed_it_makes_it_a_success(kafka, engine, writer, dualwrite_topic, orders, both):
    with at_the_decision(DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)).open):
        write(writer, dualwrite_topic, orders, 1)
    assert both() == ([1], [1])
    assert SqlStateStore(engine).incidents("orders") == []


def test_what_cannot_be_asked_is_called_unknown_and_no_success(dualwrite_kafka, engine, dualwrite_topic, orders, both):
    with KafkaProxy(dualwrite_kafka) as proxy:
        kafka = proxy.client_config()
        with DualWriter(
            "orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1, timeout_s=4)
        ) as writer:
            cut_off = []
            with (
                at_the_decision(lambda: cut_off.append(proxy.on(nth=None).reset_request())),
                pytest.raises(CompletionPending, match="not known") as caught,
            ):
                write(writer, dualwrite_topic, orders, 1)
            assert caught.value.outcome == "unknown"
            assert SqlStateStore(engine).incidents("orders") == []
            cut_off[0].withdraw()
            wait_until(lambda: writer.health().silence is None)
            write(writer, dualwrite_topic, orders, 2)
    assert both() == ([1, 2], [1, 2])
