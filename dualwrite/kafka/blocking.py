"""Transactions that hold back the readers of partitions, and whose they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from dualwrite.deadline import now_s
from dualwrite.kafka.partitions import OpenOffsets, Place
from dualwrite.observations import TransactionView
from dualwrite.protocol.naming import is_drawn, parsed, writer_of

HELD_BACK_S: Final = 5.0
"""Readers that have been held back for so long by one transaction are worth a warning."""


@dataclass(frozen=True)
class BlockingTransaction:
    """A transaction that is open in a partition. ``read_committed`` consumers get nothing that lies behind its first record.

    Where the partition is one of ``__consumer_offsets``, the groups whose offsets it holds get no committed offsets.

    Attributes:
        topic: The partition's topic.
        partition: Its number.
        first_offset: Where the transaction begins there.
        producer_id: Its producer's id.
        epoch: Its producer's epoch.
        kafka_id: Kafka's ``transactional.id``; None if no coordinator shows it, or not to us.
        started_ms: When it began, in ms since 1970. None if its coordinator does not show it there: then the broker has
            forgotten to end it there, or we may not describe the id.
    """

    topic: str
    partition: int
    first_offset: int
    producer_id: int
    epoch: int
    kafka_id: str | None = None
    started_ms: int | None = None

    @property
    def writer(self) -> str | None:
        """The name of the ``DualWriter`` that has begun it; None if it is none of this library's."""
        named = parsed(self.kafka_id) if self.kafka_id is not None else None
        return writer_of(named[0]) if named is not None and is_drawn(named[1]) else None

    def __str__(self) -> str:
        since = "an unknown time" if self.started_ms is None else _utc(self.started_ms)
        whose = f"producer {self.producer_id}:{self.epoch}"
        if self.kafka_id is not None:
            whose = f"{self.kafka_id!r} ({whose})"
        return (
            f"{Place(self.topic, self.partition)} from offset {self.first_offset} on, by the transaction of {whose}, "
            f"open since {since}; {self._way_on}"
        )

    @property
    def _way_on(self) -> str:
        if self.writer is not None:
            return f"if its owner is dead, run `dualwrite recover {self.writer}`"
        if self.started_ms is not None:
            return "its owner ends it, the next producer of that id, or the broker after its timeout"
        return "`kafka-transactions.sh find-hanging` tells whether it was forgotten"


def find_blocking(
    places: Collection[Place],
    *,
    open_in: Callable[[Collection[Place]], Mapping[Place, OpenOffsets | None]],
    ids_of: Callable[[Collection[int]], Mapping[int, str]],
    describe: Callable[[Collection[str]], Mapping[str, TransactionView]],
    open_for_s: float,
) -> list[BlockingTransaction]:
    """The transactions that are open in these partitions, oldest of a partition first.

    Args:
        places: The partitions.
        open_in: Asks their leaders what is open there.
        ids_of: Asks for the Kafka ids of producer ids.
        describe: Asks the coordinators.
        open_for_s: Leave out what is known to have begun less than this many seconds ago.
    """
    found = [
        BlockingTransaction(place.topic, place.partition, start, producer_id, epoch)
        for place, there in open_in(places).items()
        for (producer_id, epoch), start in (there or {}).items()
    ]
    if not found:
        return []
    ids = ids_of({one.producer_id for one in found})
    views = describe(set(ids.values())) if ids else {}
    named = [_named(one, ids.get(one.producer_id), views) for one in found]
    # The coordinator was asked later than the leader: what it does not show may have ended meanwhile.
    unknown = {Place(one.topic, one.partition) for one in named if one.started_ms is None}
    again = open_in(unknown) if unknown else {}
    oldest_ms = (time.time() - open_for_s) * 1000
    return sorted(
        (one for one in named if _is_still_open(one, again) and (one.started_ms or 0) <= oldest_ms),
        key=lambda one: (one.topic, one.partition, one.first_offset),
    )


def _named(one: BlockingTransaction, kafka_id: str | None, views: Mapping[str, TransactionView]) -> BlockingTransaction:
    view = views.get(kafka_id) if kafka_id is not None else None
    shown = view is not None and view.producer_id == one.producer_id and (one.topic, one.partition) in view.partitions
    started_ms = view.started_ms if view is not None and shown else None
    return BlockingTransaction(
        one.topic, one.partition, one.first_offset, one.producer_id, one.epoch, kafka_id, started_ms
    )


def _is_still_open(one: BlockingTransaction, again: Mapping[Place, OpenOffsets | None]) -> bool:
    if one.started_ms is not None:
        return True
    there = again.get(Place(one.topic, one.partition)) or {}
    return there.get((one.producer_id, one.epoch)) == one.first_offset


def _utc(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, tz=timezone.utc).isoformat(timespec="seconds")


class HeldBack:
    """The partitions that were seen to be held back at the same offset for a while. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[Place, tuple[int, float]] = {}
        self._told: dict[Place, int] = {}

    def note(self, place: Place, stable: int, *, upto: int) -> None:
        """A partition's last stable offset was seen.

        Args:
            place: The partition.
            stable: Its last stable offset.
            upto: Where a transaction of our own begins. What is open before it is somebody else's.
        """
        with self._lock:
            if stable >= upto or stable < 0:
                self._since.pop(place, None)
            elif self._since.get(place, (-1, 0.0))[0] != stable:
                self._since[place] = (stable, now_s())

    def due(self) -> dict[Place, int]:
        """The partitions held back at one offset for :data:`HELD_BACK_S`: where that transaction begins, each one once."""
        with self._lock:
            due = {
                place: stable
                for place, (stable, since) in self._since.items()
                if now_s() - since >= HELD_BACK_S and self._told.get(place) != stable
            }
            self._told |= due
        return due
