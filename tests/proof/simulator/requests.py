"""Kafka's requests and answers for the simulated broker: small, immutable, hashable.

Names and fields are those of Kafka's protocol, without those that have no meaning here (throttling, authorisation,
client ids). A request concerns one transactional id or one partition where Kafka allows several, except
``AddPartitionsToTxn``.

``ErrorCode`` holds the numbers of Kafka's protocol. Versions of ``AddPartitionsToTxn``, ``AddOffsetsToTxn`` and
``EndTxn`` below 2, and of ``InitProducerId`` below 4, answer ``INVALID_PRODUCER_EPOCH`` where newer ones, and the
simulator, answer ``PRODUCER_FENCED``. Nothing else depends on the version, up to the last one without version 2
transactions (``EndTxn`` 4, ``Produce`` 10, ``InitProducerId`` 5).

Where ``transaction_version`` is 2, the request is one of transactions of version 2 (KIP-890): ``Produce`` 12,
``TxnOffsetCommit`` 5, which add their partition to the transaction, and ``EndTxn`` 5, which names one transaction by its
epoch, and returns the epoch of the next. A client sends these where the cluster has finalized version 2; one broker
answers clients of both versions.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import Final, NamedTuple

TopicPartition = tuple[str, int]
Marker = str

EMPTY: Final = "Empty"
ONGOING: Final = "Ongoing"
PREPARE_COMMIT: Final = "PrepareCommit"
PREPARE_ABORT: Final = "PrepareAbort"
COMPLETE_COMMIT: Final = "CompleteCommit"
COMPLETE_ABORT: Final = "CompleteAbort"

COMMIT: Final[Marker] = "commit"
ABORT: Final[Marker] = "abort"

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
LATEST: Final = -1
EARLIEST: Final = -2

NEVER_MS: Final = 2**31 - 1
"""The timeout of a transaction that the broker never times out."""


class ErrorCode(IntEnum):
    """The error codes of Kafka's protocol that the simulator uses."""

    __hash__ = int.__hash__  # Enum's own is slow Python code, and a search hashes millions

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_ENOUGH_REPLICAS = 19
    ILLEGAL_GENERATION = 22
    UNKNOWN_MEMBER_ID = 25
    REBALANCE_IN_PROGRESS = 27
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    UNSTABLE_OFFSET_COMMIT = 88
    PRODUCER_FENCED = 90
    TRANSACTIONAL_ID_NOT_FOUND = 105
    TRANSACTION_ABORTABLE = 120


class InitProducerId(NamedTuple):
    """Up to version 6: -1, -1 for a new producer, else the expected id and epoch.

    ``enable_2pc`` is version 6's: the transactions never time out, whatever the timeout.
    """

    transactional_id: str
    transaction_timeout_ms: int = 60_000
    producer_id: int = -1
    producer_epoch: int = -1
    enable_2pc: bool = False


class InitProducerIdResponse(NamedTuple):
    """Id and epoch are -1 after an error."""

    error_code: ErrorCode
    producer_id: int = -1
    producer_epoch: int = -1


class AddPartitionsToTxn(NamedTuple):
    """Up to version 3, as clients send it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: tuple[TopicPartition, ...]


class AddPartitionsToTxnResponse(NamedTuple):
    """One error code for each partition, in the order of the request."""

    error_codes: tuple[ErrorCode, ...]


class AddOffsetsToTxn(NamedTuple):
    """Adds the partition of ``__consumer_offsets`` that belongs to the group."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    group_id: str


class TxnOffsetCommit(NamedTuple):
    """``offsets``: by partition, the offset to commit for the group.

    A consumer that has subscribed names its member id and the group's generation (KIP-447).
    """

    transactional_id: str
    group_id: str
    producer_id: int
    producer_epoch: int
    offsets: tuple[tuple[TopicPartition, int], ...]
    transaction_version: int = 1
    member_id: str = ""
    generation: int = -1


class Produce(NamedTuple):
    """One batch, acks=all. Without a transactional id, and with producer id -1, it is a plain write."""

    transactional_id: str | None
    producer_id: int
    producer_epoch: int
    partition: TopicPartition
    base_sequence: int
    values: tuple[Hashable, ...]
    transaction_version: int = 1


class ProduceResponse(NamedTuple):
    """``base_offset``: the offset of the first record, even for a repeated batch; -1 after an error."""

    error_code: ErrorCode
    base_offset: int = -1


class EndTxn(NamedTuple):
    """Up to version 4 the epoch stays the same; with version 2 transactions each has one of its own."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    committed: bool
    transaction_version: int = 1


class EndTxnResponse(NamedTuple):
    """The answer of version 5: id and epoch of the next transaction; -1 after an error."""

    error_code: ErrorCode
    producer_id: int = -1
    producer_epoch: int = -1


class ErrorResponse(NamedTuple):
    """The answer to requests that return an error code only."""

    error_code: ErrorCode


class DescribeTransactions(NamedTuple):
    """The coordinator's view of one id."""

    transactional_id: str


class DescribeTransactionsResponse(NamedTuple):
    """``transaction_state`` is one of the words above; empty if the id is unknown."""

    error_code: ErrorCode
    transaction_state: str = ""
    producer_id: int = -1
    producer_epoch: int = -1
    transaction_timeout_ms: int = 0
    transaction_start_time_ms: int = 0
    partitions: tuple[TopicPartition, ...] = ()


class ListTransactions(NamedTuple):
    """Empty filters list everything."""

    state_filters: frozenset[str] = frozenset()
    producer_id_filters: frozenset[int] = frozenset()


class ListedTransaction(NamedTuple):
    """One entry of the list."""

    transactional_id: str
    producer_id: int
    transaction_state: str


class ListTransactionsResponse(NamedTuple):
    """In order of the transactional id."""

    transactions: tuple[ListedTransaction, ...]


class DescribeProducers(NamedTuple):
    """Asks a partition's leader for its producers."""

    partition: TopicPartition


class ProducerView(NamedTuple):
    """One producer of a partition. ``current_txn_start_offset`` is -1 if it has nothing open."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    coordinator_epoch: int
    current_txn_start_offset: int


class DescribeProducersResponse(NamedTuple):
    """In order of the producer id."""

    error_code: ErrorCode
    active_producers: tuple[ProducerView, ...] = ()


class ListOffsets(NamedTuple):
    """``timestamp``: ``LATEST`` or ``EARLIEST``. At ``READ_COMMITTED`` the latest is the last stable offset."""

    partition: TopicPartition
    isolation_level: int = READ_UNCOMMITTED
    timestamp: int = LATEST


class ListOffsetsResponse(NamedTuple):
    """``offset`` is -1 after an error."""

    error_code: ErrorCode
    offset: int = -1


class Fetch(NamedTuple):
    """Reads to the end, or to the last stable offset at ``READ_COMMITTED``."""

    partition: TopicPartition
    fetch_offset: int
    isolation_level: int = READ_UNCOMMITTED


class Batch(NamedTuple):
    """One batch of a log. ``control`` is ``COMMIT`` or ``ABORT`` for a marker, which has one offset and no values."""

    base_offset: int
    next_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    values: tuple[Hashable, ...]
    control: Marker = ""


class AbortedTransaction(NamedTuple):
    """An entry of the list by which a consumer skips aborted messages."""

    producer_id: int
    first_offset: int


class FetchResponse(NamedTuple):
    """``aborted_transactions`` is None at ``READ_UNCOMMITTED``."""

    error_code: ErrorCode
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: tuple[AbortedTransaction, ...] | None = None
    batches: tuple[Batch, ...] = ()


class WriteTxnMarkers(NamedTuple):
    """A marker written past the coordinator, as Kafka's ``kafka-transactions.sh abort`` does.

    ``transaction_version`` 2 is that of request version 2: the marker's epoch must be one that the partition has not seen.
    """

    producer_id: int
    producer_epoch: int
    committed: bool
    partitions: tuple[TopicPartition, ...]
    coordinator_epoch: int = 0
    transaction_version: int = 1


class WriteTxnMarkersResponse(NamedTuple):
    """One error code for each partition, in the order of the request."""

    error_codes: tuple[ErrorCode, ...]


class OffsetFetch(NamedTuple):
    """Asks for a group's committed offset of one partition, without those of open transactions.

    ``require_stable``: not while an open transaction may still replace it.
    """

    group_id: str
    partition: TopicPartition
    require_stable: bool = False


class OffsetFetchResponse(NamedTuple):
    """``committed_offset`` is -1 if there is none."""

    error_code: ErrorCode
    committed_offset: int = -1


class JoinGroup(NamedTuple):
    """Joins a group, under a new member id if it is empty."""

    group_id: str
    member_id: str
    client_id: str


class JoinGroupResponse(NamedTuple):
    """``REBALANCE_IN_PROGRESS`` as long as other members have to join: ask again under this member id."""

    error_code: ErrorCode
    member_id: str = ""
    generation: int = -1
    assigned: tuple[TopicPartition, ...] = ()


class GroupHeartbeat(NamedTuple):
    """A member that has joined asks whether anything has changed."""

    group_id: str
    member_id: str
    generation: int


class LeaveGroup(NamedTuple):
    """A member leaves."""

    group_id: str
    member_id: str


class DescribeGroup(NamedTuple):
    """Asks for the members of a group."""

    group_id: str


class DescribeGroupResponse(NamedTuple):
    """The client ids of the members."""

    client_ids: tuple[str, ...]


Request = (
    InitProducerId
    | AddPartitionsToTxn
    | AddOffsetsToTxn
    | TxnOffsetCommit
    | Produce
    | EndTxn
    | DescribeTransactions
    | ListTransactions
    | DescribeProducers
    | ListOffsets
    | Fetch
    | WriteTxnMarkers
    | OffsetFetch
    | JoinGroup
    | GroupHeartbeat
    | LeaveGroup
    | DescribeGroup
)
Response = (
    InitProducerIdResponse
    | AddPartitionsToTxnResponse
    | ProduceResponse
    | EndTxnResponse
    | ErrorResponse
    | DescribeTransactionsResponse
    | ListTransactionsResponse
    | DescribeProducersResponse
    | ListOffsetsResponse
    | FetchResponse
    | WriteTxnMarkersResponse
    | OffsetFetchResponse
    | JoinGroupResponse
    | DescribeGroupResponse
)
