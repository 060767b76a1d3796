"""The transaction coordinator's rules for one transactional id, for clients without version 2 transactions.

Functions from the id's metadata to its next metadata and the answer. They follow Kafka's ``TransactionCoordinator`` and
``TransactionMetadata`` (4.3); the tests compare them with a real broker.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from simulator.requests import (
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    EMPTY,
    ONGOING,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    EndTxn,
    ErrorCode,
    InitProducerId,
    InitProducerIdResponse,
    TopicPartition,
)

_NO_EPOCH: Final = -1
_LAST_EPOCH: Final = 2**15 - 2  # the last one is kept for fencing
_PREPARED: Final = frozenset({PREPARE_COMMIT, PREPARE_ABORT})


class TransactionMetadata(NamedTuple):
    """The coordinator's metadata of one transactional id.

    ``marked`` holds the partitions that already have a prepared transaction's marker, in memory only.
    ``last_producer_epoch`` is the epoch before it was raised; the coordinator recognises a repeated ``InitProducerId``
    by it.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int = _NO_EPOCH
    last_producer_epoch: int = _NO_EPOCH
    previous_producer_id: int = -1
    timeout_ms: int = 60_000
    state: str = EMPTY
    partitions: tuple[TopicPartition, ...] = ()
    marked: tuple[TopicPartition, ...] = ()
    start_ms: int = -1

    @property
    def unmarked(self) -> tuple[TopicPartition, ...]:
        """The transaction's partitions without a marker."""
        return tuple(added for added in self.partitions if added not in self.marked)


def init_producer_id(
    known: TransactionMetadata, request: InitProducerId, new_producer_id: int
) -> tuple[TransactionMetadata, InitProducerIdResponse]:
    """``InitProducerId`` for a known id, or for one just made with the epoch -1.

    It aborts an ongoing transaction *before* it compares the expected epoch, and answers ``CONCURRENT_TRANSACTIONS``.

    Args:
        known: The id's metadata.
        request: The request.
        new_producer_id: The producer id to use once the current one's epochs are exhausted.
    """
    expects = request.producer_id >= 0
    if known.state in _PREPARED:
        return known, InitProducerIdResponse(ErrorCode.CONCURRENT_TRANSACTIONS)
    if expects and not _is_expected_producer(known, request):
        return known, InitProducerIdResponse(ErrorCode.PRODUCER_FENCED)
    if known.state == ONGOING:
        return fence(known), InitProducerIdResponse(ErrorCode.CONCURRENT_TRANSACTIONS)
    epoch = known.producer_epoch
    renewed = known._replace(
        state=EMPTY, partitions=(), start_ms=-1, timeout_ms=request.transaction_timeout_ms,
        previous_producer_id=known.producer_id,
    )  # fmt: skip
    if epoch >= _LAST_EPOCH and (not expects or request.producer_epoch == epoch):
        renewed = renewed._replace(
            producer_id=new_producer_id, producer_epoch=0, last_producer_epoch=epoch if expects else _NO_EPOCH
        )
    elif not expects:
        renewed = renewed._replace(producer_epoch=epoch + 1, last_producer_epoch=_NO_EPOCH)
    elif epoch in {_NO_EPOCH, request.producer_epoch}:
        renewed = renewed._replace(producer_epoch=epoch + 1, last_producer_epoch=epoch)
    elif request.producer_epoch != known.last_producer_epoch:
        return known, InitProducerIdResponse(ErrorCode.PRODUCER_FENCED)
    return renewed, InitProducerIdResponse(ErrorCode.NONE, renewed.producer_id, renewed.producer_epoch)


def _is_expected_producer(known: TransactionMetadata, request: InitProducerId) -> bool:
    return (
        known.producer_epoch == _NO_EPOCH
        or request.producer_id == known.producer_id
        or (request.producer_id == known.previous_producer_id and request.producer_epoch >= _LAST_EPOCH)
    )


def fence(known: TransactionMetadata) -> TransactionMetadata:
    """Abort the ongoing transaction under a raised epoch: by ``InitProducerId``, by time-out, or by force.

    A producer that expects the previous epoch then gets the raised one, until the next ``InitProducerId``.
    """
    epoch = known.producer_epoch
    return known._replace(state=PREPARE_ABORT, producer_epoch=epoch + 1, last_producer_epoch=epoch)


def add_partitions(
    known: TransactionMetadata | None,
    producer_id: int,
    producer_epoch: int,
    partitions: tuple[TopicPartition, ...],
    now_ms: int,
) -> tuple[TransactionMetadata | None, ErrorCode]:
    """``AddPartitionsToTxn`` from a client; ``AddOffsetsToTxn`` amounts to the same."""
    if known is not None and known.state in _PREPARED:
        return known, ErrorCode.CONCURRENT_TRANSACTIONS
    if known is None or producer_id != known.producer_id:
        return known, ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if producer_epoch != known.producer_epoch:
        return known, ErrorCode.PRODUCER_FENCED
    added = tuple(sorted({*known.partitions, *partitions}))
    start_ms = known.start_ms if known.state == ONGOING else now_ms
    return known._replace(state=ONGOING, partitions=added, start_ms=start_ms), ErrorCode.NONE


def verify_partition(
    known: TransactionMetadata | None, producer_id: int, producer_epoch: int, partition: TopicPartition
) -> ErrorCode:
    """The coordinator's answer to a partition's leader before a transaction's first batch is written there."""
    if known is None or producer_id != known.producer_id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if producer_epoch != known.producer_epoch:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if known.state in _PREPARED:
        return ErrorCode.CONCURRENT_TRANSACTIONS
    return ErrorCode.NONE if partition in known.partitions else ErrorCode.INVALID_TXN_STATE


def end_txn(known: TransactionMetadata | None, request: EndTxn) -> tuple[TransactionMetadata | None, ErrorCode]:
    """``EndTxn``: the answer in every state."""
    if known is None or request.producer_id != known.producer_id:
        return known, ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if request.producer_epoch != known.producer_epoch:
        return known, ErrorCode.PRODUCER_FENCED
    if known.state in _PREPARED:  # for the same outcome and the opposite one alike
        return known, ErrorCode.CONCURRENT_TRANSACTIONS
    if known.state == ONGOING:
        return known._replace(state=PREPARE_COMMIT if request.committed else PREPARE_ABORT), ErrorCode.NONE
    if known.state == (COMPLETE_COMMIT if request.committed else COMPLETE_ABORT):
        return known, ErrorCode.NONE
    return known, ErrorCode.INVALID_TXN_STATE


def marker_written(known: TransactionMetadata, partition: TopicPartition) -> TransactionMetadata:
    """Note a prepared transaction's marker in that partition; the last one completes the transaction."""
    marked = known._replace(marked=(*known.marked, partition))
    if marked.unmarked:
        return marked
    state = COMPLETE_COMMIT if known.state == PREPARE_COMMIT else COMPLETE_ABORT
    return known._replace(state=state, partitions=(), marked=())
