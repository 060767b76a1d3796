"""kazoo's errors as ours."""

from __future__ import annotations

import pytest
from kazoo import exceptions
from kazoo.handlers.threading import KazooTimeoutError

from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.stores.keyed.zookeeper import first_failure, requests


@pytest.mark.parametrize(
    ("error", "expected", "word"),
    [
        (exceptions.NoAuthError(), ConfigurationError, "digest"),
        (exceptions.AuthFailedError(), ConfigurationError, "digest"),
        (exceptions.InvalidACLError(), ConfigurationError, "acl="),
        (exceptions.NoNodeError(), ConfigurationError, "/x is gone"),
        (exceptions.BadArgumentsError(), ConfigurationError, "root="),
        (exceptions.ConnectionLoss(), Unavailable, "quorum"),
        (exceptions.SessionExpiredError(), Unavailable, "SessionExpiredError"),
        (KazooTimeoutError(), Unavailable, "does not answer"),
    ],
)
def test_the_class_says_what_to_do(error: Exception, expected: type[DualWriteError], word: str) -> None:
    with pytest.raises(expected, match=word) as caught, requests("/x"):
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), requests("/x"):
        raise ZeroDivisionError


def test_the_operation_that_failed_is_found_among_those_that_were_undone() -> None:
    undone, cause, unreached = (
        exceptions.RolledBackError(),
        exceptions.NodeExistsError(),
        exceptions.RuntimeInconsistency(),
    )
    assert first_failure(["/a", True]) is None
    assert first_failure([undone, undone, cause, unreached]) == (2, cause)
