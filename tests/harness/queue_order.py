"""In which order blocks ask for lanes, and in which they get them."""

from __future__ import annotations

from typing import Any

import pytest

from dualwrite.writing.lanes.lane_pool import Lanes


class QueueOrder:
    """The tickets of the blocks that have asked for a lane, and of those that got one.

    Attributes:
        asked: In the order in which they began to wait.
        given: In the order in which they went on with a lane.
    """

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.given: list[object] = []

    def assert_fair(self, count: int | None = None) -> None:
        """Assert that lanes were given first come, first served, so many of them."""
        got = set(self.given)
        assert self.given == [ticket for ticket in self.asked if ticket in got], "overtaken in the queue for a lane"
        assert count is None or len(self.given) == count


def watch_queue(patch: pytest.MonkeyPatch) -> QueueOrder:
    """Watch the queue of every writer of this process."""
    order = QueueOrder()
    real = Lanes.take

    def take(lanes: Lanes, ticket: Any) -> Any:
        order.asked.append(ticket)
        lane = real(lanes, ticket)
        order.given.append(ticket)
        return lane

    patch.setattr(Lanes, "take", take)
    return order
