"""Maps what stopped a native transaction to our errors, and to the state in which it leaves the producer.

The error and its advice are those of both engines. The state follows the wire's table: a producer may continue after an answer
whose meaning is to abort; where the incarnation must end, and where an answer is missing, it must be discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dualwrite.kafka.failures import Advice, Failure, Kind, Phase, advice_on, error_for, not_answered
from dualwrite.kafka.failures__kafka_producer_codes import Code, code_name
from dualwrite.kafka.native.error_meanings import Meaning, Request, meaning_of
from dualwrite.kafka.native.produce_state import Refusal
from dualwrite.protocol.lives__protocol_tables_producer_life import ProducerEvent

_OWN: Final[Mapping[int, Advice]] = MappingProxyType(
    {
        Code.UNSUPPORTED_VERSION: Advice(
            Kind.SETTINGS, 'the brokers do not serve transaction version 2: finalize it, or choose engine="librdkafka"'
        ),
    }
)
"""Where this engine needs other brokers than librdkafka's."""
_REQUESTS: Final = MappingProxyType(
    {
        Phase.PRODUCE: Request.PRODUCE,
        Phase.DELIVERY: Request.PRODUCE,
        Phase.SEND_OFFSETS: Request.TXN_OFFSET_COMMIT,
    }
)
"""The request of each step after which an abort may make the producer usable again."""
_LATE: Final = Advice(Kind.PASSING)


def failure_of(code: int | None, phase: Phase, *, transactional_id: str, subject: str | None = None) -> Failure:
    """Map the answer to a step.

    Args:
        code: The error code of the answer, not 0; None if no answer came in time.
        phase: The step that failed.
        transactional_id: The producer's id.
        subject: The topic or consumer group concerned, named in the hint for a missing right.
    """
    if code is None:
        return not_answered(phase, transactional_id=transactional_id, subject=subject)
    error = error_for(_advice_on(code), code_name(code), phase, transactional_id=transactional_id, subject=subject)
    request = _REQUESTS.get(phase)
    goes_on = request is not None and meaning_of(request, code) is not Meaning.END
    return Failure(error, ProducerEvent.FAIL if goes_on else ProducerEvent.DOUBT)


def refused(refusal: Refusal, phase: Phase, *, transactional_id: str) -> Failure:
    """Map the refusal of a transaction's messages.

    Args:
        refusal: Why the core sends no more.
        phase: The step that found it: ``PRODUCE`` or ``DELIVERY``.
        transactional_id: The producer's id.
    """
    topic, number = refusal.partition
    if refusal.code is None:
        # An abort raises the epoch, so no late copy of the batch can be written behind it.
        advice, what = _LATE, f"partition {number} did not acknowledge its messages in time"
    else:
        advice, what = _advice_on(refusal.code), f"partition {number}: {code_name(refusal.code)}"
    error = error_for(advice, what, phase, transactional_id=transactional_id, subject=topic)
    return Failure(error, ProducerEvent.FAIL if refusal.meaning is Meaning.ABORT else ProducerEvent.DOUBT)


def _advice_on(code: int) -> Advice:
    return _OWN.get(code) or advice_on(code)
