"""``Health``: what a writer knows of itself, and whether it is ready for the next dual write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Health:
    """A writer's knowledge of itself, gathered without asking a server.

    Attributes:
        writer: The writer's transactional id.
        open: Whether it is open, in this process.
        fenced: Whether another owner has taken over. It stays so: the process must be restarted, if that was not intended.
        answered: Whether database and Kafka answered the last dual write, settling or probe.
        lease_lost: Whether another member of its fleet has its id: it is about to take another one.
        lease_expired: Whether its lease was not renewed in time, so that another member may take its id.
        untold_losses: The number of losses that only the log has reported; see ``on_loss``.
        max_lanes: The maximum number of lanes.
        lanes: The number of lanes that exist.
        used: The number of lanes that dual writes use now.
        waiting: The number of dual writes that wait for a lane.
        unsettled: The number of lanes that may have left a transaction open in Kafka. They are settled in the background.
        stuck: The number of unsettled lanes for which settling has failed. It is retried.
        unsettled_s: For how long the oldest of the unsettled lanes has been so, in seconds.
        open_s: For how long the oldest of the running dual writes has held its lane, in seconds.
        time_left_s: The time until the broker aborts the transaction that it aborts next, in seconds; None if no transaction
            with a time limit is open.
        problems: Why it is not ready, as short sentences; empty if it is ready.
    """

    writer: str
    open: bool
    fenced: bool = False
    answered: bool = True
    lease_lost: bool = False
    lease_expired: bool = False
    untold_losses: int = 0
    max_lanes: int = 0
    lanes: int = 0
    used: int = 0
    waiting: int = 0
    unsettled: int = 0
    stuck: int = 0
    unsettled_s: float = 0.0
    open_s: float = 0.0
    time_left_s: float | None = None
    problems: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        wrong = {
            "the writer is not open": not self.open,
            "another owner has taken over": self.fenced,
            "the database or Kafka did not answer last": not self.answered,
            "its lease is lost: it is taking another id": self.lease_lost,
            "its lease was not renewed in time": self.lease_expired,
            f"lanes that could not be settled: {self.stuck}": self.stuck > 0,
            f"losses that only the log has reported: {self.untold_losses}": self.untold_losses > 0,
        }
        object.__setattr__(self, "problems", tuple(text for text, applies in wrong.items() if applies))

    @property
    def ready(self) -> bool:
        """Whether dual writes are expected to work now."""
        return not self.problems
