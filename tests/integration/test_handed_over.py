"""Transactions that were handed over, on real servers: when their owner may go on with its producer, and when it must not."""

from contextlib import ExitStack

import pytest
from sqlalchemy import insert, select, text

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import LaneProducer
from dualwrite.protocol.values import Decision, Outcome, TransactionStatus
from dualwrite.recovery.claim import OwnerContext, claim_rows, unique_owner
from dualwrite.recovery.settle import settle
from dualwrite.sinks.batches import complete_handed_over
from dualwrite.stores.sql.leases import SlotPool
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed
from dualwrite.testing.proxy import Api, KafkaProxy
from dualwrite.writing.dual_write import DualWrite, Ending
from dualwrite.writing.lane import Lane

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
PATIENT = {"retry.backoff.ms": "10000", "retry.backoff.max.ms": "10000"}


def soon():
    return Deadline(60)


@pytest.fixture
def opened():
    with ExitStack() as closed_later:
        yield closed_later


@pytest.fixture
def context_of(engine, opened):
    def make(kafka):
        coordinator = KafkaCoordinator(KafkaConfig.parse(kafka))
        opened.callback(coordinator.close)
        return OwnerContext(coordinator, SqlStateStore(engine), unique_owner())

    return make


@pytest.fixture
def context(context_of, kafka):
    """The decider's."""
    return context_of(kafka)


@pytest.fixture
def lane(context_of, kafka, opened):
    """The owner's."""
    config = KafkaConfig.parse({**kafka, **PATIENT})
    its_context = context_of(kafka)

    def make_producer(row):
        return LaneProducer(
            config,
            row.kafka_id(row.incarnation),
            coordinator=its_context.coordinator,
            incarnation=row.incarnation,
            bulk=True,
        )

    found = Lane("orders", its_context, make_producer)
    opened.callback(found.discard)
    found.ready(soon())
    return found


@pytest.fixture
def hand_over(lane, engine, dualwrite_topic):
    """The owner writes a message to each of two partitions, and hands its transaction over."""

    def write(number, ending=Ending.HAND_OVER, orders=None):
        with (
            engine.connect() as connection,
            DualWrite(lane, lane._context, connection, margin_s=1, timeout_s=60, ending=ending) as transaction,
        ):
            for partition in (0, 1):
                transaction.produce(dualwrite_topic, str(number), partition=partition)
            if orders is not None:
                transaction.connection.execute(insert(orders).values(id=number))
        return transaction.prepared

    return write


@pytest.fixture
def decide(context, engine, lane):
    """The decider decides; gives the row."""

    def record(state):
        store = context.store
        with engine.connect() as connection:
            store.begin(connection)
            store.read_incarnation(connection, "orders")
            ours, _ = store.decide(connection, Decision("orders", lane.row.incarnation, state))
            assert ours
            store.commit(connection)
        return store.read(["orders"])

    return record


@pytest.fixture
def shown(kafka, dualwrite_topic):
    return lambda: sorted(int(record.value) for record in read_committed(kafka, dualwrite_topic))


def complete(context, rows, deadline=None):
    return complete_handed_over(rows, coordinator=context.coordinator, store=context.store, deadline=deadline or soon())


def may_go_on(lane):
    rows = lane._context.store.read([lane.transactional_id])
    return lane.may_go_on(rows[0] if rows else None)


def test_an_owner_goes_on_with_its_producer_once_its_transaction_is_recorded_as_completed(
    context, lane, hand_over, decide, shown
):
    first = lane.producer
    for number in range(3):
        rows = decide(hand_over(number))
        assert not may_go_on(lane), "decided is not enough"
        assert [row.transactional_id for row in complete(context, rows)] == ["orders"]
        assert context.store.read(["orders"])[0].completed is Outcome.COMMITTED
        assert may_go_on(lane)
        lane.ready(soon())
    assert lane.producer is first
    assert lane.row.incarnation == 1
    assert shown() == [0, 0, 1, 1, 2, 2]


def test_what_is_prepared_in_the_database_is_completed_too(context, hand_over, decide, lane, orders, engine, shown):
    rows = decide(hand_over(1, Ending.PREPARE, orders))
    assert len(context.store.participants(rows)) == 1
    assert complete(context, rows)
    assert context.store.participants(rows) == []
    with engine.connect() as connection:
        assert connection.execute(select(orders.c.id)).scalars().all() == [1]
    assert may_go_on(lane)
    assert shown() == [1, 1]


def test_what_an_owner_prepares_after_it_went_on_is_not_decided_by_what_was_decided_before(
    context, hand_over, decide, lane, orders, engine, shown
):
    """Both transactions are of one incarnation."""
    assert complete(context, decide(hand_over(1, Ending.PREPARE, orders)))
    assert may_go_on(lane)
    lane.ready(soon())
    hand_over(2, Ending.PREPARE, orders)
    rows = claim_rows(context, ["orders"], soon())
    settle(rows, coordinator=context.coordinator, store=context.store, deadline=soon())
    with engine.connect() as connection:
        assert connection.execute(select(orders.c.id)).scalars().all() == [1]
    assert context.store.participants(rows) == []
    assert shown() == [1, 1]


def test_an_owner_whose_transaction_nobody_has_decided_does_not_go_on(context, lane, hand_over, shown):
    hand_over(1)
    assert not may_go_on(lane)
    rows = claim_rows(context, ["orders"], soon())
    settle(rows, coordinator=context.coordinator, store=context.store, deadline=soon())
    assert not may_go_on(lane)
    assert shown() == []


def test_an_owner_that_was_fenced_meanwhile_does_not_go_on(context, lane, hand_over, decide, shown):
    decide(hand_over(1))
    rows = claim_rows(context, ["orders"], soon())
    settle(rows, coordinator=context.coordinator, store=context.store, deadline=soon())
    assert context.store.read(["orders"])[0].completed is Outcome.COMMITTED
    assert not may_go_on(lane)
    assert shown() == [1, 1]


@pytest.mark.parametrize("fault", ["hold_request", "drop_answer"])
def test_a_request_that_may_come_late_is_followed_by_a_claim(
    dualwrite_kafka, context_of, context, lane, hand_over, decide, shown, fault
):
    """The decider's EndTxn is not answered: it is neither repeated nor forgotten. The owner's next transaction is not its own."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        through = context_of(proxy.client_config())
        through.coordinator.describe(["warm"], soon())
        rule = getattr(proxy.on(Api.END_TXN, nth=1), fault)()
        rows = decide(hand_over(1))
        with pytest.raises(Unavailable):
            complete(through, rows, Deadline(2))
        assert len([one for one in proxy.requests if one.api_key == Api.END_TXN]) == 1, "sent once"
        assert not may_go_on(lane)
        # The next settler claims: the owner's next transaction has another Kafka id.
        lane._row = None
        lane.discard()
        lane.ready(soon())
        assert lane.row.incarnation == 2
        second = hand_over(2)
        if fault == "hold_request":
            rule.release()
            rule.wait_answered()
        kafka_id = lane.row.kafka_id(2)
        assert context.coordinator.describe([kafka_id], soon())[kafka_id].status is TransactionStatus.ONGOING
        assert complete(through, decide(second))
    assert shown() == [1, 1, 2, 2]


@pytest.mark.usefixtures("through_librdkafka")
@pytest.mark.parametrize("fault", ["reset_request", "reset_answer"])
def test_a_request_whose_connection_breaks_is_not_sent_again(
    dualwrite_kafka, context_of, context, lane, hand_over, decide, shown, fault
):
    """Kafka would answer the second one, and the first might still come: what it would end is then the next transaction."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        through = context_of(proxy.client_config())
        through.coordinator.describe(["warm"], soon())
        getattr(proxy.on(Api.END_TXN, nth=1), fault)()
        assert complete(through, decide(hand_over(1))) == []
        assert len([one for one in proxy.requests if one.api_key == Api.END_TXN]) == 1, "sent once"
    assert not may_go_on(lane)
    settle(
        claim_rows(context, ["orders"], soon()), coordinator=context.coordinator, store=context.store, deadline=soon()
    )
    assert shown() == [1, 1]


def test_who_comes_after_a_decider_claims_what_it_has_decided(
    dualwrite_kafka, context_of, context, engine, lane, hand_over, decide, shown
):
    """As a driver does that finds a slot leased to a batch of another one: what that one has sent may be on its way."""
    from dualwrite.sinks.spark.worker import settle_leases  # imports PySpark

    with KafkaProxy(dualwrite_kafka) as proxy:
        through = context_of(proxy.client_config())
        through.coordinator.describe(["warm"], soon())
        held = proxy.on(Api.END_TXN, nth=1).hold_request()
        rows = decide(hand_over(1))
        with pytest.raises(Unavailable):
            complete(through, rows, Deadline(2))
        pool = SlotPool(engine, "slots")
        pool.lease("task", 60)
        with engine.begin() as connection:
            connection.execute(text("UPDATE dualwrite_slot SET transactional_id = 'orders'"))
        settle_leases(context, pool, pool.held_by("task"), soon(), name="the second driver", prefix="")
        assert not may_go_on(lane), "the owner went on while a request may come"
        held.release()
        held.wait_answered()
    assert context.store.read(["orders"])[0].settled_incarnation == 1
    assert shown() == [1, 1]


@pytest.mark.usefixtures("through_librdkafka")
def test_without_that_rule_the_late_request_commits_what_nobody_has_decided(
    dualwrite_kafka, context, lane, hand_over, decide, shown
):
    """The negative control: another decider completes without a claim what the first one has begun to complete."""
    with KafkaProxy(dualwrite_kafka) as proxy:
        through = KafkaCoordinator(KafkaConfig.parse(proxy.client_config()))
        through.describe(["warm"], soon())
        held = proxy.on(Api.END_TXN, nth=1).hold_request()
        rows = decide(hand_over(1))
        with pytest.raises(Unavailable):
            complete(OwnerContext(through, context.store, "first"), rows, Deadline(2))
        assert complete(context, rows)
        assert may_go_on(lane)
        lane.ready(soon())
        hand_over(2)
        held.release()
        held.wait_answered()
        through.close()
    assert shown() == [1, 1, 2, 2], "nobody has decided on 2"
