"""Open transactions that hold back a partition's readers, and their owners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from dualwrite.clock import now_s
from dualwrite.kafka.cluster__kafka_coordinator_partitions import OpenOffsets, Place
from dualwrite.protocol.values import TransactionView
from dualwrite.protocol.values__protocol_naming import is_drawn, parsed, writer_of

HELD_BACK_S: Final = 5.0
"""A transaction that has held back readers for this long is worth a warning."""


@dataclass(frozen=True)
class BlockingTransaction:
    """A transaction open in a partition. ``read_committed`` consumers get nothing from its first offset on.

    In a partition of ``__consumer_offsets``, it withholds committed offsets from the groups stored there.

    Attributes:
        topic: The partition's topic.
        partition: Its number.
        first_offset: The transaction's first offset there.
        producer_id: Its producer's id.
        epoch: Its producer's epoch.
        kafka_id: Kafka's ``transactional.id``; None if no coordinator shows it to us.
        started_ms: When it began, in ms since 1970. None if its coordinator does not list the partition: the broker has
            lost the marker that ends it there, or we may not describe the id.
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
        """The name of the ``DualWriter`` that began it; None if this library did not."""
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
            return "its owner, the next producer of that id, or the broker's transaction timeout will end it"
        return "check with `kafka-transactions.sh find-hanging` whether it is hanging"


def find_blocking(
    places: Collection[Place],
    *,
    open_in: Callable[[Collection[Place]], Mapping[Place, OpenOffsets | None]],
    ids_of: Callable[[Collection[int]], Mapping[int, str]],
    describe: Callable[[Collection[str]], Mapping[str, TransactionView]],
    open_for_s: float,
) -> list[BlockingTransaction]:
    """The transactions open in these partitions, sorted by partition and first offset.

    Args:
        places: The partitions.
        open_in: Asks the partitions' leaders for open transactions.
        ids_of: Looks up the Kafka ids of producer ids.
        describe: Asks the coordinators for their views.
        open_for_s: Omit transactions known to have begun less than this many seconds ago.
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
    # The coordinators answered after the leaders: a transaction that they do not show may have ended in between.
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
    """Partitions whose last stable offset has not moved for a while. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[Place, tuple[int, float]] = {}
        self._told: dict[Place, int] = {}

    def note(self, place: Place, stable: int, *, upto: int) -> None:
        """Record a partition's last stable offset.

        Args:
            place: The partition.
            stable: Its last stable offset.
            upto: Where a transaction of our own begins. If ``stable`` is lower, another producer's is open.
        """
        with self._lock:
            if stable >= upto or stable < 0:
                self._since.pop(place, None)
            elif self._since.get(place, (-1, 0.0))[0] != stable:
                self._since[place] = (stable, now_s())

    def due(self) -> dict[Place, int]:
        """The partitions held back at one offset for :data:`HELD_BACK_S`, with that offset. Each is reported once."""
        with self._lock:
            due = {
                place: stable
                for place, (stable, since) in self._since.items()
                if now_s() - since >= HELD_BACK_S and self._told.get(place) != stable
            }
            self._told |= due
        return due
