"""The protocol's error codes: their names, what a broker means by them, and the error that a failed call of a producer becomes.

Source: the broker's ``Errors`` of Kafka 4. Tests hold the sets equal to what kafka-python says of each code.

One table turns a code and a phase into advice for the caller. An engine that meets a new error adds a row, not a
branch.

The protocol's error number decides the error and its advice, so that both engines say the same of one broker's answer. An
engine adds its own rows for errors that no broker sends.

The phase matters, too. In the commit phase no error shows that the transaction was not committed, since the request may
have been sent before and its answer lost; so a commit fails only as "decided, not complete" or, where another owner took
over, as fenced with an unknown outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DualWriteError,
    Fenced,
    TransactionAborted,
    Unavailable,
)
from dualwrite.protocol.lives import ProducerEvent
from dualwrite.protocol.message import NAME_A_PARTITION, STEPS
from dualwrite.protocol.values import TransactionStatus


class Code(IntEnum):
    """The error codes that this library's requests may be answered with."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    OFFSET_NOT_AVAILABLE = 78
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    FENCED_MEMBER_EPOCH = 110
    STALE_MEMBER_EPOCH = 113
    TRANSACTION_ABORTABLE = 120
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123


def code_name(code: int) -> str:
    """The protocol's name of an error code, or its number if this library does not know it."""
    try:
        return Code(code).name
    except ValueError:
        return f"error {code}"


MISSING_RIGHT: Final[frozenset[int]] = frozenset(
    {
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Code.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    }
)
"""The user lacks a right: the same request is refused until somebody grants it."""

RETRIABLE: Final[frozenset[int]] = frozenset(
    {
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.LEADER_NOT_AVAILABLE,
        Code.NOT_LEADER_OR_FOLLOWER,
        Code.REQUEST_TIMED_OUT,
        Code.REPLICA_NOT_AVAILABLE,
        Code.NETWORK_EXCEPTION,
        Code.COORDINATOR_LOAD_IN_PROGRESS,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.NOT_COORDINATOR,
        Code.NOT_ENOUGH_REPLICAS,
        Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        Code.NOT_CONTROLLER,
        Code.CONCURRENT_TRANSACTIONS,
        Code.KAFKA_STORAGE_ERROR,
        Code.FETCH_SESSION_ID_NOT_FOUND,
        Code.INVALID_FETCH_SESSION_EPOCH,
        Code.LISTENER_NOT_FOUND,
        Code.FENCED_LEADER_EPOCH,
        Code.UNKNOWN_LEADER_EPOCH,
        Code.OFFSET_NOT_AVAILABLE,
        Code.PREFERRED_LEADER_NOT_AVAILABLE,
        Code.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        Code.ELECTION_NOT_NEEDED,
        Code.UNSTABLE_OFFSET_COMMIT,
        Code.THROTTLING_QUOTA_EXCEEDED,
        Code.UNKNOWN_TOPIC_ID,
        Code.INCONSISTENT_TOPIC_ID,
        Code.FETCH_SESSION_TOPIC_ID_ERROR,
        Code.SHARE_SESSION_NOT_FOUND,
        Code.INVALID_SHARE_SESSION_EPOCH,
    }
)
"""The same request may succeed a moment later, perhaps at another broker."""


class Phase(Enum):
    """The step of a producer's life that failed."""

    CREATE = "making the producer"
    INIT = "init_transactions"
    BEGIN = "begin_transaction"
    PRODUCE = "produce"
    DELIVERY = "delivery"
    SEND_OFFSETS = "send_offsets_to_transaction"
    COMMIT = "commit_transaction"
    ABORT = "abort_transaction"

    def of(self, subject: str | None) -> str:
        """The step, with the topic or consumer group concerned."""
        return self.value if subject is None else f"{self.value} ({subject})"


WITHIN_A_TRANSACTION: Final = frozenset({Phase.PRODUCE, Phase.DELIVERY, Phase.SEND_OFFSETS})
"""Where an abort can make the producer usable again."""


@dataclass(frozen=True)
class Failure:
    """An error to raise, and the state in which it leaves the producer.

    After ``FAIL`` an abort makes the producer usable again; after ``DOUBT`` it must be discarded.
    """

    error: DualWriteError
    event: ProducerEvent


class Kind(Enum):
    """The kinds of errors, by what helps."""

    FENCED = "nothing here: another owner took over"
    SETTINGS = "a change of settings or rights"
    REFUSED = "a change of the work: it would fail again as it is"
    PASSING = "running the work again"


@dataclass(frozen=True)
class Advice:
    """The advice on an error: what helps, and what to do, in words.

    ``{subject}`` stands for the topic or group, ``{id}`` for the transactional id. A step of None: the phase alone says it.
    """

    kind: Kind
    step: str | None = None


CONNECTING: Final = Advice(Kind.SETTINGS, "correct the security.*, sasl.* and ssl.* settings")
NO_PARTITION: Final = Advice(Kind.REFUSED, NAME_A_PARTITION)
_MOVED_ON: Final = Advice(
    Kind.REFUSED, "the consumer group has moved on: poll the consumer again instead of retrying this work"
)
_NO_KEY: Final = "a compacted topic needs a key"
_METADATA: Final = Advice(Kind.REFUSED, "shorten the offset's metadata")
_NONE: Final = Advice(Kind.PASSING)

ADVICE: Final[Mapping[int, Advice]] = MappingProxyType(
    {
        Code.INVALID_PRODUCER_EPOCH: Advice(Kind.FENCED),
        Code.PRODUCER_FENCED: Advice(Kind.FENCED),
        Code.SASL_AUTHENTICATION_FAILED: CONNECTING,
        Code.UNSUPPORTED_SASL_MECHANISM: CONNECTING,
        Code.ILLEGAL_SASL_STATE: CONNECTING,
        Code.SECURITY_DISABLED: CONNECTING,
        Code.TOPIC_AUTHORIZATION_FAILED: Advice(
            Kind.SETTINGS, "grant Write and Describe on topic {subject} to this user"
        ),
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Advice(
            Kind.SETTINGS, "grant Write and Describe on transactional id {id}, or a prefix of it, to this user"
        ),
        Code.CLUSTER_AUTHORIZATION_FAILED: Advice(Kind.SETTINGS, "grant IdempotentWrite on the cluster to this user"),
        Code.GROUP_AUTHORIZATION_FAILED: Advice(Kind.SETTINGS, "grant Read on consumer group {subject} to this user"),
        Code.DELEGATION_TOKEN_AUTHORIZATION_FAILED: Advice(Kind.SETTINGS, "grant the delegation token to this user"),
        Code.INVALID_TRANSACTION_TIMEOUT: Advice(
            Kind.SETTINGS, "lower transaction.timeout.ms, or raise the broker's transaction.max.timeout.ms"
        ),
        Code.UNSUPPORTED_VERSION: Advice(
            Kind.SETTINGS, "the broker is too old for transactions: it must be 2.5 or newer"
        ),
        Code.UNSUPPORTED_FOR_MESSAGE_FORMAT: Advice(
            Kind.SETTINGS, "the topic's message format is too old for transactions"
        ),
        Code.MESSAGE_TOO_LARGE: Advice(
            Kind.REFUSED,
            f"{STEPS['MESSAGE_TOO_LARGE']}; if it is a batch of many messages, lower batch.size, or set compression.type",
        ),
        Code.RECORD_LIST_TOO_LARGE: Advice(Kind.REFUSED, "lower batch.size, or raise the broker's segment size"),
        Code.INVALID_FETCH_SIZE: Advice(Kind.REFUSED, "send a smaller message"),
        Code.CORRUPT_MESSAGE: Advice(Kind.REFUSED, f"the topic refuses this message: {_NO_KEY}"),
        Code.INVALID_RECORD: Advice(Kind.REFUSED, f"the topic refuses this record: {_NO_KEY}"),
        Code.INVALID_TIMESTAMP: Advice(
            Kind.REFUSED,
            "the topic limits timestamps: see its message.timestamp.before.max.ms and after.max.ms",
        ),
        Code.UNKNOWN_TOPIC_OR_PARTITION: Advice(Kind.REFUSED, STEPS["UNKNOWN_TOPIC_OR_PARTITION"]),
        Code.UNKNOWN_TOPIC_ID: Advice(
            Kind.REFUSED, "the topic was deleted or recreated: run the work again with a new producer"
        ),
        Code.INVALID_TOPIC_EXCEPTION: Advice(Kind.REFUSED, STEPS["INVALID_TOPIC_EXCEPTION"]),
        Code.POLICY_VIOLATION: Advice(Kind.REFUSED, "the broker's policy refuses it"),
        Code.UNSUPPORTED_COMPRESSION_TYPE: Advice(
            Kind.REFUSED, "choose a compression.type that the broker and the topic take"
        ),
        Code.OFFSET_METADATA_TOO_LARGE: _METADATA,
        Code.INVALID_COMMIT_OFFSET_SIZE: _METADATA,
        Code.INVALID_GROUP_ID: Advice(Kind.REFUSED, "correct the consumer's group.id"),
        Code.FENCED_INSTANCE_ID: Advice(
            Kind.REFUSED, "another consumer has this group.instance.id: stop using it here"
        ),
        Code.ILLEGAL_GENERATION: _MOVED_ON,
        Code.UNKNOWN_MEMBER_ID: _MOVED_ON,
        Code.FENCED_MEMBER_EPOCH: _MOVED_ON,
        Code.STALE_MEMBER_EPOCH: _MOVED_ON,
        Code.GROUP_ID_NOT_FOUND: _MOVED_ON,
        Code.REBALANCE_IN_PROGRESS: Advice(
            Kind.REFUSED, "the consumer group is rebalancing: poll the consumer again, do not retry this work"
        ),
    }
)
"""By the protocol's error number, the advice. An error without a row may pass by itself."""

_ON_OFFSETS: Final[Mapping[int, Advice]] = MappingProxyType(
    {
        Code.UNKNOWN_TOPIC_ID: Advice(
            Kind.REFUSED,
            "a consumed topic was deleted or recreated: poll the consumer again instead of retrying this work",
        ),
    }
)
"""What differs where consumed offsets are refused."""

_OF_THE_MESSAGE: Final = frozenset(
    ADVICE[code]
    for code in (
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        Code.MESSAGE_TOO_LARGE,
        Code.RECORD_LIST_TOO_LARGE,
        Code.INVALID_FETCH_SIZE,
        Code.CORRUPT_MESSAGE,
        Code.INVALID_RECORD,
        Code.INVALID_TIMESTAMP,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.INVALID_TOPIC_EXCEPTION,
        Code.POLICY_VIOLATION,
    )
) | {NO_PARTITION}
"""The refusals of a message that another try, or another producer, would meet again; see `DualWriteError.refused_topic`."""

_IN_DOUBT: Final = "the transaction may be committed: complete it with a new producer, do not run the work again"
_NEW_PRODUCER: Final = "throw this producer away and make a new one"
_OVERTAKEN: Final = (
    "another owner took over this id, or the broker timed the transaction out; it may have been committed: only the log "
    "shows that"
)


def advice_on(code: int, phase: Phase | None = None) -> Advice:
    """The advice on an error number of the protocol, in a phase."""
    own = _ON_OFFSETS if phase is Phase.SEND_OFFSETS else {}
    return own.get(code) or ADVICE.get(code, _NONE)


def error_for(
    advice: Advice, what: str, phase: Phase, *, transactional_id: str, subject: str | None = None
) -> DualWriteError:
    """The error for the caller; its text begins with the step. ``what`` says in one sentence what happened."""
    error = _error_for(advice, what, phase, transactional_id, subject)
    if phase in {Phase.PRODUCE, Phase.DELIVERY} and advice in _OF_THE_MESSAGE:
        error.refused_topic = subject
    return error


def _error_for(advice: Advice, what: str, phase: Phase, transactional_id: str, subject: str | None) -> DualWriteError:
    said = f"{phase.of(subject)}: {what}"
    step = _step(advice, transactional_id, subject)
    if advice.kind is Kind.FENCED:
        return _fenced(said, phase, transactional_id)
    if phase is Phase.COMMIT:
        return CompletionPending(said, transactional_id=transactional_id, next_step=_joined(_IN_DOUBT, step))
    if advice.kind is Kind.SETTINGS or phase is Phase.CREATE:
        step = step or "correct the setting that the message names"
        return ConfigurationError(said, transactional_id=transactional_id, next_step=step)
    if phase in WITHIN_A_TRANSACTION:
        retryable = advice.kind is Kind.PASSING
        step = step or f"nothing was written on either side; {'run the work again' if retryable else 'correct it'}"
        return TransactionAborted(said, transactional_id=transactional_id, next_step=step, retryable=retryable)
    return Unavailable(said, transactional_id=transactional_id, next_step=_joined(_NEW_PRODUCER, step))


def not_answered(phase: Phase, *, transactional_id: str, subject: str | None = None) -> Failure:
    """The failure of a step whose answer is missing: the request may still take effect."""
    what = f"{phase.of(subject)} was not answered in time"
    error: DualWriteError
    if phase is Phase.COMMIT:
        error = CompletionPending(what, transactional_id=transactional_id, next_step=_IN_DOUBT)
    else:
        error = Unavailable(what, transactional_id=transactional_id, next_step=_NEW_PRODUCER)
    return Failure(error, ProducerEvent.DOUBT)


def other_producer(shown: tuple[int, int], ours: tuple[int, int], *, transactional_id: str) -> Fenced:
    """The coordinator shows another producer id or epoch than ours."""
    return Fenced(
        f"the coordinator shows producer {shown[0]}:{shown[1]}, ours is {ours[0]}:{ours[1]}",
        transactional_id=transactional_id,
    )


def not_open(status: TransactionStatus, *, transactional_id: str) -> TransactionAborted:
    """The coordinator shows another status than "ongoing" for the open transaction."""
    return TransactionAborted(
        f"the coordinator shows {status.value} instead of an open transaction: it timed out, or another process aborted it",
        transactional_id=transactional_id,
    )


def ended_by_hand(partition: tuple[str, int], *, transactional_id: str) -> TransactionAborted:
    """A leader shows that an operator's tool ended the open transaction in one partition."""
    return TransactionAborted(
        f"the transaction is no longer open in {partition[0]}[{partition[1]}]: it was ended there by hand",
        transactional_id=transactional_id,
    )


def _fenced(what: str, phase: Phase, transactional_id: str) -> Fenced:
    if phase is not Phase.COMMIT:
        return Fenced(what, transactional_id=transactional_id)
    error = Fenced(what, transactional_id=transactional_id, next_step=_OVERTAKEN)
    error.outcome = "unknown"
    return error


def _step(advice: Advice, transactional_id: str, subject: str | None) -> str | None:
    if advice.step is None:
        return None
    # Not str.format: an id may hold braces.
    return advice.step.replace("{subject}", subject or "concerned").replace("{id}", transactional_id)


def _joined(step: str, hint: str | None) -> str:
    return f"{step}; {hint}" if hint else step
