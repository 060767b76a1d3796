"""The conflicts of the statements of a writer's blocks."""

import psycopg
import pytest
from sqlalchemy import exc

from dualwrite.errors import TransactionAborted
from dualwrite.writing.units_of_work import named


def test_a_deadlock_that_leaves_the_block_is_an_abort_that_may_be_run_again(shop):
    statement = exc.OperationalError("UPDATE", {}, psycopg.errors.DeadlockDetected("deadlock detected"))
    with shop.writer() as writer:
        with pytest.raises(TransactionAborted) as raised, writer.transaction() as tx:
            shop.put(tx, 1)
            raise statement
        assert raised.value.retryable
        assert raised.value.__cause__ is statement
        assert named(statement, "orders").retryable
    assert shop.both_have()


@pytest.mark.parametrize(
    "error", [ValueError("no"), exc.IntegrityError("INSERT", {}, psycopg.errors.UniqueViolation("twice"))]
)
def test_every_other_error_leaves_the_block_as_it_is(shop, error):
    with shop.writer() as writer:
        with pytest.raises(type(error)) as raised, writer.transaction():
            raise error
        assert raised.value is error
        assert named(error, "orders") is error
