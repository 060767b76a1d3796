"""Asks whether producers' last transactions have ended; :mod:`dualwrite.protocol.known_end` interprets the answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dualwrite.clock import Deadline, GrowingPause, now_s
from dualwrite.errors import Unavailable
from dualwrite.interfaces import TransactionCoordinator, native_of
from dualwrite.protocol.known_end import (
    Ended,
    EndStep,
    Partition,
    native_step_at_rest,
    next_end_step,
    next_native_end_step,
)
from dualwrite.protocol.prepared_state import PreparedTxnState

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
    """Ask once for all of their ends, whichever engine made the transactions.

    Returns:
        The next step for each; ``WAIT`` means to ask again.

    Raises:
        ConfigurationError: We may not read or describe a topic.
    """
    asked = [one for one in pending if _step(one, None, early=True) is EndStep.ASK]
    for one in asked:
        one.note_asked()
    shown = _shared(coordinator, [one for one in asked if not one.ended.state.is_native], deadline)
    shown.update(_native(coordinator, [one for one in asked if one.ended.state.is_native], deadline))
    early = not deadline.expired
    return [_step(one, shown.get(id(one)), early=early and one.asked_for_s < EARLY_S) for one in pending]


_Shown = Mapping[Partition, Any]
"""By partition, what an engine's own rule goes by."""


def _step(pending_end: PendingEnd, shown: _Shown | None, *, early: bool) -> EndStep:
    rule = next_native_end_step if pending_end.ended.state.is_native else next_end_step
    return rule(pending_end.ended, shown, early=early)


def _shared(coordinator: TransactionCoordinator, asked: Sequence[PendingEnd], deadline: Deadline) -> dict[int, _Shown]:
    """The proofs of librdkafka's transactions, which share their producers' epochs."""
    if not asked:
        return {}
    proofs = coordinator.prove_now(
        [one.ended.state for one in asked],
        Deadline(min(_ANSWER_S, deadline.remaining_s())),
        read_on=any(one.asked_for_s > _READ_ON_AFTER_S for one in asked),
    )
    return dict(zip(map(id, asked), proofs, strict=True))


def _native(coordinator: TransactionCoordinator, asked: Sequence[PendingEnd], deadline: Deadline) -> dict[int, _Shown]:
    """The epochs of native transactions' producers, as the partitions show them."""
    if not asked:
        return {}
    shown = native_of(coordinator).producer_epochs(
        [one.ended.state for one in asked], Deadline(min(_ANSWER_S, deadline.remaining_s()))
    )
    return dict(zip(map(id, asked), shown, strict=True))


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


def end_at_rest(coordinator: TransactionCoordinator, state: PreparedTxnState, deadline: Deadline) -> EndStep:
    """Check how a committed transaction whose end is known has ended, before the row calls it completed.

    The log has shown it already, except for a native transaction.

    Returns:
        As :func:`~dualwrite.protocol.known_end.native_step_at_rest`.

    Raises:
        ConfigurationError: We may not read or describe a topic.
    """
    if not state.is_native:
        return EndStep.KNOWN
    [proofs] = coordinator.prove_now([state], Deadline(min(_ANSWER_S, deadline.remaining_s())), read_on=True)
    return native_step_at_rest(state, proofs)
