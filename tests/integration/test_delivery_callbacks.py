"""``on_delivery`` of a dual write: what it produces commits with the block, and what it raises never hides why a block failed."""

import pytest
from harness.engines import ENGINES, answered
from harness.orders import on_both, on_postgresql
from sqlalchemy import insert, select

from dualwrite import DualWriter, TransactionAborted
from dualwrite.testing.checker import read_committed
from dualwrite.writing.transaction import write_of

GENERATIONS = 3


class Mine(Exception):
    """Raised by the code of a block."""


@pytest.fixture(params=ENGINES)
def producer_engine(request):
    return request.param


@pytest.fixture
def writer(kafka, engine, producer_engine):
    settings = {**kafka, "linger.ms": 5, "topic.metadata.propagation.max.ms": 300}
    with DualWriter("orders", kafka={**settings, "dualwrite.engine": producer_engine}, database=engine) as writer:
        yield writer


@pytest.fixture
def both(engine, orders, kafka, dualwrite_topic):
    """The state that both sides show."""

    def read():
        with engine.connect() as connection:
            rows = list(connection.scalars(select(orders.c.id).order_by(orders.c.id)))
        return rows, sorted(message.value.decode() for message in read_committed(kafka, dualwrite_topic))

    return read


def order(tx, orders, topic, number, on_delivery):
    tx.connection.execute(insert(orders).values(id=number))
    tx.produce(topic, value=f"order {number}", on_delivery=on_delivery)


def raising(error, message):
    raise LookupError("the callback's mistake")


def failing(error, message):
    if error is not None:
        raise LookupError("delivery failed, as in most examples")


@pytest.mark.parametrize("ways", ["block", "savepoint", "submit"])
@on_both
def test_what_callbacks_produce_at_the_end_of_a_block_commits_with_it(writer, orders, dualwrite_topic, both, ways):
    def work(tx):
        def follow(left):
            if left:
                for _ in range(2):
                    tx.produce(dualwrite_topic, value=f"audit {left}", on_delivery=lambda *_: follow(left - 1))

        if ways == "savepoint":
            with tx.connection.begin_nested():
                order(tx, orders, dualwrite_topic, 1, lambda *_: follow(GENERATIONS))
        else:
            order(tx, orders, dualwrite_topic, 1, lambda *_: follow(GENERATIONS))

    if ways == "submit":
        writer.submit(work).result()
    else:
        with writer.transaction() as tx:
            work(tx)
    audits = [f"audit {left}" for left in range(GENERATIONS, 0, -1) for _ in range(2 ** (GENERATIONS + 1 - left))]
    assert both() == ([1], sorted([*audits, "order 1"]))


@on_postgresql
def test_an_exception_of_a_callback_aborts_its_block_and_leaves_it(writer, orders, dualwrite_topic, both):
    with pytest.raises(LookupError, match="the callback's mistake"), writer.transaction() as tx:
        order(tx, orders, dualwrite_topic, 1, raising)
    with writer.transaction() as tx:
        order(tx, orders, dualwrite_topic, 2, None)
    assert both() == ([2], ["order 2"])


@pytest.mark.parametrize("error", [Mine, TransactionAborted])
@on_postgresql
def test_the_blocks_own_error_wins_and_the_callbacks_is_its_context(writer, orders, dualwrite_topic, both, error):
    with pytest.raises(error) as raised, writer.transaction() as tx:
        for number in range(3):
            order(tx, orders, dualwrite_topic, number, raising)
        answered(write_of(tx)._lane.producer)
        raise error("the block's own")
    assert isinstance(raised.value.__context__, LookupError)
    assert both() == ([], [])


@on_postgresql
def test_an_error_that_explains_the_blocks_own_still_does(writer, orders, dualwrite_topic):
    with pytest.raises(Mine) as raised, writer.transaction() as tx:
        order(tx, orders, dualwrite_topic, 1, raising)
        answered(write_of(tx)._lane.producer)
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise Mine from cause
    assert isinstance(raised.value.__cause__, KeyError)
    assert isinstance(raised.value.__cause__.__context__, LookupError)


@on_postgresql
def test_run_makes_another_attempt_whatever_callbacks_raise(writer, orders, dualwrite_topic, both):
    attempts = []

    def work(tx):
        attempts.append(tx)
        order(tx, orders, dualwrite_topic, 1, raising if len(attempts) < 3 else None)
        if len(attempts) < 3:
            raise TransactionAborted("a conflict, say")

    writer.run(work, longest_pause_s=0.01)
    assert len(attempts) == 3
    assert both() == ([1], ["order 1"])


@on_postgresql
def test_a_missing_topic_is_told_whatever_callbacks_raise(writer, orders, dualwrite_topic, both):
    with pytest.raises(TransactionAborted, match="misspelt") as raised, writer.transaction() as tx:
        order(tx, orders, dualwrite_topic, 1, failing)
        order(tx, orders, f"{dualwrite_topic}-misspelt", 2, failing)
    assert not raised.value.retryable
    assert both() == ([], [])


@on_postgresql
def test_a_callback_that_swallows_that_its_message_was_refused_does_not_commit(writer, orders, dualwrite_topic, both):
    def follow(*_):
        with pytest.raises(TransactionAborted, match="MESSAGE_TOO_LARGE|MSG_SIZE_TOO_LARGE"):
            tx.produce(dualwrite_topic, value=b"x" * 2_000_000)

    with pytest.raises(TransactionAborted, match="continued after an error"), writer.transaction() as tx:
        order(tx, orders, dualwrite_topic, 1, follow)
    assert both() == ([], [])


@on_postgresql
def test_an_interruption_in_a_callback_is_not_lost(writer, orders, dualwrite_topic, both):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised, writer.transaction() as tx:
        order(tx, orders, dualwrite_topic, 1, interrupt)
        answered(write_of(tx)._lane.producer)
        raise Mine
    assert isinstance(raised.value.__cause__, Mine)
    assert both() == ([], [])
