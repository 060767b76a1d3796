"""Asking for the end of producers' last transactions; :mod:`dualwrite.protocol.known_end` says what the answers mean."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from dualwrite.deadline import Deadline, GrowingPause, now_s
from dualwrite.errors import Unavailable
from dualwrite.ports import TransactionCoordinator
from dualwrite.protocol.known_end import Ended, EndStep, next_end_step

logger = logging.getLogger(__name__)

EARLY_S: Final = 2.0
"""For so long a marker that is not there yet is waited for; then settling looks whether it was forgotten."""
_ANSWER_S: Final = 2.0
"""Bounds one question: a broker that is suspended answers nothing, and others wait behind it."""
_READ_ON_AFTER_S: Final = 0.02
"""What is open before a transaction has ended by then, as a rule. Reading on costs as much as the log is long from there."""


class PendingEnd:
    """A transaction whose commit or abort was answered, while its end is not known.

    Args:
        ended: The transaction.
    """

    def __init__(self, ended: Ended) -> None:
        self.ended = ended
        self._asked_since: float | None = None

    @property
    def asked_for_s(self) -> float:
        """Seconds since it was asked for the first time; 0 if it was not."""
        return 0.0 if self._asked_since is None else now_s() - self._asked_since

    def note_asked(self) -> None:
        """It is asked for now."""
        if self._asked_since is None:
            self._asked_since = now_s()


def ask_for_ends(
    coordinator: TransactionCoordinator, pending: Sequence[PendingEnd], deadline: Deadline
) -> Sequence[EndStep]:
    """Ask for all of them, once and side by side.

    Returns:
        The next step about each. ``WAIT`` where it is to be asked again.

    Raises:
        ConfigurationError: We may not read or describe a topic.
    """
    steps = [next_end_step(pending_end.ended, None, early=True) for pending_end in pending]
    asked = [pending_end for pending_end, step in zip(pending, steps, strict=True) if step is EndStep.ASK]
    for pending_end in asked:
        pending_end.note_asked()
    proofs = coordinator.prove_now(
        [pending_end.ended.state for pending_end in asked],
        Deadline(min(_ANSWER_S, deadline.remaining_s())),
        read_on=any(pending_end.asked_for_s > _READ_ON_AFTER_S for pending_end in asked),
    )
    seen = dict(zip(map(id, asked), proofs, strict=True))
    early = not deadline.expired
    return [
        next_end_step(pending_end.ended, seen.get(id(pending_end)), early=early and pending_end.asked_for_s < EARLY_S)
        for pending_end in pending
    ]


def know_end(coordinator: TransactionCoordinator, pending_end: PendingEnd, deadline: Deadline) -> EndStep:
    """Ask until there is nothing to wait for.

    Returns:
        ``KNOWN``, ``RECORD`` or ``SETTLE``.

    Raises:
        ConfigurationError: We may not read or describe a topic.
    """
    between = GrowingPause(first_s=0.001, longest_s=0.1)
    while True:
        try:
            [step] = ask_for_ends(coordinator, [pending_end], deadline)
        except Unavailable as error:  # a broker has answered what no answer is known for
            logger.warning("the end of %s is not known: %s", pending_end.ended.state, error)
            return EndStep.SETTLE
        if step is not EndStep.WAIT:
            return step
        between.wait(deadline)
