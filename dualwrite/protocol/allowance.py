"""How the end of a dual write spends what the broker leaves of its transaction timeout.

::

    what is left at the record of the decision
    |-- at most decide_s: a pause, and COMMIT ----|-- at least the margin: its answer, Kafka's commit --|  the broker aborts

Each second is given away once: the database ends a transaction that has not committed within ``decide_s``, and
``decide_s`` and the margin together fit into what is left when the record has been written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowance:
    """What one ending may take from the record of its decision on. In seconds.

    Attributes:
        decide_s: From the record until the database has committed; the database enforces it where it can.
        answer_s: Until the answer to COMMIT; without one the row is asked, while Kafka's transaction is still open.
        margin_s: What must be left for Kafka when the database has committed.
    """

    decide_s: float
    answer_s: float
    margin_s: float

    def fits(self, left_s: float) -> bool:
        """Whether a decision at the last allowed moment leaves the margin, looked at when the record has been written.

        Args:
            left_s: What is left of the broker's timeout now. The record may have waited for a lock.
        """
        return self.decide_s + self.margin_s <= left_s


def allow(left_s: float, margin_s: float, ending_s: float) -> Allowance | None:
    """Divide what is left, just before the record is written. None: there is too little left to decide. Pure.

    Half of what lies above the margin is for the record itself, half for the decision. Half of the ending is for finding out
    about a COMMIT that was not answered.

    Args:
        left_s: What is left of the broker's transaction timeout.
        margin_s: What must be left when the database has committed; also the most that the decision is given, unless 0.
        ending_s: What is left of the time for this ending.
    """
    if left_s <= margin_s:
        return None
    half_s = ending_s / 2
    return Allowance(
        decide_s=min(margin_s or half_s, half_s, (left_s - margin_s) / 2),
        answer_s=min(half_s, left_s - margin_s / 2),
        margin_s=margin_s,
    )
