"""The losses found on one lane: recorded in the database, then reported."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dualwrite.errors import DatabaseWentBack, DualWriteError, OutcomeUnverifiable
from dualwrite.protocol.lost_decisions import contradiction
from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import Outcome
from dualwrite.protocol.values__protocol_mismatch import gone_back
from dualwrite.recovery.in_doubt import note_told

if TYPE_CHECKING:
    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.recovery.claim import OwnerContext
    from dualwrite.writing.lane__writing_lanes_losses import FoundLoss, Losses

logger = logging.getLogger(__name__)


class RecordedLosses:
    """Records what a lane finds lost, and reports it.

    Args:
        transactional_id: The lane's id.
        context: The servers.
        losses: Reports losses that do not belong to the current dual write.
    """

    def __init__(self, transactional_id: str, context: OwnerContext, losses: Losses) -> None:
        self._id = transactional_id
        self._context = context
        self._losses = losses
        self._forgotten: str | None = None

    def tell(self, loss: FoundLoss) -> None:
        """Report a loss that is recorded already, and note in the database whether a caller has got it."""
        if self._losses.tell(loss) and loss.state is not None:
            note_told(self._context.store, [(self._id, PreparedTxnState.from_string(loss.state))])

    def record_came_back(self, row: StateRow) -> None:
        """Record and report that the row's transaction, aborted on both sides, is committed in Kafka.

        Raises:
            ConfigurationError, Unavailable: It could not be recorded. It is not reported then.
        """
        detail = (
            "aborted on both sides, but the log shows a commit: its messages are visible, and its rows are not there"
        )
        error = OutcomeUnverifiable(detail, transactional_id=self._id, state=str(row.prepared))
        self._context.store.record_outcomes([(row, Outcome.UNVERIFIABLE, detail)])
        self.tell(error)

    def record_forgotten(self, row: StateRow, error: DatabaseWentBack) -> None:
        """Record the decision on this row that the database has lost. Kafka has its messages."""
        logger.error("%s", error)
        if error.state is None:
            return
        self._forgotten = error.state
        row = replace(row, prepared=PreparedTxnState.from_string(error.state))
        detail = f"{error.what}; the messages of the forgotten decision may be visible in Kafka"
        try:
            self._context.store.record_outcomes([(row, Outcome.UNVERIFIABLE, detail)])
        except DualWriteError:
            logger.exception("%s: could not record a decision that the database has lost", self._id)

    def compare(self, row: StateRow) -> None:
        """Check whether the database has lost the decision that this row holds; record and report it once if so.

        Args:
            row: The row as its owner knows it.

        Raises:
            ConfigurationError, Unavailable: The row could not be read.
        """
        if not row.prepared.has_transaction or str(row.prepared) == self._forgotten:
            return
        found = next(iter(self._context.store.read([self._id])), None)
        if found is None or found.namespace != row.namespace or found.prepared == row.prepared:
            return  # deleted by hand, or only a claim was lost: the next owner finds that out
        seen = contradiction(row.incarnation, row.prepared, found.incarnation, found.prepared)
        if seen is not None:
            recorded = found.incarnation == row.incarnation  # if the claim is lost too, no opening can succeed
            error = gone_back(seen, self._id, str(row.prepared), recorded=recorded)
            self.record_forgotten(row, error)
            self.tell(error)
