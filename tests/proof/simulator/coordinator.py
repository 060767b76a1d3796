"""The transaction coordinator's rules for one transactional id, for clients with and without version 2 transactions.

Functions from the id's metadata to its next metadata and the answer. They follow Kafka's ``TransactionCoordinator`` and
``TransactionMetadata`` (4.3); the tests compare them with a real broker.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from simulator.requests import (
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    EMPTY,
    NEVER_MS,
    ONGOING,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    EndTxn,
    EndTxnResponse,
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
    by it. ``transaction_version`` is that of the request, or of the broker, that ended a prepared transaction.
    ``next_producer_id`` is -1 unless that transaction has the last epoch of its producer id.
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
    transaction_version: int = 1
    next_producer_id: int = -1

    @property
    def unmarked(self) -> tuple[TopicPartition, ...]:
        """The transaction's partitions without a marker."""
        return tuple(added for added in self.partitions if added not in self.marked)


def init_producer_id(
    known: TransactionMetadata, request: InitProducerId, new_producer_id: int, transaction_version: int
) -> tuple[TransactionMetadata, InitProducerIdResponse]:
    """``InitProducerId`` for a known id, or for one just made with the epoch -1.

    It aborts an ongoing transaction *before* it compares the expected epoch, and answers ``CONCURRENT_TRANSACTIONS``.

    Args:
        known: The id's metadata.
        request: The request.
        new_producer_id: The producer id to use once the current one's epochs are exhausted.
        transaction_version: The broker's.
    """
    expects = request.producer_id >= 0
    if known.state in _PREPARED:
        return known, InitProducerIdResponse(ErrorCode.CONCURRENT_TRANSACTIONS)
    if expects and not _is_expected_producer(known, request):
        return known, InitProducerIdResponse(ErrorCode.PRODUCER_FENCED)
    if known.state == ONGOING:
        return fence(known, transaction_version, new_producer_id), InitProducerIdResponse(
            ErrorCode.CONCURRENT_TRANSACTIONS
        )
    epoch = known.producer_epoch
    renewed = known._replace(
        state=EMPTY, partitions=(), start_ms=-1,
        timeout_ms=NEVER_MS if request.enable_2pc else request.transaction_timeout_ms,
        previous_producer_id=known.producer_id,
    )  # fmt: skip
    if is_exhausted(known):
        if expects and request.producer_epoch != epoch:
            # Before it compares epochs, the broker finds none left, and throws: even for a repeated request that got this one.
            return known, InitProducerIdResponse(ErrorCode.UNKNOWN_SERVER_ERROR)
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


def is_exhausted(known: TransactionMetadata) -> bool:
    """Whether the epoch is the last one of its producer id: the next transaction, or producer, gets another id."""
    return known.producer_epoch >= _LAST_EPOCH


def fence(known: TransactionMetadata, transaction_version: int, new_producer_id: int) -> TransactionMetadata:
    """Abort the ongoing transaction under a raised epoch: by ``InitProducerId``, by time-out, or by force.

    A producer that expects the previous epoch then gets the raised one, until the next ``InitProducerId``. After the last
    epoch a broker of version 2 continues with the new producer id.
    """
    epoch = known.producer_epoch
    return known._replace(
        state=PREPARE_ABORT,
        producer_epoch=epoch + 1,
        last_producer_epoch=epoch,
        previous_producer_id=known.producer_id,
        transaction_version=transaction_version,
        next_producer_id=new_producer_id if transaction_version > 1 and is_exhausted(known) else -1,
    )


def add_partitions(
    known: TransactionMetadata | None,
    producer_id: int,
    producer_epoch: int,
    partitions: tuple[TopicPartition, ...],
    now_ms: int,
) -> tuple[TransactionMetadata | None, ErrorCode]:
    """``AddPartitionsToTxn`` from a client; ``AddOffsetsToTxn`` amounts to the same.

    So does the first write of a version 2 transaction to a partition, whose leader asks in the client's place.
    """
    if known is not None and known.state in _PREPARED:
        return known, ErrorCode.CONCURRENT_TRANSACTIONS
    if known is None or producer_id != known.producer_id:
        return known, ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if producer_epoch != known.producer_epoch:
        return known, ErrorCode.PRODUCER_FENCED
    added = tuple(sorted({*known.partitions, *partitions}))
    start_ms = known.start_ms if known.state == ONGOING else now_ms
    return known._replace(
        state=ONGOING, partitions=added, start_ms=start_ms, previous_producer_id=producer_id
    ), ErrorCode.NONE  # fmt: skip


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
    """``EndTxn`` up to version 4: the answer in every state."""
    if known is None or request.producer_id != known.producer_id:
        return known, ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if request.producer_epoch != known.producer_epoch:
        return known, ErrorCode.PRODUCER_FENCED
    if known.state in _PREPARED:  # for the same outcome and the opposite one alike
        return known, ErrorCode.CONCURRENT_TRANSACTIONS
    if known.state == ONGOING:
        return known._replace(
            state=PREPARE_COMMIT if request.committed else PREPARE_ABORT,
            previous_producer_id=known.producer_id,
            transaction_version=1,
        ), ErrorCode.NONE  # fmt: skip
    if known.state == (COMPLETE_COMMIT if request.committed else COMPLETE_ABORT):
        return known, ErrorCode.NONE
    return known, ErrorCode.INVALID_TXN_STATE


def end_txn_v2(
    known: TransactionMetadata | None, request: EndTxn, new_producer_id: int, now_ms: int
) -> tuple[TransactionMetadata | None, EndTxnResponse]:
    """``EndTxn`` 5: ends the transaction of this epoch, and returns id and epoch of the next one.

    A repetition is recognised by the epoch of the transaction before, at any time until the next one is ended or the
    producer is initialised. An abort under the current epoch is answered even with nothing written: it raises the epoch.

    Args:
        known: The id's metadata.
        request: The request.
        new_producer_id: The producer id of the next transaction, once the current one's epochs are exhausted.
        now_ms: The broker's time.
    """
    if known is None:
        return known, EndTxnResponse(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    if known.state in _PREPARED:  # whatever the producer id, epoch and outcome
        return known, EndTxnResponse(ErrorCode.CONCURRENT_TRANSACTIONS)
    epoch = known.producer_epoch
    of_last_id = (
        request.producer_id == known.previous_producer_id and request.producer_epoch == _LAST_EPOCH and epoch == 0
    )
    repeated = request.producer_epoch == epoch - 1 or of_last_id
    if request.producer_id != known.producer_id and not of_last_id:
        return known, EndTxnResponse(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    if repeated and known.state in {COMPLETE_COMMIT, COMPLETE_ABORT}:
        if known.state == (COMPLETE_COMMIT if request.committed else COMPLETE_ABORT):
            return known, EndTxnResponse(ErrorCode.NONE, known.producer_id, epoch)
        return known, EndTxnResponse(ErrorCode.INVALID_TXN_STATE)
    if request.producer_epoch != epoch:
        return known, EndTxnResponse(ErrorCode.PRODUCER_FENCED)
    if request.committed and known.state != ONGOING:
        return known, EndTxnResponse(ErrorCode.INVALID_TXN_STATE)
    exhausted = is_exhausted(known)
    ended = known._replace(
        state=PREPARE_COMMIT if request.committed else PREPARE_ABORT,
        producer_epoch=epoch + 1,
        last_producer_epoch=epoch,
        previous_producer_id=known.producer_id,
        start_ms=known.start_ms if known.state == ONGOING else now_ms,
        transaction_version=2,
        next_producer_id=new_producer_id if exhausted else -1,
    )
    following = (new_producer_id, 0) if exhausted else (known.producer_id, epoch + 1)
    return ended, EndTxnResponse(ErrorCode.NONE, *following)


def marker_written(known: TransactionMetadata, partition: TopicPartition) -> TransactionMetadata:
    """Note a prepared transaction's marker in that partition; the last one completes the transaction."""
    marked = known._replace(marked=(*known.marked, partition))
    return marked if marked.unmarked else completed(marked)


def completed(known: TransactionMetadata) -> TransactionMetadata:
    """Complete a prepared transaction: every partition has its marker, or there is none."""
    done = known._replace(
        state=COMPLETE_COMMIT if known.state == PREPARE_COMMIT else COMPLETE_ABORT,
        partitions=(),
        marked=(),
        previous_producer_id=known.producer_id,
        transaction_version=1,
    )
    if known.next_producer_id < 0:
        return done
    return done._replace(producer_id=known.next_producer_id, producer_epoch=0, next_producer_id=-1)
