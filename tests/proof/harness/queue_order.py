"""In which order blocks ask for lanes, and in which they get them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from dualwrite.writing.lane_pool import Lanes


class QueueOrder:
    """The tickets of the blocks that have asked for a lane, and of those that got one; by writer.

    Attributes:
        asked: In the order in which they began to wait.
        given: In the order in which they went on with a lane.
    """

    def __init__(self) -> None:
        self.asked: defaultdict[Lanes, list[object]] = defaultdict(list)
        self.given: defaultdict[Lanes, list[object]] = defaultdict(list)

    @property
    def count(self) -> int:
        """How many got a lane."""
        return sum(map(len, self.given.values()))

    def assert_fair(self) -> None:
        """Assert that lanes were given first come, first served."""
        for lanes, given in self.given.items():
            got = set(given)
            assert given == [ticket for ticket in self.asked[lanes] if ticket in got], (
                "overtaken in the queue for a lane"
            )


def watch_queue(patch: pytest.MonkeyPatch) -> QueueOrder:
    """Watch the queue of every writer of this process."""
    order = QueueOrder()
    real = Lanes.take

    def take(lanes: Lanes, ticket: Any) -> Any:
        order.asked[lanes].append(ticket)
        lane = real(lanes, ticket)
        order.given[lanes].append(ticket)
        return lane

    patch.setattr(Lanes, "take", take)
    return order
