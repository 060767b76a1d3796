"""Which transaction it is: comparing what the servers show with what a prepared state names.

librdkafka's transactions share producer id and epoch, so the partitions' first offsets tell them apart. A native transaction
has an epoch of its own, which names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualwrite.protocol.prepared_state import PreparedTxnState
from dualwrite.protocol.values import TransactionStatus, TransactionView

Partition = tuple[str, int]
OpenPlaces = tuple[tuple[Partition, int], ...]
"""Partitions, each with the offset at which its open transaction begins."""
OFFSETS_TOPIC: Final = "__consumer_offsets"
_LAST_EPOCH: Final = 32_766
"""The coordinator gives a new producer id in place of an epoch above it."""


def belongs(state: PreparedTxnState, incarnation: int) -> bool:
    """Whether that incarnation prepared the state."""
    return state.has_transaction and state.incarnation == incarnation


def shows_same_transaction(view: TransactionView, state: PreparedTxnState) -> bool:
    """Whether the coordinator's view may show the state's own transaction.

    Compares producer id and epoch, which are enough for a native state, and, where both are known, start and partitions. The
    view may show more partitions: see :func:`others_than`.
    """
    if (view.producer_id, view.epoch) != (state.producer_id, state.epoch):
        return False
    if state.is_native:
        return True
    if view.partitions and not own_partitions(state) <= set(view.partitions):
        return False
    return view.started_ms is None or state.started_ms is None or view.started_ms == state.started_ms


def another_owner_since(seen: TransactionView, now: TransactionView) -> bool:
    """Whether another producer of the id has been at work between two views of the coordinator's that are at rest.

    The transaction that was seen open may have ended meanwhile, by its own producer or the broker: nothing is left to end then.
    A producer that was initialised since shows an empty state first, and then transactions of another name; or, where those of
    librdkafka share a name, of another start.

    Args:
        seen: The first view.
        now: The later one.
    """
    if now.status is TransactionStatus.NO_SUCH_ID:
        return False
    same_ids = (seen.producer_id, seen.epoch) == (now.producer_id, now.epoch)
    if seen.status is not TransactionStatus.ONGOING:
        return not same_ids or seen.status is not now.status
    if now.status is TransactionStatus.ONGOING:
        return not same_ids or seen.started_ms != now.started_ms
    # Its own end shows its epoch, or the next one: that of a native transaction, or of one that timed out. After the last epoch
    # comes another producer id.
    is_its_end = now.producer_id == seen.producer_id and now.epoch in {seen.epoch, seen.epoch + 1}
    is_its_end = is_its_end or (now.epoch == 0 and seen.epoch == _LAST_EPOCH)
    return now.status is TransactionStatus.EMPTY or not is_its_end


def others_than(state: PreparedTxnState, view: TransactionView) -> frozenset[Partition]:
    """The partitions that the coordinator shows besides those that the state's transaction has written.

    Either they belong to another transaction, which then has something open there; or a late request of an earlier transaction
    has added them, and nothing is open there. Consumer offsets may be part of any transaction, so they are left out.
    """
    return frozenset(key for key in view.partitions if key[0] != OFFSETS_TOPIC) - own_partitions(state)


def own_partitions(state: PreparedTxnState) -> frozenset[Partition]:
    """The partitions that the state names."""
    return state.partitions


def is_older(state: PreparedTxnState, than: PreparedTxnState) -> bool:
    """Whether the state was certainly decided before ``than``, of the same transactional id; False if that is unknown.

    Epochs of native transactions rise, and so do offsets in one partition of one topic.
    """
    if not than.has_transaction:
        return False
    if not state.has_transaction:
        return True
    if state.incarnation is not None and than.incarnation is not None and state.incarnation != than.incarnation:
        return state.incarnation < than.incarnation
    if state.is_native and than.is_native and state.producer_id == than.producer_id:
        return state.epoch < than.epoch
    firsts = {(first.topic_id, first.partition): first.offset for first in state.first_offsets}
    return any(
        first.topic_id is not None and firsts.get((first.topic_id, first.partition), first.offset) < first.offset
        for first in than.first_offsets
    )


def is_open(
    state: PreparedTxnState, open_offsets: Mapping[tuple[str, int], int | None], *, exactly: bool = False
) -> bool:
    """Whether the state's transaction is open in every partition that still exists, of which there must be at least one.

    Partitions that are gone with their topic show nothing. One first offset identifies the transaction, as every later one
    begins at another offset; if the others match too, no operator has ended it by hand in one of them. In a partition that is
    open from an earlier offset on, the broker has forgotten to end an earlier transaction, and will end both.

    Args:
        state: The prepared state.
        open_offsets: By (topic, partition), where the open transaction of the state's producer begins, or None. Partitions
            that no longer exist are left out.
        exactly: Whether a partition that is open from an earlier offset on does not count.
    """
    shown = [
        (start := open_offsets[key]) == first.offset or (start is not None and start < first.offset and not exactly)
        for first in state.first_offsets
        if (key := (first.topic, first.partition)) in open_offsets
    ]
    return bool(shown) and all(shown)


def own_among(state: PreparedTxnState, still_open: OpenPlaces) -> frozenset[Partition]:
    """The partitions whose open transaction includes the records of the state's transaction."""
    firsts = {(first.topic, first.partition): first.offset for first in state.first_offsets}
    return frozenset(key for key, start in still_open if key in firsts and start <= firsts[key])
