"""Reports losses of transactions that have ended for their callers; never raises them into another caller's block."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable
from dualwrite.interfaces__ports_observer import NO_OBSERVER, Observer

logger = logging.getLogger(__name__)

FoundLoss = DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack
"""The errors that report a loss. ``transactional_id`` and ``state`` name the transaction, ``outcome`` what is known of it."""

OnLoss = Callable[[FoundLoss], object]


class Losses:
    """Reports losses that settling finds. They are already in the table of incidents.

    Every loss becomes one log record at level ``ERROR``, with the fields ``dualwrite_event`` (``loss``),
    ``dualwrite_transactional_id``, ``dualwrite_state`` and ``dualwrite_outcome`` for log collectors.

    Args:
        on_loss: Called with each loss, in the thread that found it. An exception that it raises is logged, and the loss counts
            as reported in the log alone.
        observer: Observes each loss.
    """

    def __init__(self, on_loss: OnLoss | None = None, observer: Observer = NO_OBSERVER) -> None:
        self._on_loss = on_loss
        self._observer = observer
        self._untold: queue.SimpleQueue[FoundLoss] = queue.SimpleQueue()

    def tell(self, loss: FoundLoss) -> bool:
        """Report one loss. Returns whether ``on_loss`` took it, besides the log."""
        logger.error(
            "a transaction was lost after its block had ended: %s",
            loss,
            extra={
                "dualwrite_event": "loss",
                "dualwrite_transactional_id": loss.transactional_id,
                "dualwrite_state": loss.state,
                "dualwrite_outcome": loss.outcome,
            },
        )
        self._observer.lost(loss)
        if self._on_loss is not None:
            try:
                self._on_loss(loss)
            except Exception:
                logger.exception("on_loss raised for the loss of %s", loss.transactional_id)
            else:
                return True
        self._untold.put(loss)
        return False

    @property
    def untold(self) -> int:
        """The number of losses that only the log has reported."""
        return self._untold.qsize()

    def raise_untold(self) -> None:
        """Raise the first loss that only the log has reported, if any. Each is raised at most once."""
        untold = [self._untold.get_nowait() for _ in range(self._untold.qsize())]
        if untold:
            raise untold[0]
