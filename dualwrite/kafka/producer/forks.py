"""Detects forks. A librdkafka instance does not survive one: its threads stay in the parent."""

from __future__ import annotations

import os

from dualwrite.errors import IllegalStateError

_process = os.getpid()


def _note_fork() -> None:
    global _process  # noqa: PLW0603 - the process id is global to the process
    _process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)  # a getpid() per message would cost as much as the message


class ForkGuard:
    """Remembers the process in which it was made.

    Args:
        transactional_id: Named in the error.
    """

    def __init__(self, transactional_id: str) -> None:
        self._id = transactional_id
        self._made_in = _process

    def check(self) -> None:
        """Raise if the process was forked since.

        Raises:
            IllegalStateError: This is another process.
        """
        if self._made_in != _process:
            raise IllegalStateError(
                f"this producer was made by process {self._made_in} and does not work after a fork",
                transactional_id=self._id,
                next_step="make a producer in each process",
            )
