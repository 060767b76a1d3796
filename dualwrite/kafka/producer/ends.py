"""Asks whether producers' last transactions have ended; :mod:`dualwrite.protocol.settling.known_end` interprets the answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from dualwrite.runtime.deadline import Deadline, GrowingPause, now_s
from dualwrite.errors import Unavailable
from dualwrite.ports.coordinator import TransactionCoordinator
from dualwrite.protocol.settling.known_end import Ended, EndStep, next_end_step

logger = logging.getLogger(__name__)

EARLY_S: Final = 2.0
"""How long to wait for a missing marker before settling checks whether the broker has forgotten it."""
_ANSWER_S: Final = 2.0
"""Limits one request: a suspended broker never answers, and other requests queue behind it."""
_READ_ON_AFTER_S: Final = 0.02
"""Transactions open before ours have usually ended by then. Reading on costs as much as the log is long from there."""


class PendingEnd:
    """A transaction whose commit or abort was acknowledged, but whose markers have not been seen in every partition.

    Args:
        ended: The transaction.
    """

    def __init__(self, ended: Ended) -> None:
        self.ended = ended
        self._asked_since: float | None = None

    @property
    def asked_for_s(self) -> float:
        """Seconds since the first request for its end; 0 if there was none."""
        return 0.0 if self._asked_since is None else now_s() - self._asked_since

    def note_asked(self) -> None:
        """Note the time of the first request for its end."""
        if self._asked_since is None:
            self._asked_since = now_s()


def ask_for_ends(
    coordinator: TransactionCoordinator, pending: Sequence[PendingEnd], deadline: Deadline
) -> Sequence[EndStep]:
    """Ask once for all of their ends, in parallel.

    Returns:
        The next step for each; ``WAIT`` means to ask again.

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
    """Ask until the end is known, or waiting no longer helps.

    Returns:
        ``KNOWN``, ``RECORD`` or ``SETTLE``.

    Raises:
        ConfigurationError: We may not read or describe a topic.
    """
    between = GrowingPause(first_s=0.001, longest_s=0.1)
    while True:
        try:
            [step] = ask_for_ends(coordinator, [pending_end], deadline)
        except Unavailable as error:  # a broker gave an answer that this library does not know
            logger.warning("the end of %s is not known: %s", pending_end.ended.state, error)
            return EndStep.SETTLE
        if step is not EndStep.WAIT:
            return step
        between.wait(deadline)
