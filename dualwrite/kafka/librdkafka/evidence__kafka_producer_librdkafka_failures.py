"""Maps librdkafka's errors to ours, and to the state in which each leaves a producer.

A confluent-kafka error carries a code and up to three flags: *fatal* (the instance is dead), *requires abort* (the
transaction is), *retriable*. Codes above 0 are the protocol's, those below are librdkafka's own.

An error of a transactional call without any flag is treated as fatal: the client's view of the transaction and ours
disagree. A delivery report carries no flags; there the transaction must be aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from dualwrite.kafka.failures import (
    CONNECTING,
    NO_PARTITION,
    WITHIN_A_TRANSACTION,
    Advice,
    Failure,
    Kind,
    Phase,
    advice_on,
    error_for,
)
from dualwrite.kafka.failures__kafka_producer_codes import Code
from dualwrite.protocol.lives__protocol_tables_producer_life import ProducerEvent

_LOCAL: Final[Mapping[int, Advice]] = MappingProxyType(
    {
        KafkaError._FENCED: Advice(Kind.FENCED),
        KafkaError._AUTHENTICATION: CONNECTING,
        KafkaError._SSL: CONNECTING,
        KafkaError._UNSUPPORTED_FEATURE: advice_on(Code.UNSUPPORTED_VERSION),
        KafkaError._INVALID_ARG: Advice(Kind.SETTINGS, "correct the value that the message names"),
        KafkaError._NOT_CONFIGURED: Advice(Kind.SETTINGS, "correct the setting that the message names"),
        KafkaError._UNKNOWN_TOPIC: advice_on(Code.UNKNOWN_TOPIC_OR_PARTITION),
        KafkaError._UNKNOWN_PARTITION: NO_PARTITION,
    }
)
"""The advice on errors that librdkafka finds by itself."""
_LOST, _HIDDEN = "without setting an exception", "'ClientLog' object has no attribute 'log'"


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside a confluent-kafka exception."""
    error = exception.args[0] if exception.args else None
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def kafka_exception_behind(
    error: KafkaException | SystemError | AttributeError, ask: Callable[[], object]
) -> KafkaException:
    """Recover librdkafka's exception from the Python exception that hides it.

    librdkafka raises a fatal error from inside ``poll`` and ``flush``. If a delivery callback runs after it, Python
    raises a ``SystemError``: the callback returned with an exception set or, if confluent-kafka has lost the exception
    by then, ``flush`` failed without one. If a log line follows it, the pending exception makes the look-up of the
    logger's method fail. In these last two cases the fatal error itself is lost, but librdkafka keeps it.

    Args:
        error: What ``poll`` or ``flush`` has raised.
        ask: A call that an instance with a fatal error answers with that error.

    Raises:
        SystemError, AttributeError: The error has another cause.
    """
    cause: BaseException | None = error
    while isinstance(cause, SystemError) and not _is_lost(cause):
        cause = cause.__cause__
    if isinstance(cause, KafkaException):
        return cause
    if cause is not None and _is_lost(cause):
        return _asked(ask) or KafkaException(
            KafkaError(KafkaError._FATAL, "a fatal error that confluent-kafka lost", fatal=True)
        )
    raise error


def _asked(ask: Callable[[], object]) -> KafkaException | None:
    try:
        ask()
    except KafkaException as again:
        return again if kafka_error(again).fatal() else None
    return None


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
    cause = kafka_error(exception)
    advice = _LOCAL.get(cause.code()) or advice_on(cause.code())
    what = f"{cause.str()} ({cause.name()})"
    error = error_for(advice, what, phase, transactional_id=transactional_id, subject=subject)
    error.__cause__ = exception
    return Failure(error, _event(cause, advice, phase))


def _event(cause: KafkaError, advice: Advice, phase: Phase) -> ProducerEvent:
    if cause.fatal() or advice.kind is Kind.FENCED or phase not in WITHIN_A_TRANSACTION:
        return ProducerEvent.DOUBT
    if phase is Phase.SEND_OFFSETS and not (cause.txn_requires_abort() or cause.retriable()):
        return ProducerEvent.DOUBT
    return ProducerEvent.FAIL
