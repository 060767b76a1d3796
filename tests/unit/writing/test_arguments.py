"""The arguments of a writer, and the conflicts of its blocks' statements."""

import psycopg
import pytest
from sqlalchemy import exc

from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.writing.arguments import check_arguments, conflicts_named


def test_names_that_leave_room_for_the_number_of_a_lane_are_taken():
    for name in ("o", "o" * 240):
        check_arguments(name, 1)


@pytest.mark.parametrize(
    ("name", "max_lanes", "said"),
    [
        ("", 1, "transactional id"),
        ("o" * 241, 1, "transactional id"),
        ("orders#1", 1, "'#'"),
        ("orders", 0, "at least 1"),
    ],
)
def test_arguments_that_cannot_work_are_refused(name, max_lanes, said):
    with pytest.raises(ConfigurationError, match=said):
        check_arguments(name, max_lanes)


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
