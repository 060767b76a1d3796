"""Losses of transactions whose callers have had their answer: told to people, never raised into somebody else's block."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable

logger = logging.getLogger(__name__)

FoundLoss = DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack
"""What a loss is told with. Its ``transactional_id`` and ``state`` name the transaction, its ``outcome`` what is known."""

OnLoss = Callable[[FoundLoss], object]


class Losses:
    """Tells what settling finds lost. The table of incidents has it already.

    Every loss becomes one log record at level ``ERROR``, with the fields ``dualwrite_event`` (``loss``),
    ``dualwrite_transactional_id``, ``dualwrite_state`` and ``dualwrite_outcome`` for those who collect logs.

    Args:
        on_loss: Called with each loss, in whichever thread has found it. What it raises is logged, and nobody counts as told.
    """

    def __init__(self, on_loss: OnLoss | None = None) -> None:
        self._on_loss = on_loss
        self._untold: queue.SimpleQueue[FoundLoss] = queue.SimpleQueue()

    def tell(self, loss: FoundLoss) -> bool:
        """Tell of one loss. Returns whether somebody beside the log was told."""
        logger.error(
            "a transaction that had ended for its caller is found lost: %s",
            loss,
            extra={
                "dualwrite_event": "loss",
                "dualwrite_transactional_id": loss.transactional_id,
                "dualwrite_state": loss.state,
                "dualwrite_outcome": loss.outcome,
            },
        )
        if self._on_loss is not None:
            try:
                self._on_loss(loss)
            except Exception:
                logger.exception("on_loss has failed for %s", loss.transactional_id)
            else:
                return True
        self._untold.put(loss)
        return False

    def raise_untold(self) -> None:
        """Raise the first loss that nothing but the log was told, if there is any. Each is raised at most once."""
        untold = [self._untold.get_nowait() for _ in range(self._untold.qsize())]
        if untold:
            raise untold[0]
