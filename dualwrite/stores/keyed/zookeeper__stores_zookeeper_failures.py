"""kazoo's errors mapped to ours: the class says what the caller must do. No message holds a credential."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from kazoo import exceptions as kazoo_errors
from kazoo.handlers.threading import KazooTimeoutError

from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable

NOT_AS_EXPECTED: Final = (
    kazoo_errors.BadVersionError,
    kazoo_errors.NoNodeError,
    kazoo_errors.NodeExistsError,
    kazoo_errors.NotEmptyError,
)
"""A condition of an operation did not hold: others have written."""
FAILED: Final = (kazoo_errors.KazooException, KazooTimeoutError)
"""Every error of kazoo's, and of its waits."""
_REFUSED: Final = (kazoo_errors.NoAuthError, kazoo_errors.AuthFailedError)


def mapped(error: Exception, path: str) -> DualWriteError:
    """Our error for one of kazoo's, when the library's own request failed."""
    named = type(error).__name__
    if isinstance(error, _REFUSED):
        return ConfigurationError(
            f"ZooKeeper refuses our session at {path} ({named})",
            next_step="give the credentials that the ACL of this path names, such as auth=[('digest', 'user:password')]; all "
            "rights on it are needed",
        )
    if isinstance(error, kazoo_errors.InvalidACLError):
        return ConfigurationError(f"ZooKeeper rejects the ACL for {path}", next_step="see acl=")
    if isinstance(error, kazoo_errors.NoNodeError):
        return ConfigurationError(f"{path} is gone", next_step="restore it before anything is settled")
    if isinstance(error, kazoo_errors.BadArgumentsError):
        return ConfigurationError(f"ZooKeeper rejects the path {path}", next_step="see root=")
    return Unavailable(f"ZooKeeper does not answer ({named})", next_step="check that a quorum of the ensemble runs")


@contextmanager
def requests(path: str) -> Generator[None, None, None]:
    """Map what the library's own requests raise in the block."""
    try:
        yield
    except FAILED as error:
        raise mapped(error, path) from error
