"""The conflicts of the statements of a writer's blocks."""

import psycopg
import pytest
from sqlalchemy import exc

from dualwrite.errors import TransactionAborted
from dualwrite.writing.transaction import conflicts_named


def test_a_deadlock_that_leaves_the_block_is_an_abort_that_may_be_run_again():
    statement = exc.OperationalError("UPDATE", {}, psycopg.errors.DeadlockDetected("deadlock detected"))
    with pytest.raises(TransactionAborted) as raised, conflicts_named("orders"):
        raise statement
    assert raised.value.retryable
    assert raised.value.__cause__ is statement


def test_every_other_error_leaves_the_block_as_it_is():
    for error in (ValueError("no"), exc.IntegrityError("INSERT", {}, psycopg.errors.UniqueViolation("twice"))):
        with pytest.raises(type(error)) as raised, conflicts_named("orders"):
            raise error
        assert raised.value is error
