"""Maps librdkafka's errors to ours, and to the state in which each leaves a producer.

A confluent-kafka error carries a code and up to three flags: *fatal* (the instance is dead), *requires abort* (the
transaction is), *retriable*. The phase also matters. In the commit phase no error shows that the transaction was not
committed, since librdkafka may have sent the request before and lost the answer; so a commit fails only as "decided,
not complete" or, where another owner took over, as fenced with an unknown outcome.

An error of a transactional call without any flag is treated as fatal: the client's view of the transaction and ours
disagree. A delivery report carries no flags; there the transaction must be aborted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from confluent_kafka import KafkaError, KafkaException

from dualwrite.errors import (
    CompletionPending,
    ConfigurationError,
    DualWriteError,
    Fenced,
    TransactionAborted,
    Unavailable,
)
from dualwrite.protocol.tables.producer_life import ProducerEvent


class Phase(Enum):
    """The call to librdkafka that failed."""

    CREATE = "making the producer"
    INIT = "init_transactions"
    BEGIN = "begin_transaction"
    PRODUCE = "produce"
    DELIVERY = "delivery"
    SEND_OFFSETS = "send_offsets_to_transaction"
    COMMIT = "commit_transaction"
    ABORT = "abort_transaction"


@dataclass(frozen=True)
class Failure:
    """An error, and the state in which it leaves the producer.

    Attributes:
        error: What to raise; its cause is librdkafka's own error.
        event: ``FAIL`` where an abort makes the producer usable again, ``DOUBT`` where it must be thrown away.
    """

    error: DualWriteError
    event: ProducerEvent


_FENCED = frozenset({KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED})

_AUTHENTICATION = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError._SSL,
        KafkaError.SECURITY_DISABLED,
    }
)

_BAD_SETTINGS = {
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "lower transaction.timeout.ms, or raise the broker's transaction.max.timeout.ms",
    KafkaError.UNSUPPORTED_VERSION: "the broker is too old for transactions: it must be 2.5 or newer",
    KafkaError._UNSUPPORTED_FEATURE: "the broker is too old for transactions: it must be 2.5 or newer",
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: "the topic's message format is too old for transactions",
    KafkaError._INVALID_ARG: "correct the value that the message names",
    KafkaError._NOT_CONFIGURED: "correct the setting that the message names",
}

_REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE: "send a smaller message, or raise message.max.bytes here and max.message.bytes on the topic",
    KafkaError.RECORD_LIST_TOO_LARGE: "lower batch.size, or raise the broker's segment size",
    KafkaError.INVALID_MSG_SIZE: "send a smaller message",
    KafkaError.INVALID_MSG: "the topic refuses this message: a compacted topic needs a key",
    KafkaError.INVALID_RECORD: "the topic refuses this record: a compacted topic needs a key",
    KafkaError.INVALID_TIMESTAMP: "the topic limits timestamps: see its message.timestamp.before.max.ms and after.max.ms",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create the topic, or correct its name",
    KafkaError._UNKNOWN_TOPIC: "create the topic, or correct its name",
    KafkaError.UNKNOWN_TOPIC_ID: "the topic was deleted or recreated: run the work again with a new producer",
    KafkaError._UNKNOWN_PARTITION: "name a partition that the topic has",
    KafkaError.TOPIC_EXCEPTION: "correct the topic's name",
    KafkaError.POLICY_VIOLATION: "the broker's policy refuses it",
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: "choose a compression.type that the broker and the topic take",
    KafkaError.OFFSET_METADATA_TOO_LARGE: "shorten the offset's metadata",
    KafkaError.INVALID_COMMIT_OFFSET_SIZE: "shorten the offset's metadata",
    KafkaError.INVALID_GROUP_ID: "correct the consumer's group.id",
    KafkaError.FENCED_INSTANCE_ID: "another consumer has this group.instance.id: stop using it here",
    KafkaError.ILLEGAL_GENERATION: "the consumer group has moved on: poll the consumer again instead of retrying this work",
    KafkaError.UNKNOWN_MEMBER_ID: "the consumer group has moved on: poll the consumer again instead of retrying this work",
    KafkaError.STALE_MEMBER_EPOCH: "the consumer group has moved on: poll the consumer again instead of retrying this work",
    KafkaError.REBALANCE_IN_PROGRESS: "the consumer group is rebalancing: poll the consumer again, do not retry this work",
}

_DEFINITE_PHASES = frozenset({Phase.PRODUCE, Phase.DELIVERY, Phase.SEND_OFFSETS})
NOT_ANSWERED = "the transaction may be committed: complete it with a new producer, do not run the work again"
_LOST, _HIDDEN = "without setting an exception", "'IdLogger' object has no attribute 'log'"
_NEW_PRODUCER = "throw this producer away and make a new one"


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside a confluent-kafka exception."""
    error = exception.args[0] if exception.args else None
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def kafka_exception_behind(error: KafkaException | SystemError | AttributeError) -> KafkaException:
    """Recover librdkafka's exception from the Python exception that hides it.

    librdkafka raises a fatal error from inside ``poll`` and ``flush``. If a delivery callback runs after it, Python
    raises a ``SystemError``: the callback returned with an exception set or, if confluent-kafka has lost the exception
    by then, ``flush`` failed without one. If a log line follows it, the pending exception makes the look-up of the
    logger's method fail. In these last two cases the fatal error itself is lost.

    Raises:
        SystemError, AttributeError: The error has another cause.
    """
    cause: BaseException | None = error
    while isinstance(cause, SystemError) and not _is_lost(cause):
        cause = cause.__cause__
    if isinstance(cause, KafkaException):
        return cause
    if cause is not None and _is_lost(cause):
        return KafkaException(KafkaError(KafkaError._FATAL, "a fatal error that confluent-kafka lost", fatal=True))
    raise error


def _is_lost(error: BaseException) -> bool:
    if isinstance(error, AttributeError):
        return str(error) == _HIDDEN
    return error.__cause__ is None and _LOST in str(error)


def failure_of(
    cause: KafkaError | KafkaException, phase: Phase, *, transactional_id: str, subject: str | None = None
) -> Failure:
    """Map an error of confluent-kafka.

    Args:
        cause: The error, or the exception that carries it.
        phase: The call that failed.
        transactional_id: The producer's id.
        subject: The topic or consumer group concerned, named in the hint for a missing right.
    """
    exception = cause if isinstance(cause, KafkaException) else KafkaException(cause)
    code = kafka_error(exception)
    error = _error(code, phase, transactional_id, subject)
    error.__cause__ = exception
    return Failure(error, _event(code, phase))


def _event(cause: KafkaError, phase: Phase) -> ProducerEvent:
    if cause.fatal() or cause.code() in _FENCED or phase not in _DEFINITE_PHASES:
        return ProducerEvent.DOUBT
    if phase is Phase.SEND_OFFSETS and not (cause.txn_requires_abort() or cause.retriable()):
        return ProducerEvent.DOUBT
    return ProducerEvent.FAIL


def _error(cause: KafkaError, phase: Phase, transactional_id: str, subject: str | None) -> DualWriteError:
    about = phase.value if subject is None else f"{phase.value} ({subject})"
    code, what = cause.code(), f"{about}: {cause.str()} ({cause.name()})"
    hint = _hint(code, transactional_id, subject)
    if code in _FENCED:
        return _fenced(what, phase, transactional_id)
    if phase is Phase.COMMIT:
        return CompletionPending(
            what,
            transactional_id=transactional_id,
            next_step=NOT_ANSWERED + _and(hint),
        )
    if _needs_settings(code) or phase is Phase.CREATE:
        step = hint or "correct the setting that the message names"
        return ConfigurationError(what, transactional_id=transactional_id, next_step=step)
    if phase in _DEFINITE_PHASES:
        retryable = code not in _REFUSED
        step = hint or f"nothing was written on either side; {'run the work again' if retryable else 'correct it'}"
        return TransactionAborted(what, transactional_id=transactional_id, next_step=step, retryable=retryable)
    return Unavailable(what, transactional_id=transactional_id, next_step=f"{_NEW_PRODUCER}{_and(hint)}")


def _needs_settings(code: int) -> bool:
    return code in _BAD_SETTINGS or code in _AUTHENTICATION or code in _RIGHTS


def _fenced(what: str, phase: Phase, transactional_id: str) -> Fenced:
    if phase is not Phase.COMMIT:
        return Fenced(what, transactional_id=transactional_id)
    error = Fenced(
        what,
        transactional_id=transactional_id,
        next_step="another owner took over this id, or the broker timed the transaction out; it may have been "
        "committed: only the log shows that",
    )
    error.outcome = "unknown"
    return error


_RIGHTS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "grant Write and Describe on topic {subject} to this user",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "grant Write and Describe on transactional id {id}, or a prefix of it, "
    "to this user",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "grant IdempotentWrite on the cluster to this user",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "grant Read on consumer group {subject} to this user",
    KafkaError.DELEGATION_TOKEN_AUTHORIZATION_FAILED: "grant the delegation token to this user",
}


def _hint(code: int, transactional_id: str, subject: str | None) -> str | None:
    if code in _RIGHTS:
        # Not str.format: an id may hold braces.
        return _RIGHTS[code].replace("{subject}", subject or "concerned").replace("{id}", transactional_id)
    if code in _AUTHENTICATION:
        return "correct the security.*, sasl.* and ssl.* settings"
    return _BAD_SETTINGS.get(code) or _REFUSED.get(code)


def _and(hint: str | None) -> str:
    return f"; {hint}" if hint else ""
