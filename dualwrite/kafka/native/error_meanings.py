"""The meaning of each answer to a request of a transaction: one row for every error code that a broker may give.

Source: the broker's ``Errors`` and, by request, ``TransactionCoordinator``, ``ProducerStateManager``, ``ReplicaManager``
and ``GroupCoordinator`` of Kafka 4; KIP-360, KIP-890.

A code that a table does not have ends the incarnation: what this library does not know is no ground to write on.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from dualwrite.kafka.error_codes import Code, code_name

__all__ = ["MEANINGS", "Code", "Meaning", "Request", "code_name", "meaning_of"]


class Meaning(Enum):
    """The meaning of an answer for the producer."""

    DONE = "done"
    AGAIN = "ask the same broker again"
    MOVED = "ask again, perhaps another broker: look up the leader or the coordinator first"
    NOT_OPEN = "this transaction is not open any more: only a look shows how it ended"
    ABORT = "the transaction must be aborted; the producer may continue"
    END = "the incarnation must end"


class Request(Enum):
    """The requests of a transaction."""

    INIT_PRODUCER_ID = "InitProducerId"
    PRODUCE = "Produce"
    TXN_OFFSET_COMMIT = "TxnOffsetCommit"
    END_TXN = "EndTxn"


_AT_THE_COORDINATOR: Final = {
    Code.NONE: Meaning.DONE,
    Code.CONCURRENT_TRANSACTIONS: Meaning.AGAIN,
    Code.COORDINATOR_LOAD_IN_PROGRESS: Meaning.AGAIN,
    Code.COORDINATOR_NOT_AVAILABLE: Meaning.MOVED,
    Code.NOT_COORDINATOR: Meaning.MOVED,
    Code.NETWORK_EXCEPTION: Meaning.MOVED,
    Code.REQUEST_TIMED_OUT: Meaning.MOVED,
    Code.THROTTLING_QUOTA_EXCEEDED: Meaning.AGAIN,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Meaning.END,
    Code.CLUSTER_AUTHORIZATION_FAILED: Meaning.END,
    Code.TRANSACTION_COORDINATOR_FENCED: Meaning.END,
    Code.UNSUPPORTED_VERSION: Meaning.END,
    Code.INVALID_REQUEST: Meaning.END,
    Code.UNKNOWN_SERVER_ERROR: Meaning.END,
}

_INIT_PRODUCER_ID: Final = _AT_THE_COORDINATOR | {
    Code.INVALID_TRANSACTION_TIMEOUT: Meaning.END,
    Code.INVALID_PRODUCER_EPOCH: Meaning.END,
    Code.PRODUCER_FENCED: Meaning.END,
    Code.INVALID_TXN_STATE: Meaning.END,
}

_PRODUCE: Final = {
    Code.NONE: Meaning.DONE,
    # The broker remembers the last five batches of a producer. It already has this one, which was older.
    Code.DUPLICATE_SEQUENCE_NUMBER: Meaning.DONE,
    # Verifying the transaction, the leader asks the coordinator: its answers come through.
    Code.CONCURRENT_TRANSACTIONS: Meaning.AGAIN,
    Code.COORDINATOR_LOAD_IN_PROGRESS: Meaning.AGAIN,
    Code.COORDINATOR_NOT_AVAILABLE: Meaning.AGAIN,
    Code.NOT_COORDINATOR: Meaning.AGAIN,
    Code.NETWORK_EXCEPTION: Meaning.AGAIN,
    Code.CORRUPT_MESSAGE: Meaning.AGAIN,
    Code.REQUEST_TIMED_OUT: Meaning.AGAIN,
    Code.NOT_ENOUGH_REPLICAS: Meaning.AGAIN,
    Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND: Meaning.AGAIN,
    Code.THROTTLING_QUOTA_EXCEEDED: Meaning.AGAIN,
    Code.LEADER_NOT_AVAILABLE: Meaning.MOVED,
    Code.NOT_LEADER_OR_FOLLOWER: Meaning.MOVED,
    Code.REPLICA_NOT_AVAILABLE: Meaning.MOVED,
    Code.FENCED_LEADER_EPOCH: Meaning.MOVED,
    Code.UNKNOWN_LEADER_EPOCH: Meaning.MOVED,
    Code.KAFKA_STORAGE_ERROR: Meaning.MOVED,
    Code.UNKNOWN_TOPIC_OR_PARTITION: Meaning.MOVED,
    Code.UNKNOWN_TOPIC_ID: Meaning.MOVED,
    Code.INCONSISTENT_TOPIC_ID: Meaning.MOVED,
    Code.MESSAGE_TOO_LARGE: Meaning.ABORT,
    Code.RECORD_LIST_TOO_LARGE: Meaning.ABORT,
    Code.INVALID_TOPIC_EXCEPTION: Meaning.ABORT,
    Code.INVALID_TIMESTAMP: Meaning.ABORT,
    Code.INVALID_RECORD: Meaning.ABORT,
    Code.UNSUPPORTED_COMPRESSION_TYPE: Meaning.ABORT,
    Code.UNSUPPORTED_FOR_MESSAGE_FORMAT: Meaning.ABORT,
    Code.POLICY_VIOLATION: Meaning.ABORT,
    Code.TOPIC_AUTHORIZATION_FAILED: Meaning.ABORT,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Meaning.ABORT,
    # Behind a batch that failed the answer comes by itself; see `PartitionQueue`. At the head it is a gap that nobody explains.
    Code.OUT_OF_ORDER_SEQUENCE_NUMBER: Meaning.ABORT,
    # The epoch is not ours any more, or the transaction of this epoch has ended: by its timeout, an operator, a settler.
    Code.INVALID_TXN_STATE: Meaning.END,
    # A leader asks about several producers at once, and says one for the other where they are of different versions.
    Code.TRANSACTION_ABORTABLE: Meaning.END,
    Code.INVALID_PRODUCER_EPOCH: Meaning.END,
    Code.PRODUCER_FENCED: Meaning.END,
    Code.INVALID_PRODUCER_ID_MAPPING: Meaning.END,
    Code.UNKNOWN_PRODUCER_ID: Meaning.END,
    Code.CLUSTER_AUTHORIZATION_FAILED: Meaning.END,
    Code.INVALID_REQUIRED_ACKS: Meaning.END,
    Code.UNSUPPORTED_VERSION: Meaning.END,
    Code.INVALID_REQUEST: Meaning.END,
    Code.UNKNOWN_SERVER_ERROR: Meaning.END,
}

_TXN_OFFSET_COMMIT: Final = {
    Code.NONE: Meaning.DONE,
    Code.CONCURRENT_TRANSACTIONS: Meaning.AGAIN,
    Code.COORDINATOR_LOAD_IN_PROGRESS: Meaning.AGAIN,
    Code.REQUEST_TIMED_OUT: Meaning.AGAIN,
    Code.NETWORK_EXCEPTION: Meaning.AGAIN,
    Code.THROTTLING_QUOTA_EXCEEDED: Meaning.AGAIN,
    Code.UNKNOWN_TOPIC_OR_PARTITION: Meaning.AGAIN,
    Code.COORDINATOR_NOT_AVAILABLE: Meaning.MOVED,
    Code.NOT_COORDINATOR: Meaning.MOVED,
    Code.ILLEGAL_GENERATION: Meaning.ABORT,
    Code.UNKNOWN_MEMBER_ID: Meaning.ABORT,
    Code.STALE_MEMBER_EPOCH: Meaning.ABORT,
    Code.FENCED_MEMBER_EPOCH: Meaning.ABORT,
    Code.GROUP_ID_NOT_FOUND: Meaning.ABORT,
    # What was consumed is of a topic that was deleted, or made again: its offsets mean nothing in the new one.
    Code.UNKNOWN_TOPIC_ID: Meaning.ABORT,
    Code.REBALANCE_IN_PROGRESS: Meaning.ABORT,
    Code.FENCED_INSTANCE_ID: Meaning.ABORT,
    Code.INVALID_GROUP_ID: Meaning.ABORT,
    Code.INVALID_COMMIT_OFFSET_SIZE: Meaning.ABORT,
    Code.OFFSET_METADATA_TOO_LARGE: Meaning.ABORT,
    Code.GROUP_AUTHORIZATION_FAILED: Meaning.ABORT,
    Code.TOPIC_AUTHORIZATION_FAILED: Meaning.ABORT,
    Code.UNSUPPORTED_FOR_MESSAGE_FORMAT: Meaning.ABORT,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Meaning.ABORT,
    Code.INVALID_TXN_STATE: Meaning.END,
    Code.TRANSACTION_ABORTABLE: Meaning.END,
    Code.INVALID_PRODUCER_EPOCH: Meaning.END,
    Code.PRODUCER_FENCED: Meaning.END,
    Code.INVALID_PRODUCER_ID_MAPPING: Meaning.END,
    Code.UNKNOWN_PRODUCER_ID: Meaning.END,
    Code.UNSUPPORTED_VERSION: Meaning.END,
    Code.INVALID_REQUEST: Meaning.END,
    Code.UNKNOWN_SERVER_ERROR: Meaning.END,
}

_END_TXN: Final = _AT_THE_COORDINATOR | {
    # An answer whose request was lost on the way back is given again: success, with the same next epoch.
    Code.INVALID_TXN_STATE: Meaning.NOT_OPEN,
    Code.PRODUCER_FENCED: Meaning.NOT_OPEN,
    Code.INVALID_PRODUCER_EPOCH: Meaning.NOT_OPEN,
    Code.INVALID_PRODUCER_ID_MAPPING: Meaning.NOT_OPEN,
    Code.TRANSACTION_ABORTABLE: Meaning.ABORT,
}

MEANINGS: Final[Mapping[Request, Mapping[Code, Meaning]]] = MappingProxyType(
    {
        Request.INIT_PRODUCER_ID: MappingProxyType(_INIT_PRODUCER_ID),
        Request.PRODUCE: MappingProxyType(_PRODUCE),
        Request.TXN_OFFSET_COMMIT: MappingProxyType(_TXN_OFFSET_COMMIT),
        Request.END_TXN: MappingProxyType(_END_TXN),
    }
)


def meaning_of(request: Request, code: int) -> Meaning:
    """The meaning of an answer; ``END`` for a code that the table does not have."""
    if not code:
        return Meaning.DONE
    try:
        return MEANINGS[request].get(Code(code), Meaning.END)
    except ValueError:
        return Meaning.END
