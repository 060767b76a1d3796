"""Divides the rest of the broker's transaction timeout among the steps that end a dual write.

::

    the time left when the decision is recorded
    |-- at most decide_s: a pause, and COMMIT ----|-- at least the margin: its answer, Kafka's commit --|  the broker aborts

No second is allotted twice: the database ends a transaction that has not committed within ``decide_s``, and ``decide_s``
plus the margin must fit into the time left once the record is written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowance:
    """The time that one ending may take after the record of its decision, in seconds.

    Attributes:
        decide_s: Until the database has committed; the database enforces it where it can.
        answer_s: Until COMMIT is answered. Without an answer the owner asks the row while the Kafka transaction is still open.
        margin_s: Must be left for Kafka once the database has committed.
    """

    decide_s: float
    answer_s: float
    margin_s: float

    def fits(self, left_s: float) -> bool:
        """Whether a decision at the last allowed moment still leaves the margin. Checked once the record is written.

        Args:
            left_s: The time left of the broker's timeout now. The record may have waited for a lock.
        """
        return self.decide_s + self.margin_s <= left_s


def allow(left_s: float, margin_s: float, ending_s: float) -> Allowance | None:
    """Divide the time left, just before the record is written. None: too little is left to decide. Pure.

    Half of the time above the margin is for the record itself, half for the decision. Half of the ending's time is kept for
    resolving a COMMIT that was not answered.

    Args:
        left_s: The time left of the broker's transaction timeout.
        margin_s: The time that must be left once the database has committed; also the most that the decision gets, unless 0.
        ending_s: The time left for this ending.
    """
    if left_s <= margin_s:
        return None
    half_s = ending_s / 2
    return Allowance(
        decide_s=min(margin_s or half_s, half_s, (left_s - margin_s) / 2),
        answer_s=min(half_s, left_s - margin_s / 2),
        margin_s=margin_s,
    )
