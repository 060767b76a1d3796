"""The ORM session of a block or a unit: made at first use, and on no other connection."""

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from dualwrite import ConfigurationError
from dualwrite.writing.dual_write import OwnSession


@pytest.fixture
def connection():
    engine = create_engine("sqlite://")
    with engine.connect() as found:
        yield found
    engine.dispose()


def own(connection, factory=Session, **kwargs):
    refused = []
    return OwnSession(connection, factory, "w", refused.append, **kwargs), refused


def test_it_is_made_at_first_use(connection):
    made = []
    found, _ = own(connection, lambda bind: made.append(bind) or Session(bind=bind))
    found.flush()
    found.close()
    assert not made
    assert found.session is found.session
    assert made == [connection]


def test_another_connection_is_refused(connection):
    other = create_engine("sqlite://")
    found, refused = own(connection, lambda **_: Session(bind=other))
    with pytest.raises(ConfigurationError, match="another connection"):
        found.session.connection()
    assert refused
    found.close()
    other.dispose()


@pytest.mark.parametrize("savepoint", [True, False])
def test_that_of_a_unit_rolls_back_without_its_transaction_and_refuses_to_go_on(connection, savepoint):
    connection.begin()
    found, refused = own(connection, savepoint=savepoint)
    found.session.execute(text("SELECT 1"))
    found.session.rollback()
    assert connection.in_transaction() is savepoint
    assert len(refused) is int(savepoint)
    found.close()
    assert len(refused) is int(savepoint)
