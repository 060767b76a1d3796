"""Detects forks. A librdkafka instance does not survive one: its threads stay in the parent."""

from __future__ import annotations

import os

from dualwrite.errors import IllegalStateError

process = os.getpid()
"""This process's id, without a system call: a ``getpid()`` for each message would cost as much as the message."""


def _note_fork() -> None:
    global process  # noqa: PLW0603 - the process id is global to the process
    process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def forked_error(made_in: int, transactional_id: str) -> IllegalStateError:
    """The error for a producer that another process has made.

    Args:
        made_in: That process.
        transactional_id: The producer's id.
    """
    return IllegalStateError(
        f"this producer was made by process {made_in} and does not work after a fork",
        transactional_id=transactional_id,
        next_step="make a producer in each process",
    )
