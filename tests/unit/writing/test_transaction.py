"""The transaction object: it shows users only what they may use, and messages go with rows as its docstrings say."""

from contextlib import nullcontext

import pytest
from harness.served import TOPIC
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from dualwrite import AsyncTransaction, ConfigurationError, Transaction, TransactionAborted, WriterLimits
from dualwrite.databases import RocksBatch
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.lives import WriteState
from dualwrite.state import PartitionStores
from dualwrite.stores.keyed.zookeeper import Multi
from dualwrite.types import AsyncBoundSessions, BoundSessions
from dualwrite.units import Unit


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Refused(Exception):
    """Raised by the code of a block."""


OF_A_TRANSACTION = {
    "outbox",
    "connection",
    "prepared",
    "produce",
    "produce_arrow",
    "produce_many",
    "send_offsets_to_transaction",
    "session",
    "state",
    "transactional_id",
}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (Transaction, OF_A_TRANSACTION | {"batch", "multi", "without_serializers"}),
        (AsyncTransaction, OF_A_TRANSACTION),
        (RocksBatch, {"delete", "get", "get_for_update", "put"}),
        (Multi, {"check", "create", "delete", "set_data"}),
        (BoundSessions, {"join", "produce"}),
        (AsyncBoundSessions, {"join", "produce"}),
        (Unit, {"produce"}),
        (PartitionStores, {"close", "of", "reader"}),
    ],
)
def test_a_transaction_shows_none_of_the_verbs_that_end_it(given, shown):
    """Nor does what else a block's code is given: emptied by its user, a batch would commit its messages without its rows."""
    assert {name for name in dir(given) if not name.startswith("_")} == shown


@pytest.fixture
def writer(shop):
    with shop.writer(limits=WriterLimits(max_lanes=1)) as opened:
        yield opened


def test_its_state_and_identity_are_known_when_the_block_has_ended(shop, writer):
    with writer.transaction() as tx:
        assert (tx.state, tx.prepared, tx.transactional_id) == (WriteState.CHECKED, None, "orders")
        shop.put(tx, 1)
    assert tx.state is WriteState.COMPLETED
    assert str(tx.prepared) == shop.state().prepared_transaction_state


def test_messages_go_with_their_savepoint(shop, writer):
    with writer.transaction() as tx:
        shop.put(tx, 1)
        with tx.connection.begin_nested():
            shop.put(tx, 2)
            with pytest.raises(Refused), tx.connection.begin_nested():
                shop.put(tx, 3)
                raise Refused
            shop.put(tx, 4)
        with pytest.raises(Refused), tx.connection.begin_nested():
            shop.put(tx, 5)
            raise Refused
        shop.put(tx, 6)
    assert shop.both_have(1, 2, 4, 6)


def test_a_message_that_cannot_be_sent_is_refused_in_its_savepoint_and_aborts_both_although_the_block_goes_on(
    shop, writer
):
    with pytest.raises(TransactionAborted, match="continued after an error"), writer.transaction() as tx:
        shop.put(tx, 1)
        with tx.connection.begin_nested():
            shop.put(tx, 2)
            with pytest.raises(TransactionAborted):
                tx.produce(TOPIC, "x" * 2_000_000, partition=0)
    assert shop.both_have()


def test_a_message_that_the_broker_refuses_aborts_both(shop, writer):
    with pytest.raises(TransactionAborted), writer.transaction() as tx:
        shop.put(tx, 1)
        tx.produce(TOPIC, "2", partition=99)
    assert shop.both_have()


@pytest.mark.parametrize("nested", [True, False])
def test_keys_that_do_not_fit_the_values_are_refused_at_once_and_nothing_is_sent(shop, writer, nested):
    with writer.transaction() as tx:
        shop.put(tx, 1)
        with (
            tx.connection.begin_nested() if nested else nullcontext(),
            pytest.raises(ValueError, match="2 values, 1 keys"),
        ):
            tx.produce_many(TOPIC, ["a", "b"], ["k"])
    assert shop.both_have(1)


def test_the_session_is_flushed_by_the_end_and_its_objects_stay_readable(shop, writer):
    with writer.transaction() as tx:
        order = Order(id=1)
        tx.session.add(order)
        tx.produce(TOPIC, "1", partition=0)
        assert tx.session is tx.session
    assert shop.both_have(1)
    assert order.id == 1


def test_commit_of_the_session_only_flushes(shop, writer):
    with pytest.raises(Refused), writer.transaction() as tx:
        tx.session.add(Order(id=1))
        tx.session.commit()
        tx.produce(TOPIC, "1", partition=0)
        raise Refused
    assert shop.both_have()


def test_a_session_on_another_connection_aborts_both(shop):
    def elsewhere(bind):
        return Session(binds={Order: shop.database.engine()}, bind=bind)

    with shop.writer(session_factory=elsewhere) as writer:
        with pytest.raises(TransactionAborted) as raised, writer.transaction() as tx:
            tx.produce(TOPIC, "1", partition=0)
            with pytest.raises(ConfigurationError, match="another connection"):
                tx.session.add(Order(id=1))
                tx.session.flush()
        assert isinstance(raised.value.__cause__, ConfigurationError)
    assert shop.both_have()


def test_a_commit_of_the_connection_is_refused_and_aborts_both(shop, writer):
    with pytest.raises(Exception, match="dual write"), writer.transaction() as tx:
        shop.put(tx, 1)
        tx.connection.commit()
    assert shop.both_have()


@pytest.mark.parametrize(
    "use",
    [
        lambda tx: tx.connection,
        lambda tx: tx.session,
        lambda tx: tx.produce(TOPIC, "late"),
        lambda tx: tx.produce_many(TOPIC, ["late"]),
    ],
)
def test_it_cannot_be_used_once_its_block_has_ended(shop, writer, use):
    with writer.transaction() as tx:
        shop.put(tx, 1)
    with pytest.raises(IllegalStateError):
        use(tx)
    assert shop.both_have(1)


def test_on_delivery_is_called_for_each_message_by_the_end_of_the_block(shop, writer):
    told = []
    with writer.transaction() as tx:
        tx.produce(TOPIC, "1", partition=0, on_delivery=lambda error, message: told.append((error, message.offset())))
    assert told == [(None, 0)]
